"""The audit of a finished run: its labels, judged by what training has kept of each example."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from nearsay.errors import BAD_DATA, ImageError, RunError, first_line
from nearsay.experiment import Experiment
from nearsay.files import load_sealed
from nearsay.label_issues.audit import audit
from nearsay.label_issues.duplicates import Thumbnails, shrink_each
from nearsay.label_issues.result import Audit
from nearsay.training.progress import percent
from nearsay.training.run_folder import read_experiment, read_labels, read_predictions
from nearsay.training.splits import open_train

RECALLS = (0.8, 0.9, 0.95)
"""Shares of the wrong labels for which the summary says how many labels to review."""
DOUBTFUL = 0.4
"""An estimated noise rate above this may come from the network and not from the labels."""
MOST_CLASSES = 100
"""With more classes, audit.json has no noise matrix: its size grows with their square."""
_UNREADABLE = "unreadable"
_HELD_OUT = "held out"


@dataclass(frozen=True, kw_only=True, eq=False)
class RunAudit:
    """The audit of a run, and the files in which it was written.

    Attributes:
        audit: the audit of the n examples that could be read, in the order of `indices`.
        indices: (n,) numbers of these examples in the data set.
        summary: what `audit.json` holds; its values are JSON.
        columns: the table of all N examples of the data set, the unreadable ones included.
        labels: the N labels that the run has learned.
        predictions: features and logits of the n examples.
        inputs: what the network saw of the N examples; None where the data is gone.
        absence: why the data is not as it was when the run was trained; "" where it is.
        files: the files that were written.
        page: the page report.html, None where none was drawn.
        remark: why no page could be drawn, though one was wanted; "" otherwise.
    """

    audit: Audit
    indices: Tensor
    summary: dict[str, Any]
    columns: dict[str, list[Cell]]
    labels: Labels
    predictions: Predictions
    inputs: Tensor | Files | None
    absence: str = ""
    files: tuple[Path, ...] = ()
    page: Path | None = None
    remark: str = ""

    @property
    def paths(self) -> tuple[str, ...] | None:
        """The paths of the n audited examples, where they are files."""
        if not isinstance(self.inputs, Files):
            return None
        return tuple(self.inputs.names[index] for index in self.indices.tolist())


def judge_run(folder: Path, *, k: int = 20, device: str = "auto") -> RunAudit:
    """Audit the labels that a finished run has learned, without writing anything.

    Args:
        folder: the folder of the run.
        k: how many neighbors to ask about each label, at most 1000.
        device: where to search for neighbors: auto, cpu, cuda or cuda:1.
    """
    labels, experiment = read_labels(folder), read_experiment(folder)
    predictions = read_predictions(folder, labels)
    shown = metrics.aligned(labels, predictions)
    place = replace(experiment.machine, device=device).find_device()
    names = recorded_digest((folder / "labels.npz").read_bytes(), "names")
    inputs, absence = _open_inputs(experiment, "train", len(labels.given), names)
    judged = audit(
        shown.given,
        probabilities=predictions.logits.double().softmax(dim=1),
        features=predictions.features.to(place),
        dynamics=_read_dynamics(folder, predictions.indices, len(labels.given)),
        classes=labels.classes,
        k=k,
        images=_pictures(inputs, predictions.indices),
    )
    files = inputs if isinstance(inputs, Files) else None
    columns = _columns(judged, predictions.indices, labels, files, folder)
    summary = _summary(judged, shown, k, columns["status"])
    summary["doubt"] = _doubt(judged, predictions, columns["status"])
    return RunAudit(
        audit=judged,
        indices=predictions.indices,
        summary=summary,
        columns=columns,
        labels=labels,
        predictions=predictions,
        inputs=inputs,
        absence=absence,
    )


def pack_audit(
    judged: RunAudit, *, parquet: bool = False, spreadsheet: bool = False
) -> dict[str, bytes]:
    """The files of an audit by their names: audit.csv and audit.json, and further tables."""
    contents = {"audit.csv": table_bytes(judged.columns, ".csv")}
    if parquet:
        contents["audit.parquet"] = table_bytes(judged.columns, ".parquet")
    if spreadsheet:
        contents["audit-spreadsheet.csv"] = table_bytes(
            judged.columns, ".csv", for_spreadsheet=True
        )
    summary = json.dumps(judged.summary, indent=2, ensure_ascii=False)
    contents["audit.json"] = summary.encode() + b"\n"
    return contents


def file_names(
    experiment: Experiment, split: str, num: int | None = None, names: str = ""
) -> tuple[Files | None, str]:
    """The files of a split, and why they cannot be found; None where its examples are no files."""
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


def read_doubt(folder: Path) -> str | None:
    """Why the audit of a run is itself to be doubted, from `audit.json`; None where it is not."""
    path = folder / "audit.json"
    try:
        doubt: str | None = json.loads(path.read_bytes())["doubt"]
        is_whole = isinstance(doubt, str | None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RunError(
            f"{path} is missing or damaged. Audit the run again with nearsay audit {folder}.",
            BAD_DATA,
        )
    return doubt


def _open_inputs(
    experiment: Experiment, split: str, num: int | None, names: str
) -> tuple[Tensor | Files | None, str]:
    """What the network saw of a split; None and the reason where the data is not as it was."""
    try:
        if split == "train":
            inputs = open_train(experiment).inputs
        else:
            inputs = experiment.data.open(split).inputs
    except (OSError, ValueError, ImportError) as error:
        return None, first_line(error)
    if num not in (None, len(inputs)):
        return None, f"the run has learned {num:,} examples, and now there are {len(inputs):,}"
    if names and isinstance(inputs, Files) and names != digest_names(inputs):
        return None, "files were renamed, moved or replaced since the run was trained"
    return inputs, ""


def _pictures(inputs: Tensor | Files | None, indices: Tensor) -> Tensor | Thumbnails | None:
    """Images of the examples, to find near-duplicates; None for features and for missing files."""
    if isinstance(inputs, Tensor):
        if not are_pictures(inputs):
            return None
        # A gray image has three equal colors.
        return inputs[indices].expand(-1, 3, -1, -1)
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
            f"{path} cannot be used ({error}). Remove it to audit without it.", BAD_DATA
        ) from error
    return kept if (kept["count"] > 0).any() else None


def _columns(
    judged: Audit, indices: Tensor, labels: Labels, files: Files | None, folder: Path
) -> dict[str, list[Cell]]:
    """A row for every example of the data set, the unreadable ones included."""
    numbers = indices.tolist()
    kept = judged.to_columns(numbers)
    held_out = set(recorded_rows((folder / "labels.npz").read_bytes(), "validation").tolist())
    rows = dict(zip(numbers, zip(*kept.values(), strict=True), strict=True))
    columns: dict[str, list[Cell]] = {"index": [], "path": []}
    for name in (*kept, "reason"):
        columns.setdefault(name, [])
    for index, given in enumerate(labels.given.tolist()):
        cells: dict[str, Cell] = dict.fromkeys(columns)
        if index in rows:
            cells.update(zip(kept, rows[index], strict=True))
            if index in held_out and cells["status"] == "ok":
                cells["status"] = _HELD_OUT
        else:
            label = labels.classes[given] if given >= 0 else None
            cells.update(index=index, given_label=label, is_label_issue=False, status=_UNREADABLE)
            cells["reason"] = None if files is None else why_unreadable(files, index) or None
        cells["path"] = None if files is None else files.names[index]
        for name, column in columns.items():
            column.append(cells[name])
    return columns


def _summary(judged: Audit, shown: Labels, k: int, statuses: Sequence[Cell]) -> dict[str, Any]:
    """What `audit.json` holds; None stands for unknown numbers and for too large a matrix."""
    groups = judged.duplicate_groups
    matrix = None
    if judged.noise_matrix is not None and len(judged.classes) <= MOST_CLASSES:
        matrix = [[round(share, 6) for share in row] for row in judged.noise_matrix.tolist()]
    return {
        "num_examples": len(statuses),
        "num_labeled": int((judged.given >= 0).sum()),
        "num_unreadable": sum(status == _UNREADABLE for status in statuses),
        "num_issues": int(judged.is_issue.sum()),
        "noise_rate": {
            name: _rounded(share) for name, share in judged.noise_rate._asdict().items()
        },
        "classes": list(judged.classes),
        "noise_matrix": matrix,
        "most_confused": [pair._asdict() for pair in judged.confused()],
        "review_for_recall": {f"{recall:g}": judged.review_for(recall) for recall in RECALLS},
        "num_duplicate_groups": 0 if groups is None else int(groups.max()) + 1,
        "num_duplicates": 0 if groups is None else int((groups >= 0).sum()),
        "k": k,
        "neighbor_recall": judged.neighbor_recall,
        "detection": _detection(judged, shown),
    }


def _rounded(share: float) -> float | None:
    return None if share != share else round(share, 6)


def _doubt(judged: Audit, predictions: Predictions, statuses: Sequence[Cell]) -> str | None:
    """A warning where too many labels seem wrong to be true; None where they are few."""
    if not judged.noise_rate.estimate > DOUBTFUL:
        return None
    held_out = [statuses[index] == _HELD_OUT for index in predictions.indices.tolist()]
    is_judge = torch.tensor(held_out, dtype=torch.bool) & (judged.given >= 0)
    agrees = (predictions.logits.argmax(dim=1) == judged.given)[is_judge]
    agreement = ""
    if len(agrees):
        share = percent(agrees.double().mean().item())
        agreement = f" (it agrees with {share} of the held-out labels)"
    return (
        f"that so many seem wrong may mean that the network has learned too little{agreement}; "
        "trust the order of the list more than its numbers, decide by hand, and train longer or "
        "from pretrained weights"
    )


def _detection(judged: Audit, shown: Labels) -> dict[str, Any] | None:
    """How well each score finds the wrong labels; None where the clean ones are unknown."""
    if shown.clean is None:
        return None
    is_labeled = shown.given >= 0
    is_wrong = (shown.given != shown.clean) & is_labeled
    if not is_wrong.any() or is_wrong[is_labeled].all():
        return None
    detection = {}
    for name, scores in {"score": judged.scores, **judged.parts}.items():
        if not torch.isnan(scores).all():
            detection[name] = {
                "auroc": round(metrics.detection_auroc(scores, is_wrong), 6),
                "average_precision": round(metrics.average_precision(scores, is_wrong), 6),
            }
    return detection
