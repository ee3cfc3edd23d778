"""SIGKILL at any time: the same command again ends with the very bytes of a run that was never interrupted."""

import random
import signal
import time
from collections import Counter

import pytest

from faults.jobs import INTERVAL, assert_same, last_checkpoint, words_of


def is_saving(folder):
    return any((folder / "checkpoints").glob(".*.partial"))


def is_rotating(folder):
    return len(list((folder / "checkpoints").glob("step-*"))) > 2


def is_finishing(folder):
    return (folder / "predictions").exists()


MOMENTS = {
    "anywhere": None,
    "in a save": is_saving,
    "in a rotation": is_rotating,
    "at the end": is_finishing,
}


def check_kills(server, whole, tmp_path, *, kills, experiment, loading):
    """Kill run after run, each several times; says what the kills hit."""
    draw, hits, number = random.Random(f"{experiment} {loading}"), Counter(), 0
    while sum(hits.values()) < kills:
        number += 1
        folder = tmp_path / f"run{number}"
        while sum(hits.values()) < kills:
            job = server.start(folder, *words_of(experiment, loading))
            if not kill(job, draw):
                break
            hits[name_place(folder)] += 1
            # A save may have put its checkpoint in place before the kill; the steps since the last one are lost.
            assert job.steps - last_checkpoint(folder) <= INTERVAL
        server.finish(folder, *words_of(experiment, loading))
        assert_same(folder, whole(experiment))
    print(
        f"{sum(hits.values())} kills of {experiment} with {loading} in {number} runs: {dict(hits)}"
    )
    return hits


def kill(job, draw):
    """Kill the job at a random moment; False if it was faster."""
    moment = MOMENTS[draw.choice(list(MOMENTS))]
    code = job.wait(draw.uniform(0.0, 0.5))
    if code is None and moment is not None:
        job.until(lambda: moment(job.folder))
        time.sleep(draw.uniform(0.0, 0.002))
    if code is None:
        job.signal(signal.SIGKILL)
        code = job.end()
    assert code in (0, -signal.SIGKILL), job.said
    return code != 0


def name_place(folder):
    """What a killed run was doing, as far as its folder tells."""
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
    job = server.start(tmp_path / "run", *words)
    log = tmp_path / "run" / "log.jsonl"
    assert job.until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 2)
    job.signal(signal.SIGKILL)
    assert job.end() == -signal.SIGKILL
    assert last_checkpoint(tmp_path / "run") == 0
    server.finish(tmp_path / "run", *words)
    assert_same(tmp_path / "run", whole("ncr"))
