import csv
import datetime
import json
import os
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


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=60, deadline=None)
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
    table = {  # what is written, and what is read
        "whole": ([1, -2, None], ["1", "-2", None]),
        "real": ([1.0, float("nan"), 1e-07], ["1.0", None, "1e-07"]),
        "edge": ([float("inf"), -float("inf"), 0.5], ["inf", "-inf", "0.5"]),
        "claim": ([True, False, None], ["true", "false", None]),
        "nothing": ([None] * 3, [None] * 3),
        "text": (["1.0", "", None], ["1.0", None, None]),
    }
    for ending in FORMATS:
        path = tmp_path / f"t.{ending}"
        tables.write(path, {name: cells for name, (cells, _) in table.items()})
        assert tables.read(path).columns == {name: cells for name, (_, cells) in table.items()}
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


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_usual_encodings_and_line_ends_are_read(tmp_path, encoding, newline):
    path = of(tmp_path, newline.join(["path,label", "a,é", "b,漢"]).encode(encoding))
    table = tables.read(path)
    assert table.header == ("path", "label")
    assert table.columns["label"] == ["é", "漢"]
    assert [*table.lines] == [2, 3]


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
    ("content", "place", "word"),
    [
        ("", "", "empty"),
        ("\n\n\r\n", "", "empty"),
        ("\ufeff", "", "empty"),
        ("a,b\n1,2\n3\n", ":3", "1 fields"),
        ("a,b\n1,2,3\n", ":2", "3 fields"),
        ("a,b,a\n1,2,3\n", ":1", "column 'a'"),
        ('a,b\n1,"2\n3,4\n', ":2", "never closed"),
        ('a,b\n1,"2" 3\n', ":2", "more text"),
        ('a,b\n1,"2\n3,"4"\n', ":2", "more text"),
        ('a,b\n1,"' + "x\n" * 10**5 + '"\n', ":2", "never closed"),
        ("a,b\n1,2\n3,\0\n", ":3", "NUL"),
        ("a,b\n1,2\n".encode("utf-16-le"), ":1", "NUL"),
        (b"a,b\n1,2\n3,caf\xe9\n", ":3", "0xE9"),
        (b"a,b\n1,\xed\xa0\x80\n", ":2", "0xED"),
        ("a,b\n1,2\n".encode("utf-16") + b"\0", "", "UTF-16"),
        ("a,b\n1,2\n".encode("utf-32"), ":1", "NUL"),
    ],
)
def test_bad_csv_is_told_by_line(tmp_path, content, place, word):
    text = complaint(tmp_path, content)
    assert text.startswith(f"t.csv{place}: ")
    assert word in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "place", "word"),
    [
        ("", "", "empty"),
        ('{"a": 1}\n{"a": 2\n', ":2", "JSON"),
        ('{"a": 1}\n[1]\n', ":2", "[1]"),
        ("{}\n", ":1", "{}"),
        ('{"a": 1}\n{"a": 1, "a": 2}\n', ":2", "twice"),
        ('{"a": 1}\n{"b": 1}\n', ":2", "'b'"),
        ('{"a": {"b": 1}}\n', ":1", "dict"),
        ('{"a": "\\u0000"}\n', ":1", "'\\x00'"),
        ('{"a": "\\ud800"}\n', ":1", "'\\ud800'"),
        (b'{"a": "\xff"}\n', ":1", "0xFF"),
        ("[" * 10**5, ":1", "JSON"),
    ],
)
def test_bad_jsonl_is_told_by_line(tmp_path, content, place, word):
    text = complaint(tmp_path, content, "t.jsonl")
    assert text.startswith(f"t.jsonl{place}: ")
    assert word in text
    assert "\n" not in text


def test_numbers_of_json_stay_as_they_are_written_and_missing_keys_are_missing_cells(tmp_path):
    numbers = ["1.00", "1E400", "12345678901234567890123", "-0"]
    content = "\n".join(f'{{"a": {number}}}' for number in numbers)
    assert tables.read(of(tmp_path, content, "t.jsonl")).columns == {"a": numbers}
    content = '{"a": 1.0, "b": "x"}\n{"a": 10}\n{"b": NaN, "a": null}'
    columns = tables.read(of(tmp_path, content, "t.jsonl")).columns
    assert columns == {"a": ["1.0", "10", None], "b": ["x", None, None]}


def test_damaged_parquet_never_raises_anything_else(tmp_path):
    for content in (b"", b"PAR1", b"path,label\n", b"PAR1" + b"\0" * 100 + b"PAR1"):
        assert complaint(tmp_path, content, "t.parquet").startswith("t.parquet: ")
    tables.write(tmp_path / "t.parquet", {"a": [f"cell {number}" for number in range(50)]})
    content = (tmp_path / "t.parquet").read_bytes()
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        try:
            tables.read(of(tmp_path, bytes(damaged), "damaged.parquet"))
        except TableError as error:
            assert "damaged.parquet" in str(error)  # noqa: PT017 — it may also go unnoticed


def test_the_first_twenty_problems_and_their_number_are_told(tmp_path):
    lines = complaint(tmp_path, "a,b\n" + "1\n" * 3000).splitlines()
    assert "3000" in lines[0]
    assert [int(line.split(":")[1]) for line in lines[1:]] == [*range(2, 22)]
    assert "2 problems" in complaint(tmp_path, "a,b\n1\n1,2\n1\n").splitlines()[0]
    assert len(complaint(tmp_path, "a,b\n" + "1\n" * 20).splitlines()) == 21


def test_problems_are_told_in_the_order_of_lines(tmp_path):
    problems = Problems(tmp_path)
    for line in (*range(3000, 3990), *range(1, 31), *range(4000, 9000)):
        problems.add(line, "reason")
    with pytest.raises(TableError) as caught:
        problems.raise_any()
    lines = str(caught.value).splitlines()[1:]
    assert [int(line.split(":")[1]) for line in lines] == [*range(1, 21)]
    Problems(tmp_path).raise_any()


@pytest.mark.parametrize("name", ["t.txt", "t", ".csv"])
def test_unknown_endings_are_refused_with_the_known_ones(tmp_path, name):
    with pytest.raises(ValueError, match=r"\.parquet"):
        tables.read(tmp_path / name)
    with pytest.raises(ValueError, match=r"\.parquet"):
        tables.write(tmp_path / name, {"a": ["b"]})


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    for name in ("none.csv", "folder.csv", "pipe.csv", "loop.csv"):
        with pytest.raises(TableError, match=name):
            tables.read(tmp_path / name)


def test_without_pyarrow_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    tables.write(tmp_path / "t.parquet", {"a": ["b"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"\[parquet\]"):
        tables.read(tmp_path / "t.parquet")
    with pytest.raises(ImportError, match=r"\[parquet\]"):
        tables.write(tmp_path / "u.parquet", {"a": []})
    tables.write(tmp_path / "t.csv", {"a": ["b"]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.parquet"]


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "=a,b", '=HYPERLINK("x")']


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_spreadsheet_sees_no_formula(tmp_path, ending):
    path, others = tmp_path / f"t.{ending}", ["cat", "a;=1", None]
    table = {"=head": [*FORMULAS, *others], "score": [-1.5] * (len(FORMULAS) + 3)}
    tables.write(path, table, for_spreadsheet=True)
    found = tables.read(path)
    assert found.header == ("'=head", "score")
    assert found.columns["'=head"] == [*(f"'{each}" for each in FORMULAS), *others]
    assert found.columns["score"][0] == "-1.5"
    content = path.read_bytes()
    for words in (b'\xef\xbb\xbf"\'=head"', b'\n"cat"', b'\n"a;=1"'):
        assert words in content


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
        os, "fsync", lambda file: synced.append(stat.S_IFMT(os.fstat(file).st_mode))
    )
    (tmp_path / "other").write_text("")
    tables.write(tmp_path / "t.csv", {"a": ["b"]})
    assert (tmp_path / "t.csv").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert synced == [stat.S_IFREG, stat.S_IFDIR]
