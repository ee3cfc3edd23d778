"""The command `nearsay`, and `python -m nearsay`: Ctrl-C ends it without a word while it is still being read."""

import atexit
import os
import signal
import sys


def start() -> int:
    """Read the command line, which takes a moment, and run it; returns the exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell may have said to ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from nearsay.cli import main  # noqa: PLC0415  # see above

    signal.signal(signal.SIGINT, before)
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _leave(code)
    return code


def _leave(code: int) -> None:
    """End one process of several here and now.

    Threads of gloo outlive their group, and one that asks for Python while Python is torn down aborts a process that
    was done; torchrun would take that for a failure, and start all of them again.
    """
    atexit._run_exitfuncs()  # what was promised to be called, such as the removal of temporary files
    os._exit(code)


if __name__ == "__main__":
    sys.exit(start())
