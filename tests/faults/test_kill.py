"""SIGKILL at any time: the same command again ends with the bytes of an uninterrupted run."""

import random
import signal
from collections import Counter

import pytest

from faults.jobs import INTERVAL, assert_same, at_step, last_checkpoint, words_of
from faults.server import Hold

# Where a run is killed: the function, and before which of its calls at most. A run makes one of
# the calls more often, so that some kills come early and others late.
PLACES = {
    "step": ("nearsay.training.step:Step.__call__", 20),
    "save": ("nearsay.training.checkpoints:_write_flushed", 24),
    "rotation": ("nearsay.training.checkpoints:read", 7),
    "end": ("nearsay.training.loop:write_whole", 4),
}


def is_saving(folder):
    return any((folder / "checkpoints").glob(".*.partial"))


def is_rotating(folder):
    return len(list((folder / "checkpoints").glob("step-*"))) > 2


def is_finishing(folder):
    return (folder / "predictions").exists()


def check_kills(server, whole, tmp_path, *, kills, experiment, loading):
    """Kill run after run, each several times; returns what the kills hit."""
    draw, hits, number = random.Random(f"{experiment} {loading}"), Counter(), 0
    while sum(hits.values()) < kills:
        number += 1
        folder = tmp_path / f"run{number}"
        while sum(hits.values()) < kills:
            place, most = draw.choice([*PLACES.values()])
            hold = Hold(place, draw.randint(1, most))
            job = server.start(folder, *words_of(experiment, loading), hold=hold)
            if not kill(job, draw):
                break
            hits[name_place(folder)] += 1
            # A save may have put its checkpoint in place before the kill; the steps since are lost.
            assert job.steps - last_checkpoint(folder) <= INTERVAL
        server.finish(folder, *words_of(experiment, loading))
        assert_same(folder, whole(experiment))
    print(f"{kills} kills of {experiment} with {loading} in {number} runs: {dict(hits)}")
    return hits


def kill(job, draw):
    """Kill the job where it is held, or right after; False if it ended before."""
    mark = job.counter.with_suffix(".held")
    if not job.until(mark.exists):
        assert job.end() == 0, job.said
        return False
    job.until_held()
    if draw.random() < 0.5:
        # The kill then comes a little later, wherever the process is.
        job.signal(signal.SIGCONT)
    job.signal(signal.SIGKILL)
    assert job.end() == -signal.SIGKILL, job.said
    return True


def name_place(folder):
    """What a killed run was doing, as far as its folder shows."""
    for name, is_there in (("save", is_saving), ("rotation", is_rotating), ("end", is_finishing)):
        if is_there(folder):
            return name
    return "step"


@pytest.mark.parametrize(
    ("experiment", "loading"), [("two networks", "resident"), ("mixup", "two workers")]
)
def test_a_killed_run_ends_as_if_it_had_not_been(server, whole, tmp_path, experiment, loading):
    check_kills(server, whole, tmp_path, kills=3, experiment=experiment, loading=loading)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["two networks", "mixup"])
@pytest.mark.parametrize("loading", ["no worker", "two workers"])
def test_fifty_kills_change_nothing(server, whole, tmp_path, experiment, loading):
    hits = check_kills(server, whole, tmp_path, kills=50, experiment=experiment, loading=loading)
    assert hits.keys() == {"step", "save", "rotation", "end"}


def test_a_run_killed_before_its_first_checkpoint_begins_its_log_anew(server, whole, tmp_path):
    words = words_of("ncr", every=1000)
    job = server.start(tmp_path / "run", *words, hold=at_step(30))
    job.until_held()
    assert (tmp_path / "run" / "log.jsonl").read_bytes().count(b"\n") == 2
    job.signal(signal.SIGKILL)
    assert job.end() == -signal.SIGKILL
    assert last_checkpoint(tmp_path / "run") == 0
    server.finish(tmp_path / "run", *words)
    assert_same(tmp_path / "run", whole("ncr"))
