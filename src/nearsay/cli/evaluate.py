"""The verb evaluate: accuracy and calibration of a trained run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Device, Json, Run, Split, print_json
from nearsay.training.progress import make_table, print_table

_MOST_NAMED = 5  # files, in a note


def evaluate(
    run: Run,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Other data: a folder of class folders, a table of paths and labels, or features "
            "with labels.",
            exists=True,
        ),
    ] = None,
    split: Annotated[
        Split | None,
        typer.Option("--split", help="By default test, or validation if there is no test."),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure the accuracy and the calibration of a run.

    This takes seconds, because the run has kept its predictions. If the true training labels are
    known, it also measures how well the run finds the wrong ones.

    For example: nearsay evaluate runs/first --data new-photos/
    """
    from nearsay.training import evaluate as task  # noqa: PLC0415  # brings torch

    name = None if split is None else split.value
    report = task.evaluate(run, split=name, data=data, device=device)
    # Both notes change what the numbers mean, so they are printed with --json too.
    if report["unreadable"]:
        print(f"note: {_describe_unreadable(report['unreadable'])}", file=sys.stderr)
    if report["labels_in_doubt"]:
        print(
            "note: these labels may be wrong themselves. Use --data for labels that you trust.",
            file=sys.stderr,
        )
    if as_json:
        print_json(report)
    else:
        print_table(make_table(*task.evaluation_cells(report)))


def _describe_unreadable(names: list[str]) -> str:
    count = "1 file was" if len(names) == 1 else f"{len(names):,} files were"
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{count} left out as unreadable: {', '.join(names[:_MOST_NAMED])}{more}."
