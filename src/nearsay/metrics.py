"""Metrics of predictions and of labels.

Most are functions f(logits, labels): logits are (N, C), labels (N,) class numbers in the same
order, and −1 means "unlabeled" or "not among the classes". Such rows are ignored, in sums and in
denominators. A mean over no rows is NaN. The rows of `Predictions` may be in any order; `aligned`
brings the labels into that order.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nearsay import rng
from nearsay.batch import PADDING, Labels, Predictions, one_hot
from nearsay.neighbors import Identity, nearest, normalize
from nearsay.validation import check_whole

__all__ = [
    "ClassAccuracy",
    "Memorization",
    "SimilarityHistogram",
    "accuracy",
    "aligned",
    "average_precision",
    "brier",
    "calibration_error",
    "class_accuracy",
    "confidence",
    "confusion",
    "detection_auroc",
    "knn_accuracy",
    "margin",
    "memorization",
    "nll",
    "noise_rate",
    "similarity_histogram",
    "top_k_accuracy",
]

# Numbers in memory at a time.
_CHUNK = 2**24


class ClassAccuracy(NamedTuple):
    """Accuracy of each class.

    >>> import torch
    >>> result = class_accuracy(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 1, 1]))
    >>> result.classes.tolist(), result.mean
    ([1.0, 0.5], 0.75)

    Attributes:
        classes: (C,) float64; NaN for a class without examples.
        mean: over the classes with examples (balanced accuracy).
    """

    classes: Tensor
    mean: float


class Memorization(NamedTuple):
    """Predictions for examples with wrong labels, as shares that sum to 1.

    >>> Memorization(memorized=0.5, corrected=0.25, other=0.25).corrected
    0.25

    Attributes:
        memorized: share predicted as the wrong label.
        corrected: share predicted as the true class.
        other: share predicted as any other class.
    """

    memorized: float
    corrected: float
    other: float


class SimilarityHistogram(NamedTuple):
    """Counts of pairs of examples by their cosine similarity.

    >>> import torch
    >>> labels = Labels(torch.tensor([0, 0, 1, 1]), None, ("cat", "dog"))
    >>> similarity_histogram(torch.eye(4), labels, bins=2, num_pairs=8).counts.shape
    torch.Size([2, 2, 2])

    Attributes:
        edges: (bins + 1,) limits of the bins, from −1 to 1.
        counts: (2, 2, bins) int64. First axis: pairs with the same or with different given labels;
            second axis: both labels right, or at least one wrong.
    """

    edges: Tensor
    counts: Tensor


def aligned(labels: Labels, predictions: Predictions) -> Labels:
    """The labels in the order of the rows of the predictions; padding rows become unlabeled.

    >>> import torch
    >>> labels = Labels(torch.tensor([0, 1, 1]), None, ("cat", "dog"))
    >>> rows = torch.zeros(2, 4)
    >>> aligned(labels, Predictions(rows, rows, torch.tensor([2, 0]))).given.tolist()
    [1, 0]
    """
    indices, num_examples = predictions.indices.to(labels.given.device), len(labels.given)
    outside = indices[(indices < PADDING) | (indices >= num_examples)]
    if len(outside):
        raise ValueError(
            f"predictions must be of examples below {num_examples}, got {outside[0].item()}."
        )
    # One more row at the end, which the padding index −1 picks.
    given = functional.pad(labels.given, (0, 1), value=-1)[indices]
    clean = labels.clean
    if clean is not None:
        clean = functional.pad(clean, (0, 1), value=-1)[indices]
    return Labels(given, clean, labels.classes)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of labeled rows with the largest logit at the label; of equal ones the first counts.

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.

    >>> import torch
    >>> accuracy(torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 1]))
    0.5
    """
    return top_k_accuracy(logits, labels, k=1)


def top_k_accuracy(logits: Tensor, labels: Tensor, *, k: int = 5) -> float:
    """Share of labeled rows with the label among the k largest logits.

    Of equal logits, lower class numbers come first.

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.
        k: how many predictions count.

    >>> import torch
    >>> top_k_accuracy(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([1]), k=2)
    1.0
    """
    check_whole("k", k, 1)
    logits, labels = _labeled(logits, labels)
    own = logits.gather(1, labels[:, None])  # (n, 1)
    # The rank of the label is the number of classes that come before it.
    is_lower = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    num_before = ((logits > own) | ((logits == own) & is_lower)).sum(dim=1)
    return _mean(num_before < k)


def confusion(logits: Tensor, labels: Tensor) -> Tensor:
    """(C, C) int64 counts of labeled rows: the row is the label, the column the prediction.

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.

    >>> import torch
    >>> confusion(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 1, 1])).tolist()
    [[1, 0], [1, 1]]
    """
    logits, labels = _labeled(logits, labels)
    num_classes = logits.shape[1]
    # One number per cell, so that one bincount counts them all.
    cells = labels * num_classes + logits.argmax(dim=1)
    return torch.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def class_accuracy(logits: Tensor, labels: Tensor) -> ClassAccuracy:
    """Accuracy among the rows of each label, and its mean over classes.

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.

    >>> import torch
    >>> class_accuracy(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 1, 1])).mean
    0.75
    """
    counts = confusion(logits, labels)
    classes = counts.diagonal().double() / counts.sum(dim=1)
    return ClassAccuracy(classes, classes.nanmean().item())


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) probability of the given label, low if suspicious; NaN where unlabeled.

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.

    >>> import torch
    >>> confidence(torch.zeros(2, 4), torch.tensor([0, -1])).tolist()
    [0.25, nan]
    """
    return _own_and_best_other(logits, labels)[0]


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) half of 1 + probability of the label − of the best other; NaN where unlabeled.

    It is from 0 to 1, low if suspicious.

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.

    >>> import torch
    >>> margin(torch.zeros(1, 2), torch.tensor([0])).tolist()
    [0.5]
    """
    own, other = _own_and_best_other(logits, labels)
    return (1 + own - other) / 2


def nll(logits: Tensor, labels: Tensor) -> float:
    """Mean negative log-likelihood of the labels (cross-entropy).

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.

    >>> import torch
    >>> round(nll(torch.zeros(1, 2), torch.tensor([0])), 4)
    0.6931
    """
    logits, labels = _labeled(logits, labels)
    return _mean(-logits.log_softmax(dim=1).gather(1, labels[:, None]))


def brier(logits: Tensor, labels: Tensor) -> float:
    """Mean squared distance of the probabilities from the one-hot label, from 0 to 2.

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.

    >>> import torch
    >>> brier(torch.zeros(1, 2), torch.tensor([0]))
    0.5
    """
    logits, labels = _labeled(logits, labels)
    return _mean((logits.softmax(dim=1) - one_hot(labels, logits.shape[1])).square().sum(dim=1))


def calibration_error(
    logits: Tensor, labels: Tensor, *, bins: int = 15, adaptive: bool = False
) -> float:
    """Expected calibration error: the mean gap between probability and accuracy in a bin.

    Bins have equal widths and include their upper edge. Adaptive bins hold equal numbers of rows,
    but rows of equal probability stay together in the bin of the first of them.

    Args:
        logits: (N, C) outputs of the network.
        labels: (N,) class numbers; −1 is unlabeled and does not count.
        bins: number of bins.
        adaptive: True gives every bin the same number of rows, False the same width.

    >>> import torch
    >>> calibration_error(torch.zeros(2, 2), torch.tensor([0, 1]))
    0.0
    """
    check_whole("bins", bins, 1)
    logits, labels = _labeled(logits, labels)
    if not len(labels):
        return math.nan
    probability, predicted = logits.double().softmax(dim=1).max(dim=1)
    if adaptive:
        # The rank of the first of equal probabilities decides the bin.
        rank = torch.searchsorted(probability.sort().values, probability)
        which = rank * bins // len(probability)
    else:
        edges = torch.arange(1, bins, device=probability.device).double() / bins
        which = torch.bucketize(probability, edges)
    gaps = (predicted == labels).double() - probability
    return sum(abs(gaps[which == bin].sum().item()) for bin in range(bins)) / len(probability)


def memorization(logits: Tensor, labels: Labels) -> Memorization:
    """What is predicted for rows with a wrong given label.

    Args:
        logits: (N, C) outputs of the network.
        labels: the labels, of which the clean ones must be known.

    >>> import torch
    >>> labels = Labels(torch.tensor([0, 0]), torch.tensor([1, 1]), ("cat", "dog"))
    >>> memorization(torch.eye(2), labels)
    Memorization(memorized=0.5, corrected=0.5, other=0.0)
    """
    clean = _clean(labels)
    is_wrong = (labels.given >= 0) & (clean >= 0) & (labels.given != clean)
    predicted = _checked(logits, labels.given)[0].argmax(dim=1).to(clean.device)
    is_given, is_true = (predicted == labels.given)[is_wrong], (predicted == clean)[is_wrong]
    return Memorization(_mean(is_given), _mean(is_true), _mean(~(is_given | is_true)))


def noise_rate(labels: Labels) -> float:
    """Share of labeled rows with a given label that is not the true class.

    A true class that is not among the classes makes the label wrong.

    Args:
        labels: the labels, of which the clean ones must be known.

    >>> import torch
    >>> noise_rate(Labels(torch.tensor([0, 0]), torch.tensor([0, 1]), ("cat", "dog")))
    0.5
    """
    return _mean((labels.given != _clean(labels))[labels.given >= 0])


def detection_auroc(scores: Tensor, is_wrong: Tensor) -> float:
    """Probability that a wrong label scores below a right one; equal scores count half.

    Scores are (N,), low if suspicious; rows with NaN are ignored. The result is exact, and NaN
    unless both kinds of labels occur.

    Args:
        scores: (N,) one score per label; low is suspicious. NaN does not count.
        is_wrong: (N,) bool, whether the label is wrong.

    >>> import torch
    >>> detection_auroc(torch.tensor([0.1, 0.8, 0.9]), torch.tensor([True, False, False]))
    1.0
    """
    wrong, right = _counts_by_score(scores, is_wrong)  # (G,) each
    num_pairs = int(wrong.sum()) * int(right.sum())
    right_above = right.sum() - right.cumsum(dim=0)
    # Twice the count of ordered pairs, so that everything stays whole.
    doubled = int((wrong * (2 * right_above + right)).sum())
    return doubled / (2 * num_pairs) if num_pairs else math.nan


def average_precision(scores: Tensor, is_wrong: Tensor) -> float:
    """Mean precision, at each wrong label, of a review from the lowest score on.

    Scores are (N,), low if suspicious; rows with NaN are ignored. Labels with equal scores are
    reviewed together. NaN if no label is wrong.

    Args:
        scores: (N,) one score per label; low is suspicious. NaN does not count.
        is_wrong: (N,) bool, whether the label is wrong.

    >>> import torch
    >>> average_precision(torch.tensor([0.1, 0.8, 0.9]), torch.tensor([False, True, False]))
    0.5
    """
    wrong, right = _counts_by_score(scores, is_wrong)
    num_wrong, num_reviewed = wrong.cumsum(dim=0).double(), (wrong + right).cumsum(dim=0)
    return ((wrong * num_wrong / num_reviewed).sum() / wrong.sum()).item()


@torch.no_grad()
def knn_accuracy(
    train: Predictions, votes: Tensor, test: Predictions | None, truth: Tensor, *, k: int = 10
) -> float:
    """Accuracy of a weighted k-nearest-neighbor classifier on the features.

    A neighbor votes for its label with its cosine similarity, if that is positive. A test row
    without a vote counts as an error.

    >>> import torch
    >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> rows = Predictions(features, torch.zeros(4, 2), torch.arange(4))
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> knn_accuracy(rows, labels, None, labels, k=1)
    1.0

    Args:
        train: rows that vote, if they are labeled.
        votes: (N,) labels of the rows of `train`.
        test: rows to classify; None means each training row, by all rows of another index.
        truth: labels of the test rows; only labeled rows count.
        k: number of neighbors.
    """
    check_whole("k", k, 1)
    keys, votes, key_indices = _labeled_directions(train, votes)
    queries, truth, indices = _labeled_directions(train if test is None else test, truth)
    if not len(keys) or not len(queries):
        return math.nan
    if test is not None:
        # Indices of another data set must match no training row.
        indices = torch.full_like(indices, PADDING - 1)
    num_classes = int(votes.max()) + 1
    hits, num_rows = [], max(1, _CHUNK // max(num_classes, k))
    for start in range(0, len(queries), num_rows):
        rows = slice(start, start + num_rows)
        who = Identity(indices[rows], key_indices)
        similarities, positions = nearest(queries[rows], keys, k, who)  # (n, k)
        tally = similarities.new_zeros(len(similarities), num_classes)
        # Add each neighbor's similarity to the column of its label.
        tally.scatter_add_(1, votes[positions], similarities)
        most, predicted = tally.max(dim=1)
        hits.append((most > 0) & (predicted == truth[rows]))
    return _mean(torch.cat(hits))


@torch.no_grad()
def similarity_histogram(
    features: Tensor, labels: Labels, *, bins: int = 50, num_pairs: int = 100_000, seed: int = 0
) -> SimilarityHistogram:
    """How similar the features of two examples are, by their labels (a figure of the paper).

    Draws about `num_pairs` pairs with the same given label and as many with different ones. Each
    labeled row is equally likely to be the first. Without clean labels all labels count as right.

    >>> import torch
    >>> labels = Labels(torch.tensor([0, 0, 1, 1]), None, ("cat", "dog"))
    >>> int(similarity_histogram(torch.eye(4), labels, bins=2, num_pairs=8).counts[0, 1].sum())
    0

    Args:
        features: (N, D) numbers.
        labels: of the same N examples, in the same order.
        bins: number of bins from −1 to 1.
        num_pairs: of each kind; a pair of a row with itself is left out.
        seed: of the draws.
    """
    check_whole("bins", bins, 1)
    if len(features) != len(labels.given):
        raise ValueError(
            f"features must have one row for each of the {len(labels.given)} labels, "
            f"got {len(features)}."
        )
    rows = (labels.given >= 0).nonzero()[:, 0]
    given = labels.given[rows]
    is_wrong = torch.zeros_like(given, dtype=torch.bool)
    if labels.clean is not None:
        is_wrong = given != labels.clean[rows]
    edges, counts = torch.linspace(-1, 1, bins + 1), torch.zeros(4 * bins, dtype=torch.int64)
    step = max(1, _CHUNK // max(1, features.shape[1]))
    for start in range(0, num_pairs if len(rows) else 0, step):
        pairs = torch.arange(start, min(start + step, num_pairs))
        for is_same in (True, False):
            one, other = _pairs(given, pairs, is_same, seed)
            first = normalize(features[rows[one]].float())[0]
            second = normalize(features[rows[other]].float())[0]
            cosines = (first * second).sum(dim=1).cpu()
            # Count all cells of (same label, right labels, bin) at once, as one number each.
            cell = 2 * (not is_same) + (is_wrong[one] | is_wrong[other]).long().cpu()
            place = torch.bucketize(cosines, edges[1:-1], right=True)
            counts += torch.bincount(cell * bins + place, minlength=4 * bins)
    return SimilarityHistogram(edges, counts.reshape(2, 2, bins))


def _pairs(given: Tensor, pairs: Tensor, is_same: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Two positions for each pair number, without the pairs that do not fit."""
    drawn = rng.uniform(seed, f"similarity {is_same}", 0, pairs.to(given.device), num=2).double()
    first = (drawn[:, 0] * len(given)).long()
    if is_same:
        # Rows sorted by label form one block per class; draw a row from the block of the first.
        order, sizes, label = given.argsort(stable=True), torch.bincount(given), given[first]
        starts = sizes.cumsum(dim=0) - sizes
        second = order[starts[label] + (drawn[:, 1] * sizes[label]).long()]
        kept = first != second
    else:
        second = (drawn[:, 1] * len(given)).long()
        kept = given[first] != given[second]
    return first[kept], second[kept]


def _labeled_directions(predictions: Predictions, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features of length 1, labels and indices of the rows that are labeled and not padding."""
    features, _, indices = predictions
    if not len(features) == len(labels) == len(indices):
        raise ValueError(
            f"labels must have one row for each of the {len(features)} rows of features, "
            f"got {len(labels)}. Use aligned(labels, predictions)."
        )
    labels, indices = labels.to(features.device), indices.to(features.device)
    kept = (labels >= 0) & (indices != PADDING)
    rows = features[kept]
    directions, _ = normalize(rows.to(torch.promote_types(rows.dtype, torch.float32)))
    return directions, labels[kept], indices[kept]


def _own_and_best_other(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) probabilities of the label and of the likeliest other class, 0 if there is none."""
    logits, labels = _checked(logits, labels)
    probabilities = logits.softmax(dim=1)
    is_own = one_hot(labels, logits.shape[1]).bool()
    own = probabilities.where(is_own, 0.0).sum(dim=1).where(labels >= 0, math.nan)
    return own, probabilities.where(~is_own, 0.0).amax(dim=1)


def _counts_by_score(scores: Tensor, is_wrong: Tensor) -> tuple[Tensor, Tensor]:
    """(G,) numbers of wrong and of right labels at each different score, from low to high."""
    if scores.ndim != 1 or scores.shape != is_wrong.shape or is_wrong.dtype != torch.bool:
        raise ValueError(
            "scores and is_wrong must both be (N,), is_wrong of torch.bool, "
            f"got {tuple(scores.shape)} and {tuple(is_wrong.shape)} of {is_wrong.dtype}."
        )
    kept = ~scores.isnan()
    ordered, order = scores[kept].sort()
    wrong = is_wrong.to(scores.device)[kept][order]
    # A group begins where the score differs from the one before.
    begins = torch.ones_like(wrong)
    begins[1:] = ordered[1:] != ordered[:-1]
    group, num_groups = begins.cumsum(dim=0) - 1, int(begins.sum())
    num_wrong = torch.bincount(group[wrong], minlength=num_groups)
    return num_wrong, torch.bincount(group[~wrong], minlength=num_groups)


def _labeled(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that count."""
    logits, labels = _checked(logits, labels)
    is_labeled = labels >= 0
    return logits[is_labeled], labels[is_labeled]


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in float32 or better, and labels on the same device."""
    is_matrix = logits.ndim == 2 and logits.is_floating_point() and logits.shape[1] > 0
    if not is_matrix or labels.shape != logits.shape[:1]:
        raise ValueError(
            "logits must be floating-point (N, C) and labels (N,), "
            f"got {tuple(logits.shape)} of {logits.dtype} and {tuple(labels.shape)}."
        )
    # This checks that the labels are class numbers.
    Labels(labels.cpu(), None, ("",) * logits.shape[1])
    # The largest logit is finite unless a row has NaN, infinity, or only minus infinity.
    is_bad = ~logits.amax(dim=1).isfinite()
    if is_bad.any():
        raise ValueError(
            f"logits must be finite, got another value in row {int(is_bad.nonzero()[0])}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits, labels.to(logits.device, torch.int64)


def _clean(labels: Labels) -> Tensor:
    if labels.clean is None:
        raise ValueError("clean must hold the true classes, got None. Use Labels with clean.")
    return labels.clean


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
