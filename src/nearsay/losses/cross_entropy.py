"""Cross-entropy with soft targets, and label smoothing (paper, "Relation to other methods")."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nearsay import distributed
from nearsay.batch import Batch, Loss, Outputs, check_outputs
from nearsay.losses.base import real_rows, upcast
from nearsay.validation import check_number, check_tensors


def cross_entropy(logits: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """(B, C) logits and (B, C) soft targets -> (B,) rows −⟨y, log p⟩, each times the weight (the sum) of its target.

    `smoothing` replaces that share of the target by the uniform distribution of the same weight (paper, L_LS).
    """
    _check(smoothing)
    check_tensors(logits=logits, targets=targets)
    if logits.ndim != 2 or targets.shape != logits.shape:
        raise ValueError(
            f"targets {tuple(targets.shape)} must be distributions of the shape {tuple(logits.shape)} of the logits; "
            "nearsay.one_hot makes them from class numbers"
        )
    targets = upcast(targets)
    targets = (1 - smoothing) * targets + smoothing * targets.mean(
        dim=1, keepdim=True
    )  # the mean is weight / C
    return -(targets * upcast(logits).log_softmax(dim=1)).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """The usual loss, which fits wrong labels as readily as right ones; `smoothing` in [0, 1]."""

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self.smoothing)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """Always the same."""
        return "cross_entropy"

    def __call__(
        self,
        outputs: Outputs,
        batch: Batch,
        epoch: Tensor,
        state: Mapping[str, Tensor],
        phase: str,
    ) -> Loss:
        """The mean over labels."""
        check_outputs(outputs, batch)
        logits, targets = real_rows(outputs, batch)
        total = distributed.mean(
            cross_entropy(logits, targets, smoothing=self.smoothing), targets.sum(dim=1)
        )
        return Loss(total, {"cross_entropy": total.detach()})


def _check(smoothing: float) -> None:
    check_number("smoothing", smoothing, 0, 1)
