"""What the recipes for a user's own images have in common: the network, where its weights come from, the settings."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from nearsay.batch import Dataset
from nearsay.experiment import Backbone, Experiment
from nearsay.losses import NCR
from nearsay.models import ResNet, Timm
from nearsay.noise import Symmetric
from nearsay.optim import SGD, Cosine
from nearsay.recipes.methods import Method, choose, warmup
from nearsay.transforms import IMAGENET_COLORS, Flip, RandomResizedCrop

Weights = Literal["auto", "none"] | Path
DEPTHS: dict[str, Literal[18, 34, 50]] = {
    "auto": 18,
    "resnet18": 18,
    "resnet34": 34,
    "resnet50": 50,
}


class Network(NamedTuple):
    """A backbone and, for one of ours, the file that it starts from."""

    backbone: Backbone
    init: str | None
    is_pretrained: bool


def make_experiment(
    data: Dataset,
    *,
    method: Method,
    size: int,
    backbone: str,
    weights: Weights,
    epochs: float,
    batch_size: int,
    held_out: float,
    seed: int,
    noise: float,
    bad_images: Literal["skip", "stop"],
) -> Experiment:
    """Settings that need no knowledge of the noise rate; why they are what they are stands in the recipe `folder`."""
    network = choose_network(backbone, weights)
    start_epoch = 0 if network.is_pretrained else max(0, round(epochs / 4))
    choice = choose(method, ncr=NCR(alpha=0.7, k=10, start_epoch=start_epoch))
    rate = 0.01 if network.is_pretrained else 0.05
    return Experiment(
        data=data,
        noise=Symmetric(rate=noise, seed=seed) if noise else None,
        held_out=held_out,
        backbone=network.backbone,
        init=network.init,
        **choice.fields(epochs),
        augment=choice.augment(RandomResizedCrop(size=size), Flip()),
        normalize=IMAGENET_COLORS,
        image_size=size,
        bad_images=bad_images,
        optimizer=SGD(lr=rate * max(1, batch_size) / 64),
        schedule=Cosine(warmup=warmup(epochs, 5.0)),
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )


def choose_network(name: str, weights: Weights) -> Network:
    """One of our ResNets, or else a network of timm; nothing is downloaded, and timm is not imported to decide."""
    if name == "auto" and isinstance(weights, Path):
        raise ValueError(
            f"weights={str(weights)!r} needs backbone=, the network they belong to, such as resnet50"
        )
    if name not in DEPTHS and find_spec("timm") is None:
        raise ValueError(
            f"backbone={name!r} is none of {', '.join(DEPTHS)}; networks of timm need "
            'pip install ".[vision]" in the clone'
        )
    file = find_weights("resnet18" if name == "auto" else name) if weights == "auto" else None
    if isinstance(weights, Path):
        file = weights
    if name in DEPTHS:
        # One network whatever is found: only the start differs, so a run can be read where the file is no more.
        return Network(
            ResNet(depth=DEPTHS[name], small_images=False),
            None if file is None else str(file),
            bool(file),
        )
    return Network(Timm(name=name, weights="none" if file is None else str(file)), None, bool(file))


def find_weights(name: str) -> Path | None:
    """The weights that timm publishes under this name, if an earlier download left them on this machine."""
    for folder in _cached(name):
        for file in sorted(folder.glob("snapshots/*/model.safetensors")):
            if file.is_file():
                return file
    return None


def _cached(name: str) -> Iterator[Path]:
    """Folders of timm's networks in the cache of Hugging Face, wherever its variables put it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    hub = os.environ.get("HF_HOME") or Path(home) / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(hub) / "hub").expanduser()
    try:
        folders = sorted(cache.iterdir())
    except OSError:  # there is none, or it is not ours to read
        return
    wanted = f"models--timm--{name}"
    for folder in folders:
        if folder.name == wanted or folder.name.startswith(f"{wanted}."):
            yield folder
