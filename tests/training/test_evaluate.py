"""What an experiment needs of memory and time, and how right a finished run is."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from nearsay import config
from nearsay.batch import Labels, Split
from nearsay.data import Cifar10, Embeddings, Folder, Manifest
from nearsay.data.inspect import dataset_at
from nearsay.doors.audit import audit_run
from nearsay.errors import RunError
from nearsay.training import estimate, evaluate
from nearsay.training.loop import train
from nearsay.training.predict import propagate
from nearsay.training.splits import are_in_doubt

SIZES = ["data.num_train=200", "data.num_test=120", "batch_size=50", "held_out=40"]


class Stripes:
    """A data set of a user: two classes of images of 8×8, without a word on its sizes."""

    def open(self, split):
        inputs = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
        return Split(inputs, Labels(torch.arange(6) % 2, None, ("across", "down")))


def made(seed=0, method="ncr"):
    call = config.call_recipe("toy", [f"seed={seed}", f"method={method}", "epochs=2"])
    return config.apply_overrides(call, SIZES)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ncr"
    call = made()
    train(call.experiment, folder, origin=call.origin)
    return folder


@pytest.fixture(scope="module")
def result(run):
    return json.loads((run / "result.json").read_text())


def test_what_is_allocated_is_counted():
    found = estimate.estimate(made().experiment)
    num = (32 * 256 + 256) + (256 * 64 + 64) + (64 * 8 + 8)  # the layers of the toy network
    assert found.num_parameters == num
    assert found.num_bytes["weights"] == found.num_bytes["gradients"] == 4 * num
    assert (
        8 * num <= found.num_bytes["optimizer"] <= 8 * num + 1000
    )  # two moments, and counts of steps
    assert found.num_bytes["averages"] == 0
    assert (found.num_examples, found.num_classes, found.input_shape) == (200, 8, (32,))


def test_activations_are_what_the_layers_keep_and_grow_with_the_batch():
    experiment = made().experiment
    found = estimate.estimate(experiment).num_bytes["activations"]
    assert found == 50 * 4 * (
        32 + 256 + 64
    )  # the input of each layer; the last is also the features
    doubled = estimate.estimate(replace(experiment, batch_size=100)).num_bytes["activations"]
    assert doubled == 2 * found


def test_in_place_activations_are_counted_once():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    assert estimate._saved_bytes(network, (4,)) == 2 * 4 * (4 + 8)


def test_the_steps_are_those_of_the_training(result):
    assert estimate.estimate(made().experiment).num_steps == result["steps"] == 6


@pytest.mark.parametrize(
    ("held_out", "epochs", "wanted"),
    [(0.0, 3.0, 60), (0.1, 3.0, 54), (101, 0.5, 8), (1, 2.0, 38), (0.99, 2.0, 2)],
)
def test_steps_are_of_whole_batches_of_what_is_not_held_out(held_out, epochs, wanted):
    experiment = replace(
        made().experiment, held_out=held_out, epochs=epochs, batches_per_epoch=None, batch_size=50
    )
    assert (
        estimate._num_steps(experiment, 1000) == wanted
    )  # an epoch has 20, 18, 17 and 19, and one at least
    assert estimate._num_steps(experiment, None) is None


def test_an_own_data_set_is_opened_for_the_estimate():
    digits = config.call_recipe("digits", []).experiment
    needed = estimate.estimate(replace(digits, data=Stripes(), held_out=0.0, batch_size=2))
    assert (needed.num_classes, needed.input_shape, needed.num_examples) == (2, (3, 8, 8), 6)
    assert sum(needed.num_bytes.values()) < 2**30


def test_evaluation_agrees_with_what_training_found(run, result):
    report = evaluate.evaluate(run)
    assert report["split"] == "test"
    assert report["num_examples"] == 120
    assert report["accuracy"] == pytest.approx(result["accuracy"]["test"]["final"], abs=1e-12)
    assert report["balanced_accuracy"] == pytest.approx(
        report["accuracy"], abs=1e-12
    )  # 15 examples of each class
    assert report["detection"]["auroc"] == pytest.approx(result["detection"]["auroc"], abs=1e-12)
    assert 0 < report["calibration_error"] < 1
    assert report["top_5_accuracy"] > report["accuracy"]


def test_held_out_examples_are_of_validation_and_not_of_train(run, result):
    train_report, validation = (
        evaluate.evaluate(run, split=split) for split in ("train", "validation")
    )
    assert train_report["num_examples"] == 160
    assert validation["num_examples"] == 40
    assert validation["accuracy"] == pytest.approx(
        result["accuracy"]["validation"]["final"], abs=1e-12
    )


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_pass_finds_what_was_kept(run, split, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "predictions" / f"{split}.safetensors").unlink()
    kept, passed = evaluate.evaluate(run, split=split), evaluate.evaluate(copy, split=split)
    for name in ("accuracy", "nll", "num_examples"):
        assert passed[name] == pytest.approx(kept[name], rel=1e-5)


def test_other_data_is_judged_by_the_names_of_its_classes(run, tmp_path):
    inputs, labels = made().experiment.data.open("test")
    names = np.array([f"{number}" for number in labels.given.tolist()])
    order = np.array(
        [str(number) for number in range(7, -1, -1)]
    )  # the same names, numbered from the other end
    np.savez(tmp_path / "data.npz", features=inputs.numpy(), labels=names, classes=order)
    report = evaluate.evaluate(run, data=tmp_path / "data.npz")
    assert report["split"] == "train"  # all that there is
    assert report["accuracy"] == pytest.approx(evaluate.evaluate(run)["accuracy"])
    assert report["detection"] is None


def test_renumbered_labels_keep_minus_one():
    labels = Labels(torch.tensor([0, 1, -1]), torch.tensor([-1, 0, 1]), ("b", "a"))
    found = evaluate._renumbered(labels, ("a", "b", "c"), "here")
    assert found.given.tolist() == [1, 0, -1]
    assert found.clean is not None
    assert found.clean.tolist() == [-1, 1, 0]


def test_a_class_that_was_never_learned_is_refused(run, tmp_path):
    np.savez(tmp_path / "data.npz", features=np.zeros((2, 32)), labels=np.array(["0", "cat"]))
    with pytest.raises(ValueError, match=r"class in .* got 'cat'"):
        evaluate.evaluate(run, data=tmp_path / "data.npz")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_predictions_of_other_examples_are_not_judged(run, split, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    path = copy / "predictions" / f"{split}.safetensors"
    seen = load_file(path)
    for part in (
        {"indices": seen["indices"] + 1000},
        {"logits": seen["logits"][:, :3].contiguous()},
    ):
        save_file({**seen, **part}, path)
        with pytest.raises(RunError, match=rf"{split}\.safetensors"):
            evaluate.evaluate(copy, split=split)


def test_a_split_without_a_label_is_refused(run, tmp_path):
    names = {
        "labels": np.array(["", ""]),
        "classes": np.array([str(number) for number in range(8)]),
    }
    np.savez(tmp_path / "data.npz", features=np.zeros((2, 32)), **names)
    with pytest.raises(
        RunError, match=r"data\.npz has no labeled example to judge by; give some with --data"
    ):
        evaluate.evaluate(run, data=tmp_path / "data.npz")


def test_data_is_of_the_kind_that_it_looks_like(tmp_path):
    (tmp_path / "list.csv").write_text("path,label\n")
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_text("")
    like = Cifar10(path="old", labels="n.pt", column="worse")
    assert dataset_at(tmp_path / "list.csv", like) == Manifest(path=tmp_path / "list.csv")
    assert dataset_at(tmp_path / "x.npz", like) == Embeddings(path=tmp_path / "x.npz")
    (tmp_path / "x.parquet").touch()
    assert dataset_at(tmp_path / "x.parquet", like) == Manifest(path=tmp_path / "x.parquet")
    learned = Embeddings(path="old.parquet")
    assert dataset_at(tmp_path / "x.parquet", learned) == Embeddings(path=tmp_path / "x.parquet")
    assert dataset_at(tmp_path, like) == Cifar10(path=tmp_path)
    assert dataset_at(tmp_path, Folder(path="old")) == Folder(path=tmp_path)


@pytest.mark.parametrize(
    ("split", "validation_labels", "clean", "expected"),
    [
        ("train", "given", None, True),
        ("validation", "clean", None, True),  # which is not known
        ("test", "given", None, False),  # of its own, and not in doubt
        ("train", "given", [0, 1, 0], False),
        ("validation", "given", [0, 1, 0], True),
        ("validation", "clean", [0, 1, 0], False),
        ("validation", "given", [0, 1, 1], False),  # as no label is wrong, only missing
    ],
)
def test_labels_that_may_be_as_wrong_as_those_learned_are_in_doubt(
    split, validation_labels, clean, expected
):
    truth = None if clean is None else torch.tensor(clean)
    given = [0, 1, -1] if clean == [0, 1, 1] else [0, 1, 1]
    recorded = Labels(given=torch.tensor(given), clean=truth, classes=("a", "b"))
    assert are_in_doubt(split, validation_labels, recorded) is expected


def test_a_table_is_looked_for_where_the_run_was_told_if_not_where_it_lies(tmp_path):
    for name in ("images/a.png", "a.png", "c.png", "tables/b.png", "tables/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    like = Manifest(path=tmp_path / "tables" / "train.csv", root=tmp_path)
    path = tmp_path / "tables" / "x.csv"
    for rows, split, root in (
        (["images/a.png,x,train"], None, tmp_path),
        (["b.png,x,train"], None, None),
        (["c.png,x,train"], None, None),  # in both places
        (
            ["a.png,x,train", "c.png,x,train"],
            None,
            None,
        ),  # one of them is missing beside the table, and is to be told
        (["c.png,x,train", "a.png,x,test"], "train", None),
        (["c.png,x,train", "a.png,x,test"], "test", tmp_path),
        (["nowhere.png,x,train"], None, None),
    ):
        path.write_text("\n".join(["path,label,split", *rows]))
        assert dataset_at(path, like, split) == Manifest(path=path, root=root)
    gone = Manifest(path=path, root=tmp_path / "gone")
    assert dataset_at(path, gone) == Manifest(path=path)


def test_predictions_that_may_not_be_read_are_not_said_to_be_missing(run, monkeypatch):
    opened = Path.open

    def closed(path, *choices, **named):
        if path.suffix == ".safetensors":  # as chmod 000 makes it, which root does not feel
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *choices, **named)

    monkeypatch.setattr(Path, "open", closed)
    for read, name in ((evaluate.evaluate, "test"), (audit_run, "train"), (propagate, "train")):
        with pytest.raises(PermissionError, match=rf"Permission denied: .*{name}\.safetensors"):
            read(run)
