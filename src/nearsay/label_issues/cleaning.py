"""New labels for an audited run, from what the audit suggests and what was decided by hand."""

import math
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay.batch import Labels
from nearsay.data import tables
from nearsay.data.labels_file import pack_relabeled, recorded_digest
from nearsay.data.tables import Cell
from nearsay.errors import BAD_DATA, RunError
from nearsay.label_issues.corrections import read_corrections
from nearsay.label_issues.run_audit import file_names, read_doubt, table_bytes
from nearsay.training.checkpoints import COPY, open_run, write_whole
from nearsay.training.run_folder import read_experiment, read_labels
from nearsay.validation import check_number

RELABEL_ABOVE, DROP_BELOW = 0.5, 0.5
_COLUMNS = (
    "index",
    "path",
    "given_label",
    "predicted_label",
    "predicted_probability",
    "label_score",
    "is_label_issue",
)


class Cleaned(NamedTuple):
    """The new labels of a run, and the files in which they were written."""

    given: Tensor  # (N,) the new labels; −1 for those that were dropped
    relabeled: Tensor  # numbers of the examples with another label
    dropped: Tensor  # numbers of the examples that lost their label
    review: Tensor  # numbers of the examples that are suspicious and kept their label
    files: tuple[Path, ...]
    root: Path | None  # the folder of the paths in the manifest; None without a manifest
    doubt: str | None = None  # why the audit itself is not reliable
    absence: str = ""  # why the data is not as it was, so that no manifest could be written


class _Rows(NamedTuple):
    """What `audit.csv` says of each example."""

    paths: list[str | None]
    suggested: Tensor  # (N,) −1 for nothing
    probabilities: Tensor  # (N,) of the suggestion; 0 for nothing
    scores: Tensor  # (N,) 1 for none
    is_issue: Tensor  # (N,) bool


class _Manifest(NamedTuple):
    columns: dict[str, list[Cell]]
    root: Path


def clean_run(
    folder: Path,
    *,
    relabel_above: float | None = None,
    drop_below: float | None = None,
    corrections: Path | None = None,
) -> Cleaned:
    """Write new labels for an audited run, which `--set labels_file=FOLDER/cleaned.npz` trains on.

    An issue of `audit.csv` gets its suggestion, or loses its label, or is left for review. If the
    audit itself is not reliable, all of them are left for review unless limits are given, because
    suggestions of a network that has learned too little do more harm than good.

    Writes `cleaned.npz`, the lists `cleaned-relabel.csv`, `cleaned-drop.csv` and
    `cleaned-review.csv` and, where the examples are files, the manifest `cleaned.csv` of all
    splits. Nothing else is changed.

    Args:
        folder: the folder of the run.
        relabel_above: accept suggestions with at least this probability; by default 0.5.
        drop_below: drop other issues with a lower score than this; by default 0.5.
        corrections: a table of `index` and `label` (empty to drop it) that has the last word; by
            default `corrections.csv` in the folder. The last row of an example counts; a row
            with the `decision` skip does not.
    """
    for name, limit in (("relabel_above", relabel_above), ("drop_below", drop_below)):
        if limit is not None:
            check_number(name, limit, 0, 1)
    labels = read_labels(folder)
    # The lock comes first: another command may be writing the audit.
    with open_run(folder, cure=COPY) as run:
        rows, doubt = _read_audit(folder / "audit.csv", labels), read_doubt(folder)
        if relabel_above is None:
            relabel_above = RELABEL_ABOVE if doubt is None else math.inf
        if drop_below is None:
            drop_below = DROP_BELOW if doubt is None else 0.0
        is_sure = rows.is_issue & (rows.probabilities >= relabel_above) & (rows.suggested >= 0)
        is_poor = rows.is_issue & ~is_sure & (rows.scores < drop_below)
        given = rows.suggested.where(is_sure, labels.given).masked_fill(is_poor, -1)
        # Decisions by hand have the last word.
        decisions = read_corrections(folder, corrections, labels)
        decided = torch.tensor(list(decisions), dtype=torch.int64)
        given[decided] = torch.tensor(list(decisions.values()), dtype=torch.int64)
        is_decided = torch.zeros_like(is_sure).index_fill(0, decided, True)
        is_changed = given != labels.given
        lists = {
            "relabel": is_changed & (given >= 0),
            "drop": is_changed & (given < 0),
            "review": rows.is_issue & ~is_changed & ~is_decided,
        }
        learned = (folder / "labels.npz").read_bytes()
        contents = {"cleaned.npz": pack_relabeled(given, learned)}
        for name, is_listed in lists.items():
            columns = _list_columns(is_listed, given, labels, rows)
            contents[f"cleaned-{name}.csv"] = table_bytes(columns, ".csv")
        manifest, absence = _manifest(folder, given, labels, recorded_digest(learned, "names"))
        if manifest is not None:
            contents["cleaned.csv"] = table_bytes(manifest.columns, ".csv")
        for name, content in contents.items():
            write_whole(run.path / name, content)
        if manifest is None:
            # One of an earlier cleaning, when the files were there, would hold old labels.
            (run.path / "cleaned.csv").unlink(missing_ok=True)
    relabeled, dropped, review = (is_listed.nonzero()[:, 0] for is_listed in lists.values())
    files = tuple(folder / name for name in contents)
    root = None if manifest is None else manifest.root
    return Cleaned(given, relabeled, dropped, review, files, root, doubt, absence)


def folder_for(given: Tensor, run: Path) -> Path:
    """The folder for a run on these new labels: beside the old run, and without a run on others."""
    # "." has no name.
    run = run if run.name not in ("", "..") else run.resolve()
    folder = run.with_name(f"{run.name}-cleaned")
    for number in count(2):
        if not folder.exists() or _has_learned(folder, given):
            break
        folder = run.with_name(f"{run.name}-cleaned-{number}")
    return folder


def _has_learned(folder: Path, given: Tensor) -> bool:
    try:
        return read_labels(folder).given.tolist() == given.tolist()
    except RunError:
        return False


def _read_audit(path: Path, labels: Labels) -> _Rows:
    """The audit of these labels; RunError if the table is missing, or is of other labels."""
    if not path.is_file():
        raise RunError(
            f"{path} is missing. Audit the run first with nearsay audit {path.parent}.", BAD_DATA
        )
    cells = tables.read(path).columns
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(labels.classes)}
    try:
        indices, paths, given, suggested, probabilities, scores, issues = (
            cells[name] for name in _COLUMNS
        )
        # A table that was sorted by hand would speak of other examples.
        if indices != [str(index) for index in range(len(labels.given))]:
            raise ValueError(
                f"it must have a row for each of the {len(labels.given)} examples, in their order"
            )
        if [numbers.get(name, -1) for name in given] != labels.given.tolist():
            raise ValueError("it is of other labels")
        shares = [tables.as_share(cell) or 0.0 for cell in probabilities]
        return _Rows(
            paths,
            torch.tensor([numbers.get(name, -1) for name in suggested]),
            torch.tensor(shares, dtype=torch.float64),
            torch.tensor([_read_score(cell) for cell in scores], dtype=torch.float64),
            torch.tensor([tables.as_claim(cell) for cell in issues]),
        )
    except (KeyError, ValueError) as error:
        raise RunError(
            f"{path} does not fit the run ({error}). Audit it again.", BAD_DATA
        ) from error


def _read_score(cell: str | None) -> float | None:
    return 1.0 if cell is None else tables.as_share(cell)


def _list_columns(
    is_listed: Tensor, given: Tensor, labels: Labels, rows: _Rows
) -> dict[str, list[Cell]]:
    """The listed examples: their old label, their new one, and the suggestion of the audit."""
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


def _manifest(
    folder: Path, given: Tensor, labels: Labels, names: str
) -> tuple[_Manifest | None, str]:
    """Paths, new labels and splits of all files; None and the reason where they are gone."""
    experiment = read_experiment(folder)
    files, absence = file_names(experiment, "train", len(given), names)
    if files is None:
        return None, absence
    columns: dict[str, list[Cell]] = {
        "path": list(files.names),
        "label": _names_of(given, labels.classes),
        "split": ["train"] * len(files),
    }
    for split in ("validation", "test"):
        others, _ = file_names(experiment, split)
        if others is None or others.root != files.root:
            continue
        opened = experiment.data.open(split).labels
        columns["path"] += others.names
        columns["label"] += _names_of(opened.given, opened.classes)
        columns["split"] += [split] * len(others)
    return _Manifest(columns, files.root.absolute()), ""


def _names_of(labels: Tensor, classes: tuple[str, ...]) -> list[Cell]:
    return [classes[number] if number >= 0 else None for number in labels.tolist()]
