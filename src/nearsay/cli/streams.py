"""What a command writes to, whatever has become of it: closed, full, or without a reader."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast


class Unfailing:
    """A stream that drops what cannot be written; all else is as in the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As if all of it had been written."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Written now, if it can be."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # Any: whatever the stream has
        return getattr(self._stream, name)


class Named:
    """A stdout that says which file it is when it cannot be written; all else is as in the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """All of it, now or later."""
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        """Written now."""
        with self._named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # Any: whatever the stream has
        return getattr(self._stream, name)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # nobody wants to read it
            raise
        except OSError as error:
            told = f"{error.strerror}; send it where it can be written"
            raise OSError(error.errno, told, "stdout") from error


@contextmanager
def told_if_possible() -> Iterator[None]:
    """Let progress and complaints go to stderr as far as they can: no training ends because nobody can read of it.

    What cannot go to stdout ends the command, as that is its result, in a sentence that names it.
    A stream that was closed before Python began is replaced by one that keeps nothing.
    """
    sys.stdout, sys.stderr = (_or_nothing(stream) for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a name that the terminal cannot show is no reason to stop
    inner = sys.stdout, sys.stderr
    named, unfailing = cast(TextIO, Named(sys.stdout)), cast(TextIO, Unfailing(sys.stderr))
    try:
        with redirect_stdout(named), redirect_stderr(unfailing):
            yield
    finally:
        for stream in inner:
            try:
                stream.flush()
            except OSError:
                silence(stream)


def silence(stream: TextIO) -> None:
    """Nothing that is still in the stream may complain when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _or_nothing(stream: TextIO | None) -> TextIO:
    return open(os.devnull, "w") if stream is None else stream  # open until Python ends
