"""The labels of an audited run, written anew by what was found and what was decided by hand."""

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
from nearsay.doors.audit import file_names, read_doubt, table_bytes
from nearsay.errors import BAD_DATA, RunError
from nearsay.label_issues.corrections import read_corrections
from nearsay.training.checkpoints import COPY, open_run, write_whole
from nearsay.training.run_folder import read_experiment, read_labels
from nearsay.validation import check_number

RELABEL_ABOVE, DROP_BELOW = 0.5, 0.5


class Cleaned(NamedTuple):
    """What cleaning has made of the labels of a run."""

    given: Tensor  # (N,) the cleaned labels; −1 for those that were dropped
    relabeled: Tensor  # numbers of the examples that have another label now
    dropped: Tensor  # of those that have none any more
    review: Tensor  # of those that are suspicious and were left as they are
    files: tuple[Path, ...]
    root: (
        Path | None
    )  # the folder below which the paths of the manifest are; None where there is no manifest
    doubt: str | None = None  # why the audit is itself to be doubted
    absence: str = (
        ""  # why the data cannot be looked at, and nothing be trained on it by these labels
    )


def clean_run(
    folder: Path,
    *,
    relabel_above: float | None = None,
    drop_below: float | None = None,
    corrections: Path | None = None,
) -> Cleaned:
    """Write the labels of an audited run anew, for `--set relabeled=FOLDER/cleaned.npz`.

    Of the issues in `audit.csv`, those whose suggestion is at least as likely as `relabel_above` (0.5) get it; of the
    others those with a score below `drop_below` (0.5) lose their label; the rest is left to be reviewed. Where the
    audit doubts itself, all of them are, unless these numbers are given: suggestions of a network that has learned too
    little do more harm than good. A table of corrections
    (`index` and `label`, empty to drop it; the last row of an example counts, and one whose `decision` is skip does
    not) has the last word; by default that is `corrections.csv` in the folder, if there is one.

    Writes `cleaned.npz`, the lists `cleaned-relabel.csv`, `cleaned-drop.csv` and `cleaned-review.csv` and, where the
    examples are files, the manifest `cleaned.csv` of all splits; nothing else is changed.
    """
    for name, limit in (("relabel_above", relabel_above), ("drop_below", drop_below)):
        if limit is not None:
            check_number(name, limit, 0, 1)
    labels = read_labels(folder)
    with open_run(
        folder, cure=COPY
    ) as run:  # before the audit is read, which another command may be writing
        rows, doubt = _read_audit(folder / "audit.csv", labels), read_doubt(folder)
        if relabel_above is None:
            relabel_above = RELABEL_ABOVE if doubt is None else math.inf
        if drop_below is None:
            drop_below = DROP_BELOW if doubt is None else 0.0
        is_sure = rows.is_issue & (rows.probabilities >= relabel_above) & (rows.suggested >= 0)
        is_poor = rows.is_issue & ~is_sure & (rows.scores < drop_below)
        given = rows.suggested.where(is_sure, labels.given).masked_fill(is_poor, -1)
        decided = read_corrections(folder, corrections, labels)
        for index, label in decided.items():
            given[index] = label
        is_decided = torch.zeros_like(is_sure).index_fill(
            0, torch.tensor(list(decided), dtype=torch.int64), True
        )
        is_changed = given != labels.given
        lists = {
            "relabel": is_changed & (given >= 0),
            "drop": is_changed & (given < 0),
            "review": rows.is_issue & ~is_changed & ~is_decided,
        }
        learned = (folder / "labels.npz").read_bytes()
        contents = {"cleaned.npz": pack_relabeled(given, learned)}
        for name, is_listed in lists.items():
            contents[f"cleaned-{name}.csv"] = table_bytes(
                _listed(is_listed, given, labels, rows), ".csv"
            )
        manifest, absence = _manifest(folder, given, labels, recorded_digest(learned, "names"))
        if manifest is not None:
            contents["cleaned.csv"] = table_bytes(manifest.columns, ".csv")
        for name, content in contents.items():
            write_whole(run.path / name, content)
        if manifest is None:
            (run.path / "cleaned.csv").unlink(
                missing_ok=True
            )  # of an earlier cleaning, when the files were there
    relabeled, dropped, review = (is_listed.nonzero()[:, 0] for is_listed in lists.values())
    files = tuple(folder / name for name in contents)
    return Cleaned(
        given, relabeled, dropped, review, files, manifest and manifest.root, doubt, absence
    )


def folder_for(given: Tensor, run: Path) -> Path:
    """Where a run on these cleaned labels goes: beside the run they are of, and not where others were learned."""
    run = run if run.name not in ("", "..") else run.resolve()  # "." has no name
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


class _Rows(NamedTuple):
    """What `audit.csv` says of each example."""

    paths: list[str | None]
    suggested: Tensor  # (N,) −1 for nothing
    probabilities: Tensor  # (N,) of the suggestion; 0 for nothing
    scores: Tensor  # (N,) 1 for none
    is_issue: Tensor  # (N,) bool


def _read_audit(path: Path, labels: Labels) -> _Rows:
    """What the audit says of each example."""
    if not path.is_file():
        raise RunError(
            f"{path} is missing; audit the run first, with nearsay audit {path.parent}", BAD_DATA
        )
    cells = tables.read(path).columns
    names = (
        "index",
        "path",
        "given_label",
        "predicted_label",
        "predicted_probability",
        "label_score",
        "is_label_issue",
    )
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(labels.classes)}
    try:
        indices, paths, given, suggested, probabilities, scores, issues = (
            cells[name] for name in names
        )
        if indices != [
            str(index) for index in range(len(labels.given))
        ]:  # sorted by hand, it would speak of others
            raise ValueError(
                f"it has not one row for each of the {len(labels.given)} examples, in their order"
            )
        if [numbers.get(name, -1) for name in given] != labels.given.tolist():
            raise ValueError("it is of other labels")
        return _Rows(
            paths,
            torch.tensor([numbers.get(name, -1) for name in suggested]),
            torch.tensor(
                [tables.as_share(cell) or 0.0 for cell in probabilities], dtype=torch.float64
            ),
            torch.tensor(
                [1.0 if cell is None else tables.as_share(cell) for cell in scores],
                dtype=torch.float64,
            ),
            torch.tensor([tables.as_claim(cell) for cell in issues]),
        )
    except (KeyError, ValueError) as error:
        raise RunError(
            f"{path} does not fit the run ({error}); audit it again", BAD_DATA
        ) from error


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


class _Manifest(NamedTuple):
    columns: dict[str, list[Cell]]
    root: Path


def _manifest(
    folder: Path, given: Tensor, labels: Labels, names: str
) -> tuple[_Manifest | None, str]:
    """Paths, cleaned labels and splits of all files, below the root of the data; None, and why, where they are gone."""
    experiment = read_experiment(folder)
    files, absence = file_names(experiment, "train", len(given), names)
    if files is None:
        return None, absence
    columns: dict[str, list[Cell]] = {
        "path": list(files.names),
        "label": [labels.classes[number] if number >= 0 else None for number in given.tolist()],
        "split": ["train"] * len(files),
    }
    for split in ("validation", "test"):
        others, _ = file_names(experiment, split)
        if others is None or others.root != files.root:
            continue
        opened = experiment.data.open(split).labels
        columns["path"] += others.names
        columns["label"] += [
            opened.classes[number] if number >= 0 else None for number in opened.given.tolist()
        ]
        columns["split"] += [split] * len(others)
    return _Manifest(columns, files.root.absolute()), ""
