"""What losses share: a formula of (logits, targets) as an objective, and the masking of padding."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nearsay import distributed
from nearsay.batch import Batch, Loss, Objective, Outputs, check_outputs

Formula = Callable[[Tensor, Tensor], Tensor]
"""(B, C) logits and (B, C) targets -> (B,) losses."""

# The log has columns of its own with these names.
_RESERVED = ("loss", "steps")


@dataclass(frozen=True, kw_only=True)
class LossFunction:
    """An objective without state: the mean of a formula over the labels of the global batch.

    The formula is called with logits and targets, both (B, C) in float32 or float64, and returns
    one loss per row, (B,). A target row is a distribution: it sums to 1. Its weight is applied
    afterwards, and a row without a label has the weight 0. The formula may be a function, or a
    frozen dataclass with a method `__call__(self, logits, targets)`, with its
    hyper-parameters as fields.

    Attributes:
        function: the formula. In the log, the loss has its name.

    >>> import torch
    >>> from nearsay.losses import NCR, LossFunction
    >>> def brier(logits, targets):
    ...     return (logits.softmax(dim=1) - targets).square().sum(dim=1)
    >>> objective = LossFunction(function=brier)
    >>> objective.name
    'brier'
    >>> NCR(base=brier).base == objective
    True
    """

    function: Formula

    def __post_init__(self) -> None:
        if isinstance(self.function, type) or not callable(self.function):
            raise ValueError(
                f"function must be callable with (logits, targets), got {self.function!r}."
            )
        if not _takes_two(self.function):
            raise ValueError(
                f"{self.name} must take two arguments, (logits, targets), got the signature "
                f"{inspect.signature(self.function)}."
            )

    @property
    def name(self) -> str:
        """The name of the function, or of its class, in snake case."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        return "formula" if name in _RESERVED or not name.isidentifier() else name

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        return {}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        return self.name

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        check_outputs(outputs, batch)
        logits, targets = real_rows(outputs, batch)
        weights = targets.sum(dim=1)  # (B,)
        has_label = (weights > 0)[:, None]
        labels = targets / weights.where(weights > 0, 1.0)[:, None]
        # A formula may take logarithms of the targets, so a row of zeros must not reach it.
        rows = self.function(logits, labels.where(has_label, 1 / labels.shape[1]))
        if not isinstance(rows, Tensor) or rows.shape != weights.shape:
            shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"{self.name} must return one loss per row, of shape {tuple(weights.shape)}, "
                f"got {shape}. Take no mean over the batch."
            )
        has_gradient = rows.requires_grad or not outputs.logits.requires_grad
        if torch.is_grad_enabled() and not has_gradient:
            raise ValueError(
                f"{self.name} must have a gradient with respect to the logits, got none. "
                "Compute it without detach(), numpy() and argmax()."
            )
        total = distributed.mean(rows * weights, weights)
        return Loss(total, {self.name: total.detach()})


def as_objective(value: object, *, name: str = "objective") -> Objective:
    """The value itself if it is an objective; a formula of logits and targets as a `LossFunction`.

    Args:
        value: an objective such as `ELR()`, a function `f(logits, targets)` that returns one loss
            per row, or a frozen dataclass with such a `__call__`.
        name: the name of the argument in the error message.

    >>> from nearsay.losses import ELR, as_objective, cross_entropy
    >>> as_objective(ELR())
    ELR(beta=0.7, weight=3.0, ramp=0.0, reweigh=False)
    >>> as_objective(cross_entropy).name
    'cross_entropy'
    """
    if isinstance(value, type):
        raise ValueError(f"{name} must be an instance, got the class. Use {value.__name__}(...).")
    if hasattr(value, "init_state") and hasattr(value, "phase"):
        return value  # type: ignore[return-value]
    if not callable(value):
        raise ValueError(
            f"{name} must be a loss such as NCR() or a function of (logits, targets), "
            f"got {value!r}."
        )
    return LossFunction(function=value)


def _takes_two(function: Formula) -> bool:
    """Whether it can be called with logits and targets, as far as its signature is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least: 16 bits are too few for a loss. float64 stays.

    >>> import torch
    >>> upcast(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def real_rows(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """(B, C) logits and (B, C) targets, upcast, with zeros instead of padding.

    The content of padding, even NaN, reaches neither a value nor a gradient. The row sums of the
    targets are the weights of the labels.

    Args:
        outputs: of the network.
        batch: whose `indices` say which rows are padding.

    >>> import torch
    >>> from nearsay import Batch, Outputs, one_hot
    >>> logits = torch.tensor([[1.0, 2.0], [torch.nan, 0.0]])
    >>> batch = Batch(
    ...     inputs=logits, targets=one_hot(torch.tensor([1, 0]), 2), indices=torch.tensor([5, -1])
    ... )
    >>> real_rows(Outputs(logits, logits), batch)[0]
    tensor([[1., 2.],
            [0., 0.]])
    """
    is_real = batch.is_real[:, None]
    return upcast(outputs.logits).where(is_real, 0.0), upcast(batch.targets).where(is_real, 0.0)


def not_finite(rows: Tensor, is_real: Tensor) -> Tensor:
    """(B,) NaN for real rows with a value that is not finite, else 0.

    A table that leaves such a row out adds this to its loss, so that the loss shows it.

    Args:
        rows: (B, D) features or (B, C) probabilities.
        is_real: (B,) bool, False for padding.

    >>> not_finite(torch.tensor([[1.0], [torch.inf]]), torch.tensor([True, True]))
    tensor([0., nan])
    """
    is_fine = rows.isfinite().all(dim=1) | ~is_real
    return torch.zeros_like(rows[:, 0]).masked_fill(~is_fine, torch.nan)


def part_of_state(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of one part of a loss: names that begin with `name.`, without that prefix."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
