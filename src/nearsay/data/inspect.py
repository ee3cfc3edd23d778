"""What of a data set is in a folder: part by part there, missing or wrong, and where to get it."""

from pathlib import Path
from typing import Literal, NamedTuple

from nearsay.batch import Dataset, Files
from nearsay.data import cifar, clothing1m, mini_imagenet, webvision
from nearsay.data.webvision import present
from nearsay.errors import Missing


class Finding(NamedTuple):
    """What is known of one part of a data set."""

    part: str
    status: Literal["ok", "missing", "wrong"]
    found: int  # images
    expected: int | None  # images, None if the lists that would tell are not there
    message: str  # one sentence


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
"""The data sets that can be checked."""


def check(name: str, path: str | Path) -> list[Finding]:
    """Look at every part of a data set and count its images; none is decoded."""
    if name not in _SOURCES:
        raise ValueError(f"name={name!r} is none of {', '.join(NAMES)}")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [Finding(name, "missing", 0, None, f"{folder} is no folder; {_SOURCES[name]}.")]
    if name == "imagenet-validation":
        return [_check_imagenet(folder)]
    if name in cifar.ORIGINALS:
        return [_check_cifar(name, folder, split) for split in _NUM_CIFAR]
    if name == "clothing1m":
        shop = clothing1m.Clothing1M(path=folder)
        return [
            _check_listed(split, shop, split, name) for split in ("train", "validation", "test")
        ]
    if name in ("webvision", "mini-webvision"):
        web = (
            webvision.WebVision(path=folder)
            if name == "webvision"
            else webvision.MiniWebVision(path=folder)
        )
        return [_check_listed(split, web, split, name) for split in ("train", "test")]
    color: Literal["red", "blue"] = "red" if name == "mini-imagenet-red" else "blue"
    levels = [
        mini_imagenet.MiniImageNet(path=folder, color=color, noise=level)
        for level in mini_imagenet.LEVELS
    ]
    findings = [
        _check_listed(f"train with {data.noise:.0%} noise", data, "train", name) for data in levels
    ]
    return [*findings, _check_listed("test", levels[0], "test", name)]


def _check_listed(part: str, data: Dataset, split: str, name: str) -> Finding:
    try:
        inputs = data.open(split).inputs
        assert isinstance(inputs, Files)
        found = present(inputs.root, inputs.names)
        if not found.all():
            raise webvision.missing_images(inputs.root, inputs.names, found, _SOURCES[name])
    except Missing as error:
        return Finding(part, "missing", error.found, error.expected, f"{error}.")
    except (ValueError, OSError) as error:
        return Finding(part, "wrong", 0, None, f"{error}.")
    return Finding(
        part, "ok", len(inputs), len(inputs), f"All {len(inputs)} images are in {inputs.root}."
    )


def _check_imagenet(folder: Path) -> Finding:
    try:
        images = webvision.imagenet_images(folder)
    except (ValueError, OSError) as error:
        status: Literal["missing", "wrong"] = "missing" if isinstance(error, Missing) else "wrong"
        return Finding("test", status, 0, _NUM_IMAGENET, f"{error}.")
    num = sum(map(len, images.values()))
    if num == _NUM_IMAGENET and len(images) == 1000:
        return Finding("test", "ok", num, num, f"All {num} images are in {folder}.")
    message = (
        f"{folder} has {num} images of {len(images)} synsets, but the original has {_NUM_IMAGENET} of 1000; "
        f"{webvision.IMAGENET_SOURCE}."
    )
    return Finding(
        "test", "missing" if num < _NUM_IMAGENET else "wrong", num, _NUM_IMAGENET, message
    )


def _check_cifar(name: str, folder: Path, split: str) -> Finding:
    data = cifar.Cifar10(path=folder) if name == "cifar10" else cifar.Cifar100(path=folder)
    expected, original = _NUM_CIFAR[split], cifar.ORIGINALS[name]
    try:
        num = len(data.open(split).labels.given)
    except (ValueError, OSError) as error:
        needed = (*original.splits[split], original.meta)
        is_there = any(
            all((each / file).is_file() for file in needed)
            for each in (folder / original.folder, folder)
        )
        return Finding(split, "wrong" if is_there else "missing", 0, expected, f"{error}.")
    return Finding(split, "ok", num, expected, f"All {num} images are in {folder}.")
