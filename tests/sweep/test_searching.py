import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from nearsay import cli
from nearsay.errors import Stopped, StorageError
from nearsay.sweep import make_space, search
from nearsay.sweep.searching import JOURNAL
from sweep.making import HELD, RATES, SET, Watcher, rows_of

COMMAND = ["sweep", "toy", "epochs=1", *SET, "--set", "held_out=0.2", "--set", RATES]
COMMAND += ["--search", "optuna", "--trials", "2"]


@pytest.fixture
def space():
    """A search of the learning rate alone."""
    return make_space("toy", ["epochs=1"], [*HELD, RATES])


def choices_of(outcome):
    return dict(word.split("=", 1) for word in outcome.words if "=" in word)


def test_a_search_maximizes_validation_and_goes_on_to_the_number_of_trials(tmp_path):
    ranges = ["objective.alpha=0..1", *HELD, RATES, "objective.k=1..9"]
    space = make_space("toy", ["epochs=1"], ranges)
    are_whole = [choice.range.is_whole for choice in space.choices if choice.range]
    assert are_whole == [False, False, True]
    first = search(space, tmp_path / "a", trials=3)
    again = search(space, tmp_path / "a", trials=5)
    straight = search(space, tmp_path / "b", trials=5)
    names = [run.name for run in straight.outcomes]
    assert len(set(names)) == 5
    assert [run.name for run in first.outcomes] == names[:3]
    assert [run.name for run in again.outcomes] == names
    assert [run.is_new for run in again.outcomes] == [False, False, False, True, True]
    accuracies, words, rates = {}, {}, []
    for run in again.outcomes:
        accuracies[run.name] = run.result["accuracy"]["validation"]["final"]
        words[run.name] = run.words
        chosen = choices_of(run)
        rates.append(float(chosen["optimizer.lr"]))
        assert 0 <= float(chosen["objective.alpha"]) <= 1
        assert int(chosen["objective.k"]) in range(1, 10)
    assert len(set(accuracies.values())) > 1
    assert accuracies[again.best.name] == again.accuracy == max(accuracies.values())
    assert again.best.words == words[again.best.name]
    assert 1e-4 <= min(rates) < 3e-3  # half of the draws are below, because they are of factors
    assert max(rates) <= 1e-1
    assert (tmp_path / "a" / JOURNAL).is_file()


def test_a_search_on_the_command_line_prints_the_best_command_and_leaves_a_table(tmp_path, capsys):
    assert cli.main([*COMMAND, "method=standard,ncr", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    best = max(rows_of(tmp_path), key=lambda row: float(row["validation_final"]))
    accuracy = f"{100 * float(best['validation_final']):.1f} %"
    [line] = [line for line in out.splitlines() if line.startswith("Best on validation")]
    assert f"{accuracy}: nearsay train toy epochs=1 method={best['method']} " in line
    assert f"--set optimizer.lr={best['optimizer.lr']}" in line
    assert "Trial" not in out + err  # the words of Optuna
    assert "note:" not in err


def test_an_interrupted_trial_is_tried_again_and_goes_on(tmp_path):
    space = make_space("toy", ["epochs=2"], [*HELD, RATES])
    with pytest.raises(Stopped):
        search(space, tmp_path, trials=2, display=Watcher("epoch", run=2))
    watcher = Watcher()
    result = search(space, tmp_path, trials=2, display=watcher)
    assert watcher.begun == [3]  # 160 examples that are not held out are three batches
    assert len(result.outcomes) == 2
    assert len(list(tmp_path.glob("toy-*"))) == 2
    assert all(run.result is not None for run in result.outcomes)


@pytest.mark.parametrize(("host", "num_runs"), [(socket.gethostname(), 2), ("elsewhere", 1)])
def test_a_trial_that_died_with_its_process_is_tried_again_on_its_machine(
    space, tmp_path, host, num_runs
):
    dead = subprocess.Popen(["true"])
    dead.wait()
    address = f"sqlite:///{tmp_path}/trials.db"
    storage = optuna.storages.RDBStorage(address)
    study = optuna.create_study(storage=storage, study_name=space.name, direction="maximize")
    trial = study.ask()
    trial.set_user_attr("process", [host, dead.pid])
    trial.suggest_float("--set optimizer.lr", 1e-4, 1e-1, log=True)
    storage.remove_session()
    storage.engine.dispose()
    result = search(space, tmp_path / "runs", trials=2, storage=address)
    assert len(result.outcomes) == num_runs
    rates = [choices_of(run)["optimizer.lr"] for run in result.outcomes]
    assert (repr(trial.params["--set optimizer.lr"]) in rates) == (num_runs == 2)


def test_failed_trials_count_and_are_kept(tmp_path):
    # Averages cannot be judged if there are none.
    both = ["averaging=0.9,none", "eval_weights=networks,averages"]
    space = make_space("toy", ["epochs=1"], [*HELD, *both])
    first = search(space, tmp_path, trials=5)
    failed = [run for run in first.outcomes if run.result is None]
    assert failed
    assert {run.code for run in failed} == {2}
    assert all("eval_weights" in run.error for run in failed)
    watcher = Watcher()
    again = search(space, tmp_path, trials=5, display=watcher)
    assert watcher.begun == []
    codes = [(run.name, run.code) for run in again.outcomes]
    assert codes == [(run.name, run.code) for run in first.outcomes]

    rates = make_space("toy", ["epochs=1"], [*HELD, "optimizer.lr=1e30,1e31"])
    hopeless = search(rates, tmp_path, trials=2)
    assert {run.code for run in hopeless.outcomes} == {76}
    assert (hopeless.best, hopeless.accuracy) == (None, None)


def test_runs_of_other_machines_count_but_are_not_in_the_folder(space, tmp_path):
    address = f"sqlite:///{tmp_path}/trials.db"
    there = search(space, tmp_path / "there", trials=2, storage=address)
    here = search(space, tmp_path / "here", trials=2, storage=address)
    assert (there.num_elsewhere, here.num_elsewhere) == (0, 2)
    assert here.outcomes == []
    assert here.best.name == there.best.name
    # No connection waits for the collection of garbage.
    files = list(map(os.path.realpath, Path("/proc/self/fd").iterdir()))
    assert not [file for file in files if file.endswith("/trials.db")]


@pytest.mark.parametrize(
    "address",
    ["mysql+pymysql://me:secret@nowhere/x", "postgresql://me:a@secret@nowhere/x", "secret"],
)
def test_a_storage_that_cannot_be_reached_is_one_line_without_its_password(
    tmp_path, capsys, address
):
    assert cli.main([*COMMAND, "--storage", address, "--out", str(tmp_path)]) == 74
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "driver" in err
    assert ("secret" in err) == (address == "secret")
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_is_lost_on_the_way_leaves_the_runs(space, tmp_path):
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


def test_without_optuna_a_search_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main([*COMMAND, "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "pip install" in err


def test_optuna_is_left_as_it_was(space, tmp_path):
    before = optuna.logging.get_verbosity()
    search(space, Path(tmp_path), trials=1)
    assert optuna.logging.get_verbosity() == before
