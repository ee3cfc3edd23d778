"""Images and labels of Hugging Face datasets, from the hub or from files of your own."""

from pathlib import Path
from typing import Literal

from nearsay.data import Hub
from nearsay.experiment import Experiment
from nearsay.recipes._images import Weights, make_experiment
from nearsay.recipes.methods import Method


def recipe(
    path: Path | None = None,
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
    """Image classification data that the library datasets reads, with labels in doubt.

    Reproduces: nothing of the paper; the settings are those of the recipe folder, where their reasons stand.

    Command: nearsay train hub path=saved

    Time: unmeasured. Accuracy: unmeasured.

    Args:
        path: a folder of save_to_disk, or with Parquet, CSV, JSON, Arrow or images in it; the network is not touched.
        name: instead of path, a data set of the hub such as user/photos, kept in the cache of the library.
        config: which part of a data set that has several.
        revision: a branch, tag or commit of the hub; without it the newest is taken, which may change.
        image: the column of images; none finds it by its type.
        label: the column of labels; none finds it by its type.
        clean: a column of true labels, if there is one.
        train: what the split to train on is called there.
        validation: what the validation split is called there.
        test: what the test split is called there.
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
        Hub(
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
        ),
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
