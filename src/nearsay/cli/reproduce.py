"""The verb reproduce: tables and figures of the paper."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Quiet
from nearsay.errors import INTERNAL
from nearsay.reproduce import NAMES
from nearsay.reproduce import reproduce as make
from nearsay.training.progress import make_display


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(NAMES)}.", metavar="NAME", autocompletion=lambda: list(NAMES)
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data", help="Folder of the data sets, or toy for small stand-ins without files."
        ),
    ] = "data",
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", help="Seeds per number. By default as many as in the paper.", min=1
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of the runs and the tables. By default runs/paper, or runs/paper-toy.",
            metavar="DIR",
        ),
    ] = None,
    only: Annotated[
        str, typer.Option("--only", help="Train only runs with matching names: *noise=0.4*.")
    ] = "*",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, and neither train nor write.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Make a table or figure of the paper, beside its own numbers.

    Trains the missing runs and writes the table (Markdown, LaTeX, CSV, HTML) or figure (PNG, SVG,
    HTML). Finished runs are not trained again. A number without a run reads "not run".

    For example: nearsay reproduce cifar --data toy --trials 1
    """
    target = out or Path("runs/paper-toy" if data == "toy" else "runs/paper")
    # A line for every epoch of every run would fill a log file.
    with closing(make_display(quiet=quiet or not sys.stderr.isatty())) as display:
        done = make(
            name,
            data="toy" if data == "toy" else Path(data),
            trials=trials,
            out=target,
            only=only,
            dry_run=dry_run,
            display=display,
            tell=None if quiet else lambda line: print(line, file=sys.stderr),
        )
    print(done.text())
    if done.failed:
        raise typer.Exit(INTERNAL)
