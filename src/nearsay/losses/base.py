"""A loss that is a function of logits and targets, as an objective without state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from nearsay import distributed
from nearsay.batch import Batch, Loss, Objective, Outputs, check_outputs
from nearsay.losses.cross_entropy import real_rows


@dataclass(frozen=True, kw_only=True)
class LossFunction:
    """The mean of `function(logits, targets)` over labels, without padding."""

    function: Callable[[Tensor, Tensor], Tensor]

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """Empty."""
        return {}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """The name of the function."""
        return self._name

    def __call__(
        self,
        outputs: Outputs,
        batch: Batch,
        epoch: Tensor,
        state: Mapping[str, Tensor],
        phase: str,
    ) -> Loss:
        """The loss of one batch."""
        check_outputs(outputs, batch)
        logits, targets = real_rows(outputs, batch)
        total = distributed.mean(self.function(logits, targets), targets.sum(dim=1))
        return Loss(total, {self._name: total.detach()})

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


def as_objective(value: object) -> Objective:
    """The value itself if it is an objective; a function of logits and targets is wrapped."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(f"objective must be a loss, got {value!r}.")
    if hasattr(value, "init_state") and hasattr(value, "phase"):
        return value
    return LossFunction(function=value)
