"""Tables of an audit that somebody has opened, changed and saved, as cleaning reads them."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from review.conftest import write_run

from nearsay.data import tables
from nearsay.errors import RunError
from nearsay.label_issues.cleaning import clean_run, folder_for
from nearsay.training.checkpoints import open_run


@pytest.fixture
def run(tmp_path):
    """300 examples of three classes, sorted by class; the suspicious ones are of the first."""
    np.savez(
        tmp_path / "features.npz",
        features=np.eye(300, dtype=np.float32),
        labels=np.arange(300) // 100,
    )
    path = f"path={tmp_path / 'features.npz'}"
    return write_run(
        tmp_path / "run",
        "embeddings",
        path,
        overrides=["held_out=0"],
        predicted_probability=[0.99] * 300,
    )


def edit(run, change):
    with (run / "audit.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    rows = change([dict(zip(header, row, strict=True)) for row in rows])
    tables.write(run / "audit.csv", {name: [row[name] for row in rows] for name in header})


def test_a_table_that_was_sorted_within_its_classes_is_refused_and_not_taken_for_others(run):
    edit(
        run,
        lambda rows: sorted(rows, key=lambda row: (row["given_label"], -float(row["label_score"]))),
    )
    with pytest.raises(RunError, match=r"audit\.csv.*300"):
        clean_run(run)
    assert not (run / "cleaned.npz").exists()


def test_by_default_it_takes_what_is_likelier_right_than_wrong_and_drops_what_else_is_poor(run):
    rows = {0: ("0.5", "0.1"), 1: ("0.49", "0.49"), 2: ("0.49", "0.5")}  # how likely, and the score
    columns = ("predicted_probability", "label_score")
    edit(
        run,
        lambda table: [
            {**row, **dict(zip(columns, rows.get(place, ("0.9", "0.1")), strict=True))}
            for place, row in enumerate(table)
        ],
    )
    found = clean_run(run)
    assert (found.relabeled.tolist(), found.dropped.tolist(), found.review.tolist()) == (
        [0, *range(3, 30)],
        [1],
        [2],
    )


@pytest.mark.parametrize(
    ("name", "cell"),
    [("is_label_issue", "maybe"), ("label_score", "nan"), ("predicted_probability", "inf")],
)
def test_cells_that_cannot_be_meant_are_refused(run, name, cell):
    edit(run, lambda rows: [{**rows[0], name: cell}, *rows[1:]])
    with pytest.raises(RunError, match=rf"audit\.csv.*'{cell}'"):
        clean_run(run)


def test_an_audit_that_is_still_being_written_is_not_read(run):
    (told, tell), (waits, go_on) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        with open_run(run):
            os.unlink(run / "audit.csv")
            os.write(tell, b".")
            os.read(waits, 1)
        os._exit(0)
    os.read(told, 1)
    try:
        with pytest.raises(RunError, match=str(child)) as caught:
            clean_run(run)
        assert caught.value.code == 75
    finally:
        os.write(go_on, b".")
        os.waitpid(child, 0)


@pytest.mark.parametrize("inside", ["within/.."])
def test_labels_of_the_folder_that_one_is_in_go_beside_it(run, monkeypatch, inside):
    (run / "within").mkdir()
    monkeypatch.chdir(run)
    assert folder_for(clean_run(Path(inside)).given, Path(inside)).resolve() == run.with_name(
        "run-cleaned"
    )


def test_an_issue_without_a_suggestion_or_a_score_is_left_to_be_reviewed(run):
    empty = {5: ("predicted_label", "predicted_probability"), 7: ("label_score",)}
    edit(
        run,
        lambda rows: [
            {**row, **dict.fromkeys(empty.get(place, ()), "")} for place, row in enumerate(rows)
        ],
    )
    found = clean_run(run, relabel_above=0, drop_below=0)
    # Any likelihood is enough, but not none.
    assert (found.dropped.tolist(), found.review.tolist()) == ([], [5])
    found = clean_run(run, relabel_above=1, drop_below=1)
    assert found.review.tolist() == [7]
    assert found.dropped.tolist() == [*range(7), *range(8, 30)]


def test_an_audit_of_other_labels_is_refused(run):
    edit(run, lambda rows: [*rows[:-1], {**rows[-1], "given_label": "0"}])
    with pytest.raises(RunError, match=r"audit\.csv"):
        clean_run(run)


def test_what_had_no_label_before_is_not_told_as_dropped(tmp_path):
    labels = np.arange(60) // 20
    labels[[3, 50]] = -1
    np.savez(
        tmp_path / "features.npz",
        features=np.eye(60, dtype=np.float32),
        labels=labels,
        classes=np.array(list("abc")),
    )
    path = f"path={tmp_path / 'features.npz'}"
    folder = write_run(tmp_path / "run", "embeddings", path, overrides=["held_out=0"], num_issues=2)
    edit(folder, lambda rows: [{**row, "predicted_probability": "0.1"} for row in rows])
    found = clean_run(folder)
    assert found.dropped.tolist() == [0, 1]
    assert (found.given < 0).nonzero()[:, 0].tolist() == [0, 1, 3, 50]


@pytest.mark.parametrize("content", [None, "[" * 100_000, "[]", '{"doubt": 3}'])
def test_without_the_doubts_of_the_audit_nothing_is_cleaned(run, content):
    path = run / "audit.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(RunError, match=r"audit\.json") as caught:
        clean_run(run)
    assert caught.value.code == 65
    assert not (run / "cleaned.npz").exists()


def test_the_manifest_holds_the_other_splits_as_they_are(tmp_path):
    splits = ("train", "val", "test")
    names = [f"{split}/{kind}/{split}-{kind}.png" for split in splits for kind in ("ant", "bee")]
    for number, name in enumerate(names):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(tmp_path / "photos" / name)
    words = (f"path={tmp_path / 'photos'}", "backbone=resnet18", "weights=none")
    folder = write_run(tmp_path / "run", "folder", *words, num_issues=1)
    clean_run(folder)
    columns = tables.read(folder / "cleaned.csv").columns
    assert columns["path"] == names
    # The first was suspicious.
    assert columns["label"] == ["bee", "bee", "ant", "bee", "ant", "bee"]
    assert columns["split"] == ["train", "train", "validation", "validation", "test", "test"]
