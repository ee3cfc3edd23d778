"""Verbs that read run folders: evaluate, predict, compare and export."""

import csv
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Device, Json, Run, print_json
from nearsay.config import ConfigError
from nearsay.training.progress import counted, make_table, print_table

_MOST_NAMED = 5  # files, in a note


class Split(StrEnum):
    """Parts of a data set."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"
    SECOND_TEST = "second_test"


def evaluate(
    run: Run,
    source: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Other data: a folder of class folders, a table of paths and labels, or features with labels.",
            exists=True,
        ),
    ] = None,
    split: Annotated[
        Split | None,
        typer.Option("--split", help="By default test, or validation if there is none."),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell how right and how sure a trained run is.

    Predictions that the run has kept are used, so that this takes seconds. Where the true labels of the training set
    are known, it also tells how well the run finds the wrong ones.
    """
    from nearsay.training import evaluate as command  # noqa: PLC0415  # brings torch

    report = command.evaluate(
        run, split=None if split is None else split.value, data=source, device=device
    )
    if names := report["unreadable"]:
        more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
        which = (
            "1 of the files was left out, as it"
            if len(names) == 1
            else f"{len(names):,} of the files were left out, as they"
        )
        print(
            f"note: {which} could not be read: {', '.join(names[:_MOST_NAMED])}{more}.",
            file=sys.stderr,
        )
    if report["labels_in_doubt"]:
        print(
            "note: judged by labels that may be wrong themselves; --data judges by others.",
            file=sys.stderr,
        )
    if as_json:
        print_json(report)
        return
    print_table(make_table(*command.evaluation_cells(report)))


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder that nearsay train has made, or an .onnx file of nearsay export.",
            metavar="RUN",
            exists=True,
            show_default=False,
        ),
    ],
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Images, folders of images, or .npy, .npz, .parquet files of features.",
            metavar="PATH",
            exists=True,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A .csv, .jsonl or .parquet file; by default CSV to stdout."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Label images or features with a run or its ONNX file.

    The table has the columns path, label, probability and error; what cannot be read is a row with an error. The exit
    code is 65 if that is all.
    """
    from nearsay.data import tables  # noqa: PLC0415  # brings torch
    from nearsay.doors import predict as command  # noqa: PLC0415
    from nearsay.errors import (  # noqa: PLC0415
        CANNOT_CREATE,
        RunError,
    )

    if out is not None and out.suffix.lower() not in tables.ENDINGS:
        raise ConfigError(f"--out {out} must end in one of {', '.join(tables.ENDINGS)}")
    if out is not None and out.exists() and any(out.samefile(path) for path in paths):
        raise ConfigError(f"--out {out} would replace what is to be read; choose another file")
    if out is not None and not out.parent.is_dir():
        raise RunError(
            f"cannot write {out}: {out.parent} is no folder; make it first", CANNOT_CREATE
        )
    if out is not None:
        command.check_target(out)
    columns = command.predict(model, paths, device=device)
    num, num_errors = len(columns["path"]), sum(error is not None for error in columns["error"])
    if out is None:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    else:
        tables.write(out, columns)
        told = (
            ""
            if not num_errors
            else " with an error"
            if num == 1
            else f", {num_errors:,} of them with an error,"
        )
        print(f"{counted(num, 'row')}{told} {'is' if num == 1 else 'are'} in {out}.")
    if num == num_errors:
        first = "" if num == 1 else f"the first of {num:,} errors: "
        raise ValueError(f"nothing was predicted: {first}{columns['error'][0]}")


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that nearsay train or nearsay sweep has made.", metavar="RUN", exists=True
        ),
    ],
    split: Annotated[
        Split | None,
        typer.Option(
            "--split",
            help="By default test, or validation where more runs have it; others are left out.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write curves and tables to this file too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put finished runs side by side, with means over seeds."""
    from nearsay.doors import compare as command  # noqa: PLC0415  # brings torch
    from nearsay.report.runs import OTHER_JUDGES, judges_differ  # noqa: PLC0415

    done = command.finished(runs)
    for folder, found in done.items():
        if not found:
            print(f"note: {folder} holds no finished run and is left out", file=sys.stderr)
    read = command.read_runs([folder for found in done.values() for folder in found])
    chosen = command.common_split(read) if split is None else split.value
    judged = command.judged_on(read, chosen)
    if split is None and judged:
        for run in read:
            if run not in judged:
                print(
                    f"note: {run.path} was not judged on {chosen} and is left out", file=sys.stderr
                )
        read = judged
    groups = command.compare(read, split=chosen)
    if judges_differ(read, chosen):
        print(f"note: {OTHER_JUDGES}", file=sys.stderr)
    if html is not None:
        from nearsay.report import write_report  # noqa: PLC0415  # drawing is an extra

        write_report([run.path for run in read], html, title="Runs compared", split=chosen)
    if as_json:
        print_json({"split": chosen, "groups": [command.as_tree(group) for group in groups]})
        return
    print_table(make_table(*command.comparison_cells(groups, chosen)))
    if html is not None:
        print(f"Curves are in {html}.")


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
            help="Folder for the model and its card; by default export, in the run.",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Write the network of a run for other programs.

    ONNX and torch-export take images as bytes and normalize them inside, so that this cannot be forgotten.
    """
    from nearsay.integrations.export import export_run  # noqa: PLC0415  # brings torch

    path = export_run(run, out or run / "export", format=format.value)
    print(f"The model is in {path}, with a card beside it.")
