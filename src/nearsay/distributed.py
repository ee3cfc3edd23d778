"""Collectives that are the identity on one process; the only door to torch.distributed.

All processes call them in the same order with tensors of equal shapes: pad batches instead of shortening them.
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
import torch.distributed.nn.functional  # before there is a group, which it would keep: see `joined`
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nearsay.errors import LaunchError, ProcessError, one_line

_AT_ONCE = (
    2**22
)  # numbers of each process that are on the device together, where all of them might not fit
_PAUSE = 0.01  # seconds between two looks for the others


class Launch(NamedTuple):
    """What torchrun says of this process in its environment; one process alone without it."""

    size: int
    rank: int  # among all processes, known before they have met
    local_rank: int  # among those on this machine: the number of its GPU


def launch() -> Launch:
    """Read the environment; LaunchError at once where the processes could only wait for each other in vain."""
    size = _variable("WORLD_SIZE", 1, low=1)
    found = Launch(
        size, _variable("RANK", 0, high=size - 1), _variable("LOCAL_RANK", 0, high=size - 1)
    )
    if size > 1 and num_processes() == 1:  # who has met already needs no address
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise LaunchError(
                    f"WORLD_SIZE={size} needs {name} too; start with torchrun, or unset WORLD_SIZE"
                )
        _variable("MASTER_PORT", 0, low=1, high=65535)
    return found


def _variable(name: str, default: int, *, low: int = 0, high: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if (
        not (text.isascii() and text.isdigit())
        or int(text) < low
        or (high is not None and int(text) > high)
    ):
        to = "" if high is None else f" to {high}"
        raise LaunchError(
            f"{name}={text!r} must be a whole number from {low}{to}; start with torchrun, or unset it"
        )
    return int(text)


@contextmanager
def joined(device: torch.device, timeout: float) -> Iterator[None]:
    """Work with the other processes that torchrun started, if it did; waits at most `timeout` seconds for them.

    At the end nobody may hold the group, or its threads outlive it and can abort a process that is about to end.
    """
    if launch().size == 1 or distributed.is_initialized():
        yield
        return
    with _ended_by_interrupts():
        _meet("nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout))
    try:
        yield
    except RuntimeError as error:
        if hasattr(error, "code") or not _is_of_others(
            error
        ):  # what has a code has been explained already
            raise
        reason = one_line(error)
        raise ProcessError(
            f"process {rank()} lost the others ({reason}); start them again, and the run goes on from its checkpoint"
        ) from error
    finally:
        distributed.destroy_process_group()


def num_processes() -> int:
    """How many processes share the step; 1 without torch.distributed."""
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


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


def average_(tensors: Iterable[Tensor]) -> None:
    """In place the mean over processes, all tensors in one message."""
    if num_processes() == 1:
        return
    tensors = list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distributed.all_reduce(flat)
    flat /= num_processes()
    for tensor, piece in zip(
        tensors, flat.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(piece.view_as(tensor))


def broadcast_(tensors: Iterable[Tensor]) -> None:
    """In place what the first process has."""
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
    buffer = torch.tensor(
        list(content) if rank() == 0 else [0] * int(size), dtype=torch.uint8, device=device
    )
    broadcast_([buffer])
    return bytes(buffer.tolist()).decode()


def agreed(claims: list[bool], device: torch.device) -> list[bool]:
    """Which of them any process claims, in one message."""
    return (
        claims
        if num_processes() == 1
        else (total(torch.tensor(claims, device=device).float()) > 0).tolist()
    )


def gather(tensor: Tensor) -> Tensor:
    """(B, ...) on each process -> (W·B, ...) in order of rank, with gradient back to every process."""
    if num_processes() == 1:
        return tensor
    return _Gather.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def join(rows: Tensor, device: torch.device) -> Tensor:
    """(B, ...) on the CPU, with a B of its own on each process -> (ΣB, ...) in order of rank, without gradient."""
    if num_processes() == 1:
        return rows
    sizes = gather(torch.tensor([len(rows)], device=device)).tolist()
    joined, starts = rows.new_empty(sum(sizes), *rows.shape[1:]), [0, *accumulate(sizes)][:-1]
    num = max(1, _AT_ONCE // max(1, math.prod(rows.shape[1:])))  # the same where there is no row
    for first in range(0, max(sizes), num):
        part = rows.new_zeros(min(num, max(sizes) - first), *rows.shape[1:])
        own = rows[first : first + num]
        part[: len(own)] = own
        for piece, start, size in zip(
            gather(part.to(device)).cpu().chunk(len(sizes)), starts, sizes, strict=True
        ):
            kept = piece[: max(0, size - first)]
            joined[start + first :][: len(kept)] = kept
    return joined


def join_texts(value: str, device: torch.device) -> str:
    """The texts of all processes in order of rank, one after the other."""
    return bytes(
        join(torch.tensor(list(value.encode()), dtype=torch.uint8), device).tolist()
    ).decode()


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
        pieces = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for _ in range(num_processes())
        ]
        distributed.all_gather(pieces, tensor.contiguous())
        return torch.cat(pieces)

    @staticmethod
    @once_differentiable  # a second derivative would silently miss what other processes add
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        summed = gradient.contiguous().clone()
        distributed.all_reduce(summed)
        return summed.chunk(num_processes())[rank()]


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process at once: torch waits for the others outside of Python, which would hear it later."""
    before = signal.getsignal(signal.SIGINT)
    if (
        before is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _meet(backend: str, timeout: timedelta) -> None:
    """Join the group, trying again until the time is over: right after a restart connections may still fail."""
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
                    f"process {os.environ.get('RANK')} cannot meet the others at {where} ({error}); check that all "
                    f"{os.environ.get('WORLD_SIZE')} of them run and reach each other"
                ) from error
            time.sleep(min(1.0, 0.1 * attempt))


def _agree(store: Store, own: int, num: int, deadline: float) -> str:
    """A name for this meeting: after a restart, the store still tells where the processes of earlier ones were.

    Each process leaves a card that nobody has seen before, and waits for an answer to that very card. The first
    process answers all cards, those of the dead too, until everybody has confirmed.
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
            raise RuntimeError(f"nothing is heard of processes {sorted(missing)}")
        for other in sorted(missing):
            if store.check([f"{other} in {card}"]):
                missing.remove(other)
            elif store.check([f"card {other}"]):
                store.set(f"answer to {store.get(f'card {other}').decode()}", card)
        time.sleep(_PAUSE)
    return card


def _is_of_others(error: RuntimeError) -> bool:
    """Whether a collective failed, rather than something of this process."""
    words = ("gloo", "nccl", "connection", "timed out", "process group", "peer")
    return any(word in str(error).lower() for word in words)
