import csv
import re
from pathlib import Path

import pytest

from nearsay.reproduce.plans import plan
from nearsay.reproduce.printing import write_table
from nearsay.reproduce.runs import Runs

DATA = Path("data")


def finished(accuracies, name="baselines", trials=3, data=DATA):
    """Runs that ended as said, by the name of their row: a share for each seed."""
    cells = plan(name, data, trials)
    results = {}
    for cell in cells:
        if cell.row in accuracies and cell.seed < len(accuracies[cell.row]):
            final = accuracies[cell.row][cell.seed]
            results[cell.run] = {
                "accuracy": {"test": {"final": final, "best": final + 0.1, "last_10": final - 0.1}}
            }
    return cells, Runs(folder=Path("nowhere"), _results=results)


@pytest.fixture
def written(tmp_path):
    """Write a table of such runs; the texts of its files by their endings."""

    def write(accuracies, name="baselines", data=DATA):
        paths = write_table(name, *finished(accuracies, name, data=data), tmp_path / "out", data)
        assert [path.name for path in paths] == [
            f"{name}.{ending}" for ending in ("md", "tex", "csv", "html")
        ]
        return {path.suffix[1:]: path.read_text("utf-8") for path in paths}

    return write


def line(text, *beginning):
    """The cells of the line that begins with these, and of those after it."""
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in text.splitlines()
        if row.startswith("|")
    ]
    [found] = [
        number for number, row in enumerate(rows) if tuple(row[: len(beginning)]) == beginning
    ]
    return rows[found:]


def test_our_numbers_stand_above_those_of_the_paper_and_the_difference(written):
    ours, paper, difference, *_ = line(written({"Standard": [0.70, 0.72, 0.74]})["md"], "Standard")
    assert ours[:4] == ["Standard", "nearsay (n=3)", "72.0 ± 2.0", "72.0 ± 2.0"]
    assert paper[:6] == ["", "paper", "72.7 ± 0.4", "63.4 ± 0.4", "55.9 ± 0.5", "13.4 ± 0.4"]
    assert difference[:6] == ["", "difference", "−0.7", "+8.6", "+16.1", "+58.6"]


def test_a_difference_that_rounds_to_nothing_is_not_below(written):
    below = line(written({"Standard": [0.7266]})["md"], "Standard")[2]
    above = line(written({"Standard": [0.7274]})["md"], "Standard")[2]
    assert (below[2], above[2]) == ("+0.0", "+0.0")  # the paper has 72.7


def test_what_was_not_run_says_so(written):
    ours, paper, difference, *_ = line(written({"Standard": [0.7]})["md"], "NCR")
    assert ours[1:] == ["nearsay (n=1)", *["not run"] * 8]
    assert paper[2] == "73.4 ± 0.5"
    assert difference[2:] == ["–"] * 8


def test_numbers_of_runs_are_told_one_by_one_where_they_differ(written):
    text = written({"Standard": [0.7], "Mixup": [0.6, 0.62]})["md"]
    assert line(text, "Standard")[0][1:3] == ["nearsay", "70.0 (n=1)"]
    assert line(text, "Mixup")[0][1:3] == ["nearsay", "61.0 ± 1.4 (n=2)"]


def test_other_works_are_quoted_and_marked(written):
    texts = written({})
    moit = [
        "MOIT (Ortego et al. 2020)",
        "quoted",
        "–",
        "–",
        "–",
        "–",
        "64.7",
        "63.1",
        "60.8",
        "45.9",
    ]
    assert line(texts["md"], "MOIT (Ortego et al. 2020)")[0] == moit
    rows = list(csv.DictReader(texts["csv"].splitlines()))
    quoted = [row for row in rows if row["kind"] == "quoted"]
    assert {row["method"] for row in quoted} == {"D-Mix", "ELR", "MOIT"}
    assert all(row["mean"] == row["difference"] == "" and row["n"] == "0" for row in quoted)


def test_best_and_last_ten_are_in_the_csv_alone(written):
    texts = written({"NCR": [0.61, 0.63]})
    rows = {
        (row["method"], row["column"]): row for row in csv.DictReader(texts["csv"].splitlines())
    }
    row = rows["NCR", "mini-ImageNet-Red 80 %"]
    assert (row["mean"], row["best_mean"], row["last_10_mean"]) == ("62.0", "72.0", "52.0")
    assert (row["deviation"], row["n"], row["seeds"]) == ("1.414", "2", "0 1")
    assert (row["paper"], row["paper_mean"], row["paper_deviation"]) == (
        "51.2 ± 0.4",
        "51.2",
        "0.4",
    )
    assert row["difference"] == "10.8"
    for ending in ("md", "tex", "html"):
        assert "62.0" in texts[ending]
        assert "52.0 ±" not in texts[ending]
        assert "72.0 ±" not in texts[ending]


def test_latex_is_a_booktabs_table_with_nothing_unescaped(written):
    text = written({"Standard": [0.7, 0.8]}, "realistic")["tex"]
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{llccc}"):
        assert text.count(part) >= 1
    assert r"Standard & nearsay (n=2) & 75.0 $\pm$ 7.1 & 75.0 $\pm$ 7.1 & 75.0 $\pm$ 7.1 \\" in text
    assert r"77.8$^\dagger$ & -- & 74.8 \\" in text
    assert not set("±†–−") & set(text)
    body = text.partition("\n")[2]  # the first line is a comment
    assert body.count("%") == body.count(r"\%")
    columns = {row.count("&") for row in body.splitlines() if row.endswith(r"\\")}
    assert columns == {4}


def test_latex_has_a_group_of_columns_for_each_data_set(written):
    text = written({})["tex"]
    assert (
        r"& & \multicolumn{4}{c}{mini-ImageNet-Blue} & \multicolumn{4}{c}{mini-ImageNet-Red} \\"
        in text
    )
    assert text.count(r"\midrule") == 3  # below the head, and around what is quoted
    assert (
        r"Method & Source & 0 \% & 20 \% & 40 \% & 80 \% & 0 \% & 20 \% & 40 \% & 80 \% \\" in text
    )


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
    assert "stand-ins" in texts["md"]
    rows = list(csv.DictReader(texts["csv"].splitlines()))
    assert {row["difference"] for row in rows} == {""}
    stand_ins = {
        (row["column"].removesuffix(" %").rpartition(" ")[0], row["stand_in"]) for row in rows
    }
    assert stand_ins == {("mini-ImageNet-Blue", "toy"), ("mini-ImageNet-Red", "digits")}
    for ending, title in (
        ("md", "# Baselines"),
        ("html", "<h1>Baselines"),
        ("tex", r"\caption{Baselines"),
    ):
        [line_of_title] = [row for row in texts[ending].splitlines() if title in row]
        assert "noise (small stand-ins, not the data itself)" in line_of_title


def test_real_data_has_no_stand_in(written):
    texts = written({"Standard": [0.9]})
    assert {row["stand_in"] for row in csv.DictReader(texts["csv"].splitlines())} == {""}
    assert "stand-in" not in texts["md"] + texts["tex"] + texts["html"]


def heads(page):
    """The lines of a table's head: the text of each cell, and how many columns and lines it is for."""
    found = []
    for row in re.findall(r"<tr>(.*?)</tr>", page.partition("<thead>")[2].partition("</thead>")[0]):
        cells = re.findall(r"<th([^>]*)>(.*?)</th>", row)
        found.append(
            [(re.sub("<.*?>", "", text), *re.findall(r'span="(\d+)"', tag)) for tag, text in cells]
        )
    return found


def test_columns_of_the_page_are_grouped_by_data_set(written):
    first, second = heads(written({})["html"])
    assert first == [("method", "2"), ("mini-ImageNet-Blue", "4"), ("mini-ImageNet-Red", "4")]
    assert [text for (text,) in second] == [f"{rate}\u00a0%" for rate in (0, 20, 40, 80)] * 2
    first, second, third = heads(written({}, "cifar", data="toy")["html"])
    assert first == [
        ("method", "3"),
        ("stand-in for CIFAR-10", "6"),
        ("stand-in for CIFAR-100", "6"),
    ]
    assert second[5:7] == [("A\u201140\u00a0%",), ("20\u00a0%",)]
    assert [text for (text,) in third] == [*["toy"] * 5, "digits"] * 2
    [only] = heads(written({}, "realistic")["html"])
    assert [text for text, *_ in only] == [
        "method",
        "mini\u2011WebVision",
        "WebVision",
        "Clothing1M",
    ]


def test_a_line_of_the_page_says_whose_it_is_and_stays_in_sight(written):
    page = written({"Standard": [0.7]})["html"]
    lines = re.findall(r'<tr[^>]*><th scope="row">(.*?)</th>', page)
    assert lines[:3] == [
        'Standard <span class="source">nearsay (n=1)</span>',
        '<span class="source">paper</span>',
        '<span class="source">difference</span>',
    ]
    assert ".grouped tbody th, .grouped .corner { position: sticky; left: 0;" in page
    assert page.count("</style>") == 1
