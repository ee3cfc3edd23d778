"""Networks for embeddings and tables: a multilayer perceptron, or only a classifier."""

from dataclasses import dataclass

from torch import Tensor, nn

from nearsay.batch import Outputs
from nearsay.models.heads import Head, LinearHead, drawn
from nearsay.models.norm import BatchNorm, Statistics, check_statistics
from nearsay.validation import check_that


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Hidden layers, each linear, batch normalization, ReLU; features are the output of the last.

    Args:
        hidden: Width of each hidden layer.
        batch_norm: False leaves batch normalization out.
        statistics: Of batch normalization under several processes, as in `BatchNorm`.
        head: The classifier on top of the features.

    >>> import torch
    >>> network = MLP(hidden=(16,)).build(num_classes=3, num_inputs=4)
    >>> network(torch.zeros(2, 4)).features.shape
    torch.Size([2, 16])
    """

    hidden: tuple[int, ...] = (512,)
    batch_norm: bool = True
    statistics: Statistics = "global"
    # The head is frozen, so it may be shared.
    head: Head = LinearHead()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_statistics(self.statistics)
        is_right = bool(self.hidden) and min(self.hidden) >= 1
        check_that(is_right, "hidden", "one width or more, such as (512,)", self.hidden)

    def build(self, num_classes: int, *, num_inputs: int, seed: int = 0) -> nn.Module:
        """A module from (B, num_inputs) to `Outputs`."""
        with drawn(seed):
            body = self._body(num_inputs)
            return _Network(body, num_inputs, self.hidden[-1], num_classes, self.head)

    def _body(self, num_inputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        before = num_inputs
        for width in self.hidden:
            # Without a bias, because normalization would subtract it again.
            linear = nn.Linear(before, width, bias=not self.batch_norm)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            layers.append(linear)
            if self.batch_norm:
                layers.append(BatchNorm(width, statistics=self.statistics))
            layers.append(nn.ReLU(inplace=True))
            before = width
        return nn.Sequential(*layers)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Only a classifier; the features are the inputs.

    Args:
        head: The classifier.

    >>> import torch
    >>> Linear().build(num_classes=3, num_inputs=4)(torch.zeros(2, 4)).logits.shape
    torch.Size([2, 3])
    """

    # The head is frozen, so it may be shared.
    head: Head = LinearHead()  # noqa: RUF009

    def build(self, num_classes: int, *, num_inputs: int, seed: int = 0) -> nn.Module:
        """A module from (B, num_inputs) to `Outputs`."""
        with drawn(seed):
            return _Network(nn.Identity(), num_inputs, num_inputs, num_classes, self.head)


class _Network(nn.Module):
    def __init__(
        self, body: nn.Module, num_inputs: int, num_features: int, num_classes: int, head: Head
    ) -> None:
        super().__init__()
        self.num_inputs, self.num_features = num_inputs, num_features
        self.body = body
        self.fc = head.build(num_features, num_classes)

    def forward(self, inputs: Tensor) -> Outputs:
        is_right = inputs.ndim == 2 and inputs.shape[1] == self.num_inputs
        check_that(is_right, "inputs", f"(B, {self.num_inputs}) features", tuple(inputs.shape))
        features = self.body(inputs)
        return Outputs(features, self.fc(features))
