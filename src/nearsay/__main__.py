"""The command `nearsay`, and `python -m nearsay`; Ctrl-C ends it silently while it is imported."""

import signal
import sys


def start() -> int:
    """Import the command line, which takes a moment, and run it; returns the exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell may have set it to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from nearsay.cli import main  # noqa: PLC0415  # see above

    signal.signal(signal.SIGINT, before)
    return main()


if __name__ == "__main__":
    sys.exit(start())
