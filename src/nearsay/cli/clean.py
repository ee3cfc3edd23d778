"""The verb clean: new labels from an audit and from decisions by hand."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearsay.cli.options import Json, Run, print_json
from nearsay.errors import ConfigError
from nearsay.training.progress import counted

if TYPE_CHECKING:  # brings torch
    from nearsay.label_issues.cleaning import Cleaned


def clean(
    run: Run,
    relabel_above: Annotated[
        float | None,
        typer.Option(
            "--relabel-above",
            help="Accept suggestions with at least this probability. By default 0.5.",
        ),
    ] = None,
    drop_below: Annotated[
        float | None,
        typer.Option(
            "--drop-below", help="Drop suspicious labels with a lower score. By default 0.5."
        ),
    ] = None,
    corrections: Annotated[
        Path | None,
        typer.Option(
            "--corrections",
            help="Decisions that have the last word: a table of index and label, or a JSON export "
            "of Label Studio. By default corrections.csv in the run.",
            exists=True,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make new labels from an audit and from your decisions.

    Your files are not changed. The new labels are in cleaned.npz and, for images, in the table
    cleaned.csv, with lists of what was relabeled, dropped, or left for review. If the audit itself
    is not reliable, only your decisions count, unless you set the limits below.

    For example: nearsay clean runs/first --relabel-above 0.8
    """
    for name, value in (("--relabel-above", relabel_above), ("--drop-below", drop_below)):
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{name} must be a number from 0 to 1, got {value}.")
    from nearsay.label_issues.cleaning import clean_run  # noqa: PLC0415  # brings torch

    # An export of Label Studio is first made a table of corrections in the run folder.
    if corrections is not None and corrections.suffix.lower() == ".json":
        from nearsay.integrations.label_tools import read_label_studio  # noqa: PLC0415

        corrections = read_label_studio(run, corrections)
    cleaned = clean_run(
        run, relabel_above=relabel_above, drop_below=drop_below, corrections=corrections
    )
    counts = {name: len(getattr(cleaned, name)) for name in ("relabeled", "dropped", "review")}
    if as_json:
        print_json({**counts, "files": [str(path) for path in cleaned.files]})
        return
    relabeled = counted(counts["relabeled"], "label")
    print(f"{relabeled} relabeled, {counts['dropped']:,} dropped, {counts['review']:,} for review.")
    _print_notes(cleaned, has_limits=relabel_above is not None or drop_below is not None)
    if counts["relabeled"] or counts["dropped"]:
        _print_commands(run, cleaned)
    else:
        print("No labels changed.")
        if counts["review"]:
            print(f"Next: nearsay review {shlex.quote(str(run))} to decide by hand.")


def _print_notes(cleaned: "Cleaned", *, has_limits: bool) -> None:
    from nearsay.label_issues.cleaning import DROP_BELOW, RELABEL_ABOVE  # noqa: PLC0415

    if cleaned.doubt:
        limits = f"--relabel-above {RELABEL_ABOVE} --drop-below {DROP_BELOW}"
        cure = "" if has_limits else f" Only your decisions were used; {limits} uses the rest too."
        print(f"note: {cleaned.doubt}.{cure}", file=sys.stderr)
    if cleaned.absence:
        print(
            f"note: the data is not as it was ({cleaned.absence}), so cleaned.csv was not written. "
            "Put the data back before you train on the new labels.",
            file=sys.stderr,
        )


def _print_commands(run: Path, cleaned: "Cleaned") -> None:
    """The commands that train on the new labels."""
    from nearsay.config.records import command_again  # noqa: PLC0415
    from nearsay.label_issues.cleaning import folder_for  # noqa: PLC0415
    from nearsay.training.run_folder import read_origin  # noqa: PLC0415

    if cleaned.root is not None:
        path, root = f"path={run / 'cleaned.csv'}", f"root={cleaned.root}"
        words = ["nearsay", "train", "manifest", path, root]
        print(f"As a table for other settings: {shlex.join(words)}")
    again = command_again(
        read_origin(run), labels_file=run / "cleaned.npz", out=folder_for(cleaned.given, run)
    )
    print(f"Train on them: {again}")
