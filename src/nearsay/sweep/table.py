"""What a sweep came to: means over seeds, and every run with its choices, as a table to show and two files."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearsay.data import tables
from nearsay.errors import BAD_DATA
from nearsay.report.runs import OTHER_JUDGES, judges_differ
from nearsay.report.runs import FinishedRun, read_run
from nearsay.report.runs import Group, Spread, group_runs
from nearsay.sweep import Found, Outcome
from nearsay.training.checkpoints import write_whole
from nearsay.training.progress import percent

SPLITS = ("validation", "test")


class Summary(NamedTuple):
    """What to show of a sweep; Any is the type of JSON."""

    headers: list[str]
    rows: list[list[str]]
    failed: list[Outcome]
    best: str  # a sentence with the command of the best trial; empty for a grid
    doubt: str  # what speaks against comparing the accuracies; empty if nothing does
    table: Path
    record: Path
    tree: dict[str, Any]


def summarize(outcomes: Sequence[Outcome], folder: Path, *, found: Found | None = None) -> Summary:
    """Write `sweep.csv`, a row for each run, and `sweep.json`, which has the groups too; `found` is of a search.

    Groups are of runs that differ in their seed only. They stay in the order of the sweep, those of a search are sorted
    by the accuracy that was searched for.
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
        tree["best"] = (
            None
            if found.best is None
            else {"words": found.best.words, "validation": found.accuracy}
        )
        tree["elsewhere"] = found.num_elsewhere
    table, record = folder / "sweep.csv", folder / "sweep.json"
    tables.write(table, _columns(outcomes, failed))
    write_whole(record, json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n")
    splits = [
        name for name in SPLITS if any(group.spread("accuracy", name, "final") for group in groups)
    ]
    headers = ["", "n", *(f"{name}, final" for name in splits), "seconds"]
    rows = [_row(group, splits) for group in groups]
    rows += [
        [name, "failed", *[""] * len(splits), f"exit {each.code}"] for name, each in failed.items()
    ]
    doubt = OTHER_JUDGES if any(judges_differ(runs, name) for name in splits) else ""
    return Summary(headers, rows, list(failed.values()), _best(found), doubt, table, record, tree)


def _read(outcomes: Sequence[Outcome]) -> tuple[list[FinishedRun], dict[str, Outcome]]:
    """The runs that can be read, and by their names those that failed or are damaged."""
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
    accuracies = [group.spread("accuracy", name, "final") for name in splits]
    seconds = group.spread("seconds")
    return [
        group.name,
        str(group.num_seeds),
        *("-" if each is None else f"{each.text(scale=100)} %" for each in accuracies),
        "-" if seconds is None else f"{seconds.mean:,.1f}",
    ]


def _group_tree(group: Group) -> dict[str, Any]:
    spreads = {name: group.spread("accuracy", name, "final") for name in SPLITS}
    return {
        "name": group.name,
        "runs": [str(run.path) for run in group.runs],
        "accuracy": {
            name: None if each is None else each._asdict() for name, each in spreads.items()
        },
    }


def _run_tree(outcome: Outcome, failed: dict[str, Outcome]) -> dict[str, Any]:
    shown = failed.get(outcome.name, outcome)
    facts = {
        "run": str(shown.folder),
        "words": shown.words,
        "exit_code": shown.code,
        "error": shown.error or None,
    }
    return {**facts, "result": shown.result}


def _columns(
    outcomes: Sequence[Outcome], failed: dict[str, Outcome]
) -> dict[str, list[tables.Cell]]:
    """A row for each run: its choices, then what came of it."""
    shown = [failed.get(each.name, each) for each in outcomes]
    choices = [_choices(each) for each in shown]
    keys = dict.fromkeys(key for each in choices for key in each)
    columns: dict[str, list[tables.Cell]] = {"run": [each.name for each in shown]}
    columns |= {key: [each.get(key) for each in choices] for key in keys}
    columns["exit_code"] = [each.code for each in shown]
    for split in SPLITS:
        for kind in ("final", "last_10"):
            columns[f"{split}_{kind}"] = [
                _number(each.result, "accuracy", split, kind) for each in shown
            ]
    columns["seconds"] = [_number(each.result, "seconds") for each in shown]
    columns["error"] = [each.error or None for each in shown]
    return columns


def _choices(outcome: Outcome) -> dict[str, str]:
    """Key -> text; where a field has the name of an argument, it has the last word."""
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
    elsewhere = (
        f"; {found.num_elsewhere} finished trials are not in this folder"
        if found.num_elsewhere
        else ""
    )
    if found.best is None:
        return f"No trial has succeeded{elsewhere}."
    command = shlex.join(["nearsay", "train", *found.best.words])
    return f"Best on validation, {percent(found.accuracy)}{elsewhere}: {command}"
