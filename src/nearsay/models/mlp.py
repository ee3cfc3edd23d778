"""Networks for embeddings and tables: a multilayer perceptron, or nothing but a classifier."""

from dataclasses import dataclass

from torch import Tensor, nn

from nearsay.batch import Outputs
from nearsay.models.heads import Head, LinearHead, drawn
from nearsay.models.norm import BatchNorm, Statistics, check_statistics


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Hidden layers of the given widths, each linear, batch normalization, ReLU; features = the last of them."""

    hidden: tuple[int, ...] = (512,)
    batch_norm: bool = True
    statistics: Statistics = "global"  # of batch normalization under several processes
    head: Head = LinearHead()  # noqa: RUF009 — frozen, so it may be shared

    def __post_init__(self) -> None:
        check_statistics(self.statistics)
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(
                f"hidden is {self.hidden}; it must name the width of one layer or more, such as (512,)"
            )

    def build(self, num_classes: int, *, num_inputs: int, seed: int = 0) -> nn.Module:
        """A module from (B, num_inputs) to `Outputs`."""
        with drawn(seed):
            return _Network(
                self._body(num_inputs), num_inputs, self.hidden[-1], num_classes, self.head
            )

    def _body(self, num_inputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before, width in zip((num_inputs, *self.hidden), self.hidden, strict=False):
            linear = nn.Linear(
                before, width, bias=not self.batch_norm
            )  # normalization would take a bias away
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            norm = [BatchNorm(width, statistics=self.statistics)] if self.batch_norm else []
            layers += [linear, *norm, nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A classifier alone; features = the inputs."""

    head: Head = LinearHead()  # noqa: RUF009 — frozen, so it may be shared

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
        if inputs.ndim != 2 or inputs.shape[1] != self.num_inputs:
            raise ValueError(
                f"inputs {tuple(inputs.shape)} must be (B, {self.num_inputs}) features"
            )
        features = self.body(inputs)
        return Outputs(features, self.fc(features))
