"""The labels of a finished run, audited into a table of them all and a page that shows them."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from nearsay import metrics
from nearsay.batch import Files, Labels, Predictions, are_pictures
from nearsay.data import tables
from nearsay.data.images import decode, why_unreadable
from nearsay.data.labels_file import digest_names, recorded_digest, recorded_rows
from nearsay.data.tables import Cell
from nearsay.errors import BAD_DATA, ImageError, RunError, TableError, first_line
from nearsay.experiment import Experiment
from nearsay.files import load_sealed
from nearsay.label_issues import Audit, audit
from nearsay.label_issues.corrections import read_corrections
from nearsay.label_issues.duplicates import Thumbnails, shrink_each
from nearsay.training.checkpoints import COPY, open_run, write_whole
from nearsay.training.progress import percent
from nearsay.training.run_folder import read_experiment, read_labels, read_predictions
from nearsay.training.splits import open_train

RECALLS = (0.8, 0.9, 0.95)  # of the wrong labels, for which the summary says how many to review
DOUBTFUL = 0.4  # estimated share of wrong labels above which the network is to be doubted as well
MOST_CLASSES = (
    100  # of which audit.json holds the noise matrix: it grows by their square, to 99 MB for 3000
)
PAGE = "report.html"
_UNREADABLE = "unreadable"
_HELD_OUT = "held out"


class Audited(NamedTuple):
    """What an audit of a run has found and written; Any is the type of JSON."""

    audit: Audit  # of the examples that could be read, in the order of `indices`
    indices: Tensor  # (n,) their numbers in the data set
    summary: dict[str, Any]  # as in audit.json
    files: tuple[Path, ...]
    page: Path | None = None  # report.html
    remark: str = ""  # why there is no page, though one was wanted
    paths: tuple[str, ...] | None = None  # of the same examples, where they are files
    absence: str = ""  # why what the network saw could not be looked at


def audit_run(
    folder: Path,
    *,
    k: int = 20,
    device: str = "auto",
    parquet: bool = False,
    spreadsheet: bool = False,
    report: bool = True,
) -> Audited:
    """Audit the labels that a run has learned, and write `audit.csv`, `audit.json` and `report.html` into its folder.

    `parquet` writes `audit.parquet` as well, `spreadsheet` an `audit-spreadsheet.csv` in which no cell is a formula.
    The page needs an extra; without it the audit stands, and `remark` says what is missing. The same folder gives the
    same bytes, however often it is asked.
    """
    labels = read_labels(folder)
    experiment = read_experiment(folder)
    with open_run(folder, cure=COPY) as run:  # alone, and without what a killed one has left
        predictions = read_predictions(folder, labels)
        shown = metrics.aligned(labels, predictions)
        place = replace(experiment.machine, device=device).find_device()
        names = recorded_digest((folder / "labels.npz").read_bytes(), "names")
        inputs, absence = _open_inputs(experiment, "train", len(labels.given), names)
        found = audit(
            shown.given,
            probabilities=predictions.logits.double().softmax(dim=1),
            features=predictions.features.to(place),
            dynamics=_read_dynamics(folder, predictions.indices, len(labels.given)),
            classes=labels.classes,
            k=k,
            images=_pictures(inputs, predictions.indices),
        )
        files = inputs if isinstance(inputs, Files) else None
        columns = _columns(found, predictions.indices, labels, files, folder)
        summary = _summary(found, shown, k, columns["status"])
        summary["doubt"] = _doubt(found, predictions, columns["status"])
        contents = {"audit.csv": table_bytes(columns, ".csv")}
        if parquet:
            contents["audit.parquet"] = table_bytes(columns, ".parquet")
        if spreadsheet:
            contents["audit-spreadsheet.csv"] = table_bytes(columns, ".csv", for_spreadsheet=True)
        contents["audit.json"] = json.dumps(summary, indent=2, ensure_ascii=False).encode() + b"\n"
        remark = (
            _add_page(contents, folder, found, predictions, labels, inputs, summary)
            if report
            else ""
        )
        for name in sorted(
            contents, key=lambda name: name != "audit.json"
        ):  # no table without what doubts it
            write_whole(run.path / name, contents[name])
    page = folder / PAGE if PAGE in contents else None
    paths = (
        None
        if files is None
        else tuple(files.names[index] for index in predictions.indices.tolist())
    )
    written = tuple(folder / name for name in contents)
    return Audited(found, predictions.indices, summary, written, page, remark, paths, absence)


def file_names(
    experiment: Experiment, split: str, num: int | None = None, names: str = ""
) -> tuple[Files | None, str]:
    """The files of a split, None where its examples are no files or cannot be found any more, and why they cannot."""
    inputs, absence = _open_inputs(experiment, split, num, names)
    return inputs if isinstance(inputs, Files) else None, absence


def table_bytes(
    columns: Mapping[str, Sequence[Cell]], ending: str, *, for_spreadsheet: bool = False
) -> bytes:
    """A table as the content of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"table{ending}"
        tables.write(path, columns, for_spreadsheet=for_spreadsheet)
        return path.read_bytes()


def _open_inputs(
    experiment: Experiment, split: str, num: int | None, names: str
) -> tuple[Tensor | Files | None, str]:
    """What the network saw of a split; None, and why, where that is gone, not of `num` examples or of other names."""
    try:
        inputs = (
            open_train(experiment) if split == "train" else experiment.data.open(split)
        ).inputs
    except (OSError, ValueError, ImportError) as error:
        return None, first_line(error)
    if num not in (None, len(inputs)):
        return None, f"the run has learned {num:,} examples, and now there are {len(inputs):,}"
    if names and isinstance(inputs, Files) and names != digest_names(inputs):
        return None, "files were renamed, moved or replaced since the run was trained"
    return inputs, ""


def _pictures(inputs: Tensor | Files | None, indices: Tensor) -> Tensor | Thumbnails | None:
    """What the examples look like, to find near-duplicates; None for features and for files that are gone or broken."""
    if isinstance(inputs, Tensor):
        return (
            inputs[indices].expand(-1, 3, -1, -1) if are_pictures(inputs) else None
        )  # gray is all three colors alike
    if inputs is None or not len(indices):
        return None
    paths = [inputs.root / inputs.names[index] for index in indices.tolist()]
    try:
        return shrink_each(np.asarray(decode(path)) for path in paths)
    except (OSError, ImageError):
        return None


def _read_dynamics(folder: Path, indices: Tensor, num_examples: int) -> dict[str, Tensor] | None:
    """What training showed of these examples; None for a run that has not kept it."""
    path = folder / "dynamics.safetensors"
    if not path.is_file():
        return None
    try:
        tensors = load_sealed(path)
        if any(tensor.shape[:1] != (num_examples,) for tensor in tensors.values()):
            raise ValueError(f"it is not of {num_examples} examples")
        kept = {name: tensors[name][indices] for name in ("confidence", "margin", "count")}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RunError(
            f"{path} cannot be used ({error}); remove it to audit without it", BAD_DATA
        ) from error
    return kept if (kept["count"] > 0).any() else None


def _columns(
    found: Audit, indices: Tensor, labels: Labels, files: Files | None, folder: Path
) -> dict[str, list[Cell]]:
    """A row for every example of the data set, those that could not be read too."""
    numbers = indices.tolist()
    kept = found.to_columns(numbers)
    held_out = set(recorded_rows((folder / "labels.npz").read_bytes(), "validation").tolist())
    rows = dict(zip(numbers, zip(*kept.values(), strict=True), strict=True))
    columns: dict[str, list[Cell]] = {
        "index": [],
        "path": [],
        **{name: [] for name in kept if name != "index"},
    }
    columns["reason"] = []
    for index, given in enumerate(labels.given.tolist()):
        cells: dict[str, Cell] = dict.fromkeys(columns)
        if index in rows:
            cells.update(zip(kept, rows[index], strict=True))
            if index in held_out and cells["status"] == "ok":
                cells["status"] = _HELD_OUT
        else:
            name = labels.classes[given] if given >= 0 else None
            cells.update(index=index, given_label=name, is_label_issue=False, status=_UNREADABLE)
            cells["reason"] = None if files is None else why_unreadable(files, index) or None
        cells["path"] = None if files is None else files.names[index]
        for name, column in columns.items():
            column.append(cells[name])
    return columns


def _summary(found: Audit, shown: Labels, k: int, statuses: Sequence[Cell]) -> dict[str, Any]:
    """What `audit.json` holds; numbers that mean nothing, and a matrix of too many classes, are None."""
    groups = found.duplicate_groups
    is_labeled = found.given >= 0
    rate = {
        name: None if share != share else round(share, 6)
        for name, share in found.noise_rate._asdict().items()
    }
    shares = found.noise_matrix if len(found.classes) <= MOST_CLASSES else None
    matrix = (
        None if shares is None else [[round(share, 6) for share in row] for row in shares.tolist()]
    )
    return {
        "num_examples": len(statuses),
        "num_labeled": int(is_labeled.sum()),
        "num_unreadable": sum(status == _UNREADABLE for status in statuses),
        "num_issues": int(found.is_issue.sum()),
        "noise_rate": rate,
        "classes": list(found.classes),
        "noise_matrix": matrix,
        "most_confused": [pair._asdict() for pair in found.confused()],
        "review_for_recall": {f"{recall:g}": found.review_for(recall) for recall in RECALLS},
        "num_duplicate_groups": 0 if groups is None else int(groups.max()) + 1,
        "num_duplicates": 0 if groups is None else int((groups >= 0).sum()),
        "k": k,
        "neighbor_recall": found.neighbor_recall,
        "detection": _detection(found, shown),
    }


def read_doubt(folder: Path) -> str | None:
    """Why the audit of a run is itself to be doubted, as `audit.json` has it; None where it is not."""
    path = folder / "audit.json"
    try:
        doubt: str | None = json.loads(path.read_bytes())["doubt"]
        is_whole = isinstance(doubt, str | None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RunError(
            f"{path} is missing or damaged; audit the run again, with nearsay audit {folder}",
            BAD_DATA,
        )
    return doubt


def _doubt(found: Audit, predictions: Predictions, statuses: Sequence[Cell]) -> str | None:
    """What to beware of where so many labels seem wrong that it may rather be the network; None where they are few."""
    if not found.noise_rate.estimate > DOUBTFUL:
        return None
    is_held = torch.tensor(
        [statuses[index] == _HELD_OUT for index in predictions.indices.tolist()], dtype=torch.bool
    )
    is_held &= found.given >= 0
    agreed = (predictions.logits.argmax(dim=1) == found.given)[is_held]
    unseen = (
        f" (it agrees with {percent(agreed.double().mean().item())} of the held-out labels)"
        if len(agreed)
        else ""
    )
    return (
        f"that so many seem wrong may mean that the network has learned too little{unseen}; trust the order of the "
        "list more than its numbers, decide by hand, and train longer or from pretrained weights"
    )


def _detection(found: Audit, shown: Labels) -> dict[str, Any] | None:
    """How well each part and the whole find the labels that are known to be wrong; None where that is unknown."""
    if shown.clean is None:
        return None
    is_wrong = (shown.given != shown.clean) & (shown.given >= 0)
    if not is_wrong.any() or is_wrong[shown.given >= 0].all():
        return None
    return {
        name: {
            "auroc": round(metrics.detection_auroc(scores, is_wrong), 6),
            "average_precision": round(metrics.average_precision(scores, is_wrong), 6),
        }
        for name, scores in {"score": found.scores, **found.parts}.items()
        if not torch.isnan(scores).all()
    }


def _add_page(
    contents: dict[str, bytes],
    folder: Path,
    found: Audit,
    predictions: Predictions,
    labels: Labels,
    inputs: Tensor | Files | None,
    summary: Mapping[str, Any],
) -> str:
    """Draw the page; says why, in a sentence, if it cannot be drawn."""
    try:
        from nearsay.report.audited import render  # noqa: PLC0415  # drawing is an extra, and takes a second to import
        from nearsay.report.comparison import compare  # noqa: PLC0415
        from nearsay.report.findings import Findings  # noqa: PLC0415

        comparison = compare([folder])
    except (ImportError, ValueError) as error:
        return str(error)
    corrections, problem = _decided(folder, labels)
    shown = metrics.aligned(labels, predictions)
    given = labels.given.tolist()
    missing = sorted(set(range(len(given))) - set(predictions.indices.tolist()))
    findings = Findings(
        name=folder.resolve().name,
        audit=found,
        indices=predictions.indices,
        features=predictions.features,
        confidence=metrics.confidence(predictions.logits, shown.given),
        clean=shown.clean,
        inputs=inputs,
        unreadable={
            index: labels.classes[given[index]] if given[index] >= 0 else "" for index in missing
        },
        corrections=corrections,
        problem=problem,
        summary=summary,
        comparison=comparison,
    )
    contents[PAGE] = render(findings).encode()
    return ""


def _decided(folder: Path, labels: Labels) -> tuple[dict[int, int], str]:
    """What was decided by hand, or why that cannot be read: it is no reason not to show the audit."""
    try:
        return read_corrections(folder, None, labels), ""
    except TableError as error:
        return {}, str(error)
