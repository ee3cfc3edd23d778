"""Strong augmentation: a few random operations on each image, all images at once."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay.transforms.geometry import warp
from nearsay.transforms.views import transform_alone, whole
from nearsay.validation import check_number, check_that, check_whole

OPERATIONS = (
    "identity",
    "autocontrast",
    "equalize",
    "solarize",
    "posterize",
    "brightness",
    "contrast",
    "color",
    "sharpness",
    "rotate",
    "shear x",
    "shear y",
    "translate x",
    "translate y",
)
# The gray of pixels that come from outside the image.
_FILL = 128


class _Affine(NamedTuple):
    """Where the output takes its pixels from: matrix · point + shift, in pixels from the middle of
    the image.
    """

    matrix: Tensor  # (B, 2, 2), x before y
    shift: Tensor  # (B, 2)


@dataclass(frozen=True, kw_only=True)
class RandAugment:
    """Apply a few random operations to each image (Cubuk et al., 2020); uint8 in and out.

    The operations are those of `OPERATIONS`. The strength of each is uniform between nothing and
    `magnitude`, with a random sign, as in FixMatch; the original fixes the strength. Colors agree
    with Pillow to a unit in 255. The moves of an image become one bilinear warp about its middle,
    after all color changes; uncovered pixels are gray.

    Args:
        num_ops: How many operations each image gets.
        magnitude: From 0 to 10. At 10 they are: rotate by 30°, shear by 0.3, translate by 0.3 of
            the side, enhance by 1 ± 0.9, posterize to 4 bits, solarize everything.

    >>> import torch
    >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    >>> RandAugment(num_ops=2)(images, torch.arange(2), seed=0, epoch=1).shape
    torch.Size([2, 3, 8, 8])
    """

    num_ops: int = 2
    magnitude: float = 10
    __call__ = transform_alone

    def __post_init__(self) -> None:
        check_whole("num_ops", self.num_ops, 0)
        check_number("magnitude", self.magnitude, 0, 10)

    @property
    def num_draws(self) -> int:
        """Two for each operation: which, and how strong."""
        return 2 * self.num_ops

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """uint8 images of the same size."""
        is_bytes = images.dtype == torch.uint8
        hint = "Put RandAugment before Normalize."
        check_that(is_bytes, "images", "torch.uint8", images.dtype, hint=hint)
        height, width = images.shape[2:]
        move = _stay(draws)
        for layer in range(self.num_ops):
            operation = whole(draws[:, 2 * layer], len(OPERATIONS))  # (B,)
            strength = (2 * draws[:, 2 * layer + 1] - 1) * (self.magnitude / 10)  # (B,) in [−1, 1)
            images = _tone(images, operation, strength.abs())
            images = _enhance(images, operation, strength)
            move = _followed_by(move, _step(operation, strength, height, width))
        return _moved(images, move) if self.num_ops else images


def _is(operation: Tensor, name: str) -> Tensor:
    return operation == OPERATIONS.index(name)


def _tone(images: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    """Autocontrast, equalize, solarize and posterize: each is a table from old to new values for
    each channel.
    """
    levels = torch.arange(256, device=images.device)
    values = images.flatten(2).long()  # (B, 3, pixels)
    # A histogram of each channel of each image.
    ones = values.new_ones(()).expand_as(values)
    counts = values.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, ones)  # (B, 3, 256)
    operation, strength = operation[:, None, None], strength[:, None, None]
    low, high = values.amin(dim=2, keepdim=True), values.amax(dim=2, keepdim=True)  # (B, 3, 1)
    contrasted = ((levels - low) * 255 // (high - low).clamp(min=1)).clamp(0, 255)
    contrasted = torch.where(high > low, contrasted, levels)
    below = counts.cumsum(dim=2) - counts
    # As in Pillow: all pixels but those of the highest value, spread over the range.
    step = below.gather(2, high) // 255
    equalized = torch.where(step > 0, (step // 2 + below) // step.clamp(min=1), levels)
    equalized = equalized.clamp(0, 255)
    solarized = torch.where(levels < 256 * (1 - strength), levels, 255 - levels)
    dropped_bits = (4 * strength).round().long()
    posterized = (levels >> dropped_bits) << dropped_bits
    table = levels.expand_as(counts)
    for name, other in (
        ("autocontrast", contrasted),
        ("equalize", equalized),
        ("solarize", solarized),
        ("posterize", posterized),
    ):
        table = torch.where(_is(operation, name), other, table)
    return table.to(torch.uint8).gather(2, values).view(images.shape)


def _enhance(images: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    """Brightness, contrast, color and sharpness: blends with black, mean gray, grays and a smoothed
    image.
    """
    operation, strength = operation[:, None, None, None], strength[:, None, None, None]
    colors = images.float()
    grays = _gray(images)  # (B, 1, H, W)
    num_pixels = images.shape[2] * images.shape[3]
    # The mean gray, rounded half up in integers.
    mean = (2 * grays.sum(dim=(2, 3), keepdim=True) + num_pixels) // (2 * num_pixels)
    other = _smoothed(colors)
    other = torch.where(_is(operation, "color"), grays, other)
    other = torch.where(_is(operation, "contrast"), mean, other)
    other = other.masked_fill(_is(operation, "brightness"), 0)
    first, last = OPERATIONS.index("brightness"), OPERATIONS.index("sharpness")
    is_chosen = (operation >= first) & (operation <= last)
    factor = torch.where(is_chosen, 1 + 0.9 * strength, 1)
    # The conversion drops the fraction, as Pillow does.
    return (other + factor * (colors - other)).clamp(0, 255).to(torch.uint8)


def _gray(images: Tensor) -> Tensor:
    """(B, 1, H, W) int64 luma from 0 to 255, by the integer arithmetic of Pillow."""
    red, green, blue = images.long().chunk(3, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def _smoothed(colors: Tensor) -> Tensor:
    """Each pixel with its eight neighbors in the proportion 5 : 1, rounded; the border as it is."""
    columns = colors[..., :-2] + colors[..., 1:-1] + colors[..., 2:]
    squares = columns[..., :-2, :] + columns[..., 1:-1, :] + columns[..., 2:, :]
    smoothed = colors.clone()
    smoothed[..., 1:-1, 1:-1] = ((squares + 4 * colors[..., 1:-1, 1:-1]) / 13).round()
    return smoothed


def _stay(draws: Tensor) -> _Affine:
    matrix = torch.eye(2, device=draws.device).expand(len(draws), 2, 2)
    return _Affine(matrix, torch.zeros(len(draws), 2, device=draws.device))


def _step(operation: Tensor, strength: Tensor, height: int, width: int) -> _Affine:
    """Rotate, shear or translate; all other operations do not move pixels."""

    def if_drawn(name: str, amount: Tensor) -> Tensor:
        return amount.where(_is(operation, name), 0)

    # In float64, because the float32 sine differs between devices.
    angle = if_drawn("rotate", strength).double() * math.radians(30)
    sine, cosine = angle.sin().float(), angle.cos().float()
    shear_x, shear_y = if_drawn("shear x", 0.3 * strength), if_drawn("shear y", 0.3 * strength)
    matrix = torch.stack([cosine, shear_x - sine, shear_y + sine, cosine], dim=1).view(-1, 2, 2)
    right = if_drawn("translate x", 0.3 * width * strength)
    down = if_drawn("translate y", 0.3 * height * strength)
    return _Affine(matrix, torch.stack([right, down], dim=1))


def _followed_by(first: _Affine, second: _Affine) -> _Affine:
    """Both moves as one."""

    def times(points: Tensor) -> Tensor:
        # (B, 2, n) by sums and products, because autocast would round a matrix product.
        return (first.matrix[:, :, :, None] * points[:, None, :, :]).sum(dim=2)

    return _Affine(times(second.matrix), times(second.shift[:, :, None])[:, :, 0] + first.shift)


def _moved(images: Tensor, move: _Affine) -> Tensor:
    height, width = images.shape[2:]
    # Centers of pixels, counted from the middle of the image.
    columns = torch.arange(width, device=images.device) + (0.5 - width / 2)
    rows = torch.arange(height, device=images.device) + (0.5 - height / 2)
    x, y = columns[None, None, :], rows[None, :, None]
    entries, shift = move.matrix[..., None, None], move.shift[..., None, None]
    source_x = entries[:, 0, 0] * x + entries[:, 0, 1] * y + (shift[:, 0] + width / 2)  # (B, H, W)
    source_y = entries[:, 1, 0] * x + entries[:, 1, 1] * y + (shift[:, 1] + height / 2)
    is_outside = (source_x < 0) | (source_x >= width) | (source_y < 0) | (source_y >= height)
    return warp(images, source_x, source_y).masked_fill(is_outside[:, None], _FILL)
