"""Transductive label propagation over a graph of neighbors (paper Eq. 2), the ancestor NCR is compared with.

Zhou et al., Learning with Local and Global Consistency, NeurIPS 2003. In Eq. 2 every pair stands twice, so that with
S = D^-½ W D^-½ its smoothness term is tr Pᵀ(I − S)P, its gradient μ(P − Y) + 2(I − S)P, and its minimum the solution of
(I − αS) P = (1 − α) Y with α = 2 / (2 + μ). An example without edges has no smoothness term: there P = Y.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nearsay.batch import one_hot
from nearsay.neighbors import Neighbors, nearest, normalize
from nearsay.validation import check_number, check_tensors, check_whole


class _Graph(NamedTuple):
    """S = D^-½ W D^-½ row by row; E directed edges."""

    starts: Tensor  # (N + 1,) where the edges of each row begin
    columns: Tensor  # (E,)
    weights: Tensor  # (E,)
    is_connected: Tensor  # (N,) bool


@torch.no_grad()
def propagate_labels(
    features: Tensor,
    labels: Tensor,
    num_classes: int | None = None,
    *,
    k: int = 50,
    mu: float = 0.02,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> Tensor:
    """Spread labels over the graph of nearest neighbors: (N, C) scores P, the minimum of the paper's Eq. 2.

    Two examples share an edge if either is among the other's k nearest by cosine similarity (everyone, when there are
    no more than k others); its weight is that similarity, and only positive ones count. A small `mu` trusts the
    neighbors, a large one the given labels; 0.02 is the customary α = 0.99.

    Scores are not negative. The argmax of a row is its propagated label, a row divided by its sum is a distribution,
    and a row that no label reaches is all zeros.

    Args:
        features: (N, D) floating point; their scale does not matter. 16-bit ones are computed in float32.
        labels: (N,) class numbers with −1 for unlabeled, or (N, C) soft targets, zeros for unlabeled.
        num_classes: by default the largest label plus one, or the width of the soft targets.
        k: neighbors that each example names.
        mu: weight of the given labels against smoothness.
        tolerance: of the norm of the residual of each class, relative to its right-hand side. Lower it (in float64)
            where a handful of labels must reach very many examples.
        max_iterations: of the conjugate gradients; one warning if they end before the tolerance is reached.

    Raises:
        ValueError: for arguments that cannot be meant; the message says which and what would work.
    """
    _check(features, labels, k, mu, tolerance, max_iterations)
    targets = _targets(labels, num_classes)  # (N, C) before the search, which takes time
    directions, _ = normalize(
        features.to(torch.promote_types(features.dtype, torch.float32))
    )  # (N, D)
    neighbors = nearest(directions, directions, k, None)
    return spread(neighbors, targets, mu=mu, tolerance=tolerance, max_iterations=max_iterations)


def spread(
    neighbors: Neighbors,
    labels: Tensor,
    num_classes: int | None = None,
    *,
    mu: float = 0.02,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> Tensor:
    """`propagate_labels` over the neighbors of N examples that an exact search has found already."""
    targets = _targets(labels, num_classes).to(neighbors.similarities)  # (N, C)
    graph = _graph(neighbors)
    is_connected = graph.is_connected[:, None]
    own_share = mu / (2 + mu)  # 1 − α, without cancellation
    scores = _solve(graph, 2 / (2 + mu), own_share * targets, tolerance, max_iterations)
    return scores.clamp(min=0).where(
        is_connected, targets
    )  # the minimum is never negative, its approximation may be


def _solve(
    graph: _Graph, alpha: float, given: Tensor, tolerance: float, max_iterations: int
) -> Tensor:
    """(I − αS)⁻¹ given, by conjugate gradients on all classes at once; rows out of reach of a label stay exactly 0."""
    size = given.amax(dim=0)  # (C,) so that squares neither overflow nor vanish
    given = given / size.where(size > 0, 1.0)
    solution = torch.zeros_like(given)  # (N, C)
    residual = given.clone()
    direction = given.clone()
    squares = given.square().sum(dim=0)  # (C,)
    enough = squares * tolerance**2
    for _ in range(max_iterations):
        is_open = squares > enough  # classes still to be improved; those without labels never are
        if not is_open.any():
            return solution * size
        image = direction - alpha * _product(graph, direction)
        step = (squares / (direction * image).sum(dim=0)).where(is_open, 0.0)  # (C,)
        solution.addcmul_(direction, step)
        residual.addcmul_(image, step, value=-1)
        before, squares = squares, residual.square().sum(dim=0)
        direction = residual + direction * (squares / before).where(is_open, 0.0)
    is_open = squares > enough
    if is_open.any():
        worst = (squares[is_open] / enough[is_open]).max().sqrt().item() * tolerance
        warnings.warn(
            f"label propagation stopped after max_iterations={max_iterations} at a relative residual of {worst:.1e}, "
            f"above tolerance={tolerance:g}; raise max_iterations or mu",
            stacklevel=5,  # the caller of propagate_labels, behind torch.no_grad
        )
    return solution * size


def _product(graph: _Graph, rows: Tensor) -> Tensor:
    """S @ rows: (N, C). Summing bags is ten times as fast on a CPU as torch's sparse matrices."""
    return functional.embedding_bag(
        graph.columns,
        rows,
        graph.starts,
        mode="sum",
        per_sample_weights=graph.weights,
        include_last_offset=True,
    )


def _graph(neighbors: Neighbors) -> _Graph:
    """The normalized graph that joins each row to those it names, in both directions: W = max(W, Wᵀ)."""
    similarities, positions = neighbors
    num_rows = len(positions)
    rows = torch.arange(num_rows, device=positions.device)[:, None].expand_as(positions)
    is_edge = similarities > 0
    rows, columns, weights = rows[is_edge], positions[is_edge], similarities[is_edge]
    # One key per unordered pair, so that W is symmetric to the last bit whoever named whom.
    pairs, which = torch.unique(
        torch.minimum(rows, columns) * num_rows + torch.maximum(rows, columns), return_inverse=True
    )
    weights = weights.new_zeros(len(pairs)).scatter_reduce(0, which, weights, "amax")
    low, high = pairs // num_rows, pairs % num_rows
    rows, order = torch.cat([low, high]).sort(stable=True)  # (E,)
    columns, weights = torch.cat([high, low])[order], weights.repeat(2)[order]
    degrees = weights.new_zeros(num_rows).index_add_(0, rows, weights)  # (N,)
    scales = degrees.rsqrt()  # infinite without edges, and then never used
    starts = functional.pad(torch.bincount(rows, minlength=num_rows).cumsum(dim=0), (1, 0))
    return _Graph(starts, columns, weights * scales[rows] * scales[columns], degrees > 0)


def _targets(labels: Tensor, num_classes: int | None) -> Tensor:
    """(N, C) what is given of each example; looked at on the host, where labels out of range are refused."""
    labels = labels.detach().cpu()
    if labels.ndim == 2:
        if num_classes not in (None, labels.shape[1]):
            raise ValueError(
                f"soft labels of {labels.shape[1]} columns cannot mean num_classes={num_classes}; leave it out"
            )
        wrong = ~((labels >= 0) & (labels < torch.inf))  # true for NaN as well
        if wrong.any():
            raise ValueError(
                f"soft labels hold {labels[wrong][0].item()}; they must be finite and not negative"
            )
        targets = labels
    else:
        targets = one_hot(
            labels, num_classes if num_classes is not None else max(1, int(labels.max()) + 1)
        )
    if not targets.any():
        raise ValueError(
            f"none of the {len(labels)} examples has a label to propagate; give at least one"
        )
    return targets


def _check(
    features: Tensor, labels: Tensor, k: int, mu: float, tolerance: float, max_iterations: int
) -> None:
    check_tensors(features=features, labels=labels)
    if features.ndim != 2 or not features.is_floating_point() or 0 in features.shape:
        raise ValueError(
            f"features of shape {tuple(features.shape)} and {features.dtype} must be a floating-point matrix (N, D) "
            "with at least one row and column; convert them with .float()"
        )
    if not features.isfinite().all():
        row = int((~features.isfinite()).any(dim=1).nonzero()[0])
        raise ValueError(
            f"features hold NaN or infinity, first in row {row}; leave such examples out"
        )
    if labels.ndim not in (1, 2) or labels.is_floating_point() != (labels.ndim == 2):
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} must be (N,) whole class numbers or (N, C) "
            "floating-point soft targets"
        )
    if len(labels) != len(features):
        raise ValueError(
            f"{len(features)} rows of features but {len(labels)} labels; there must be as many"
        )
    check_whole("k", k, 1)
    check_number("mu", mu, 1e-6, 1e12, cure="; 0.02 is customary")
    if check_number("tolerance", tolerance, 0, 1, cure="; 1e-6 is customary") in (0, 1):
        raise ValueError(f"tolerance={tolerance} must lie between 0 and 1; 1e-6 is customary")
    check_whole("max_iterations", max_iterations, 1)
