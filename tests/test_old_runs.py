"""Run folders of an early version open, and go on; old_runs/README.md says how they were made."""

import csv
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from nearsay.__main__ import start

OLD = Path(__file__).parent / "old_runs"

# The words with which each run is trained again. They are of today's names; those that it was
# made with are in its experiment.json and in the README.
WORDS = {
    "digits-nearsay": (
        "digits method=neighbor-vote noise=0.2 epochs=30 seed=3 --set data.test_share=0.8 --set backbone.width=1 "
        "--set batch_size=24 --set averaging=0.9 --set mixup.alpha=0.2 --set augment.second.1.magnitude=2 "
        "--set objective.k=10 --set objective.agreement_power=3 --set objective.threshold=0.4 "
        "--set optimizer.lr=0.03 --set optimizer.weight_decay=0"
    ),
    "toy-two-networks": (
        "toy method=ncr+elr+ noise=0.3 epochs=16 --set data.num_train=160 --set data.num_test=120 "
        "--set data.num_features=16 --set backbone.hidden=12,8 --set batch_size=20 "
        "--set optimizer.lr=0.01 --set averaging=0.9 --set eval_weights=averages"
    ),
    "embeddings-bank": (
        "embeddings path=features.npz method=ncr noise=0.3 epochs=12 hidden=8 batch_size=40 "
        "--set objective.bank.size=80 --set objective.start_epoch=2 --set optimizer.lr=0.01"
    ),
}
NAMES = list(WORDS)
# What the version that made them has said.
SPLITS = {"digits-nearsay": "test", "toy-two-networks": "test", "embeddings-bank": "validation"}
EVALUATED = {  # examples, accuracy, negative log-likelihood
    "digits-nearsay": (1438, 0.504868, 1.276931),
    "toy-two-networks": (120, 0.725, 1.166373),
    "embeddings-bank": (20, 0.6, 1.180034),
}
AUDITED = {  # issues, share of wrong labels, AUROC
    "digits-nearsay": (169, 0.493036, 0.907483),
    "toy-two-networks": (78, 0.505912, 0.945871),
    "embeddings-bank": (53, 0.285, 0.930124),
}
PREDICTED = {  # first letters of the classes of 20 inputs
    "digits-nearsay": "28196967890622694879",
    "toy-two-networks": "06046227337763760220",
    "embeddings-bank": "aeceaeceaeceebceaece",
}


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """A copy of a run, beside a copy of the features that one of them has learned from."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(OLD / "features.npz", tmp_path)
    run = tmp_path / request.param
    shutil.copytree(OLD / request.param, run)
    origin = run / "experiment.json"  # a training writes down whole paths
    whole = json.dumps(str(tmp_path / "features.npz"))
    origin.write_text(origin.read_text("utf-8").replace('"features.npz"', whole), "utf-8")
    return run


@pytest.fixture
def nearsay(monkeypatch, capsys):
    """The command, which gives what it prints."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["nearsay", *map(str, words)])
        code = start()
        told = capsys.readouterr()
        assert code == 0, told.err
        return told.out

    return run


def train(nearsay, run):
    return nearsay(
        "train", *WORDS[run.name].split(), "--device", "cpu", "--out", run, "--quiet", "--json"
    )


def inputs_for(name):
    """Files to label: pictures of digits, or features."""
    if name == "digits-nearsay":
        Path("pictures").mkdir()
        for number, image in enumerate(load_digits().images[:20]):
            Image.fromarray((15 * image).astype(np.uint8)).convert("RGB").save(
                f"pictures/{number:02}.png"
            )
        return "pictures"
    if name == "toy-two-networks":
        np.save(
            "rows.npy", 2 * np.random.RandomState(0).standard_normal((20, 16)).astype(np.float32)
        )
        return "rows.npy"
    return "features.npz"


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_an_old_run_is_evaluated_to_the_same_numbers(folder, nearsay):
    split = SPLITS[folder.name]
    told = json.loads(nearsay("evaluate", folder, "--split", split, "--json", "--device", "cpu"))
    found = (told["num_examples"], told["accuracy"], told["nll"])
    assert found == pytest.approx(EVALUATED[folder.name], abs=5e-5)
    result = json.loads((folder / "result.json").read_bytes())
    assert found[1] == pytest.approx(result["accuracy"][split]["final"], abs=1e-3)


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_an_old_run_is_audited_to_the_same_numbers(folder, nearsay):
    told = json.loads(nearsay("audit", folder, "--json", "--no-report", "--device", "cpu"))
    auroc = told["detection"]["score"]["auroc"]
    found = (told["num_issues"], told["noise_rate"]["estimate"], auroc)
    assert found == pytest.approx(AUDITED[folder.name], abs=5e-5)
    with open(folder / "audit.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == told["num_examples"]


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_an_old_run_labels_new_inputs_as_it_did(folder, nearsay):
    told = nearsay("predict", folder, inputs_for(folder.name), "--device", "cpu")
    rows = list(csv.DictReader(told.splitlines()))
    assert "".join(row["label"][0] for row in rows[:20]) == PREDICTED[folder.name]
    assert not any(row["error"] for row in rows)


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_the_weights_of_an_old_run_are_exported(folder, nearsay):
    nearsay("export", folder, "--out", "exported")
    (exported,) = Path("exported").glob("*.safetensors")
    weights, others = load_file(folder / "model.safetensors"), load_file(exported)
    assert weights.keys() == others.keys()
    assert all(np.array_equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_a_finished_old_run_only_tells_its_result_again(folder, nearsay):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    told, kept = json.loads(train(nearsay, folder)), json.loads(before[folder / "result.json"])
    assert told["accuracy"] == kept["accuracy"]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_an_unfinished_old_run_goes_on_to_the_same_result(folder, nearsay):
    result = json.loads((folder / "result.json").read_bytes())
    log = (folder / "log.jsonl").read_text("utf-8")
    weights = load_file(folder / "model.safetensors")
    for name in ("result.json", "model.safetensors", "dynamics.safetensors"):
        (folder / name).unlink()
    shutil.rmtree(folder / "predictions")
    (checkpoint,) = (folder / "checkpoints").iterdir()
    kept = json.loads((checkpoint / "state.json").read_bytes())["log_end"]
    train(nearsay, folder)
    # On the machine that made them all of this is equal; another one may round otherwise.
    ended = json.loads((folder / "result.json").read_bytes())
    lines = (folder / "log.jsonl").read_text("utf-8")
    assert ended["steps"] == result["steps"]
    for split, accuracy in result["accuracy"].items():
        assert ended["accuracy"][split] == pytest.approx(accuracy, abs=0.01)
    assert lines[:kept] == log[:kept]
    for new, old in zip(lines.splitlines(), log.splitlines(), strict=True):
        # Names may change.
        terms = zip(json.loads(new).values(), json.loads(old).values(), strict=True)
        assert all(term == pytest.approx(known, rel=1e-3, abs=1e-3) for term, known in terms), new
    others = load_file(folder / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert others[name] == pytest.approx(tensor, abs=1e-4), name


def test_old_runs_are_compared(nearsay):
    judged = [name for name in NAMES if SPLITS[name] == "test"]
    told = json.loads(nearsay("compare", *(OLD / name for name in judged), "--json"))
    finals = [run["final"] for group in told["groups"] for run in group["runs"]]
    assert finals == pytest.approx([EVALUATED[name][1] for name in judged], abs=1e-3)


def test_old_runs_are_small_and_name_no_folder_of_the_machine_that_made_them():
    contents = [path.read_bytes() for path in OLD.rglob("*") if path.is_file()]
    assert max(map(len, contents)) < 150_000
    assert sum(map(len, contents)) < 400_000
    assert not any(word in content for content in contents for word in (b"/tmp/", b"/home/"))
