import csv
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
from nearsay.report import charts
from nearsay.report.charts import LABELS, RIGHT_PAIRS, SIMILARITIES, WRONG_PAIRS, Panel
from nearsay.reproduce.plans import plan
from nearsay.reproduce.rendering import confidence_shares, similarity_shares, write_table
from nearsay.reproduce.runs import Runs

DATA = Path("data")


# Tables


@pytest.fixture
def written(tmp_path):
    """The texts of a table's files, from finals by row: a share for each seed."""

    def write(finals, name="baselines", data=DATA):
        cells = plan(name, data, 3)
        results = {}
        for cell in cells:
            if cell.seed < len(finals.get(cell.row, ())):
                final = finals[cell.row][cell.seed]
                test = {"final": final, "best": final + 0.1, "last_10": final - 0.1}
                results[cell.run] = {"accuracy": {"test": test}}
        runs = Runs(folder=Path("nowhere"), _results=results)
        paths = write_table(name, cells, runs, tmp_path / "out", data)
        assert [path.name for path in paths] == [f"{name}.{end}" for end in ENDINGS]
        return {path.suffix[1:]: path.read_text("utf-8") for path in paths}

    return write


ENDINGS = ("md", "tex", "csv", "html")


def line(text, name):
    """The cells of the line of a row, and of all lines below it."""
    rows = [row for row in text.splitlines() if row.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    [number] = [number for number, row in enumerate(cells) if row[0] == name]
    return cells[number:]


def read_csv(text):
    return list(csv.DictReader(text.splitlines()))


def test_our_numbers_stand_above_those_of_the_paper_and_the_difference(written):
    ours, paper, difference, *_ = line(written({"Standard": [0.70, 0.72, 0.74]})["md"], "Standard")
    assert ours[:4] == ["Standard", "nearsay (n=3)", "72.0 ± 2.0", "72.0 ± 2.0"]
    assert paper[:6] == ["", "paper", "72.7 ± 0.4", "63.4 ± 0.4", "55.9 ± 0.5", "13.4 ± 0.4"]
    assert difference[:6] == ["", "difference", "−0.7", "+8.6", "+16.1", "+58.6"]


def test_other_works_are_quoted_and_marked(written):
    texts = written({})
    name = "MOIT (Ortego et al. 2020)"
    numbers = [*["–"] * 4, "64.7", "63.1", "60.8", "45.9"]
    assert line(texts["md"], name)[0] == [name, "quoted", *numbers]
    quoted = [row for row in read_csv(texts["csv"]) if row["kind"] == "quoted"]
    assert {row["method"] for row in quoted} == {"D-Mix", "ELR", "MOIT"}
    assert all(row["mean"] == row["difference"] == "" and row["n"] == "0" for row in quoted)


def test_best_and_last_ten_are_in_the_csv_alone(written):
    texts = written({"NCR": [0.61, 0.63]})
    rows = {(row["method"], row["column"]): row for row in read_csv(texts["csv"])}
    row = rows["NCR", "mini-ImageNet-Red 80 %"]
    expected = {"mean": "62.0", "best_mean": "72.0", "last_10_mean": "52.0", "deviation": "1.414"}
    expected |= {"n": "2", "seeds": "0 1", "paper": "51.2 ± 0.4", "paper_mean": "51.2"}
    expected |= {"paper_deviation": "0.4", "difference": "10.8"}
    assert {key: row[key] for key in expected} == expected
    for ending in ("md", "tex", "html"):
        assert "62.0" in texts[ending]
        assert "52.0 ±" not in texts[ending]
        assert "72.0 ±" not in texts[ending]


def test_latex_is_a_booktabs_table_with_nothing_unescaped(written):
    text = written({"Standard": [0.7, 0.8]}, "realistic")["tex"]
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{llccc}"):
        assert part in text
    assert r"Standard & nearsay (n=2) & 75.0 $\pm$ 7.1 & 75.0 $\pm$ 7.1 & 75.0 $\pm$ 7.1 \\" in text
    assert r"77.8$^\dagger$ & -- & 74.8 \\" in text
    assert not set("±†–−") & set(text)
    body = text.partition("\n")[2]  # the first line is a comment
    assert body.count("%") == body.count(r"\%")
    assert {row.count("&") for row in body.splitlines() if row.endswith(r"\\")} == {4}


def test_stand_ins_are_named_and_not_compared(written):
    texts = written({"Standard": [0.9]}, data="toy")
    assert "| toy for mini-ImageNet-Blue 40 % |" in texts["md"]
    assert "digits for mini-ImageNet-Red 80 %" in texts["md"]
    assert "difference" not in texts["md"]
    rows = read_csv(texts["csv"])
    assert {row["difference"] for row in rows} == {""}
    stand_ins = {(row["column"].split()[0], row["stand_in"]) for row in rows}
    assert stand_ins == {("mini-ImageNet-Blue", "toy"), ("mini-ImageNet-Red", "digits")}
    assert all("stand-ins, not the data itself" in texts[kind] for kind in ("md", "html", "tex"))


# Figures

FEATURES = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]])


@pytest.fixture
def run(tmp_path):
    """Five examples, the last held out; the fourth is of class 0 but has the label 1."""
    given, clean = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([0, 0, 1, 0, 0])
    labels = Labels(given, clean, ("a", "b"))
    trust = torch.tensor([0.99, 0.62, 0.99, 0.02, 0.5])
    logits = torch.stack([trust, 1 - trust], dim=1).log()
    logits = torch.where(given[:, None] == 0, logits, logits.flip(1))
    (tmp_path / "predictions").mkdir()
    tensors = {"features": FEATURES, "logits": logits, "indices": torch.arange(5)}
    save_file(tensors, tmp_path / "predictions" / "train.safetensors")
    parts = {"train": np.arange(4), "validation": np.array([4]), "fingerprint": fingerprint(labels)}
    np.savez(
        tmp_path / "labels.npz", given=given, clean=clean, classes=np.array(labels.classes), **parts
    )
    record = {"recipe": "toy", "arguments": {}, "overrides": [], "experiment": {}}
    (tmp_path / "experiment.json").write_text(json.dumps(record))
    (tmp_path / "result.json").write_text(json.dumps({"finished": True, "seed": 0}))
    (tmp_path / "log.jsonl").write_text('{"epoch": 1.0}\n')
    return tmp_path


def filled(shares):
    """The bins that are not empty."""
    return {place: round(share, 3) for place, share in enumerate(shares) if share}


def test_confidence_is_counted_apart_for_right_and_wrong_labels(run):
    right, wrong = (confidence_shares(run)[kind, ""] for kind in LABELS)
    assert len(right) == len(wrong) == 20
    assert filled(right) == {12: 33.333, 19: 66.667}
    assert filled(wrong) == {0: 100.0}


def test_similarity_is_counted_apart_for_labels_that_agree_and_are_right(run):
    shares = similarity_shares(run)
    assert list(shares) == list(SIMILARITIES)
    ones, zeros = 79, 40  # bins of cosines 1 and 0; the held-out example would be at −1
    for half in (RIGHT_PAIRS, WRONG_PAIRS):
        assert filled(shares["same label", half]) == {ones: 100}
        assert filled(shares["different labels", half]) == {zeros: 100}


def test_labels_without_truth_are_refused(run):
    with np.load(run / "labels.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "clean"}
    np.savez(run / "labels.npz", **kept)
    with pytest.raises(ValueError, match=re.escape(str(run))):
        confidence_shares(run)


HEADING = charts.Heading(
    "What is <shown>", ["A ring is the best of " + "many " * 30 + "values.", "Data: digits."]
)


def texts(svg):
    # A text of several lines has a tspan for each.
    return re.findall(r"<(?:text|tspan)[^>]*>([^<]+)</", svg)


def check_alone(drawing, *words):
    """A picture without a page has real colors, white paper, its heading and these words."""
    assert "var(--" not in drawing.svg
    title = "What is &lt;shown&gt;"
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    assert f"<title>{title}</title>{paper}" in drawing.svg
    shown = " ".join(texts(drawing.svg))
    heading = (title, "A ring is the best of many", "many values.", "Data: digits.")
    assert [word for word in (*heading, *words) if word not in shown] == []
    assert drawing.png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", drawing.png[16:24])
    assert width > 600
    assert height > 300
    assert "var(--" in drawing.html  # which the page resolves for light and dark
    assert drawing.html.count("<svg") == 2
    assert "Data: digits." not in drawing.html  # where the page says it


WORDS = ("Standard", "NCR", "toy for Blue, 40 %", "Red, 40 % noise", "share of its kind (%)")


def grid(kinds):
    panels = []
    for row in ("Standard", "NCR"):
        for column in ("toy for Blue, 40 %", "Red, 40 % noise"):
            panels.append(Panel(row, column, dict.fromkeys(kinds, (25.0, 75.0))))
    return panels


def test_similarities_name_rows_columns_and_halves():
    drawing = charts.similarities(grid(SIMILARITIES), lowest=-1, heading=HEADING)
    words = ("same label", "different labels", "cosine similarity", "−1.0", "−0.5")
    check_alone(drawing, *WORDS, *words)
    assert texts(drawing.svg).count(RIGHT_PAIRS) == texts(drawing.svg).count(WRONG_PAIRS) == 4
    # A share that is drawn down is a positive number as well.
    assert not {"−20", "−50", "−80"} & set(texts(drawing.svg))


def test_pairs_with_a_wrong_label_hang_down_from_zero():
    shares = {SIMILARITIES[0]: [25.0, 75.0], SIMILARITIES[1]: [40.0, 60.0]}
    rows = charts._steps([Panel("NCR", "Red", shares)], 0, 1)
    up, down = ([row for row in rows if row["half"] == half] for half in (RIGHT_PAIRS, WRONG_PAIRS))
    assert [(row["x"], row["share"]) for row in up] == [(0.0, 25.0), (0.5, 75.0), (1.0, 75.0)]
    assert [(row["x"], row["share"]) for row in down] == [(0.0, -40.0), (0.5, -60.0), (1.0, -60.0)]
