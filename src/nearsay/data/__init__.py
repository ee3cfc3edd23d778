"""Data sets: values with a method `open(split)` that gives the inputs and, apart from them, the
labels.

A data set is described by `describe(data)` without being read as a whole. To use your own data,
write a class with a method `open` (see `nearsay.batch.Dataset`) and pass an instance, or
`FILE.py:NAME`.
"""

from nearsay.batch import DataInfo, Dataset, Files, Labels, Split
from nearsay.data.cifar import Cifar10, Cifar100
from nearsay.data.clothing1m import Clothing1M
from nearsay.data.digits import Digits
from nearsay.data.embeddings import Embeddings
from nearsay.data.folder import Folder
from nearsay.data.hub import Hub
from nearsay.data.inspect import describe
from nearsay.data.manifest import Manifest
from nearsay.data.mini_imagenet import MiniImageNet
from nearsay.data.toy import Toy
from nearsay.data.webvision import ImageNetValidation, MiniWebVision, WebVision

__all__ = [
    "Cifar10",
    "Cifar100",
    "Clothing1M",
    "DataInfo",
    "Dataset",
    "Digits",
    "Embeddings",
    "Files",
    "Folder",
    "Hub",
    "ImageNetValidation",
    "Labels",
    "Manifest",
    "MiniImageNet",
    "MiniWebVision",
    "Split",
    "Toy",
    "WebVision",
    "describe",
]
