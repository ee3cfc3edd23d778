"""Checks of values that users give: each returns the value or raises ValueError with what would work."""

import math
from collections.abc import Callable
from numbers import Real
from operator import index
from typing import TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant_when_compiled(function: _Function) -> _Function:
    """Mark what torch.compile calls once and does not look into.

    `torch.compiler.assume_constant_result` does the same, but imports the whole compiler to do so, which every command
    would wait for.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def can_look(tensor: Tensor) -> bool:
    """Whether its values may be looked at: on a CPU, where that stalls no device, and not in torch.compile or vmap."""
    is_hidden = torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(tensor)
    return tensor.device.type == "cpu" and not is_hidden


def check_number(
    name: str, value: object, low: float, high: float = math.inf, *, cure: str = ""
) -> float:
    """The value if it is a real number from low to high; otherwise ValueError with the value and what would work."""
    check_plain(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        span = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        raise ValueError(f"{name}={value!r} must be a number {span}{cure}")
    return value


def check_plain(name: str, value: object) -> None:
    """Refuse a number that is not Python's own, such as float32 of numpy, which would be recorded as an array."""
    if not isinstance(value, (int, float)) and isinstance(value, Real):
        raise ValueError(
            f"{name}={value!r} must be a number of Python itself; convert it with float(...)"
        )


def check_whole(name: str, value: object, low: int, *, cure: str = "") -> int:
    """The value as an int if it is a whole number from low on; otherwise ValueError."""
    try:
        whole = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = None
    if whole is None or whole < low:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {low}{cure}")
    return whole


def check_tensors(**named: object) -> None:
    """Refuse arrays and lists by name."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} of type {type(value).__name__} must be a torch.Tensor; torch.as_tensor makes one"
            )


def check_together(logits: Tensor, **named: Tensor) -> None:
    """Refuse by name what is on another device than the logits: mostly what came from a loader and stayed there."""
    for name, tensor in named.items():
        if tensor.device != logits.device:
            raise ValueError(
                f"{name} are on {tensor.device} and the logits are on {logits.device}; move them there with "
                ".to(logits.device)"
            )
