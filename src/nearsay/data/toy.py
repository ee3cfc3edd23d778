"""Gaussian classes with known labels: a data set for tests that needs no file."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nearsay import rng
from nearsay.batch import DataInfo, Labels, Split
from nearsay.validation import check_number, check_split, check_whole


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Features around random centers, one per class, with standard deviation 1 in all directions.

    Example i is of class i modulo `num_classes`. A split is a pure function of the fields, and a
    longer split continues a shorter one.

    Args:
        num_classes: At least 2.
        num_features: Width of an example.
        num_train: Examples of the training split.
        num_test: Examples of the test split.
        distance: Of the centers from the origin; larger separates the classes better.
        seed: Of the random numbers.

    >>> inputs, labels = Toy(num_classes=3, num_features=2, num_train=5).open("train")
    >>> inputs.shape, labels.given
    (torch.Size([5, 2]), tensor([0, 1, 2, 0, 1]))
    """

    num_classes: int = 8
    num_features: int = 32
    num_train: int = 2000
    num_test: int = 4000
    distance: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("num_classes", self.num_classes, 2)
        for name in ("num_features", "num_train", "num_test"):
            check_whole(name, getattr(self, name), 1)
        check_number("distance", self.distance, 0, 1e6)

    def describe(self) -> DataInfo:
        """Its classes and sizes, by its fields."""
        return DataInfo(self.num_classes, (self.num_features,), self.num_train)

    def open(self, split: str) -> Split:
        """The split "train" or "test": float32 features (N, D), and labels that are all clean."""
        counts = {"train": self.num_train, "test": self.num_test}
        check_split(split, counts, "the toy data")
        clean = torch.arange(counts[split]) % self.num_classes
        directions = functional.normalize(self._normal("toy centers", self.num_classes))
        centers = self.distance * directions
        features = centers[clean] + self._normal(f"toy {split}", len(clean))
        classes = tuple(map(str, range(self.num_classes)))
        return Split(features.float(), Labels(given=clean.clone(), clean=clean, classes=classes))

    def _normal(self, purpose: str, num: int) -> Tensor:
        """(num, D) float64 normal random numbers, by the inverse of their distribution function."""
        words = rng.words(self.seed, purpose, 0, torch.arange(num), self.num_features)
        # Half a step from 0 and from 1, so that all numbers are finite.
        uniforms = (words.double() + 0.5) * 2.0**-32
        deviates: Tensor = torch.special.ndtri(uniforms)
        return deviates
