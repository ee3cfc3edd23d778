"""Handwritten digits with 40 % of the labels drawn at random."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from nearsay.data import Digits
from nearsay.losses import NCR
from nearsay.noise import Symmetric

OBJECTIVE = NCR(alpha=0.9, k=10)


class Data(NamedTuple):
    """Images from −1 to 1, and labels."""

    images: Tensor  # (N, 3, 8, 8)
    labels: Tensor  # (N,) of which two in five are drawn at random
    test_images: Tensor
    test_labels: Tensor


def noisy_digits(seed: int) -> Data:
    train, test = (Digits().open(split) for split in ("train", "test"))
    given = Symmetric(rate=0.4, seed=seed)(train.labels).given
    return Data(train.inputs / 127.5 - 1, given, test.inputs / 127.5 - 1, test.labels.given)


def as_dataset(data: Data) -> TensorDataset:
    return TensorDataset(data.images, data.labels, torch.arange(len(data.labels)))
