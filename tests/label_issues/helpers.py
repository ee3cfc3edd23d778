"""Data with known wrong labels, and evidence by hand."""

import torch

from nearsay.batch import Labels
from nearsay.label_issues import scores
from nearsay.noise import Symmetric

NAN = float("nan")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noisy(clean, rate, seed=0):
    """The labels with exactly this share of wrong ones."""
    classes = tuple(map(str, range(int(clean.max()) + 1)))
    return Symmetric(rate=rate, seed=seed, redraw=False)(Labels(clean, clean, classes)).given


def blobs(num=300, classes=3, width=8, noise=0.3, seed=0):
    """Features of classes that are far apart, true labels, and labels with noise."""
    drawn = generator(seed)
    clean = torch.arange(num) % classes
    centers = 6 * torch.randn(classes, width, generator=drawn)
    features = centers[clean] + torch.randn(num, width, generator=drawn)
    return features, clean, noisy(clean, noise, seed)


def evidence_of(positions, similarities, groups, distances=None):
    similarities = torch.tensor(similarities)
    distances = (2 - 2 * similarities).sqrt() if distances is None else torch.tensor(distances)
    lengths = torch.ones(len(positions))
    return scores.Evidence(
        torch.tensor(positions), similarities, distances, torch.tensor(groups), None, lengths
    )
