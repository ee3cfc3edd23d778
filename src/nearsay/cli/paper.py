"""Verbs around the paper: its tables and figures, label propagation, and whether its data is whole."""

import math
import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Json, Quiet, Run, print_json
from nearsay.config import ConfigError
from nearsay.errors import BAD_DATA, INTERNAL
from nearsay.reproduce import NAMES
from nearsay.reproduce import reproduce as make
from nearsay.training.progress import make_display, make_table, percent, print_table


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(NAMES)}.", metavar="NAME", autocompletion=lambda: list(NAMES)
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Folder that holds the data sets, or toy for stand-ins that need no file.",
        ),
    ] = "data",
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", help="Seeds of each number; by default as many as the paper had.", min=1
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of the runs and of what is made; by default runs/paper, or runs/paper-toy.",
            metavar="DIR",
        ),
    ] = None,
    only: Annotated[
        str, typer.Option("--only", help="Train only runs whose names match, as *noise=0.4*.")
    ] = "*",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, and neither train nor write.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Make a table or figure of the paper, beside its own numbers.

    Trains what is still missing and writes the table (Markdown, LaTeX, CSV, HTML) or figure (PNG, SVG, HTML). Runs that
    are finished are not done again, and a number without a run reads "not run".

    For example: nearsay reproduce cifar --data toy --trials 1
    """
    target = out or Path("runs/paper-toy" if data == "toy" else "runs/paper")
    with closing(make_display(quiet=quiet or not sys.stderr.isatty())) as display:
        done = make(
            name,
            data="toy" if data == "toy" else Path(data),
            trials=trials,
            out=target,
            only=only,
            dry_run=dry_run,
            display=display,
            tell=None if quiet else lambda line: print(line, file=sys.stderr),
        )
    print(done.text())
    if done.failed:
        raise typer.Exit(INTERNAL)


def propagate(
    run: Run,
    k: Annotated[int, typer.Option("--k", help="Neighbors that each example names.", min=1)] = 50,
    mu: Annotated[
        float, typer.Option("--mu", help="Weight of the given labels against the neighbors.")
    ] = 0.02,
    out: Annotated[
        Path | None, typer.Option("--out", help="An .npz; by default propagated.npz in the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Spread the labels of a run over its neighbors.

    Writes the labels that come out, which nearsay train RECIPE --set relabeled=FILE learns.
    """
    if not 0 < mu < math.inf:
        raise ConfigError(f"--mu {mu} must be a positive number, such as 0.02")
    from nearsay.training.predict import propagate as command  # noqa: PLC0415  # brings torch

    report = command(run, k=k, mu=mu, out=out)
    if as_json:
        print_json(report)
        return
    rows = [
        ["examples", f"{report['num_examples']:,}"],
        ["labels changed", f"{report['num_changed']:,}"],
    ]
    if report["accuracy_before"] is not None:
        rows += [["right before", percent(report["accuracy_before"])]]
        rows += [["right now (transductive accuracy)", percent(report["accuracy_after"])]]
    print_table(make_table(("label propagation", ""), rows))
    change = shlex.quote(f"relabeled={report['file']}")
    print(f"The labels are in {report['file']}; learn them with --set {change}")


def check(
    name: Annotated[
        str,
        typer.Argument(
            help="Such as cifar10 or mini-imagenet-red; a wrong one lists all.", metavar="NAME"
        ),
    ],
    path: Annotated[Path, typer.Argument(help="The folder that holds it.", metavar="PATH")],
    as_json: Json = False,
) -> None:
    """Tell what of a data set is there and what is missing.

    Where something is missing, it also tells where to get it.
    """
    from nearsay.data.inspect import NAMES as KNOWN  # noqa: PLC0415  # brings torch
    from nearsay.data.inspect import check as command  # noqa: PLC0415

    if name not in KNOWN:
        raise ConfigError(f"there is no data set {name!r} to check; there are {', '.join(KNOWN)}")
    findings = command(name, path)
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
    else:
        rows = [
            [
                each.part,
                each.status,
                f"{each.found:,}",
                "-" if each.expected is None else f"{each.expected:,}",
            ]
            for each in findings
        ]
        print_table(make_table(("part", "status", "images", "expected"), rows))
        for told in dict.fromkeys(each.message for each in findings if each.status != "ok"):
            print(told)
    if any(each.status != "ok" for each in findings):
        raise typer.Exit(BAD_DATA)
