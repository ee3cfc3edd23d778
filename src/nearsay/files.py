"""The name that a file has until it is whole; what killed processes have left under such names goes with the next."""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows, where arrays can be audited all the same
    fcntl = None  # type: ignore[assignment]


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written and renamed to it, which is removed if it was not.

    Its lock goes with the process, whatever machine that is on, so one that nobody holds was left behind.
    """
    begin = f".{path.name[:100]}."  # the draft of a long name has a name too
    draft = path.with_name(
        f"{begin}{secrets.randbits(31)}.partial"
    )  # processes of two machines may have one number
    with suppress(OSError):  # they are in nobody's way
        for name in os.listdir(path.parent):
            if re.fullmatch(re.escape(begin) + r"\d+\.partial", name):
                _remove_if_left(path.with_name(name))
    with nullcontext() if fcntl is None else _locked(draft):
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def _locked(draft: Path) -> Iterator[None]:
    """Make the file and hold its lock; another process may have taken it for left behind before it was locked."""
    while True:
        with draft.open("ab") as held:
            with suppress(
                OSError
            ):  # not every file system knows locks, and then none of them is removed
                fcntl.flock(held, fcntl.LOCK_EX)
            if draft.exists():
                yield
                return


def _remove_if_left(draft: Path) -> None:
    if fcntl is None:
        return
    with suppress(OSError), draft.open("r+b") as found:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.unlink()
