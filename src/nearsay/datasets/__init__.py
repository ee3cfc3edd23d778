"""One file per source of data: a value whose `open` gives what the network sees, and the labels apart from it."""

from nearsay.datasets.cifar import Cifar10, Cifar100
from nearsay.datasets.digits import Digits
from nearsay.datasets.embeddings import Embeddings
from nearsay.datasets.folder import Folder
from nearsay.datasets.manifest import Manifest
from nearsay.datasets.toy import Toy

__all__ = ["Cifar10", "Cifar100", "Digits", "Embeddings", "Folder", "Manifest", "Toy"]
