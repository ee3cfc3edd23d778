"""A number that is not finite, wherever it comes up, ends a run before it has spoiled anything."""

import json
import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faults.jobs import PATIENCE
from nearsay.batch import Labels, Split
from nearsay.config import call_recipe
from nearsay.data.loader import Rows
from nearsay.errors import NoSplit, NotFinite
from nearsay.experiment import Experiment, Machine
from nearsay.models import MLP, Linear
from nearsay.optim import SGD, Constant
from nearsay.training.checkpoints import open_run
from nearsay.training.loop import train
from nearsay.training.splits import make_order, open_splits
from nearsay.training.step import Setting, Step, make_learners

CPU = torch.device("cpu")
SPOILED = '''
"""A recipe whose loss goes wrong at one step, in one place, on all processes or on one."""
from dataclasses import dataclass

import torch

from nearsay import distributed
from nearsay.batch import Objective, Outputs
from nearsay.data import Toy
from nearsay.experiment import Experiment, Machine
from nearsay.models import MLP
from nearsay.losses import ELR, NCR, Bank
from nearsay.optim import SGD, Constant

PER_EPOCH = 4


@dataclass(frozen=True, kw_only=True)
class Spoiled:
    base: Objective
    at: int
    where: str
    value: str
    rank: int

    def init_state(self, num_examples, num_classes, num_features):
        return self.base.init_state(num_examples, num_classes, num_features)

    def phase(self, epoch, state):
        return self.base.phase(epoch, state)

    def __call__(self, outputs, batch, epoch, state, phase):
        is_here = self.rank in (-1, distributed.rank())
        is_now = (epoch * PER_EPOCH).round() == self.at
        bad = torch.where(is_now, float(self.value), 0.0) if is_here else torch.zeros(())
        features, logits = outputs
        if self.where == "features":
            features = features + bad
        if self.where == "logits":
            logits = logits + bad
        if self.where == "gradient":
            logits.register_hook(lambda gradient: gradient + bad)
        loss = self.base(Outputs(features, logits), batch, epoch, state, phase)
        if self.where != "loss":
            return loss
        for each in state.values():
            each += bad.to(each.dtype) if each.is_floating_point() else 0
        return loss._replace(total=loss.total + bad, terms={**loss.terms, "spoiled": bad})


def recipe(*, at: int = 3, where: str = "loss", value: str = "nan", rank: int = -1, steps: int = 1) -> Experiment:
    """A small run with everything that a step changes."""
    return Experiment(
        data=Toy(num_classes=4, num_features=6, num_train=64, num_test=16),
        backbone=MLP(hidden=(8,)),
        objective=Spoiled(base=NCR(k=3, base=ELR(), bank=Bank(size=32)), at=at, where=where, value=value, rank=rank),
        averaging=0.5,
        normalize=None,
        optimizer=SGD(lr=0.1),
        schedule=Constant(),
        epochs=3,
        batch_size=16,
        machine=Machine(checkpoint_steps=steps, timeout=900),
    )
'''
KINDS = [
    ("loss", "nan"),
    ("loss", "inf"),
    ("gradient", "nan"),
    ("gradient", "-inf"),
    ("features", "nan"),
    ("logits", "inf"),
    ("input", "nan"),
    ("weight", "nan"),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "spoiled.py"
    path.write_text(SPOILED)
    return str(path)


def spoiled(recipe, **arguments):
    return call_recipe(recipe, [f"{key}={value}" for key, value in arguments.items()]).experiment


def ready(experiment):
    """The step of an experiment and the order of its examples, on the CPU."""
    splits = open_splits(experiment)
    order = make_order(experiment, splits)
    setting = Setting(
        source=splits.inputs.clone(),
        given=(splits.labels.given,) * experiment.networks,
        label_weights=torch.ones(len(splits.labels.classes)),
        batches_per_epoch=order.batches_per_pass,
        batches_per_pass=order.batches_per_pass,
        is_cut=False,
        device=CPU,
        dtype=torch.float32,
        captures=False,
        compiles=False,
    )
    num_classes = len(splits.labels.classes)
    learners = make_learners(
        experiment, len(splits.labels.given), num_classes, splits.inputs[0], CPU
    )
    return Step(experiment, setting, learners), order


def bytes_of(tensors):
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def assert_nothing_changes(experiment, at, where, value, draw):
    """Go to step `at`, where something is spoiled, and beyond; all that was learned stays as it was before.

    Only the average of a weight that itself is spoiled follows it, and room for sums is made in the first step.
    """
    step, order = ready(experiment)

    def go(numbers):
        for number in numbers:
            stage = experiment.objective.phase(
                number / order.batches_per_pass, step.learners[0].state
            )
            step(Rows(order.batch(number), None), stage)

    go(range(at))
    assert step.is_fine.item()
    fresh = bytes_of(ready(experiment)[0].tensors())
    if where == "input":
        step.setting.source[order.batch(at)[draw.randrange(16)], draw.randrange(6)] = float(value)
    if where == "weight":
        weight = next(step.learners[0].network.parameters())
        with torch.no_grad():
            weight.view(-1)[draw.randrange(weight.numel())] = float(value)
    before = bytes_of(step.tensors())
    go(range(at, at + 3))
    assert not step.is_fine.item()
    assert step.bad_step.item() == at
    after = bytes_of(step.tensors())
    passed_over = ["count", *(["average"] if where == "weight" else []), *([] if at else ["sums"])]
    compared = [name for name in before if not name.startswith(tuple(passed_over))]
    assert [name for name in compared if after[name] != before[name]] == []
    kinds = {
        re.match("[a-z]+", name)[0]
        for name in compared
        if at and name in fresh and fresh[name] != before[name]
    }
    # Each of them had been learning.
    assert not at or {"network", "optimizer", "memory"} <= kinds


@pytest.mark.parametrize(("where", "value"), KINDS)
def test_a_bad_step_changes_no_bit_of_what_was_learned(recipe, where, value):
    assert_nothing_changes(
        spoiled(recipe, where=where, value=value), 3, where, value, random.Random(0)
    )


def checkpoint_of(folder):
    with open_run(folder) as run:
        return run.load()


def assert_is_finite(checkpoint):
    kept = {name: each for name, each in checkpoint.tensors.items() if each.is_floating_point()}
    assert [name for name, each in kept.items() if not each.isfinite().all()] == []
    assert any(name.startswith("average0.") for name in kept)


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_run_stops_with_the_examples_of_the_first_bad_step(recipe, tmp_path, at):
    experiment = spoiled(recipe, at=at, where="gradient")
    with pytest.raises(NotFinite, match=f"at step {at} .*not_finite.json") as caught:
        train(experiment, tmp_path)
    assert caught.value.code == 76
    told = json.loads((tmp_path / "not_finite.json").read_text())
    order = make_order(experiment, open_splits(experiment))
    assert (told["step"], told["epoch"], told["names"]) == (at, at / 4, [])
    assert told["examples"] == order.batch(at).tolist()
    newest = checkpoint_of(tmp_path)
    assert not (tmp_path / "result.json").exists()
    if at == 0:
        assert newest is None
        return
    assert newest.step == at
    assert_is_finite(newest)


def test_the_last_checkpoint_is_that_of_a_run_without_the_fault(recipe, tmp_path):
    with pytest.raises(NotFinite):
        train(spoiled(recipe, at=3), tmp_path / "spoiled")
    train(replace(spoiled(recipe, at=99), epochs=0.75), tmp_path / "right")
    left, right = (checkpoint_of(tmp_path / name).tensors for name in ("spoiled", "right"))
    assert left["count"] == right["count"] == 3
    # Which an epoch that ends begins anew.
    learned = [name for name in left if not name.startswith("sums")]
    assert bytes_of({name: left[name] for name in learned}) == bytes_of(
        {name: right[name] for name in learned}
    )


def test_no_checkpoint_is_written_after_the_bad_step(recipe, tmp_path):
    with pytest.raises(NotFinite, match="at step 1 "):
        train(spoiled(recipe, at=1, steps=3), tmp_path)
    assert checkpoint_of(tmp_path) is None


def test_a_weight_that_overflows_is_never_saved(recipe, tmp_path):
    """Loss and gradient are finite, but the step is too far for float32."""
    experiment = spoiled(recipe, at=99)
    far = replace(experiment.data, distance=1e4)
    experiment = replace(
        experiment,
        data=far,
        backbone=Linear(),
        optimizer=SGD(lr=1e38),
        objective=experiment.objective.base,
    )
    with pytest.raises(NotFinite, match="or a weight was not finite at step 0 "):
        train(experiment, tmp_path)
    assert checkpoint_of(tmp_path) is None


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Features in a file that somebody may repair."""

    path: Path

    def open(self, split):
        if split != "train":
            raise NoSplit(split)
        features = torch.from_numpy(np.load(self.path))
        given = torch.arange(len(features)) % 4
        return Split(features, Labels(given, None, tuple("abcd")))


def test_a_run_on_repaired_data_goes_on_as_if_nothing_had_been(tmp_path):
    features = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    np.save(tmp_path / "features.npy", features)
    experiment = Experiment(
        data=Stored(path=tmp_path / "features.npy"),
        backbone=MLP(hidden=(8,)),
        normalize=None,
        optimizer=SGD(lr=0.1),
        schedule=Constant(),
        epochs=2,
        batch_size=16,
        machine=Machine(checkpoint_steps=1),
    )
    train(experiment, tmp_path / "right")
    bad = int(make_order(experiment, open_splits(experiment)).batch(2)[5])
    broken = features.copy()
    broken[bad, 1] = np.nan
    np.save(tmp_path / "features.npy", broken)
    # Again the same, as long as nothing is done about it.
    for _ in range(2):
        with pytest.raises(NotFinite):
            train(experiment, tmp_path / "broken")
        told = json.loads((tmp_path / "broken" / "not_finite.json").read_text())
        assert told["step"] == 2
        assert bad in told["examples"]
    np.save(tmp_path / "features.npy", features)
    train(experiment, tmp_path / "broken")
    for name in ("model.safetensors", "log.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "right" / name).read_bytes()


def test_one_of_two_processes_stops_both(recipe, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [recipe, "at=2", "value=inf", "rank=1"]
    command = [sys.executable, "-m", "nearsay", "train", *words]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [*command, "--out", str(tmp_path / "run"), "--quiet"],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [76, 76], told
    assert all("step 2 " in each for each in told)
    newest = checkpoint_of(tmp_path / "run")
    assert newest.step == 2
    assert_is_finite(newest)
