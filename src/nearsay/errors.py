"""Every exception of nearsay with the exit code of a command that ends in it, and what a user is told.

The codes are those of sysexits.h where it has one.
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


class ConfigError(ValueError):
    """What is wrong with a command line or a recorded experiment, in one sentence."""


class RunError(RuntimeError):
    """What ends a command, in one sentence; `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class NotFinite(RuntimeError):
    """A loss, gradient or weight was not finite; what was learned before is kept."""

    code = 76


class Stopped(RuntimeError):
    """A signal ended the run after a checkpoint; `code` is its exit code."""

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name}; run the same command again to go on in {folder}"
        )
        self.code = 128 + number


class NoDevice(ValueError):
    """A device that is not there."""

    code = 2  # the exit code of wrong arguments


class NoSplit(ValueError):
    """A data set has no part of that name."""


class TableError(ValueError):
    """What is wrong with a file, as lines `file:line: reason`: the first 20 of them and how many there are."""


class ImageError(ValueError):
    """A file that is not a readable image, and why."""


class WorkerError(RuntimeError):
    """A process that decodes images died or hung."""

    code = 70


class BadImage(ValueError):
    """Files that cannot be decoded, in a run that is to stop there."""


class ProcessError(RuntimeError):
    """Another process died, hung or could not be met."""

    code = 70


class LaunchError(ValueError):
    """The variables that torchrun sets are there by half, or make no sense."""

    code = 2


class Missing(ValueError):
    """A file or a folder that a data set needs is not there; of images it says how many are."""

    def __init__(self, message: str, *, found: int = 0, expected: int | None = None) -> None:
        super().__init__(message)
        self.found, self.expected = found, expected


class StorageError(RuntimeError):
    """What is known of the trials cannot be reached."""

    code = IO_FAILED


class ChangedFile(RuntimeError):
    """Something else has written to the file since it was read."""


def exit_code(error: BaseException) -> int:
    """What a command returns that ends in this error."""
    code = getattr(error, "code", None)
    if isinstance(code, int) and 0 < code < 256:
        return code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ConfigError) or (
        isinstance(error, ImportError) and "pip install" in str(error)
    ):
        return USAGE
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate" in str(error)
    ):
        return NO_MEMORY  # torch has two ways to say so, and may not be there to be asked
    if _has_no_room(error):
        return NO_MEMORY
    if isinstance(error, OSError):
        return IO_FAILED
    return BAD_DATA if isinstance(error, ValueError) else INTERNAL


def explain(error: BaseException, code: int, *, takes_batches: bool = True) -> str:
    """The error in one sentence that says what would work; `takes_batches` if the command was given their size."""
    told = str(error).strip() or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if _has_no_room(error):
        return f"out of memory before it began ({first_line(error)}); allow it more, as ulimit -v may forbid"
    if code == NO_MEMORY:
        cure = "try a smaller batch_size, or another device"
        if not takes_batches:
            is_of_device = type(error).__name__ == "OutOfMemoryError"
            cure = (
                "try another device"
                if is_of_device
                else "end other programs, or use a machine with more of it"
            )
        return f"out of memory ({first_line(error)}); {cure}"
    if isinstance(error, OSError) and error.strerror and error.filename:
        cure = (
            "; change its permissions, or use a place where you may read and write"
            if isinstance(error, PermissionError)
            else ""
        )
        return f"{error.filename}: {error.strerror}{cure}"
    if (
        isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8"
    ):  # only names of files come with such text
        around = error.object[max(0, error.start - 20) : error.end + 20]
        return f"a name is not UTF-8 (in {around!r}); rename that file or folder"
    if code == INTERNAL and not hasattr(error, "code"):
        return f"internal error: {type(error).__name__}: {first_line(error)}; run again with --debug to see where"
    return told


def _has_no_room(error: BaseException) -> bool:
    """Whether a library could not be loaded because the process may have no more memory."""
    return isinstance(error, ImportError) and "failed to map segment" in str(error)


def first_line(error: BaseException) -> str:
    """Its first line, without the rest of a long report; and the second, where the first only announces it."""
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


def one_line(error: BaseException, most: int = 200) -> str:
    """All of it in one line, up to so many characters: for what a library or the system says in a few lines."""
    return " ".join(str(error).split())[:most] or type(error).__name__
