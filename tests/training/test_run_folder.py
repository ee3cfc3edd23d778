"""A run folder found again: its networks say what they said, and damage is named in one sentence."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

from nearsay.batch import Files
from nearsay.config import ConfigError, apply_overrides, call_recipe, to_tree
from nearsay.errors import RunError
from nearsay.training.checkpoints import open_run
from nearsay.training.evaluate import evaluate
from nearsay.training.loop import train
from nearsay.training.predict import find_view, open_trained, predict_run
from nearsay.training.run_folder import (
    check_same,
    read_experiment,
    read_labels,
    read_origin,
    read_predictions,
    read_result,
    remember_experiment,
)
from nearsay.training.splits import open_splits

SMALL = ["data.num_train=120", "data.num_test=40", "batch_size=40", "backbone.hidden=16"]


def made(*overrides, method="ncr", epochs=2):
    return apply_overrides(
        call_recipe("toy", [f"method={method}", f"epochs={epochs}"]), [*SMALL, *overrides]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    call = made()
    path = tmp_path_factory.mktemp("runs") / "toy"
    train(call.experiment, path, origin=call.origin)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_finished_run_says_what_it_said_before(folder):
    kept = load_file(folder / "predictions" / "test.safetensors")
    inputs = made().experiment.data.open("test").inputs
    found, unreadable = predict_run(folder, inputs)
    assert_close(found._asdict(), kept, rtol=0, atol=0)
    assert found.indices.equal(torch.arange(40))
    assert unreadable == {}


def test_what_was_learned_comes_back(folder):
    found = open_trained(folder)
    assert found.experiment == made().experiment
    assert found.labels.given.equal(open_splits(made().experiment).labels.given)
    assert [network.training for network in found.networks] == [False]
    assert_close(dict(found.networks[0].state_dict()), load_file(folder / "model.safetensors"))


def test_two_averaged_networks_come_back(tmp_path):
    call = made("averaging=0.9", "networks=2", method="elr", epochs=1)
    train(call.experiment, tmp_path / "run", origin=call.origin)
    assert len(open_trained(tmp_path / "run").networks) == 2
    found = predict_run(tmp_path / "run", call.experiment.data.open("test").inputs).predictions
    assert_close(found._asdict(), load_file(tmp_path / "run" / "predictions" / "test.safetensors"))


@pytest.mark.parametrize("name", ["model.safetensors", "predictions/train.safetensors"])
def test_the_cure_of_a_damaged_file_is_to_have_it_made_anew(copy, name):
    before = (copy / name).read_bytes()
    (copy / name).write_bytes(before[:-4] + b"hurt")
    with pytest.raises(RunError, match=name):
        open_trained(copy) if name == "model.safetensors" else read_predictions(
            copy, read_labels(copy)
        )
    (copy / name).unlink()
    train(made().experiment, copy, origin=made().origin)
    assert (copy / name).read_bytes() == before


def test_the_number_of_inputs_is_recorded_and_not_guessed(copy):
    origin = read_origin(copy)
    assert origin["num_inputs"] == 32
    for wrong in (None, True, 0, "32", 1.5):
        (copy / "experiment.json").write_text(json.dumps(dict(origin) | {"num_inputs": wrong}))
        with pytest.raises(RunError, match="num_inputs") as caught:
            open_trained(copy)
        assert caught.value.code == 65


def test_inputs_of_the_wrong_kind_are_refused(folder, tmp_path):
    for images in (torch.zeros(2, 3, 4, 4), Files(tmp_path, ("a.jpg", "b.jpg"))):
        with pytest.raises(ValueError, match=r"features \(N, 32\)"):
            predict_run(folder, images)
    with pytest.raises(ValueError, match=r"features \(N, 32\).*\(2, 31\)"):
        predict_run(folder, torch.zeros(2, 31))


def test_features_are_refused_by_a_run_on_images(digits):
    with pytest.raises(ValueError, match=r"images of 3 .*\(2, 32\)"):
        predict_run(digits, torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"images of 3 .*\(2, 1, 8, 8\)"):
        predict_run(digits, torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert read_origin(digits)["num_inputs"] == 3


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on arrays of images."""
    call = apply_overrides(
        call_recipe("digits", ["epochs=0.2", "method=standard"]), ["backbone.width=4"]
    )
    path = tmp_path_factory.mktemp("runs") / "digits"
    train(call.experiment, path, origin=call.origin)
    return path


def as_files(images, folder):
    """(N, 3, H, W) bytes as files."""
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    return Files(folder, tuple(f"{number}.png" for number in range(len(images))))


def rewritten(folder, copy, **changes):
    """A copy of a run whose experiment.json says other things, or nothing where they are None."""
    shutil.copytree(folder, copy)
    origin = {
        name: each
        for name, each in (dict(read_origin(folder)) | changes).items()
        if each is not None
    }
    (copy / "experiment.json").write_text(json.dumps(origin))
    return copy


@pytest.mark.parametrize("is_older", [False, True])
def test_a_run_on_arrays_sees_files_as_it_saw_the_arrays(digits, tmp_path, is_older):
    run = rewritten(digits, tmp_path / "older", image_shape=None) if is_older else digits
    images = call_recipe("digits", []).experiment.data.open("test").inputs[:9]
    found = predict_run(run, as_files(images, tmp_path), device="cpu", workers=0).predictions
    assert_close(
        found.logits, predict_run(run, images, device="cpu").predictions.logits, rtol=0, atol=1e-5
    )


def test_the_shape_of_arrays_is_recorded_and_files_are_not_made_to_fit_what_is_no_square(
    digits, folder, tmp_path
):
    assert read_origin(digits)["image_shape"] == [8, 8]
    assert read_origin(folder)["image_shape"] is None
    files = as_files(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), tmp_path)
    oblong = rewritten(digits, tmp_path / "oblong", image_shape=[8, 10])
    with pytest.raises(ValueError, match="8 × 10 pixels"):
        predict_run(oblong, files)
    for number, wrong in enumerate((8, [8], [8, "8"], [8, 0], [True, True])):
        with pytest.raises(RunError, match="image_shape") as caught:
            predict_run(rewritten(digits, tmp_path / f"wrong{number}", image_shape=wrong), files)
        assert caught.value.code == 65


def test_an_older_run_whose_data_is_gone_looks_at_files_as_it_always_did(digits):
    class Gone:
        def open(self, split):
            raise FileNotFoundError(split)

    experiment = replace(call_recipe("digits", []).experiment, data=Gone(), image_size=16)
    origin = {name: each for name, each in read_origin(digits).items() if name != "image_shape"}
    assert find_view(experiment, origin) == (16, 16, 224 / 256)


def test_a_run_of_python_is_opened_with_its_experiment(tmp_path):
    # A folder may be text.
    train(made().experiment, str(tmp_path))
    assert (tmp_path / "model.safetensors").exists()
    for command in (open_trained, evaluate):
        with pytest.raises(RunError, match="experiment="):
            command(tmp_path)
    with pytest.raises(RunError, match="another experiment"):
        remember_experiment(tmp_path, replace(made().experiment, seed=7))
    remember_experiment(tmp_path, made().experiment)
    assert len(open_trained(tmp_path).networks) == 1


def test_a_damaged_file_is_named(folder, copy):
    labels, weights = ((folder / name).read_bytes() for name in ("labels.npz", "model.safetensors"))
    damages = {
        "model.safetensors": [None, weights[:-1]],
        "labels.npz": [None, labels[:99]],
        "experiment.json": [None, b"{", b"[]", b"[" * 10**5, b"\xff\xfe"],
    }
    for name, contents in damages.items():
        for content in contents:
            (copy / name).unlink(missing_ok=True)
            if content is not None:
                (copy / name).write_bytes(content)
            with pytest.raises(RunError, match=name) as caught:
                open_trained(copy)
            assert caught.value.code == 65
            assert str(copy) in str(caught.value)
            assert "\n" not in str(caught.value)
        shutil.copy(folder / name, copy / name)


def test_a_recipe_that_is_not_ours_is_never_imported(copy):
    origin = read_origin(copy)
    (copy / "experiment.json").write_text(json.dumps(dict(origin) | {"recipe": "os"}))
    with pytest.raises(ConfigError, match=r"recipe.*'os'"):
        open_trained(copy)


def test_only_a_finished_result_that_nobody_changed_counts(copy):
    result = read_result(copy)
    assert result["finished"]
    final = [{"test": {"final": value}} for value in ("0.9", True, float("nan"))]
    for accuracy in (None, "x", {"test": None}, *final):
        (copy / "result.json").write_text(json.dumps({**result, "accuracy": accuracy}))
        assert read_result(copy) is None
    no_labels = json.dumps({**result, "labels": None})
    for content in ("", "{}", "[]", "null", "7", '{"finished": false}', "[" * 10**5, no_labels):
        (copy / "result.json").write_text(content)
        assert read_result(copy) is None
    (copy / "result.json").unlink()
    assert read_result(copy) is None


def test_other_labels_and_weights_by_a_relative_path_are_found_from_anywhere(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("labels.npz", "model.safetensors"):
        shutil.copy(folder / name, name)
    call = made("labels_file=labels.npz", "init=model.safetensors", epochs=0.02)
    assert call.origin["overrides"][-2:] == [
        f"labels_file={tmp_path}/labels.npz",
        f"init={tmp_path}/model.safetensors",
    ]
    train(call.experiment, "run", origin=call.origin)
    # As runs before wrote them down.
    plain = replace(call.experiment, labels_file="labels.npz", init="model.safetensors")
    path = tmp_path / "run" / "experiment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "experiment": to_tree(plain)}))
    for same in (call.experiment, plain, replace(plain, labels_file="./labels.npz")):
        assert train(same, "run")["finished"]
    with pytest.raises(ConfigError, match=r"labels_file: .*other.npz"):
        train(replace(plain, labels_file="other.npz"), "run")
    monkeypatch.chdir("/")
    assert read_experiment(tmp_path / "run") == call.experiment
    assert evaluate(tmp_path / "run", split="train")["num_examples"] == 120


def test_labels_that_a_run_hides_are_no_other_labels_than_those_of_its_file(folder, tmp_path):
    call = made(f"labels_file={folder / 'labels.npz'}", "labeled=0.5", epochs=0.02)
    first, again = (train(call.experiment, tmp_path / "run", origin=call.origin) for _ in range(2))
    assert first == again


def test_another_experiment_does_not_go_into_the_folder(copy):
    with open_run(copy) as run:
        check_same(run, made().experiment)
        with pytest.raises(ConfigError, match="seed"):
            check_same(run, replace(made().experiment, seed=1))
        for content in ("[]", "[" * 100_000):
            (copy / "experiment.json").write_text(content)
            with pytest.raises(RunError, match=r"experiment\.json"):
                check_same(run, made().experiment)


def test_a_run_goes_on_under_a_version_that_has_more_choices_if_they_are_off(copy):
    record = json.loads((copy / "experiment.json").read_text())
    for field in ("propagate_at", "self_taught"):
        del record["experiment"][field]
    (copy / "experiment.json").write_text(json.dumps(record))
    now = made().experiment
    with open_run(copy) as run:
        check_same(run, now)
        with pytest.raises(ConfigError, match="propagate_at: not there, but 1"):
            check_same(run, replace(now, propagate_at=1))
        # One that changes the loss unless somebody turns it off.
        del record["experiment"]["objective"]["temperature"]
        (copy / "experiment.json").write_text(json.dumps(record))
        with pytest.raises(ConfigError, match=r"objective\.temperature: not there, but 2\.0"):
            check_same(run, now)


IN_ANOTHER_LOCALE = """
import sys
from pathlib import Path
from nearsay.training.checkpoints import open_run
from nearsay.training.run_folder import check_same, read_experiment, read_origin, read_result

folder = Path(sys.argv[1])
print(ascii(read_origin(folder)["note"]), ascii(read_result(folder)["hardware"]))
with open_run(folder) as run:
    check_same(run, read_experiment(folder))
"""


def test_a_run_is_read_alike_in_every_locale(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "run")
    notes = {"experiment.json": {"note": "Äpfel"}, "result.json": {"hardware": "Prozeßor"}}
    for name, changes in notes.items():
        before = json.loads((copy / name).read_bytes())
        (copy / name).write_text(json.dumps(before | changes, ensure_ascii=False), encoding="utf-8")
    # Text is ASCII there.
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", IN_ANOTHER_LOCALE, str(copy)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("'\\xc4pfel' 'Proze\\xdfor'\n", "")
