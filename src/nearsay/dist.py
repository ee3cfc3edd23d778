"""Collectives that are the identity on one process; the only door to torch.distributed.

All processes call them in the same order with tensors of equal shapes: pad batches instead of shortening them.
"""

from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.autograd.function import once_differentiable


def num_processes() -> int:
    """How many processes share the step; 1 without torch.distributed."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return distributed.get_rank() if num_processes() > 1 else 0


def total(tensor: Tensor) -> Tensor:
    """The sum over processes, without gradient."""
    if num_processes() == 1:
        return tensor.detach()
    summed = tensor.detach().clone()
    distributed.all_reduce(summed)
    return summed


def gather(tensor: Tensor) -> Tensor:
    """(B, ...) on each process -> (W·B, ...) in order of rank, with gradient back to every process."""
    if num_processes() == 1:
        return tensor
    return _Gather.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def others(tensor: Tensor) -> Tensor:
    """(B, ...) on each process -> (W·B − B, ...): the rows of all other processes, with gradient back to them."""
    own, rows = rank(), len(tensor)
    everyone = gather(tensor)
    return torch.cat([everyone[: own * rows], everyone[(own + 1) * rows :]])


def mean(rows: Tensor, weights: Tensor) -> Tensor:
    """The sum of (already weighted) rows over the global sum of weights; 0 if there is no weight.

    Scaled by the number of processes, so that its mean over processes is the mean over the global batch.
    """
    weight = total(weights.sum())
    return rows.sum() * (num_processes() / weight.where(weight > 0, 1.0))


class _Gather(torch.autograd.Function):
    """all_gather whose backward sums what every process wants of this one's rows (plain all_gather has none)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # Any: torch types no context
        pieces = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(num_processes())]
        distributed.all_gather(pieces, tensor.contiguous())
        return torch.cat(pieces)

    @staticmethod
    @once_differentiable  # a second derivative would silently miss what other processes add
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        summed = gradient.contiguous().clone()
        distributed.all_reduce(summed)
        return summed.chunk(num_processes())[rank()]
