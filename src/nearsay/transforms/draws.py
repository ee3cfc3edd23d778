"""What an image transform is, and how it comes to its random numbers.

A draw is a uniform number of `nearsay.rng` for (seed, "augment view v", epoch, example): the same alone or in any
batch, on any device, in any worker. The transforms of a view take their draws from one row of them, one after another.
"""

from collections.abc import Sequence
from operator import index
from typing import Protocol

import torch
from torch import Tensor

from nearsay import rng


class Transform(Protocol):
    """A function of images (B, 3, H, W) and of what was drawn for each of them."""

    @property
    def num_draws(self) -> int:
        """How many draws an image needs."""
        ...

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """The transformed images; `draws` is (B, num_draws) float32 in [0, 1). Neither argument is changed."""
        ...


def make_draws(
    num: int, indices: Tensor, *, seed: int, epoch: int | Tensor, view: int = 0
) -> Tensor:
    """(..., num) float32 in [0, 1) for `indices` (...); a larger `num` continues a smaller one."""
    return rng.uniform(seed, f"augment view {index(view)}", epoch, indices, num=num)


def whole(draws: Tensor, high: int | Tensor) -> Tensor:
    """Uniform draws as int64 in [0, high), without rounding: a float32 product could round up to `high`."""
    return ((draws * 2**24).long() * high) >> 24


def transform_images(
    transforms: Sequence[Transform],
    images: Tensor,
    indices: Tensor,
    *,
    seed: int,
    epoch: int | Tensor,
    view: int = 0,
    num_done: int = 0,
) -> Tensor:
    """The transforms one after another, all draws in one call; the first `num_done` are done and only keep their draws.

    `images` are (B, 3, H, W), `indices` (B,).
    """
    if images.ndim != 4 or images.shape[1] != 3 or indices.shape != images.shape[:1]:
        raise ValueError(
            f"images {tuple(images.shape)} and indices {tuple(indices.shape)} must be (B, 3, H, W) and (B,)"
        )
    counts = [transform.num_draws for transform in transforms]
    if sum(counts[num_done:]):
        draws = make_draws(sum(counts), indices, seed=seed, epoch=epoch, view=view)  # (B, all)
    else:
        draws = torch.zeros(len(images), sum(counts), device=images.device)  # nobody looks at them
    shares = draws.split_with_sizes(counts, dim=1)
    for transform, share in list(zip(transforms, shares, strict=True))[num_done:]:
        images = transform.apply(images, share)
    return images


def transform_alone(
    self: Transform,
    images: Tensor,
    indices: Tensor,
    *,
    seed: int,
    epoch: int | Tensor,
    view: int = 0,
) -> Tensor:
    """The transformed images, as if this were the only transform of its view; `images` (B, 3, H, W), `indices` (B,)."""
    return transform_images((self,), images, indices, seed=seed, epoch=epoch, view=view)
