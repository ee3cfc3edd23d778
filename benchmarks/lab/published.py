"""Published accuracies, as their authors print them, and the targets of our methods.

On CIFAR-100, the targets of our own method are one network and one setting at the final epoch.
"""

from typing import NamedTuple

from lab.run_queue import OWN
from nearsay.reproduce.paper import NOTHING, cifar

_PAPER_COLUMNS = (
    "symmetric-20",
    "symmetric-40",
    "symmetric-50",
    "symmetric-80",
    "symmetric-90",
    "asymmetric-40",
)
_FIELD_COLUMNS = ("symmetric-20", "symmetric-50", "symmetric-80", "symmetric-90", "asymmetric-40")
_HUMAN_COLUMNS = ("human-aggre", "human-random1", "human-worse")


class Quoted(NamedTuple):
    """A row that is not ours: accuracies in percent as texts, by the keys of columns."""

    name: str
    source: str
    texts: dict[str, str]


def _quoted(name: str, source: str, columns: tuple[str, ...], words: str) -> Quoted:
    return Quoted(
        name, source, dict(zip(columns, words.replace("--", NOTHING).split(), strict=True))
    )


_PAPER_COLUMNS100 = tuple(f"cifar100-{key}" for key in _PAPER_COLUMNS)
_FIELD_COLUMNS100 = tuple(f"cifar100-symmetric-{rate}" for rate in (20, 50, 80, 90))
_HUMAN100 = ("cifar100-human",)

PAPER = tuple(  # a row of the paper has the columns of CIFAR-10, then those of CIFAR-100
    Quoted(
        row.name,
        (row.cited if row.is_rerun else f"{row.source}, as the paper prints it")
        if row.source
        else "the paper, final epoch",
        dict(
            zip(
                (*_PAPER_COLUMNS, *_PAPER_COLUMNS100),
                (each.text for each in row.printed),
                strict=True,
            )
        ),
    )
    for row in cifar()
)
_DIVIDEMIX = "Li et al. 2020, two networks, mean of the last ten epochs"
_ELR = "Liu et al. 2020, two networks, best epoch, other noise for each"
_SOP = "Liu et al. 2022, best epoch"
_C2D = "Zheltonozhskii et al. 2022, two networks, final epoch"
_SSR = "Feng et al. 2022, one network, best epoch"
_PROMIX = "Xiao et al. 2023, two networks, last epoch"
_RERUN = "rerun, ReScience C 2026, best epoch"
FIELD = (
    _quoted("DivideMix", _DIVIDEMIX, _FIELD_COLUMNS, "95.7 94.4 92.9 75.4 92.1"),
    _quoted("ELR+", _ELR, _FIELD_COLUMNS, "95.8 94.8 93.3 78.7 93.0"),
    _quoted("SOP+", _SOP, _FIELD_COLUMNS, "96.3 95.5 94.0 -- 93.8"),
    _quoted("C2D", _C2D, _FIELD_COLUMNS, "96.2 95.2 94.3 93.4 90.8"),
    _quoted("SSR+", _SSR, _FIELD_COLUMNS, "96.7 96.1 95.6 95.2 95.5"),
    _quoted("ProMix", _PROMIX, _FIELD_COLUMNS, "97.6 97.3 95.1 91.1 96.5"),
    _quoted("cross-entropy", _RERUN, _HUMAN_COLUMNS, "91.7 90.2 83.9"),
    _quoted("ELR", _RERUN, _HUMAN_COLUMNS, "93.0 92.2 87.9"),
    _quoted("ELR+", _RERUN, _HUMAN_COLUMNS, "95.3 94.9 91.8"),
    _quoted("DivideMix", _RERUN, _HUMAN_COLUMNS, "95.6 95.7 93.1"),
    _quoted("SOP+", _RERUN, _HUMAN_COLUMNS, "96.0 95.7 92.9"),
    _quoted("ProMix", "Xiao et al. 2023, best epoch", _HUMAN_COLUMNS, "97.7 97.4 96.3"),
    _quoted("DivideMix", _DIVIDEMIX, _FIELD_COLUMNS100, "76.9 74.2 59.6 31.0"),
    _quoted("ELR+", _ELR, _FIELD_COLUMNS100, "77.6 73.6 60.8 33.4"),
    _quoted("SOP+", _SOP, _FIELD_COLUMNS100, "78.8 75.9 63.3 --"),
    _quoted("C2D", _C2D, _FIELD_COLUMNS100, "78.3 76.1 67.4 58.5"),
    _quoted("SSR+", _SSR, _FIELD_COLUMNS100, "79.7 77.2 71.9 66.6"),
    _quoted("ProMix", _PROMIX, _FIELD_COLUMNS100, "82.4 79.7 69.0 42.7"),
    _quoted("cross-entropy", _RERUN, _HUMAN100, "61.2"),
    _quoted("ELR", _RERUN, _HUMAN100, "63.7"),
    _quoted("ELR+", _RERUN, _HUMAN100, "67.9"),
    _quoted("DivideMix", _RERUN, _HUMAN100, "70.9"),
    _quoted("SOP+", _RERUN, _HUMAN100, "63.9"),
    _quoted("ProMix", "Xiao et al. 2023, best epoch", _HUMAN100, "73.8"),
    _quoted("DSS+", "best published figure", _HUMAN100, "74.7"),
)

_ALL = (*_PAPER_COLUMNS, *_HUMAN_COLUMNS)
_ALL100 = (*_PAPER_COLUMNS100, *_HUMAN100)
TARGETS: dict[str, dict[str, float]] = {  # method -> column -> final accuracy in percent
    "ncr+elr+": dict(
        zip(_ALL, (95.2, 94.5, 94.3, 91.6, 75.1, 90.7, 95.3, 94.9, 91.8), strict=True)
    ),
    OWN: dict(zip(_ALL, (96.5, 96.0, 96.0, 95.0, 93.0, 95.0, 97.0, 97.0, 95.5), strict=True)),
}
TARGETS["ncr+elr+"] |= dict(zip(_ALL100, (76.6, 74.2, 72.5, 58.0, 30.8, 76.3, 67.9), strict=True))
TARGETS[OWN] |= dict(zip(_ALL100, (80.0, 77.0, 77.0, 68.0, 55.0, 77.0, 74.0), strict=True))

CLEANLAB = {"human-aggre": 0.977, "human-worse": 0.967}  # AUROC, published
LEAST_DETECTION = {"human-aggre": 0.95, "human-worse": 0.94}  # AUROC that one run has to reach


def rows_of(rows: tuple[Quoted, ...], columns: tuple[str, ...]) -> list[Quoted]:
    """The rows that have a number in one of the columns."""
    return [
        row for row in rows if any(row.texts.get(column, NOTHING) != NOTHING for column in columns)
    ]
