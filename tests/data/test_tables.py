import csv
import datetime
import json
import os
import re
import stat
import sys
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearsay.data import tables
from nearsay.data.tables import Problems
from nearsay.errors import TableError

TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)
AWKWARD = st.sampled_from(
    ["", " ", ",", '"', '""', "\n", "\r", "\r\n", "a,b", '"a"', "\ufeff", "=1", "'", "\t", "é漢😀"]
)
CELL = st.one_of(st.none(), AWKWARD, TEXT, st.tuples(AWKWARD, TEXT, AWKWARD).map("".join))
FORMATS = ["csv", "tsv", "jsonl", "ndjson", "parquet", "CSV", "Parquet"]


@st.composite
def columns(draw):
    header = draw(st.lists(st.one_of(AWKWARD, TEXT), min_size=1, max_size=4, unique=True))
    num_rows = draw(st.integers(1, 6))
    return {name: draw(st.lists(CELL, min_size=num_rows, max_size=num_rows)) for name in header}


def write_quickly(path, table):
    with mock.patch.object(os, "fsync"):  # hundreds of which take a while
        tables.write(path, table)


def as_read(cells):
    return [cell or None for cell in cells]


def of(tmp_path, content, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def complaint(tmp_path, content, name="t.csv"):
    path = of(tmp_path, content, name)
    with pytest.raises(TableError) as caught:
        tables.read(path)
    return str(caught.value).replace(f"{path}", name)


@settings(max_examples=80, deadline=None)
@given(columns())
def test_what_is_written_is_read_in_every_format(tmp_path_factory, table):
    for ending in ("csv", "tsv", "jsonl", "parquet"):
        path = tmp_path_factory.getbasetemp() / f"round.{ending}"
        write_quickly(path, table)
        found = tables.read(path)
        path.unlink()
        assert found.header == tuple(table), ending
        assert found.columns == {name: as_read(cells) for name, cells in table.items()}, ending
        assert len(found.lines) == len(next(iter(table.values())))


@settings(max_examples=150, deadline=None)
@given(columns())
def test_our_csv_is_what_others_read_and_write(tmp_path_factory, table):
    path = tmp_path_factory.getbasetemp() / "others.csv"
    rows = [[*table], *([cell or "" for cell in row] for row in zip(*table.values(), strict=True))]
    write_quickly(path, table)
    with path.open(newline="", encoding="utf-8-sig") as file:
        assert [*csv.reader(file, strict=True)] == rows
    path.unlink()
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    assert tables.read(path).columns == {name: as_read(cells) for name, cells in table.items()}
    path.unlink()


def test_numbers_and_gaps_are_the_same_text_in_every_format(tmp_path):
    table = {
        "whole": [1, -2, None],
        "real": [1.0, float("nan"), 1e-07],
        "edge": [float("inf"), -float("inf"), 0.5],
        "claim": [True, False, None],
        "nothing": [None, None, None],
        "text": ["1.0", "", None],
    }
    for ending in FORMATS:
        tables.write(tmp_path / f"t.{ending}", table)
        assert tables.read(tmp_path / f"t.{ending}").columns == {
            "whole": ["1", "-2", None],
            "real": ["1.0", None, "1e-07"],
            "edge": ["inf", "-inf", "0.5"],
            "claim": ["true", "false", None],
            "nothing": [None, None, None],
            "text": ["1.0", None, None],
        }, ending
    for line in (tmp_path / "t.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_lines_are_those_where_rows_begin(tmp_path):
    path = of(tmp_path, 'path,label\n\na,"x\ny\r\nz"\nb,c\n\n\nd,e')
    table = tables.read(path)
    assert [*table.lines] == [3, 6, 9]
    assert table.columns == {"path": ["a", "b", "d"], "label": ["x\ny\r\nz", "c", "e"]}
    assert [*tables.read(of(tmp_path, '{"a": 1}\n\n{"a": 2}\n', "t.jsonl")).lines] == [1, 3]
    tables.write(tmp_path / "t.parquet", {"a": ["x", "y"]})
    assert [*tables.read(tmp_path / "t.parquet").lines] == [1, 2]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_usual_encodings_and_line_ends_are_read(tmp_path, encoding, newline):
    path = of(tmp_path, newline.join(["path,label", "a,é", "b,漢"]).encode(encoding))
    table = tables.read(path)
    assert table.header == ("path", "label")
    assert table.columns["label"] == ["é", "漢"]
    assert [*table.lines] == [2, 3]


def test_both_byte_orders_of_utf16_are_read(tmp_path):
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        assert tables.read(of(tmp_path, mark + "a\né".encode(encoding))).columns == {"a": ["é"]}


def test_only_wanted_columns_are_kept(tmp_path):
    table = {"a": ["1"], "b": ["2"], "c": ["3"]}
    for ending in FORMATS:
        tables.write(tmp_path / f"t.{ending}", table)
        found = tables.read(tmp_path / f"t.{ending}", columns=["c", "a", "z"])
        assert found.header == ("a", "b", "c")
        assert found.columns == {"a": ["1"], "c": ["3"]}


def test_a_nested_column_is_refused_only_if_wanted(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({"a": ["x"], "b": [[1, 2]], "c": [b"z"]}), tmp_path / "t.parquet"
    )
    of(tmp_path, '{"a": "x", "b": [1, 2], "c": {}}', "t.jsonl")
    for name in ("t.parquet", "t.jsonl"):
        assert tables.read(tmp_path / name, columns=["a"]).columns == {"a": ["x"]}
        with pytest.raises(TableError, match="list"):
            tables.read(tmp_path / name)


def test_parquet_dictionaries_dates_and_repeated_names(tmp_path):
    path = tmp_path / "t.parquet"
    array = pyarrow.array(["x", None, "x"]).dictionary_encode()
    days = pyarrow.array([datetime.date(2020, 1, 2), None, None])
    pyarrow.parquet.write_table(pyarrow.table({"a": array, "b": days}), path)
    assert tables.read(path).columns == {"a": ["x", None, "x"], "b": ["2020-01-02", None, None]}
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([array, array], ["a", "a"]), path)
    with pytest.raises(TableError, match="column 'a' is there more than once"):
        tables.read(path)


def test_repeated_strings_are_kept_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_MOST_SHARED", 3)
    cells = ["cat", "dog", "cow", "pig", "cat", "dog", "pig"]
    tables.write(tmp_path / "t.csv", {"a": cells})
    column = tables.read(tmp_path / "t.csv").columns["a"]
    assert column == cells
    assert column[0] is column[4]
    assert column[1] is column[5]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "t.csv: is empty"),
        ("\n\n\r\n", "t.csv: is empty"),
        ("\ufeff", "t.csv: is empty"),
        ("a,b\n1,2\n3\n", "t.csv:3: has 1 fields where the header has 2"),
        ("a,b\n1,2,3\n", "t.csv:2: has 3 fields where the header has 2"),
        ("a,b,a\n1,2,3\n", "t.csv:1: column 'a' is there more than once"),
        ('a,b\n1,"2\n3,4\n', "t.csv:2: a quote that opens in this row is never closed"),
        ('a,b\n1,"2" 3\n', "t.csv:2: a quote that opens in this row is followed by more text"),
        ('a,b\n1,"2\n3,"4"\n', "t.csv:2: a quote that opens in this row is followed by more text"),
        (
            'a,b\n1,"' + "x\n" * 10**5 + '"\n',
            "t.csv:2: a quote that opens in this row is never closed",
        ),
        ("a,b\n1,2\n3,\0\n", "t.csv:3: holds a NUL; save the file as UTF-8 text"),
        ("a,b\n1,2\n".encode("utf-16-le"), "t.csv:1: holds a NUL"),
        (b"a,b\n1,2\n3,caf\xe9\n", "t.csv:3: holds the byte 0xE9, which is not UTF-8"),
        (b"a,b\n1,\xed\xa0\x80\n", "t.csv:2: holds the byte 0xED"),
        ("a,b\n1,2\n".encode("utf-16") + b"\0", "t.csv: is not all UTF-16"),
        ("a,b\n".encode("utf-16") + b"\0\xd8\0\xd8", "t.csv: is not all UTF-16"),
        ("a,b\n1,2\n".encode("utf-32"), "t.csv:1: holds a NUL"),
    ],
)
def test_bad_csv_is_told_by_line(tmp_path, content, expected):
    found = complaint(tmp_path, content)
    assert found.startswith(expected)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "t.jsonl: is empty"),
        ('{"a": 1}\n{"a": 2\n', "t.jsonl:2: is not JSON (Expecting ',' delimiter)"),
        ('{"a": 1}\n[1]\n', "t.jsonl:2: holds '[1]' and not an object"),
        ("{}\n", "t.jsonl:1: holds '{}' and not an object"),
        ('{"a": 1}\n{"a": 1, "a": 2}\n', "t.jsonl:2: is not JSON (a name is there twice)"),
        ('{"a": 1}\n{"b": 1}\n', "t.jsonl:2: has 'b', which the first line has not"),
        ('{"a": {"b": 1}}\n', "t.jsonl:1: holds a dict"),
        ('{"a": "\\u0000"}\n', "t.jsonl:1: '\\x00' holds '\\x00', which is not text"),
        ('{"a": "\\ud800"}\n', "t.jsonl:1: '\\ud800' holds '\\ud800', which is not text"),
        (b'{"a": "\xff"}\n', "t.jsonl:1: holds the byte 0xFF"),
        ("[" * 10**5, "t.jsonl:1: is not JSON (maximum recursion depth"),
    ],
)
def test_bad_jsonl_is_told_by_line(tmp_path, content, expected):
    found = complaint(tmp_path, content, "t.jsonl")
    assert found.startswith(expected)
    assert "\n" not in found


def test_numbers_of_json_stay_as_they_are_written(tmp_path):
    table = tables.read(
        of(
            tmp_path,
            '{"a": 1.00}\n{"a": 1E400}\n{"a": 12345678901234567890123}\n{"a": -0}\n',
            "t.jsonl",
        )
    )
    assert table.columns == {"a": ["1.00", "1E400", "12345678901234567890123", "-0"]}


def test_missing_keys_are_missing_cells(tmp_path):
    table = tables.read(
        of(tmp_path, '{"a": 1.0, "b": "x"}\n{"a": 10}\n{"b": NaN, "a": null}', "t.jsonl")
    )
    assert table.columns == {"a": ["1.0", "10", None], "b": ["x", None, None]}


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"path,label\n", b"PAR1" + b"\0" * 100 + b"PAR1"]
)
def test_what_is_no_parquet_is_refused(tmp_path, content):
    assert complaint(tmp_path, content, "t.parquet").startswith(
        "t.parquet: cannot be read as Parquet"
    )


def test_damaged_parquet_never_raises_anything_else(tmp_path):
    tables.write(tmp_path / "t.parquet", {"a": [f"cell {number}" for number in range(50)]})
    content = (tmp_path / "t.parquet").read_bytes()
    for place in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        try:
            tables.read(of(tmp_path, bytes(damaged), "damaged.parquet"))
        except TableError as error:
            assert "damaged.parquet" in str(error)  # noqa: PT017 — it may also go unnoticed


def test_the_first_twenty_problems_and_their_number_are_told(tmp_path):
    found = complaint(tmp_path, "a,b\n" + "1\n" * 3000).splitlines()
    assert found[0] == "t.csv: 3000 problems, the first 20:"
    assert [re.match(r"t.csv:(\d+): ", line)[1] for line in found[1:]] == [
        str(line) for line in range(2, 22)
    ]
    assert complaint(tmp_path, "a,b\n1\n1,2\n1\n").splitlines()[0] == "t.csv: 2 problems:"
    assert len(complaint(tmp_path, "a,b\n" + "1\n" * 20).splitlines()) == 21


def test_problems_are_told_in_the_order_of_lines(tmp_path):
    problems = Problems(tmp_path)
    for line in (*range(3000, 3990), *range(1, 31), *range(4000, 9000)):
        problems.add(line, "reason")
    with pytest.raises(TableError) as caught:
        problems.raise_any()
    assert [line.split(":")[1] for line in str(caught.value).splitlines()[1:]] == [
        str(line) for line in range(1, 21)
    ]
    Problems(tmp_path).raise_any()


def test_many_columns_are_no_burden(tmp_path):
    table = tables.read(of(tmp_path, ",".join(map(str, range(50_000))) + "\n"))
    assert len(table.header) == 50_000


@pytest.mark.parametrize("name", ["t.txt", "t", "t.xlsx", ".csv"])
def test_unknown_endings_are_refused_with_the_known_ones(tmp_path, name):
    for call in (
        lambda: tables.read(tmp_path / name),
        lambda: tables.write(tmp_path / name, {"a": ["b"]}),
    ):
        with pytest.raises(ValueError, match=r"\.csv, \.tsv, \.jsonl, \.ndjson, \.parquet"):
            call()


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    for name in ("none.csv", "folder.csv", "pipe.csv", "loop.csv"):
        with pytest.raises(TableError, match="does not exist"):
            tables.read(tmp_path / name)


def test_without_pyarrow_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    tables.write(tmp_path / "t.parquet", {"a": ["b"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for call in (
        lambda: tables.read(tmp_path / "t.parquet"),
        lambda: tables.write(tmp_path / "u.parquet", {"a": []}),
    ):
        with pytest.raises(ImportError, match=r'pip install "\.\[parquet\]" in the clone'):
            call()
    tables.write(tmp_path / "t.csv", {"a": ["b"]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.parquet"]


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "=a,b", '=HYPERLINK("x")']


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_spreadsheet_sees_no_formula(tmp_path, ending):
    path = tmp_path / f"t.{ending}"
    table = {"=head": [*FORMULAS, "cat", "a;=1", None], "score": [-1.5] * (len(FORMULAS) + 3)}
    tables.write(path, table, for_spreadsheet=True)
    found = tables.read(path)
    assert found.header == ("'=head", "score")
    assert found.columns["'=head"] == [*(f"'{each}" for each in FORMULAS), "cat", "a;=1", None]
    assert found.columns["score"][0] == "-1.5"
    content = path.read_bytes()
    assert content.startswith(b'\xef\xbb\xbf"\'=head"')
    assert b'\n"cat"' in content
    assert b'\n"a;=1"' in content


def test_formulas_stay_as_they_are_unless_asked(tmp_path):
    for ending in FORMATS:
        tables.write(tmp_path / f"t.{ending}", {"a": FORMULAS})
        assert tables.read(tmp_path / f"t.{ending}").columns == {"a": FORMULAS}
    for ending in ("jsonl", "parquet"):
        with pytest.raises(ValueError, match="csv"):
            tables.write(tmp_path / f"t.{ending}", {"a": FORMULAS}, for_spreadsheet=True)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("bad", ["\0", "\ud800"])
def test_what_cannot_be_read_is_not_written(tmp_path, ending, bad):
    path = tmp_path / f"t.{ending}"
    tables.write(path, {"a": ["old"]})
    for table in ({"a": ["fine", bad]}, {bad: ["fine"]}):
        with pytest.raises(ValueError, match="is not text"):
            tables.write(path, table)
    assert tables.read(path).columns == {"a": ["old"]}
    assert [*tmp_path.iterdir()] == [path]


def test_columns_must_fit(tmp_path):
    for table in ({}, {"a": ["1"], "b": []}):
        with pytest.raises(ValueError, match="columns"):
            tables.write(tmp_path / "t.csv", table)
    with pytest.raises(ValueError, match=r"column 'a' of .* mixes text and numbers"):
        tables.write(tmp_path / "t.parquet", {"a": ["1", 1]})
    assert not [*tmp_path.iterdir()]


def test_a_table_without_rows_keeps_its_header(tmp_path):
    for ending in ("csv", "tsv", "parquet"):
        tables.write(tmp_path / f"t.{ending}", {"a": [], "b": []})
        found = tables.read(tmp_path / f"t.{ending}")
        assert found.columns == {"a": [], "b": []}
        assert len(found.lines) == 0


def test_a_broken_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    tables.write(path, {"a": ["old"]})

    def fail(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        tables.write(path, {"a": ["new"]})
    assert tables.read(path).columns == {"a": ["old"]}
    assert [*tmp_path.iterdir()] == [path]


def test_written_files_have_the_usual_rights_and_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(stat.S_IFMT(os.fstat(descriptor).st_mode))
    )
    (tmp_path / "other").write_text("")
    tables.write(tmp_path / "t.csv", {"a": ["b"]})
    assert (tmp_path / "t.csv").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert synced == [stat.S_IFREG, stat.S_IFDIR]
