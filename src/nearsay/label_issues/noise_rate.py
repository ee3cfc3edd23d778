"""How many labels are wrong, which classes they are confused with, and how sure that is."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Least share of the variance between two halves; it is 0.64 for one normal distribution and 0.75
# for a uniform one.
IS_SPLIT = 0.7
# If classes explain this share of what two groups explain, the groups are classes. The second
# number holds if other evidence rejects less than `_HARDLY_ANY` of the lower group.
_BY_CLASS, _BY_CLASS_ACCEPTED = 0.9, 0.5
_HARDLY_ANY = 0.2
# Share of the examples that count as the surest.
_SUREST = 0.1
# The 97.5 % quantile of the standard normal distribution.
_NORMAL = 1.959964
# Standard deviations by which all estimates of a share may err together.
_SHARED = 0.1
# Values that a mixture is fitted to, at most.
_MOST_FITTED = 20_000


class NoiseRate(NamedTuple):
    """The estimated share of wrong labels, with a 95 % interval.

    The estimate is of the labels that have a score, the interval of all labels.

    Attributes:
        estimate: from 0 to 1; NaN if no label has a score.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    estimate: float
    low: float
    high: float


class Cut(NamedTuple):
    """The best cut of numbers into low and high ones (Otsu 1979)."""

    threshold: float  # the largest of the low ones
    explained: float  # share of the variance between the halves


def otsu_cut(values: Tensor) -> Cut:
    """The cut with the largest variance between the halves; NaN is ignored."""
    ordered = values[~values.isnan()].double().sort().values
    if len(ordered) < 2 or ordered[0] == ordered[-1]:
        return Cut(ordered[-1].item() if len(ordered) else math.nan, 0.0)
    num_low = torch.arange(1, len(ordered), dtype=torch.float64)
    num_high = len(ordered) - num_low
    # With the mean of all at 0, the variance between the halves follows from the sum of one half.
    centered = ordered - ordered.mean()
    sums = centered.cumsum(dim=0)[:-1]
    between = sums.square() * len(ordered) / (num_low * num_high)
    place = int(between.argmax())
    return Cut(ordered[place].item(), (between[place] / centered.square().sum()).item())


def bimodal_threshold(
    values: Tensor, labels: Tensor, is_rejected: Tensor | None = None
) -> float | None:
    """Where the lower of two groups of values ends; None for one group, or if classes explain it.

    A class that is learned later than the others is not wrong. This is the more likely reason if
    the views reject hardly any label of the lower group, as the (N,) `is_rejected` says.
    """
    cut = otsu_cut(values)
    if cut.explained < IS_SPLIT:
        return None
    most = _BY_CLASS
    if is_rejected is not None:
        is_low = values <= cut.threshold
        if is_rejected[is_low].double().mean() < _HARDLY_ANY:
            most = _BY_CLASS_ACCEPTED
    if _explained_by_class(values, labels) < most * cut.explained:
        return cut.threshold
    return None


def mixture_share(values: Tensor) -> float:
    """The share of the lower of two normal distributions fitted to the values; NaN is ignored."""
    ordered = values[~values.isnan()].double().sort().values
    if len(ordered) < 2 or ordered[0] == ordered[-1]:
        return 0.0
    sample = ordered[:: max(1, len(ordered) // _MOST_FITTED), None]  # (n, 1)
    means = torch.quantile(sample[:, 0], torch.tensor([0.1, 0.9], dtype=torch.float64))
    spread = sample.std()
    deviations, shares = spread.repeat(2) / 2, torch.full((2,), 0.5, dtype=torch.float64)
    # Expectation maximization: weights of the two for each value, then their parameters.
    for _ in range(100):
        likelihoods = shares.log() - deviations.log() - ((sample - means) / deviations).square() / 2
        weights = likelihoods.softmax(dim=1)  # (n, 2)
        sizes = weights.sum(dim=0).clamp(min=1e-9)
        shares = sizes / len(sample)
        means = (weights * sample).sum(dim=0) / sizes
        variances = (weights * (sample - means).square()).sum(dim=0) / sizes
        # A lower limit keeps one of them from shrinking onto a single value.
        deviations = variances.sqrt().clamp(min=1e-3 * spread)
    return shares[int(means.argmin())].item()


def own_and_best_other(beliefs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) belief in the label and in the best other class, −1 if there is no other.

    A label is rejected if the second is larger. If both are equal it is not, so the order of the
    classes does not matter.
    """
    column = labels.clamp(min=0)[:, None]
    return beliefs.gather(1, column)[:, 0], beliefs.scatter(1, column, -1.0).amax(dim=1)


def confident_share(beliefs: Tensor, labels: Tensor) -> float:
    """The share of (N,) labels that confident learning rejects (Northcutt et al. 2021).

    A label is rejected if the belief in another class reaches the mean belief in that class among
    the examples labeled so. Rows of `beliefs` (N, C) need not sum to 1.
    """
    shares = beliefs / beliefs.sum(dim=1, keepdim=True)
    # In float32 the mean of equal numbers may differ from them.
    own = shares.gather(1, labels[:, None])[:, 0].double()
    sums = torch.zeros(beliefs.shape[1], dtype=torch.float64).index_add_(0, labels, own)
    # NaN for a class without labels; comparisons with it are false.
    usual = (sums / torch.bincount(labels, minlength=len(sums))).to(shares.dtype)  # (C,)
    trusted, other = own_and_best_other(shares.where(shares >= usual, -1.0), labels)
    return (other > trusted).double().mean().item()


def surest_share(beliefs: Tensor, labels: Tensor) -> float:
    """The share of rejected labels among the tenth of the (N, C) beliefs that is surest.

    If classes overlap, right labels are rejected too, but rarely where the beliefs are sure. So if
    noise does not depend on the example, this is the noise rate (anchor points, Liu and Tao 2016).
    Rows of `beliefs` need not sum to 1.
    """
    sureness = (beliefs / beliefs.sum(dim=1, keepdim=True)).amax(dim=1)
    least = sureness.topk(math.ceil(_SUREST * len(labels))).values[-1]
    own, other = own_and_best_other(beliefs, labels)
    # All that are as sure as the last one count, so the order of the examples does not matter.
    return (other > own)[sureness >= least].double().mean().item()


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """The 95 % interval of a share that was counted among `num`."""
    if not num:
        return 0.0, 1.0
    square = _NORMAL**2
    scale = 1 + square / num
    center = (share + square / (2 * num)) / scale
    half = _NORMAL * math.sqrt(share * (1 - share) / num + square / (4 * num**2)) / scale
    # At the ends the formula is right up to rounding.
    low = max(0.0, center - half) if share > 0 else 0.0
    high = min(1.0, center + half) if share < 1 else 1.0
    return low, high


def pooled_rate(estimate: float, others: list[float], num: int) -> NoiseRate:
    """The estimate with an interval that contains the intervals of all other estimates.

    Counting errors do not show bias, but the disagreement of several estimates does. All of them
    use one network, which makes its own errors, so the interval is wider by a tenth of a deviation.
    """
    limits = []
    for share in (estimate, *others):
        limits.append(wilson_interval(min(1.0, max(0.0, share)), num))
    shared = _SHARED * math.sqrt(estimate * (1 - estimate))
    low = min(low for low, _ in limits) - shared
    high = max(high for _, high in limits) + shared
    return NoiseRate(estimate, max(0.0, low), min(1.0, high))


def extend_to_all(rate: NoiseRate, share: float) -> NoiseRate:
    """The rate of this share of the labels, with an interval for all: the rest may be anything."""
    return NoiseRate(rate.estimate, share * rate.low, share * rate.high + (1 - share))


def decreasing_fit(scores: Tensor, values: Tensor) -> Tensor:
    """(N,) float64 least squares fit of the values that never rises with the score.

    This is isotonic regression by pooling adjacent violators. Equal scores get equal values, and an
    example without a score gets NaN.
    """
    fitted = torch.full_like(scores, torch.nan, dtype=torch.float64)
    known = ~scores.isnan()
    if not known.any():
        return fitted
    _, group, counts = np.unique(scores[known].numpy(), return_inverse=True, return_counts=True)
    sums = np.bincount(group, weights=values[known].double().numpy())
    # Each block holds the sum of its values, the number of examples and of different scores.
    blocks: list[tuple[float, int, int]] = []
    for total, count in zip(sums.tolist(), counts.tolist(), strict=True):
        block = (total, count, 1)
        # While the mean of the block before is not larger, merge the two.
        while blocks and blocks[-1][0] * block[1] <= block[0] * blocks[-1][1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    means = [total / count for total, count, _ in blocks]
    levels = np.repeat(means, [width for _, _, width in blocks])
    fitted[known] = torch.from_numpy(levels[group])
    return fitted


def raised_to_mean(values: Tensor, mean: float) -> Tensor:
    """Values from 0 to 1 to the power that makes their mean `mean`; the power is 0.05 to 20."""
    known = values[~values.isnan()]
    if not len(known) or not known.any():
        return values
    low, high = 0.05, 20.0
    # Bisection: a larger power makes the mean smaller.
    for _ in range(60):
        power = (low + high) / 2
        if known.pow(power).mean() > mean:
            low = power
        else:
            high = power
    return values.pow((low + high) / 2)


def noise_matrix(given: Tensor, suggested: Tensor, num_classes: int) -> Tensor:
    """(C, C) float64 shares of the given labels (columns) by suggested class (rows).

    A class without suggestions gets the row of the identity matrix.
    """
    kept = (given >= 0) & (suggested >= 0)
    cells = suggested[kept] * num_classes + given[kept]
    counts = torch.bincount(cells, minlength=num_classes**2)
    counts = counts.reshape(num_classes, num_classes).double()
    sizes = counts.sum(dim=1, keepdim=True)
    identity = torch.eye(num_classes, dtype=torch.float64)
    return (counts / sizes.clamp(min=1)).where(sizes > 0, identity)


def _explained_by_class(values: Tensor, labels: Tensor) -> float:
    """The share of the variance that lies between classes, without what random classes explain."""
    known = ~values.isnan() & (labels >= 0)
    kept, label = values[known].double(), labels[known]
    counts = torch.bincount(label)
    num_classes = int((counts > 0).sum())
    # With one example per class there is no variance within classes.
    if len(kept) <= num_classes:
        return 0.0
    means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, label, kept) / counts
    within, total = (kept - means[label]).square().sum(), (kept - kept.mean()).square().sum()
    # Both variances are divided by their degrees of freedom.
    return 1 - (within / (len(kept) - num_classes) / (total / (len(kept) - 1))).item()
