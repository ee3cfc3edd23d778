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
from nearsay.report.charts import LABELS, RIGHT_PAIRS, SIMILARITIES, WRONG_PAIRS, Panel, Point
from nearsay.reproduce.plans import Setting, make_cells, plan
from nearsay.reproduce.rendering import (
    confidence_shares,
    describe_runs,
    similarity_shares,
    write_table,
)
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


@pytest.mark.parametrize("final", [0.7266, 0.7274])  # the paper has 72.7
def test_a_difference_that_rounds_to_zero_has_a_plus(written, final):
    assert line(written({"Standard": [final]})["md"], "Standard")[2][2] == "+0.0"


def test_a_row_that_was_not_run_says_so(written):
    ours, paper, difference, *_ = line(written({"Standard": [0.7]})["md"], "NCR")
    assert ours[1:] == ["nearsay (n=1)", *["not run"] * 8]
    assert paper[2] == "73.4 ± 0.5"
    assert difference[2:] == ["–"] * 8


def test_numbers_of_runs_are_shown_one_by_one_if_they_differ(written):
    text = written({"Standard": [0.7], "Mixup": [0.6, 0.62]})["md"]
    assert line(text, "Standard")[0][1:3] == ["nearsay", "70.0 (n=1)"]
    assert line(text, "Mixup")[0][1:3] == ["nearsay", "61.0 ± 1.4 (n=2)"]


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


def test_latex_has_a_group_of_columns_for_each_data_set(written):
    text = written({})["tex"]
    blue, red = (rf"\multicolumn{{4}}{{c}}{{mini-ImageNet-{color}}}" for color in ("Blue", "Red"))
    assert rf"& & {blue} & {red} \\" in text
    assert text.count(r"\midrule") == 3  # below the head, and around what is quoted
    rates = r"0 \% & 20 \% & 40 \% & 80 \%"
    assert rf"Method & Source & {rates} & {rates} \\" in text


def test_the_page_stands_alone(written):
    page = written({"Standard": [0.7]}, "cifar")["html"]
    assert page.startswith("<!doctype html>")
    assert '<td class="number">70.0</td>' in page
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_stand_ins_are_named_and_not_compared(written):
    texts = written({"Standard": [0.9]}, data="toy")
    assert "| toy for mini-ImageNet-Blue 40 % |" in texts["md"]
    assert "digits for mini-ImageNet-Red 80 %" in texts["md"]
    assert "difference" not in texts["md"]
    rows = read_csv(texts["csv"])
    assert {row["difference"] for row in rows} == {""}
    stand_ins = {(row["column"].split()[0], row["stand_in"]) for row in rows}
    assert stand_ins == {("mini-ImageNet-Blue", "toy"), ("mini-ImageNet-Red", "digits")}
    titles = {"md": "# Baselines", "html": "<h1>Baselines", "tex": r"\caption{Baselines"}
    for ending, title in titles.items():
        [title_line] = [row for row in texts[ending].splitlines() if title in row]
        assert "noise (small stand-ins, not the data itself)" in title_line


def test_real_data_has_no_stand_in(written):
    texts = written({"Standard": [0.9]})
    assert {row["stand_in"] for row in read_csv(texts["csv"])} == {""}
    assert "stand-in" not in texts["md"] + texts["tex"] + texts["html"]


def heads(page):
    """The lines of a table's head: the text of each cell and its span."""
    rows = re.findall(r"<tr>(.*?)</tr>", re.search("<thead>(.*?)</thead>", page)[1])
    lines = []
    for row in rows:
        cells = []
        for tag, text in re.findall(r"<th([^>]*)>(.*?)</th>", row):
            cells.append((re.sub("<.*?>", "", text), *re.findall(r'span="(\d+)"', tag)))
        lines.append(cells)
    return lines


def test_columns_of_the_page_are_grouped_by_data_set(written):
    first, second = heads(written({})["html"])
    assert first == [("method", "2"), ("mini-ImageNet-Blue", "4"), ("mini-ImageNet-Red", "4")]
    assert [text for (text,) in second] == [f"{rate}\u00a0%" for rate in (0, 20, 40, 80)] * 2
    first, second, third = heads(written({}, "cifar", data="toy")["html"])
    groups = [("stand-in for CIFAR-10", "6"), ("stand-in for CIFAR-100", "6")]
    assert first == [("method", "3"), *groups]
    assert second[5:7] == [("A\u201140\u00a0%",), ("20\u00a0%",)]
    assert [text for (text,) in third] == [*["toy"] * 5, "digits"] * 2
    [only] = heads(written({}, "realistic")["html"])
    assert [text for text, *_ in only][1:] == ["mini\u2011WebVision", "WebVision", "Clothing1M"]


def test_a_line_of_the_page_says_whose_it_is_and_stays_in_sight(written):
    page = written({"Standard": [0.7]})["html"]
    assert re.findall(r'<tr[^>]*><th scope="row">(.*?)</th>', page)[:3] == [
        'Standard <span class="source">nearsay (n=1)</span>',
        '<span class="source">paper</span>',
        '<span class="source">difference</span>',
    ]
    assert ".grouped tbody th, .grouped .corner { position: sticky; left: 0;" in page
    assert page.count("</style>") == 1


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


def test_damaged_predictions_are_named(run):
    (run / "predictions" / "train.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"train\.safetensors"):
        similarity_shares(run)


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        ([1], "n = 1 per panel, seed 1."),
        ([0, 2], "n = 2 per panel, seeds 0, 2."),
    ],
)
def test_the_number_of_runs_and_their_seeds_are_shown(seeds, text):
    cells = make_cells("NCR", "Blue", Setting("toy", ("noise=0.4",)), "ncr", 3)
    cells = [cell for cell in cells if cell.seed in seeds]
    runs = Runs(folder=Path("nowhere"), _results={cell.run: {} for cell in cells})
    assert describe_runs(cells, runs, "panel") == f"Runs: {text}"


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


def test_curves_name_axes_lines_and_units():
    points = []
    for shift, name in enumerate(("0 % noise", "40 % noise")):
        for value in (0.1, 0.9):
            points.append(Point("alpha", name, value, 80 + 10 * value + shift, 0.5, value == 0.9))
    points.append(Point("k", "40 % noise", 10, 91.0, None, True))
    axes = [
        charts.Axis("alpha", ("alpha", "with k = m")),
        charts.Axis("k", ("k (neighbors)",), True),
    ]
    drawing = charts.ablation(points, axes, title="accuracy (%)", heading=HEADING)
    check_alone(drawing, "alpha", "with k = m", "k (neighbors)", "0 % noise", "40 % noise")
    assert texts(drawing.svg).count("accuracy (%)") == 1  # beside the first panel, for all


WORDS = ("Standard", "NCR", "toy for Blue, 40 %", "Red, 40 % noise", "share of its kind (%)")


def grid(kinds):
    panels = []
    for row in ("Standard", "NCR"):
        for column in ("toy for Blue, 40 %", "Red, 40 % noise"):
            panels.append(Panel(row, column, dict.fromkeys(kinds, (25.0, 75.0))))
    return panels


def test_confidences_name_rows_columns_and_units_and_ticks_stay_on_their_lines():
    drawing = charts.confidences(grid([(kind, "") for kind in LABELS]), heading=HEADING)
    check_alone(drawing, *WORDS, *LABELS, "confidence in given label (%)")
    assert set(re.findall(r'<text text-anchor="(\w+)"[^>]*>100</text>', drawing.svg)) == {"middle"}


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
