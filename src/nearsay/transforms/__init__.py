"""Transforms of whole batches on the device, with random numbers that depend only on the example.

A transform says how many random numbers it needs for an image. `apply(images, draws)` is a pure
function of both. `Augment` makes all draws of its transforms in one call, because each call starts
a hundred small kernels. No transform waits for the device, and no shape depends on a value.

An order that works: crops, `Flip`, `ColorJitter` or `RandAugment`, then `Normalize`, then `Cutout`.
"""

from nearsay.transforms.color import (
    CIFAR10_COLORS,
    CIFAR100_COLORS,
    IMAGENET_COLORS,
    PLUS_MINUS_ONE,
    ColorJitter,
    Normalize,
)
from nearsay.transforms.geometry import Cutout, Flip, PadCrop, RandomResizedCrop
from nearsay.transforms.mixup import Mixup
from nearsay.transforms.strong import RandAugment
from nearsay.transforms.views import Augment, Transform, Views

__all__ = [
    "CIFAR10_COLORS",
    "CIFAR100_COLORS",
    "IMAGENET_COLORS",
    "PLUS_MINUS_ONE",
    "Augment",
    "ColorJitter",
    "Cutout",
    "Flip",
    "Mixup",
    "Normalize",
    "PadCrop",
    "RandAugment",
    "RandomResizedCrop",
    "Transform",
    "Views",
]
