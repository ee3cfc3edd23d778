"""The shared checks: what they accept, what they refuse, and how an error is quoted."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from nearsay.errors import first_line, one_line
from nearsay.validation import (
    check_choice,
    check_number,
    check_tensors,
    check_together,
    check_whole,
    reading,
)

REPORT = ValueError("\n  wrong shape\n  index: 1 Got: 3\tExpected: 2\n")


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float64(0.5)])
def test_a_number_in_the_range_is_given_back_as_it_is(value):
    assert check_number("share", value, 0, 1) is value


@pytest.mark.parametrize(
    "value", [-0.1, 1.1, math.nan, True, np.True_, "1", None, Fraction(1, 2), np.float32(0.5)]
)
def test_other_numbers_are_refused_with_the_field_and_the_value(value):
    with pytest.raises(ValueError, match=r"^share") as caught:
        check_number("share", value, 0, 1, cure=", or None")
    assert repr(value) in str(caught.value)


def test_whole_numbers_have_both_bounds():
    assert type(check_whole("size", np.int64(3), 1)) is int
    assert check_whole("size", 5, 1, 5) == 5
    for value in (0, 6, 2.0, True, "2", None):
        with pytest.raises(ValueError, match=r"^size"):
            check_whole("size", value, 1, 5)


def test_a_choice_is_compared_with_its_type():
    assert check_choice("depth", 18, (18, 34)) == 18
    for value in (50, "18", 18.0, None):
        with pytest.raises(ValueError, match=r"^depth .* 18, 34"):
            check_choice("depth", value, (18, 34))
    with pytest.raises(ValueError, match="level"):
        check_choice("level", True, (0, 1))


def test_a_long_value_is_cut():
    with pytest.raises(ValueError, match=r"mode .*\.\.\.") as caught:
        check_choice("mode", "x" * 10_000, ("a", "b"))
    assert len(str(caught.value)) < 200


def test_tensors_are_told_apart_by_name():
    check_tensors(logits=torch.zeros(1))
    with pytest.raises(ValueError, match=r"^targets .* list"):
        check_tensors(logits=torch.zeros(1), targets=[0.0])
    with pytest.raises(ValueError, match=r"^features .* meta"):
        check_together(torch.zeros(1), features=torch.zeros(1, device="meta"))


def test_reading_names_the_file_the_reason_and_the_hint(tmp_path):
    path = tmp_path / "facts.json"
    missing = pytest.raises(ValueError, match=r"facts\.json does not exist\. Train first\.")
    with missing, reading(path, hint="Train first."):
        path.read_text()
    damaged = pytest.raises(RuntimeError, match=r"facts\.json cannot be read: Expecting")
    with damaged, reading(path, error=RuntimeError):
        json.loads("{")
    with pytest.raises(KeyError), reading(path, ZeroDivisionError):
        raise KeyError


def test_a_long_report_is_quoted_by_its_first_line():
    assert first_line(REPORT) == "wrong shape"
    # The first line alone only announces the second.
    announced = ValueError("a.csv: 2 problems:\n  a.csv:2: no label\na.csv:9: no path")
    assert first_line(announced) == "a.csv: 2 problems: a.csv:2: no label"
    assert first_line(ValueError("what is this:")) == "what is this:"


def test_a_short_one_is_quoted_whole_in_one_line():
    assert one_line(REPORT) == "wrong shape index: 1 Got: 3 Expected: 2"
    assert one_line(ValueError("x" * 999)) == "x" * 200
    assert one_line(ValueError("x" * 999), 300) == "x" * 300


def test_an_error_without_words_is_quoted_by_its_name():
    for error in (MemoryError(), ValueError(""), ValueError(" \n ")):
        assert first_line(error) == one_line(error) == type(error).__name__
