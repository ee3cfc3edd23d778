"""A sweep that was killed: its runs end by themselves, and the same command again waits for them and goes on."""

import os
import signal
import subprocess
import sys
import time

import pytest

from faults.jobs import PATIENCE, is_over
from nearsay.errors import RunError
from nearsay.sweep import grid, make_space, run_all, running, search
from nearsay.training.progress import Silent

SMALL = ["data.num_train=200", "data.num_test=100", "batch_size=50", "backbone.hidden=(8,)"]
HELD = [*SMALL, "held_out=0.2", "optimizer.lr=1e-4..1e-1:log"]

HOLD = """
import sys
from pathlib import Path
from nearsay.training.checkpoints import open_run
with open_run(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""

STAND_IN = """#!{python} -S
import json, os, sys
folder = sys.argv[sys.argv.index("--out") + 1]
if not os.path.exists(folder):
    os.makedirs(folder)
    sys.exit(75)
with open(os.path.join(folder, "result.json"), "w") as file:
    json.dump({{"finished": True, "accuracy": {{}}, "labels": {{}}}}, file)
"""


class Listener(Silent):
    """Keeps the notes, and lets the other process go at the first of them."""

    def __init__(self, holder):
        self.holder, self.notes = holder, []

    def note(self, message):
        self.notes.append(message)
        if len(self.notes) == 1:
            self.holder.stdin.close()


def until(claim):
    deadline = time.monotonic() + PATIENCE
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.05)
    return claim()


def hold(folder):
    """Another process that uses the run until its stdin is closed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"\n"
    return process


def test_the_runs_of_a_sweep_that_was_killed_save_and_end(tmp_path):
    words = [
        "epochs=1000000",
        "seed=0,1",
        *(word for change in SMALL for word in ("--set", change)),
    ]
    command = [sys.executable, "-m", "nearsay", "sweep", "toy", *words, "--at-once", "2"]
    command += ["--out", str(tmp_path)]
    sweep = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pids = []
    try:
        assert until(lambda: len(list(tmp_path.glob("*/log.jsonl"))) == 2)
        pids = [int(lock.read_text().split()[1]) for lock in tmp_path.glob("*/.lock")]
        sweep.kill()
        sweep.wait()
        assert until(lambda: all(map(is_over, pids)))
        assert len(list(tmp_path.glob("*/checkpoints/step-*"))) == 2
    finally:
        sweep.kill()
        sweep.wait()
        for pid in pids:
            if not is_over(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_run_in_use_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_PATIENCE", float(PATIENCE))
    [planned] = grid("toy", ["epochs=1"], SMALL)
    with hold(tmp_path / planned.name) as holder:
        listener = Listener(holder)
        [outcome] = run_all([planned], tmp_path, display=listener)
    assert outcome.result is not None
    assert len(listener.notes) == 1
    assert f"process {holder.pid} " in listener.notes[0]


@pytest.mark.parametrize(("patience", "codes"), [(float(PATIENCE), [0, 0]), (0.0, [75, 75])])
def test_runs_in_use_are_waited_for_side_by_side(tmp_path, monkeypatch, patience, codes):
    program = tmp_path / "program"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(running, "_PATIENCE", patience)
    outcomes = run_all(grid("toy", ["seed=0,1"]), tmp_path / "runs", at_once=2)
    assert [each.code for each in outcomes] == codes


def test_a_trial_whose_run_is_in_use_has_not_failed(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RunError("it is in use by process 1; wait for it", 75)

    space = make_space("toy", ["epochs=1"], HELD)
    with monkeypatch.context() as patched:
        patched.setattr(running, "_PATIENCE", 0.0)
        patched.setattr(running, "train", refuse)
        first = search(space, tmp_path, trials=2)
    assert [each.code for each in first.outcomes] == [75, 75]
    second = search(space, tmp_path, trials=2)
    assert [each.code for each in second.outcomes] == [0, 0]
    assert [each.name for each in second.outcomes] == [each.name for each in first.outcomes]
