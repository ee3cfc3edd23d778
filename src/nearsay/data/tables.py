"""Tables of text in and out: CSV, TSV, JSON lines and Parquet, told apart by the ending of the file's name.

A cell is a string as it was written, or None where it is missing; an empty cell is missing in every format.
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
_MOST_TOLD = 20
_MOST_SHARED = (
    2**16
)  # different strings of a column that are kept once each, however often they occur


@dataclass
class Problems:
    """What is wrong with a file, collected so that it can be told at once."""

    path: Path
    total: int = 0
    _found: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        """One more; line 0 stands for the whole file."""
        self.total += 1
        self._found.append((line, reason))
        if len(self._found) > 50 * _MOST_TOLD:
            self._found = sorted(self._found)[:_MOST_TOLD]

    def raise_any(self) -> None:
        """TableError if there were any."""
        told = [
            f"{self.path}{f':{line}' if line else ''}: {reason}"
            for line, reason in sorted(self._found)
        ]
        if self.total > 1:
            first = f", the first {_MOST_TOLD}" if self.total > _MOST_TOLD else ""
            told = [f"{self.path}: {self.total} problems{first}:", *told[:_MOST_TOLD]]
        if told:
            raise TableError("\n".join(told))


class Table(NamedTuple):
    """A table that was read."""

    path: Path
    header: tuple[str, ...]  # the names of all columns of the file
    columns: dict[str, list[str | None]]  # those that were asked for, N cells each
    lines: Sequence[
        int
    ]  # (N,) the line where a row begins, from 1; in Parquet, the number of the row


def read(path: str | Path, *, columns: Collection[str] | None = None) -> Table:
    """The table at `path`, or those of the `columns` that it has; TableError if there is anything wrong with it."""
    path, kind = _kind(path)
    if not path.is_file():
        raise TableError(
            f"{path} is no file; check the name, and the folder that it is relative to"
        )
    builder = _Builder(Problems(path), columns)
    if kind == "parquet":
        _read_parquet(builder)
    else:
        with path.open("rb") as file:
            encoding = next(
                (name for mark, name in _MARKS.items() if file.peek(4).startswith(mark)), "utf-8"
            )
            text = io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")
            try:
                _read_jsonl(builder, text) if kind == "jsonl" else _read_delimited(
                    builder, text, _DELIMITERS[kind]
                )
            except UnicodeDecodeError as error:  # only of UTF-16: see errors= above
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
    """(N, D) numbers of a Parquet file: its column of lists called one of `named`, or all columns of numbers.

    Columns called one of `others` are no features, nor are id, index, and what pandas has written as its index; names
    are compared without case.
    """
    pyarrow = _pyarrow()
    try:
        table = pyarrow.parquet.read_table(path, use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        reason = one_line(error)
        raise ValueError(f"{path} is not readable as Parquet ({reason}); write it again") from error
    types = pyarrow.types
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        # of pandas, of polars and of Hugging Face, in this order
        if name.lower() in named and (
            types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        ):
            lengths = pyarrow.compute.unique(pyarrow.compute.list_value_length(column)).to_pylist()
            are_numbers = types.is_floating(kind.value_type) or types.is_integer(kind.value_type)
            if column.null_count or len(lengths) != 1 or not are_numbers:
                raise ValueError(
                    f"column {name!r} of {path} must hold lists of numbers, all of one length, and no row without"
                )
            flat = np.array(
                column.combine_chunks().flatten().to_numpy(zero_copy_only=False), dtype=np.float32
            )
            return flat.reshape(len(column), lengths[0])
    index = (table.schema.pandas_metadata or {}).get(
        "index_columns", []
    )  # names, or how a range was left out
    passed = {*others, "id", "index", *(name.lower() for name in index if isinstance(name, str))}
    kept = [
        column.to_numpy().astype(np.float32)
        for name, column in zip(table.column_names, table.columns, strict=True)
        if name.lower() not in passed
        and (types.is_floating(column.type) or types.is_integer(column.type))
    ]
    if not kept:
        raise ValueError(
            f"{path} has no column of lists called {' or '.join(sorted(named))}, and none of numbers"
        )
    return np.stack(kept, axis=1)


def write(
    path: str | Path, columns: Mapping[str, Sequence[Cell]], *, for_spreadsheet: bool = False
) -> None:
    """Write columns of equal length; the file appears whole or not at all.

    `for_spreadsheet` makes CSV and TSV safe to open there: cells that would be taken for formulas get an apostrophe
    in front, every cell is quoted, and a byte order mark tells the encoding.
    """
    path, kind = _kind(path)
    if not columns or len({len(cells) for cells in columns.values()}) > 1:
        lengths = ", ".join(f"{name!r} has {len(cells)}" for name, cells in columns.items())
        raise ValueError(
            f"{path} needs columns with equally many cells, but {lengths or 'there is none'}"
        )
    if for_spreadsheet and kind not in _DELIMITERS:
        raise ValueError(f"{path} cannot be made for a spreadsheet; write a .csv or .tsv file")
    rows: Iterator[tuple[Cell, ...]] = zip(*columns.values(), strict=True)
    with _replacing(path) as file:
        if kind == "parquet":
            _write_parquet(file, path, columns)
        elif kind == "jsonl":
            for row in rows:
                record = {
                    _checked(name): _json(cell) for name, cell in zip(columns, row, strict=True)
                }
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        else:
            file.write(codecs.BOM_UTF8 if for_spreadsheet else b"")
            for cells in itertools.chain([columns], rows):
                file.write(_delimited(cells, _DELIMITERS[kind], for_spreadsheet).encode())


def as_claim(cell: str | None) -> bool:
    """A cell that says true or false, however a spreadsheet has spelled it; ValueError if it says neither."""
    said = (cell or "").lower()
    if said not in ("true", "false"):
        raise ValueError(f"{(cell or '')[:40]!r} is neither true nor false")
    return said == "true"


def as_share(cell: str | None) -> float | None:
    """A cell with a number from 0 to 1, None where it is empty; ValueError for anything else, such as nan."""
    if cell is None:
        return None
    value = float(cell)
    if not 0 <= value <= 1:
        raise ValueError(f"{cell[:40]!r} is no number from 0 to 1")
    return value


def _kind(name: str | Path) -> tuple[Path, str]:
    path = Path(name).expanduser()
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(
            f"{path} has no ending that tells what kind of table it is; use one of {', '.join(ENDINGS)}"
        )
    return path, ENDINGS[path.suffix.lower()]


class _Builder:
    """Columns that grow row by row; strings that come again are kept once."""

    def __init__(self, problems: Problems, wanted: Collection[str] | None) -> None:
        self.problems, self.wanted = problems, wanted
        self.header: tuple[str, ...] = ()
        self.columns: dict[str, list[str | None]] = {}
        self.lines = array("I")
        self._shared: list[dict[str, str | None]] = []
        self.places: list[int] = []  # of the columns, in the header

    def begin(self, header: Sequence[str], line: int) -> None:
        for name in [name for name, times in Counter(header).items() if times > 1]:
            self.problems.add(
                line, f"column {name!r} is there more than once; give each its own name"
            )
        self.problems.raise_any()
        self.header = tuple(header)
        self.places = [
            place for place, name in enumerate(header) if self.wanted is None or name in self.wanted
        ]
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
            column.append(
                shared.setdefault(text, text)
                if len(shared) < _MOST_SHARED
                else shared.get(text, text)
            )


def _read_delimited(builder: _Builder, text: Iterable[str], delimiter: str) -> None:
    reader = csv.reader(_checked_lines(text, builder.problems), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            is_closed = "expected after" in str(
                error
            )  # otherwise the end of the file, or of what a cell may hold
            told = "followed by more text" if is_closed else "never closed"
            builder.problems.add(
                line, f"a quote that opens in this row is {told}; write a quote inside quotes twice"
            )
            row = [] if is_closed else None
        if row is None:
            return
        if row and not builder.header:
            if (
                delimiter == ","
                and len(row) == 1
                and (other := _other_delimiter(row[0], builder.wanted or ()))
            ):
                builder.problems.add(
                    line, f"is separated by {other!r}; write commas, or tabs in a .tsv"
                )
                return
            builder.begin(row, line)
        elif row and len(row) != (width := len(builder.header)):
            reason = f"has {len(row)} fields where the header has {width}"
            builder.problems.add(line, f"{reason}; quote cells that hold {delimiter!r}")
        elif row:
            builder.add(line, [row[place] for place in builder.places])


def _other_delimiter(header: str, wanted: Collection[str]) -> str | None:
    """What stands between the names of a header instead of commas; None unless one of them is wanted."""
    return next(
        (each for each in ";\t" if each in header and {*header.split(each)} & {*wanted}), None
    )


def _checked_lines(text: Iterable[str], problems: Problems) -> Iterator[str]:
    for number, line in enumerate(text, start=1):
        if found := _NOT_TEXT.search(line):
            what = (
                "a NUL"
                if found[0] == "\0"
                else f"the byte 0x{ord(found[0]) & 0xFF:02X}, which is no UTF-8"
            )
            problems.add(number, f"holds {what}; save the file as UTF-8 text")
            line = _NOT_TEXT.sub("?", line)  # so that the cell is not told of as well
        yield line


def _read_jsonl(builder: _Builder, text: Iterable[str]) -> None:
    infinities = {
        "Infinity": "inf",
        "-Infinity": "-inf",
    }  # NaN is missing; other numbers stay as they are written
    decoder = json.JSONDecoder(
        object_pairs_hook=_record, parse_int=str, parse_float=str, parse_constant=infinities.get
    )
    for line, content in enumerate(_checked_lines(text, builder.problems), start=1):
        if not content.strip():
            continue
        try:
            record = decoder.decode(content)
        except (ValueError, RecursionError) as error:
            builder.problems.add(
                line, f"is no JSON ({str(error).partition(': line')[0]}); write one object per line"
            )
            continue
        if not isinstance(record, dict) or not record:
            builder.problems.add(
                line, f"holds {content.strip()[:40]!r} and not an object with names"
            )
            continue
        if not builder.header:
            builder.begin(list(record), line)
        if unknown := record.keys() - set(builder.header):
            builder.problems.add(
                line, f"has {min(unknown)!r}, which the first line has not; name every column there"
            )
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
        reason = one_line(error)
        builder.problems.add(0, f"is not readable as Parquet ({reason}); write it again")


def _pyarrow() -> Any:  # a module
    try:
        import pyarrow.compute  # noqa: PLC0415 — an extra
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
    """A cell as it stands in a file, the same in every format."""
    if isinstance(cell, str):
        return _checked(cell)
    if cell is None or cell != cell:  # NaN is missing
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, bytes | dict | list | tuple):
        raise ValueError(
            f"holds a {type(cell).__name__} as a cell, which must be text or a number; leave it out"
        )
    return str(cell)


def _json(cell: Cell) -> Cell:
    is_json = not isinstance(cell, str | float) or (
        isinstance(cell, float) and abs(cell) < float("inf")
    )
    return cell if is_json or cell == "" else _text(cell) or None


def _checked(text: str) -> str:
    if found := _NOT_TEXT.search(text):
        raise ValueError(f"{text[:80]!r} holds {found[0]!r}, which is not text; leave it out")
    return text


def _delimited(cells: Iterable[Cell], delimiter: str, for_spreadsheet: bool) -> str:
    texts = []
    for cell in cells:
        text = _text(cell)
        if (
            for_spreadsheet
            and isinstance(cell, str)
            and text.startswith(("=", "+", "-", "@", "\t", "\r"))
        ):
            text = f"'{text}"
        if for_spreadsheet or delimiter in text or re.search('["\r\n\ufeff]', text):
            text = '"' + text.replace('"', '""') + '"'
        texts.append(text)
    return (delimiter.join(texts) or '""') + "\n"  # an empty line would be no row


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is whole and on the disk."""
    try:
        with draft_of(path) as draft:
            with draft.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
    except OSError as error:  # what the system says of a full disk names no file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
