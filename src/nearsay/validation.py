"""Checks of values that users give; each returns the value or raises ValueError in one form of
words.

The form is `{name} must be {condition}, got {value!r}.` with, if it helps, one more sentence: the
`hint`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from operator import index
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from nearsay.errors import NoSplit, one_line

_Function = TypeVar("_Function", bound=Callable[..., object])
_Value = TypeVar("_Value")
_MOST_SHOWN = 100  # characters of a value


def check_that(holds: bool, name: str, condition: str, value: object, *, hint: str = "") -> None:
    """Raise ValueError with the condition and the value unless it holds."""
    if not holds:
        text = repr(value)
        if len(text) > _MOST_SHOWN:
            text = f"{text[:_MOST_SHOWN]}..."
        raise ValueError(f"{name} must be {condition}, got {text}.{hint and f' {hint}'}")


def check_choice(name: str, value: _Value, choices: Iterable[object], *, cure: str = "") -> _Value:
    """The value if it is one of the choices, compared with its type: True is not 1."""
    known = list(choices)
    is_known = any(type(choice) is type(value) and choice == value for choice in known)
    listed = ", ".join(map(repr, known))
    if len(known) > 1:
        listed = f"one of {listed}"
    check_that(is_known, name, f"{listed}{cure}", value)
    return value


def check_split(split: str, known: Iterable[str], data: object, *, hint: str = "") -> None:
    """NoSplit unless the data has the split."""
    names = set(known)
    if split not in names:
        usual = ("train", "validation", "test")
        in_order = [name for name in usual if name in names] + sorted(names - {*usual})
        listed = " or ".join(map(repr, in_order))
        raise NoSplit(f"split must be {listed} for {data}, got {split!r}.{hint and f' {hint}'}")


def check_number(
    name: str, value: object, low: float, high: float = math.inf, *, cure: str = ""
) -> float:
    """The value if it is a Python number from low to high; `cure` adds to the condition."""
    check_plain(name, value)
    span = f"from {low:g} to {high:g}" if high < math.inf else f"of {low:g} or more"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN fails this comparison as well
    is_right = is_number and low <= value <= high  # type: ignore[operator]
    check_that(is_right, name, f"a number {span}{cure}", value)
    return value  # type: ignore[return-value]


def check_plain(name: str, value: object) -> None:
    """Refuse a number such as numpy.float32, because records would hold an array."""
    is_foreign = isinstance(value, Real) and not isinstance(value, (int, float))
    check_that(not is_foreign, name, "a Python number", value, hint="Use float(...).")


def check_whole(
    name: str, value: object, low: int, high: int | None = None, *, cure: str = ""
) -> int:
    """The value as an int if it is whole and from low to high; `cure` adds to the condition."""
    try:
        whole = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = None
    span = f"of {low} or more" if high is None else f"from {low} to {high}"
    is_right = whole is not None and whole >= low and (high is None or whole <= high)
    check_that(is_right, name, f"a whole number {span}{cure}", value)
    return whole  # type: ignore[return-value]


def check_tensors(**named: object) -> None:
    """Refuse arrays and lists by name."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} must be a torch.Tensor, got {type(value).__name__}. Use torch.as_tensor."
            )


def check_together(logits: Tensor, **named: Tensor) -> None:
    """Refuse by name a tensor on another device than the logits; mostly it came from a loader."""
    for name, tensor in named.items():
        if tensor.device != logits.device:
            raise ValueError(
                f"{name} must be on the device of the logits, {logits.device}, got "
                f"{tensor.device}. Use {name}.to(logits.device)."
            )


@contextmanager
def reading(
    path: str | Path,
    *causes: type[BaseException],
    hint: str = "",
    error: Callable[[str], Exception] = ValueError,
) -> Iterator[None]:
    """Name the file, the reason and the hint in one error if what is inside cannot read `path`.

    Args:
        path: The file, as the message names it.
        causes: What to catch; by default OSError, ValueError and RecursionError (deep JSON).
        hint: One sentence with the cure.
        error: Makes the exception from the message, such as `lambda text: RunError(text, 65)`.
    """
    caught = causes or (OSError, ValueError, RecursionError)
    try:
        yield
    except caught as cause:
        reason = f"cannot be read: {one_line(cause).rstrip('.')}"
        if isinstance(cause, FileNotFoundError):
            reason = "does not exist"
        raise error(f"{path} {reason}.{hint and f' {hint}'}") from cause


def can_look(tensor: Tensor) -> bool:
    """Whether values may be read: on a CPU, which does not stall, not in torch.compile or vmap."""
    is_hidden = torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(tensor)
    return tensor.device.type == "cpu" and not is_hidden


def constant_when_compiled(function: _Function) -> _Function:
    """Mark a function that torch.compile calls once and does not trace.

    `torch.compiler.assume_constant_result` does the same, but importing it loads the whole
    compiler, which every command would wait for.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
