"""Transforms that move pixels: crop, flip, resized crop, cutout, and the warp of strong
augmentation.

`PadCrop`, `Flip` and `Cutout` copy pixels of any dtype. Interpolation takes uint8 or floating point
and keeps the dtype; it computes in float32, or in float64 for float64.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from nearsay.transforms.views import transform_alone, whole
from nearsay.validation import check_choice, check_number, check_that, check_whole

# How often a box inside the image is tried, as in torchvision.
_ATTEMPTS = 10


class Box(NamedTuple):
    """Where to cut, in whole pixels; int64 of one shape."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


@dataclass(frozen=True, kw_only=True)
class PadCrop:
    """Pad on all sides and cut the old size out at random; any dtype.

    Args:
        padding: How many pixels to add on each side.
        mode: "reflect" mirrors the image at its edges, "zeros" adds black.

    >>> import torch
    >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    >>> PadCrop(padding=1)(images, torch.arange(2), seed=0, epoch=1).shape
    torch.Size([2, 3, 8, 8])
    """

    padding: int = 4
    mode: Literal["reflect", "zeros"] = "reflect"
    num_draws: ClassVar[int] = 2
    __call__ = transform_alone

    def __post_init__(self) -> None:
        check_whole("padding", self.padding, 0)
        check_choice("mode", self.mode, ("reflect", "zeros"))

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crops of the same size and dtype, in the channels_last format."""
        height, width = images.shape[2:]
        offsets = whole(draws, 2 * self.padding + 1) - self.padding  # (B, 2)
        rows = offsets[:, :1] + torch.arange(height, device=images.device)  # (B, H)
        columns = offsets[:, 1:] + torch.arange(width, device=images.device)  # (B, W)
        examples = torch.arange(len(images), device=images.device)[:, None, None]
        source_rows = _reflect(rows, height)[:, :, None]
        source_columns = _reflect(columns, width)[:, None, :]
        # Channels last, so that one gather copies whole pixels.
        crops = images.permute(0, 2, 3, 1)[examples, source_rows, source_columns]  # (B, H, W, 3)
        if self.mode == "zeros":
            is_image = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
            crops = crops.masked_fill(~is_image[..., None], 0)
        return crops.permute(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Mirror left and right at random; any dtype.

    Args:
        probability: Of mirroring, from 0 to 1.

    >>> import torch
    >>> images = torch.arange(2).view(1, 1, 1, 2).repeat(1, 3, 1, 1)
    >>> Flip(probability=1)(images, torch.tensor([0]), seed=0, epoch=1)[0, 0]
    tensor([[1, 0]])
    """

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
    """Cover a square around a random pixel, clipped at the edges (DeVries & Taylor, 2017); any
    dtype.

    Args:
        size: Side of the square in pixels.
        fill: Its value. After `Normalize`, 0 is the mean color, as in that paper; before it, 0 is
            black and 128 gray.

    >>> import torch
    >>> images = torch.ones(1, 3, 4, 4)
    >>> Cutout(size=8)(images, torch.tensor([0]), seed=0, epoch=1).sum()
    tensor(0.)
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
        is_color = images.is_floating_point() or self.fill in range(256)
        check_that(is_color, "fill", f"from 0 to 255 for {images.dtype} images", self.fill)
        # Positions counted from the edge of the square, so that 0 to size − 1 are inside.
        positions = []
        for axis, length in enumerate(images.shape[2:]):
            center = whole(draws[:, axis : axis + 1], length)  # (B, 1)
            places = torch.arange(length, device=images.device)
            positions.append(places - center + self.size // 2)
        rows, columns = positions  # (B, H) and (B, W)
        hidden = _inside(rows, self.size)[:, :, None] & _inside(columns, self.size)[:, None, :]
        return images.masked_fill(hidden[:, None], self.fill)


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop:
    """Cut a box of random area and shape and resize it to a square (the inception crop).

    Images are uint8 or floating point. Arrays are resized bilinearly without antialiasing, which is
    right as long as a box is not much larger than `size`, as when 32×32 images stay 32×32. Image
    files are cut by `box` and resized with antialiasing in the worker that decodes them. It must be
    the first transform of its view, so that both ways draw the same box.

    Args:
        size: Side of the square in pixels.
        area: Smallest and largest share of the image; the released code of the paper uses (0.05,
            1.0).
        ratio: Smallest and largest width / height, drawn uniformly in the logarithm.

    >>> import torch
    >>> images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    >>> RandomResizedCrop(size=16)(images, torch.arange(2), seed=0, epoch=1).shape
    torch.Size([2, 3, 16, 16])
    """

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    num_draws: ClassVar[int] = 2 * _ATTEMPTS + 2
    __call__ = transform_alone

    def __post_init__(self) -> None:
        check_whole("size", self.size, 1)
        is_area = len(self.area) == 2 and 0 < self.area[0] <= self.area[1] <= 1
        check_that(is_area, "area", "two rising shares above 0 and at most 1", self.area)
        is_ratio = len(self.ratio) == 2 and 0 < self.ratio[0] <= self.ratio[1] < math.inf
        check_that(is_ratio, "ratio", "two rising numbers above 0", self.ratio)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images (B, 3, size, size) of the same dtype."""
        height, width = images.shape[2:]
        heights = torch.full_like(draws[:, 0], height, dtype=torch.int64)
        widths = torch.full_like(draws[:, 0], width, dtype=torch.int64)
        box = self.box(heights, widths, draws)
        y = self._points(box.top[:, None], box.height[:, None])
        x = self._points(box.left[:, None], box.width[:, None])
        rows, columns = y[:, :, None], x[:, None, :]
        return warp(images, columns.expand(-1, self.size, -1), rows.expand(-1, -1, self.size))

    def _points(self, start: Tensor, length: Tensor) -> Tensor:
        """(B, size) where to take the pixels of the square from, along one axis."""
        centers = torch.arange(self.size, device=start.device) + 0.5
        points = start + centers * (length / self.size)
        # Half a pixel from the edges, so that nothing outside the box is blended in.
        return points.maximum(start + 0.5).minimum(start + length - 0.5)

    def box(self, height: Tensor, width: Tensor, draws: Tensor) -> Box:
        """What to cut from images of size `height` and `width`, int64 (...), by `draws` (...,
        num_draws).

        If no attempt fits into the image, it is the largest box in the middle with a shape that
        `ratio` allows, as in torchvision.
        """
        # In float64, so that a CPU and a GPU round to the same integers.
        attempts = draws[..., : 2 * _ATTEMPTS].double()
        shares, shapes = attempts[..., ::2], attempts[..., 1::2]  # (..., attempts)
        shares = self.area[0] + (self.area[1] - self.area[0]) * shares
        areas = shares * (height * width)[..., None]
        ratios = (math.log(self.ratio[0]) + math.log(self.ratio[1] / self.ratio[0]) * shapes).exp()
        heights = (areas / ratios).sqrt().round().long()
        widths = (areas * ratios).sqrt().round().long()
        fits = (heights >= 1) & (heights <= height[..., None])
        fits &= (widths >= 1) & (widths <= width[..., None])
        # Of equal values argmax gives the first, here the first attempt that fits.
        first = fits.to(torch.uint8).argmax(dim=-1, keepdim=True)
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
    """Images at (B, H, W) points, bilinear; pixel (i, j) covers x from j to j + 1 and y from i to i
    + 1.

    Points outside get the nearest pixel; uint8 is rounded.
    """
    height, width = images.shape[2:]
    exact = images.to(torch.promote_types(images.dtype, torch.float32))
    # grid_sample counts both axes from −1 to 1.
    grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], dim=-1)  # (B, H, W, 2)
    grid = grid.to(exact.dtype)
    warped = grid_sample(exact, grid, mode="bilinear", padding_mode="border", align_corners=False)
    if not images.is_floating_point():
        warped = warped.round()
    return warped.to(images.dtype)


def _reflect(places: Tensor, length: int) -> Tensor:
    """Places on an endless line, mirrored into [0, length); the pixels at the ends are not
    repeated.
    """
    period = max(2 * (length - 1), 1)
    folded = places % period
    return folded.minimum(period - folded)


def _inside(places: Tensor, length: int) -> Tensor:
    return (places >= 0) & (places < length)
