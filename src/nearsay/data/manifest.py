"""Images listed in a table: a path and a label in each row, if wanted with its split and its clean label.

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

SPLITS = {
    None: "train",
    "train": "train",
    "val": "validation",
    "validation": "validation",
    "test": "test",
}
_CLEAN = ("clean", "clean_label")
_KNOWN = ("path", "label", "split", *_CLEAN)
_ODD_PATH = re.compile(
    r"(?:^|/)\.{0,2}(?:/|$)|\\|^[A-Za-z]:/"
)  # with a part that is empty, . or .., or of Windows
_NUMBER = re.compile(r"[+-]?[0-9]{1,300}(\.[0-9]{0,300})?([eE][+-]?[0-9]{1,4})?")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A CSV, TSV, JSON lines or Parquet file with the columns `path`, `label` and, if wanted, `split` and `clean`.

    Paths are below `root`, by default the folder of the file. A row without a split is of train. Clean labels are
    given for all rows of a split or for none; one that no row has as its label counts as outside the vocabulary.
    `check_files=False` leaves missing files to be found when they are decoded.
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
        """The rows of a split, in their order; TableError names every line that is wrong, in whatever split."""
        table = self._read(_KNOWN)
        problems = Problems(table.path)
        root = table.path.parent if self.root is None else Path(self.root).expanduser()
        if not root.is_dir():
            raise ValueError(
                f"root={str(self.root)!r} is no folder; give the one that the paths are relative to"
            )
        paths = _paths(table, problems)
        splits = _splits(table, problems)
        _check_duplicates(table, paths, splits, problems)
        clean_name = next((name for name in _CLEAN if name in table.columns), None)
        _check_labels(table, ["label", *([clean_name] if clean_name else [])], problems)
        classes = _classes(table, splits, problems)
        chosen = [each == split for each in splits]
        names = tuple(compress(paths, chosen))
        if self.check_files and not problems.total:
            _check_files(root, names, list(compress(table.lines, chosen)), problems)
        clean = _clean(table, clean_name, chosen, problems)
        problems.raise_any()
        if not names:
            known = [each for each in dict.fromkeys(SPLITS.values()) if each in splits]
            if not known:
                raise NoSplit(
                    f"{table.path} has no rows below its first line; add one for each image"
                )
            raise NoSplit(f"split={split!r} is not in {table.path}; it has {' and '.join(known)}")
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(classes)}
        given = _numbers(compress(table.columns["label"], chosen), numbers)
        labels = Labels(
            given=given, clean=None if clean is None else _numbers(clean, numbers), classes=classes
        )
        return Split(Files(root, names), labels)

    def extra(self, split: str) -> dict[str, list[str | None]]:
        """The other columns of the file, for the rows of a split."""
        table = self._read(None)
        problems = Problems(table.path)
        chosen = [each == split for each in _splits(table, problems)]
        problems.raise_any()
        return {
            name: list(compress(cells, chosen))
            for name, cells in table.columns.items()
            if name not in _KNOWN
        }

    def _read(self, columns: Sequence[str] | None) -> Table:
        if (path := Path(self.path).expanduser()).is_dir():
            raise TableError(
                f"{path} is a folder, and no table; nearsay train folder reads folders of images"
            )
        table = tables.read(path, columns=columns)
        problems = Problems(table.path)
        found = ", ".join(map(repr, table.header))[:200]
        spelled = {name.strip().lower(): name for name in table.header}
        has_clean = any(name in table.header for name in _CLEAN)
        for name in _KNOWN:  # a split that is passed over would be learned
            if name not in table.header and name in spelled and not (has_clean and name in _CLEAN):
                problems.add(
                    1, f"column {spelled[name]!r} must be written {name!r} to be read; rename it"
                )
            elif name not in table.header and name in ("path", "label"):
                problems.add(
                    1,
                    f"there is no column {name!r}, only {found}; the first line must be like path,label",
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
            problems.add(line, f"split {split!r} is none of train, validation, val and test")
    return [SPLITS.get(split, "") for split in table.columns["split"]]


def _check_duplicates(
    table: Table, paths: list[str], splits: list[str], problems: Problems
) -> None:
    hashes = np.fromiter(
        map(hash, paths), np.int64, len(paths)
    )  # a set of a million strings is far larger
    ordered = np.sort(hashes)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    first: dict[str, int] = {}
    for row in np.flatnonzero(np.isin(hashes, again)).tolist() if len(again) else []:
        other = first.setdefault(paths[row], row)
        if other != row and paths[row]:
            leak = (
                ""
                if splits[row] == splits[other]
                else f", there for {splits[other]} and here for {splits[row]}"
            )
            problems.add(
                table.lines[row],
                f"path {paths[row]!r} is also on line {table.lines[other]}{leak}; keep one",
            )


def _check_labels(table: Table, columns: Sequence[str], problems: Problems) -> None:
    """Refuse labels that are not what they seem; a label is judged once and told of in every row."""
    reasons: dict[str | None, str] = {None: ""}
    alike: dict[object, tuple[str, int]] = {}
    for column in columns:
        for line, label in zip(table.lines, table.columns[column], strict=True):
            if label not in reasons and label is not None:
                meaning = (
                    Decimal(label)
                    if _NUMBER.fullmatch(label)
                    else unicodedata.normalize("NFC", label)
                )
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
    learned = {
        label
        for label, split in zip(labels, splits, strict=True)
        if split == "train" and label is not None
    }
    unknown = classes - learned if learned else set()
    for line, label, split in zip(table.lines, labels, splits, strict=True) if unknown else ():
        if label in unknown:
            problems.add(
                line,
                f"label {label!r} is in {split} but never in train, where it would have to be learned",
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
                f"{name} is empty, but not everywhere in this split; fill it in, or leave out the column",
            )
    return clean


def _check_files(
    root: Path, names: Sequence[str], lines: Sequence[int], problems: Problems
) -> None:
    inside = os.path.join(os.path.realpath(root), "")
    targets: dict[str, str] = {}  # of folders
    cure = "put the table there, or give nearsay train a root= if they lie elsewhere"
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
