"""Numbers in a text that is written by hand, filled in from the records, so that nobody types them.

`{paper-symmetric-40-nearsay final}` is the mean over the seeds of these runs, `{short-human-worse-ncr-seed-0 best}` a
number of one run, and `{paper-symmetric-40-nearsay final - 96.0}` says "0.2 above" or "below" what stands behind the
sign: a number, or another pair of run and kind.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from lab.cells import NOT_RUN, Numbers
from lab.record import Record, as_wanted, device_seconds
from lab.run_queue import queue

_REFERENCE = re.compile(r"\{([^{}]*)\}")
_COUNTS = ("no seed", "one seed", "two seeds", "three seeds")


class Kind(NamedTuple):
    """A number of a run, and how many digits are told of it."""

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
            f"{{{reference}}} is no number of a run; write {{RUN KIND}} or {{RUN KIND - NUMBER}} with a name of "
            f"benchmarks/records/ with or without its -seed-N for RUN, and for KIND one of {kinds}"
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
    """The run of this name, or the runs that have it before their seeds, of one form of a method."""
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
