import json
import os
import signal
import statistics
import sys
import threading
import time
from itertools import accumulate

import pytest

from nearsay import cli
from nearsay.config import ConfigError
from nearsay.errors import RunError, Stopped
from nearsay.sweep import grid, run_all, running
from sweep.making import SET, SMALL, Watcher, rows_of


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("held_out", "labels", "has_note"), [("40", "given", True), ("40", "clean", False)]
)
def test_accuracies_by_other_labels_have_a_note(tmp_path, capsys, held_out, labels, has_note):
    words = ["toy", "epochs=1", *SET, "--set", f"held_out={held_out}", "--quiet"]
    words += ["--set", f"validation_labels={labels}"]
    first, out = tmp_path / "first", str(tmp_path / "runs")
    assert cli.main(["train", *words, "--out", str(first)]) == 0
    assert cli.main(["propagate", str(first)]) == 0
    capsys.readouterr()
    lists = ["--set", f"labels_file=none,{first / 'propagated.npz'}"]
    assert cli.main(["sweep", *words, *lists, "--out", out]) == 0
    assert ("judged by different labels" in capsys.readouterr().err) == has_note


def test_a_result_on_labels_that_were_written_again_since_is_a_failure(tmp_path, capsys):
    first = tmp_path / "first"
    labels = first / "propagated.npz"
    assert cli.main(["train", "toy", "epochs=1", *SET, "--quiet", "--out", str(first)]) == 0
    words = ["sweep", "toy", "epochs=1", *SET, "--set", f"labels_file=none,{labels}", "--quiet"]
    for k, code in ((50, 0), (50, 0), (2, 70)):
        assert cli.main(["propagate", str(first), "--k", str(k)]) == 0
        capsys.readouterr()
        assert cli.main([*words, "--out", str(tmp_path / "runs")]) == code
    assert f"labels_file='{labels}'" in capsys.readouterr().out


def own_recipe(path):
    """A recipe of the user, planned and then edited."""
    lines = [
        "from nearsay.recipes import toy",
        "def recipe(*, hidden: tuple[int, ...] = (8,), seed: int = 0):",
        "    return toy.recipe(method='standard', epochs=1, seed=seed)",
    ]
    path.write_text("\n".join(lines))
    planned = grid(str(path), [], [*SMALL, "optimizer.lr=0.001,1e30"])
    path.write_text("\n".join(lines).replace("standard", "ncr"))
    return planned


def test_runs_at_once_are_processes_that_end_as_they_would_alone(tmp_path):
    planned = own_recipe(tmp_path / "mine.py")
    finished, failed = run_all(planned, tmp_path / "both", at_once=2)
    [alone] = run_all(planned[:1], tmp_path / "alone")
    assert finished.result["accuracy"] == alone.result["accuracy"]
    assert failed.code == 76
    assert "not finite at step 1" in failed.error
    # The recipe is the one that was planned.
    for outcome in (finished, alone):
        assert outcome.words[0] == str(tmp_path / "mine.py")
        record = json.loads((outcome.folder / "experiment.json").read_text())
        origin = planned[0].call.origin
        assert {key: record[key] for key in origin} == origin
        assert record["experiment"]["objective"]["kind"] == "CrossEntropy"
    # A finished run is not run again.
    [again] = run_all(planned[:1], tmp_path / "both", at_once=2)
    assert not again.is_new


def test_a_recipe_that_other_runs_are_reading_is_not_written_again(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("from nearsay.recipes.toy import recipe\n")
    [planned] = grid(str(recipe), ["epochs=1"])
    path = running._recipe(planned, tmp_path)
    os.utime(path, (0, 0))
    assert running._recipe(planned, tmp_path) == path
    assert os.stat(path).st_mtime == 0


def test_the_same_run_in_other_words_is_no_further_seed(tmp_path, capsys):
    command = ["sweep", "toy", "epochs=1", "noise=0.2,.20", "seed=0,1", *SET]
    assert cli.main([*command, "--out", str(tmp_path), "--quiet"]) == 0
    [line] = [line.split() for line in capsys.readouterr().out.splitlines() if " ± " in line]
    assert line[:2] == ["ncr", "2"]
    finals = [float(row["test_final"]) for row in rows_of(tmp_path)]
    assert finals[:2] == finals[2:]
    [group] = json.loads((tmp_path / "sweep.json").read_text())["groups"]
    assert len(group["runs"]) == 4
    assert group["accuracy"]["test"] == pytest.approx(spread_of(finals[:2]))


def spread_of(values):
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values), "num": 2}


def test_a_sweep_ends_in_means_over_seeds_and_is_not_run_twice(tmp_path, capsys):
    # The rate is so high that the last epoch is not the best.
    lists, changes = ["epochs=4", "noise=0.2,0.4", "seed=0,1"], [*SMALL, "optimizer.lr=0.5"]
    command = ["sweep", "toy", *lists, *SET, "--set", changes[-1], "--out", str(tmp_path)]
    assert cli.main([*command, "--json", "--quiet"]) == 0
    first = json.loads(capsys.readouterr().out)
    finals, bests = [], []
    for run in grid("toy", lists, changes):
        accuracy = result_of(tmp_path / run.name)["accuracy"]["test"]
        finals.append(accuracy["final"])
        bests.append(accuracy["best"])
    assert finals[:2] != bests[:2]
    assert finals[2:] != bests[2:]
    assert [group["name"] for group in first["groups"]] == ["noise=0.2", "noise=0.4"]
    for group, values in zip(first["groups"], (finals[:2], finals[2:]), strict=True):
        assert group["accuracy"]["test"] == pytest.approx(spread_of(values))
    rows = rows_of(tmp_path)
    choices = [(row["noise"], row["seed"], row["exit_code"]) for row in rows]
    assert choices == [("0.2", "0", "0"), ("0.2", "1", "0"), ("0.4", "0", "0"), ("0.4", "1", "0")]
    assert [float(row["test_final"]) for row in rows] == finals
    assert {row["validation_final"] for row in rows} == {""}
    assert json.loads((tmp_path / "sweep.json").read_text())["groups"] == first["groups"]

    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert err.count(": finished before\n") == 4
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")} == written
    mean, deviation = statistics.mean(finals[:2]), statistics.stdev(finals[:2])
    assert f"{100 * mean:.1f} ± {100 * deviation:.1f} %" in out
    assert f"{tmp_path}/sweep.csv" in out
    assert f"{tmp_path}/sweep.json" in out


def test_a_failed_run_is_shown_with_its_error_and_stops_no_other(tmp_path, capsys):
    command = ["sweep", "toy", "epochs=1", *SET, "--set", "optimizer.lr=1e30,0.001"]
    assert cli.main([*command, "--out", str(tmp_path)]) == 70
    out, err = capsys.readouterr()
    failed, finished = rows_of(tmp_path)
    assert (failed["optimizer.lr"], failed["exit_code"], failed["test_final"]) == ("1e30", "76", "")
    assert "not finite at step 1" in failed["error"]
    assert (finished["optimizer.lr"], finished["exit_code"]) == ("0.001", "0")
    assert finished["error"] == ""
    assert f"{failed['run']} failed with exit code 76: {failed['error']}\n" in out
    assert f"1/2  {failed['run']}: failed: " in err
    assert f"2/2  {finished['run']}: finished\n" in err


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path):
    planned = grid("toy", ["epochs=2", "seed=0,1"], SMALL)
    whole = run_all(planned, tmp_path / "whole")
    with pytest.raises(Stopped, match=f"{tmp_path}/cut") as stop:
        run_all(planned, tmp_path / "cut", display=Watcher("epoch", run=2))
    assert stop.value.code == 130
    watcher = Watcher()
    outcomes = run_all(planned, tmp_path / "cut", display=watcher)
    assert watcher.begun == [4]  # of the second run alone, after its first epoch of four steps
    assert [run.is_new for run in outcomes] == [False, True]
    accuracies = [run.result["accuracy"] for run in outcomes]
    assert accuracies == [run.result["accuracy"] for run in whole]


def test_a_run_of_a_sweep_that_lost_its_weights_is_not_finished(tmp_path):
    planned = grid("toy", ["epochs=1", "seed=0,1"], SMALL)
    run_all(planned, tmp_path)
    weights = tmp_path / planned[1].name / "model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    assert [run.is_new for run in run_all(planned, tmp_path)] == [False, True]
    assert weights.read_bytes() == before


def test_a_signal_after_the_last_step_of_a_run_keeps_the_next_from_beginning(tmp_path):
    planned = grid("toy", ["epochs=1", "seed=0,1"], SMALL)
    watcher = Watcher("end")
    with pytest.raises(Stopped):
        run_all(planned, tmp_path, display=watcher)
    assert watcher.begun == [0]
    assert [(tmp_path / run.name).exists() for run in planned] == [True, False]
    # The last run has no next one.
    assert len(run_all(planned[:1], tmp_path, display=Watcher("end"))) == 1


def test_a_damaged_run_is_a_failure_and_the_others_are_compared(tmp_path, capsys):
    command = ["sweep", "toy", "epochs=1", "seed=0,1", *SET, "--out", str(tmp_path)]
    assert cli.main([*command, "--quiet"]) == 0
    first, second = sorted(tmp_path.glob("toy-*"))
    (first / "predictions" / "train.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert cli.main([*command, "--quiet", "--json"]) == 70
    tree = json.loads(capsys.readouterr().out)
    assert tree["groups"][0]["runs"] == [str(second)]
    assert [run["exit_code"] for run in tree["runs"]] == [65, 0]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_sweep_refuses_torchrun_and_files_as_folders(tmp_path, monkeypatch, at_once):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file") as caught:
        run_all([], tmp_path / "file", at_once=at_once)
    assert caught.value.code == 73
    launch = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"):
        run_all([], tmp_path, at_once=at_once)


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
# The first two wait until both are there; seed 9 waits for a signal.
while seed == "9" or open(log).read().count("begin") < 2:
    time.sleep(0.01)
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
    """A program instead of Python that ends in the ways of a training, without training."""
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
    assert [run.code for run in outcomes] == [0, 0, 137, 65, 0]
    assert "SIGKILL" in outcomes[2].error
    assert outcomes[3].error == "it was not to be"
    assert notes == ["toy-seed=3: k is large"]
    log = (stand_in / "log").read_text().split()
    steps = [1 if line.startswith("begin") else -1 for line in log]
    assert max(accumulate(steps)) == 2
    assert log.count("begin1") == 2
    assert log[-2:] == ["begin1", "end1"]  # after too little memory, the second try is alone


def test_a_signal_reaches_every_process_once(stand_in):
    def interrupt():
        while not (stand_in / "log").exists() or (stand_in / "log").read_text().count("begin") < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped) as stop:
        run_all(grid("toy", ["seed=9", "noise=0.1,0.2,0.3"]), stand_in, at_once=2)
    thread.join()
    assert stop.value.code == 143
    assert sorted((stand_in / "log").read_text().split()) == ["begin9", "begin9", "stop9", "stop9"]


def test_an_error_in_a_file_of_the_user_is_named_by_that_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # The first call, with two rows, happens before the training.
    (tmp_path / "bad.py").write_text(
        "def loss(logits, targets):\n"
        "    if len(logits) > 2:\n"
        "        raise KeyError('nothing')\n"
        "    return logits.sum(dim=1)\n"
    )
    words = ["sweep", "toy", "epochs=1", "noise=0.2,0.4", "method=bad.py:loss", "--quiet"]
    assert cli.main([*words, "--out", "s"]) == 70
    assert "line 3 of bad.py" in capsys.readouterr().out
