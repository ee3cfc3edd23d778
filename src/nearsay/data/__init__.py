"""One file per source of data: a value whose `open` gives what the network sees, and the labels apart from it."""

from nearsay.data.cifar import Cifar10, Cifar100
from nearsay.data.clothing1m import Clothing1M
from nearsay.data.digits import Digits
from nearsay.data.embeddings import Embeddings
from nearsay.data.folder import Folder
from nearsay.data.hub import Hub
from nearsay.data.manifest import Manifest
from nearsay.data.mini_imagenet import MiniImageNet
from nearsay.data.toy import Toy
from nearsay.data.webvision import ImageNetValidation, MiniWebVision, WebVision

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
