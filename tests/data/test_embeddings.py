import json
import os
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.testing import assert_close

from nearsay.data import tables
from nearsay.data.embeddings import Embeddings

FEATURES = np.arange(12, dtype=np.float32).reshape(6, 2) / 7
NUMBERS = np.array([0, 2, 1, -1, 2, 0])
NAMES = np.array(["cat", "yak", "dog", "", "yak", "cat"])
SPLIT = np.array(["train", "test", "train", "train", "validation", "test"])


def npz(folder, **arrays):
    path = folder / "data.npz"
    np.savez(path, **arrays)
    return path


def refusal(path, labels=None, split="train"):
    with pytest.raises(ValueError, match=r"\w") as caught:
        Embeddings(path=path, labels=labels).open(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def labels_of(path, labels=None, split="train"):
    return Embeddings(path=path, labels=labels).open(split).labels


@pytest.fixture
def x(tmp_path):
    """A file of features."""
    np.save(tmp_path / "x.npy", FEATURES)
    return tmp_path / "x.npy"


@pytest.mark.parametrize(
    ("features", "labels"),
    [("features", "labels"), ("embeddings", "label"), ("embedding", "y"), ("x", "y"), ("X", "y")],
)
def test_an_npz_by_any_of_the_names(tmp_path, features, labels):
    path = npz(tmp_path, **{features: FEATURES, labels: NUMBERS})
    inputs, found = Embeddings(path=path).open("train")
    assert torch.equal(inputs, torch.from_numpy(FEATURES))
    assert found.given.tolist() == NUMBERS.tolist()
    assert found.clean is None
    assert found.classes == ("0", "1", "2")


@pytest.mark.parametrize("kind", ["<f2", ">f4", "<f8", "i1", "<i8", ">u2", "?"])
def test_every_kind_of_number_becomes_float32(tmp_path, kind):
    values = FEATURES.round().astype(kind)
    path = npz(tmp_path, x=np.asfortranarray(values), y=NUMBERS)
    inputs = Embeddings(path=path).open("train").inputs
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous()
    assert_close(inputs, torch.from_numpy(values.astype(np.float32)))


@pytest.mark.parametrize("kind", ["U", "S"])
def test_names_are_sorted_and_empty_ones_are_unlabeled(tmp_path, kind):
    labels = labels_of(npz(tmp_path, x=FEATURES, y=NAMES.astype(kind)))
    assert labels.classes == ("cat", "dog", "yak")
    assert labels.given.tolist() == [0, 2, 1, -1, 2, 0]


def test_given_classes_keep_their_order_and_need_not_occur(tmp_path):
    classes = np.array(["yak", "owl", "dog", "cat"])
    for given, expected in ((NAMES, [3, 0, 2, -1, 0, 3]), (NUMBERS, NUMBERS.tolist())):
        labels = labels_of(npz(tmp_path, x=FEATURES, y=given, classes=classes))
        assert labels.classes == ("yak", "owl", "dog", "cat")
        assert labels.given.tolist() == expected


def test_a_name_that_only_clean_labels_know_is_outside_the_vocabulary(tmp_path):
    # Where there is no label, none may be true.
    clean = np.array(["cat", "emu", "dog", "", "owl", "cat"])
    labels = labels_of(npz(tmp_path, x=FEATURES, y=NAMES, clean=clean))
    assert labels.classes == ("cat", "dog", "yak")
    assert labels.given.tolist() == [0, 2, 1, -1, 2, 0]
    assert labels.clean.tolist() == [0, -1, 1, -1, -1, 0]


def test_splits_are_rows_and_test_labels_are_clean(tmp_path):
    path = npz(tmp_path, x=FEATURES, y=NUMBERS, clean=np.array([0, 1, 1, 3, 2, 2]), split=SPLIT)
    for split, rows, given in (
        ("train", [0, 2, 3], [0, 1, -1]),
        ("validation", [4], [2]),
        ("test", [1, 5], [1, 2]),
    ):
        inputs, labels = Embeddings(path=path).open(split)
        assert torch.equal(inputs, torch.from_numpy(FEATURES[rows]))
        assert labels.given.tolist() == given
        assert labels.clean.tolist() == [[0, 1, 1, 3, 2, 2][row] for row in rows]
        assert labels.classes == ("0", "1", "2", "3")  # the same in every split


def test_validation_may_be_called_val_and_training_nothing(tmp_path):
    split = np.array(["", "val", "train", "", "validation", "train"])
    path = npz(tmp_path, x=FEATURES, y=NUMBERS, split=split)
    assert labels_of(path, split="validation").given.tolist() == [2, 2]
    assert labels_of(path).given.tolist() == [0, 1, -1, 0]


def test_a_split_that_is_not_there_is_refused(tmp_path):
    assert "split" in refusal(npz(tmp_path, x=FEATURES, y=NUMBERS), split="test")
    split = np.where(SPLIT == "test", "train", SPLIT)
    assert "split" in refusal(npz(tmp_path, x=FEATURES, y=NUMBERS, split=split), split="test")
    split = np.where(SPLIT == "test", "dev", SPLIT)
    text = refusal(npz(tmp_path, x=FEATURES, y=NUMBERS, split=split))
    assert "row 1 of split" in text
    assert "dev" in text


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_labels_in_a_table(tmp_path, x, ending):
    path = tmp_path / f"y.{ending}"
    cells = {"id": [*"abcdef"], "label": NAMES.tolist(), "clean": ["cat"] * 6}
    tables.write(path, cells | {"split": SPLIT.tolist()})
    data = Embeddings(path=x, labels=path)
    inputs, labels = data.open("train")
    assert torch.equal(inputs, torch.from_numpy(FEATURES[[0, 2, 3]]))
    assert labels.classes == ("cat", "dog", "yak")
    assert labels.given.tolist() == [0, 1, -1]
    assert labels.clean.tolist() == [0, 0, 0]
    assert data.extra("train") == {"id": ["a", "c", "d"]}
    assert data.extra("test") == {"id": ["b", "f"]}


@pytest.mark.parametrize("header", ["label\n", "y\n", "", "\ufefflabel\n"])
def test_labels_in_one_column_of_text(tmp_path, x, header):
    (tmp_path / "y.csv").write_text(header + '0\n2\n1\n""\n2\n0\n', "utf-8")
    np.save(tmp_path / "y.npy", NUMBERS)
    for name in ("y.csv", "y.npy"):
        labels = labels_of(x, tmp_path / name)
        assert labels.given.tolist() == NUMBERS.tolist()
        assert labels.classes == ("0", "1", "2")
    (tmp_path / "y.csv").write_text("kind\n0\n1\n0\n1\n0\n1\n")  # one label too many
    assert "labels" in refusal(x, tmp_path / "y.csv")


def test_numbers_with_leading_zeros_are_names(tmp_path, x):
    (tmp_path / "y.csv").write_text('label\n007\n7\n10115\n""\n7\n007\n')
    labels = labels_of(x, tmp_path / "y.csv")
    assert labels.classes == ("007", "10115", "7")
    assert labels.given.tolist() == [0, 2, 1, -1, 2, 0]


def test_labels_in_two_places_are_refused(tmp_path):
    np.save(tmp_path / "y.npy", NUMBERS)
    assert "labels" in refusal(npz(tmp_path, x=FEATURES, y=NUMBERS), tmp_path / "y.npy")


@pytest.mark.parametrize("is_npz", [False, True])
def test_clean_labels_of_one_split_alone_leave_those_of_the_other_unknown(tmp_path, x, is_npz):
    """Else all labels would count as wrong where nothing is known of them."""
    numbers = np.where(NUMBERS < 0, "", NUMBERS.astype(str))
    for given in (NAMES, numbers):
        cells = {"y": given, "clean": np.where(SPLIT == "test", given, ""), "split": SPLIT}
        if is_npz:
            places = (npz(tmp_path, x=FEATURES, **cells),)
        else:
            places = (x, tmp_path / "y.csv")
            tables.write(places[1], {name: values.tolist() for name, values in cells.items()})
        assert labels_of(*places).clean is None
        assert labels_of(*places, split="test").clean.tolist() == [2, 0]


@pytest.mark.parametrize("names", ["cat,dog,yak", "0,1,2"])
def test_a_clean_label_that_is_empty_among_others_is_not_taken_for_a_class_from_outside(
    tmp_path, x, names
):
    """Such a label would count as wrong, though nothing is known of it."""
    a, b, c = names.split(",")
    tables.write(tmp_path / "y.csv", {"label": [a, c, b, "", c, a], "clean": [a, "", b, "", c, a]})
    assert "row 1" in refusal(x, tmp_path / "y.csv")


def changed(row, column, value, kind=np.float32):
    values = FEATURES.astype(kind)
    values[row, column] = value
    return values


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x": changed(4, 1, np.nan)}, "row 4 of the features"),
        ({"x": changed(5, 0, -np.inf)}, "inf"),
        ({"x": changed(2, 0, 1e39, np.float64)}, "1e+39"),
        ({"x": FEATURES[:, :, None]}, "(N, D)"),
        ({"x": FEATURES[:, 0]}, "(N, D)"),
        ({"x": FEATURES[:0], "y": NUMBERS[:0]}, "(0, 2)"),
        ({"x": FEATURES.astype(complex)}, "complex128"),
        ({"x": FEATURES.astype(str)}, "real numbers"),
        ({"y": NUMBERS[:5]}, "labels"),
        ({"y": NUMBERS[:, None]}, "labels"),
        ({"clean": NUMBERS[:1]}, "clean"),
        ({"split": SPLIT[:2]}, "split"),
        ({"y": NUMBERS / 2}, "labels in"),
        ({"y": NUMBERS - 1}, "-2."),
        ({"y": NUMBERS + 4}, "6."),
        ({"y": NUMBERS.clip(0).astype(np.uint64) << 63}, "from 0 to 5"),
        ({"classes": np.array(["a", "b"])}, "2."),
        ({"y": NAMES, "classes": np.array(["cat", "dog"])}, "'yak'"),
        ({"y": NAMES, "classes": np.array(["cat", "cat"])}, "classes in"),
        ({"y": NAMES, "clean": NUMBERS}, "both names"),
        ({"y": NUMBERS * 0 - 1}, "labels in"),
        ({"y": np.array([""] * 6)}, "labels in"),
        ({"y": np.array([0, 1, 0, 1, 0, np.inf])}, "inf"),
        ({"y": NUMBERS.clip(0), "clean": np.array([0, 1, np.nan, 1, 0, 1])}, "clean"),
        ({"y": None}, "labels"),
        ({"x": None}, "features"),
        ({"X": FEATURES}, "mean the same"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, arrays, complaint):
    arrays = {"x": FEATURES, "y": NUMBERS} | arrays
    path = npz(tmp_path, **{name: each for name, each in arrays.items() if each is not None})
    text = refusal(path)
    assert complaint in text
    assert "data.npz" in text


class Hostile:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.mkdir, (str(self.sentinel),)


def test_no_pickle_is_ever_opened(tmp_path, x):
    hostile = Hostile(tmp_path / "ran")
    objects = np.array([hostile] * 6, dtype=object)
    np.savez(tmp_path / "labels.npz", x=FEATURES, y=objects)
    np.savez(tmp_path / "features.npz", x=objects[:, None], y=NUMBERS)
    np.save(tmp_path / "objects.npy", objects[:, None])
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(hostile))
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(hostile))
    for name in ("labels.npz", "features.npz", "objects.npy", "plain.npz", "plain.npy"):
        assert name in refusal(tmp_path / name)
        assert name in refusal(x, tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_refused(tmp_path):
    path = npz(tmp_path, x=FEATURES, y=NUMBERS)
    content = path.read_bytes()
    for share in (0.0, 0.1, 0.5, 0.9):
        path.write_bytes(content[: int(share * len(content))])
        assert "data.npz" in refusal(path)
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    assert "x.parquet" in refusal(tmp_path / "x.parquet")


@pytest.mark.parametrize("rows", [10**6, 10**17])
def test_a_header_that_promises_more_than_there_is_costs_nothing(tmp_path, rows):
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (rows, 2)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(80))
    assert "x.npy" in refusal(path)


def test_a_missing_file_or_folder_is_refused(tmp_path, x):
    assert "x.npz" in refusal(tmp_path / "x.npz")
    assert str(tmp_path) in refusal(tmp_path)
    assert "y.npy" in refusal(x, tmp_path / "y.npy")


@pytest.mark.parametrize("layout", ["list_", "large_list", "fixed", "columns"])
def test_features_are_read_from_parquet(tmp_path, layout):
    values = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    columns = {"label": ["a", "b", "a", "b", "", "a"], "split": ["train"] * 4 + ["test"] * 2}
    number = pyarrow.float32()
    if layout == "columns":
        columns |= {f"f{place}": values[:, place] for place in range(3)}
    else:
        kind = pyarrow.list_(number, 3) if layout == "fixed" else getattr(pyarrow, layout)(number)
        columns["embedding"] = pyarrow.array(list(values), kind)
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    data = Embeddings(path=tmp_path / "all.parquet")
    assert data.open("train").inputs.numpy().tolist() == values[:4].tolist()
    inputs, labels = data.open("test")
    assert inputs.numpy().tolist() == values[4:].tolist()
    assert labels.classes == ("a", "b")
    assert labels.given.tolist() == [-1, 0]


def test_columns_of_parquet_are_found_whatever_their_case(tmp_path):
    columns = {"Features": [[1.0], [2.0], [3.0]], "LABEL": [*"aba"], "Clean": [*"aab"]}
    columns["Split"] = ["train", "train", "test"]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    data = Embeddings(path=tmp_path / "all.parquet")
    assert data.open("train").inputs.tolist() == [[1.0], [2.0]]
    assert data.open("test").inputs.tolist() == [[3.0]]
    assert data.open("train").labels.clean.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": ["a", "b"]}, "features"),
        ({"label": ["a", "b"], "features": [[1.0], [1.0, 2.0]]}, "one length"),
        ({"label": ["a", "b"], "features": [[1.0], None]}, "features"),
        ({"label": ["a", "b"], "features": [["1.0"], ["2.0"]]}, "x.parquet"),
        ({"label": ["a", "b"], "features": [np.zeros(0, np.float32)] * 2}, "2"),
        ({"features": [[1.0], [2.0]]}, "labels"),
    ],
)
def test_parquet_that_cannot_be_features_is_refused(tmp_path, columns, words):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    assert words in refusal(tmp_path / "x.parquet")


def test_numbers_with_gaps_are_classes_without_examples_and_told_of(tmp_path):
    arrays = {"features": np.ones((100, 2), dtype=np.float32), "labels": np.arange(100) // 10 * 10}
    with pytest.warns(UserWarning, match="81 classes"):
        assert len(labels_of(npz(tmp_path, **arrays)).classes) == 91
    labels_of(npz(tmp_path, **arrays, classes=[f"class {number}" for number in range(91)]))


@pytest.mark.parametrize("index", ["__index_level_0__", "row", "id", "Index"])
def test_an_index_in_parquet_is_no_feature(tmp_path, index):
    columns = {"a": [0.5, 1.5], "b": [2, 3], "label": ["x", "y"], index: [70000, 70001]}
    table = pyarrow.table(columns)
    if index in ("__index_level_0__", "row"):  # as pandas writes the index of rows that were chosen
        about = {"index_columns": [index], "column_indexes": [], "columns": []}
        table = table.replace_schema_metadata({"pandas": json.dumps(about)})
    pyarrow.parquet.write_table(table, tmp_path / "all.parquet")
    inputs = Embeddings(path=tmp_path / "all.parquet").open("train").inputs
    assert inputs.tolist() == [[0.5, 2.0], [1.5, 3.0]]


def test_labels_without_other_columns_have_no_extra(tmp_path, x):
    (tmp_path / "one.csv").write_text("\n".join(NAMES) + "\n")
    assert Embeddings(path=x, labels=tmp_path / "one.csv").extra("train") == {}
    assert Embeddings(path=npz(tmp_path, x=FEATURES, y=NAMES)).extra("train") == {}


def test_a_label_called_nan_is_a_class_and_said_to_be_one(tmp_path):
    names = np.array(["cat", "nan", "dog", "", "nan", "cat"])
    with pytest.warns(UserWarning, match="'nan'"):
        labels = labels_of(npz(tmp_path, x=FEATURES, y=names))
    assert labels.classes == ("cat", "dog", "nan")
    labels_of(npz(tmp_path, x=FEATURES, y=names, classes=["cat", "dog", "nan"]))  # meant so


def test_whole_numbers_of_floating_point_are_classes_and_nan_is_no_label(tmp_path):
    """As pandas has them once one is missing."""
    labels, clean = np.array([2, np.nan, 0, 1, 1, -1.0]), np.array([2.0, np.nan, -1, 1, 0, np.nan])
    found = labels_of(npz(tmp_path, features=FEATURES, labels=labels, clean=clean))
    assert found.given.tolist() == [2, -1, 0, 1, 1, -1]
    assert found.clean.tolist() == [2, -1, -1, 1, 0, -1]
