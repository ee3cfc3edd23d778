"""The verb propagate: spread the labels of a run over its neighbors."""

import math
import shlex
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Json, Run, print_json
from nearsay.errors import ConfigError
from nearsay.training.progress import make_table, percent, print_table


def propagate(
    run: Run,
    k: Annotated[int, typer.Option("--k", help="Neighbors of each example.", min=1)] = 50,
    mu: Annotated[
        float, typer.Option("--mu", help="Weight of the given labels against the neighbors.")
    ] = 0.02,
    out: Annotated[
        Path | None, typer.Option("--out", help="An .npz. By default propagated.npz in the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Spread the labels of a run over its neighbors.

    Writes the new labels to a file that nearsay train reads with --set labels_file=FILE.

    For example: nearsay propagate runs/first --k 20
    """
    if not 0 < mu < math.inf:
        raise ConfigError(f"--mu must be a positive number, got {mu}.")
    from nearsay.training.predict import propagate as task  # noqa: PLC0415  # brings torch

    report = task(run, k=k, mu=mu, out=out)
    if as_json:
        print_json(report)
        return
    rows = [
        ["examples", f"{report['num_examples']:,}"],
        ["labels changed", f"{report['num_changed']:,}"],
    ]
    # The accuracies are known only where the clean labels are.
    if report["accuracy_before"] is not None:
        rows.append(["correct before", percent(report["accuracy_before"])])
        rows.append(["correct after (transductive)", percent(report["accuracy_after"])])
    print_table(make_table(("label propagation", ""), rows))
    change = shlex.quote(f"labels_file={report['file']}")
    print(f"The labels are in {report['file']}. Train on them with --set {change}")
