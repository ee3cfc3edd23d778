"""Scores from features: the neighbors of an example, its near-duplicates, and how unusual it is."""

from typing import NamedTuple

import torch
from torch import Tensor

from nearsay.neighbors import Neighbors, nearest_others, normalize

# Near-duplicates are at most this share of the distance to the k-th neighbor apart.
DUPLICATE = 0.2
# Rows that are this near are the same, however near the others are.
_IDENTICAL = 1e-6
# The fifth neighbor is hardly ever a duplicate. If examples are spread evenly, the k-th neighbor is
# at most 1.5 times as far away as the fifth.
_FIFTH, _FARTHER = 4, 1.5
# From this cosine on, rounding is larger than the distance, so differences are computed.
_NEAR = 0.98
# The distance of an empty place: orthogonal features.
_ORTHOGONAL = 2**0.5
# Numbers in memory at a time.
_CHUNK = 2**24


class Evidence(NamedTuple):
    """The K nearest neighbors of N examples, the nearest first. Similarity 0 is an empty place.

    Attributes:
        positions: (N, K) int64 positions of the neighbors.
        similarities: (N, K) float32 cosines from 0 to 1.
        distances: (N, K) between features of length 1; √2 in an empty place.
        groups: (N,) int64 number of the group of near-duplicates; −1 without one.
        recall: share of the true neighbors that an approximate search found; None if exact.
        lengths: (N,) norms of the features.
    """

    positions: Tensor
    similarities: Tensor
    distances: Tensor
    groups: Tensor
    recall: float | None
    lengths: Tensor


def gather_evidence(
    features: Tensor, k: int, approximate: bool | None
) -> tuple[Evidence, Neighbors | None]:
    """Search the (N, D) features on their device, and return the evidence on the CPU.

    The second value is the result of an exact search as it came, on its device; None if an index
    was used. Label propagation needs it.
    """
    # With k >= N, the search would return the row itself as its farthest neighbor.
    k = min(k, max(1, len(features) - 1))
    neighbors, recall = nearest_others(features, k, approximate=approximate)
    similarities, distances = _exact_near_one(features, *neighbors)
    similarities, positions = similarities.cpu(), neighbors.positions.cpu()
    # Sort by position first, so that equal similarities come in the order of the examples.
    order = positions.argsort(dim=1)
    by_similarity = similarities.gather(1, order).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, by_similarity)
    similarities, positions = similarities.gather(1, order), positions.gather(1, order)
    distances = distances.cpu().gather(1, order).where(similarities > 0, _ORTHOGONAL)
    evidence = Evidence(
        positions,
        similarities.float().clamp(max=1),
        distances,
        duplicate_groups(positions, similarities, distances),
        recall,
        _lengths(features),
    )
    return evidence, neighbors if recall is None else None


def duplicate_groups(positions: Tensor, similarities: Tensor, distances: Tensor) -> Tensor:
    """(N,) number of the group of near-duplicates, in the order of first members; −1 without one.

    Two examples are near-duplicates if they are far nearer to each other than each is to its k-th
    neighbor. A class of fewer than k examples is far from all others too, so that distance counts
    no more than 1.5 times the usual distance of the fifth neighbor. Groups are connected
    components.
    """
    usual = _FARTHER * distances[:, min(_FIFTH, distances.shape[1] - 1)].median()
    scale = distances[:, -1].minimum(usual)  # (N,)
    # The limit of a pair is set by the example in the denser place.
    limit = DUPLICATE * torch.minimum(scale[:, None], scale[positions])  # (N, K)
    is_edge = (similarities > 0) & (distances <= limit.clamp(min=_IDENTICAL))
    return connected_components(len(positions), is_edge.nonzero()[:, 0], positions[is_edge])


def connected_components(num: int, rows: Tensor, columns: Tensor) -> Tensor:
    """(num,) number of each node's component in order of first members; −1 for single nodes."""
    names = torch.arange(num)
    while True:
        # Both ends of an edge take the lower name; names[names] then follows chains of names, so
        # that a path of n nodes needs about log n rounds.
        lowest = torch.minimum(names[rows], names[columns])
        lowered = names.scatter_reduce(0, rows, lowest, "amin")
        lowered = lowered.scatter_reduce(0, columns, lowest, "amin")
        lowered = lowered[lowered]
        if torch.equal(lowered, names):
            break
        names = lowered
    _, component, sizes = torch.unique(names, return_inverse=True, return_counts=True)
    numbers = (sizes > 1).long().cumsum(dim=0) - 1
    return torch.where(sizes > 1, numbers, -1)[component]


def votes(evidence: Evidence, labels: Tensor, is_voter: Tensor, num_classes: int) -> Tensor:
    """(N, C) shares of the neighbors' similarities by label; zeros if there is no voter.

    A near-duplicate of the example itself has no vote, and those of each other share one.
    """
    weights = evidence.similarities * (is_voter & (labels >= 0))[evidence.positions]
    weights = weights * _vote_shares(evidence)
    tally = weights.new_zeros(len(weights), num_classes)
    # Add each neighbor's weight to the column of its label.
    tally.scatter_add_(1, labels.clamp(min=0)[evidence.positions], weights)
    return tally / tally.sum(dim=1, keepdim=True).clamp(min=torch.finfo(tally.dtype).tiny)


def length_score(evidence: Evidence) -> Tensor:
    """(N,) from 0 to 1: the norm of the features over the median; low if a network saw little."""
    return (evidence.lengths / evidence.lengths.median().clamp(min=1e-30)).clamp(max=1)


def density_score(evidence: Evidence) -> Tensor:
    """(N,) from 0 to 1: the median distance to the neighbors over one's own; low if isolated."""
    mean = evidence.distances.mean(dim=1)
    score = mean.median() / mean.clamp(min=torch.finfo(mean.dtype).tiny)
    return score.clamp(max=1).where(mean > 0, 1.0)


def _vote_shares(evidence: Evidence) -> Tensor:
    """(N, K) the factor of each vote: 1/n for n near-duplicates of each other in the same list."""
    groups = evidence.groups[evidence.positions]  # (N, K)
    shares = torch.ones_like(evidence.similarities)
    # Only rows with a near-duplicate need the (K, K) comparison below.
    rows = (groups >= 0).any(dim=1).nonzero()[:, 0]
    width = evidence.positions.shape[1]
    for chunk in torch.split(rows, max(1, _CHUNK // width**2)):
        group = groups[chunk]  # (n, K)
        is_member = (group >= 0) & (evidence.similarities[chunk] > 0)
        is_same = (group[:, :, None] == group[:, None, :]) & is_member[:, None, :]  # (n, K, K)
        share = is_same.sum(dim=2).clamp(min=1).to(shares.dtype).reciprocal()
        is_own = group == evidence.groups[chunk][:, None]
        shares[chunk] = share.where(is_member, 1.0).masked_fill(is_member & is_own, 0.0)
    return shares


def _lengths(features: Tensor) -> Tensor:
    """(N,) float32 norms on the CPU; 0 for a row of zeros."""
    dtype = torch.promote_types(features.dtype, torch.float32)
    parts = []
    for chunk in torch.split(features, max(1, _CHUNK // features.shape[1])):
        length = normalize(chunk.to(dtype))[1][:, 0]
        # `normalize` gives rows of zeros an infinite length.
        parts.append(length.where(length.isfinite(), 0.0).float().cpu())
    return torch.cat(parts)


def _exact_near_one(
    features: Tensor, similarities: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """(N, K) similarities and distances, exact also for pairs that are nearly the same.

    In float32, 1 − cosine is right to about 1e-7, and so a distance only to about 3e-4. For near
    pairs the distance is the norm of the difference, and the cosine follows from it.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    # A copy, because the caller still uses the similarities.
    similarities = similarities.to(dtype, copy=True)
    distances = (2 - 2 * similarities).clamp(min=0).sqrt()
    rows, places = (similarities >= _NEAR).nonzero().unbind(dim=1)
    size = max(1, _CHUNK // features.shape[1])
    for row, place in zip(torch.split(rows, size), torch.split(places, size), strict=True):
        one = normalize(features[row].to(dtype))[0]
        other = normalize(features[positions[row, place]].to(dtype))[0]
        distance = torch.linalg.vector_norm(one - other, dim=1)
        distances[row, place] = distance
        similarities[row, place] = 1 - distance.square() / 2
    return similarities, distances
