"""From a name to files: train the runs that are missing, then write the table or figure from all that are finished."""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from nearsay import config
from nearsay.batch import Dataset, Files
from nearsay.data.webvision import missing_images, present
from nearsay.errors import CANNOT_CREATE, NoSplit, NotFinite, RunError
from nearsay.reproduce import ablation
from nearsay.reproduce.cells import Cell, Data, call
from nearsay.reproduce.plans import TABLES, plan
from nearsay.reproduce.printing import write_table
from nearsay.reproduce.runs import Runs
from nearsay.training.loop import train
from nearsay.training.progress import Display
from nearsay.training.system import one_thread


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What there is of a table or figure, and what is missing."""

    name: str
    done: tuple[str, ...]  # names of runs, which are those of their folders
    to_do: tuple[str, ...]
    failed: dict[str, str]  # name -> why
    num_later: int  # runs whose settings depend on the results of others
    hours: float | None  # that the runs to do will take, None if nothing like them was measured
    files: tuple[Path, ...]  # written

    def text(self) -> str:
        """All of it in lines."""
        hours = "time unmeasured" if self.hours is None else f"about {self.hours:.1f} hours"
        later = f", {self.num_later} more that depend on them" if self.num_later else ""
        first = f"{self.name}: runs: {len(self.done)} done, {len(self.to_do)} to do{later}"
        lines = [f"{first} ({hours})" if self.to_do else first]
        lines += [f"done    {run}" for run in self.done] + [f"to do   {run}" for run in self.to_do]
        lines += [f"failed  {run}: {reason}" for run, reason in self.failed.items()]
        return "\n".join([*lines, *(f"wrote   {path}" for path in self.files)])


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
    write = None if dry_run else _writer(name, trials)
    runs = Runs(folder=out / "runs", only=only)
    cells = _plan(name, data, trials, runs)
    _check_only(name, only, cells)
    is_first = True
    while write is not None and (missing := runs.missing(cells)):
        calls = [call(cell, data) for cell in missing]
        if is_first:  # later stages learn from the same data
            _check_data(each for called in calls for each in _sources(called))
            _check_place(runs.folder)
            is_first = False
        for number, (cell, called) in enumerate(zip(missing, calls, strict=True), start=1):
            if tell is not None:
                tell(f"{number}/{len(missing)}  {cell.run}")
            _train(called, cell, runs, data, display)
        cells = _plan(name, data, trials, runs)
    files = [] if write is None else write(cells, runs, out, data)
    return _told(name, cells, runs, trials, tuple(files))


def _writer(name: str, trials: int | None) -> Callable[[list[Cell], Runs, Path, Data], list[Path]]:
    """What writes the table or figure from finished runs; ImportError if drawing is not installed, before any run."""
    if name in TABLES:
        return partial(write_table, name)
    from nearsay.reproduce.drawing import write_ablation, write_panels  # noqa: PLC0415  # an extra, for figures alone

    if name == "ablation":
        return partial(write_ablation, trials or ablation.TRIALS)
    return partial(write_panels, name)


def _plan(name: str, data: Data, trials: int | None, runs: Runs) -> list[Cell]:
    return plan(name, data, trials, validation=runs.validation, is_settled=runs.is_settled)


def _train(
    called: config.Call, cell: Cell, runs: Runs, data: Data, display: Display | None
) -> None:
    try:
        with one_thread() if data == "toy" else nullcontext():
            train(called.experiment, runs.path(cell), origin=called.origin, display=display)
    except NotFinite as error:  # says something of the method, and nothing against the other runs
        runs.failed[cell.run] = str(error)


def _told(
    name: str, cells: list[Cell], runs: Runs, trials: int | None, files: tuple[Path, ...]
) -> Reproduced:
    missing = runs.missing(cells)
    later = 0
    if name == "ablation":
        for row in {
            cell.row for cell in missing
        }:  # a noise rate, whose later stages wait for these alone
            named = {cell.run for cell in cells if cell.row == row}
            later += ablation.NUM_POINTS * (trials or ablation.TRIALS) - len(named)
    return Reproduced(
        name=name,
        done=tuple(cell.run for cell in runs.finished(cells)),
        to_do=tuple(cell.run for cell in missing),
        failed=dict(runs.failed),
        num_later=later,
        hours=_hours(cells, missing, runs),
        files=files,
    )


def _hours(cells: list[Cell], missing: list[Cell], runs: Runs) -> float | None:
    """As long as finished runs of the same recipe and method took, or at least of the same recipe."""
    finished = [
        (cell, result["seconds"])
        for cell in runs.finished(cells)
        if (result := runs.result(cell)) is not None
    ]
    total = 0.0
    for cell in missing:
        alike = [(each, seconds) for each, seconds in finished if each.recipe == cell.recipe]
        closer = [(each, seconds) for each, seconds in alike if each.method == cell.method] or alike
        if not closer:
            return None
        total += sum(seconds for _, seconds in closer) / len(closer)
    return total / 3600


def _check_only(name: str, only: str, cells: list[Cell]) -> None:
    """See that a pattern means something; what it leaves out is not run, so a mistake in it would leave out all."""
    if not any(fnmatchcase(cell.run, only) for cell in cells):
        raise config.ConfigError(
            f"no run of {name} matches {only!r}; the names look like {cells[0].run}"
        )


def _check_place(folder: Path) -> None:
    """Make the folder of runs and write into it and the one above; RunError if that cannot be, before any run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            with tempfile.TemporaryFile(dir=each):
                pass
    except OSError as error:
        raise RunError(
            f"cannot write into {folder.parent}: {error.strerror}; choose another folder with --out",
            CANNOT_CREATE,
        ) from error


def _sources(called: config.Call) -> list[Dataset]:
    experiment = called.experiment
    return [experiment.data, *([] if experiment.second_test is None else [experiment.second_test])]


def _check_data(data: Iterable[Dataset]) -> None:
    """Open every data set that will be needed and see that its images are there; ValueError of the first that fails."""
    seen: list[Dataset] = []
    for each in data:
        if each in seen:
            continue
        seen.append(each)
        for split in ("train", "validation", "test"):
            try:
                inputs = each.open(split).inputs
            except NoSplit:
                continue
            if (
                isinstance(inputs, Files)
                and not (found := present(inputs.root, inputs.names)).all()
            ):
                raise missing_images(
                    inputs.root, inputs.names, found, "nothing was trained; copy them there first"
                )
