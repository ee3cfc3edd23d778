"""WebVision 1.0 and its first fifty classes, the ImageNet validation images in the same classes, and lists of files.

A list has a line for each image, its path and the number of its class. The other large data sets of the paper come with
such lists too, and read them with the functions below; images are looked for only where the lists say that they are.
"""

import csv
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearsay.batch import DataInfo, Files, Labels, Split
from nearsay.data.images import is_image
from nearsay.errors import Missing, NoSplit

SOURCE = "info.tar and the resized images are on https://data.vision.ee.ethz.ch/cvl/webvision/download.html"
IMAGENET_SOURCE = "ILSVRC2012_img_val.tar is on https://image-net.org/download-images"
SYNSET_LABELS = "imagenet_2012_validation_synset_labels.txt"
_SYNSET_LABELS_SOURCE = f"https://raw.githubusercontent.com/tensorflow/models/master/research/slim/datasets/{SYNSET_LABELS}"
_NUM_CLASSES, _NUM_MINI = 1000, 50
_NUM_TRAIN = range(2_400_000, 2_500_000)  # the publication says 2.4 million
_NUM_MINI_TRAIN = 65_944
_PER_CLASS = 50  # validation images of a class, here and in ImageNet
_ODD_PATH = re.compile(
    r"(?:^|/)\.{0,2}(?:/|$)|[\\\0]"
)  # with a part that is empty, . or .., or none of a path
_SYNSET = re.compile("n[0-9]{8}")
_NUM_PROBES = 8


class Listing(NamedTuple):
    """The lines of a list."""

    names: list[str]
    numbers: "array[int]"  # of the classes

    def tensor(self) -> Tensor:
        """(N,) int64 the classes."""
        return torch.from_numpy(np.array(self.numbers, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class WebVision:
    """WebVision 1.0 (Li et al. 2017): 2.4 million images that Google and Flickr found for 1000 ImageNet classes.

    `path` is the folder that holds `info`, `google`, `flickr` and `val_images_256`. The published validation images,
    50 for each class and verified by people, are the split "test": results are reported on them, and the labels of the
    published test images are withheld. `partial=True` takes the images that are there, however many.
    """

    path: str | Path
    partial: bool = False

    def describe(self) -> DataInfo:
        """The published sizes; no file is read."""
        return DataInfo(_NUM_CLASSES, None, None)

    def at(self, path: Path, split: str | None = None) -> "WebVision | None":
        """The data set at another path; None if its lists are not there."""
        return replace(self, path=path) if _has_lists(path) else None

    def open(self, split: str) -> Split:
        """The split "train" or "test"; the true classes of train are unknown."""
        return _open(self.path, split, _NUM_CLASSES, partial=self.partial)


@dataclass(frozen=True, kw_only=True)
class MiniWebVision:
    """The first 50 classes of WebVision 1.0, of the images that Google found (Li et al. 2020): 65 944 and 2 500.

    `path`, the splits and `partial` are those of `WebVision`; Flickr's images are not needed.
    """

    path: str | Path
    partial: bool = False

    def describe(self) -> DataInfo:
        """The published sizes; no file is read."""
        return DataInfo(_NUM_MINI, None, None if self.partial else _NUM_MINI_TRAIN)

    def at(self, path: Path, split: str | None = None) -> "MiniWebVision | None":
        """The data set at another path; None if its lists are not there."""
        return replace(self, path=path) if _has_lists(path) else None

    def open(self, split: str) -> Split:
        """The split "train" or "test"; the true classes of train are unknown."""
        return _open(self.path, split, _NUM_MINI, partial=self.partial)


@dataclass(frozen=True, kw_only=True)
class ImageNetValidation:
    """The validation images of ILSVRC 2012 in the first `num_classes` classes of WebVision: a test split, no other.

    `path` holds `val`, or is it: with a folder for each synset, such as `val/n01440764/ILSVRC2012_val_00000293.JPEG`,
    or with all images side by side and the synset of each in `labels`. That is a file of one synset a line in the order
    of the images, or Kaggle's `LOC_val_solution.csv`; either is found if it lies in `path` or in `val`. `synsets` is
    WebVision's `info/synsets.txt`, or the folder of WebVision, and says which synset is which class.
    """

    path: str | Path
    synsets: str | Path
    num_classes: int = _NUM_CLASSES
    labels: str | Path | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if self.num_classes not in range(1, _NUM_CLASSES + 1) or isinstance(self.num_classes, bool):
            raise ValueError(
                f"num_classes={self.num_classes!r} must be a whole number from 1 to {_NUM_CLASSES}"
            )

    def describe(self) -> DataInfo:
        """Its classes; it has no training split."""
        return DataInfo(self.num_classes, None, None)

    def at(self, path: Path, split: str | None = None) -> "ImageNetValidation | None":
        """The validation images at another path; None if they are not there."""
        try:
            imagenet_images(path, self.labels)
        except ValueError:
            return None
        return replace(self, path=path)

    def open(self, split: str) -> Split:
        """The split "test", by class and then by name."""
        if split != "test":
            raise NoSplit(
                f"split={split!r} is not in the ImageNet validation images; they are test"
            )
        given_path = Path(self.synsets).expanduser()
        classes = read_classes(
            given_path if given_path.is_file() else info_folder(given_path) / "synsets.txt"
        )
        root = Path(self.path).expanduser()
        images = imagenet_images(root, self.labels)
        names, numbers = [], array("q")
        for number, title in enumerate(classes[: self.num_classes]):
            found = images.get(title[:9], [])
            if len(found) != _PER_CLASS and not self.partial:
                raise (ValueError if found else Missing)(
                    f"{root} has {len(found)} validation images of the class {title!r}, but the original has "
                    f"{_PER_CLASS}; {IMAGENET_SOURCE}, or set partial=True to use what is there"
                )
            names += found
            numbers.extend([number] * len(found))
        given = Listing(names, numbers).tensor()
        labels = Labels(given=given, clean=given.clone(), classes=classes[: self.num_classes])
        return make_split(root, names, labels, partial=self.partial, source=IMAGENET_SOURCE)


def imagenet_images(root: Path, labels: str | Path | None = None) -> dict[str, list[str]]:
    """The validation images of each synset, as sorted paths below the root."""
    below = next(
        (each for each in ("val/", "ILSVRC/Data/CLS-LOC/val/", "") if (root / each).is_dir()), None
    )
    if below is None:
        raise Missing(f"{root} is no folder; {IMAGENET_SOURCE}")
    entries = sorted(os.listdir(root / below))
    if folders := [
        entry for entry in entries if _SYNSET.fullmatch(entry) and (root / below / entry).is_dir()
    ]:
        return {
            each: [f"{below}{each}/{name}" for name in _image_names(root / below / each)]
            for each in folders
        }
    names = [entry for entry in entries if entry.startswith("ILSVRC2012_val_") and is_image(entry)]
    if not names:
        raise Missing(
            f"{root / below} has no folder like n01440764 and no image like ILSVRC2012_val_00000001.JPEG; "
            f"{IMAGENET_SOURCE}"
        )
    images: dict[str, list[str]] = {}
    for name, synset in zip(names, _imagenet_synsets(root, below, labels, names), strict=True):
        images.setdefault(synset, []).append(below + name)
    return images


def _image_names(folder: Path) -> list[str]:
    return sorted(filter(is_image, os.listdir(folder)))


def _imagenet_synsets(
    root: Path, below: str, labels: str | Path | None, names: list[str]
) -> list[str]:
    """The synset of each image, from a file that says it."""
    if labels is None:
        places = [
            root / each / file
            for each in ("", below)
            for file in (SYNSET_LABELS, "LOC_val_solution.csv")
        ]
    else:
        places = [Path(labels).expanduser()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise Missing(
            f"{root / below} has {len(names)} images side by side, but {places[0]} is not there to say their synsets; "
            f"it is {_SYNSET_LABELS_SOURCE}, and the numbers of ILSVRC2012_validation_ground_truth.txt do not serve"
        )
    if path.suffix == ".csv":
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                said = {row[0]: row[1][:9] for row in csv.reader(file) if len(row) == 2}
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(
                f"{path} is no table in UTF-8, so it is damaged; take {_SYNSET_LABELS_SOURCE}"
            ) from error
        synsets = [said.get(name.partition(".")[0], "") for name in names]
    else:
        lines = [line for _, line in read_lines(path, IMAGENET_SOURCE)]
        numbers = [
            int(digits) if (digits := name[15:23]).isdecimal() else 0 for name in names
        ]  # from 1
        synsets = [lines[number - 1] if 0 < number <= len(lines) else "" for number in numbers]
    for name, synset in zip(names, synsets, strict=True):
        if not _SYNSET.fullmatch(synset):
            raise ValueError(
                f"{path} says {synset!r} of {name}, but must say a synset like n01440764; take {_SYNSET_LABELS_SOURCE}"
            )
    return synsets


def _has_lists(root: Path) -> bool:
    return any((folder / "synsets.txt").is_file() for folder in (root / "info", root))


def info_folder(root: Path) -> Path:
    """Where the lists of WebVision are."""
    for folder in (root / "info", root):
        if (folder / "synsets.txt").is_file():
            return folder
    raise Missing(f"{root} has no info/synsets.txt; {SOURCE}")


def read_classes(path: Path) -> tuple[str, ...]:
    """A name for each class of WebVision: its synset, as two are called crane, and its first word."""
    classes = []
    for number, line in read_lines(path, SOURCE):
        synset, _, words = line.partition(" ")
        if not _SYNSET.fullmatch(synset) or not words:
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} must be like 'n01440764 tench, Tinca tinca'; {SOURCE}"
            )
        classes.append(f"{synset} {words.partition(',')[0].strip()}")
    if len(classes) != _NUM_CLASSES:
        raise ValueError(
            f"{path} has {len(classes)} classes, but the original has {_NUM_CLASSES}; {SOURCE}"
        )
    return tuple(classes)


def _open(path: str | Path, split: str, num_classes: int, *, partial: bool) -> Split:
    if split not in ("train", "test"):
        raise NoSplit(f"split={split!r} is not in WebVision; it has train and test")
    root = Path(path).expanduser()
    info = info_folder(root)
    classes = read_classes(info / "synsets.txt")[:num_classes]
    parts, expected = _parts(split, num_classes)
    listings = [
        read_list(info / file, _NUM_CLASSES, wanted=num_classes, source=SOURCE) for file in parts
    ]
    num_images = sum(len(listing.names) for listing in listings)
    check_count(info / " and ".join(parts), num_images, expected, partial=partial, source=SOURCE)
    whole, is_there = Listing([], array("q")), True
    for listing, templates in zip(listings, parts.values(), strict=True):
        is_there &= locate(root, listing, templates, partial=partial)
        whole.names.extend(listing.names)
        whole.numbers.extend(listing.numbers)
    given = whole.tensor()
    labels = Labels(given=given, clean=given.clone() if split == "test" else None, classes=classes)
    return make_split(root, whole.names, labels, is_there=is_there, partial=partial, source=SOURCE)


def _parts(split: str, num_classes: int) -> tuple[dict[str, tuple[str, ...]], range]:
    """The lists of a split, with where their images may be, and how many images they must have together."""
    is_mini = num_classes != _NUM_CLASSES
    if split == "test":
        templates = ("val_images_256/{name}", "val_images/{name}", "val/{name}", "{name}")
        return {"val_filelist.txt": templates}, range(
            _PER_CLASS * num_classes, _PER_CLASS * num_classes + 1
        )
    parts: dict[str, tuple[str, ...]] = {
        f"train_filelist_{engine}.txt": ("{name}", f"{engine}_resized_256/{{name}}", "train/{name}")
        for engine in (("google",) if is_mini else ("google", "flickr"))
    }
    return parts, range(_NUM_MINI_TRAIN, _NUM_MINI_TRAIN + 1) if is_mini else _NUM_TRAIN


def read_lines(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """The number, from 1, and the text of each line that is not blank."""
    if not path.is_file():
        raise Missing(f"{path} is not there; {source}")
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if stripped := line.strip():
                    yield number, stripped
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8, so it is damaged; {source}") from error


def read_list(path: Path, num_classes: int, *, wanted: int | None = None, source: str) -> Listing:
    """Paths with the numbers of their classes, of the first `wanted` ones; ValueError names a line that is wrong."""
    known = {str(number): number for number in range(num_classes)}
    limit = num_classes if wanted is None else wanted
    names, numbers = [], array("q")
    for line_number, line in read_lines(path, source):
        name, *rest = line.rsplit(None, 1)
        number = known.get(rest[0]) if rest else None
        if number is None:
            raise ValueError(
                f"{path}, line {line_number}: {line[:80]!r} must be a path and a class from 0 to {num_classes - 1}; "
                f"{source}"
            )
        if number < limit:
            check_path(path, line_number, name)
            names.append(name)
            numbers.append(number)
    return Listing(names, numbers)


def check_path(path: Path, line_number: int, name: str) -> None:
    """Refuse a path in a list that could lead out of the folder of the data."""
    if _ODD_PATH.search(name):
        raise ValueError(
            f"{path}, line {line_number}: path {name[:80]!r} must lead down from the folder of the data"
        )


def check_count(path: Path, found: int, expected: range, *, partial: bool, source: str) -> None:
    """Refuse a list that is not as long as the published one, unless a part of it is wanted."""
    if found not in expected and not (partial and found):
        few, most = expected[0], expected[-1]
        raise ValueError(
            f"{path} should list {few if few == most else f'{few} to {most}'} images, not {found}; {source}"
            + (", or set partial=True to use what is there" if found else "")
        )


def locate(root: Path, listing: Listing, templates: Sequence[str], *, partial: bool) -> bool:
    """Turn the names of a listing into paths below the root, by the template that fits best; False if it does not fit.

    A template has a place for `{name}` and if wanted for `{label}`. Only a few images are looked for, as a file system
    may take hours for millions, unless those few are not there and `partial` says that others may be.
    """
    names, numbers = listing
    probes = (
        sorted({round(place) for place in np.linspace(0, len(names) - 1, _NUM_PROBES)})
        if names
        else []
    )

    def paths(template: str, rows: Sequence[int]) -> list[str]:
        return [template.format(name=names[row], label=numbers[row]) for row in rows]

    def num_found(template: str) -> int:
        return sum(os.path.lexists(root / path) for path in paths(template, probes))

    best = max(templates, key=num_found)
    is_there = num_found(best) == len(probes)
    if partial and not num_found(best):
        best = max(
            templates,
            key=lambda template: int(present(root, paths(template, range(len(names)))).sum()),
        )
    if best != "{name}":
        for row, name in enumerate(
            names
        ):  # in place: a second copy of millions of names is hundreds of megabytes
            names[row] = best.format(name=name, label=numbers[row])
    return is_there


def present(root: Path, names: Sequence[str]) -> NDArray[np.bool_]:
    """(N,) which of the files are there; each folder is read once."""
    folders: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
    for row, name in enumerate(names):
        folders[name.rpartition("/")[0]].append(row)
    found = np.zeros(len(names), dtype=np.bool_)
    for folder, rows in folders.items():
        try:
            there = set(os.listdir(root / folder))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for row in rows:
            found[row] = names[row].rpartition("/")[2] in there
    return found


def missing_images(
    root: Path, names: Sequence[str], found: NDArray[np.bool_], source: str
) -> Missing:
    """What to say of images that are not there: how many, and the first three."""
    missing = np.flatnonzero(~found)
    first = ", ".join(names[row] for row in missing[:3].tolist())
    are = "is" if len(missing) == 1 else "are"
    message = (
        f"{len(missing)} of {len(names)} images {are} not in {root}, such as {first}; {source}"
    )
    if not names:
        message = f"{root} has none of the images that are wanted; {source}"
    return Missing(message, found=len(names) - len(missing), expected=len(names))


def make_split(
    root: Path,
    names: list[str],
    labels: Labels,
    *,
    is_there: bool = True,
    partial: bool,
    source: str,
) -> Split:
    """Images and labels, with `partial` of the images that are there; Missing if they are not (`is_there`, or none)."""
    if partial or not is_there:
        found = present(root, names)
        if not partial or not found.any():
            raise missing_images(root, names, found, source)
        rows = torch.from_numpy(np.flatnonzero(found))
        names = [names[row] for row in rows.tolist()]
        clean = None if labels.clean is None else labels.clean[rows]
        labels = Labels(given=labels.given[rows], clean=clean, classes=labels.classes)
    return Split(Files(root, tuple(names)), labels)
