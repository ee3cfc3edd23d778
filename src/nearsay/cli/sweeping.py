"""The verb sweep: many runs from one command."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearsay.cli.options import Json, Quiet, Recipe, print_json
from nearsay.config import ConfigError
from nearsay.errors import INTERNAL
from nearsay.training.progress import AnyDisplay, counted, make_display, make_table, print_table

if TYPE_CHECKING:  # these import torch
    from nearsay.sweep import Outcome, Planned, Space
    from nearsay.sweep.table import Summary


class Search(StrEnum):
    """What can search."""

    OPTUNA = "optuna"


def sweep(
    recipe: Recipe,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Lists for the recipe, as in method=standard,ncr seed=0,1,2.", metavar="KEY=A,B,C"
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="The same for one field, as in objective.k=5,10.", metavar="FIELD=A,B,C"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the runs; by default below runs/.", metavar="DIR"),
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once", help="How many runs at the same time; all must fit into memory.", min=1
        ),
    ] = 1,
    search: Annotated[
        Search | None,
        typer.Option("--search", help="Search ranges such as optimizer.lr=1e-4..1e-1:log."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", help="Runs of the search in all; it needs this number.", min=1),
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", help="What a search maximizes: validation; never test.")
    ] = "validation",
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            help="A database for a search on many machines; by default a file.",
            metavar="ADDRESS",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, and stop.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train every combination of settings, or search ranges.

    The same command again goes on: what is finished is not run again. A run that fails is told at the end and stops no
    other; the exit code is then 70. Values that hold commas stand in brackets, as in backbone.hidden=(64,32),(128,).

    For example: nearsay sweep digits method=standard,ncr seed=0,1,2 --set optimizer.lr=0.05,0.1
    """
    _check_options(search, trials, metric, storage)
    from nearsay import sweep as sweeping  # noqa: PLC0415  # brings torch
    from nearsay.config import default_sweep_folder  # noqa: PLC0415
    from nearsay.sweep.table import summarize  # noqa: PLC0415

    listed, changed = arguments or [], changes or []
    folder = default_sweep_folder(recipe, listed, changed) if out is None else out
    if search is None:
        planned = sweeping.grid(recipe, listed, changed)
        if dry_run:
            _print_grid(planned, folder, as_json=as_json)
            return
        with closing(make_display(quiet=quiet)) as display:
            teller = _Teller(display, len(planned), quiet=quiet)
            outcomes = sweeping.run_all(
                planned, folder, at_once=at_once, display=display, tell=teller
            )
        summary = summarize(outcomes, folder)
    else:
        space = sweeping.make_space(recipe, listed, changed)
        assert trials is not None
        if dry_run:
            _print_space(space, folder, trials, as_json=as_json)
            return
        with closing(make_display(quiet=quiet)) as display:
            teller = _Teller(display, trials, quiet=quiet)
            found = sweeping.search(
                space,
                folder,
                trials=trials,
                storage=storage,
                at_once=at_once,
                display=display,
                tell=teller,
            )
        summary = summarize(found.outcomes, folder, found=found)
    _print_summary(summary, folder, as_json=as_json)
    if summary.failed:
        raise typer.Exit(INTERNAL)


class _Teller:
    """Prints a line on stderr for each outcome."""

    def __init__(self, display: AnyDisplay, total: int, *, quiet: bool) -> None:
        self._display, self._total, self._quiet, self._number = display, total, quiet, 0

    def __call__(self, outcome: "Outcome") -> None:
        self._number += 1
        self._display.close()  # a run that failed has left its bar
        if not self._quiet:
            told = "finished" if outcome.result is not None else f"failed: {outcome.error}"
            before = "" if outcome.is_new else " before"
            print(f"{self._number}/{self._total}  {outcome.name}: {told}{before}", file=sys.stderr)


def _check_options(
    search: Search | None, trials: int | None, metric: str, storage: str | None
) -> None:
    if metric == "test":
        raise ConfigError(
            "--metric test is refused: hyper-parameters are never chosen on test, or it would no longer measure them; "
            "leave it at validation"
        )
    if metric not in ("validation", "held-out"):
        raise ConfigError(
            f"--metric {metric} is no accuracy of a run; it is validation, also called held-out"
        )
    if search is not None and trials is None:
        raise ConfigError("--search optuna needs the number of runs, such as --trials 20")
    for name, value in (("--trials", trials), ("--storage", storage)):
        if search is None and value is not None:
            raise ConfigError(
                f"{name} {value} is for a search; add --search optuna, or leave it out"
            )


def _print_grid(planned: "Sequence[Planned]", folder: Path, *, as_json: bool) -> None:
    if as_json:
        runs = [{"run": str(folder / each.name), "words": each.words} for each in planned]
        print_json({"sweep": str(folder), "runs": runs})
        return
    for each in planned:
        print(shlex.join(["nearsay", "train", *each.words, "--out", str(folder / each.name)]))
    print(f"{counted(len(planned), 'run')} would be in {folder}.", file=sys.stderr)


def _print_space(space: "Space", folder: Path, trials: int, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "sweep": str(folder),
                "trials": trials,
                "space": {each.key: each.text for each in space.choices},
            }
        )
        return
    kinds = [
        (
            each.key,
            each.text,
            "whole numbers" if each.range is not None and each.range.is_whole else "",
        )
        for each in space.choices
    ]
    print_table(make_table(("", "", ""), kinds))
    print(f"{counted(trials, 'trial')} would be in {folder}.", file=sys.stderr)


def _print_summary(summary: "Summary", folder: Path, *, as_json: bool) -> None:
    if summary.doubt:
        print(f"note: {summary.doubt}", file=sys.stderr)
    if as_json:
        print_json(
            {
                "sweep": str(folder),
                "csv": str(summary.table),
                "json": str(summary.record),
                **summary.tree,
            }
        )
        return
    print_table(make_table(summary.headers, summary.rows))
    for outcome in summary.failed:
        print(f"{outcome.name} failed with exit code {outcome.code}: {outcome.error}")
    if summary.best:
        print(summary.best)
    print(f"The table is in {summary.table} and {summary.record}.")
