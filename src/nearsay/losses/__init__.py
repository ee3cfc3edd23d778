"""One file per loss: the formula as a pure function, then the frozen dataclass that calls it.

`NCRLoss` is the `torch.nn.Module` for a loop of your own; `LossFunction` makes an objective of your
own formula.
"""

from nearsay.losses.base import LossFunction, as_objective, not_finite, real_rows, upcast
from nearsay.losses.bootstrap import Bootstrap, bootstrap
from nearsay.losses.criterion import NCRLoss
from nearsay.losses.cross_entropy import CrossEntropy, cross_entropy
from nearsay.losses.elr import ELR, elr
from nearsay.losses.gjs import GJS, gjs
from nearsay.losses.memory_bank import Bank
from nearsay.losses.ncr import NCR, ncr
from nearsay.losses.neighbor_vote import NeighborVote

__all__ = [
    "ELR",
    "GJS",
    "NCR",
    "Bank",
    "Bootstrap",
    "CrossEntropy",
    "LossFunction",
    "NCRLoss",
    "NeighborVote",
    "as_objective",
    "bootstrap",
    "cross_entropy",
    "elr",
    "gjs",
    "ncr",
    "not_finite",
    "real_rows",
    "upcast",
]
