"""What a run in progress tells whoever shows it, and numbers and text of other people made fit to be shown."""

import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

_TURNING = frozenset(
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # make text read as what it is not


class Progress(NamedTuple):
    """How far a run is."""

    step: int
    num_steps: int
    epoch: float
    num_epochs: float
    images_per_second: float
    seconds_left: float
    terms: dict[str, float]  # the loss and what it is made of, means since the epoch began


class Display(Protocol):
    """What shows a run to the user; Any stands for what JSON can hold."""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Once, before the first step: what runs where."""
        ...

    def step(self, progress: Progress) -> None:
        """A few times a second."""
        ...

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """After each epoch, with what was logged."""
        ...

    def note(self, message: str) -> None:
        """Something that the user should know."""
        ...

    def end(self, result: Mapping[str, Any]) -> None:
        """Once, after the last step."""
        ...


class Silent:
    """Shows nothing."""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Nothing."""

    def step(self, progress: Progress) -> None:
        """Nothing."""

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Nothing."""

    def note(self, message: str) -> None:
        """Nothing."""

    def end(self, result: Mapping[str, Any]) -> None:
        """Nothing."""


def counted(number: int, noun: str) -> str:
    """Such as "1 run" or "12,000 runs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """The text without what cannot be encoded, commands a terminal, begins a line or turns the direction of reading."""
    return "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in _TURNING else c for c in text
    )
