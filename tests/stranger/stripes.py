"""A data set of one file, which tells its own classes and sizes."""

from dataclasses import dataclass

import torch

from nearsay.batch import DataInfo, Labels, Split
from nearsay.errors import NoSplit


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """Horizontal and vertical stripes, 8 × 8 pixels."""

    num_examples: int = 100

    def open(self, split: str) -> Split:
        """(N, 3, 8, 8) uint8 images and their labels."""
        if split not in ("train", "test"):
            raise NoSplit(f"split must be train or test, got {split!r}.")
        classes = torch.arange(self.num_examples) % 2
        shift = 0 if split == "train" else 1
        pattern = 255 * ((torch.arange(8) + shift) % 2).to(torch.uint8)
        rows = pattern.expand(self.num_examples, 3, 8, 8)
        images = torch.where(classes.bool()[:, None, None, None], rows, rows.mT)
        return Split(images, Labels(classes, classes, ("flat", "upright")))

    def describe(self) -> DataInfo:
        """Two classes of 8 × 8 images."""
        return DataInfo(num_classes=2, shape=(3, 8, 8), num_examples=self.num_examples)
