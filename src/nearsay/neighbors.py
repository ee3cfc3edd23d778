"""Nearest neighbors by cosine similarity: inside a batch, over a bank, or in chunks over a data set."""

from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay.core import PADDING

CHUNK_ROWS = {"cpu": 256, "cuda": 4096}  # enough to be fast; from there on memory is linear in the number of keys
CHUNK_NUMBERS = 2**26  # and at most 256 MB of float32 similarities at a time


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
    for start in range(0, len(queries), rows):
        similarities = cosines(queries[start : start + rows], keys)
        clip(similarities, who, start)
        chunks.append(_largest(similarities, k))
    if len(chunks) == 1:
        return chunks[0]
    return Neighbors(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, M) products of rows of length 1 in full precision: TF32 or bfloat16 would find other neighbors."""
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
        return Neighbors(similarities, torch.arange(num_keys, device=similarities.device).expand_as(similarities))
    if k == 1:  # several times faster than topk
        return Neighbors(*similarities.max(dim=1, keepdim=True))
    return Neighbors(*similarities.topk(k, dim=1, sorted=False))
