"""The file of decisions, `corrections.csv`: rows are only added, and each is on the disk before anybody hears of it.

A row is an example's number, a label (empty for none) and a decision. The last row of an example counts; one that says
skip changes nothing, and one that says undo takes back all that stands above it.
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

from nearsay.batch import Labels
from nearsay.data import tables
from nearsay.errors import BAD_DATA, IO_FAILED, ChangedFile, RunError, TableError
from nearsay.training.checkpoints import flush_folder

COUNTING = ("accept", "keep", "other", "drop")
DECISIONS = (
    *COUNTING,
    "skip",
    "undo",
)  # no word begins another, so that half a word is never taken for a whole one
HEADER = ("index", "label", "decision")


@dataclass(frozen=True)
class Entry:
    """A row of the file."""

    index: int
    label: int  # number of the class, −1 for none
    decision: str


class Corrections:
    """The decisions of a run, in the order in which they were made; one process at a time may hold them."""

    def __init__(self, path: Path, labels: Labels) -> None:
        self.path = path
        self.classes, self.given = labels.classes, labels.given.tolist()
        self.torn = ""  # half a row that a crash had left, now removed
        self._lock = threading.Lock()
        self._header: tuple[str, ...] = HEADER
        self._stamp = (0, 0)  # which file it is, and where it ends; zeros if there is none
        self.entries: list[Entry] = self._read() if os.path.lexists(path) else []

    def append(self, *entries: Entry) -> None:
        """More rows, on the disk when this returns; RunError or ChangedFile if they are not, and then none was."""
        rows = b"".join(map(self._written, entries))
        with self._lock:
            if self._stamp != _stamp(self.path):
                raise ChangedFile(
                    f"{self.path} was changed by something else since the review began; end the review and start it "
                    "again to go on with what is there now"
                )
            self._write(rows if self._stamp[1] else _row(self._header) + rows)
            self.entries.extend(entries)

    def _written(self, entry: Entry) -> bytes:
        cells = {
            "index": str(entry.index),
            "label": self.classes[entry.label] if entry.label >= 0 else "",
            "decision": entry.decision,
        }
        return _row([cells.get(name, "") for name in self._header])

    def _write(self, content: bytes) -> None:
        """All of it at the end of the file, or nothing."""
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
                    self._stamp = (os.fstat(file).st_ino, end)  # the file may be new
                raise
            finally:
                os.close(file)
            if not end:
                flush_folder(self.path.parent)
        except OSError as error:
            told = f"cannot write {self.path}: {error.strerror}; what was decided before is kept"
            raise RunError(told, IO_FAILED) from error
        self._stamp = _stamp(self.path)

    def _read(self) -> list[Entry]:
        if not self.path.is_file():
            raise RunError(f"{self.path} is no regular file; move it away", BAD_DATA)
        end, tail = self._heal()
        try:
            return self._parse()
        except (RunError, TableError):
            if self.path.stat().st_size != end + len(tail):
                self._mend(tail, end)  # what is refused is left as it was
            raise

    def _parse(self) -> list[Entry]:
        self._stamp = _stamp(self.path)
        if not self._stamp[1]:
            return []
        table = tables.read(self.path)
        self._header = table.header
        if missing := [name for name in HEADER if name not in table.header]:
            told = f"{self.path} has no column {missing[0]!r}; its first line must be like {','.join(HEADER)}"
            raise RunError(told, BAD_DATA)
        problems = tables.Problems(self.path)
        entries = []
        for line, *cells in zip(
            table.lines, *(table.columns[name] for name in HEADER), strict=True
        ):
            try:
                entries.append(self._entry(*cells))
            except ValueError as error:
                problems.add(line, str(error))
        problems.raise_any()
        return entries

    def _entry(self, index: str | None, label: str | None, decision: str | None) -> Entry:
        """A row as a value; ValueError says what is wrong with it. A row without a decision was written by hand."""
        if index is None or not re.fullmatch("[0-9]{1,18}", index) or int(index) >= len(self.given):
            told = None if index is None else index[:40]
            raise ValueError(f"index {told!r} is none of the {len(self.given)} examples")
        if label is not None and label not in self.classes:
            raise ValueError(
                f"label {label!r} is no class of the run; leave it empty to drop the label"
            )
        number = -1 if label is None else self.classes.index(label)
        if decision not in DECISIONS:
            decision = (
                "keep" if number == self.given[int(index)] else "drop" if number < 0 else "other"
            )
        return Entry(int(index), number, decision)

    def _heal(self) -> tuple[int, bytes]:
        """End the file with a whole row: complete the last line if only its end is missing, else cut it off.

        Returns where the last row that had an end ended, and what was behind it.
        """
        content = self.path.read_bytes()
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise RunError(
                f"{self.path} is UTF-16, to which no row can be added; save it as UTF-8", BAD_DATA
            )
        whole = _whole(content)
        tail = content[whole:]
        if not tail or tail.count(b"\n") > max(name.count("\n") for name in self.classes):
            return whole, tail  # what else is wrong with it is told by who reads it
        if self._is_row(tail, is_first=not whole):
            self._mend(b"\n", len(content))
        elif whole or _row(HEADER).startswith(tail):
            self.torn = tail.decode(errors="replace")
            self._mend(b"", whole)
        return whole, tail

    def _is_row(self, tail: bytes, *, is_first: bool) -> bool:
        try:
            (cells,) = csv.reader(io.StringIO(tail.decode(), newline=""), strict=True)
            if is_first:
                return set(HEADER) <= set(cells)
            header = next(csv.reader(self.path.read_text("utf-8-sig").splitlines()[:1]))
            cell = dict(zip(header, cells, strict=True))
            self._entry(cell["index"], cell["label"] or None, None)
            return cell["decision"] in DECISIONS
        except (ValueError, KeyError, csv.Error):
            return False

    def _mend(self, content: bytes, end: int) -> None:
        with open(self.path, "r+b") as file:
            file.truncate(end)
            file.seek(end)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _row(cells: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _whole(content: bytes) -> int:
    """Where the last row that has an end ends; a line break between quotes is none."""
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
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_size
