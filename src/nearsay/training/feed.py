"""What the steps of a training are fed with: who is in which batch, from the device or read ahead by workers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nearsay import distributed
from nearsay.data.loader import Rows, Stream, is_resident, num_workers, training_reader
from nearsay.experiment import Experiment
from nearsay.training.splits import Splits, make_order


class Feed:
    """The rows of every step, the same ones whichever way they come."""

    def __init__(self, experiment: Experiment, splits: Splits, device: torch.device) -> None:
        machine, inputs = experiment.machine, splits.inputs
        self.order = make_order(experiment, splits)
        self.source: Tensor | None = (
            None  # (N, ...) all inputs on the device, None where they are streamed
        )
        reader = training_reader(
            inputs, experiment.augment, size=experiment.image_size, seed=experiment.seed
        )
        self.is_cut = any(
            crop is not None for crop in reader.crops
        )  # whether reading is the first step of augmenting
        self._stream: Stream | None = None
        if is_resident(inputs, device, machine.loading):
            assert isinstance(inputs, Tensor)
            self.source = inputs.to(device)
            self.order.to(device)
        else:
            workers = num_workers(inputs, machine.workers)
            self._stream = Stream(
                reader, self._who, workers, machine.timeout, pin=device.type == "cuda"
            )

    def rows(self, steps: range) -> Iterator[Rows]:
        """Those of each step, in turn."""
        if self._stream is not None:
            return self._stream.rows(steps)
        return (Rows(self.order.batch(step), None) for step in steps)

    def read(self, step: int) -> Rows:
        """Those of one step, now and in this process."""
        if self._stream is not None:
            return self._stream.reader.read(*self._who(step))
        return Rows(self.order.batch(step), None)

    def explained(self) -> AbstractContextManager[None]:
        """Where rows are used: the death of a worker becomes a sentence, and no worker is left behind."""
        return nullcontext() if self._stream is None else self._stream.explained()

    def _who(self, step: int) -> tuple[Tensor, int]:
        """The examples of this process in a step, and the pass."""
        share = self.order.batch_size // distributed.num_processes()
        own = self.order.batch(step)[distributed.rank() * share : (distributed.rank() + 1) * share]
        return own, step // self.order.batches_per_pass
