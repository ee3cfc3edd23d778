"""The audit of a run, written into its folder: a table of all labels and a page that shows them."""

from dataclasses import replace
from pathlib import Path

from nearsay import metrics
from nearsay.batch import Labels
from nearsay.errors import TableError
from nearsay.label_issues.corrections import read_corrections
from nearsay.label_issues.run_audit import RunAudit, judge_run, pack_audit
from nearsay.training.checkpoints import COPY, open_run, write_whole
from nearsay.training.run_folder import read_labels

PAGE = "report.html"


def audit_run(
    folder: Path,
    *,
    k: int = 20,
    device: str = "auto",
    parquet: bool = False,
    spreadsheet: bool = False,
    report: bool = True,
) -> RunAudit:
    """Audit the labels of a run, and write the audit into its folder.

    Writes `audit.csv`, `audit.json` and, if the extra is installed, the page `report.html`. The
    same folder always gives the same bytes.

    Args:
        folder: the folder of a finished run.
        k: how many neighbors to ask about each label, at most 1000.
        device: where to search for neighbors: auto, cpu, cuda or cuda:1.
        parquet: write `audit.parquet` too.
        spreadsheet: write `audit-spreadsheet.csv` too, in which no cell is a formula.
        report: draw the page; if it cannot be drawn, `remark` of the result says why.
    """
    # A folder without a run is refused before `open_run` would make it.
    read_labels(folder)
    with open_run(folder, cure=COPY) as run:
        judged = judge_run(folder, k=k, device=device)
        contents = pack_audit(judged, parquet=parquet, spreadsheet=spreadsheet)
        page, remark = _draw_page(folder, judged) if report else (None, "")
        if page is not None:
            contents[PAGE] = page
        # The summary goes first: no table may be there without the warning that belongs to it.
        for name in sorted(contents, key=lambda name: name != "audit.json"):
            write_whole(run.path / name, contents[name])
    return replace(
        judged,
        files=tuple(folder / name for name in contents),
        page=None if page is None else folder / PAGE,
        remark=remark,
    )


def _draw_page(folder: Path, judged: RunAudit) -> tuple[bytes | None, str]:
    """The page, or None and why it cannot be drawn."""
    try:
        # Drawing needs an extra, and takes a second to import.
        from nearsay.report.audit_page import render  # noqa: PLC0415
        from nearsay.report.findings import Findings  # noqa: PLC0415
        from nearsay.report.runs import compare  # noqa: PLC0415

        comparison = compare([folder])
    except (ImportError, ValueError) as error:
        return None, str(error)
    labels, predictions = judged.labels, judged.predictions
    corrections, problem = _read_decisions(folder, labels)
    shown = metrics.aligned(labels, predictions)
    given = labels.given.tolist()
    missing = sorted(set(range(len(given))) - set(predictions.indices.tolist()))
    unreadable = {}
    for index in missing:
        unreadable[index] = labels.classes[given[index]] if given[index] >= 0 else ""
    findings = Findings(
        name=folder.resolve().name,
        audit=judged.audit,
        indices=predictions.indices,
        features=predictions.features,
        confidence=metrics.confidence(predictions.logits, shown.given),
        clean=shown.clean,
        inputs=judged.inputs,
        unreadable=unreadable,
        corrections=corrections,
        problem=problem,
        summary=judged.summary,
        comparison=comparison,
    )
    return render(findings).encode(), ""


def _read_decisions(folder: Path, labels: Labels) -> tuple[dict[int, int], str]:
    """The decisions made by hand, or why they cannot be read: the page shows the audit anyway."""
    try:
        return read_corrections(folder, None, labels), ""
    except TableError as error:
        return {}, str(error)
