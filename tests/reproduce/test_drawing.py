import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nearsay.batch import Labels
from nearsay.noise import fingerprint
from nearsay.report import figures
from nearsay.report.figures import (
    LABELS,
    RIGHT_PAIRS,
    SIMILARITIES,
    WRONG_PAIRS,
    Axis,
    Heading,
    Panel,
    Point,
    confidences,
    curves,
    similarities,
)
from nearsay.reproduce.cells import Setting, make_cells
from nearsay.reproduce.drawing import _told, confidence_shares, similarity_shares
from nearsay.reproduce.runs import Runs

SIGNS = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]])


@pytest.fixture
def run(tmp_path):
    """Five examples, the last held out: two of class 0, then two given as class 1, of which the last is wrongly so."""
    given, clean = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([0, 0, 1, 0, 0])
    labels = Labels(given, clean, ("a", "b"))
    trust = torch.tensor([0.99, 0.62, 0.99, 0.02, 0.5])
    logits = torch.stack([trust, 1 - trust], dim=1).log()
    logits = torch.where(given[:, None] == 0, logits, logits.flip(1))
    (tmp_path / "predictions").mkdir()
    tensors = {"features": SIGNS, "logits": logits, "indices": torch.arange(5)}
    save_file(tensors, tmp_path / "predictions" / "train.safetensors")
    arrays = {
        "given": given.numpy(),
        "clean": clean.numpy(),
        "train": np.arange(4),
        "validation": np.array([4]),
    }
    np.savez(
        tmp_path / "labels.npz",
        **arrays,
        classes=np.array(labels.classes),
        fingerprint=np.array(fingerprint(labels)),
    )
    origin = {
        "recipe": "toy",
        "arguments": {},
        "overrides": [],
        "experiment": {"kind": "Experiment"},
    }
    (tmp_path / "experiment.json").write_text(json.dumps(origin))
    (tmp_path / "result.json").write_text(json.dumps({"finished": True, "seed": 0}))
    (tmp_path / "log.jsonl").write_text('{"epoch": 1.0}\n')
    return tmp_path


def test_confidence_is_counted_apart_for_right_and_wrong_labels(run):
    shares = confidence_shares(run)
    right, wrong = (shares[kind, ""] for kind in LABELS)
    assert len(right) == len(wrong) == 20
    assert {place: round(share, 3) for place, share in enumerate(right) if share} == {
        12: 33.333,
        19: 66.667,
    }
    assert {place: share for place, share in enumerate(wrong) if share} == {0: 100.0}


def test_similarity_is_counted_apart_for_labels_that_agree_and_are_right(run):
    shares = similarity_shares(run)
    assert list(shares) == list(SIMILARITIES)
    where = {
        kind: {place: round(share) for place, share in enumerate(each) if share}
        for kind, each in shares.items()
    }
    ones, zeros = 79, 40  # bins of cosines 1 and 0
    assert where["same label", RIGHT_PAIRS] == {ones: 100}
    assert where["same label", WRONG_PAIRS] == {ones: 100}
    assert where["different labels", RIGHT_PAIRS] == {zeros: 100}
    assert where["different labels", WRONG_PAIRS] == {
        zeros: 100
    }  # the example held out would be at −1


def test_labels_without_truth_are_refused(run):
    with np.load(run / "labels.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "clean"}
    np.savez(run / "labels.npz", **kept)
    with pytest.raises(ValueError, match="does not know which labels are wrong"):
        confidence_shares(run)


def test_damaged_predictions_are_told(run):
    (run / "predictions" / "train.safetensors").write_bytes(b"nothing")
    with pytest.raises(
        ValueError, match=r"train\.safetensors or labels\.npz beside it cannot be used"
    ):
        similarity_shares(run)


HEADING = Heading(
    "What is <shown>", ["A ring is the best of " + "many " * 30 + "values.", "Data: digits."]
)


def texts(svg):
    return re.findall(
        r"<(?:text|tspan)[^>]*>([^<]+)</", svg
    )  # a text of several lines has a tspan for each


def check_alone(drawing, *words):
    """A picture that needs no page: real colors, white paper, and the words are there to read, as is its heading."""
    assert "var(--" not in drawing.svg
    assert (
        '<title>What is &lt;shown&gt;</title><rect width="100%" height="100%" fill="#fff"/>'
        in drawing.svg
    )
    told = " ".join(texts(drawing.svg))
    heading = (
        "What is &lt;shown&gt;",
        "A ring is the best of many",
        "many values.",
        "Data: digits.",
    )
    assert [word for word in (*heading, *words) if word not in told] == []
    assert drawing.png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", drawing.png[16:24])
    assert width > 600
    assert height > 300
    assert "var(--" in drawing.html  # which the page resolves for light and dark
    assert drawing.html.count("<svg") == 2
    assert "Data: digits." not in drawing.html  # where the page says it


@pytest.mark.parametrize(
    ("seeds", "told"),
    [
        ([0], "n = 1 per panel, seed 0."),
        ([1], "n = 1 per panel, seed 1."),
        ([0, 2], "n = 2 per panel, seeds 0, 2."),
    ],
)
def test_one_seed_is_called_so_whichever_it_is(seeds, told):
    setting = Setting("toy", ("noise=0.4",))
    cells = [cell for cell in make_cells("NCR", "Blue", setting, "ncr", 3) if cell.seed in seeds]
    runs = Runs(folder=Path("nowhere"), _results={cell.run: {} for cell in cells})
    assert _told(cells, runs, "panel") == f"Runs: {told}"


def test_curves_name_axes_lines_and_units():
    points = [
        Point("alpha", line, value, 80 + 10 * value + shift, 0.5, value == 0.9)
        for shift, line in enumerate(("0 % noise", "40 % noise"))
        for value in (0.1, 0.9)
    ]
    points.append(Point("k", "40 % noise", 10, 91.0, None, True))
    axes = [Axis("alpha", ("alpha", "with k = m")), Axis("k", ("k (neighbors)",), True)]
    drawing = curves(points, axes, title="accuracy (%)", heading=HEADING)
    check_alone(drawing, "alpha", "with k = m", "k (neighbors)", "0 % noise", "40 % noise")
    assert texts(drawing.svg).count("accuracy (%)") == 1  # beside the first panel, for all


def grid(kinds, shares=(25.0, 75.0)):
    return [
        Panel(row, column, dict.fromkeys(kinds, shares))
        for row in ("Standard", "NCR")
        for column in ("toy for Blue, 40 %", "Red, 40 % noise")
    ]


WORDS = ("Standard", "NCR", "toy for Blue, 40 %", "Red, 40 % noise", "share of its kind (%)")


def test_confidences_name_rows_columns_and_units_and_ticks_stay_on_their_lines():
    drawing = confidences(grid([(kind, "") for kind in LABELS]), heading=HEADING)
    check_alone(drawing, *WORDS, *LABELS, "confidence in given label (%)")
    assert set(re.findall(r'<text text-anchor="(\w+)"[^>]*>100</text>', drawing.svg)) == {"middle"}


def test_similarities_name_rows_columns_and_halves():
    drawing = similarities(grid(SIMILARITIES), lowest=-1, heading=HEADING)
    check_alone(
        drawing, *WORDS, "same label", "different labels", "cosine similarity", "−1.0", "−0.5"
    )
    assert texts(drawing.svg).count(RIGHT_PAIRS) == texts(drawing.svg).count(WRONG_PAIRS) == 4
    assert not {"−20", "−50", "−80"} & set(
        texts(drawing.svg)
    )  # a share that is drawn downward is one as well


def test_pairs_of_which_a_label_is_wrong_hang_down_from_zero():
    rows = figures._steps(
        [Panel("NCR", "Red", {SIMILARITIES[0]: [25.0, 75.0], SIMILARITIES[1]: [40.0, 60.0]})], 0, 1
    )
    drawn = [(row["half"], row["x"], row["share"]) for row in rows]
    up = [(RIGHT_PAIRS, 0.0, 25.0), (RIGHT_PAIRS, 0.5, 75.0), (RIGHT_PAIRS, 1.0, 75.0)]
    assert drawn == [
        *up,
        (WRONG_PAIRS, 0.0, -40.0),
        (WRONG_PAIRS, 0.5, -60.0),
        (WRONG_PAIRS, 1.0, -60.0),
    ]
