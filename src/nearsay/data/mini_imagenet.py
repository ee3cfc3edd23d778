"""Mini-ImageNet with controlled label noise, from the web (red) or by chance (blue).

The published lists name two kinds of images: names of ImageNet begin with a synset, others are of
the web.
"""

import re
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from nearsay.batch import DataInfo, Labels, Split
from nearsay.data.webvision import Listing, check_count, locate, make_split, read_lines, read_list
from nearsay.errors import Missing
from nearsay.validation import check_choice, check_split

SOURCE = (
    "the lists are in https://storage.googleapis.com/cnlw/dataset_no_images.zip, and "
    "https://google.github.io/controlled-noisy-web-labels/index.html describes the images"
)
LEVELS = (0.0, 0.2, 0.4, 0.8)
"""The shares of noise that the paper reports."""
_NUM_RED = {  # images, by the share of noise
    **dict.fromkeys((0.0, 0.05, 0.1, 0.15, 0.2, 0.6), 50_000),
    **{0.3: 49_985, 0.4: 50_010, 0.5: 49_962, 0.8: 50_008},
}
_NUM_BLUE, _NUM_TEST, _NUM_CLASSES = 60_000, 5_000, 100
_LIST_FOLDERS = ("", "mini-imagenet", "dataset_no_images/mini-imagenet")
_IMAGE_FOLDERS = ("", "mini-imagenet/", "dataset_no_images/mini-imagenet/", "dataset_no_images/")
_SYNSET = re.compile("n[0-9]{8}")


@dataclass(frozen=True, kw_only=True)
class MiniImageNet:
    """Red and Blue Mini-ImageNet (Jiang et al. 2020): 100 classes, 50 000 (red) or 60 000 (blue)
    images.

    Images of train are looked for in `all_images`, images of the web in `noisy_images` too, images
    of test in `validation`. The published validation images are the split "test", because results
    are reported on them.

    True classes: an image of ImageNet has the class of its synset. Images of the web have wrong
    labels, and what they show is unknown, so they count as outside the vocabulary (clean is −1).

    Args:
        path: The folder that holds `split`, or `mini-imagenet/split` as the archive of the lists
            does.
        noise: Share of wrong labels: 0, 0.2, 0.4 or 0.8 as in the paper, or 0.05, 0.1, 0.15, 0.3,
            0.5 or 0.6.
        color: "red" is noise from the web, "blue" noise by chance.
        held_out_set: True adds a split "validation" for choosing hyper-parameters: the images of
            red without noise that are not in the lists with 20, 40 and 80 %. They are left out of
            train.
        partial: True uses the images that exist, however many, because some web images are gone.

    >>> from nearsay.data import describe
    >>> describe(MiniImageNet(path="mini", noise=0.4)).num_examples
    50010
    """

    path: str | Path
    noise: float
    color: Literal["red", "blue"] = "red"
    held_out_set: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        check_choice("color", self.color, ("red", "blue"))
        is_number = isinstance(self.noise, (int, float)) and not isinstance(self.noise, bool)
        check_choice("noise", float(self.noise) if is_number else self.noise, sorted(_NUM_RED))

    def describe(self) -> DataInfo:
        """The published sizes; no file is read."""
        num_examples: int | None = _NUM_RED[self.noise] if self.color == "red" else _NUM_BLUE
        if self.partial or self.held_out_set:
            num_examples = None
        return DataInfo(_NUM_CLASSES, None, num_examples)

    def at(self, path: Path, split: str | None = None) -> "MiniImageNet | None":
        """The data set at another path; None if its lists are not there."""
        is_here = any((path / folder / "split").is_dir() for folder in _LIST_FOLDERS)
        return replace(self, path=path) if is_here else None

    def open(self, split: str) -> Split:
        """The split "train" or "test", or "validation" if it is held out; in the order of the
        lists.
        """
        known = ["train", "test"]
        if self.held_out_set:
            known.insert(1, "validation")
        hint = "Use held_out_set=True to make one." if split == "validation" else ""
        check_split(split, known, "Mini-ImageNet", hint=hint)
        root = Path(self.path).expanduser()
        folder = _list_folder(root)
        classes = _read_classes(folder / "class_name.txt")
        if split == "test":
            listing = self._read(folder, "clean_validation", _NUM_TEST)
            clean = listing.tensor()
            is_there = _locate_test(root, listing, partial=self.partial)
        else:
            color, noise = (self.color, float(self.noise)) if split == "train" else ("red", 0.0)
            listing = self._read_train(folder, color, noise)
            if self.held_out_set:
                held_out = self._held_out(folder)
                rows = []
                for row, name in enumerate(listing.names):
                    if (name in held_out) == (split == "validation"):
                        rows.append(row)
                listing = _select(listing, rows)
            # The list without noise says which synset has which class.
            pure = self._read_train(folder, color, 0.0)
            clean = _true_classes(listing, pure, folder / "split" / f"{color}_noise_nl_0.0")
            file = f"{color}_noise_nl_{noise}"
            is_there = _locate_train(root, listing, file, partial=self.partial)
        labels = Labels(given=listing.tensor(), clean=clean, classes=classes)
        return make_split(
            root, listing.names, labels, is_there=is_there, partial=self.partial, source=SOURCE
        )

    def _read(self, folder: Path, file: str, expected: int) -> Listing:
        path = folder / "split" / file
        listing = read_list(path, _NUM_CLASSES, source=SOURCE)
        counts = range(expected, expected + 1)
        check_count(path, len(listing.names), counts, partial=self.partial, source=SOURCE)
        return listing

    def _read_train(self, folder: Path, color: str, noise: float) -> Listing:
        expected = _NUM_RED[noise] if color == "red" else _NUM_BLUE
        return self._read(folder, f"{color}_noise_nl_{noise}", expected)

    def _held_out(self, folder: Path) -> frozenset[str]:
        clean, *noisy = (self._read_train(folder, "red", noise).names for noise in LEVELS)
        held_out = frozenset(clean).difference(*noisy)
        if not held_out:
            raise ValueError(
                "held_out_set must be False, because all images of "
                f"{folder / 'split' / 'red_noise_nl_0.0'} are in the lists with noise too."
            )
        return held_out


def _list_folder(root: Path) -> Path:
    for folder in _LIST_FOLDERS:
        if (root / folder / "split").is_dir():
            return root / folder
    looked = ", ".join(f"{folder}/split".lstrip("/") for folder in _LIST_FOLDERS)
    raise Missing(f"{root} must hold one of the folders {looked}; {SOURCE}")


def _read_classes(path: Path) -> tuple[str, ...]:
    classes = tuple(line for _, line in read_lines(path, SOURCE))
    if len(classes) != _NUM_CLASSES:
        raise ValueError(
            f"{path} has {len(classes)} classes, but the original has {_NUM_CLASSES}; {SOURCE}"
        )
    return classes


def _select(listing: Listing, rows: list[int]) -> Listing:
    names = [listing.names[row] for row in rows]
    return Listing(names, array("q", [listing.numbers[row] for row in rows]))


def _true_classes(listing: Listing, pure: Listing, path: Path) -> Tensor:
    """(N,) the class of the synset of each image, by the list without noise; −1 for images of the
    web.
    """
    classes: dict[str, int] = {}
    for name, number in zip(*pure, strict=True):
        if _SYNSET.match(name) and classes.setdefault(name[:9], number) != number:
            raise ValueError(
                f"{path} puts the synset {name[:9]!r} in the classes {classes[name[:9]]} and "
                f"{number}, but the original has no noise; {SOURCE}"
            )
    clean = []
    for name in listing.names:
        if _SYNSET.match(name) and name[:9] not in classes:
            raise ValueError(
                f"{path} has no image of the synset of {name!r}, so its class is unknown; {SOURCE}"
            )
        clean.append(classes.get(name[:9], -1))
    return torch.tensor(clean, dtype=torch.int64)


def _locate_train(root: Path, listing: Listing, file: str, *, partial: bool) -> bool:
    """Find the images of ImageNet and those of the web, which may be in different folders."""
    is_there = True
    of_imagenet: list[int] = []
    of_web: list[int] = []
    for row, name in enumerate(listing.names):
        rows = of_imagenet if _SYNSET.match(name) else of_web
        rows.append(row)
    for rows in (of_imagenet, of_web):
        part = _select(listing, rows)
        places = ["all_images/{name}"]
        if rows is of_web:
            places.append("noisy_images/{name}")
        places += [f"training/{file}/{{label}}/{{name}}", f"training/{file}/{{name}}"]
        templates = [folder + place for place in places for folder in _IMAGE_FOLDERS]
        is_there &= locate(root, part, templates, partial=partial)
        for row, name in zip(rows, part.names, strict=True):
            listing.names[row] = name
    return is_there


def _locate_test(root: Path, listing: Listing, *, partial: bool) -> bool:
    places = ("validation/{label}/{name}", "validation/{name}", "all_validation/{name}")
    templates = [folder + place for place in places for folder in _IMAGE_FOLDERS]
    return locate(root, listing, templates, partial=partial)
