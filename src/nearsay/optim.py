"""Optimizers and schedules as values, weight averaging, and steps that skip a bad gradient.

Nothing here makes the host wait for the device during training, so a whole step can be captured in
a CUDA graph: all that changes (learning rate, decay, "all is finite") is a tensor on the device.
"""

import math
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.nn import BatchNorm2d, Module, Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from nearsay.batch import Labels
from nearsay.validation import check_number, check_that

__all__ = ["SGD", "AdamW", "Constant", "Cosine", "CosineRestarts", "MultiStep"]

# Buffers of BatchNorm that are averaged with the weights.
_STATISTICS = ("running_mean", "running_var")
# Epochs since the start: a number, or a tensor of any shape.
Progress = TypeVar("Progress", float, Tensor)
_BELOW_ONE = math.nextafter(1, 0)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum.

    Attributes:
        lr: The learning rate, which the schedule multiplies.
        momentum: The share of the previous step that is kept, below 1.
        nesterov: Use Nesterov momentum.
        weight_decay: The weight of the L2 penalty.
        decay_all: Decay biases and normalization parameters too, as the released code does.

    Example:
        >>> network = torch.nn.Linear(4, 2)
        >>> optimizer = SGD(lr=0.05, nesterov=True).build(network.parameters())
        >>> type(optimizer).__name__
        'SGD'
    """

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    decay_all: bool = True

    def __post_init__(self) -> None:
        _check_finite("lr", self.lr)
        _check_finite("weight_decay", self.weight_decay)
        check_number("momentum", self.momentum, 0, _BELOW_ONE)
        if self.nesterov:
            check_that(self.momentum > 0, "momentum", "more than 0 with nesterov", self.momentum)

    def build(self, parameters: Iterable[Parameter]) -> Optimizer:
        """The optimizer of all parameters that require a gradient, with its state allocated."""
        groups, rate = _groups(parameters, self)
        optimizer = torch.optim.SGD(
            groups, lr=rate, momentum=self.momentum, nesterov=self.nesterov, fused=True
        )
        if self.momentum:
            for parameter in _parameters(optimizer):
                # A first step from zeros equals torch's first step. If torch allocated the buffer
                # itself, a first step that is skipped would leave uninitialized memory in it.
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay.

    Attributes:
        lr: The learning rate, which the schedule multiplies.
        betas: The decay of the mean of the gradient and of the mean of its square, each below 1.
        weight_decay: The weight of the decay.
        decay_all: Decay biases and normalization parameters too.

    Example:
        >>> network = torch.nn.Linear(4, 2)
        >>> optimizer = AdamW(lr=1e-3, decay_all=False).build(network.parameters())
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.05, 0.0]
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.05
    decay_all: bool = True

    def __post_init__(self) -> None:
        _check_finite("lr", self.lr)
        _check_finite("weight_decay", self.weight_decay)
        for beta in self.betas:
            check_number("betas", beta, 0, _BELOW_ONE)

    def build(self, parameters: Iterable[Parameter]) -> Optimizer:
        """The optimizer of all parameters that require a gradient, with its state allocated."""
        groups, rate = _groups(parameters, self)
        optimizer = torch.optim.AdamW(
            groups, lr=rate, betas=self.betas, fused=True, capturable=rate.is_cuda
        )
        for parameter in _parameters(optimizer):
            optimizer.state[parameter].update(
                step=torch.zeros((), device=parameter.device),
                exp_avg=torch.zeros_like(parameter),
                exp_avg_sq=torch.zeros_like(parameter),
            )
        return optimizer


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same learning rate throughout, after a linear warm-up.

    Attributes:
        warmup: Epochs over which the rate rises from 0.

    Example:
        >>> Constant(warmup=4).factor(1.0, num_epochs=10)
        0.25
    """

    warmup: float = 0.0

    def __post_init__(self) -> None:
        _check_finite("warmup", self.warmup)

    def factor(self, epoch: Progress, num_epochs: float) -> Progress:
        """What multiplies the learning rate at `epoch`."""
        return _like(epoch, _warm(_tensor(epoch), self.warmup))


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """A linear warm-up, then half a cosine down to `final` times the rate at the end of training.

    Attributes:
        warmup: Epochs over which the rate rises from 0.
        final: What multiplies the rate at the end, from 0 to 1.

    Example:
        >>> Cosine(warmup=0).factor(5.0, num_epochs=10)
        0.5
    """

    warmup: float = 5.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_finite("warmup", self.warmup)
        check_number("final", self.final, 0, 1)

    def factor(self, epoch: Progress, num_epochs: float) -> Progress:
        """What multiplies the learning rate at `epoch`."""
        # Not by check_that: this is called in compiled steps.
        if not self.warmup < num_epochs:
            raise ValueError(
                f"schedule.warmup must be less than epochs={num_epochs}, got {self.warmup}."
            )
        now = _tensor(epoch)
        done = ((now - self.warmup) / (num_epochs - self.warmup)).clamp(0, 1)
        return _like(epoch, _warm(now, self.warmup) * _descent(done, self.final))


@dataclass(frozen=True, kw_only=True)
class MultiStep:
    """A linear warm-up, then the rate times `gamma` at each milestone.

    Attributes:
        milestones: Epochs at which the rate falls.
        gamma: What multiplies the rate at each milestone, from 0 to 1.
        warmup: Epochs over which the rate rises from 0.

    Example:
        >>> schedule = MultiStep(milestones=(40, 80))
        >>> [round(schedule.factor(epoch, num_epochs=120), 4) for epoch in (0.0, 40.0, 100.0)]
        [1.0, 0.1, 0.01]
    """

    milestones: tuple[float, ...]
    gamma: float = 0.1
    warmup: float = 0.0

    def __post_init__(self) -> None:
        _check_finite("warmup", self.warmup)
        check_number("gamma", self.gamma, 0, 1)
        for milestone in self.milestones:
            _check_finite("milestones", milestone)

    def factor(self, epoch: Progress, num_epochs: float) -> Progress:
        """What multiplies the learning rate at `epoch`."""
        now = _tensor(epoch)
        factor = _warm(now, self.warmup)
        for milestone in self.milestones:
            factor = torch.where(now >= milestone, factor * self.gamma, factor)
        return _like(epoch, factor)


@dataclass(frozen=True, kw_only=True)
class CosineRestarts:
    """Half a cosine down to `minimum` times the rate, again and again (SGDR).

    Attributes:
        period: Epochs of the first cosine.
        multiplier: How much longer each cosine is than the one before, from 1.
        minimum: What multiplies the rate at the end of each cosine; the default is ELR's.

    Example:
        >>> schedule = CosineRestarts(period=10, minimum=0.0)
        >>> [round(schedule.factor(epoch, num_epochs=20), 4) for epoch in (0.0, 5.0, 10.0)]
        [1.0, 0.5, 1.0]
    """

    period: float = 10.0
    multiplier: float = 1.0
    minimum: float = 0.05

    def __post_init__(self) -> None:
        _check_finite("period", self.period)
        check_that(self.period > 0, "period", "more than 0", self.period)
        _check_finite("multiplier", self.multiplier, low=1)
        check_number("minimum", self.minimum, 0, 1)

    def factor(self, epoch: Progress, num_epochs: float) -> Progress:
        """What multiplies the learning rate at `epoch`: 1 exactly where a period begins."""
        now = _tensor(epoch)
        done = now.remainder(self.period) / self.period
        if self.multiplier > 1:
            # A few turns only, because the periods grow geometrically.
            start, length = self.period, self.period * self.multiplier
            while start <= num_epochs:
                done = torch.where(now >= start, (now - start) / length, done)
                start, length = start + length, length * self.multiplier
        return _like(epoch, _descent(done, self.minimum))


Schedule = Constant | Cosine | MultiStep | CosineRestarts


def ramp(epoch: Progress, length: float) -> Progress:
    """ELR+'s ramp-up exp(−5(1 − x)²) with x = epoch / length, at most 1."""
    if not 0 <= length < math.inf:
        raise ValueError(f"length must be a finite number of 0 or more, got {length}.")
    return _like(epoch, torch.exp(-5 * (1 - _warm(_tensor(epoch), length)).square()))


def set_rate_(optimizer: Optimizer, rate: Tensor | float) -> None:
    """Write the learning rate in place, where a captured graph reads it too."""
    for group in optimizer.param_groups:
        if isinstance(rate, Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"].fill_(rate)


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """All tensors of the optimizer's state by name; copy into them to restore it."""
    tensors = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        for name, tensor in optimizer.state[parameter].items():
            tensors[f"{number}.{name}"] = tensor
    return tensors


def grad_norm(parameters: Iterable[Parameter]) -> Tensor:
    """The 0-d norm of all gradients together; not finite if one of them is not, or on overflow."""
    return get_total_norm([part.grad for part in parameters if part.grad is not None])


def clip_gradients_(parameters: Iterable[Parameter], max_norm: float) -> Tensor:
    """Scale all gradients together to at most `max_norm`; returns their norm before, 0-d."""
    check_that(max_norm > 0, "max_norm", "more than 0", max_norm)
    parameters = list(parameters)
    norm = grad_norm(parameters)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def step_if_(optimizer: Optimizer, is_finite: Tensor) -> None:
    """One step of a fused optimizer if the 0-d bool is true; else nothing changes, bit for bit."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        name = type(optimizer).__name__
        raise ValueError(f"optimizer must be built with fused=True, got {name} without it.")
    # The same attribute by which torch.amp.GradScaler lets a fused step be skipped on the device.
    optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]


@torch.no_grad()
def snapshot(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies for `keep_old_`, made by one kernel per dtype."""
    tensors = list(tensors)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for copy, tensor in zip(copies, tensors, strict=True):
        targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
        targets.append(copy)
        sources.append(tensor)
    # torch copies a list of several dtypes one tensor at a time, so each dtype gets its own call.
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)
    return copies


@torch.no_grad()
def keep_old_(tensors: Iterable[Tensor], old: Iterable[Tensor], is_finite: Tensor) -> None:
    """Put the old values back, bit for bit, unless the 0-d bool is true."""
    by_size: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, before in zip(tensors, old, strict=True):
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        size = tensor.element_size()
        new_bits, old_bits = by_size.setdefault(size, ([], []))
        new_bits.append(tensor.view(bits[size]))
        old_bits.append(before.view(bits[size]))
    for new_bits, old_bits in by_size.values():
        # The bits are taken as whole numbers, which wrap around, so old + 1 · (new − old) and
        # old + 0 · (new − old) are exact even if new is NaN. It takes a few kernels for all
        # tensors; torch.where would take one per tensor.
        changes = torch._foreach_sub(new_bits, old_bits)
        torch._foreach_mul_(changes, is_finite.to(new_bits[0].dtype))
        torch._foreach_add_(changes, old_bits)
        torch._foreach_copy_(new_bits, changes)


def averaged_copy(module: Module) -> Module:
    """A copy that holds averaged weights: in evaluation mode, without gradients."""
    return deepcopy(module).requires_grad_(False).eval()


def by_batch_(module: Module) -> None:
    """Let BatchNorm use the statistics of each batch and keep its running ones, for a teacher.

    The running statistics of averaged weights lag behind the weights, and measuring them anew at
    every step would cost too much.
    """
    for norm in module.modules():
        if isinstance(norm, BatchNorm2d):
            norm.train()
            # A momentum of 0 would keep the statistics too, but would let NaN pass.
            norm.track_running_stats = False


@torch.no_grad()
def update_average_(average: Module, module: Module, decay: Tensor | float) -> None:
    """In place average ← decay · average + (1 − decay) · module; decay may be a 0-d tensor.

    Running statistics of BatchNorm are averaged like parameters. They are still not those of the
    averaged weights: call `recalibrate_` before an evaluation. All other buffers are copied.
    """
    old = {**dict(average.named_parameters()), **dict(average.named_buffers())}
    new = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if old.keys() != new.keys():
        name = min(old.keys() ^ new.keys())
        raise ValueError(f"average must be a copy of the network, got one that differs in {name}.")
    copied = {name for name, _ in average.named_buffers() if not name.endswith(_STATISTICS)}
    averaged = [name for name in old if name not in copied]
    averages = [old[name] for name in averaged]
    # Three calls, because the single call of lerp would read a tensor on the host.
    changes = torch._foreach_sub([new[name] for name in averaged], averages)
    torch._foreach_mul_(changes, 1 - decay)
    torch._foreach_add_(averages, changes)
    for name in copied:
        old[name].copy_(new[name])


@torch.no_grad()
def recalibrate_(module: Module, batches: Iterable[Tensor]) -> None:
    """Set the running statistics of BatchNorm to their plain mean over the batches.

    Averaged weights need it. Give batches of equal size, augmented as in training.
    """
    # A copy, so that nothing else changes, and nothing at all if a batch fails.
    trial = averaged_copy(module)
    norms = []
    for part in trial.modules():
        if getattr(part, "running_mean", None) is not None:
            norms.append(cast(BatchNorm2d, part))
    num_batches = 0
    for num_batches, batch in enumerate(batches, start=1):
        for norm in norms:
            norm.train()
            norm.track_running_stats = True
            if num_batches == 1:
                # A momentum of 1 alone would not remove a NaN.
                norm.reset_running_stats()
            norm.momentum = 1 / num_batches
        trial(batch)
    check_that(num_batches > 0, "batches", "at least one batch", num_batches)
    for (name, buffer), estimate in zip(module.named_buffers(), trial.buffers(), strict=True):
        if name.endswith(_STATISTICS):
            buffer.copy_(estimate)


def class_weights(labels: Labels) -> Tensor:
    """(C,) float32 weights that give all classes that occur the same total; their mean is 1.

    With n labeled examples of P classes: n / (P · n_c) for a class of n_c examples, 0 if n_c is 0.
    """
    is_labeled = labels.given >= 0
    counts = torch.bincount(labels.given[is_labeled], minlength=len(labels.classes))  # (C,)
    counts = counts.double()
    return torch.where(counts > 0, counts.sum() / (counts.count_nonzero() * counts), 0.0).float()


def _check_finite(name: str, value: float, *, low: float = 0) -> None:
    check_number(name, value, low)
    check_that(value < math.inf, name, "finite", value)


def _tensor(epoch: Tensor | float) -> Tensor:
    """Epochs to calculate with: numbers in float64, tensors in float32 or better."""
    if isinstance(epoch, Tensor):
        return epoch.to(torch.promote_types(epoch.dtype, torch.float32))
    return torch.tensor(epoch, dtype=torch.float64, device="cpu")


def _like(epoch: Progress, value: Tensor) -> Progress:
    return value if isinstance(epoch, Tensor) else value.item()


def _warm(now: Tensor, length: float) -> Tensor:
    """From 0 to 1 over `length` epochs."""
    return (now / length).clamp(0, 1) if length else torch.ones_like(now)


def _descent(done: Tensor, final: float) -> Tensor:
    """Half a cosine from 1 to `final` while `done` goes from 0 to 1."""
    return final + (1 - final) * 0.5 * (1 + torch.cos(math.pi * done))


def _parameters(optimizer: Optimizer) -> Iterator[Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _groups(
    parameters: Iterable[Parameter], choices: SGD | AdamW
) -> tuple[list[dict[str, object]], Tensor]:
    """Parameter groups for torch, and the rate tensor that they share."""
    decayed: list[Parameter] = []
    spared: list[Parameter] = []
    for parameter in parameters:
        if parameter.requires_grad:
            # Biases and normalization parameters have one axis.
            is_decayed = choices.decay_all or parameter.ndim > 1
            (decayed if is_decayed else spared).append(parameter)
    devices = {str(parameter.device) for parameter in (*decayed, *spared)}
    check_that(len(devices) == 1, "parameters", "on one device", sorted(devices))
    rate = torch.tensor(choices.lr, dtype=torch.float32, device=devices.pop())
    groups: list[dict[str, object]] = []
    for members, decay in ((decayed, choices.weight_decay), (spared, 0.0)):
        if members:
            groups.append({"params": members, "weight_decay": decay})
    return groups, rate
