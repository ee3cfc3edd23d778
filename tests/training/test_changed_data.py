"""Data that was changed after training, with as many examples as before: numbers must not be taken for other files."""

import shutil

import numpy as np
import pytest
from PIL import Image

from nearsay import cli, config
from nearsay.data import tables
from nearsay.doors.audit import audit_run
from nearsay.errors import RunError
from nearsay.integrations.label_tools import hand_over
from nearsay.label_issues.cleaning import clean_run
from nearsay.review.examples import open_source
from nearsay.training.evaluate import evaluate
from nearsay.training.loop import train
from nearsay.training.predict import propagate
from nearsay.training.splits import open_splits

QUICK = ["epochs=1", "batch_size=8", "method=standard"]


def called(recipe, path, overrides=()):
    small = ["size=16", "backbone=resnet18", "weights=none"] if recipe == "folder" else []
    call = config.call_recipe(recipe, [f"path={path}", *QUICK, *small])
    return config.apply_overrides(call, [*overrides, "machine.device=cpu", "held_out=4"])


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """A trained and audited run on 12 files, in its place and as a copy to put there again."""
    root = tmp_path_factory.mktemp("photos") / "work"
    for number in range(12):
        place = root / "images" / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number, 10, 10)).save(place / f"{number:02}.png")
    call = called("folder", root / "images", ["backbone.width=4"])
    train(call.experiment, root / "run", origin=call.origin)
    audit_run(root / "run", device="cpu", report=False, k=3)
    return root, shutil.copytree(root, root.parent / "kept")


@pytest.fixture
def photos(audited):
    """The run, whatever an earlier test did to it."""
    root, kept = audited
    shutil.rmtree(root)
    return shutil.copytree(kept, root)


def rename(photos):
    (photos / "images" / "cat" / "01.png").rename(photos / "images" / "cat" / "99.png")


def move_to_another_class(photos):
    (photos / "images" / "cat" / "01.png").rename(photos / "images" / "dog" / "01.png")


@pytest.mark.parametrize("change", [rename, move_to_another_class])
def test_other_names_are_not_given_to_what_was_judged(photos, change):
    assert set(tables.read(photos / "run" / "audit.csv").columns["path"]) > {
        "cat/01.png",
        "dog/02.png",
    }
    change(photos)
    found = audit_run(photos / "run", device="cpu", report=False, k=3)
    assert found.absence == "files were renamed, moved or replaced since the run was trained"
    assert set(tables.read(photos / "run" / "audit.csv").columns["path"]) == {None}
    assert clean_run(photos / "run").root is None
    assert not (photos / "run" / "cleaned.csv").exists()
    with pytest.raises(RunError, match="images"):
        hand_over(photos / "run", found, ["label-studio"])


@pytest.mark.parametrize("change", [rename, move_to_another_class])
def test_other_pictures_are_not_shown_of_what_was_judged(photos, change):
    assert open_source(photos / "run", 12).note == ""
    change(photos)
    found = open_source(photos / "run", 12)
    assert found.inputs is None
    assert "renamed" in found.note


def test_a_file_that_was_repaired_in_place_keeps_its_name(photos):
    Image.new("RGB", (90, 70), (1, 2, 3)).save(photos / "images" / "cat" / "01.png")
    found = audit_run(photos / "run", device="cpu", report=False, k=3)
    assert (found.absence, found.paths[0]) == ("", "cat/01.png")
    shown = open_source(photos / "run", 12)
    assert shown.inputs is not None
    assert "changed" in shown.note


@pytest.mark.parametrize("make", [clean_run, propagate])
def test_labels_by_number_are_not_learned_by_other_files(photos, make):
    make(photos / "run")
    name = "cleaned" if make is clean_run else "propagated"
    experiment = called(
        "folder", photos / "images", [f"labels_file={photos / 'run' / name}.npz"]
    ).experiment
    assert not open_splits(experiment).notes
    rename(photos)
    with pytest.raises(ValueError, match=rf"{name}\.npz"):
        open_splits(experiment)


def test_labels_by_number_for_other_features_are_noted_and_not_refused(tmp_path):
    features = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    np.savez(tmp_path / "data.npz", features=features, labels=np.arange(40) % 2)
    call = called("embeddings", tmp_path / "data.npz")
    train(call.experiment, tmp_path / "run", origin=call.origin)
    propagate(tmp_path / "run", k=5)
    experiment = called(
        "embeddings", tmp_path / "data.npz", [f"labels_file={tmp_path / 'run'}/propagated.npz"]
    ).experiment
    assert not open_splits(experiment).notes
    np.savez(tmp_path / "data.npz", features=features[::-1], labels=np.arange(40)[::-1] % 2)
    (note,) = open_splits(experiment).notes
    assert "labels_file" in note


def test_held_out_examples_are_judged_by_the_labels_they_had(photos):
    before = evaluate(photos / "run")
    assert (before["split"], before["num_examples"]) == ("validation", 4)
    for number in (1, 3, 5):
        (photos / "images" / "cat" / f"{number:02}.png").unlink()
    assert evaluate(photos / "run") == before
    (photos / "images").rename(photos / "elsewhere")
    assert evaluate(photos / "run") == before


def test_who_judges_by_labels_in_doubt_is_told(photos, capsys):
    assert cli.main(["evaluate", str(photos / "run")]) == 0
    assert "--data" in capsys.readouterr().err
    assert cli.main(["evaluate", str(photos / "run"), "--data", str(photos / "images")]) == 0
    assert capsys.readouterr().err == ""
