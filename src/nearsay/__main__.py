"""The command `nearsay`, and `python -m nearsay`: Ctrl-C ends it without a word while it is still being read."""

import signal
import sys


def start() -> int:
    """Read the command line, which takes a moment, and run it; returns the exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell may have said to ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from nearsay.cli import main  # noqa: PLC0415  # see above

    signal.signal(signal.SIGINT, before)
    return main()


if __name__ == "__main__":
    sys.exit(start())
