"""NCRClassifier keeps the contract of scikit-learn, resists wrong labels and finds them."""

import re

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_digits, make_blobs
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from nearsay.batch import Outputs
from nearsay.integrations.sklearn import NCRClassifier, _even_size, _label_quality, _merged, _Table
from nearsay.label_issues import audit
from nearsay.losses import CrossEntropy

FAST = {"hidden": (16,), "epochs": 4, "learning_rate": 0.03, "random_state": 0}


@parametrize_with_checks([NCRClassifier((32,), epochs=6, learning_rate=0.03, random_state=0)])
def test_scikit_learn_is_content(estimator, check):
    check(estimator)


def blobs(num=240, *, seed=0, share=0.0):
    """Features, given labels and true ones."""
    rows, truth = make_blobs(
        n_samples=num, centers=3, n_features=5, cluster_std=1.0, random_state=seed
    )
    generator = np.random.RandomState(seed)
    is_drawn = generator.rand(num) < share
    return rows, np.where(is_drawn, generator.randint(0, 3, num), truth), truth


def digits(share):
    rows, truth = load_digits(return_X_y=True)
    generator = np.random.RandomState(1)
    given = np.where(
        generator.rand(len(truth)) < share, generator.randint(0, 10, len(truth)), truth
    )
    return rows / 16, given, truth


def test_neighbors_help_against_wrong_labels():
    rows, given, truth = digits(0.5)
    choices = {"hidden": (64,), "epochs": 30, "learning_rate": 0.01, "random_state": 0}
    with_neighbors, without = (
        NCRClassifier(alpha=alpha, **choices)
        .fit(rows[:1200], given[:1200])
        .score(rows[1200:], truth[1200:])
        for alpha in (0.9, 0.0)
    )
    assert with_neighbors > 0.88
    assert with_neighbors > without + 0.06


@pytest.mark.parametrize("hidden", [()])
def test_low_quality_finds_wrong_labels(hidden):
    rows, given, truth = digits(0.3)
    quality = NCRClassifier(hidden, epochs=5, random_state=0).fit(rows, given).label_quality_
    assert quality.shape == (len(rows),)
    assert quality.min() >= 0
    assert quality.max() <= 1
    assert roc_auc_score(given == truth, quality) > 0.98


def test_quality_is_the_mean_of_confidence_and_agreement():
    class Network(torch.nn.Module):
        def forward(self, inputs):
            return Outputs(inputs[:, :2], inputs[:, 2:])

    rows = np.array(
        [[1, 0, 0, 0], [1, 0.1, 0, 0], [0.1, 1, 0, np.log(3)], [0, 1, 0, np.log(3)]],
        dtype=np.float32,
    )
    table = _Table(rows, np.array([0, 1, 1, -1]), np.ones(4))
    # Each has one labeled neighbor: 0 and 1 each other, 2 has 1; the last has no label to judge.
    expected = [(0.5 + 0) / 2, (0.5 + 0) / 2, (0.75 + 1) / 2, np.nan]
    np.testing.assert_allclose(_label_quality(Network(), table, k=1, seed=0), expected, rtol=1e-6)


def test_equal_rows_become_one_with_the_sum_of_their_weights():
    rows = np.array([[2, 3], [0, 1], [2, 3], [2, 3], [0, 1]], dtype=np.float32)
    table, places = _merged(rows, np.array([1, 0, 1, 0, -1]), np.array([1.0, 2.0, 3.0, 4.0, 6.0]))
    kept = {
        (*row, code): weight
        for row, code, weight in zip(table.inputs.tolist(), table.codes, table.weights, strict=True)
        for row in [tuple(row)]
    }
    assert kept == {(2, 3, 1): 1.0, (0, 1, 0): 0.5, (2, 3, 0): 1.0, (0, 1, -1): 1.5}
    np.testing.assert_array_equal(table.inputs[places], rows)
    np.testing.assert_array_equal(table.codes[places], [1, 0, 1, 0, -1])


def test_the_order_of_rows_does_not_matter():
    rows, given, _ = blobs(share=0.2)
    order = np.random.RandomState(3).permutation(len(rows))
    one = NCRClassifier(**FAST).fit(rows, given)
    other = NCRClassifier(**FAST).fit(rows[order], given[order])
    np.testing.assert_array_equal(one.predict_proba(rows), other.predict_proba(rows))
    np.testing.assert_array_equal(one.label_quality_[order], other.label_quality_)


def test_a_weight_counts_as_so_many_rows_and_only_its_proportion():
    rows, given, _ = blobs(share=0.2)
    weights = np.arange(len(rows)) % 3
    weighted = NCRClassifier(**FAST).fit(rows, given, sample_weight=weights)
    scaled = NCRClassifier(**FAST).fit(rows, given, sample_weight=weights * 0.5)
    repeated = NCRClassifier(**FAST).fit(rows.repeat(weights, axis=0), given.repeat(weights))
    plain = NCRClassifier(**FAST).fit(rows, given)
    np.testing.assert_array_equal(weighted.predict_proba(rows), repeated.predict_proba(rows))
    np.testing.assert_array_equal(weighted.predict_proba(rows), scaled.predict_proba(rows))
    assert np.abs(weighted.predict_proba(rows) - plain.predict_proba(rows)).max() > 1e-3
    np.testing.assert_array_equal(np.isnan(weighted.label_quality_), weights == 0)


@pytest.mark.parametrize("state", [7, np.random.RandomState(7)])
def test_a_random_state_decides_everything(state):
    rows, given, _ = blobs(share=0.2)
    again = 7 if state == 7 else np.random.RandomState(7)
    one, other, third = (
        NCRClassifier((8,), epochs=2, random_state=each).fit(rows, given).predict_proba(rows)
        for each in (state, again, 8)
    )
    np.testing.assert_array_equal(one, other)
    assert np.abs(one - third).max() > 1e-3


def test_without_a_random_state_fits_differ_and_global_draws_of_torch_stay():
    rows, given, _ = blobs()
    before = torch.get_rng_state()
    one, other = (
        NCRClassifier((8,), epochs=1).fit(rows, given).predict_proba(rows) for _ in range(2)
    )
    assert np.abs(one - other).max() > 1e-3
    assert torch.get_rng_state().equal(before)


def test_unlabeled_rows_are_marked_by_an_explicit_value():
    rows, given, truth = blobs()
    given = given.copy()
    given[30:] = -1
    plain = NCRClassifier(**FAST).fit(rows, given)
    np.testing.assert_array_equal(plain.classes_, [-1, 0, 1, 2])
    assert not np.isnan(plain.label_quality_).any()
    marked = NCRClassifier((64,), alpha=0.5, learning_rate=0.02, unlabeled=-1, random_state=0).fit(
        rows, given
    )
    np.testing.assert_array_equal(marked.classes_, [0, 1, 2])
    np.testing.assert_array_equal(np.isnan(marked.label_quality_), given == -1)
    assert marked.score(rows[30:], truth[30:]) > 0.9
    alone = NCRClassifier((64,), alpha=0.5, learning_rate=0.02, random_state=0).fit(
        rows[:30], given[:30]
    )
    # The others took part.
    assert np.abs(alone.predict_proba(rows) - marked.predict_proba(rows)).max() > 1e-3


def test_it_serves_in_a_pipeline_under_grid_search():
    rows, given, _ = blobs(share=0.1)
    pipeline = make_pipeline(StandardScaler(), NCRClassifier(**FAST))
    grid = {
        "ncrclassifier__alpha": np.array([0.1, 0.9]),
        "ncrclassifier__objective": [None, CrossEntropy()],
        "ncrclassifier__epochs": np.array([3]),
    }
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise")
    search.fit(rows, given, ncrclassifier__sample_weight=np.ones(len(rows)))
    assert search.best_score_ > 0.6
    assert len(search.cv_results_["params"]) == 4


@pytest.mark.parametrize(
    ("num_rows", "most", "fewest", "expected"),
    [(50_000, 512, 32, 510), (100, 512, 32, 25), (30, 512, 32, 30), (3, 2, 32, 3)],
)
def test_batches_are_even_and_leave_out_next_to_nothing(num_rows, most, fewest, expected):
    size = _even_size(num_rows, most, fewest=fewest)
    assert size == expected
    assert num_rows % size < num_rows // size


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", (8, 0)),
        ("alpha", 1.5),
        ("k", 0),
        ("epochs", 0),
        ("learning_rate", "fast"),
        ("objective", "ncr"),
        ("device", "abacus"),
        ("unlabeled", 1),
    ],
)
def test_a_wrong_parameter_is_named(field, value):
    rows = np.arange(16.0).reshape(8, 2)
    with pytest.raises(ValueError, match=field):
        NCRClassifier(**{"epochs": 1, field: value}).fit(rows, np.ones(8, dtype=int))


def test_the_loss_may_be_a_formula():
    def brier(logits, targets):
        return (logits.softmax(dim=1) - targets).square().sum(dim=1)

    rows, given, truth = blobs()
    assert NCRClassifier(**FAST, objective=brier).fit(rows, given).score(rows, truth) > 0.8


@pytest.mark.parametrize(
    ("labels", "cure"),
    [
        (["a", "b", None, "a"], "?"),
        ([0.0, 1.0, np.nan, 0.0], -1),
        (["a", "b", float("nan"), "a"], "?"),
    ],
)
def test_a_missing_label_is_told_with_its_row_and_what_to_do(labels, cure):
    message = rf"(None|nan)\b.*row 2\b.*unlabeled={re.escape(repr(cure))}"
    rows = np.arange(8.0).reshape(4, 2)
    for given in (labels, np.array(labels, dtype=object)):
        with pytest.raises(ValueError, match=message):
            NCRClassifier(**FAST).fit(rows, given)
    model = NCRClassifier(**FAST, unlabeled=cure).fit(rows, [*labels[:2], cure, labels[3]])
    assert model.classes_.tolist() == labels[:2]  # in a list of names -1 would become one of them


def test_wrong_data_is_named_in_one_sentence():
    rows, labels = np.arange(16.0).reshape(8, 2), np.arange(8) % 2
    model = NCRClassifier(**FAST)
    # The second is ours, with scikit-learn 1.6.
    with pytest.raises(ValueError, match=r"at least one non-zero number|weight above 0"):
        model.fit(rows, labels, sample_weight=np.zeros(8))
    with pytest.raises(ValueError, match=r"^y .* 4 labels in 8 rows"):
        clone(model).set_params(unlabeled=1).fit(rows, labels, sample_weight=labels)
    with pytest.raises(ValueError, match="Negative values"):
        model.fit(rows, labels, sample_weight=-np.ones(8))
    with pytest.raises(ValueError, match="n_samples=1"):
        model.fit(np.ones((8, 2)), np.ones(8, dtype=int))
    with pytest.raises(ValueError, match=r"^X .*1e\+300"):
        model.fit(np.where(rows == 3, 1e300, rows), labels)
    with pytest.raises(ValueError, match=r"^learning_rate .*1000"):
        NCRClassifier((), learning_rate=1000, epochs=40, random_state=0).fit(rows * 1e37, labels)
    with pytest.raises(TypeError, match="Sparse data"):
        model.fit(csr_array(rows), labels)


def test_what_the_caller_has_switched_in_torch_changes_nothing():
    rows, given, _ = blobs()
    plain = NCRClassifier(**FAST).fit(rows, given)

    def assert_same(model):
        np.testing.assert_array_equal(model.label_quality_, plain.label_quality_)
        np.testing.assert_array_equal(model.predict_proba(rows), plain.predict_proba(rows))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(NCRClassifier(**FAST).fit(rows, given))
    with torch.inference_mode():
        model = NCRClassifier(**FAST).fit(rows, given)
    assert_same(model)


def test_another_default_type_of_torch_is_no_hindrance():
    rows, given, truth = blobs()
    torch.set_default_dtype(torch.float64)
    try:
        assert NCRClassifier(**FAST).fit(rows, given).score(rows, truth) > 0.9
        assert audit(given, features=rows).scores.isfinite().all()
    finally:
        torch.set_default_dtype(torch.float32)
