import json
import os
import pickle
import re

import numpy as np
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


@pytest.mark.parametrize("features", ["features", "embeddings", "embedding", "x", "X"])
@pytest.mark.parametrize("labels", ["labels", "label", "y"])
def test_an_npz_by_any_of_the_names(tmp_path, features, labels):
    inputs, found = Embeddings(path=npz(tmp_path, **{features: FEATURES, labels: NUMBERS})).open(
        "train"
    )
    assert torch.equal(inputs, torch.from_numpy(FEATURES))
    assert found.given.tolist() == NUMBERS.tolist()
    assert found.clean is None
    assert found.classes == ("0", "1", "2")


@pytest.mark.parametrize("kind", ["<f2", ">f4", "<f8", ">f8", "i1", "<i8", ">u2", "?"])
def test_every_kind_of_number_becomes_float32(tmp_path, kind):
    values = FEATURES.round().astype(kind)
    inputs = (
        Embeddings(path=npz(tmp_path, x=np.asfortranarray(values), y=NUMBERS)).open("train").inputs
    )
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous()
    assert_close(inputs, torch.from_numpy(values.astype(np.float32)))


@pytest.mark.parametrize("kind", ["U", "S"])
def test_names_are_sorted_and_empty_ones_are_unlabeled(tmp_path, kind):
    labels = Embeddings(path=npz(tmp_path, x=FEATURES, y=NAMES.astype(kind))).open("train").labels
    assert labels.classes == ("cat", "dog", "yak")
    assert labels.given.tolist() == [0, 2, 1, -1, 2, 0]


def test_given_classes_keep_their_order_and_need_not_occur(tmp_path):
    classes = np.array(["yak", "owl", "dog", "cat"])
    labels = (
        Embeddings(path=npz(tmp_path, x=FEATURES, y=NAMES, classes=classes)).open("train").labels
    )
    assert labels.classes == ("yak", "owl", "dog", "cat")
    assert labels.given.tolist() == [3, 0, 2, -1, 0, 3]
    labels = (
        Embeddings(path=npz(tmp_path, x=FEATURES, y=NUMBERS, classes=classes)).open("train").labels
    )
    assert (labels.given.tolist(), labels.classes) == (
        NUMBERS.tolist(),
        ("yak", "owl", "dog", "cat"),
    )


def test_a_name_that_only_clean_labels_know_is_outside_the_vocabulary(tmp_path):
    clean = np.array(
        ["cat", "emu", "dog", "", "owl", "cat"]
    )  # where there is no label, none may be true
    labels = Embeddings(path=npz(tmp_path, x=FEATURES, y=NAMES, clean=clean)).open("train").labels
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
    path = npz(
        tmp_path,
        x=FEATURES,
        y=NUMBERS,
        split=np.array(["", "val", "train", "", "validation", "train"]),
    )
    assert Embeddings(path=path).open("validation").labels.given.tolist() == [2, 2]
    assert Embeddings(path=path).open("train").labels.given.tolist() == [0, 1, -1, 0]


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    path = npz(tmp_path, x=FEATURES, y=NUMBERS)
    assert "split must be 'train'" in (text := refusal(path, split="test"))
    path = npz(tmp_path, x=FEATURES, y=NUMBERS, split=np.where(SPLIT == "test", "train", SPLIT))
    assert refusal(path, split="test").startswith("split must be")
    path = npz(tmp_path, x=FEATURES, y=NUMBERS, split=np.where(SPLIT == "test", "dev", SPLIT))
    assert "row 1 of split" in (text := refusal(path))
    assert "dev" in text


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_labels_in_a_table(tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    np.save(tmp_path / "x.npy", FEATURES)
    cells = {
        "id": [*"abcdef"],
        "label": [*NAMES.tolist()],
        "clean": ["cat"] * 6,
        "split": SPLIT.tolist(),
    }
    tables.write(tmp_path / f"y.{ending}", cells)
    inputs, labels = Embeddings(path=tmp_path / "x.npy", labels=tmp_path / f"y.{ending}").open(
        "train"
    )
    assert torch.equal(inputs, torch.from_numpy(FEATURES[[0, 2, 3]]))
    assert labels.classes == ("cat", "dog", "yak")
    assert labels.given.tolist() == [0, 1, -1]
    assert labels.clean.tolist() == [0, 0, 0]


@pytest.mark.parametrize("header", ["label\n", "y\n", "", "\ufefflabel\n"])
def test_labels_in_one_column_of_text(tmp_path, header):
    np.save(tmp_path / "x.npy", FEATURES)
    (tmp_path / "y.csv").write_text(header + '0\n2\n1\n""\n2\n0\n', "utf-8")
    labels = Embeddings(path=tmp_path / "x.npy", labels=tmp_path / "y.csv").open("train").labels
    assert labels.given.tolist() == NUMBERS.tolist()
    assert labels.classes == ("0", "1", "2")


def test_numbers_with_leading_zeros_are_names(tmp_path):
    np.save(tmp_path / "x.npy", FEATURES)
    (tmp_path / "y.csv").write_text('label\n007\n7\n10115\n""\n7\n007\n')
    labels = Embeddings(path=tmp_path / "x.npy", labels=tmp_path / "y.csv").open("train").labels
    assert labels.classes == ("007", "10115", "7")
    assert labels.given.tolist() == [0, 2, 1, -1, 2, 0]


def test_labels_in_an_array_of_their_own(tmp_path):
    np.save(tmp_path / "x.npy", FEATURES)
    np.save(tmp_path / "y.npy", NUMBERS)
    assert (
        Embeddings(path=str(tmp_path / "x.npy"), labels=str(tmp_path / "y.npy"))
        .open("train")
        .labels.given[1]
        == 2
    )


def test_a_header_of_another_name_is_one_label_too_many(tmp_path):
    np.save(tmp_path / "x.npy", FEATURES)
    (tmp_path / "y.csv").write_text("kind\n0\n1\n0\n1\n0\n1\n")
    assert "labels" in refusal(tmp_path / "x.npy", tmp_path / "y.csv")


def test_labels_in_two_places_are_refused(tmp_path):
    np.save(tmp_path / "y.npy", NUMBERS)
    assert "labels must be in one file" in refusal(
        npz(tmp_path, x=FEATURES, y=NUMBERS), tmp_path / "y.npy"
    )


def test_a_clean_column_without_a_value_is_no_clean_column(tmp_path):
    np.save(tmp_path / "x.npy", FEATURES)
    (tmp_path / "y.csv").write_text("label,clean\n" + "0,\n" * 6)
    assert (
        Embeddings(path=tmp_path / "x.npy", labels=tmp_path / "y.csv").open("train").labels.clean
        is None
    )


@pytest.mark.parametrize(
    ("kind", "place"), [("names", "npz"), ("names", "csv"), ("numbers", "csv")]
)
def test_clean_labels_of_one_split_alone_leave_those_of_the_other_unknown(tmp_path, kind, place):
    """Else all labels would count as wrong where nothing is known of them."""
    given = NAMES if kind == "names" else np.where(NUMBERS < 0, "", NUMBERS.astype(str))
    truth = np.where(SPLIT == "test", given, "")
    if place == "npz":
        wish = {"path": npz(tmp_path, x=FEATURES, y=given, clean=truth, split=SPLIT)}
    else:
        np.save(tmp_path / "x.npy", FEATURES)
        tables.write(
            tmp_path / "y.csv",
            {"y": [*given.tolist()], "clean": [*truth.tolist()], "split": [*SPLIT.tolist()]},
        )
        wish = {"path": tmp_path / "x.npy", "labels": tmp_path / "y.csv"}
    assert Embeddings(**wish).open("train").labels.clean is None
    assert Embeddings(**wish).open("test").labels.clean.tolist() == [2, 0]


@pytest.mark.parametrize(
    "cells", [["cat", "", "dog", "", "yak", "cat"], ["0", "", "1", "", "2", "0"]]
)
def test_a_clean_label_that_is_empty_among_others_is_not_taken_for_a_class_from_outside(
    tmp_path, cells
):
    """As then the label counted as wrong, of which nothing is known."""
    np.save(tmp_path / "x.npy", FEATURES)
    given = NAMES if "cat" in cells else np.where(NUMBERS < 0, "", NUMBERS.astype(str))
    tables.write(tmp_path / "y.csv", {"label": [*given.tolist()], "clean": cells})
    text = refusal(tmp_path / "x.npy", tmp_path / "y.csv")
    assert "row 1" in text


def changed(row, column, value, kind=np.float32):
    values = FEATURES.astype(kind)
    values[row, column] = value
    return values


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x": changed(4, 1, np.nan), "y": NUMBERS}, "row 4 of the features"),
        (
            {"x": changed(5, 0, -np.inf), "y": NUMBERS},
            "inf",
        ),
        ({"x": changed(2, 0, 1e39, np.float64), "y": NUMBERS}, "1e+39"),
        (
            {"x": FEATURES[:, :, None], "y": NUMBERS},
            "(N, D)",
        ),
        ({"x": FEATURES[:, 0], "y": NUMBERS}, "(N, D)"),
        ({"x": FEATURES[:0], "y": NUMBERS[:0]}, "(0, 2)"),
        (
            {"x": FEATURES.astype(complex), "y": NUMBERS},
            "complex128",
        ),
        ({"x": FEATURES.astype(str), "y": NUMBERS}, "real numbers"),
        ({"x": FEATURES, "y": NUMBERS[:5]}, "labels"),
        ({"x": FEATURES, "y": NUMBERS[:, None]}, "labels"),
        ({"x": FEATURES, "y": NUMBERS, "clean": NUMBERS[:1]}, "clean"),
        ({"x": FEATURES, "y": NUMBERS, "split": SPLIT[:2]}, "split"),
        ({"x": FEATURES, "y": NUMBERS / 2}, "labels in"),
        ({"x": FEATURES, "y": NUMBERS - 1}, "got -2."),
        ({"x": FEATURES, "y": NUMBERS * 1000}, "got -1000."),
        ({"x": FEATURES, "y": NUMBERS + 4}, "got 6."),
        ({"x": FEATURES, "y": NUMBERS.clip(0).astype(np.uint64) << 63}, "from 0 to 5"),
        ({"x": FEATURES, "y": NUMBERS, "classes": np.array(["a", "b"])}, "got 2."),
        ({"x": FEATURES, "y": NAMES, "classes": np.array(["cat", "dog"])}, "'yak'"),
        ({"x": FEATURES, "y": NAMES, "classes": np.array(["cat", "cat"])}, "classes in"),
        (
            {"x": FEATURES, "y": NAMES, "clean": NUMBERS},
            "both names",
        ),
        ({"x": FEATURES, "y": NUMBERS * 0 - 1}, "labels in"),
        ({"x": FEATURES, "y": np.array([""] * 6)}, "labels in"),
        (
            {"x": FEATURES},
            "labels",
        ),
        ({"y": NUMBERS}, "features"),
        ({"x": FEATURES, "X": FEATURES, "y": NUMBERS}, "mean the same"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, arrays, complaint):
    text = refusal(npz(tmp_path, **arrays))
    assert complaint in text
    assert "data.npz" in text


class Hostile:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.mkdir, (str(self.sentinel),)


def test_no_pickle_is_ever_opened(tmp_path):
    sentinel = tmp_path / "ran"
    objects = np.array([Hostile(sentinel)] * 6, dtype=object)
    np.savez(tmp_path / "labels.npz", x=FEATURES, y=objects)
    np.savez(tmp_path / "features.npz", x=objects[:, None], y=NUMBERS)
    np.save(tmp_path / "objects.npy", objects[:, None])
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(Hostile(sentinel)))
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(Hostile(sentinel)))
    np.save(tmp_path / "x.npy", FEATURES)
    for name in ("labels.npz", "features.npz", "objects.npy", "plain.npz", "plain.npy"):
        why = "it is not a file of numpy" if "plain" in name else "it holds objects"
        assert f"{name} cannot be read: {why}" in refusal(tmp_path / name)
        assert f"{name} cannot be read: {why}" in refusal(tmp_path / "x.npy", tmp_path / name)
    assert not sentinel.exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_damaged_files_are_refused(tmp_path, share):
    path = npz(tmp_path, x=FEATURES, y=NUMBERS)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert "data.npz" in refusal(path)


@pytest.mark.parametrize("rows", [10**6, 10**17])
def test_a_header_that_promises_more_than_there_is_costs_nothing(tmp_path, rows):
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (rows, 2)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(80))
    assert "x.npy" in refusal(path)


def test_a_missing_file_or_folder_is_refused(tmp_path):
    assert str(tmp_path / "x.npz") in refusal(tmp_path / "x.npz")
    assert "does not exist" in refusal(tmp_path)
    np.save(tmp_path / "x.npy", FEATURES)
    assert "y.npy with labels" in refusal(tmp_path / "x.npy", tmp_path / "y.npy")


@pytest.mark.parametrize("layout", ["list_", "large_list", "fixed", "columns"])
def test_features_are_read_from_parquet(tmp_path, layout):
    pyarrow = pytest.importorskip("pyarrow")
    values = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    columns = {"label": ["a", "b", "a", "b", "", "a"], "split": ["train"] * 4 + ["test"] * 2}
    if layout == "fixed":
        columns["embedding"] = pyarrow.array(list(values), pyarrow.list_(pyarrow.float32(), 3))
    elif layout != "columns":
        columns["embedding"] = pyarrow.array(
            list(values), getattr(pyarrow, layout)(pyarrow.float32())
        )
    else:
        columns |= {f"f{number}": values[:, number] for number in range(3)}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    train, test = (
        Embeddings(path=tmp_path / "all.parquet").open(split) for split in ("train", "test")
    )
    assert train.inputs.numpy().tolist() == values[:4].tolist()
    assert test.inputs.numpy().tolist() == values[4:].tolist()
    assert train.labels.classes == ("a", "b")
    assert test.labels.given.tolist() == [-1, 0]


def test_columns_of_parquet_are_found_whatever_their_case(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    columns = {
        "Features": [[1.0], [2.0], [3.0]],
        "LABEL": ["a", "b", "a"],
        "Clean": ["a", "a", "b"],
    }
    columns["Split"] = ["train", "train", "test"]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    train, test = (
        Embeddings(path=tmp_path / "all.parquet").open(split) for split in ("train", "test")
    )
    assert train.inputs.tolist() == [[1.0], [2.0]]
    assert test.inputs.tolist() == [[3.0]]
    assert train.labels.clean.tolist() == [0, 0]


def test_rows_for_testing_are_not_learned_for_the_sake_of_a_capital_letter(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    columns = {
        "features": [[1.0], [2.0], [3.0]],
        "label": ["a", "b", "a"],
        "Split": ["train", "train", "test"],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    assert Embeddings(path=tmp_path / "all.parquet").open("train").inputs.tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": ["a", "b"]}, "features in"),
        ({"label": ["a", "b"], "features": [[1.0], [1.0, 2.0]]}, "all of one length"),
        ({"label": ["a", "b"], "features": [[1.0], None]}, "features"),
        (
            {"label": ["a", "b"], "features": [["1.0"], ["2.0"]]},
            "x.parquet",
        ),
        ({"label": ["a", "b"], "features": [np.zeros(0, np.float32)] * 2}, "2"),
        ({"features": [[1.0], [2.0]]}, "no labels"),
    ],
)
def test_parquet_that_cannot_be_features_is_refused(tmp_path, columns, words):
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=words):
        Embeddings(path=tmp_path / "x.parquet").open("train")


def test_a_damaged_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        Embeddings(path=tmp_path / "x.parquet").open("train")


def test_numbers_with_gaps_are_classes_without_examples_and_told_of(tmp_path):
    arrays = {"features": np.ones((100, 2), dtype=np.float32), "labels": np.arange(100) // 10 * 10}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.warns(
        UserWarning,
        match="leave 81 classes without examples",
    ):
        assert len(Embeddings(path=tmp_path / "a.npz").open("train").labels.classes) == 91
    np.savez(tmp_path / "b.npz", **arrays, classes=[f"class {number}" for number in range(91)])
    Embeddings(path=tmp_path / "b.npz").open("train")


@pytest.mark.parametrize("index", ["__index_level_0__", "row", "id", "Index"])
def test_an_index_in_parquet_is_no_feature(tmp_path, index):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(
        {"a": [0.5, 1.5], "b": [2, 3], "label": ["x", "y"], index: [70000, 70001]}
    )
    if index in ("__index_level_0__", "row"):  # as pandas writes the index of rows that were chosen
        about = {"index_columns": [index], "column_indexes": [], "columns": []}
        table = table.replace_schema_metadata({"pandas": json.dumps(about)})
    pyarrow.parquet.write_table(table, tmp_path / "all.parquet")
    assert Embeddings(path=tmp_path / "all.parquet").open("train").inputs.tolist() == [
        [0.5, 2.0],
        [1.5, 3.0],
    ]


def test_other_columns_of_the_table_of_labels_are_extra(tmp_path):
    np.save(tmp_path / "f.npy", FEATURES)
    lines = [
        f"t{row},{name},{split}" for row, (name, split) in enumerate(zip(NAMES, SPLIT, strict=True))
    ]
    (tmp_path / "l.csv").write_text("\n".join(["text,label,split", *lines]) + "\n")
    data = Embeddings(path=tmp_path / "f.npy", labels=tmp_path / "l.csv")
    assert [data.extra(split) for split in ("train", "test")] == [
        {"text": ["t0", "t2", "t3"]},
        {"text": ["t1", "t5"]},
    ]
    (tmp_path / "one.csv").write_text("\n".join(NAMES) + "\n")
    assert Embeddings(path=tmp_path / "f.npy", labels=tmp_path / "one.csv").extra("train") == {}
    assert Embeddings(path=npz(tmp_path, x=FEATURES, y=NAMES)).extra("train") == {}


def test_a_label_called_nan_is_a_class_and_said_to_be_one(tmp_path):
    names = np.array(["cat", "nan", "dog", "", "nan", "cat"])
    with pytest.warns(UserWarning, match=r"'nan' is taken for a class in .*, 2 times"):
        labels = Embeddings(path=npz(tmp_path, x=FEATURES, y=names)).open("train").labels
    assert labels.classes == ("cat", "dog", "nan")
    Embeddings(path=npz(tmp_path, x=FEATURES, y=names, classes=["cat", "dog", "nan"])).open(
        "train"
    )  # meant so


def test_whole_numbers_of_floating_point_are_classes_and_nan_is_no_label(tmp_path):
    """As pandas has them once one is missing."""
    labels, clean = np.array([2, np.nan, 0, 1, 1, -1.0]), np.array([2.0, np.nan, -1, 1, 0, np.nan])
    np.savez(tmp_path / "all.npz", features=FEATURES, labels=labels, clean=clean)
    found = Embeddings(path=tmp_path / "all.npz").open("train").labels
    assert found.given.tolist() == [2, -1, 0, 1, 1, -1]
    assert found.clean.tolist() == [2, -1, -1, 1, 0, -1]


@pytest.mark.parametrize("odd", [0.5, np.inf, 1e300])
def test_numbers_that_are_not_whole_are_no_classes(tmp_path, odd):
    np.savez(tmp_path / "all.npz", features=FEATURES, labels=np.array([0, 1, 0, 1, 0, odd]))
    told = rf"labels in .* got \[{re.escape(str(odd))}\]"
    with pytest.raises(ValueError, match=told):
        Embeddings(path=tmp_path / "all.npz").open("train")


def test_a_true_label_that_is_nan_among_others_is_refused(tmp_path):
    np.savez(
        tmp_path / "all.npz",
        features=FEATURES,
        labels=np.arange(6) % 2,
        clean=[0, 1, np.nan, 1, 0, 1],
    )
    with pytest.raises(ValueError, match="clean"):
        Embeddings(path=tmp_path / "all.npz").open("train")
