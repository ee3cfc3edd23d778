"""Decisions that people made about labels: `corrections.csv` and tables like it.

A row holds the number of an example, a label (empty for none) and a decision. The last row of an
example counts. "skip" changes nothing, and "undo" cancels all rows of the example above it.
`read_corrections` reads a table once. `Corrections` also adds rows, and each row is on the disk
before the caller continues.
"""

import csv
import io
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nearsay.batch import Labels
from nearsay.data import tables
from nearsay.errors import BAD_DATA, IO_FAILED, ChangedFile, RunError, TableError
from nearsay.training.checkpoints import flush_folder

COUNTING = ("accept", "keep", "other", "drop")
# No word begins another, so half a word is never read as a whole one.
DECISIONS = (*COUNTING, "skip", "undo")
HEADER = ("index", "label", "decision")
_NUMBER = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Entry:
    """One row of a table of corrections."""

    index: int
    label: int  # class number, −1 for none
    decision: str


def read_corrections(folder: Path, path: Path | None, labels: Labels) -> dict[int, int]:
    """The corrected label of each example that has one, −1 for "no label".

    `path` is any table with the columns index and label; a column decision is optional. The default
    is `corrections.csv` in the folder of the run, which does not have to exist.
    """
    if path is None:
        path = folder / "corrections.csv"
        if not os.path.lexists(path):
            return {}
        _check_is_file(path)
        # A review that was killed before its first decision leaves an empty file.
        if not path.stat().st_size:
            return {}
    table = tables.read(path, columns=HEADER)
    corrected: dict[int, int] = {}
    for entry in _parse(table, _Known.of(labels), required=("index", "label")):
        if entry.decision == "undo":
            corrected.pop(entry.index, None)
        elif entry.decision != "skip":
            corrected[entry.index] = entry.label
    return corrected


class Corrections:
    """A `corrections.csv` that grows row by row. Only one process may hold it at a time."""

    def __init__(self, path: Path, labels: Labels) -> None:
        self.path = path
        self.classes = labels.classes
        self._known = _Known.of(labels)
        self.torn = ""  # the incomplete last row of a crashed process, now removed
        self._lock = threading.Lock()
        self._header: tuple[str, ...] = HEADER
        # Inode and size of the file as we know it; zeros if there is no file.
        self._stamp = (0, 0)
        self.entries: list[Entry] = self._read() if os.path.lexists(path) else []

    def append(self, *entries: Entry) -> None:
        """Add rows. When this returns, they are on the disk.

        If it raises RunError or ChangedFile, no row was added.
        """
        rows = b"".join(map(self._encode, entries))
        with self._lock:
            if self._stamp != _stamp(self.path):
                raise ChangedFile(
                    f"{self.path} was changed by another program during the review. "
                    "End the review and start it again to continue from the new file."
                )
            if not self._stamp[1]:
                rows = _row(self._header) + rows
            self._write(rows)
            self.entries.extend(entries)

    def _encode(self, entry: Entry) -> bytes:
        label = self.classes[entry.label] if entry.label >= 0 else ""
        cells = {"index": str(entry.index), "label": label, "decision": entry.decision}
        return _row([cells.get(name, "") for name in self._header])

    def _write(self, content: bytes) -> None:
        """Write all of the content at the end of the file, or nothing."""
        end = self._stamp[1]
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if os.write(file, content) < len(content):
                    raise OSError(0, "the disk is full")
                os.fsync(file)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file, end)
                    # The file may be new, so its inode is read again.
                    self._stamp = (os.fstat(file).st_ino, end)
                raise
            finally:
                os.close(file)
            # The name of a new file is an entry of its folder, which needs its own flush.
            if not end:
                flush_folder(self.path.parent)
        except OSError as error:
            raise RunError(
                f"cannot write {self.path}: {error.strerror}. All earlier decisions are kept.",
                IO_FAILED,
            ) from error
        self._stamp = _stamp(self.path)

    def _read(self) -> list[Entry]:
        _check_is_file(self.path)
        end, tail = self._heal()
        try:
            self._stamp = _stamp(self.path)
            if not self._stamp[1]:
                return []
            table = tables.read(self.path)
            self._header = table.header
            return _parse(table, self._known, required=HEADER)
        except TableError:
            # A file that we refuse stays as it was.
            if self.path.stat().st_size != end + len(tail):
                self._replace_end(tail, end)
            raise

    def _heal(self) -> tuple[int, bytes]:
        """Make the file end with a whole row, as a crash may leave half of one.

        If only the line break is missing, add it; otherwise remove the last line. Returns where the
        last row with a line break ended, and the bytes after it.
        """
        content = self.path.read_bytes()
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise RunError(f"{self.path} must be UTF-8, got UTF-16. Save it as UTF-8.", BAD_DATA)
        end = _end_of_whole_rows(content)
        tail = content[end:]
        # With more line breaks than a class name can hold, the tail is no row that we wrote.
        if not tail or tail.count(b"\n") > max(name.count("\n") for name in self.classes):
            return end, tail
        if self._is_row(tail, is_first=not end):
            self._replace_end(b"\n", len(content))
        elif end or _row(HEADER).startswith(tail):
            self.torn = tail.decode(errors="replace")
            self._replace_end(b"", end)
        return end, tail

    def _is_row(self, tail: bytes, *, is_first: bool) -> bool:
        try:
            (cells,) = csv.reader(io.StringIO(tail.decode(), newline=""), strict=True)
            if is_first:
                return set(HEADER) <= set(cells)
            header = next(csv.reader(self.path.read_text("utf-8-sig").splitlines()[:1]))
            cell = dict(zip(header, cells, strict=True))
            _entry(cell["index"], cell["label"] or None, None, self._known)
            return cell["decision"] in DECISIONS
        except (ValueError, KeyError, csv.Error):
            return False

    def _replace_end(self, content: bytes, start: int) -> None:
        with open(self.path, "r+b") as file:
            file.truncate(start)
            file.seek(start)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        raise TableError(f"{path} must be a regular file. Move it away.")


class _Known(NamedTuple):
    """The values that rows are checked against, as plain Python values for speed."""

    numbers: dict[str | None, int]  # of the classes by name; −1 for None
    given: list[int]  # (N,)

    @classmethod
    def of(cls, labels: Labels) -> "_Known":
        numbers: dict[str | None, int] = {
            name: number for number, name in enumerate(labels.classes)
        }
        return cls({**numbers, None: -1}, labels.given.tolist())


def _parse(table: tables.Table, known: _Known, *, required: Sequence[str]) -> list[Entry]:
    """All rows of the table; TableError lists those that are wrong."""
    problems = tables.Problems(table.path)
    for name in required:
        if name not in table.columns:
            problems.add(1, f"there is no column {name!r}; write {','.join(required)} in line 1")
            problems.raise_any()
    decisions = table.columns.get("decision", [None] * len(table.lines))
    rows = zip(table.lines, table.columns["index"], table.columns["label"], decisions, strict=True)
    entries = []
    for line, index, label, decision in rows:
        try:
            entries.append(_entry(index, label, decision, known))
        except ValueError as error:
            problems.add(line, str(error))
    problems.raise_any()
    return entries


def _entry(index: str | None, label: str | None, decision: str | None, known: _Known) -> Entry:
    """A row as a value. A row without a known decision was written by hand."""
    num_examples = len(known.given)
    if index is None or not _NUMBER.fullmatch(index) or int(index) >= num_examples:
        shown = None if index is None else index[:40]
        raise ValueError(f"index must be a number below {num_examples}, got {shown!r}")
    if label not in known.numbers:
        raise ValueError(
            f"label must be a class of the run, got {label!r}; leave it empty to drop the label"
        )
    number = known.numbers[label]
    if decision not in DECISIONS:
        if number == known.given[int(index)]:
            decision = "keep"
        else:
            decision = "drop" if number < 0 else "other"
    return Entry(int(index), number, decision)


def _row(cells: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _end_of_whole_rows(content: bytes) -> int:
    """Where the last complete row ends; a line break between quotes ends no row."""
    place = end = 0
    is_quoted = False
    for line in content.splitlines(keepends=True):
        place += len(line)
        is_quoted ^= line.count(b'"') % 2 == 1
        if not is_quoted and line.endswith((b"\n", b"\r")):
            end = place
    return end


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_ino, status.st_size
