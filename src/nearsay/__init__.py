"""nearsay: learn from noisy labels by asking the neighbors, and find the labels to distrust.

Three doors:

1. `NCRLoss` in a training loop of your own.
2. `audit`: which labels are wrong, from features, probabilities or both.
3. `train` and `load`: training on noisy labels; the result is a `Run`.

The building blocks are in the submodules `data`, `losses`, `metrics`, `models`, `noise`, `optim`,
`recipes` and `transforms`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nearsay._version import __version__ as __version__

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
    "LossFunction",
    "Mixup",
    "NCRClassifier",
    "NCRLoss",
    "NeighborVote",
    "Objective",
    "Outputs",
    "Predictions",
    "Run",
    "as_objective",
    "audit",
    "bootstrap",
    "cross_entropy",
    "data",
    "elr",
    "gjs",
    "load",
    "losses",
    "metrics",
    "models",
    "ncr",
    "noise",
    "one_hot",
    "optim",
    "pad",
    "propagate_labels",
    "recipes",
    "train",
    "transforms",
]

if TYPE_CHECKING:
    from nearsay import data, losses, metrics, models, noise, optim, recipes, transforms
    from nearsay.batch import Batch, Labels, Loss, Objective, Outputs, Predictions, one_hot, pad
    from nearsay.doors.run import Run, load, train
    from nearsay.experiment import Experiment
    from nearsay.integrations.sklearn import NCRClassifier
    from nearsay.label_issues.audit import audit
    from nearsay.label_issues.result import Audit
    from nearsay.label_propagation import propagate_labels
    from nearsay.losses.base import LossFunction, as_objective
    from nearsay.losses.bootstrap import Bootstrap, bootstrap
    from nearsay.losses.criterion import NCRLoss
    from nearsay.losses.cross_entropy import CrossEntropy, cross_entropy
    from nearsay.losses.elr import ELR, elr
    from nearsay.losses.gjs import GJS, gjs
    from nearsay.losses.memory_bank import Bank
    from nearsay.losses.ncr import NCR, ncr
    from nearsay.losses.neighbor_vote import NeighborVote
    from nearsay.transforms.mixup import Mixup

# Module -> the public names that it defines.
_MODULES = {
    "batch": ("Batch", "Labels", "Loss", "Objective", "Outputs", "Predictions", "one_hot", "pad"),
    "doors.run": ("Run", "load", "train"),
    "experiment": ("Experiment",),
    "integrations.sklearn": ("NCRClassifier",),
    "label_issues.audit": ("audit",),
    "label_issues.result": ("Audit",),
    "label_propagation": ("propagate_labels",),
    "losses.base": ("LossFunction", "as_objective"),
    "losses.bootstrap": ("Bootstrap", "bootstrap"),
    "losses.criterion": ("NCRLoss",),
    "losses.cross_entropy": ("CrossEntropy", "cross_entropy"),
    "losses.elr": ("ELR", "elr"),
    "losses.gjs": ("GJS", "gjs"),
    "losses.memory_bank": ("Bank",),
    "losses.ncr": ("NCR", "ncr"),
    "losses.neighbor_vote": ("NeighborVote",),
    "transforms.mixup": ("Mixup",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("data", "losses", "metrics", "models", "noise", "optim", "recipes", "transforms")


# Type checkers must not see this function, or they would accept every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the home of a public name at its first use, so `import nearsay` is instant."""
        if name in _SUBMODULES:
            return import_module(f"nearsay.{name}")
        if name not in _HOME:
            known = ", ".join(__all__)
            raise AttributeError(f"module 'nearsay' has no attribute {name!r}. It has {known}.")
        value = getattr(import_module(f"nearsay.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
