"""Batch normalization over the rows of all processes, on any device."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nearsay import distributed
from nearsay.validation import check_choice, check_that

Statistics = Literal["global", "process"]


class BatchNorm(nn.BatchNorm2d):
    """torch's BatchNorm; under several processes with mean and variance of the global batch.

    On one process it is bit for bit torch's. Inputs are (B, C) or (B, C, H, W). Padding rows count
    like all others. It is a subclass of torch's, so that code that looks for those finds it.

    Args:
        num_features: C.
        eps: Added to the variance.
        momentum: Weight of a batch in the running averages; None averages all batches equally.
        statistics: "global", or "process": every process normalizes by its own rows, as the
            released code of the paper does, and has its own running averages.

    >>> import torch
    >>> BatchNorm(2)(torch.tensor([[0.0, 1.0], [2.0, 3.0]])).detach().round()
    tensor([[-1., -1.],
            [ 1.,  1.]])
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
        """Normalize (B, C) or (B, C, H, W)."""
        # torch's fused code wherever no other process is needed.
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
        numbers = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"
        return f"{numbers}, statistics={self.statistics}"

    # torch's name; its forward calls this method.
    def _check_input_dim(self, input: Tensor) -> None:
        is_right = input.ndim in (2, 4) and input.shape[1] == self.num_features
        condition = f"(B, C) or (B, C, H, W) with C = {self.num_features}"
        check_that(is_right, "inputs", condition, tuple(input.shape))

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running averages in place, with the unbiased variance as torch does."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight: float | Tensor | None = self.momentum
        if weight is None:
            weight = 1 / self.num_batches_tracked
        unbiased = variance * (count / (count - 1))
        for average, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            average += weight * (value.to(average.dtype) - average)


def synchronize(module: nn.Module, statistics: Statistics = "global") -> nn.Module:
    """Replace torch's BatchNorm1d and 2d, and timm's with an activation, by `BatchNorm`.

    Names, parameters and buffers stay the same objects. Other subclasses are left as they are.
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
    """Refuse anything but "global" and "process"."""
    check_choice("statistics", statistics, ("global", "process"))


class _BatchNormActivated(BatchNorm):
    """timm's BatchNorm that drops and activates in the same module."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        activated: Tensor = self.act(self.drop(super().forward(input)))
        return activated


def _global_moments(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(C,) mean and (C,) biased variance over all processes, and () the number of values per
    channel.

    Means and variances are combined, because sums of squares lose all digits where a mean is large.
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
    """Batch normalization by moments that are functions of the inputs of all processes.

    It keeps its input and no other tensor of that size; forward costs one fused pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
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

    # A second derivative would silently miss the part of the other processes.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        precise, axes = mean.dtype, _all_but_channels(inputs)
        # (C,) tensors are reshaped, so that they broadcast over the other axes.
        shape = (-1, *(1,) * (inputs.ndim - 2))

        slope = gradient.to(precise)
        centered = inputs.to(precise) - mean.view(shape)
        # The sums of this process, (2, C), and their means over all rows of all processes.
        sums = torch.stack([slope.sum(dim=axes), (slope * centered).sum(dim=axes)])
        means = distributed.total(sums) / count
        scale = (variance + ctx.eps).rsqrt()
        through_moments = means[0].view(shape) + centered * (means[1] * scale**2).view(shape)
        wanted = (slope - through_moments) * (weight.to(precise) * scale).view(shape)
        # Parameters get the sums of this process; their gradients are averaged over processes
        # later.
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
