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
    "Labels",
    "Loss",
    "Mixup",
    "NCRClassifier",
    "Nearsay",
    "Objective",
    "Outputs",
    "Predictions",
    "audit",
    "bootstrap",
    "cross_entropy",
    "elr",
    "gjs",
    "ncr",
    "one_hot",
    "pad",
    "propagate_labels",
]

if TYPE_CHECKING:
    from nearsay.auditing import Audit, audit
    from nearsay.augment import Mixup
    from nearsay.core import Batch, Labels, Loss, Objective, Outputs, Predictions, one_hot, pad
    from nearsay.estimator import NCRClassifier
    from nearsay.objectives.bank import Bank
    from nearsay.objectives.bootstrap import Bootstrap, bootstrap
    from nearsay.objectives.cross_entropy import CrossEntropy, cross_entropy
    from nearsay.objectives.elr import ELR, elr
    from nearsay.objectives.gjs import GJS, gjs
    from nearsay.objectives.ncr import NCR, ncr
    from nearsay.objectives.nearsay import Nearsay
    from nearsay.propagation import propagate_labels

_MODULES = {
    "auditing": ("Audit", "audit"),
    "augment": ("Mixup",),
    "core": ("Batch", "Labels", "Loss", "Objective", "Outputs", "Predictions", "one_hot", "pad"),
    "estimator": ("NCRClassifier",),
    "objectives.bank": ("Bank",),
    "objectives.bootstrap": ("Bootstrap", "bootstrap"),
    "objectives.cross_entropy": ("CrossEntropy", "cross_entropy"),
    "objectives.elr": ("ELR", "elr"),
    "objectives.gjs": ("GJS", "gjs"),
    "objectives.ncr": ("NCR", "ncr"),
    "objectives.nearsay": ("Nearsay",),
    "propagation": ("propagate_labels",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # or every name would be taken for one of these

    def __getattr__(name: str) -> object:
        """Import the home of a public name when it is first asked for: `import nearsay` alone stays instant."""
        if name not in _HOME:
            raise AttributeError(f"module 'nearsay' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(import_module(f"nearsay.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
