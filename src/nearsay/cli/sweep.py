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
from nearsay.errors import INTERNAL, ConfigError
from nearsay.training.progress import AnyDisplay, counted, make_display, make_table, print_table

if TYPE_CHECKING:  # these import torch
    from nearsay.sweep.planning import Outcome, Planned, Space
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
            "--set", help="A list for one field, as in objective.k=5,10.", metavar="FIELD=A,B,C"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the runs. By default below runs/.", metavar="DIR"),
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once", help="How many runs at the same time. All must fit into memory.", min=1
        ),
    ] = 1,
    search: Annotated[
        Search | None,
        typer.Option("--search", help="Search ranges such as optimizer.lr=1e-4..1e-1:log."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", help="Total number of runs of a search. Required there.", min=1),
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", help="What a search maximizes: validation, never test.")
    ] = "validation",
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            help="A database for a search on many machines. By default a file.",
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

    The same command again continues: finished runs are not trained again. A failed run stops no
    other run; it is named at the end, and the exit code is then 70. Values that contain commas
    stand in brackets, as in backbone.hidden=(64,32),(128,).

    For example: nearsay sweep digits method=standard,ncr seed=0,1,2
    """
    # typer has checked the types. How the options fit together is checked before torch is imported.
    _check_options(search, trials, metric, storage)
    from nearsay import sweep as task  # noqa: PLC0415  # brings torch
    from nearsay.config.records import default_sweep_folder  # noqa: PLC0415
    from nearsay.sweep.table import summarize  # noqa: PLC0415

    words, fields = arguments or [], changes or []
    folder = default_sweep_folder(recipe, words, fields) if out is None else out
    if search is None:
        planned = task.grid(recipe, words, fields)
        if dry_run:
            _print_grid(planned, folder, as_json=as_json)
            return
        with closing(make_display(quiet=quiet)) as display:
            teller = _Teller(display, len(planned), quiet=quiet)
            outcomes = task.run_all(planned, folder, at_once=at_once, display=display, tell=teller)
        summary = summarize(outcomes, folder)
    else:
        space = task.make_space(recipe, words, fields)
        assert trials is not None
        if dry_run:
            _print_space(space, folder, trials, as_json=as_json)
            return
        with closing(make_display(quiet=quiet)) as display:
            study = task.search(
                space,
                folder,
                trials=trials,
                storage=storage,
                at_once=at_once,
                display=display,
                tell=_Teller(display, trials, quiet=quiet),
            )
        summary = summarize(study.outcomes, folder, found=study)
    _print_summary(summary, folder, as_json=as_json)
    if summary.failed:
        raise typer.Exit(INTERNAL)


class _Teller:
    """Prints a line on stderr for each outcome."""

    def __init__(self, display: AnyDisplay, total: int, *, quiet: bool) -> None:
        self._display, self._total, self._quiet, self._number = display, total, quiet, 0

    def __call__(self, outcome: "Outcome") -> None:
        self._number += 1
        # A run that failed has left its progress bar on the terminal.
        self._display.close()
        if not self._quiet:
            end = "finished" if outcome.result is not None else f"failed: {outcome.error}"
            before = "" if outcome.is_new else " before"
            print(f"{self._number}/{self._total}  {outcome.name}: {end}{before}", file=sys.stderr)


def _check_options(
    search: Search | None, trials: int | None, metric: str, storage: str | None
) -> None:
    if metric == "test":
        raise ConfigError(
            "--metric must be validation, got test. "
            "Settings chosen on the test set would make its accuracy too good."
        )
    if metric not in ("validation", "held-out"):
        raise ConfigError(f"--metric must be validation (or held-out), got {metric}.")
    if search is not None and trials is None:
        raise ConfigError("--search optuna needs a number of runs. Try --trials 20.")
    for name, value in (("--trials", trials), ("--storage", storage)):
        if search is None and value is not None:
            raise ConfigError(f"{name} {value} needs --search optuna.")


def _print_grid(planned: "Sequence[Planned]", folder: Path, *, as_json: bool) -> None:
    if as_json:
        runs = [{"run": str(folder / run.name), "words": run.words} for run in planned]
        print_json({"sweep": str(folder), "runs": runs})
        return
    for run in planned:
        print(shlex.join(["nearsay", "train", *run.words, "--out", str(folder / run.name)]))
    print(f"{counted(len(planned), 'run')} would be in {folder}.", file=sys.stderr)


def _print_space(space: "Space", folder: Path, trials: int, *, as_json: bool) -> None:
    if as_json:
        ranges = {choice.key: choice.text for choice in space.choices}
        print_json({"sweep": str(folder), "trials": trials, "space": ranges})
        return
    rows = []
    for choice in space.choices:
        is_whole = choice.range is not None and choice.range.is_whole
        rows.append((choice.key, choice.text, "whole numbers" if is_whole else ""))
    print_table(make_table(("", "", ""), rows))
    print(f"{counted(trials, 'trial')} would be in {folder}.", file=sys.stderr)


def _print_summary(summary: "Summary", folder: Path, *, as_json: bool) -> None:
    if summary.doubt:
        print(f"note: {summary.doubt}", file=sys.stderr)
    if as_json:
        files = {"csv": str(summary.table), "json": str(summary.record)}
        print_json({"sweep": str(folder), **files, **summary.tree})
        return
    print_table(make_table(summary.headers, summary.rows))
    for outcome in summary.failed:
        print(f"{outcome.name} failed with exit code {outcome.code}: {outcome.error}")
    if summary.best:
        print(summary.best)
    print(f"The table is in {summary.table} and {summary.record}.")
