"""A user's arrays: every kind that is read, and every mistake that is refused."""

import math

import numpy as np
import pytest
import torch
from label_issues.helpers import NAN, blobs, generator
from scipy import sparse
from torch.testing import assert_close

from nearsay.label_issues import audit, inputs


def test_features_on_disk_are_not_copied(tmp_path):
    features, _, given = blobs()
    np.save(tmp_path / "features.npy", features.numpy())
    on_disk = np.load(tmp_path / "features.npy", mmap_mode="r")
    read = inputs.read_inputs(given, None, on_disk, None, None).features
    assert read.data_ptr() == on_disk.ctypes.data
    assert torch.equal(
        audit(given, features=on_disk).scores, audit(given, features=features).scores
    )
    backward = audit(given, features=features.numpy()[:, ::-1])
    assert_close(backward.scores, audit(given, features=features).scores)


@pytest.mark.parametrize(
    "labels", [[None, 2, 0], np.array([NAN, 2, 0], object), [NAN, 2, 0], torch.tensor([NAN, 2, 0])]
)
def test_none_and_nan_are_unlabeled(labels):
    read = inputs.read_inputs(labels, torch.eye(3), None, None, None)
    assert read.labels.tolist() == [-1, 2, 0]


# An empty cell of a CSV file is read as text.
@pytest.mark.parametrize("none", [None, NAN, ""])
def test_empty_names_are_unlabeled(none):
    read = inputs.read_inputs([none, "b", "a"], None, torch.eye(3), None, None)
    assert (read.labels.tolist(), read.classes) == ([-1, 1, 0], ("a", "b"))


def test_dynamics_without_training_are_unknown():
    dynamics = {
        "confidence": [0.5, NAN, 0.7, 0.9],
        "margin": [1.0, 2.0, NAN, 3.0],
        "count": [0, 1, 1, 2],
    }
    read = inputs.read_inputs([0, 1, 0, 1], None, None, dynamics, None).dynamics
    assert_close(read.confidence, torch.tensor([NAN, NAN, NAN, 0.9]), equal_nan=True)
    assert_close(read.margin, torch.tensor([NAN, NAN, NAN, 3.0]), equal_nan=True)


def test_the_first_row_that_is_not_finite_is_named_in_any_chunk(monkeypatch):
    monkeypatch.setattr(inputs, "_CHUNK", 4)
    features = torch.ones(9, 2).masked_fill(torch.arange(9)[:, None] >= 5, NAN)
    with pytest.raises(ValueError, match=r"features .*row 5"):
        inputs.read_inputs([0] * 9, None, features, None, None)


def test_labels_are_the_numbers_that_classes_list():
    labels = [17, -1, 3, 90210]
    numbers = np.array([3, 17, 90210])
    for classes in (
        numbers.tolist(),
        numbers,
        numbers.astype(float),
        numbers.astype("float32"),
        torch.tensor(numbers),
    ):
        read = inputs.read_inputs(
            labels, torch.eye(4)[:, :3].index_fill(0, torch.tensor(3), 1 / 3), None, None, classes
        )
        assert (read.labels.tolist(), read.classes) == ([1, -1, 0, 2], ("3", "17", "90210"))
    # As the columns stand.
    read = inputs.read_inputs([0, 1, 1], torch.eye(3), None, None, [2, 0, 1])
    assert read.labels.tolist() == [1, 2, 2]
    read = inputs.read_inputs([-1, 1], torch.eye(2), None, None, [-1, 1])
    assert read.labels.tolist() == [0, 1]


class Table:
    """A table with named columns that turns into an array, as of pandas and polars."""

    def __init__(self, columns, values):
        self.columns, self.values = columns, values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


@pytest.mark.parametrize(
    ("labels", "columns", "classes", "wanted"),
    [
        (["a", "b", "c"], ["c", "a", "b"], None, [1, 2, 0]),
        ([0, 1, 2], [2, 0, 1], None, [1, 2, 0]),
        ([0, 1, 2], ["c", "a", "b"], ["b", "a", "c"], [2, 1, 0]),
        # These names are no classes.
        (["a", "b", "c"], ["column_2", "column_0", "column_1"], None, [0, 1, 2]),
        ([0, 1, 2], ["c", "a", "b"], None, [0, 1, 2]),
        # The numbers of columns without a name.
        (["0", "1", "2"], [0, 1, 2], ["2", "0", "1"], [0, 1, 2]),
        (["0", "1", "2"], ["0", "1", "2"], ["2", "0", "1"], [2, 0, 1]),
    ],
)
def test_columns_named_after_classes_may_be_in_any_order(labels, columns, classes, wanted):
    probabilities = np.array([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6]])
    read = inputs.read_inputs(
        labels, Table(columns, probabilities), None, None, classes
    ).probabilities
    assert_close(read.double(), torch.from_numpy(probabilities[:, wanted]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "columns", "classes", "odd", "missing"),
    [
        (["a", "b", "c"], ["b", "c", "A"], None, "A", "a"),
        (["a", "b", "a"], ["d", "a", "b"], ["a", "b", "c"], "d", "c"),
        ([0, 1, 2], ["0", "1", "none"], None, "none", "2"),
        ([3, 17, 3], [17, 3, 90211], [3, 17, 90210], "90211", "90210"),
    ],
)
def test_columns_must_be_named_after_all_classes_or_none(labels, columns, classes, odd, missing):
    probabilities = np.full((3, 3), 1 / 3)
    with pytest.raises(ValueError, match=f"probabilities .*'{missing}'.*'{odd}'"):
        audit(labels, probabilities=Table(columns, probabilities), classes=classes)
    audit(labels, probabilities=Table(["x", "y", "z"], probabilities), classes=classes)


def test_masked_cells_are_missing():
    mask = [True, False, False, False]
    probabilities = torch.full((4, 3), 1 / 3)
    for labels in ([1, 2, 0, 1], ["b", "c", "a", "b"], [7.0, 2.0, 0.0, 1.0]):
        masked = np.ma.masked_array(labels, mask)
        read = inputs.read_inputs(masked, probabilities, None, None, None)
        assert read.labels.tolist() == [-1, 2, 0, 1]
        assert len(read.classes) == 3
    confidence = np.ma.masked_array([0.9, 0.1, 0.2, 0.3], mask)
    dynamics = {"confidence": confidence, "margin": [1.0] * 4}
    read = inputs.read_inputs([0, 1, 0, 1], None, None, dynamics, None).dynamics
    assert read.confidence.isnan().tolist() == read.margin.isnan().tolist() == mask
    features = np.ma.masked_array(np.eye(4), mask=False)
    read = inputs.read_inputs([0, 1, 0, 1], None, features, None, None)
    assert read.features.tolist() == np.eye(4).tolist()


def test_dynamics_of_sixteen_bits_and_images_of_numpy_are_read():
    features, _, given = blobs(60)
    confidence = torch.linspace(0, 1, 60).bfloat16()
    one, other = (
        audit(given, dynamics={"confidence": each, "margin": each})
        for each in (confidence, confidence.float())
    )
    assert torch.equal(one.scores, other.scores)
    images = torch.randint(256, (60, 3, 32, 32), generator=generator(), dtype=torch.uint8)
    one, other = (audit(given, features=features, images=each) for each in (images, images.numpy()))
    assert torch.equal(one.ood_scores, other.ood_scores)


GOOD = {"probabilities": [[0.5, 0.5], [0.1, 0.9]]}


def of_two(**arrays):
    return [0, 1], arrays


@pytest.mark.parametrize(
    ("case", "field"),
    [
        (([0, 1], {}), "labels"),
        (([0, 2], GOOD), "labels"),
        (([0, -2], GOOD), "labels"),
        (([0.0, 1.5], GOOD), "labels"),
        (([True, False], GOOD), "labels"),
        (([[0], [1]], GOOD), "labels"),
        ((["a", "b"], {**GOOD, "classes": ["a", "c"]}), "labels"),
        ((torch.arange(2).to_sparse(), GOOD), "labels .*to_dense"),
        (([2**70, 1], GOOD), f"labels .*{2**70}"),
        ((np.array([2**64 - 1, 1], np.uint64), GOOD), "labels"),
        (of_two(**GOOD, classes=["a", "a"]), "classes"),
        (of_two(**GOOD, classes={0: "a", 1: "b"}), "classes"),
        (of_two(**GOOD, classes=[]), "classes"),
        (of_two(**GOOD, k=0), "k"),
        ((["a", "a"], GOOD), "probabilities"),
        (of_two(probabilities=[[3.0, -1.0], [0.5, 0.5]]), "probabilities .*softmax"),
        (of_two(probabilities=[[0.5, NAN], [0.5, 0.5]]), "probabilities .*row 0"),
        (of_two(probabilities=[0.5, 0.5]), "probabilities"),
        (of_two(probabilities=sparse.coo_array(np.eye(2))), "probabilities .*toarray"),
        (of_two(probabilities=np.ma.masked_less(np.eye(2), 1)), "probabilities .*row 0"),
        (of_two(features=np.array([np.ones(2), None], object)), "features .*numpy.stack"),
        (of_two(features=[[0.5, math.inf], [0.5, 0.5]]), "features .*row 0"),
        (of_two(features=np.array([[1, "a"], [2, "b"]], object)), "features"),
        (of_two(features=np.eye(2) * 1j), "features"),
        (of_two(features=sparse.csr_matrix(np.eye(2))), "features .*toarray"),
        (of_two(features=torch.eye(2).to_sparse()), "features .*to_dense"),
        (of_two(features=np.ma.masked_equal(np.eye(2), 1)), "features .*row 0"),
        (of_two(features=torch.ones(3, 2)), "features"),
        (of_two(features=[[1.0, 2.0], [3.0]]), "features"),
        (of_two(dynamics={"confidence": [0.1, 0.2]}), "dynamics .*margin"),
        (of_two(dynamics={"confidence": [[0.1]] * 2, "margin": [[1.0]] * 2}), "dynamics"),
        (of_two(dynamics={"confidence": [0.1, -0.5], "margin": [1.0, 1.0]}), "dynamics"),
        (of_two(dynamics={"confidence": [0.1, 0.2], "margin": [10**400, 1.0]}), "dynamics"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(case, field):
    labels, arrays = case
    with pytest.raises(ValueError, match=rf"^{field}"):
        audit(labels, **arrays)
