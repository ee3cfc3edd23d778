"""Verbs about labels to distrust: audit and clean."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearsay.cli.options import Device, Json, Run, print_json
from nearsay.config import ConfigError
from nearsay.training.display import counted
from nearsay.training.progress import make_table, percent, print_table

if TYPE_CHECKING:
    from nearsay.label_issues.run_audit import RunAudit


class Tool(StrEnum):
    """Other tools that an audit can be handed to."""

    CLEANLAB = "cleanlab"
    FIFTYONE = "fiftyone"
    LABEL_STUDIO = "label-studio"


def audit(
    run: Run,
    k: Annotated[
        int, typer.Option("--k", help="Neighbors to ask about each label.", min=1, max=1000)
    ] = 20,
    show: Annotated[int, typer.Option("--show", help="Suspicious labels to print.", min=0)] = 10,
    parquet: Annotated[bool, typer.Option("--parquet", help="Write audit.parquet too.")] = False,
    spreadsheet: Annotated[
        bool,
        typer.Option(
            "--spreadsheet", help="Write audit-spreadsheet.csv too, where no cell can be a formula."
        ),
    ] = False,
    tools: Annotated[
        list[Tool] | None,
        typer.Option(
            "--for",
            help="Write what this tool reads, too; may be given several times.",
            metavar=f"[{'|'.join(Tool)}]",
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Draw report.html, a page of it all.")
    ] = True,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Rank the labels of a run by how much to distrust them.

    Takes seconds: it reads what training has kept of each example. Writes audit.csv (the lowest label_score is the most
    suspicious, with the neighbors as evidence), audit.json, and report.html, a page that opens offline.
    """
    from nearsay.doors.audit import audit_run  # noqa: PLC0415  # brings torch

    found = audit_run(
        run, k=k, device=device, parquet=parquet, spreadsheet=spreadsheet, report=report
    )
    if found.remark:
        print(f"note: no report: {found.remark}", file=sys.stderr)
    if found.absence:
        told = (
            "so names and pictures are left out, near-duplicates are those of the features, and the rest is from what "
            "training has kept: scores may differ from those of an audit beside its data"
        )
        print(f"note: the data is not as it was ({found.absence}), {told}.", file=sys.stderr)
    handed = _hand_over(run, found, tools or [])
    if as_json:
        print_json(found.summary)
        return
    _print_suspects(found, show)
    rate, summary = found.audit.noise_rate, found.summary
    told = f"about {percent(rate.estimate)} (95 % interval {percent(rate.low)} to {percent(rate.high)}) of all are"
    if rate.estimate != rate.estimate:
        told = "how many are is unknown, as none could be judged"
    seem = "seems" if summary["num_issues"] == 1 else "seem"
    print(
        f"{summary['num_issues']:,} of {counted(summary['num_labeled'], 'label')} {seem} wrong; {told}."
    )
    if summary["num_unreadable"]:
        print(
            f"Files that could not be read, so that their labels were not judged: {summary['num_unreadable']:,}."
        )
    if summary["doubt"]:
        print(f"note: {summary['doubt']}.", file=sys.stderr)
    print(f"The whole list is in {found.files[0]}.")
    if found.page is not None:
        print(f"To look at it, open {found.page} in a browser.")
    others = [
        path for path in found.files if path.name in ("audit.parquet", "audit-spreadsheet.csv")
    ]
    for line in [*(f"Wrote {path}" for path in others), *handed]:
        print(line)
    if not summary["num_issues"] and not (run / "corrections.csv").exists():
        return  # nothing to look at, and nothing that clean would change
    name = shlex.quote(str(run))
    print(
        f"Next: nearsay review {name} to decide by hand, nearsay clean {name} for labels to train on."
    )


def clean(
    run: Run,
    relabel_above: Annotated[
        float | None,
        typer.Option(
            "--relabel-above",
            help="Take a suggestion that is at least as likely as this; by default 0.5.",
        ),
    ] = None,
    drop_below: Annotated[
        float | None,
        typer.Option(
            "--drop-below",
            help="Take away a suspicious label whose score is below this; by default 0.5.",
        ),
    ] = None,
    corrections: Annotated[
        Path | None,
        typer.Option(
            "--corrections",
            help="A table of index and label, or the JSON export of Label Studio, that has the last word; by default "
            "corrections.csv in the run.",
            exists=True,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make new labels of an audit and of your decisions.

    Nothing of yours is changed: the new labels are in cleaned.npz and, for images, in the manifest cleaned.csv, with
    lists of what was relabeled, dropped or left to be reviewed. Where the audit doubts itself, only what you decided is
    changed, unless you give the numbers below.
    """
    for name, value in (("--relabel-above", relabel_above), ("--drop-below", drop_below)):
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{name} {value} must be a number from 0 to 1")
    from nearsay.config.commands import command_again  # noqa: PLC0415
    from nearsay.label_issues.cleaning import DROP_BELOW, RELABEL_ABOVE, clean_run, folder_for  # noqa: PLC0415  # brings torch
    from nearsay.training.run_folder import read_origin  # noqa: PLC0415

    if corrections is not None and corrections.suffix.lower() == ".json":
        from nearsay.integrations.label_tools import read_label_studio  # noqa: PLC0415  # brings torch

        corrections = read_label_studio(run, corrections)
    done = clean_run(
        run, relabel_above=relabel_above, drop_below=drop_below, corrections=corrections
    )
    counts = {name: len(getattr(done, name)) for name in ("relabeled", "dropped", "review")}
    if as_json:
        print_json({**counts, "files": [str(path) for path in done.files]})
        return
    relabeled = counted(counts["relabeled"], "label")
    print(
        f"{relabeled} relabeled, {counts['dropped']:,} dropped, {counts['review']:,} to be reviewed."
    )
    if done.doubt:
        limits = f"--relabel-above {RELABEL_ABOVE} --drop-below {DROP_BELOW}"
        told = f"; so only what you decided was changed; {limits} would change the rest too"
        print(
            f"note: {done.doubt}{told if relabel_above is None and drop_below is None else ''}.",
            file=sys.stderr,
        )
    if done.absence:
        told = "so there is no manifest of it; put it back before you train on the new labels"
        print(f"note: the data is not as it was ({done.absence}), {told}.", file=sys.stderr)
    if not counts["relabeled"] and not counts["dropped"]:
        decide = (
            f"; decide by hand with nearsay review {shlex.quote(str(run))}"
            if counts["review"]
            else ""
        )
        print(f"No label is another now, so there is nothing new to train on{decide}.")
        return
    if done.root is not None:
        words = ["nearsay", "train", "manifest", f"path={run / 'cleaned.csv'}", f"root={done.root}"]
        print(f"As a table for other settings: {shlex.join(words)}")
    again = command_again(
        read_origin(run), relabeled=run / "cleaned.npz", out=folder_for(done.given, run)
    )
    print(f"Train on them: {again}")


def _hand_over(run: Path, found: "RunAudit", tools: list[Tool]) -> list[str]:
    """Write for the tools, and tell what was written in a line each."""
    if not tools:
        return []
    from nearsay.integrations.label_tools import hand_over  # noqa: PLC0415  # brings torch

    done = hand_over(run, found, [tool.value for tool in tools])
    told = [f"Wrote {path}" for path in done.files]
    if done.root is not None and Tool.LABEL_STUDIO in tools:
        told.append(
            f"Label Studio shows the images if LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT is {done.root.parent}"
        )
        told.append(f"and {done.root} is a source storage of the project (Local Files).")
    return told


def _print_suspects(found: "RunAudit", num: int) -> None:
    """The most suspicious labels, by the names of their files where they have some."""
    columns = found.audit.to_columns(found.indices.tolist(), with_neighbors=False)
    who = "index"
    if found.paths is not None:
        who, columns = "path", {**columns, "path": list(found.paths)}
    shown = (who, "given_label", "predicted_label", "label_score")
    rows = [
        [_told(columns[name][row]) for name in shown] for row in found.audit.order()[:num].tolist()
    ]
    if rows:
        print_table(make_table([name.replace("_", " ") for name in shown], rows))


def _told(cell: object) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)
