"""What everything is made of refuses what cannot be meant, in one sentence."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nearsay import ELR, NCR, Batch, one_hot, pad
from nearsay.batch import PADDING


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


@pytest.mark.parametrize("num_rows", ["x", None, 4.5, True, 2])
def test_a_number_of_rows_that_cannot_be_reached_is_refused(num_rows):
    with pytest.raises(ValueError, match="num_rows"):
        pad(batch_of(3), num_rows)


@pytest.mark.parametrize("name", ["inputs", "targets", "indices"])
def test_lists_are_not_padded(name):
    with pytest.raises(ValueError, match=name):
        pad(replace(batch_of(3), **{name: [0, 0, 0]}), 5)


def test_a_number_of_numpy_is_refused_as_records_could_not_hold_it():
    with pytest.raises(ValueError, match="alpha"):
        NCR(alpha=np.float32(0.5))
    with pytest.raises(ValueError, match="weight"):
        ELR(weight=np.int64(3))
