"""Collectives that are the identity on one process; no other file imports torch.distributed.

All processes must call them in the same order with tensors of equal shapes, so pad a short batch.
"""

import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, count
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

# Imported before there is a process group, because it would keep a reference to it; see `joined`.
import torch.distributed.nn.functional
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nearsay.errors import LaunchError, ProcessError, one_line

# Numbers of each process that are on the device at the same time, because all might not fit.
_AT_ONCE = 2**22
# Seconds between two looks for the other processes.
_PAUSE = 0.01


class Launch(NamedTuple):
    """The place of this process among those that torchrun started; without torchrun, one alone."""

    size: int
    # Among all processes, known before they have connected.
    rank: int
    # Among the processes of this machine: the number of its GPU.
    local_rank: int


def launch() -> Launch:
    """Read torchrun's variables; LaunchError at once if the processes could never connect."""
    size = _variable("WORLD_SIZE", 1, low=1)
    rank = _variable("RANK", 0, high=size - 1)
    local_rank = _variable("LOCAL_RANK", 0, high=size - 1)
    # A process that is connected already needs no address.
    if size > 1 and num_processes() == 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise LaunchError(
                    f"{name} must be set with WORLD_SIZE={size}. "
                    "Start with torchrun, or unset WORLD_SIZE."
                )
        _variable("MASTER_PORT", 0, low=1, high=65535)
    return Launch(size, rank, local_rank)


def _variable(name: str, default: int, *, low: int = 0, high: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit()
    if not is_number or int(text) < low or (high is not None and int(text) > high):
        span = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise LaunchError(
            f"{name} must be a whole number {span}, got {text!r}. "
            "Start with torchrun, or unset the variable."
        )
    return int(text)


@contextmanager
def joined(device: torch.device, timeout: float) -> Iterator[None]:
    """Connect to the other processes of torchrun, if any; waits at most `timeout` seconds for them.

    At the end nothing may hold the process group: its threads would outlive it, and could abort the
    process while it exits.
    """
    if launch().size == 1 or distributed.is_initialized():
        yield
        return
    with _ended_by_interrupts():
        _meet("nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout))
    try:
        yield
    except RuntimeError as error:
        # An error with an exit code is one of ours.
        if hasattr(error, "code") or not _is_of_collective(error):
            raise
        raise ProcessError(
            f"process {rank()} lost the others ({one_line(error)}). "
            "Start them again to continue from the last checkpoint."
        ) from error
    finally:
        distributed.destroy_process_group()


def num_processes() -> int:
    """How many processes share the step; 1 without torch.distributed."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if num_processes() > 1 else 0


def total(tensor: Tensor) -> Tensor:
    """The sum over processes, without gradient."""
    if num_processes() == 1:
        return tensor.detach()
    summed = tensor.detach().clone()
    distributed.all_reduce(summed)
    return summed


def average_(tensors: Iterable[Tensor]) -> None:
    """In place the mean over processes, all tensors in one message."""
    if num_processes() == 1:
        return
    tensors = list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distributed.all_reduce(flat)
    flat /= num_processes()
    pieces = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


def broadcast_(tensors: Iterable[Tensor]) -> None:
    """In place the values of the first process."""
    if num_processes() > 1:
        for tensor in tensors:
            distributed.broadcast(tensor, src=0)


def share(value: str, device: torch.device) -> str:
    """The text of the first process, on all of them."""
    if num_processes() == 1:
        return value
    content = value.encode()
    size = torch.tensor(len(content), device=device)
    broadcast_([size])
    values = list(content) if rank() == 0 else [0] * int(size)
    buffer = torch.tensor(values, dtype=torch.uint8, device=device)
    broadcast_([buffer])
    return bytes(buffer.tolist()).decode()


def agreed(claims: list[bool], device: torch.device) -> list[bool]:
    """For each claim, whether any process makes it; one message for all."""
    if num_processes() == 1:
        return claims
    is_claimed: list[bool] = (total(torch.tensor(claims, device=device).float()) > 0).tolist()
    return is_claimed


def gather(tensor: Tensor) -> Tensor:
    """(B, ...) on each process -> (W·B, ...) in order of rank, with gradient to all processes."""
    if num_processes() == 1:
        return tensor
    return _Gather.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def join(rows: Tensor, device: torch.device) -> Tensor:
    """(B, ...) on the CPU, where B may differ -> (ΣB, ...) in order of rank, without gradient."""
    if num_processes() == 1:
        return rows
    sizes = gather(torch.tensor([len(rows)], device=device)).tolist()
    joined = rows.new_empty(sum(sizes), *rows.shape[1:])
    starts = [0, *accumulate(sizes)][:-1]
    # All processes go the same number of turns, those without rows too, with parts of equal size.
    num = max(1, _AT_ONCE // max(1, math.prod(rows.shape[1:])))
    for first in range(0, max(sizes), num):
        part = rows.new_zeros(min(num, max(sizes) - first), *rows.shape[1:])
        own = rows[first : first + num]
        part[: len(own)] = own
        pieces = gather(part.to(device)).cpu().chunk(len(sizes))
        for piece, start, size in zip(pieces, starts, sizes, strict=True):
            # The rest of the piece is filling.
            kept = piece[: max(0, size - first)]
            joined[start + first :][: len(kept)] = kept
    return joined


def join_texts(value: str, device: torch.device) -> str:
    """The texts of all processes in order of rank, one after the other."""
    content = torch.tensor(list(value.encode()), dtype=torch.uint8)
    return bytes(join(content, device).tolist()).decode()


def others(tensor: Tensor) -> Tensor:
    """(B, ...) on each process -> (W·B − B, ...): the rows of all others, with gradient to them."""
    own, rows = rank(), len(tensor)
    everyone = gather(tensor)
    return torch.cat([everyone[: own * rows], everyone[(own + 1) * rows :]])


def mean(rows: Tensor, weights: Tensor) -> Tensor:
    """The sum of (already weighted) rows over the global sum of weights; 0 if there is no weight.

    It is scaled by the number of processes, so its mean over processes is the global mean.
    """
    weight = total(weights.sum())
    return rows.sum() * (num_processes() / weight.where(weight > 0, 1.0))


class _Gather(torch.autograd.Function):
    """all_gather with a gradient: the sum of the gradients of all processes for this one's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        pieces = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for _ in range(num_processes())
        ]
        distributed.all_gather(pieces, tensor.contiguous())
        return torch.cat(pieces)

    # A second derivative would silently miss the part of the other processes.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        summed = gradient.contiguous().clone()
        distributed.all_reduce(summed)
        return summed.chunk(num_processes())[rank()]


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process at once, because torch waits outside of Python for the others."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not is_main:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _meet(backend: str, timeout: timedelta) -> None:
    """Join the group; try again until the timeout, because connections may fail after a restart."""
    deadline = time.monotonic() + timeout.total_seconds()
    for attempt in count(1):
        try:
            store, own, num = next(iter(rendezvous("env://", timeout=timeout)))
            store = PrefixStore(_agree(store, own, num, deadline), store)
            distributed.init_process_group(
                backend, store=store, rank=own, world_size=num, timeout=timeout
            )
            return
        except (RuntimeError, ValueError, OSError) as error:
            if time.monotonic() >= deadline:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                raise ProcessError(
                    f"process {os.environ.get('RANK')} cannot connect to the others at {where} "
                    f"({error}). Check that all {os.environ.get('WORLD_SIZE')} processes run."
                ) from error
            time.sleep(min(1.0, 0.1 * attempt))


def _agree(store: Store, own: int, num: int, deadline: float) -> str:
    """A name for this attempt to connect, because the store keeps addresses of earlier attempts.

    Each process writes a new random card and waits for an answer to it. The first process answers
    all cards, those of dead processes too, until every other process has confirmed.
    """
    card = uuid.uuid4().hex
    if own:
        store.set(f"card {own}", card)
        name = store.get(f"answer to {card}").decode()
        store.set(f"{own} in {name}", "")
        return name
    missing = set(range(1, num))
    while missing:
        if time.monotonic() >= deadline:
            raise RuntimeError(f"processes {sorted(missing)} do not answer")
        for other in sorted(missing):
            if store.check([f"{other} in {card}"]):
                missing.remove(other)
            elif store.check([f"card {other}"]):
                store.set(f"answer to {store.get(f'card {other}').decode()}", card)
        time.sleep(_PAUSE)
    return card


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether a collective failed, judged by words of torch's message."""
    words = ("gloo", "nccl", "connection", "timed out", "process group", "peer")
    return any(word in str(error).lower() for word in words)
