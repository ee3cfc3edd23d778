"""Images in folders named after their classes, with or without folders for the splits around them."""

import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay import rng
from nearsay.batch import DataInfo, Files, Labels, Split
from nearsay.data.images import is_image
from nearsay.errors import NoSplit

SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
"""Folders that are splits rather than classes, in lower case."""


class Scan(NamedTuple):
    """What was found of one split."""

    names: tuple[str, ...]  # below the root, by class and then by path
    labels: tuple[int, ...]  # the number of the class of each name
    classes: tuple[str, ...]
    num_skipped: int  # files that are hidden, no images, or in no class


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Images as `path/CLASS/*.jpg`, or as `path/train/CLASS/*.jpg` with folders `val` and `test` beside `train`.

    Where there is no `val`, `validation` is the share of each class that is held out of train, drawn by `seed`.
    """

    path: str | Path
    validation: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.validation is not None and not 0 < self.validation < 1:
            raise ValueError(
                f"validation={self.validation!r} must be a share between 0 and 1, or None for no split"
            )

    def describe(self) -> DataInfo:
        """Its classes and how many images they have, by the names of folders and files."""
        scan = self.scan("train")
        return DataInfo(len(scan.classes), None, len(scan.names))

    def at(self, path: Path, split: str | None = None) -> "Folder | None":
        """The folder at another path with its own splits; None if it is a file."""
        return Folder(path=path) if path.is_dir() else None

    def open(self, split: str) -> Split:
        """The images as files, and their labels; ValueError if there is no such split or something is out of place."""
        found = self.scan(split)
        labels = Labels(given=torch.tensor(found.labels), clean=None, classes=found.classes)
        return Split(Files(Path(self.path).expanduser(), found.names), labels)

    def scan(self, split: str) -> Scan:
        """What `open` gives, and how many files were skipped."""
        root = Path(self.path).expanduser()
        if not root.is_dir():
            table = (
                "; a table of images is read by nearsay train manifest" if root.is_file() else ""
            )
            raise ValueError(
                f"path={str(self.path)!r} is no folder; give the one that holds the classes{table}"
            )
        reader = _Reader(root)
        folders = _split_folders(reader)
        is_drawn = (
            self.validation is not None and "train" in folders and "validation" not in folders
        )
        known = [*folders, *(["validation"] if is_drawn else [])]
        if split not in known:
            raise NoSplit(f"split={split!r} is not in {root}; it has {' and '.join(known)}")
        is_drawn = is_drawn and split in ("train", "validation")
        classes = _classes(reader, folders)
        reader.num_skipped = 0
        names, counts = _images(reader, folders["train" if is_drawn else split], classes)
        labels = [number for number, count in enumerate(counts) for _ in range(count)]
        if is_drawn:
            is_held = _draw(counts, self.validation or 0.0, self.seed)
            chosen = (is_held == (split == "validation")).nonzero().flatten().tolist()
            names, labels = [names[place] for place in chosen], [labels[place] for place in chosen]
            if not names:
                raise ValueError(
                    f"validation={self.validation!r} finds no class with two images; leave it out"
                )
        return Scan(tuple(names), tuple(labels), classes, reader.num_skipped)


class _Reader:
    """Looks into folders below a root and never outside it."""

    def __init__(self, root: Path) -> None:
        self.root, self.num_skipped = root, 0
        self._inside = os.path.join(os.path.realpath(root), "")

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder, sorted; its files are skipped."""
        found = []
        for entry in self._entries(folder):
            if entry.is_dir(follow_symlinks=False):
                found.append(entry.name)
            else:
                self.num_skipped += 1
        return sorted(found)

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
        if not os.path.lexists(target):
            return  # it leads nowhere, so it is an image that cannot be decoded, and treated as such
        if not target.startswith(self._inside):
            raise ValueError(
                f"{entry.path!r} is a link to {target!r}, outside of {str(self.root)!r}; copy it there"
            )
        if os.path.isdir(target):
            raise ValueError(f"{entry.path!r} is a link to a folder; put the folder itself there")
        parts = target[len(self._inside) :].split(os.sep)
        if os.path.exists(target) and not any(part.startswith(".") for part in parts):
            raise ValueError(
                f"{entry.path!r} is a link to {target!r}, which would count twice; remove one of them"
            )


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path!r} has a name that is no UTF-8; rename it") from error


def _split_folders(reader: _Reader) -> dict[str, str]:
    """The folder of each split, below the root; "" is the root itself, where there are no folders for splits."""
    names = reader.folders("")
    splits = [name for name in names if name.lower() in SPLITS]
    others = [name for name in names if name.lower() not in SPLITS]
    if others and not any(reader.folders(name) for name in splits):
        return {"train": ""}  # also where a class is called train, as in CIFAR-100
    if others:
        raise ValueError(
            f"{reader.root} holds {others[0]!r} beside {splits[0]!r}, which is a split; the splits are train, val or "
            f"validation, and test, so rename it or move it away, or give {str(reader.root / splits[0])!r} as path"
        )
    folders: dict[str, str] = {}
    for name in splits:
        split = SPLITS[name.lower()]
        if split in folders:
            raise ValueError(
                f"{reader.root} holds {folders[split]!r} and {name!r}, both for {split}; keep one of them"
            )
        folders[split] = name
    return folders or {"train": ""}


def _classes(reader: _Reader, folders: dict[str, str]) -> tuple[str, ...]:
    found = {split: reader.folders(folder) for split, folder in folders.items()}
    everywhere = {name for names in found.values() for name in names}
    known = set(found.get("train", everywhere))
    for split, names in found.items():
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"class {unknown[0]!r} is in {folders[split]!r} but not in {folders['train']!r}, where it would "
                "have to be learned; add it there, or remove it"
            )
    written: dict[str, str] = {}  # as it looks -> as it is
    for name in sorted(known):
        if (other := written.setdefault(unicodedata.normalize("NFC", name), name)) != name:
            raise ValueError(
                f"classes {other!a} and {name!a} look the same; put their images into one folder"
            )
    return tuple(sorted(known))


def _images(reader: _Reader, folder: str, classes: tuple[str, ...]) -> tuple[list[str], list[int]]:
    """The images of a split by class and then by path, and how many each class has."""
    names: list[str] = []
    counts = []
    present = set(reader.folders(folder))
    for name in classes:
        below = (
            sorted(reader.images(f"{folder}/{name}" if folder else name)) if name in present else []
        )
        if name in present and not below:
            where = str(reader.root / folder / name)
            if any(Path(where).rglob(".lock")):
                raise ValueError(
                    f"{where!r} is for runs, but here every folder is a class; choose another with --out"
                )
            raise ValueError(
                f"{where!r} is a class without images; fill it or remove it\n{_layout(reader)}"
            )
        names += below
        counts.append(len(below))
    if (
        len(classes) == 1
        and len(inner := {name.split("/")[-2] for name in names}) > 1
        and classes[0] not in inner
    ):
        where = str(reader.root / folder / classes[0])
        raise ValueError(
            f"{where!r} would be the only class, though it holds {len(inner)} folders of images; if these are the "
            f"classes, give path={where}"
        )
    if not names:
        where = str(reader.root / folder)
        raise ValueError(f"{where!r} holds no folder of a class with images\n{_layout(reader)}")
    return names, counts


def _layout(reader: _Reader) -> str:
    return (
        f"found: {reader.num_skipped} files that are hidden, no images, or in no class; expected:\n"
        f"  {reader.root}/CLASS/image.jpg\n"
        f"  {reader.root}/train/CLASS/image.jpg, with val and test beside train\n"
        "or, where a table says which image is what: nearsay train manifest path=TABLE.csv"
    )


def _draw(counts: list[int], share: float, seed: int) -> Tensor:
    """(N,) bool: who is held out: of each class that share, but at least one and not all."""
    is_held = torch.zeros(sum(counts), dtype=torch.bool)
    start = 0
    for count in counts:
        members = torch.arange(start, start + count)
        num_held = min(max(round(share * count), 1), count - 1) if count else 0
        is_held[members[rng.shuffle(seed, "held out", 0, members)][:num_held]] = True
        start += count
    return is_held
