"""Transforms of whole batches on the device where they lie, with draws that depend only on who an example is.

Each image transform says how many draws it needs of an example, and `apply(images, draws)` is a pure function of the
two. `Augment` makes all draws of its transforms in one call, because a call costs a hundred small kernels and its
width next to nothing. Nothing waits for the device, and no shape depends on a value.

The order that works: crops, `Flip`, `ColorJitter` or `RandAugment`, then `Normalize`, then `Cutout`.
"""

from nearsay.transforms.color import (
    CIFAR10_COLORS,
    CIFAR100_COLORS,
    IMAGENET_COLORS,
    PLUS_MINUS_ONE,
    ColorJitter,
    Normalize,
)
from nearsay.transforms.draws import Transform
from nearsay.transforms.geometry import Cutout, Flip, PadCrop, RandomResizedCrop
from nearsay.transforms.mixup import Mixup
from nearsay.transforms.strong import RandAugment
from nearsay.transforms.views import Augment, Views

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
