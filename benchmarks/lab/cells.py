"""The numbers of one cell of a table, from its records: means over seeds, detection, cost, as text.

`fill` puts such numbers into a text, so they are never typed by hand:
`{RUN final}` is the mean over the seeds of the runs of that name, `{RUN-seed-0 best}` a number of
one run, and `{RUN final - 96.0}` says "0.2 above" or "below" the number after the minus sign, which
may also be another pair of run and kind.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lab.record import Record, as_wanted, device_seconds
from lab.run_queue import Wanted, queue
from nearsay.report.runs import Spread, spread

NOT_RUN = "not run"
NOTHING = "–"
CHANGED = "†"
_REFERENCE = re.compile(r"\{([^{}]*)\}")
_COUNTS = ("no seed", "one seed", "two seeds", "three seeds")
Key = tuple[str, frozenset[str], frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """All records, to be asked for those of a cell."""

    records: dict[str, Record]  # by name
    # Names of runs recorded with other settings than the recipe has now.
    changed: frozenset[str] = frozenset()

    def of(self, wanted: Wanted) -> list[Record]:
        """The runs that differ from the wanted one in nothing but their seed, by seed.

        If some are runs of today's recipe, only those: a mean is never of two forms of a method.
        """
        alike = self.ever(wanted)
        return [each for each in alike if each["name"] not in self.changed] or alike

    def ever(self, wanted: Wanted) -> list[Record]:
        """The same, and with them those of the recipe as it was."""
        return self._alike.get(_key(wanted.recipe, wanted.arguments, wanted.overrides), [])

    @cached_property
    def _alike(self) -> dict[Key, list[Record]]:
        found: dict[Key, list[Record]] = {}
        for each in sorted(self.records.values(), key=lambda each: int(each["seed"])):
            found.setdefault(_key(each["recipe"], each["arguments"], each["overrides"]), []).append(
                each
            )
        return found

    def accuracy(self, wanted: Wanted, split: str = "test", kind: str = "final") -> Spread | None:
        """In percent; None if there is no run that was judged on the split."""
        found = (each["accuracy"].get(split, {}).get(kind) for each in self.of(wanted))
        return spread(100 * share for share in found if share is not None)

    def shown(self, wanted: Wanted, split: str = "test") -> str:
        """The accuracy as text, with a mark if the recipe has changed since."""
        return self._marked(as_text(self.accuracy(wanted, split)), wanted)

    def detection(self, wanted: Wanted, kind: str, *, by: str = "detection") -> Spread | None:
        """AUROC or average precision, also `by` the "audit"; None if no wrong label is known."""
        return spread(each[by][kind] for each in self.of(wanted) if each.get(by))

    def detected(self, wanted: Wanted, kind: str, *, by: str = "detection") -> str:
        """The same as text, with a mark if the recipe has changed since."""
        return self._marked(as_share(self.detection(wanted, kind, by=by)), wanted)

    def _marked(self, text: str, wanted: Wanted) -> str:
        is_changed = any(each["name"] in self.changed for each in self.of(wanted))
        return f"{text}{CHANGED}" if is_changed and text != NOT_RUN else text

    def minutes(self, wanted: Iterable[Wanted], *, by: str = "detection") -> str:
        """Minutes of a run, as a mean over a row; with the range if they differ by over a quarter.

        `by` the "audit", only runs whose audit was timed count, each with its audit. Marked if one
        of the runs is of a recipe that has changed since.
        """
        found = [each for one in wanted for each in self.of(one)]
        if by == "audit":
            found = [each for each in found if "seconds" in (each.get(by) or {})]
            taken = [(device_seconds(each) + each[by]["seconds"]) / 60 for each in found]
        else:
            taken = [device_seconds(each) / 60 for each in found]
        if not taken:
            return NOTHING
        mean, mark = (
            sum(taken) / len(taken),
            CHANGED if any(each["name"] in self.changed for each in found) else "",
        )
        if max(taken) - min(taken) > 0.25 * mean:
            return f"{mean:.1f} ({min(taken):.1f} to {max(taken):.1f}){mark}"
        return f"{mean:.1f}{mark}"


def check_doubles(records: Mapping[str, Record], folder: Path) -> None:
    """See that no two records are of one run; ValueError names the files of two that are."""
    seen: dict[tuple[str, Key, int], str] = {}
    for name, each in records.items():
        run = (
            each["protocol"],
            _key(each["recipe"], each["arguments"], each["overrides"]),
            int(each["seed"]),
        )
        if (other := seen.setdefault(run, name)) != name:
            raise ValueError(
                f"{folder / other}.json and {folder / name}.json are records of the same run with "
                "the same seed; remove one of them"
            )


def as_text(number: Spread | None, digits: int = 2) -> str:
    """Such as "94.12", or "94.12 ± 0.10 (n=3)"."""
    if number is None:
        return NOT_RUN
    return f"{number.text(digits)} (n={number.num})" if number.num > 1 else number.text(digits)


def as_share(number: Spread | None) -> str:
    """Such as ".967"."""
    return as_text(number, 3).replace("0.", ".")


def difference(ours: Spread | None, other: float, digits: int = 2) -> str:
    """How far ours is above or below; "–" without a run."""
    if ours is None:
        return NOTHING
    gap = round(ours.mean - other, digits)
    return f"{'−' if gap < 0 else '+'}{abs(gap):.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """A table in Markdown that also reads as plain text; all but the first columns align right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[place]) for line in lines)) for place in range(len(header))]

    def printed(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    ruler = [
        "-" * width if place < num_left else f"{'-' * (width - 1)}:"
        for place, width in enumerate(widths)
    ]
    return "\n".join([printed(lines[0]), printed(ruler), *map(printed, lines[1:])])


def _key(recipe: str, arguments: Iterable[str], overrides: Iterable[str]) -> Key:
    """What runs have in common that differ in their seed only, wherever they ran."""
    chosen = frozenset(word for word in arguments if not word.startswith("seed="))
    return recipe, chosen, frozenset(word for word in overrides if not word.startswith("machine."))


class Kind(NamedTuple):
    """A number of a run, and how many of its digits are printed."""

    find: Callable[[Record], float]  # KeyError or TypeError where a run has none
    digits: int = 1


def _accuracy(kind: str, split: str = "test") -> Kind:
    return Kind(lambda record: 100 * record["accuracy"][split][kind])


def _share(by: str, kind: str) -> Kind:
    return Kind(lambda record: record[by][kind], 3)


def _forgotten(record: Record) -> float:
    test = record["accuracy"]["test"]
    return float(100 * (test["best"] - test["final"]))


_KINDS = {
    "final": _accuracy("final"),
    "best": _accuracy("best"),
    "last-10": _accuracy("last_10"),
    "held-out": _accuracy("final", "validation"),
    "forgotten": Kind(_forgotten),
    "best-epoch": Kind(lambda record: record["accuracy"]["test"]["best_epoch"], 0),
    "auroc": _share("detection", "auroc"),
    "ap": _share("detection", "average_precision"),
    "audit-auroc": _share("audit", "auroc"),
    "audit-ap": _share("audit", "average_precision"),
    "minutes": Kind(lambda record: device_seconds(record) / 60),
}


def fill(text: str, numbers: Numbers) -> str:
    """The text with a number for each reference; ValueError quotes one that means nothing."""
    return _REFERENCE.sub(lambda found: _told(found[1], numbers), text)


def _told(reference: str, numbers: Numbers) -> str:
    try:
        ours, _, other = reference.partition(" - ")
        name, kind = ours.split()
        if kind == "seeds" and not other:
            return _counted(len(_alike(name, numbers)))
        found, digits = _mean(ours, numbers), _KINDS[kind].digits
        if not other:
            return NOT_RUN if found is None else _written(found, digits)
        than = _mean(other, numbers) if " " in other else float(other)
    except (ValueError, KeyError, TypeError) as error:
        kinds = ", ".join((*_KINDS, "seeds"))
        raise ValueError(
            f"{{{reference}}} must name a number of a run. Write {{RUN KIND}} or {{RUN KIND - NUMBER}} "
            "with a name of benchmarks/records/ with or without its -seed-N for RUN, and for KIND "
            f"one of {kinds}"
        ) from error
    if found is None or than is None:
        return NOT_RUN
    gap = round(found - than, digits)
    return f"{_written(abs(gap), digits)} {'below' if gap < 0 else 'above'}"


def _mean(pair: str, numbers: Numbers) -> float | None:
    name, kind = pair.split()
    found = [_KINDS[kind].find(each) for each in _alike(name, numbers)]
    return sum(found) / len(found) if found else None


def _alike(name: str, numbers: Numbers) -> list[Record]:
    """The run of this name, or the runs of several seeds with this name before `-seed-N`."""
    if name in numbers.records:
        return [numbers.records[name]]
    seeds = re.compile(rf"{re.escape(name)}(-seed-\d+)?")
    found = [each for key, each in numbers.records.items() if seeds.fullmatch(key)]
    if not found and not any(seeds.fullmatch(each.name) for each in queue()):
        raise KeyError(name)
    return numbers.of(as_wanted(found[0])) if found else []


def _counted(num: int) -> str:
    return _COUNTS[num] if num < len(_COUNTS) else f"{num} seeds"


def _written(number: float, digits: int) -> str:
    """Shares as in ".967"."""
    text = f"{number:.{digits}f}"
    return text.removeprefix("0") if digits == 3 else text
