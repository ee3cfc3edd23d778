"""WebVision 1.0, its first fifty classes, the ImageNet validation images, and lists of image files.

A list has a line for each image: its path and the number of its class. Other large data sets have
such lists too and read them with the functions below. Images are looked for only where the lists
say.
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
from nearsay.errors import Missing
from nearsay.validation import check_split, check_that, check_whole, reading

_PAGE = "https://data.vision.ee.ethz.ch/cvl/webvision/download.html"
SOURCE = f"info.tar and the resized images are on {_PAGE}"
IMAGENET_SOURCE = "ILSVRC2012_img_val.tar is on https://image-net.org/download-images"
SYNSET_LABELS = "imagenet_2012_validation_synset_labels.txt"
_SLIM = "https://raw.githubusercontent.com/tensorflow/models/master/research/slim"
_SYNSET_LABELS_SOURCE = f"{_SLIM}/datasets/{SYNSET_LABELS}"
_NUM_CLASSES, _NUM_MINI = 1000, 50
# The publication says 2.4 million.
_NUM_TRAIN = range(2_400_000, 2_500_000)
_NUM_MINI_TRAIN = 65_944
# Validation images of a class, here and in ImageNet.
_PER_CLASS = 50
# A path with a part that is empty, . or .., or with a character that paths do not have.
_ODD_PATH = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|[\\\0]")
_SYNSET = re.compile("n[0-9]{8}")
_NUM_PROBES = 8


class Listing(NamedTuple):
    """The lines of a list.

    Attributes:
        names: Paths of images.
        numbers: Their class numbers.
    """

    names: list[str]
    numbers: "array[int]"

    def tensor(self) -> Tensor:
        """(N,) int64 the classes."""
        return torch.from_numpy(np.array(self.numbers, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class WebVision:
    """WebVision 1.0 (Li et al. 2017): 2.4 million images from web searches for 1000 ImageNet
    classes.

    The published validation images, 50 for each class and verified by people, are the split "test",
    because results are reported on them and the labels of the published test images are withheld.

    Args:
        path: The folder that holds `info`, `google`, `flickr` and `val_images_256`.
        partial: True uses the images that exist, however many; False refuses if one is missing.

    >>> from nearsay.data import describe
    >>> describe(WebVision(path="webvision")).num_classes
    1000
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
    """The first 50 classes of WebVision 1.0, images of Google only (Li et al. 2020): 65 944 and 2
    500.

    Args:
        path: As in `WebVision`; Flickr's images are not needed.
        partial: As in `WebVision`.

    >>> from nearsay.data import describe
    >>> describe(MiniWebVision(path="webvision")).num_examples
    65944
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
    """The validation images of ILSVRC 2012 in the first classes of WebVision: only a test split.

    Args:
        path: The folder that holds `val`, or `val` itself: with a folder for each synset, such as
            `val/n01440764/ILSVRC2012_val_00000293.JPEG`, or with all images in one folder.
        synsets: WebVision's `info/synsets.txt`, or the folder of WebVision; it says which synset is
            which class.
        num_classes: How many classes to keep, from 1 to 1000.
        labels: The synset of each image, if all are in one folder: a file with one synset a line in
            the order of the images, or Kaggle's `LOC_val_solution.csv`. None looks in `path` and
            `val`.
        partial: True uses the images that exist, however many; False refuses if one is missing.

    >>> from nearsay.data import describe
    >>> describe(ImageNetValidation(path="val", synsets="webvision", num_classes=50)).num_classes
    50
    """

    path: str | Path
    synsets: str | Path
    num_classes: int = _NUM_CLASSES
    labels: str | Path | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        check_whole("num_classes", self.num_classes, 1, _NUM_CLASSES)

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
        check_split(split, ("test",), "the ImageNet validation images")
        synsets = Path(self.synsets).expanduser()
        if not synsets.is_file():
            synsets = info_folder(synsets) / "synsets.txt"
        classes = read_classes(synsets)
        root = Path(self.path).expanduser()
        images = imagenet_images(root, self.labels)
        names, numbers = [], array("q")
        for number, title in enumerate(classes[: self.num_classes]):
            of_class = images.get(title[:9], [])
            if len(of_class) != _PER_CLASS and not self.partial:
                raise (ValueError if of_class else Missing)(
                    f"{root} has {len(of_class)} validation images of the class {title!r}, but the "
                    f"original has {_PER_CLASS}; {IMAGENET_SOURCE}, or set partial=True"
                )
            names += of_class
            numbers.extend([number] * len(of_class))
        given = Listing(names, numbers).tensor()
        labels = Labels(given=given, clean=given.clone(), classes=classes[: self.num_classes])
        return make_split(root, names, labels, partial=self.partial, source=IMAGENET_SOURCE)


def imagenet_images(root: Path, labels: str | Path | None = None) -> dict[str, list[str]]:
    """The validation images of each synset, as sorted paths below the root."""
    if not root.is_dir():
        raise Missing(f"{root} is not a folder; {IMAGENET_SOURCE}")
    below = ""
    for folder in ("ILSVRC/Data/CLS-LOC/val/", "val/"):
        if (root / folder).is_dir():
            below = folder
    images: dict[str, list[str]] = {}
    names = []
    for entry in sorted(os.listdir(root / below)):
        if _SYNSET.fullmatch(entry) and (root / below / entry).is_dir():
            files = sorted(filter(is_image, os.listdir(root / below / entry)))
            images[entry] = [f"{below}{entry}/{name}" for name in files]
        elif entry.startswith("ILSVRC2012_val_") and is_image(entry):
            names.append(entry)
    if images:
        return images
    if not names:
        raise Missing(
            f"{root / below} has no folder like n01440764 and no image like "
            f"ILSVRC2012_val_00000001.JPEG; {IMAGENET_SOURCE}"
        )
    for name, synset in zip(names, _imagenet_synsets(root, below, labels, names), strict=True):
        images.setdefault(synset, []).append(below + name)
    return images


def _imagenet_synsets(
    root: Path, below: str, labels: str | Path | None, names: list[str]
) -> list[str]:
    """The synset of each image, from the file that lists them."""
    places = [root / SYNSET_LABELS, root / "LOC_val_solution.csv"]
    places += [root / below / place.name for place in places]
    if labels is not None:
        places = [Path(labels).expanduser()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        # ILSVRC2012_validation_ground_truth.txt does not serve, because its numbers are others.
        raise Missing(
            f"{root / below} has {len(names)} images in one folder, but {places[0]} with their "
            f"synsets does not exist; it is {_SYNSET_LABELS_SOURCE}"
        )
    hint = f"Use {_SYNSET_LABELS_SOURCE}"
    by_name: dict[str, str] = {}
    if path.suffix == ".csv":
        with (
            reading(path, UnicodeDecodeError, csv.Error, hint=hint),
            path.open(encoding="utf-8-sig", newline="") as file,
        ):
            by_name = {row[0]: row[1][:9] for row in csv.reader(file) if len(row) == 2}
    else:
        # Line n is the image with the number n in its name.
        for number, (_, line) in enumerate(read_lines(path, IMAGENET_SOURCE), start=1):
            by_name[f"ILSVRC2012_val_{number:08d}"] = line
    synsets = [by_name.get(name.partition(".")[0], "") for name in names]
    for name, synset in zip(names, synsets, strict=True):
        is_synset = _SYNSET.fullmatch(synset) is not None
        check_that(is_synset, f"{name} in {path}", "a synset like n01440764", synset, hint=hint)
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
    """The name of each class: its synset, because two are called crane, and its first word."""
    classes = []
    for number, line in read_lines(path, SOURCE):
        synset, _, words = line.partition(" ")
        if not _SYNSET.fullmatch(synset) or not words:
            raise ValueError(
                f"{path}, line {number} must be like 'n01440764 tench, Tinca tinca', got "
                f"{line[:80]!r}; {SOURCE}"
            )
        classes.append(f"{synset} {words.partition(',')[0].strip()}")
    if len(classes) != _NUM_CLASSES:
        raise ValueError(
            f"{path} has {len(classes)} classes, but the original has {_NUM_CLASSES}; {SOURCE}"
        )
    return tuple(classes)


def _open(path: str | Path, split: str, num_classes: int, *, partial: bool) -> Split:
    check_split(split, ("train", "test"), "WebVision")
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
    """The lists of a split with the places of their images, and how many images they have."""
    is_mini = num_classes != _NUM_CLASSES
    if split == "test":
        templates = ("val_images_256/{name}", "val_images/{name}", "val/{name}", "{name}")
        num_images = _PER_CLASS * num_classes
        return {"val_filelist.txt": templates}, range(num_images, num_images + 1)
    parts: dict[str, tuple[str, ...]] = {}
    for engine in ("google",) if is_mini else ("google", "flickr"):
        resized = f"{engine}_resized_256/{{name}}"
        parts[f"train_filelist_{engine}.txt"] = ("{name}", resized, "train/{name}")
    expected = range(_NUM_MINI_TRAIN, _NUM_MINI_TRAIN + 1) if is_mini else _NUM_TRAIN
    return parts, expected


def read_lines(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """The number, from 1, and the text of each line that is not blank."""
    if not path.is_file():
        raise Missing(f"{path} does not exist; {source}")
    with reading(path, UnicodeDecodeError, hint=source), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if stripped := line.strip():
                yield number, stripped


def read_list(path: Path, num_classes: int, *, wanted: int | None = None, source: str) -> Listing:
    """Paths and class numbers, of the first `wanted` classes; ValueError names a line that is
    wrong.
    """
    known = {str(number): number for number in range(num_classes)}
    limit = num_classes if wanted is None else wanted
    names, numbers = [], array("q")
    for line_number, line in read_lines(path, source):
        name, *rest = line.rsplit(None, 1)
        number = known.get(rest[0]) if rest else None
        if number is None:
            raise ValueError(
                f"{path}, line {line_number} must be a path and a class from 0 to "
                f"{num_classes - 1}, got {line[:80]!r}; {source}"
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
            f"{path}, line {line_number}: path must stay in the folder of the data, got "
            f"{name[:80]!r}."
        )


def check_count(path: Path, found: int, expected: range, *, partial: bool, source: str) -> None:
    """Refuse a list that is not as long as the published one, unless a part of it is wanted."""
    if found not in expected and not (partial and found):
        span = str(expected[0])
        if len(expected) > 1:
            span = f"{expected[0]} to {expected[-1]}"
        cure = ", or set partial=True" if found else ""
        raise ValueError(f"{path} must list {span} images, got {found}; {source}{cure}")


def locate(root: Path, listing: Listing, templates: Sequence[str], *, partial: bool) -> bool:
    """Turn the names of a listing into paths below the root, by the template that fits best.

    A template has a place for `{name}` and perhaps for `{label}`. Only a few images are looked for,
    because a file system may take hours for millions. All are looked for if those few do not exist
    and `partial` is true. Returns False if the few images do not exist.
    """
    names, numbers = listing
    probes: list[int] = []
    if names:
        probes = sorted({round(place) for place in np.linspace(0, len(names) - 1, _NUM_PROBES)})

    def paths(template: str, rows: Sequence[int]) -> list[str]:
        return [template.format(name=names[row], label=numbers[row]) for row in rows]

    def num_found(template: str) -> int:
        return sum(os.path.lexists(root / path) for path in paths(template, probes))

    best = max(templates, key=num_found)
    is_there = num_found(best) == len(probes)
    if partial and not num_found(best):
        everywhere = range(len(names))
        best = max(templates, key=lambda template: present(root, paths(template, everywhere)).sum())
    if best != "{name}":
        # In place, because a second copy of millions of names takes hundreds of megabytes.
        for row, name in enumerate(names):
            names[row] = best.format(name=name, label=numbers[row])
    return is_there


def present(root: Path, names: Sequence[str]) -> NDArray[np.bool_]:
    """(N,) which of the files exist; each folder is read once."""
    folders: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
    for row, name in enumerate(names):
        folders[name.rpartition("/")[0]].append(row)
    exist = np.zeros(len(names), dtype=np.bool_)
    for folder, rows in folders.items():
        try:
            files = set(os.listdir(root / folder))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for row in rows:
            exist[row] = names[row].rpartition("/")[2] in files
    return exist


def missing_images(
    root: Path, names: Sequence[str], exist: NDArray[np.bool_], source: str
) -> Missing:
    """The error for images that do not exist: how many, and the first three."""
    missing = np.flatnonzero(~exist)
    first = ", ".join(names[row] for row in missing[:3].tolist())
    verb = "is" if len(missing) == 1 else "are"
    message = (
        f"{len(missing)} of {len(names)} images {verb} not in {root}, such as {first}; {source}"
    )
    if not names:
        message = f"{root} has no image of the lists; {source}"
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
    """Images and labels; with `partial` only the images that exist. Missing if some, or all, do
    not.
    """
    if partial or not is_there:
        exist = present(root, names)
        if not partial or not exist.any():
            raise missing_images(root, names, exist, source)
        rows = torch.from_numpy(np.flatnonzero(exist))
        names = [names[row] for row in rows.tolist()]
        clean = None if labels.clean is None else labels.clean[rows]
        labels = Labels(given=labels.given[rows], clean=clean, classes=labels.classes)
    return Split(Files(root, tuple(names)), labels)
