"""Bootstrapping: part of the target is the network's own prediction (Reed et al. 2015)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from nearsay import distributed
from nearsay.batch import Batch, Loss, Outputs, check_outputs
from nearsay.losses.base import real_rows, upcast
from nearsay.losses.cross_entropy import cross_entropy
from nearsay.validation import check_choice, check_number, check_tensors

Kind = Literal["soft", "hard"]


def bootstrap(
    logits: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.5,
    kind: Kind = "soft",
    temperature: float = 1.0,
    stop_gradient: bool = False,
) -> Tensor:
    """(B,) losses (1 − α)·ℓ(p, y) + α·weight·ℓ(p, σ_B(z)): L_B of the paper (arXiv:1412.6596).

    The defaults are those of the released code of NCR.

    Args:
        logits: (B, C).
        targets: (B, C) distributions; the sum of a row is its weight.
        alpha: the share of the prediction in the target, in [0, 1].
        kind: "soft" takes σ_B(z) = softmax(z / temperature), "hard" the one-hot argmax.
        temperature: divides the logits of a soft prediction, from 0.01 to 100.
        stop_gradient: whether a soft prediction is a constant for the gradient.

    >>> import torch
    >>> bootstrap(torch.zeros(1, 4), torch.eye(4)[:1], alpha=1.0)
    tensor([1.3863])
    """
    _check(alpha, kind, temperature)
    check_tensors(logits=logits, targets=targets)
    logits = upcast(logits)
    log_probabilities = logits.log_softmax(dim=1)  # (B, C)
    if kind == "hard":
        # The gradient of a maximum holds the argmax fixed, as a one-hot target would.
        own = -log_probabilities.max(dim=1).values
    else:
        prediction = (logits / temperature).softmax(dim=1)
        if stop_gradient:
            prediction = prediction.detach()
        own = -(prediction * log_probabilities).sum(dim=1)
    return (1 - alpha) * cross_entropy(logits, targets) + alpha * upcast(targets).sum(dim=1) * own


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Labels and own predictions in fixed proportion. An unlabeled row has no loss.

    Attributes:
        alpha: the share of the prediction in the target, in [0, 1].
        kind: "soft" takes the softmax of the logits as prediction, "hard" the one-hot argmax.
        temperature: divides the logits of a soft prediction, from 0.01 to 100.
        stop_gradient: whether a soft prediction is a constant for the gradient.

    >>> from nearsay.losses import NCR
    >>> NCR(base=Bootstrap(alpha=0.3, kind="hard")).base.alpha
    0.3
    """

    alpha: float = 0.5
    kind: Kind = "soft"
    temperature: float = 1.0
    stop_gradient: bool = False

    def __post_init__(self) -> None:
        _check(self.alpha, self.kind, self.temperature)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        return {}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        return "bootstrap"

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        check_outputs(outputs, batch)
        logits, targets = real_rows(outputs, batch)
        rows = bootstrap(
            logits,
            targets,
            alpha=self.alpha,
            kind=self.kind,
            temperature=self.temperature,
            stop_gradient=self.stop_gradient,
        )
        total = distributed.mean(rows, targets.sum(dim=1))
        return Loss(total, {"bootstrap": total.detach()})


def _check(alpha: float, kind: str, temperature: float) -> None:
    check_number("alpha", alpha, 0, 1)
    check_choice("kind", kind, get_args(Kind))
    check_number("temperature", temperature, 0.01, 100)
