"""The parts of the noise rate, against scikit-learn, formulas and scalar loops."""

import pytest
import torch
from label_issues.helpers import NAN, generator
from sklearn.isotonic import IsotonicRegression
from sklearn.mixture import GaussianMixture

from nearsay.label_issues import noise_rate


def test_the_cut_has_the_largest_variance_between_the_halves():
    values = [0.1, 0.15, 0.2, 0.8, 0.9]
    mean = sum(values) / 5
    shares = []
    for num in range(1, 5):
        low, high = sum(values[:num]) / num, sum(values[num:]) / (5 - num)
        between = num * (5 - num) * (low - high) ** 2 / 5
        shares.append(between / sum((value - mean) ** 2 for value in values))
    threshold, explained = noise_rate.otsu_cut(torch.tensor([*values, NAN]))
    assert shares.index(max(shares)) == 2
    assert threshold == pytest.approx(0.2)
    assert explained == pytest.approx(max(shares))


def test_equal_values_are_not_cut():
    assert noise_rate.otsu_cut(torch.full((9,), 0.3)).explained == 0
    assert noise_rate.otsu_cut(torch.tensor([0.0, 0.0, 1.0])).threshold == 0
    assert noise_rate.otsu_cut(torch.tensor([1.0, 0.0])) == (0, 1)


@pytest.mark.parametrize(
    ("name", "is_split"),
    [("bell", False), ("exponential", False), ("two bells", True), ("two points", True)],
)
def test_only_two_groups_count_as_two(name, is_split):
    bell = torch.randn(5000, generator=generator())
    values = {
        "bell": bell,
        "exponential": -torch.rand(5000, generator=generator(1)).log(),
        "two bells": torch.cat([bell, bell[:2000] + 6]),
        "two points": torch.tensor([0.0] * 30 + [1.0] * 70),
    }[name]
    assert (noise_rate.otsu_cut(values).explained >= noise_rate.IS_SPLIT) == is_split


def test_the_mixture_is_that_of_scikit_learn():
    bell = torch.randn(3001, generator=generator(2))
    values = torch.cat([0.5 * bell[:901] - 2, 1.2 * bell[901:] + 1])
    fit = GaussianMixture(2, means_init=[[-2], [1]], tol=1e-9, max_iter=1000).fit(
        values.double()[:, None].numpy()
    )
    wanted = fit.weights_[fit.means_[:, 0].argmin()]
    # No cut would do.
    assert abs(wanted - (values < -0.5).double().mean().item()) > 0.02
    found = noise_rate.mixture_share(torch.cat([values, torch.tensor([NAN])]))
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([], 0), ([0.3], 0), ([0.3] * 9, 0), ([0.0, 1.0], 1 / 2), ([0.0, 1.0, 1.0, 1.0], 1 / 4)],
)
def test_few_values_have_a_lower_group_if_they_differ(values, wanted):
    assert noise_rate.mixture_share(torch.tensor(values)) == pytest.approx(wanted)


def test_the_interval_of_a_count_is_that_of_wilson():
    assert noise_rate.wilson_interval(0.1, 100) == pytest.approx((0.05523, 0.17437), abs=1e-5)
    assert noise_rate.wilson_interval(0.0, 20)[0] == 0
    assert noise_rate.wilson_interval(0.5, 0) == (0, 1)
    assert noise_rate.wilson_interval(1.0, 20) == pytest.approx(
        (1 - noise_rate.wilson_interval(0.0, 20)[1], 1)
    )
    assert noise_rate.wilson_interval(1.0, 7)[1] == 1


def test_the_interval_contains_those_of_all_estimates():
    rate = noise_rate.pooled_rate(0.2, [0.1, 0.35], 1000)
    # A tenth of the deviation of a share of 0.2.
    shared = 0.1 * 0.4
    low = noise_rate.wilson_interval(0.1, 1000)[0] - shared
    high = noise_rate.wilson_interval(0.35, 1000)[1] + shared
    assert rate == pytest.approx((0.2, low, high))
    assert noise_rate.pooled_rate(0.02, [0.02], 9)[1] == 0
    assert noise_rate.pooled_rate(0.98, [0.98], 9)[2] == 1
    none = noise_rate.pooled_rate(0.0, [0.0], 1000)
    assert none == (0, 0, noise_rate.wilson_interval(0.0, 1000)[1])


def test_confident_learning_rejects_by_beliefs_above_the_class_mean():
    rows = [[9, 1, 0], [7, 3, 0], [6, 4, 0], [2, 8, 0], [3, 6, 1], [8.5, 1, 0.5]]
    beliefs, labels = torch.tensor(rows) / 10, torch.tensor([0, 0, 1, 1, 1, 1])
    # The means are .8 for class 0 and (.4 + .8 + .6 + .1) / 4 for class 1, so that only the last
    # row is rejected: .6 is less than .8.
    assert noise_rate.confident_share(beliefs, labels) == pytest.approx(1 / 6)
    scale = torch.tensor([9.0, 0.5, 1.0, 3.0, 1.0, 0.1])[:, None]
    assert noise_rate.confident_share(scale * beliefs, labels) == pytest.approx(1 / 6)
    assert noise_rate.confident_share(beliefs, torch.tensor([0, 0, 0, 1, 1, 0])) == 0


def test_confident_learning_is_exact_where_beliefs_are_equal():
    # Seven times .8 in float32 has a mean above .8.
    beliefs = torch.tensor([[0.8, 0.2]]).repeat(8, 1)
    assert noise_rate.confident_share(beliefs, torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])) == 1 / 8
    halves = torch.full((4, 2), 0.5)
    assert noise_rate.confident_share(halves, torch.tensor([0, 0, 0, 1])) == 0
    assert noise_rate.confident_share(halves, torch.tensor([1, 1, 1, 0])) == 0


def test_the_surest_tenth_is_counted_with_all_that_are_as_sure():
    labels = torch.tensor([0, 1, 0] + [0] * 17)
    beliefs = torch.tensor([[0.9, 0.1], [1.8, 0.2], [0.2, 1.8]] + [[0.4, 0.6]] * 17)
    # Two of twenty, and one as sure as they.
    assert noise_rate.surest_share(beliefs, labels) == pytest.approx(2 / 3)
    assert noise_rate.surest_share(beliefs.flip(0), labels.flip(0)) == pytest.approx(2 / 3)
    assert noise_rate.surest_share(beliefs[:1], labels[:1]) == 0


def test_the_decreasing_fit_is_that_of_scikit_learn():
    # With ties.
    scores = torch.rand(200, generator=generator()).mul(20).round() / 20
    values = (torch.rand(200, generator=generator(1)) > scores).float()
    scores[7] = NAN
    found = noise_rate.decreasing_fit(scores, values)
    known = ~scores.isnan()
    fit = IsotonicRegression(increasing=False).fit_transform(
        scores[known].numpy(), values[known].numpy()
    )
    torch.testing.assert_close(found[known], torch.from_numpy(fit).double(), atol=1e-6, rtol=0)
    assert found[7].isnan()


@pytest.mark.parametrize("mean", [0.1, 0.6])
def test_values_are_raised_to_the_wanted_mean(mean):
    doubts = torch.linspace(0.05, 0.95, 50).double()
    found = noise_rate.raised_to_mean(doubts, mean)
    assert found.mean().item() == pytest.approx(mean, abs=1e-6)
    assert (found.diff() > 0).all()
    # Five are 0, and one is unknown.
    some = torch.cat([doubts, torch.zeros(5), torch.tensor([NAN])])
    found = noise_rate.raised_to_mean(some, mean)
    assert found[:-1].mean().item() == pytest.approx(mean, abs=1e-6)
    assert found[-1].isnan()
    assert (found[-6:-1] == 0).all()


def test_the_variance_that_classes_explain_excludes_chance():
    values, labels = [1.0, 2.0, 4.0, 8.0, 5.0, 7.0], [0, 0, 0, 2, 2, 2]
    # Means of the classes are 7/3 and 20/3, the mean of all is 27/6.
    means = [7 / 3] * 3 + [20 / 3] * 3
    within = sum((a - b) ** 2 for a, b in zip(values, means, strict=True)) / (6 - 2)
    total = sum((value - 27 / 6) ** 2 for value in values) / (6 - 1)
    more = torch.tensor([*values, NAN, 3.0]), torch.tensor([*labels, 2, -1])
    assert noise_rate._explained_by_class(*more) == pytest.approx(1 - within / total)
    # Each example is alone in its class.
    assert noise_rate._explained_by_class(torch.tensor([1.0, 2.0]), torch.tensor([0, 3])) == 0


def test_wrong_labels_of_a_single_class_are_still_two_groups():
    labels = torch.arange(1000) % 10
    is_wrong = (labels == 3) & (torch.arange(1000) % 20 < 10)
    values = torch.where(is_wrong, -4.0, 4.0) + torch.randn(1000, generator=generator())
    assert noise_rate.bimodal_threshold(values, labels) is not None


def test_the_noise_matrix_counts_labels_by_suggested_class():
    given, suggested = torch.tensor([0, 1, 1, 0, -1, 1]), torch.tensor([0, 0, 1, 0, 1, -1])
    expected = torch.tensor([[2 / 3, 1 / 3, 0], [0, 1, 0], [0, 0, 1]]).double()
    torch.testing.assert_close(noise_rate.noise_matrix(given, suggested, 3), expected)
