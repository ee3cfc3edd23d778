"""What everything is made of refuses what cannot be meant, in one sentence."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from nearsay import ELR, NCR, Batch, ncr, one_hot, pad
from nearsay.batch import PADDING
from nearsay.validation import check_number


def batch_of(num_rows):
    return Batch(
        inputs=torch.ones(num_rows, 5),
        targets=one_hot(torch.arange(num_rows) % 4, 4),
        indices=torch.arange(num_rows),
    )


@pytest.mark.parametrize("num_rows", [3, 5, np.int64(5)])
def test_a_batch_is_padded_with_rows_that_are_nobody(num_rows):
    batch = pad(batch_of(3), num_rows)
    assert batch.inputs.sum(dim=1).tolist() == [5, 5, 5, 0, 0][:num_rows]
    assert batch.targets.sum(dim=1).tolist() == [1, 1, 1, 0, 0][:num_rows]
    assert batch.indices.tolist() == [0, 1, 2, PADDING, PADDING][:num_rows]


@pytest.mark.parametrize("num_rows", ["x", None, 4.5, True, 2, -1])
def test_a_number_of_rows_that_cannot_be_reached_is_refused(num_rows):
    with pytest.raises(
        ValueError,
        match=f"num_rows={num_rows!r} must be a whole number of at least 3, as many as the batch has",
    ):
        pad(batch_of(3), num_rows)


@pytest.mark.parametrize("name", ["inputs", "targets", "indices"])
def test_lists_are_not_padded(name):
    with pytest.raises(ValueError, match=rf"{name} of type list must be a torch\.Tensor"):
        pad(replace(batch_of(3), **{name: [0, 0, 0]}), 5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NCR(alpha=np.float32(0.5)), r"alpha=np\.float32\(0\.5\)"),
        (lambda: ELR(weight=np.int64(3)), r"weight=np\.int64\(3\)"),
        (
            lambda: ncr(torch.ones(4, 3), torch.ones(4, 5), temperature=np.float32(2)),
            r"temperature=np\.float32\(2\.0\)",
        ),
        (lambda: check_number("share", Fraction(1, 2), 0, 1), r"share=Fraction\(1, 2\)"),
    ],
)
def test_a_number_that_is_not_of_python_is_refused_with_what_makes_it_one(make, words):
    with pytest.raises(
        ValueError,
        match=rf"^{words} must be a number of Python itself; convert it with float\(...\)$",
    ):
        make()


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float64(0.5)])
def test_numbers_of_python_are_taken(value):
    assert check_number("share", value, 0, 1) is value


@pytest.mark.parametrize(
    "value", [True, np.True_, "1", None, -0.1, 1.1, float("nan"), torch.tensor(0.5)]
)
def test_what_is_no_number_of_the_range_is_refused(value):
    with pytest.raises(
        ValueError, match=r"^share=.* must be a number from 0 to 1; one half is usual$"
    ):
        check_number("share", value, 0, 1, cure="; one half is usual")
