"""What is quoted of an error inside a sentence of ours."""

import re
from pathlib import Path

from nearsay import validation
from nearsay.errors import first_line, one_line

REPORT = ValueError("\n  wrong shape\n  index: 1 Got: 3\tExpected: 2\n")


def test_a_long_report_is_told_by_its_first_line():
    assert first_line(REPORT) == "wrong shape"
    assert first_line(ValueError("a.csv: 2 problems:\n  a.csv:2: no label\na.csv:9: no path")) == (
        "a.csv: 2 problems: a.csv:2: no label"  # the first line alone would tell nothing
    )
    assert first_line(ValueError("what is this:")) == "what is this:"


def test_a_short_one_is_told_whole_in_one_line():
    assert one_line(REPORT) == "wrong shape index: 1 Got: 3 Expected: 2"
    assert one_line(ValueError("x" * 999)) == "x" * 200
    assert one_line(ValueError("x" * 999), 300) == "x" * 300


def test_an_error_without_words_is_told_by_its_name():
    for error in (MemoryError(), ValueError(""), ValueError(" \n ")):
        assert first_line(error) == one_line(error) == type(error).__name__


def test_errors_are_cut_in_one_place():
    source = Path(validation.__file__)
    cut = re.compile(r"str\(error\)(\.strip\(\))?\.split(lines)?\(\)")
    found = {
        path.name for path in source.parent.rglob("*.py") if cut.search(path.read_text("utf-8"))
    }
    assert found == {source.name, "loading.py"}  # of a report of a worker the last line counts
