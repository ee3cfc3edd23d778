"""The verbs data get and data check: fetch public data sets, and see whether one is complete."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Json, print_json
from nearsay.errors import BAD_DATA, ConfigError
from nearsay.training.progress import make_table, print_table

data = typer.Typer(
    help="Fetch public data sets, or check that one is complete.", rich_markup_mode=None
)


class Public(StrEnum):
    """Data sets that can be fetched."""

    CIFAR10 = "cifar10"
    CIFAR100 = "cifar100"


@data.command()
def get(
    name: Annotated[Public, typer.Argument(help="Which one.", metavar="NAME", show_default=False)],
    to: Annotated[Path, typer.Option("--to", help="Folder to unpack it in.", metavar="DIR")] = Path(
        "data"
    ),
) -> None:
    """Download a data set, check its hash and unpack it.

    For example: nearsay data get cifar10 --to data
    """
    from nearsay.data.cifar import fetch  # noqa: PLC0415  # brings torch

    print(f"Fetching {name.value} to {to} (about 170 MB, unless it is there) ...", file=sys.stderr)
    print(f"{name.value} is in {fetch(name.value, to)}.")


@data.command()
def check(
    name: Annotated[
        str,
        typer.Argument(
            help="Such as cifar10 or mini-imagenet-red. A wrong name lists all.", metavar="NAME"
        ),
    ],
    path: Annotated[Path, typer.Argument(help="The folder that holds it.", metavar="PATH")],
    as_json: Json = False,
) -> None:
    """Check which parts of a data set are there.

    Shows where to get the missing parts.

    For example: nearsay data check clothing1m data/clothing1m
    """
    from nearsay.data.inspect import NAMES  # noqa: PLC0415  # brings torch
    from nearsay.data.inspect import check as task  # noqa: PLC0415

    if name not in NAMES:
        raise ConfigError(f"NAME must be one of {', '.join(NAMES)}, got {name!r}.")
    findings = task(name, path)
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
    else:
        rows = []
        for part in findings:
            expected = "-" if part.expected is None else f"{part.expected:,}"
            rows.append([part.part, part.status, f"{part.found:,}", expected])
        print_table(make_table(("part", "status", "images", "expected"), rows))
    missing = [part for part in findings if part.status != "ok"]
    if not as_json:
        # Parts of one archive have the same message: it is printed once.
        for message in dict.fromkeys(part.message for part in missing):
            print(message)
    if missing:
        raise typer.Exit(BAD_DATA)
