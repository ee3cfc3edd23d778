"""Finished runs side by side."""

import json
import shutil

import pytest
from doors.conftest import made

from nearsay import config
from nearsay.doors import compare


@pytest.fixture(scope="module")
def runs(finished, tmp_path_factory):
    """The run three times over, with other seeds, methods and accuracies written into it."""
    folders = []
    for seed, method, final in ((0, "ncr", 0.8), (1, "ncr", 0.9), (0, "standard", 0.5)):
        folder = shutil.copytree(finished, tmp_path_factory.mktemp("copies") / f"{method}-{seed}")
        origin = config.apply_overrides(made(seed, method), [])
        tree = {**origin.origin, "experiment": config.to_tree(origin.experiment)}
        (folder / "experiment.json").write_text(json.dumps(tree))
        result = json.loads((folder / "result.json").read_text()) | {"seed": seed}
        result["accuracy"]["test"]["final"] = final
        (folder / "result.json").write_text(json.dumps(result))
        folders.append(folder)
    return folders


def change_record(folder, **fields):
    """Write other fields of the experiment into the record of a run."""
    record = json.loads((folder / "experiment.json").read_text())
    record["experiment"] |= fields
    (folder / "experiment.json").write_text(json.dumps(record))


def test_runs_that_differ_in_their_seed_have_a_mean(runs):
    compared = compare.compare(runs)
    first, second = compared.groups
    assert [[row["seed"] for row in group.rows] for group in (first, second)] == [[0, 1], [0]]
    # The deviation is that of a sample of two.
    assert first.means["final"] == (pytest.approx(0.85), pytest.approx(0.1 / 2**0.5), 2)
    headers, rows = compared.to_cells()
    assert [len(row) for row in rows] == [len(headers)] * 4
    final = headers.index("test, final")
    assert [row[final] for row in rows] == ["80.0 %", "90.0 %", "85.0 ± 7.1", "50.0 %"]
    assert [row[3] for row in rows] == ["0", "1", "n=2", "0"]
    assert [row[0] for row in rows] == ["ncr", "ncr", "ncr: mean ± std", "standard"]
    [tree, _] = compared.to_tree()["groups"]
    assert tree["means"]["final"]["num"] == 2


def test_a_method_that_was_left_to_the_recipe_is_named_as_one_that_was_chosen(runs, tmp_path):
    silent = shutil.copytree(runs[1], tmp_path / "silent")
    tree = json.loads((silent / "experiment.json").read_text())
    assert tree["arguments"].pop("method") == "ncr"
    (silent / "experiment.json").write_text(json.dumps(tree))
    _, rows = compare.compare([runs[0], silent]).to_cells()
    assert [row[0] for row in rows] == ["ncr", "ncr", "ncr: mean ± std"]


def test_a_split_that_was_not_judged_cannot_be_compared(runs):
    with pytest.raises(ValueError, match=r"split .*'dev'"):
        compare.compare(runs, split="dev")


@pytest.mark.parametrize(
    ("validation_labels", "split", "is_noted"),
    [("given", "validation", True), ("given", "test", False), ("clean", "validation", False)],
)
def test_accuracies_by_cleaned_labels_and_by_others_are_told_apart(
    runs, tmp_path, validation_labels, split, is_noted
):
    folders = [shutil.copytree(run, tmp_path / run.name) for run in runs[:2]]
    for folder, file in zip(folders, (None, "a/cleaned.npz"), strict=True):
        change_record(folder, labels_file=file, validation_labels=validation_labels)
    notes = [compare.OTHER_JUDGES] if is_noted else []
    assert compare.compare(folders, split=split).notes == notes


def test_one_file_of_labels_is_one_judge_however_it_is_written(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [shutil.copytree(run, tmp_path / run.name) for run in runs[:2]]
    names = ("a/cleaned.npz", str(tmp_path / "a" / "cleaned.npz"))
    for folder, file in zip(folders, names, strict=True):
        change_record(folder, labels_file=file)
    compared = compare.compare(folders, split="validation")
    [group] = compared.groups
    assert [row["seed"] for row in group.rows] == [0, 1]
    assert compared.notes == []


def test_runs_that_look_alike_are_told_apart_by_the_names_of_their_folders(runs, tmp_path):
    again = shutil.copytree(runs[0], tmp_path / "again")
    data = json.loads((again / "experiment.json").read_text())["experiment"]["data"]
    change_record(again, data=data | {"num_train": 300})
    headers, rows = compare.compare([*runs[:2], again]).to_cells()
    assert [len(row) for row in rows] == [len(headers)] * 4
    assert headers[0] == "run"
    names = ["ncr-0", "ncr-1", "ncr data.num_train=200: mean ± std", "again"]
    assert [row[0] for row in rows] == names
    twin = shutil.copytree(again, tmp_path / "other" / "again")
    _, rows = compare.compare([again, twin]).to_cells()
    assert [row[0] for row in rows[:2]] == [str(again), str(twin)]


def test_a_folder_of_runs_stands_for_the_runs_in_it(runs, tmp_path):
    for folder in runs:
        shutil.copytree(folder, tmp_path / "sweep" / folder.name)
    (tmp_path / "sweep" / "sweep.csv").write_text("")
    (tmp_path / "sweep" / "begun").mkdir()
    names = ["ncr-0", "ncr-1", "standard-0"]
    found = compare.find_finished([tmp_path / "sweep", runs[0], tmp_path / "sweep" / "begun"])
    assert list(found.values()) == [[tmp_path / "sweep" / name for name in names], [runs[0]], []]


def without(folder, split):
    """Make the run one that was not judged on a split."""
    result = json.loads((folder / "result.json").read_text())
    del result["accuracy"][split]
    (folder / "result.json").write_text(json.dumps(result))


def test_the_split_of_most_runs_is_compared_and_runs_without_it_are_left_out(runs, tmp_path):
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in runs]
    without(folders[2], "test")
    compared = compare.compare(folders)
    assert (compared.split, compared.folders, compared.notes) == ("validation", folders, [])
    without(folders[0], "validation")
    compared = compare.compare(folders)
    assert (compared.split, compared.folders) == ("test", folders[:2])
    assert [str(folders[2]) in note for note in compared.notes] == [True]
    # A split that was asked for is not replaced.
    with pytest.raises(ValueError, match=r"split .*'test'"):
        compare.compare(folders, split="test")


def test_a_file_among_the_folders_is_left_out(runs, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("")
    compared = compare.compare([runs[0], page])
    assert compared.folders == [runs[0]]
    assert [str(page) in note for note in compared.notes] == [True]
    with pytest.raises(ValueError, match=r"report\.html"):
        compare.compare([page])
