import errno
import json
import os
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from nearsay import cli, config
from nearsay.batch import Labels, Predictions, Split
from nearsay.cli import doctor_report
from nearsay.data import Cifar10, Embeddings, Folder, Manifest, MiniWebVision, tables
from nearsay.data.inspect import dataset_at
from nearsay.doors import compare, predict
from nearsay.doors.audit import audit_run
from nearsay.errors import NoSplit, RunError
from nearsay.models import ResNet
from nearsay.training import estimate, evaluate
from nearsay.training.loop import train
from nearsay.training.predict import propagate
from nearsay.training.splits import are_in_doubt

SMALL = ["epochs=2"]
SIZES = ["data.num_train=200", "data.num_test=120", "batch_size=50", "held_out=40"]


def made(seed=0, method="ncr"):
    call = config.call_recipe("toy", [f"seed={seed}", f"method={method}", *SMALL])
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


# The estimate


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


def test_two_networks_and_averages_take_their_share():
    experiment = replace(made().experiment, networks=2, averaging=0.9)
    one, two = estimate.estimate(made().experiment), estimate.estimate(experiment)
    assert two.num_parameters == 2 * one.num_parameters
    assert two.num_bytes["averages"] == two.num_bytes["weights"] == 2 * one.num_bytes["weights"]
    assert two.num_bytes["activations"] == 2 * one.num_bytes["activations"]


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


def test_memory_is_told_in_units_of_its_size():
    told = [estimate._megabytes(number) for number in (2**19, 2**30 - 2**20, 2**30, 5 * 2**29)]
    assert told == ["0.5 MiB", "1,023.0 MiB", "1.0 GiB", "2.5 GiB"]


def test_two_views_keep_twice_as_much():
    one, two = (
        config.call_recipe("digits", [f"method={method}"]).experiment
        for method in ("standard", "gjs")
    )
    kept = [estimate.estimate(each).num_bytes["activations"] for each in (one, two)]
    assert kept[1] == 2 * kept[0]


def test_the_plan_names_every_field_once_and_calls_the_memory_an_estimate():
    call = config.call_recipe("folder", ["path=nowhere"])
    data = MiniWebVision(path="nowhere", partial=True)
    needed = estimate.estimate(replace(call.experiment, data=data, backbone=ResNet(width=4)))
    lines = estimate.describe_plan(config.to_tree(call.experiment), needed).splitlines()
    assert "data: Folder" in lines
    assert "  k: 10" in lines
    assert lines.count("seed: 0") == 1
    assert "data: 50 classes, inputs of 3 x 224 x 224" in lines
    assert "steps: unknown until the data is opened" in lines
    assert lines[-1].startswith("memory, an estimate")


class Stripes:
    """A data set of a user: two classes of images of 8×8, without a word on its sizes."""

    def open(self, split):
        inputs = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
        return Split(inputs, Labels(torch.arange(6) % 2, None, ("across", "down")))


def test_an_own_data_set_is_opened_for_the_estimate():
    digits = config.call_recipe("digits", []).experiment
    needed = estimate.estimate(replace(digits, data=Stripes(), held_out=0.0, batch_size=2))
    assert (needed.num_classes, needed.input_shape, needed.num_examples) == (2, (3, 8, 8), 6)
    assert sum(needed.num_bytes.values()) < 2**30


# Evaluation


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


def test_labels_that_are_hidden_are_not_wrong(tmp_path):
    call = config.apply_overrides(made(), ["noise=none", "labeled=0.5"])
    assert train(call.experiment, tmp_path, origin=call.origin)["detection"] is None
    assert evaluate.evaluate(tmp_path)["detection"] is None


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


def test_a_split_that_is_not_there_is_refused(run):
    with pytest.raises(NoSplit, match=r"split must be"):
        evaluate.evaluate(run, split="dev")


def test_damaged_predictions_are_named(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "predictions" / "test.safetensors").write_bytes(b"nothing")
    with pytest.raises(RunError, match=r"test.safetensors is damaged .* remove it") as caught:
        evaluate.evaluate(copy)
    assert caught.value.code == 65


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


# Predictions


def test_features_of_any_file_get_the_label_that_evaluation_finds(run, tmp_path):
    inputs, labels = made().experiment.data.open("test")
    np.save(tmp_path / "a.npy", inputs.numpy())
    np.savez(tmp_path / "b.npz", features=inputs.numpy(), labels=labels.given.numpy())
    columns = {f"feature{number}": inputs[:, number].tolist() for number in range(32)}
    words = {"label": ["?"] * len(inputs), "id": ["text, as training passes over it"] * len(inputs)}
    tables.write(tmp_path / "c.parquet", {**words, **columns})
    pyarrow.parquet.write_table(
        pyarrow.table({**words, "embedding": list(inputs.numpy())}), tmp_path / "d.parquet"
    )
    found = [
        predict.predict(run, [tmp_path / name])
        for name in ("a.npy", "b.npz", "c.parquet", "d.parquet")
    ]
    assert found[0]["label"] == found[1]["label"] == found[2]["label"] == found[3]["label"]
    hits = [
        label == str(truth)
        for label, truth in zip(found[0]["label"], labels.given.tolist(), strict=True)
    ]
    assert sum(hits) / len(hits) == pytest.approx(evaluate.evaluate(run)["accuracy"])
    assert found[0]["path"][:2] == [f"{tmp_path}/a.npy:0", f"{tmp_path}/a.npy:1"]
    assert set(found[0]["error"]) == {None}
    assert all(1 / 8 <= probability <= 1 for probability in found[0]["probability"])


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


def test_two_files_of_features_follow_each_other(run, tmp_path):
    rows = np.random.default_rng(0).normal(size=(5, 32))
    np.save(tmp_path / "a.npy", rows[:2])
    np.save(tmp_path / "b.npy", rows[2:])
    np.save(tmp_path / "all.npy", rows)
    parts = predict.predict(run, [tmp_path / "a.npy", tmp_path / "b.npy"])
    assert parts["probability"] == predict.predict(run, [tmp_path / "all.npy"])["probability"]
    assert parts["path"][-1] == f"{tmp_path}/b.npy:2"


def test_a_row_of_features_that_is_not_finite_costs_no_other_row(run, tmp_path):
    rows = np.random.default_rng(0).normal(size=(5, 32))
    np.save(tmp_path / "whole.npy", rows)
    rows[1, 3], rows[4, 0] = np.nan, 1e300
    np.save(tmp_path / "odd.npy", rows)
    found, whole = (predict.predict(run, [tmp_path / f"{name}.npy"]) for name in ("odd", "whole"))
    for column in ("label", "probability"):
        kept = [None if row in (1, 4) else cell for row, cell in enumerate(whole[column])]
        assert found[column] == kept
    told = "holds NaN or infinity; replace it by a finite float32"
    assert found["error"] == [
        None,
        f"{tmp_path}/odd.npy:1 {told}",
        None,
        None,
        f"{tmp_path}/odd.npy:4 {told}",
    ]


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


def test_what_cannot_be_read_is_a_row_with_an_error():
    predictions = Predictions(
        torch.zeros(2, 1), torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([2, 0])
    )
    found = predict._columns(["a", "b", "c"], predictions, {1: "is broken"}, ("no", "yes"))
    assert found["path"] == ["a", "b", "c"]
    assert found["label"] == ["no", None, "yes"]
    assert found["probability"] == [pytest.approx(0.880797), None, pytest.approx(0.731059)]
    assert found["error"] == [None, "is broken", None]


def test_a_name_that_is_no_text_costs_no_other_row(tmp_path):
    predictions = Predictions(
        torch.zeros(2, 1), torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([0, 1])
    )
    found = predict._columns(["b\udcff.png", "ünï.png"], predictions, {}, ("no", "yes"))
    tables.write(tmp_path / "found.csv", found)
    assert tables.read(tmp_path / "found.csv").columns["path"] == ["b\\udcff.png", "ünï.png"]


def test_images_are_found_in_folders_and_keep_the_names_they_were_given_by(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "in/b.png",
        "in/sub/a.JPG",
        "in/.hidden.png",
        "in/.git/c.png",
        "in/notes.txt",
        "other/d.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name, "PNG")
    names, files = predict._images([tmp_path.__class__("in"), tmp_path.__class__("other/d.png")])
    assert names == ["in/b.png", "in/sub/a.JPG", "other/d.png"]
    assert files.root == tmp_path
    assert files.names == ("in/b.png", "in/sub/a.JPG", "other/d.png")


def broken_features(folder):
    np.savez(folder / "many.npz", a=np.zeros((2, 3)), b=np.zeros((2, 3)))
    np.save(folder / "flat.npy", np.zeros(3))
    np.save(folder / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    (folder / "text.npy").write_text("nothing")
    tables.write(folder / "words.parquet", {"x": ["a", "b"]})
    tables.write(folder / "labels.parquet", {"label": ["a", "b"]})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("many.npz", "it has the arrays a, b, none of them called features"),
        ("flat.npy", r"holds an array of \(3,\)"),
        ("pickled.npy", "is not read"),
        ("text.npy", "is not read"),
        ("words.parquet", "features in"),
        ("labels.parquet", "features in"),
    ],
)
def test_files_that_hold_no_features_are_refused(tmp_path, name, told):
    broken_features(tmp_path)
    with pytest.raises(ValueError, match=told):
        predict._read_features(tmp_path / name)


# Comparison


@pytest.fixture(scope="module")
def runs(run, tmp_path_factory):
    """The run three times over, with other seeds, methods and accuracies written into it."""
    folders = []
    for seed, method, final in ((0, "ncr", 0.8), (1, "ncr", 0.9), (0, "standard", 0.5)):
        folder = shutil.copytree(run, tmp_path_factory.mktemp("copies") / f"{method}-{seed}")
        origin = config.apply_overrides(made(seed, method), [])
        tree = {**origin.origin, "experiment": config.to_tree(origin.experiment)}
        (folder / "experiment.json").write_text(json.dumps(tree))
        result = json.loads((folder / "result.json").read_text()) | {"seed": seed}
        result["accuracy"]["test"]["final"] = final
        (folder / "result.json").write_text(json.dumps(result))
        folders.append(folder)
    return folders


def test_runs_that_differ_in_their_seed_have_a_mean(runs):
    groups = compare.compare(compare.read_runs(runs))
    assert [[row["seed"] for row in group.rows] for group in groups] == [[0, 1], [0]]
    first = groups[0].means["final"]
    assert first is not None
    assert first.mean == pytest.approx(0.85)
    assert first.deviation == pytest.approx(0.1 / 2**0.5)  # of a sample of two
    headers, rows = compare.comparison_cells(groups, "test")
    assert [len(row) for row in rows] == [len(headers)] * 4
    assert headers[4:7] == [
        "test, final",
        "best",
        "mean of last 10 or fewer",
    ]  # a run may have fewer epochs
    assert [row[headers.index("test, final")] for row in rows] == [
        "80.0 %",
        "90.0 %",
        "85.0 ± 7.1",
        "50.0 %",
    ]
    assert [row[3] for row in rows] == ["0", "1", "n=2", "0"]
    assert [row[0] for row in rows] == ["ncr", "ncr", "ncr: mean ± std", "standard"]


def test_a_run_whose_method_was_left_to_the_recipe_is_called_as_one_where_it_was_said(
    runs, tmp_path
):
    silent = shutil.copytree(runs[1], tmp_path / "silent")
    tree = json.loads((silent / "experiment.json").read_text())
    assert tree["arguments"].pop("method") == "ncr"
    (silent / "experiment.json").write_text(json.dumps(tree))
    [group] = compare.compare(compare.read_runs([runs[0], silent]))
    assert [row[0] for row in compare.comparison_cells([group], "test")[1]] == [
        "ncr",
        "ncr",
        "ncr: mean ± std",
    ]


def test_a_run_named_twice_counts_once(runs):
    assert len(compare.read_runs([runs[0], runs[0], runs[1]])) == 2
    otherwise = runs[0] / ".." / runs[0].name
    [group] = compare.compare(compare.read_runs([runs[0], otherwise, runs[1]]))
    assert len(group.rows) == 2


def test_a_copy_of_a_run_is_no_further_seed(runs, tmp_path):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    [group] = compare.compare(compare.read_runs([runs[0], copy, runs[1]]))
    assert len(group.rows) == 3
    assert group.means["final"] == (pytest.approx(0.85), pytest.approx(0.1 / 2**0.5), 2)
    _, rows = compare.comparison_cells([group], "test")
    assert [row[4] for row in rows] == ["0", "0", "1", "n=2"]


def test_to_compare_runs_each_is_read_once(runs, monkeypatch):
    folders, read_run = [], compare.read_run
    monkeypatch.setattr(
        compare, "read_run", lambda folder: folders.append(folder) or read_run(folder)
    )
    assert cli.main(["compare", *map(str, runs)]) == 0
    assert folders == runs


def test_a_split_that_was_not_judged_cannot_be_compared(runs):
    with pytest.raises(
        ValueError,
        match=r"split='dev'; it has validation and test; choose a split that all .* have",
    ):
        compare.compare(compare.read_runs(runs), split="dev")


@pytest.mark.parametrize(
    ("validation_labels", "split", "told"),
    [("given", "validation", True), ("given", "test", False), ("clean", "validation", False)],
)
def test_accuracies_by_cleaned_labels_and_by_others_are_told_apart(
    runs, tmp_path, capsys, validation_labels, split, told
):
    folders = [shutil.copytree(run, tmp_path / run.name) for run in runs[:2]]
    for folder, file in zip(folders, (None, "a/cleaned.npz"), strict=True):
        origin = json.loads((folder / "experiment.json").read_text())
        origin["experiment"] |= {"relabeled": file, "validation_labels": validation_labels}
        (folder / "experiment.json").write_text(json.dumps(origin))
    assert cli.main(["compare", *map(str, folders), "--split", split]) == 0
    assert (
        "judged by different labels, which makes cleaned ones look better"
        in capsys.readouterr().err
    ) == told


def test_one_file_of_labels_is_one_judge_however_it_is_written(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folders = [shutil.copytree(run, tmp_path / run.name) for run in runs[:2]]
    for folder, file in zip(
        folders, ("a/cleaned.npz", str(tmp_path / "a" / "cleaned.npz")), strict=True
    ):
        origin = json.loads((folder / "experiment.json").read_text())
        origin["experiment"]["relabeled"] = file
        origin["overrides"] = [f"relabeled={file}"]
        (folder / "experiment.json").write_text(json.dumps(origin))
    [group] = compare.compare(compare.read_runs(folders), split="validation")
    assert [row["seed"] for row in group.rows] == [0, 1]
    assert cli.main(["compare", *map(str, folders), "--split", "validation"]) == 0
    assert "different labels" not in capsys.readouterr().err


def test_runs_that_look_alike_are_told_by_the_names_of_their_folders(runs, tmp_path):
    again = shutil.copytree(runs[0], tmp_path / "again")
    origin = json.loads((again / "experiment.json").read_text())
    origin["experiment"]["data"]["num_train"] = 300  # on other data
    (again / "experiment.json").write_text(json.dumps(origin))
    headers, rows = compare.comparison_cells(
        compare.compare(compare.read_runs([*runs[:2], again])), "test"
    )
    assert [len(row) for row in rows] == [len(headers)] * 4
    assert headers[0] == "run"
    assert [row[0] for row in rows] == [
        "ncr-0",
        "ncr-1",
        "ncr data.num_train=200: mean ± std",
        "again",
    ]
    twin = shutil.copytree(again, tmp_path / "other" / "again")
    _, rows = compare.comparison_cells(compare.compare(compare.read_runs([again, twin])), "test")
    assert [row[0] for row in rows[:2]] == [str(again), str(twin)]


def test_a_folder_of_runs_stands_for_the_runs_in_it(runs, tmp_path):
    for folder in runs:
        shutil.copytree(folder, tmp_path / "sweep" / folder.name)
    (tmp_path / "sweep" / "sweep.csv").write_text("")
    (tmp_path / "sweep" / "begun").mkdir()
    names = ["ncr-0", "ncr-1", "standard-0"]
    found = compare.finished([tmp_path / "sweep", runs[0], tmp_path / "sweep" / "begun"])
    assert list(found.values()) == [[tmp_path / "sweep" / name for name in names], [runs[0]], []]


def without(folder, split):
    """The run as if it had not been judged on a split."""
    result = json.loads((folder / "result.json").read_text())
    del result["accuracy"][split]
    (folder / "result.json").write_text(json.dumps(result))


def test_what_most_of_the_runs_were_judged_on_is_compared_and_what_does_not_fit_is_left_out(
    runs, tmp_path, capsys
):
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in runs]
    for split, place, chosen, left in (
        ("test", 2, "validation", []),
        ("validation", 0, "test", [2]),
    ):
        without(folders[place], split)
        assert cli.main(["compare", *map(str, folders), "--json"]) == 0
        said = capsys.readouterr()
        told = json.loads(said.out)
        assert told["split"] == chosen
        assert sorted(row["run"] for group in told["groups"] for row in group["runs"]) == sorted(
            str(folder) for number, folder in enumerate(folders) if number not in left
        )
        assert said.err.splitlines() == [
            f"note: {folders[n]} was not judged on test and is left out" for n in left
        ]
    assert (
        cli.main(["compare", *map(str, folders), "--split", "test"]) == 65
    )  # what was asked for is not changed


def test_a_file_among_the_folders_is_left_out_of_a_comparison(runs, tmp_path, capsys):
    (tmp_path / "report.html").write_text("")
    assert cli.main(["compare", str(runs[0]), str(tmp_path / "report.html")]) == 0
    assert (
        capsys.readouterr().err
        == f"note: {tmp_path / 'report.html'} holds no finished run and is left out\n"
    )
    assert cli.main(["compare", str(tmp_path / "report.html")]) == 65


# The demonstration


def demonstrated(finals):
    return [
        compare.Demonstrated(
            number,
            len(finals),
            method,
            seed,
            None,
            {"accuracy": {"test": {"final": final}}, "confidence": {"right": 0.5, "wrong": 0.25}},
        )
        for number, ((method, seed), final) in enumerate(finals.items(), start=1)
    ]


def test_the_demonstration_shows_every_seed_and_a_loss_as_a_loss():
    runs = demonstrated(
        {("standard", 0): 0.9, ("ncr", 0): 0.8, ("standard", 1): 0.9, ("ncr", 1): 0.95}
    )
    headers, rows = compare.demo_cells(runs)
    assert headers == ["test accuracy after the last epoch", "seed 0", "seed 1", "mean ± std"]
    assert rows[:3] == [
        ["standard", "90.0 %", "90.0 %", "90.0 ± 0.0"],
        ["ncr", "80.0 %", "95.0 %", "87.5 ± 10.6"],
        ["ncr above standard, points", "-10.0", "+5.0", "-2.5 ± 10.6"],
    ]
    assert rows[-1] == ["confidence in wrong labels, ncr", "25.0 %", "25.0 %", "25.0 ± 0.0"]


def test_the_demonstration_trains_each_method_on_each_seed(monkeypatch, tmp_path):
    trained = []

    def fake(experiment, folder, *, origin, display):
        trained.append(
            (
                experiment.objective.__class__.__name__,
                experiment.seed,
                experiment.noise.rate,
                folder.name,
            )
        )
        return {"seed": experiment.seed}

    monkeypatch.setattr(compare, "train", fake)
    done = list(compare.demonstrate(tmp_path))
    assert trained == [
        (kind, seed, 0.4, f"{method}-seed={seed}")
        for seed in (0, 1, 2)
        for kind, method in (("CrossEntropy", "standard"), ("NCR", "ncr"))
    ]
    assert [each.number for each in done] == [1, 2, 3, 4, 5, 6]
    assert [each.result for each in done] == [{"seed": each.seed} for each in done]


# The doctor


def test_the_doctor_finds_versions_and_the_device():
    found = {each.name: each for each in doctor_report.examine()}
    assert found["torch"].value == metadata.version(
        "torch"
    )  # where a build for GPUs has no +cu… after it
    assert found["rich"].problem == ""
    assert "device" in found
    assert "pyarrow [parquet]" in found


def test_the_doctor_tells_what_is_too_old_or_missing(monkeypatch):
    versions = {"old": "1.9", "new": "1.10.2", "torchvision": "0.25", "torch": "2.13+cpu"}

    def version(name):
        if name not in versions:
            raise doctor_report.metadata.PackageNotFoundError(name)
        return versions[name]

    required = [
        "old>=1.10",
        "new>=1.10",
        "gone>=1",
        "extra>=2; extra == 'more'",
        "torchvision>=0.25; extra == 'vision'",
    ]
    monkeypatch.setattr(doctor_report.metadata, "version", version)
    monkeypatch.setattr(doctor_report.metadata, "requires", lambda name: required)
    found = {each.name: each for each in doctor_report._packages()}
    assert found["old"].problem == "is older than 1.10; pip install --upgrade old"
    assert found["new"].problem == ""
    assert found["gone"].problem == "is missing; pip install . in the clone again"
    assert found["extra [more]"] == (
        "extra [more]",
        'not installed; pip install ".[more]" in the clone',
        "",
    )
    assert "not of one build with torch 2.13+cpu" in found["torchvision [vision]"].problem


def test_the_doctor_does_not_fail_on_a_broken_torch(monkeypatch):
    def broken():
        raise RuntimeError("the driver\nis on fire")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert doctor_report._device() == [
        ("device", "unknown", "torch cannot be used: the driver is on fire")
    ]


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
