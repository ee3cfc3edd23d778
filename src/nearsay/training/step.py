"""One optimization step, written once: plain on a CPU, compiled or replayed from a CUDA graph on a GPU.

Nothing in a step waits for the device. What changes during training is a tensor that the step itself moves on: the
number of the step, from which epoch and learning rate follow, and the flag that all has been finite. Once something
is not finite, that step and all later ones change nothing, until the host looks at the flag.
"""

import warnings
from collections.abc import Sequence
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
from nearsay.models import load_weights

_WARM_UP = 3  # steps outside a graph before one is captured, in which libraries choose and allocate what they need


class Learner(NamedTuple):
    """A network and all that it has gathered."""

    network: Module
    optimizer: Optimizer
    average: Module | None
    state: dict[str, Tensor]
    seed: int  # of augmentation and mixup


@dataclass(frozen=True)
class Setting:
    """What a step needs to know besides the experiment."""

    source: Tensor | None  # (N, ...) all inputs on the device, None where they come with the rows
    given: tuple[Tensor, ...]  # (N,) labels, for each network
    label_weights: Tensor  # (C,)
    batches_per_epoch: int
    batches_per_pass: int
    is_cut: bool  # random crops were cut by a worker
    device: torch.device
    dtype: torch.dtype  # of the network's arithmetic
    captures: bool
    compiles: bool


def make_learners(
    experiment: Experiment,
    num_examples: int,
    num_classes: int,
    example: Tensor,
    device: torch.device,
) -> list[Learner]:
    """The networks of an experiment as they are before the first step; `example` is an input without its first axis."""
    learners = []
    for number in range(experiment.networks):
        seed = (
            experiment.seed + number * 2**32
        )  # one seed for each network, the first as if it were alone
        network = experiment.backbone.build(num_classes, num_inputs=example.shape[0], seed=seed)
        network = network.to(device, torch.float32)  # also where that is not torch's default
        if example.ndim == 3:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if experiment.init is not None:
            init = Path(experiment.init)
            load_weights(
                network, init / "model.safetensors" if init.is_dir() else init, skip_head=True
            )
        optimizer = experiment.optimizer.build(network.parameters())
        average = optim.averaged_copy(network) if experiment.averaging is not None else None
        if average is not None and experiment.self_taught:
            optim.by_batch_(average)
        num_features: int = network.num_features  # type: ignore[assignment]
        state = experiment.objective.init_state(num_examples, num_classes, num_features)
        state = {name: tensor.to(device) for name, tensor in state.items()}
        learners.append(Learner(network, optimizer, average, state, seed))
    return learners


class Times(NamedTuple):
    """What follows from the number of a step, 0-d each."""

    epoch: Tensor
    turn: Tensor  # the pass through the data
    rate: Tensor
    decay: Tensor  # of averaged weights


class Step:
    """The step of an experiment, and the tensors that it changes in place."""

    def __init__(self, experiment: Experiment, setting: Setting, learners: list[Learner]) -> None:
        self.experiment, self.setting, self.learners = experiment, setting, learners
        device, num_examples = setting.device, len(setting.given[0])
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # steps done
        self.is_fine = torch.ones(
            (), dtype=torch.bool, device=device
        )  # nothing was ever not finite
        self.bad_step = torch.full(
            (), -1, dtype=torch.int64, device=device
        )  # the first that was not
        self.dynamics = make_dynamics(num_examples, device)
        self.sums = torch.zeros(
            0, dtype=torch.float64, device=device
        )  # of what is logged, since the epoch began
        self.names: list[str] = []  # of the sums
        self._rows: Rows | None = None  # where a captured step finds its input
        self._phase, self._warm = "", 0
        self._graph: torch.cuda.CUDAGraph | None = None

        def made(function: Any) -> Any:
            return torch.compile(function, dynamic=False) if setting.compiles else function

        self._networks = [made(learner.network) for learner in learners]
        self._teachers = [
            made(learner.average) for learner in learners if learner.average is not None
        ]
        self._prepare, self._times, self._observe = (
            made(self._prepared),
            made(self._timed),
            made(observe_),
        )
        self._objective = made(experiment.objective.__call__)
        self._mix = None if experiment.mixup is None else made(experiment.mixup.__call__)

    def __call__(self, rows: Rows, phase: str) -> None:
        """Learn from the rows; `phase` is what the objective says of this epoch."""
        self._load(rows)
        if phase != self._phase:
            self._phase, self._warm, self._graph = phase, 0, None
        if self._graph is not None:
            self._graph.replay()
        elif not self.setting.captures:
            self._step()
        else:
            self._warm_up()
            if self._warm == _WARM_UP:
                self._graph = torch.cuda.CUDAGraph()
                # Another thread may pin memory meanwhile, which is no business of this graph.
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    self._step()

    def tensors(self) -> dict[str, Tensor]:
        """All that a step changes, by name; to restore it, copy into these very tensors."""
        found = {"count": self.count}
        found.update({f"dynamics.{name}": tensor for name, tensor in self.dynamics.items()})
        found["sums"] = self.sums
        if self.experiment.propagate_at is not None:
            found.update(
                {f"given{number}": given for number, given in enumerate(self.setting.given)}
            )
        for number, (network, optimizer, average, state, _) in enumerate(self.learners):
            parts = {
                "network": network.state_dict(),
                "optimizer": optim.optimizer_state(optimizer),
                "memory": state,
            }
            parts["average"] = {} if average is None else average.state_dict()
            found.update(
                {
                    f"{part}{number}.{name}": held
                    for part, each in parts.items()
                    for name, held in each.items()
                }
            )
        return found

    def prepare(self, rows: Rows, turn: int) -> Tensor:
        """What the network sees of these rows in pass `turn`, augmented as in training."""
        inputs = None if rows.inputs is None else rows.inputs.to(self.setting.device)
        number = torch.full((), turn, device=self.setting.device)
        batch = self._prepared(rows.indices.to(self.setting.device), inputs, number, 0)
        return (batch if self.setting.source is None else shard(batch)).inputs

    def averages(self) -> list[Module | None]:
        """The averaged networks."""
        return [learner.average for learner in self.learners]

    def buffers(self) -> list[Tensor]:
        """Those of all networks; BatchNorm may count on each process for itself."""
        networks = [learner.network for learner in self.learners]
        return [
            each
            for network in (*networks, *self.averages())
            if network is not None
            for each in network.buffers()
        ]

    def begin_sums(self, names: Sequence[str]) -> None:
        """Make room to sum up values of these names; sums that are there already are kept."""
        values = dict(zip(self.names, self.sums, strict=True))
        zero = torch.zeros((), dtype=torch.float64, device=self.setting.device)
        self.names = list(dict.fromkeys([*self.names, *names]))
        self.sums = torch.stack([values.get(name, zero) for name in self.names])

    def drain(self) -> dict[str, float]:
        """Means of what was logged since the epoch began, which begins anew."""
        found = self.means()
        self.sums.zero_()
        return found

    def means(self) -> dict[str, float]:
        """Means of what was logged since the epoch began."""
        sums = dict(zip(self.names, self.sums.tolist(), strict=True))
        steps, labeled, right = (sums.pop(name, 0.0) for name in ("steps", "labeled", "right"))
        means = {name: value / steps for name, value in sums.items()} if steps else {}
        return {**means, "train_accuracy": right / labeled} if labeled else means

    def _load(self, rows: Rows) -> None:
        """Bring the rows to where a captured step reads them."""
        device = self.setting.device
        if self._rows is None or not self.setting.captures:
            inputs = None if rows.inputs is None else rows.inputs.to(device)
            self._rows = Rows(rows.indices.to(device, copy=self.setting.captures), inputs)
            return
        self._rows.indices.copy_(rows.indices, non_blocking=True)
        if self._rows.inputs is not None and rows.inputs is not None:
            self._rows.inputs.copy_(rows.inputs, non_blocking=True)

    def _warm_up(self) -> None:
        """A real step, beside the stream that a graph will be captured on."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._step()
        torch.cuda.current_stream().wait_stream(beside)
        self._warm += 1

    def _step(self) -> None:
        """One step; plain, or while it is compiled or captured."""
        if not self.setting.compiles:
            self._steps()
            return
        with warnings.catch_warnings():
            # Similarities are in full float32 on purpose; the rest is the compiler's own looking around.
            for known in (
                "TensorFloat32",
                "Dynamo does not know",
                "The .grad attribute of a Tensor",
            ):
                warnings.filterwarnings("ignore", known)
            self._steps()

    def _steps(self) -> None:
        times = self._times(self.count)
        for number in range(len(self.learners)):
            self._learn(number, times)
        self.count += 1

    def _timed(self, count: Tensor) -> Times:
        experiment = self.experiment
        epoch = (count.double() / self.setting.batches_per_epoch).float()
        # A warm-up begins at 0, where the first step would learn nothing: it takes the rate of half a step later.
        start = 0.5 / self.setting.batches_per_epoch
        rate = experiment.optimizer.lr * experiment.schedule.factor(
            epoch.clamp(min=start), experiment.epochs
        )
        decay = torch.full_like(epoch, experiment.averaging or 0.0)
        if experiment.averaging_ramp:
            decay = decay * optim.ramp(epoch, experiment.averaging_ramp)
        return Times(epoch, count // self.setting.batches_per_pass, rate, decay)

    def _raw(self, indices: Tensor, inputs: Tensor | None, number: int) -> Batch:
        """The batch as it was read: bytes, or features."""
        setting = self.setting
        if inputs is None:
            assert setting.source is not None
            inputs = setting.source[indices]
        views = len(inputs) // len(indices)
        labels = setting.given[number][indices].where(indices >= 0, -1)
        targets = one_hot(labels, len(setting.label_weights)) * setting.label_weights
        return Batch(
            inputs=inputs,
            targets=targets.repeat(views, 1),
            indices=indices.repeat(views),
            views=views,
        )

    def _prepared(self, indices: Tensor, inputs: Tensor | None, turn: Tensor, number: int) -> Batch:
        """Augmented and normalized, for the network of that number."""
        seed = self.learners[number].seed
        batch = self._raw(indices, inputs, number)
        if self.experiment.augment is not None:
            batch = self.experiment.augment(
                batch, seed=seed, epoch=turn, is_cut=self.setting.is_cut
            )
        return replace(batch, inputs=finish(batch.inputs, self.experiment.normalize))

    def _learn(self, number: int, times: Times) -> None:
        assert self._rows is not None
        experiment, learner = self.experiment, self.learners[number]
        optimizer, state = learner.optimizer, learner.state
        batch = self._prepare(self._rows.indices, self._rows.inputs, times.turn, number)
        plain = shard(batch) if self.setting.source is not None else batch
        teacher = self._taught(number, plain)
        if self._mix is not None:
            mixed = self._mix(batch, seed=learner.seed, epoch=times.turn)
            batch = shard(mixed) if self.setting.source is not None else mixed
        else:
            batch = plain
        batch = replace(batch, teacher=teacher)

        held = [*learner.network.buffers(), *state.values()]
        before = optim.snapshot(held)
        with torch.autocast(
            self.setting.device.type,
            self.setting.dtype,
            enabled=self.setting.dtype != torch.float32,
        ):
            outputs = self._networks[number](batch.inputs)
        loss = self._objective(outputs, batch, times.epoch, state, self._phase)
        optimizer.zero_grad(set_to_none=True)
        loss.total.backward()

        parameters = [
            parameter for parameter in learner.network.parameters() if parameter.grad is not None
        ]
        distributed.average_(
            parameter.grad for parameter in parameters if parameter.grad is not None
        )
        norm = (
            optim.clip_gradients_(parameters, experiment.clip)
            if experiment.clip
            else optim.grad_norm(parameters)
        )
        self._judge(loss.total, norm)
        optim.set_rate_(optimizer, times.rate)
        optim.step_if_(optimizer, self.is_fine)
        optim.keep_old_(held, before, self.is_fine)
        if learner.average is not None:
            decay = times.decay.where(self.is_fine, 1.0)
            optim.update_average_(learner.average, learner.network, decay)
        if number == 0:
            self._record(outputs, batch, {"loss": loss.total.detach(), **loss.terms})

    def _taught(self, number: int, batch: Batch) -> Outputs | None:
        """What the averaged weights of the other network say, or the network's own of the first views."""
        alone = self.experiment.self_taught
        if len(self.learners) == 1 and not alone:
            return None
        teacher = self._teachers[number if alone else 1 - number]
        views = batch.views if alone else 1
        inputs = batch.inputs[: len(batch.inputs) // views]
        with (
            torch.no_grad(),
            torch.autocast(
                self.setting.device.type,
                self.setting.dtype,
                enabled=self.setting.dtype != torch.float32,
            ),
        ):
            outputs: Outputs = teacher(inputs)
        return Outputs(*(part.repeat(views, 1) for part in outputs)) if views > 1 else outputs

    def _judge(self, loss: Tensor, norm: Tensor) -> None:
        """Lower the flag, on all processes, if this step is not finite; it never rises again."""
        is_bad = distributed.total((~(loss.isfinite() & norm.isfinite())).float()) > 0
        self.bad_step.copy_(torch.where(self.is_fine & is_bad, self.count, self.bad_step))
        self.is_fine &= ~is_bad

    @torch.no_grad()
    def _record(self, outputs: Outputs, batch: Batch, terms: dict[str, Tensor]) -> None:
        """Add to what is logged and, unless images are mixed, to what is known of each example."""
        values = {"steps": torch.ones_like(terms["loss"]), **terms}
        if batch.mix is None:
            num = len(batch.indices) // batch.views  # first views
            indices = distributed.gather(batch.indices[:num].where(self.is_fine, -1))
            logits = distributed.gather(outputs.logits[:num].float())
            labels = self.setting.given[0][indices].where(indices >= 0, -1)
            seen = self._observe(
                self.dynamics, logits, labels, indices, repeats=self.experiment.balanced
            )
            values["right"], values["labeled"] = seen
        if missing := [name for name in values if name not in self.names]:
            self.begin_sums(missing)
        zero = torch.zeros_like(terms["loss"])
        news = torch.stack([values.get(name, zero).to(zero.dtype) for name in self.names])
        distributed.average_([news])  # a process knows the loss of its own rows only
        self.sums += news.double().where(self.is_fine, 0.0)


def shard(batch: Batch) -> Batch:
    """The rows of this process, of a batch that holds those of all processes."""
    num_processes, own = distributed.num_processes(), distributed.rank()
    if num_processes == 1:
        return batch

    def mine(rows: Tensor) -> Tensor:
        per_view = rows.view(batch.views, num_processes, -1, *rows.shape[1:])
        return per_view[:, own].flatten(0, 1)

    mix = None if batch.mix is None else Mix(*(mine(part) for part in batch.mix))
    plain = None if batch.plain_targets is None else mine(batch.plain_targets)
    return replace(
        batch,
        inputs=mine(batch.inputs),
        targets=mine(batch.targets),
        indices=mine(batch.indices),
        mix=mix,
        plain_targets=plain,
    )


def make_dynamics(num_examples: int, device: torch.device) -> dict[str, Tensor]:
    """What training shows of each example, (N + 1,) each: the last row takes what must not be kept."""
    kinds = {"confidence": torch.float32, "spread": torch.float32, "margin": torch.float32}
    kinds |= {"count": torch.int32, "changes": torch.int32, "predicted": torch.int32}
    return {
        name: torch.zeros(num_examples + 1, dtype=dtype, device=device)
        for name, dtype in kinds.items()
    }


def observe_(
    dynamics: dict[str, Tensor],
    logits: Tensor,
    labels: Tensor,
    indices: Tensor,
    *,
    repeats: bool = False,
) -> tuple[Tensor, Tensor]:
    """Count (B, C) logits of the examples `indices` (B,), whose given labels are `labels` (B,), into their statistics.

    Running means of the probability of the given label (`confidence`) and of its logit less the largest other
    (`margin`), the sum of squared deviations of the former (`spread`), and how often the predicted class changed.
    With `repeats` an example may be there twice and counts by its first row; padding and rows without a label are left
    out. Returns how many predictions are the label, and of how many.
    """
    nobody = len(dynamics["count"]) - 1
    is_seen = first_rows(indices) if repeats else indices >= 0
    places = indices.where(is_seen & (labels >= 0), nobody)
    old = {name: tensor[places] for name, tensor in dynamics.items()}
    own = labels.clamp(min=0)[:, None]
    confidence = logits.softmax(dim=1).gather(1, own)[:, 0]
    other = logits.scatter(1, own, -torch.inf).amax(dim=1)
    margin = logits.gather(1, own)[:, 0] - other.where(
        other > -torch.inf, 0.0
    )  # with one class there is no other
    predicted = logits.argmax(dim=1).int()
    count = old["count"] + 1
    step = confidence - old["confidence"]
    mean = old["confidence"] + step / count
    new = {
        "confidence": mean,
        "spread": old["spread"] + step * (confidence - mean),
        "margin": old["margin"] + (margin - old["margin"]) / count,
        "count": count,
        "changes": old["changes"] + ((predicted != old["predicted"]) & (old["count"] > 0)).int(),
        "predicted": predicted,
    }
    for name, tensor in dynamics.items():
        tensor.index_copy_(0, places, new[name].to(tensor.dtype))
        tensor[nobody].zero_()
    return (predicted == labels).sum(), (labels >= 0).sum()


def restore(step: Step, saved: dict[str, Tensor]) -> None:
    """Copy what a checkpoint holds into the tensors of a step; ValueError if it is of another experiment."""
    live = step.tensors()
    for name in live.keys() ^ saved.keys():
        raise ValueError(f"{name} is in the {'network' if name in live else 'checkpoint'} only")
    with torch.no_grad():
        for name, tensor in live.items():
            if saved[name].shape != tensor.shape:
                raise ValueError(
                    f"{name} is {tuple(saved[name].shape)} in the checkpoint, not {tuple(tensor.shape)}"
                )
            tensor.copy_(saved[name])
