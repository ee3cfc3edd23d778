"""Standard output and error, which may be closed, full, or without a reader."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast


class QuietStderr:
    """A stream that drops what cannot be written, and is otherwise the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if it is possible."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # Any: whatever the stream has
        return getattr(self._stream, name)


class StdoutWithPath:
    """A stream with errors that name stdout, and otherwise the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write; the OSError names stdout."""
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush; the OSError names stdout."""
        with self._named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # Any: whatever the stream has
        return getattr(self._stream, name)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # The reader has left on purpose, as head does.
            raise
        except OSError as error:
            reason = f"{error.strerror}; send it where it can be written"
            raise OSError(error.errno, reason, "stdout") from error


@contextmanager
def safe_streams() -> Iterator[None]:
    """Let no training end because its progress cannot be written to stderr.

    What cannot be written to stdout ends the command, because that is its result. A stream that
    was closed before Python began is replaced by one that keeps nothing.
    """
    sys.stdout, sys.stderr = (_open_or_null(stream) for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal cannot show is no reason to stop.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    inner = sys.stdout, sys.stderr
    named, quiet = cast(TextIO, StdoutWithPath(sys.stdout)), cast(TextIO, QuietStderr(sys.stderr))
    try:
        with redirect_stdout(named), redirect_stderr(quiet):
            yield
    finally:
        for stream in inner:
            try:
                stream.flush()
            except OSError:
                silence(stream)


def silence(stream: TextIO) -> None:
    """Drop what is still in the stream, so that Python ends without a complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_or_null(stream: TextIO | None) -> TextIO:
    # It stays open until Python ends.
    return open(os.devnull, "w") if stream is None else stream
