"""Batch normalization over the rows of all processes, on any device."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nearsay import distributed

Statistics = Literal["global", "process"]


class BatchNorm(nn.BatchNorm2d):
    """torch's BatchNorm, bit for bit on one process; mean and variance of the global batch under several.

    Takes (B, C) as well as (B, C, H, W). With `statistics="process"` every process keeps to its own rows, as the
    released code does, and its running averages are its own. Padding rows are rows like all others. It is one of
    torch's, so that whatever looks for those finds it: recalibration of averaged weights, fusing, other loaders.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        statistics: Statistics = "global",
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        check_statistics(statistics)
        self.statistics = statistics

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (B, C) or (B, C, H, W); torch's own fused code wherever one process can do it alone."""
        if not self.training or self.statistics == "process" or distributed.num_processes() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        with torch.no_grad():
            mean, variance, count = _global_moments(input)
            if self.track_running_stats:
                self._track(mean, variance, count)
        return _Normalize.apply(input, self.weight, self.bias, mean, variance, count, self.eps)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        """What print shows."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, statistics={self.statistics}"

    def _check_input_dim(self, input: Tensor) -> None:  # torch's name: called by its forward
        if input.ndim not in (2, 4) or input.shape[1] != self.num_features:
            raise ValueError(
                f"inputs {tuple(input.shape)} must be (B, {self.num_features}) or (B, {self.num_features}, H, W)"
            )

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """In place, and without looking at a number: as torch does it, variance is made unbiased for the average."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight: float | Tensor = (
            self.momentum if self.momentum is not None else 1 / self.num_batches_tracked
        )
        for average, fresh in (
            (self.running_mean, mean),
            (self.running_var, variance * (count / (count - 1))),
        ):
            average += weight * (fresh.to(average.dtype) - average)


def synchronize(module: nn.Module, statistics: Statistics = "global") -> nn.Module:
    """Put `BatchNorm` in the place of torch's BatchNorm1d and 2d, and of timm's with an activation; names stay.

    The very parameters and buffers are moved over. Subclasses of another kind are left as they are.
    """
    for name, child in list(module.named_children()):
        setattr(module, name, synchronize(child, statistics))
    has_activation = (
        isinstance(module, nn.BatchNorm2d) and hasattr(module, "act") and hasattr(module, "drop")
    )
    if not has_activation and type(module) not in (nn.BatchNorm1d, nn.BatchNorm2d):
        return module
    assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
    if not module.affine or not module.track_running_stats:
        return module
    kind = _BatchNormActivated if has_activation else BatchNorm
    norm = kind(
        module.num_features, eps=module.eps, momentum=module.momentum, statistics=statistics
    )
    norm.weight, norm.bias = module.weight, module.bias
    norm.running_mean, norm.running_var = module.running_mean, module.running_var
    norm.num_batches_tracked = module.num_batches_tracked
    if has_activation:
        norm.drop, norm.act = module.drop, module.act
    return norm.train(module.training)


def check_statistics(statistics: str) -> None:
    """Refuse what is neither "global" nor "process"."""
    if statistics not in ("global", "process"):
        raise ValueError(f'statistics is {statistics!r}; it must be "global" or "process"')


class _BatchNormActivated(BatchNorm):
    """timm's BatchNorm that drops and activates in the same module."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        activated: Tensor = self.act(self.drop(super().forward(input)))
        return activated


def _global_moments(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(C,) mean and (C,) biased variance over all processes, and () the number of values per channel.

    Means and variances are combined, not sums of squares: those lose all digits where a mean is large.
    """
    inputs = inputs.to(_precise(inputs.dtype))
    axes = _all_but_channels(inputs)
    variance, mean = torch.var_mean(inputs, dim=axes, correction=0)
    count = mean.new_full((1,), inputs.numel() // inputs.shape[1])
    rows = distributed.gather(torch.cat([mean, variance, count])[None])  # (W, 2C + 1)
    means, variances, counts = rows[:, : len(mean)], rows[:, len(mean) : -1], rows[:, -1:]
    share = counts / counts.sum()  # (W, 1)
    mean = (share * means).sum(dim=0)
    return mean, (share * (variances + (means - mean) ** 2)).sum(dim=0), counts.sum()


class _Normalize(torch.autograd.Function):
    """Batch normalization whose moments, given, count as functions of the inputs of all processes.

    Keeps its input and nothing else of that size; forward costs one fused pass.
    """

    @staticmethod
    def forward(
        ctx: Any,  # Any: torch types no context
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.eps = eps
        return functional.batch_norm(inputs, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable  # a second derivative would silently miss what other processes add
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        precise, axes = mean.dtype, _all_but_channels(inputs)
        shape = (-1, *(1,) * (inputs.ndim - 2))  # (C,) so that it meets the channels

        slope = gradient.to(precise)
        centered = inputs.to(precise) - mean.view(shape)
        sums = torch.stack(
            [slope.sum(dim=axes), (slope * centered).sum(dim=axes)]
        )  # (2, C) of this process
        everyone = distributed.total(sums) / count
        scale = (variance + ctx.eps).rsqrt()
        through_moments = everyone[0].view(shape) + centered * (everyone[1] * scale**2).view(shape)
        wanted = (slope - through_moments) * (weight.to(precise) * scale).view(shape)
        # Parameters get what this process wants: their gradients are averaged over processes like all others.
        return (
            wanted.to(inputs.dtype),
            (sums[1] * scale).to(weight.dtype),
            sums[0].to(weight.dtype),
            *(None,) * 4,
        )


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _all_but_channels(inputs: Tensor) -> list[int]:
    return [axis for axis in range(inputs.ndim) if axis != 1]
