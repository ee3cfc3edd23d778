"""From a name to files: train the runs that are missing, then write the table or figure."""

import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from nearsay import config
from nearsay.batch import Dataset, Files
from nearsay.data.webvision import missing_images, present
from nearsay.errors import CANNOT_CREATE, NoSplit, NotFinite, RunError
from nearsay.reproduce import plans
from nearsay.reproduce.plans import Cell, Data, call, plan
from nearsay.training.loop import train
from nearsay.training.progress import Display
from nearsay.training.run_folder import is_whole, read_result
from nearsay.training.system import one_thread

_PLACES = ("data.path", "init")  # fields that say where files are


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The folder of runs that all tables and figures share; each result is read once."""

    folder: Path
    only: str = "*"  # a pattern for the names of runs to train
    failed: dict[str, str] = field(default_factory=dict)  # name -> why
    _results: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: what JSON can hold

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a run, None if it is not finished; ConfigError for another experiment."""
        if cell.run not in self._results:
            result = read_result(self.path(cell))
            if result is None:
                return None
            # A folder of the same name may hold another experiment, or be incomplete.
            _check_same(self.path(cell), cell)
            if not is_whole(self.path(cell)):
                return None
            self._results[cell.run] = result
        return self._results[cell.run]

    def path(self, cell: Cell) -> Path:
        """The folder of a run, which may not be there yet."""
        return self.folder / cell.run

    def accuracy(self, cell: Cell, split: str, kind: str = "final") -> float | None:
        """A share, None if the run is not finished or was not evaluated on that split."""
        result = self.result(cell) or {"accuracy": {}}
        accuracy = result["accuracy"].get(split, {}).get(kind)
        return None if accuracy is None else float(accuracy)

    def validation(self, cell: Cell) -> float | None:
        """The accuracy on examples held out from training, by which values are chosen."""
        return self.accuracy(cell, "validation")

    def is_wanted(self, cell: Cell) -> bool:
        """Whether to train a run if it is not finished."""
        return cell.run not in self.failed and fnmatchcase(cell.run, self.only)

    def is_settled(self, cell: Cell) -> bool:
        """Whether a run is finished or has failed."""
        return self.result(cell) is not None or cell.run in self.failed

    def finished(self, cells: Iterable[Cell]) -> list[Cell]:
        """The runs that are finished, each once."""
        finished = {}
        for cell in cells:
            if self.result(cell) is not None:
                finished[cell.run] = cell
        return list(finished.values())

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The runs that are wanted and not finished, each once."""
        missing = {}
        for cell in cells:
            if self.result(cell) is None and self.is_wanted(cell):
                missing[cell.run] = cell
        return list(missing.values())


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What there is of a table or figure, and what is missing."""

    name: str
    done: tuple[str, ...]  # names of runs, which are those of their folders
    to_do: tuple[str, ...]
    failed: dict[str, str]  # name -> why
    num_later: int  # runs with settings that depend on the results of others
    hours: float | None  # that the runs to do will take, None if nothing like them was measured
    files: tuple[Path, ...]  # written

    def text(self) -> str:
        """All of it in lines."""
        hours = "time unmeasured" if self.hours is None else f"about {self.hours:.1f} hours"
        later = f", {self.num_later} more that depend on them" if self.num_later else ""
        first = f"{self.name}: runs: {len(self.done)} done, {len(self.to_do)} to do{later}"
        if self.to_do:
            first = f"{first} ({hours})"
        lines = [first]
        lines += map("done    {}".format, self.done)
        lines += map("to do   {}".format, self.to_do)
        lines += map("failed  {}: {}".format, self.failed, self.failed.values())
        lines += map("wrote   {}".format, self.files)
        return "\n".join(lines)


def reproduce(
    name: str,
    *,
    data: Data,
    trials: int | None,
    out: Path,
    only: str,
    dry_run: bool,
    display: Display | None,
    tell: Callable[[str], None] | None,
) -> Reproduced:
    """See `nearsay.reproduce.reproduce`."""
    # Without a writer nothing is trained or written.
    write = None if dry_run else _writer(name, trials)
    runs = Runs(folder=out / "runs", only=only)
    cells = _plan(name, data, trials, runs)
    _check_only(name, only, cells)
    is_first = True
    while write is not None and (missing := runs.missing(cells)):
        calls = [call(cell, data) for cell in missing]
        # Later stages learn from the same data, so one check is enough.
        if is_first:
            check_data(calls)
            _check_place(runs.folder)
            is_first = False
        for number, (cell, called) in enumerate(zip(missing, calls, strict=True), start=1):
            if tell is not None:
                tell(f"{number}/{len(missing)}  {cell.run}")
            _train(called, cell, runs, data, display)
        # New results may name the runs of a later stage.
        cells = _plan(name, data, trials, runs)
    files = () if write is None else tuple(write(cells, runs, out, data))
    missing = runs.missing(cells)
    return Reproduced(
        name=name,
        done=tuple(cell.run for cell in runs.finished(cells)),
        to_do=tuple(cell.run for cell in missing),
        failed=dict(runs.failed),
        num_later=_num_later(name, trials, cells, missing),
        hours=hours_to_do(cells, missing, runs),
        files=files,
    )


def check_data(calls: Iterable[config.Call]) -> None:
    """Open every data set that will be needed; ValueError if one or its images are missing."""
    opened: list[Dataset] = []
    for called in calls:
        for dataset in (called.experiment.data, called.experiment.second_test):
            if dataset is not None and dataset not in opened:
                opened.append(dataset)
                _check_images(dataset)


def hours_to_do(cells: list[Cell], missing: list[Cell], runs: Runs) -> float | None:
    """As long as finished runs of the same recipe and method took, or else of the same recipe."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for cell in runs.finished(cells):
        took = (runs.result(cell) or {})["seconds"]
        seconds.setdefault((cell.recipe,), []).append(took)
        seconds.setdefault((cell.recipe, cell.method), []).append(took)
    total = 0.0
    for cell in missing:
        alike = seconds.get((cell.recipe, cell.method)) or seconds.get((cell.recipe,))
        if alike is None:
            return None
        total += sum(alike) / len(alike)
    return total / 3600


def _writer(name: str, trials: int | None) -> Callable[[list[Cell], Runs, Path, Data], list[Path]]:
    """The function that writes the table or figure from finished runs.

    It is imported before any run, so that a missing extra is an ImportError at once.
    """
    from nearsay.reproduce import rendering  # noqa: PLC0415  # drawing is an extra

    if name in plans.TABLES:
        return partial(rendering.write_table, name)
    if name == "ablation":
        return partial(rendering.write_ablation, trials or plans.ABLATION_TRIALS)
    return partial(rendering.write_panels, name)


def _plan(name: str, data: Data, trials: int | None, runs: Runs) -> list[Cell]:
    return plan(name, data, trials, validation=runs.validation, is_settled=runs.is_settled)


def _train(
    called: config.Call, cell: Cell, runs: Runs, data: Data, display: Display | None
) -> None:
    try:
        with one_thread() if data == "toy" else nullcontext():
            train(called.experiment, runs.path(cell), origin=called.origin, display=display)
    except NotFinite as error:
        # This is a result of the method and no reason to stop the other runs.
        runs.failed[cell.run] = str(error)


def _num_later(name: str, trials: int | None, cells: list[Cell], missing: list[Cell]) -> int:
    """How many runs of the ablation cannot be named yet, because they wait for others."""
    if name != "ablation":
        return 0
    num_later = 0
    # A row is a noise rate: its later stages wait only for its own runs.
    for row in {cell.row for cell in missing}:
        known = {cell.run for cell in cells if cell.row == row}
        num_later += plans.NUM_POINTS * (trials or plans.ABLATION_TRIALS) - len(known)
    return num_later


def _check_only(name: str, only: str, cells: list[Cell]) -> None:
    """Refuse a pattern that matches nothing: a mistake in it would leave out every run."""
    if not any(fnmatchcase(cell.run, only) for cell in cells):
        raise config.ConfigError(
            f"only must match a run of {name}, got {only!r}. Names look like {cells[0].run}."
        )


def _check_place(folder: Path) -> None:
    """Make the folder of runs, and try to write into it and the one above."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder.parent, folder):
            with tempfile.TemporaryFile(dir=place):
                pass
    except OSError as error:
        raise RunError(
            f"cannot write into {folder.parent}: {error.strerror}. Choose another folder with "
            "--out.",
            CANNOT_CREATE,
        ) from error


def _check_images(dataset: Dataset) -> None:
    for split in ("train", "validation", "test"):
        try:
            inputs = dataset.open(split).inputs
        except NoSplit:
            continue
        if isinstance(inputs, Files):
            is_present = present(inputs.root, inputs.names)
            if not is_present.all():
                cure = "nothing was trained; copy them there first"
                raise missing_images(inputs.root, inputs.names, is_present, cure)


def _check_same(folder: Path, cell: Cell) -> None:
    """Check that a finished run is of the experiment that its name promises.

    The recipe is called again with the recorded paths, so that a table can be made on a machine
    without the data.
    """
    chosen = dict(pair.split("=", 1) for pair in cell.arguments)
    try:
        record = config.current_record(json.loads((folder / "experiment.json").read_bytes()))
        arguments = {**record["arguments"], **chosen, "seed": str(cell.seed)}
        called = {"recipe": cell.recipe, "arguments": arguments, "overrides": list(cell.overrides)}
        now = config.to_tree(config.from_origin(called).experiment)
        changed = config.differences(record["experiment"], now)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise config.ConfigError(
            f"{folder} cannot be used ({error}). Move it away to train it again."
        ) from error
    if changed := config.substantial(changed, _PLACES):
        fields = "; ".join(changed[:5])
        raise config.ConfigError(
            f"{folder} holds another experiment ({fields}). Move it away to train it again."
        )
