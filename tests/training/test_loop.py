"""What a run leaves in its folder, recomputed from what else is there; and how a run begins, goes on and is refused."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from nearsay import config
from nearsay.batch import Batch, Labels, Loss, Outputs, Split
from nearsay.config import ConfigError
from nearsay.data import Toy
from nearsay.data.loader import Order
from nearsay.errors import NoSplit, RunError
from nearsay.experiment import Experiment, Machine
from nearsay.losses import ELR, NCR, CrossEntropy
from nearsay.models import MLP
from nearsay.noise import OpenSet, Symmetric
from nearsay.optim import SGD, Constant, Cosine
from nearsay.recipes import toy
from nearsay.training import checkpoints, metrics, progress
from nearsay.training.loop import train
from nearsay.transforms import Mixup

NUM_TRAIN, NUM_TEST, SIZE = 200, 60, 32
PER_PASS = NUM_TRAIN // SIZE
SMALL = Experiment(
    data=Toy(num_classes=4, num_features=8, num_train=NUM_TRAIN, num_test=NUM_TEST, distance=3.0),
    noise=Symmetric(rate=0.4, redraw=False),
    backbone=MLP(hidden=(16,)),
    objective=CrossEntropy(),
    normalize=None,
    optimizer=SGD(lr=0.1),
    schedule=Constant(),
    epochs=3,
    batch_size=SIZE,
    machine=Machine(device="cpu"),
)
PARTS = ("log.jsonl", "model.safetensors", "labels.npz", "dynamics.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nobody may change."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return train(SMALL, folder), folder


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def contents(folder, *names):
    return {name: (folder / name).read_bytes() for name in names or PARTS}


def go_back(folder, num=1):
    """As if the process had died before its last checkpoints."""
    (folder / "result.json").unlink()
    for checkpoint in sorted((folder / "checkpoints").iterdir())[-num:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()


# What is written


def test_the_result_is_what_predictions_and_labels_say(finished):
    result, folder = finished
    assert json.loads((folder / "result.json").read_text()) == result
    labels, seen, test = np.load(folder / "labels.npz"), *tables(folder, "train", "test")
    truth = SMALL.data.open("test").labels.clean.tolist()
    right = sum(
        max(range(4), key=row.__getitem__) == own for row, own in zip(test, truth, strict=True)
    )
    assert result["accuracy"]["test"]["final"] == pytest.approx(right / NUM_TEST)

    given, clean = labels["given"].tolist(), labels["clean"].tolist()
    sure = [
        math.exp(row[own]) / sum(map(math.exp, row)) for row, own in zip(seen, given, strict=True)
    ]
    wrong = [number for number in range(NUM_TRAIN) if given[number] != clean[number]]
    rest = [number for number in range(NUM_TRAIN) if given[number] == clean[number]]
    pairs = [
        (sure[low] < sure[high]) + (sure[low] == sure[high]) / 2 for low in wrong for high in rest
    ]
    assert result["detection"]["auroc"] == pytest.approx(sum(pairs) / len(pairs))
    assert result["confidence"] == pytest.approx(
        {
            "right": sum(sure[each] for each in rest) / len(rest),
            "wrong": sum(sure[each] for each in wrong) / len(wrong),
        }
    )
    predicted = [max(range(4), key=row.__getitem__) for row in seen]
    memorized = sum(predicted[each] == given[each] for each in wrong) / len(wrong)
    corrected = sum(predicted[each] == clean[each] for each in wrong) / len(wrong)
    assert result["memorization"] == pytest.approx(
        {"memorized": memorized, "corrected": corrected, "other": 1 - memorized - corrected}
    )
    assert result["labels"]["effective_rate"] == pytest.approx(len(wrong) / NUM_TRAIN)
    assert (
        result["labels"] | {"requested_rate": 0.4, "num_examples": NUM_TRAIN, "num_classes": 4}
        == result["labels"]
    )
    assert result["labels"]["fingerprint"] == str(labels["fingerprint"])
    assert (result["steps"], result["epochs"], result["seed"], result["processes"]) == (
        3 * PER_PASS,
        3,
        0,
        1,
    )
    assert result["finished"] is True
    assert result["skipped"] == 0
    assert result["seconds"] > 0
    assert result["images_per_second"] > 0


def test_the_summary_takes_no_fact_for_a_metric(finished):
    result, _ = finished
    metric_names = {*metrics.TRAIN_METRICS, *metrics.SPLIT_METRICS}
    assert result.keys() - metric_names == {*progress._RESULT_FACTS}


def test_images_from_outside_are_wrong_labels_in_the_result(tmp_path):
    others = replace(SMALL.data, seed=7)
    told = Told()
    result = train(
        replace(SMALL, noise=OpenSet(rate=0.4), outside=others, epochs=1), tmp_path, display=told
    )
    assert result["labels"]["effective_rate"] == told.facts["effective_rate"] == 0.4
    assert float(np.load(tmp_path / "labels.npz")["effective_rate"]) == 0.4


def test_a_metric_is_added_in_one_place(tmp_path, monkeypatch):
    def mean_length(predictions, labels):
        assert len(predictions.logits) == len(labels.given)
        return predictions.features.norm(dim=1).mean().item()

    monkeypatch.setitem(metrics.TRAIN_METRICS, "mean_length", mean_length)
    monkeypatch.setitem(metrics.SPLIT_METRICS, "mean_length_of", mean_length)
    result = train(replace(SMALL, epochs=1, held_out=20), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result["mean_length"] > 0
    assert result["mean_length_of"].keys() == {"validation", "test"}


def tables(folder, *names):
    found = [load_file(folder / "predictions" / f"{name}.safetensors") for name in names]
    for table in found:
        assert table["indices"].tolist() == list(range(len(table["logits"])))
    return [table["logits"].double().tolist() for table in found]


def test_predictions_are_what_the_saved_weights_say(finished):
    _, folder = finished
    network = SMALL.backbone.build(4, num_inputs=8)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    for split in ("train", "test"):
        table = load_file(folder / "predictions" / f"{split}.safetensors")
        with torch.no_grad():
            outputs = network.eval()(SMALL.data.open(split).inputs)
        assert_close(table["logits"], outputs.logits)
        assert_close(table["features"], outputs.features)


def test_dynamics_are_of_every_example_as_often_as_it_was_seen(finished):
    _, folder = finished
    dynamics = load_file(folder / "dynamics.safetensors")
    order = Order(torch.arange(NUM_TRAIN), batch_size=SIZE, seed=0)
    seen = torch.cat([order.batch(step) for step in range(3 * PER_PASS)])
    assert dynamics["count"].tolist() == torch.bincount(seen, minlength=NUM_TRAIN).tolist()
    assert dynamics.keys() == {"count", "confidence", "spread", "margin", "changes", "predicted"}


def test_a_shorter_run_is_the_beginning_of_a_longer_one(tmp_path, finished):
    _, folder = finished
    longer = log_of(folder)
    assert [(entry["epoch"], entry["step"]) for entry in longer] == [(1, 6), (2, 12), (3, 18)]
    accuracy = train(replace(SMALL, epochs=2), tmp_path)["accuracy"]["test"]
    assert log_of(tmp_path) == longer[:2]
    seen = [entry["test_accuracy"] for entry in longer[:2]]
    assert (accuracy["final"], accuracy["best"]) == (seen[-1], max(seen))
    names = "epoch step rate loss cross_entropy train_accuracy test_accuracy"
    for entry in longer:
        assert entry.keys() == set(names.split())
        assert entry["loss"] == entry["cross_entropy"]


def test_the_rate_that_is_logged_is_that_of_the_schedule(tmp_path):
    schedule = Cosine(warmup=1, final=0.2)
    train(replace(SMALL, schedule=schedule, epochs=2.5), tmp_path)
    log = log_of(tmp_path)
    assert [entry["epoch"] for entry in log] == [1, 2, 2.5]
    descent = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * done / 1.5)) for done in (0, 1, 1.5)]
    assert [entry["rate"] for entry in log] == pytest.approx([0.1 * each for each in descent])


def test_two_runs_leave_the_same_bytes_whatever_the_clock_says(tmp_path, finished):
    first, folder = finished
    again = train(SMALL, tmp_path)
    assert contents(tmp_path) == contents(folder)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    timed = ("seconds", "images_per_second", "peak_memory_bytes")
    assert {**first, **dict.fromkeys(timed)} == {**again, **dict.fromkeys(timed)}
    exact = ("experiment.json", "predictions/train.safetensors", "predictions/test.safetensors")
    assert contents(tmp_path, *exact) == contents(folder, *exact)


# How long


def test_the_last_epoch_is_evaluated_and_of_the_others_every_second(tmp_path):
    train(replace(SMALL, epochs=5, evaluate_every=2), tmp_path)
    assert [entry["epoch"] for entry in log_of(tmp_path) if "test_accuracy" in entry] == [2, 4, 5]


@pytest.mark.parametrize(
    ("changes", "num_steps", "epochs"),
    [
        ({"batches_per_epoch": 10, "epochs": 2}, 20, [1, 2]),
        ({"batches_per_epoch": 2, "epochs": 3}, 6, [1, 2, 3]),
        ({"epochs": 1.5}, 9, [1, 1.5]),
        ({"epochs": 0.01}, 1, [1 / 6]),
        ({"batch_size": 1000, "epochs": 2}, 2, [1, 2]),
    ],
    ids=str,
)
def test_epochs_become_steps(tmp_path, changes, num_steps, epochs):
    result = train(replace(SMALL, **changes), tmp_path)
    assert result["steps"] == num_steps
    log = log_of(tmp_path)
    assert [entry["epoch"] for entry in log] == pytest.approx(epochs)
    assert log[-1]["step"] == num_steps
    rows = num_steps * min(changes.get("batch_size", SIZE), NUM_TRAIN)
    assert load_file(tmp_path / "dynamics.safetensors")["count"].sum() == rows


def test_how_steps_are_cut_into_epochs_does_not_change_what_is_learned(tmp_path, finished):
    _, folder = finished
    train(replace(SMALL, batches_per_epoch=3 * PER_PASS, epochs=1), tmp_path)
    same = ("model.safetensors", "dynamics.safetensors")
    assert contents(tmp_path, *same) == contents(folder, *same)


# A folder that is not empty


class Told:
    """Keeps what a display is told."""

    def __init__(self):
        self.calls, self.notes, self.facts, self.progress = [], [], {}, []

    def begin(self, facts):
        self.calls.append("begin")
        self.facts = facts

    def step(self, progress):
        if self.calls[-1] != "step":
            self.calls.append("step")
        self.progress.append(progress)

    def epoch(self, entry):
        self.calls.append("epoch")
        self.entry = entry

    def note(self, message):
        self.notes.append(message)

    def end(self, result):
        self.calls.append("end")
        self.result = result


def test_a_finished_run_is_not_run_again(finished, monkeypatch):
    first, folder = finished

    def times():
        paths = [path for path in folder.rglob("*.*") if path.name != ".lock"]
        return {path: path.stat().st_mtime_ns for path in paths}

    before = times()
    monkeypatch.setattr("nearsay.training.loop._Training", None)
    told = Told()
    assert train(SMALL, folder, display=told) == first
    assert (told.calls, told.result) == (["end"], first)
    assert times() == before


def test_another_experiment_in_the_folder_is_refused_by_the_field_that_differs(finished):
    _, folder = finished
    before = contents(folder, *PARTS, "result.json", "experiment.json")
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.1, not 0\.2"):
        train(replace(SMALL, optimizer=SGD(lr=0.2)), folder)
    assert contents(folder, *PARTS, "result.json", "experiment.json") == before


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Labels in a file, which somebody may edit."""

    path: str

    def open(self, split: str) -> Split:
        if split != "train":
            raise NoSplit(split)
        given = torch.tensor(json.loads(Path(self.path).read_text()))
        inputs = torch.randn(len(given), 8, generator=torch.Generator().manual_seed(0))
        return Split(inputs, Labels(given, None, ("a", "b", "c", "d")))


def test_labels_that_changed_since_are_refused(tmp_path):
    data = tmp_path / "labels.json"
    data.write_text(json.dumps([0, 1, 2, 3] * 16))
    folder = tmp_path / "run"
    experiment = replace(
        SMALL,
        data=Stored(path=str(data)),
        noise=None,
        machine=Machine(device="cpu", checkpoint_steps=2),
    )
    result = train(experiment, folder)
    # There is no split to be judged on.
    assert result["accuracy"] == {}
    assert result["detection"] is None
    go_back(folder)
    data.write_text(json.dumps([1, 1, 2, 3] * 16))
    before = contents(folder, "labels.npz", "log.jsonl")
    with pytest.raises(RunError, match=r"labels\.npz") as caught:
        train(experiment, folder)
    assert caught.value.code == 65
    assert contents(folder, "labels.npz", "log.jsonl") == before


def test_a_run_goes_on_with_the_same_bytes_on_another_machine(tmp_path, finished):
    _, folder = finished
    # At 16, and at the end.
    train(replace(SMALL, machine=Machine(device="cpu", checkpoint_steps=4)), tmp_path)
    go_back(tmp_path)
    told = Told()
    other = Machine(
        device="cpu",
        checkpoint_seconds=7,
        loading="streaming",
        workers=0,
        deterministic=True,
        timeout=5,
    )
    train(replace(SMALL, machine=other), tmp_path, display=told)
    assert told.facts["resumed_at"] == 16
    assert told.facts["loading"] == "streaming"
    assert contents(tmp_path) == contents(folder)
    assert (
        json.loads((tmp_path / "experiment.json").read_text())["experiment"]["machine"][
            "checkpoint_steps"
        ]
        == 4
    )


def test_a_run_with_no_step_left_keeps_how_fast_it_was(tmp_path):
    first = train(SMALL, tmp_path)
    (tmp_path / "result.json").unlink()
    told = Told()
    again = train(SMALL, tmp_path, display=told)
    assert told.facts["resumed_at"] == 18 == first["steps"]
    assert again["images_per_second"] == first["images_per_second"] > 0


def test_a_checkpoint_of_an_older_version_names_the_stage_and_no_speed(tmp_path, finished):
    _, folder = finished
    train(replace(SMALL, machine=Machine(device="cpu", checkpoint_steps=4)), tmp_path)
    go_back(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000016"
    state = json.loads((newest / "state.json").read_text())
    state["stage"] = state.pop("phase")
    del state["images_per_second"]
    files = {"tensors.safetensors": (newest / "tensors.safetensors").read_bytes()}
    files["state.json"] = json.dumps(state).encode()
    (newest / "state.json").write_bytes(files["state.json"])
    (newest / "manifest.json").write_bytes(checkpoints._manifest(16, files))
    told = Told()
    train(SMALL, tmp_path, display=told)
    assert (told.facts["resumed_at"], told.notes) == (16, [])
    assert contents(tmp_path) == contents(folder)


def test_a_damaged_checkpoint_is_passed_over_with_a_note_that_names_both(tmp_path, finished):
    _, folder = finished
    experiment = replace(SMALL, machine=Machine(device="cpu", checkpoint_steps=7))
    # At 14, and at the end.
    train(experiment, tmp_path)
    (tmp_path / "result.json").unlink()
    newest = tmp_path / "checkpoints" / "step-00000018" / "tensors.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    told = Told()
    train(experiment, tmp_path, display=told)
    assert ["step-00000018" in note and "step 14" in note for note in told.notes] == [True]
    assert told.facts["resumed_at"] == 14
    assert contents(tmp_path) == contents(folder)


class Forgetful(nn.Module):
    """A network that draws from torch's own generator while it learns."""

    def __init__(self, network):
        super().__init__()
        self.network, self.dropout, self.num_features = network, nn.Dropout(), network.num_features

    def forward(self, inputs):
        return self.network(self.dropout(inputs))


@dataclass(frozen=True, kw_only=True)
class Dropping:
    """A network with dropout, as a value."""

    def build(self, num_classes, *, num_inputs, seed=0):
        return Forgetful(MLP(hidden=(16,)).build(num_classes, num_inputs=num_inputs, seed=seed))


def test_a_network_with_dropout_goes_on_with_the_same_bytes(tmp_path):
    experiment = replace(
        SMALL, backbone=Dropping(), machine=Machine(device="cpu", checkpoint_steps=7)
    )
    train(experiment, tmp_path)
    whole = contents(tmp_path)
    go_back(tmp_path)
    torch.manual_seed(99)
    train(experiment, tmp_path)
    assert contents(tmp_path) == whole


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    experiment = replace(SMALL, epochs=1)
    train(experiment, tmp_path)
    other = replace(experiment, backbone=MLP(hidden=(17,)))
    record = json.loads((tmp_path / "experiment.json").read_text())
    (tmp_path / "experiment.json").write_text(
        json.dumps({**record, "experiment": config.to_tree(other)})
    )
    (tmp_path / "result.json").unlink()
    with pytest.raises(RunError, match=r"step 6 .*network0") as caught:
        train(other, tmp_path)
    assert caught.value.code == 65


def test_what_was_deleted_from_a_finished_run_is_made_again(tmp_path):
    train(replace(SMALL, epochs=1), tmp_path)
    for name in ("model.safetensors", "predictions/train.safetensors", "result.json"):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        told = Told()
        train(replace(SMALL, epochs=1), tmp_path, display=told)
        assert told.calls == ["begin", "end"]
        # The result tells how long it took.
        if name != "result.json":
            assert (tmp_path / name).read_bytes() == before


def test_a_log_that_is_none_or_cut_short_is_refused_before_a_step(tmp_path):
    experiment = replace(SMALL, machine=Machine(device="cpu", checkpoint_steps=7))
    train(experiment, tmp_path)
    (tmp_path / "result.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000018")
    for content in (b"", b"garbage\n", b"\xff", b"[" * 100_000, b"[]\n"):
        written = content and content + bytes(100_000)
        (tmp_path / "log.jsonl").write_bytes(written)
        told = Told()
        with pytest.raises(RunError, match=r"log\.jsonl") as caught:
            train(experiment, tmp_path, display=told)
        assert caught.value.code == 65
        # A log that is too short is noticed when it is cut.
        assert told.calls == [] or not content
        assert (tmp_path / "log.jsonl").read_bytes() == written


def test_a_log_whose_checkpoints_cannot_be_reached_is_kept(tmp_path):
    train(replace(SMALL, epochs=1), tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "mounted")
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    with pytest.raises(RunError, match="checkpoints") as caught:
        train(replace(SMALL, epochs=1), tmp_path / "run")
    assert caught.value.code == 74
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
    (tmp_path / "elsewhere").rename(tmp_path / "mounted")
    assert train(replace(SMALL, epochs=1), tmp_path / "run")["finished"]


def test_a_folder_of_other_things_is_not_filled(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(RunError, match=r"photo\.jpg") as caught:
        train(replace(SMALL, epochs=1), tmp_path)
    assert caught.value.code == 73
    assert (tmp_path / "photo.jpg").read_bytes() == b"mine"


@pytest.mark.parametrize(("start", "is_reached"), [(2.0, True), (2.5, False), (3.0, False)])
def test_a_start_that_is_never_reached_is_noted(tmp_path, start, is_reached):
    display = Told()
    train(replace(SMALL, objective=NCR(start_epoch=start)), tmp_path, display=display)
    expected = [] if is_reached else [True]
    assert ["start_epoch" in note for note in display.notes] == expected
    assert any("ncr" in entry for entry in log_of(tmp_path)) == is_reached


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_largest_seeds_are_trained_with(tmp_path, seed):
    assert train(replace(SMALL, seed=seed, epochs=0.2), tmp_path)["seed"] == seed


def test_inputs_that_changed_since_are_told(tmp_path):
    train(replace(SMALL, epochs=1), tmp_path)
    with np.load(tmp_path / "labels.npz") as arrays:
        others = {**arrays, "inputs": np.array("0" * 64)}
    np.savez(tmp_path / "labels.npz", **others)
    (tmp_path / "result.json").unlink()
    told = Told()
    train(replace(SMALL, epochs=1), tmp_path, display=told)
    assert ["inputs" in note for note in told.notes] == [True]


def test_a_display_is_told_of_all_in_order(tmp_path):
    told = Told()
    result = train(SMALL, tmp_path, display=told)
    # The last look is before a checkpoint.
    assert told.calls == ["begin", *["step", "epoch"] * 3, "step", "end"]
    assert told.result == result
    assert told.entry == log_of(tmp_path)[-1]
    assert told.notes == []
    assert told.facts | {
        "device": "cpu", "num_examples": NUM_TRAIN, "num_classes": 4, "num_steps": 18, "resumed_at": 0,
        "loading": "resident", "precision": "float32", "num_parameters": 8 * 16 + 2 * 16 + 16 * 4 + 4,
    } == told.facts  # fmt: skip
    assert [progress.step for progress in told.progress] == sorted(
        progress.step for progress in told.progress
    )
    last = told.progress[-1]
    assert (last.step, last.num_steps, last.epoch, last.num_epochs, last.seconds_left) == (
        18,
        18,
        3,
        3,
        0,
    )


# What is learned


def test_averaged_weights_are_judged_with_statistics_of_their_own(tmp_path):
    experiment = replace(SMALL, averaging=0.9)
    train(experiment, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    checkpoint = load_file(tmp_path / "checkpoints" / "step-00000018" / "tensors.safetensors")
    average = {
        name.removeprefix("average0."): each
        for name, each in checkpoint.items()
        if name.startswith("average0.")
    }
    assert average.keys() == saved.keys()
    statistics = {"body.1.running_mean", "body.1.running_var"}
    for name in average.keys() - statistics:
        assert torch.equal(saved[name], average[name]), name
    inputs, _ = experiment.data.open("train")
    order = Order(torch.arange(NUM_TRAIN), batch_size=SIZE, seed=0)
    last_pass = [
        inputs[order.batch(step)] @ saved["body.0.weight"].T
        for step in range(2 * PER_PASS, 3 * PER_PASS)
    ]
    assert_close(
        saved["body.1.running_mean"],
        torch.stack([each.mean(dim=0) for each in last_pass]).mean(dim=0),
    )
    assert_close(
        saved["body.1.running_var"],
        torch.stack([each.var(dim=0) for each in last_pass]).mean(dim=0),
    )
    assert (saved["body.1.running_mean"] - average["body.1.running_mean"]).abs().max() > 1e-3


def test_two_networks_are_judged_by_the_mean_of_what_they_believe(tmp_path):
    experiment = replace(SMALL, networks=2, averaging=0.9, objective=ELR(), epochs=1)
    train(experiment, tmp_path)
    saved, beliefs = load_file(tmp_path / "model.safetensors"), []
    for number in range(2):
        network = SMALL.backbone.build(4, num_inputs=8)
        own = {name[2:]: tensor for name, tensor in saved.items() if name.startswith(f"{number}.")}
        network.load_state_dict(own)
        with torch.no_grad():
            beliefs.append(
                network.eval()(experiment.data.open("test").inputs).logits.softmax(dim=1)
            )
    table = load_file(tmp_path / "predictions" / "test.safetensors")
    assert_close(table["logits"].softmax(dim=1), (beliefs[0] + beliefs[1]) / 2)
    assert (beliefs[0] - beliefs[1]).abs().max() > 0.01


def test_under_mixup_dynamics_come_from_passes_over_the_examples_as_they_are(tmp_path):
    train(replace(SMALL, mixup=Mixup(), epochs=1, held_out=40), tmp_path / "1")
    dynamics = load_file(tmp_path / "1" / "dynamics.safetensors")
    labels, seen = (
        np.load(tmp_path / "1" / "labels.npz"),
        load_file(tmp_path / "1" / "predictions" / "train.safetensors"),
    )
    is_trained = torch.zeros(NUM_TRAIN, dtype=torch.bool)
    is_trained[torch.from_numpy(labels["train"])] = True
    assert dynamics["count"].tolist() == is_trained.int().tolist()
    sure = seen["logits"].softmax(dim=1)[torch.arange(NUM_TRAIN), torch.from_numpy(labels["given"])]
    assert_close(dynamics["confidence"], sure.where(is_trained, 0.0))
    assert not dynamics["spread"].any()
    # After every second epoch, and the last.
    train(replace(SMALL, mixup=Mixup(), epochs=21), tmp_path / "21")
    assert load_file(tmp_path / "21" / "dynamics.safetensors")["count"].unique().tolist() == [11]
    assert "train_accuracy" not in log_of(tmp_path / "21")[-1]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Cross-entropy that keeps its targets by example, where anybody can see them."""

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        return {"targets": torch.zeros(num_examples, num_classes)}

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        return ""

    def __call__(
        self,
        outputs: Outputs,
        batch: Batch,
        epoch: Tensor,
        memory: Mapping[str, Tensor],
        stage: str,
    ) -> Loss:
        memory["targets"][batch.indices] = batch.targets
        return CrossEntropy()(outputs, batch, epoch, {}, "")


def test_class_weights_make_the_classes_that_are_trained_on_count_alike(tmp_path):
    data = tmp_path / "labels.json"
    data.write_text(json.dumps([0] * 100 + [1] * 40 + [2] * 20 + [-1] * 10))
    experiment = replace(
        SMALL,
        data=Stored(path=str(data)),
        noise=None,
        objective=Watched(),
        class_weights=True,
        held_out=15,
        epochs=9,
    )
    train(experiment, tmp_path / "run")
    saved = load_file(
        sorted((tmp_path / "run" / "checkpoints").iterdir())[-1] / "tensors.safetensors"
    )
    targets = saved["memory0.targets"]
    labels = np.load(tmp_path / "run" / "labels.npz")
    counts = {
        number: int((labels["given"][labels["train"]] == number).sum()) for number in range(3)
    }
    # Every class gives as many, so shares differ from those of all examples.
    assert counts == {0: 95, 1: 35, 2: 15}
    for number in range(3):
        weights = targets[torch.from_numpy(labels["given"]) == number, number]
        assert sorted(weights.unique().tolist()) == pytest.approx([0, 145 / (3 * counts[number])])
    assert not targets[160:].any()
    assert not targets[:, 3].any()


@pytest.mark.parametrize("wish", ["given", "clean"])
def test_held_out_examples_are_judged_and_not_trained_on(tmp_path, wish):
    experiment = replace(SMALL, held_out=0.2, validation_labels=wish)
    result = train(experiment, tmp_path)
    labels = np.load(tmp_path / "labels.npz")
    train_part, held = labels["train"], labels["validation"]
    assert (len(train_part), len(held)) == (160, 40)
    assert sorted([*train_part, *held]) == list(range(NUM_TRAIN))
    assert result["labels"]["num_examples"] == 160
    seen, everyone = (
        load_file(tmp_path / "predictions" / f"{name}.safetensors")
        for name in ("validation", "train")
    )
    assert_close(seen["logits"], everyone["logits"][torch.from_numpy(held)])
    right = (seen["logits"].argmax(dim=1).numpy() == labels[wish][held]).mean()
    assert result["accuracy"]["validation"]["final"] == pytest.approx(right)
    assert result["accuracy"].keys() == {"validation", "test"}
    assert not load_file(tmp_path / "dynamics.safetensors")["count"][torch.from_numpy(held)].any()


def test_a_run_can_begin_with_the_weights_of_another_but_for_its_classifier(tmp_path, finished):
    _, folder = finished
    before = load_file(folder / "model.safetensors")
    save_file(before, tmp_path / "weights.safetensors")
    still = replace(SMALL, optimizer=SGD(lr=0.0), epochs=0.01, seed=4)
    train(still, tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for init in (folder, tmp_path / "weights.safetensors"):
        train(replace(still, init=str(init)), tmp_path / f"from {init.name}")
        after = load_file(tmp_path / f"from {init.name}" / "model.safetensors")
        for name in ("body.0.weight", "body.1.weight", "body.1.bias"):
            assert torch.equal(after[name], before[name]), name
        for name in ("fc.weight", "fc.bias"):
            assert torch.equal(after[name], plain[name]), name
            assert not torch.equal(after[name], before[name]), name
        assert not torch.equal(after["body.0.weight"], plain["body.0.weight"])


def test_neighbors_beat_cross_entropy_by_far_where_labels_are_noisy(tmp_path):
    standard, ncr = (
        train(
            replace(toy(method=method, noise=0.4, epochs=25), machine=Machine(device="cpu")),
            tmp_path / method,
        )
        for method in ("standard", "ncr")
    )
    accuracies = [result["accuracy"]["test"]["final"] for result in (standard, ncr)]
    assert accuracies[1] > max(0.94, accuracies[0] + 0.12)
    memorized = [result["memorization"]["memorized"] for result in (standard, ncr)]
    assert memorized[1] < 0.15 < memorized[0] - 0.25
    assert ncr["detection"]["auroc"] > standard["detection"]["auroc"]
