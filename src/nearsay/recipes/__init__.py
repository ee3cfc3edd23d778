"""Recipes: functions that return an Experiment, and that `nearsay train NAME` calls.

`nearsay.recipes.digits(method="ncr", noise=0.4)` in Python is
`nearsay train digits method=ncr noise=0.4` in a shell.
Importing this does not import torch; a recipe is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "cifar10",
    "cifar100",
    "clothing1m",
    "dataset",
    "digits",
    "embeddings",
    "folder",
    "hub",
    "manifest",
    "mini_imagenet",
    "toy",
    "webvision",
]

if TYPE_CHECKING:
    from nearsay.recipes.cifar import cifar10, cifar100
    from nearsay.recipes.own_data import dataset, embeddings, folder, hub, manifest
    from nearsay.recipes.small import digits, toy
    from nearsay.recipes.web_images import clothing1m, mini_imagenet, webvision

_MODULES = {
    "cifar": ("cifar10", "cifar100"),
    "own_data": ("dataset", "embeddings", "folder", "hub", "manifest"),
    "small": ("digits", "toy"),
    "web_images": ("clothing1m", "mini_imagenet", "webvision"),
}
HOMES = {name: module for module, names in _MODULES.items() for name in names}
"""The module of each recipe."""


if not TYPE_CHECKING:  # or the type checker would accept every name

    def __getattr__(name: str) -> object:
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        recipe = getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
        globals()[name] = recipe
        return recipe


def __dir__() -> list[str]:
    return list(__all__)
