"""Choices of an experiment that the paper's methods need: the oracle, hidden labels, balanced batches, two noises."""

import json
import math
import shutil
from dataclasses import dataclass, replace

import numpy as np
import oracles
import pytest
import torch
from safetensors.torch import load_file

from nearsay import ELR, Batch, CrossEntropy, Outputs, config
from nearsay.data.loader import Order
from nearsay.data.toy import Toy
from nearsay.experiment import Experiment, Machine
from nearsay.models import MLP
from nearsay.noise import Symmetric
from nearsay.optim import SGD, Constant
from nearsay.training.loop import train
from nearsay.training.predict import propagate, propagate_in_run
from nearsay.training.splits import open_splits
from nearsay.training.step import observe_
from nearsay.transforms import Mixup

SMALL = Experiment(
    data=Toy(num_train=200, num_test=100, num_classes=4),
    noise=Symmetric(rate=0.5, redraw=False),
    backbone=MLP(hidden=(16,)),
    normalize=None,
    optimizer=SGD(lr=0.05),
    schedule=Constant(),
    epochs=2,
    batch_size=32,
)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_hidden_labels_are_a_share_and_nested(share):
    shown, more = (
        open_splits(replace(SMALL, labeled=each)).labels.given >= 0 for each in (share, 1.0)
    )
    assert shown.sum() == round(200 * share)
    assert more.all()
    fewer = open_splits(replace(SMALL, labeled=share / 2)).labels.given >= 0
    assert (fewer <= shown).all()
    # Unlabeled, but still neighbors.
    assert len(open_splits(replace(SMALL, labeled=share)).train) == 200


def test_other_noise_changes_the_second_network_and_only_by_its_teaching_the_first(tmp_path):
    two = replace(SMALL, networks=2, averaging=0.9, objective=CrossEntropy(), mixup=Mixup())
    shared = train(two, tmp_path / "shared")
    leaked = train(replace(two, noise_per_network=True), tmp_path / "leaked")
    assert shared["labels"] == leaked["labels"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("shared", "leaked")]
    for name, tensor in weights[0].items():
        if name.endswith("num_batches_tracked"):
            continue
        # No teacher in cross-entropy.
        assert torch.equal(tensor, weights[1][name]) == name.startswith("0."), name


def test_noise_that_leaks_reaches_a_network_through_its_teacher(tmp_path):
    two = replace(SMALL, networks=2, averaging=0.5, objective=ELR(), epochs=1)
    for name, leaks in (("shared", False), ("leaked", True)):
        train(replace(two, noise_per_network=leaks), tmp_path / name)
    shared, leaked = (
        load_file(tmp_path / name / "model.safetensors") for name in ("shared", "leaked")
    )
    assert not torch.equal(shared["0.fc.weight"], leaked["0.fc.weight"])
    assert torch.equal(
        *(torch.from_numpy(load_labels(tmp_path / name)) for name in ("shared", "leaked"))
    )


def load_labels(folder):
    with np.load(folder / "labels.npz") as arrays:
        return arrays["given"]


def test_networks_or_averages_are_judged(tmp_path):
    # So slow that it is still near the beginning.
    averaged = replace(SMALL, noise=None, epochs=10, averaging=0.999)
    ends = {
        judged: train(replace(averaged, eval_weights=judged), tmp_path / judged)
        for judged in ("networks", "averages")
    }
    assert (
        ends["networks"]["accuracy"]["test"]["final"]
        > ends["averages"]["accuracy"]["test"]["final"] + 0.2
    )
    with pytest.raises(ValueError, match="averaging"):
        replace(SMALL, eval_weights="averages")


def test_balanced_batches_hold_every_class_alike():
    kinds = torch.tensor([0] * 90 + [1] * 9 + [2] * 3 + [-1] * 8)
    order = Order(torch.arange(110), batch_size=12, seed=0, kinds=kinds)
    assert order.batches_per_pass == 9
    seen = torch.cat([order.batch(step) for step in range(9)])
    for step in range(20):
        assert torch.bincount(kinds[order.batch(step)], minlength=3).tolist() == [4, 4, 4]
    # Nobody of a large class twice in a pass.
    assert len(set(seen[kinds[seen] == 0].tolist())) == 36
    counts = torch.bincount(seen[kinds[seen] == 1], minlength=99)[90:99]
    # And everybody of a small one equally often.
    assert counts.tolist() == [4] * 9
    again = Order(torch.arange(110), batch_size=12, seed=0, kinds=kinds)
    assert torch.equal(again.batch(13), order.batch(13))
    assert not torch.equal(order.batch(0), order.batch(9))


def test_a_balanced_run_counts_classes_alike(tmp_path, monkeypatch):
    asked = []

    def spied(*arguments, repeats):
        asked.append(repeats)
        return observe_(*arguments, repeats=repeats)

    monkeypatch.setattr("nearsay.training.step.observe_", spied)
    result = train(replace(SMALL, balanced=True, batches_per_epoch=3), tmp_path)
    assert result["steps"] == 6
    # A small class may be in a batch with one example twice.
    assert asked == [True] * 6


def case():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    targets = torch.softmax(torch.randn(5, 4, generator=generator, dtype=torch.float64), dim=1)
    # unlabeled.
    targets[1] = 0
    return Outputs(logits, logits), Batch(inputs=logits, targets=targets, indices=torch.arange(5))


def test_targets_are_weighed_anew_as_in_elr_plus_with_many_classes():
    outputs, batch = case()
    memory = ELR(reweigh=True).init_state(5, 4, 4)
    loss = ELR(beta=0.7, weight=0, reweigh=True)(outputs, batch, torch.tensor(0.0), memory, "elr")
    averages = oracles.elr_update([[0.0] * 4] * 5, outputs.logits.tolist(), range(5), 0.7)
    total, weights = 0.0, 0.0
    for row, target, average in zip(
        outputs.logits.tolist(), batch.targets.tolist(), averages, strict=True
    ):
        weight = math.fsum(target)
        product = [y * t for y, t in zip(target, average, strict=True)]
        scale = weight / math.fsum(product) if weight else 0.0
        logs = [math.log(p) for p in oracles.softmax(row)]
        total -= math.fsum(scale * y * log for y, log in zip(product, logs, strict=True))
        weights += weight
    assert loss.total.item() == pytest.approx(total / weights, rel=1e-6)


def test_propagated_labels_are_better_and_can_be_learned(tmp_path):
    call = config.call_recipe("toy", ["epochs=5", "method=ncr", "noise=0.4"])
    train(call.experiment, tmp_path / "first", origin=call.origin)
    found = propagate(tmp_path / "first", k=20)
    assert found["accuracy_before"] == pytest.approx(0.6, abs=0.01)
    assert found["accuracy_after"] > 0.85
    again = config.apply_overrides(call, [f"labels_file={found['file']}", "objective.alpha=0.1"])
    result = train(again.experiment, tmp_path / "second", origin=again.origin)
    assert result["labels"]["effective_rate"] == pytest.approx(1 - found["accuracy_after"])
    with pytest.raises(ValueError, match=r"labels_file=.*nothing\.npz"):
        open_splits(replace(call.experiment, labels_file=str(tmp_path / "nothing.npz")))
    with pytest.raises(ValueError, match="labels_file"):
        open_splits(replace(SMALL, labels_file=found["file"]))


@dataclass(frozen=True)
class OtherToy:
    """A second test split, of the same classes."""

    def open(self, split):
        assert split == "test"
        return Toy(num_test=60, num_classes=4, seed=5).open("test")


def test_a_second_test_split_is_judged_as_well(tmp_path):
    result = train(replace(SMALL, second_test=OtherToy()), tmp_path)
    assert set(result["accuracy"]) == {"test", "second_test"}
    seen = load_file(tmp_path / "predictions" / "second_test.safetensors")
    truth = Toy(num_test=60, num_classes=4, seed=5).open("test").labels.given
    right = (seen["logits"].argmax(dim=1) == truth).double().mean().item()
    assert result["accuracy"]["second_test"]["final"] == pytest.approx(right)


def test_labels_are_propagated_halfway_and_learned(tmp_path):
    call = config.call_recipe("toy", ["method=label-propagation", "epochs=10"])
    assert call.experiment.propagate_at == 5
    train(call.experiment, tmp_path / "whole", origin=call.origin)
    entries = [
        json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    ]
    assert [entry["epoch"] for entry in entries if "transductive_accuracy" in entry] == [5.0]
    # Of labels of which 60 % were right.
    assert entries[4]["transductive_accuracy"] > 0.8


def test_a_run_too_short_to_propagate_labels_is_refused_and_one_of_an_epoch_says_how_right_they_are(
    tmp_path,
):
    with pytest.raises(config.ConfigError, match="propagate_at"):
        config.call_recipe("toy", ["method=label-propagation", "epochs=0.5"])
    call = config.call_recipe("toy", ["method=label-propagation", "epochs=1"])
    train(call.experiment, tmp_path)
    assert 0 < json.loads((tmp_path / "log.jsonl").read_text())["transductive_accuracy"] <= 1


def test_the_result_is_about_the_labels_before_they_were_propagated(tmp_path):
    plain = train(replace(SMALL, objective=CrossEntropy(), epochs=2), tmp_path / "plain")
    found = train(
        replace(SMALL, objective=CrossEntropy(), epochs=2, propagate_at=2), tmp_path / "propagated"
    )
    assert found["labels"] == plain["labels"]
    for part in ("detection", "confidence", "memorization"):
        # As the labels changed after the last step, the networks are the same.
        assert found[part] == plain[part]


def test_two_networks_propagate_from_the_same_labels(tmp_path, monkeypatch):
    seen = []

    def watched(predictions, given, clean, trained):
        seen.append(given.clone())
        return propagate_in_run(predictions, given, clean, trained)

    monkeypatch.setattr("nearsay.training.loop.propagate_in_run", watched)
    train(
        replace(
            SMALL, objective=CrossEntropy(), epochs=2, propagate_at=1, networks=2, averaging=0.9
        ),
        tmp_path,
    )
    assert len(seen) == 2
    assert seen[0].equal(seen[1])


@pytest.mark.parametrize("steps", [10, 14])  # of 18, before the labels change at 12, and after
def test_propagated_labels_survive_a_stop(tmp_path, steps):
    experiment = replace(SMALL, objective=CrossEntropy(), epochs=3, propagate_at=2)
    experiment = replace(experiment, machine=Machine(checkpoint_steps=steps))
    train(experiment, tmp_path / "whole")
    train(experiment, tmp_path / "stopped")
    older, newest = sorted((tmp_path / "stopped" / "checkpoints").iterdir())
    assert older.name == f"step-{steps:08d}"
    shutil.rmtree(newest)
    (tmp_path / "stopped" / "result.json").unlink()
    train(experiment, tmp_path / "stopped")
    whole, stopped = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")
    )
    assert whole == stopped
