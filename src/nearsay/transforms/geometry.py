"""Where the pixels of an image come from: crop, flip, resized crop, cutout, and the warp that strong augmentation uses.

`PadCrop`, `Flip` and `Cutout` move exact pixels of any dtype. What interpolates takes uint8 or floating point and gives
the same back, computed in float32 (float64 stays).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from nearsay.transforms.draws import transform_alone, whole
from nearsay.validation import check_number, check_whole

_ATTEMPTS = 10  # to find a box inside the image; as many as in torchvision


class Box(NamedTuple):
    """Where to cut, in whole pixels; int64 of one shape."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


@dataclass(frozen=True, kw_only=True)
class PadCrop:
    """Pad by `padding` on all sides, and cut the old size out at random; any dtype, exact pixels."""

    padding: int = 4
    mode: Literal["reflect", "zeros"] = "reflect"
    num_draws: ClassVar[int] = 2
    __call__ = transform_alone

    def __post_init__(self) -> None:
        check_whole("padding", self.padding, 0)
        if self.mode not in ("reflect", "zeros"):
            raise ValueError(f"mode {self.mode!r} must be 'reflect' or 'zeros'")

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crops of the same size and dtype, in the channels_last format."""
        height, width = images.shape[2:]
        offsets = whole(draws, 2 * self.padding + 1) - self.padding  # (B, 2)
        rows = offsets[:, :1] + torch.arange(height, device=images.device)  # (B, H)
        columns = offsets[:, 1:] + torch.arange(width, device=images.device)  # (B, W)
        everyone = torch.arange(len(images), device=images.device)[:, None, None]
        crops = images.permute(0, 2, 3, 1)[
            everyone, _reflect(rows, height)[:, :, None], _reflect(columns, width)[:, None, :]
        ]  # (B, H, W, 3)
        if self.mode == "zeros":
            is_image = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
            crops = crops.masked_fill(~is_image[..., None], 0)
        return crops.permute(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Mirror left and right with some probability; any dtype, exact pixels."""

    probability: float = 0.5
    num_draws: ClassVar[int] = 1
    __call__ = transform_alone

    def __post_init__(self) -> None:
        check_number("probability", self.probability, 0, 1)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images of the same size and dtype."""
        return torch.where((draws < self.probability)[:, :, None, None], images.flip(-1), images)


@dataclass(frozen=True, kw_only=True)
class Cutout:
    """Cover a square around a random pixel (DeVries & Taylor, 2017), clipped where it leaves the image; any dtype.

    After `Normalize` a fill of 0 is the mean color, as in that paper; before it, 0 is black and 128 gray.
    """

    size: int = 16
    fill: float = 0
    num_draws: ClassVar[int] = 2
    __call__ = transform_alone

    def __post_init__(self) -> None:
        check_whole("size", self.size, 0)
        check_number("fill", self.fill, -1e9, 1e9)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images of the same size and dtype."""
        if not images.is_floating_point() and self.fill not in range(256):
            raise ValueError(
                f"fill {self.fill!r} must be a whole number from 0 to 255 for images of {images.dtype}"
            )
        rows, columns = (
            torch.arange(length, device=images.device)
            - whole(draws[:, axis : axis + 1], length)
            + self.size // 2
            for axis, length in enumerate(images.shape[2:])
        )  # (B, H) and (B, W), counted from the edge of the square
        hidden = _inside(rows, self.size)[:, :, None] & _inside(columns, self.size)[:, None, :]
        return images.masked_fill(hidden[:, None], self.fill)


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop:
    """Cut a box of random area and shape and resize it to a square (the inception crop); uint8 or floating point.

    `area` is a share of the image, `ratio` width / height, uniform in its logarithm; the released code of the paper
    uses area=(0.05, 1.0). Bilinear without antialiasing: right as long as a box is not much larger than `size`, as when
    32×32 images stay 32×32. Large images of varying size are cut by `box` and resized, with antialiasing, in the
    worker that decodes them. It must stand first in its view, so that both ways draw the same box.
    """

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    num_draws: ClassVar[int] = 2 * _ATTEMPTS + 2
    __call__ = transform_alone

    def __post_init__(self) -> None:
        check_whole("size", self.size, 1)
        if len(self.area) != 2 or not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(
                f"area {self.area!r} must be a smallest and a largest share, above 0 and at most 1"
            )
        if len(self.ratio) != 2 or not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(
                f"ratio {self.ratio!r} must be a smallest and a largest width / height, above 0"
            )

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images (B, 3, size, size) of the same dtype."""
        heights, widths = (
            torch.full_like(draws[:, 0], length, dtype=torch.int64) for length in images.shape[2:]
        )
        box = self.box(heights, widths, draws)
        centers = torch.arange(self.size, device=images.device) + 0.5
        y, x = (
            (start + centers * (length / self.size))
            .maximum(start + 0.5)
            .minimum(start + length - 0.5)  # stay inside
            for start, length in (
                (box.top[:, None], box.height[:, None]),
                (box.left[:, None], box.width[:, None]),
            )
        )  # (B, size) each
        return warp(
            images, x[:, None, :].expand(-1, self.size, -1), y[:, :, None].expand(-1, -1, self.size)
        )

    def box(self, height: Tensor, width: Tensor, draws: Tensor) -> Box:
        """What to cut from images of any size, int64 (...), by `draws` (..., num_draws).

        Integers by way of float64, so a CPU and a GPU agree. If none of ten attempts fits into the image, it is the
        largest box in the middle whose shape `ratio` allows, as in torchvision.
        """
        attempts = draws[..., : 2 * _ATTEMPTS].double()
        shares, shapes = attempts[..., ::2], attempts[..., 1::2]  # (..., attempts)
        areas = (self.area[0] + (self.area[1] - self.area[0]) * shares) * (height * width)[
            ..., None
        ]
        ratios = (math.log(self.ratio[0]) + math.log(self.ratio[1] / self.ratio[0]) * shapes).exp()
        heights, widths = (
            (areas / ratios).sqrt().round().long(),
            (areas * ratios).sqrt().round().long(),
        )
        fits = (
            (heights >= 1)
            & (heights <= height[..., None])
            & (widths >= 1)
            & (widths <= width[..., None])
        )
        first = fits.to(torch.uint8).argmax(dim=-1, keepdim=True)  # of equals the first
        middle_height = height.minimum((width.double() / self.ratio[0]).round().long().clamp(min=1))
        middle_width = width.minimum((height.double() * self.ratio[1]).round().long().clamp(min=1))
        any_fits = fits.any(dim=-1)
        heights = torch.where(any_fits, heights.gather(-1, first)[..., 0], middle_height)
        widths = torch.where(any_fits, widths.gather(-1, first)[..., 0], middle_width)
        free_rows, free_columns = height - heights, width - widths
        top = torch.where(any_fits, whole(draws[..., -2], free_rows + 1), free_rows // 2)
        left = torch.where(any_fits, whole(draws[..., -1], free_columns + 1), free_columns // 2)
        return Box(top, left, heights, widths)


def warp(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Images at (B, H, W) points, bilinear; pixel (i, j) covers x from j to j + 1 and y from i to i + 1.

    Points outside get the nearest pixel; uint8 is rounded.
    """
    height, width = images.shape[2:]
    exact = images.to(torch.promote_types(images.dtype, torch.float32))
    grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], dim=-1).to(
        exact.dtype
    )  # (B, H, W, 2)
    warped = grid_sample(exact, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return (warped if images.is_floating_point() else warped.round()).to(images.dtype)


def _reflect(places: Tensor, length: int) -> Tensor:
    """Places on an endless line, folded into [0, length) at its ends, which are not repeated."""
    period = max(2 * (length - 1), 1)
    folded = places % period
    return folded.minimum(period - folded)


def _inside(places: Tensor, length: int) -> Tensor:
    return (places >= 0) & (places < length)
