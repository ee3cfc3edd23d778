"""Every exception of nearsay, with the exit code of a command that ends in it.

    NearsayError
    ├── ConfigError (ValueError)       2    a command line or a recorded experiment is wrong
    ├── NoDevice (ValueError)          2    the device does not exist
    ├── LaunchError (ValueError)       2    the variables of torchrun are incomplete or wrong
    ├── DataError (ValueError)        65    the data cannot be used
    │   ├── NoSplit                         the data set has no split of that name
    │   ├── TableError                      a table is wrong: lines `file:line: reason`
    │   ├── ImageError                      a file is not a readable image
    │   ├── BadImage                        unreadable images, in a run that must stop there
    │   └── Missing                         a file or folder of a data set does not exist
    ├── WorkerError (RuntimeError)    70    a process that decodes images died or hung
    ├── ProcessError (RuntimeError)   70    another process died, hung or could not be reached
    ├── ChangedFile (RuntimeError)    70    another program has written to the file
    ├── StorageError (RuntimeError)   74    the record of the trials cannot be reached
    ├── NotFinite (RuntimeError)      76    a loss, gradient or weight was not finite
    ├── Stopped (RuntimeError)     128 + n  a signal ended the run after a checkpoint
    └── RunError (RuntimeError)     varies  ends a command with the code that it holds

The second base is Python's own, so `except ValueError` and `except RuntimeError` catch them as
well. The codes are those of sysexits.h where it has one.
"""

import signal
from pathlib import Path

USAGE = 2
BAD_DATA = 65
INTERNAL = 70
NO_MEMORY = 71
CANNOT_CREATE = 73
IO_FAILED = 74
LOCKED = 75
NOT_FINITE = 76
INTERRUPTED = 130
PREEMPTED = 143


class NearsayError(Exception):
    """Base of all exceptions of nearsay; `code` is the exit code of a command that ends in it."""

    code: int = INTERNAL


class ConfigError(NearsayError, ValueError):
    """A command line or a recorded experiment is wrong; the message is one sentence."""

    code = USAGE


class NoDevice(NearsayError, ValueError):
    """The device does not exist on this machine."""

    code = USAGE


class LaunchError(NearsayError, ValueError):
    """The variables that torchrun sets are incomplete or make no sense."""

    code = USAGE


class DataError(NearsayError, ValueError):
    """The data cannot be used."""

    code = BAD_DATA


class NoSplit(DataError):
    """The data set has no split of that name."""


class TableError(DataError):
    """A table is wrong: lines `file:line: reason`, the first 20 of them and how many there are."""


class ImageError(DataError):
    """A file is not a readable image; the message says why."""


class BadImage(DataError):
    """Files cannot be decoded, in a run that must stop there."""


class Missing(DataError):
    """A file or folder of a data set does not exist.

    Attributes:
        found: How many images exist.
        expected: How many there should be, or None if no list says so.
    """

    def __init__(self, message: str, *, found: int = 0, expected: int | None = None) -> None:
        super().__init__(message)
        self.found, self.expected = found, expected


class WorkerError(NearsayError, RuntimeError):
    """A process that decodes images died or hung."""


class ProcessError(NearsayError, RuntimeError):
    """Another process died, hung or could not be reached."""


class ChangedFile(NearsayError, RuntimeError):
    """Another program has written to the file since it was read."""


class StorageError(NearsayError, RuntimeError):
    """The record of the trials cannot be reached."""

    code = IO_FAILED


class NotFinite(NearsayError, RuntimeError):
    """A loss, gradient or weight was not finite; what was saved before is kept."""

    code = NOT_FINITE


class Stopped(NearsayError, RuntimeError):
    """A signal ended the run after a checkpoint; `code` is 128 + the number of the signal."""

    def __init__(self, number: int, folder: Path) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}; run the same command again to go on in {folder}")
        self.code = 128 + number


class RunError(NearsayError, RuntimeError):
    """Ends a command with one sentence and the exit code `code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ends in this error."""
    code = getattr(error, "code", None)
    if isinstance(code, int) and 0 < code < 256:
        return code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ImportError) and "pip install" in str(error):
        return USAGE
    if _lacks_memory(error) or _has_no_room(error):
        return NO_MEMORY
    if isinstance(error, OSError):
        return IO_FAILED
    return BAD_DATA if isinstance(error, ValueError) else INTERNAL


def explain(error: BaseException, code: int, *, takes_batches: bool = True) -> str:
    """The error in one sentence with its cure; `takes_batches` if the command has a batch size."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    reason = first_line(error)
    if _has_no_room(error):
        cure = "allow it more, as ulimit -v may forbid"
        return f"out of memory before it began ({reason}); {cure}"
    if code == NO_MEMORY:
        return f"out of memory ({reason}); {_memory_cure(error, takes_batches)}"
    if isinstance(error, OSError) and error.strerror and error.filename:
        cure = ""
        if isinstance(error, PermissionError):
            cure = "; change its permissions, or use a place where you may read and write"
        return f"{error.filename}: {error.strerror}{cure}"
    # Only file names come with text that cannot be encoded in UTF-8.
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        around = error.object[max(0, error.start - 20) : error.end + 20]
        return f"a name is not UTF-8 (in {around!r}); rename that file or folder"
    if code == INTERNAL and not hasattr(error, "code"):
        kind = type(error).__name__
        return f"internal error: {kind}: {reason}; run again with --debug to see where"
    return str(error).strip() or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of its message, and the second if the first ends in a colon."""
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


def one_line(error: BaseException, most: int = 200) -> str:
    """Its message in one line of up to `most` characters."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def _memory_cure(error: BaseException, takes_batches: bool) -> str:
    if takes_batches:
        return "try a smaller batch_size, or another device"
    if type(error).__name__ == "OutOfMemoryError":
        return "try another device"
    return "end other programs, or use a machine with more of it"


def _lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch has two ways to say so, and may not be imported."""
    is_of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error)
    return isinstance(error, MemoryError) or is_of_torch


def _has_no_room(error: BaseException) -> bool:
    """Whether a library could not be loaded because the process may not use more memory."""
    return isinstance(error, ImportError) and "failed to map segment" in str(error)
