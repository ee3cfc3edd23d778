"""The verb demo: see in a minute what NCR does to noisy labels."""

import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearsay.cli.options import Quiet
from nearsay.training.progress import make_display, make_table, percent, print_table

if TYPE_CHECKING:  # brings torch
    from nearsay.doors.demo import Demonstrated


def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the six runs.", metavar="DIR")
    ] = Path("runs/demo"),
    quiet: Quiet = False,
) -> None:
    """See what NCR does to noisy labels, on digits.

    Trains six short runs on the CPU or GPU: cross-entropy (standard) and NCR (ncr), three seeds
    each. Nothing is downloaded.
    """
    from nearsay.doors import demo as door  # noqa: PLC0415  # brings torch
    from nearsay.report import write_report  # noqa: PLC0415

    print(f"{door.TITLE}: cross-entropy (standard) and NCR, three seeds each.", file=sys.stderr)
    runs: list[Demonstrated] = []
    # A line for every epoch of six runs would hide the table.
    with closing(make_display(quiet=quiet or not sys.stderr.isatty())) as display:
        for run in door.demonstrate(out, display=display):
            runs.append(run)
            if not quiet:
                accuracy = percent(run.result["accuracy"]["test"]["final"])
                print(
                    f"{run.number}/{run.total}  {run.method}, seed {run.seed}: {accuracy}",
                    file=sys.stderr,
                )
    print_table(make_table(*door.to_cells(runs)))
    try:
        page = write_report([run.folder for run in runs], out / "report.html", title=door.TITLE)
        print(f"Curves and more: {page}")
    # Drawing is an extra: without it, the table above is the result.
    except ImportError as error:
        print(f"note: no report: {error}", file=sys.stderr)
    name = shlex.quote(str(runs[-1].folder))
    print(f"Try next: nearsay audit {name} (which labels are likely wrong)")
    print("          nearsay train folder path=photos/ (your images)")
    print("          nearsay recipes (other data: tables, embeddings, benchmarks)")
