"""Training and run folders from Python: the functions train and load, and the class Run."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nearsay
from nearsay import cli
from nearsay.doors import run as door
from nearsay.errors import ConfigError, RunError
from nearsay.training.evaluate import evaluate
from nearsay.training.run_folder import load_predictions

SMALL = {"epochs": 2, "noise": 0.3}
OVERRIDES = ["data.num_train=200", "data.num_test=120", "batch_size=50"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    return nearsay.train(
        "toy", method="ncr", out=folder, overrides=OVERRIDES, device="cpu", quiet=True, **SMALL
    )


@pytest.fixture
def run(original, tmp_path):
    """A copy of the run that a test may change."""
    return nearsay.load(shutil.copytree(original.folder, tmp_path / "run"))


def test_a_run_is_the_one_that_the_command_line_makes(original, tmp_path):
    words = ["toy", "method=ncr", "epochs=2", "noise=0.3", "--device", "cpu", "--quiet"]
    for change in OVERRIDES:
        words += ["--set", change]
    assert cli.main(["train", *words, "--out", str(tmp_path / "typed")]) == 0
    for name in ("labels.npz", "model.safetensors", "log.jsonl", "predictions/test.safetensors"):
        assert (tmp_path / "typed" / name).read_bytes() == (original.folder / name).read_bytes()
    records = [
        json.loads((folder / "experiment.json").read_text())
        for folder in (tmp_path / "typed", original.folder)
    ]
    assert records[0] == records[1]


def test_a_run_holds_what_its_folder_holds(original):
    assert original.result == json.loads((original.folder / "result.json").read_text())
    assert original.experiment.objective.k == 10
    assert len(original.labels.given) == 200
    kept = load_predictions(original.folder / "predictions" / "train.safetensors")
    assert original.predictions.indices.tolist() == list(range(200))
    assert original.predictions.logits.equal(kept.logits[kept.indices.argsort()])
    final = original.result["accuracy"]["test"]["final"]
    assert repr(original) == (
        f"<Run {original.folder}: ncr on toy, test accuracy {100 * final:.1f} %>"
    )


def test_another_experiment_in_the_same_folder_is_refused(original):
    with pytest.raises(ConfigError, match="objective"):
        nearsay.train("toy", method="standard", out=original.folder, quiet=True, **SMALL)


def test_without_a_folder_the_run_is_below_runs_as_that_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = nearsay.train("toy", epochs=1, overrides="data.num_train=100", quiet=True)
    assert run.folder.as_posix().startswith("runs/toy-epochs=1-data.num_train=100")


def test_predictions_evaluation_and_audit_are_those_of_the_run(run):
    inputs = run.experiment.data.open("test").inputs
    table = run.predict(inputs)
    kept = load_predictions(run.folder / "predictions" / "test.safetensors")
    torch.testing.assert_close(table.probabilities, kept.logits.softmax(dim=1))
    assert run.evaluate() == evaluate(run.folder)
    assert run.evaluate(split="train")["num_examples"] == 200
    features = run.folder / "features.npz"
    np.savez(features, features=inputs.numpy(), labels=np.array(table.labels))
    assert run.evaluate(str(features))["accuracy"] == 1


def test_an_audit_writes_into_the_folder_only_if_it_is_asked_to(run):
    before = sorted(run.folder.rglob("*"))
    audit = run.audit(k=5)
    assert isinstance(audit, nearsay.Audit)
    assert len(audit.scores) == 200
    assert sorted(run.folder.rglob("*")) == before
    written = run.audit(k=5, write=True)
    assert written.scores.equal(audit.scores)
    assert (run.folder / "audit.csv").is_file()


def test_the_network_is_exported_and_the_report_is_drawn(run, tmp_path):
    assert run.export() == run.folder / "export" / "model.safetensors"
    assert run.export(tmp_path / "model") == tmp_path / "model" / "model.safetensors"
    assert b"<html" in run.report(tmp_path / "page.html").read_bytes()


def test_an_experiment_is_trained_and_used_in_the_same_process(tmp_path, original):
    experiment = replace(original.experiment, seed=3, epochs=1)
    run = nearsay.train(experiment, out=tmp_path / "run", overrides=["batch_size=25"], quiet=True)
    assert run.experiment.seed == 3
    assert run.experiment.batch_size == 25
    assert run.evaluate()["num_examples"] == 120
    assert len(run.predict(np.zeros((2, 32)))) == 2
    assert len(run.audit().scores) == 200
    assert run.export().is_file()
    assert "NCR" in repr(run)


def test_the_run_of_an_experiment_is_opened_elsewhere_with_the_experiment(
    tmp_path, original, monkeypatch
):
    experiment = replace(original.experiment, epochs=1)
    nearsay.train(experiment, out=tmp_path / "run", quiet=True)
    # As in another process.
    monkeypatch.setattr("nearsay.training.run_folder._REMEMBERED", {})
    with pytest.raises(RunError, match="experiment="):
        nearsay.load(tmp_path / "run").evaluate()
    with pytest.raises(RunError, match="epochs"):
        nearsay.load(tmp_path / "run", experiment=original.experiment)
    run = nearsay.load(tmp_path / "run", experiment=experiment)
    assert run.evaluate()["num_examples"] == 120


@pytest.mark.parametrize(
    ("arguments", "field"), [({}, "out"), ({"out": "run", "noise": 0.4}, "noise")]
)
def test_an_experiment_needs_a_folder_and_takes_no_arguments(original, arguments, field):
    with pytest.raises(ValueError, match=field):
        nearsay.train(original.experiment, quiet=True, **arguments)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="experiment"):
        nearsay.load(tmp_path)


def test_an_unfinished_run_says_so(run):
    (run.folder / "result.json").unlink()
    assert repr(run).endswith("ncr on toy, not finished>")
    with pytest.raises(RunError, match="finished"):
        _ = run.result
    (run.folder / "experiment.json").unlink()
    assert "no run" in repr(run)


class Interrupting:
    """A display that sends a signal to this process at the end of the first epoch."""

    def __init__(self, number):
        self.number = number

    def begin(self, facts): ...
    def step(self, progress): ...
    def note(self, message): ...
    def end(self, result): ...
    def close(self): ...

    def epoch(self, entry):
        os.kill(os.getpid(), self.number)


def test_an_interrupt_leaves_a_folder_from_which_the_same_call_goes_on(
    original, tmp_path, monkeypatch
):
    calls = {"out": tmp_path / "run", "overrides": OVERRIDES, "device": "cpu", **SMALL}
    with monkeypatch.context() as patched:
        patched.setattr(door, "make_display", lambda *, quiet: Interrupting(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt, match="run"):
            nearsay.train("toy", method="ncr", **calls)
    assert "not finished" in repr(nearsay.load(tmp_path / "run"))
    run = nearsay.train("toy", method="ncr", quiet=True, **calls)
    for name in ("model.safetensors", "log.jsonl"):
        assert (run.folder / name).read_bytes() == (original.folder / name).read_bytes()


class Cell:
    """The output of a notebook cell, as IPython.display makes one."""

    def __init__(self):
        self.texts = []

    def __call__(self, data, *, raw, display_id):
        assert raw
        assert display_id
        self.texts.append(data["text/plain"])
        return self

    def update(self, data, *, raw):
        assert raw
        self.texts.append(data["text/plain"])


def test_in_a_notebook_progress_is_redrawn_in_one_output(tmp_path, monkeypatch, capsys):
    cell = Cell()
    shell = type("ZMQInteractiveShell", (), {})()
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=cell))
    nearsay.train("toy", out=tmp_path / "run", overrides=[*OVERRIDES, "seed=1"], **SMALL)
    assert capsys.readouterr() == ("", "")
    first, *_, last = cell.texts
    # Notes and facts stay, the line of progress is replaced.
    assert "seed" in first
    assert last.startswith(first)
    assert [text.count("epoch 2/2") for text in cell.texts][-1] == 1
    assert "epoch 1/2" not in last
    monkeypatch.setattr(ipython, "get_ipython", lambda: None)
    assert not isinstance(door._find_display(quiet=False), door.Notebook)
