"""The NCR term on a CUDA device in about fifteen launches: the formulas of `_ncr_fast` in Triton.

Small batches wait for launches, not for arithmetic, so one program computes a whole row. All sums
go through logarithms. Neighbors receive their gradients by atomic additions in no fixed order.
float32 only.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearsay.losses._ncr_fast import TWICE, Choices
from nearsay.neighbors import Identity, nearest

# Numbers that a program works on at a time.
TILE = 4096
# Similarities up to this are rounding, as in `neighbors.clip_`.
_EPSILON = tl.constexpr(1.1920928955078125e-07)
# The smallest normal float32, as in `neighbors.normalize`.
_TINY = tl.constexpr(1.1754943508222875e-38)


class TritonRows(torch.autograd.Function):
    """What `_ncr_fast.ncr_rows` computes, for tensors on a CUDA device."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        features: Tensor,
        pool_logits: Tensor | None,
        pool_features: Tensor | None,
        who: Identity | None,
        choices: Choices,
    ) -> tuple[Tensor, Tensor]:
        """(B,) divergences and (B,) bool: rows without neighbors."""
        num_rows, num_classes = logits.shape
        key_logits, key_features = logits, features
        if pool_logits is not None and pool_features is not None:
            key_logits = torch.cat([logits, pool_logits])
            key_features = torch.cat([features, pool_features])
        key_logits, key_features = key_logits.contiguous(), key_features.contiguous()
        num_keys, num_features = key_features.shape
        keys, lengths = torch.empty_like(key_features), key_features.new_empty(num_keys)
        _normalize[(num_keys,)](
            key_features, keys, lengths, num_features, BLOCK=_block(num_features)
        )
        similarities, positions = nearest(
            keys[:num_rows], keys, choices.k, who, clip=_clip_by_triton
        )
        similarities, positions = similarities.contiguous(), positions.contiguous()

        scale = 1 / choices.temperature
        sums = key_features.new_empty(num_keys, 2)
        _log_sum_exp[(num_keys,)](key_logits, sums, scale, num_classes, BLOCK=_block(num_classes))
        rows, totals = key_features.new_empty(2, num_rows)
        log_q, is_alone = (
            torch.empty_like(logits),
            torch.empty(num_rows, dtype=torch.bool, device=logits.device),
        )
        sizes = (num_classes, similarities.shape[1])
        _forward[(num_rows,)](
            key_logits, sums, similarities, positions, log_q, rows, totals, is_alone, scale, *sizes,
            **_tiles(*sizes), IS_PAPER=choices.variant == "paper",
        )  # fmt: skip
        ctx.choices = choices
        ctx.save_for_backward(
            key_logits, sums, log_q, keys, lengths, similarities, positions, totals
        )
        ctx.mark_non_differentiable(is_alone)
        return rows, is_alone

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of both logits and both features."""
        # With create_graph=True autograd would take this gradient for a constant.
        if torch.is_grad_enabled():
            raise RuntimeError(TWICE)
        key_logits, sums, log_q, keys, lengths, similarities, positions, totals = ctx.saved_tensors
        num_rows, num_classes = log_q.shape
        to_logits, to_features, to_pool_logits, to_pool_features = ctx.needs_input_grad[:4]
        num_receivers = len(keys) if to_pool_logits or to_pool_features else num_rows
        scale = 1 / ctx.choices.temperature
        num_neighbors = similarities.shape[1]
        sizes = (num_classes, num_neighbors)
        grad_logits = torch.zeros_like(key_logits[:num_receivers])
        grad_similarities = torch.empty_like(similarities)
        _backward[(num_rows,)](
            key_logits, sums, similarities, positions, log_q, upstream.contiguous(), totals,
            grad_logits, grad_similarities, scale, num_receivers, *sizes, **_tiles(*sizes),
            IS_PAPER=ctx.choices.variant == "paper",
        )  # fmt: skip
        _through_softmax[(num_receivers,)](
            key_logits, sums, grad_logits, scale, num_classes, BLOCK=_block(num_classes)
        )
        grad_keys = None
        if to_features or to_pool_features:
            grad_keys = torch.zeros_like(keys[:num_receivers])
            # A single neighbor has the weight 1 at any similarity: no gradient.
            if num_neighbors > 1:
                num_features = keys.shape[1]
                width = min(256, _block(num_features))
                _to_features[(num_rows, triton.cdiv(num_features, width))](
                    keys, grad_similarities, positions, grad_keys, num_receivers, num_features,
                    num_neighbors, BLOCK_K=min(_block(num_neighbors), TILE // width), BLOCK_D=width,
                )  # fmt: skip
                _through_norm[(num_receivers,)](
                    keys, lengths, grad_keys, num_features, BLOCK=_block(num_features)
                )
        return (
            grad_logits[:num_rows] if to_logits else None,
            grad_keys[:num_rows] if grad_keys is not None and to_features else None,
            grad_logits[num_rows:] if to_pool_logits else None,
            grad_keys[num_rows:] if grad_keys is not None and to_pool_features else None,
            None,
            None,
        )


def _block(size: int) -> int:
    return min(TILE, 1 << (size - 1).bit_length())


def _tiles(num_classes: int, num_neighbors: int) -> dict[str, int]:
    width = min(512, _block(num_classes))
    return {"BLOCK_C": width, "BLOCK_K": min(_block(num_neighbors), TILE // width)}


def _clip_by_triton(similarities: Tensor, who: Identity | None, start: int) -> None:
    """`neighbors.clip_` in one launch."""
    num_rows, num_keys = similarities.shape
    # In place of tables that the program does not read.
    unused = similarities if who is None else who.queries
    queries, keys = (
        (unused, unused) if who is None else (who.queries.contiguous(), who.keys.contiguous())
    )
    has_partners = (
        who is not None and who.query_partners is not None and who.key_partners is not None
    )
    partners = (unused, unused)
    if who is not None and who.query_partners is not None and who.key_partners is not None:
        partners = who.query_partners.contiguous(), who.key_partners.contiguous()
    block = min(1024, _block(num_keys))
    _clip[(num_rows, triton.cdiv(num_keys, block))](
        similarities, queries, keys, *partners, start, num_keys,
        HAS_INDICES=who is not None, HAS_PARTNERS=has_partners, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _normalize(features, units, lengths, D, BLOCK: tl.constexpr):
    """`neighbors.normalize` of one row: by its maximum first, then by its length."""
    row = tl.program_id(0).to(tl.int64)
    largest = 0.0
    # NaN if anything is not finite: a maximum may pass over NaN.
    poison = 0.0
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(features + row * D + columns, mask=columns < D, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=0))
        poison += tl.sum(x * 0.0, axis=0)
    is_zero = (largest < _TINY) & (poison == 0.0)
    largest = tl.where(is_zero, float("inf"), largest) + poison
    squares = 0.0
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(features + row * D + columns, mask=columns < D, other=0.0) / largest
        squares += tl.sum(x * x, axis=0)
    length = tl.where(is_zero, 1.0, tl.sqrt(squares))
    tl.store(lengths + row, length * largest)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(features + row * D + columns, mask=columns < D, other=0.0)
        tl.store(units + row * D + columns, x / largest / length, mask=columns < D)


@triton.jit
def _clip(
    similarities, queries, keys, query_partners, key_partners, start, M,
    HAS_INDICES: tl.constexpr, HAS_PARTNERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Similarities of one query to a block of keys: 0 if forbidden or not positive."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < M
    s = tl.load(similarities + row * M + columns, mask=inside, other=0.0)
    if HAS_INDICES:
        query = tl.load(queries + start + row)
        key = tl.load(keys + columns, mask=inside, other=-1)
        is_forbidden = (key == query) | (key == -1)
        if HAS_PARTNERS:
            is_forbidden = is_forbidden | (key == tl.load(query_partners + start + row))
            is_forbidden = is_forbidden | (
                tl.load(key_partners + columns, mask=inside, other=-1) == query
            )
    else:
        is_forbidden = columns == start + row
    # The comparison is false for NaN, which stays.
    s = tl.where(is_forbidden | (s <= _EPSILON), 0.0, s)
    tl.store(similarities + row * M + columns, s, mask=inside)


@triton.jit
def _log_sum_exp(logits, sums, scale, C, BLOCK: tl.constexpr):
    """The largest logit of a row and the logarithm of the rest: their sum would lose digits."""
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    for start in range(0, C, BLOCK):
        classes = start + tl.arange(0, BLOCK)
        z = tl.load(logits + row * C + classes, mask=classes < C, other=-float("inf"))
        higher = tl.maximum(largest, tl.max(z, axis=0))
        total = total * tl.exp((largest - higher) * scale) + tl.sum(
            tl.exp((z - higher) * scale), axis=0
        )
        largest = higher
    tl.store(sums + 2 * row, largest)
    tl.store(sums + 2 * row + 1, tl.log(total))


@triton.jit
def _log_softmax(logits, sums, row, classes, scale, C):
    """log p of some classes of one row."""
    z = tl.load(logits + row * C + classes, mask=classes < C, other=0.0)
    return (z - tl.load(sums + 2 * row)) * scale - tl.load(sums + 2 * row + 1)


@triton.jit
def _divergence(p, q, log_ratio):
    """Terms of KL(p ‖ q), as in `_ncr_fast.divergence`; a series where exp would cancel."""
    r = log_ratio
    series = r * r * (0.5 - r * (1 / 6 - r * (1 / 24 - r * (1 / 120 - r / 720))))
    near = p * tl.where(tl.abs(r) < 0.3, series, r - 1.0 + tl.exp(-tl.maximum(r, -1.0)))
    return tl.where(r > -1.0, near, p * (r - 1.0) + q)


@triton.jit
def _neighbor_tile(logits, sums, similarities, positions, row, ks, classes, log_total, scale, C, K):
    """log(w_ij p_j), one row for each neighbor, −∞ where there is none; s and positions."""
    is_place = ks < K
    s = tl.load(similarities + row * K + ks, mask=is_place, other=0.0)
    j = tl.load(positions + row * K + ks, mask=is_place, other=0)
    z = tl.load(
        logits + j[:, None] * C + classes[None, :],
        mask=is_place[:, None] & (classes < C)[None, :],
        other=0.0,
    )
    peak = tl.load(sums + 2 * j, mask=is_place, other=0.0)
    shift = tl.log(s) - log_total - tl.load(sums + 2 * j + 1, mask=is_place, other=0.0)
    return (z - peak[:, None]) * scale + shift[:, None], s, j


@triton.jit
def _forward(
    logits, sums, similarities, positions, log_q_out, rows, totals, is_alone_out, scale, C, K,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, IS_PAPER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        total += tl.sum(tl.load(similarities + row * K + ks, mask=ks < K, other=0.0), axis=0)
    # The comparison is false for NaN, so that NaN reaches the loss.
    is_alone = total <= 0.0
    log_total = tl.log(tl.where(is_alone, 1.0, total))
    loss = 0.0
    for first in range(0, C, BLOCK_C):
        classes = first + tl.arange(0, BLOCK_C)
        log_p = _log_softmax(logits, sums, row, classes, scale, C)
        largest = tl.full([BLOCK_C], -float("inf"), tl.float32)
        sum_exp = tl.zeros([BLOCK_C], tl.float32)
        for start in range(0, K, BLOCK_K):
            ks = start + tl.arange(0, BLOCK_K)
            v, _, _ = _neighbor_tile(
                logits, sums, similarities, positions, row, ks, classes, log_total, scale, C, K
            )
            # A running logsumexp over the neighbors, rescaled whenever the maximum rises.
            higher = tl.maximum(largest, tl.max(v, axis=0))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            sum_exp = sum_exp * tl.exp(largest - base) + tl.sum(tl.exp(v - base[None, :]), axis=0)
            largest = higher
        log_q = tl.where(
            is_alone, log_p, tl.where(largest == -float("inf"), 0.0, largest) + tl.log(sum_exp)
        )
        tl.store(log_q_out + row * C + classes, log_q, mask=classes < C)
        if IS_PAPER:
            terms = _divergence(tl.exp(log_p), tl.exp(log_q), log_p - log_q)
        else:
            terms = _divergence(tl.exp(log_q), tl.exp(log_p), log_q - log_p)
        loss += tl.sum(tl.where(classes < C, terms, 0.0), axis=0)
    if not IS_PAPER:
        loss = loss / (scale * scale)
    tl.store(rows + row, loss)
    tl.store(totals + row, total)
    tl.store(is_alone_out + row, is_alone)


@triton.jit
def _own_and_flow(logits, sums, log_q_in, row, classes, upstream, scale, C, IS_PAPER: tl.constexpr):
    """own, flow and log q of `_ncr_fast`, for some classes of one row."""
    inside = classes < C
    log_p = _log_softmax(logits, sums, row, classes, scale, C)
    log_q = tl.load(log_q_in + row * C + classes, mask=inside, other=0.0)
    p, q, r = tl.exp(log_p), tl.exp(log_q), log_p - log_q
    series = p * r * (-1.0 + r * (0.5 - r * (1 / 6 - r * (1 / 24 - r * (1 / 120 - r / 720)))))
    # A series where the exponentials would cancel.
    difference = tl.where(tl.abs(r) < 0.3, series, q - p)
    if IS_PAPER:
        flow = upstream * difference
        own = upstream * p * r
    else:
        flow = -upstream * q * r / (scale * scale)
        own = -upstream * difference / (scale * scale)
    return tl.where(inside, own, 0.0), tl.where(inside, flow, 0.0), log_q


@triton.jit
def _backward(
    logits, sums, similarities, positions, log_q_in, upstreams, totals, grad_log_p,
    grad_similarities, scale, R, C, K,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, IS_PAPER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(totals + row)
    is_alone = total <= 0.0
    upstream = tl.where(is_alone, 0.0, tl.load(upstreams + row))
    log_total = tl.log(tl.where(is_alone, 1.0, total))
    whole_flow = 0.0
    for first in range(0, C, BLOCK_C):
        classes = first + tl.arange(0, BLOCK_C)
        own, flow, _ = _own_and_flow(
            logits, sums, log_q_in, row, classes, upstream, scale, C, IS_PAPER
        )
        whole_flow += tl.sum(flow, axis=0)
        tl.atomic_add(grad_log_p + row * C + classes, own, mask=classes < C, sem="relaxed")
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        is_place = ks < K
        s = tl.load(similarities + row * K + ks, mask=is_place, other=0.0)
        grad_log_w = tl.zeros([BLOCK_K], tl.float32)
        for first in range(0, C, BLOCK_C):
            classes = first + tl.arange(0, BLOCK_C)
            inside = classes < C
            _, flow, log_q = _own_and_flow(
                logits, sums, log_q_in, row, classes, upstream, scale, C, IS_PAPER
            )
            v, _, j = _neighbor_tile(
                logits, sums, similarities, positions, row, ks, classes, log_total, scale, C, K
            )
            # flow_i r_ij: summed over classes for the weight, added to log p of the neighbor.
            share = tl.exp(v - log_q[None, :]) * flow[None, :]
            grad_log_w += tl.sum(share, axis=1)
            receives = (is_place & (j < R) & (s != 0.0))[:, None] & inside[None, :]
            tl.atomic_add(
                grad_log_p + j[:, None] * C + classes[None, :], share, mask=receives, sem="relaxed"
            )
        # Through w = s / Σ s. Where s is 0, the quotient is not used.
        grad = (grad_log_w - s / total * whole_flow) / s
        tl.store(grad_similarities + row * K + ks, tl.where(s == 0.0, 0.0, grad), mask=is_place)


@triton.jit
def _through_softmax(logits, sums, grad, scale, C, BLOCK: tl.constexpr):
    """In place from ∂L/∂log p to ∂L/∂z = (g − p Σ g) / T, for one row."""
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, C, BLOCK):
        classes = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(grad + row * C + classes, mask=classes < C, other=0.0), axis=0)
    for start in range(0, C, BLOCK):
        classes = start + tl.arange(0, BLOCK)
        inside = classes < C
        p = tl.exp(_log_softmax(logits, sums, row, classes, scale, C))
        g = tl.load(grad + row * C + classes, mask=inside, other=0.0)
        tl.store(grad + row * C + classes, (g - p * total) * scale, mask=inside)


@triton.jit
def _to_features(
    keys, grad_similarities, positions, grad, R, D, K, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    """From similarities to both directions: each receives the other, times the gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    own = tl.load(keys + row * D + columns, mask=inside, other=0.0)
    gathered = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        is_place = ks < K
        g = tl.load(grad_similarities + row * K + ks, mask=is_place, other=0.0)
        j = tl.load(positions + row * K + ks, mask=is_place, other=0)
        where = j[:, None] * D + columns[None, :]
        theirs = tl.load(keys + where, mask=is_place[:, None] & inside[None, :], other=0.0)
        gathered += tl.sum(g[:, None] * theirs, axis=0)
        receives = (is_place & (j < R) & (g != 0.0))[:, None] & inside[None, :]
        tl.atomic_add(grad + where, g[:, None] * own[None, :], mask=receives, sem="relaxed")
    tl.atomic_add(grad + row * D + columns, gathered, mask=inside, sem="relaxed")


@triton.jit
def _through_norm(units, lengths, grad, D, BLOCK: tl.constexpr):
    """In place from directions to features: without the part along the row, over its length."""
    row = tl.program_id(0).to(tl.int64)
    along = 0.0
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        u = tl.load(units + row * D + columns, mask=columns < D, other=0.0)
        along += tl.sum(u * tl.load(grad + row * D + columns, mask=columns < D, other=0.0), axis=0)
    length = tl.load(lengths + row)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < D
        u = tl.load(units + row * D + columns, mask=inside, other=0.0)
        g = tl.load(grad + row * D + columns, mask=inside, other=0.0)
        tl.store(grad + row * D + columns, (g - u * along) / length, mask=inside)
