"""What a training will take: parameters, steps and memory."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsay.data.inspect import describe
from nearsay.experiment import Experiment
from nearsay.training.step import make_learners
from nearsay.transforms.views import Views


class Estimate(NamedTuple):
    """What a training will take.

    Attributes:
        num_parameters: Of all networks.
        num_classes: As the data set describes itself.
        input_shape: Of one input of the network.
        num_examples: Of the training split; None if only the files can tell.
        num_steps: None if the number of examples is unknown.
        num_bytes: By their purpose; activations in float32.
    """

    num_parameters: int
    num_classes: int
    input_shape: tuple[int, ...]
    num_examples: int | None
    num_steps: int | None
    num_bytes: dict[str, int]


def estimate(experiment: Experiment) -> Estimate:
    """Build the networks and count their memory; activations are those of two rows, scaled up."""
    num_classes, shape, num_examples = describe(experiment.data)
    if shape is None:
        # Image files are resized to a square.
        shape = (3, experiment.image_size, experiment.image_size)
    learners = make_learners(
        experiment, num_examples or 0, num_classes, torch.zeros(shape), torch.device("cpu")
    )
    parameters: list[Tensor] = []
    num_bytes = dict.fromkeys(("weights", "gradients", "optimizer", "averages", "method"), 0)
    for learner in learners:
        own = list(learner.network.parameters())
        parameters += own
        num_bytes["weights"] += _num_bytes(learner.network.state_dict().values())
        num_bytes["gradients"] += _num_bytes(weight for weight in own if weight.requires_grad)
        for state in learner.optimizer.state.values():
            num_bytes["optimizer"] += _num_bytes(state.values())
        if learner.average is not None:
            num_bytes["averages"] += _num_bytes(learner.average.state_dict().values())
        num_bytes["method"] += _num_bytes(learner.state.values())
    rows = experiment.batch_size
    if isinstance(experiment.augment, Views):
        rows *= 2
    # Two rows are measured, because batch normalization refuses one.
    saved = _saved_bytes(learners[0].network, shape)
    num_bytes["activations"] = len(learners) * rows * saved // 2
    return Estimate(
        num_parameters=sum(weight.numel() for weight in parameters),
        num_classes=num_classes,
        input_shape=shape,
        num_examples=num_examples,
        num_steps=_num_steps(experiment, num_examples),
        num_bytes=num_bytes,
    )


def describe_plan(tree: Mapping[str, Any], needed: Estimate) -> str:
    """An experiment as indented lines, and what it will take."""
    steps = examples = "unknown until the data is opened"
    if needed.num_steps is not None:
        steps = f"{needed.num_steps:,}"
    if needed.num_examples is not None:
        examples = f"{needed.num_examples:,}"
    parts = [f"{name} {_megabytes(number)}" for name, number in needed.num_bytes.items() if number]
    total = _megabytes(sum(needed.num_bytes.values()))
    shape = " x ".join(map(str, needed.input_shape))
    lines = [
        *_lines(tree),
        "",
        f"data: {needed.num_classes} classes, inputs of {shape}",
        f"examples: {examples}",
        f"parameters: {needed.num_parameters:,}",
        f"steps: {steps}",
        f"memory, an estimate in float32 and without the data: {total} ({', '.join(parts)})",
    ]
    return "\n".join(lines)


def _lines(tree: Any, indent: str = "") -> list[str]:
    """A tree of JSON, one line for each leaf and for each thing that has a kind."""
    lines = []
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if key == "kind":
            continue
        is_list = isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)
        if not is_list and not isinstance(value, Mapping):
            lines.append(f"{indent}{key}: {json.dumps(value)}")
            continue
        kind = "" if is_list else f" {value['kind']}"
        lines += [f"{indent}{key}:{kind}", *_lines(value, f"{indent}  ")]
    return lines


def _megabytes(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB" if number < 2**30 else f"{number / 2**30:,.1f} GiB"


def _num_steps(experiment: Experiment, num_examples: int | None) -> int | None:
    per_epoch = experiment.batches_per_epoch
    if per_epoch is None:
        if num_examples is None:
            return None
        held_out = experiment.held_out
        num_held = round(held_out * num_examples) if held_out < 1 else round(held_out)
        per_epoch = max(1, (num_examples - num_held) // experiment.batch_size)
    return max(1, round(experiment.epochs * per_epoch))


def _num_bytes(values: Iterable[Any]) -> int:
    """Of the tensors among the values; a state may hold other things too."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _saved_bytes(network: torch.nn.Module, shape: tuple[int, ...]) -> int:
    """What a forward pass of two rows keeps for the backward pass, besides the weights."""
    own = {weight.untyped_storage().data_ptr() for weight in network.parameters()}
    # By address. The tensors are held, so that no address is used a second time.
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network.train()(torch.zeros(2, *shape))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
