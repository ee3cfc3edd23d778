"""Batches in, batches out: one augmented view of each example, or two."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearsay.batch import Batch
from nearsay.transforms.draws import Transform, transform_images
from nearsay.transforms.geometry import RandomResizedCrop


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Transform the images of a batch, one view of each: `Augment(transforms=(PadCrop(), Flip(), CIFAR10_COLORS))`."""

    transforms: tuple[Transform, ...]

    def __post_init__(self) -> None:
        _check_transforms("transforms", self.transforms)

    def __call__(
        self, batch: Batch, *, seed: int, epoch: int | Tensor, is_cut: bool = False
    ) -> Batch:
        """The batch with new inputs; `is_cut` says that a worker has cut the boxes of a `RandomResizedCrop` already."""
        _check_batch(batch, 1)
        return replace(
            batch,
            inputs=_view(self.transforms, batch.inputs, batch.indices, 0, seed, epoch, is_cut),
        )


@dataclass(frozen=True, kw_only=True)
class Views:
    """Two views of each example, each with transforms and draws of its own: first all first views, then all second."""

    first: tuple[Transform, ...]
    second: tuple[Transform, ...]

    def __post_init__(self) -> None:
        _check_transforms("first", self.first)
        _check_transforms("second", self.second)

    def __call__(
        self, batch: Batch, *, seed: int, epoch: int | Tensor, is_cut: bool = False
    ) -> Batch:
        """A batch of two views from a batch of one; the first is what `Augment` would make of it.

        With `is_cut`, a worker has cut the box of a `RandomResizedCrop` for each view, and the batch has two views.
        """
        _check_batch(batch, 2 if is_cut else 1)
        num = len(batch.indices) // batch.views
        images = (
            (batch.inputs[:num], batch.inputs[num:]) if is_cut else (batch.inputs, batch.inputs)
        )
        indices, targets = batch.indices[:num], batch.targets[:num]
        return Batch(
            inputs=torch.cat(
                [
                    _view(transforms, images[view], indices, view, seed, epoch, is_cut)
                    for view, transforms in enumerate((self.first, self.second))
                ]
            ),
            targets=targets.repeat(2, 1),
            indices=indices.repeat(2),
            views=2,
        )


def _view(
    transforms: tuple[Transform, ...],
    images: Tensor,
    indices: Tensor,
    view: int,
    seed: int,
    epoch: int | Tensor,
    is_cut: bool,
) -> Tensor:
    num_done = int(is_cut and bool(transforms) and isinstance(transforms[0], RandomResizedCrop))
    return transform_images(
        transforms, images, indices, seed=seed, epoch=epoch, view=view, num_done=num_done
    )


def _check_transforms(name: str, transforms: tuple[Transform, ...]) -> None:
    if not isinstance(transforms, tuple):
        raise ValueError(
            f"{name} {transforms!r} must be a tuple of transforms, such as (PadCrop(), Flip())"
        )
    if any(isinstance(transform, RandomResizedCrop) for transform in transforms[1:]):
        raise ValueError(
            f"RandomResizedCrop must stand first in {name}, where a worker finds the draws of its box"
        )


def _check_batch(batch: Batch, views: int) -> None:
    if batch.views != views or len(batch.indices) % views:
        raise ValueError(
            f"{len(batch.indices)} rows in {batch.views} views must come in {views} here"
        )
    if batch.mix is not None or batch.teacher is not None:
        raise ValueError("augment a batch first and make its teacher and mixup afterwards")
