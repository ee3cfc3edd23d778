"""The colors of an image: jitter as in the paper's DA variant, and the step from bytes to what a network takes.

uint8 is 0 to 255; floating point is 0 to 1 until `Normalize`, which comes after all else that looks at colors.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nearsay.transforms.draws import transform_alone
from nearsay.validation import check_number

Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class ColorJitter:
    """Random brightness, contrast, saturation and hue, always in this order; uint8 or floating point, given back as is.

    The first three are blends with black, with the mean gray of the image, and with its grays, by factors uniform in
    [max(0, 1 − x), 1 + x]; hue turns the circle of HSV by up to `hue` of a round either way. Results are clamped to the
    range after each. The same formulas as torchvision, which shuffles their order.
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
        colors = (
            images.float() / 255
            if is_bytes
            else images.to(torch.promote_types(images.dtype, torch.float32))
        )
        draws = draws[:, :, None, None, None].to(colors.dtype)  # (B, 4, 1, 1, 1)
        if self.brightness:
            colors = (colors * _factor(self.brightness, draws[:, 0])).clamp(0, 1)
        if self.contrast:
            mean = gray(colors).mean(
                dim=(2, 3), keepdim=True, dtype=torch.float64
            )  # alike in any order of summation
            colors = _blend(mean.to(colors.dtype), colors, _factor(self.contrast, draws[:, 1]))
        if self.saturation:
            colors = _blend(gray(colors), colors, _factor(self.saturation, draws[:, 2]))
        if self.hue:
            colors = turn_hue(colors, (2 * draws[:, 3] - 1) * self.hue)
        return (colors * 255).round().to(torch.uint8) if is_bytes else colors.to(images.dtype)


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """(x − mean) / std for each channel, where uint8 is scaled to [0, 1] first and floating point taken to be there."""

    mean: Triple
    std: Triple
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_draws: ClassVar[int] = 0
    __call__ = transform_alone

    def __post_init__(self) -> None:
        for name, values, low in (("mean", self.mean, -math.inf), ("std", self.std, 0)):
            if len(values) != 3 or not all(low < value < math.inf for value in values):
                raise ValueError(
                    f"{name} {values!r} must be three numbers"
                    + (" above 0" if name == "std" else "")
                )
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images of the same size and of `dtype`, computed in float32."""
        top = 1 if images.is_floating_point() else 255
        scale = _channels([1 / (top * std) for std in self.std], images)
        shift = _channels(
            [-mean / std for mean, std in zip(self.mean, self.std, strict=True)], images
        )
        dtype: torch.dtype = getattr(torch, self.dtype)
        return (images * scale + shift).to(dtype)


CIFAR10_COLORS = Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
CIFAR100_COLORS = Normalize(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
IMAGENET_COLORS = Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
PLUS_MINUS_ONE = Normalize(
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)  # pixels in [−1, 1], as in the released code


def gray(colors: Tensor) -> Tensor:
    """(B, 1, H, W) luma of (B, 3, H, W) by the weights of ITU-R BT.601."""
    red, green, blue = colors.chunk(3, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def turn_hue(colors: Tensor, turns: Tensor) -> Tensor:
    """Colors in [0, 1] with the hue of HSV moved by `turns` (B, 1, 1, 1) of a round; value and saturation stay."""
    red, green, blue = colors.chunk(3, dim=1)
    value = colors.amax(dim=1, keepdim=True)
    chroma = value - colors.amin(dim=1, keepdim=True)
    divisor = chroma.masked_fill(chroma == 0, 1)  # a gray has no hue, and none is needed
    sextant = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    # each channel is a trapezoid over the circle, that of red two sextants after that of green
    phases = torch.arange(5, 0, -2, device=colors.device)[:, None, None]  # (3, 1, 1)
    place = (sextant + 6 * turns + phases) % 6
    return value - chroma * place.minimum(4 - place).clamp(0, 1)


def _factor(spread: float, draws: Tensor) -> Tensor:
    low = max(0.0, 1 - spread)
    return low + (1 + spread - low) * draws


def _blend(other: Tensor, colors: Tensor, factor: Tensor) -> Tensor:
    """All of `other` at factor 0, all of `colors` at 1, and beyond it farther away."""
    return (other + factor * (colors - other)).clamp(0, 1)


def _channels(values: list[float], images: Tensor) -> Tensor:
    """(3, 1, 1) float32 made by filling, since a copy from the host would stall the device."""
    return torch.stack(
        [torch.full((1, 1), value, dtype=torch.float32, device=images.device) for value in values]
    )
