"""One pass of a network over a data set, which makes the table that everything after training reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from nearsay.augment import Transform
from nearsay.core import PADDING, Outputs, Predictions
from nearsay.loading import MARGIN, Inputs, finish, num_workers, sweep

_ROWS = 1024  # of small images in one go
_PIXELS = _ROWS * 32 * 32 * 3  # in one go, of larger ones


class Predicted(NamedTuple):
    """The table, and the examples that are not in it."""

    predictions: Predictions  # on the CPU
    unreadable: dict[int, str]  # example -> why it could not be decoded


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How to look at a data set."""

    normalize: Transform | None
    size: int  # of images on disk, once they are cut and resized
    device: torch.device
    dtype: torch.dtype
    workers: int | None = None
    timeout: float = 600.0
    margin: float = MARGIN  # of images on disk: how much of the shorter side is looked at

    @torch.no_grad()
    def over(self, networks: Sequence[Module], inputs: Inputs, *, with_features: bool = True) -> Predicted:
        """The features of the first network and the logits of all: of several, the logarithm of their mean belief."""
        if not len(inputs):
            raise ValueError("there are 0 examples to look at; give at least one")
        batch_size = _ROWS if isinstance(inputs, Tensor) and inputs.ndim == 2 else self._batch_size(inputs)
        pieces: list[Predictions] = []
        unreadable: dict[int, str] = {}
        was_training = [network.training for network in networks]
        for network in networks:
            network.eval()
        try:
            with sweep(
                inputs,
                size=self.size,
                margin=self.margin,
                batch_size=batch_size,
                workers=num_workers(inputs, self.workers),
                timeout=self.timeout,
                pin=self.device.type == "cuda",
            ) as batches:
                for indices, images, problems in batches:
                    assert images is not None
                    unreadable.update(problems)
                    features, logits = self._ask(networks, images)
                    kept = indices != PADDING
                    features = features.float().cpu()[kept] if with_features else torch.empty(int(kept.sum()), 0)
                    pieces.append(Predictions(features, logits.float().cpu()[kept], indices[kept]))
        finally:
            for network, was in zip(networks, was_training, strict=True):
                network.train(was)
        return Predicted(Predictions(*(torch.cat(parts) for parts in zip(*pieces, strict=True))), unreadable)

    def _ask(self, networks: Sequence[Module], images: Tensor) -> Outputs:
        inputs = finish(images.to(self.device, non_blocking=True), self.normalize)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            answers: list[Outputs] = [network(inputs) for network in networks]
        if len(answers) == 1:
            return answers[0]
        beliefs = torch.stack([answer.logits.float().log_softmax(dim=1) for answer in answers])
        return Outputs(answers[0].features, beliefs.logsumexp(dim=0))

    def _batch_size(self, inputs: Inputs) -> int:
        edges = inputs.shape[-2:] if isinstance(inputs, Tensor) else (self.size, self.size)
        return max(1, min(_ROWS, _PIXELS // (3 * edges[0] * edges[1])))
