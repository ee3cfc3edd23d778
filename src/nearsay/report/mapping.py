"""Features as a map in the plane, of so many points as a page can show and a minute can place."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearsay import rng

MOST_POINTS = 3000
_SUSPECTS = 3  # of so many points, one at most is shown because it is suspicious
_COMPONENTS = 50  # that the features are reduced to first
_PERPLEXITY = 30.0
_STEPS = 500


def choose_points(suspects: Tensor, num: int) -> Tensor:
    """Positions that are on the map, in order: the first suspects, and of all others a draw that is always the same."""
    first = suspects[: MOST_POINTS // _SUSPECTS]
    is_other = torch.ones(num, dtype=torch.bool)
    is_other[first] = False
    others = is_other.nonzero()[:, 0]
    drawn = others[rng.shuffle(0, "report map", 0, others)[: MOST_POINTS - len(first)]]
    return torch.cat([first, drawn]).sort().values


def place(features: Tensor, chosen: Tensor) -> Tensor:
    """(n, 2) from 0 to 1: where the chosen rows of the (N, D) features lie, similar ones near each other.

    Principal components of their directions, then t-SNE, which starts from the first two of them and has one thread,
    so that the same features give the same map.
    """
    directions = torch.nn.functional.normalize(features[chosen].double(), dim=1)
    directions = directions - directions.mean(dim=0)
    values, axes = torch.linalg.eigh(directions.T @ directions / max(1, len(directions)))
    kept = axes[:, -_COMPONENTS:].flip(1)
    kept = (
        kept * kept.gather(0, kept.abs().argmax(dim=0)[None]).sign()
    )  # an axis has no direction of its own
    reduced = directions @ kept  # (n, ≤ 50)
    if reduced.shape[1] == 1:
        reduced = torch.cat([reduced, torch.zeros_like(reduced)], dim=1)
    if len(chosen) >= 10 and values[-1] > 1e-12:
        reduced = torch.from_numpy(_unfolded(reduced.float().numpy())).double()
    flat = reduced[:, :2] - reduced[:, :2].amin(dim=0)
    extent = flat.max() if len(flat) else torch.tensor(0.0)
    return flat / extent if extent > 0 else torch.full_like(flat, 0.5)


def _unfolded(
    reduced: np.ndarray[Any, np.dtype[np.float32]],
) -> np.ndarray[Any, np.dtype[np.float32]]:
    from sklearn.manifold import TSNE  # noqa: PLC0415  # two seconds, which only this page should cost
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415  # of scikit-learn

    start = reduced[:, :2] / max(float(reduced[:, 0].std()), 1e-12) * 1e-4
    perplexity = min(_PERPLEXITY, (len(reduced) - 1) / 3)
    with threadpool_limits(limits=1):
        method = TSNE(
            2, perplexity=perplexity, init=start, max_iter=_STEPS, random_state=0, n_jobs=1
        )
        found: np.ndarray[Any, np.dtype[np.float32]] = method.fit_transform(reduced)
    return found
