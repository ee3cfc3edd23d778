"""The verb export: the network of a run for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Run


class Format(StrEnum):
    """What a network can be written as."""

    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"


def export(
    run: Run,
    format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.SAFETENSORS,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for the model and its card. By default export, in the run.",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Write the network of a run for other programs.

    ONNX and torch-export models take images as bytes and normalize them inside.

    For example: nearsay export runs/first --format onnx
    """
    from nearsay.integrations.export import export_run  # noqa: PLC0415  # brings torch

    path = export_run(run, out or run / "export", format=format.value)
    print(f"The model and its card are in {path.parent}: {path.name}, README.md.")
