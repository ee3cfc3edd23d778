import json
import re

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


ACCEPTED = [  # the rows below "path,label", and what they mean
    ("a.jpg,cat\nb.jpg,dog\n", {"a.jpg": "cat", "b.jpg": "dog"}),
    ("a.jpg,\nb.jpg,dog\n", {"a.jpg": None, "b.jpg": "dog"}),
    ("a.jpg,\n", {"a.jpg": None}),
    ('a.jpg,"a ""b"", c\nd"\n', {"a.jpg": 'a "b", c\nd'}),
    ("a.jpg,010\nb.jpg,1.0\nc.jpg,-1\n", {"a.jpg": "010", "b.jpg": "1.0", "c.jpg": "-1"}),
    ("a.jpg,nan\nb.jpg,None\nc.jpg,NULL\n", {"a.jpg": "nan", "b.jpg": "None", "c.jpg": "NULL"}),
    ("a.jpg,10000000000000001\n", {"a.jpg": "10000000000000001"}),
    ("./deep/../a.jpg,cat\ndeep//e.jpg,dog\n", {"a.jpg": "cat", "deep/e.jpg": "dog"}),
    ("é 漢.jpg,cat\n", {"é 漢.jpg": "cat"}),
    ("\na.jpg,cat\n\n", {"a.jpg": "cat"}),
]

REFUSED = [  # the rows below "path,label", the line that is named and words of the reason
    ("a.jpg,cat,dog", 2, "fields"),
    ("a.jpg,cat\nb.jpg,cat\na.jpg,dog", 4, "'a.jpg' is also on line 2"),
    ("a.jpg,cat\n./a.jpg,cat", 3, "'a.jpg' is also on line 2"),
    ("a.jpg,cat\nb.jpg,cat ", 3, "label 'cat '"),
    ("a.jpg, cat", 2, "label ' cat'"),
    ("a.jpg,  ", 2, "label '  '"),
    ("a.jpg,cat\u00a0", 2, "label 'cat\\xa0'"),
    ("a.jpg,1\nb.jpg,2\nc.jpg,1.0", 4, "label '1.0' looks like '1' on line 2"),
    ("a.jpg,1\nb.jpg,01", 3, "label '01' looks like '1' on line 2"),
    ("a.jpg,caf\u00e9\nb.jpg,cafe\u0301", 3, "looks like 'café' on line 2"),
    ("a.jpg,cat\nb.jpg,-100", 3, "label '-100'"),
    ("a.jpg,-100.0", 2, "label '-100.0'"),
    ("/etc/passwd,cat", 2, "path '/etc/passwd' is absolute"),
    ("C:/a.jpg,cat", 2, "path 'C:/a.jpg' is absolute"),
    ("deep\\e.jpg,cat", 2, "backslash"),
    ("../a.jpg,cat", 2, "path '../a.jpg'"),
    ("deep/../../a.jpg,cat", 2, "path 'deep/../../a.jpg'"),
    ("..,cat", 2, "path '..'"),
    (",cat", 2, "path is empty"),
    ("a.jpg,cat\nnone.jpg,cat", 3, "path 'none.jpg'"),
    ("deep,cat", 2, "path 'deep' is a folder"),
]
OTHER_HEADERS = [
    ("a.jpg,cat\nb.jpg,dog\n", 1, "'path'"),
    ("path,label,clean,clean_label\na.jpg,cat,cat,cat\n", 1, "'clean_label'"),
    ("path,label,Split\na.jpg,cat,train\nb.jpg,cat,test\n", 1, "column"),
    ("path, label\na.jpg,cat\n", 1, "column"),
    ("path,label,split\na.jpg,cat,train\na.jpg,cat,test\n", 3, "for train and here for test"),
    ("path,label,clean\na.jpg,1,1.0\n", 2, "clean '1.0' looks like '1' on line 2"),
    ("path,label,split\na.jpg,cat,valid\n", 2, "split 'valid'"),
    ("path,label,split\na.jpg,cat,\nb.jpg,cow,test\n", 3, "label 'cow'"),
    ("path,label,clean\na.jpg,cat,cat\nb.jpg,cat,\n", 3, "clean is empty"),
]


@pytest.mark.parametrize(("rows", "expected"), ACCEPTED)
def test_these_manifests_are_read(folder, rows, expected):
    assert opened(folder, f"path,label\n{rows}") == expected


def test_columns_of_the_user_are_left_alone(folder):
    expected = {"a.jpg": "cat", "b.jpg": "dog"}
    assert opened(folder, ",path,label\n0,a.jpg,cat\n1,b.jpg,dog\n") == expected
    assert opened(folder, "path,label,Label\na.jpg,cat,dog\n") == {"a.jpg": "cat"}


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [(f"path,label\n{rows}\n", *more) for rows, *more in REFUSED] + OTHER_HEADERS,
)
def test_these_manifests_are_refused_by_line_and_reason(folder, content, line, reason):
    with pytest.raises(TableError) as caught:
        manifest(folder, content).open("train")
    where, lines = f"{folder / 'm.csv'}:{line}: ", str(caught.value).splitlines()
    assert [each for each in lines if each.startswith(where) and reason in each]


def test_every_row_of_a_bad_label_counts_and_reasons_come_together(folder):
    content = "path,label\na.jpg,cat \nb.jpg,cat \n../c.jpg,-100\na.jpg,x\n"
    with pytest.raises(TableError) as caught:
        manifest(folder, content).open("train")
    places = re.findall(r"m\.csv:(\d+): (\w)", str(caught.value))
    assert ["".join(place) for place in places] == ["2l", "3l", "4l", "4p", "5p"]


def test_splits_are_told_apart_and_share_their_classes(folder):
    content = "label,path,split\ndog,a.jpg,train\ncat,b.jpg,\ndog,c.jpg,val\n"
    data = manifest(folder, content + "cat,d.jpg,validation\ncat,deep/e.jpg,test\n")
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
    with pytest.raises(ValueError, match=r"m\.csv"):
        manifest(folder, "path,label\n").open("train")
    with pytest.raises(ValueError, match="folder"):
        Manifest(path=folder).open("train")


@pytest.mark.parametrize(("column", "other"), [("clean", "Clean_label"), ("clean_label", "Clean")])
def test_clean_labels_outside_the_vocabulary_are_minus_one(folder, column, other):
    rows = "a.jpg,cat,dog,,\nb.jpg,dog,dog,,\nc.jpg,,cow,,yes\nd.jpg,dog,,test,\n"
    data = manifest(folder, f"path,label,{column},split,{other}\n{rows}")
    labels = data.open("train").labels
    assert labels.classes == ("cat", "dog")
    assert labels.given.tolist() == [0, 1, -1]
    assert labels.clean.tolist() == [1, 1, -1]
    assert data.open("test").labels.clean is None


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
    for name in ("out.jpg", "out/x.jpg", "loop.jpg"):
        with pytest.raises(TableError, match=rf"m\.csv:2: path '{name}'"):
            manifest(folder, f"path,label\n{name},cat\n").open("train")


def test_files_are_looked_for_only_if_asked_and_only_of_the_split(folder):
    content = "path,label,split\na.jpg,cat,\nnone.jpg,cat,test\n"
    assert opened(folder, content) == {"a.jpg": "cat"}
    assert opened(folder, content, "test", check_files=False) == {"none.jpg": "cat"}


def test_other_columns_are_kept_at_hand(folder):
    rows = "a.jpg,ann,cat,test,\nb.jpg,bob,cat,,x\nc.jpg,,cat,,\n"
    data = manifest(folder, f"path,annotator,label,split,note\n{rows}")
    assert data.extra("train") == {"annotator": ["bob", None], "note": ["x", None]}
    assert data.extra("test") == {"annotator": ["ann"], "note": [None]}


@pytest.mark.parametrize("ending", ["tsv", "jsonl", "parquet"])
def test_every_format_means_the_same(folder, ending):
    rows = "a.jpg,010,,010\nb.jpg,1.0,train,010\nc.jpg,,val,7\nd.jpg,1.0,test,1.0\n"
    expected = manifest(folder, f"path,label,split,clean\n{rows}")
    tables.write(folder / f"m.{ending}", tables.read(folder / "m.csv").columns)
    for split in ("train", "validation", "test"):
        one, other = expected.open(split), Manifest(path=folder / f"m.{ending}").open(split)
        assert one.inputs == other.inputs
        assert one.labels.classes == other.labels.classes
        assert one.labels.given.equal(other.labels.given)
        assert one.labels.clean.equal(other.labels.clean)


def test_lines_and_rows_are_named_in_other_formats(folder):
    rows = ['{"path": "a.jpg", "label": 1}', "", '{"path": "b.jpg", "label": 1.0}']
    (folder / "m.jsonl").write_text("\n".join(rows))
    with pytest.raises(TableError, match=r"m\.jsonl:3: label '1\.0' .* line 1"):
        Manifest(path=folder / "m.jsonl").open("train")
    tables.write(folder / "m.parquet", {"path": ["a.jpg", "a.jpg"], "label": [1, 2]})
    with pytest.raises(TableError, match=r"m\.parquet:2: path 'a\.jpg' .* line 1"):
        Manifest(path=folder / "m.parquet").open("train")


CHARACTERS = st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")
LABEL = st.text(CHARACTERS, min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(LABEL, st.sampled_from(["train", "test"])), min_size=1, max_size=8))
@example([("0", "train"), ("'", "test")])  # a label that is quoted in another way
def test_labels_come_back_as_they_are_written_or_are_refused(tmp_path_factory, rows):
    path, split = tmp_path_factory.getbasetemp() / "labels.jsonl", rows[0][1]
    cells = [{"path": f"{n}.jpg", "label": one, "split": two} for n, (one, two) in enumerate(rows)]
    path.write_text("\n".join(map(json.dumps, cells)))
    try:
        inputs, labels = Manifest(path=path, check_files=False).open(split)
    except TableError as error:
        assert re.search(r"labels\.jsonl:\d+: label|has spaces", str(error))  # noqa: PT017
        return
    finally:
        path.unlink()
    names = [labels.classes[number] for number in labels.given.tolist()]
    wanted = [(cell["path"], cell["label"]) for cell in cells if cell["split"] == split]
    assert [*zip(inputs.names, names, strict=True)] == wanted
    assert labels.classes == tuple(sorted({label for label, _ in rows}))


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_wrong_separator_is_told_of_once_and_nothing_after_it(folder, mark):
    with pytest.raises(TableError, match=re.escape(f":1: is separated by {mark!r}")) as caught:
        manifest(folder, f'path{mark}label\na, "b.jpg{mark}cat\nc,d,e{mark}cat\n').open("train")
    assert str(caught.value).count("\n") == 0
