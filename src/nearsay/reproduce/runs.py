"""The folder of runs that all tables and figures share."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nearsay import config
from nearsay.reproduce.cells import Cell
from nearsay.training.run_folder import is_whole, read_result

_PLACES = ("data.path", "init")  # fields that say where files are


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What is finished and what is wanted; each result is read once."""

    folder: Path
    only: str = "*"  # a pattern for the names of runs to train
    failed: dict[str, str] = field(default_factory=dict)  # name -> why
    _results: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: what JSON can hold

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """What a run came to, None if it is not finished; ConfigError if it is of another experiment."""
        if cell.run not in self._results:
            found = read_result(self.path(cell))
            if found is None:
                return None
            _check_same(self.path(cell), cell)
            if not is_whole(self.path(cell)):
                return None
            self._results[cell.run] = found
        return self._results[cell.run]

    def path(self, cell: Cell) -> Path:
        """The folder of a run, which may not be there yet."""
        return self.folder / cell.run

    def accuracy(self, cell: Cell, split: str, kind: str = "final") -> float | None:
        """A share, None if the run is not finished or was not judged on that split."""
        result = self.result(cell)
        found = None if result is None else result["accuracy"].get(split, {}).get(kind)
        return None if found is None else float(found)

    def validation(self, cell: Cell) -> float | None:
        """The accuracy on examples held out from training, by which values are chosen."""
        return self.accuracy(cell, "validation")

    def is_wanted(self, cell: Cell) -> bool:
        """Whether a run shall be trained if it is not finished."""
        return cell.run not in self.failed and fnmatchcase(cell.run, self.only)

    def is_settled(self, cell: Cell) -> bool:
        """Whether it is known what comes of a run: it is finished, or has failed."""
        return self.result(cell) is not None or cell.run in self.failed

    def finished(self, cells: Iterable[Cell]) -> list[Cell]:
        """The runs that are finished, each once."""
        return list({cell.run: cell for cell in cells if self.result(cell) is not None}.values())

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The runs that are wanted and not finished, each once."""
        return list(
            {
                cell.run: cell
                for cell in cells
                if self.result(cell) is None and self.is_wanted(cell)
            }.values()
        )


def _check_same(folder: Path, cell: Cell) -> None:
    """See that a finished run is of the experiment that its name promises.

    The recipe is called again with the paths of then, so that a table can be made where the data is not.
    """
    chosen = dict(each.split("=", 1) for each in cell.arguments)
    try:
        record = config.current_record(json.loads((folder / "experiment.json").read_bytes()))
        arguments = {**record["arguments"], **chosen, "seed": str(cell.seed)}
        called = {"recipe": cell.recipe, "arguments": arguments, "overrides": list(cell.overrides)}
        now = config.to_tree(config.from_origin(called).experiment)
        changed = config.differences(record["experiment"], now)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise config.ConfigError(
            f"{folder} cannot be used ({error}); move it away, and it is trained again"
        ) from error
    if changed := config.substantial(changed, _PLACES):
        raise config.ConfigError(
            f"{folder} holds another experiment ({'; '.join(changed[:5])}); move it away, and it is trained again"
        )
