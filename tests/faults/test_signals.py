"""SIGTERM and SIGINT: a checkpoint at the next step, an exit code that tells which, and the same bits afterwards."""

import os
import random
import signal
import time

import pytest

from faults.jobs import LOADINGS, STEPS, assert_same, at_step, last_checkpoint, words_of

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
# Steps between checkpoints, so that only a signal makes one before the end.
NEVER = 100_000
by_signal = pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)


def interrupt(job, number, *, pause=None):
    """Signal the whole group of a job that is held, and a second time after a pause."""
    job.until_held()
    job.signal_group(number)
    job.signal(signal.SIGCONT)
    if pause is not None:
        # Whether the second signal comes before or after the end is left open.
        time.sleep(pause)
        job.signal_group(number)


def shell_code(code):
    """An exit code as a shell shows it, where death by a signal is a code too."""
    return 128 - code if code < 0 else code


def check_signals(server, whole, tmp_path, *, number, attempts, loadings):
    draw = random.Random(int(number))
    for attempt in range(attempts):
        folder = tmp_path / str(attempt)
        words = words_of("ncr", loadings[attempt % len(loadings)], every=NEVER)
        step, is_twice = draw.randrange(1, STEPS), attempt % 2 == 1
        job = server.start(folder, *words, hold=at_step(step))
        interrupt(job, number, pause=draw.uniform(0, 0.01) if is_twice else None)
        assert shell_code(job.end()) == CODES[number], job.said
        # A second signal may come before or after the message.
        assert is_twice or (number.name in job.said and str(folder) in job.said)
        assert last_checkpoint(folder) == job.steps == step
        server.finish(folder, *words)
        assert_same(folder, whole("ncr"))


@by_signal
def test_a_signaled_run_saves_at_once_and_goes_on(server, whole, tmp_path, number):
    check_signals(
        server, whole, tmp_path, number=number, attempts=2, loadings=["resident", "two workers"]
    )


@pytest.mark.slow
@by_signal
def test_thirty_signals_change_nothing(server, whole, tmp_path, number):
    loadings = ["resident", "resident", "two workers", "two workers", "no worker"]
    check_signals(server, whole, tmp_path, number=number, attempts=30, loadings=loadings)


def check_stops(server, whole, tmp_path, *, experiment, draw, stops):
    """One run, stopped and gone on with in another way of loading each time."""
    folder = tmp_path / experiment
    done = 0
    for step in sorted(draw.sample(range(1, STEPS), stops)):
        words = words_of(experiment, draw.choice(list(LOADINGS)), every=NEVER)
        job = server.start(folder, *words, hold=at_step(step - done))
        interrupt(job, signal.SIGTERM)
        assert job.end() == CODES[signal.SIGTERM], job.said
        assert last_checkpoint(folder) == step
        done = step
    server.finish(folder, *words_of(experiment, draw.choice(list(LOADINGS)), every=NEVER))
    assert_same(folder, whole(experiment))


def test_ways_of_loading_may_change_at_every_stop(server, whole, tmp_path):
    check_stops(server, whole, tmp_path, experiment="mixup", draw=random.Random(0), stops=2)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["ncr", "mixup", "two networks"])
def test_ways_of_loading_may_change_at_each_of_many_stops(server, whole, tmp_path, experiment):
    for attempt in range(4):
        check_stops(
            server,
            whole,
            tmp_path / str(attempt),
            experiment=experiment,
            draw=random.Random(attempt),
            stops=5,
        )


@pytest.mark.parametrize("loading", ["no worker", "two workers"])
def test_all_ways_of_loading_give_the_same_bits(server, whole, tmp_path, loading):
    folder = server.finish(tmp_path / "run", *words_of("ncr", loading, every=NEVER))
    assert_same(folder, whole("ncr"))


@pytest.mark.slow
@pytest.mark.parametrize("loading", LOADINGS)
@pytest.mark.parametrize("experiment", ["mixup", "two networks"])
def test_all_ways_of_loading_give_the_same_bits_whatever_is_learned(
    server, whole, tmp_path, experiment, loading
):
    folder = server.finish(tmp_path / "run", *words_of(experiment, loading))
    assert_same(folder, whole(experiment))


def test_no_worker_outlives_a_run_that_was_stopped(server, tmp_path):
    job = server.start(tmp_path / "run", *words_of("ncr", "two workers"), hold=at_step(5))
    interrupt(job, signal.SIGTERM)
    assert job.end() == CODES[signal.SIGTERM], job.said
    with pytest.raises(ProcessLookupError):
        os.killpg(job.pid, 0)
