"""How many labels are wrong, which classes they are confused with, and how sure one may be of that."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IS_SPLIT = 0.7  # share of the variance between two halves; 0.64 for one bell, 0.75 for a flat line
_BY_CLASS = 0.9  # of what two heaps explain: if the classes explain as much, the heaps are classes
_BY_CLASS_ACCEPTED = (
    0.5  # the same where hardly any label of the lower heap is rejected by what else is known
)
_HARDLY_ANY = 0.2  # of the lower heap
_SUREST = 0.1  # of the examples
_NORMAL = 1.959964  # 95 % of a bell curve lie within as many deviations
_SHARED = 0.1  # deviations by which all ways to estimate a share may err together
_MOST_FITTED = 20_000  # values that a mixture is fitted to


class NoiseRate(NamedTuple):
    """The estimated share of wrong labels, NaN if none could be judged, with a 95 % interval.

    The estimate is of the labels that could be judged, the interval of all.
    """

    estimate: float
    low: float
    high: float


class Halves(NamedTuple):
    """The best cut of numbers into low and high ones (Otsu 1979)."""

    threshold: float  # the largest of the low ones
    explained: float  # share of the variance that lies between the halves


def cut(values: Tensor) -> Halves:
    """The cut with the largest variance between the halves; NaN is left out, and equals explain nothing."""
    ordered = values[~values.isnan()].double().sort().values
    if len(ordered) < 2 or ordered[0] == ordered[-1]:
        return Halves(ordered[-1].item() if len(ordered) else math.nan, 0.0)
    num_low = torch.arange(1, len(ordered), dtype=torch.float64)
    num_high = len(ordered) - num_low
    sums = (ordered - ordered.mean()).cumsum(dim=0)[:-1]
    between = sums.square() * len(ordered) / (num_low * num_high)  # the mean of all is 0
    place = int(between.argmax())
    total = (ordered - ordered.mean()).square().sum()
    return Halves(ordered[place].item(), (between[place] / total).item())


def split(values: Tensor, labels: Tensor, is_rejected: Tensor | None = None) -> float | None:
    """Where the lower of two heaps ends, NaN left out; None where there is one heap, or where the heaps are classes.

    A class may be learned later than others, which does not make its labels wrong; the less so where the views reject
    hardly any of the lower heap, as (N,) `is_rejected` tells.
    """
    halves = cut(values)
    if halves.explained < IS_SPLIT:
        return None
    is_low = values <= halves.threshold
    is_accepted = is_rejected is not None and is_rejected[is_low].double().mean() < _HARDLY_ANY
    most = _BY_CLASS_ACCEPTED if is_accepted else _BY_CLASS
    return halves.threshold if _explained_by(values, labels) < most * halves.explained else None


def mixture_share(values: Tensor) -> float:
    """The share of the lower of two bell curves fitted to the values, NaN left out."""
    ordered = values[~values.isnan()].double().sort().values
    if len(ordered) < 2 or ordered[0] == ordered[-1]:
        return 0.0
    sample = ordered[:: max(1, len(ordered) // _MOST_FITTED), None]  # (n, 1)
    means = torch.quantile(sample[:, 0], torch.tensor([0.1, 0.9], dtype=torch.float64))
    spread = sample.std()
    deviations, shares = spread.repeat(2) / 2, torch.full((2,), 0.5, dtype=torch.float64)
    for _ in range(100):
        likelihoods = shares.log() - deviations.log() - ((sample - means) / deviations).square() / 2
        weights = likelihoods.softmax(dim=1)  # (n, 2)
        sizes = weights.sum(dim=0).clamp(min=1e-9)
        shares = sizes / len(sample)
        means = (weights * sample).sum(dim=0) / sizes
        deviations = (
            ((weights * (sample - means).square()).sum(dim=0) / sizes)
            .sqrt()
            .clamp(min=1e-3 * spread)
        )
    return shares[int(means.argmin())].item()


def own_and_other(beliefs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) what (N, C) numbers say of the label and of the best other class, −1 where there is none.

    A label is rejected where the second is larger: of equals none is, whatever the order of the classes.
    """
    column = labels.clamp(min=0)[:, None]
    return beliefs.gather(1, column)[:, 0], beliefs.scatter(1, column, -1.0).amax(dim=1)


def confident_share(beliefs: Tensor, labels: Tensor) -> float:
    """The share of (N,) labels of which another class is believed as much as it is of those labeled so on average.

    Confident learning (Northcutt et al. 2021): a network that is seldom sure of a class rejects little by being unsure.
    Rows of `beliefs` (N, C) need not sum to 1.
    """
    shares = beliefs / beliefs.sum(dim=1, keepdim=True)
    own = shares.gather(1, labels[:, None])[
        :, 0
    ].double()  # or the mean of equals would be another number than they
    sums = torch.zeros(beliefs.shape[1], dtype=torch.float64).index_add_(0, labels, own)
    usual = (sums / torch.bincount(labels, minlength=len(sums))).to(
        shares.dtype
    )  # (C,) NaN for a class of nobody
    trusted, other = own_and_other(shares.where(shares >= usual, -1.0), labels)
    return (other > trusted).double().mean().item()


def surest_share(beliefs: Tensor, labels: Tensor) -> float:
    """The share of (N,) labels that are rejected among the tenth of the rows of `beliefs` (N, C) that are surest.

    Where classes overlap right labels are rejected too, but hardly where one is sure: if labels turn wrong everywhere
    alike, this is the share of the wrong ones (anchor points, Liu and Tao 2016). Rows need not sum to 1.
    """
    sureness = (beliefs / beliefs.sum(dim=1, keepdim=True)).amax(dim=1)
    least = sureness.topk(math.ceil(_SUREST * len(labels))).values[-1]
    own, other = own_and_other(beliefs, labels)
    return (
        (other > own)[sureness >= least].double().mean().item()
    )  # equals count, whatever their order


def _explained_by(values: Tensor, labels: Tensor) -> float:
    """The share of the variance of the values that lies between the classes, less what any classes would explain."""
    known = ~values.isnan() & (labels >= 0)
    kept, which = values[known].double(), labels[known]
    counts = torch.bincount(which)
    num_classes = int((counts > 0).sum())
    if len(kept) <= num_classes:  # each is alone in its class
        return 0.0
    means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, which, kept) / counts
    within, total = (kept - means[which]).square().sum(), (kept - kept.mean()).square().sum()
    return 1 - (within / (len(kept) - num_classes) / (total / (len(kept) - 1))).item()


def wilson(share: float, num: int) -> tuple[float, float]:
    """The 95 % interval of a share that was counted among `num`."""
    if not num:
        return 0.0, 1.0
    square = _NORMAL**2
    center = (share + square / (2 * num)) / (1 + square / num)
    half = (
        _NORMAL * math.sqrt(share * (1 - share) / num + square / (4 * num**2)) / (1 + square / num)
    )
    return max(0.0, center - half) if share > 0 else 0.0, min(
        1.0, center + half
    ) if share < 1 else 1.0


def pooled(estimate: float, others: list[float], num: int) -> NoiseRate:
    """The estimate, with the interval that holds those of all ways to estimate it, as counts do not show bias.

    All ways go by one network, which errs in some of its own, so that the interval is wider by a tenth of a deviation.
    """
    limits = [wilson(min(1.0, max(0.0, share)), num) for share in (estimate, *others)]
    shared = _SHARED * math.sqrt(estimate * (1 - estimate))
    low, high = min(low for low, _ in limits) - shared, max(high for _, high in limits) + shared
    return NoiseRate(estimate, max(0.0, low), min(1.0, high))


def widened(rate: NoiseRate, judged: float) -> NoiseRate:
    """The rate of this share of the labels, with an interval for all: any number of the others may be wrong."""
    return NoiseRate(rate.estimate, judged * rate.low, judged * rate.high + (1 - judged))


def falling(scores: Tensor, values: Tensor) -> Tensor:
    """(N,) the values, smoothed so that they never rise with the score; where there is no score, NaN.

    The least squares fit of a decreasing function, by pooling adjacent violators; equal scores get equal values.
    """
    found = torch.full_like(scores, torch.nan, dtype=torch.float64)
    known = ~scores.isnan()
    if not known.any():
        return found
    _, which, counts = np.unique(scores[known].numpy(), return_inverse=True, return_counts=True)
    sums = np.bincount(which, weights=values[known].double().numpy())
    blocks: list[tuple[float, int, int]] = []  # sum, examples, scores
    for total, count in zip(sums.tolist(), counts.tolist(), strict=True):
        block = (total, count, 1)
        while (
            blocks and blocks[-1][0] * block[1] <= block[0] * blocks[-1][1]
        ):  # the mean before is not larger
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    levels = np.repeat(
        [total / count for total, count, _ in blocks], [width for _, _, width in blocks]
    )
    found[known] = torch.from_numpy(levels[which])
    return found


def bent(doubts: Tensor, mean: float) -> Tensor:
    """The doubts (from 0 to 1) to the power that brings their mean to `mean`, as far as any power does."""
    known = doubts[~doubts.isnan()]
    if not len(known) or not known.any():
        return doubts
    low, high = 0.05, 20.0
    for _ in range(60):
        power = (low + high) / 2
        low, high = (power, high) if known.pow(power).mean() > mean else (low, power)
    return doubts.pow((low + high) / 2)


def noise_matrix(given: Tensor, suggested: Tensor, num_classes: int) -> Tensor:
    """(C, C) float64 shares of the given labels (columns) among the examples that seem to be of a class (rows).

    A class that no example seems to be of is taken to be labeled right.
    """
    kept = (given >= 0) & (suggested >= 0)
    counts = torch.bincount(suggested[kept] * num_classes + given[kept], minlength=num_classes**2)
    counts = counts.reshape(num_classes, num_classes).double()
    sizes = counts.sum(dim=1, keepdim=True)
    return (counts / sizes.clamp(min=1)).where(
        sizes > 0, torch.eye(num_classes, dtype=torch.float64)
    )
