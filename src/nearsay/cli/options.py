"""Options and arguments that several verbs share, and the printing of JSON."""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nearsay.config.calling import recipe_names


class Split(StrEnum):
    """Parts of a data set."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"
    SECOND_TEST = "second_test"


def _check_run(folder: Path) -> Path:
    """The folder, if it holds something of a run."""
    # A damaged run may lack one of them; the verb itself then says what is missing.
    if not any((folder / name).exists() for name in ("experiment.json", "labels.npz")):
        raise typer.BadParameter(
            f"{str(folder)!r} holds no run. Use a folder that nearsay train has made."
        )
    return folder


def _check_device(device: str | None) -> str | None:
    if device is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(f"must be auto, cpu, cuda or a number like cuda:1, got {device!r}")
    return device


Recipe = Annotated[
    str,
    typer.Argument(
        help="A name from nearsay recipes, or a .py file of your own.",
        metavar="RECIPE",
        autocompletion=recipe_names,
        show_default=False,
    ),
]
Run = Annotated[
    Path,
    typer.Argument(
        help="Folder of a run, made by nearsay train.",
        metavar="RUN",
        exists=True,
        file_okay=False,
        show_default=False,
        callback=_check_run,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.", callback=_check_device)
]
RecipeDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="auto, cpu, cuda or cuda:1. Same as --set machine.device=...",
        callback=_check_device,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def print_json(value: object) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False, default=str))
