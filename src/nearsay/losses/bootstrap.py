"""Bootstrapping: part of the target is the network's own prediction (Reed et al. 2015, arXiv:1412.6596)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nearsay import distributed
from nearsay.batch import Batch, Loss, Outputs, check_outputs
from nearsay.losses.base import real_rows, upcast
from nearsay.losses.cross_entropy import cross_entropy
from nearsay.validation import check_number, check_tensors

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
    """(B, C) logits and (B, C) soft targets -> (B,) rows (1 − α)·ℓ(p, y) + α·weight·ℓ(p, σ_B(z)): the paper's L_B.

    "soft": σ_B(z) = softmax(z / temperature); "hard": one-hot argmax, for which the last two choices do not matter.
    The released code of NCR uses softmax, α = 0.5 and no stop-gradient, as the defaults here.
    """
    _check(alpha, kind, temperature)
    check_tensors(logits=logits, targets=targets)
    logits = upcast(logits)
    log_probabilities = logits.log_softmax(dim=1)  # (B, C)
    if kind == "hard":
        own = -log_probabilities.max(dim=1).values  # its gradient holds the argmax fixed
    else:
        prediction = (logits / temperature).softmax(dim=1)
        own = -((prediction.detach() if stop_gradient else prediction) * log_probabilities).sum(
            dim=1
        )
    return (1 - alpha) * cross_entropy(logits, targets) + alpha * upcast(targets).sum(dim=1) * own


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Labels and own predictions in fixed proportion; `alpha` in [0, 1] is the share of the predictions.

    An unlabeled row has no loss: its own prediction, too, counts by the weight of its label.
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
        """Nothing."""
        return {}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """Always the same."""
        return "bootstrap"

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
    if kind not in ("soft", "hard"):
        raise ValueError(f'kind={kind!r} must be "soft" or "hard"')
    check_number("temperature", temperature, 0.01, 100)
