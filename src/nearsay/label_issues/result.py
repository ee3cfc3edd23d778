"""What an audit found, for reading, for review and for tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsay.data.tables import Cell
from nearsay.label_issues.noise_rate import NoiseRate
from nearsay.label_issues.scores import Evidence

_DIGITS = 6  # of numbers in tables


class Suggested(NamedTuple):
    """The likeliest class of every example."""

    labels: Tensor  # (N,) int64; −1 where there is nothing to suggest
    probabilities: Tensor  # (N,) NaN where there is nothing to suggest


class Confused(NamedTuple):
    """So many examples labeled `given` seem to be `suggested`."""

    given: str
    suggested: str
    num_examples: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Audit:
    """Labels, judged; made by `audit`. All tensors are on the CPU, in the order of the labels."""

    given: Tensor  # (N,) int64; −1 where unlabeled
    classes: tuple[str, ...]
    scores: Tensor  # (N,) from 0 to 1, low where suspicious; ½ where nothing is known, NaN where unlabeled
    parts: dict[
        str, Tensor
    ]  # (N,) each, what the scores are made of: from 0 to 1, NaN where unknown
    right: Tensor  # (N,) how likely the label is right; NaN where unlabeled
    suggested: Suggested
    is_issue: Tensor  # (N,) bool: another label is likelier than the given one
    evidence: Evidence | None  # neighbors and near-duplicates; None without features
    ood_scores: (
        Tensor | None
    )  # (N,) from 0 to 1, low for what is like nothing else; None if unknown
    noise_rate: NoiseRate
    noise_matrix: (
        Tensor | None
    )  # (C, C) rows: what examples seem to be, columns: their labels; None if unknown

    def __repr__(self) -> str:
        """How much was found; the tensors would fill the screen."""
        rate = f"{self.noise_rate.estimate:.3f} from {self.noise_rate.low:.3f} to {self.noise_rate.high:.3f}"
        num, issues = int((self.given >= 0).sum()), int(self.is_issue.sum())
        classes = "1 class" if len(self.classes) == 1 else f"{len(self.classes)} classes"
        return f"<Audit of {num} labels in {classes}: {issues} seem wrong, noise rate {rate}>"

    @property
    def neighbors(self) -> Evidence | None:
        """The nearest examples of each, as evidence."""
        return self.evidence

    @property
    def duplicate_groups(self) -> Tensor | None:
        """(N,) the number of each example's group of near-duplicates, −1 without one; None without features."""
        return None if self.evidence is None else self.evidence.groups

    @property
    def neighbor_recall(self) -> float | None:
        """The share of the true neighbors that an approximate search found; None where the search was exact."""
        return None if self.evidence is None else self.evidence.recall

    def order(self) -> Tensor:
        """(n,) positions of the labeled examples, the most suspicious first; of equals the first comes first."""
        labeled = (self.given >= 0).nonzero()[:, 0]
        return labeled[self.scores[labeled].argsort(stable=True)]

    def review_for(self, recall: float) -> int:
        """How many labels, the most suspicious first, hold about that share of all wrong ones."""
        if isinstance(recall, bool) or not isinstance(recall, int | float) or not 0 < recall <= 1:
            raise ValueError(f"recall={recall!r} must be a share above 0 and up to 1, such as 0.9")
        found = (1 - self.right[self.order()]).cumsum(dim=0)
        if not len(found) or found[-1] <= 0:
            return 0
        return int(torch.searchsorted(found, (recall - 1e-9) * found[-1])) + 1

    def confused(self, most: int = 10) -> list[Confused]:
        """The pairs of given and suggested labels that occur most often among the issues."""
        num_classes = len(self.classes)
        chosen = self.is_issue & (self.suggested.labels >= 0)
        cells = self.given[chosen] * num_classes + self.suggested.labels[chosen]
        found, counts = torch.unique(cells, return_counts=True)
        order = counts.argsort(descending=True, stable=True)[:most]
        return [
            Confused(self.classes[cell // num_classes], self.classes[cell % num_classes], num)
            for cell, num in zip(found[order].tolist(), counts[order].tolist(), strict=True)
        ]

    def to_columns(
        self, indices: Sequence[int] | None = None, *, with_neighbors: bool = True
    ) -> dict[str, list[Cell]]:
        """Columns for `nearsay.data.tables`, a row for each example; `indices` are its numbers, by default its positions.

        Nearly all of the time goes into the column of neighbors, which may be left out.
        """
        names = list(range(len(self.given))) if indices is None else list(indices)
        nothing: list[Cell] = [None] * len(names)
        is_labeled = self.given >= 0
        near = {}
        if with_neighbors:
            near["neighbors"] = (
                nothing if self.evidence is None else self._neighbors(self.evidence, names)
            )
        return {
            "index": list(names),
            "given_label": self._named(self.given),
            "predicted_label": self._named(self.suggested.labels),
            "predicted_probability": _rounded(self.suggested.probabilities),
            "label_score": _rounded(self.scores),
            "is_label_issue": list(self.is_issue.tolist()),
            **near,
            "duplicate_group": nothing
            if self.evidence is None
            else _numbered(self.evidence.groups),
            "ood_score": nothing if self.ood_scores is None else _rounded(self.ood_scores),
            "status": ["ok" if each else "unlabeled" for each in is_labeled.tolist()],
        }

    def to_frame(self) -> Any:  # a pandas.DataFrame
        """The columns as a table of pandas."""
        try:
            import pandas  # noqa: PLC0415  # nobody else needs it
        except ImportError as error:
            raise ImportError(
                "to_frame needs pandas: pip install pandas, or take to_columns"
            ) from error
        return pandas.DataFrame(self.to_columns()).set_index("index")

    def _named(self, labels: Tensor) -> list[Cell]:
        return [self.classes[number] if number >= 0 else None for number in labels.tolist()]

    def _neighbors(self, evidence: Evidence, names: list[int]) -> list[Cell]:
        """For each example a list of number, given label and similarity of its neighbors, as JSON."""
        labels = self._named(self.given)
        rows = zip(evidence.positions.tolist(), evidence.similarities.tolist(), strict=True)
        return [
            json.dumps(
                [[names[a], labels[a], round(s, 4)] for a, s in zip(*row, strict=True) if s > 0]
            )
            for row in rows
        ]


def _rounded(values: Tensor) -> list[Cell]:
    return [None if value != value else round(value, _DIGITS) for value in values.tolist()]


def _numbered(values: Tensor) -> list[Cell]:
    return [value if value >= 0 else None for value in values.tolist()]
