"""The colors of an image: random jitter, and the step from bytes to the numbers that a network
takes.

uint8 is 0 to 255. Floating point is 0 to 1 until `Normalize`, which comes after all other color
changes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nearsay.transforms.views import transform_alone
from nearsay.validation import check_choice, check_number, check_that

Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class ColorJitter:
    """Random brightness, contrast, saturation and hue, always in this order.

    The first three blend the image with black, with its mean gray and with its gray version, by
    factors uniform in [max(0, 1 − x), 1 + x]. Hue turns the circle of HSV either way. Results are
    clamped to the range after each step. The formulas are those of torchvision, which shuffles
    their order. Images are uint8 or floating point, and keep their dtype.

    Args:
        brightness: x of the brightness factor, 0 or more.
        contrast: x of the contrast factor, 0 or more.
        saturation: x of the saturation factor, 0 or more.
        hue: Largest turn, as a share of the circle, from 0 to 0.5.

    >>> import torch
    >>> images = torch.full((1, 3, 2, 2), 100, dtype=torch.uint8)
    >>> ColorJitter(brightness=0.4)(images, torch.tensor([0]), seed=0, epoch=1).dtype
    torch.uint8
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    num_draws: ClassVar[int] = 4
    __call__ = transform_alone

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_number(name, getattr(self, name), 0, 1e3)
        check_number("hue", self.hue, 0, 0.5)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images of the same size and dtype."""
        is_bytes = not images.is_floating_point()
        if is_bytes:
            colors = images.float() / 255
        else:
            colors = images.to(torch.promote_types(images.dtype, torch.float32))
        draws = draws[:, :, None, None, None].to(colors.dtype)  # (B, 4, 1, 1, 1)
        if self.brightness:
            colors = (colors * _factor(self.brightness, draws[:, 0])).clamp(0, 1)
        if self.contrast:
            # In float64 the mean does not depend on the order of summation.
            mean = gray(colors).mean(dim=(2, 3), keepdim=True, dtype=torch.float64)
            colors = _blend(mean.to(colors.dtype), colors, _factor(self.contrast, draws[:, 1]))
        if self.saturation:
            colors = _blend(gray(colors), colors, _factor(self.saturation, draws[:, 2]))
        if self.hue:
            colors = turn_hue(colors, (2 * draws[:, 3] - 1) * self.hue)
        if is_bytes:
            return (colors * 255).round().to(torch.uint8)
        return colors.to(images.dtype)


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """(x − mean) / std for each channel; uint8 is first scaled to [0, 1].

    Args:
        mean: Of red, green and blue.
        std: Of red, green and blue, above 0.
        dtype: Of the result; the computation is in float32.

    >>> import torch
    >>> images = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    >>> normalize = Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    >>> normalize(images, torch.tensor([0]), seed=0, epoch=1).flatten()
    tensor([1., 1., 1.])
    """

    mean: Triple
    std: Triple
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_draws: ClassVar[int] = 0
    __call__ = transform_alone

    def __post_init__(self) -> None:
        is_mean = len(self.mean) == 3 and all(map(math.isfinite, self.mean))
        check_that(is_mean, "mean", "three numbers", self.mean)
        is_std = len(self.std) == 3 and all(0 < value < math.inf for value in self.std)
        check_that(is_std, "std", "three numbers above 0", self.std)
        check_choice("dtype", self.dtype, ("float32", "bfloat16", "float16"))

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images of the same size and of `dtype`."""
        top = 1 if images.is_floating_point() else 255
        # One multiplication and one addition: x / (top · std) − mean / std.
        scale = _channels([1 / (top * std) for std in self.std], images)
        pairs = zip(self.mean, self.std, strict=True)
        shift = _channels([-mean / std for mean, std in pairs], images)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return (images * scale + shift).to(dtype)


CIFAR10_COLORS = Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
CIFAR100_COLORS = Normalize(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
IMAGENET_COLORS = Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
PLUS_MINUS_ONE = Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
"""Pixels in [−1, 1], as in the released code of the paper."""


def gray(colors: Tensor) -> Tensor:
    """(B, 1, H, W) luma of (B, 3, H, W) by the weights of ITU-R BT.601."""
    red, green, blue = colors.chunk(3, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def turn_hue(colors: Tensor, turns: Tensor) -> Tensor:
    """Colors in [0, 1] with the hue of HSV turned by `turns` (B, 1, 1, 1), in rounds.

    Value and saturation stay.
    """
    red, green, blue = colors.chunk(3, dim=1)
    value = colors.amax(dim=1, keepdim=True)
    chroma = value - colors.amin(dim=1, keepdim=True)
    # A gray has no hue. Any divisor serves, because its chroma is 0.
    divisor = chroma.masked_fill(chroma == 0, 1)
    sextant = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    # Each channel is a trapezoid over the circle, and red is two sextants after green.
    phases = torch.arange(5, 0, -2, device=colors.device)[:, None, None]  # (3, 1, 1)
    place = (sextant + 6 * turns + phases) % 6
    return value - chroma * place.minimum(4 - place).clamp(0, 1)


def _factor(spread: float, draws: Tensor) -> Tensor:
    low = max(0.0, 1 - spread)
    return low + (1 + spread - low) * draws


def _blend(other: Tensor, colors: Tensor, factor: Tensor) -> Tensor:
    """All of `other` at factor 0, all of `colors` at 1, and beyond it even farther from `other`."""
    return (other + factor * (colors - other)).clamp(0, 1)


def _channels(values: list[float], images: Tensor) -> Tensor:
    """(3, 1, 1) float32, filled on the device: a copy from the host would stall it."""
    cells = []
    for value in values:
        cells.append(torch.full((1, 1), value, dtype=torch.float32, device=images.device))
    return torch.stack(cells)
