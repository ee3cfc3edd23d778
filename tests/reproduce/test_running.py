import json
import shutil
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch

from nearsay.batch import Files, Labels, Split
from nearsay.config import ConfigError
from nearsay.errors import NoSplit, NotFinite, RunError
from nearsay.reproduce import NAMES, reproduce, running
from nearsay.reproduce.cells import call
from nearsay.reproduce.plans import plan
from nearsay.training.loop import train

CLEAN_RUN = "toy-method=standard-noise=0.4-epochs=5-seed=0"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all names, as their runs are shared."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def baselines(out):
    """Every method of the first table at 40 % noise, trained once; what was told, and what came of it."""
    told = []
    done = reproduce(
        "baselines", data="toy", trials=1, out=out, only="toy-*noise=0.4-*", tell=told.append
    )
    return told, done


def test_every_method_of_the_baselines_is_trained_and_printed(out, baselines):
    told, done = baselines
    assert len(told) == len(done.done) == 10
    assert told[0] == f"1/10  {CLEAN_RUN}"
    assert (done.to_do, done.failed, done.hours) == ((), {}, 0)
    assert [path.name for path in done.files] == [
        f"baselines.{ending}" for ending in ("md", "tex", "csv", "html")
    ]
    final = json.loads((out / "runs" / CLEAN_RUN / "result.json").read_text())["accuracy"]["test"][
        "final"
    ]
    [row] = [
        row
        for row in (out / "baselines.md").read_text().splitlines()
        if row.startswith("| Standard ")
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "Standard",
        "nearsay (n=1)",
        "not run",
        "not run",
        f"{100 * final:.1f}",
        *["not run"] * 5,
    ]


@pytest.mark.parametrize("name", ["confidence", "similarity"])
def test_figures_are_drawn_from_the_runs_of_the_table(out, baselines, name):
    told = []
    done = reproduce(name, data="toy", trials=1, out=out, only="toy-*noise=0.4-*", tell=told.append)
    assert told == []
    assert len(done.done) == 2
    assert [path.name for path in done.files] == [
        f"{name}.{ending}" for ending in ("png", "svg", "html")
    ]
    page = (out / f"{name}.html").read_text()
    assert "Stand-in: toy data for mini-ImageNet-Blue. Runs: n = 1 per panel, seed 0." in page
    assert "Not run: Standard, toy for mini-ImageNet-Blue, 80 %;" in page
    assert "mini-ImageNet (small stand-ins, not the data itself)</h1>" in page
    picture = (out / f"{name}.svg").read_text()
    assert "mini-ImageNet (small stand-ins, not the data itself)</text>" in picture
    assert "Stand-in: toy data for mini-ImageNet-Blue. Runs: n = 1 per panel, seed 0." in picture
    assert "toy for mini-ImageNet-Blue, 40 %" in picture


def test_the_ablation_goes_on_with_what_it_found_best(out):
    done = reproduce(
        "ablation", data="toy", trials=1, out=out, only="*noise=0.4-*start_epoch=[03]-*"
    )
    assert len(done.done) == 5 + 5 + 1
    accuracies = {}
    for run in done.done:
        result = json.loads((out / "runs" / run / "result.json").read_text())
        accuracies[run] = result["accuracy"]["validation"]["final"]
    first = [run for run in done.done if "start_epoch=0" in run]
    [late] = [run for run in done.done if "start_epoch=3" in run]
    best = late.replace("start_epoch=3", "start_epoch=0")
    assert accuracies[best] == max(accuracies[run] for run in first)
    for text in ((out / "ablation.svg").read_text(), (out / "ablation.html").read_text()):
        assert "accuracy on held-out examples (%)" in text
        assert "of equals the first" in text
        assert "Stand-in: toy data for CIFAR-10. Runs: n = 1 per point, seed 0." in text
        assert "e, start of NCR (epochs, of 5)" in text
        assert "deviations" not in text  # one seed has none


def test_the_ablation_chooses_no_value_before_all_of_its_stage_are_run(tmp_path):
    only = "*noise=0.4-*alpha=0.[79]-objective.k=none-objective.start_epoch=[03]-*"
    done = reproduce("ablation", data="toy", trials=1, out=tmp_path, only=only)
    assert len(done.done) == 2
    assert all("start_epoch=0" in run for run in done.done)
    for text in ((tmp_path / "ablation.svg").read_text(), (tmp_path / "ablation.html").read_text()):
        assert "No value is marked as the best before all of its panel" in text
        assert "of equals the first" not in text


@pytest.mark.parametrize(
    ("name", "only", "num"),
    [
        ("realistic", "*method=ncr+mixup+da-*", 1),  # the stand-in of three columns
        ("cifar", "toy-*method=*elr+-noise=0.4-*", 2),
        ("batch-size", "*batch_size=256*", 1),
    ],
)
def test_every_other_table_is_printed(out, name, only, num):
    done = reproduce(name, data="toy", trials=1, out=out, only=only)
    assert len([run for run in done.done if fnmatch(run, only)]) == num
    assert [path.is_file() for path in done.files] == [True] * 4


def test_finished_runs_are_left_as_they_are(out, baselines):
    before = {path: path.stat().st_mtime_ns for path in (out / "runs" / CLEAN_RUN).rglob("*")}
    told = []
    reproduce("baselines", data="toy", trials=1, out=out, only="toy-*noise=0.4-*", tell=told.append)
    assert told == []
    assert {
        path: path.stat().st_mtime_ns for path in (out / "runs" / CLEAN_RUN).rglob("*")
    } == before


@pytest.mark.parametrize("name", ["model.safetensors", "predictions/train.safetensors"])
def test_a_run_of_which_something_is_missing_is_not_finished(out, baselines, name):
    path = out / "runs" / CLEAN_RUN / name
    before = path.read_bytes()
    path.unlink()
    told = []
    reproduce("baselines", data="toy", trials=1, out=out, only="toy-*noise=0.4-*", tell=told.append)
    assert told == [f"1/1  {CLEAN_RUN}"]
    assert path.read_bytes() == before


def test_an_unfinished_run_goes_on(out, baselines):
    result = out / "runs" / CLEAN_RUN / "result.json"
    before = json.loads(result.read_text())
    result.unlink()
    told = []
    reproduce("baselines", data="toy", trials=1, out=out, only="toy-*noise=0.4-*", tell=told.append)
    assert told == [f"1/1  {CLEAN_RUN}"]
    assert json.loads(result.read_text())["accuracy"] == before["accuracy"]


def test_a_dry_run_lists_and_touches_nothing(out, baselines, tmp_path):
    planned = reproduce(
        "baselines", data="toy", trials=1, out=tmp_path / "new", only="toy-*", dry_run=True
    )
    assert (len(planned.done), len(planned.to_do), planned.hours, planned.files) == (
        0,
        38,
        None,
        (),
    )
    assert not (tmp_path / "new").exists()
    assert planned.text().splitlines()[0] == "baselines: runs: 0 done, 38 to do (time unmeasured)"
    begun = reproduce("baselines", data="toy", trials=1, out=out, only="toy-*", dry_run=True)
    assert (len(begun.done), len(begun.to_do)) == (10, 28)
    assert 28 * 0.01 < 3600 * begun.hours < 28 * 60
    assert f"done    {CLEAN_RUN}" in begun.text()


def test_a_dry_run_of_the_ablation_counts_what_cannot_be_named_yet(tmp_path):
    planned = reproduce("ablation", data="toy", trials=2, out=tmp_path, dry_run=True)
    assert (len(planned.to_do), planned.num_later) == (30, 54)
    assert "30 to do, 54 more that depend on them (time unmeasured)" in planned.text()
    planned = reproduce(
        "ablation", data="toy", trials=2, out=tmp_path, only="*noise=0.4-*", dry_run=True
    )
    assert (len(planned.to_do), planned.num_later) == (
        10,
        18,
    )  # those of other rates are not wanted


def test_time_is_told_by_runs_of_the_same_method_where_there_are_any(tmp_path):
    cells = plan("baselines", "toy", 2)
    seconds = {"standard": 3600.0, "ncr": 7200.0}
    runs = running.Runs(
        folder=tmp_path,
        _results={
            each.run: {"seconds": seconds[each.method]}
            for each in cells
            if each.recipe == "toy"
            and each.seed == 0
            and "noise=0.4" in each.arguments
            and each.method in seconds
        },
    )
    missing = {cell.method: cell for cell in cells if cell.seed == 1 and cell.recipe == "toy"}
    assert running._hours(cells, [missing["ncr"], missing["standard"]], runs) == 3.0
    assert running._hours(cells, [missing["mixup"]], runs) == 1.5
    assert running._hours(cells, [cell for cell in cells if cell.recipe == "digits"], runs) is None


def test_values_are_never_chosen_by_the_test_set(tmp_path):
    seen, unseen, *_ = plan("cifar", "toy", 1)
    shares = {"validation": {"final": 0.3, "best": 0.6}, "test": {"final": 0.9}}
    results = {seen.run: {"accuracy": shares}, unseen.run: {"accuracy": {"test": {"final": 0.9}}}}
    runs = running.Runs(folder=tmp_path, _results=results)
    assert runs.validation(seen) == 0.3
    assert runs.validation(unseen) is None


def test_an_unknown_name_lists_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=f"called 'baseline'; there are {', '.join(NAMES)}"):
        reproduce("baseline", data="toy", out=tmp_path)


@pytest.mark.parametrize("trials", [0, -1, 1.5, True])
def test_trials_are_whole_numbers(trials, tmp_path):
    with pytest.raises(ValueError, match=f"trials={trials} must be a whole number from 1"):
        reproduce("cifar", data="toy", trials=trials, out=tmp_path)


@pytest.mark.parametrize("name", ["baselines", "cifar", "ablation", "confidence"])
def test_missing_data_is_told_before_anything_is_trained(name, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="is no folder; give the one that holds the data sets"):
        reproduce(name, data=tmp_path / "nowhere", out=out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):  # by the data set itself
        reproduce(name, data=tmp_path / "empty", out=out)
    assert not out.exists()


class Half:
    """A data set of two images, of which one was copied."""

    def __init__(self, root):
        self.root, self.num_opened = root, 0

    def open(self, split):
        if split == "validation":
            raise NoSplit("none")
        self.num_opened += 1
        names = ("a.jpg", "b.jpg") if split == "test" else ("a.jpg",)
        labels = torch.zeros(len(names), dtype=torch.int64)
        return Split(Files(self.root, names), Labels(labels, labels, ("only",)))


def test_a_half_copied_data_set_is_told_with_the_images_that_are_missing(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    data = Half(tmp_path)
    with pytest.raises(
        ValueError, match=r"1 of 2 images is not in .*, such as b\.jpg; nothing was trained"
    ):
        running._check_data([data])
    (tmp_path / "b.jpg").write_bytes(b"")
    data.num_opened = 0
    running._check_data([data, data, data])
    assert data.num_opened == 2  # train and test, once


def test_a_folder_of_another_experiment_is_not_taken_for_a_result(out, baselines, tmp_path):
    folder = tmp_path / "runs" / CLEAN_RUN
    folder.mkdir(parents=True)
    for name in ("result.json", "experiment.json"):
        text = (out / "runs" / CLEAN_RUN / name).read_text()
        (folder / name).write_text(text.replace('"batch_size": 256', '"batch_size": 64'))
    with pytest.raises(
        ConfigError, match=r"holds another experiment \(batch_size: 64, not 256\); move it away"
    ):
        reproduce("cifar", data="toy", trials=1, out=tmp_path, dry_run=True)
    (folder / "experiment.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be used"):
        reproduce("cifar", data="toy", trials=1, out=tmp_path, dry_run=True)


def test_a_field_that_came_later_and_is_off_makes_no_other_experiment(out, baselines, tmp_path):
    folder = tmp_path / "runs" / CLEAN_RUN
    shutil.copytree(out / "runs" / CLEAN_RUN, folder)
    record = json.loads((out / "runs" / CLEAN_RUN / "experiment.json").read_text())
    assert record["experiment"].pop("class_weights") is False
    assert record["experiment"].pop("clip") is None
    (folder / "experiment.json").write_text(json.dumps(record))
    assert reproduce("cifar", data="toy", trials=1, out=tmp_path, dry_run=True).done == (CLEAN_RUN,)


def test_a_run_that_blows_up_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    def explode(experiment, folder, **options):
        if "method=standard" in folder.name:
            raise NotFinite("the loss was not finite")
        return train(experiment, folder, **options)

    monkeypatch.setattr(running, "train", explode)
    done = reproduce("cifar", data="toy", trials=1, out=tmp_path, only="toy-*noise=0.4-*")
    assert done.failed == {CLEAN_RUN: "the loss was not finite"}
    assert len(done.done) == 2
    assert f"failed  {CLEAN_RUN}: the loss was not finite" in done.text()
    [row] = [
        row
        for row in (tmp_path / "cifar.md").read_text().splitlines()
        if row.startswith("| Standard ")
    ]
    assert row.count("not run") == 12


def test_nothing_finished_leaves_nothing_to_draw(tmp_path, monkeypatch):
    def explode(experiment, folder, **options):
        raise NotFinite("the loss was not finite")

    monkeypatch.setattr(running, "train", explode)
    for name in ("confidence", "ablation"):
        with pytest.raises(ValueError, match=f"no run of {name} is finished"):
            reproduce(name, data="toy", trials=1, out=tmp_path)


@pytest.mark.parametrize("name", ["cifar", "ablation", "similarity"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_pattern_that_matches_no_run_is_told_with_a_name_that_would(name, dry_run, tmp_path):
    out = tmp_path / "out"
    told = rf"no run of {name} matches '\*noise=0\.3\*'; the names look like toy-method=\w+-noise=0\.\d-epochs=5-.*seed=0"
    with pytest.raises(ConfigError, match=told):
        reproduce(name, data="toy", trials=1, out=out, only="*noise=0.3*", dry_run=dry_run)
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_told_before_the_first_run_is_announced(tmp_path):
    (tmp_path / "file").write_text("mine")
    told = []
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            RunError, match=r"cannot write into .*file.*; choose another folder with --out"
        ) as caught:
            reproduce("cifar", data="toy", trials=1, out=out, tell=told.append)
        assert caught.value.code == 73
    assert told == []
    assert (tmp_path / "file").read_text() == "mine"


def test_the_second_data_set_is_checked_as_well(tmp_path, monkeypatch):
    def call_with_second(cell, data):
        called = call(cell, data)
        return called._replace(experiment=replace(called.experiment, second_test=Half(tmp_path)))

    monkeypatch.setattr(running, "call", call_with_second)
    with pytest.raises(
        ValueError, match=r"1 of 1 images is not in .*, such as a\.jpg; nothing was trained"
    ):
        reproduce("cifar", data="toy", trials=1, out=tmp_path / "out", only=CLEAN_RUN)
    assert not (tmp_path / "out").exists()


def test_names_come_without_torch():
    code = (
        "import sys; from nearsay.reproduce import NAMES; print(len(NAMES), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7", "False"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_on_stand_ins(tmp_path_factory, name):
    whole = tmp_path_factory.getbasetemp() / "reproduced"
    done = reproduce(name, data="toy", trials=1, out=whole)
    assert (done.to_do, done.failed, done.num_later) == ((), {}, 0)
    assert all(path.stat().st_size > 500 for path in done.files)
    if done.files[0].suffix == ".md":
        assert "not run" not in done.files[0].read_text()
