"""What an image transform is, its random numbers, and batches with one or two augmented views.

A draw is a uniform number of `nearsay.rng` for (seed, "augment view v", epoch, example): the same
alone or in any batch, on any device, in any worker. The transforms of a view share one row of
draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Protocol

import torch
from torch import Tensor

from nearsay import rng
from nearsay.batch import Batch
from nearsay.validation import check_that


class Transform(Protocol):
    """A function of images (B, 3, H, W) and of the random numbers drawn for each of them.

    To write your own, give a frozen dataclass `num_draws` and `apply`. If it also has a method
    `box`, as `RandomResizedCrop` has, workers cut image files by that box before they resize them.

    >>> import torch
    >>> class Darken:
    ...     num_draws = 1
    ...
    ...     def apply(self, images, draws):
    ...         return (images * draws[:, :, None, None]).to(images.dtype)
    >>> images = torch.full((1, 3, 2, 2), 200, dtype=torch.uint8)
    >>> Darken().apply(images, torch.tensor([[0.5]])).amax()
    tensor(100, dtype=torch.uint8)
    """

    @property
    def num_draws(self) -> int:
        """How many random numbers an image needs."""
        ...

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """The transformed images; `draws` is (B, num_draws) float32 in [0, 1).

        Neither argument is changed.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Transform the images of a batch: one view of each example.

    Args:
        transforms: Applied in this order; a `RandomResizedCrop` must be the first.

    >>> import torch
    >>> from nearsay.batch import Batch
    >>> from nearsay.transforms import Flip, PadCrop
    >>> batch = Batch(
    ...     inputs=torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
    ...     targets=torch.eye(2),
    ...     indices=torch.arange(2),
    ... )
    >>> Augment(transforms=(PadCrop(), Flip()))(batch, seed=0, epoch=1).inputs.shape
    torch.Size([2, 3, 8, 8])
    """

    transforms: tuple[Transform, ...]

    def __post_init__(self) -> None:
        _check_transforms("transforms", self.transforms)

    def __call__(
        self, batch: Batch, *, seed: int, epoch: int | Tensor, is_cut: bool = False
    ) -> Batch:
        """The batch with new inputs; `is_cut` if a worker has already cut the boxes of the crop."""
        _check_batch(batch, 1)
        num_done = _num_done(self.transforms, is_cut)
        images = transform_images(
            self.transforms, batch.inputs, batch.indices, seed=seed, epoch=epoch, num_done=num_done
        )
        return replace(batch, inputs=images)


@dataclass(frozen=True, kw_only=True)
class Views:
    """Two views of each example, each with its own transforms and draws.

    Args:
        first: Transforms of the first view, as in `Augment`.
        second: Transforms of the second view. All second views follow all first views.

    >>> import torch
    >>> from nearsay.batch import Batch
    >>> from nearsay.transforms import Flip
    >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    >>> batch = Batch(inputs=images, targets=torch.eye(2), indices=torch.tensor([4, 9]))
    >>> Views(first=(), second=(Flip(),))(batch, seed=0, epoch=1).indices
    tensor([4, 9, 4, 9])
    """

    first: tuple[Transform, ...]
    second: tuple[Transform, ...]

    def __post_init__(self) -> None:
        _check_transforms("first", self.first)
        _check_transforms("second", self.second)

    def __call__(
        self, batch: Batch, *, seed: int, epoch: int | Tensor, is_cut: bool = False
    ) -> Batch:
        """A batch of two views from a batch of one; the first view is the one of `Augment`.

        With `is_cut`, a worker has cut the box of each view, and the batch already has two views.
        """
        _check_batch(batch, 2 if is_cut else 1)
        num = len(batch.indices) // batch.views
        indices, targets = batch.indices[:num], batch.targets[:num]
        views = []
        for view, transforms in enumerate((self.first, self.second)):
            images = batch.inputs
            if is_cut:
                images = images[view * num : (view + 1) * num]
            views.append(
                transform_images(
                    transforms,
                    images,
                    indices,
                    seed=seed,
                    epoch=epoch,
                    view=view,
                    num_done=_num_done(transforms, is_cut),
                )
            )
        return Batch(
            inputs=torch.cat(views),
            targets=targets.repeat(2, 1),
            indices=indices.repeat(2),
            views=2,
        )


def make_draws(
    num: int, indices: Tensor, *, seed: int, epoch: int | Tensor, view: int = 0
) -> Tensor:
    """(..., num) float32 in [0, 1) for `indices` (...); a larger `num` continues a smaller one."""
    return rng.uniform(seed, f"augment view {index(view)}", epoch, indices, num=num)


def whole(draws: Tensor, high: int | Tensor) -> Tensor:
    """Uniform draws as int64 in [0, high).

    The arithmetic is in integers, because a float32 product could be rounded up to `high`.
    """
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
    """Apply the transforms to images (B, 3, H, W) of examples `indices` (B,), all draws in one
    call.

    The first `num_done` transforms have been applied elsewhere; they only keep their draws.
    """
    is_batch = images.ndim == 4 and images.shape[1] == 3
    check_that(is_batch, "images", "(B, 3, H, W)", tuple(images.shape))
    has_indices = indices.shape == images.shape[:1]
    check_that(has_indices, "indices", "(B,), one per image", tuple(indices.shape))
    counts = [transform.num_draws for transform in transforms]
    if sum(counts[num_done:]):
        draws = make_draws(sum(counts), indices, seed=seed, epoch=epoch, view=view)  # (B, all)
    else:
        # No transform reads them, so no random numbers are made.
        draws = torch.zeros(len(images), sum(counts), device=images.device)
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
    """Transform images (B, 3, H, W) of examples `indices` (B,) as the only transform of a view."""
    return transform_images((self,), images, indices, seed=seed, epoch=epoch, view=view)


def _cuts_boxes(transform: Transform) -> bool:
    """Whether it cuts a box out of an image, which workers do before they resize an image file."""
    return hasattr(transform, "box")


def _num_done(transforms: tuple[Transform, ...], is_cut: bool) -> int:
    return int(is_cut and bool(transforms) and _cuts_boxes(transforms[0]))


def _check_transforms(name: str, transforms: tuple[Transform, ...]) -> None:
    is_tuple = isinstance(transforms, tuple)
    check_that(is_tuple, name, "a tuple of transforms, such as (PadCrop(), Flip())", transforms)
    for transform in transforms[1:]:
        # Its draws are then the first of the row, where a worker finds them.
        check_that(not _cuts_boxes(transform), name, "a tuple with the crop first", transforms)


def _check_batch(batch: Batch, views: int) -> None:
    is_right = batch.views == views and len(batch.indices) % views == 0
    check_that(is_right, "views", f"{views} here", batch.views)
    if batch.mix is not None or batch.teacher is not None:
        raise ValueError("batch must be augmented before it has a teacher or mixup.")
