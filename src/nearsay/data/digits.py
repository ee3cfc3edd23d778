"""The 1 797 handwritten digits that come with scikit-learn: real images without a download."""

from dataclasses import dataclass

import torch

from nearsay import rng
from nearsay.batch import Labels, Split
from nearsay.errors import NoSplit


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images of 8×8 in ten classes (Alpaydin and Kaynak 1998), split by `seed`, with the same share of every class.

    The file has the gray levels 0 to 16; they are multiplied by 15 and stand in all three channels, so that networks
    for color images take them. Both splits keep the order of the file.
    """

    test_share: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.01 <= self.test_share <= 0.99:
            raise ValueError(f"test_share={self.test_share!r} must be from 0.01 to 0.99")

    def open(self, split: str) -> Split:
        """The split "train" or "test": uint8 images (N, 3, 8, 8) with values from 0 to 240, and labels all clean."""
        if split not in ("train", "test"):
            raise NoSplit(f"split={split!r} is not in the digits; it has train and test")
        from sklearn.datasets import load_digits  # noqa: PLC0415  # a second, which only this data set should cost

        images, numbers = load_digits(return_X_y=True)
        labels = torch.from_numpy(numbers).long()
        is_test = torch.zeros(len(labels), dtype=torch.bool)
        for number in range(10):
            members = (labels == number).nonzero()[:, 0]
            order = rng.shuffle(self.seed, "digits split", 0, members)
            is_test[members[order[: round(self.test_share * len(members))]]] = True
        rows = is_test if split == "test" else ~is_test
        gray = (15 * torch.from_numpy(images)).to(torch.uint8).view(-1, 1, 8, 8)
        clean = labels[rows]
        classes = tuple(map(str, range(10)))
        return Split(
            gray[rows].repeat(1, 3, 1, 1), Labels(given=clean.clone(), clean=clean, classes=classes)
        )
