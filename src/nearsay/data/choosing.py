"""A part of a data set: the examples of some of its classes."""

import torch
from torch import Tensor

from nearsay.batch import Labels, Split


def of_classes(inputs: Tensor, labels: Labels, kept: tuple[str, ...]) -> Split:
    """The (n, ...) inputs whose given label is one of `kept`, the classes from now on; other clean labels become −1.

    ValueError if `kept` are not some of the classes, each once.
    """
    names = labels.classes
    if not kept or len({*kept}) < len(kept) or not {*kept} <= {*names}:
        raise ValueError(f"classes={kept} must be some of {', '.join(names)}, each once")
    numbers = torch.full((len(names) + 1,), -1)  # one more for −1, the last
    numbers[[names.index(name) for name in kept]] = torch.arange(len(kept))
    given = numbers[labels.given]
    rows = (given >= 0).nonzero()[:, 0]
    clean = None if labels.clean is None else numbers[labels.clean][rows]
    return Split(inputs[rows], Labels(given[rows], clean, kept))
