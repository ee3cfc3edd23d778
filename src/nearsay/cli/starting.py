"""Verbs to start with, before a first training: recipes, data get, doctor and demo."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearsay.cli.options import Json, Quiet, print_json
from nearsay.config import recipe_names
from nearsay.training.progress import make_display, make_table, percent, print_table

if TYPE_CHECKING:  # these import torch
    from nearsay.doors.compare import Demonstrated


class Public(StrEnum):
    """Data sets that can be fetched."""

    CIFAR10 = "cifar10"
    CIFAR100 = "cifar100"


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Tell all about this one.", metavar="NAME", autocompletion=recipe_names
        ),
    ] = None,
) -> None:
    """List the recipes, or tell what one of them takes."""
    from nearsay.config import describe_recipe  # noqa: PLC0415  # as the others, though without torch

    if name is None:
        names = recipe_names()
        for each in map(describe_recipe, names):
            print(f"{each.name:<{max(map(len, names))}}  {each.summary}")
        print(
            "\nnearsay recipes NAME tells what one takes; nearsay train NAME KEY=VALUE... trains it."
        )
        return
    described = describe_recipe(name)
    taken = [
        f"{key}={default}" if default else f"{key}=..."
        for key, default in described.parameters.items()
    ]
    print(f"nearsay train {name} {' '.join(taken)}\n\n{described.docstring}")


def get(
    name: Annotated[Public, typer.Argument(help="Which one.", metavar="NAME", show_default=False)],
    to: Annotated[Path, typer.Option("--to", help="Folder to unpack it in.", metavar="DIR")] = Path(
        "data"
    ),
) -> None:
    """Download a data set, compare it with the original and unpack it."""
    from nearsay.data.cifar import fetch  # noqa: PLC0415  # brings torch

    print(f"Fetching {name.value} to {to} (about 170 MB, unless it is there) ...", file=sys.stderr)
    print(f"{name.value} is in {fetch(name.value, to)}.")


def doctor(as_json: Json = False) -> None:
    """Tell what is installed and what does not fit together."""
    from nearsay.cli.doctor_report import examine  # noqa: PLC0415  # brings torch

    findings = examine()
    problems = [f"{each.name} {each.problem}" for each in findings if each.problem]
    if as_json:
        print_json({"found": {each.name: each.value for each in findings}, "problems": problems})
        return
    print_table(make_table(("", ""), [(each.name, each.value) for each in findings]))
    print("\n".join(f"Problem: {problem}." for problem in problems) or "All fits together.")


def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the six runs.", metavar="DIR")
    ] = Path("runs/demo"),
    quiet: Quiet = False,
) -> None:
    """See what NCR does to noisy labels, on digits.

    Six short runs on the CPU or GPU: cross-entropy (standard) and NCR (ncr), three seeds each. Nothing is downloaded.
    """
    from nearsay.doors.compare import DEMO_TITLE, demo_cells, demonstrate  # noqa: PLC0415  # brings torch

    print(f"{DEMO_TITLE}: cross-entropy (standard) and NCR, three seeds each.", file=sys.stderr)
    runs: list[Demonstrated] = []
    with closing(make_display(quiet=quiet or not sys.stderr.isatty())) as display:
        for done in demonstrate(out, display=display):
            runs.append(done)
            if not quiet:
                accuracy = percent(done.result["accuracy"]["test"]["final"])
                print(
                    f"{done.number}/{done.total}  {done.method}, seed {done.seed}: {accuracy}",
                    file=sys.stderr,
                )
    print_table(make_table(*demo_cells(runs)))
    _print_report_of_demo(runs, out / "report.html", DEMO_TITLE)


def _print_report_of_demo(runs: "Sequence[Demonstrated]", target: Path, title: str) -> None:
    from nearsay.report import write_report  # noqa: PLC0415  # drawing is an extra

    try:
        print(
            f"Curves and more: {write_report([each.folder for each in runs], target, title=title)}"
        )
    except ImportError as error:
        print(f"note: no report: {error}", file=sys.stderr)
    name = shlex.quote(str(runs[-1].folder))
    print(f"Try next: nearsay audit {name} (which labels to distrust)")
    print(
        "          nearsay train folder path=photos/ (your images; nearsay recipes folder: what to add on a CPU)"
    )
    print("          nearsay recipes (other data: tables, embeddings, benchmarks)")
