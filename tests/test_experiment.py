"""What experiments and machines accept and refuse."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from nearsay.data import Toy
from nearsay.errors import NoDevice
from nearsay.experiment import Experiment, Machine
from nearsay.losses import NCR
from nearsay.models import ResNet
from nearsay.optim import SGD, Constant, Cosine

DATA = Toy()


def test_an_experiment_is_a_value_with_defaults():
    experiment = Experiment(data=DATA)
    assert experiment == Experiment(
        data=Toy(),
        backbone=ResNet(),
        objective=NCR(),
        optimizer=SGD(),
        schedule=Cosine(),
        machine=Machine(),
    )
    assert (experiment.epochs, experiment.batch_size, experiment.networks, experiment.seed) == (
        100,
        256,
        1,
        0,
    )
    with pytest.raises(FrozenInstanceError):
        experiment.epochs = 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"validation_labels": "true"},
        {"bad_images": "ignore"},
        {"networks": 3},
        {"eval_weights": "best"},
        {"held_out": 1.5},
        {"held_out": math.nan},
        {"labeled": 0},
        {"labeled": 1.1},
        {"averaging_ramp": -1},
        {"evaluate_every": 0},
        {"epochs": 0},
        {"batch_size": 1},
        {"image_size": 0},
        {"seed": 0.5},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"propagate_at": 4, "epochs": 3, "schedule": Constant()},
        {"propagate_at": 0},
        {"batches_per_epoch": 0},
        {"averaging": 1.0},
        {"networks": 2},
        {"self_taught": True},
        {"self_taught": True, "averaging": 0.9, "networks": 2},
        {"noise_per_network": True},
        {"eval_weights": "averages"},
        {"clip": 0},
        {"schedule": Cosine(warmup=5), "epochs": 5},
    ],
    ids=lambda wrong: ",".join(map(str, wrong.items())),
)
def test_an_impossible_experiment_is_refused_by_its_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Experiment(data=DATA, **wrong)


@pytest.mark.parametrize(
    "right",
    [
        {"held_out": 0.5},
        {"epochs": 0.001, "schedule": Constant()},
        {"batch_size": 2},
        {"averaging": 0.0},
        {"averaging": math.nextafter(1, 0), "networks": 2},
        {"clip": 1e-3},
        {"seed": 2**63 - 1},
        {"epochs": 3, "propagate_at": 3, "schedule": Constant()},
        {"batches_per_epoch": 1},
    ],
    ids=str,
)
def test_an_experiment_at_the_edge_is_accepted(right):
    experiment = Experiment(data=DATA, **right)
    assert {name: getattr(experiment, name) for name in right} == right


@pytest.mark.parametrize(
    "wrong",
    [
        {"precision": "float16"},
        {"loading": "lazy"},
        {"workers": -1},
        {"checkpoint_steps": 0},
        {"checkpoint_seconds": -1},
        {"timeout": 0.5},
    ],
    ids=str,
)
def test_an_impossible_machine_is_refused_by_its_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Machine(**wrong)


def pretend_gpus(monkeypatch, num):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)


@pytest.mark.parametrize(
    ("name", "number", "num_gpus", "found"),
    [
        ("auto", 0, 0, "cpu"),
        ("cpu", 1, 2, "cpu"),
        ("auto", 0, 1, "cuda:0"),
        ("auto", 1, 2, "cuda:1"),
        ("cuda", 1, 2, "cuda:1"),
        ("cuda:1", 0, 2, "cuda:1"),
    ],
)
def test_the_device_is_found(monkeypatch, name, number, num_gpus, found):
    pretend_gpus(monkeypatch, num_gpus)
    assert Machine(device=name).find_device(number) == torch.device(found)


@pytest.mark.parametrize(
    ("name", "num_gpus"), [("cuda", 0), ("cuda:2", 2), ("gpu", 1), ("meta", 1)]
)
def test_a_missing_device_is_refused_by_its_name(monkeypatch, name, num_gpus):
    pretend_gpus(monkeypatch, num_gpus)
    with pytest.raises(NoDevice, match=f"device.*'{name}'"):
        Machine(device=name).find_device()


@pytest.mark.parametrize(
    ("precision", "on_cpu", "on_gpu"),
    [
        ("auto", torch.float32, torch.bfloat16),
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_of_the_network(precision, on_cpu, on_gpu):
    machine = replace(Machine(), precision=precision)
    assert machine.find_dtype(torch.device("cpu")) == on_cpu
    assert machine.find_dtype(torch.device("cuda")) == on_gpu
