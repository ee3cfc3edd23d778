"""One file per loss: the formula as a pure function, then the value that calls it."""

from nearsay.objectives.bank import Bank
from nearsay.objectives.bootstrap import Bootstrap
from nearsay.objectives.cross_entropy import CrossEntropy
from nearsay.objectives.elr import ELR
from nearsay.objectives.gjs import GJS
from nearsay.objectives.ncr import NCR
from nearsay.objectives.nearsay import Nearsay

__all__ = ["ELR", "GJS", "NCR", "Bank", "Bootstrap", "CrossEntropy", "Nearsay"]
