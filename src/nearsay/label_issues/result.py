"""The result of an audit: its fields, its order, its tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsay.data.tables import Cell
from nearsay.label_issues.noise_rate import NoiseRate
from nearsay.label_issues.scores import Evidence

# Digits of numbers in tables.
_DIGITS = 6


class Suggested(NamedTuple):
    """The likeliest class of every example.

    Attributes:
        labels: (N,) int64 class numbers; −1 without a suggestion.
        probabilities: (N,) of these classes; NaN without a suggestion.
    """

    labels: Tensor
    probabilities: Tensor


class Confused(NamedTuple):
    """A pair of classes that are confused.

    Attributes:
        given: name of the given label.
        suggested: name of the suggested label.
        num_examples: number of label issues with this pair.
    """

    given: str
    suggested: str
    num_examples: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Audit:
    """The result of `audit`. All tensors are on the CPU, in the order of the labels.

    >>> import nearsay
    >>> result = nearsay.audit([0, 1, 1], probabilities=[[0.9, 0.1], [0.2, 0.8], [0.9, 0.1]])
    >>> result.order().tolist()  # the most suspicious label first
    [2, 1, 0]
    >>> result.to_columns()["predicted_label"]
    ['0', '1', '0']

    Attributes:
        given: (N,) int64 class numbers of the given labels; −1 where unlabeled.
        classes: names of the C classes.
        scores: (N,) from 0 to 1, low where suspicious; ½ where nothing is known, NaN where
            unlabeled.
        parts: (N,) scores by source ("training", "probabilities", "neighbors", "propagation"), from
            0 to 1; NaN where the source knows nothing.
        right: (N,) probability that the label is right; NaN where unlabeled.
        suggested: the likeliest class of each example, with its probability.
        is_issue: (N,) bool: another class is likelier than the given label.
        evidence: neighbors and near-duplicates; None without features.
        ood_scores: (N,) from 0 to 1, low if the example is unlike all others; None if unknown.
        noise_rate: estimated share of wrong labels, with a 95 % interval.
        noise_matrix: (C, C) shares of given labels (columns) by suggested class (rows); None if
            unknown.
    """

    given: Tensor
    classes: tuple[str, ...]
    scores: Tensor
    parts: dict[str, Tensor]
    right: Tensor
    suggested: Suggested
    is_issue: Tensor
    evidence: Evidence | None
    ood_scores: Tensor | None
    noise_rate: NoiseRate
    noise_matrix: Tensor | None

    def __repr__(self) -> str:
        estimate, low, high = self.noise_rate
        num, num_issues = int((self.given >= 0).sum()), int(self.is_issue.sum())
        classes = "1 class" if len(self.classes) == 1 else f"{len(self.classes)} classes"
        rate = f"noise rate {estimate:.3f} from {low:.3f} to {high:.3f}"
        return f"<Audit of {num} labels in {classes}: {num_issues} seem wrong, {rate}>"

    @property
    def neighbors(self) -> Evidence | None:
        """The nearest examples of each example; None without features."""
        return self.evidence

    @property
    def duplicate_groups(self) -> Tensor | None:
        """(N,) number of the group of near-duplicates, −1 without one; None without features."""
        return None if self.evidence is None else self.evidence.groups

    @property
    def neighbor_recall(self) -> float | None:
        """Share of the true neighbors that an approximate search found; None if it was exact."""
        return None if self.evidence is None else self.evidence.recall

    def order(self) -> Tensor:
        """(n,) positions of the labeled examples, the most suspicious first."""
        labeled = (self.given >= 0).nonzero()[:, 0]
        return labeled[self.scores[labeled].argsort(stable=True)]

    def review_for(self, recall: float) -> int:
        """How many labels to review, in `order`, to see this share of the wrong ones."""
        if isinstance(recall, bool) or not isinstance(recall, int | float) or not 0 < recall <= 1:
            raise ValueError(f"recall must be above 0 and at most 1, got {recall!r}.")
        # The expected number of wrong labels among the first 1, 2, 3, ...
        num_wrong = (1 - self.right[self.order()]).cumsum(dim=0)
        if not len(num_wrong) or num_wrong[-1] <= 0:
            return 0
        return int(torch.searchsorted(num_wrong, (recall - 1e-9) * num_wrong[-1])) + 1

    def confused(self, most: int = 10) -> list[Confused]:
        """The pairs of given and suggested labels that occur most often among the issues."""
        num_classes = len(self.classes)
        chosen = self.is_issue & (self.suggested.labels >= 0)
        # One number per pair, so that equal pairs can be counted.
        cells = self.given[chosen] * num_classes + self.suggested.labels[chosen]
        pairs, counts = torch.unique(cells, return_counts=True)
        order = counts.argsort(descending=True, stable=True)[:most]
        confused = []
        for pair, num in zip(pairs[order].tolist(), counts[order].tolist(), strict=True):
            given, suggested = divmod(pair, num_classes)
            confused.append(Confused(self.classes[given], self.classes[suggested], num))
        return confused

    def to_columns(
        self, indices: Sequence[int] | None = None, *, with_neighbors: bool = True
    ) -> dict[str, list[Cell]]:
        """A table with one row per example, as columns.

        Args:
            indices: numbers of the examples; the default is their positions.
            with_neighbors: whether to add the column of neighbors, which takes most of the time.
        """
        numbers = list(range(len(self.given))) if indices is None else list(indices)
        empty: list[Cell] = [None] * len(numbers)
        columns: dict[str, list[Cell]] = {
            "index": list(numbers),
            "given_label": self._names(self.given),
            "predicted_label": self._names(self.suggested.labels),
            "predicted_probability": _rounded(self.suggested.probabilities),
            "label_score": _rounded(self.scores),
            "is_label_issue": list(self.is_issue.tolist()),
        }
        if with_neighbors:
            columns["neighbors"] = empty
            if self.evidence is not None:
                columns["neighbors"] = self._neighbors(self.evidence, numbers)
        columns["duplicate_group"] = empty
        if self.evidence is not None:
            groups = self.evidence.groups.tolist()
            columns["duplicate_group"] = [group if group >= 0 else None for group in groups]
        columns["ood_score"] = empty if self.ood_scores is None else _rounded(self.ood_scores)
        columns["status"] = ["ok" if label >= 0 else "unlabeled" for label in self.given.tolist()]
        return columns

    def to_frame(self) -> Any:  # a pandas.DataFrame
        """The table as a DataFrame of pandas, with the index of the examples."""
        try:
            import pandas  # noqa: PLC0415  # optional
        except ImportError as error:
            raise ImportError(
                "to_frame needs pandas. Run pip install pandas, or use to_columns."
            ) from error
        return pandas.DataFrame(self.to_columns()).set_index("index")

    def _names(self, labels: Tensor) -> list[Cell]:
        return [self.classes[number] if number >= 0 else None for number in labels.tolist()]

    def _neighbors(self, evidence: Evidence, numbers: list[int]) -> list[Cell]:
        """For each example a JSON list of number, given label and similarity of its neighbors."""
        names = self._names(self.given)
        cells: list[Cell] = []
        rows = zip(evidence.positions.tolist(), evidence.similarities.tolist(), strict=True)
        for positions, similarities in rows:
            near = []
            for position, cosine in zip(positions, similarities, strict=True):
                if cosine > 0:
                    near.append([numbers[position], names[position], round(cosine, 4)])
            cells.append(json.dumps(near))
        return cells


def _rounded(values: Tensor) -> list[Cell]:
    # NaN is the one value that differs from itself.
    return [None if value != value else round(value, _DIGITS) for value in values.tolist()]
