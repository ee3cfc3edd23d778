"""The verb audit: find labels of a run that are likely wrong."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearsay.cli.options import Device, Json, Run, print_json
from nearsay.training.progress import counted, make_table, percent, print_table

if TYPE_CHECKING:  # brings torch
    from nearsay.label_issues.run_audit import RunAudit


class Tool(StrEnum):
    """Other tools that can read an audit."""

    CLEANLAB = "cleanlab"
    FIFTYONE = "fiftyone"
    LABEL_STUDIO = "label-studio"


def audit(
    run: Run,
    k: Annotated[
        int, typer.Option("--k", help="Neighbors to ask about each label.", min=1, max=1000)
    ] = 20,
    show: Annotated[int, typer.Option("--show", help="Suspicious labels to print.", min=0)] = 10,
    parquet: Annotated[bool, typer.Option("--parquet", help="Also write audit.parquet.")] = False,
    spreadsheet: Annotated[
        bool,
        typer.Option(
            "--spreadsheet",
            help="Also write audit-spreadsheet.csv, without cells that are formulas.",
        ),
    ] = False,
    tools: Annotated[
        list[Tool] | None,
        typer.Option(
            "--for",
            help="Also write files for this tool. May be repeated.",
            metavar=f"[{'|'.join(Tool)}]",
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Draw the page report.html.")
    ] = True,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find labels of a run that are likely wrong.

    This takes seconds, because it reads what training has kept of each example. Writes audit.csv
    (the lowest label_score is the most suspicious, with the neighbors as evidence), audit.json,
    and report.html, a page that opens offline.

    For example: nearsay audit runs/first --show 20
    """
    from nearsay.doors.audit import audit_run  # noqa: PLC0415  # brings torch

    audited = audit_run(
        run, k=k, device=device, parquet=parquet, spreadsheet=spreadsheet, report=report
    )
    if audited.remark:
        print(f"note: no report: {audited.remark}", file=sys.stderr)
    if audited.absence:
        print(
            f"note: the data is not as it was ({audited.absence}). Names and pictures are left "
            "out, near-duplicates come from the features, and scores may differ.",
            file=sys.stderr,
        )
    lines = _write_for_tools(run, audited, tools or [])
    if as_json:
        print_json(audited.summary)
        return
    _print_suspects(audited, show)
    _print_summary(audited)
    print(f"The whole list is in {audited.files[0]}.")
    if audited.page is not None:
        print(f"To look at it, open {audited.page} in a browser.")
    for path in audited.files:
        if path.name in ("audit.parquet", "audit-spreadsheet.csv"):
            print(f"Wrote {path}")
    for line in lines:
        print(line)
    # Without issues and decisions there is nothing to review or to clean.
    if audited.summary["num_issues"] or (run / "corrections.csv").exists():
        name = shlex.quote(str(run))
        print(f"Next: nearsay review {name} to decide by hand, nearsay clean {name} to fix labels.")


def _write_for_tools(run: Path, audited: "RunAudit", tools: list[Tool]) -> list[str]:
    """Write the files of the tools; returns a line about each."""
    if not tools:
        return []
    from nearsay.integrations.label_tools import hand_over  # noqa: PLC0415  # brings torch

    written = hand_over(run, audited, [tool.value for tool in tools])
    lines = [f"Wrote {path}" for path in written.files]
    if written.root is not None and Tool.LABEL_STUDIO in tools:
        lines.append(
            "Label Studio shows the images if LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT is "
            f"{written.root.parent}"
        )
        lines.append(f"and {written.root} is a source storage of the project (Local Files).")
    return lines


def _print_suspects(audited: "RunAudit", num: int) -> None:
    """The most suspicious labels, with the names of their files if they have some."""
    columns = audited.audit.to_columns(audited.indices.tolist(), with_neighbors=False)
    first = "index"
    if audited.paths is not None:
        first, columns = "path", {**columns, "path": list(audited.paths)}
    names = (first, "given_label", "predicted_label", "label_score")
    rows = []
    for row in audited.audit.order()[:num].tolist():
        *words, score = (columns[name][row] for name in names)
        rows.append([*map(str, words), f"{score:.3f}" if isinstance(score, float) else str(score)])
    print_table(make_table([name.replace("_", " ") for name in names], rows))


def _print_summary(audited: "RunAudit") -> None:
    rate, summary = audited.audit.noise_rate, audited.summary
    seem = "seems" if summary["num_issues"] == 1 else "seem"
    print(
        f"{summary['num_issues']:,} of {counted(summary['num_labeled'], 'label')} {seem} wrong.",
        end=" ",
    )
    if rate.estimate != rate.estimate:
        print("The noise rate is unknown, because no label could be judged.")
    else:
        interval = f"95 % interval {percent(rate.low)} to {percent(rate.high)}"
        print(f"The estimated noise rate is {percent(rate.estimate)} ({interval}).")
    if summary["num_unreadable"]:
        print(f"Unreadable files, which were not judged: {summary['num_unreadable']:,}.")
    if summary["doubt"]:
        print(f"note: {summary['doubt']}.", file=sys.stderr)
