"""What can be said of predictions once the labels are known, or of labels once the predictions are.

Logits are (N, C), labels (N,) class numbers in the same order, with −1 for "unlabeled" or "outside the vocabulary":
such rows are left out of every sum and every denominator. Means over nothing are NaN. A row of `Predictions` may
stand anywhere: `aligned` brings the labels into its order.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nearsay import rng
from nearsay.batch import PADDING, Labels, Predictions, one_hot
from nearsay.neighbors import Identity, nearest, normalize

_CHUNK = 2**24  # numbers of votes or features held at a time


class ClassAccuracy(NamedTuple):
    """Accuracy class by class."""

    classes: Tensor  # (C,) float64, NaN for a class without examples
    mean: float  # over the classes that have examples: balanced accuracy


class Memorization(NamedTuple):
    """What is predicted for examples with wrong labels; shares that sum to 1."""

    memorized: float  # the wrong label itself
    corrected: float  # the true class
    other: float


class SimilarityHistogram(NamedTuple):
    """Counts of pairs by cosine similarity, for pairs of the same and of different given labels."""

    edges: Tensor  # (bins + 1,) from −1 to 1
    counts: Tensor  # (2, 2, bins) int64: same or different label; both labels right or at least one wrong


def aligned(labels: Labels, predictions: Predictions) -> Labels:
    """The labels in the order of the rows of the predictions; rows of padding become unlabeled."""
    indices, num_examples = predictions.indices.to(labels.given.device), len(labels.given)
    outside = indices[(indices < PADDING) | (indices >= num_examples)]
    if len(outside):
        raise ValueError(
            f"predictions are of example {outside[0].item()}, but there are labels of {num_examples} only"
        )
    known = [each for each in (labels.given, labels.clean) if each is not None]
    given, *clean = (functional.pad(each, (0, 1), value=-1)[indices] for each in known)
    return Labels(given, clean[0] if clean else None, labels.classes)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of labeled rows whose largest logit is their label's; the first of equals is the largest."""
    return top_k_accuracy(logits, labels, k=1)


def top_k_accuracy(logits: Tensor, labels: Tensor, *, k: int = 5) -> float:
    """Share of labeled rows whose label is among their k largest logits; of equals, lower class numbers come first."""
    if k < 1:
        raise ValueError(f"k={k} leaves nothing to hit; it must be at least 1")
    logits, labels = _labeled(logits, labels)
    own = logits.gather(1, labels[:, None])
    is_lower = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    num_before = ((logits > own) | ((logits == own) & is_lower)).sum(dim=1)
    return _mean(num_before < k)


def confusion(logits: Tensor, labels: Tensor) -> Tensor:
    """(C, C) int64 counts of labeled rows: row is the label, column the prediction."""
    logits, labels = _labeled(logits, labels)
    num_classes = logits.shape[1]
    cells = labels * num_classes + logits.argmax(dim=1)
    return torch.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def class_accuracy(logits: Tensor, labels: Tensor) -> ClassAccuracy:
    """Accuracy among the rows of each label, and its mean over classes."""
    counts = confusion(logits, labels)
    classes = counts.diagonal().double() / counts.sum(dim=1)
    return ClassAccuracy(classes, classes.nanmean().item())


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) probability of the given label, low where it is suspicious; NaN where unlabeled."""
    return _own_and_best_other(logits, labels)[0]


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) half of 1 + probability of the given label − of the best other, low as above; NaN where unlabeled."""
    own, other = _own_and_best_other(logits, labels)
    return (1 + own - other) / 2


def nll(logits: Tensor, labels: Tensor) -> float:
    """Mean negative log-likelihood of the labels."""
    logits, labels = _labeled(logits, labels)
    return _mean(-logits.log_softmax(dim=1).gather(1, labels[:, None]))


def brier(logits: Tensor, labels: Tensor) -> float:
    """Mean squared distance of the probabilities from the label, summed over classes: from 0 to 2."""
    logits, labels = _labeled(logits, labels)
    return _mean((logits.softmax(dim=1) - one_hot(labels, logits.shape[1])).square().sum(dim=1))


def calibration_error(
    logits: Tensor, labels: Tensor, *, bins: int = 15, adaptive: bool = False
) -> float:
    """Expected calibration error: mean gap between how sure and how right the predictions of a bin are.

    Bins have equal widths and own their upper edge; adaptive ones hold equal numbers of rows, save that rows of equal
    probability stay together, in the bin where the first of them falls.
    """
    _check_bins(bins)
    logits, labels = _labeled(logits, labels)
    if not len(labels):
        return math.nan
    sure, predicted = logits.double().softmax(dim=1).max(dim=1)
    if adaptive:
        chosen = (
            torch.searchsorted(sure.sort().values, sure) * bins // len(sure)
        )  # where the first of equals stands
    else:
        chosen = torch.bucketize(sure, torch.arange(1, bins, device=sure.device).double() / bins)
    gaps = (predicted == labels).double() - sure
    return sum(abs(gaps[chosen == each].sum().item()) for each in range(bins)) / len(sure)


def memorization(logits: Tensor, labels: Labels) -> Memorization:
    """Of labeled rows whose true class is known and not the given one: the shares predicted as either or neither."""
    clean = _clean(labels)
    is_wrong = (labels.given >= 0) & (clean >= 0) & (labels.given != clean)
    predicted = _checked(logits, labels.given)[0].argmax(dim=1).to(clean.device)
    is_given, is_true = (predicted == labels.given)[is_wrong], (predicted == clean)[is_wrong]
    return Memorization(_mean(is_given), _mean(is_true), _mean(~(is_given | is_true)))


def noise_rate(labels: Labels) -> float:
    """Share of labeled rows whose label is not their true class; a class outside the vocabulary makes it wrong."""
    return _mean((labels.given != _clean(labels))[labels.given >= 0])


def detection_auroc(scores: Tensor, is_wrong: Tensor) -> float:
    """Probability that a wrong label scores below a right one, ties counting half; exact.

    Scores are (N,), low where suspicious; rows without a score (NaN) are left out. NaN unless both kinds occur.
    """
    wrong, right = _counts_by_score(scores, is_wrong)  # (G,) each
    num_pairs = int(wrong.sum()) * int(right.sum())
    right_above = right.sum() - right.cumsum(dim=0)
    doubled = int((wrong * (2 * right_above + right)).sum())
    return doubled / (2 * num_pairs) if num_pairs else math.nan


def average_precision(scores: Tensor, is_wrong: Tensor) -> float:
    """Precision of looking at the lowest scores first, averaged over the wrong labels; equals are looked at together.

    Scores are (N,), low where suspicious; rows without a score (NaN) are left out. NaN if no label is wrong.
    """
    wrong, right = _counts_by_score(scores, is_wrong)
    found, looked_at = wrong.cumsum(dim=0).double(), (wrong + right).cumsum(dim=0)
    return ((wrong * found / looked_at).sum() / wrong.sum()).item()


@torch.no_grad()
def knn_accuracy(
    train: Predictions, votes: Tensor, test: Predictions | None, truth: Tensor, *, k: int = 10
) -> float:
    """Share of labeled test rows whose class wins among the k nearest labeled training rows.

    A neighbor votes for its label in `votes` with its cosine similarity, if that is positive; a row without a vote is
    a miss. `truth` are the labels of the test rows. `test=None` asks of each training row all others: those of
    another index.
    """
    if k < 1:
        raise ValueError(f"k={k} leaves nobody to ask; it must be at least 1")
    keys, votes, names = _features(train, votes)
    queries, truth, asking = _features(train if test is None else test, truth)
    if not len(keys) or not len(queries):
        return math.nan
    if test is not None:
        asking = torch.full_like(asking, PADDING - 1)  # numbers of another data set: nobody here
    num_classes = int(votes.max()) + 1
    hits, num_rows = [], max(1, _CHUNK // max(num_classes, k))
    for start in range(0, len(queries), num_rows):
        chosen = slice(start, start + num_rows)
        similarities, positions = nearest(queries[chosen], keys, k, Identity(asking[chosen], names))
        tally = similarities.new_zeros(len(similarities), num_classes).scatter_add_(
            1, votes[positions], similarities
        )
        most, predicted = tally.max(dim=1)
        hits.append((most > 0) & (predicted == truth[chosen]))
    return _mean(torch.cat(hits))


@torch.no_grad()
def similarity_histogram(
    features: Tensor, labels: Labels, *, bins: int = 50, num_pairs: int = 100_000, seed: int = 0
) -> SimilarityHistogram:
    """How alike the features of two examples are, by whether their labels agree and are right (the paper's figure).

    About `num_pairs` pairs of the same given label and as many of different ones, drawn by `seeds`; of all labeled
    rows, each is as likely to be first. Without clean labels all count as right.
    """
    _check_bins(bins)
    if len(features) != len(labels.given):
        raise ValueError(
            f"{len(features)} rows of features but {len(labels.given)} labels; there must be as many"
        )
    rows = (labels.given >= 0).nonzero()[:, 0]
    given = labels.given[rows]
    is_wrong = (
        torch.zeros_like(given, dtype=torch.bool)
        if labels.clean is None
        else given != labels.clean[rows]
    )
    edges, counts = torch.linspace(-1, 1, bins + 1), torch.zeros(4 * bins, dtype=torch.int64)
    step = max(1, _CHUNK // max(1, features.shape[1]))
    for start in range(0, num_pairs if len(rows) else 0, step):
        pairs = torch.arange(start, min(start + step, num_pairs))
        for is_same in (True, False):
            first, second = _pairs(given, pairs, is_same, seed)
            units = [normalize(features[rows[each]].float())[0] for each in (first, second)]
            cosines = (units[0] * units[1]).sum(dim=1).cpu()
            cell = 2 * (not is_same) + (is_wrong[first] | is_wrong[second]).long().cpu()
            place = torch.bucketize(cosines, edges[1:-1], right=True)
            counts += torch.bincount(cell * bins + place, minlength=4 * bins)
    return SimilarityHistogram(edges, counts.reshape(2, 2, bins))


def _pairs(given: Tensor, pairs: Tensor, is_same: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Two positions for each number of a pair, less the pairs that came out as they should not."""
    drawn = rng.uniform(seed, f"similarity {is_same}", 0, pairs.to(given.device), num=2).double()
    first = (drawn[:, 0] * len(given)).long()
    if is_same:
        order, sizes, label = given.argsort(stable=True), torch.bincount(given), given[first]
        starts = sizes.cumsum(dim=0) - sizes
        second = order[starts[label] + (drawn[:, 1] * sizes[label]).long()]
        kept = first != second
    else:
        second = (drawn[:, 1] * len(given)).long()
        kept = given[first] != given[second]
    return first[kept], second[kept]


def _features(predictions: Predictions, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Directions, labels and indices of the rows that are labeled and not padding."""
    features, _, indices = predictions
    if not len(features) == len(labels) == len(indices):
        raise ValueError(
            f"{len(features)} rows of features but {len(labels)} labels; `aligned` brings them together"
        )
    kept = (labels.to(features.device) >= 0) & (indices.to(features.device) != PADDING)
    rows = features[kept]
    directions, _ = normalize(rows.to(torch.promote_types(rows.dtype, torch.float32)))
    return directions, labels.to(features.device)[kept], indices.to(features.device)[kept]


def _own_and_best_other(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) probabilities of the label and of the likeliest other class, which is 0 where there is no other."""
    logits, labels = _checked(logits, labels)
    probabilities = logits.softmax(dim=1)
    is_own = one_hot(labels, logits.shape[1]).bool()
    own = probabilities.where(is_own, 0.0).sum(dim=1).where(labels >= 0, math.nan)
    return own, probabilities.where(~is_own, 0.0).amax(dim=1)


def _counts_by_score(scores: Tensor, is_wrong: Tensor) -> tuple[Tensor, Tensor]:
    """(G,) numbers of wrong and of right labels at each distinct score, from low to high."""
    if scores.ndim != 1 or scores.shape != is_wrong.shape or is_wrong.dtype != torch.bool:
        shapes = (
            f"scores {tuple(scores.shape)} and is_wrong {tuple(is_wrong.shape)} of {is_wrong.dtype}"
        )
        raise ValueError(f"{shapes} must both be (N,), the latter of torch.bool")
    kept = ~scores.isnan()
    ordered, order = scores[kept].sort()
    wrong = is_wrong.to(scores.device)[kept][order]
    begins = torch.ones_like(wrong)
    begins[1:] = ordered[1:] != ordered[:-1]
    group, num_groups = begins.cumsum(dim=0) - 1, int(begins.sum())
    return torch.bincount(group[wrong], minlength=num_groups), torch.bincount(
        group[~wrong], minlength=num_groups
    )


def _labeled(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that count."""
    logits, labels = _checked(logits, labels)
    is_labeled = labels >= 0
    return logits[is_labeled], labels[is_labeled]


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in float32 or better and labels on one device; refuses what cannot be meant."""
    if (
        logits.ndim != 2
        or not logits.is_floating_point()
        or not logits.shape[1]
        or labels.shape != logits.shape[:1]
    ):
        shapes = f"logits {tuple(logits.shape)} of {logits.dtype} and labels {tuple(labels.shape)}"
        raise ValueError(f"{shapes} must be floating-point (N, C) and (N,)")
    Labels(labels.cpu(), None, ("",) * logits.shape[1])  # refuses what are no class numbers
    is_bad = ~logits.amax(dim=1).isfinite()  # NaN, infinity, or minus infinity for all classes
    if is_bad.any():
        raise ValueError(
            f"logits of row {int(is_bad.nonzero()[0])} are not finite; leave such rows out"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.to(
        logits.device, torch.int64
    )


def _clean(labels: Labels) -> Tensor:
    if labels.clean is None:
        raise ValueError(
            "clean is None, but this compares given labels with the true ones; give Labels with clean"
        )
    return labels.clean


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins={bins} leaves no room for anybody; it must be at least 1")
