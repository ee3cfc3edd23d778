"""The 1 797 handwritten digits that come with scikit-learn: real images without a download."""

from dataclasses import dataclass

import torch

from nearsay import rng
from nearsay.batch import Labels, Split
from nearsay.validation import check_number, check_split


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images of 8×8 in ten classes (Alpaydin and Kaynak 1998), with the splits "train" and "test".

    The gray levels 0 to 16 are multiplied by 15 and copied to three channels, so that networks for
    color images take them. Both splits have the same share of every class and keep the order of the
    file.

    Args:
        test_share: Share of every class in the test split, from 0.01 to 0.99.
        seed: Of the split.

    >>> inputs, labels = Digits().open("train")
    >>> inputs.shape, len(labels.classes)
    (torch.Size([1347, 3, 8, 8]), 10)
    """

    test_share: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("test_share", self.test_share, 0.01, 0.99)

    def open(self, split: str) -> Split:
        """uint8 images (N, 3, 8, 8) with values from 0 to 240, and labels that are all clean."""
        check_split(split, ("train", "test"), "the digits")
        # The import takes a second, which only this data set should cost.
        from sklearn.datasets import load_digits  # noqa: PLC0415

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
