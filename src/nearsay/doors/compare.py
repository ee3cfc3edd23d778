"""Finished runs side by side, with means over seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearsay.report.runs import (
    OTHER_JUDGES,
    FinishedRun,
    Spread,
    each_once,
    group_runs,
    judges_differ,
    read_run,
)
from nearsay.training.progress import percent

ACCURACIES = ("final", "best", "last_10")


class Group(NamedTuple):
    """Runs that differ in nothing but seeds."""

    name: str
    rows: list[dict[str, Any]]  # one for each run
    num_seeds: int  # copies of a run count once
    means: dict[str, Spread | None]  # by the names of the accuracies


class Compared(NamedTuple):
    """Runs side by side."""

    split: str  # what all of them were judged on
    groups: list[Group]
    folders: list[Path]  # of all runs in the groups, in the order in which they were named
    notes: list[str]  # what the user should know: runs that were left out, other judges

    def to_tree(self) -> dict[str, Any]:
        """The groups as JSON."""
        groups = []
        for group in self.groups:
            means = {name: mean and mean._asdict() for name, mean in group.means.items()}
            groups.append({"name": group.name, "means": means, "runs": group.rows})
        return {"split": self.split, "groups": groups}

    def to_cells(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows of a table: every run, and after the runs of a group their means."""
        headers = [
            "method",
            "recipe",
            "noise",
            "seed",
            f"{self.split}, final",
            "best",
            "mean of last 10 or fewer",
            "seconds",
            "images/s",
        ]
        names = _names([row for group in self.groups for row in group.rows])
        cells: list[list[str]] = []
        for group in self.groups:
            for row in group.rows:
                accuracies = [percent(row[name]) for name in ACCURACIES]
                speed = [_whole(row["seconds"]), _whole(row["images_per_second"])]
                first = [names[row["run"]]] if names else []
                cells.append([*first, *_choices(row), *accuracies, *speed])
            # A single run has no deviation, and its mean would repeat its row.
            if len(group.rows) > 1:
                means = [_text(mean) for mean in group.means.values()]
                title = f"{group.name}: mean ± std"
                first = [title, ""] if names else [title]
                cells.append([*first, "", "", f"n={group.num_seeds}", *means, "", ""])
        return (["run", *headers] if names else headers), cells


def compare(folders: Sequence[Path], *, split: str | None = None) -> Compared:
    """Compare finished runs, those that differ in their seeds alone as a group.

    Args:
        folders: run folders, or folders of runs as `nearsay sweep` makes them.
        split: test, validation or second_test; ValueError if a run was not judged on it. By
            default test, or validation where more runs have it; the others are left out.
    """
    notes: list[str] = []
    chosen: list[Path] = []
    for folder, finished in find_finished(folders).items():
        chosen += finished
        if not finished:
            notes.append(f"{folder} holds no finished run and is left out")
    runs = [read_run(folder) for folder in each_once(chosen)]
    if split is None:
        # What most of the runs were judged on, test where validation has no more.
        split = max(("test", "validation"), key=lambda name: len(_judged_on(runs, name)))
        judged = _judged_on(runs, split)
        for run in runs:
            if judged and run not in judged:
                notes.append(f"{run.path} was not judged on {split} and is left out")
        runs = judged or runs
    groups = _group(runs, split)
    if judges_differ(runs, split):
        notes.append(OTHER_JUDGES)
    return Compared(split, groups, [run.path for run in runs], notes)


def find_finished(folders: Sequence[Path]) -> dict[Path, list[Path]]:
    """The finished runs of each folder: itself, or those in it; ValueError if there is none."""
    runs: dict[Path, list[Path]] = {}
    for folder in folders:
        # A run folder stands for itself, another one for the runs in it, as after a sweep.
        inside = [folder] if _is_finished(folder) else sorted(folder.glob("*"))
        runs[folder] = [path for path in inside if _is_finished(path)]
    if not any(runs.values()):
        raise ValueError(
            f"{folders[0]} must hold a finished run. "
            "Use folders that nearsay train or nearsay sweep has made."
        )
    return runs


def _group(runs: Sequence[FinishedRun], split: str) -> list[Group]:
    judged = _judged_on(runs, split)
    for run in runs:
        if run not in judged:
            known = " and ".join(run.result.get("accuracy") or ()) or "none"
            raise ValueError(
                f"split must be one that {run.path} was judged on ({known}), got {split!r}. "
                "Choose another split, or leave this run out."
            )
    groups = []
    for group in group_runs(runs):
        rows = [_row(run, split) for run in group.runs]
        means = {name: group.spread("accuracy", split, name) for name in ACCURACIES}
        groups.append(Group(group.name, rows, group.num_seeds, means))
    return groups


def _judged_on(runs: Sequence[FinishedRun], split: str) -> list[FinishedRun]:
    return [run for run in runs if run.number("accuracy", split, "final") is not None]


def _is_finished(folder: Path) -> bool:
    return (folder / "result.json").is_file()


def _row(run: FinishedRun, split: str) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "recipe": run.recipe,
        "method": run.method(),
        "noise": run.number("labels", "effective_rate"),
        "seed": run.seed,
        **{name: run.number("accuracy", split, name) for name in ACCURACIES},
        "seconds": run.number("seconds"),
        "images_per_second": run.number("images_per_second"),
    }


def _choices(row: dict[str, Any]) -> list[str]:
    return [row["method"], row["recipe"], percent(row["noise"]), str(row["seed"])]


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def _text(mean: Spread | None) -> str:
    return "-" if mean is None else mean.text(scale=100)


def _names(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A name for each run where the choices alone do not tell the runs apart; {} where they do."""
    if len({tuple(_choices(row)) for row in rows}) == len(rows):
        return {}
    last = {row["run"]: Path(row["run"]).name for row in rows}
    if len(set(last.values())) == len(last):
        return last
    return {run: run for run in last}
