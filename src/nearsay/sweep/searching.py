"""A search among ranges and lists by Optuna, which maximizes the accuracy on held-out examples; its only door.

What is known of the trials is in a journal beside the runs, or in a database for many machines. A trial that was
interrupted is tried again with the same choices, and so goes on from its checkpoint.
"""

import math
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nearsay.config import ConfigError
from nearsay.errors import LOCKED, USAGE, Stopped, StorageError, first_line
from nearsay.sweep.planning import Choice, Planned, Space, plan
from nearsay.sweep.running import Outcome, run_each
from nearsay.training.progress import Display
from nearsay.training.run_folder import read_result

if TYPE_CHECKING:  # an extra
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

JOURNAL = "trials.journal"


class Found(NamedTuple):
    """What a search came to."""

    outcomes: list[Outcome]  # of all trials whose runs are here, in their order
    best: Planned | None  # None if no trial has succeeded
    accuracy: float | None  # of the best on validation, after the last epoch
    num_elsewhere: int  # finished trials of other machines, or whose runs are gone


def search(
    space: Space,
    folder: Path,
    *,
    trials: int,
    storage: str | None = None,
    at_once: int = 1,
    display: Display | None = None,
    tell: Callable[[Outcome], None] | None = None,
) -> Found:
    """Go on until there are `trials` trials in all, those of earlier calls and of other machines included.

    `storage` is the address of a database; without, a journal in the folder is kept. What a trial draws depends on its
    number and on what was known by then. Failed trials count, and the best is the best after its last epoch.
    """
    if trials < 1:
        raise ConfigError(f"trials={trials} must be 1 or more")
    with _quiet(), _opened_study(space, folder, storage) as study:
        with _explained(storage):
            _release_dead(study)
        found: dict[str, Outcome] = {}
        waiting: dict[str, list[Trial]] = {}  # by the name of the run that tells their value
        try:
            plans = _ask(study, space, trials, waiting, storage)
            for outcome in run_each(plans, folder, at_once=at_once, display=display):
                outcome = found[outcome.name] = _judged(outcome)
                with _explained(storage):
                    # what another process runs has not failed, and is tried again by the next call
                    for trial in waiting.pop(outcome.name) if outcome.code != LOCKED else ():
                        _answer(study, trial, outcome)
                if tell is not None:
                    tell(outcome)
        except (Stopped, KeyboardInterrupt):
            with _explained(storage):
                _release_all(study, waiting)
            raise
        with _explained(storage):
            collected = _collect(study, space, folder, found)
            _release_all(study, waiting)
            return collected


def _ask(
    study: "Study",
    space: Space,
    trials: int,
    waiting: "dict[str, list[Trial]]",
    storage: str | None,
) -> Iterator[Planned]:
    """Plans of new trials; one that draws what is running already waits for that run instead."""
    from optuna.samplers import TPESampler  # noqa: PLC0415  # an extra

    while True:
        with _explained(storage):
            if len(_counted(study)) >= trials:
                return
            trial = study.ask()
            trial.set_user_attr("process", _process())
            # Independent draws of a generator of its own for each trial: those of an earlier call are not repeated,
            # and two machines do not draw the same.
            study.sampler = TPESampler(seed=trial.number, multivariate=False, constant_liar=True)
            chosen = [(choice, _draw(trial, choice)) for choice in space.choices]
            try:
                planned = plan(space.recipe, chosen)
            except ConfigError as error:  # values that are right alone and do not go together
                _fail(study, trial, USAGE, str(error))
                continue
        others = waiting.setdefault(planned.name, [])
        others.append(trial)
        if len(others) == 1:
            yield planned


def _draw(trial: "Trial", choice: Choice) -> str:
    """A value of the choice, as text that is read as the very same value."""
    if choice.range is None:
        return (
            str(trial.suggest_categorical(choice.label, choice.texts))
            if choice.is_open
            else choice.texts[0]
        )
    low, high, log = choice.range.low, choice.range.high, choice.range.is_log
    if choice.range.is_whole:
        return str(trial.suggest_int(choice.label, int(low), int(high), log=log))
    return repr(trial.suggest_float(choice.label, low, high, log=log))


def _judged(outcome: Outcome) -> Outcome:
    """The outcome, failed if there is nothing to judge it by."""
    if outcome.result is None or _accuracy(outcome.result) is not None:
        return outcome
    told = "the run has no accuracy on validation, perhaps because no example was held out; try a larger held_out"
    return outcome._replace(result=None, code=USAGE, error=told)


def _accuracy(result: dict[str, Any]) -> float | None:
    found = result["accuracy"].get("validation")
    return found["final"] if found is not None and math.isfinite(found["final"]) else None


def _answer(study: "Study", trial: "Trial", outcome: Outcome) -> None:
    if outcome.result is None:
        _fail(study, trial, outcome.code, outcome.error)
    else:
        study.tell(trial, _accuracy(outcome.result))


def _fail(study: "Study", trial: "Trial", code: int, error: str) -> None:
    from optuna.trial import TrialState  # noqa: PLC0415  # an extra

    trial.set_user_attr("code", code)
    trial.set_user_attr("error", error)
    study.tell(trial, state=TrialState.FAIL)


def _counted(study: "Study") -> "list[FrozenTrial]":
    """The trials that are over or running, without those that were interrupted."""
    everyone = study.get_trials(deepcopy=False)
    replaced = {each.user_attrs.get("replaces") for each in everyone}
    return [
        each for each in everyone if each.state.name != "WAITING" and each.number not in replaced
    ]


def _release(study: "Study", number: int, params: dict[str, Any]) -> None:
    """Let a trial be tried again with what it drew."""
    from optuna.trial import TrialState  # noqa: PLC0415  # an extra

    study.enqueue_trial(
        params, user_attrs={"replaces": number}
    )  # first: a crash in between then loses nothing
    study.tell(number, state=TrialState.FAIL)


def _release_all(study: "Study", waiting: "dict[str, list[Trial]]") -> None:
    for trial in (each for trials_of_run in waiting.values() for each in trials_of_run):
        _release(study, trial.number, trial.params)


def _release_dead(study: "Study") -> None:
    """Release the trials that died with a process of this machine."""
    for each in _counted(study):
        if each.state.name == "RUNNING" and _is_dead(each.user_attrs.get("process")):
            _release(study, each.number, each.params)


def _process() -> list[Any]:
    return [socket.gethostname(), os.getpid()]


def _is_dead(process: list[Any] | None) -> bool:
    """Whether a process of this machine is over; one that had no time to leave its name is not known to be."""
    host, own = _process()
    if process is None or process[0] != host:
        return False
    if process[1] == own:  # of a container that was started again, as this process has only begun
        return True
    try:
        os.kill(process[1], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _collect(study: "Study", space: Space, folder: Path, found: dict[str, Outcome]) -> Found:
    """All that is known of the trials, from this call and from the study."""
    outcomes: dict[str, Outcome] = {}
    num_elsewhere = 0
    for trial in _counted(study):
        outcome = _recall(trial, space, folder, found)
        if outcome is not None:
            outcomes.setdefault(outcome.name, outcome)
        elif trial.state.name == "COMPLETE":
            num_elsewhere += 1
    done = [each for each in study.get_trials(deepcopy=False) if each.state.name == "COMPLETE"]
    if not done:
        return Found(list(outcomes.values()), None, None, num_elsewhere)
    best = max(done, key=lambda each: (each.value or 0.0, -each.number))
    return Found(list(outcomes.values()), _planned(best, space), best.value, num_elsewhere)


def _planned(trial: "FrozenTrial", space: Space) -> Planned:
    return plan(
        space.recipe,
        [(each, _text(trial.params.get(each.label, each.texts[0]))) for each in space.choices],
    )


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _recall(
    trial: "FrozenTrial", space: Space, folder: Path, found: dict[str, Outcome]
) -> Outcome | None:
    """The outcome of a trial, None if it is running, or its run is not here."""
    code, error = trial.user_attrs.get("code"), trial.user_attrs.get("error", "")
    try:
        planned = _planned(trial, space)
    except ConfigError:
        name = f"trial-{trial.number}"
        return Outcome(name, (), folder / name, code=USAGE, error=error, is_new=False)
    if planned.name in found:
        return found[planned.name]
    target = folder / planned.name
    if code is not None:
        return Outcome(planned.name, planned.words, target, code=code, error=error, is_new=False)
    result = read_result(target) if trial.state.name == "COMPLETE" else None
    return (
        None
        if result is None
        else Outcome(planned.name, planned.words, target, result, is_new=False)
    )


@contextmanager
def _opened_study(space: Space, folder: Path, storage: str | None) -> "Iterator[Study]":
    """The study of the search; connections to a database are closed at the end."""
    import optuna  # noqa: PLC0415  # an extra
    from optuna.storages import JournalStorage, RDBStorage  # noqa: PLC0415
    from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415

    with _explained(storage):
        if storage is None:
            folder.mkdir(parents=True, exist_ok=True)
            kept: JournalStorage | RDBStorage = JournalStorage(
                JournalFileBackend(str(folder / JOURNAL))
            )
        else:
            kept = RDBStorage(storage)
        study = optuna.create_study(
            storage=kept, study_name=space.name, direction="maximize", load_if_exists=True
        )
    try:
        yield study
    finally:
        if isinstance(kept, RDBStorage):
            kept.remove_session()
            kept.engine.dispose()


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna without its log and its warnings; afterwards all is as before."""
    try:
        import optuna  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ImportError(
            '--search optuna needs Optuna: pip install ".[sweep]" in the clone'
        ) from error

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", module="optuna")
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _explained(storage: str | None) -> Iterator[None]:
    """Turn what databases and their drivers say, which can be anything, into a sentence without a password."""
    try:
        yield
    except Exception as error:
        shown = (
            "the journal of the search" if storage is None else re.sub(r"//\S*@", "//...@", storage)
        )
        cause = (
            error.__cause__ if isinstance(error.__cause__, Exception) else error
        )  # Optuna's own words are general
        reason = re.sub(r"//\S*@", "//...@", first_line(cause).rstrip("."))
        cure = (
            "check the disk"
            if storage is None
            else "check the address, and that its driver is installed"
        )
        raise StorageError(
            f"{shown} cannot be used ({reason}); {cure}; finished runs are untouched"
        ) from error
