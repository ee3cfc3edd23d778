"""One file per source of data: a value whose `open` gives what the network sees, and the labels apart from it."""

from nearsay.datasets.cifar import Cifar10, Cifar100
from nearsay.datasets.clothing1m import Clothing1M
from nearsay.datasets.digits import Digits
from nearsay.datasets.embeddings import Embeddings
from nearsay.datasets.folder import Folder
from nearsay.datasets.hub import Hub
from nearsay.datasets.manifest import Manifest
from nearsay.datasets.mini_imagenet import MiniImageNet
from nearsay.datasets.toy import Toy
from nearsay.datasets.webvision import ImageNetValidation, MiniWebVision, WebVision

__all__ = [
    "Cifar10",
    "Cifar100",
    "Clothing1M",
    "Digits",
    "Embeddings",
    "Folder",
    "Hub",
    "ImageNetValidation",
    "Manifest",
    "MiniImageNet",
    "MiniWebVision",
    "Toy",
    "WebVision",
]
