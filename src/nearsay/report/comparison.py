"""What is compared, and the words for it that every part of the page shares."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nearsay.report.folders import FinishedRun, each_once, read_run
from nearsay.report.groups import Group, group_runs
from nearsay.training.progress import counted, plain

OTHER_JUDGES = (
    "these runs were judged by different labels, which makes cleaned ones look better; nearsay evaluate with --data "
    "judges by the same."
)


class Comparison(NamedTuple):
    """Groups of runs, and the examples on which they are compared."""

    groups: tuple[Group, ...]
    split: str | None  # such as "test" or "validation", None if no run was judged on either


def compare(paths: Sequence[Path], split: str | None = None) -> Comparison:
    """Read the run folders, each once however often it is named, and group them.

    They are compared on `split`, by default on the test set if all or else if some were judged on one, else on
    held-out examples.
    """
    if not paths:
        raise ValueError(
            "no run was given; name at least one run folder, as `nearsay train` writes them"
        )
    groups = group_runs([read_run(path) for path in each_once(paths)])
    if split is not None:
        return Comparison(groups, split)
    found = {
        split: [
            run.number("accuracy", split, "final") is not None
            for group in groups
            for run in group.runs
        ]
        for split in ("test", "validation")
    }
    for enough in (all, any):
        for split, has in found.items():
            if enough(has):
                return Comparison(groups, split)
    return Comparison(groups, None)


def split_text(comparison: Comparison) -> str:
    """The examples on which runs are compared, in words that say how far their labels can be trusted."""
    runs = [run for group in comparison.groups for run in group.runs]
    if comparison.split == "validation":
        is_clean = all(_knows_validation(run) for run in runs)
        who = "each run has them" if any(map(_made_anew, runs)) else "they were given"
        return "held-out validation set" + (
            " with clean labels" if is_clean else f" (its labels as {who})"
        )
    if comparison.split == "second_test":
        return "second test set"
    return "clean test set" if all(run.labels.clean is not None for run in runs) else "test set"


def judges_differ(runs: Iterable[FinishedRun], split: str | None) -> bool:
    """Whether some runs were judged by labels that `nearsay clean` or `propagate` made, and others by other ones."""
    judged = [run for run in runs if not _knows_validation(run)]
    return split == "validation" and len({_made_anew(run) for run in judged}) > 1


def _knows_validation(run: FinishedRun) -> bool:
    return run.settings.get("validation_labels") == "clean" and run.labels.clean is not None


def _made_anew(run: FinishedRun) -> str | None:
    """The file of labels in place of those of the data, if examples that were held out have theirs from it too."""
    return run.relabeled() if run.num_held_out else None


def source(groups: Sequence[Group]) -> str:
    """Where numbers come from: data sets, runs and seeds."""
    data = distinct(run.data() for group in groups for run in group.runs)
    return f"Data: {data}; {counted(sum(len(group.runs) for group in groups), 'run')}; {seeds_text(groups)}."


def seeds_text(groups: Sequence[Group]) -> str:
    """The seeds of all runs."""
    seeds = sorted({run.seed for group in groups for run in group.runs})
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def run_names(comparison: Comparison) -> dict[Path, str]:
    """What to call each folder: its last name, or the whole path where two end alike."""
    paths = [run.path for group in comparison.groups for run in group.runs]
    are_unique = len({path.name for path in paths}) == len(paths)
    return {path: plain(path.name if are_unique else str(path)) for path in paths}


def distinct(texts: Iterable[str]) -> str:
    """Each text once."""
    return ", ".join(dict.fromkeys(texts))
