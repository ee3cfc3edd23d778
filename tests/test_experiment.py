"""What an experiment and a machine refuse, in one sentence that says what would work."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from nearsay.data import Toy
from nearsay.experiment import Experiment, Machine
from nearsay.losses import NCR
from nearsay.models import ResNet
from nearsay.optim import SGD, Constant, Cosine

DATA = Toy()


def test_an_experiment_is_a_value_of_good_choices():
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
    ("wrong", "complaint"),
    [
        ({"validation_labels": "true"}, "validation_labels='true' must be one of 'given', 'clean'"),
        ({"bad_images": "ignore"}, "bad_images='ignore' must be one of 'stop', 'skip'"),
        ({"networks": 3}, "networks=3 must be one of 1, 2"),
        ({"held_out": -0.1}, "held_out=-0.1 must be a number of at least 0"),
        ({"held_out": 1.5}, "held_out=1.5 must be a share below 1 or a whole number of examples"),
        ({"held_out": math.nan}, "held_out=nan must be a number of at least 0"),
        ({"averaging_ramp": -1}, "averaging_ramp=-1 must be a number from 0 to 1e+09"),
        ({"evaluate_every": 0}, "evaluate_every=0 must be a whole number of at least 1"),
        ({"evaluate_every": 1.5}, "evaluate_every=1.5 must be a whole number of at least 1"),
        ({"epochs": 0}, "epochs=0 must be a number from 0.001 to 1e+06"),
        ({"epochs": math.inf}, "epochs=inf must be a number from 0.001 to 1e+06"),
        (
            {"batch_size": 1},
            "batch_size=1 must be a whole number of at least 2; a row alone has no neighbor",
        ),
        ({"image_size": 0}, "image_size=0 must be a whole number of at least 1"),
        *(
            (
                {"seed": seed},
                f"seed={seed} must be a whole number from -9223372036854775808 to 9223372036854775807",
            )
            for seed in (0.5, True, 2**63, -(2**63) - 1)
        ),
        (
            {"epochs": 3, "propagate_at": 4, "schedule": Constant()},
            "propagate_at=4 is never reached in epochs=3; propagate earlier, or train for at least 4",
        ),
        (
            {"batches_per_epoch": 0},
            "batches_per_epoch=0 must be a whole number of at least 1, or None for once through the data",
        ),
        (
            {"averaging": 1.0},
            "averaging=1.0 must be a number from 0 to 1, or None for no averaging",
        ),
        (
            {"networks": 2},
            "networks=2 needs averaging=, such as 0.997: each is taught by the average of the other",
        ),
        ({"self_taught": True}, "self_taught=True needs averaging=, such as 0.997, and networks=1"),
        (
            {"self_taught": True, "averaging": 0.9, "networks": 2},
            "self_taught=True needs averaging=, such as 0.997, and networks=1",
        ),
        (
            {"clip": 0},
            "clip=0 would stop all learning; give a positive length, or None for no clipping",
        ),
        ({"clip": -1.0}, "clip=-1.0 must be a number of at least 0"),
        (
            {"epochs": 5, "schedule": Cosine(warmup=5)},
            "schedule.warmup=5 must end before the 5 epochs do; shorten it",
        ),
    ],
    ids=lambda value: (
        "" if isinstance(value, str) else ",".join(f"{name}={each}" for name, each in value.items())
    ),
)
def test_an_experiment_that_means_nothing_is_refused(wrong, complaint):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole sentence is compared below
        Experiment(data=DATA, **wrong)
    assert str(caught.value) == complaint


@pytest.mark.parametrize(
    "right",
    [
        {"held_out": 0.5},
        {"held_out": 100},
        {"epochs": 0.001, "schedule": Constant()},
        {"batch_size": 2},
        {"averaging": 0.0},
        {"averaging": math.nextafter(1, 0), "networks": 2},
        {"clip": 1e-3},
        {"seed": -3},
        {"seed": 2**63 - 1},
        {"epochs": 3, "propagate_at": 3, "schedule": Constant()},
        {"batches_per_epoch": 1},
    ],
    ids=str,
)
def test_an_experiment_at_the_edge_of_what_it_means_is_made(right):
    experiment = Experiment(data=DATA, **right)
    assert {name: getattr(experiment, name) for name in right} == right


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            {"precision": "float16"},
            "precision='float16' must be one of 'auto', 'float32', 'bfloat16'",
        ),
        ({"loading": "lazy"}, "loading='lazy' must be one of 'auto', 'resident', 'streaming'"),
        (
            {"workers": -1},
            "workers=-1 must be a whole number of at least 0, or None for as many as there are cores",
        ),
        (
            {"checkpoint_steps": 0},
            "checkpoint_steps=0 must be a whole number of at least 1, or None to go by checkpoint_seconds",
        ),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds=-1 must be a number of at least 0"),
        ({"timeout": 0.5}, "timeout=0.5 must be a number of at least 1"),
    ],
    ids=lambda value: (
        "" if isinstance(value, str) else ",".join(f"{name}={each}" for name, each in value.items())
    ),
)
def test_a_machine_that_means_nothing_is_refused(wrong, complaint):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole sentence is compared below
        Machine(**wrong)
    assert str(caught.value) == complaint


def pretend_gpus(monkeypatch, num):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)


@pytest.mark.parametrize(
    ("name", "number", "num_gpus", "found"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 1, 0, "cpu"),
        ("cpu", 1, 2, "cpu"),
        ("auto", 0, 1, "cuda:0"),
        ("auto", 1, 2, "cuda:1"),
        ("cuda", 1, 2, "cuda:1"),
        ("cuda:1", 0, 2, "cuda:1"),
        ("cuda:0", 1, 2, "cuda:0"),
    ],
)
def test_the_device_that_is_meant(monkeypatch, name, number, num_gpus, found):
    pretend_gpus(monkeypatch, num_gpus)
    assert Machine(device=name).find_device(number) == torch.device(found)


@pytest.mark.parametrize(
    ("name", "num_gpus", "complaint"),
    [
        ("cuda", 0, "device='cuda' asks for GPU 0, but 0 are found; use 'cpu' or 'auto'"),
        ("cuda:2", 2, "device='cuda:2' asks for GPU 2, but 2 are found; use 'cpu' or 'auto'"),
        ("gpu", 1, "device='gpu' is no device of torch; use 'auto', 'cpu', 'cuda' or 'cuda:1'"),
        ("meta", 1, "device='meta' is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:1'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, name, num_gpus, complaint):
    pretend_gpus(monkeypatch, num_gpus)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole sentence is compared below
        Machine(device=name).find_device()
    assert str(caught.value) == complaint


@pytest.mark.parametrize(
    ("precision", "on_cpu", "on_gpu"),
    [
        ("auto", torch.float32, torch.bfloat16),
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_what_the_network_calculates_in(precision, on_cpu, on_gpu):
    machine = replace(Machine(), precision=precision)
    assert machine.find_dtype(torch.device("cpu")) == on_cpu
    assert machine.find_dtype(torch.device("cuda")) == on_gpu
