"""Label propagation against the paper's Eq. 2 written as loops, and the laws it obeys."""

import math
import re
import warnings

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from nearsay import neighbors
from nearsay.label_propagation import propagate_labels

# With float64 features: the solver's own error is out of the way.
EXACT = {"tolerance": 1e-13}


def graph_of(features: Tensor, k: int) -> list[list[float]]:
    """W by scalar loops: positive cosines of pairs in which one names the other."""
    rows = features.tolist()
    norms = [math.sqrt(sum(x * x for x in row)) for row in rows]
    n = len(rows)
    cosines = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            if i != j and norms[i] > 0 and norms[j] > 0:
                product = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
                cosines[i][j] = product / (norms[i] * norms[j])
    nearest = []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        nearest.append(sorted(others, key=lambda j, i=i: -cosines[i][j])[:k])
    weights = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            if j in nearest[i] or i in nearest[j]:
                weights[i][j] = max(cosines[i][j], 0.0)
    return weights


def objective(scores: Tensor, targets: Tensor, weights: list[list[float]], mu: float) -> float:
    """Q(P), Eq. 2 of the paper, as the literal double sum over pairs with a weight."""
    p, y, n = scores.tolist(), targets.tolist(), len(weights)
    degrees = [sum(row) for row in weights]
    fit = sum((a - b) ** 2 for i in range(n) for a, b in zip(p[i], y[i], strict=True))
    smoothness = 0.0
    for i in range(n):
        for j in range(n):
            if weights[i][j] > 0:
                scale, other = math.sqrt(degrees[i]), math.sqrt(degrees[j])
                for a, b in zip(p[i], p[j], strict=True):
                    smoothness += weights[i][j] * (a / scale - b / other) ** 2
    return 0.5 * mu * fit + 0.5 * smoothness


def example(n: int = 14, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features with an isolated row, labels with unlabeled ones, and their targets."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    features[5] = 0.0
    labels = torch.randint(-1, classes, (n,), generator=generator)
    labels[:classes] = torch.arange(classes)
    labels[5] = 1
    return features, labels, (labels[:, None] == torch.arange(classes)).double()


def blobs(n: int, separation: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(n) % 3
    return torch.randn(n, 3, generator=generator) + separation * torch.eye(3)[classes], classes


@pytest.mark.parametrize("mu", [1e-3, 0.5])
@pytest.mark.parametrize("k", [1, 3, 100])
def test_it_solves_the_dense_system(k, mu):
    features, labels, targets = example()
    weights = torch.tensor(graph_of(features, k), dtype=torch.float64)
    degrees = weights.sum(dim=1)
    laplacian = torch.diag((degrees > 0).double()) - torch.where(
        weights > 0, weights / (degrees[:, None] * degrees).sqrt(), 0.0
    )
    expected = torch.linalg.solve(
        mu * torch.eye(len(features), dtype=torch.float64) + 2 * laplacian, mu * targets
    )
    scores = propagate_labels(features, labels, 3, k=k, mu=mu, **EXACT)
    # Atol: scores are of order 1.
    assert_close(scores, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mu", [0.02])
def test_the_gradient_of_the_objective_vanishes_at_the_result(mu):
    features, labels, targets = example()
    weights = graph_of(features, 3)
    scores = propagate_labels(features, labels, 3, k=3, mu=mu, **EXACT)
    for i in range(len(scores)):
        for c in range(3):
            nudge = torch.zeros_like(scores)
            nudge[i, c] = 1e-3
            above = objective(scores + nudge, targets, weights, mu)
            below = objective(scores - nudge, targets, weights, mu)
            # Central differences are exact for a quadratic.
            assert abs(above - below) / 2e-3 < 1e-10


def test_labels_follow_two_moons_where_the_nearest_label_misleads():
    angles = torch.linspace(0, math.pi, 100)
    upper = torch.stack([angles.cos(), angles.sin()], dim=1)
    lower = torch.stack([1 - angles.cos(), 0.5 - angles.sin()], dim=1)
    plane = torch.cat([upper, lower])  # (200, 2)
    # With similarities to all points as features, cosines fall with the distance in the plane.
    features = torch.exp(-torch.cdist(plane, plane).square() / (2 * 0.1**2))
    labels = torch.full((200,), -1)
    # The right-hand tip of each moon.
    labels[0], labels[199] = 0, 1
    truth = torch.arange(200) // 100
    nearest = torch.cdist(plane, plane[[0, 199]]).argmin(dim=1)
    assert (nearest == truth).float().mean() < 0.9
    assert torch.equal(propagate_labels(features, labels, k=5).argmax(dim=1), truth)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_the_scale_of_features_does_not_matter(scale):
    features, labels, _ = example()
    row_scales = torch.linspace(0.1, 7.0, len(features), dtype=torch.float64)[:, None]
    scores = propagate_labels(features, labels, 3, k=3, **EXACT)
    assert_close(propagate_labels(scale * row_scales * features, labels, 3, k=3, **EXACT), scores)


def test_an_isolated_example_keeps_its_own_label():
    # The last two have no positive similarity.
    opposed = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [0.0, 0.0]])
    scores = propagate_labels(opposed, torch.tensor([0, -1, 1, 2]))
    assert_close(scores[2:], torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), rtol=0, atol=0)
    assert (scores[:2, 0] > 0).all()
    assert (scores[:2, 1:] == 0).all()


def test_unlabeled_duplicates_share_scores_and_never_name_themselves():
    features = torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(6, 1)
    scores = propagate_labels(features, torch.tensor([0, 0, 1, -1, -1, -1]), k=5, **EXACT)
    assert_close(scores[3], scores[4])
    assert_close(scores[3], scores[5])
    # Six equal points: S is 1/5 off the diagonal, so every class keeps its mass, and the
    # unlabeled points follow the majority.
    assert_close(scores.sum(dim=0), torch.tensor([2.0, 1.0], dtype=torch.float64))
    assert (scores[:, 0] > scores[:, 1]).all()
    alpha = 2 / 2.02
    own, other = (1 - alpha) * (1 - alpha * 4 / 5), (1 - alpha) * alpha / 5
    determinant = (1 - alpha) * (1 + alpha / 5)
    assert_close(scores[2, 1], torch.tensor(own / determinant, dtype=torch.float64))
    assert_close(scores[3, 1], torch.tensor(other / determinant, dtype=torch.float64))


def test_scores_are_never_negative_even_when_the_solver_stops_early():
    x = [2.16, 0.63, -1.07, 1.67, -0.97, -0.23, 0.24]
    y = [-0.86, -0.76, -1.74, -0.83, -1.7, -0.31, 0.56]
    features = torch.tensor([x, y], dtype=torch.float64).T
    soft = torch.tensor([[0.514, 0.147, 0.015, 0.005, 0.001, 0.0, 0.001]], dtype=torch.float64).T
    # The third iterate reaches −6e-5.
    with pytest.warns(UserWarning, match="max_iterations=3"):
        scores = propagate_labels(features, soft, k=3, mu=1e-3, max_iterations=3)
    assert (scores >= 0).all()


def test_float32_agrees_with_float64():
    features, classes = blobs(200, separation=3.0)
    single = propagate_labels(features, classes, k=10)
    double = propagate_labels(features.double(), classes, k=10, **EXACT)
    assert single.dtype == torch.float32
    assert double.dtype == torch.float64
    # The relative error is that of the input times the condition of the system, about 200.
    assert_close(single.double(), double, rtol=1e-4, atol=2e-5)


def test_sixteen_bit_features_are_computed_in_float32():
    features, classes = blobs(100, separation=3.0)
    # The squares of these overflow float16.
    rounded = (1e3 * features).half()
    scores = propagate_labels(rounded, classes, k=10)
    assert scores.dtype == torch.float32
    assert_close(scores, propagate_labels(rounded.float(), classes, k=10))


def test_searching_in_chunks_changes_nothing(monkeypatch):
    features, labels, _ = example(50)
    whole = propagate_labels(features, labels, 3, k=4, **EXACT)
    # The last chunk has one row.
    monkeypatch.setitem(neighbors.CHUNK_ROWS, "cpu", 7)
    assert_close(propagate_labels(features, labels, 3, k=4, **EXACT), whole)


def test_no_gradient_is_recorded_and_inputs_stay_as_they_are():
    features, _, targets = example()
    features.requires_grad_(), targets.requires_grad_()
    before = features.detach().clone(), targets.detach().clone()
    assert not propagate_labels(features, targets, k=3).requires_grad
    assert torch.equal(features, before[0])
    assert torch.equal(targets, before[1])


def test_stopping_early_warns_once_with_the_residual():
    features, classes = blobs(200, separation=3.0)
    residuals = []
    for max_iterations in (2, 30):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scores = propagate_labels(
                features, classes, k=5, tolerance=1e-12, max_iterations=max_iterations
            )
        assert len(caught) == 1
        assert caught[0].filename == __file__
        message = str(caught[0].message)
        assert f"max_iterations={max_iterations}" in message
        residuals.append(float(re.search(r"residual is (\S+)", message)[1]))
        assert scores.isfinite().all()
    assert residuals[0] > 0.1
    assert 1e-12 < residuals[1] < 0.1


def test_scores_of_a_solver_that_stops_early_are_as_large_as_the_labels():
    features, _ = blobs(60, separation=3.0)
    labels = torch.rand(60, 3, generator=torch.Generator().manual_seed(0)).to(features.dtype)
    scales = torch.tensor([1.0, 64.0, 1 / 8])
    for num in (1, 4):
        with pytest.warns(UserWarning, match=f"max_iterations={num}"):
            scores = propagate_labels(features, labels, k=5, max_iterations=num)
        with pytest.warns(UserWarning, match=f"max_iterations={num}"):
            larger = propagate_labels(features, labels * scales, k=5, max_iterations=num)
        assert_close(larger, scores * scales)


FEATURES = torch.eye(4)
LABELS = torch.tensor([0, 1, -1, 1])


@pytest.mark.parametrize(
    ("arguments", "choices", "field"),
    [
        ((FEATURES, LABELS), {"k": 0}, "k"),
        ((FEATURES, LABELS), {"mu": 0.0}, "mu"),
        ((FEATURES, LABELS), {"tolerance": 1}, "tolerance"),
        ((FEATURES, LABELS), {"max_iterations": 0}, "max_iterations"),
        ((FEATURES.long(), LABELS), {}, "features"),
        ((FEATURES[:0], LABELS[:0]), {}, "features"),
        ((FEATURES / FEATURES[1], LABELS), {}, "features .*row 0"),
        ((FEATURES, LABELS, 1), {}, "labels"),
        ((FEATURES, LABELS - 1), {}, "labels"),
        ((FEATURES, LABELS.float()), {}, "labels"),
        ((FEATURES, torch.full((4,), -1)), {}, "labels"),
        ((FEATURES, 1 - 3 * FEATURES.flip(0)), {}, r"labels .*-2\.0"),
        ((FEATURES, FEATURES * math.nan), {}, "labels .*nan"),
        ((FEATURES, FEATURES, 3), {}, "num_classes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments, choices, field):
    with pytest.raises(ValueError, match=rf"^{field}"):
        propagate_labels(*arguments, **choices)
