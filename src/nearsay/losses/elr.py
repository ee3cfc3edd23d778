"""Early-learning regularization: keep to earlier predictions (Liu et al. 2020)."""

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

# Probabilities are clamped to [1e-4, 1 − 1e-4], as in the public code.
SMALLEST = 1e-4


def elr(logits: Tensor, averages: Tensor) -> Tensor:
    """(B,) regularizer log(1 − ⟨t, p⟩), which is lower where the prediction p agrees with t.

    Args:
        logits: (B, C).
        averages: (B, C) averages t of earlier predictions of the same examples.

    >>> import torch
    >>> elr(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([-0.6931])
    """
    check_tensors(logits=logits, averages=averages)
    if logits.ndim != 2 or averages.shape != logits.shape:
        raise ValueError(
            f"averages must be (B, C) like the logits, {tuple(logits.shape)}, "
            f"got {tuple(averages.shape)}."
        )
    return (1 - (averages * _probabilities(logits)).sum(dim=1)).log()


def update_averages(averages: Tensor, logits: Tensor, indices: Tensor, *, beta: float) -> None:
    """In place t ← β·t + (1 − β)·p/Σp in the rows of `averages`, (N + 1, C), of these examples.

    An example in several rows, or on several processes, is updated once, by its first row. Padding
    updates nothing. Rows that must not be kept are written to the last row of the table, which is
    then set to zero: it is the average of no example. There is no gradient.
    """
    with torch.no_grad():
        probabilities = _probabilities(logits)
        # The clamped probabilities do not sum to 1 any more.
        own = probabilities / probabilities.sum(dim=1, keepdim=True)
        # Every process writes the rows of all, so that their tables stay equal.
        everyone = distributed.gather(indices)  # (W·B,)
        predictions = distributed.gather(own)  # (W·B, C)
        # The loss shows what is not finite. It must not stay in the table after a refused step.
        is_kept = first_rows(everyone) & predictions.isfinite().all(dim=1)
        # Boolean indexing would have a shape that depends on values, which stalls a device.
        places = everyone.where(is_kept, len(averages) - 1)
        updated = beta * averages[places] + (1 - beta) * predictions
        averages.index_copy_(0, places, updated.to(averages.dtype))
        averages[-1].zero_()


@dataclass(frozen=True, kw_only=True)
class ELR:
    """Cross-entropy + `weight` · mean over all rows, labeled or not, of log(1 − ⟨t, p⟩).

    t is the running average of the predictions of an example. They are those of this network, or of
    the teacher if the batch has one: with two networks, the averaged weights of the other one, on
    images before mixup. Under mixup, t is blended as the images are.

    Attributes:
        beta: the share of the old average at every visit of an example, in [0, 1).
        weight: the weight of the regularizer.
        ramp: the number of epochs over which the weight rises as exp(−5(1 − x)²), as in ELR+; 0 is
            the full weight from the beginning.
        reweigh: multiply targets by t and normalize them, as ELR+ does with 100 classes.

    >>> state = ELR().init_state(num_examples=100, num_classes=10, num_features=64)
    >>> state["averages"].shape
    torch.Size([101, 10])
    """

    beta: float = 0.7
    weight: float = 3.0
    ramp: float = 0.0
    reweigh: bool = False

    def __post_init__(self) -> None:
        if check_number("beta", self.beta, 0, 1) == 1:
            raise ValueError("beta must be below 1, got 1. The averages would never change.")
        if check_number("weight", self.weight, 0) == math.inf:
            raise ValueError("weight must be finite, got inf.")
        check_number("ramp", self.ramp, 0)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """The average of each example, zero before its first visit."""
        return {"averages": torch.zeros(num_examples + 1, num_classes)}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        return "elr"

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        """Update the averages, then compare with them: the order of the public code."""
        averages = self._checked_averages(outputs, batch, epoch, state)
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
            # The averages leave out a prediction that is not finite, so the loss must show it.
            rows = rows + not_finite(_probabilities(teacher), batch.is_real).to(rows.dtype)
        regularizer = self.weight * distributed.mean(rows, batch.is_real.to(logits.dtype))
        if self.ramp:
            progress = (epoch / self.ramp).clamp(0, 1)
            regularizer = regularizer * torch.exp(-5 * (1 - progress).square())
        terms = {"cross_entropy": supervised.detach(), "elr": regularizer.detach()}
        return Loss(supervised + regularizer, terms)

    def _checked_averages(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """The table of the state, if all arguments fit it: nothing is written before an error."""
        check_outputs(outputs, batch)
        if self.ramp:
            check_tensors(epoch=epoch)
        check_state(state)
        averages, num_classes = state.get("averages"), outputs.logits.shape[1]
        if averages is None or averages.ndim != 2 or averages.shape[1] != num_classes:
            raise ValueError(
                f"state must hold averages of {num_classes} classes. "
                "Use objective.init_state(num_examples, num_classes, num_features)."
            )
        check_place(state, outputs)
        check_indices(batch.indices, len(averages) - 1)
        return averages


def _reweighed(targets: Tensor, past: Tensor) -> Tensor:
    """Targets times t, scaled to the weights that they had; unchanged where nothing is left."""
    product = targets * past
    mass = product.sum(dim=1, keepdim=True)
    scale = targets.sum(dim=1, keepdim=True) / mass.where(mass > 0, 1.0)
    return torch.where(mass > 0, product * scale, targets)


def _probabilities(logits: Tensor) -> Tensor:
    return upcast(logits).softmax(dim=1).clamp(SMALLEST, 1 - SMALLEST)


def _recall(averages: Tensor, indices: Tensor, mix: Mix | None) -> Tensor:
    """(B, C): the average of each example, blended with its partner's as its image was."""
    # The last row of the table is zero: the average of padding.
    last = len(averages) - 1
    own = averages[indices.where(indices != PADDING, last)]
    if mix is None:
        return own
    check_indices(mix.partner_indices, last)
    partners = averages[mix.partner_indices.where(mix.partner_indices != PADDING, last)]
    share = upcast(mix.weight)[:, None]  # (B, 1)
    return share * own + (1 - share) * partners
