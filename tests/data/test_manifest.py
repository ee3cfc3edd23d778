import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nearsay.batch import Files
from nearsay.data import tables
from nearsay.data.manifest import Manifest
from nearsay.errors import TableError

FILES = ["a.jpg", "b.jpg", "c.jpg", "d.jpg", "deep/e.jpg", "é 漢.jpg"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in FILES:
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def manifest(folder, content, name="m.csv", **options):
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return Manifest(path=folder / name, **options)


def opened(folder, content, split="train", **options):
    inputs, labels = manifest(folder, content, **options).open(split)
    assert isinstance(inputs, Files)
    names = [labels.classes[number] if number >= 0 else None for number in labels.given.tolist()]
    return dict(zip(inputs.names, names, strict=True))


ACCEPTED = {  # what is written, and what it means
    "plain": ("path,label\na.jpg,cat\nb.jpg,dog\n", {"a.jpg": "cat", "b.jpg": "dog"}),
    "byte order mark": ("\ufeffpath,label\na.jpg,cat\n", {"a.jpg": "cat"}),
    "UTF-16": ("path,label\na.jpg,é\n".encode("utf-16"), {"a.jpg": "é"}),
    "ends of Windows": ("path,label\r\na.jpg,cat\r\n", {"a.jpg": "cat"}),
    "empty label": ("path,label\na.jpg,\nb.jpg,dog\n", {"a.jpg": None, "b.jpg": "dog"}),
    "only unlabeled": ("path,label\na.jpg,\n", {"a.jpg": None}),
    "quotes, comma and line": ('path,label\na.jpg,"a ""b"", c\nd"\n', {"a.jpg": 'a "b", c\nd'}),
    "numbers as names": (
        "path,label\na.jpg,010\nb.jpg,1.0\nc.jpg,-1\n",
        {"a.jpg": "010", "b.jpg": "1.0", "c.jpg": "-1"},
    ),
    "no names of ours": (
        "path,label\na.jpg,nan\nb.jpg,None\nc.jpg,NULL\n",
        {"a.jpg": "nan", "b.jpg": "None", "c.jpg": "NULL"},
    ),
    "large ids": (
        "path,label\na.jpg,10000000000000001\nb.jpg,10000000000000000\n",
        {"a.jpg": "10000000000000001", "b.jpg": "10000000000000000"},
    ),
    "index column": (",path,label\n0,a.jpg,cat\n1,b.jpg,dog\n", {"a.jpg": "cat", "b.jpg": "dog"}),
    "paths inside": (
        "path,label\n./deep/../a.jpg,cat\ndeep//e.jpg,dog\n",
        {"a.jpg": "cat", "deep/e.jpg": "dog"},
    ),
    "odd file name": ("path,label\né 漢.jpg,cat\n", {"é 漢.jpg": "cat"}),
    "another Label": ("path,label,Label\na.jpg,cat,dog\n", {"a.jpg": "cat"}),
    "blank lines": ("path,label\n\na.jpg,cat\n\n", {"a.jpg": "cat"}),
}

REFUSED = {  # what is written, the line that is named and the reason
    "empty": ("", 0, "is"),
    "no header": ("a.jpg,cat\nb.jpg,dog\n", 1, "there is no column 'path', only 'a.jpg', 'cat'"),
    "semicolons": (
        'path;label\na"b.jpg;cat\n"c,d.jpg";cat\n',
        1,
        "is separated by ';'; write commas, or tabs in a .tsv",
    ),
    "tabs": (
        "path\tlabel\na, b.jpg\tcat\n",
        1,
        r"is separated by '\t'; write commas, or tabs in a .tsv",
    ),
    "two headers alike": (
        "path,label,label\na.jpg,cat,dog\n",
        1,
        "column 'label' is there more than once",
    ),
    "both clean columns": (
        "path,label,clean,clean_label\na.jpg,cat,cat,cat\n",
        1,
        "both columns 'clean' and 'clean_label'",
    ),
    "capital letter": (
        "path,label,Split\na.jpg,cat,train\nb.jpg,cat,test\n",
        1,
        "column",
    ),
    "space in the header": (
        "path, label\na.jpg,cat\n",
        1,
        "column",
    ),
    "unclosed quote": (
        'path,label\na.jpg,cat\nb.jpg,"dog\nc.jpg,cow\n',
        3,
        "a quote that opens in this row is never closed",
    ),
    "NUL": ("path,label\na.jpg,c\0t\n", 2, "holds a NUL"),
    "UTF-16 without mark": ("path,label\na.jpg,cat\n".encode("utf-16-le"), 1, "holds a NUL"),
    "Latin-1": (
        "path,label\na.jpg,cat\nb.jpg,é\n".encode("latin-1"),
        3,
        "holds the byte 0xE9, which is not UTF-8",
    ),
    "too many fields": ("path,label\na.jpg,cat,dog\n", 2, "has 3 fields where the header has 2"),
    "too few fields": ("path,label\na.jpg\n", 2, "has 1 fields where the header has 2"),
    "duplicate path": (
        "path,label\na.jpg,cat\nb.jpg,cat\na.jpg,dog\n",
        4,
        "path 'a.jpg' is also on line 2; keep one",
    ),
    "duplicate in disguise": (
        "path,label\na.jpg,cat\n./a.jpg,cat\n",
        3,
        "path 'a.jpg' is also on line 2",
    ),
    "leak": (
        "path,label,split\na.jpg,cat,train\na.jpg,cat,test\n",
        3,
        "is also on line 2, there for train and here for test",
    ),
    "space after": (
        "path,label\na.jpg,cat\nb.jpg,cat \n",
        3,
        "label 'cat ' has spaces around it; remove them",
    ),
    "space before": ("path,label\na.jpg, cat\n", 2, "label ' cat' has spaces around it"),
    "only space": ("path,label\na.jpg,  \n", 2, "label '  ' has spaces around it"),
    "odd space": ("path,label\na.jpg,cat\u00a0\n", 2, "label 'cat\\xa0' has spaces around it"),
    "1 beside 1.0": (
        "path,label\na.jpg,1\nb.jpg,2\nc.jpg,1.0\n",
        4,
        "label '1.0' looks like '1' on line 2",
    ),
    "1 beside 01": ("path,label\na.jpg,1\nb.jpg,01\n", 3, "label '01' looks like '1' on line 2"),
    "two ways to write é": (
        "path,label\na.jpg,caf\u00e9\nb.jpg,cafe\u0301\n",
        3,
        "looks like 'café' on line 2",
    ),
    "clean unlike label": (
        "path,label,clean\na.jpg,1,1.0\n",
        2,
        "clean '1.0' looks like '1' on line 2",
    ),
    "-100": (
        "path,label\na.jpg,cat\nb.jpg,-100\n",
        3,
        "label '-100' is no class; leave it empty for unlabeled",
    ),
    "-100.0": (
        "path,label\na.jpg,-100.0\n",
        2,
        "label '-100.0' is no class; leave it empty for unlabeled",
    ),
    "absolute": (
        "path,label\n/etc/passwd,cat\n",
        2,
        "path '/etc/passwd' is absolute; write it relative to the root",
    ),
    "absolute on Windows": ("path,label\nC:/a.jpg,cat\n", 2, "path 'C:/a.jpg' is absolute"),
    "backslash": ("path,label\ndeep\\e.jpg,cat\n", 2, "has a backslash; write / between folders"),
    "up": ("path,label\n../a.jpg,cat\n", 2, "path '../a.jpg' leads out of the root"),
    "up in disguise": (
        "path,label\ndeep/../../a.jpg,cat\n",
        2,
        "path 'deep/../../a.jpg' leads out of the root",
    ),
    "up to the root": ("path,label\n..,cat\n", 2, "path '..' leads out of the root"),
    "no path": ("path,label\n,cat\n", 2, "the path is empty"),
    "missing file": (
        "path,label\na.jpg,cat\nnone.jpg,cat\n",
        3,
        "path 'none.jpg' names no file below",
    ),
    "folder": ("path,label\ndeep,cat\n", 2, "path 'deep' is a folder"),
    "unknown split": (
        "path,label,split\na.jpg,cat,valid\n",
        2,
        "split 'valid'",
    ),
    "class never learned": (
        "path,label,split\na.jpg,cat,\nb.jpg,cow,test\n",
        3,
        "label 'cow' is in test but never in train",
    ),
    "gaps in clean": (
        "path,label,clean\na.jpg,cat,cat\nb.jpg,cat,\n",
        3,
        "clean is empty, but not everywhere",
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_these_manifests_are_read(folder, case):
    content, expected = ACCEPTED[case]
    assert opened(folder, content) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_these_manifests_are_refused_by_line_and_reason(folder, case):
    content, line, reason = REFUSED[case]
    with pytest.raises(TableError) as caught:
        manifest(folder, content).open("train")
    where = f"{folder / 'm.csv'}:{line}: " if line else f"{folder / 'm.csv'}: "
    assert [
        each for each in str(caught.value).splitlines() if each.startswith(where) and reason in each
    ]


def test_the_first_twenty_and_their_number_are_told(folder):
    rows = "".join(f"none{number}.jpg,cat\n" for number in range(100))
    with pytest.raises(TableError) as caught:
        manifest(folder, f"path,label\n{rows}").open("train")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("m.csv: 100 problems, the first 20:")
    assert [int(re.search(r"m\.csv:(\d+):", line)[1]) for line in lines[1:]] == [*range(2, 22)]


def test_every_row_of_a_bad_label_counts_and_reasons_come_together(folder):
    with pytest.raises(TableError) as caught:
        manifest(folder, "path,label\na.jpg,cat \nb.jpg,cat \n../c.jpg,-100\na.jpg,x\n").open(
            "train"
        )
    assert [
        re.search(r"m\.csv:(\d+): (\w+)", line).groups()
        for line in str(caught.value).splitlines()[1:]
    ] == [
        ("2", "label"),
        ("3", "label"),
        ("4", "label"),
        ("4", "path"),
        ("5", "path"),
    ]


def test_splits_are_told_apart_and_share_their_classes(folder):
    content = "label,path,split\ndog,a.jpg,train\ncat,b.jpg,\ndog,c.jpg,val\ncat,d.jpg,validation\ncat,deep/e.jpg,test\n"
    data = manifest(folder, content)
    for split, names, numbers in (
        ("train", ("a.jpg", "b.jpg"), [1, 0]),
        ("validation", ("c.jpg", "d.jpg"), [1, 0]),
        ("test", ("deep/e.jpg",), [0]),
    ):
        inputs, labels = data.open(split)
        assert inputs == Files(folder, names)
        assert labels.classes == ("cat", "dog")
        assert labels.given.tolist() == numbers
        assert labels.clean is None
    with pytest.raises(ValueError, match="'val'"):
        data.open("val")


def test_a_missing_split_is_named(folder):
    with pytest.raises(ValueError, match="'test'"):
        manifest(folder, "path,label\na.jpg,cat\n").open("test")
    with pytest.raises(ValueError, match=r"m\.csv must have a row"):
        manifest(folder, "path,label\n").open("train")
    with pytest.raises(
        ValueError,
        match=r"nearsay train folder",
    ):
        Manifest(path=folder).open("train")


@pytest.mark.parametrize("column", ["clean", "clean_label"])
def test_clean_labels_outside_the_vocabulary_are_minus_one(folder, column):
    other = {"clean": "Clean_label", "clean_label": "Clean"}[
        column
    ]  # a column of the user's, as one is found
    header = f"path,label,{column},split,{other}"
    data = manifest(
        folder, f"{header}\na.jpg,cat,dog,,\nb.jpg,dog,dog,,\nc.jpg,,cow,,yes\nd.jpg,dog,,test,\n"
    )
    labels = data.open("train").labels
    assert labels.classes == ("cat", "dog")
    assert labels.given.tolist() == [0, 1, -1]
    assert labels.clean.tolist() == [1, 1, -1]
    assert data.open("test").labels.clean is None


def test_only_unlabeled_rows_have_no_classes(folder):
    labels = manifest(folder, "path,label\na.jpg,\nb.jpg,\n").open("train").labels
    assert labels.classes == ()
    assert labels.given.tolist() == [-1, -1]


def test_a_test_set_needs_no_training_labels(folder):
    assert opened(folder, "path,label,split\na.jpg,,\nb.jpg,cow,test\n", "test") == {"b.jpg": "cow"}


def test_paths_are_below_the_root(folder):
    (folder / "lists").mkdir()
    content = "path,label\ne.jpg,cat\n"
    inputs, _ = manifest(folder / "lists", content, root=folder / "deep").open("train")
    assert inputs == Files(folder / "deep", ("e.jpg",))
    with pytest.raises(TableError, match=r"m\.csv:2: path 'e\.jpg' names no file below"):
        manifest(folder / "lists", content).open("train")
    with pytest.raises(ValueError, match="root"):
        manifest(folder / "lists", content, root=folder / "none").open("train")


def test_links_out_of_the_root_are_refused(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "x.jpg").write_bytes(b"")
    (folder / "out.jpg").symlink_to(elsewhere / "x.jpg")
    (folder / "out").symlink_to(elsewhere)
    (folder / "in.jpg").symlink_to("a.jpg")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    assert opened(folder, "path,label\nin.jpg,cat\n") == {"in.jpg": "cat"}
    for name in ("out.jpg", "out/x.jpg"):
        with pytest.raises(
            TableError, match=rf"m\.csv:2: path '{name}' is a link to .*, outside of"
        ):
            manifest(folder, f"path,label\n{name},cat\n").open("train")
    with pytest.raises(TableError, match=r"m\.csv:2: path 'loop\.jpg' names no file"):
        manifest(folder, "path,label\nloop.jpg,cat\n").open("train")


def test_files_are_looked_for_only_if_asked_and_only_of_the_split(folder):
    content = "path,label,split\na.jpg,cat,\nnone.jpg,cat,test\n"
    assert opened(folder, content) == {"a.jpg": "cat"}
    assert opened(folder, content, "test", check_files=False) == {"none.jpg": "cat"}


def test_other_columns_are_kept_at_hand(folder):
    data = manifest(
        folder,
        "path,annotator,label,split,note\na.jpg,ann,cat,test,\nb.jpg,bob,cat,,x\nc.jpg,,cat,,\n",
    )
    assert data.extra("train") == {"annotator": ["bob", None], "note": ["x", None]}
    assert data.extra("test") == {"annotator": ["ann"], "note": [None]}


@pytest.mark.parametrize("ending", ["tsv", "jsonl", "ndjson", "parquet"])
def test_every_format_means_the_same(folder, ending):
    content = "path,label,split,clean\na.jpg,010,,010\nb.jpg,1.0,train,010\nc.jpg,,val,7\nd.jpg,1.0,test,1.0\n"
    expected = manifest(folder, content)
    tables.write(folder / f"m.{ending}", tables.read(folder / "m.csv").columns)
    found = Manifest(path=folder / f"m.{ending}")
    for split in ("train", "validation", "test"):
        (inputs, labels), (same_inputs, same_labels) = expected.open(split), found.open(split)
        assert inputs == same_inputs
        assert labels.classes == same_labels.classes
        assert labels.given.equal(same_labels.given)
        assert labels.clean.equal(same_labels.clean)


def test_lines_and_rows_are_named_in_other_formats(folder):
    (folder / "m.jsonl").write_text(
        '{"path": "a.jpg", "label": 1}\n\n{"path": "b.jpg", "label": 1.0}\n'
    )
    with pytest.raises(TableError, match=r"m\.jsonl:3: label '1\.0' looks like '1' on line 1"):
        Manifest(path=folder / "m.jsonl").open("train")
    tables.write(folder / "m.parquet", {"path": ["a.jpg", "a.jpg"], "label": [1, 2]})
    with pytest.raises(TableError, match=r"m\.parquet:2: path 'a\.jpg' is also on line 1"):
        Manifest(path=folder / "m.parquet").open("train")


LABEL = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=5
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(LABEL, st.sampled_from(["train", "test"])), min_size=1, max_size=8))
@example([("0", "train"), ("'", "test")])  # a label that is quoted in another way
def test_labels_come_back_as_they_are_written_or_are_refused(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "labels.jsonl"
    lines = [
        json.dumps({"path": f"{n}.jpg", "label": label, "split": split})
        for n, (label, split) in enumerate(rows)
    ]
    path.write_text("\n".join(lines))
    data = Manifest(path=path, check_files=False)
    split = rows[0][1]
    try:
        inputs, labels = data.open(split)
    except TableError as error:
        is_told = re.search(r"labels\.jsonl:\d+: label ['\"]", str(error)) is not None
        assert is_told or "has spaces" in str(error)  # noqa: PT017
        return
    finally:
        path.unlink()
    wanted = [(f"{n}.jpg", label) for n, (label, each) in enumerate(rows) if each == split]
    assert [
        *zip(inputs.names, (labels.classes[n] for n in labels.given.tolist()), strict=True)
    ] == wanted
    assert labels.classes == tuple(sorted({label for label, _ in rows}))


MEASURE = """
import json, resource, sys, time
from nearsay.data.manifest import Manifest
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
split = Manifest(path=sys.argv[1], check_files=False).open("train")
spent, memory = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"rows": len(split.inputs), "seconds": spent, "mebibytes": memory / 1024}))
"""


@pytest.mark.slow
def test_a_million_rows_take_ten_seconds_and_little_memory(tmp_path):
    path = tmp_path / "m.csv"
    with path.open("w") as file:
        file.write("path,label\n")
        file.writelines(
            f"images/class_{n % 100:02}/img_{n:07}.jpg,class_{n % 100:02}\n" for n in range(10**6)
        )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path], capture_output=True, check=True, env=environment
    )
    found = json.loads(done.stdout)
    assert found["rows"] == 10**6
    assert found["seconds"] < 10
    assert found["mebibytes"] < 150


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_wrong_separator_is_told_of_once_and_nothing_after_it(folder, mark):
    with pytest.raises(TableError) as caught:
        manifest(folder, f'path{mark}label\na, "b.jpg{mark}cat\nc,d,e{mark}cat\n').open("train")
    assert (
        str(caught.value)
        == f"{folder / 'm.csv'}:1: is separated by {mark!r}; write commas, or tabs in a .tsv"
    )
