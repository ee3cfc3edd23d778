"""The tables and figures of the paper, each as a list of runs and one renderer.

Importing this does not import torch, so that a command line can list `NAMES` at once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nearsay.config import ConfigError

if TYPE_CHECKING:
    from nearsay.reproduce.runs import Reproduced
    from nearsay.training.progress import Display

NAMES = ("baselines", "realistic", "cifar", "batch-size", "ablation", "confidence", "similarity")
"""What can be reproduced: four tables, then three figures."""

__all__ = ["NAMES", "reproduce"]


def reproduce(
    name: str,
    *,
    data: Path | Literal["toy"],
    trials: int | None = None,
    out: Path,
    only: str = "*",
    dry_run: bool = False,
    display: "Display | None" = None,
    tell: Callable[[str], None] | None = None,
) -> "Reproduced":
    """Train what a table or figure still lacks and write it into `out`; keep finished runs.

    Args:
        name: one of `NAMES`.
        data: the folder that holds the data sets, or "toy" for small stand-ins without files.
        trials: runs of each number, with the seeds 0, 1, ...; None is as many as the paper had.
        out: the folder for tables and figures; names share the runs in `out/runs`.
        only: a pattern, such as "*noise=0.4*", that the names of the runs to train have to match.
        dry_run: list the runs, and neither train nor write anything.
        display: what shows a run in progress.
        tell: is called with one line before each run.

    Raises:
        ValueError: for an unknown name, a pattern that matches no run, and data that is missing or
            incomplete, before anything is trained.
        RunError: if `out` cannot be written, before anything is trained.
    """
    if name not in NAMES:
        raise ConfigError(f"name must be one of {', '.join(NAMES)}, got {name!r}.")
    # These import torch, which the list of names does not need.
    from nearsay.reproduce import runs  # noqa: PLC0415
    from nearsay.validation import check_whole  # noqa: PLC0415

    if trials is not None:
        check_whole("trials", trials, 1)
    folder: Path | Literal["toy"] = "toy" if data == "toy" else Path(data).expanduser()
    return runs.reproduce(
        name,
        data=folder,
        trials=trials,
        out=out,
        only=only,
        dry_run=dry_run,
        display=display,
        tell=tell,
    )
