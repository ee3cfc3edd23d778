"""Neighbor Consistency Regularization (Iscen et al., CVPR 2022): predict as the neighbors do."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import threshold

from nearsay import distributed
from nearsay.batch import (
    PADDING,
    Batch,
    Loss,
    Objective,
    Outputs,
    check_outputs,
    check_place,
    check_state,
)
from nearsay.losses._ncr_fast import Choices, divergence, ncr_rows
from nearsay.losses.base import as_objective, part_of_state
from nearsay.losses.cross_entropy import CrossEntropy
from nearsay.losses.memory_bank import Bank
from nearsay.losses.neighbor_agreement import (
    NUM_EPOCHS,
    ask_neighbors,
    count_agreement_,
    has_settled,
    outlying_rows,
)
from nearsay.neighbors import Identity, autocast_off, cosines, forbidden, normalize
from nearsay.validation import (
    can_look,
    check_choice,
    check_number,
    check_tensors,
    check_together,
    check_whole,
)

Variant = Literal["paper", "released"]
Reduction = Literal["mean", "sum", "none"]
Implementation = Literal["auto", "plain", "fast"]


class Pool(NamedTuple):
    """Rows to search besides the batch: those of other processes or of a memory bank."""

    logits: Tensor  # (M, C)
    features: Tensor  # (M, D)
    indices: Tensor  # (M,) int64; rows of index −1 are never neighbors
    partners: Tensor | None = None  # (M,) int64: the example that mixup blended into each row


def ncr(
    logits: Tensor,
    features: Tensor,
    indices: Tensor | None = None,
    *,
    k: int | None = 10,
    temperature: float = 2.0,
    variant: Variant = "paper",
    pool: Pool | tuple[Tensor, Tensor, Tensor] | None = None,
    partners: Tensor | None = None,
    reduction: Reduction = "mean",
    implementation: Implementation = "auto",
) -> Tensor:
    """The divergence of predictions from those of their k nearest neighbors (paper Eq. 3).

    The predictions of the neighbors are averaged, weighted by cosine similarity. A row without
    neighbors (a feature vector of zeros, or no positive similarity) has loss and gradient 0 and
    counts in the mean. The computation is in float32 or float64 with autocast off. NaN and infinity
    are passed on.

    Args:
        logits: (B, C), the outputs of the classifier.
        features: (B, D), the inputs of the classifier. Gradients flow into logits and features.
        indices: (B,) int64, the number of the example in each row. Rows with the same index (views,
            duplicates) are never neighbors of each other. −1 is padding: its loss is 0 and it
            is no neighbor. Without indices, every row is a different example.
        k: number of neighbors; None means all rows.
        temperature: divides the logits, from 0.01 to 100.
        variant: "paper" is KL(own ‖ neighbors). "released" is KL(neighbors ‖ own) · T², as in the
            authors' code.
        pool: (logits, features, indices) of rows to search besides the batch.
        partners: (B,) int64, the example that mixup blended into each row
            (`Batch.mix.partner_indices`). It is then no neighbor of the row.
        reduction: "mean" over the rows that are not padding, "sum", or "none" for (B,).
        implementation: "plain" is the readable version. "fast" needs less memory and time, but its
            gradient cannot be differentiated again. "auto" is "fast", except inside torch.compile.

    Neighbors are searched in these rows only. If you accumulate gradients over small batches, pass
    the rows of the other batches as `pool`.

    >>> import torch
    >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 0.0]])
    >>> ncr(logits, features, k=1, reduction="none") > 0.1
    tensor([False, False,  True,  True])
    """
    check_choice("reduction", reduction, get_args(Reduction))
    choices = Choices(k if k is None else check_whole("k", k, 1), temperature, variant)
    rows, _ = _rows(logits, features, indices, _as_pool(pool), partners, choices, implementation)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    if indices is None:
        return rows.sum() / max(1, len(rows))
    return rows.sum() / (indices != PADDING).sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class NCR:
    """(1 − alpha) · base + alpha · NCR from `start_epoch` on, and the base alone before (Eq. 4).

    The defaults are the best of the paper's ablation on CIFAR-10 with 40 % noise.

    Attributes:
        alpha: weight of the neighbors against the labels, from 0 (base alone) to 1 (no labels).
        k: number of neighbors; None means all rows.
        temperature: divides the logits in the NCR term, from 0.01 to 100.
        start_epoch: first epoch with the NCR term (the paper's e). "auto" starts it when the
            neighbors no longer agree with the labels more often from epoch to epoch.
        base: the loss of the labels: an objective, or a function of (logits, targets) that returns
            one loss per row.
        variant: "paper" or "released", the formula of the authors' code. See `ncr`.
        bank: a `Bank` of earlier rows to search besides the batch.
        mask_partners: after mixup, rows that share an image are not neighbors.
        reject: share of the rows, those with the most distant neighbors, that lose their label if
            their neighbors are undecided as well.

    >>> import torch
    >>> from nearsay import Batch, Outputs, one_hot
    >>> generator = torch.Generator().manual_seed(0)
    >>> outputs = Outputs(
    ...     torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
    ... )
    >>> targets = one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), 3)
    >>> batch = Batch(inputs=outputs.features, targets=targets, indices=torch.arange(8))
    >>> objective = NCR(alpha=0.5, k=3)
    >>> state = objective.init_state(num_examples=8, num_classes=3, num_features=4)
    >>> phase = objective.phase(0.0, state)
    >>> total, terms = objective(outputs, batch, torch.tensor(0.0), state, phase)
    >>> bool(total == 0.5 * terms["cross_entropy"] + 0.5 * terms["ncr"])
    True
    """

    alpha: float = 0.9
    k: int | None = 10
    temperature: float = 2.0
    start_epoch: float | Literal["auto"] = 0.0
    base: Objective = CrossEntropy()  # noqa: RUF009 — frozen, so it may be shared
    variant: Variant = "paper"
    bank: Bank | None = None
    mask_partners: bool = False
    reject: float = 0.0

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, 0, 1)
        if self.start_epoch != "auto":
            check_number("start_epoch", self.start_epoch, 0, cure=', or "auto"')
        check_number("reject", self.reject, 0, 1)
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(self, "base", as_objective(self.base, name="base"))
        if self.bank is not None and not isinstance(self.bank, Bank):
            raise ValueError(
                f"bank must be None or a Bank, such as Bank(size=4096), got {self.bank!r}."
            )
        _check_choices(self._choices)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """`base.…` of the base, `bank.…` of the bank, `start.agreement` of an automatic start."""
        sizes = (num_examples, num_classes, num_features)
        parts = {"base": self.base.init_state(*sizes)}
        if self.bank is not None:
            parts["bank"] = self.bank.init_state(*sizes)
        if self.start_epoch == "auto":
            parts["start"] = {"agreement": torch.zeros(NUM_EPOCHS, 2, dtype=torch.float64)}
        state: dict[str, Tensor] = {}
        for part, tensors in parts.items():
            state |= {f"{part}.{name}": tensor for name, tensor in tensors.items()}
        return state

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """`ncr/…` from the start on; before, `base/…`, or `watch/…` if the start is automatic."""
        check_state(state)
        if self.start_epoch == "auto":
            if "start.agreement" not in state:
                raise ValueError(
                    'state must hold start.agreement for start_epoch="auto". '
                    "Use objective.init_state(num_examples, num_classes, num_features)."
                )
            mine = "ncr" if has_settled(state["start.agreement"], epoch) else "watch"
        else:
            mine = "ncr" if epoch >= self.start_epoch else "base"
        return f"{mine}/{self.base.phase(epoch, part_of_state(state, 'base'))}"

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        mine, _, base_phase = str(phase).partition("/")
        if mine not in ("base", "watch", "ncr"):
            raise ValueError(
                f"phase must be what objective.phase(epoch, state) returns, got {phase!r}."
            )
        check_place(state, outputs)
        bank_state = part_of_state(state, "bank")
        if self.bank is not None:
            # Before anything is written, so that an error leaves the state as it was.
            check_outputs(outputs, batch)
            num_rows = distributed.num_processes() * len(batch.indices)
            self.bank.check(bank_state, outputs, num_rows)
        labels, more_terms = self._ask_neighbors(outputs, batch, epoch, state, mine)
        base_state = part_of_state(state, "base")
        total, terms = self.base(outputs, labels, epoch, base_state, base_phase)
        terms = {**terms, **more_terms}
        if mine == "ncr":
            rows, is_alone = self._rows(outputs, batch, state)
            real = batch.is_real.to(rows.dtype)
            consistency = distributed.mean(rows, real)
            total = (1 - self.alpha) * total + self.alpha * consistency  # paper Eq. 4
            terms["ncr"] = consistency.detach()
            terms["isolated"] = distributed.mean(is_alone.to(rows.dtype), real)
        if self.bank is not None:
            # Every process writes the rows of all, so that their banks stay equal.
            with torch.no_grad():
                features = distributed.gather(outputs.features.detach())
                everyone = Outputs(features, distributed.gather(outputs.logits.detach()))
                self.bank.write(bank_state, everyone, distributed.gather(batch.indices))
        return Loss(total, terms)

    def _ask_neighbors(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], mine: str
    ) -> tuple[Batch, dict[str, Tensor]]:
        """The batch without the labels of rejected rows, and terms for the log.

        Before an automatic start: the batch itself, and agreement is counted in the state.
        """
        if mine == "watch":
            check_outputs(outputs, batch)
            check_tensors(epoch=epoch)
            opinion = ask_neighbors(outputs, batch, self.k)
            count_agreement_(state["start.agreement"], opinion, epoch)
            weights = opinion.is_asked.to(outputs.logits.dtype)
            agreement = distributed.mean(opinion.agrees.to(weights.dtype), weights)
            return batch, {"agreement": agreement}
        if mine == "base" or not self.reject:
            return batch, {}
        check_outputs(outputs, batch)
        is_rejected = outlying_rows(ask_neighbors(outputs, batch, self.k), batch, self.reject)
        weights = batch.is_real.to(outputs.logits.dtype)
        # A target row of zeros means unlabeled.
        targets = batch.targets.masked_fill(is_rejected[:, None], 0)
        rejected = distributed.mean(is_rejected.to(weights.dtype), weights)
        return replace(batch, targets=targets), {"rejected": rejected}

    def _rows(
        self, outputs: Outputs, batch: Batch, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The NCR term of each row, with the rows of other processes and of the bank as a pool."""
        partners = (
            batch.mix.partner_indices if batch.mix is not None and self.mask_partners else None
        )
        pools = []
        if distributed.num_processes() > 1:
            pools.append(
                Pool(
                    distributed.others(outputs.logits),
                    distributed.others(outputs.features),
                    distributed.others(batch.indices),
                    None if partners is None else distributed.others(partners),
                )
            )
        if self.bank is not None:
            everyone = distributed.gather(batch.indices)
            pools.append(Pool(*self.bank.search(part_of_state(state, "bank"), everyone)))
        return _rows(
            outputs.logits, outputs.features, batch.indices, _joined(pools), partners, self._choices
        )

    @property
    def _choices(self) -> Choices:
        return Choices(self.k, self.temperature, self.variant)


def _as_pool(pool: Pool | tuple[Tensor, Tensor, Tensor] | None) -> Pool | None:
    if pool is None:
        return None
    if not isinstance(pool, tuple) or len(pool) not in (3, 4):
        raise ValueError(
            f"pool must be a tuple (logits, features, indices), got {type(pool).__name__}."
        )
    check_tensors(**{"indices of the pool": pool[2]})
    return Pool(*pool)


def _joined(pools: list[Pool]) -> Pool | None:
    if len(pools) < 2:
        return pools[0] if pools else None
    partners = []
    for pool in pools:
        no_partners = torch.full_like(pool.indices, PADDING)
        partners.append(no_partners if pool.partners is None else pool.partners)
    return Pool(
        torch.cat([pool.logits for pool in pools]),
        torch.cat([pool.features for pool in pools]),
        torch.cat([pool.indices for pool in pools]),
        torch.cat(partners),
    )


def _rows(
    logits: Tensor,
    features: Tensor,
    indices: Tensor | None,
    pool: Pool | None,
    partners: Tensor | None,
    choices: Choices,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """(B,) losses, 0 for padding, and (B,) bool: real rows without neighbors."""
    _check_choices(choices)
    _check_rows(logits, features, indices, pool, partners)
    check_choice("implementation", implementation, get_args(Implementation))
    num_others = len(logits) - 1 + (0 if pool is None else len(pool.logits))
    if choices.k is not None and choices.k > num_others:
        if num_others > 0 and not torch.compiler.is_compiling():
            _warn_of_few(choices.k, num_others)
        choices = choices._replace(k=None)

    dtype = torch.promote_types(torch.promote_types(logits.dtype, features.dtype), torch.float32)
    if features.dtype == torch.float16 and len(features):
        # Features this small have no gradient in float16, although float32 could normalize them.
        largest = features.detach().abs().amax(dim=1, keepdim=True)
        features = features.masked_fill(largest < torch.finfo(torch.float16).tiny, 0)
    logits, features = logits.to(dtype), features.to(dtype)
    if not len(logits):
        return logits.sum(dim=1), torch.zeros_like(logits[:, 0], dtype=torch.bool)
    is_padding = None
    if indices is not None:
        # A row of zeros has no neighbors, so padding has no loss, and its NaN does not spread.
        is_padding = indices == PADDING
        logits = logits.masked_fill(is_padding[:, None], 0)
        features = features.masked_fill(is_padding[:, None], 0)
    pool_rows = None
    if pool is not None:
        is_empty = (pool.indices == PADDING)[:, None]
        pool_logits = pool.logits.to(dtype).masked_fill(is_empty, 0)
        pool_rows = pool_logits, pool.features.to(dtype).masked_fill(is_empty, 0)
    who = _identity(indices, pool, partners)

    # torch.compile fuses the plain version by itself, and cannot look into the fast one.
    is_plain = implementation == "auto" and torch.compiler.is_compiling()
    is_plain = is_plain or implementation == "plain"
    compute = _plain_rows if is_plain else ncr_rows
    with autocast_off(logits):
        rows, is_alone = compute(logits, features, pool_rows, who, choices)
    return rows, is_alone if is_padding is None else is_alone & ~is_padding


def _plain_rows(
    logits: Tensor,
    features: Tensor,
    pool: tuple[Tensor, Tensor] | None,
    who: Identity | None,
    choices: Choices,
) -> tuple[Tensor, Tensor]:
    """Eq. 3 as it reads: the specification of `_ncr_fast.ncr_rows`, with the same signature."""
    key_logits, key_features = logits, features
    if pool is not None:
        key_logits, key_features = torch.cat([logits, pool[0]]), torch.cat([features, pool[1]])
    similarities = cosines(normalize(features)[0], normalize(key_features)[0])  # (B, B + M)
    # Negative similarities count as 0, and so do those that may be rounding.
    similarities = threshold(similarities, torch.finfo(similarities.dtype).eps, 0)
    if who is None:
        same = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    else:
        same = forbidden(who)
    similarities = similarities.masked_fill(same, 0)
    k = similarities.shape[1] if choices.k is None else choices.k
    largest, positions = similarities.topk(k, dim=1)  # (B, K)
    total = largest.sum(dim=1, keepdim=True)
    # The comparison is false for NaN, so that NaN reaches the loss.
    is_alone = total <= 0
    weights = largest / total.masked_fill(is_alone, 1)

    log_p = (logits / choices.temperature).log_softmax(dim=1)
    key_log_p = (key_logits / choices.temperature).log_softmax(dim=1)
    # log q = log Σ_j w_j p_j. A weight of 0 takes its neighbor out as −∞; its logarithm is taken of
    # 1 instead of 0, because the gradient at 0 would be NaN.
    is_absent = weights == 0
    log_weights = weights.masked_fill(is_absent, 1).log()
    log_weights = log_weights.masked_fill(is_absent & ~is_alone, -torch.inf)
    log_q = (log_weights[:, :, None] + key_log_p[positions]).logsumexp(dim=1)  # (B, C)
    # A row without neighbors is compared with itself: no loss, no gradient.
    log_q = torch.where(is_alone, log_p, log_q)
    p, q = log_p.exp(), log_q.exp()
    if choices.variant == "paper":
        return divergence(p, q, log_p - log_q), is_alone[:, 0]  # paper Eq. 3
    # The released code exchanges p and q and scales by T², see docs/faithful.md.
    return divergence(q, p, log_q - log_p) * choices.temperature**2, is_alone[:, 0]


def _identity(
    indices: Tensor | None, pool: Pool | None, partners: Tensor | None
) -> Identity | None:
    """The examples of rows and keys; None if row i is key i and all differ, which is cheaper."""
    if indices is None:
        return None
    if pool is None:
        if partners is None and can_look(indices):
            ordered = indices.sort().values
            if bool((ordered[:1] >= 0).all() & (ordered[1:] > ordered[:-1]).all()):
                return None
        return Identity(indices, indices, partners, partners)
    key_partners = None
    if pool.partners is not None and partners is None:
        partners = torch.full_like(indices, PADDING)
    if partners is not None:
        no_partners = torch.full_like(pool.indices, PADDING)
        pool_partners = no_partners if pool.partners is None else pool.partners
        key_partners = torch.cat([partners, pool_partners])
    return Identity(indices, torch.cat([indices, pool.indices]), partners, key_partners)


def _check_choices(choices: Choices) -> None:
    k, temperature, variant = choices
    if k is not None:
        check_whole("k", k, 1, cure=", or None for all")
    check_number("temperature", temperature, 1e-2, 1e2)
    check_choice("variant", variant, get_args(Variant))


def _check_rows(
    logits: Tensor,
    features: Tensor,
    indices: Tensor | None,
    pool: Pool | None,
    partners: Tensor | None,
) -> None:
    _check_table("batch", logits, logits, features, indices, partners)
    if indices is None and (pool is not None or partners is not None):
        raise ValueError("indices must be given with pool or partners, got None.")
    if pool is None:
        return
    _check_table("pool", logits, *pool)
    sizes = pool.logits.shape[1], pool.features.shape[1]
    expected = logits.shape[1], features.shape[1]
    if sizes != expected:
        raise ValueError(
            f"pool must have {expected[0]} classes and {expected[1]} features, got {sizes}."
        )


def _check_table(
    name: str,
    beside: Tensor,
    logits: Tensor,
    features: Tensor,
    indices: Tensor | None,
    partners: Tensor | None,
) -> None:
    """Refuse rows with wrong shapes, types or devices, naming the batch or the pool."""
    for kind, tensor in (("logits", logits), ("features", features)):
        check_tensors(**{f"{kind} of the {name}": tensor})
        check_together(beside, **{f"{kind} of the {name}": tensor})
        if not tensor.is_floating_point() or tensor.ndim != 2 or not tensor.shape[1]:
            raise ValueError(
                f"{kind} of the {name} must be a floating-point matrix, "
                f"got {tuple(tensor.shape)} of {tensor.dtype}. Flatten or pool other shapes."
            )
    if len(logits) != len(features):
        raise ValueError(
            f"features of the {name} must have as many rows as logits, {len(logits)}, "
            f"got {len(features)}."
        )
    for kind, numbers in (("indices", indices), ("partners", partners)):
        if numbers is None:
            continue
        check_tensors(**{f"{kind} of the {name}": numbers})
        check_together(beside, **{f"{kind} of the {name}": numbers})
        if numbers.shape != logits.shape[:1] or numbers.dtype != torch.int64:
            raise ValueError(
                f"{kind} of the {name} must be {tuple(logits.shape[:1])} of torch.int64, "
                f"got {tuple(numbers.shape)} of {numbers.dtype}."
            )
        if can_look(numbers) and len(numbers) and int(numbers.min()) < PADDING:
            raise ValueError(
                f"{kind} of the {name} must be 0 or more, or {PADDING} for padding, "
                f"got {int(numbers.min())}."
            )


@cache
def _warn_of_few(k: int, num_others: int) -> None:
    warnings.warn(
        f"k={k} is more than the {num_others} other rows, so all of them are neighbors. "
        "Enlarge the batch, lower k, or use a Bank.",
        stacklevel=5,
    )
