"""The verb of those who look for themselves: review."""

import os
import shlex
import sys
import webbrowser
from typing import Annotated

import typer

from nearsay.cli.options import Run

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
            help="Show the page in a browser; by default where there is a screen.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option("--limit", help="Labels to show at most, the most suspicious ones.", min=1),
    ] = 50_000,
) -> None:
    """Go through suspicious labels in a browser, one key each.

    Needs an audit (nearsay audit RUN). The page is for this machine alone, at the address that is printed. Each
    decision is in corrections.csv before the next image shows; Ctrl-C ends the review, and the same command goes on.
    """
    from nearsay.review import review_run  # noqa: PLC0415  # brings torch and a server

    def opened(address: str) -> None:
        print(f"Review the labels of {run} at {address} (Ctrl-C ends it)", flush=True)
        if _has_screen() if browser is None else browser:
            webbrowser.open(address)

    tally = review_run(run, port=port, limit=limit, opened=opened)
    before = "" if tally.now == tally.total else f", and {tally.total:,} in all"
    if tally.total:
        labels = "1 label was" if tally.now == 1 else f"{tally.now:,} labels were"
        told = f"{labels} decided{before}: {'it is' if tally.total == 1 else 'they are'} in {tally.path}"
        print(
            f"\n{told}; nearsay clean {shlex.quote(str(run))} makes labels that can be trained on."
        )
    else:
        print(f"\nNo label was decided; nearsay review {shlex.quote(str(run))} begins again.")


def _has_screen() -> bool:
    """Whether somebody sits in front of this machine, and not at the other end of a line."""
    return sys.stdout.isatty() and (
        sys.platform in ("darwin", "win32") or any(map(os.environ.get, _SCREENS))
    )
