"""One pass of a network over a data set, which makes the table that everything after training reads."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from nearsay import distributed
from nearsay.batch import PADDING, Outputs, Predictions
from nearsay.data.loader import MARGIN, Inputs, finish, num_workers, sweep
from nearsay.transforms import Transform

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

    def over(
        self, networks: Sequence[Module], inputs: Inputs, *, with_features: bool = True
    ) -> Predicted:
        """The features of the first network and the logits of all: of several, the logarithm of their mean belief."""
        return self._over(networks, inputs, with_features=with_features, part=(0, 1))

    def together(self, networks: Sequence[Module], inputs: Inputs) -> Predicted:
        """The same without features, bit for bit, by all processes at once: each does a part, and has the whole then.

        So none of them waits long for another, however many examples there are.
        """
        num = distributed.num_processes()
        with _as_on_the_first(networks):
            if len(inputs) <= (num - 1) * self._batch_size(inputs):  # fewer batches than processes
                return self.over(networks, inputs, with_features=False)
            own = self._over(networks, inputs, with_features=False, part=(distributed.rank(), num))
        logits, indices = (distributed.join(each, self.device) for each in own.predictions[1:])
        told = distributed.join_texts(
            "".join(json.dumps(each) + "\n" for each in own.unreadable.items()), self.device
        )
        unreadable = dict(map(json.loads, told.splitlines()))
        return Predicted(Predictions(torch.empty(len(indices), 0), logits, indices), unreadable)

    @torch.no_grad()
    def _over(
        self,
        networks: Sequence[Module],
        inputs: Inputs,
        *,
        with_features: bool,
        part: tuple[int, int],
    ) -> Predicted:
        if not len(inputs):
            raise ValueError("there are 0 examples to look at; give at least one")
        batch_size = self._batch_size(inputs)
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
                part=part,
            ) as batches:
                for indices, images, problems in batches:
                    assert images is not None
                    unreadable.update(problems)
                    features, logits = self._ask(networks, images)
                    kept = indices != PADDING
                    features = (
                        features.float().cpu()[kept]
                        if with_features
                        else torch.empty(int(kept.sum()), 0)
                    )
                    pieces.append(Predictions(features, logits.float().cpu()[kept], indices[kept]))
        finally:
            for network, was in zip(networks, was_training, strict=True):
                network.train(was)
        return Predicted(
            Predictions(*(torch.cat(parts) for parts in zip(*pieces, strict=True))), unreadable
        )

    def _ask(self, networks: Sequence[Module], images: Tensor) -> Outputs:
        inputs = finish(images.to(self.device, non_blocking=True), self.normalize)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            answers: list[Outputs] = [network(inputs) for network in networks]
        if len(answers) == 1:
            return answers[0]
        beliefs = torch.stack([answer.logits.float().log_softmax(dim=1) for answer in answers])
        return Outputs(answers[0].features, beliefs.logsumexp(dim=0))

    def _batch_size(self, inputs: Inputs) -> int:
        if isinstance(inputs, Tensor) and inputs.ndim == 2:
            return _ROWS
        edges = inputs.shape[-2:] if isinstance(inputs, Tensor) else (self.size, self.size)
        return max(1, min(_ROWS, _PIXELS // (3 * edges[0] * edges[1])))


@contextmanager
def _as_on_the_first(networks: Sequence[Module]) -> Iterator[None]:
    """With the buffers of the first process, whose networks are saved: BatchNorm may count on each for itself."""
    held = (
        [buffer for network in networks for buffer in network.buffers()]
        if distributed.num_processes() > 1
        else []
    )
    before = [buffer.clone() for buffer in held]
    distributed.broadcast_(held)
    try:
        yield
    finally:
        for buffer, old in zip(held, before, strict=True):
            buffer.copy_(old)
