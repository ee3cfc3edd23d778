"""Nearest neighbors by cosine similarity, in a batch, a memory bank or a data set.

`nearest` compares everything with everything, in chunks. `nearest_others` searches a data set, from
200 000 rows on a CPU with an approximate index.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearsay.batch import PADDING

# Queries at a time: enough to be fast, and memory stays linear in the number of keys.
CHUNK_ROWS = {"cpu": 256, "cuda": 4096}
# At most 256 MB of float32 similarities at a time.
CHUNK_NUMBERS = 2**26
# From this number of rows on, an index is faster than comparing all rows on a CPU.
APPROXIMATE_FROM = 200_000
# Rows of the sample that measures the recall of the index.
_SAMPLED = 1000
# Cells that a query searches: the fewest that find this share of the true neighbors.
_PROBED, _ENOUGH = (8, 16, 32), 0.95
# Iterations of k-means for the cells.
_ROUNDS = 10
# Numbers in memory at a time.
_CHUNK = 2**25

_precision_lock = Lock()


class Neighbors(NamedTuple):
    """The K most similar keys of B queries. Similarity 0 is an empty place."""

    similarities: Tensor  # (B, K) not negative, in no particular order
    positions: Tensor  # (B, K) int64, rows of the keys


class Identity(NamedTuple):
    """The example of each query and key, so that no example is its own neighbor."""

    queries: Tensor  # (B,) int64
    keys: Tensor  # (M,) int64; −1 is padding, which is never a neighbor
    query_partners: Tensor | None = None  # (B,) examples that mixup added; no neighbors either
    key_partners: Tensor | None = None  # (M,)


def normalize(features: Tensor) -> tuple[Tensor, Tensor]:
    """(B, D) rows of length 1, and their (B, 1) lengths.

    A row with no entry above the smallest normal number becomes zeros with an infinite length, so
    that anything divided by its length vanishes.
    """
    # Divide by the largest entry first, so that squares neither overflow nor underflow. The scale
    # is a constant for the gradient, as it cancels out.
    fixed = features.detach()
    largest = torch.maximum(fixed.amax(dim=1, keepdim=True), -fixed.amin(dim=1, keepdim=True))
    # This is false for NaN, which must stay visible.
    is_zero = largest < torch.finfo(features.dtype).tiny
    largest = largest.masked_fill(is_zero, torch.inf)
    scaled = features / largest
    length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True).masked_fill(is_zero, 1)
    return scaled / length, length * largest


def clip_(similarities: Tensor, who: Identity | None, start: int) -> None:
    """Set forbidden and non-positive similarities to 0, in place.

    The (rows, M) similarities belong to the queries from `start` on.
    """
    torch.threshold_(similarities, torch.finfo(similarities.dtype).eps, 0)
    if who is None:
        similarities.diagonal(start).zero_()
    else:
        similarities.masked_fill_(forbidden(who, start, start + len(similarities)), 0)


def nearest(
    queries: Tensor,
    keys: Tensor,
    k: int | None,
    who: Identity | None,
    clip: Callable[[Tensor, Identity | None, int], None] = clip_,
) -> Neighbors:
    """The k nearest keys of every query, both (·, D) of length 1; `k=None` returns all.

    Without `who`, query i is key i. The example itself, its partners, padding, and keys with a
    similarity that is negative or within rounding of 0 get similarity 0.
    """
    rows = min(CHUNK_ROWS.get(queries.device.type, 256), max(1, CHUNK_NUMBERS // max(1, len(keys))))
    chunks = []
    # Without queries there is one chunk of no rows, which has the right shape.
    for start in range(0, max(1, len(queries)), rows):
        similarities = cosines(queries[start : start + rows], keys)  # (rows, M)
        clip(similarities, who, start)
        chunks.append(_largest(similarities, k))
    if len(chunks) == 1:
        return chunks[0]
    return Neighbors(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


class SearchResult(NamedTuple):
    """The neighbors within a data set."""

    neighbors: Neighbors  # (N, K)
    recall: float | None  # of an approximate search, on a sample; None for an exact one


def nearest_others(features: Tensor, k: int, *, approximate: bool | None = None) -> SearchResult:
    """The k nearest other rows of every row of (N, D), of any length.

    `approximate=None` searches exactly, but with an index of faiss from 200 000 rows on a CPU.
    """
    if approximate is None:
        approximate = features.device.type == "cpu" and len(features) >= APPROXIMATE_FROM
    if approximate:
        return _search_index(features, min(k, len(features)))
    # Normalize in chunks, so that a copy in higher precision never exists as a whole twice.
    units = torch.empty_like(features, dtype=torch.promote_types(features.dtype, torch.float32))
    for rows in _chunks(features):
        units[rows] = normalize(features[rows].to(units.dtype))[0]
    return SearchResult(nearest(units, units, k, None), None)


def _search_index(features: Tensor, k: int) -> SearchResult:
    """Search with an inverted file in half precision; an empty place has similarity 0."""
    index = _make_index(features)
    recall = _choose_probes(index, features, k)
    similarities = torch.empty(len(features), k)
    positions = torch.empty(len(features), k, dtype=torch.int64)
    for rows in _chunks(features):
        # One more than k, because the row itself is usually among them.
        cosines_found, keys_found = index.search(_units(features[rows]), k + 1)
        values, keys = torch.from_numpy(cosines_found), torch.from_numpy(keys_found)
        own = torch.arange(rows.start, rows.stop)[:, None]
        # faiss marks empty places with −1.
        is_empty = (keys < 0) | (keys == own) | (values <= 0)
        # In half precision a cosine may exceed 1.
        values = values.masked_fill(is_empty, 0).clamp(max=1)
        best = values.topk(k, dim=1)
        similarities[rows], positions[rows] = best.values, keys.clamp(min=0).gather(1, best.indices)
    neighbors = Neighbors(similarities.to(features.device), positions.to(features.device))
    return SearchResult(neighbors, recall)


def _make_index(features: Tensor) -> Any:
    """An index of faiss with about 4√N cells and rows in half precision."""
    num_rows, width = features.shape
    # faiss needs 39 rows per cell to learn the cells from.
    num_cells = max(1, min(round(4 * num_rows**0.5), num_rows // 40))
    faiss = _import_faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.index_factory(width, f"IVF{num_cells},SQfp16", faiss.METRIC_INNER_PRODUCT)
    # Half precision is enough without residuals, and queries need not be shifted for every cell.
    index.by_residual = False
    index.cp.niter = _ROUNDS
    index.train(_units(features[:: max(1, num_rows // (40 * num_cells))]))
    for rows in _chunks(features):
        index.add(_units(features[rows]))
    return index


def _choose_probes(index: Any, features: Tensor, k: int) -> float:
    """Set how many cells a query searches, by the recall on a sample, and return that recall."""
    sample = torch.linspace(0, len(features) - 1, min(_SAMPLED, len(features))).long()
    queries = torch.from_numpy(_units(features[sample]))
    best = Neighbors(torch.empty(len(sample), 0), torch.empty(len(sample), 0, dtype=torch.int64))
    # The true neighbors of the sample: keep the k best while the keys pass by in chunks.
    for rows in _chunks(features):
        keys = torch.from_numpy(_units(features[rows]))
        who = Identity(sample, torch.arange(rows.start, rows.stop))
        chunk = nearest(queries, keys, k, who)
        chosen = torch.cat([best.similarities, chunk.similarities], dim=1).topk(k, dim=1)
        positions = torch.cat([best.positions, chunk.positions + rows.start], dim=1)
        best = Neighbors(chosen.values, positions.gather(1, chosen.indices))
    is_there = best.similarities > 0
    for index.nprobe in _PROBED:
        candidates = torch.from_numpy(index.search(queries.numpy(), k + 1)[1])
        is_hit = (best.positions[:, :, None] == candidates[:, None, :]).any(dim=2) & is_there
        recall = is_hit.sum().item() / max(1, int(is_there.sum()))
        if recall >= _ENOUGH:
            break
    return recall


def _units(features: Tensor) -> Any:
    """(n, D) float32 array of length 1, as faiss needs it."""
    return np.ascontiguousarray(normalize(features.detach().cpu().float())[0].numpy())


def _chunks(features: Tensor) -> list[slice]:
    """Slices of the rows that hold at most `_CHUNK` numbers each."""
    num, rows = len(features), max(1, _CHUNK // features.shape[1])
    return [slice(start, min(start + rows, num)) for start in range(0, num, rows)]


def _import_faiss() -> Any:
    try:
        with warnings.catch_warnings():
            # The generated bindings of faiss use deprecated names.
            warnings.simplefilter("ignore", DeprecationWarning)
            import faiss  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ImportError(
            f"a search in {APPROXIMATE_FROM} rows or more needs faiss. Run "
            'pip install ".[audit]" in the clone, or use approximate=False, which is slower.'
        ) from error
    return faiss


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast lowers no precision on the device of the tensor."""
    device = tensor.device.type
    # Code that compiles has autocast, and torch 2.10 cannot compile the question.
    is_available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if is_available and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, M) products of rows of length 1, in full precision.

    TF32 or 16 bits would change which neighbors are nearest.
    """
    with autocast_off(queries):
        if torch.compiler.is_compiling() or queries.dtype == torch.float64:
            return queries @ keys.T
        backend: Any = torch.backends.cuda.matmul
        if queries.device.type == "cpu":
            backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        # The switch belongs to the process, not to the thread.
        with _precision_lock:
            before = backend.fp32_precision
            backend.fp32_precision = "ieee"
            try:
                return queries @ keys.T
            finally:
                backend.fp32_precision = before


def forbidden(who: Identity, start: int = 0, stop: int | None = None) -> Tensor:
    """(stop − start, M) bool: keys that must not be neighbors of a query."""
    queries = who.queries[start:stop, None]
    mask = (queries == who.keys) | (who.keys == PADDING)
    if who.query_partners is not None:
        mask |= who.query_partners[start:stop, None] == who.keys
    if who.key_partners is not None:
        mask |= queries == who.key_partners
    return mask


def _largest(similarities: Tensor, k: int | None) -> Neighbors:
    num_keys = similarities.shape[1]
    if k is None or k >= num_keys:
        positions = torch.arange(num_keys, device=similarities.device)
        return Neighbors(similarities, positions.expand_as(similarities))
    # max is several times faster than topk.
    if k == 1:
        return Neighbors(*similarities.max(dim=1, keepdim=True))
    return Neighbors(*similarities.topk(k, dim=1, sorted=False))
