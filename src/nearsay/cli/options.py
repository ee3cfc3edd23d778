"""Options and arguments that several verbs share."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from nearsay.config import recipe_names


def _folder(help: str) -> Any:  # what typer takes for the description of an argument
    return typer.Argument(
        help=help, metavar="RUN", exists=True, file_okay=False, show_default=False, callback=_run
    )


def _run(folder: Path) -> Path:
    """The folder, if something of a run is in it."""
    if not any((folder / name).exists() for name in ("experiment.json", "labels.npz")):
        raise typer.BadParameter(
            f"{str(folder)!r} holds no run; give the folder that nearsay train has named"
        )
    return folder


def check_device(device: str | None) -> str | None:
    """The device, if it can be one."""
    if device is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(
            f"{device!r} must be auto, cpu, cuda, or one of several such as cuda:1"
        )
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
Run = Annotated[Path, _folder("Folder that nearsay train has made.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.", callback=check_device)
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder of the run; by default below runs/.", metavar="DIR"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def print_json(value: object) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False, default=str))
