"""Runs that differ only in their seed, as groups with a name; and what is said of the numbers of a group."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nearsay.report.folders import FinishedRun


class Spread(NamedTuple):
    """Mean and standard deviation (of a sample, so None for one number) of `num` numbers."""

    mean: float
    deviation: float | None
    num: int

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """Such as "95.1 ± 0.4"."""
        deviation = "" if self.deviation is None else f" ± {scale * self.deviation:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{deviation}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Runs of one experiment that differ in their seed only; some may have the same seed, and be the same again."""

    name: str
    runs: tuple[FinishedRun, ...]  # by seed

    def by_seed(self) -> list[list[FinishedRun]]:
        """The runs of each seed: several where they are the same again."""
        found: dict[str, list[FinishedRun]] = {}
        for run in self.runs:
            found.setdefault(_settings(run), []).append(run)
        return list(found.values())

    @property
    def num_seeds(self) -> int:
        """How many of the runs are not another one again."""
        return len(self.by_seed())

    def numbers(self, *names: str) -> list[float]:
        """A number of the result for each seed that has it: of runs that are the same again, their mean."""
        found = [
            [number for run in runs if (number := run.number(*names)) is not None]
            for runs in self.by_seed()
        ]
        return [math.fsum(each) / len(each) for each in found if each]

    def spread(self, *names: str) -> Spread | None:
        """Mean and deviation of a number of the result over the seeds that have it, None if none has."""
        return spread(self.numbers(*names))

    def first(self) -> FinishedRun:
        """A run to ask for what all of them share."""
        return self.runs[0]


def spread(numbers: Iterable[float]) -> Spread | None:
    """Mean and standard deviation of a sample, None if it is empty."""
    values = list(numbers)
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(
        mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None, len(values)
    )


def single(run: FinishedRun, *names: str) -> Spread | None:
    """A number of the result of one run."""
    number = run.number(*names)
    return None if number is None else Spread(number, None, 1)


def group_runs(runs: Sequence[FinishedRun]) -> tuple[Group, ...]:
    """Groups in the order in which their first runs come."""
    members: dict[str, list[FinishedRun]] = {}
    for run in runs:
        members.setdefault(_identity(run), []).append(run)
    names = _names([each[0] for each in members.values()])
    return tuple(
        Group(name=name, runs=tuple(sorted(each, key=lambda run: run.seed)))
        for name, each in zip(names, members.values(), strict=True)
    )


def _identity(run: FinishedRun) -> str:
    """What two runs of one group have in common.

    A seed inside the tree, such as that of the noise, mostly follows the seed of the run; where somebody chose it, an
    argument or override says so.
    """
    chosen = [
        each
        for each in (*_pairs(run), *run.overrides)
        if _key(each).endswith("seed") and _key(each) != "seed"
    ]
    return json.dumps([run.recipe, _settings(run, "seed"), sorted(chosen)])


def _settings(run: FinishedRun, *left_out: str) -> str:
    """All that makes two runs the same, as text."""
    settings = {**run.settings, "relabeled": run.relabeled()}
    return json.dumps(_without(settings, "machine", *left_out), sort_keys=True)


def _without(tree: Any, *keys: str) -> Any:
    """The tree without these keys, wherever they are; "machine" only says where a run took place."""
    if isinstance(tree, dict):
        return {key: _without(value, *keys) for key, value in tree.items() if key not in keys}
    return [_without(value, *keys) for value in tree] if isinstance(tree, list) else tree


def _names(firsts: Sequence[FinishedRun]) -> list[str]:
    """What tells each run from the others: arguments and overrides, else fields of the experiment, else a number."""
    if len(firsts) == 1:
        return [firsts[0].method()]
    names = [" ".join(parts) for parts in _told_apart([_choices(run) for run in firsts])]
    names = [name or run.method() for name, run in zip(names, firsts, strict=True)]
    fields = _told_apart(
        [dict(_leaves(_without(run.settings, "machine", "seed"))) for run in firsts]
    )
    names = [
        " ".join([name, *parts[:3]]) if count > 1 else name
        for name, count, parts in zip(names, _counts(names), fields, strict=True)
    ]
    places = [names[:place].count(name) + 1 for place, name in enumerate(names)]
    return [
        f"{name} ({place})" if count > 1 else name
        for name, count, place in zip(names, _counts(names), places, strict=True)
    ]


def _counts(names: Sequence[str]) -> list[int]:
    counts = Counter(names)
    return [counts[name] for name in names]


def _told_apart(choices: Sequence[dict[str, str]]) -> list[list[str]]:
    """For each, the choices that are not the same everywhere; a method and a recipe go without saying what they are."""
    keys = list(dict.fromkeys(key for each in choices for key in each))
    differing = [key for key in keys if len({each.get(key) for each in choices}) > 1]
    differing.sort(key=lambda key: {"recipe": 0, "method": 1}.get(key, 2))
    return [
        [
            each[key] if key in ("recipe", "method") else f"{key}={each[key]}"
            for key in differing
            if key in each
        ]
        for each in choices
    ]


def _choices(run: FinishedRun) -> dict[str, str]:
    overrides = {
        _key(each): each.partition("=")[2]
        for each in run.overrides
        if not _key(each).startswith("machine.")
    }
    chosen = {**run.arguments, **overrides, "recipe": run.recipe, "method": run.method()}
    return {key: value for key, value in chosen.items() if key != "seed"}


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names of all that is in a tree."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{prefix}{key}.")
    else:
        yield prefix[:-1], str(tree)


def _pairs(run: FinishedRun) -> Iterator[str]:
    return (f"{key}={value}" for key, value in run.arguments.items())


def _key(pair: str) -> str:
    return pair.partition("=")[0]
