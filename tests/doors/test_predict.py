"""Labels for examples that no run has seen."""

import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from doors.conftest import made
from PIL import Image

from nearsay.batch import Predictions
from nearsay.data import tables
from nearsay.doors import predict
from nearsay.training import evaluate


def test_features_of_any_file_get_the_label_that_evaluation_finds(finished, tmp_path):
    inputs, labels = made().experiment.data.open("test")
    np.save(tmp_path / "a.npy", inputs.numpy())
    np.savez(tmp_path / "b.npz", features=inputs.numpy(), labels=labels.given.numpy())
    columns = {f"feature{number}": inputs[:, number].tolist() for number in range(32)}
    # Columns of words are passed over, as training does.
    words = {"label": ["?"] * len(inputs), "id": ["text"] * len(inputs)}
    tables.write(tmp_path / "c.parquet", {**words, **columns})
    arrow = pyarrow.table({**words, "embedding": list(inputs.numpy())})
    pyarrow.parquet.write_table(arrow, tmp_path / "d.parquet")
    first, *others = (
        predict.predict(finished, [tmp_path / name])
        for name in ("a.npy", "b.npz", "c.parquet", "d.parquet")
    )
    assert all(other.labels == first.labels for other in others)
    truth = map(str, labels.given.tolist())
    hits = sum(label == true for label, true in zip(first.labels, truth, strict=True))
    assert hits / len(inputs) == pytest.approx(evaluate.evaluate(finished)["accuracy"])
    assert first.paths[:2] == [f"{tmp_path}/a.npy:0", f"{tmp_path}/a.npy:1"]
    assert first.errors == {}
    np.testing.assert_allclose(first.probabilities.sum(axis=1), 1, atol=1e-5)


def test_two_files_of_features_follow_each_other(finished, tmp_path):
    rows = np.random.default_rng(0).normal(size=(5, 32))
    for name, part in (("a", rows[:2]), ("b", rows[2:]), ("all", rows)):
        np.save(tmp_path / f"{name}.npy", part)
    parts = predict.predict(finished, [tmp_path / "a.npy", tmp_path / "b.npy"])
    whole = predict.predict(finished, tmp_path / "all.npy")
    np.testing.assert_array_equal(parts.probabilities, whole.probabilities)
    assert parts.paths[-1] == f"{tmp_path}/b.npy:2"


def test_a_row_of_features_that_is_not_finite_costs_no_other_row(finished, tmp_path):
    rows = np.random.default_rng(0).normal(size=(5, 32))
    np.save(tmp_path / "whole.npy", rows)
    rows[1, 3], rows[4, 0] = np.nan, 1e300
    np.save(tmp_path / "odd.npy", rows)
    odd = predict.predict(finished, tmp_path / "odd.npy").to_columns()
    whole = predict.predict(finished, tmp_path / "whole.npy").to_columns()
    for column in ("label", "probability"):
        expected = [None if row in (1, 4) else cell for row, cell in enumerate(whole[column])]
        assert odd[column] == expected
    assert [row for row, error in enumerate(odd["error"]) if error] == [1, 4]
    assert f"{tmp_path}/odd.npy:4" in odd["error"][4]


def test_arrays_tensors_and_tables_get_the_same_answer_in_their_own_kind(finished):
    rows = np.random.default_rng(0).normal(size=(4, 32))
    table = predict.predict(finished, rows)
    assert table.paths is None
    assert list(table.to_columns()) == ["index", "label", "probability", "error"]
    of_tensor = predict.predict(finished, torch.from_numpy(rows))
    assert isinstance(of_tensor.probabilities, torch.Tensor)
    of_lists = predict.predict(finished, rows.tolist())
    for other in (of_tensor, of_lists):
        np.testing.assert_array_equal(np.asarray(other.probabilities), table.probabilities)
        assert other.labels == table.labels
    rows[2, 0] = np.inf
    odd = predict.predict(finished, rows)
    assert odd.labels[2] is None
    assert np.isnan(odd.probabilities[2]).all()
    assert list(odd.errors) == [2]
    # The array of the user is as it was.
    assert rows[2, 0] == np.inf


class Table:
    """What is asked of a table of pandas."""

    iloc = None

    def __init__(self, rows, index):
        self.rows, self.index = rows, index

    def to_numpy(self):
        return self.rows


def test_the_index_of_a_table_stays_with_its_rows(finished):
    rows = np.random.default_rng(0).normal(size=(3, 32))
    table = predict.predict(finished, Table(rows, ["x", "y", "z"]))
    assert table.index == ["x", "y", "z"]
    assert table.labels == predict.predict(finished, rows).labels


def test_a_pandas_table_keeps_its_index(finished):
    pandas = pytest.importorskip("pandas")
    rows = np.random.default_rng(0).normal(size=(3, 32))
    frame = predict.predict(finished, pandas.DataFrame(rows, index=["x", "y", "z"])).to_frame()
    assert list(frame.index) == ["x", "y", "z"]
    assert list(frame.columns) == ["label", "probability", "error"]


@pytest.mark.parametrize("data", [np.zeros(32), np.zeros((0, 32)), np.zeros((2, 3, 4)), []])
def test_an_array_of_another_shape_is_refused(finished, data):
    with pytest.raises(ValueError, match="data"):
        predict.predict(finished, data)


def make_table(names, logits, indices, errors):
    predictions = Predictions(
        torch.zeros(len(logits), 1), torch.tensor(logits), torch.tensor(indices)
    )
    return predict._label_table(names, len(names), predictions, errors, ("no", "yes"), None)


def test_what_cannot_be_read_is_a_row_with_an_error():
    errors = {1: "is broken"}
    columns = make_table(["a", "b", "c"], [[0.0, 1.0], [2.0, 0.0]], [2, 0], errors).to_columns()
    assert columns["path"] == ["a", "b", "c"]
    assert columns["label"] == ["no", None, "yes"]
    assert columns["probability"] == [pytest.approx(0.880797), None, pytest.approx(0.731059)]
    assert columns["error"] == [None, "is broken", None]


def test_a_name_that_is_no_text_costs_no_other_row(tmp_path):
    names = ["b\udcff.png", "ünï.png"]
    columns = make_table(names, [[0.0, 1.0], [2.0, 0.0]], [0, 1], {}).to_columns()
    tables.write(tmp_path / "labels.csv", columns)
    written = tables.read(tmp_path / "labels.csv").columns["path"]
    assert written == ["b\\udcff.png", "ünï.png"]


def test_images_are_found_in_folders_and_keep_the_names_they_were_given_by(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hidden = ("in/.hidden.png", "in/.git/c.png", "in/notes.txt")
    for name in ("in/b.png", "in/sub/a.JPG", "other/d.png", *hidden):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name, "PNG")
    names, files = predict._images([Path("in"), Path("other/d.png")])
    assert names == ["in/b.png", "in/sub/a.JPG", "other/d.png"]
    assert files.root == tmp_path
    assert files.names == ("in/b.png", "in/sub/a.JPG", "other/d.png")


def test_a_table_names_images_below_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "list.csv").write_text("label,path\ncat,a.png\ndog,sub/b.png\n")
    names, files = predict._images([Path("in/list.csv")])
    assert names == ["in/a.png", "in/sub/b.png"]
    assert files.root == tmp_path / "in"


@pytest.mark.parametrize("content", ["label\ncat\n", "path,label\n,cat\na.png,dog\n", "path\n"])
def test_a_table_without_paths_is_refused(tmp_path, content):
    (tmp_path / "list.csv").write_text(content)
    with pytest.raises(ValueError, match=r"list\.csv.* path"):
        predict._images([tmp_path / "list.csv"])


def broken_features(folder):
    np.savez(folder / "many.npz", a=np.zeros((2, 3)), b=np.zeros((2, 3)))
    np.save(folder / "flat.npy", np.zeros(3))
    np.save(folder / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    (folder / "text.npy").write_text("nothing")
    tables.write(folder / "words.parquet", {"x": ["a", "b"]})
    tables.write(folder / "labels.parquet", {"label": ["a", "b"]})


def test_files_that_hold_no_features_are_refused(tmp_path):
    broken_features(tmp_path)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=re.escape(path.name)):
            predict._read_features(path)


@pytest.mark.parametrize("data", ["nowhere", ["nowhere/"], None])
def test_a_path_that_does_not_exist_and_is_no_image_is_refused(data):
    with pytest.raises(ValueError, match=r"^data"):
        predict._read_inputs(data)
