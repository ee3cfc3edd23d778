"""Images in folders named after their classes, perhaps inside folders for the splits."""

import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay import rng
from nearsay.batch import DataInfo, Files, Labels, Split
from nearsay.data.images import is_image
from nearsay.validation import check_split, check_that

SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
"""Folders that are splits rather than classes, in lower case."""


class Scan(NamedTuple):
    """The images of one split.

    Attributes:
        names: Paths below the root, by class and then by path.
        labels: The class number of each name.
        classes: The names of the classes.
        num_skipped: How many files are hidden, not images, or not in a class.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    num_skipped: int


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Images as `path/CLASS/*.jpg`, or as `path/train/CLASS/*.jpg` with `val` and `test` next to
    `train`.

    Args:
        path: The folder.
        validation: Share of each class to hold out of train if there is no folder `val`; None holds
            none out.
        seed: Of the choice of held-out images.

    >>> Folder(path="photos", validation=0.1).seed
    0
    """

    path: str | Path
    validation: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        is_right = self.validation is None or 0 < self.validation < 1
        check_that(is_right, "validation", "between 0 and 1, or None", self.validation)

    def describe(self) -> DataInfo:
        """Its classes and how many images they have, by the names of folders and files."""
        scan = self.scan("train")
        return DataInfo(len(scan.classes), None, len(scan.names))

    def at(self, path: Path, split: str | None = None) -> "Folder | None":
        """The folder at another path with its own splits; None if it is a file."""
        return Folder(path=path) if path.is_dir() else None

    def open(self, split: str) -> Split:
        """The images as files, and their labels."""
        scan = self.scan(split)
        labels = Labels(given=torch.tensor(scan.labels), clean=None, classes=scan.classes)
        return Split(Files(Path(self.path).expanduser(), scan.names), labels)

    def scan(self, split: str) -> Scan:
        """What `open` gives, and how many files were skipped."""
        root = Path(self.path).expanduser()
        hint = "Use nearsay train manifest for a table of images." if root.is_file() else ""
        check_that(root.is_dir(), "path", "a folder of classes", str(self.path), hint=hint)
        reader = _Reader(root)
        folders = _split_folders(reader)
        known = list(folders)
        is_drawn = False
        if self.validation is not None and "train" in folders and "validation" not in folders:
            known.append("validation")
            is_drawn = split in ("train", "validation")
        check_split(split, known, root)
        classes = _classes(reader, folders)
        reader.num_skipped = 0
        names, counts = _images(reader, folders["train" if is_drawn else split], classes)
        labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).tolist()
        if is_drawn:
            is_held = _draw(counts, self.validation or 0.0, self.seed)
            chosen = (is_held == (split == "validation")).tolist()
            names, labels = list(compress(names, chosen)), list(compress(labels, chosen))
            condition = "None, because no class has two images"
            check_that(bool(names), "validation", condition, self.validation)
        return Scan(tuple(names), tuple(labels), classes, reader.num_skipped)


class _Reader:
    """Lists folders below a root and never outside it."""

    def __init__(self, root: Path) -> None:
        self.root, self.num_skipped = root, 0
        self._inside = os.path.join(os.path.realpath(root), "")

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder, sorted; its files are skipped."""
        names = []
        for entry in self._entries(folder):
            if entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
            else:
                self.num_skipped += 1
        return sorted(names)

    def images(self, folder: str) -> Iterator[str]:
        """The images in a folder and the folders in it, as paths below the root."""
        pending = [folder]
        while pending:
            below = pending.pop()
            for entry in self._entries(below):
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{below}/{entry.name}")
                elif is_image(entry.name):
                    yield f"{below}/{entry.name}"
                else:
                    self.num_skipped += 1

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    self.num_skipped += 1
                    continue
                if not entry.name.isascii():
                    _check_name(entry.path)
                if entry.is_symlink() and (is_image(entry.name) or os.path.isdir(entry.path)):
                    self._check_link(entry)
                yield entry

    def _check_link(self, entry: os.DirEntry[str]) -> None:
        target = os.path.realpath(entry.path)
        # A link to nothing is an image that cannot be decoded, and is treated like one.
        if not os.path.lexists(target):
            return
        if not target.startswith(self._inside):
            raise ValueError(
                f"{entry.path!r} is a link to {target!r}, outside of {str(self.root)!r}. "
                "Copy it there."
            )
        if os.path.isdir(target):
            raise ValueError(f"{entry.path!r} is a link to a folder. Move the folder there.")
        parts = target[len(self._inside) :].split(os.sep)
        if os.path.exists(target) and not any(part.startswith(".") for part in parts):
            raise ValueError(
                f"{entry.path!r} is a link to {target!r}, which would count twice. Remove one."
            )


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path!r} must have a UTF-8 name. Rename it.") from error


def _split_folders(reader: _Reader) -> dict[str, str]:
    """The folder of each split, below the root; without such folders the root is train."""
    splits: list[str] = []
    others: list[str] = []
    for name in reader.folders(""):
        names = splits if name.lower() in SPLITS else others
        names.append(name)
    # A class may be called train, as in CIFAR-100.
    if others and not any(reader.folders(name) for name in splits):
        return {"train": ""}
    if others:
        raise ValueError(
            f"{reader.root} must hold either splits or classes, got the split {splits[0]!r} and "
            f"{others[0]!r}. Move {others[0]!r} away, or use path={str(reader.root / splits[0])!r}."
        )
    folders: dict[str, str] = {}
    for name in splits:
        split = SPLITS[name.lower()]
        if split in folders:
            raise ValueError(
                f"{reader.root} must hold one folder for {split}, got {folders[split]!r} "
                f"and {name!r}."
            )
        folders[split] = name
    return folders or {"train": ""}


def _classes(reader: _Reader, folders: dict[str, str]) -> tuple[str, ...]:
    in_split = {split: reader.folders(folder) for split, folder in folders.items()}
    known = set().union(*in_split.values())
    if "train" in in_split:
        known = set(in_split["train"])
    for split, names in in_split.items():
        for name in names:
            if name not in known:
                raise ValueError(
                    f"class {name!r} of {folders[split]!r} must be in {folders['train']!r} too, "
                    "where it is learned."
                )
    # Two spellings in Unicode may look the same.
    written: dict[str, str] = {}
    for name in sorted(known):
        if (other := written.setdefault(unicodedata.normalize("NFC", name), name)) != name:
            raise ValueError(
                f"classes {other!a} and {name!a} look the same. Move their images into one folder."
            )
    return tuple(sorted(known))


def _images(reader: _Reader, folder: str, classes: tuple[str, ...]) -> tuple[list[str], list[int]]:
    """The images of a split by class and then by path, and how many each class has."""
    names: list[str] = []
    counts = []
    present = set(reader.folders(folder))
    for name in classes:
        below = []
        if name in present:
            below = sorted(reader.images(f"{folder}/{name}" if folder else name))
            if not below:
                _refuse_empty(reader, reader.root / folder / name)
        names += below
        counts.append(len(below))
    inner = {name.split("/")[-2] for name in names}
    if len(classes) == 1 and len(inner) > 1 and classes[0] not in inner:
        where = str(reader.root / folder / classes[0])
        raise ValueError(
            f"{where!r} would be the only class, but it holds {len(inner)} folders of images. "
            f"If these are the classes, use path={where}"
        )
    if not names:
        where = str(reader.root / folder)
        raise ValueError(f"{where!r} must hold a folder of images per class\n{_layout(reader)}")
    return names, counts


def _refuse_empty(reader: _Reader, folder: Path) -> None:
    if any(folder.rglob(".lock")):
        raise ValueError(
            f"{str(folder)!r} is for runs, but here every folder is a class. Use another --out."
        )
    raise ValueError(f"{str(folder)!r} is a class without images\n{_layout(reader)}")


def _layout(reader: _Reader) -> str:
    return (
        f"found: {reader.num_skipped} files that are hidden, not images, or not in a class; "
        "expected:\n"
        f"  {reader.root}/CLASS/image.jpg\n"
        f"  {reader.root}/train/CLASS/image.jpg, with val and test next to train\n"
        "or, with a table of paths and labels: nearsay train manifest path=TABLE.csv"
    )


def _draw(counts: list[int], share: float, seed: int) -> Tensor:
    """(N,) bool: the held-out images: that share of each class, but at least one and not all."""
    is_held = torch.zeros(sum(counts), dtype=torch.bool)
    start = 0
    for count in counts:
        members = torch.arange(start, start + count)
        num_held = min(max(round(share * count), 1), count - 1) if count else 0
        is_held[members[rng.shuffle(seed, "held out", 0, members)][:num_held]] = True
        start += count
    return is_held
