"""Finished runs side by side, with means over seeds; and the demonstration, which is such a comparison."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearsay import config
from nearsay.report.runs import FinishedRun, Spread, each_once, group_runs, read_run, spread
from nearsay.training.loop import train
from nearsay.training.progress import Display, percent
from nearsay.training.system import one_thread

DEMO_TITLE = "Digits, 40 % of the labels drawn at random"
DEMO_METHODS = ("standard", "ncr")
DEMO_SEEDS = (0, 1, 2)
ACCURACIES = ("final", "best", "last_10")


class Group(NamedTuple):
    """Runs that differ in nothing but seeds."""

    name: str
    rows: list[dict[str, Any]]  # one for each run
    num_seeds: int  # without runs that are another one again
    means: dict[str, Spread | None]  # by the names of the accuracies


class Demonstrated(NamedTuple):
    """One run of the demonstration."""

    number: int  # from 1
    total: int
    method: str
    seed: int
    folder: Path
    result: dict[str, Any]


def read_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """The runs, each once; ValueError if one is not finished."""
    return [read_run(folder) for folder in each_once(folders)]


def compare(runs: Sequence[FinishedRun], *, split: str = "test") -> list[Group]:
    """The runs by what they have in common; ValueError if one knows nothing of the split."""
    judged = {run.path for run in judged_on(runs, split)}
    for run in runs:
        if run.path not in judged:
            known = " and ".join(run.result.get("accuracy") or ()) or "none"
            raise ValueError(
                f"{run.path} has no accuracy on split={split!r}; it has {known}; choose a split that all runs have, or "
                "leave this one out"
            )
    return [
        Group(
            group.name,
            [_row(run, split) for run in group.runs],
            group.num_seeds,
            {name: group.spread("accuracy", split, name) for name in ACCURACIES},
        )
        for group in group_runs(runs)
    ]


def judged_on(runs: Sequence[FinishedRun], split: str) -> list[FinishedRun]:
    """Those that have an accuracy on a split."""
    return [run for run in runs if run.number("accuracy", split, "final") is not None]


def common_split(runs: Sequence[FinishedRun]) -> str:
    """What most of the runs were judged on, test where validation has no more."""
    return max(("test", "validation"), key=lambda split: len(judged_on(runs, split)))


def finished(folders: Sequence[Path]) -> dict[Path, list[Path]]:
    """The finished runs of each folder: itself, or those in it, as after a sweep; ValueError if there is none."""
    found = {
        folder: [folder] if _is_finished(folder) else sorted(filter(_is_finished, folder.glob("*")))
        for folder in folders
    }
    if not any(found.values()):
        raise ValueError(
            f"{folders[0]} holds no finished run; give folders that nearsay train or nearsay sweep has made"
        )
    return found


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


def as_tree(group: Group) -> dict[str, Any]:
    """A group as JSON."""
    means = {name: each._asdict() if each else None for name, each in group.means.items()}
    return {"name": group.name, "means": means, "runs": group.rows}


def comparison_cells(groups: Sequence[Group], split: str) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table: every run, and after those of a group their means."""
    headers = [
        "method",
        "recipe",
        "noise",
        "seed",
        f"{split}, final",
        "best",
        "mean of last 10 or fewer",
        "seconds",
        "images/s",
    ]
    names = _names([row for group in groups for row in group.rows])
    rows = []
    for group in groups:
        for row in group.rows:
            speed = [
                "-" if row[name] is None else f"{row[name]:,.0f}"
                for name in ("seconds", "images_per_second")
            ]
            told = [*_told(row), *(percent(row[name]) for name in ACCURACIES), *speed]
            rows.append([names[row["run"]], *told] if names else told)
        if len(group.rows) > 1:
            means = [each.text(scale=100) if each else "-" for each in group.means.values()]
            told = [f"{group.name}: mean ± std", "", "", f"n={group.num_seeds}", *means, "", ""]
            rows.append([told[0], "", *told[1:]] if names else told)
    return (["run", *headers] if names else headers), rows


def _told(row: dict[str, Any]) -> list[str]:
    return [row["method"], row["recipe"], percent(row["noise"]), str(row["seed"])]


def _names(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What to call each run where a table could not tell them apart otherwise; nothing where it can."""
    if len({tuple(_told(row)) for row in rows}) == len(rows):
        return {}
    last = {row["run"]: Path(row["run"]).name for row in rows}
    return last if len(set(last.values())) == len(last) else {run: run for run in last}


def demo_cells(runs: Sequence[Demonstrated]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table: every seed, then mean and deviation; the gain; and confidence in labels."""
    seeds = sorted({each.seed for each in runs})
    results = {(each.method, each.seed): each.result for each in runs}
    plain, better = DEMO_METHODS
    finals = {
        method: [results[method, seed]["accuracy"]["test"]["final"] for seed in seeds]
        for method in DEMO_METHODS
    }
    rows = [
        [method, *map(percent, finals[method]), _mean(finals[method])] for method in DEMO_METHODS
    ]
    gains = [after - before for before, after in zip(finals[plain], finals[better], strict=True)]
    rows.append(
        [f"{better} above {plain}, points", *(f"{100 * gain:+.1f}" for gain in gains), _mean(gains)]
    )
    for kind in ("right", "wrong"):
        for method in DEMO_METHODS:
            values = [results[method, seed]["confidence"][kind] for seed in seeds]
            rows.append(
                [f"confidence in {kind} labels, {method}", *map(percent, values), _mean(values)]
            )
    return [
        "test accuracy after the last epoch",
        *(f"seed {seed}" for seed in seeds),
        "mean ± std",
    ], rows


def _mean(shares: Sequence[float]) -> str:
    found = spread(shares)
    return "-" if found is None else found.text(scale=100)


def demonstrate(folder: Path, *, display: Display | None = None) -> Iterator[Demonstrated]:
    """Train on digits with 40 % of the labels drawn at random, by cross-entropy and by NCR, three seeds each.

    What is finished in the folder is not done again.
    """
    pairs = [(method, seed) for seed in DEMO_SEEDS for method in DEMO_METHODS]
    for number, (method, seed) in enumerate(pairs, start=1):
        call = config.call_recipe("digits", ["noise=0.4", f"method={method}", f"seed={seed}"])
        target = folder / f"{method}-seed={seed}"
        with one_thread():
            result = train(call.experiment, target, origin=call.origin, display=display)
        yield Demonstrated(number, len(pairs), method, seed, target, result)
