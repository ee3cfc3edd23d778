"""What `audit.csv` says of every example, in the order in which to look at them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nearsay.batch import Labels
from nearsay.data import tables
from nearsay.errors import BAD_DATA, RunError

_NEEDED = (
    "index",
    "given_label",
    "predicted_label",
    "predicted_probability",
    "label_score",
    "is_label_issue",
)
_KNOWN = (*_NEEDED, "path", "neighbors", "status")


@dataclass(frozen=True)
class Neighbor:
    """A near example, as evidence."""

    index: int
    label: int  # as given; −1 without one
    similarity: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """The examples of a run, judged; classes are numbers, −1 for none."""

    classes: tuple[str, ...]
    given: Sequence[int]  # (N,)
    suggested: Sequence[int]  # (N,)
    probabilities: Sequence[float | None]  # (N,) of the suggestion
    scores: Sequence[float | None]  # (N,) low is suspicious; None where nothing can be said
    is_issue: Sequence[bool]  # (N,)
    statuses: Sequence[str]  # (N,) "ok", or why an example could not be judged
    paths: Sequence[str | None]  # (N,) for reading only: nothing is ever opened by them
    details: dict[str, Sequence[str | None]]  # (N,) each: whatever else is known
    neighbors_json: Sequence[
        str | None
    ]  # (N,) parsed when they are asked for: there may be millions

    def __len__(self) -> int:
        return len(self.given)

    def order(self) -> list[int]:
        """All examples, the most suspicious first and those without a score last."""

        def key(index: int) -> tuple[bool, float, int]:
            score = self.scores[index]
            return score is None, 0.0 if score is None else score, index

        return sorted(range(len(self)), key=key)

    def neighbors(self, index: int) -> list[Neighbor]:
        """The nearest examples, the most similar first; none where the table has none."""
        try:
            rows = json.loads(self.neighbors_json[index] or "[]")
            found = [
                Neighbor(int(near), self.given[int(near)], float(similarity))
                for near, _, similarity in rows
            ]
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
            return []
        return [each for each in found if each.index >= 0 and math.isfinite(each.similarity)]


def read_examples(folder: Path, labels: Labels) -> Examples:
    """The audit of a run; RunError says what is missing, or that it does not fit the labels."""
    path = folder / "audit.csv"
    if not path.is_file():
        raise RunError(
            f"{path} is missing; audit the run first, with nearsay audit {folder}", BAD_DATA
        )
    cells = tables.read(path).columns
    num = len(labels.given)
    given: list[int] = labels.given.tolist()
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(labels.classes)}
    nothing: list[str | None] = [None] * num
    try:
        if missing := [name for name in _NEEDED if name not in cells]:
            raise ValueError(f"it has no column {missing[0]!r}")
        if cells["index"] != [str(index) for index in range(num)]:
            raise ValueError(f"it has not one row for each of the {num} examples")
        if [numbers.get(name, -1) for name in cells["given_label"]] != given:
            raise ValueError("it is of other labels")
        return Examples(
            classes=labels.classes,
            given=given,
            suggested=[numbers.get(name, -1) for name in cells["predicted_label"]],
            probabilities=[tables.as_share(cell) for cell in cells["predicted_probability"]],
            scores=[tables.as_share(cell) for cell in cells["label_score"]],
            is_issue=[tables.as_claim(cell) for cell in cells["is_label_issue"]],
            statuses=[cell or "ok" for cell in cells.get("status", nothing)],
            paths=cells.get("path", nothing),
            details={name: column for name, column in cells.items() if name not in _KNOWN},
            neighbors_json=cells.get("neighbors", nothing),
        )
    except ValueError as error:
        raise RunError(
            f"{path} does not fit the run ({error}); audit it again", BAD_DATA
        ) from error
