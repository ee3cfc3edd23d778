"""nearsay: learn from noisy labels by asking the neighbors, and find the labels to distrust."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "ELR",
    "GJS",
    "NCR",
    "Audit",
    "Bank",
    "Batch",
    "Bootstrap",
    "CrossEntropy",
    "Experiment",
    "Labels",
    "Loss",
    "Mixup",
    "NCRClassifier",
    "NeighborVote",
    "Objective",
    "Outputs",
    "Predictions",
    "Run",
    "audit",
    "bootstrap",
    "cross_entropy",
    "elr",
    "gjs",
    "load",
    "ncr",
    "one_hot",
    "pad",
    "propagate_labels",
    "train",
]

if TYPE_CHECKING:
    from nearsay.batch import Batch, Labels, Loss, Objective, Outputs, Predictions, one_hot, pad
    from nearsay.doors.run import Run, load, train
    from nearsay.experiment import Experiment
    from nearsay.integrations.sklearn import NCRClassifier
    from nearsay.label_issues import Audit, audit
    from nearsay.label_propagation import propagate_labels
    from nearsay.losses.bootstrap import Bootstrap, bootstrap
    from nearsay.losses.cross_entropy import CrossEntropy, cross_entropy
    from nearsay.losses.elr import ELR, elr
    from nearsay.losses.gjs import GJS, gjs
    from nearsay.losses.memory_bank import Bank
    from nearsay.losses.ncr import NCR, ncr
    from nearsay.losses.neighbor_vote import NeighborVote
    from nearsay.transforms import Mixup

_MODULES = {
    "label_issues": ("Audit", "audit"),
    "transforms": ("Mixup",),
    "batch": ("Batch", "Labels", "Loss", "Objective", "Outputs", "Predictions", "one_hot", "pad"),
    "doors.run": ("Run", "load", "train"),
    "experiment": ("Experiment",),
    "integrations.sklearn": ("NCRClassifier",),
    "losses.memory_bank": ("Bank",),
    "losses.bootstrap": ("Bootstrap", "bootstrap"),
    "losses.cross_entropy": ("CrossEntropy", "cross_entropy"),
    "losses.elr": ("ELR", "elr"),
    "losses.gjs": ("GJS", "gjs"),
    "losses.ncr": ("NCR", "ncr"),
    "losses.neighbor_vote": ("NeighborVote",),
    "label_propagation": ("propagate_labels",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # or every name would be taken for one of these

    def __getattr__(name: str) -> object:
        """Import the home of a public name when it is first asked for: `import nearsay` alone stays instant."""
        if name not in _HOME:
            raise AttributeError(
                f"module 'nearsay' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        value = getattr(import_module(f"nearsay.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
