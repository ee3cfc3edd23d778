"""Gaussian classes of which everything is known: a data set that costs nothing and needs no file."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nearsay import rng
from nearsay.batch import DataInfo, Labels, Split
from nearsay.errors import NoSplit


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Classes around random centers, which lie `distance` from the origin; each has standard deviation 1 everywhere.

    Example i is of class i modulo `num_classes`. A split is a pure function of the fields, and a longer one continues a
    shorter one.
    """

    num_classes: int = 8
    num_features: int = 32
    num_train: int = 2000
    num_test: int = 4000
    distance: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_classes", 2),
            ("num_features", 1),
            ("num_train", 1),
            ("num_test", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number from {least}")
        if not 0 <= self.distance < math.inf:
            raise ValueError(f"distance={self.distance!r} must be finite and not negative")

    def describe(self) -> DataInfo:
        """Its classes and sizes, by its fields."""
        return DataInfo(self.num_classes, (self.num_features,), self.num_train)

    def open(self, split: str) -> Split:
        """The split "train" or "test": float32 features (N, D), and labels that are all clean."""
        counts = {"train": self.num_train, "test": self.num_test}
        if split not in counts:
            raise NoSplit(f"split={split!r} is not in the toy data; it has {' and '.join(counts)}")
        clean = torch.arange(counts[split]) % self.num_classes
        centers = self.distance * functional.normalize(
            self._normal("toy centers", self.num_classes)
        )
        features = centers[clean] + self._normal(f"toy {split}", len(clean))
        classes = tuple(map(str, range(self.num_classes)))
        return Split(features.float(), Labels(given=clean.clone(), clean=clean, classes=classes))

    def _normal(self, purpose: str, num: int) -> Tensor:
        """(num, D) float64 normal deviates, by the inverse of their distribution function."""
        words = rng.words(self.seed, purpose, 0, torch.arange(num), self.num_features)
        uniforms = (
            words.double() + 0.5
        ) * 2.0**-32  # half a step from 0 and from 1, so that all is finite
        deviates: Tensor = torch.special.ndtri(uniforms)
        return deviates
