"""The labels of a finished run: audited into a table of them all, and cleaned by what was found."""

import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from nearsay import config, metrics, tables
from nearsay.auditing import Audit, audit
from nearsay.core import Files, Labels, Predictions, check_number
from nearsay.experiment import Experiment
from nearsay.run import BAD_DATA, RunError, open_run, write_whole
from nearsay.tables import Cell
from nearsay.trained import read_labels, read_origin

RECALLS = (0.8, 0.9, 0.95)  # of the wrong labels, for which the summary says how many to review
SPLITS = ("train", "validation", "test")
_UNREADABLE = "unreadable"
_HELD_OUT = "held out"


class Audited(NamedTuple):
    """What an audit of a run has found and written; Any is the type of JSON."""

    audit: Audit  # of the examples that could be read, in the order of `indices`
    indices: Tensor  # (n,) their numbers in the data set
    summary: dict[str, Any]  # as in audit.json
    files: tuple[Path, ...]


def audit_run(
    folder: Path, *, k: int = 20, device: str = "auto", parquet: bool = False, spreadsheet: bool = False
) -> Audited:
    """Audit the labels that a run has learned, and write `audit.csv` and `audit.json` into its folder.

    `parquet` writes `audit.parquet` as well, `spreadsheet` an `audit-spreadsheet.csv` in which no cell is a formula.
    The same folder gives the same bytes, however often it is asked.
    """
    labels = read_labels(folder)
    experiment = _experiment(folder)
    predictions = _read_predictions(folder, len(labels.classes))
    shown = metrics.aligned(labels, predictions)
    place = config.override(experiment, f"machine.device={device}").machine.find_device()
    found = audit(
        shown.given,
        probabilities=predictions.logits.double().softmax(dim=1),
        features=predictions.features.to(place),
        dynamics=_read_dynamics(folder, predictions.indices, len(labels.given)),
        classes=labels.classes,
        k=k,
    )
    columns = _columns(found, predictions.indices, labels, file_names(experiment, "train", len(labels.given)), folder)
    summary = _summary(found, shown, k, columns["status"])
    contents = {"audit.csv": table_bytes(columns, ".csv")}
    if parquet:
        contents["audit.parquet"] = table_bytes(columns, ".parquet")
    if spreadsheet:
        contents["audit-spreadsheet.csv"] = table_bytes(columns, ".csv", for_spreadsheet=True)
    contents["audit.json"] = json.dumps(summary, indent=2, ensure_ascii=False).encode() + b"\n"
    with open_run(folder) as run:  # alone, and without what a killed one has left
        for name, content in contents.items():
            write_whole(run.path / name, content)
    return Audited(found, predictions.indices, summary, tuple(folder / name for name in contents))


class Cleaned(NamedTuple):
    """What cleaning has made of the labels of a run."""

    given: Tensor  # (N,) the cleaned labels; −1 for those that were dropped
    relabeled: Tensor  # numbers of the examples that have another label now
    dropped: Tensor  # of those that have none any more
    review: Tensor  # of those that are suspicious and were left as they are
    files: tuple[Path, ...]


def clean_run(
    folder: Path, *, relabel_above: float = 0.95, drop_below: float = 0.5, corrections: Path | None = None
) -> Cleaned:
    """Write the labels of an audited run anew, for `--set relabeled=FOLDER/cleaned.npz`.

    Of the issues in `audit.csv`, those whose suggestion is at least as likely as `relabel_above` get it; of the others
    those with a score below `drop_below` lose their label; the rest is left to be reviewed. A table of corrections
    (`index` and `label`, empty to drop it; the last row of an example counts, and one whose `decision` is skip does
    not) has the last word; by default that is `corrections.csv` in the folder, if there is one.

    Writes `cleaned.npz`, the lists `cleaned-relabel.csv`, `cleaned-drop.csv` and `cleaned-review.csv` and, where the
    examples are files, the manifest `cleaned.csv` of all splits; nothing else is changed.
    """
    check_number("relabel_above", relabel_above, 0, 1)
    check_number("drop_below", drop_below, 0, 1)
    labels = read_labels(folder)
    rows = _read_audit(folder / "audit.csv", labels)
    is_sure = rows.is_issue & (rows.probabilities >= relabel_above) & (rows.suggested >= 0)
    is_poor = rows.is_issue & ~is_sure & (rows.scores < drop_below)
    given = rows.suggested.where(is_sure, labels.given).masked_fill(is_poor, -1)
    decided = _read_corrections(folder, corrections, labels)
    for index, label in decided.items():
        given[index] = label
    is_decided = torch.zeros_like(is_sure).index_fill(0, torch.tensor(list(decided), dtype=torch.int64), True)
    is_changed = given != labels.given
    lists = {
        "relabel": is_changed & (given >= 0),
        "drop": is_changed & (given < 0),
        "review": rows.is_issue & ~is_changed & ~is_decided,
    }
    contents = {"cleaned.npz": _pack(given, labels.classes)}
    for name, is_listed in lists.items():
        contents[f"cleaned-{name}.csv"] = table_bytes(_listed(is_listed, given, labels, rows), ".csv")
    manifest = _manifest(folder, given, labels)
    if manifest is not None:
        contents["cleaned.csv"] = table_bytes(manifest, ".csv")
    with open_run(folder) as run:
        for name, content in contents.items():
            write_whole(run.path / name, content)
    chosen = [is_listed.nonzero()[:, 0] for is_listed in lists.values()]
    return Cleaned(given, chosen[0], chosen[1], chosen[2], tuple(folder / name for name in contents))


def file_names(experiment: Experiment, split: str, num: int | None = None) -> Files | None:
    """The files of a split, None where its examples are no files or cannot be found any more."""
    try:
        inputs = experiment.data.open(split).inputs
    except (OSError, ValueError, ImportError):
        return None
    return inputs if isinstance(inputs, Files) and num in (None, len(inputs)) else None


def table_bytes(columns: Mapping[str, Sequence[Cell]], ending: str, *, for_spreadsheet: bool = False) -> bytes:
    """A table as the content of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"table{ending}"
        tables.write(path, columns, for_spreadsheet=for_spreadsheet)
        return path.read_bytes()


def _experiment(folder: Path) -> Experiment:
    origin = read_origin(folder)
    if "recipe" not in origin:
        raise RunError(
            f"{folder} was trained from Python, not by a recipe; give its arrays to nearsay.auditing.audit", BAD_DATA
        )
    return config.from_origin(origin).experiment


def _read_predictions(folder: Path, num_classes: int) -> Predictions:
    """What the run has said of its training examples, in their order."""
    path = folder / "predictions" / "train.safetensors"
    try:
        tensors = safetensors.torch.load_file(path)
        seen = Predictions(tensors["features"], tensors["logits"], tensors["indices"])
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing; train the run to its end first", BAD_DATA) from error
    except (OSError, SafetensorError, KeyError) as error:
        raise RunError(f"{path} cannot be read ({error}); train again in another folder", BAD_DATA) from error
    if seen.logits.ndim != 2 or seen.logits.shape[1] != num_classes or not seen.logits.isfinite().all():
        shape = tuple(seen.logits.shape)
        raise RunError(f"{path} has logits {shape} where finite ones of {num_classes} classes should be", BAD_DATA)
    order = seen.indices.argsort()
    return Predictions(*(part[order] for part in seen))


def _read_dynamics(folder: Path, indices: Tensor, num_examples: int) -> dict[str, Tensor] | None:
    """What training showed of these examples; None for a run that has not kept it."""
    path = folder / "dynamics.safetensors"
    if not path.is_file():
        return None
    try:
        tensors = safetensors.torch.load_file(path)
        if any(len(tensor) != num_examples for tensor in tensors.values()):
            raise ValueError(f"it is not of {num_examples} examples")
        kept = {name: tensors[name][indices] for name in ("confidence", "margin", "count")}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"{path} cannot be used ({error}); remove it to audit without it", BAD_DATA) from error
    return kept if (kept["count"] > 0).any() else None


def _columns(found: Audit, indices: Tensor, labels: Labels, files: Files | None, folder: Path) -> dict[str, list[Cell]]:
    """A row for every example of the data set, those that could not be read too."""
    numbers = indices.tolist()
    kept = found.to_columns(numbers)
    with np.load(folder / "labels.npz", allow_pickle=False) as arrays:
        held_out = set(arrays["validation"].tolist()) if "validation" in arrays.files else set()
    rows = dict(zip(numbers, zip(*kept.values(), strict=True), strict=True))
    columns: dict[str, list[Cell]] = {"index": [], "path": [], **{name: [] for name in kept if name != "index"}}
    for index, given in enumerate(labels.given.tolist()):
        cells: dict[str, Cell] = dict.fromkeys(columns)
        if index in rows:
            cells.update(zip(kept, rows[index], strict=True))
            if index in held_out and cells["status"] == "ok":
                cells["status"] = _HELD_OUT
        else:
            name = labels.classes[given] if given >= 0 else None
            cells.update(index=index, given_label=name, is_label_issue=False, status=_UNREADABLE)
        cells["path"] = None if files is None else files.names[index]
        for name, column in columns.items():
            column.append(cells[name])
    return columns


def _summary(found: Audit, shown: Labels, k: int, statuses: Sequence[Cell]) -> dict[str, Any]:
    """What `audit.json` holds; numbers that mean nothing are None."""
    groups = found.duplicate_groups
    is_labeled = found.given >= 0
    rate = {name: None if share != share else round(share, 6) for name, share in found.noise_rate._asdict().items()}
    matrix = None if found.noise_matrix is None else [[round(c, 6) for c in row] for row in found.noise_matrix.tolist()]
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


class _Rows(NamedTuple):
    """What `audit.csv` says of each example."""

    paths: list[str | None]
    suggested: Tensor  # (N,) −1 for nothing
    probabilities: Tensor  # (N,) of the suggestion; 0 for nothing
    scores: Tensor  # (N,) 1 for none
    is_issue: Tensor  # (N,) bool


def _read_audit(path: Path, labels: Labels) -> _Rows:
    if not path.is_file():
        raise RunError(f"{path} is missing; audit the run first, with nearsay audit {path.parent}", BAD_DATA)
    cells = tables.read(path).columns
    names = ("path", "given_label", "predicted_label", "predicted_probability", "label_score", "is_label_issue")
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(labels.classes)}
    try:
        paths, given, suggested, probabilities, scores, issues = (cells[name] for name in names)
        if [numbers.get(name, -1) for name in given] != labels.given.tolist():
            raise ValueError("it is of other labels")
        return _Rows(
            paths,
            torch.tensor([numbers.get(name, -1) for name in suggested]),
            torch.tensor([float(cell or 0) for cell in probabilities], dtype=torch.float64),
            torch.tensor([1.0 if cell is None else float(cell) for cell in scores], dtype=torch.float64),
            torch.tensor([cell == "true" for cell in issues]),
        )
    except (KeyError, ValueError) as error:
        raise RunError(f"{path} does not fit the run ({error}); audit it again", BAD_DATA) from error


def _read_corrections(folder: Path, path: Path | None, labels: Labels) -> dict[int, int]:
    """What was decided by hand: the number of the label of each example, −1 to drop it."""
    if path is None:
        path = folder / "corrections.csv"
        if not path.is_file():
            return {}
    table = tables.read(path, columns=("index", "label", "decision"))
    problems = tables.Problems(table.path)
    if missing := [name for name in ("index", "label") if name not in table.columns]:
        problems.add(1, f"there is no column {missing[0]!r}; the first line must be like index,label")
        problems.raise_any()
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(labels.classes)}
    numbers[None] = -1
    decided: dict[int, int] = {}
    decisions = table.columns.get("decision", [None] * len(table.lines))
    rows = zip(table.lines, table.columns["index"], table.columns["label"], decisions, strict=True)
    for line, index, label, decision in rows:
        if index is None or not (index.isascii() and index.isdigit()) or int(index) >= len(labels.given):
            problems.add(line, f"index {index!r} is none of the {len(labels.given)} examples")
        elif label not in numbers:
            problems.add(line, f"label {label!r} is no class of the run; leave it empty to drop the label")
        elif decision == "skip":
            continue
        else:
            decided[int(index)] = numbers[label]
    problems.raise_any()
    return decided


def _pack(given: Tensor, classes: Sequence[str]) -> bytes:
    content = io.BytesIO()
    np.savez(content, given=given.numpy(), classes=np.array(classes, dtype=np.str_))
    return content.getvalue()


def _listed(is_listed: Tensor, given: Tensor, labels: Labels, rows: _Rows) -> dict[str, list[Cell]]:
    """The listed examples: what they were called, what they are now, and what the audit suggests."""
    chosen = is_listed.nonzero()[:, 0].tolist()
    names: dict[int, str | None] = {**dict(enumerate(labels.classes)), -1: None}
    old, new, suggested = (tensor.tolist() for tensor in (labels.given, given, rows.suggested))
    return {
        "index": list(chosen),
        "path": [rows.paths[row] for row in chosen],
        "given_label": [names[old[row]] for row in chosen],
        "label": [names[new[row]] for row in chosen],
        "predicted_label": [names[suggested[row]] for row in chosen],
        "label_score": [round(rows.scores[row].item(), 6) for row in chosen],
    }


def _manifest(folder: Path, given: Tensor, labels: Labels) -> dict[str, list[Cell]] | None:
    """Paths, cleaned labels and splits of all files, below the root of the data; None where there are no files."""
    experiment = _experiment(folder)
    files = file_names(experiment, "train", len(given))
    if files is None:
        return None
    columns: dict[str, list[Cell]] = {
        "path": list(files.names),
        "label": [labels.classes[number] if number >= 0 else None for number in given.tolist()],
        "split": ["train"] * len(files),
    }
    for split in SPLITS[1:]:
        others = file_names(experiment, split)
        if others is None or others.root != files.root:
            continue
        opened = experiment.data.open(split).labels
        columns["path"] += others.names
        columns["label"] += [opened.classes[number] if number >= 0 else None for number in opened.given.tolist()]
        columns["split"] += [split] * len(others)
    return columns
