"""What an audit found, as values and words that all parts of its page share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from nearsay.batch import Files
from nearsay.label_issues import Audit
from nearsay.report.comparison import Comparison
from nearsay.report.pictures import Album
from nearsay.training.progress import plain

UNNAMED = "no label"


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings:
    """An audit of a run and what is needed to show it; n examples could be read of the N of the data set."""

    name: str  # of the run folder
    audit: Audit  # of the n, in the order of `indices`
    indices: Tensor  # (n,) their numbers in the data set
    features: Tensor  # (n, D)
    confidence: Tensor  # (n,) of the network in the given label; NaN where there is none
    clean: Tensor | None  # (n,) the truth, None if unknown
    inputs: Tensor | Files | None  # of all N; None if the data cannot be found any more
    unreadable: Mapping[int, str]  # number in the data set -> given label
    corrections: Mapping[int, int]  # number in the data set -> label by hand, −1 for none
    problem: str  # why corrections could not be read, or nothing
    summary: Mapping[str, Any]  # as in audit.json; Any is the type of JSON
    comparison: Comparison  # of this one run
    album: Album = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "album", Album(self.inputs))

    def label(self, number: int) -> str:
        """The name of a class as it can be shown; −1 is none."""
        return self.named(self.audit.classes[number]) if number >= 0 else UNNAMED

    def named(self, name: str) -> str:
        """A class by its own name, as it can be shown."""
        return plain(name) or "(empty)"

    def file(self, index: int) -> str:
        """The path of an example below the root of the data, or nothing."""
        return plain(self.inputs.names[index]) if isinstance(self.inputs, Files) else ""

    def suspects(self) -> Tensor:
        """(m,) positions of the issues, the most suspicious first."""
        order = self.audit.order()
        return order[self.audit.is_issue[order]]

    def is_wrong(self) -> Tensor | None:
        """(n,) whether a label is known to be wrong; None if the truth is unknown."""
        return (
            None
            if self.clean is None
            else (self.audit.given != self.clean) & (self.audit.given >= 0)
        )

    def kinds(self) -> dict[str, Tensor]:
        """(n,) masks of the two kinds of labels that are told apart: by the truth, or else by the audit."""
        is_labeled = self.audit.given >= 0
        wrong = self.is_wrong()
        if wrong is not None:
            return {"right label": is_labeled & ~wrong, "wrong label": wrong}
        return {
            "other label": is_labeled & ~self.audit.is_issue,
            "suspicious label": self.audit.is_issue,
        }

    def by_hand(self, index: int) -> str | None:
        """What was decided by hand, None if nothing was."""
        if index not in self.corrections:
            return None
        label = self.corrections[index]
        return self.label(label) if label >= 0 else "label dropped"


def picture(findings: Findings, index: int, text: str, *, is_small: bool = False) -> Markup:
    """The picture of an example, or nothing where there is none."""
    address = findings.album.address(index)
    if address is None:
        return (
            Markup("")
            if not findings.album.has_pictures
            else Markup('<span class="blank">no picture</span>')
        )
    crisp = " crisp" if findings.album.is_tiny(index) else ""
    return Markup('<img class="{}{}" src="{}" alt="{}">').format(
        "small" if is_small else "large", crisp, address, text
    )


def score_text(value: float) -> str:
    """A score with three digits, or a dash."""
    return "–" if value != value else f"{value:.3f}"


def percent_text(value: float | None, digits: int = 1) -> str:
    """A share such as "33.8 %", or a dash; number and sign stay on one line."""
    return "–" if value is None or value != value else f"{100 * value:.{digits}f}\u00a0%"


def known(values: Tensor) -> Tensor:
    """The values that are numbers."""
    return values[~torch.isnan(values)]
