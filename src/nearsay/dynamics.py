"""What a step leaves besides weights: whether all was finite, sums to log, and what it showed of each example."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearsay import dist


def judge_(loss: Tensor, norm: Tensor, count: Tensor, is_fine: Tensor, bad_step: Tensor) -> None:
    """Lower the flag, on all processes, if step `count` is not finite, and note which it was; it never rises again."""
    is_bad = dist.total((~(loss.isfinite() & norm.isfinite())).float()) > 0
    bad_step.copy_(torch.where(is_fine & is_bad, count, bad_step))
    is_fine &= ~is_bad


def add_up_(sums: Tensor, names: Sequence[str], values: dict[str, Tensor], is_fine: Tensor) -> None:
    """Add what a step has to say, by name, to the (len(names),) sums, unless something was not finite."""
    one = torch.ones_like(values["loss"])
    known = {"steps": one, **values}
    news = torch.stack([known[name].to(one.dtype) if name in known else 0 * one for name in names])
    dist.average_([news])  # a process knows the loss of its own rows only
    sums += news.double().where(is_fine, 0.0)


def make_dynamics(num_examples: int, device: torch.device) -> dict[str, Tensor]:
    """What training shows of each example, (N + 1,) each: the last row takes what must not be kept."""
    kinds = {"confidence": torch.float32, "spread": torch.float32, "margin": torch.float32}
    kinds |= {"count": torch.int32, "changes": torch.int32, "predicted": torch.int32}
    return {name: torch.zeros(num_examples + 1, dtype=dtype, device=device) for name, dtype in kinds.items()}


def observe_(dynamics: dict[str, Tensor], logits: Tensor, labels: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Count (B, C) logits of the examples `indices` (B,), whose given labels are `labels` (B,), into their statistics.

    Running means of the probability of the given label (`confidence`) and of its logit less the largest other
    (`margin`), the sum of squared deviations of the former (`spread`), and how often the predicted class changed.
    Rows of padding and without a label are left out. Returns how many predictions are the label, and of how many.
    """
    nobody = len(dynamics["count"]) - 1
    places = indices.where((indices >= 0) & (labels >= 0), nobody)
    old = {name: tensor[places] for name, tensor in dynamics.items()}
    own = labels.clamp(min=0)[:, None]
    confidence = logits.softmax(dim=1).gather(1, own)[:, 0]
    other = logits.scatter(1, own, -torch.inf).amax(dim=1)
    margin = logits.gather(1, own)[:, 0] - other.where(other > -torch.inf, 0.0)  # with one class there is no other
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
