"""The classifier on top of features, and the drawing of weights from a seed."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearsay import rng
from nearsay.neighbors import normalize


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """Logits = W·features + b."""

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """A module from (B, D) features to (B, C) logits."""
        _check_num_classes(num_classes)
        return nn.Linear(num_features, num_classes)


@dataclass(frozen=True, kw_only=True)
class CosineHead:
    """Logits = `scale` · cosine of features and class weights, the paper's choice for WebVision.

    The paper prints no scale, nor does the work it follows. 16 lets a softmax over 1000 classes reach 0.9999 where
    features point at their class and at a right angle to the others; 10 would stop at 0.96 and smooth all labels.
    """

    scale: float = 16.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}; it must be positive and finite, such as 16")

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """A module from (B, D) features to (B, C) logits, in float32 or better even under autocast."""
        _check_num_classes(num_classes)
        return _Cosine(num_features, num_classes, self.scale)


Head = LinearHead | CosineHead


class _Cosine(nn.Module):
    def __init__(self, num_features: int, num_classes: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_classes, num_features))
        nn.init.normal_(
            self.weight, std=num_features**-0.5
        )  # of length 1 or so, on which the size of steps depends

    def forward(self, features: Tensor) -> Tensor:
        """Zero features have no direction: logits of 0, and no gradient."""
        dtype = torch.promote_types(
            torch.promote_types(features.dtype, self.weight.dtype), torch.float32
        )
        with torch.autocast(features.device.type, enabled=False):
            directions, _ = normalize(features.to(dtype))
            classes, _ = normalize(self.weight.to(dtype))
            return self.scale * functional.linear(directions, classes)


@contextmanager
def drawn(seed: int) -> Iterator[None]:
    """Modules made inside have weights that are a function of `seed` alone; torch's global generators stay untouched.

    They are made on the CPU whatever the default device is: other devices would draw other numbers.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        high, low = rng.words(seed, "weights", 0, torch.zeros(1, dtype=torch.int64), 2)[0].tolist()
        torch.default_generator.manual_seed(
            high << 32 | low
        )  # torch.manual_seed would reseed every GPU as well
        yield


def _check_num_classes(num_classes: int) -> None:
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}; there must be at least one class")
