"""Generalized Jensen–Shannon divergence of label and views (Englesson & Azizpour 2021)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay import distributed
from nearsay.batch import Batch, Loss, Outputs, check_outputs
from nearsay.losses.base import real_rows, upcast
from nearsay.validation import can_look, check_number, check_tensors


class Parts(NamedTuple):
    """The two summands of GJS / Z."""

    supervised: Tensor  # (B,) times the weight of the label: 0 for an unlabeled row
    consistency: Tensor  # (B,) needs no label


def gjs(logits: Tensor, targets: Tensor, *, label_weight: float = 0.3) -> Parts:
    """(B,) rows of GJS / Z in two parts, `supervised` and `consistency` (arXiv:2105.04522).

    The label y has the weight π₁ = `label_weight`, each of V views p_v has (1 − π₁)/V. With m the
    mean of the views,
        GJS = H(π₁·y + (1 − π₁)·m) − π₁·H(y) − (1 − π₁)/V·Σ H(p_v)
            = JS_π(y, m) + (1 − π₁)·JS(p_1, ..., p_V).
    It is divided by Z = −(1 − π₁)·log(1 − π₁), so that for one view it tends to cross-entropy as
    π₁ → 0.

    Args:
        logits: (V, B, C), those of V views of the same examples.
        targets: (B, C) distributions; the sum of a row is its weight, which multiplies the first
            part.
        label_weight: π₁, from 0.001 to 0.999.

    >>> import torch
    >>> views = torch.zeros(2, 1, 4)
    >>> gjs(views, torch.eye(4)[:1]).consistency
    tensor([0.])
    """
    _check(label_weight)
    check_tensors(logits=logits, targets=targets)
    if logits.ndim != 3 or not len(logits) or targets.shape != logits.shape[1:]:
        raise ValueError(
            "logits must be (V, B, C) and targets (B, C), "
            f"got {tuple(logits.shape)} and {tuple(targets.shape)}."
        )
    if can_look(targets):
        # The comparisons are false for NaN, so NaN counts as wrong.
        wrong = ~((targets >= 0) & (targets < torch.inf))
        if wrong.any():
            raise ValueError(
                f"targets must be finite and not negative, got {targets[wrong][0].item()}."
            )
    # All in logarithms: near a sure prediction, 1 − p has no digits left.
    log_views = upcast(logits).log_softmax(dim=2)  # (V, B, C)
    log_mean = log_views.logsumexp(dim=0) - math.log(len(logits))  # (B, C)
    targets = upcast(targets)
    weights = targets.sum(dim=1)  # (B,)
    label = targets / weights.where(weights > 0, 1.0)[:, None]
    log_views_share = math.log1p(-label_weight)
    # The logarithm of π₁·y + (1 − π₁)·m. A class that the label excludes adds −∞: nothing.
    log_label = math.log(label_weight) + label.log()
    log_mixture = torch.logaddexp(log_label, log_views_share + log_mean)  # (B, C)

    # Each divergence is an expectation of log ratios, which cannot cancel below 0 as entropies do.
    # entr(y) = −y·log y is 0 at y = 0, where a logarithm would give NaN.
    from_label = -(torch.special.entr(label) + label * log_mixture).sum(dim=1)  # KL(y ‖ mixture)
    from_mean = (log_mean.exp() * (log_mean - log_mixture)).sum(dim=1)  # KL(m ‖ mixture)
    # The mean over views of KL(p_v ‖ m) is the Jensen–Shannon divergence of the views.
    from_views = (log_views.exp() * (log_views - log_mean)).sum(dim=2).mean(dim=0)
    views_share = 1 - label_weight
    scale = -views_share * log_views_share  # Z
    supervised = weights * (label_weight * from_label + views_share * from_mean)
    return Parts(supervised / scale, views_share * from_views / scale)


@dataclass(frozen=True, kw_only=True)
class GJS:
    """Agreement of the label with the views of its image, and of the views among themselves.

    All views of an example take the target of the first. With one view, this is the Jensen–Shannon
    loss and consistency is 0.

    Attributes:
        label_weight: from near 0 (cross-entropy) to near 1 (mean absolute error).

    >>> from nearsay.losses import NCRLoss
    >>> loss = NCRLoss(objective=GJS(label_weight=0.5))
    >>> loss.objective
    GJS(label_weight=0.5)
    """

    label_weight: float = 0.3

    def __post_init__(self) -> None:
        _check(self.label_weight)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        return {}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        return "gjs"

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        """The mean of the first part over labels, of the second over examples."""
        check_outputs(outputs, batch)
        num_examples = len(batch.indices) // batch.views
        _check_views(batch.indices.view(batch.views, num_examples))
        logits, targets = real_rows(outputs, batch)
        targets = targets[:num_examples]
        views = logits.view(batch.views, num_examples, logits.shape[1])
        parts = gjs(views, targets, label_weight=self.label_weight)
        supervised = distributed.mean(parts.supervised, targets.sum(dim=1))
        real = batch.is_real[:num_examples].to(logits.dtype)
        consistency = distributed.mean(parts.consistency, real)
        terms = {"gjs": supervised.detach(), "consistency": consistency.detach()}
        return Loss(supervised + consistency, terms)


def _check(label_weight: float) -> None:
    # Nearer to 0 or 1, float32 has no digits left.
    check_number("label_weight", label_weight, 1e-3, 1 - 1e-3)


def _check_views(indices: Tensor) -> None:
    """Refuse (V, B) indices that differ between views; only where values cost nothing to read."""
    if can_look(indices):
        differing = (indices != indices[0]).any(dim=0).nonzero()
        if len(differing):
            place = int(differing[0])
            raise ValueError(
                "views must show the same examples in the same order, "
                f"got {indices[:, place].tolist()} at place {place}."
            )
