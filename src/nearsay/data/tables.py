"""Tables of text in and out: CSV, TSV, JSON lines and Parquet, by the ending of the file's name.

A cell is a string as it was written, or None where it is missing; an empty cell is missing in every
format.
"""

import codecs
import csv
import io
import itertools
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearsay.errors import TableError, one_line
from nearsay.files import draft_of
from nearsay.validation import check_that

Cell = str | int | float | None
ENDINGS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
# Problems in one message.
_MOST_SHOWN = 20
# Different strings of a column that are kept once each, however often they occur.
_MOST_SHARED = 2**16


@dataclass
class Problems:
    """The problems of a file, collected for one message."""

    path: Path
    total: int = 0
    _found: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        """Add a problem; line 0 is the whole file."""
        self.total += 1
        self._found.append((line, reason))
        if len(self._found) > 50 * _MOST_SHOWN:
            self._found = sorted(self._found)[:_MOST_SHOWN]

    def raise_any(self) -> None:
        """TableError if there were any."""
        if not self._found:
            return
        lines = []
        for line, reason in sorted(self._found)[:_MOST_SHOWN]:
            place = f"{self.path}:{line}" if line else str(self.path)
            lines.append(f"{place}: {reason}")
        if self.total > 1:
            first = f", the first {_MOST_SHOWN}" if self.total > _MOST_SHOWN else ""
            lines.insert(0, f"{self.path}: {self.total} problems{first}:")
        raise TableError("\n".join(lines))


class Table(NamedTuple):
    """A table that was read.

    Attributes:
        path: The file.
        header: The names of all columns of the file.
        columns: The requested columns, N cells each.
        lines: (N,) the line where a row begins, from 1; in Parquet the number of the row.
    """

    path: Path
    header: tuple[str, ...]
    columns: dict[str, list[str | None]]
    lines: Sequence[int]


def read(path: str | Path, *, columns: Collection[str] | None = None) -> Table:
    """The table at `path`, or the `columns` that it has; TableError names every problem."""
    path, kind = _kind(path)
    if not path.is_file():
        raise TableError(f"{path} does not exist. Check its name and folder.")
    builder = _Builder(Problems(path), columns)
    if kind == "parquet":
        _read_parquet(builder)
    else:
        with path.open("rb") as file:
            encoding = "utf-8"
            for mark, name in _MARKS.items():
                if file.peek(4).startswith(mark):
                    encoding = name
            text = io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")
            try:
                if kind == "jsonl":
                    _read_jsonl(builder, text)
                else:
                    _read_delimited(builder, text, _DELIMITERS[kind])
            # Only UTF-16 raises it, because surrogateescape keeps bytes that are not UTF-8.
            except UnicodeDecodeError as error:
                builder.problems.add(
                    0, f"is not all {encoding.upper()} ({error.reason}); save it as UTF-8"
                )
    if not builder.header and not builder.problems.total:
        builder.problems.add(0, "is empty; its first line must name the columns, as in path,label")
    builder.problems.raise_any()
    return Table(path, builder.header, builder.columns, builder.lines)


def read_features(
    path: str | Path, *, named: Collection[str], others: Collection[str]
) -> NDArray[np.float32]:
    """(N, D) numbers of a Parquet file: a column of lists with a name in `named`, or all number
    columns.

    Columns with a name in `others` are not features, nor are id, index and the index of pandas.
    Names are compared without case.
    """
    pyarrow = _pyarrow()
    try:
        table = pyarrow.parquet.read_table(path, use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        reason = one_line(error).rstrip(".")
        raise ValueError(f"{path} cannot be read as Parquet: {reason}. Write it again.") from error
    types = pyarrow.types
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        # pandas, polars and Hugging Face write these kinds of lists, in this order.
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if is_list and name.lower() in named:
            lengths = pyarrow.compute.unique(pyarrow.compute.list_value_length(column)).to_pylist()
            are_numbers = types.is_floating(kind.value_type) or types.is_integer(kind.value_type)
            is_right = column.null_count == 0 and len(lengths) == 1 and are_numbers
            where = f"column {name!r} of {path}"
            check_that(is_right, where, "lists of numbers, all of one length", kind)
            flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
            return np.array(flat, dtype=np.float32).reshape(len(column), lengths[0])
    # Names of columns, or a dict that describes a range.
    index = (table.schema.pandas_metadata or {}).get("index_columns", [])
    not_features = {*others, "id", "index"}
    not_features |= {name.lower() for name in index if isinstance(name, str)}
    kept = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        is_number = types.is_floating(column.type) or types.is_integer(column.type)
        if is_number and name.lower() not in not_features:
            kept.append(column.to_numpy().astype(np.float32))
    condition = f"a column of lists called {' or '.join(sorted(named))}, or columns of numbers"
    check_that(bool(kept), f"features in {path}", condition, table.column_names)
    return np.stack(kept, axis=1)


def write(
    path: str | Path, columns: Mapping[str, Sequence[Cell]], *, for_spreadsheet: bool = False
) -> None:
    """Write columns of equal length; the file appears whole or not at all.

    `for_spreadsheet` makes CSV and TSV safe to open in a spreadsheet: cells that look like formulas
    get an apostrophe in front, every cell is quoted, and a byte order mark names the encoding.
    """
    path, kind = _kind(path)
    if not columns or len({len(cells) for cells in columns.values()}) > 1:
        lengths = {name: len(cells) for name, cells in columns.items()}
        check_that(False, f"columns of {path}", "of one length", lengths)
    is_right = not for_spreadsheet or kind in _DELIMITERS
    check_that(is_right, "path", "a .csv or .tsv file for a spreadsheet", str(path))
    rows: Iterator[tuple[Cell, ...]] = zip(*columns.values(), strict=True)
    with _replacing(path) as file:
        if kind == "parquet":
            _write_parquet(file, path, columns)
        elif kind == "jsonl":
            for row in rows:
                pairs = zip(columns, row, strict=True)
                record = {_checked(name): _json(cell) for name, cell in pairs}
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        else:
            file.write(codecs.BOM_UTF8 if for_spreadsheet else b"")
            for cells in itertools.chain([columns], rows):
                file.write(_delimited(cells, _DELIMITERS[kind], for_spreadsheet).encode())


def as_claim(cell: str | None) -> bool:
    """A cell with true or false, in any case as spreadsheets write it."""
    word = (cell or "").lower()
    check_that(word in ("true", "false"), "cell", "true or false", (cell or "")[:40])
    return word == "true"


def as_share(cell: str | None) -> float | None:
    """A cell with a number from 0 to 1, None where it is empty; ValueError for other cells, such as
    nan.
    """
    if cell is None:
        return None
    value = float(cell)
    check_that(0 <= value <= 1, "cell", "a number from 0 to 1", cell[:40])
    return value


def _kind(name: str | Path) -> tuple[Path, str]:
    path = Path(name).expanduser()
    condition = f"a table with the ending {', '.join(ENDINGS)}"
    check_that(path.suffix.lower() in ENDINGS, "path", condition, str(path))
    return path, ENDINGS[path.suffix.lower()]


class _Builder:
    """Columns that grow row by row; strings that come again are kept once."""

    def __init__(self, problems: Problems, wanted: Collection[str] | None) -> None:
        self.problems, self.wanted = problems, wanted
        self.header: tuple[str, ...] = ()
        self.columns: dict[str, list[str | None]] = {}
        self.lines = array("I")
        self._shared: list[dict[str, str | None]] = []
        # The positions of the columns in the header.
        self.places: list[int] = []

    def begin(self, header: Sequence[str], line: int) -> None:
        for name in [name for name, times in Counter(header).items() if times > 1]:
            self.problems.add(
                line, f"column {name!r} is there more than once; give each its own name"
            )
        self.problems.raise_any()
        self.header = tuple(header)
        self.places = list(range(len(header)))
        if self.wanted is not None:
            self.places = [place for place in self.places if header[place] in self.wanted]
        self.columns = {header[place]: [] for place in self.places}
        self._shared = [{"": None} for _ in self.places]

    def add(self, line: int, cells: Iterable[object]) -> None:
        """A row of the wanted columns."""
        try:
            texts = [_text(cell) for cell in cells]
        except ValueError as error:
            self.problems.add(line, str(error))
            return
        self.lines.append(line)
        for column, shared, text in zip(self.columns.values(), self._shared, texts, strict=True):
            if len(shared) < _MOST_SHARED:
                column.append(shared.setdefault(text, text))
            else:
                column.append(shared.get(text, text))


def _read_delimited(builder: _Builder, text: Iterable[str], delimiter: str) -> None:
    reader = csv.reader(_checked_lines(text, builder.problems), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            # Otherwise the file ended, or the cell was too long.
            is_closed = "expected after" in str(error)
            problem = "followed by more text" if is_closed else "never closed"
            cure = "write a quote inside quotes twice"
            builder.problems.add(line, f"a quote that opens in this row is {problem}; {cure}")
            row = [] if is_closed else None
        if row is None:
            return
        if row and not builder.header:
            other = None
            if delimiter == "," and len(row) == 1:
                other = _other_delimiter(row[0], builder.wanted or ())
            if other is not None:
                problem = f"is separated by {other!r}; write commas, or tabs in a .tsv"
                builder.problems.add(line, problem)
                return
            builder.begin(row, line)
        elif row and len(row) != (width := len(builder.header)):
            reason = f"has {len(row)} fields where the header has {width}"
            builder.problems.add(line, f"{reason}; quote cells that hold {delimiter!r}")
        elif row:
            builder.add(line, [row[place] for place in builder.places])


def _other_delimiter(header: str, wanted: Collection[str]) -> str | None:
    """The delimiter of a header without commas; None unless a wanted column is found by it."""
    for delimiter in ";\t":
        if delimiter in header and {*header.split(delimiter)} & {*wanted}:
            return delimiter
    return None


def _checked_lines(text: Iterable[str], problems: Problems) -> Iterator[str]:
    for number, line in enumerate(text, start=1):
        if match := _NOT_TEXT.search(line):
            character = f"the byte 0x{ord(match[0]) & 0xFF:02X}, which is not UTF-8"
            if match[0] == "\0":
                character = "a NUL"
            problems.add(number, f"holds {character}; save the file as UTF-8 text")
            # So that the cell is not reported as well.
            line = _NOT_TEXT.sub("?", line)
        yield line


def _read_jsonl(builder: _Builder, text: Iterable[str]) -> None:
    # NaN is missing; other numbers stay as they are written.
    infinities = {"Infinity": "inf", "-Infinity": "-inf"}
    decoder = json.JSONDecoder(
        object_pairs_hook=_record, parse_int=str, parse_float=str, parse_constant=infinities.get
    )
    for line, content in enumerate(_checked_lines(text, builder.problems), start=1):
        if not content.strip():
            continue
        try:
            record = decoder.decode(content)
        except (ValueError, RecursionError) as error:
            reason = str(error).partition(": line")[0]
            builder.problems.add(line, f"is not JSON ({reason}); write one object per line")
            continue
        if not isinstance(record, dict) or not record:
            problem = f"holds {content.strip()[:40]!r} and not an object with names"
            builder.problems.add(line, problem)
            continue
        if not builder.header:
            builder.begin(list(record), line)
        if unknown := record.keys() - set(builder.header):
            problem = f"has {min(unknown)!r}, which the first line has not; name every column there"
            builder.problems.add(line, problem)
        else:
            builder.add(line, [record.get(name) for name in builder.columns])


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(record := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return record


def _read_parquet(builder: _Builder) -> None:
    pyarrow, rows = _pyarrow(), itertools.count(1)
    try:
        with pyarrow.parquet.ParquetFile(builder.problems.path, pre_buffer=False) as file:
            builder.begin(file.schema_arrow.names, 0)
            for batch in file.iter_batches(2**14, columns=list(builder.columns), use_threads=False):
                for cells in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    builder.add(next(rows), cells)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = one_line(error).rstrip(".")
        builder.problems.add(0, f"cannot be read as Parquet: {reason}. Write it again.")


def _pyarrow() -> Any:
    """The module, which is an extra."""
    try:
        import pyarrow.compute  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install ".[parquet]" in the clone') from error
    return pyarrow


def _write_parquet(file: BinaryIO, path: Path, columns: Mapping[str, Sequence[Cell]]) -> None:
    pyarrow, arrays = _pyarrow(), {}
    for name, cells in columns.items():
        kind = None if any(isinstance(cell, int | float) for cell in cells) else pyarrow.string()
        try:
            checked = [_checked(cell) if isinstance(cell, str) else cell for cell in cells]
            arrays[_checked(name)] = pyarrow.array(checked, kind)
        except (pyarrow.ArrowException, OverflowError) as error:
            raise ValueError(
                f"column {name!r} of {path} mixes text and numbers; write it as text"
            ) from error
    pyarrow.parquet.write_table(pyarrow.table(arrays), file)


def _text(cell: object) -> str:
    """A cell as it is written in a file, the same in every format."""
    if isinstance(cell, str):
        return _checked(cell)
    # NaN, which is not equal to itself, is missing.
    if cell is None or cell != cell:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, bytes | dict | list | tuple):
        raise ValueError(f"holds a {type(cell).__name__}, but a cell must be text or a number")
    return str(cell)


def _json(cell: Cell) -> Cell:
    if isinstance(cell, float) and abs(cell) < float("inf"):
        return cell
    if not isinstance(cell, str | float) or cell == "":
        return cell
    return _text(cell) or None


def _checked(text: str) -> str:
    if match := _NOT_TEXT.search(text):
        raise ValueError(f"{text[:80]!r} holds {match[0]!r}, which is not text; leave it out")
    return text


def _delimited(cells: Iterable[Cell], delimiter: str, for_spreadsheet: bool) -> str:
    texts = []
    for cell in cells:
        text = _text(cell)
        looks_like_formula = text.startswith(("=", "+", "-", "@", "\t", "\r"))
        if for_spreadsheet and isinstance(cell, str) and looks_like_formula:
            text = f"'{text}"
        if for_spreadsheet or delimiter in text or re.search('["\r\n\ufeff]', text):
            text = '"' + text.replace('"', '""') + '"'
        texts.append(text)
    # An empty line would not be a row.
    return (delimiter.join(texts) or '""') + "\n"


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` when it is whole and on the disk."""
    try:
        with draft_of(path) as draft:
            with draft.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
    # The error of a full disk does not name the file.
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
