"""The runs of a sweep, one after another in this process or several at once in others."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from nearsay import distributed
from nearsay.config.own_files import explain_own
from nearsay.errors import (
    CANNOT_CREATE,
    INTERNAL,
    LOCKED,
    NO_MEMORY,
    ConfigError,
    RunError,
    Stopped,
    exit_code,
    explain,
)
from nearsay.sweep.planning import Outcome, Planned
from nearsay.training.checkpoints import LockedRun
from nearsay.training.loop import train
from nearsay.training.progress import Display
from nearsay.training.run_folder import check_relabeled, check_same, is_whole, read_result
from nearsay.training.system import PARENT, signals

_PAUSE = 0.05  # seconds between two looks at processes
# Seconds to wait for a run that is in use: one that a killed sweep has left ends by itself.
_PATIENCE = 30.0
_STOPS = (signal.SIGINT, signal.SIGTERM)


class _Process(NamedTuple):
    """A run in a process of its own."""

    planned: Planned
    folder: Path
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]


def run_all(
    planned: Sequence[Planned],
    folder: Path,
    *,
    at_once: int = 1,
    display: Display | None = None,
    tell: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run all that is not finished in `folder`, and go on with what was begun.

    The outcomes are in the order of the plan, and a run that fails has one too. A signal ends this
    with `Stopped`, after a checkpoint. With `at_once` above 1 each run has its own process, and
    the display shows only their notes. A run that did not get enough memory beside others is tried
    again alone. `tell` is called with each outcome as it comes.
    """
    outcomes: dict[str, Outcome] = {}
    for outcome in run_each(iter(planned), folder, at_once=at_once, display=display):
        outcomes[outcome.name] = outcome
        if tell is not None:
            tell(outcome)
    return [outcomes[run.name] for run in planned]


def run_each(
    plans: Iterator[Planned], folder: Path, *, at_once: int = 1, display: Display | None = None
) -> Iterator[Outcome]:
    """Outcomes as they come; the next plan is asked for when there is room for it."""
    if at_once < 1:
        raise ConfigError(f"at_once must be 1 or more, got {at_once}.")
    if distributed.launch().size > 1:
        raise ConfigError(
            "a sweep does not run under torchrun. Start it alone, with --at-once for several runs."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write into {folder}: {error.strerror}. Choose another folder with --out.",
            CANNOT_CREATE,
        ) from error
    if at_once == 1:
        return _in_turn(plans, folder, display)
    return _side_by_side(plans, folder, at_once, display)


def _in_turn(plans: Iterator[Planned], folder: Path, display: Display | None) -> Iterator[Outcome]:
    with _listening() as heard:
        for planned in plans:
            if number := heard():
                raise Stopped(number, folder)
            patience = _Patience(display)
            while patience.allows(
                outcome := _finished(planned, folder) or _run(planned, folder, display)
            ):
                time.sleep(_PAUSE)
            yield outcome


class _Patience:
    """Whether to try runs again that another process is using."""

    def __init__(self, display: Display | None) -> None:
        self._display, self._until = display, dict[str, float]()

    def allows(self, outcome: Outcome) -> bool:
        """Whether there is time for one more try; a note says so at the first."""
        if outcome.code != LOCKED:
            return False
        if outcome.name not in self._until:
            self._until[outcome.name] = time.monotonic() + _PATIENCE
            if self._display is not None:
                # The message goes on with advice, which does not fit here.
                reason = re.split(r"[;.] ", outcome.error)[0]
                self._display.note(f"{reason}; waiting {_PATIENCE:g} seconds for it")
        return time.monotonic() < self._until[outcome.name]


def _run(planned: Planned, folder: Path, display: Display | None) -> Outcome:
    target = folder / planned.name
    try:
        result = train(planned.call.experiment, target, origin=planned.call.origin, display=display)
    except Stopped as stop:
        raise Stopped(stop.code - 128, folder) from stop
    except Exception as error:
        # Any error is one of this run, and the other runs may succeed.
        return _failed(planned, target, error)
    return Outcome(planned.name, planned.words, target, result)


def _finished(planned: Planned, folder: Path) -> Outcome | None:
    """The outcome of a run that needs nothing more, None if it does."""
    target = folder / planned.name
    result, run = read_result(target), LockedRun(target)
    if result is None:
        return None
    try:
        check_same(run, planned.call.experiment)
        if not is_whole(target):
            return None
        check_relabeled(run, planned.call.experiment)
    except (ConfigError, RunError) as error:
        return _failed(planned, target, error)
    return Outcome(planned.name, planned.words, target, result, is_new=False)


def _failed(planned: Planned, target: Path, error: Exception) -> Outcome:
    code = exit_code(error)
    message = explain(error, code)
    if message.startswith("internal error"):
        # A loss or data set of the user may have failed.
        message = explain_own(error) or message
    return Outcome(planned.name, planned.words, target, code=code, error=message)


def _side_by_side(
    plans: Iterator[Planned], folder: Path, at_once: int, display: Display | None
) -> Iterator[Outcome]:
    running: list[_Process] = []
    crowded: list[Planned] = []
    is_passed_on, patience = False, _Patience(display)
    with signals() as received, tempfile.TemporaryDirectory() as recipes:
        try:
            while True:
                while len(running) < at_once and not received:
                    planned = next(plans, None)
                    if planned is None:
                        break
                    finished = _finished(planned, folder)
                    if finished is not None:
                        yield finished
                    else:
                        running.append(_start(planned, folder, at_once, Path(recipes)))
                if not running:
                    break
                time.sleep(_PAUSE)
                if received and not is_passed_on:
                    is_passed_on = True
                    for run in running:
                        run.process.send_signal(received[0])
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    outcome = _ended(run, display)
                    if outcome.code == NO_MEMORY and at_once > 1:
                        crowded.append(run.planned)
                    elif not received and patience.allows(outcome):
                        running.append(_start(run.planned, folder, at_once, Path(recipes)))
                    elif outcome.result is not None or not received:
                        yield outcome
            if received:
                raise Stopped(received[0], folder)
        finally:
            for run in running:
                run.process.terminate()
                run.process.wait()
                run.errors.close()
    # Runs that did not get enough memory beside others are tried again alone.
    if crowded:
        yield from _side_by_side(iter(crowded), folder, 1, display)


def _start(planned: Planned, folder: Path, at_once: int, recipes: Path) -> _Process:
    target, words = folder / planned.name, (_recipe(planned, recipes), *planned.words[1:])
    command = [sys.executable, "-m", "nearsay", "train", *words, "--out", str(target), "--quiet"]
    # Each run gets its share of the processors; all threads for all runs would be too many.
    share = max(1, (os.cpu_count() or 1) // at_once)
    environment = {"OMP_NUM_THREADS": str(share), **os.environ}
    # In its own session, a run learns only from this that the sweep was killed.
    environment[PARENT] = str(os.getpid())
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # open until the process is over
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=environment,
        # Ctrl-C in the terminal is for this process, which passes it on once.
        start_new_session=True,
    )
    return _Process(planned, target, process, errors)


def _recipe(planned: Planned, recipes: Path) -> str:
    """The recipe as it was planned, because a file of the user may be edited during the sweep."""
    origin = planned.call.origin
    if "source" not in origin:
        return planned.words[0]
    path = recipes / origin["sha256"] / origin["recipe"]
    # It is written once: a run that has just begun could read half of a second writing.
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        path.write_text(origin["source"], "utf-8", newline="")
        for name, file in origin.get("files", {}).items():
            local = path.parent / name
            # Files outside the folder of the recipe are those of objects, which the words name.
            if ".." not in local.parts:
                local.parent.mkdir(parents=True, exist_ok=True)
                local.write_text(file["source"], "utf-8", newline="")
    return str(path)


def _ended(run: _Process, display: Display | None) -> Outcome:
    """The outcome of a process that is over; its notes are passed on."""
    with run.errors:
        run.errors.seek(0)
        text = run.errors.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    planned, code = run.planned, run.process.returncode
    for line in lines:
        if display is not None and line.startswith("note: "):
            display.note(f"{planned.name}: {line.removeprefix('note: ')}")
    result = read_result(run.folder)
    if code == 0 and result is not None:
        return Outcome(planned.name, planned.words, run.folder, result)
    error = "its process ended without a message"
    if code < 0:
        error = f"its process was ended by {signal.Signals(-code).name}"
        code = 128 - code
    elif lines:
        error = lines[-1].removeprefix("error: ")
    words = planned.words
    return Outcome(planned.name, words, run.folder, code=code or INTERNAL, error=error)


@contextmanager
def _listening() -> Iterator[Callable[[], int]]:
    """A function that returns a signal to stop since the last call, or 0.

    A training that is past its last step finishes and keeps the signal to itself, but the sweep
    must not begin the next run.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python gives signals to the main thread only.
        yield lambda: 0
        return
    inner, outer = socket.socketpair()
    for end in (inner, outer):
        end.setblocking(False)

    def heard() -> int:
        numbers = inner.recv(4096) if select.select([inner], [], [], 0)[0] else b""
        return next((number for number in numbers if number in _STOPS), 0)

    before = signal.set_wakeup_fd(outer.fileno())
    try:
        yield heard
    finally:
        signal.set_wakeup_fd(before)
        inner.close()
        outer.close()
