"""Your own data: folders and tables of images, Hugging Face data sets, features, Python data sets.

No setting needs the noise rate. The paper has no such experiments, but those on web images suggest
the settings. NCR needs good features, so a network with random weights learns without NCR for a
quarter of the epochs (the paper: 50 of 130). With pretrained weights or given features NCR starts
at once. alpha=0.7 is between the 0.5 of WebVision and the 0.9 of Clothing1M and mini-ImageNet, and
k=10 is the paper's choice in most experiments.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from nearsay.batch import Dataset, Files
from nearsay.data.embeddings import Embeddings
from nearsay.data.folder import Folder
from nearsay.data.hub import Hub
from nearsay.data.manifest import Manifest
from nearsay.experiment import Backbone, Experiment
from nearsay.losses.ncr import NCR
from nearsay.models.mlp import MLP
from nearsay.models.pretrained import Timm
from nearsay.models.resnet import ResNet
from nearsay.noise import Symmetric
from nearsay.optim import SGD, AdamW, Cosine
from nearsay.recipes.methods import FeatureMethod, Method, OwnMethod, choose, warmup
from nearsay.transforms.color import IMAGENET_COLORS
from nearsay.transforms.geometry import Flip, PadCrop, RandomResizedCrop

Weights = Literal["auto", "none"] | Path
BadImages = Literal["skip", "stop"]
Shape = tuple[int, ...] | Literal["auto", "files"]

_DEPTHS: dict[str, Literal[18, 34, 50]] = {
    "auto": 18,
    "resnet18": 18,
    "resnet34": 34,
    "resnet50": 50,
}
# Arrays of images up to this size get a network for small images.
_SMALL = 64


class Network(NamedTuple):
    """A backbone and, for one of ours, the file with its first weights."""

    backbone: Backbone
    init: str | None
    is_pretrained: bool


def folder(
    path: str | Path,
    *,
    method: Method | OwnMethod = "ncr",
    size: int = 224,
    backbone: str = "auto",
    weights: Weights = "auto",
    epochs: float = 30,
    batch_size: int = 64,
    held_out: float = 0.1,
    seed: int = 0,
    noise: float = 0.0,
    bad_images: BadImages = "skip",
) -> Experiment:
    """Images as path/CLASS/*.jpg, or as path/train/CLASS/*.jpg with folders val and test.

    The learning rate is 0.05, or 0.01 with pretrained weights, for a batch of 64, and grows with
    the batch. Without a GPU use size=64 --set backbone.width=16.

    Command: nearsay train folder path=photos

    Time: 1800 images, 30 epochs, with the settings for a CPU: 4 minutes on one thread.
    Accuracy: five classes of CIFAR-10, 2000 images, 25 % wrong labels: 65.0 % (n = 1).

    Args:
        path: the folder of images.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        size: the images are cut and resized to so many pixels.
        backbone: auto (resnet18), resnet18, resnet34, resnet50, a network of timm, or FILE.py:NAME.
        weights: none, a .safetensors file, or auto: those of timm if already downloaded, else none.
        epochs: how long to train.
        batch_size: images of a step; neighbors are found in it, so it needs several of each class.
        held_out: training images kept for validation, a share or a number; 0 uses all.
        seed: of the held-out images, the weights, the order, the augmentation and the noise.
        noise: share of the labels to make wrong on purpose, to see what a method does about it.
        bad_images: skip leaves out and names images that cannot be decoded, stop ends the run.

    Example:
        >>> from nearsay import recipes
        >>> recipes.folder("photos", size=64, weights="none").objective.alpha
        0.7
    """
    return _train_images(
        Folder(path=path),
        method=method,
        size=size,
        network=_choose_network(backbone, weights),
        epochs=epochs,
        batch_size=batch_size,
        held_out=held_out,
        seed=seed,
        noise=noise,
        bad_images=bad_images,
    )


def manifest(
    path: str | Path,
    *,
    root: str | Path | None = None,
    method: Method | OwnMethod = "ncr",
    size: int = 224,
    backbone: str = "auto",
    weights: Weights = "auto",
    epochs: float = 30,
    batch_size: int = 64,
    held_out: float = 0.1,
    seed: int = 0,
    noise: float = 0.0,
    bad_images: BadImages = "skip",
) -> Experiment:
    """A CSV, TSV, JSON lines or Parquet file with the columns path and label (and split, clean).

    The settings are those of the recipe folder.

    Command: nearsay train manifest path=photos.csv

    Args:
        path: the table.
        root: the folder of the images; none is the folder of the table.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        size: the images are cut and resized to so many pixels.
        backbone: auto (resnet18), resnet18, resnet34, resnet50, a network of timm, or FILE.py:NAME.
        weights: none, a .safetensors file, or auto: those of timm if already downloaded, else none.
        epochs: how long to train.
        batch_size: images of a step; neighbors are found in it, so it needs several of each class.
        held_out: training images kept for validation, a share or a number; 0 uses all.
        seed: of the held-out images, the weights, the order, the augmentation and the noise.
        noise: share of the labels to make wrong on purpose, to see what a method does about it.
        bad_images: skip leaves out and names images that cannot be decoded, stop ends the run.

    Example:
        >>> from nearsay import recipes
        >>> recipes.manifest("photos.csv", batch_size=128).batch_size
        128
    """
    return _train_images(
        Manifest(path=path, root=root),
        method=method,
        size=size,
        network=_choose_network(backbone, weights),
        epochs=epochs,
        batch_size=batch_size,
        held_out=held_out,
        seed=seed,
        noise=noise,
        bad_images=bad_images,
    )


def hub(
    path: str | Path | None = None,
    *,
    name: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    image: str | None = None,
    label: str | None = None,
    clean: str | None = None,
    train: str | None = None,
    validation: str | None = None,
    test: str | None = None,
    method: Method | OwnMethod = "ncr",
    size: int = 224,
    backbone: str = "auto",
    weights: Weights = "auto",
    epochs: float = 30,
    batch_size: int = 64,
    held_out: float = 0.1,
    seed: int = 0,
    noise: float = 0.0,
    bad_images: BadImages = "skip",
) -> Experiment:
    """Image classification data that the library datasets (Hugging Face) can read.

    The settings are those of the recipe folder.

    Command: nearsay train hub path=saved

    Args:
        path: a folder of save_to_disk, or with Parquet, CSV, JSON, Arrow or images; no network.
        name: instead of path, a data set of the hub such as user/photos, kept in its cache.
        config: the part of a data set that has several.
        revision: a branch, tag or commit of the hub; none is the newest, which may change.
        image: the column of images; none finds it by its type.
        label: the column of labels; none finds it by its type.
        clean: a column of true labels, if there is one.
        train: the name of the training split there.
        validation: the name of the validation split there.
        test: the name of the test split there.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        size: the images are cut and resized to so many pixels.
        backbone: auto (resnet18), resnet18, resnet34, resnet50, a network of timm, or FILE.py:NAME.
        weights: none, a .safetensors file, or auto: those of timm if already downloaded, else none.
        epochs: how long to train.
        batch_size: images of a step; neighbors are found in it, so it needs several of each class.
        held_out: training images kept for validation, a share or a number; 0 uses all.
        seed: of the held-out images, the weights, the order, the augmentation and the noise.
        noise: share of the labels to make wrong on purpose, to see what a method does about it.
        bad_images: skip leaves out and names images that cannot be decoded, stop ends the run.

    Example:
        >>> from nearsay import recipes
        >>> recipes.hub(name="user/photos", label="breed").data.label
        'breed'
    """
    data = Hub(
        path=path,
        name=name,
        config=config,
        revision=revision,
        image=image,
        label=label,
        clean=clean,
        train=train,
        validation=validation,
        test=test,
    )
    return _train_images(
        data,
        method=method,
        size=size,
        network=_choose_network(backbone, weights),
        epochs=epochs,
        batch_size=batch_size,
        held_out=held_out,
        seed=seed,
        noise=noise,
        bad_images=bad_images,
    )


def embeddings(
    path: str | Path,
    *,
    labels: str | Path | None = None,
    method: FeatureMethod | OwnMethod = "ncr",
    hidden: tuple[int, ...] = (512,),
    epochs: float = 30,
    batch_size: int = 256,
    held_out: float = 0.1,
    seed: int = 0,
    noise: float = 0.0,
) -> Experiment:
    """A perceptron on features that another network made, such as CLIP or a sentence encoder.

    The features are good from the first epoch on, so NCR starts at once.

    Command: nearsay train embeddings path=features.npz

    Args:
        path: an .npz or Parquet file with features and labels, or an .npy with features.
        labels: an .npy or a table with labels, if the file of features has none.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        hidden: widths of the hidden layers, such as 512 or 512,128.
        epochs: how long to train.
        batch_size: examples of a step; neighbors are found among them.
        held_out: training examples kept for validation, a share or a number; 0 uses all.
        seed: of the held-out examples, the weights, the order and the noise.
        noise: share of the labels to make wrong on purpose, to see what a method does about it.

    Example:
        >>> from nearsay import recipes
        >>> recipes.embeddings("features.npz", hidden=(256,)).backbone.hidden
        (256,)
    """
    return _train_features(
        Embeddings(path=path, labels=labels),
        method=method,
        hidden=hidden,
        epochs=epochs,
        batch_size=batch_size,
        held_out=held_out,
        seed=seed,
        noise=noise,
    )


def dataset(
    data: Dataset,
    *,
    shape: Shape = "auto",
    method: Method | OwnMethod = "ncr",
    epochs: float = 30,
    batch_size: int = 64,
    held_out: float = 0.1,
    seed: int = 0,
    noise: float = 0.0,
) -> Experiment:
    """A data set of your own: a Python object, or a class in a file, with a method open(split).

    The settings follow from the shape of its examples: features get a perceptron as in the recipe
    embeddings; arrays of images up to 64 pixels get a network for small images; larger images and
    image files are trained as in the recipe folder.

    Command: nearsay train dataset data=my_data.py:Stripes

    Args:
        data: the data set, FILE.py:NAME on a command line.
        shape: of an example: 3,32,32 for images, 512 for features, or files; auto asks the data.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        epochs: how long to train.
        batch_size: examples of a step; neighbors are found in it: it needs several of each class.
        held_out: training examples kept for validation, a share or a number; 0 uses all.
        seed: of the held-out examples, the weights, the order, the augmentation and the noise.
        noise: share of the labels to make wrong on purpose, to see what a method does about it.

    Example:
        >>> from nearsay import data, recipes
        >>> recipes.dataset(data.Toy()).backbone.hidden
        (512,)
    """
    if shape == "auto":
        shape = find_shape(data)
    if shape != "files" and len(shape) == 1:
        return _train_features(
            data,
            method=method,
            hidden=(512,),
            epochs=epochs,
            batch_size=batch_size,
            held_out=held_out,
            seed=seed,
            noise=noise,
        )
    if shape != "files" and (len(shape) != 3 or shape[0] != 3):
        raise ValueError(
            f"shape must be 3,HEIGHT,WIDTH for images or one number for features, got {shape!r}."
        )
    size, is_small = 224, False
    network = _choose_network("auto", "auto")
    if shape != "files":
        size, is_small = min(shape[1:]), max(shape[1:]) <= _SMALL
    if is_small:
        # Tiny images need a network that is fast on a CPU, as that of the recipe digits.
        width = 16 if size <= 16 else 64
        network = Network(ResNet(depth=18, width=width), None, is_pretrained=False)
    return _train_images(
        data,
        method=method,
        size=size,
        network=network,
        epochs=epochs,
        batch_size=batch_size,
        held_out=held_out,
        seed=seed,
        noise=noise,
        bad_images="skip",
        is_small=is_small,
    )


def find_shape(data: Dataset) -> tuple[int, ...] | Literal["files"]:
    """The shape of an example: from `data.describe()`, or else from the training split."""
    describe = getattr(data, "describe", None)
    if describe is not None:
        described: tuple[int, ...] | None = describe().shape
        return described or "files"
    inputs = data.open("train").inputs
    return "files" if isinstance(inputs, Files) else tuple(inputs.shape[1:])


def _train_features(
    data: Dataset,
    *,
    method: Method | OwnMethod,
    hidden: tuple[int, ...],
    epochs: float,
    batch_size: int,
    held_out: float,
    seed: int,
    noise: float,
) -> Experiment:
    choice = choose(method, ncr=NCR())
    # Transforms make views of images only.
    if choice.num_views == 2:
        raise ValueError(f"method must compare one view, because features have one, got {method}.")
    return Experiment(
        data=data,
        noise=Symmetric(rate=noise, seed=seed) if noise else None,
        held_out=held_out,
        backbone=MLP(hidden=hidden),
        **choice.fields(epochs),
        # The scale of features is unknown here; the perceptron normalizes its hidden layers.
        normalize=None,
        optimizer=AdamW(lr=1e-3),
        schedule=Cosine(warmup=warmup(epochs, 1.0)),
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )


def _train_images(
    data: Dataset,
    *,
    method: Method | OwnMethod,
    size: int,
    network: Network,
    epochs: float,
    batch_size: int,
    held_out: float,
    seed: int,
    noise: float,
    bad_images: BadImages,
    is_small: bool = False,
) -> Experiment:
    start_epoch, rate = max(0, round(epochs / 4)), 0.05
    if network.is_pretrained:
        # The features are good already, and a high learning rate would undo them.
        start_epoch, rate = 0, 0.01
    choice = choose(method, ncr=NCR(alpha=0.7, k=10, start_epoch=start_epoch))
    augment = choice.augment(RandomResizedCrop(size=size), Flip())
    if is_small:
        # A part of a small image often shows too little, so it is only shifted.
        augment = choice.augment(PadCrop(padding=max(1, size // 8), mode="zeros"))
    return Experiment(
        data=data,
        noise=Symmetric(rate=noise, seed=seed) if noise else None,
        held_out=held_out,
        backbone=network.backbone,
        init=network.init,
        **choice.fields(epochs),
        augment=augment,
        normalize=IMAGENET_COLORS,
        image_size=size,
        bad_images=bad_images,
        # Larger batches make fewer steps, so each step is larger.
        optimizer=SGD(lr=rate * max(1, batch_size) / 64),
        schedule=Cosine(warmup=warmup(epochs, 5.0)),
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )


def _choose_network(name: str, weights: Weights) -> Network:
    """One of our ResNets, or a network of timm; nothing is downloaded, and timm is not imported."""
    if name == "auto" and isinstance(weights, Path):
        raise ValueError(
            f"backbone must be the network of weights={str(weights)!r}, got 'auto'. "
            "Try backbone=resnet50."
        )
    if name not in _DEPTHS and find_spec("timm") is None:
        raise ValueError(
            f"backbone must be one of {', '.join(_DEPTHS)}, got {name!r}. Networks of timm need "
            'pip install ".[vision]" in the clone.'
        )
    file = None
    if weights == "auto":
        file = find_weights("resnet18" if name == "auto" else name)
    elif weights != "none":
        file = Path(weights)
    start = None if file is None else str(file)
    if name not in _DEPTHS:
        return Network(Timm(name=name, weights=start or "none"), None, bool(file))
    # The network is the same with and without weights. Only its start differs, so a run can be
    # read on a machine without the file.
    return Network(ResNet(depth=_DEPTHS[name], small_images=False), start, bool(file))


def find_weights(name: str) -> Path | None:
    """The weights that timm publishes under this name, if they were downloaded before."""
    for cached in _cached(name):
        for file in sorted(cached.glob("snapshots/*/model.safetensors")):
            if file.is_file():
                return file
    return None


def _cached(name: str) -> Iterator[Path]:
    """Folders of timm's networks in the cache of Hugging Face, wherever its variables put it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    hugging_face = os.environ.get("HF_HOME") or Path(home) / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(hugging_face) / "hub").expanduser()
    try:
        entries = sorted(cache.iterdir())
    except OSError:
        # There is no cache, or it belongs to somebody else.
        return
    wanted = f"models--timm--{name}"
    for entry in entries:
        if entry.name == wanted or entry.name.startswith(f"{wanted}."):
            yield entry
