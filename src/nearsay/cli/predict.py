"""The verb predict: label images or features with a trained run."""

import csv
import sys
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Device
from nearsay.errors import ConfigError
from nearsay.training.progress import counted


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, or an .onnx file of nearsay export.",
            metavar="RUN",
            exists=True,
            show_default=False,
        ),
    ],
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Images, folders of images, tables with a column path, or .npy, .npz, .parquet "
            "files of features.",
            metavar="PATH",
            exists=True,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A .csv, .jsonl or .parquet file. By default CSV on stdout."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Label images or features with a run or its ONNX file.

    The table has the columns path, label, probability and error. A file that cannot be read gets
    a row with an error. If all rows are errors, the exit code is 65.

    For example: nearsay predict runs/first new-photos/ --out labels.csv
    """
    from nearsay.data import tables  # noqa: PLC0415  # brings torch
    from nearsay.doors import predict as door  # noqa: PLC0415

    if out is not None:
        _check_out(out, paths)
    columns = door.predict(model, paths, device=device).to_columns()
    errors = [error for error in columns["error"] if error is not None]
    num = len(columns["path"])
    if out is None:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    else:
        tables.write(out, columns)
        wrong = f", {len(errors):,} of them with an error" if errors else ""
        print(f"Wrote {counted(num, 'row')}{wrong} to {out}.")
    # The table is there all the same: it says what is wrong with each file.
    if num == len(errors):
        raise ValueError(f"no example could be read. The first error: {errors[0]}")


def _check_out(out: Path, paths: list[Path]) -> None:
    from nearsay.data import tables  # noqa: PLC0415  # brings torch
    from nearsay.doors.predict import check_target  # noqa: PLC0415
    from nearsay.errors import CANNOT_CREATE, RunError  # noqa: PLC0415

    if out.suffix.lower() not in tables.ENDINGS:
        raise ConfigError(f"--out must end in one of {', '.join(tables.ENDINGS)}, got {out}.")
    # A link may lead to an input, so names are not compared.
    if out.exists() and any(out.samefile(path) for path in paths):
        raise ConfigError(f"--out {out} would replace an input. Choose another file.")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent} must be a folder. Make it first.", CANNOT_CREATE)
    check_target(out)
