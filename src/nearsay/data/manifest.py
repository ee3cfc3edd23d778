"""Images listed in a table: a path and a label in each row, perhaps a split and a clean label.

Labels are the names of classes, exactly as they are written; an empty label means unlabeled.
"""

import os
import posixpath
import re
import stat
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nearsay.batch import DataInfo, Files, Labels, Split
from nearsay.data import tables
from nearsay.data.tables import Problems, Table
from nearsay.errors import NoSplit, TableError
from nearsay.validation import check_split, check_that

SPLITS = {
    None: "train",
    "train": "train",
    "val": "validation",
    "validation": "validation",
    "test": "test",
}
_CLEAN = ("clean", "clean_label")
_KNOWN = ("path", "label", "split", *_CLEAN)
# A path with a part that is empty, . or .., or a path of Windows.
_ODD_PATH = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|\\|^[A-Za-z]:/")
_NUMBER = re.compile(r"[+-]?[0-9]{1,300}(\.[0-9]{0,300})?([eE][+-]?[0-9]{1,4})?")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A CSV, TSV, JSON lines or Parquet file with the columns `path`, `label`, and perhaps more.

    The column `split` is train, validation (or val) or test; a row without a split is of train. The
    column `clean` has the true labels, for all rows of a split or for no row; a clean label that is
    never a label counts as outside the vocabulary. Other columns are kept for tables of results.

    Args:
        path: The file.
        root: The folder that the paths are below; None is the folder of the file.
        check_files: False finds missing files only when they are decoded.

    >>> Manifest(path="list.csv", root="photos").check_files
    True
    """

    path: str | Path
    root: str | Path | None = None
    check_files: bool = True

    def describe(self) -> DataInfo:
        """Its classes and rows, by the table; no image is looked for."""
        files, labels = replace(self, check_files=False).open("train")
        return DataInfo(len(labels.classes), None, len(files))

    def at(self, path: Path, split: str | None = None) -> "Manifest | None":
        """The table at another path; None if it is no table.

        It keeps the root if all images of the split are below it and none is beside the table.
        """
        if path.suffix.lower() not in tables.ENDINGS or not path.is_file():
            return None
        beside = Manifest(path=path)
        if self.root is None:
            return beside
        below = replace(beside, root=self.root)
        for name in [split] if split else ["test", "validation", "train"]:
            try:
                files = below.open(name).inputs
            except NoSplit:
                continue
            except (OSError, ValueError):
                return beside
            assert isinstance(files, Files)
            is_beside = any((path.parent / file).exists() for file in files.names)
            return beside if is_beside else below
        return beside

    def open(self, split: str) -> Split:
        """The rows of a split, in their order; TableError names every wrong line of any split."""
        table = self._read(_KNOWN)
        problems = Problems(table.path)
        root = table.path.parent if self.root is None else Path(self.root).expanduser()
        check_that(root.is_dir(), "root", "the folder that the paths are below", str(self.root))
        paths = _paths(table, problems)
        splits = _splits(table, problems)
        _check_duplicates(table, paths, splits, problems)
        clean_name = next((name for name in _CLEAN if name in table.columns), None)
        _check_labels(table, ["label", *([clean_name] if clean_name else [])], problems)
        classes = _classes(table, splits, problems)
        chosen = [row_split == split for row_split in splits]
        names = tuple(compress(paths, chosen))
        if self.check_files and not problems.total:
            _check_files(root, names, list(compress(table.lines, chosen)), problems)
        clean = _clean(table, clean_name, chosen, problems)
        problems.raise_any()
        if not splits:
            raise NoSplit(f"{table.path} must have a row for each image, got only the first line.")
        check_split(split, splits, table.path)
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(classes)}
        given = _numbers(compress(table.columns["label"], chosen), numbers)
        true = None if clean is None else _numbers(clean, numbers)
        return Split(Files(root, names), Labels(given=given, clean=true, classes=classes))

    def extra(self, split: str) -> dict[str, list[str | None]]:
        """The other columns of the file, for the rows of a split."""
        table = self._read(None)
        problems = Problems(table.path)
        chosen = [row_split == split for row_split in _splits(table, problems)]
        problems.raise_any()
        others = {}
        for name, cells in table.columns.items():
            if name not in _KNOWN:
                others[name] = list(compress(cells, chosen))
        return others

    def _read(self, columns: Sequence[str] | None) -> Table:
        if (path := Path(self.path).expanduser()).is_dir():
            raise TableError(f"{path} must be a table, got a folder. Use nearsay train folder.")
        table = tables.read(path, columns=columns)
        problems = Problems(table.path)
        header = ", ".join(map(repr, table.header))[:200]
        spelled = {name.strip().lower(): name for name in table.header}
        has_clean = any(name in table.header for name in _CLEAN)
        # A misspelled column is an error: rows of a split that is passed over would be learned.
        for name in _KNOWN:
            if name not in table.header and name in spelled and not (has_clean and name in _CLEAN):
                problems.add(
                    1, f"column {spelled[name]!r} must be written {name!r} to be read; rename it"
                )
            elif name not in table.header and name in ("path", "label"):
                problems.add(
                    1, f"there is no column {name!r}, only {header}; begin with a line path,label"
                )
        if all(name in table.header for name in _CLEAN):
            problems.add(
                1, f"there are both columns {_CLEAN[0]!r} and {_CLEAN[1]!r}; keep one of them"
            )
        problems.raise_any()
        return table


def _paths(table: Table, problems: Problems) -> list[str]:
    """Paths below the root, each written in one way only."""
    paths = []
    for line, path in zip(table.lines, table.columns["path"], strict=True):
        if path is None:
            problems.add(line, "the path is empty; name a file or remove the row")
            path = ""
        elif _ODD_PATH.search(path):
            shortest = posixpath.normpath(path)
            if "\\" in path:
                problems.add(line, f"path {path!r} has a backslash; write / between folders")
            elif path.startswith("/") or path[1:3] == ":/":
                problems.add(line, f"path {path!r} is absolute; write it relative to the root")
            elif shortest == ".." or shortest.startswith("../"):
                problems.add(
                    line,
                    f"path {path!r} leads out of the root; give train a root= that holds all files",
                )
            path = shortest
        paths.append(path)
    return paths


def _splits(table: Table, problems: Problems) -> list[str]:
    if "split" not in table.columns:
        return ["train"] * len(table.lines)
    for line, split in zip(table.lines, table.columns["split"], strict=True):
        if split not in SPLITS:
            problems.add(line, f"split {split!r} must be train, validation, val or test")
    return [SPLITS.get(split, "") for split in table.columns["split"]]


def _check_duplicates(
    table: Table, paths: list[str], splits: list[str], problems: Problems
) -> None:
    # Hashes first, because a set of a million strings takes far more memory.
    hashes = np.fromiter(map(hash, paths), np.int64, len(paths))
    ordered = np.sort(hashes)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return
    first: dict[str, int] = {}
    for row in np.flatnonzero(np.isin(hashes, again)).tolist():
        other = first.setdefault(paths[row], row)
        if other != row and paths[row]:
            leak = ""
            if splits[row] != splits[other]:
                leak = f", there for {splits[other]} and here for {splits[row]}"
            problems.add(
                table.lines[row],
                f"path {paths[row]!r} is also on line {table.lines[other]}{leak}; keep one",
            )


def _check_labels(table: Table, columns: Sequence[str], problems: Problems) -> None:
    """Refuse labels that differ only in spelling; a label is checked once and reported in every
    row.
    """
    reasons: dict[str | None, str] = {None: ""}
    alike: dict[object, tuple[str, int]] = {}
    for column in columns:
        for line, label in zip(table.lines, table.columns[column], strict=True):
            if label not in reasons and label is not None:
                meaning: object = unicodedata.normalize("NFC", label)
                if _NUMBER.fullmatch(label):
                    meaning = Decimal(label)
                other, other_line = alike.setdefault(meaning, (label, line))
                reasons[label] = ""
                if label != label.strip():
                    reasons[label] = "has spaces around it; remove them"
                elif meaning == -100:
                    reasons[label] = "is no class; leave it empty for unlabeled"
                elif other != label:
                    reasons[label] = (
                        f"looks like {other!r} on line {other_line}; write both in the same way"
                    )
            if reasons[label]:
                problems.add(line, f"{column} {label!r} {reasons[label]}")


def _classes(table: Table, splits: list[str], problems: Problems) -> tuple[str, ...]:
    """All labels; those of validation and test must be among those of train, if train has any."""
    labels = table.columns["label"]
    classes = {label for label in labels if label is not None}
    in_train = {label for label, split in zip(labels, splits, strict=True) if split == "train"}
    learned = in_train - {None}
    unknown = classes - learned if learned else set()
    for line, label, split in zip(table.lines, labels, splits, strict=True):
        if label in unknown:
            problems.add(
                line, f"label {label!r} is in {split} but never in train, where it is learned"
            )
            unknown.remove(label)
    return tuple(sorted(classes))


def _clean(
    table: Table, name: str | None, chosen: list[bool], problems: Problems
) -> list[str | None] | None:
    """The clean labels of the chosen rows; None if they have none."""
    if name is None:
        return None
    clean = list(compress(table.columns[name], chosen))
    if all(label is None for label in clean):
        return None
    for line, label in zip(compress(table.lines, chosen), clean, strict=True):
        if label is None:
            problems.add(
                line,
                f"{name} is empty, but not everywhere in this split; fill it in or leave it out",
            )
    return clean


def _check_files(
    root: Path, names: Sequence[str], lines: Sequence[int], problems: Problems
) -> None:
    inside = os.path.join(os.path.realpath(root), "")
    # Where each folder really is.
    targets: dict[str, str] = {}
    cure = "move the table there, or give nearsay train their root="
    for line, name in zip(lines, names, strict=True):
        folder, _, file = name.rpartition("/")
        if folder not in targets:
            targets[folder] = os.path.realpath(os.path.join(inside, folder))
        path = os.path.join(targets[folder], file)
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                path = os.path.realpath(path)
                mode = os.stat(path).st_mode
        except OSError as error:
            problems.add(
                line, f"path {name!r} names no file below {str(root)!r} ({error.strerror}); {cure}"
            )
            continue
        if not path.startswith(inside):
            problems.add(
                line,
                f"path {name!r} is a link to {path!r}, outside of {str(root)!r}; copy it there",
            )
        elif stat.S_ISDIR(mode):
            problems.add(line, f"path {name!r} is a folder; name a file")


def _numbers(names: Iterable[str | None], numbers: Mapping[str | None, int]) -> Tensor:
    """(N,) int64; −1 for None and for names that are no class."""
    return torch.from_numpy(np.fromiter((numbers.get(name, -1) for name in names), np.int64))
