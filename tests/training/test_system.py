"""Signals, the clock, and what torch is told to do: as it was before, once a run has ended."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nearsay import errors
from nearsay.experiment import Machine
from nearsay.training import system

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still unless it is set."""
    time = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(system, "time", SimpleNamespace(perf_counter=lambda: time.seconds))
    return time


def test_the_first_steps_are_counted_only_where_there_are_no_others(now):
    clock = system.Clock(10)
    assert clock.rate == 0
    now.seconds += 4
    clock.look(8)
    assert clock.rate == 10 * 8 / 4
    now.seconds += 2
    clock.look(20)
    assert clock.rate == 10 * 12 / 2
    now.seconds += 1
    clock.look(23)
    assert clock.rate == 10 * 15 / 3


def test_time_before_a_restart_is_not_counted(now):
    clock = system.Clock(10)
    now.seconds += 1
    clock.look(1)
    now.seconds += 1
    clock.look(6)
    # Of evaluation.
    now.seconds += 50
    clock.restart(6)
    now.seconds += 1
    clock.look(11)
    assert clock.rate == 10 * 10 / 2


def test_how_fast_an_earlier_process_was_counts_until_the_first_step(now):
    clock = system.Clock(10)
    clock.resume(70.0)
    clock.restart(1000)
    clock.look(1000)
    assert clock.rate == 70
    now.seconds += 2
    clock.look(1004)
    assert clock.rate == 10 * 4 / 2


def test_a_look_without_a_step_counts_nothing(now):
    clock = system.Clock(10)
    clock.look(0)
    assert clock.rate == 0
    now.seconds += 1
    clock.look(3)
    assert clock.rate == 30
    now.seconds += 1
    clock.look(5)
    # In which nothing was trained.
    now.seconds += 9
    clock.look(5)
    assert clock.rate == 20


def test_it_is_time_to_look_after_64_steps_or_a_quarter_of_a_second(now):
    clock = system.Clock(10)
    clock.restart(100)
    assert not clock.is_due(163)
    assert clock.is_due(164)
    now.seconds += 0.2
    assert not clock.is_due(101)
    now.seconds += 0.05
    assert clock.is_due(101)
    clock.look(101)
    assert not clock.is_due(102)


def handlers():
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)


def test_signals_are_collected_and_their_handlers_restored():
    before = handlers()
    with system.signals() as received:
        assert received == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGTERM, signal.SIGINT]
        assert handlers() != before
    assert handlers() == before


def test_handlers_are_restored_after_an_error_too():
    before = handlers()
    with suppress(KeyError), system.signals():
        raise KeyError
    assert handlers() == before


def test_outside_the_main_thread_signals_are_left_alone():
    seen = []

    def inside():
        with system.signals() as received:
            seen.append((received, handlers()))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [([], handlers())]


def test_a_stop_has_the_exit_code_of_its_signal():
    stopped = errors.Stopped(signal.SIGTERM, Path("runs/a"))
    assert stopped.code == 143
    assert str(stopped) == "stopped by SIGTERM; run the same command again to go on in runs/a"
    assert errors.Stopped(signal.SIGINT, Path("runs/a")).code == 130


def state():
    return (
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.fixture
def kept(monkeypatch):
    """What these tests change is as it was afterwards, whatever happens."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    benchmark, deterministic, warns_only = state()
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("before", [(False, False, False), (True, True, False), (True, True, True)])
def test_torch_is_told_what_to_do_only_while_a_run_goes_on(deterministic, before):
    torch.backends.cudnn.benchmark = before[0]
    torch.use_deterministic_algorithms(before[1], warn_only=before[2])
    numbers = torch.get_rng_state()
    with suppress(KeyError), system.backend(Machine(deterministic=deterministic), CPU, seed=3):
        assert torch.backends.cudnn.benchmark is not deterministic
        if deterministic:
            assert state() == (False, True, False)
        torch.rand(5)
        raise KeyError
    assert state() == before
    assert torch.equal(torch.get_rng_state(), numbers)
    # The user's own choice.
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_modules_draw_from_the_seed_of_the_run():
    draws = []
    for seed in (3, 3, 4):
        with system.backend(Machine(), CPU, seed=seed):
            draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_one_thread_is_only_for_a_while(monkeypatch):
    counts = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    with suppress(ValueError), system.one_thread():
        raise ValueError
    assert counts == [4, 1, 4]


def test_draws_go_on_where_the_generator_stood():
    torch.manual_seed(0)
    saved = system.own_states(CPU, [])
    expected = torch.rand(3)
    system.set_own_states(saved, CPU, [])
    assert torch.equal(torch.rand(3), expected)
    torch.rand(1)
    # Of two processes.
    twice = {name: torch.cat([state, torch.zeros_like(state)]) for name, state in saved.items()}
    system.set_own_states(twice, CPU, [])
    assert torch.equal(torch.rand(3), expected)
    # Of a run that began on another device.
    system.set_own_states({}, CPU, [])
