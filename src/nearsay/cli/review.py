"""The verb review: decide about suspicious labels by hand."""

import os
import shlex
import sys
import webbrowser
from typing import Annotated

import typer

from nearsay.cli.options import Run
from nearsay.training.progress import counted

_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")


def review(
    run: Run,
    port: Annotated[
        int, typer.Option("--port", help="Port of the page; 0 is a free one.", min=0, max=65535)
    ] = 0,
    browser: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-browser",
            help="Show the page in a browser. By default only where there is a screen.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", help="Show so many labels, the most suspicious first.", min=1)
    ] = 50_000,
) -> None:
    """Review suspicious labels in a browser, with one key for each.

    Run nearsay audit RUN first. Only this machine can open the page. Each decision is saved in
    corrections.csv before the next image is shown. Ctrl-C ends the review; the same command
    continues it.

    For example: nearsay review runs/first
    """
    from nearsay.review.server import review_run  # noqa: PLC0415

    def show(address: str) -> None:
        print(f"Review the labels of {run} at {address} (Ctrl-C ends it)", flush=True)
        if _has_screen() if browser is None else browser:
            webbrowser.open(address)

    tally = review_run(run, port=port, limit=limit, opened=show)
    name = shlex.quote(str(run))
    if not tally.total:
        print("\nNo label was decided.")
        return
    before = "" if tally.now == tally.total else f" ({tally.total:,} in all)"
    print(f"\n{counted(tally.now, 'label')} decided{before}. The decisions are in {tally.path}.")
    print(f"Next: nearsay clean {name} makes labels to train on.")


def _has_screen() -> bool:
    """Whether somebody sits in front of this machine."""
    # Without a terminal it is a script, or the other end of an ssh connection.
    if not sys.stdout.isatty():
        return False
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, _SCREENS))
