"""Eq. 3 of the paper with an analytic gradient: only (B, K) similarities are kept.

The plain version, `ncr._plain_rows`, is the specification. For a row i and its neighbors j:

    w_ij = s_ij / Σ_j s_ij      log p = log softmax(z / T)      q_i = Σ_j w_ij p_j
    d_i = log p_i − log q_i

    paper     L_i = Σ_c p_i d_i         own_i = p_i d_i           flow_i = q_i − p_i
    released  L_i = −T² Σ_c q_i d_i     own_i = T² (p_i − q_i)    flow_i = −T² q_i d_i

own = ∂L/∂log p_i and flow = q ∂L/∂q, each up to a part that the softmax cancels. The part is chosen
so that both vanish where p and q agree: otherwise rounding would drown the gradient there. With
r_ij = w_ij p_j / q_i, the part of neighbor j in q_i, a neighbor receives
∂L_i/∂log p_j = flow_i r_ij, and a similarity
∂L_i/∂s_ij = (Σ_c flow_i r_ij − w_ij Σ_c flow_i) / s_ij.
"""

import math
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from nearsay.neighbors import CHUNK_NUMBERS, Identity, autocast_off, nearest, normalize
from nearsay.validation import can_look

_CURE = 'Use nearsay.ncr(..., implementation="plain") instead of NCR or NCRLoss.'
TWICE = f"This gradient cannot be differentiated again (create_graph=True). {_CURE}"
_TRANSFORMED = f"torch.func cannot transform the fast version. {_CURE}"
# If more than one key in so many is a neighbor, a matrix product beats going through lists.
DENSE_SHARE = 8


class Choices(NamedTuple):
    """The hyper-parameters of the loss."""

    k: int | None
    temperature: float
    variant: Literal["paper", "released"]


def ncr_rows(
    logits: Tensor,  # (B, C) float32 or float64
    features: Tensor,  # (B, D)
    pool: tuple[Tensor, Tensor] | None,  # (M, C) logits and (M, D) features to search besides
    who: Identity | None,
    choices: Choices,
) -> tuple[Tensor, Tensor]:
    """(B,) divergences from the neighbors, and (B,) bool: rows without any, which have 0."""
    function = _function_for(logits)
    try:
        rows, is_alone = function.apply(logits, features, *(pool or (None, None)), who, choices)
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        raise RuntimeError(_TRANSFORMED) from error
    return rows, is_alone


def _function_for(logits: Tensor) -> Any:
    """The autograd function in Triton, where it can run and the order of sums need not be fixed."""
    is_for_triton = logits.device.type == "cuda" and logits.dtype == torch.float32
    if is_for_triton and not torch.compiler.is_compiling():
        function = _triton_function()
        if function is not None and not torch.are_deterministic_algorithms_enabled():
            return function
    return _Rows


@cache
def _triton_function() -> Any:
    try:
        return import_module("nearsay.losses._ncr_triton").TritonRows
    except ImportError:
        # torch for Windows has no Triton.
        return None


def divergence(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """(B,) KL(p ‖ q) from (B, C) distributions and log p − log q, exact where p and q nearly agree.

    The terms of Σ p log(p/q) have both signs and nearly cancel there. Those of
    Σ (p log(p/q) − p + q) have the same sum and are not negative.
    """
    # With d = log(p/q), p log(p/q) − p + q = p (d + expm1(−d)), which is exact for small d. For
    # very negative d the exponential would overflow.
    near = p * (log_ratio + torch.expm1(-log_ratio.clamp(min=-1)))
    far = p * (log_ratio - 1) + q
    return torch.where(log_ratio > -1, near, far).sum(dim=1)


def _difference(p: Tensor, q: Tensor, log_ratio: Tensor, small: Tensor | None) -> Tensor:
    """(B, C) q − p, exact where they nearly agree: in the rows `small`, or in all."""
    if small is None:
        return torch.where(log_ratio > -1, p * torch.expm1(-log_ratio.clamp(min=-1)), q - p)
    difference = q - p
    if len(small):
        difference[small] = _difference(p[small], q[small], log_ratio[small], None)
    return difference


def _divergence_where_it_pays(
    p: Tensor, q: Tensor, log_ratio: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`divergence`, and the rows that need its long sum; None if all took it.

    On a CPU, other rows take the short sum Σ p log(p/q), which is as good there and faster.
    """
    if not can_look(p):
        return divergence(p, q, log_ratio), None
    rows = (p * log_ratio).sum(dim=1)
    small = (rows < 1e-2).nonzero()[:, 0]
    if len(small):
        rows[small] = divergence(p[small], q[small], log_ratio[small])
    return rows, small


class _Rows(torch.autograd.Function):
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
        log_p = (logits / choices.temperature).log_softmax(dim=1)
        units, lengths = normalize(features)
        key_log_p, keys, key_lengths = log_p, units, lengths
        if pool_logits is not None and pool_features is not None:
            pool_units, pool_lengths = normalize(pool_features)
            key_log_p = torch.cat([log_p, (pool_logits / choices.temperature).log_softmax(dim=1)])
            keys, key_lengths = torch.cat([units, pool_units]), torch.cat([lengths, pool_lengths])

        similarities, positions = nearest(units, keys, choices.k, who)  # (B, K)
        total = similarities.sum(dim=1, keepdim=True)
        # The comparison is false for NaN, so that NaN reaches the loss.
        is_alone = total <= 0
        weights = similarities / total.masked_fill(is_alone, 1)
        key_p = key_log_p.exp()
        ctx.is_exact = _needs_logarithms(key_log_p)
        if ctx.is_exact:
            log_q = _log_mean(weights, positions, key_log_p)
            q = log_q.exp()
        else:
            q = _edges(positions, len(keys)).combine(weights, key_p)
            log_q = q.log()
        # A row without neighbors is compared with itself: no loss, but NaN is passed on.
        log_q = torch.where(is_alone, log_p, log_q)
        log_ratio = log_p - log_q
        ctx.logarithms = (key_log_p, log_q) if ctx.is_exact else None

        ctx.choices = choices
        ctx.save_for_backward(
            key_p, q, log_ratio, keys, key_lengths, similarities, positions, weights, is_alone
        )
        ctx.mark_non_differentiable(is_alone)
        if choices.variant == "paper":
            rows, ctx.small = _divergence_where_it_pays(key_p[: len(q)], q, log_ratio)
        else:
            rows, ctx.small = _divergence_where_it_pays(q, key_p[: len(q)], -log_ratio)
            rows *= choices.temperature**2
        return rows, is_alone[:, 0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True autograd would take this gradient for a constant.
        if torch.is_grad_enabled():
            raise RuntimeError(TWICE)
        with autocast_off(upstream):
            return _backward(ctx, upstream)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    key_p, q, log_ratio, keys, key_lengths, similarities, positions, weights, is_alone = (
        ctx.saved_tensors
    )
    temperature, num_rows = ctx.choices.temperature, len(q)
    to_logits, to_features, to_pool_logits, to_pool_features = ctx.needs_input_grad[:4]
    # A single neighbor has the weight 1 at any similarity, so features get no gradient.
    wants_features = (to_features or to_pool_features) and positions.shape[1] > 1
    # A pool without gradient receives nothing: leave it out of everything that flows back.
    num_receivers = len(keys) if to_pool_logits or to_pool_features else num_rows
    edges = _edges(positions, len(keys), num_receivers)
    # Rows without neighbors have no loss, so nothing flows back from them.
    upstream = upstream[:, None].masked_fill(is_alone, 0)
    p = key_p[:num_rows]
    if ctx.choices.variant == "paper":
        flow = upstream * _difference(p, q, log_ratio, ctx.small)
        own = upstream * p * log_ratio
        # Less the part along p, which the softmax cancels.
        own.addcmul_(p, own.sum(dim=1, keepdim=True), value=-1)
    else:
        upstream = upstream * temperature**2
        flow = -upstream * q * log_ratio
        own = -upstream * _difference(p, q, log_ratio, ctx.small)
    # What the neighbors receive: flow_i r_ij, summed over the rows i for log p_j, and over classes
    # for log w_ij.
    if ctx.is_exact:
        grad_log_p, grad_log_weights = _shares(flow, weights, positions, *ctx.logarithms)
        grad_log_p = grad_log_p[:num_receivers]
    else:
        flow_over_q = flow / q.masked_fill(is_alone, 1)
        grad_log_p = edges.spread(weights, flow_over_q).mul_(key_p[:num_receivers])
        grad_log_weights = weights
        if wants_features:
            grad_log_weights = edges.dots(flow_over_q, key_p, weights).mul_(weights)
    # Through log softmax: ∂L/∂z = g − p Σ g, and through the division by T.
    sums = grad_log_p.sum(dim=1, keepdim=True)
    grad_logits = grad_log_p.addcmul_(key_p[:num_receivers], sums, value=-1)
    grad_logits[:num_rows] += own
    grad_logits /= temperature

    grad_keys = None
    if wants_features:
        grad_keys = _to_features(grad_log_weights, weights, similarities, keys, key_lengths, edges)
    elif to_features or to_pool_features:
        grad_keys = torch.zeros_like(keys[:num_receivers])
    return (
        grad_logits[:num_rows] if to_logits else None,
        grad_keys[:num_rows] if grad_keys is not None and to_features else None,
        grad_logits[num_rows:] if to_pool_logits else None,
        grad_keys[num_rows:] if grad_keys is not None and to_pool_features else None,
        None,
        None,
    )


def _to_features(
    grad_log_weights: Tensor,  # (B, K)
    weights: Tensor,
    similarities: Tensor,
    keys: Tensor,
    key_lengths: Tensor,
    edges: "_Lists | _Matrix",
) -> Tensor:
    """The gradient of the features of rows and pool from that of the logarithms of the weights."""
    num_rows, num_receivers = len(weights), edges.num_receivers
    # Through w = s / Σ s; similarities of 0 are constants.
    grad_log_weights = grad_log_weights - weights * grad_log_weights.sum(dim=1, keepdim=True)
    divisors = similarities.masked_fill(similarities == 0, torch.inf)
    grad_similarities = grad_log_weights / divisors
    # A cosine is a product of two directions: each receives the other.
    grad_keys = edges.spread(grad_similarities, keys[:num_rows])
    grad_keys[:num_rows] += edges.combine(grad_similarities, keys)
    # Through the normalization: the part along the direction changes nothing.
    units = keys[:num_receivers]
    grad_keys.addcmul_(units, (units * grad_keys).sum(dim=1, keepdim=True), value=-1)
    grad_keys /= key_lengths[:num_receivers]
    return grad_keys


def _needs_logarithms(log_p: Tensor) -> bool:
    """Whether sums of these probabilities could underflow; True if looking would stall a device."""
    if not can_look(log_p):
        return True
    return not bool(log_p.amin() > 0.7 * math.log(torch.finfo(log_p.dtype).tiny))


def _chunks(positions: Tensor, num_classes: int) -> list[slice]:
    # So many rows at a time that (rows, K, C) numbers fit; on a CPU, into its cache.
    budget = CHUNK_NUMBERS if positions.device.type != "cpu" else CHUNK_NUMBERS // 16
    rows = max(1, budget // max(1, positions.shape[1] * num_classes))
    return [slice(start, start + rows) for start in range(0, len(positions), rows)]


def _log_mean(weights: Tensor, positions: Tensor, key_log_p: Tensor) -> Tensor:
    """(B, C) log Σ_j w_ij p_j through logarithms: right for any finite logits, K times the work."""
    log_weights = weights.log()[:, :, None]
    chunks = []
    for part in _chunks(positions, key_log_p.shape[1]):
        chunks.append((key_log_p[positions[part]] + log_weights[part]).logsumexp(dim=1))
    return torch.cat(chunks)


def _shares(
    flow: Tensor, weights: Tensor, positions: Tensor, key_log_p: Tensor, log_q: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ_i flow_i r_ij for every key, (B + M, C), and Σ_c flow_i r_ij, (B, K), by logarithms."""
    to_keys, to_weights = torch.zeros_like(key_log_p), torch.empty_like(weights)
    log_weights = weights.log()[:, :, None]
    for part in _chunks(positions, key_log_p.shape[1]):
        # (b, K, C) flow_i · exp(log p_j + log w_ij − log q_i), in place to save memory.
        share = key_log_p[positions[part]].add_(log_weights[part]).sub_(log_q[part, None])
        share = share.exp_().mul_(flow[part, None])
        to_weights[part] = share.sum(dim=2)
        to_keys.index_add_(0, positions[part].flatten(), share.flatten(0, 1))
    return to_keys, to_weights


class _Lists:
    """Products with the sparse (B, M) matrix of edges, as weighted sums over lists."""

    def __init__(self, positions: Tensor, num_keys: int, num_receivers: int) -> None:
        self.positions, self.num_receivers = positions, num_receivers
        self._incoming: tuple[Tensor, Tensor, Tensor] | None = None

    def combine(self, weights: Tensor, of_keys: Tensor) -> Tensor:
        """(B, ·) Σ_j weights_ij · of_keys_j."""
        return embedding_bag(self.positions, of_keys, per_sample_weights=weights, mode="sum")

    def spread(self, weights: Tensor, of_rows: Tensor) -> Tensor:
        """(R, ·) Σ_i weights_ij · of_rows_i."""
        order, sources, starts = self._incoming or self._invert()
        ordered = weights.flatten().index_select(0, order)
        sums = embedding_bag(sources, of_rows, starts, per_sample_weights=ordered, mode="sum")
        return sums[: self.num_receivers]

    def dots(self, of_rows: Tensor, of_keys: Tensor, weights: Tensor) -> Tensor:
        """(B, K) ⟨of_rows_i, of_keys_j⟩: the gradient of `combine` with respect to its weights."""
        # In small batches, calls cost more than products that are not needed.
        if max(of_keys.numel(), len(of_rows) * len(of_keys)) <= 2**14:
            return (of_rows @ of_keys.T).gather(1, self.positions)
        with torch.enable_grad():
            leaf = weights.detach().requires_grad_()
            (dots,) = torch.autograd.grad(self.combine(leaf, of_keys), leaf, of_rows)
        return dots

    def _invert(self) -> tuple[Tensor, Tensor, Tensor]:
        """Lists of the edges into each key: their order, their rows, and where each list starts."""
        # int32 takes half the memory and half the time.
        targets, order = self.positions.flatten().int().sort(stable=True)
        sources = (order // self.positions.shape[1]).int()
        # One list more than receivers takes the edges to all other keys.
        receivers = torch.arange(self.num_receivers + 1, dtype=torch.int32, device=targets.device)
        starts = torch.searchsorted(targets, receivers, out_int32=True)
        self._incoming = order.int(), sources, starts
        return self._incoming


class _Matrix:
    """The same products with a dense matrix, for when most entries are edges."""

    def __init__(self, positions: Tensor, num_keys: int, num_receivers: int) -> None:
        self.positions, self.num_keys, self.num_receivers = positions, num_keys, num_receivers

    def combine(self, weights: Tensor, of_keys: Tensor) -> Tensor:
        sums = of_keys.new_empty(len(weights), of_keys.shape[1])
        for part in self._parts():
            torch.mm(self._dense(weights[part], part), of_keys, out=sums[part])
        return sums

    def spread(self, weights: Tensor, of_rows: Tensor) -> Tensor:
        sums = of_rows.new_zeros(self.num_receivers, of_rows.shape[1])
        for part in self._parts():
            sums.addmm_(self._dense(weights[part], part)[:, : self.num_receivers].T, of_rows[part])
        return sums

    def dots(self, of_rows: Tensor, of_keys: Tensor, weights: Tensor) -> Tensor:
        dots = of_rows @ of_keys.T
        return dots if self._is_full else dots.gather(1, self.positions)

    @property
    def _is_full(self) -> bool:
        return self.positions.shape[1] == self.num_keys

    def _parts(self) -> list[slice]:
        # On a CPU in parts, so that memory is linear in the number of keys.
        rows = 128 if self.positions.device.type == "cpu" else len(self.positions)
        return [slice(start, start + rows) for start in range(0, len(self.positions), rows)]

    def _dense(self, weights: Tensor, part: slice) -> Tensor:
        if self._is_full:
            return weights
        return weights.new_zeros(len(weights), self.num_keys).scatter_(
            1, self.positions[part], weights
        )


def _edges(positions: Tensor, num_keys: int, num_receivers: int | None = None) -> _Lists | _Matrix:
    kind = _Matrix if positions.shape[1] * DENSE_SHARE >= num_keys else _Lists
    return kind(positions, num_keys, num_keys if num_receivers is None else num_receivers)
