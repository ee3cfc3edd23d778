"""The results of a sweep as a table to show and two files: means over seeds, and every run."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearsay.data import tables
from nearsay.errors import BAD_DATA
from nearsay.report.runs import (
    OTHER_JUDGES,
    FinishedRun,
    Group,
    Spread,
    group_runs,
    judges_differ,
    read_run,
)
from nearsay.sweep.planning import Found, Outcome
from nearsay.training.checkpoints import write_whole
from nearsay.training.progress import percent

SPLITS = ("validation", "test")


class Summary(NamedTuple):
    """What to show of a sweep; Any is the type of JSON."""

    headers: list[str]
    rows: list[list[str]]
    failed: list[Outcome]
    best: str  # a sentence with the command of the best trial; empty for a grid
    doubt: str  # what speaks against comparing the accuracies, or empty
    table: Path
    record: Path
    tree: dict[str, Any]


def summarize(outcomes: Sequence[Outcome], folder: Path, *, found: Found | None = None) -> Summary:
    """Write `sweep.csv`, a row for each run, and `sweep.json`, which has the groups too.

    Groups are of runs that differ in their seed only, in the order of the sweep. After a search,
    with its result as `found`, they are sorted by the accuracy that was searched for.
    """
    runs, failed = _read(outcomes)
    groups = list(group_runs(runs))
    if found is not None:
        groups.sort(key=lambda group: -_mean(group.spread("accuracy", "validation", "final")))
    tree: dict[str, Any] = {
        "groups": [_group_tree(group) for group in groups],
        "runs": [_run_tree(outcome, failed) for outcome in outcomes],
    }
    if found is not None:
        tree["best"] = None
        if found.best is not None:
            tree["best"] = {"words": found.best.words, "validation": found.accuracy}
        tree["elsewhere"] = found.num_elsewhere
    table, record = folder / "sweep.csv", folder / "sweep.json"
    tables.write(table, _columns(outcomes, failed))
    write_whole(record, json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n")
    splits = []
    for split in SPLITS:
        if any(group.spread("accuracy", split, "final") for group in groups):
            splits.append(split)
    headers = ["", "n", *(f"{split}, final" for split in splits), "seconds"]
    rows = [_row(group, splits) for group in groups]
    for name, outcome in failed.items():
        rows.append([name, "failed", *[""] * len(splits), f"exit {outcome.code}"])
    doubt = OTHER_JUDGES if any(judges_differ(runs, split) for split in splits) else ""
    return Summary(headers, rows, list(failed.values()), _best(found), doubt, table, record, tree)


def _read(outcomes: Sequence[Outcome]) -> tuple[list[FinishedRun], dict[str, Outcome]]:
    """The runs that can be read, and by their names the runs that failed or are damaged."""
    runs, failed = [], {}
    for outcome in outcomes:
        if outcome.result is None:
            failed[outcome.name] = outcome
            continue
        try:
            runs.append(read_run(outcome.folder))
        except ValueError as error:
            failed[outcome.name] = outcome._replace(result=None, code=BAD_DATA, error=str(error))
    return runs, failed


def _row(group: Group, splits: Sequence[str]) -> list[str]:
    cells = [group.name, str(group.num_seeds)]
    for split in splits:
        accuracy = group.spread("accuracy", split, "final")
        cells.append("-" if accuracy is None else f"{accuracy.text(scale=100)} %")
    seconds = group.spread("seconds")
    return [*cells, "-" if seconds is None else f"{seconds.mean:,.1f}"]


def _group_tree(group: Group) -> dict[str, Any]:
    accuracies = {}
    for split in SPLITS:
        accuracy = group.spread("accuracy", split, "final")
        accuracies[split] = None if accuracy is None else accuracy._asdict()
    runs = [str(run.path) for run in group.runs]
    return {"name": group.name, "runs": runs, "accuracy": accuracies}


def _run_tree(outcome: Outcome, failed: dict[str, Outcome]) -> dict[str, Any]:
    outcome = failed.get(outcome.name, outcome)
    return {
        "run": str(outcome.folder),
        "words": outcome.words,
        "exit_code": outcome.code,
        "error": outcome.error or None,
        "result": outcome.result,
    }


def _columns(
    outcomes: Sequence[Outcome], failed: dict[str, Outcome]
) -> dict[str, list[tables.Cell]]:
    """A row for each run: its choices, then its results."""
    outcomes = [failed.get(outcome.name, outcome) for outcome in outcomes]
    choices = list(map(_choices, outcomes))
    columns: dict[str, list[tables.Cell]] = {"run": [outcome.name for outcome in outcomes]}
    for key in dict.fromkeys(key for choice in choices for key in choice):
        columns[key] = [choice.get(key) for choice in choices]
    columns["exit_code"] = [outcome.code for outcome in outcomes]
    for split in SPLITS:
        for kind in ("final", "last_10"):
            numbers = [_number(outcome.result, "accuracy", split, kind) for outcome in outcomes]
            columns[f"{split}_{kind}"] = [*numbers]
    columns["seconds"] = [_number(outcome.result, "seconds") for outcome in outcomes]
    columns["error"] = [outcome.error or None for outcome in outcomes]
    return columns


def _choices(outcome: Outcome) -> dict[str, str]:
    """Key -> text; a field with the name of an argument comes later and wins."""
    pairs = (word.partition("=") for word in outcome.words[1:] if word != "--set")
    return {key: text for key, _, text in pairs}


def _number(result: dict[str, Any] | None, *names: str) -> float | None:
    value: Any = result
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def _mean(spread: Spread | None) -> float:
    return -1.0 if spread is None else spread.mean


def _best(found: Found | None) -> str:
    if found is None:
        return ""
    elsewhere = ""
    if found.num_elsewhere:
        elsewhere = f"; {found.num_elsewhere} finished trials are not in this folder"
    if found.best is None:
        return f"No trial has succeeded{elsewhere}."
    command = shlex.join(["nearsay", "train", *found.best.words])
    return f"Best on validation, {percent(found.accuracy)}{elsewhere}: {command}"
