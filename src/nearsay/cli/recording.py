"""The verb that makes the page of measured results."""

from pathlib import Path
from typing import Annotated

import typer

from nearsay.errors import BAD_DATA


def results(
    folder: Annotated[
        Path, typer.Option("--results", help="Folder with a file for each run.", metavar="DIR")
    ] = Path("results"),
    out: Annotated[Path, typer.Option("--out", help="The page to write.", metavar="FILE")] = Path(
        "docs/results.md"
    ),
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; fail if the page is not what the files make of it."
        ),
    ] = False,
) -> None:
    """Make docs/results.md of recorded runs, for contributors.

    Writes docs/results.md, with the numbers of the paper and of others beside ours, and results/queue.json, which says
    what is left. A number without a run reads "not run". The runs themselves are done by benchmarks/cifar.py.
    """
    from nearsay.results.writing import stale_files, write_results  # noqa: PLC0415  # brings torch

    if not check:
        changed = write_results(folder, out)
        print(
            f"Wrote {' and '.join(map(str, changed))}."
            if changed
            else f"{out} is as the results make it."
        )
        return
    if stale := stale_files(folder, out):
        print(f"{' and '.join(map(str, stale))} must be made again with nearsay results.")
        raise typer.Exit(BAD_DATA)
    print(f"{out} is as the results make it.")
