"""What was decided by hand about the labels of a run, as `corrections.csv` has it."""

import os
import re
from pathlib import Path

from nearsay.batch import Labels
from nearsay.data import tables
from nearsay.errors import TableError

_NUMBER = re.compile("[0-9]{1,18}")


def read_corrections(folder: Path, path: Path | None, labels: Labels) -> dict[int, int]:
    """The number of the label that each example was given by hand, −1 for none; {} where nothing was decided.

    `path` is by default `corrections.csv` in the folder of the run, which need not be there.
    """
    if path is None:
        path = folder / "corrections.csv"
        if not os.path.lexists(path):
            return {}
        if not path.is_file():
            raise TableError(f"{path} is no regular file; move it away")
        if not path.stat().st_size:  # a review was killed before its first decision
            return {}
    table = tables.read(path, columns=("index", "label", "decision"))
    problems = tables.Problems(table.path)
    if missing := [name for name in ("index", "label") if name not in table.columns]:
        problems.add(
            1, f"there is no column {missing[0]!r}; the first line must be like index,label"
        )
        problems.raise_any()
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(labels.classes)}
    numbers[None] = -1
    decided: dict[int, int] = {}
    decisions = table.columns.get("decision", [None] * len(table.lines))
    rows = zip(table.lines, table.columns["index"], table.columns["label"], decisions, strict=True)
    for line, index, label, decision in rows:
        if index is None or not _NUMBER.fullmatch(index) or int(index) >= len(labels.given):
            told = None if index is None else index[:40]
            problems.add(line, f"index {told!r} is none of the {len(labels.given)} examples")
        elif label not in numbers:
            problems.add(
                line, f"label {label!r} is no class of the run; leave it empty to drop the label"
            )
        elif decision == "skip":
            continue
        elif decision == "undo":
            decided.pop(int(index), None)
        else:
            decided[int(index)] = numbers[label]
    problems.raise_any()
    return decided
