"""Optimizers and schedules as functions of progress, weight averaging, and steps that a bad gradient cannot spoil.

Nothing here makes the host wait for the device once training runs, so that a whole step can be captured in a CUDA
graph: what changes during training (learning rate, decay, "all is finite") is a tensor on the device.
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

_STATISTICS = ("running_mean", "running_var")  # of BatchNorm
Progress = TypeVar(
    "Progress", float, Tensor
)  # epochs since the start: a number, or a tensor of any shape


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum; `decay_all=False` spares biases and norms from weight decay."""

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    decay_all: bool = True  # as the released code does

    def __post_init__(self) -> None:
        _check(lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum)
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                "nesterov=True with momentum=0 means nothing; raise momentum or leave nesterov out"
            )

    def build(self, parameters: Iterable[Parameter]) -> Optimizer:
        """The optimizer of those parameters that want a gradient, its state allocated and its rate a tensor."""
        groups, rate = _groups(parameters, self)
        optimizer = torch.optim.SGD(
            groups, lr=rate, momentum=self.momentum, nesterov=self.nesterov, fused=True
        )
        for parameter in _parameters(optimizer) if self.momentum else ():
            # A first step from zeros is torch's first step; left to torch, a refused first step leaves rubbish here.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay; `decay_all=False` spares biases and norms from it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.05
    decay_all: bool = True

    def __post_init__(self) -> None:
        _check(
            lr=self.lr,
            weight_decay=self.weight_decay,
            first_beta=self.betas[0],
            second_beta=self.betas[1],
        )

    def build(self, parameters: Iterable[Parameter]) -> Optimizer:
        """The optimizer of those parameters that want a gradient, its state allocated and its rate a tensor."""
        groups, rate = _groups(parameters, self)
        optimizer = torch.optim.AdamW(
            groups, lr=rate, betas=self.betas, fused=True, capturable=rate.is_cuda
        )
        for parameter in _parameters(optimizer):
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter].update(
                step=torch.zeros((), device=parameter.device), **zeros
            )
        return optimizer


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same rate throughout, after a linear warm-up."""

    warmup: float = 0.0  # epochs

    def __post_init__(self) -> None:
        _check(warmup=self.warmup)

    def factor(self, epoch: Progress, num_epochs: float) -> Progress:
        """From 0 to 1 during the warm-up, then 1."""
        return _like(epoch, _warm(_tensor(epoch), self.warmup))


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """A linear warm-up, then half a cosine down to `final` times the rate at the end of training."""

    warmup: float = 5.0  # epochs
    final: float = 0.0

    def __post_init__(self) -> None:
        _check(warmup=self.warmup, final=self.final)

    def factor(self, epoch: Progress, num_epochs: float) -> Progress:
        """From 0 to 1 during the warm-up, then down to `final`, where it stays."""
        if not self.warmup < num_epochs:
            raise ValueError(
                f"schedule.warmup={self.warmup} must end before the {num_epochs} epochs do; shorten it"
            )
        now = _tensor(epoch)
        done = ((now - self.warmup) / (num_epochs - self.warmup)).clamp(0, 1)
        return _like(epoch, _warm(now, self.warmup) * _descent(done, self.final))


@dataclass(frozen=True, kw_only=True)
class MultiStep:
    """A linear warm-up, then `gamma` times the rate from each milestone on, exactly at its epoch."""

    milestones: tuple[float, ...]  # epochs
    gamma: float = 0.1
    warmup: float = 0.0  # epochs

    def __post_init__(self) -> None:
        _check(warmup=self.warmup, gamma=self.gamma)
        for milestone in self.milestones:
            _check(milestone=milestone)

    def factor(self, epoch: Progress, num_epochs: float) -> Progress:
        """`gamma` to the power of the number of milestones reached."""
        now = _tensor(epoch)
        factor = _warm(now, self.warmup)
        for milestone in self.milestones:
            factor = torch.where(now >= milestone, factor * self.gamma, factor)
        return _like(epoch, factor)


@dataclass(frozen=True, kw_only=True)
class CosineRestarts:
    """Half a cosine down to `minimum` times the rate, again and again (SGDR); each is `multiplier` times as long."""

    period: float = 10.0  # epochs
    multiplier: float = 1.0
    minimum: float = 0.05  # ELR's: from 0.02 down to 0.001

    def __post_init__(self) -> None:
        if not (0 < self.period < math.inf and 1 <= self.multiplier < math.inf):
            raise ValueError(
                f"period={self.period} must be positive and multiplier={self.multiplier} at least 1"
            )
        _check(minimum=self.minimum)

    def factor(self, epoch: Progress, num_epochs: float) -> Progress:
        """From 1 down to `minimum` in each period; 1 exactly where the next begins."""
        now = _tensor(epoch)
        done, start, length = (
            now.remainder(self.period) / self.period,
            self.period,
            self.period * self.multiplier,
        )
        while (
            self.multiplier > 1 and start <= num_epochs
        ):  # a few times only, as lengths grow geometrically
            done = torch.where(now >= start, (now - start) / length, done)
            start, length = start + length, length * self.multiplier
        return _like(epoch, _descent(done, self.minimum))


Schedule = Constant | Cosine | MultiStep | CosineRestarts


def ramp(epoch: Progress, length: float) -> Progress:
    """ELR+'s ramp-up exp(−5(1 − x)²), x = epoch / length ≤ 1; its averaging decays by 0.997 · ramp(step, 40 000)."""
    _check(length=length)
    return _like(epoch, torch.exp(-5 * (1 - _warm(_tensor(epoch), length)).square()))


def set_rate_(optimizer: Optimizer, rate: Tensor | float) -> None:
    """Write the learning rate where the optimizer, or the graph that captured it, reads it."""
    for group in optimizer.param_groups:
        group["lr"].copy_(rate) if isinstance(rate, Tensor) else group["lr"].fill_(rate)


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """All that an optimizer remembers, by name; to restore it, copy into these tensors, which a graph may hold."""
    members = enumerate(_parameters(optimizer))
    return {
        f"{number}.{name}": held
        for number, each in members
        for name, held in optimizer.state[each].items()
    }


def grad_norm(parameters: Iterable[Parameter]) -> Tensor:
    """The 0-d length of all gradients together; not finite if any of them is not, or if it overflows."""
    return get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    )


def clip_gradients_(parameters: Iterable[Parameter], max_norm: float) -> Tensor:
    """Shrink all gradients together to length `max_norm` if they are longer; gives their length before, 0-d."""
    if not max_norm > 0:
        raise ValueError(
            f"max_norm={max_norm} must be positive; for no clipping use grad_norm instead"
        )
    parameters = list(parameters)
    clip_grads_with_norm_(parameters, max_norm, norm := grad_norm(parameters))
    return norm


def step_if_(optimizer: Optimizer, is_finite: Tensor) -> None:
    """One step of a fused optimizer where the 0-d bool is true; else parameters and state keep every bit."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"{type(optimizer).__name__} cannot skip a step on the device; build it with fused=True"
        )
    optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]  # as torch.amp.GradScaler tells it
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]


@torch.no_grad()
def snapshot(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies for `keep_old_`, in a few kernels however many there are."""
    tensors = list(tensors)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    for dtype in {
        tensor.dtype for tensor in tensors
    }:  # a list of several kinds would be copied one by one
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        torch._foreach_copy_(
            [copies[place] for place in places], [tensors[place] for place in places]
        )
    return copies


@torch.no_grad()
def keep_old_(tensors: Iterable[Tensor], old: Iterable[Tensor], is_finite: Tensor) -> None:
    """Put the old values back, bit for bit, unless the 0-d bool is true: for buffers, averages and memory."""
    kinds: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for tensor, before in zip(tensors, old, strict=True):
        kinds.setdefault(tensor.element_size(), []).append((tensor, before))
    for size, pairs in kinds.items():
        # Bits as whole numbers, which wrap around: old + 1 · (new − old) and old + 0 · (new − old) are exact, even
        # where new is NaN, and take a few kernels for all tensors, while torch.where would take one for each.
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        new_bits, old_bits = (
            [each.view(whole) for each in side] for side in zip(*pairs, strict=True)
        )
        changes = torch._foreach_sub(new_bits, old_bits)
        torch._foreach_mul_(changes, is_finite.to(whole))
        torch._foreach_add_(changes, old_bits)
        torch._foreach_copy_(new_bits, changes)


def averaged_copy(module: Module) -> Module:
    """A copy to hold averaged weights: in evaluation mode, without gradients."""
    return deepcopy(module).requires_grad_(False).eval()


def by_batch_(module: Module) -> None:
    """Let BatchNorm go by the batch at hand, and leave the running statistics as they are: for a teacher in training.

    Those of averaged weights lag behind the weights and would have to be measured anew at every step.
    """
    for norm in module.modules():
        if isinstance(norm, BatchNorm2d):
            norm.train()
            norm.track_running_stats = False  # and no momentum of 0, which would let NaN pass


@torch.no_grad()
def update_average_(average: Module, module: Module, decay: Tensor | float) -> None:
    """In place average ← decay · average + (1 − decay) · module; decay is a number or a 0-d tensor on the device.

    Running statistics of BatchNorm are averaged like parameters, so that they lag as the weights do; they still are
    not those of the averaged weights: `recalibrate_` before judging. All other buffers are copied.
    """
    old, new = (
        dict([*each.named_parameters(), *each.named_buffers()]) for each in (average, module)
    )
    if old.keys() != new.keys():
        raise ValueError(
            f"{min(old.keys() ^ new.keys())} is in one network only; average a copy of the network"
        )
    copied = {name for name, _ in average.named_buffers() if not name.endswith(_STATISTICS)}
    averages = [tensor for name, tensor in old.items() if name not in copied]
    changes = torch._foreach_sub([new[name] for name in old if name not in copied], averages)
    torch._foreach_mul_(
        changes, 1 - decay
    )  # three calls, as the one of lerp would read a tensor on the host
    torch._foreach_add_(averages, changes)
    for name in copied:
        old[name].copy_(new[name])


@torch.no_grad()
def recalibrate_(module: Module, batches: Iterable[Tensor]) -> None:
    """Estimate the running statistics of BatchNorm anew, as their plain mean over batches; all else stays as it is.

    Averaged weights need it. Give batches of equal size, augmented as in training.
    """
    trial = averaged_copy(
        module
    )  # so that nothing else changes, and nothing at all if a batch fails
    norms = [
        cast(BatchNorm2d, each)
        for each in trial.modules()
        if getattr(each, "running_mean", None) is not None
    ]
    num_batches = 0
    for num_batches, batch in enumerate(batches, start=1):
        for norm in norms:
            norm.train()
            norm.track_running_stats = True
            if num_batches == 1:
                norm.reset_running_stats()  # or a NaN would outlive a momentum of 1
            norm.momentum = 1 / num_batches
        trial(batch)
    if not num_batches:
        raise ValueError("statistics of 0 batches mean nothing; give at least one batch")
    for (name, buffer), estimate in zip(module.named_buffers(), trial.buffers(), strict=True):
        if name.endswith(_STATISTICS):
            buffer.copy_(estimate)


def class_weights(labels: Labels) -> Tensor:
    """(C,) float32 weights under which all classes that occur count alike; their mean over labeled examples is 1.

    With n labeled examples of P classes, n / (P · n_c) for a class of n_c examples, and 0 for one of none.
    """
    counts = torch.bincount(
        labels.given[labels.given >= 0], minlength=len(labels.classes)
    ).double()  # (C,)
    return torch.where(counts > 0, counts.sum() / (counts.count_nonzero() * counts), 0.0).float()


def _tensor(epoch: Tensor | float) -> Tensor:
    """Progress to calculate with: numbers in float64, tensors in float32 or better."""
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
    """Parameter groups as torch wants them (biases and norms have one axis), and the rate tensor that they share."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    devices = {str(parameter.device) for parameter in wanted}
    if len(devices) != 1:
        raise ValueError(
            f"{len(wanted)} parameters to train lie on {devices or 'no device'}; give some, all on one"
        )
    decayed = [parameter for parameter in wanted if choices.decay_all or parameter.ndim > 1]
    spared = [parameter for parameter in wanted if not (choices.decay_all or parameter.ndim > 1)]
    rate = torch.tensor(choices.lr, dtype=torch.float32, device=wanted[0].device)
    groups = ((decayed, choices.weight_decay), (spared, 0.0))
    return [
        {"params": members, "weight_decay": decay} for members, decay in groups if members
    ], rate


def _check(**values: float) -> None:
    for name, value in values.items():
        most = 1.0 if name in ("final", "gamma", "minimum") else math.inf
        below = 1.0 if name in ("momentum", "first_beta", "second_beta") else math.inf
        if not (0 <= value <= most and value < below):
            raise ValueError(
                f"{name} is {value}; it must lie in [0, {'1]' if most == 1 else f'{below:g})'}"
            )
