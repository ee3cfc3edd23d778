"""One optimization step: plain on a CPU, compiled or replayed from a CUDA graph on a GPU.

Nothing in a step waits for the device. All that changes during training is a tensor that the step
itself updates: its number, from which epoch and learning rate follow, and the flag `is_fine`. When
a loss, gradient or weight is not finite, the flag falls; that step and all later ones change
nothing, until the host looks at the flag.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nearsay import distributed, optim
from nearsay.batch import Batch, Mix, Outputs, first_rows, one_hot
from nearsay.data.loader import Rows, finish
from nearsay.experiment import Experiment
from nearsay.models.pretrained import load_weights

# Steps before one is captured. In these, libraries choose algorithms and allocate memory, which a
# captured step may not do.
_WARM_UP_STEPS = 3
# Warnings of torch.compile that say nothing about this program. Similarities are in full float32
# on purpose; the others come from the compiler inspecting itself.
_COMPILER_WARNINGS = ("TensorFloat32", "Dynamo does not know", "The .grad attribute of a Tensor")


class Learner(NamedTuple):
    """A network and everything that it learns with."""

    network: Module
    optimizer: Optimizer
    average: Module | None
    # The state of the loss.
    state: dict[str, Tensor]
    # The seed of augmentation and mixup.
    seed: int


@dataclass(frozen=True)
class Setting:
    """What a step needs to know besides the experiment."""

    # All inputs on the device, or None if they come with the rows.
    source: Tensor | None  # (N, ...)
    # The labels that each network learns.
    given: tuple[Tensor, ...]  # (N,) each
    label_weights: Tensor  # (C,)
    batches_per_epoch: int
    batches_per_pass: int
    # Whether workers have cut the random crops.
    is_cut: bool
    device: torch.device
    # Of the network's arithmetic.
    dtype: torch.dtype
    captures: bool
    compiles: bool


def make_learners(
    experiment: Experiment,
    num_examples: int,
    num_classes: int,
    example: Tensor,
    device: torch.device,
) -> list[Learner]:
    """The networks of an experiment before the first step; `example` is one input."""
    learners = []
    for number in range(experiment.networks):
        # The first of two networks has the same seed as a network alone.
        seed = experiment.seed + number * 2**32
        network = experiment.backbone.build(num_classes, num_inputs=example.shape[0], seed=seed)
        # float32 also if that is not torch's default dtype.
        network = network.to(device, torch.float32)
        if example.ndim == 3:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if experiment.init is not None:
            init = Path(experiment.init)
            if init.is_dir():
                init = init / "model.safetensors"
            load_weights(network, init, skip_head=True)
        optimizer = experiment.optimizer.build(network.parameters())
        average = None
        if experiment.averaging is not None:
            average = optim.averaged_copy(network)
            if experiment.self_taught:
                optim.by_batch_(average)
        num_features: int = network.num_features  # type: ignore[assignment]
        state = experiment.objective.init_state(num_examples, num_classes, num_features)
        state = {name: tensor.to(device) for name, tensor in state.items()}
        learners.append(Learner(network, optimizer, average, state, seed))
    return learners


class Times(NamedTuple):
    """What follows from the number of a step, 0-d each."""

    epoch: Tensor
    # The pass through the data.
    turn: Tensor
    rate: Tensor
    # Of the averaged weights.
    decay: Tensor


class Step:
    """The step of an experiment, and the tensors that it changes in place."""

    def __init__(self, experiment: Experiment, setting: Setting, learners: list[Learner]) -> None:
        self.experiment, self.setting, self.learners = experiment, setting, learners
        device, num_examples = setting.device, len(setting.given[0])
        # The number of steps that are done.
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        # Whether everything was finite so far, and the first step in which it was not.
        self.is_fine = torch.ones((), dtype=torch.bool, device=device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.dynamics = make_dynamics(num_examples, device)
        # What is logged, summed since the epoch began, and its names.
        self.sums = torch.zeros(0, dtype=torch.float64, device=device)
        self.names: list[str] = []
        # The rows of the step. A captured step reads them from these very tensors.
        self._rows: Rows | None = None
        # The phase of the loss, the warm-up steps since it began, and the graph of this phase.
        self._phase, self._num_warm = "", 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._compile_parts()

    def _compile_parts(self) -> None:
        """Compile the forward parts one by one; backward and optimizer run kernels of torch."""

        def compiled(function: Any) -> Any:
            # All batches have one shape, so the compiler need not consider others.
            return torch.compile(function, dynamic=False) if self.setting.compiles else function

        experiment = self.experiment
        self._networks, self._teachers = [], []
        for learner in self.learners:
            self._networks.append(compiled(learner.network))
            if learner.average is not None:
                self._teachers.append(compiled(learner.average))
        self._prepare = compiled(self._prepared)
        self._times = compiled(self._timed)
        self._observe = compiled(observe_)
        self._objective = compiled(experiment.objective.__call__)
        self._mix = None if experiment.mixup is None else compiled(experiment.mixup.__call__)

    def __call__(self, rows: Rows, phase: str) -> None:
        """Learn from the rows; `phase` is what the loss computes in this epoch."""
        self._load(rows)
        if phase != self._phase:
            # Another phase is another computation, so it needs a graph of its own.
            self._phase, self._num_warm, self._graph = phase, 0, None
        if self._graph is not None:
            self._graph.replay()
        elif not self.setting.captures:
            self._step()
        else:
            self._warm_up()
            if self._num_warm == _WARM_UP_STEPS:
                self._capture()

    def _load(self, rows: Rows) -> None:
        """Bring the rows to the device, to the place where a captured step reads them."""
        if self._rows is None or not self.setting.captures:
            # A copy if steps are captured: later rows are written into it.
            indices = rows.indices.to(self.setting.device, copy=self.setting.captures)
            self._rows = Rows(indices, self._inputs_of(rows))
            return
        self._rows.indices.copy_(rows.indices, non_blocking=True)
        if self._rows.inputs is not None and rows.inputs is not None:
            self._rows.inputs.copy_(rows.inputs, non_blocking=True)

    def _inputs_of(self, rows: Rows) -> Tensor | None:
        """The inputs on the device, or None if all of them are there already."""
        return None if rows.inputs is None else rows.inputs.to(self.setting.device)

    def _warm_up(self) -> None:
        """A real step on another stream, as CUDA graphs require before a capture."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._step()
        torch.cuda.current_stream().wait_stream(beside)
        self._num_warm += 1

    def _capture(self) -> None:
        """Record the kernels of a step, without running them; `replay` runs them all at once."""
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local", because another thread may pin memory meanwhile, which a capture in the
        # default mode would take for an error.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._step()

    def _step(self) -> None:
        """One step; plain, or while it is compiled or captured."""
        if not self.setting.compiles:
            self._learn_all()
            return
        with warnings.catch_warnings():
            for message in _COMPILER_WARNINGS:
                warnings.filterwarnings("ignore", message)
            self._learn_all()

    def _learn_all(self) -> None:
        times = self._times(self.count)
        for number in range(len(self.learners)):
            self._learn(number, times)
        self.count += 1

    def _timed(self, count: Tensor) -> Times:
        experiment = self.experiment
        epoch = (count.double() / self.setting.batches_per_epoch).float()
        # A warm-up starts at a rate of 0, so the first step would learn nothing. It takes the rate
        # of half a step later.
        start = 0.5 / self.setting.batches_per_epoch
        factor = experiment.schedule.factor(epoch.clamp(min=start), experiment.epochs)
        decay = torch.full_like(epoch, experiment.averaging or 0.0)
        if experiment.averaging_ramp:
            decay = decay * optim.ramp(epoch, experiment.averaging_ramp)
        turn = count // self.setting.batches_per_pass
        return Times(epoch, turn, experiment.optimizer.lr * factor, decay)

    def _learn(self, number: int, times: Times) -> None:
        """The step of one network."""
        learner = self.learners[number]
        batch = self._make_batch(number, times)
        # Buffers and the state of the loss change in the forward pass, before it is known whether
        # the step is finite.
        changing = [*learner.network.buffers(), *learner.state.values()]
        before = optim.snapshot(changing)
        with self._autocast():
            outputs = self._networks[number](batch.inputs)
        # The loss is computed outside of autocast, in float32 or better.
        loss = self._objective(outputs, batch, times.epoch, learner.state, self._phase)
        # Gradients are set to None, so that a captured step allocates them in its own memory.
        learner.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()

        norm = self._reduce_gradients(learner.network)
        self._check_finite(loss.total, norm)
        # From here on nothing changes, bit for bit, unless the flag stands.
        optim.set_rate_(learner.optimizer, times.rate)
        optim.step_if_(learner.optimizer, self.is_fine)
        optim.keep_old_(changing, before, self.is_fine)
        if learner.average is not None:
            decay = times.decay.where(self.is_fine, 1.0)
            optim.update_average_(learner.average, learner.network, decay)
        # Of two networks, the first is logged.
        if number == 0:
            self._record(outputs, batch, {"loss": loss.total.detach(), **loss.terms})

    def _make_batch(self, number: int, times: Times) -> Batch:
        """The batch of one network: augmented, mixed, and with the teacher's outputs."""
        assert self._rows is not None
        batch: Batch = self._prepare(self._rows.indices, self._rows.inputs, times.turn, number)
        plain = self._own_rows(batch)
        teacher = self._ask_teacher(number, plain)
        if self._mix is not None:
            # A batch is mixed before it is shared out, so that partners are the same whatever the
            # number of processes.
            mixed = self._mix(batch, seed=self.learners[number].seed, epoch=times.turn)
            plain = self._own_rows(mixed)
        return replace(plain, teacher=teacher)

    def _own_rows(self, batch: Batch) -> Batch:
        """The rows of this process: resident batches hold those of all processes."""
        if self.setting.source is None:
            return batch
        return shard(batch)

    def _prepared(self, indices: Tensor, inputs: Tensor | None, turn: Tensor, number: int) -> Batch:
        """Rows as a batch, augmented and normalized, for the network of that number."""
        setting = self.setting
        if inputs is None:
            assert setting.source is not None
            inputs = setting.source[indices]
        views = len(inputs) // len(indices)
        # Padding has the index −1 and becomes unlabeled: a row of zeros.
        labels = setting.given[number][indices].where(indices >= 0, -1)  # (B,)
        targets = one_hot(labels, len(setting.label_weights)) * setting.label_weights  # (B, C)
        batch = Batch(
            inputs=inputs,
            targets=targets.repeat(views, 1),
            indices=indices.repeat(views),
            views=views,
        )
        if self.experiment.augment is not None:
            seed = self.learners[number].seed
            batch = self.experiment.augment(batch, seed=seed, epoch=turn, is_cut=setting.is_cut)
        return replace(batch, inputs=finish(batch.inputs, self.experiment.normalize))

    def _ask_teacher(self, number: int, batch: Batch) -> Outputs | None:
        """Outputs of the other network's averaged weights, or of its own for the first views."""
        if self.experiment.self_taught:
            teacher, views = self._teachers[number], batch.views
        elif len(self.learners) == 2:
            teacher, views = self._teachers[1 - number], 1
        else:
            return None
        inputs = batch.inputs[: len(batch.inputs) // views]
        with torch.no_grad(), self._autocast():
            outputs: Outputs = teacher(inputs)
        if views > 1:
            # All views of an example are taught by the outputs for its first.
            outputs = Outputs(*(part.repeat(views, 1) for part in outputs))
        return outputs

    def _autocast(self) -> AbstractContextManager[Any]:
        """The dtype of the networks' arithmetic."""
        setting = self.setting
        is_lower = setting.dtype != torch.float32
        return torch.autocast(setting.device.type, setting.dtype, enabled=is_lower)

    def _reduce_gradients(self, network: Module) -> Tensor:
        """Average the gradients over processes and clip them; returns their norm before, 0-d."""
        parameters, gradients = [], []
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameters.append(parameter)
                gradients.append(parameter.grad)
        distributed.average_(gradients)
        if self.experiment.clip:
            return optim.clip_gradients_(parameters, self.experiment.clip)
        return optim.grad_norm(parameters)

    def _check_finite(self, loss: Tensor, norm: Tensor) -> None:
        """Lower the flag on all processes if this step is not finite; it never rises again."""
        is_bad = distributed.total((~(loss.isfinite() & norm.isfinite())).float()) > 0
        self.bad_step.copy_(torch.where(self.is_fine & is_bad, self.count, self.bad_step))
        self.is_fine &= ~is_bad

    @torch.no_grad()
    def _record(self, outputs: Outputs, batch: Batch, terms: dict[str, Tensor]) -> None:
        """Add the terms to what is logged and, unless inputs are mixed, observe every example."""
        values = {"steps": torch.ones_like(terms["loss"]), **terms}
        if batch.mix is None:
            # Only the first views; all processes observe the examples of all.
            num = len(batch.indices) // batch.views
            indices = distributed.gather(batch.indices[:num].where(self.is_fine, -1))
            logits = distributed.gather(outputs.logits[:num].float())
            labels = self.setting.given[0][indices].where(indices >= 0, -1)
            values["right"], values["labeled"] = self._observe(
                self.dynamics, logits, labels, indices, repeats=self.experiment.balanced
            )
        # New names appear in warm-up steps only, so a captured step always adds to one tensor.
        if missing := [name for name in values if name not in self.names]:
            self.begin_sums(missing)
        zero = torch.zeros_like(terms["loss"])
        news = torch.stack([values.get(name, zero).to(zero.dtype) for name in self.names])
        # A process knows the loss of its own rows only.
        distributed.average_([news])
        self.sums += news.double().where(self.is_fine, 0.0)

    def prepare(self, rows: Rows, turn: int) -> Tensor:
        """The inputs of the network for these rows in pass `turn`, augmented as in training."""
        device = self.setting.device
        number = torch.full((), turn, device=device)
        batch = self._prepared(rows.indices.to(device), self._inputs_of(rows), number, 0)
        return self._own_rows(batch).inputs

    def averages(self) -> list[Module | None]:
        """The averaged networks."""
        return [learner.average for learner in self.learners]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step changes, by its name in a checkpoint; copy into it to restore."""
        tensors = {"count": self.count}
        for name, tensor in self.dynamics.items():
            tensors[f"dynamics.{name}"] = tensor
        tensors["sums"] = self.sums
        if self.experiment.propagate_at is not None:
            for number, given in enumerate(self.setting.given):
                tensors[f"given{number}"] = given
        for number, (network, optimizer, average, state, _) in enumerate(self.learners):
            # The state of the loss was called memory when the format was made.
            parts = {
                "network": network.state_dict(),
                "optimizer": optim.optimizer_state(optimizer),
                "memory": state,
            }
            if average is not None:
                parts["average"] = average.state_dict()
            for part, members in parts.items():
                for name, tensor in members.items():
                    tensors[f"{part}{number}.{name}"] = tensor
        return tensors

    def buffers(self) -> list[Tensor]:
        """The buffers of all networks, which may differ between processes because of BatchNorm."""
        buffers: list[Tensor] = []
        for learner in self.learners:
            buffers += learner.network.buffers()
        for average in self.averages():
            if average is not None:
                buffers += average.buffers()
        return buffers

    def begin_sums(self, names: Sequence[str]) -> None:
        """Make room to sum up values of these names; sums that exist are kept."""
        values = dict(zip(self.names, self.sums, strict=True))
        zero = torch.zeros((), dtype=torch.float64, device=self.setting.device)
        self.names = list(dict.fromkeys([*self.names, *names]))
        self.sums = torch.stack([values.get(name, zero) for name in self.names])

    def drain(self) -> dict[str, float]:
        """The means of what was logged since the epoch began; a new epoch begins."""
        means = self.means()
        self.sums.zero_()
        return means

    def means(self) -> dict[str, float]:
        """The means of what was logged since the epoch began."""
        sums = dict(zip(self.names, self.sums.tolist(), strict=True))
        steps, labeled, right = [sums.pop(name, 0.0) for name in ("steps", "labeled", "right")]
        means = {}
        if steps:
            means = {name: value / steps for name, value in sums.items()}
        if labeled:
            means["train_accuracy"] = right / labeled
        return means


def shard(batch: Batch) -> Batch:
    """The rows of this process, of a batch that holds the rows of all processes."""
    num_processes, own = distributed.num_processes(), distributed.rank()
    if num_processes == 1:
        return batch

    def part_of(rows: Tensor) -> Tensor:
        # Rows are view-major, so every view is divided among the processes.
        per_view = rows.view(batch.views, num_processes, -1, *rows.shape[1:])  # (V, P, B / P, ...)
        return per_view[:, own].flatten(0, 1)

    own_part = replace(
        batch,
        inputs=part_of(batch.inputs),
        targets=part_of(batch.targets),
        indices=part_of(batch.indices),
    )
    if batch.mix is not None:
        own_part = replace(own_part, mix=Mix(*map(part_of, batch.mix)))
    if batch.plain_targets is not None:
        own_part = replace(own_part, plain_targets=part_of(batch.plain_targets))
    return own_part


def make_dynamics(num_examples: int, device: torch.device) -> dict[str, Tensor]:
    """Statistics of every example, (N + 1,) each: the last row takes what must not be kept."""
    dtypes = {"confidence": torch.float32, "spread": torch.float32, "margin": torch.float32}
    dtypes |= {"count": torch.int32, "changes": torch.int32, "predicted": torch.int32}
    dynamics = {}
    for name, dtype in dtypes.items():
        dynamics[name] = torch.zeros(num_examples + 1, dtype=dtype, device=device)
    return dynamics


def observe_(
    dynamics: dict[str, Tensor],
    logits: Tensor,
    labels: Tensor,
    indices: Tensor,
    *,
    repeats: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add (B, C) logits of the examples `indices` (B,) with labels (B,) to their statistics.

    The statistics are running means of the probability of the label (`confidence`) and of its logit
    less the largest other (`margin`), the sum of squared deviations of the confidence (`spread`),
    and how often the predicted class changed. With `repeats`, an example may be in the batch twice
    and counts by its first row. Padding and unlabeled rows are left out.

    Returns how many predictions equal the label, and of how many.
    """
    # Rows that are left out are written into the last row of each table, which is then cleared.
    last = len(dynamics["count"]) - 1
    is_counted = first_rows(indices) if repeats else indices >= 0
    places = indices.where(is_counted & (labels >= 0), last)
    old = {name: tensor[places] for name, tensor in dynamics.items()}
    own = labels.clamp(min=0)[:, None]  # (B, 1)
    confidence = logits.softmax(dim=1).gather(1, own)[:, 0]
    other = logits.scatter(1, own, -torch.inf).amax(dim=1)
    # With a single class there is no other logit.
    margin = logits.gather(1, own)[:, 0] - other.where(other > -torch.inf, 0.0)
    predicted = logits.argmax(dim=1).int()
    # Welford's update of a mean and of the sum of squared deviations.
    count = old["count"] + 1
    step = confidence - old["confidence"]
    mean = old["confidence"] + step / count
    has_changed = (predicted != old["predicted"]) & (old["count"] > 0)
    new = {
        "confidence": mean,
        "spread": old["spread"] + step * (confidence - mean),
        "margin": old["margin"] + (margin - old["margin"]) / count,
        "count": count,
        "changes": old["changes"] + has_changed.int(),
        "predicted": predicted,
    }
    for name, tensor in dynamics.items():
        tensor.index_copy_(0, places, new[name].to(tensor.dtype))
        tensor[last].zero_()
    return (predicted == labels).sum(), (labels >= 0).sum()


def restore(step: Step, saved: dict[str, Tensor]) -> None:
    """Copy a checkpoint into the tensors of a step; ValueError if it is of another experiment."""
    live = step.tensors()
    for name in live.keys() - saved.keys():
        raise ValueError(f"{name} is missing in the checkpoint")
    for name in saved.keys() - live.keys():
        raise ValueError(f"{name} is in the checkpoint only")
    with torch.no_grad():
        for name, tensor in live.items():
            if saved[name].shape != tensor.shape:
                shapes = f"{tuple(saved[name].shape)} in the checkpoint, {tuple(tensor.shape)} now"
                raise ValueError(f"{name} has another shape: {shapes}")
            tensor.copy_(saved[name])
