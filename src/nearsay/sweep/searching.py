"""A search among ranges and lists by Optuna for the highest accuracy on held-out examples.

Its trials are recorded in a journal beside the runs, or in a database for many machines. A trial
that was interrupted is tried again with the same choices, and so goes on from its checkpoint.
"""

import math
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearsay.errors import LOCKED, USAGE, ConfigError, Stopped, StorageError, first_line
from nearsay.sweep.planning import Choice, Found, Outcome, Planned, Space, plan
from nearsay.sweep.running import run_each
from nearsay.training.progress import Display
from nearsay.training.run_folder import read_result

if TYPE_CHECKING:  # an extra
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

JOURNAL = "trials.journal"


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
    """Go on until there are `trials` trials in all, with those of earlier calls and machines.

    `storage` is the address of a database; without it a journal is written to the folder. The
    choices of a trial depend on its number and on the results so far. Failed trials count, and the
    best trial is the best after its last epoch.
    """
    if trials < 1:
        raise ConfigError(f"trials must be 1 or more, got {trials}.")
    with _quiet(), _opened_study(space, folder, storage) as study:
        with _explained(storage):
            _release_dead(study)
        outcomes: dict[str, Outcome] = {}
        # Trials by the name of the run that they wait for.
        waiting: dict[str, list[Trial]] = {}
        try:
            plans = _ask(study, space, trials, waiting, storage)
            for result in run_each(plans, folder, at_once=at_once, display=display):
                outcome = _require_accuracy(result)
                outcomes[outcome.name] = outcome
                # A run that another process is using has not failed: the next call tries it again.
                if outcome.code != LOCKED:
                    with _explained(storage):
                        for trial in waiting.pop(outcome.name):
                            _answer(study, trial, outcome)
                if tell is not None:
                    tell(outcome)
        except (Stopped, KeyboardInterrupt):
            with _explained(storage):
                _release_all(study, waiting)
            raise
        with _explained(storage):
            found = _collect(study, space, folder, outcomes)
            _release_all(study, waiting)
            return found


def _ask(
    study: "Study",
    space: Space,
    trials: int,
    waiting: "dict[str, list[Trial]]",
    storage: str | None,
) -> Iterator[Planned]:
    """Plans of new trials; a trial that draws the choices of a run in progress waits for it."""
    from optuna.samplers import TPESampler  # noqa: PLC0415  # an extra

    while True:
        with _explained(storage):
            if len(_counted(study)) >= trials:
                return
            trial = study.ask()
            trial.set_user_attr("process", _process())
            # Each trial has its own generator, so that a later call does not repeat the draws of
            # an earlier one, and two machines do not draw the same.
            study.sampler = TPESampler(seed=trial.number, multivariate=False, constant_liar=True)
            chosen = [(choice, _draw(trial, choice)) for choice in space.choices]
            try:
                planned = plan(space.recipe, chosen)
            except ConfigError as error:
                # Values that are right alone may not go together.
                _fail(study, trial, USAGE, str(error))
                continue
        others = waiting.setdefault(planned.name, [])
        others.append(trial)
        if len(others) == 1:
            yield planned


def _draw(trial: "Trial", choice: Choice) -> str:
    """A value of the choice, as text that is read as the very same value."""
    if not choice.is_open:
        return choice.texts[0]
    if choice.range is None:
        return str(trial.suggest_categorical(choice.label, choice.texts))
    low, high, log = choice.range.low, choice.range.high, choice.range.is_log
    if choice.range.is_whole:
        return str(trial.suggest_int(choice.label, int(low), int(high), log=log))
    return repr(trial.suggest_float(choice.label, low, high, log=log))


def _require_accuracy(outcome: Outcome) -> Outcome:
    """The outcome; a run without an accuracy to compare has failed."""
    if outcome.result is None or _accuracy(outcome.result) is not None:
        return outcome
    error = "the run has no accuracy on held-out examples. Try a larger held_out."
    return outcome._replace(result=None, code=USAGE, error=error)


def _accuracy(result: dict[str, Any]) -> float | None:
    validation = result["accuracy"].get("validation")
    if validation is None or not math.isfinite(validation["final"]):
        return None
    return float(validation["final"])


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
    trials = study.get_trials(deepcopy=False)
    replaced = {trial.user_attrs.get("replaces") for trial in trials}
    counted = []
    for trial in trials:
        if trial.state.name != "WAITING" and trial.number not in replaced:
            counted.append(trial)
    return counted


def _release(study: "Study", number: int, params: dict[str, Any]) -> None:
    """Let a trial be tried again with what it drew."""
    from optuna.trial import TrialState  # noqa: PLC0415  # an extra

    # The new trial comes first, so that a crash in between loses nothing.
    study.enqueue_trial(params, user_attrs={"replaces": number})
    study.tell(number, state=TrialState.FAIL)


def _release_all(study: "Study", waiting: "dict[str, list[Trial]]") -> None:
    for trials in waiting.values():
        for trial in trials:
            _release(study, trial.number, trial.params)


def _release_dead(study: "Study") -> None:
    """Release the trials that died with a process of this machine."""
    for trial in _counted(study):
        if trial.state.name == "RUNNING" and _is_dead(trial.user_attrs.get("process")):
            _release(study, trial.number, trial.params)


def _process() -> list[Any]:
    return [socket.gethostname(), os.getpid()]


def _is_dead(process: list[Any] | None) -> bool:
    """Whether a process of this machine is over; one that left no name is not known to be."""
    host, own = _process()
    if process is None or process[0] != host:
        return False
    # This process has only begun, so it is another one with the same number, as after the restart
    # of a container.
    if process[1] == own:
        return True
    try:
        os.kill(process[1], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _collect(study: "Study", space: Space, folder: Path, new: dict[str, Outcome]) -> Found:
    """The outcomes of all trials, of this call and of earlier ones, and the best of them."""
    outcomes: dict[str, Outcome] = {}
    num_elsewhere = 0
    done = []
    for trial in _counted(study):
        outcome = _recall(trial, space, folder, new)
        if outcome is not None:
            outcomes.setdefault(outcome.name, outcome)
        elif trial.state.name == "COMPLETE":
            num_elsewhere += 1
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "COMPLETE":
            done.append(trial)
    if not done:
        return Found(list(outcomes.values()), None, None, num_elsewhere)
    best = max(done, key=lambda trial: (trial.value or 0.0, -trial.number))
    return Found(list(outcomes.values()), _planned(best, space), best.value, num_elsewhere)


def _planned(trial: "FrozenTrial", space: Space) -> Planned:
    chosen = []
    for choice in space.choices:
        chosen.append((choice, _text(trial.params.get(choice.label, choice.texts[0]))))
    return plan(space.recipe, chosen)


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _recall(
    trial: "FrozenTrial", space: Space, folder: Path, new: dict[str, Outcome]
) -> Outcome | None:
    """The outcome of a trial, None if it is running, or its run is not here."""
    code, error = trial.user_attrs.get("code"), trial.user_attrs.get("error", "")
    try:
        name, _, words = _planned(trial, space)
    except ConfigError:
        name = f"trial-{trial.number}"
        return Outcome(name, (), folder / name, code=USAGE, error=error, is_new=False)
    if name in new:
        return new[name]
    if code is not None:
        return Outcome(name, words, folder / name, code=code, error=error, is_new=False)
    result = read_result(folder / name) if trial.state.name == "COMPLETE" else None
    if result is None:
        return None
    return Outcome(name, words, folder / name, result, is_new=False)


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
    """Turn an error of a database or its driver into one sentence without a password.

    Drivers raise errors of any type.
    """
    try:
        yield
    except Exception as error:
        place, cure = "the journal of the search", "Check the disk."
        if storage is not None:
            place = _without_password(storage)
            cure = "Check the address, and that its driver is installed."
        # The words of Optuna are general, and those of the driver behind them are not.
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        reason = _without_password(first_line(cause).rstrip("."))
        raise StorageError(
            f"{place} cannot be used ({reason}). {cure} Finished runs are untouched."
        ) from error


def _without_password(text: str) -> str:
    return re.sub(r"//\S*@", "//...@", text)
