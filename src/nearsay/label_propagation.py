"""Transductive label propagation over a graph of neighbors (Eq. 2 of the paper).

It is the method that NCR developed from (Zhou et al., Learning with Local and Global Consistency,
NeurIPS 2003). In Eq. 2 every pair occurs twice. So with S = D^-½ W D^-½ the smoothness term is
tr Pᵀ(I − S)P, the gradient is μ(P − Y) + 2(I − S)P, and the minimum solves
(I − αS) P = (1 − α) Y with α = 2 / (2 + μ). An example without edges has no smoothness term, so
there P = Y.
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
    """S = D^-½ W D^-½ as a sparse matrix by rows (CSR), with E directed edges."""

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
    """Propagate labels over the graph of nearest neighbors: (N, C) scores, the minimum of Eq. 2.

    Two examples share an edge if one is among the k nearest of the other by cosine similarity, and
    if that similarity, the weight of the edge, is positive. Scores are not negative. The argmax of
    a row is its propagated label, a row divided by its sum is a distribution, and a row that no
    label reaches is zero.

    >>> import torch
    >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> propagate_labels(features, torch.tensor([0, -1, 1, -1]), k=1).argmax(dim=1).tolist()
    [0, 0, 1, 1]

    Args:
        features: (N, D) floating point of any length. 16-bit ones are computed in float32.
        labels: (N,) class numbers with −1 for unlabeled, or (N, C) soft targets with zeros for
            unlabeled.
        num_classes: the default is the largest label plus one, or the width of the soft targets.
        k: neighbors of each example; with fewer others, all of them.
        mu: weight of the given labels against smoothness. A small value trusts the neighbors; the
            default is the usual α = 0.99.
        tolerance: of the residual norm of each class, relative to its right-hand side. Lower it (in
            float64) if a handful of labels must reach very many examples.
        max_iterations: of conjugate gradients; if they do not suffice, there is a warning.

    Raises:
        ValueError: if an argument does not fit; the message names it.
    """
    _check(features, labels, k, mu, tolerance, max_iterations)
    # Check the labels before the search, which takes time.
    targets = _targets(labels, num_classes)  # (N, C)
    directions, _ = normalize(features.to(torch.promote_types(features.dtype, torch.float32)))
    neighbors = nearest(directions, directions, k, None)
    return propagate_over_graph(
        neighbors, targets, mu=mu, tolerance=tolerance, max_iterations=max_iterations
    )


def propagate_over_graph(
    neighbors: Neighbors,
    labels: Tensor,
    num_classes: int | None = None,
    *,
    mu: float = 0.02,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> Tensor:
    """`propagate_labels` over the result of an exact search among N examples."""
    targets = _targets(labels, num_classes).to(neighbors.similarities)  # (N, C)
    graph = _graph(neighbors)
    # 1 − α, without the loss of digits of a difference.
    own_share = mu / (2 + mu)
    scores = _solve(graph, 2 / (2 + mu), own_share * targets, tolerance, max_iterations)
    # The minimum is never negative, but its approximation may be.
    return scores.clamp(min=0).where(graph.is_connected[:, None], targets)


def _solve(
    graph: _Graph, alpha: float, target: Tensor, tolerance: float, max_iterations: int
) -> Tensor:
    """(I − αS)⁻¹ target, by conjugate gradients on all classes at once.

    Rows that no label reaches stay exactly 0.
    """
    # Each class is scaled to the largest entry 1, so that squares neither overflow nor vanish.
    size = target.amax(dim=0)  # (C,)
    target = target / size.where(size > 0, 1.0)
    solution = torch.zeros_like(target)  # (N, C)
    residual = target.clone()
    direction = target.clone()
    squares = target.square().sum(dim=0)  # (C,)
    enough = squares * tolerance**2
    for _ in range(max_iterations):
        # Classes that have not converged; a class without labels has from the start.
        is_open = squares > enough
        if not is_open.any():
            return solution * size
        # One step along the direction, as long as the quadratic form falls, for each class alone.
        image = direction - alpha * _product(graph, direction)
        step = (squares / (direction * image).sum(dim=0)).where(is_open, 0.0)  # (C,)
        solution.addcmul_(direction, step)
        residual.addcmul_(image, step, value=-1)
        # The next direction is conjugate to the last one.
        before, squares = squares, residual.square().sum(dim=0)
        direction = residual + direction * (squares / before).where(is_open, 0.0)
    is_open = squares > enough
    if is_open.any():
        worst = (squares[is_open] / enough[is_open]).max().sqrt().item() * tolerance
        warnings.warn(
            f"label propagation is less exact than tolerance={tolerance:g}: the relative residual "
            f"is {worst:.1e} after max_iterations={max_iterations}. Raise max_iterations or mu.",
            # The caller of propagate_labels, which torch.no_grad wraps.
            stacklevel=5,
        )
    return solution * size


def _product(graph: _Graph, rows: Tensor) -> Tensor:
    """(N, C) S @ rows, as sums of bags: ten times faster on a CPU than torch.sparse."""
    return functional.embedding_bag(
        graph.columns,
        rows,
        graph.starts,
        mode="sum",
        per_sample_weights=graph.weights,
        include_last_offset=True,
    )


def _graph(neighbors: Neighbors) -> _Graph:
    """The normalized symmetric graph W = max(W, Wᵀ) of the neighbors."""
    similarities, positions = neighbors
    num_rows = len(positions)
    rows = torch.arange(num_rows, device=positions.device)[:, None].expand_as(positions)
    is_edge = similarities > 0
    rows, columns, weights = rows[is_edge], positions[is_edge], similarities[is_edge]
    # One number per unordered pair, so that W is symmetric to the last bit.
    keys = torch.minimum(rows, columns) * num_rows + torch.maximum(rows, columns)
    pairs, pair = torch.unique(keys, return_inverse=True)
    weights = weights.new_zeros(len(pairs)).scatter_reduce(0, pair, weights, "amax")
    low, high = pairs // num_rows, pairs % num_rows
    # Both directions of each pair, sorted by row.
    rows, order = torch.cat([low, high]).sort(stable=True)  # (E,)
    columns, weights = torch.cat([high, low])[order], weights.repeat(2)[order]
    degrees = weights.new_zeros(num_rows).index_add_(0, rows, weights)  # (N,)
    # This is infinite for rows without edges, where it is never used.
    scales = degrees.rsqrt()
    starts = functional.pad(torch.bincount(rows, minlength=num_rows).cumsum(dim=0), (1, 0))
    return _Graph(starts, columns, weights * scales[rows] * scales[columns], degrees > 0)


def _targets(labels: Tensor, num_classes: int | None) -> Tensor:
    """(N, C) targets on the CPU, where labels out of range are refused."""
    labels = labels.detach().cpu()
    if labels.ndim == 2:
        if num_classes not in (None, labels.shape[1]):
            raise ValueError(
                f"num_classes must be {labels.shape[1]} for these soft labels, got {num_classes}."
            )
        # A comparison with NaN is false.
        is_valid = (labels >= 0) & (labels < torch.inf)
        if not is_valid.all():
            value = labels[~is_valid][0].item()
            raise ValueError(f"labels must be finite and 0 or more, got {value}.")
        targets = labels
    else:
        if num_classes is None:
            num_classes = max(1, int(labels.max()) + 1)
        targets = one_hot(labels, num_classes)
    if not targets.any():
        raise ValueError(f"labels must have at least one label, got {len(labels)} unlabeled.")
    return targets


def _check(
    features: Tensor, labels: Tensor, k: int, mu: float, tolerance: float, max_iterations: int
) -> None:
    check_tensors(features=features, labels=labels)
    if features.ndim != 2 or not features.is_floating_point() or 0 in features.shape:
        raise ValueError(
            "features must be a floating-point matrix (N, D) that is not empty, "
            f"got {tuple(features.shape)} of {features.dtype}. Use .float()."
        )
    if not features.isfinite().all():
        row = int((~features.isfinite()).any(dim=1).nonzero()[0])
        raise ValueError(f"features must be finite, got NaN or infinity in row {row}.")
    if labels.ndim not in (1, 2) or labels.is_floating_point() != (labels.ndim == 2):
        raise ValueError(
            "labels must be (N,) class numbers or (N, C) floating-point soft targets, "
            f"got {tuple(labels.shape)} of {labels.dtype}."
        )
    if len(labels) != len(features):
        raise ValueError(
            f"labels must have one row for each of the {len(features)} features, got {len(labels)}."
        )
    check_whole("k", k, 1)
    check_number("mu", mu, 1e-6, 1e12)
    if check_number("tolerance", tolerance, 0, 1) in (0, 1):
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}. Try 1e-6.")
    check_whole("max_iterations", max_iterations, 1)
