"""Nearest neighbors by cosine similarity: inside a batch, over a bank, or over a data set, in chunks or by an index."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearsay.batch import PADDING

CHUNK_ROWS = {
    "cpu": 256,
    "cuda": 4096,
}  # enough to be fast; from there on memory is linear in the number of keys
CHUNK_NUMBERS = 2**26  # and at most 256 MB of float32 similarities at a time
APPROXIMATE_FROM = (
    200_000  # rows on a CPU: from there on an index is faster than looking at everybody
)
_SAMPLED = 1000  # rows that are compared with all others as well, to see what the index misses
_PROBED, _ENOUGH = (
    (8, 16, 32),
    0.95,
)  # cells that a query looks into: the fewest that hold that share of its neighbors
_ROUNDS = 10  # of learning the cells
_HELD = 2**25  # numbers held at a time


_precision_lock = Lock()


class Neighbors(NamedTuple):
    """The K most similar keys of every query; a similarity of 0 means that nobody stands in that place."""

    similarities: Tensor  # (B, K) not negative, in no particular order
    positions: Tensor  # (B, K) int64, rows of the keys


class Identity(NamedTuple):
    """Who queries and keys are, so that nobody is its own neighbor."""

    queries: Tensor  # (B,) int64
    keys: Tensor  # (M,) int64; −1 is nobody's neighbor
    query_partners: Tensor | None = None  # (B,) who was mixed into a query: not its neighbor either
    key_partners: Tensor | None = None  # (M,)


def normalize(features: Tensor) -> tuple[Tensor, Tensor]:
    """(B, D) rows of length 1, and their (B, 1) lengths.

    A row with no entry above the smallest normal number is a row of zeros of infinite length, so that what is divided
    by its length vanishes.
    """
    fixed = features.detach()
    largest = torch.maximum(fixed.amax(dim=1, keepdim=True), -fixed.amin(dim=1, keepdim=True))
    is_zero = largest < torch.finfo(features.dtype).tiny  # false for NaN, which shall be seen
    largest = largest.masked_fill(is_zero, torch.inf)
    scaled = features / largest  # by the maximum first, so that squares neither overflow nor vanish
    length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True).masked_fill(is_zero, 1)
    return scaled / length, length * largest


def clip_(similarities: Tensor, who: Identity | None, start: int) -> None:
    """Set to 0 what is forbidden or not positive, in the (rows, M) similarities of the queries from `start` on."""
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
    """The k nearest keys of every query, both (·, D) of length 1; `k=None` gives all.

    Without `who`, query i is key i, and that is all there is to know. Self, partners, padding and everybody whose
    similarity is negative, or too small to be told from rounding, count as similarity 0.
    """
    rows = min(CHUNK_ROWS.get(queries.device.type, 256), max(1, CHUNK_NUMBERS // max(1, len(keys))))
    chunks = []
    for start in range(
        0, max(1, len(queries)), rows
    ):  # of no query there is a table too, of no row
        similarities = cosines(queries[start : start + rows], keys)
        clip(similarities, who, start)
        chunks.append(_largest(similarities, k))
    if len(chunks) == 1:
        return chunks[0]
    return Neighbors(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


class Found(NamedTuple):
    """The neighbors within a data set, and how many of the true ones they are."""

    neighbors: Neighbors  # (N, K)
    recall: float | None  # of an approximate search, measured on a sample; None for an exact one


def nearest_others(features: Tensor, k: int, *, approximate: bool | None = None) -> Found:
    """The k nearest others of every row of (N, D), whatever their lengths.

    `approximate=None` searches exactly, except from 200 000 rows on a CPU on, where it asks an index of faiss.
    """
    if approximate is None:
        approximate = features.device.type == "cpu" and len(features) >= APPROXIMATE_FROM
    if approximate:
        return _ask_index(features, min(k, len(features)))
    units = torch.empty_like(features, dtype=torch.promote_types(features.dtype, torch.float32))
    for rows in _blocks(features):
        units[rows] = normalize(features[rows].to(units.dtype))[0]
    return Found(nearest(units, units, k, None), None)


def _ask_index(features: Tensor, k: int) -> Found:
    """What an inverted file of half precision finds; a place where nobody was found has similarity 0."""
    index = _make_index(features)
    recall = _look_far_enough(index, features, k)
    similarities, positions = (
        torch.empty(len(features), k),
        torch.empty(len(features), k, dtype=torch.int64),
    )
    for rows in _blocks(features):
        values, keys = (
            torch.from_numpy(each) for each in index.search(_units(features[rows]), k + 1)
        )
        own = torch.arange(rows.start, rows.stop)[:, None]
        values = values.masked_fill((keys < 0) | (keys == own) | (values <= 0), 0).clamp(
            max=1
        )  # half precision
        best = values.topk(k, dim=1)
        similarities[rows], positions[rows] = best.values, keys.clamp(min=0).gather(1, best.indices)
    return Found(Neighbors(similarities.to(features.device), positions.to(features.device)), recall)


def _make_index(features: Tensor) -> Any:  # of a module without types
    """About 4√N cells of rows in half precision, a part of the rows at a time."""
    num_rows, width = features.shape
    num_cells = max(
        1, min(round(4 * num_rows**0.5), num_rows // 40)
    )  # faiss wants 39 rows for each to learn from
    faiss = _faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.index_factory(width, f"IVF{num_cells},SQfp16", faiss.METRIC_INNER_PRODUCT)
    index.by_residual = (
        False  # half precision is enough, and a query needs not be shifted for every cell
    )
    index.cp.niter = _ROUNDS
    index.train(_units(features[:: max(1, num_rows // (40 * num_cells))]))
    for rows in _blocks(features):
        index.add(_units(features[rows]))
    return index


def _look_far_enough(index: Any, features: Tensor, k: int) -> float:
    """Let a query look into as many cells as hold nearly all true neighbors of some rows; the share that is found."""
    sample = torch.linspace(0, len(features) - 1, min(_SAMPLED, len(features))).long()
    queries = torch.from_numpy(_units(features[sample]))
    best = Neighbors(torch.empty(len(sample), 0), torch.empty(len(sample), 0, dtype=torch.int64))
    for rows in _blocks(features):
        keys = torch.from_numpy(_units(features[rows]))
        some = nearest(queries, keys, k, Identity(sample, torch.arange(rows.start, rows.stop)))
        chosen = torch.cat([best.similarities, some.similarities], dim=1).topk(k, dim=1)
        positions = torch.cat([best.positions, some.positions + rows.start], dim=1)
        best = Neighbors(chosen.values, positions.gather(1, chosen.indices))
    is_there = best.similarities > 0
    for index.nprobe in _PROBED:
        found = torch.from_numpy(index.search(queries.numpy(), k + 1)[1])
        is_found = (best.positions[:, :, None] == found[:, None, :]).any(dim=2) & is_there
        recall = is_found.sum().item() / max(1, int(is_there.sum()))
        if recall >= _ENOUGH:
            break
    return recall


def _units(features: Tensor) -> Any:  # an array
    """(n, D) float32 of length 1, as faiss takes them."""
    return np.ascontiguousarray(normalize(features.detach().cpu().float())[0].numpy())


def _blocks(features: Tensor) -> list[slice]:
    """So many rows at a time that as many numbers are held as may be."""
    num, rows = len(features), max(1, _HELD // features.shape[1])
    return [slice(start, min(start + rows, num)) for start in range(0, num, rows)]


def _faiss() -> Any:  # a module without types
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the generator of its bindings
            import faiss  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ImportError(
            f'neighbors among {APPROXIMATE_FROM} rows or more need faiss: pip install ".[audit]" in the clone, or ask '
            "with approximate=False, which takes longer"
        ) from error
    return faiss


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """Nothing inside is cast down, wherever autocast exists."""
    device = tensor.device.type
    # what compiles has autocast, and torch 2.10 cannot compile the question
    is_available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if is_available and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, M) products of rows of length 1 in full precision: TF32 or 16 bits would find other neighbors."""
    with autocast_off(queries):
        if torch.compiler.is_compiling() or queries.dtype == torch.float64:
            return queries @ keys.T
        on_cpu = queries.device.type == "cpu"
        backend = torch.backends.mkldnn.matmul if on_cpu else torch.backends.cuda.matmul  # type: ignore[attr-defined]
        with _precision_lock:  # the switch is the program's, not the thread's
            wished = backend.fp32_precision
            backend.fp32_precision = "ieee"
            try:
                return queries @ keys.T
            finally:
                backend.fp32_precision = wished


def forbidden(who: Identity, start: int = 0, stop: int | None = None) -> Tensor:
    """(stop − start, M) bool: the keys that a query must not have as neighbors."""
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
        return Neighbors(
            similarities, torch.arange(num_keys, device=similarities.device).expand_as(similarities)
        )
    if k == 1:  # several times faster than topk
        return Neighbors(*similarities.max(dim=1, keepdim=True))
    return Neighbors(*similarities.topk(k, dim=1, sorted=False))
