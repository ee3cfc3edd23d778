"""What training will take: parameters, steps and memory, before a file of data is opened."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsay.data import Cifar10, Cifar100, Digits, Embeddings, Toy
from nearsay.experiment import Experiment
from nearsay.training.step import make_learners
from nearsay.transforms import Views

_MANY_CLASSES, _MANY_FEATURES = 1000, 1024  # assumed where only a file can tell


class Estimate(NamedTuple):
    """What training will take, as far as can be told without opening files of data."""

    num_parameters: int  # of all networks
    num_classes: int
    input_shape: tuple[int, ...]
    is_assumed: (
        bool  # the number of classes and the width of features, where only the data could tell them
    )
    num_steps: int | None
    num_bytes: dict[str, int]  # by what they are for; activations in float32


def estimate(experiment: Experiment) -> Estimate:
    """What is allocated, counted; and what two rows leave for the backward pass, scaled up to a batch."""
    num_examples, num_classes, shape = _sizes(experiment)
    learners = make_learners(
        experiment, num_examples or 0, num_classes, torch.zeros(shape), torch.device("cpu")
    )
    parameters = [each for learner in learners for each in learner.network.parameters()]
    rows = experiment.batch_size * (2 if isinstance(experiment.augment, Views) else 1)
    num_bytes = {
        "weights": sum(_num_bytes(learner.network.state_dict().values()) for learner in learners),
        "gradients": _num_bytes(each for each in parameters if each.requires_grad),
        "optimizer": sum(
            _num_bytes(each.values())
            for learner in learners
            for each in learner.optimizer.state.values()
        ),
        "averages": sum(
            _num_bytes(each.average.state_dict().values())
            for each in learners
            if each.average is not None
        ),
        "method": sum(_num_bytes(learner.state.values()) for learner in learners),
        "activations": len(learners) * rows * _saved_bytes(learners[0].network, shape) // 2,
    }
    return Estimate(
        num_parameters=sum(each.numel() for each in parameters),
        num_classes=num_classes,
        input_shape=shape,
        is_assumed=num_examples is None,
        num_steps=_num_steps(experiment, num_examples),
        num_bytes=num_bytes,
    )


def describe_plan(tree: Mapping[str, Any], needed: Estimate) -> str:
    """An experiment as indented lines, and what it will take."""
    steps = (
        "unknown until the data is opened" if needed.num_steps is None else f"{needed.num_steps:,}"
    )
    parts = [f"{name} {_megabytes(number)}" for name, number in needed.num_bytes.items() if number]
    total = _megabytes(sum(needed.num_bytes.values()))
    shape = " x ".join(map(str, needed.input_shape))
    assumed = f"assumed, as only the data can tell: {needed.num_classes} classes, inputs of {shape}"
    return "\n".join(
        [
            *_lines(tree),
            "",
            f"parameters: {needed.num_parameters:,}",
            f"steps: {steps}",
            f"memory, an estimate in float32 and without the data: {total} ({', '.join(parts)})",
            *([assumed] if needed.is_assumed else []),
        ]
    )


def _lines(tree: Any, indent: str = "") -> list[str]:
    """A tree of JSON, one line for each leaf and for each thing that has a kind."""
    lines = []
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if key == "kind":
            continue
        is_tree = isinstance(value, Mapping) or (
            isinstance(value, list) and any(isinstance(each, Mapping) for each in value)
        )
        told = (
            ""
            if is_tree and isinstance(value, list)
            else value["kind"]
            if is_tree
            else json.dumps(value)
        )
        lines += [
            f"{indent}{key}: {told}".rstrip(),
            *(_lines(value, f"{indent}  ") if is_tree else []),
        ]
    return lines


def _megabytes(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB" if number < 2**30 else f"{number / 2**30:,.1f} GiB"


def _sizes(experiment: Experiment) -> tuple[int | None, int, tuple[int, ...]]:
    """Examples, classes and the shape of an input; examples are None, and the rest assumed, where files would tell."""
    data = experiment.data
    if isinstance(data, Cifar10 | Cifar100):
        return 50_000, 10 if isinstance(data, Cifar10) else 100, (3, 32, 32)
    if isinstance(data, Toy | Digits):  # small, and no files of the user
        inputs, labels = data.open("train")
        assert isinstance(inputs, Tensor)
        return len(inputs), len(labels.classes), tuple(inputs.shape[1:])
    if isinstance(data, Embeddings):
        return None, _MANY_CLASSES, (_MANY_FEATURES,)
    return None, _MANY_CLASSES, (3, experiment.image_size, experiment.image_size)


def _num_steps(experiment: Experiment, num_examples: int | None) -> int | None:
    per_epoch = experiment.batches_per_epoch
    if per_epoch is None:
        if num_examples is None:
            return None
        held_out = experiment.held_out
        num_held = round(held_out * num_examples) if held_out < 1 else round(held_out)
        per_epoch = max(1, (num_examples - num_held) // experiment.batch_size)
    return max(1, round(experiment.epochs * per_epoch))


def _num_bytes(tensors: Iterable[Any]) -> int:  # a state may hold other things too
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))


def _saved_bytes(network: torch.nn.Module, shape: tuple[int, ...]) -> int:
    """What a forward pass of two rows keeps for the backward pass, besides the weights."""
    own = {each.untyped_storage().data_ptr() for each in network.parameters()}
    kept: dict[int, Tensor] = {}  # by storage; held, so that no storage is used a second time

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network.train()(torch.zeros(2, *shape))
    return sum(each.untyped_storage().nbytes() for each in kept.values())
