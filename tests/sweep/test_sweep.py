import csv
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
from itertools import accumulate
from pathlib import Path

import numpy as np
import optuna
import pytest

from nearsay import cli
from nearsay.config import ConfigError
from nearsay.errors import RunError, Stopped, StorageError
from nearsay.sweep import Planned, grid, make_space, run_all, running, search
from nearsay.sweep.searching import JOURNAL
from nearsay.training.display import Silent

SMALL = ["data.num_train=200", "data.num_test=100", "batch_size=50", "backbone.hidden=(8,)"]
SET = [word for change in SMALL for word in ("--set", change)]
HELD = [*SMALL, "held_out=0.2"]
LOG = "optimizer.lr=1e-4..1e-1:log"


class Watcher(Silent):
    """Remembers where runs began, and sends this process a signal at a moment of choice."""

    def __init__(self, moment="", run=1):
        self.moment, self.run, self.begun = moment, run, []

    def begin(self, facts):
        self.begun.append(facts["resumed_at"])

    def epoch(self, entry):
        self.send("epoch")

    def end(self, result):
        self.send("end")

    def send(self, moment):
        if (moment, len(self.begun)) == (self.moment, self.run):
            self.moment = ""
            os.kill(os.getpid(), signal.SIGINT)


def rows_of(folder):
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_grid_is_the_product_of_its_lists_with_the_last_turning_fastest():
    planned = grid(
        "toy", ["method=standard,ncr", "epochs=1"], ["optimizer.lr=0.1,0.2", "batch_size=50"]
    )
    names = [
        f"toy-epochs=1-method={method}-batch_size=50-optimizer.lr={lr}"
        for method in ("standard", "ncr")
        for lr in (0.1, 0.2)
    ]
    assert [each.name for each in planned] == names
    assert planned[1].words == (
        *("toy", "method=standard", "epochs=1"),
        *("--set", "optimizer.lr=0.2", "--set", "batch_size=50"),
    )
    assert [each.call.experiment.optimizer.lr for each in planned] == [0.1, 0.2, 0.1, 0.2]
    assert [type(each.call.experiment.objective).__name__ for each in planned] == [
        "CrossEntropy"
    ] * 2 + ["NCR"] * 2


def test_commas_in_brackets_belong_to_one_value():
    planned = grid("toy", [], ["backbone.hidden=(64,32),[16],8", "seed=1, 2"])
    assert [each.call.experiment.backbone.hidden for each in planned[::2]] == [
        (64, 32),
        (16,),
        (8,),
    ]
    assert [each.call.experiment.seed for each in planned[:2]] == [1, 2]


WRONG = [
    ("toy sede=1,2", "the recipe toy has no 'sede' (did you mean seed?)"),
    ("toy seed=1,two", "seed='two' must be a whole number"),
    ("toy seed=", "seed='' names no value; list values as in seed=0,1,2"),
    ("toy seed=1,,2", "seed='1,,2' has nothing between two commas"),
    ("toy seed=1,2,1", "seed='1,2,1' names '1' twice"),
    ("toy noise=0.1..0.5", "noise='0.1..0.5' is a range; list values, or add --search optuna"),
    ("toy noise=0.1,7", "7"),
    ("toy --set objective.q=1,2", "has no field 'q'"),
    ("toy --set machine.device=cpu,auto", "machine.device='cpu,auto' must be one value"),
    (
        f"toy --set seed={','.join(map(str, range(101)))} noise={','.join(f'0.{n}' for n in range(100, 200))}",
        "10100 runs",
    ),
    ("toy seed=1,2 --trials 3", "--trials 3"),
    ("toy seed=1,2 --storage sqlite://", "--storage sqlite://"),
    ("toy seed=1,2 --metric test", "--metric"),
    ("toy seed=1,2 --search grid", "'grid' is not"),
    ("toy seed=1,2 --at-once 0", "--at-once"),
    ("toy noise=0..1 --search optuna", "--trials"),
    ("toy noise=0..1 --search optuna --trials 0", "--trials"),
    ("toy noise=0..1 --search optuna --trials 2 --metric test", "--metric"),
    (
        "toy noise=0..1 --search optuna --trials 2",
        "no validation examples, and hyper-parameters are never chosen on test",
    ),
    ("toy noise=0.5 --search optuna --trials 2", "there is nothing to search"),
    ("toy seed=0..9 --search optuna --trials 2", "seed='0..9' would choose the luckiest seed"),
    (
        "toy noise=0.5..0.1 --search optuna --trials 2",
        "must go from a lower number to a higher one",
    ),
    ("toy noise=0..0.1:log --search optuna --trials 2", "must begin above 0"),
    ("toy noise=0..0.1:lin --search optuna --trials 2", "must end after the range, or in :log"),
    ("toy noise=0..7 --search optuna --trials 2", "7"),
    (
        "toy --set objective.k=1.5..9 --search optuna --trials 2",
        "objective.k='1.5' must be a whole number",
    ),
    *(
        (
            f"toy --set held_out=0.1 {choice} --search optuna --trials 2",
            "would have trials judged by different labels",
        )
        for choice in (
            "noise=0.1..0.5",
            "noise=0,0.4",
            "--set noise.redraw=true,false",
            "--set relabeled=none,a.npz",
        )
    ),
    *(
        (f"toy --set {choice} --search optuna --trials 2", f"{choice.partition('=')[0]}='")
        for choice in ("held_out=0.1,0.2", "validation_labels=given,clean")
    ),
    *(
        (
            f"toy --set held_out=0.1 --set validation_labels=clean --set {choice} --search optuna --trials 2",
            "would have trials judged by different",
        )
        for choice in ("relabeled=none,a.npz", "labeled=0.2..1", "noise.rate=0.1,0.4")
    ),
    (
        "cifar10 path=data labels=CIFAR-10_human.pt kind=human column=worse,aggre --set held_out=0.1 "
        "--search optuna --trials 2",
        "column='worse,aggre' would have trials judged by different labels",
    ),
    (
        "toy --set held_out=0.1 --set data.distance=4..9 --search optuna --trials 2",
        "judged by different labels",
    ),
    ("toy method=ncr,magic --search optuna --trials 2", "method='magic' must be"),
]


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line[:60] for line, _ in WRONG])
def test_a_wrong_sweep_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys, line, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])


@pytest.mark.parametrize(
    ("held_out", "judge", "is_told"),
    [("40", "given", True), ("40", "clean", False), ("0", "given", False)],
)
def test_accuracies_by_other_labels_are_told_to_be_so(tmp_path, capsys, held_out, judge, is_told):
    words = [
        "toy",
        "epochs=1",
        *SET,
        "--set",
        f"held_out={held_out}",
        "--set",
        f"validation_labels={judge}",
        "--quiet",
    ]
    assert cli.main(["train", *words, "--out", str(tmp_path / "first")]) == 0
    assert cli.main(["propagate", str(tmp_path / "first")]) == 0
    capsys.readouterr()
    lists = [
        "--set",
        f"relabeled=none,{tmp_path / 'first' / 'propagated.npz'}",
        "--out",
        str(tmp_path / "runs"),
    ]
    assert cli.main(["sweep", *words, *lists]) == 0
    assert (
        "note: these runs were judged by different labels" in capsys.readouterr().err
    ) == is_told


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_result_on_labels_that_were_made_anew_since_is_none_of_a_sweep(tmp_path, capsys, at_once):
    first, labels = tmp_path / "first", tmp_path / "first" / "propagated.npz"
    assert cli.main(["train", "toy", "epochs=1", *SET, "--quiet", "--out", str(first)]) == 0
    words = [
        "sweep",
        "toy",
        "epochs=1",
        *SET,
        "--set",
        f"relabeled=none,{labels}",
        "--out",
        str(tmp_path / "runs"),
    ]
    words += ["--quiet", "--at-once", str(at_once)]
    for k, code in ((50, 0), (50, 0), (2, 70)):
        assert cli.main(["propagate", str(first), "--k", str(k)]) == 0
        capsys.readouterr()
        assert cli.main(words) == code
    out = capsys.readouterr().out
    assert (
        f"has learned other labels than relabeled='{labels}' holds now; choose another folder"
        in out
    )


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_recipe_that_is_edited_meanwhile_is_run_as_it_was_planned(tmp_path, at_once):
    recipe = tmp_path / "mine.py"
    lines = [
        "from nearsay.recipes import toy",
        "def recipe(*, hidden: tuple[int, ...] = (8,), seed: int = 0):",
        "    return toy.recipe(method='standard', epochs=1, seed=seed)",
    ]
    recipe.write_text("\n".join(lines))
    planned = grid(str(recipe), ["seed=0,1"], SMALL)
    recipe.write_text("\n".join(lines).replace("standard", "ncr"))
    for outcome, each in zip(
        run_all(planned, tmp_path / "runs", at_once=at_once), planned, strict=True
    ):
        assert outcome.result is not None, outcome.error
        assert outcome.words[0] == str(recipe)
        kept = json.loads((outcome.folder / "experiment.json").read_text())
        assert {key: kept[key] for key in each.call.origin} == each.call.origin
        assert kept["experiment"]["objective"]["kind"] == "CrossEntropy"


def test_a_recipe_that_other_runs_are_reading_is_not_written_again(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("from nearsay.recipes.toy import recipe\n")
    [planned] = grid(str(recipe), ["epochs=1"])
    path = running._recipe(planned, tmp_path)
    os.utime(path, (0, 0))
    assert running._recipe(planned, tmp_path) == path
    assert os.stat(path).st_mtime == 0


def test_runs_that_are_the_same_in_other_words_are_no_further_seeds(tmp_path, capsys):
    command = [
        "sweep",
        "toy",
        "epochs=1",
        "noise=0.2,.20",
        "seed=0,1",
        *SET,
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    assert cli.main(command) == 0
    [line] = [line.split() for line in capsys.readouterr().out.splitlines() if " ± " in line]
    assert line[:2] == ["ncr", "2"]
    finals = [float(row["test_final"]) for row in rows_of(tmp_path)]
    assert finals[:2] == finals[2:]
    [group] = json.loads((tmp_path / "sweep.json").read_text())["groups"]
    assert len(group["runs"]) == 4
    assert group["accuracy"]["test"] == pytest.approx(
        {"mean": statistics.mean(finals[:2]), "deviation": statistics.stdev(finals[:2]), "num": 2}
    )


def test_a_sweep_ends_in_means_over_seeds_and_is_not_run_twice(tmp_path, capsys):
    changes = [*SMALL, "optimizer.lr=0.5"]  # so much that the last epoch is not the best
    command = ["sweep", "toy", "epochs=4", "noise=0.2,0.4", "seed=0,1", *SET, "--set", changes[-1]]
    command += ["--out", str(tmp_path)]
    assert cli.main([*command, "--json", "--quiet"]) == 0
    first = json.loads(capsys.readouterr().out)
    finals, bests = {}, {}
    for planned in grid("toy", ["epochs=4", "noise=0.2,0.4", "seed=0,1"], changes):
        accuracy = json.loads((tmp_path / planned.name / "result.json").read_text())["accuracy"][
            "test"
        ]
        finals.setdefault(planned.call.experiment.noise.rate, []).append(accuracy["final"])
        bests.setdefault(planned.call.experiment.noise.rate, []).append(accuracy["best"])
    assert all(finals[rate] != bests[rate] for rate in (0.2, 0.4))
    assert [each["name"] for each in first["groups"]] == ["noise=0.2", "noise=0.4"]
    for group, (_, values) in zip(first["groups"], finals.items(), strict=True):
        assert group["accuracy"]["test"] == pytest.approx(
            {"mean": statistics.mean(values), "deviation": statistics.stdev(values), "num": 2}
        )
    rows = rows_of(tmp_path)
    assert [(row["noise"], row["seed"], row["exit_code"]) for row in rows] == [
        *(("0.2", "0", "0"), ("0.2", "1", "0"), ("0.4", "0", "0"), ("0.4", "1", "0"))
    ]
    assert [float(row["test_final"]) for row in rows] == [
        value for values in finals.values() for value in values
    ]
    assert {row["validation_final"] for row in rows} == {""}
    assert json.loads((tmp_path / "sweep.json").read_text())["groups"] == first["groups"]

    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert err.count(": finished before\n") == 4
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")} == written
    mean, deviation = statistics.mean(finals[0.2]), statistics.stdev(finals[0.2])
    assert f"{100 * mean:.1f} ± {100 * deviation:.1f} %" in out
    assert f"The table is in {tmp_path}/sweep.csv and {tmp_path}/sweep.json.\n" in out


def test_a_failed_run_is_told_with_its_sentence_and_stops_no_other(tmp_path, capsys):
    command = [
        "sweep",
        "toy",
        "epochs=1",
        *SET,
        "--set",
        "optimizer.lr=1e30,0.001",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(command) == 70
    out, err = capsys.readouterr()
    failed, finished = rows_of(tmp_path)
    assert (failed["optimizer.lr"], failed["exit_code"], failed["test_final"]) == ("1e30", "76", "")
    assert failed["error"].startswith(
        "the loss, its gradient or a weight was not finite at step 1 ("
    )
    assert (finished["optimizer.lr"], finished["exit_code"], finished["error"]) == (
        "0.001",
        "0",
        "",
    )
    assert f"{failed['run']} failed with exit code 76: {failed['error']}\n" in out
    assert f"1/2  {failed['run']}: failed: " in err
    assert f"2/2  {finished['run']}: finished\n" in err


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path):
    planned = grid("toy", ["epochs=2", "seed=0,1"], SMALL)
    whole = run_all(planned, tmp_path / "whole")
    with pytest.raises(
        Stopped, match=f"SIGINT; run the same command again to go on in {tmp_path}/cut$"
    ) as stop:
        run_all(planned, tmp_path / "cut", display=Watcher("epoch", run=2))
    assert stop.value.code == 130
    watcher = Watcher()
    outcomes = run_all(planned, tmp_path / "cut", display=watcher)
    assert watcher.begun == [4]  # of the second run alone, after its first epoch of four steps
    assert [each.is_new for each in outcomes] == [False, True]
    assert [each.result["accuracy"] for each in outcomes] == [
        each.result["accuracy"] for each in whole
    ]


def test_a_run_of_a_sweep_that_lost_its_weights_is_not_finished(tmp_path):
    planned = grid("toy", ["epochs=1", "seed=0,1"], SMALL)
    run_all(planned, tmp_path)
    weights = tmp_path / planned[1].name / "model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    assert [each.is_new for each in run_all(planned, tmp_path)] == [False, True]
    assert weights.read_bytes() == before


def test_a_signal_after_the_last_step_of_a_run_keeps_the_next_from_beginning(tmp_path):
    planned = grid("toy", ["epochs=1", "seed=0,1"], SMALL)
    watcher = Watcher("end")
    with pytest.raises(Stopped):
        run_all(planned, tmp_path, display=watcher)
    assert watcher.begun == [0]
    assert [(tmp_path / each.name).exists() for each in planned] == [True, False]
    assert (
        len(run_all(planned[:1], tmp_path, display=Watcher("end"))) == 1
    )  # where none is next, none is kept


def test_a_folder_that_holds_another_experiment_is_a_failure(tmp_path):
    [planned] = grid("toy", ["epochs=1"], SMALL)
    run_all([planned], tmp_path)
    [other] = grid("toy", ["epochs=1", "seed=5"], SMALL)
    [outcome] = run_all([Planned(planned.name, other.call, other.words)], tmp_path)
    assert outcome.code == 2
    assert "holds another experiment" in outcome.error


def test_a_damaged_run_is_told_and_the_others_are_compared(tmp_path, capsys):
    command = [
        "sweep",
        "toy",
        "epochs=1",
        "seed=0,1",
        *SET,
        "--out",
        str(tmp_path),
        "--quiet",
        "--json",
    ]
    assert cli.main(command) == 0
    first, second = sorted(tmp_path.glob("toy-*"))
    (first / "predictions" / "train.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert cli.main(command) == 70
    found = json.loads(capsys.readouterr().out)
    assert found["groups"][0]["runs"] == [str(second)]
    assert [each["exit_code"] for each in found["runs"]] == [65, 0]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_sweep_refuses_torchrun_and_folders_that_are_none(tmp_path, monkeypatch, at_once):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write into .*file") as caught:
        run_all([], tmp_path / "file", at_once=at_once)
    assert caught.value.code == 73
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="does not run under torchrun"):
        run_all([], tmp_path, at_once=at_once)


def test_a_dry_run_prints_commands_and_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "toy", "seed=0,1", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"nearsay train toy seed={seed} --out runs/sweep-toy-seed=0,1/toy-seed={seed}"
        for seed in (0, 1)
    ]
    assert err == "2 runs would be in runs/sweep-toy-seed=0,1.\n"
    assert cli.main(["sweep", "toy", "seed=0", "--dry-run"]) == 0
    assert capsys.readouterr().err == "1 run would be in runs/sweep-toy-seed=0.\n"
    search = [
        "sweep",
        "toy",
        "--set",
        "objective.k=1..9",
        "--set",
        "held_out=0.1",
        "--search",
        "optuna",
        "--trials",
        "3",
    ]
    assert cli.main([*search, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["space"] == {
        "objective.k": "1..9",
        "held_out": "0.1",
    }
    assert cli.main([*search[:-1], "1", "--dry-run"]) == 0
    assert capsys.readouterr().err.startswith("1 trial would be in runs/")
    assert list(tmp_path.iterdir()) == []


def test_runs_at_once_are_processes_that_end_as_they_would_alone(tmp_path):
    planned = grid("toy", ["epochs=1"], [*SMALL, "optimizer.lr=0.001,1e30"])
    finished, failed = run_all(planned, tmp_path / "both", at_once=2)
    alone = run_all(planned[:1], tmp_path / "alone")[0]
    assert finished.result["accuracy"] == alone.result["accuracy"]
    assert failed.code == 76
    assert failed.error.startswith("the loss, its gradient or a weight was not finite at step 1 (")


STAND_IN = """#!{python} -S
import json, os, signal, sys, time
words, folder = sys.argv[4:], sys.argv[sys.argv.index("--out") + 1]
seed, log = words[1].removeprefix("seed="), os.path.join(os.path.dirname(folder), "log")
def write(word):
    with open(log, "a") as file:
        file.write(word + seed + "\\n")
def stop(number, frame):
    write("stop")
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
write("begin")
time.sleep(30 if seed == "9" else 0.2)
write("end")
if seed == "1" and open(log).read().count("begin1") == 1:
    sys.exit(71)
if seed == "2":
    os.kill(os.getpid(), signal.SIGKILL)
if seed == "3":
    print("note: k is large\\nerror: it was not to be", file=sys.stderr)
    sys.exit(65)
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, "result.json"), "w") as file:
    json.dump({{"finished": True, "accuracy": {{}}, "labels": {{}}}}, file)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in the place of Python that does what trainings do, without training."""
    program = tmp_path / "program"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path / "runs"


def test_processes_are_counted_and_their_ends_understood(stand_in):
    notes = []
    watcher = Watcher()
    watcher.note = notes.append
    outcomes = run_all(grid("toy", ["seed=0,1,2,3,4"]), stand_in, at_once=2, display=watcher)
    assert [each.code for each in outcomes] == [0, 0, 137, 65, 0]
    assert [each.error for each in outcomes][2:4] == [
        "its process was ended by SIGKILL",
        "it was not to be",
    ]
    assert notes == ["toy-seed=3: k is large"]
    log = (stand_in / "log").read_text().split()
    running = list(accumulate(1 if line.startswith("begin") else -1 for line in log))
    assert max(running) == 2
    assert log.count("begin1") == 2
    assert log[-2:] == [
        "begin1",
        "end1",
    ]  # what found no memory beside another is alone the second time


def test_a_signal_reaches_every_process_once(stand_in):
    def interrupt():
        while not (stand_in / "log").exists() or (stand_in / "log").read_text().count("begin") < 2:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped) as stop:
        run_all(grid("toy", ["seed=9", "noise=0.1,0.2,0.3"]), stand_in, at_once=2)
    thread.join()
    assert stop.value.code == 143
    assert sorted((stand_in / "log").read_text().split()) == ["begin9", "begin9", "stop9", "stop9"]


def test_a_search_maximizes_validation_and_goes_on_to_as_many_trials_as_are_wished(tmp_path):
    space = make_space(
        "toy", ["epochs=1"], ["objective.alpha=0..1", *HELD, LOG, "objective.k=1..9"]
    )
    assert [each.range.is_whole for each in space.choices if each.range] == [False, False, True]
    first = search(space, tmp_path / "a", trials=3)
    again = search(space, tmp_path / "a", trials=5)
    straight = search(space, tmp_path / "b", trials=5)
    names = [each.name for each in straight.outcomes]
    assert len(set(names)) == 5
    assert [each.name for each in first.outcomes] == names[:3]
    assert [each.name for each in again.outcomes] == names
    assert [each.is_new for each in again.outcomes] == [False, False, False, True, True]
    found = {each.name: each.result["accuracy"]["validation"]["final"] for each in again.outcomes}
    assert len(set(found.values())) > 1
    assert found[again.best.name] == again.accuracy == max(found.values())
    assert again.best.words == next(
        each.words for each in again.outcomes if each.name == again.best.name
    )
    for outcome in again.outcomes:
        chosen = dict(word.split("=", 1) for word in outcome.words if "=" in word)
        assert 1e-4 <= float(chosen["optimizer.lr"]) <= 1e-1
        assert 0 <= float(chosen["objective.alpha"]) <= 1
        assert int(chosen["objective.k"]) in range(1, 10)
    rates = sorted(
        float(dict(w.split("=", 1) for w in o.words if "=" in w)["optimizer.lr"])
        for o in again.outcomes
    )
    assert rates[0] < 3e-3  # half of the draws lie below, as they are of factors
    assert (tmp_path / "a" / JOURNAL).is_file()


def test_a_search_on_the_command_line_tells_the_best_command_and_leaves_a_table(tmp_path, capsys):
    command = [
        "sweep",
        "toy",
        "epochs=1",
        "method=standard,ncr",
        *SET,
        "--set",
        "held_out=0.2",
        "--set",
        LOG,
    ]
    command += ["--search", "optuna", "--trials", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    best = max(rows_of(tmp_path), key=lambda row: float(row["validation_final"]))
    accuracy = f"{100 * float(best['validation_final']):.1f} %"
    [told] = [line for line in out.splitlines() if line.startswith("Best on validation")]
    assert told.startswith(
        f"Best on validation, {accuracy}: nearsay train toy epochs=1 method={best['method']} "
    )
    assert f"--set optimizer.lr={best['optimizer.lr']}" in told
    assert "Trial" not in out + err  # the words of Optuna
    assert "note:" not in err


def test_an_interrupted_trial_is_tried_again_and_goes_on(tmp_path):
    space = make_space("toy", ["epochs=2"], [*HELD, LOG])
    with pytest.raises(Stopped):
        search(space, tmp_path, trials=2, display=Watcher("epoch", run=2))
    watcher = Watcher()
    found = search(space, tmp_path, trials=2, display=watcher)
    assert watcher.begun == [3]  # 160 examples that are not held out are three batches
    assert len(found.outcomes) == 2
    assert len(list(tmp_path.glob("toy-*"))) == 2
    assert all(each.result is not None for each in found.outcomes)


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(("host", "num_runs"), [(socket.gethostname(), 2), ("elsewhere", 1)])
def test_a_trial_that_died_with_its_process_is_tried_again_on_its_machine(tmp_path, host, num_runs):
    space = make_space("toy", ["epochs=1"], [*HELD, LOG])
    address = f"sqlite:///{tmp_path}/trials.db"
    storage = optuna.storages.RDBStorage(address)
    study = optuna.create_study(storage=storage, study_name=space.name, direction="maximize")
    trial = study.ask()
    trial.set_user_attr("process", [host, dead_process()])
    trial.suggest_float("--set optimizer.lr", 1e-4, 1e-1, log=True)
    storage.remove_session()
    storage.engine.dispose()
    found = search(space, tmp_path / "runs", trials=2, storage=address)
    assert len(found.outcomes) == num_runs
    tried = [word for each in found.outcomes for word in each.words]
    assert (f"optimizer.lr={trial.params['--set optimizer.lr']!r}" in tried) == (num_runs == 2)


def test_failed_trials_count_and_are_told(tmp_path):
    both = [
        "averaging=0.9,none",
        "judged=networks,averages",
    ]  # averages cannot be judged where there are none
    found = search(make_space("toy", ["epochs=1"], [*HELD, *both]), tmp_path, trials=5)
    failed = [each for each in found.outcomes if each.result is None]
    assert [each.code for each in failed] == [2] * len(failed)
    assert {each.error for each in failed} == {"judged='averages' needs averaging=, such as 0.997"}
    again = search(
        make_space("toy", ["epochs=1"], [*HELD, *both]),
        tmp_path,
        trials=5,
        display=(watcher := Watcher()),
    )
    assert watcher.begun == []
    assert [(each.name, each.code) for each in again.outcomes] == [
        (each.name, each.code) for each in found.outcomes
    ]

    hopeless = search(
        make_space("toy", ["epochs=1"], [*HELD, "optimizer.lr=1e30,1e31"]), tmp_path, trials=2
    )
    assert {each.code for each in hopeless.outcomes} == {76}
    assert (hopeless.best, hopeless.accuracy) == (None, None)


def test_runs_of_other_machines_are_counted_and_not_missed(tmp_path):
    space = make_space("toy", ["epochs=1"], [*HELD, LOG])
    address = f"sqlite:///{tmp_path}/trials.db"
    there = search(space, tmp_path / "there", trials=2, storage=address)
    here = search(space, tmp_path / "here", trials=2, storage=address)
    assert (there.num_elsewhere, here.num_elsewhere) == (0, 2)
    assert here.outcomes == []
    assert here.best.name == there.best.name
    connections = [
        each
        for each in Path("/proc/self/fd").iterdir()
        if os.path.realpath(each).endswith("/trials.db")
    ]
    assert connections == []  # none waits for the collection of garbage


@pytest.mark.parametrize(
    "address",
    ["mysql+pymysql://me:secret@nowhere/x", "postgresql://me:a@secret@nowhere/x", "secret"],
)
def test_a_storage_that_cannot_be_reached_is_one_sentence_without_its_password(
    tmp_path, capsys, address
):
    command = [
        "sweep",
        "toy",
        "epochs=1",
        *SET,
        "--set",
        "held_out=0.2",
        "--set",
        LOG,
        "--search",
        "optuna",
    ]
    assert cli.main([*command, "--trials", "2", "--storage", address, "--out", str(tmp_path)]) == 74
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "cannot be used (" in err
    assert err.endswith(
        "; check the address, and that its driver is installed; finished runs are untouched\n"
    )
    assert ("secret" in err) == (address == "secret")
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_is_lost_on_the_way_leaves_the_runs(tmp_path):
    space = make_space("toy", ["epochs=1"], [*HELD, LOG])
    database = tmp_path / "trials.db"
    with pytest.raises(StorageError, match="no such table: studies"):
        search(
            space,
            tmp_path / "runs",
            trials=2,
            storage=f"sqlite:///{database}",
            tell=lambda outcome: database.write_bytes(b""),
        )
    [run] = (tmp_path / "runs").glob("toy-*")
    assert json.loads((run / "result.json").read_text())["finished"] is True


def test_labels_may_be_searched_where_the_data_brings_the_examples_to_judge_by(tmp_path):
    table, labels = np.eye(8, dtype=np.float32), np.arange(8) % 2
    arguments, lists = [f"path={tmp_path / 'f.npz'}"], ["relabeled=none,a.npz"]
    np.savez(
        tmp_path / "f.npz", features=table, labels=labels, split=["train"] * 6 + ["val", "test"]
    )
    space = make_space("embeddings", arguments, lists)
    assert [each.texts for each in space.choices if each.is_open] == [("none", "a.npz")]
    np.savez(tmp_path / "f.npz", features=table, labels=labels)  # then some of train are held out
    with pytest.raises(ConfigError, match="would have trials judged by different labels"):
        make_space("embeddings", arguments, lists)


def test_without_optuna_a_search_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    command = [
        "sweep",
        "toy",
        *SET,
        "--set",
        "held_out=0.2",
        "--set",
        LOG,
        "--search",
        "optuna",
        "--trials",
        "2",
    ]
    assert cli.main([*command, "--out", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == 'error: --search optuna needs Optuna: pip install ".[sweep]" in the clone\n'
    )


def test_optuna_is_left_as_it_was(tmp_path):
    before = optuna.logging.get_verbosity()
    search(make_space("toy", ["epochs=1"], [*HELD, LOG]), Path(tmp_path), trials=1)
    assert optuna.logging.get_verbosity() == before
