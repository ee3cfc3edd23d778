"""The runs of a sweep, one after another here or several at once in processes of their own; none stops another."""

import os
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
from typing import IO, Any, NamedTuple

from nearsay import distributed
from nearsay.config import ConfigError
from nearsay.errors import (
    CANNOT_CREATE,
    INTERNAL,
    LOCKED,
    NO_MEMORY,
    RunError,
    Stopped,
    exit_code,
    explain,
)
from nearsay.sweep.planning import Planned
from nearsay.training.checkpoints import Run
from nearsay.training.loop import train
from nearsay.training.progress import Display
from nearsay.training.run_folder import check_relabeled, check_same, is_whole, read_result
from nearsay.training.system import PARENT, signals

_PAUSE = 0.05  # seconds between two looks at processes
_PATIENCE = 30.0  # seconds for which a run in use is waited for: one that a killed sweep has left ends by itself
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Outcome(NamedTuple):
    """What came of a planned run; Any is the type of JSON."""

    name: str
    words: tuple[str, ...]  # that `nearsay train` would take for it
    folder: Path
    result: dict[str, Any] | None = None  # None if it failed
    code: int = 0  # the exit code of the failure
    error: str = ""  # its sentence
    is_new: bool = True  # not finished before


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
    """Run all that is not finished in `folder`, and go on with what was begun; outcomes in the order of the plan.

    A run that fails is an outcome too. A signal ends this with `Stopped`, after a checkpoint. With `at_once` above 1
    there is a process for each run, and the display hears only their notes; a run that did not find enough memory
    beside others is tried again alone. `tell` hears of each outcome as it comes.
    """
    found: dict[str, Outcome] = {}
    for outcome in run_each(iter(planned), folder, at_once=at_once, display=display):
        found[outcome.name] = outcome
        if tell is not None:
            tell(outcome)
    return [found[each.name] for each in planned]


def run_each(
    plans: Iterator[Planned], folder: Path, *, at_once: int = 1, display: Display | None = None
) -> Iterator[Outcome]:
    """Outcomes as they come; the next plan is asked for when there is room for it."""
    if at_once < 1:
        raise ConfigError(f"at_once={at_once} must be 1 or more")
    if distributed.launch().size > 1:
        raise ConfigError(
            "a sweep does not run under torchrun; start it alone, with --at-once for several runs"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write into {folder}: {error.strerror}; choose another folder with --out",
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
    """Whether to try runs again that others are using."""

    def __init__(self, display: Display | None) -> None:
        self._display, self._until = display, dict[str, float]()

    def allows(self, outcome: Outcome) -> bool:
        """Whether there is time for one more try; says so at the first."""
        if outcome.code != LOCKED:
            return False
        if outcome.name not in self._until:
            self._until[outcome.name] = time.monotonic() + _PATIENCE
            if self._display is not None:
                used = outcome.error.partition(";")[0]
                self._display.note(f"{used}; waiting {_PATIENCE:g} seconds for it")
        return time.monotonic() < self._until[outcome.name]


def _run(planned: Planned, folder: Path, display: Display | None) -> Outcome:
    target = folder / planned.name
    try:
        result = train(planned.call.experiment, target, origin=planned.call.origin, display=display)
    except Stopped as stop:
        raise Stopped(stop.code - 128, folder) from stop
    except Exception as error:  # whatever it is, the other runs may do better
        return _failed(planned, target, error)
    return Outcome(planned.name, planned.words, target, result)


def _finished(planned: Planned, folder: Path) -> Outcome | None:
    """The outcome of a run that needs nothing more, None if it does."""
    target = folder / planned.name
    result, run = read_result(target), Run(target)
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
    return Outcome(planned.name, planned.words, target, code=code, error=explain(error, code))


def _side_by_side(
    plans: Iterator[Planned], folder: Path, at_once: int, display: Display | None
) -> Iterator[Outcome]:
    running: list[_Process] = []
    crowded: list[Planned] = []
    is_told, patience = False, _Patience(display)
    with signals() as received, tempfile.TemporaryDirectory() as recipes:
        try:
            while True:
                while (
                    len(running) < at_once
                    and not received
                    and (planned := next(plans, None)) is not None
                ):
                    if (finished := _finished(planned, folder)) is not None:
                        yield finished
                    else:
                        running.append(_start(planned, folder, at_once, Path(recipes)))
                if not running:
                    break
                time.sleep(_PAUSE)
                if received and not is_told:
                    is_told = True
                    for each in running:
                        each.process.send_signal(received[0])
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    outcome = _ended(each, display)
                    if outcome.code == NO_MEMORY and at_once > 1:
                        crowded.append(each.planned)
                    elif not received and patience.allows(outcome):
                        running.append(_start(each.planned, folder, at_once, Path(recipes)))
                    elif outcome.result is not None or not received:
                        yield outcome
            if received:
                raise Stopped(received[0], folder)
        finally:
            for each in running:
                each.process.terminate()
                each.process.wait()
                each.errors.close()
    if crowded:
        yield from _side_by_side(iter(crowded), folder, 1, display)


def _start(planned: Planned, folder: Path, at_once: int, recipes: Path) -> _Process:
    target, words = folder / planned.name, (_recipe(planned, recipes), *planned.words[1:])
    command = [sys.executable, "-m", "nearsay", "train", *words, "--out", str(target), "--quiet"]
    share = max(1, (os.cpu_count() or 1) // at_once)
    environment = {
        "OMP_NUM_THREADS": str(share),
        **os.environ,
    }  # all threads for all of them would be too many
    environment[PARENT] = str(
        os.getpid()
    )  # in a session of its own, nothing else tells it that this one was killed
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # open until the process is over
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=environment,
        start_new_session=True,  # the terminal's Ctrl-C is for this process, which passes it on once
    )
    return _Process(planned, target, process, errors)


def _recipe(planned: Planned, recipes: Path) -> str:
    """The recipe as it was when it was planned: a file of one's own may be edited while others of the sweep run."""
    origin = planned.call.origin
    if "source" not in origin:
        return planned.words[0]
    path = recipes / origin["sha256"] / origin["recipe"]
    if not path.is_file():  # or a run that has just begun may read half of it
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
        lines = [
            line for line in run.errors.read().decode(errors="replace").splitlines() if line.strip()
        ]
    planned, code = run.planned, run.process.returncode
    for line in lines:
        if display is not None and line.startswith("note: "):
            display.note(f"{planned.name}: {line.removeprefix('note: ')}")
    result = read_result(run.folder)
    if code == 0 and result is not None:
        return Outcome(planned.name, planned.words, run.folder, result)
    if code < 0:
        lines.append(f"its process was ended by {signal.Signals(-code).name}")
    told = lines[-1].removeprefix("error: ") if lines else "its process ended without a word"
    return Outcome(
        planned.name,
        planned.words,
        run.folder,
        code=128 - code if code < 0 else code or INTERNAL,
        error=told,
    )


@contextmanager
def _listening() -> Iterator[Callable[[], int]]:
    """What tells a signal to stop that came since it was asked last, 0 if none did.

    A training that is past its last step finishes and keeps the signal to itself; whoever wants to run another must
    hear of it nevertheless.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # Python gives signals to the main thread only
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
