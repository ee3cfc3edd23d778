"""What an error means to the user of a command: a sentence, and the exit code that goes with it."""

from nearsay.config import ConfigError
from nearsay.reasons import first_line

USAGE, BAD_DATA, INTERNAL, NO_MEMORY, IO_FAILED, INTERRUPTED, PREEMPTED = 2, 65, 70, 71, 74, 130, 143


def exit_code(error: BaseException) -> int:
    """What a command returns that ends in this error."""
    code = getattr(error, "code", None)
    if isinstance(code, int) and 0 < code < 256:
        return code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ConfigError) or (isinstance(error, ImportError) and "pip install" in str(error)):
        return USAGE
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error):
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
            cure = "try another device" if is_of_device else "end other programs, or use a machine with more of it"
        return f"out of memory ({first_line(error)}); {cure}"
    if isinstance(error, OSError) and error.strerror and error.filename:
        cure = (
            "; change its permissions, or use a place where you may read and write"
            if isinstance(error, PermissionError)
            else ""
        )
        return f"{error.filename}: {error.strerror}{cure}"
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":  # only names of files come with such text
        around = error.object[max(0, error.start - 20) : error.end + 20]
        return f"a name is not UTF-8 (in {around!r}); rename that file or folder"
    if code == INTERNAL and not hasattr(error, "code"):
        return f"internal error: {type(error).__name__}: {first_line(error)}; run again with --debug to see where"
    return told


def _has_no_room(error: BaseException) -> bool:
    """Whether a library could not be loaded because the process may have no more memory."""
    return isinstance(error, ImportError) and "failed to map segment" in str(error)
