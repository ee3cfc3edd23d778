import json
import shutil
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
import torch

from nearsay.batch import Files, Labels, Split
from nearsay.config import ConfigError
from nearsay.errors import NoSplit, NotFinite, RunError
from nearsay.reproduce import NAMES, reproduce
from nearsay.reproduce.plans import plan
from nearsay.reproduce.runs import Runs, check_data, hours_to_do
from nearsay.training.loop import train

CLEAN_RUN = "toy-method=standard-noise=0.4-epochs=5-seed=0"
MODULE = "nearsay.reproduce.runs"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all names, as their runs are shared."""
    return tmp_path_factory.mktemp("out")


def reproduce_baselines(out, name="baselines"):
    """The lines of progress and the result for runs of toy at 40 % noise."""
    lines = []
    only = "toy-*noise=0.4-*"
    return lines, reproduce(name, data="toy", trials=1, out=out, only=only, tell=lines.append)


@pytest.fixture(scope="module")
def baselines(out):
    """Every method of the first table, trained once."""
    return reproduce_baselines(out)


def first_cells(path, name):
    [row] = [row for row in path.read_text().splitlines() if row.startswith(f"| {name} ")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def read(out, run, name="result.json"):
    return json.loads((out / "runs" / run / name).read_text())


def test_every_method_of_the_baselines_is_trained_and_printed(out, baselines):
    lines, done = baselines
    assert len(lines) == len(done.done) == 10
    assert lines[0] == f"1/10  {CLEAN_RUN}"
    assert (done.to_do, done.failed, done.hours) == ((), {}, 0)
    assert [path.suffix for path in done.files] == [".md", ".tex", ".csv", ".html"]
    final = f"{100 * read(out, CLEAN_RUN)['accuracy']['test']['final']:.1f}"
    numbers = ["not run", "not run", final, *["not run"] * 5]
    assert first_cells(out / "baselines.md", "Standard")[2:] == numbers


@pytest.mark.parametrize("name", ["confidence", "similarity"])
def test_figures_are_drawn_from_the_runs_of_the_table(out, baselines, name):
    lines, done = reproduce_baselines(out, name)
    assert lines == []
    assert len(done.done) == 2
    assert [path.suffix for path in done.files] == [".png", ".svg", ".html"]
    source = "Stand-in: toy data for mini-ImageNet-Blue. Runs: n = 1 per panel, seed 0."
    title = "mini-ImageNet (small stand-ins, not the data itself)"
    page, picture = ((out / f"{name}.{kind}").read_text() for kind in ("html", "svg"))
    assert source in page
    assert source in picture
    assert f"{title}</h1>" in page
    assert f"{title}</text>" in picture
    assert "Not run: Standard, toy for mini-ImageNet-Blue, 80 %;" in page
    assert "toy for mini-ImageNet-Blue, 40 %" in picture


def test_the_ablation_goes_on_with_its_best_value(out):
    only = "*noise=0.4-*start_epoch=[03]-*"
    done = reproduce("ablation", data="toy", trials=1, out=out, only=only)
    assert len(done.done) == 5 + 5 + 1
    accuracies = {run: read(out, run)["accuracy"]["validation"]["final"] for run in done.done}
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
    files = list((out / "runs" / CLEAN_RUN).rglob("*"))
    before = [path.stat().st_mtime_ns for path in files]
    assert reproduce_baselines(out)[0] == []
    assert [path.stat().st_mtime_ns for path in files] == before


@pytest.mark.parametrize("name", ["predictions/train.safetensors", "result.json"])
def test_a_run_that_lost_a_file_is_not_finished_and_goes_on(out, baselines, name):
    path = out / "runs" / CLEAN_RUN / name
    before, accuracy = path.read_bytes(), read(out, CLEAN_RUN)["accuracy"]
    path.unlink()
    assert reproduce_baselines(out)[0] == [f"1/1  {CLEAN_RUN}"]
    assert read(out, CLEAN_RUN)["accuracy"] == accuracy
    assert name == "result.json" or path.read_bytes() == before


def test_a_dry_run_lists_and_touches_nothing(out, baselines, tmp_path):
    choices = {"data": "toy", "trials": 1, "only": "toy-*", "dry_run": True}
    planned = reproduce("baselines", out=tmp_path / "new", **choices)
    assert (len(planned.done), len(planned.to_do)) == (0, 38)
    assert (planned.hours, planned.files) == (None, ())
    assert not (tmp_path / "new").exists()
    assert planned.text().splitlines()[0] == "baselines: runs: 0 done, 38 to do (time unmeasured)"
    begun = reproduce("baselines", out=out, **choices)
    assert (len(begun.done), len(begun.to_do)) == (10, 28)
    assert begun.hours > 0
    assert f"done    {CLEAN_RUN}" in begun.text()


def test_a_dry_run_of_the_ablation_counts_what_cannot_be_named_yet(tmp_path):
    choices = {"data": "toy", "trials": 2, "out": tmp_path, "dry_run": True}
    planned = reproduce("ablation", **choices)
    assert (len(planned.to_do), planned.num_later) == (30, 54)
    assert "30 to do, 54 more that depend on them (time unmeasured)" in planned.text()
    # Those of other rates are not wanted.
    planned = reproduce("ablation", only="*noise=0.4-*", **choices)
    assert (len(planned.to_do), planned.num_later) == (10, 18)


def test_hours_are_those_of_the_same_method_or_else_of_the_same_recipe(tmp_path):
    cells = plan("baselines", "toy", 2)
    seconds = {"standard": 3600.0, "ncr": 7200.0}
    results, missing = {}, {}
    for cell in cells:
        if cell.recipe == "toy" and cell.seed == 1:
            missing[cell.method] = cell
        elif cell.recipe == "toy" and "noise=0.4" in cell.arguments and cell.method in seconds:
            results[cell.run] = {"seconds": seconds[cell.method]}
    runs = Runs(folder=tmp_path, _results=results)
    assert hours_to_do(cells, [missing["ncr"], missing["standard"]], runs) == 3.0
    assert hours_to_do(cells, [missing["mixup"]], runs) == 1.5
    digits = [cell for cell in cells if cell.recipe == "digits"]
    assert hours_to_do(cells, digits, runs) is None


def test_values_are_never_chosen_by_the_test_set(tmp_path):
    both, only_test, *_ = plan("cifar", "toy", 1)
    shares = {"validation": {"final": 0.3, "best": 0.6}, "test": {"final": 0.9}}
    results = {both.run: shares, only_test.run: {"test": {"final": 0.9}}}
    results = {run: {"accuracy": accuracy} for run, accuracy in results.items()}
    runs = Runs(folder=tmp_path, _results=results)
    assert runs.validation(both) == 0.3
    assert runs.validation(only_test) is None


def test_missing_data_is_an_error_before_anything_is_trained(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"data .*nowhere"):
        reproduce("ablation", data=tmp_path / "nowhere", out=out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):  # by the data set itself
        reproduce("ablation", data=tmp_path / "empty", out=out)
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


def test_a_half_copied_data_set_is_named_by_the_images_that_are_missing(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    data = Half(tmp_path)
    called = SimpleNamespace(experiment=SimpleNamespace(data=data, second_test=data))
    with pytest.raises(ValueError, match=r"1 of 2 images .*b\.jpg"):
        check_data([called])
    (tmp_path / "b.jpg").write_bytes(b"")
    data.num_opened = 0
    check_data([called, called])
    assert data.num_opened == 2  # train and test, once


def test_a_folder_of_another_experiment_is_not_taken_for_a_result(out, baselines, tmp_path):
    folder = tmp_path / "runs" / CLEAN_RUN
    folder.mkdir(parents=True)
    for name in ("result.json", "experiment.json"):
        text = (out / "runs" / CLEAN_RUN / name).read_text()
        (folder / name).write_text(text.replace('"batch_size": 256', '"batch_size": 64'))
    with pytest.raises(ConfigError, match=r"another experiment .*batch_size: 64, not 256"):
        reproduce("cifar", data="toy", trials=1, out=tmp_path, dry_run=True)
    (folder / "experiment.json").write_text("{}")
    with pytest.raises(ConfigError, match=CLEAN_RUN):
        reproduce("cifar", data="toy", trials=1, out=tmp_path, dry_run=True)


def test_a_field_that_came_later_and_is_off_makes_no_other_experiment(out, baselines, tmp_path):
    folder = tmp_path / "runs" / CLEAN_RUN
    shutil.copytree(out / "runs" / CLEAN_RUN, folder)
    record = read(out, CLEAN_RUN, "experiment.json")
    assert record["experiment"].pop("class_weights") is False
    assert record["experiment"].pop("clip") is None
    (folder / "experiment.json").write_text(json.dumps(record))
    assert reproduce("cifar", data="toy", trials=1, out=tmp_path, dry_run=True).done == (CLEAN_RUN,)


def explode(experiment, folder, **options):
    raise NotFinite("the loss was not finite")


def test_a_run_that_blows_up_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    def train_others(experiment, folder, **options):
        run = explode if "method=standard" in folder.name else train
        return run(experiment, folder, **options)

    monkeypatch.setattr(f"{MODULE}.train", train_others)
    done = reproduce("cifar", data="toy", trials=1, out=tmp_path, only="toy-*noise=0.4-*")
    assert done.failed == {CLEAN_RUN: "the loss was not finite"}
    assert len(done.done) == 2
    assert f"failed  {CLEAN_RUN}: the loss was not finite" in done.text()
    assert first_cells(tmp_path / "cifar.md", "Standard").count("not run") == 12


def test_nothing_finished_leaves_nothing_to_draw(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{MODULE}.train", explode)
    for name in ("confidence", "ablation"):
        with pytest.raises(ValueError, match=f"no run of {name}"):
            reproduce(name, data="toy", trials=1, out=tmp_path)


@pytest.mark.parametrize(("name", "dry_run"), [("cifar", False), ("ablation", True)])
def test_a_pattern_that_matches_no_run_is_an_error_that_shows_a_name(name, dry_run, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"only .*'\*noise=0\.3\*'.* toy-method=\w+.*seed=0"):
        reproduce(name, data="toy", trials=1, out=out, only="*noise=0.3*", dry_run=dry_run)
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_an_error_before_the_first_run(tmp_path):
    (tmp_path / "file").write_text("mine")
    lines = []
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match="file") as caught:
            reproduce("cifar", data="toy", trials=1, out=out, tell=lines.append)
        assert caught.value.code == 73
    assert lines == []
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_on_stand_ins(tmp_path_factory, name):
    whole = tmp_path_factory.getbasetemp() / "reproduced"
    done = reproduce(name, data="toy", trials=1, out=whole)
    assert (done.to_do, done.failed, done.num_later) == ((), {}, 0)
    assert all(path.stat().st_size > 500 for path in done.files)
    if done.files[0].suffix == ".md":
        assert "not run" not in done.files[0].read_text()
