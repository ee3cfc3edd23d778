"""The classifier on top of features, and initial weights from a seed."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearsay import rng
from nearsay.neighbors import normalize
from nearsay.validation import check_that, check_whole


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """Logits = W · features + b. It has no fields.

    >>> import torch
    >>> LinearHead().build(num_features=4, num_classes=3)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """A module from (B, D) features to (B, C) logits."""
        check_whole("num_classes", num_classes, 1)
        return nn.Linear(num_features, num_classes)


@dataclass(frozen=True, kw_only=True)
class CosineHead:
    """Logits = `scale` · cosine of features and class weights, the paper's choice for WebVision.

    Args:
        scale: The largest logit. The paper prints none. With 16 a softmax over 1000 classes reaches
            0.9999 where features point at their class and at a right angle to all others; 10 would
            stop at 0.96 and smooth all labels.

    >>> import torch
    >>> CosineHead(scale=16.0).build(num_features=4, num_classes=3)(torch.zeros(1, 4)).shape
    torch.Size([1, 3])
    """

    scale: float = 16.0

    def __post_init__(self) -> None:
        check_that(0 < self.scale < math.inf, "scale", "finite and above 0", self.scale)

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """A module from (B, D) features to (B, C) logits, at least in float32, also in autocast."""
        check_whole("num_classes", num_classes, 1)
        return _Cosine(num_features, num_classes, self.scale)


Head = LinearHead | CosineHead


class _Cosine(nn.Module):
    def __init__(self, num_features: int, num_classes: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_classes, num_features))
        # Rows of length about 1: the length decides how far a step of the optimizer turns them.
        nn.init.normal_(self.weight, std=num_features**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        """Features of zero have no direction: their logits are 0, without a gradient."""
        dtype = torch.promote_types(features.dtype, self.weight.dtype)
        dtype = torch.promote_types(dtype, torch.float32)
        with torch.autocast(features.device.type, enabled=False):
            directions, _ = normalize(features.to(dtype))
            classes, _ = normalize(self.weight.to(dtype))
            return self.scale * functional.linear(directions, classes)


@contextmanager
def drawn(seed: int) -> Iterator[None]:
    """Modules made inside have weights that depend on `seed` alone.

    torch's global generators stay as they are. The modules are made on the CPU, whatever the
    default device is, because other devices would draw other numbers.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        high, low = rng.words(seed, "weights", 0, torch.zeros(1, dtype=torch.int64), 2)[0].tolist()
        # torch.manual_seed would seed every GPU as well.
        torch.default_generator.manual_seed(high << 32 | low)
        yield
