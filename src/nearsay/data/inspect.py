"""Look at data without reading all of it: its sizes, its kind, and missing files."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor

from nearsay.batch import DataInfo, Dataset, Files, Split
from nearsay.data import cifar, clothing1m, mini_imagenet, webvision
from nearsay.data.embeddings import Embeddings
from nearsay.data.folder import Folder
from nearsay.data.manifest import Manifest
from nearsay.data.webvision import missing_images, present
from nearsay.errors import Missing, NoSplit
from nearsay.validation import check_choice


def describe(dataset: Dataset) -> DataInfo:
    """Classes, shape and number of training examples of a data set.

    Asks `dataset.describe()` if it exists; otherwise opens the training split and looks at it.

    >>> from nearsay.data import Cifar10, Toy
    >>> describe(Cifar10(path="not-needed"))
    DataInfo(num_classes=10, shape=(3, 32, 32), num_examples=50000)
    >>> describe(Toy(num_classes=3, num_features=2, num_train=6)).shape
    (2,)
    """
    own_description = getattr(dataset, "describe", None)
    if own_description is not None:
        return DataInfo(*own_description())
    inputs, labels = dataset.open("train")
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else None
    return DataInfo(len(labels.classes), shape, len(inputs))


def dataset_at(path: Path, like: Dataset, split: str | None = None) -> Dataset:
    """The data set at a path, for a network that was trained on `like`.

    It is of the kind of `like` if that fits the path. Otherwise arrays are `Embeddings`, tables are
    `Manifest` and folders are `Folder`. `split` is the split that will be opened.
    """
    own_move = getattr(like, "at", None)
    if own_move is not None:
        moved = cast("Dataset | None", own_move(path, split))
        if moved is not None:
            return moved
    elif is_dataclass(like) and any(field.name == "path" for field in fields(like)):
        # A data set from a user's own file: only its class knows how to read what is there.
        return cast("Dataset", replace(cast("Any", like), path=path))
    if path.suffix.lower() in (".npy", ".npz"):
        return Embeddings(path=path)
    return Manifest(path=path) if path.is_file() else Folder(path=path)


def open_first(data: Dataset, split: str | None) -> tuple[str, Split]:
    """The split, or if none is named the first of test, validation and train that exists."""
    if split is None:
        for name in ("test", "validation"):
            try:
                return name, data.open(name)
            except NoSplit:
                continue
    return split or "train", data.open(split or "train")


class Finding(NamedTuple):
    """What is known of one part of a published data set in a folder.

    Attributes:
        part: The name of the part, such as a split.
        status: "ok", "missing" or "wrong".
        found: How many images exist.
        expected: How many there should be; None if the lists that say so are missing.
        message: One sentence.
    """

    part: str
    status: Literal["ok", "missing", "wrong"]
    found: int
    expected: int | None
    message: str


_NUM_IMAGENET, _NUM_CIFAR = 50_000, {"train": 50_000, "test": 10_000}
_SOURCES = {
    "mini-imagenet-red": mini_imagenet.SOURCE,
    "mini-imagenet-blue": mini_imagenet.SOURCE,
    "webvision": webvision.SOURCE,
    "mini-webvision": webvision.SOURCE,
    "clothing1m": clothing1m.SOURCE,
    "imagenet-validation": webvision.IMAGENET_SOURCE,
    "cifar10": f"it is on {cifar.ORIGINALS['cifar10'].address}",
    "cifar100": f"it is on {cifar.ORIGINALS['cifar100'].address}",
}
NAMES = tuple(_SOURCES)
"""The published data sets that can be checked."""


def check(name: str, path: str | Path) -> list[Finding]:
    """Look at every part of a published data set and count its images; none is decoded."""
    check_choice("name", name, NAMES)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [Finding(name, "missing", 0, None, f"{folder} is not a folder; {_SOURCES[name]}.")]
    if name == "imagenet-validation":
        return [_check_imagenet(folder)]
    if name in cifar.ORIGINALS:
        return [_check_cifar(name, folder, split) for split in _NUM_CIFAR]
    parts: list[tuple[str, Dataset, str]]
    if name == "clothing1m":
        shop = clothing1m.Clothing1M(path=folder)
        parts = [(split, shop, split) for split in ("train", "validation", "test")]
    elif name == "webvision":
        parts = [(split, webvision.WebVision(path=folder), split) for split in ("train", "test")]
    elif name == "mini-webvision":
        mini = webvision.MiniWebVision(path=folder)
        parts = [(split, mini, split) for split in ("train", "test")]
    else:
        color: Literal["red", "blue"] = "red" if name == "mini-imagenet-red" else "blue"
        parts = []
        for level in mini_imagenet.LEVELS:
            data = mini_imagenet.MiniImageNet(path=folder, color=color, noise=level)
            parts.append((f"train with {level:.0%} noise", data, "train"))
        parts.append(("test", data, "test"))
    return [_check_listed(part, data, split, _SOURCES[name]) for part, data, split in parts]


def _sentence(error: Exception) -> str:
    return f"{str(error).rstrip('.')}."


def _check_listed(part: str, data: Dataset, split: str, source: str) -> Finding:
    try:
        inputs = data.open(split).inputs
        assert isinstance(inputs, Files)
        is_present = present(inputs.root, inputs.names)
        if not is_present.all():
            raise missing_images(inputs.root, inputs.names, is_present, source)
    except Missing as error:
        return Finding(part, "missing", error.found, error.expected, _sentence(error))
    except (ValueError, OSError) as error:
        return Finding(part, "wrong", 0, None, _sentence(error))
    num = len(inputs)
    return Finding(part, "ok", num, num, f"All {num} images are in {inputs.root}.")


def _check_imagenet(folder: Path) -> Finding:
    status: Literal["missing", "wrong"]
    try:
        images = webvision.imagenet_images(folder)
    except (ValueError, OSError) as error:
        status = "missing" if isinstance(error, Missing) else "wrong"
        return Finding("test", status, 0, _NUM_IMAGENET, _sentence(error))
    num = sum(map(len, images.values()))
    if num == _NUM_IMAGENET and len(images) == 1000:
        return Finding("test", "ok", num, num, f"All {num} images are in {folder}.")
    status = "missing" if num < _NUM_IMAGENET else "wrong"
    message = (
        f"{folder} has {num} images of {len(images)} synsets, but the original has "
        f"{_NUM_IMAGENET} of 1000; {webvision.IMAGENET_SOURCE}."
    )
    return Finding("test", status, num, _NUM_IMAGENET, message)


def _check_cifar(name: str, folder: Path, split: str) -> Finding:
    data = cifar.Cifar10(path=folder) if name == "cifar10" else cifar.Cifar100(path=folder)
    expected, original = _NUM_CIFAR[split], cifar.ORIGINALS[name]
    try:
        num = len(data.open(split).labels.given)
    except (ValueError, OSError) as error:
        status: Literal["missing", "wrong"] = "missing"
        for place in (folder / original.folder, folder):
            if all((place / file).is_file() for file in (*original.splits[split], original.meta)):
                status = "wrong"
        return Finding(split, status, 0, expected, _sentence(error))
    return Finding(split, "ok", num, expected, f"All {num} images are in {folder}.")
