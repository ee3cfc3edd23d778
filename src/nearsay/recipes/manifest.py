"""Your own images named in a table, with a label for each."""

from pathlib import Path
from typing import Literal

from nearsay.data import Manifest
from nearsay.experiment import Experiment
from nearsay.recipes._images import Weights, make_experiment
from nearsay.recipes.methods import Method


def recipe(
    path: Path,
    *,
    root: Path | None = None,
    method: Method = "ncr",
    size: int = 224,
    backbone: str = "auto",
    weights: Weights = "auto",
    epochs: float = 30,
    batch_size: int = 64,
    held_out: float = 0.1,
    seed: int = 0,
    noise: float = 0.0,
    bad_images: Literal["skip", "stop"] = "skip",
) -> Experiment:
    """A CSV, TSV, JSON lines or Parquet file with the columns path and label, perhaps split and clean.

    Reproduces: nothing of the paper; the settings are those of the recipe folder, where their reasons stand.

    Command: nearsay train manifest path=photos.csv

    Time: unmeasured. Accuracy: unmeasured.

    Args:
        path: the table.
        root: the folder below which its paths are; none is the folder of the table.
        method: one of docs/methods.md; a wrong name lists them all.
        size: images are cut and resized to so many pixels.
        backbone: auto (which is resnet18), resnet18, resnet34, resnet50, or the name of a network of timm.
        weights: none, a .safetensors file, or auto: those of timm if they were downloaded before, else none.
        epochs: how long to train.
        batch_size: images of a step; neighbors are found among them, so several of each class are good to have.
        held_out: training images kept for validation, a share or a number; 0 uses all.
        seed: of the held-out images, the weights, the order, the augmentation and the noise.
        noise: share of the labels to make wrong on purpose, to see what a method does about it.
        bad_images: skip leaves out and names what cannot be decoded, stop ends the run.
    """
    return make_experiment(
        Manifest(path=path, root=root),
        method=method,
        size=size,
        backbone=backbone,
        weights=weights,
        epochs=epochs,
        batch_size=batch_size,
        held_out=held_out,
        seed=seed,
        noise=noise,
        bad_images=bad_images,
    )
