"""Cross-entropy with soft targets, and label smoothing (paper, "Relation to other methods")."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nearsay import distributed
from nearsay.batch import Batch, Loss, Outputs, check_outputs
from nearsay.losses.base import real_rows, upcast
from nearsay.validation import check_number, check_tensors


def cross_entropy(logits: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """(B,) cross-entropy −⟨y, log p⟩ of each row, times the weight of its target.

    Args:
        logits: (B, C).
        targets: (B, C) distributions; the sum of a row is its weight. `nearsay.one_hot` makes them
            from class numbers.
        smoothing: the share of the target that is replaced by the uniform distribution (paper,
            L_LS), in [0, 1].

    >>> import torch
    >>> cross_entropy(torch.zeros(1, 4), torch.eye(4)[:1])
    tensor([1.3863])
    """
    _check(smoothing)
    check_tensors(logits=logits, targets=targets)
    if logits.ndim != 2 or targets.shape != logits.shape:
        raise ValueError(
            f"targets must be distributions of the shape of the logits, {tuple(logits.shape)}, "
            f"got {tuple(targets.shape)}. Use nearsay.one_hot."
        )
    targets = upcast(targets)
    # The mean of a row is weight / C, which is the uniform distribution of the same weight.
    targets = (1 - smoothing) * targets + smoothing * targets.mean(dim=1, keepdim=True)
    return -(targets * upcast(logits).log_softmax(dim=1)).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """The usual loss, which fits wrong labels as readily as right ones.

    Attributes:
        smoothing: the share of the target that is replaced by the uniform distribution, in [0, 1].

    >>> from nearsay.losses import NCR
    >>> NCR(base=CrossEntropy(smoothing=0.1)).base
    CrossEntropy(smoothing=0.1)
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self.smoothing)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        return {}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        return "cross_entropy"

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        check_outputs(outputs, batch)
        logits, targets = real_rows(outputs, batch)
        rows = cross_entropy(logits, targets, smoothing=self.smoothing)
        total = distributed.mean(rows, targets.sum(dim=1))
        return Loss(total, {"cross_entropy": total.detach()})


def _check(smoothing: float) -> None:
    check_number("smoothing", smoothing, 0, 1)
