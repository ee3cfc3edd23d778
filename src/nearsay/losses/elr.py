"""Early-learning regularization: hold on to what was predicted before (Liu et al. 2020, arXiv:2007.00151)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nearsay import distributed
from nearsay.batch import (
    PADDING,
    Batch,
    Loss,
    Mix,
    Outputs,
    check_indices,
    check_outputs,
    check_place,
    check_state,
    first_rows,
)
from nearsay.losses.base import not_finite, real_rows, upcast
from nearsay.losses.cross_entropy import cross_entropy
from nearsay.validation import check_number, check_tensors

SMALLEST = 1e-4  # probabilities are clamped to [1e-4, 1 − 1e-4], as in the public code


def elr(logits: Tensor, averages: Tensor) -> Tensor:
    """(B, C) logits and (B, C) averaged predictions t -> (B,) rows log(1 − ⟨t, p⟩); lower where p agrees with t."""
    check_tensors(logits=logits, averages=averages)
    if logits.ndim != 2 or averages.shape != logits.shape:
        raise ValueError(
            f"averages {tuple(averages.shape)} and logits {tuple(logits.shape)} must both be (B, C)"
        )
    return (1 - (averages * _probabilities(logits)).sum(dim=1)).log()


def update_averages(averages: Tensor, logits: Tensor, indices: Tensor, *, beta: float) -> None:
    """In place t ← β·t + (1 − β)·p/Σp in the row of each index of (B,) `indices`; `averages` is (N + 1, C).

    An index that stands in several rows, or on several processes, is updated once, by the first; padding by none.
    The last row of `averages` takes what must not be kept and is left at zero, the average of nobody. No gradient.
    """
    with torch.no_grad():
        probabilities = _probabilities(logits)
        everyone = distributed.gather(indices)  # (W·B,)
        predictions = distributed.gather(
            probabilities / probabilities.sum(dim=1, keepdim=True)
        )  # (W·B, C)
        # What is not finite is seen in the loss, and must not stay after a step that was refused.
        is_kept = first_rows(everyone) & predictions.isfinite().all(dim=1)
        places = everyone.where(is_kept, len(averages) - 1)
        updated = beta * averages[places] + (1 - beta) * predictions
        averages.index_copy_(0, places, updated.to(averages.dtype))
        averages[-1].zero_()


@dataclass(frozen=True, kw_only=True)
class ELR:
    """Cross-entropy + `weight` · mean over all rows, labeled or not, of log(1 − ⟨t, p⟩).

    `beta` in [0, 1) is how slowly t, the running average of an example's predictions, moves. They are this network's;
    with a teacher, those of the peer's averaged network on un-mixed images. Under mixup t is blended as the images are.
    """

    beta: float = 0.7
    weight: float = 3.0
    ramp: float = 0.0  # epochs over which the weight rises as exp(−5(1 − x)²), as in ELR+
    reweigh: bool = False  # multiply targets by t and make them distributions again, as ELR+ does with 100 classes

    def __post_init__(self) -> None:
        if check_number("beta", self.beta, 0, 1) == 1:
            raise ValueError("beta=1 would never learn; it must be below 1")
        if check_number("weight", self.weight, 0) == math.inf:
            raise ValueError("weight=inf must be finite")
        check_number("ramp", self.ramp, 0)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """The averaged prediction of each example, zero until it is first seen."""
        return {"averages": torch.zeros(num_examples + 1, num_classes)}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """Always the same."""
        return "elr"

    def __call__(
        self,
        outputs: Outputs,
        batch: Batch,
        epoch: Tensor,
        state: Mapping[str, Tensor],
        phase: str,
    ) -> Loss:
        """Update the averages, then compare with them: the order of the public code."""
        check_outputs(outputs, batch)
        if self.ramp:
            check_tensors(epoch=epoch)
        check_state(state)
        averages = state.get("averages")
        if averages is None or averages.ndim != 2 or averages.shape[1] != outputs.logits.shape[1]:
            raise ValueError(
                f"ELR finds no averages of {outputs.logits.shape[1]} classes in its memory; make it with "
                "objective.init_state(num_examples, num_classes, num_features)"
            )
        check_place(state, outputs)
        check_indices(batch.indices, len(averages) - 1)
        logits, targets = real_rows(outputs, batch)
        teacher = outputs.logits if batch.teacher is None else batch.teacher.logits
        update_averages(averages, teacher, batch.indices, beta=self.beta)
        past = _recall(averages, batch.indices, batch.mix).where(batch.is_real[:, None], 0.0)
        weights = targets.sum(dim=1)
        if self.reweigh:
            targets = _reweighed(targets, past)
        supervised = distributed.mean(cross_entropy(logits, targets), weights)
        rows = elr(logits, past)
        if batch.teacher is not None:
            rows = rows + not_finite(_probabilities(teacher), batch.is_real).to(rows.dtype)
        regularizer = self.weight * distributed.mean(rows, batch.is_real.to(logits.dtype))
        if self.ramp:
            regularizer = regularizer * torch.exp(
                -5 * (1 - (epoch / self.ramp).clamp(0, 1)).square()
            )
        terms = {"cross_entropy": supervised.detach(), "elr": regularizer.detach()}
        return Loss(supervised + regularizer, terms)


def _reweighed(targets: Tensor, past: Tensor) -> Tensor:
    """Targets times t, with the weights that they had; where nothing is left of one, it stays as it was."""
    product = targets * past
    mass = product.sum(dim=1, keepdim=True)
    scale = targets.sum(dim=1, keepdim=True) / mass.where(mass > 0, 1.0)
    return torch.where(mass > 0, product * scale, targets)


def _probabilities(logits: Tensor) -> Tensor:
    return upcast(logits).softmax(dim=1).clamp(SMALLEST, 1 - SMALLEST)


def _recall(averages: Tensor, indices: Tensor, mix: Mix | None) -> Tensor:
    """(B, C): the average of each index, blended with its partner's as its image was."""
    nobody = len(averages) - 1
    own = averages[indices.where(indices != PADDING, nobody)]
    if mix is None:
        return own
    check_indices(mix.partner_indices, nobody)
    partners = averages[mix.partner_indices.where(mix.partner_indices != PADDING, nobody)]
    share = upcast(mix.weight)[:, None]  # (B, 1)
    return share * own + (1 - share) * partners
