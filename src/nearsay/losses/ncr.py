"""Neighbor Consistency Regularization (Iscen et al., CVPR 2022): pull a prediction toward those of its neighbors."""

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
from nearsay.losses.cross_entropy import CrossEntropy
from nearsay.losses.memory_bank import Bank
from nearsay.losses.neighborhood import NUM_EPOCHS, ask, count_agreement_, foreign_rows, has_settled
from nearsay.neighbors import Identity, autocast_off, cosines, forbidden, normalize
from nearsay.validation import can_look, check_number, check_tensors, check_together, check_whole

Variant = Literal["paper", "released"]
Reduction = Literal["mean", "sum", "none"]
Implementation = Literal["auto", "plain", "fast"]


class Pool(NamedTuple):
    """Rows to search besides the batch: other processes' or a memory bank's."""

    logits: Tensor  # (M, C)
    features: Tensor  # (M, D)
    indices: Tensor  # (M,) int64; −1 is nobody's neighbor
    partners: Tensor | None = None  # (M,) who was mixed into them


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
    """How far predictions are from the similarity-weighted predictions of their k nearest neighbors (paper Eq. 3).

    Args:
        logits: (B, C) of the classifier.
        features: (B, D), what enters the classifier. Gradients flow into both.
        indices: (B,) int64, who a row is: rows with one index (views, duplicates) are never each other's neighbors,
            and −1 is padding: no loss, nobody's neighbor. Without it every row is somebody else.
        k: how many neighbors; None means all.
        temperature: divides the logits; from 0.01 to 100.
        variant: "paper" is KL(own ‖ neighbors); "released" is KL(neighbors ‖ own) · T², as in the authors' code.
        pool: (logits, features, indices) of rows to search besides the batch.
        partners: (B,) int64, who was mixed into a row (`Batch.mix.partner_indices`), to keep the two apart.
        reduction: "mean" over the rows that are not padding, "sum", or "none" for (B,).
        implementation: "plain" is the readable version, "fast" saves memory and time (its gradient cannot be
            differentiated again), "auto" is the fast one, and the plain one for torch.compile to make fast.

    A row without neighbors (a zero feature, no positive similarity) has loss and gradient 0 and counts in the mean.
    Computed in float32 at least, with autocast off; NaN and infinity are passed on. Neighbors come from the rows
    given here, so accumulating gradients over small batches is not the same as one large batch: use `pool`.
    """
    choices = Choices(
        k if k is None else check_whole("k", k, 1, cure=", or None for all"), temperature, variant
    )
    rows, _ = _rows(logits, features, indices, _as_pool(pool), partners, choices, implementation)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    if reduction != "mean":
        raise ValueError(f'reduction={reduction!r} must be "mean", "sum" or "none"')
    if indices is None:
        return rows.sum() / max(1, len(rows))
    return rows.sum() / (indices != PADDING).sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class NCR:
    """(1 − alpha) · base + alpha · NCR from `start_epoch` on, base alone before (paper Eq. 4).

    The defaults are what the paper's ablation on CIFAR-10 finds best at 40 % noise; at 20 % the start hardly matters.
    """

    alpha: float = 0.9
    k: int | None = 10
    temperature: float = 2.0
    start_epoch: float | Literal["auto"] = (
        0.0  # the paper's e; "auto" is when neighbors agree with labels no more often
    )
    base: Objective = CrossEntropy()  # noqa: RUF009 — frozen, so it may be shared
    variant: Variant = "paper"
    bank: Bank | None = None
    mask_partners: bool = False  # keep rows that share an image through mixup from being neighbors
    reject: float = 0.0  # share of rows whose neighbors are farthest that lose their label, if those are undecided too

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, 0, 1, cure=": 0 is the base alone, 1 no labels at all")
        if self.start_epoch != "auto":
            check_number("start_epoch", self.start_epoch, 0, cure=', or "auto"')
        check_number("reject", self.reject, 0, 1)
        if isinstance(self.base, type) or not callable(self.base):
            raise ValueError(f"base={self.base!r} must be an objective, such as CrossEntropy()")
        if self.bank is not None and not isinstance(self.bank, Bank):
            raise ValueError(f"bank={self.bank!r} must be None or a Bank, such as Bank(size=4096)")
        _check_choices(self._choices)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """The memory of the base under `base.`, of the bank under `bank.`, of an automatic start under `start.`."""
        sizes = (num_examples, num_classes, num_features)
        parts = {
            "base": self.base.init_state(*sizes),
            "bank": self.bank.init_state(*sizes) if self.bank else {},
        }
        if self.start_epoch == "auto":
            parts["start"] = {"agreement": torch.zeros(NUM_EPOCHS, 2, dtype=torch.float64)}
        return {
            f"{part}.{name}": tensor
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
        }

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """`ncr/…` from `start_epoch` on, `base/…` before, or `watch/…` while that is still to be found."""
        check_state(state)
        if self.start_epoch == "auto":
            if "start.agreement" not in state:
                raise ValueError(
                    'start_epoch="auto" finds no agreement in the memory; make it with '
                    "objective.init_state(num_examples, num_classes, num_features)"
                )
            mine = "ncr" if has_settled(state["start.agreement"], epoch) else "watch"
        else:
            mine = "ncr" if epoch >= self.start_epoch else "base"
        return f"{mine}/{self.base.phase(epoch, _part(state, 'base'))}"

    def __call__(
        self,
        outputs: Outputs,
        batch: Batch,
        epoch: Tensor,
        state: Mapping[str, Tensor],
        phase: str,
    ) -> Loss:
        """Neighbors are searched among all processes' rows and the bank."""
        mine, _, base_phase = str(phase).partition("/")
        if mine not in ("base", "watch", "ncr"):
            raise ValueError(
                f"phase={phase!r} is not one of NCR's; pass what objective.phase(epoch, state) returned"
            )
        check_place(state, outputs)
        if self.bank is not None:
            check_outputs(outputs, batch)
            self.bank.check(
                _part(state, "bank"), outputs, distributed.num_processes() * len(batch.indices)
            )
        labels, more = self._ask(outputs, batch, epoch, state, mine)
        total, terms = self.base(outputs, labels, epoch, _part(state, "base"), base_phase)
        terms = {**terms, **more}
        if mine == "ncr":
            rows, is_alone = self._rows(outputs, batch, state)
            real = batch.is_real.to(rows.dtype)
            consistency = distributed.mean(rows, real)
            total = (1 - self.alpha) * total + self.alpha * consistency  # paper Eq. 4
            terms = {
                **terms,
                "ncr": consistency.detach(),
                "isolated": distributed.mean(is_alone.to(rows.dtype), real),
            }
        if self.bank is not None:
            with torch.no_grad():
                everyone = Outputs(
                    distributed.gather(outputs.features.detach()),
                    distributed.gather(outputs.logits.detach()),
                )
                self.bank.write(_part(state, "bank"), everyone, distributed.gather(batch.indices))
        return Loss(total, terms)

    def _ask(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], mine: str
    ) -> tuple[Batch, dict[str, Tensor]]:
        """The batch without the labels of foreign rows, and what there is to log of that; or count how many agree."""
        if mine == "watch":
            check_outputs(outputs, batch)
            check_tensors(epoch=epoch)
            opinion = ask(outputs, batch, self.k)
            count_agreement_(state["start.agreement"], opinion, epoch)
            real = opinion.is_asked.to(outputs.logits.dtype)
            return batch, {"agreement": distributed.mean(opinion.agrees.to(real.dtype), real)}
        if mine == "base" or not self.reject:
            return batch, {}
        check_outputs(outputs, batch)
        is_foreign = foreign_rows(ask(outputs, batch, self.k), batch, self.reject)
        real = batch.is_real.to(outputs.logits.dtype)
        targets = batch.targets.masked_fill(is_foreign[:, None], 0)
        return replace(batch, targets=targets), {
            "rejected": distributed.mean(is_foreign.to(real.dtype), real)
        }

    def _rows(
        self, outputs: Outputs, batch: Batch, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        partners = (
            batch.mix.partner_indices if batch.mix is not None and self.mask_partners else None
        )
        pools = []
        if distributed.num_processes() > 1:
            others = None if partners is None else distributed.others(partners)
            rows = (
                distributed.others(outputs.logits),
                distributed.others(outputs.features),
                distributed.others(batch.indices),
            )
            pools.append(Pool(*rows, others))
        if self.bank is not None:
            pools.append(
                Pool(*self.bank.search(_part(state, "bank"), distributed.gather(batch.indices)))
            )
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
            f"pool of type {type(pool).__name__} must be a tuple (logits, features, indices)"
        )
    check_tensors(**{"indices of the pool": pool[2]})
    return Pool(*pool)


def _part(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in state.items()
        if key.startswith(f"{name}.")
    }


def _joined(pools: list[Pool]) -> Pool | None:
    if len(pools) < 2:
        return pools[0] if pools else None
    partners = [
        torch.full_like(p.indices, PADDING) if p.partners is None else p.partners for p in pools
    ]
    logits, features, indices = (
        torch.cat(parts) for parts in zip(*(pool[:3] for pool in pools), strict=True)
    )
    return Pool(logits, features, indices, torch.cat(partners))


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
    if implementation not in get_args(Implementation):
        raise ValueError(f'implementation={implementation!r} must be "auto", "plain" or "fast"')
    others = len(logits) - 1 + (0 if pool is None else len(pool.logits))
    if choices.k is not None and choices.k > others:
        if others > 0 and not torch.compiler.is_compiling():
            _warn_of_few(choices.k, others)
        choices = choices._replace(k=None)

    dtype = torch.promote_types(torch.promote_types(logits.dtype, features.dtype), torch.float32)
    if features.dtype == torch.float16 and len(
        features
    ):  # what is normal in float32 has no gradient in float16
        largest = features.detach().abs().amax(dim=1, keepdim=True)
        features = features.masked_fill(largest < torch.finfo(torch.float16).tiny, 0)
    logits, features = logits.to(dtype), features.to(dtype)
    if not len(logits):
        return logits.sum(dim=1), torch.zeros_like(logits[:, 0], dtype=torch.bool)
    is_padding = None
    if indices is not None:
        is_padding = indices == PADDING
        logits = logits.masked_fill(is_padding[:, None], 0)
        features = features.masked_fill(is_padding[:, None], 0)
    beside = None
    if pool is not None:
        nobody = (pool.indices == PADDING)[:, None]
        beside = (
            pool.logits.to(dtype).masked_fill(nobody, 0),
            pool.features.to(dtype).masked_fill(nobody, 0),
        )
    who = _identity(indices, pool, partners)

    is_plain = implementation == "plain" or (
        implementation == "auto" and torch.compiler.is_compiling()
    )
    compute = _plain_rows if is_plain else ncr_rows
    with autocast_off(logits):
        rows, is_alone = compute(logits, features, beside, who, choices)
    # A row of padding has become a row of zeros: without neighbors, and so without loss.
    return rows, is_alone if is_padding is None else is_alone & ~is_padding


def _plain_rows(
    logits: Tensor,
    features: Tensor,
    pool: tuple[Tensor, Tensor] | None,
    who: Identity | None,
    choices: Choices,
) -> tuple[Tensor, Tensor]:
    """Eq. 3 as it reads: the specification of `kernels/ncr.py`, whose signature it has."""
    key_logits, key_features = logits, features
    if pool is not None:
        key_logits, key_features = torch.cat([logits, pool[0]]), torch.cat([features, pool[1]])
    similarities = cosines(normalize(features)[0], normalize(key_features)[0])  # (B, B + M)
    similarities = threshold(
        similarities, torch.finfo(similarities.dtype).eps, 0
    )  # less is rounding
    if who is None:
        same = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    else:
        same = forbidden(who)
    similarities = similarities.masked_fill(same, 0)
    k = similarities.shape[1] if choices.k is None else choices.k
    nearest, positions = similarities.topk(k, dim=1)  # (B, K)
    total = nearest.sum(dim=1, keepdim=True)
    is_alone = total <= 0  # false for NaN, which shall be seen
    weights = nearest / total.masked_fill(is_alone, 1)

    log_p = (logits / choices.temperature).log_softmax(dim=1)
    key_log_p = (key_logits / choices.temperature).log_softmax(dim=1)
    is_absent = weights == 0
    log_weights = (
        weights.masked_fill(is_absent, 1).log().masked_fill(is_absent & ~is_alone, -torch.inf)
    )
    log_q = (log_weights[:, :, None] + key_log_p[positions]).logsumexp(dim=1)
    log_q = torch.where(is_alone, log_p, log_q)  # nobody to agree with: agree with oneself
    p, q = log_p.exp(), log_q.exp()
    if choices.variant == "paper":
        return divergence(p, q, log_p - log_q), is_alone[:, 0]  # paper Eq. 3
    # The released code turns the divergence around and scales it by T², see docs/faithful.md.
    return divergence(q, p, log_q - log_p) * choices.temperature**2, is_alone[:, 0]


def _identity(
    indices: Tensor | None, pool: Pool | None, partners: Tensor | None
) -> Identity | None:
    """Who is who, or None where row i is key i and nobody else is: then masking costs nothing."""
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
        beside = torch.full_like(pool.indices, PADDING) if pool.partners is None else pool.partners
        key_partners = torch.cat([partners, beside])
    return Identity(indices, torch.cat([indices, pool.indices]), partners, key_partners)


def _check_choices(choices: Choices) -> None:
    k, temperature, variant = choices
    if k is not None:
        check_whole("k", k, 1, cure=", or None for all")
    check_number("temperature", temperature, 1e-2, 1e2, cure="; the paper uses 2")
    if variant not in get_args(Variant):
        raise ValueError(f'variant={variant!r} must be "paper" or "released"')


def _check_rows(
    logits: Tensor,
    features: Tensor,
    indices: Tensor | None,
    pool: Pool | None,
    partners: Tensor | None,
) -> None:
    for name, rows, whose in (
        ("batch", (logits, features), indices),
        ("pool", pool and pool[:2], pool and pool.indices),
    ):
        if rows is None:
            continue
        named = {
            f"{kind} of the {name}": t for kind, t in zip(("logits", "features"), rows, strict=True)
        }
        check_tensors(**named)
        check_together(logits, **named)
        for kind, tensor in zip(("logits", "features"), rows, strict=True):
            if not tensor.is_floating_point():
                raise ValueError(
                    f"{kind} of the {name} are {tensor.dtype}; they must be floating point, as from .float()"
                )
        shapes = [tuple(tensor.shape) for tensor in rows]
        if (
            [len(shape) for shape in shapes] != [2, 2]
            or shapes[0][0] != shapes[1][0]
            or 0 in (*shapes[0][1:], *shapes[1][1:])
        ):
            raise ValueError(
                f"logits {shapes[0]} and features {shapes[1]} of the {name} must be (B, C) and (B, D) with one B; "
                "flatten or pool features of other shapes first"
            )
        mixed = partners if name == "batch" or pool is None else pool.partners
        for kind, numbers in (("indices", whose), ("partners", mixed)):
            if numbers is None:
                continue
            check_tensors(**{f"{kind} of the {name}": numbers})
            check_together(logits, **{f"{kind} of the {name}": numbers})
            if tuple(numbers.shape) != shapes[0][:1] or numbers.dtype != torch.int64:
                raise ValueError(
                    f"{kind} {tuple(numbers.shape)} of {numbers.dtype} of the {name} "
                    f"must be {shapes[0][:1]} of torch.int64"
                )
            if can_look(numbers) and len(numbers) and int(numbers.min()) < PADDING:
                raise ValueError(
                    f"{kind} of the {name} hold {int(numbers.min())}; they are 0 or more, or {PADDING} for padding"
                )
    if pool is not None:
        if indices is None:
            raise ValueError(
                "a pool needs indices=, so that nobody in it is taken for a neighbor of itself"
            )
        if pool.logits.shape[1] != logits.shape[1] or pool.features.shape[1] != features.shape[1]:
            raise ValueError(
                f"the pool's logits {tuple(pool.logits.shape)} and features {tuple(pool.features.shape)} must have the "
                f"{logits.shape[1]} classes and {features.shape[1]} features of the batch"
            )
    if partners is not None and indices is None:
        raise ValueError("partners= needs indices=, so that they can be recognized")


@cache
def _warn_of_few(k: int, others: int) -> None:
    warnings.warn(
        f"k={k} neighbors were asked for, but there are only {others} other rows; all of them are used "
        "(enlarge the batch, lower k, or give a pool)",
        stacklevel=5,
    )
