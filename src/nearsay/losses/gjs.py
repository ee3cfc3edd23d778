"""Generalized Jensen–Shannon divergence of a label and several views (Englesson & Azizpour 2021, arXiv:2105.04522)."""

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
    """(V, B, C) logits of V views and (B, C) soft targets -> GJS / Z in two parts.

    The label y has the weight π₁ = `label_weight`, each view p_v has (1 − π₁)/V, and with m the mean of the views
    GJS = H(π₁·y + (1 − π₁)·m) − π₁·H(y) − (1 − π₁)/V·Σ H(p_v) = JS_π(y, m) + (1 − π₁)·JS(p_1, ..., p_V),
    divided by Z = −(1 − π₁)·log(1 − π₁), so that for one view it tends to cross-entropy as π₁ → 0.
    A target row is normalized to y; its sum multiplies the first part.
    """
    _check(label_weight)
    check_tensors(logits=logits, targets=targets)
    if logits.ndim != 3 or not len(logits) or targets.shape != logits.shape[1:]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} must be (V, B, C) and (B, C)"
        )
    if can_look(targets):
        wrong = ~((targets >= 0) & (targets < torch.inf))  # true for NaN as well
        if wrong.any():
            raise ValueError(
                f"targets hold {targets[wrong][0].item()}; they must be finite and not negative"
            )
    log_views = upcast(logits).log_softmax(dim=2)  # (V, B, C)
    log_mean = log_views.logsumexp(dim=0) - math.log(len(logits))  # (B, C)
    targets = upcast(targets)
    weights = targets.sum(dim=1)  # (B,)
    label = targets / weights.where(weights > 0, 1.0)[:, None]
    log_views_share = math.log1p(-label_weight)
    log_mixture = torch.logaddexp(
        math.log(label_weight) + label.log(), log_views_share + log_mean
    )  # (B, C)

    from_label = -(torch.special.entr(label) + label * log_mixture).sum(dim=1)  # KL(y ‖ mixture)
    from_mean = (log_mean.exp() * (log_mean - log_mixture)).sum(dim=1)  # KL(m ‖ mixture)
    from_views = (
        (log_views.exp() * (log_views - log_mean)).sum(dim=2).mean(dim=0)
    )  # mean of KL(p_v ‖ m)
    views_share = 1 - label_weight
    scale = -views_share * log_views_share  # Z
    supervised = weights * (label_weight * from_label + views_share * from_mean)
    return Parts(supervised / scale, views_share * from_views / scale)


@dataclass(frozen=True, kw_only=True)
class GJS:
    """Agreement of the label with the views of its image, and of the views among themselves.

    `label_weight` in (0, 1) leads from cross-entropy (near 0) to mean absolute error (near 1). All views of an example
    take the target of the first; with one view this is the Jensen–Shannon loss and consistency is 0.
    """

    label_weight: float = 0.3

    def __post_init__(self) -> None:
        _check(self.label_weight)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """Always the same."""
        return "gjs"

    def __call__(
        self,
        outputs: Outputs,
        batch: Batch,
        epoch: Tensor,
        state: Mapping[str, Tensor],
        phase: str,
    ) -> Loss:
        """The mean of one part over labels and of the other over examples."""
        check_outputs(outputs, batch)
        num_examples = len(batch.indices) // batch.views
        _check_views(batch.indices.view(batch.views, num_examples))
        logits, targets = real_rows(outputs, batch)
        targets = targets[:num_examples]
        views = logits.view(batch.views, num_examples, logits.shape[1])
        parts = gjs(views, targets, label_weight=self.label_weight)
        supervised = distributed.mean(parts.supervised, targets.sum(dim=1))
        consistency = distributed.mean(
            parts.consistency, batch.is_real[:num_examples].to(logits.dtype)
        )
        return Loss(
            supervised + consistency,
            {"gjs": supervised.detach(), "consistency": consistency.detach()},
        )


def _check(label_weight: float) -> None:
    check_number("label_weight", label_weight, 1e-3, 1 - 1e-3)  # beyond, float32 has no digits left


def _check_views(indices: Tensor) -> None:
    """(V, B) indices; looks only where it costs nothing."""
    if can_look(indices):
        differing = (indices != indices[0]).any(dim=0).nonzero()
        if len(differing):
            place = int(differing[0])
            raise ValueError(
                f"the views show examples {indices[:, place].tolist()} at place {place}; "
                "every view must show the same examples in the same order"
            )
