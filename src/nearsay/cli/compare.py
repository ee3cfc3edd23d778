"""The verb compare: finished runs side by side."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Json, Split, print_json
from nearsay.training.progress import make_table, print_table


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders made by nearsay train or nearsay sweep.", metavar="RUN", exists=True
        ),
    ],
    split: Annotated[
        Split | None,
        typer.Option(
            "--split",
            help="By default test, or validation if more runs have it. Runs without it are left "
            "out.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write curves and tables to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put finished runs side by side, with means over seeds.

    For example: nearsay compare runs/sweep-digits --html compare.html
    """
    from nearsay.doors import compare as door  # noqa: PLC0415  # brings torch

    compared = door.compare(runs, split=None if split is None else split.value)
    for note in compared.notes:
        print(f"note: {note}", file=sys.stderr)
    if html is not None:
        from nearsay.report import write_report  # noqa: PLC0415  # drawing is an extra

        write_report(compared.folders, html, title="Runs compared", split=compared.split)
    if as_json:
        print_json(compared.to_tree())
        return
    print_table(make_table(*compared.to_cells()))
    if html is not None:
        print(f"Curves are in {html}.")
