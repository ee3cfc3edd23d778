"""What the features say: who is near whom, who is the same picture twice, who is far from everybody."""

from typing import NamedTuple

import torch
from torch import Tensor

from nearsay.neighbors import Neighbors, nearest_others, normalize

DUPLICATE = 0.2  # as far apart as that share of the distance to the k-th neighbor, at most: the same picture
_IDENTICAL = 1e-6  # apart: the same row, whatever the others are
_FIFTH = 4  # place of a neighbor that is hardly ever a duplicate
_FARTHER = 1.5  # times as far away as that one, at most, is the k-th where examples lie evenly
_CHUNK = 2**24  # numbers held at a time
_NEAR = 0.98  # cosine from which on the distance is taken from the difference
_NOBODY = 2**0.5  # how far away somebody is of whom nothing is known but that he is not near


class Evidence(NamedTuple):
    """The k nearest of every example, the nearest first; a similarity of 0 means that nobody stands there."""

    positions: Tensor  # (N, K) int64
    similarities: Tensor  # (N, K) float32, cosines from 0 to 1
    distances: Tensor  # (N, K) between features of length 1; √2 where nobody stands
    groups: Tensor  # (N,) int64 number of the group of near-duplicates, −1 for an example that is the only one
    recall: float | None  # of an approximate search
    lengths: Tensor  # (N,) of the features


def gather_evidence(
    features: Tensor, k: int, approximate: bool | None
) -> tuple[Evidence, Neighbors | None]:
    """Search the (N, D) features, on the device where they are; the evidence is on the CPU.

    Beside it what an exact search has found, as it came and where it is; None where an index was asked.
    """
    k = min(k, max(1, len(features) - 1))  # or the row itself would stand there as the farthest
    found, recall = nearest_others(features, k, approximate=approximate)
    similarities, distances = _refined(features, *found)
    similarities, positions, distances = (
        each.cpu() for each in (similarities, found.positions, distances)
    )
    order = positions.argsort(dim=1)  # of equals the first comes first
    order = order.gather(
        1, similarities.gather(1, order).argsort(dim=1, descending=True, stable=True)
    )
    similarities, positions, distances = (
        each.gather(1, order) for each in (similarities, positions, distances)
    )
    distances = distances.where(similarities > 0, _NOBODY)
    groups = duplicate_groups(positions, similarities, distances)
    evidence = Evidence(
        positions, similarities.float().clamp(max=1), distances, groups, recall, _lengths(features)
    )
    return evidence, found if recall is None else None


def duplicate_groups(positions: Tensor, similarities: Tensor, distances: Tensor) -> Tensor:
    """(N,) number of the group that near-duplicates form, in the order of their first members; −1 for the others.

    Two are near-duplicates if they are far nearer to each other than each is to its k-th neighbor, and than examples
    mostly are to their fifth, as a class of fewer than k is far from all others too; a group is all that hang together.
    """
    usual = _FARTHER * distances[:, min(_FIFTH, distances.shape[1] - 1)].median()
    scale = distances[:, -1].minimum(usual)  # (N,) how far away the others are
    reach = DUPLICATE * torch.minimum(scale[:, None], scale[positions])
    is_edge = (similarities > 0) & (distances <= reach.clamp(min=_IDENTICAL))
    return connected(len(positions), is_edge.nonzero()[:, 0], positions[is_edge])


def connected(num: int, rows: Tensor, columns: Tensor) -> Tensor:
    """(num,) number of the group of each that pairs connect, in the order of their first members; −1 for the others."""
    names = torch.arange(num)
    while True:
        lowest = torch.minimum(names[rows], names[columns])
        new = names.scatter_reduce(0, rows, lowest, "amin").scatter_reduce(
            0, columns, lowest, "amin"
        )
        new = new[new]
        if torch.equal(new, names):
            break
        names = new
    _, which, sizes = torch.unique(names, return_inverse=True, return_counts=True)
    numbers = (sizes > 1).long().cumsum(dim=0) - 1
    return torch.where(sizes > 1, numbers, -1)[which]


def votes(evidence: Evidence, labels: Tensor, is_voter: Tensor, num_classes: int) -> Tensor:
    """(N, C) shares of the similarities of the neighbors that vote for each class; zeros where nobody votes.

    A near-duplicate of the example itself has no vote, and those of each other share one.
    """
    weights = evidence.similarities * (is_voter & (labels >= 0))[evidence.positions]
    weights = weights * _own_share(evidence)
    tally = weights.new_zeros(len(weights), num_classes)
    tally.scatter_add_(1, labels.clamp(min=0)[evidence.positions], weights)
    return tally / tally.sum(dim=1, keepdim=True).clamp(min=torch.finfo(tally.dtype).tiny)


def fullness(evidence: Evidence) -> Tensor:
    """(N,) from 0 to 1: the length of the features over the typical one, low where a network has seen little."""
    return (evidence.lengths / evidence.lengths.median().clamp(min=1e-30)).clamp(max=1)


def closeness(evidence: Evidence) -> Tensor:
    """(N,) from 0 to 1: the typical distance to the neighbors over one's own, low for whom nobody is near."""
    mean = evidence.distances.mean(dim=1)
    return (
        (mean.median() / mean.clamp(min=torch.finfo(mean.dtype).tiny))
        .clamp(max=1)
        .where(mean > 0, 1.0)
    )


def _own_share(evidence: Evidence) -> Tensor:
    """(N, K) what a neighbor's vote counts beside its near-duplicates in the same list."""
    groups = evidence.groups[evidence.positions]  # (N, K)
    share = torch.ones_like(evidence.similarities)
    rows = (groups >= 0).any(dim=1).nonzero()[:, 0]
    width = evidence.positions.shape[1]
    for some in torch.split(rows, max(1, _CHUNK // width**2)):
        among = groups[some]
        is_group = (among >= 0) & (evidence.similarities[some] > 0)
        is_same = (among[:, :, None] == among[:, None, :]) & is_group[:, None, :]
        is_own = among == evidence.groups[some][:, None]
        counted = is_same.sum(dim=2).clamp(min=1).to(share.dtype).reciprocal().where(is_group, 1.0)
        share[some] = counted.masked_fill(is_group & is_own, 0.0)
    return share


def _lengths(features: Tensor) -> Tensor:
    """(N,) float32 on the CPU, 0 for a row of zeros; a part at a time."""
    dtype = torch.promote_types(features.dtype, torch.float32)
    found = [
        normalize(some.to(dtype))[1][:, 0]
        for some in torch.split(features, max(1, _CHUNK // features.shape[1]))
    ]
    return torch.cat([length.where(length.isfinite(), 0.0).float().cpu() for length in found])


def _refined(features: Tensor, similarities: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) similarities and distances; of two that are nearly the same, the cosine knows only that it is nearly 1."""
    dtype = torch.promote_types(features.dtype, torch.float32)
    similarities = similarities.to(dtype, copy=True)  # the caller keeps his
    distances = (2 - 2 * similarities).clamp(min=0).sqrt()
    rows, places = (similarities >= _NEAR).nonzero().unbind(dim=1)
    some = max(1, _CHUNK // features.shape[1])
    for row, place in zip(*(torch.split(each, some) for each in (rows, places)), strict=True):
        one, other = (
            normalize(features[each].to(dtype))[0] for each in (row, positions[row, place])
        )
        apart = torch.linalg.vector_norm(one - other, dim=1)
        distances[row, place] = apart
        similarities[row, place] = 1 - apart.square() / 2
    return similarities, distances
