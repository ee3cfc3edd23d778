"""One file per loss: the formula as a pure function, then the value that calls it."""

from nearsay.losses.bootstrap import Bootstrap
from nearsay.losses.cross_entropy import CrossEntropy
from nearsay.losses.elr import ELR
from nearsay.losses.gjs import GJS
from nearsay.losses.memory_bank import Bank
from nearsay.losses.ncr import NCR
from nearsay.losses.neighbor_vote import NeighborVote

__all__ = ["ELR", "GJS", "NCR", "Bank", "Bootstrap", "CrossEntropy", "NeighborVote"]
