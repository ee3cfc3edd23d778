"""Clothing1M from its published folder: a million web images with labels from the text around them.

Noisy and verified labels are in two files of pairs; four other files list the images of each part.
"""

from array import array
from dataclasses import dataclass, replace
from pathlib import Path

from nearsay.batch import DataInfo, Labels, Split
from nearsay.data.webvision import (
    Listing,
    check_count,
    check_path,
    locate,
    make_split,
    read_lines,
    read_list,
)
from nearsay.errors import Missing
from nearsay.validation import check_split

SOURCE = "https://github.com/Cysu/noisy_label tells how to ask its authors for it"
_NUM_CLASSES = 14
_CLASS_NAMES = "category_names_eng.txt"
_PARTS = {
    "train": ("noisy_train", 1_000_000),
    "validation": ("clean_val", 14_313),
    "test": ("clean_test", 10_526),
}


@dataclass(frozen=True, kw_only=True)
class Clothing1M:
    """Clothing1M (Xiao et al. 2015): 1 000 000, 14 313 and 10 526 images of clothes in 14 classes.

    The training split is the noisy part, with unknown true classes. Validation and test were
    verified by people; the 47 570 verified training images are not used.

    Args:
        path: The folder with the images in `images`, and with `noisy_label_kv.txt` and the other
            lists, or these in `annotations`.
        partial: True uses the images that exist, however many; False refuses if one is missing.

    >>> from nearsay.data import describe
    >>> describe(Clothing1M(path="clothing")).num_classes
    14
    """

    path: str | Path
    partial: bool = False

    def describe(self) -> DataInfo:
        """The published sizes; no file is read."""
        return DataInfo(_NUM_CLASSES, None, None if self.partial else _PARTS["train"][1])

    def at(self, path: Path, split: str | None = None) -> "Clothing1M | None":
        """The data set at another path; None if its lists are not there."""
        is_here = any((path / folder / _CLASS_NAMES).is_file() for folder in ("", "annotations"))
        return replace(self, path=path) if is_here else None

    def open(self, split: str) -> Split:
        """The split "train", "validation" or "test", in the order of its list."""
        check_split(split, _PARTS, "Clothing1M")
        part, expected = _PARTS[split]
        root = Path(self.path).expanduser()
        folder = _list_folder(root)
        classes = _read_classes(folder / _CLASS_NAMES)
        keys = folder / f"{part}_key_list.txt"
        listing = _read(keys, folder / f"{part.partition('_')[0]}_label_kv.txt")
        counts = range(expected, expected + 1)
        check_count(keys, len(listing.names), counts, partial=self.partial, source=SOURCE)
        is_there = locate(root, listing, ("images/{name}", "{name}"), partial=self.partial)
        given = listing.tensor()
        clean = None if split == "train" else given.clone()
        labels = Labels(given=given, clean=clean, classes=classes)
        return make_split(
            root, listing.names, labels, is_there=is_there, partial=self.partial, source=SOURCE
        )


def _list_folder(root: Path) -> Path:
    for folder in (root, root / "annotations"):
        if (folder / _CLASS_NAMES).is_file():
            return folder
    raise Missing(
        f"{root} has no category_names_eng.txt and no annotations/category_names_eng.txt; {SOURCE}"
    )


def _read_classes(path: Path) -> tuple[str, ...]:
    classes = tuple(line for _, line in read_lines(path, SOURCE))
    if len(classes) != _NUM_CLASSES:
        raise ValueError(
            f"{path} has {len(classes)} classes, but the original has {_NUM_CLASSES}; {SOURCE}"
        )
    return classes


def _read(keys: Path, pairs: Path) -> Listing:
    """The images of a part with their labels; the folder `images` is cut off their names."""
    known = dict(zip(*read_list(pairs, _NUM_CLASSES, source=SOURCE), strict=True))
    names, numbers = [], array("q")
    for line_number, name in read_lines(keys, SOURCE):
        check_path(keys, line_number, name)
        if name not in known:
            raise ValueError(
                f"{keys}, line {line_number}: {name[:80]!r} has no label in {pairs}; {SOURCE}"
            )
        names.append(name.removeprefix("images/"))
        numbers.append(known[name])
    return Listing(names, numbers)
