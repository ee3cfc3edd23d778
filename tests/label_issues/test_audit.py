import importlib
import importlib.util
import json
import math
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.datasets import load_digits
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import GaussianMixture

from nearsay import metrics, neighbors
from nearsay.batch import Labels
from nearsay.label_issues import audit, inputs, noise_rate, scores
from nearsay.label_propagation import spread
from nearsay.noise import PairFlip, Symmetric

NAN = float("nan")
audit_module = importlib.import_module("nearsay.label_issues.audit")  # its name is that of a function too


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(num=300, classes=3, width=8, noise=0.3, seed=0):
    """Features of classes that are far apart, true labels, and labels of which a share is wrong."""
    drawn = generator(seed)
    clean = torch.arange(num) % classes
    centers = 6 * torch.randn(classes, width, generator=drawn)
    features = centers[clean] + torch.randn(num, width, generator=drawn)
    given = Symmetric(rate=noise, seed=seed, redraw=False)(
        Labels(clean, clean, tuple(map(str, range(classes))))
    ).given
    return features, clean, given


def evidence_of(positions, similarities, groups, distances=None):
    similarities = torch.tensor(similarities)
    distances = (2 - 2 * similarities).sqrt() if distances is None else torch.tensor(distances)
    lengths = torch.ones(len(positions))
    return scores.Evidence(
        torch.tensor(positions), similarities, distances, torch.tensor(groups), None, lengths
    )


# Ingredients, by hand


def test_the_margin_is_half_of_one_plus_the_label_less_the_best_other():
    beliefs = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.0, 0.0, 0.0]])
    found = audit_module.belief_margin(beliefs, torch.tensor([0, 2, -1, 1]))
    torch.testing.assert_close(found, torch.tensor([0.75, 0.2, NAN, NAN]), equal_nan=True)


def test_neighbors_vote_with_their_similarity():
    found = evidence_of(
        [[1, 2], [0, 2], [0, 1]], [[0.9, 0.3], [0.9, 0.5], [0.5, 0.3]], [-1, -1, -1]
    )
    shares = scores.votes(found, torch.tensor([0, 1, 1]), torch.ones(3, dtype=torch.bool), 2)
    expected = torch.tensor([[0, 1], [0.9 / 1.4, 0.5 / 1.4], [0.5 / 0.8, 0.3 / 0.8]])
    torch.testing.assert_close(shares, expected)


def test_unlabeled_and_distrusted_neighbors_have_no_vote():
    found = evidence_of(
        [[1, 2], [0, 2], [0, 1]], [[0.9, 0.3], [0.9, 0.5], [0.5, 0.3]], [-1, -1, -1]
    )
    shares = scores.votes(found, torch.tensor([0, -1, 1]), torch.tensor([False, True, True]), 2)
    torch.testing.assert_close(shares, torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]))


def test_near_duplicates_share_one_vote_and_those_of_oneself_have_none():
    positions = [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    found = evidence_of(positions, [[0.8, 0.8, 0.4]] * 4, [-1, 5, 5, -1])
    shares = scores.votes(found, torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), 2)
    torch.testing.assert_close(
        shares[0], torch.tensor([0.4, 0.4 + 0.4]) / 1.2
    )  # 1 and 2 count half each
    torch.testing.assert_close(shares[1], torch.tensor([0.8, 0.4]) / 1.2)  # 2 is its own duplicate


def test_only_near_duplicates_that_stand_in_the_list_share_a_vote():
    found = evidence_of([[1, 2, 3, 4]] * 5, [[0.8, 0.8, 0.4, 0.2]] * 5, [-1, 5, 5, 6, -1])
    labels, everybody = torch.tensor([0, 0, 0, 1, 1]), torch.ones(5, dtype=torch.bool)
    shares = scores.votes(found, labels, everybody, 2)
    torch.testing.assert_close(
        shares[0], torch.tensor([0.8, 0.6]) / 1.4
    )  # 3 is alone of its group, 4 has none
    absent = evidence_of(
        [[1, 2, 3, 4]] * 5, [[0.8, 0.0, 0.4, 0.2]] * 5, [-1, 5, 5, 6, -1]
    )  # nobody stands second
    shares = scores.votes(absent, labels, everybody, 2)
    torch.testing.assert_close(shares[0], torch.tensor([0.8, 0.6]) / 1.4)


def test_training_is_the_mean_of_confidence_and_of_the_logistic_of_the_margin():
    found = audit([0, 1, 0], dynamics={"confidence": [0.9, 0.2, 0.6], "margin": [2.0, -1.0, 0.0]})
    expected = (torch.tensor([0.9, 0.2, 0.6]) + torch.tensor([2.0, -1.0, 0.0]).sigmoid()) / 2
    torch.testing.assert_close(found.scores, expected)
    torch.testing.assert_close(found.parts["training"], expected)


def test_the_score_is_the_mean_of_training_and_of_the_views():
    probabilities = [[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]
    dynamics = {"confidence": [0.5, 0.5, 0.5], "margin": [0.0, 0.0, 0.0], "count": [3, 3, 0]}
    found = audit([0, 1, 0], probabilities=probabilities, dynamics=dynamics)
    torch.testing.assert_close(found.scores, torch.tensor([(0.8 + 0.5) / 2, (0.4 + 0.5) / 2, 0.1]))


def test_the_views_are_averaged_first():
    features, _, given = blobs(60)
    features[7] = 0
    probabilities = torch.rand(60, 3, generator=generator(1)).softmax(dim=1)
    found = audit(given, probabilities=probabilities, features=features)
    assert set(found.parts) == {"probabilities", "neighbors", "propagation"}
    assert found.parts["neighbors"].isnan().nonzero().tolist() == [
        [7]
    ]  # nobody is near: the others count then
    torch.testing.assert_close(found.scores, torch.stack(list(found.parts.values())).nanmean(dim=0))


# Neighbors as evidence


def test_neighbors_come_nearest_first_with_their_cosines():
    angles = torch.tensor([0.0, 0.1, 0.3, 0.7])
    features = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor(
        [[1.0], [5.0], [0.2], [3.0]]
    )
    found, _ = scores.gather_evidence(features, 2, None)
    assert found.positions.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    torch.testing.assert_close(found.similarities[0], torch.tensor([0.1, 0.3]).cos())
    torch.testing.assert_close(found.distances[0], 2 * (torch.tensor([0.1, 0.3]) / 2).sin())
    assert found.recall is None


def test_an_audit_searches_once_and_labels_spread_over_what_it_found(monkeypatch):
    features, _, given = blobs(num=200)
    features[100:110] = features[110:120] * (
        1 + 1e-6
    )  # nearly the same, so that their distances are refined
    searched, graphs, kept, cosines = [], [], [], neighbors.cosines

    def spied(graph, *others):
        kept.append(weakref.ref(graph.similarities))
        graphs.append([part.clone() for part in graph])
        return spread(graph, *others)

    monkeypatch.setattr(
        neighbors, "cosines", lambda *rows: searched.append(len(rows[0])) or cosines(*rows)
    )
    monkeypatch.setattr(audit_module, "spread", spied)
    found = audit(given, features=features)
    assert searched == [200]
    assert [each() for each in kept] == [None]  # or the audit would hold memory of the device
    units, _ = neighbors.normalize(features)
    wanted = neighbors.nearest(units, units, 20, None)
    assert all(one.equal(other) for one, other in zip(graphs[0], wanted, strict=True))
    assert "propagation" in found.parts


def test_groups_are_all_that_hang_together_and_numbered_by_their_first():
    positions = torch.tensor([[2, 1], [3, 0], [0, 4], [1, 0], [2, 0]])
    similarities = torch.full((5, 2), 0.9)
    distances = torch.tensor([[0.1, 1.0], [0.1, 1.0], [0.1, 1.0], [0.1, 1.0], [0.1, 1.0]])
    assert scores.duplicate_groups(positions, similarities, distances).tolist() == [0, 1, 0, 1, 0]
    distances[4, 0] = 0.3
    assert scores.duplicate_groups(positions, similarities, distances).tolist() == [0, 1, 0, 1, -1]


def test_near_duplicates_are_far_nearer_than_the_others_of_either():
    positions = torch.tensor([[1, 4], [2, 3], [1, 3], [1, 2], [5, 0], [4, 0], [7, 0], [6, 0]])
    distances = torch.tensor([[0.1, 1.0], [0.15, 0.2], [0.15, 0.2], [0.2, 0.2], *[[0.9, 1.0]] * 4])
    similarities = torch.full((8, 2), 0.9)
    assert (
        scores.duplicate_groups(positions, similarities, distances) == -1
    ).all()  # 1 has others as near as 0
    distances[1] = 1.0
    assert scores.duplicate_groups(positions, similarities, distances).tolist() == [0, 0] + [-1] * 6


def test_how_far_the_others_are_is_at_most_half_more_than_the_fifth_mostly_is():
    positions = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6], *[[0, 1, 8, 8, 8, 8]] * 7])
    distances = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 4.0]] * 9)  # a fifth of 1.5 is 0.3
    for apart, group in ((0.29, 0), (0.31, -1)):
        distances[:2, 0] = apart
        found = scores.duplicate_groups(positions, torch.full((9, 6), 0.9), distances)
        assert found.tolist() == [group, group] + [-1] * 7


def test_who_is_the_same_to_a_millionth_is_so_however_near_the_others_are():
    positions = torch.tensor([[1, 2], [0, 3], [3, 0], [2, 1]])
    distances = torch.tensor([[9e-7, 2e-6], [9e-7, 2e-6], [1.1e-6, 2e-6], [1.1e-6, 2e-6]])
    found = scores.duplicate_groups(positions, torch.ones(4, 2), distances)
    assert found.tolist() == [0, 0, -1, -1]


def test_of_two_that_are_nearly_the_same_the_nearer_comes_first():
    center, away = torch.randn(2, 512, generator=generator(), dtype=torch.float64)
    features = center + torch.tensor([0.0, 3e-3, 1e-3, 2e-3, 4e-3])[:, None] * away
    found, _ = scores.gather_evidence(features.float(), 4, None)
    assert found.positions[0].tolist() == [
        2,
        3,
        1,
        4,
    ]  # which products in float32, right to 1e-7, cannot tell
    units = torch.nn.functional.normalize(features)
    exact = torch.linalg.vector_norm(units[0] - units[found.positions[0]], dim=1)
    torch.testing.assert_close(found.distances[0].double(), exact, rtol=1e-3, atol=0)
    torch.testing.assert_close(
        1 - found.similarities[0].double(), exact.square() / 2, rtol=0, atol=6.1e-8
    )


def test_planted_near_duplicates_are_found_and_nobody_else():
    pixels = torch.from_numpy(load_digits().data).float()
    copied = torch.randperm(len(pixels), generator=generator())[:100]
    copies = pixels[copied] + 0.15 * torch.randn(
        100, 64, generator=generator(1)
    )  # of pixels from 0 to 16
    groups = scores.gather_evidence(torch.cat([pixels, copies]), 20, None)[0].groups
    is_planted = torch.zeros(len(groups), dtype=torch.bool)
    is_planted[copied], is_planted[len(pixels) :] = True, True
    pairs = groups[copied]
    assert ((pairs >= 0) & (pairs == groups[len(pixels) :])).float().mean() >= 0.95
    assert is_planted[groups >= 0].float().mean() >= 0.95


@pytest.mark.parametrize("num", [4, 10, 20, 21])
def test_in_a_small_crowd_only_copies_are_near_duplicates(num):
    crowd = torch.tensor([3.0] + [0.0] * 7) + 0.15 * torch.randn(
        num, 8, generator=generator()
    )  # all alike, none the same
    crowd[-1] = crowd[0] * 2
    groups = scores.gather_evidence(crowd, 20, None)[0].groups
    assert groups.tolist() == [0] + [-1] * (num - 2) + [0]


def test_what_is_like_nothing_else_is_far_from_everybody():
    pixels = torch.from_numpy(load_digits().data).float()
    foreign = 16 * torch.rand(50, 64, generator=generator())
    found = audit(
        torch.zeros(len(pixels) + 50, dtype=torch.int64), features=torch.cat([pixels, foreign])
    )
    is_foreign = torch.arange(len(pixels) + 50) >= len(pixels)
    assert found.ood_scores.min() > 0
    assert found.ood_scores.max() == 1
    assert metrics.detection_auroc(found.ood_scores, is_foreign) > 0.95


def test_closeness_is_the_typical_distance_over_ones_own():
    distances = [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]
    found = scores.density_score(
        evidence_of([[1, 2], [0, 2], [0, 1]], [[0.5, 0.5]] * 3, [-1] * 3, distances)
    )
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, 0.5]))


def test_fullness_is_the_length_over_the_typical_one():
    found = evidence_of([[1, 2], [0, 2], [0, 1]], [[0.5, 0.5]] * 3, [-1] * 3)
    found = found._replace(lengths=torch.tensor([1.0, 2.0, 4.0]))
    torch.testing.assert_close(scores.length_score(found), torch.tensor([0.5, 1.0, 1.0]))


def test_nobody_stands_as_far_away_as_who_has_nothing_in_common():
    found, _ = scores.gather_evidence(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0]]), 2, None)
    torch.testing.assert_close(found.distances, torch.full((3, 2), math.sqrt(2)))
    found, _ = scores.gather_evidence(torch.tensor([[1.0, 0.0], [1.0, 0.1]]), 20, None)
    assert found.positions.tolist() == [[1], [0]]  # there is no other than these


def test_without_features_the_largest_probability_says_what_is_foreign():
    found = audit([0, 1], probabilities=[[0.9, 0.1], [0.45, 0.55]])
    torch.testing.assert_close(found.ood_scores, torch.tensor([0.9, 0.55]))
    rounded = audit(
        [0, 1], probabilities=[[1.005, 0.0], [0.4, 0.6]]
    )  # as near to a distribution as must be
    torch.testing.assert_close(rounded.ood_scores, torch.tensor([1.0, 0.6]))
    assert found.evidence is None
    assert found.duplicate_groups is None


# Estimates


def test_the_cut_has_the_largest_variance_between_the_halves():
    values = torch.tensor([0.1, 0.15, 0.2, 0.8, 0.9, NAN])
    threshold, explained = noise_rate.otsu_cut(values)
    known = values[:5].double()
    best = max(
        (
            n
            * (5 - n)
            * (known[:n].mean() - known[n:].mean()) ** 2
            / 5
            / ((known - known.mean()) ** 2).sum(),
            n,
        )
        for n in range(1, 5)
    )
    assert threshold == pytest.approx(0.2)
    assert best[1] == 3
    assert explained == pytest.approx(best[0].item())


def test_equal_values_are_not_cut():
    assert noise_rate.otsu_cut(torch.full((9,), 0.3)).explained == 0
    assert noise_rate.otsu_cut(torch.tensor([0.0, 0.0, 1.0])).threshold == 0
    assert noise_rate.otsu_cut(torch.tensor([1.0, 0.0])) == (0, 1)


@pytest.mark.parametrize(
    ("name", "is_split"),
    [("bell", False), ("exponential", False), ("two bells", True), ("two points", True)],
)
def test_only_two_heaps_count_as_two(name, is_split):
    bell = torch.randn(5000, generator=generator())
    values = {
        "bell": bell,
        "exponential": -torch.rand(5000, generator=generator(1)).log(),
        "two bells": torch.cat([bell, bell[:2000] + 6]),
        "two points": torch.tensor([0.0] * 30 + [1.0] * 70),
    }[name]
    assert (noise_rate.otsu_cut(values).explained >= noise_rate.IS_SPLIT) == is_split


def test_the_share_of_the_lower_bell_is_found():
    bell = torch.randn(10000, generator=generator())
    assert noise_rate.mixture_share(torch.cat([bell[:3000] - 5, bell[3000:]])) == pytest.approx(
        0.3, abs=0.01
    )


def test_bells_that_overlap_and_are_not_equally_wide_are_those_of_scikit_learn():
    bell = torch.randn(3001, generator=generator(2))
    values = torch.cat([0.5 * bell[:901] - 2, 1.2 * bell[901:] + 1])
    fit = GaussianMixture(2, means_init=[[-2], [1]], tol=1e-9, max_iter=1000).fit(
        values.double()[:, None].numpy()
    )
    wanted = fit.weights_[fit.means_[:, 0].argmin()]
    assert abs(wanted - (values < -0.5).double().mean().item()) > 0.02  # no cut would do
    found = noise_rate.mixture_share(torch.cat([values, torch.tensor([NAN])]))
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([], 0), ([0.3], 0), ([0.3] * 9, 0), ([0.0, 1.0], 1 / 2), ([0.0, 1.0, 1.0, 1.0], 1 / 4)],
)
def test_few_values_have_a_lower_bell_if_they_differ(values, wanted):
    assert noise_rate.mixture_share(torch.tensor(values)) == pytest.approx(wanted)


def test_the_interval_of_a_count_is_that_of_wilson():
    assert noise_rate.wilson_interval(0.1, 100) == pytest.approx((0.05523, 0.17437), abs=1e-5)
    assert noise_rate.wilson_interval(0.0, 20)[0] == 0
    assert noise_rate.wilson_interval(0.5, 0) == (0, 1)
    assert noise_rate.wilson_interval(1.0, 20) == pytest.approx((1 - noise_rate.wilson_interval(0.0, 20)[1], 1))
    assert noise_rate.wilson_interval(1.0, 7)[1] == 1


def test_the_interval_holds_those_of_all_estimates_and_what_they_may_err_together():
    rate = noise_rate.pooled_rate(0.2, [0.1, 0.35], 1000)
    assert rate.estimate == 0.2
    together = 0.1 * 0.4  # of a deviation
    limits = (
        noise_rate.wilson_interval(0.1, 1000)[0] - together,
        noise_rate.wilson_interval(0.35, 1000)[1] + together,
    )
    assert (rate.low, rate.high) == pytest.approx(limits)
    assert noise_rate.pooled_rate(0.02, [0.02], 9)[1] == 0
    assert noise_rate.pooled_rate(0.98, [0.98], 9)[2] == 1
    assert noise_rate.pooled_rate(0.0, [0.0], 1000) == (
        0,
        0,
        noise_rate.wilson_interval(0.0, 1000)[1],
    )  # none errs where none is seen


def test_a_label_is_rejected_with_confidence_by_what_is_as_sure_as_usual():
    beliefs = torch.tensor(
        [
            [0.9, 0.1, 0],
            [0.7, 0.3, 0],
            [0.6, 0.4, 0],
            [0.2, 0.8, 0],
            [0.3, 0.6, 0.1],
            [0.85, 0.1, 0.05],
        ]
    )
    labels = torch.tensor(
        [0, 0, 1, 1, 1, 1]
    )  # class 0 is believed by .8 on average, class 1 by (.4 + .8 + .6 + .1) / 4
    assert noise_rate.confident_share(beliefs, labels) == pytest.approx(
        1 / 6
    )  # the last alone: .6 is less than .8
    scale = torch.tensor([9.0, 0.5, 1.0, 3.0, 1.0, 0.1])[:, None]
    assert noise_rate.confident_share(scale * beliefs, labels) == pytest.approx(1 / 6)
    assert noise_rate.confident_share(beliefs, torch.tensor([0, 0, 0, 1, 1, 0])) == 0


def test_the_surest_tenth_is_counted_with_all_that_are_as_sure():
    labels = torch.tensor([0, 1, 0] + [0] * 17)
    beliefs = torch.tensor([[0.9, 0.1], [1.8, 0.2], [0.2, 1.8]] + [[0.4, 0.6]] * 17)
    assert noise_rate.surest_share(beliefs, labels) == pytest.approx(
        2 / 3
    )  # two of twenty, and one as sure as they
    assert noise_rate.surest_share(beliefs.flip(0), labels.flip(0)) == pytest.approx(2 / 3)
    assert noise_rate.surest_share(beliefs[:1], labels[:1]) == 0


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_interval_allows_for_classes_that_overlap(rate):
    drawn = generator()
    clean = torch.randint(0, 2, (1500,), generator=drawn)
    place = 2.0 * clean + torch.randn(
        1500, generator=drawn
    )  # a sixth of them lie on the other side
    wrong = torch.rand(1500, generator=drawn) < rate
    labels = clean.where(~wrong, 1 - clean)
    features = torch.stack([torch.cos(place / 2), torch.sin(place / 2)], dim=1)
    probabilities = torch.stack([2 - 2 * place, 2 * place - 2], dim=1).softmax(dim=1)
    found = audit(labels, probabilities=probabilities, features=features)
    assert (
        noise_rate.bimodal_threshold(found.scores, labels) is not None
    )  # though right labels are in either heap
    assert found.noise_rate.low <= wrong.double().mean() <= found.noise_rate.high


def test_what_is_exactly_as_sure_as_usual_is_told_from_what_is_equally_sure():
    beliefs = torch.tensor([[0.8, 0.2]]).repeat(
        8, 1
    )  # seven times .8 in float32 has a mean above .8
    assert noise_rate.confident_share(beliefs, torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])) == 1 / 8
    halves = torch.full((4, 2), 0.5)
    assert noise_rate.confident_share(halves, torch.tensor([0, 0, 0, 1])) == 0
    assert noise_rate.confident_share(halves, torch.tensor([1, 1, 1, 0])) == 0


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_the_interval_allows_for_a_classifier_that_is_often_wrong(rate):
    drawn = generator(4)
    clean = torch.arange(900) % 10
    centers = 3.5 * torch.nn.functional.normalize(torch.randn(10, 32, generator=drawn))
    features = centers[clean] + torch.randn(900, 32, generator=drawn)
    given = Symmetric(rate=rate, redraw=False)(
        Labels(clean, clean, tuple(map(str, range(10))))
    ).given
    pieces = torch.arange(900) % 3
    sure = torch.zeros(900, 10)
    for piece in range(3):  # each by a classifier that has not seen it
        learned = LogisticRegression(max_iter=200).fit(
            features[pieces != piece], given[pieces != piece]
        )
        sure[pieces == piece] = torch.from_numpy(
            learned.predict_proba(features[pieces == piece])
        ).float()
    _, low, high = audit(given, probabilities=sure, features=features).noise_rate
    assert low <= (given != clean).double().mean() <= high < 0.5


@pytest.mark.parametrize("temperature", [0.3, 1, 3])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.2, 0.4])
def test_the_interval_of_probabilities_alone_holds_the_truth_however_sure_they_are(
    rate, temperature
):
    for seed, strength in enumerate((1.5, 2.5, 4)):  # right of 51, 80 and 99 %
        clean = torch.arange(1000) % 10
        given = Symmetric(rate=rate, seed=seed, redraw=False)(
            Labels(clean, clean, tuple(map(str, range(10))))
        ).given
        seen = strength * torch.eye(10)[clean] + torch.randn(1000, 10, generator=generator(seed))
        _, low, high = audit(
            given, probabilities=(strength * seen / temperature).softmax(dim=1)
        ).noise_rate
        assert low <= (given != clean).double().mean() <= high


def test_doubts_fall_with_the_score_as_a_least_squares_fit_does():
    scores = torch.rand(200, generator=generator()).mul(20).round() / 20  # with ties
    values = (torch.rand(200, generator=generator(1)) > scores).float()
    scores[7] = NAN
    found = noise_rate.decreasing_fit(scores, values)
    known = ~scores.isnan()
    fit = IsotonicRegression(increasing=False).fit_transform(
        scores[known].numpy(), values[known].numpy()
    )
    torch.testing.assert_close(found[known], torch.from_numpy(fit).double(), atol=1e-6, rtol=0)
    assert found[7].isnan()


@pytest.mark.parametrize("mean", [0.1, 0.3, 0.6])
def test_doubts_are_bent_to_the_wished_mean(mean):
    doubts = torch.linspace(0.05, 0.95, 50).double()
    found = noise_rate.raised_to_mean(doubts, mean)
    assert found.mean().item() == pytest.approx(mean, abs=1e-6)
    assert (found.diff() > 0).all()
    some = torch.cat(
        [doubts, torch.zeros(5), torch.tensor([NAN])]
    )  # nobody doubts five, and one is not known
    found = noise_rate.raised_to_mean(some, mean)
    assert found[:-1].mean().item() == pytest.approx(mean, abs=1e-6)
    assert found[-1].isnan()
    assert (found[-6:-1] == 0).all()


def test_doubts_are_bent_no_further_than_by_the_power_of_twenty():
    doubts = torch.tensor([0.5, 0.9]).double()
    torch.testing.assert_close(
        noise_rate.raised_to_mean(doubts, 0.0), torch.tensor([0.5**20, 0.9**20]).double()
    )
    torch.testing.assert_close(
        noise_rate.raised_to_mean(doubts, 1.0), torch.tensor([0.5**0.05, 0.9**0.05]).double()
    )


def test_the_variance_that_classes_explain_is_less_what_any_classes_would():
    values = [1.0, 2.0, 4.0, 8.0, 5.0, 7.0, NAN, 3.0]
    labels = [0, 0, 0, 2, 2, 2, 2, -1]  # nobody is of class 1
    kept = [
        (value, label)
        for value, label in zip(values, labels, strict=True)
        if value == value and label >= 0
    ]
    groups = [[value for value, label in kept if label == each] for each in (0, 2)]
    within = sum(sum((value - sum(group) / 3) ** 2 for value in group) for group in groups) / (
        6 - 2
    )
    total = sum((value - 27 / 6) ** 2 for value, _ in kept) / (6 - 1)
    found = noise_rate._explained_by_class(torch.tensor(values), torch.tensor(labels))
    assert found == pytest.approx(1 - within / total)
    assert (
        noise_rate._explained_by_class(torch.tensor([1.0, 2.0]), torch.tensor([0, 3])) == 0
    )  # each alone in its class


def test_the_noise_matrix_counts_labels_among_those_that_seem_to_be_of_a_class():
    given, suggested = torch.tensor([0, 1, 1, 0, -1, 1]), torch.tensor([0, 0, 1, 0, 1, -1])
    expected = torch.tensor([[2 / 3, 1 / 3, 0], [0, 1, 0], [0, 0, 1]]).double()
    torch.testing.assert_close(noise_rate.noise_matrix(given, suggested, 3), expected)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4])
def test_the_noise_rate_of_digits_is_estimated_from_their_pixels(rate):
    pixels, truth = load_digits(return_X_y=True)
    clean = torch.from_numpy(truth).long()
    given = Symmetric(rate=rate, seed=1, redraw=False)(
        Labels(clean, clean, tuple("0123456789"))
    ).given
    found = audit(given, features=pixels)
    effective = (given != clean).float().mean().item()
    # The nearest in pixels err on 4 % of clean digits, and who asks nobody else cannot know that.
    assert found.noise_rate.estimate == pytest.approx(effective, abs=0.05)
    assert (found.noise_rate.low == 0) == (
        rate == 0
    )  # where there is one heap of scores, all may be right
    if rate:
        assert metrics.detection_auroc(found.scores, given != clean) > 0.97
        assert (found.suggested.labels == clean).float().mean() > 0.95
        order = (given != clean)[found.order()]
        needed = int((order.cumsum(0) >= 0.9 * order.sum()).nonzero()[0]) + 1
        assert found.review_for(0.9) == pytest.approx(needed, rel=0.15)


def test_the_interval_begins_at_none_where_training_shows_one_heap_of_labels():
    drawn = generator()
    clean = torch.randint(0, 4, (2000,), generator=drawn)
    probabilities = torch.full((2000, 4), 0.01).scatter(1, clean[:, None], 0.97)
    probabilities[:200] = probabilities[:200].roll(
        1, dims=1
    )  # hard ones, or wrong labels: who knows
    confidence = torch.full((2000,), 0.9)
    one_heap = torch.randn(2000, generator=drawn) + 5
    two_heaps = torch.where(torch.arange(2000) < 400, one_heap - 12, one_heap)
    known = audit(
        clean, probabilities=probabilities, dynamics={"confidence": confidence, "margin": two_heaps}
    )
    unknown = audit(
        clean, probabilities=probabilities, dynamics={"confidence": confidence, "margin": one_heap}
    )
    assert unknown.noise_rate.estimate == pytest.approx(0.1)
    assert unknown.noise_rate.low == 0
    assert unknown.noise_rate.high > 0.1
    assert known.noise_rate.estimate == pytest.approx(0.2, abs=0.01)
    assert known.noise_rate.low > 0.03


def test_the_rate_of_two_heaps_is_the_mean_of_two_sizes_and_its_interval_holds_all_views():
    drawn = generator(3)
    margins = torch.cat(
        [torch.randn(300, generator=drawn) - 3, 2.5 * torch.randn(700, generator=drawn) + 4]
    )
    labels, dynamics = torch.arange(1000) % 2, {"confidence": margins.sigmoid(), "margin": margins}
    below = (margins <= noise_rate.otsu_cut(margins).threshold).double().mean().item()
    lower = noise_rate.mixture_share(margins)
    assert below > lower + 0.01  # the wide heap reaches below the cut
    found = audit(labels, dynamics=dynamics).noise_rate
    assert found.estimate == pytest.approx(below)
    mirrored = {"confidence": margins.neg().sigmoid(), "margin": -margins}
    below = (-margins <= noise_rate.otsu_cut(-margins).threshold).double().mean().item()
    lower = noise_rate.mixture_share(-margins)
    assert lower > below + 0.01
    found = audit(labels, dynamics=mirrored).noise_rate
    assert found.estimate == pytest.approx((below + lower) / 2)
    agreeing = audit(labels, dynamics=dynamics, probabilities=torch.eye(2)[labels]).noise_rate
    assert agreeing.low == 0  # the network has learned all labels, and rejects none


def test_what_scores_tell_apart_may_be_wrong_where_training_does_not_show_it():
    labels = torch.arange(300) % 2
    is_low = torch.arange(300) % 10 < 3
    sure = torch.where(is_low, 0.6, 0.99)
    probabilities = torch.eye(2)[labels] * sure[:, None] + (1 - torch.eye(2)[labels]) * (
        1 - sure[:, None]
    )
    dynamics = {"confidence": torch.full((300,), 0.9), "margin": torch.full((300,), 2.0)}
    found = audit(labels, dynamics=dynamics, probabilities=probabilities).noise_rate
    assert found.estimate == 0
    assert found.low == 0
    assert found.high == pytest.approx(noise_rate.wilson_interval(0.3, 300)[1])


def test_the_lower_heap_has_no_vote_where_training_or_a_view_speaks_against_it():
    scores = torch.tensor([0.6] * 3 + [0.95] * 7)
    is_upper = scores > 0.9
    margins = torch.where(is_upper, 0.9, 0.7)
    agreed = audit_module._Views({}, {"neighbors": margins, "probabilities": margins})
    refused = audit_module._Views({}, {"neighbors": margins - 0.3, "probabilities": margins})
    labels = torch.arange(10) % 2
    assert audit_module._is_trusted(scores, labels, agreed, None).all()
    assert torch.equal(audit_module._is_trusted(scores, labels, refused, None), is_upper)
    assert torch.equal(audit_module._is_trusted(scores, labels, agreed, scores), is_upper)


def test_a_class_that_is_learned_later_is_not_taken_for_wrong_labels():
    labels = torch.arange(300) % 3
    features = torch.eye(3)[labels] + 0.02 * torch.randn(300, 3, generator=generator())
    margins = torch.tensor([9.0, 5.0, 4.0])[labels] + 0.4 * torch.randn(300, generator=generator(1))
    dynamics = {"confidence": torch.tensor([0.99, 0.9, 0.88])[labels], "margin": margins}
    probabilities = (8 * torch.eye(3)[labels]).softmax(dim=1)
    found = audit(labels, dynamics=dynamics, probabilities=probabilities, features=features)
    assert noise_rate.otsu_cut(margins).explained > noise_rate.IS_SPLIT
    assert not found.is_issue.any()
    assert found.noise_rate.estimate == 0


def test_heaps_that_are_half_classes_and_that_no_view_rejects_are_no_wrong_labels():
    drawn = generator()
    labels = torch.arange(600) % 3
    is_late = (labels > 0) & (
        torch.rand(600, generator=drawn) < 0.9
    )  # of two classes most are learned later
    margins = torch.where(is_late, 0.4, 2.0) + 0.1 * torch.randn(600, generator=drawn)
    explained = noise_rate._explained_by_class(margins, labels) / noise_rate.otsu_cut(margins).explained
    assert 0.5 < explained < 0.9
    nobody = torch.zeros(600, dtype=torch.bool)
    some = is_late & (torch.arange(600) % 4 == 0)  # of the lower heap
    assert noise_rate.bimodal_threshold(margins, labels) is not None  # nothing else is known
    assert noise_rate.bimodal_threshold(margins, labels, nobody) is None
    assert noise_rate.bimodal_threshold(margins, labels, some) is not None
    dynamics = {"confidence": margins.sigmoid(), "margin": margins}
    found = audit(
        labels, dynamics=dynamics, probabilities=(6 * torch.eye(3)[labels]).softmax(dim=1)
    )
    assert found.noise_rate.estimate == 0
    assert found.noise_rate.high < 0.01
    assert not found.is_issue.any()


def two_heaps(is_low, confidence=0.5):
    """Dynamics of which the margins fall into two heaps, whatever the classes are."""
    margins = torch.where(is_low, -1.0, 1.0) + 0.2 * torch.randn(len(is_low), generator=generator())
    return {"confidence": torch.full((len(is_low),), confidence), "margin": margins}


def test_a_lower_heap_that_neighbors_accept_is_not_of_wrong_labels():
    features, clean, given = blobs(noise=0.3)
    is_low = torch.rand(300, generator=generator(1)) < 0.3
    unsure = 0.5 * torch.eye(3)[clean] + 0.5 / 3
    right = audit(clean, probabilities=unsure, features=features, dynamics=two_heaps(is_low))
    assert right.noise_rate.estimate == 0
    assert right.noise_rate.low == 0
    assert not right.is_issue.any()
    wrong = audit(
        given, probabilities=unsure, features=features, dynamics=two_heaps(given != clean)
    )
    share = (given != clean).double().mean().item()
    assert wrong.noise_rate.estimate == pytest.approx(share, abs=0.01)
    assert wrong.noise_rate.low > share / 2
    assert torch.equal(wrong.is_issue, given != clean)


@pytest.mark.parametrize(
    ("outvoted", "is_heap"),
    [([1, 1, 0, 0], False), ([1, 1, 1, 0], True), ([1, NAN, NAN, 0], False)],
)
def test_most_of_the_lower_heap_must_be_outvoted(outvoted, is_heap):
    labels, is_low = torch.arange(400) % 2, torch.arange(400) % 20 < 4
    read = inputs.read_inputs(labels, None, None, two_heaps(is_low), None)
    found = torch.zeros(400).masked_scatter(
        is_low, torch.tensor(outvoted, dtype=torch.float32).repeat(20)
    )
    assert (audit_module._training_threshold(read, audit_module._Views({}, {}), found) is not None) == is_heap


def test_a_lower_heap_that_was_learned_by_heart_is_still_one():
    _, clean, given = blobs(num=600, noise=0.3)
    features = torch.eye(3)[given] + 0.02 * torch.randn(
        600, 3, generator=generator()
    )  # nobody is outvoted
    share = (given != clean).double().mean().item()
    for sure, wanted in ((0.95, share), (0.7, 0.0)):
        probabilities = (sure - (1 - sure) / 2) * torch.eye(3)[given] + (1 - sure) / 2
        arrays = {
            "probabilities": probabilities,
            "features": features,
            "dynamics": two_heaps(given != clean),
        }
        assert audit(given, **arrays).noise_rate.estimate == pytest.approx(wanted, abs=0.01)


def test_what_a_network_rejects_that_has_learned_little_counts_where_neighbors_reject_it_too():
    labels = torch.arange(300) % 3
    tenth, shown = torch.arange(300) % 10, 0.3 * torch.eye(3) + 0.7 / 3
    view = shown[torch.where(tenth < 4, (labels + 1) % 3, labels)]  # what all views say together
    dynamics = {
        "confidence": torch.full((300,), 0.6),
        "margin": torch.randn(300, generator=generator()),
    }  # one heap

    def rate(outvoted, by_network=0.3):
        own = shown[torch.where(tenth < 10 * by_network, (labels + 1) % 3, labels)]
        read = inputs.read_inputs(labels, own, None, dynamics, None)
        return audit_module._rate_of_scored(
            read, torch.full((300,), 0.6), audit_module._Views({"all": view}, {}), outvoted, None
        )

    is_first = (tenth < 1).float()
    assert rate(is_first).estimate == pytest.approx(0.1)
    assert rate(is_first, by_network=0.0).estimate == pytest.approx(
        0.4
    )  # labels were learned by heart
    assert rate((tenth < 5).float(), by_network=0.7).estimate == pytest.approx(0.4)
    assert rate(torch.full((300,), NAN)) == rate(None)  # nobody votes
    assert rate(None).estimate == pytest.approx(0.4)
    assert rate(is_first)[1:] == rate(None)[1:]  # as the views may be right
    assert rate(None).low == 0


def test_a_label_is_outvoted_by_a_class_that_a_view_believes_in_more():
    view = torch.tensor([[0.2, 0.8], [0.8, 0.2], [0.0, 0.0], [0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])
    found = audit_module._rejects(view, torch.tensor([0, 0, 1, 0, -1, 1]))
    torch.testing.assert_close(found, torch.tensor([1, 0, NAN, 0, NAN, 1]), equal_nan=True)


def test_without_a_view_labels_that_score_below_one_half_are_rejected_and_at_one_half_are_not():
    dynamics = {"confidence": [0.5] * 16 + [0.2] * 4, "margin": [0.0] * 20}  # one heap
    assert audit([0, 1] * 10, dynamics=dynamics).noise_rate.estimate == pytest.approx(4 / 20)


def test_of_examples_that_no_view_knows_nothing_is_counted_as_accepted():
    probabilities = torch.tensor([[0.1, 0.9]] * 3 + [[0.9, 0.1]] * 7 + [[0.5, 0.5]] * 10)
    dynamics = {"confidence": [0.9] * 20, "margin": [2.0] * 20}
    assert audit(
        [0] * 20, probabilities=probabilities, dynamics=dynamics
    ).noise_rate.estimate == pytest.approx(3 / 10)


def test_the_interval_of_probabilities_alone_holds_what_confident_learning_finds():
    probabilities = torch.tensor(
        [[1.0, 0, 0]] * 10 + [[0.55, 0.45, 0]] * 10 + [[0.3, 0.4, 0.3]] * 20
    )
    labels = torch.tensor(
        [0] * 20 + [1] * 20
    )  # usual are 0.775 and 0.4, which the second ten fall short of and reach
    found = audit(labels, probabilities=probabilities).noise_rate
    assert found.estimate == 0
    assert found.high == pytest.approx(noise_rate.wilson_interval(1 / 4, 40)[1])


@pytest.mark.parametrize("are_two", [False, True])
def test_where_scores_are_one_heap_all_labels_may_be_right(are_two):
    labels, features = torch.arange(300) % 3, torch.ones(300, 2)
    is_wrong = torch.arange(300) % 10 < 3
    view = (0.3 * torch.eye(3) + 0.7 / 3)[torch.where(is_wrong, (labels + 1) % 3, labels)]
    scores = (
        torch.where(is_wrong, 0.2, 0.8)
        if are_two
        else torch.randn(300, generator=generator()).sigmoid()
    )
    read = inputs.read_inputs(labels, None, features, None, None)
    rate = audit_module._rate_of_scored(read, scores, audit_module._Views({"all": view}, {}), None, None)
    assert rate.estimate == pytest.approx(0.3)
    low = noise_rate.wilson_interval(0.3, 300)[0] - 0.1 * math.sqrt(0.3 * 0.7)
    assert rate.low == pytest.approx(low if are_two else 0)


def test_labels_that_training_did_not_see_are_no_heap_of_their_own():
    labels = torch.arange(600) % 3
    features = torch.eye(3)[labels] + 0.02 * torch.randn(600, 3, generator=generator())
    is_held_out = torch.rand(600, generator=generator(1)) < 0.1
    margins = 1 + 0.1 * torch.randn(600, generator=generator(2))
    dynamics = {
        "confidence": torch.full((600,), 0.5),
        "margin": margins,
        "count": (~is_held_out).float(),
    }
    probabilities = (6 * torch.eye(3)[labels]).softmax(dim=1)
    found = audit(labels, dynamics=dynamics, probabilities=probabilities, features=features)
    assert (
        found.scores[is_held_out].min() > found.scores[~is_held_out].max() + 0.1
    )  # the views alone are surer
    assert found.noise_rate.estimate == 0
    assert found.noise_rate.high < 0.01


def test_wrong_labels_of_one_class_alone_are_still_two_heaps():
    labels = torch.arange(1000) % 10
    is_wrong = (labels == 3) & (torch.arange(1000) % 20 < 10)
    values = torch.where(is_wrong, -4.0, 4.0) + torch.randn(1000, generator=generator())
    assert noise_rate.bimodal_threshold(values, labels) is not None


def test_what_views_say_together_is_their_geometric_mean_and_nobody_is_sure_that_a_class_is_none():
    first = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    second = torch.tensor([[0.2, 0.8], [0.3, 0.7], [0.0, 0.0]])
    wanted = torch.tensor(
        [[0.2**0.5, (0.05 * 0.8) ** 0.5], [0.3, 0.7], [1.0, 1.0]]
    ).double()  # a tenth for two classes
    torch.testing.assert_close(audit_module._geometric_mean([first, second]), wanted)


def test_a_suggestion_weighs_the_label_as_far_as_it_is_right_against_the_others_in_their_proportion():
    view = torch.tensor([[0.7, 0.2, 0.1]] * 3)
    found = audit_module._likeliest(
        [view], torch.tensor([0, 0, -1]), torch.tensor([0.7, 0.5, NAN]).double()
    )
    assert found.labels.tolist() == [1, 0, 0]
    assert found.probabilities.tolist() == pytest.approx([0.7 * 2 / 3, 0.5, 0.7])
    views = [torch.tensor([[0.8, 0.2]]), torch.tensor([[0.5, 0.5]])]  # 2 : 1 in the geometric mean
    found = audit_module._likeliest(views, torch.tensor([-1]), torch.tensor([NAN]).double())
    assert found.probabilities.tolist() == pytest.approx([2 / 3])


def test_without_a_view_a_label_stays_that_is_as_likely_right_as_wrong():
    read = inputs.read_inputs([1, 1, 0, -1], None, torch.eye(4), None, None)
    doubts = torch.tensor([0.4, 0.6, 0.5, NAN]).double()
    found = audit_module._likeliest_of_all(read, audit_module._Views({}, {}), doubts)
    assert found.labels.tolist() == [1, -1, 0, -1]
    assert found.probabilities.tolist() == pytest.approx([0.6, NAN, 0.5, NAN], nan_ok=True)


def test_a_suggestion_is_as_sure_as_one_view_and_not_as_all_multiplied():
    truth = torch.arange(100) % 2
    given = truth.clone()
    given[:8] = 1 - given[:8]  # wrong, as the probabilities say as well as all neighbors do
    features = torch.eye(2)[truth] + 0.01 * torch.randn(100, 2, generator=generator())
    probabilities = torch.full((100, 5), 0.05).scatter(1, truth[:, None], 0.8)
    found = audit(given, probabilities=probabilities, features=features, classes=list("abcde"))
    likely = found.suggested.probabilities[:8]
    assert torch.equal(found.suggested.labels[:8], truth[:8])
    assert (
        0.8 < likely.min() <= likely.max() < 0.97
    )  # three views of 0.8, 0.98 and 0.98 multiplied would say 0.999


def test_a_suggestion_can_be_sure_among_many_classes():
    truth = torch.arange(2000) % 1000
    given = truth.clone()
    given[:20] = truth[:20] + 1
    probabilities = torch.full((2000, 1000), 1e-6).scatter(1, truth[:, None], 0.999)
    found = audit(given, probabilities=probabilities)
    assert torch.equal(found.suggested.labels[:20], truth[:20])
    assert (found.suggested.probabilities[:20] > 0.85).all()


def test_unsure_probabilities_of_clean_labels_are_no_noise():
    drawn = generator()
    clean = torch.randint(0, 4, (2000,), generator=drawn)
    own = 0.9 + 0.1 * torch.rand(2000, generator=drawn)
    own[:300] = 0.55  # the likeliest still, but not by far: a heap of their own
    probabilities = (
        ((1 - own) / 3)[:, None].expand(2000, 4).scatter(1, clean[:, None], own[:, None])
    )
    found = audit(clean, probabilities=probabilities)
    assert noise_rate.otsu_cut(found.scores).explained > noise_rate.IS_SPLIT
    assert found.noise_rate.estimate == 0
    assert not found.is_issue.any()


def test_the_noise_matrix_of_flipped_pairs_is_found():
    pixels, truth = load_digits(return_X_y=True)
    clean = torch.from_numpy(truth).long()
    given = PairFlip(rate=0.3, seed=2)(Labels(clean, clean, tuple("0123456789"))).given
    found = audit(given, features=pixels)
    true_matrix = noise_rate.noise_matrix(given, clean, 10)
    assert (found.noise_matrix - true_matrix).abs().mean() < 0.01
    assert {(int(each.suggested) + 1) % 10 == int(each.given) for each in found.confused()} == {
        True
    }


# Laws


def test_the_order_of_the_examples_does_not_matter():
    features, _, given = blobs()
    probabilities = torch.rand(300, 3, generator=generator(1)).softmax(dim=1)
    dynamics = {"confidence": torch.rand(300, generator=generator(2)), "margin": torch.randn(300)}
    order = torch.randperm(300, generator=generator(3))
    one = audit(given, probabilities=probabilities, features=features, dynamics=dynamics)
    shuffled = {name: values[order] for name, values in dynamics.items()}
    other = audit(
        given[order],
        probabilities=probabilities[order],
        features=features[order],
        dynamics=shuffled,
    )
    torch.testing.assert_close(
        other.scores, one.scores[order], atol=1e-4, rtol=0
    )  # propagation stops at a tolerance
    assert torch.equal(other.suggested.labels, one.suggested.labels[order])
    torch.testing.assert_close(other.noise_matrix, one.noise_matrix)


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_order_of_the_classes_does_not_matter_even_where_they_are_equally_likely(is_trained):
    probabilities = (
        torch.randint(0, 3, (200, 3), generator=generator(4)) + 0.5
    )  # as of a few trees, or of a few people
    probabilities /= probabilities.sum(dim=1, keepdim=True)
    given = torch.randint(0, 3, (200,), generator=generator(2))
    dynamics = {"confidence": torch.rand(200, generator=generator(3)), "margin": torch.randn(200)}
    more = {"dynamics": dynamics} if is_trained else {}
    one = audit(given, probabilities=probabilities, **more)
    other = audit(2 - given, probabilities=probabilities.flip(1), **more)
    assert other.noise_rate == one.noise_rate
    torch.testing.assert_close(other.right, one.right)
    assert torch.equal(other.is_issue, one.is_issue)


def test_of_equally_likely_classes_the_label_stays():
    for label in (0, 1):
        found = audit([label] * 4, probabilities=[[0.5, 0.5, 0.0]] * 4, classes=["a", "b", "c"])
        assert found.noise_rate.estimate == 0
        assert not found.is_issue.any()
    view, halves = (
        torch.tensor([[0.7, 0.3], [0.3, 0.7]]),
        torch.full((2,), 0.5, dtype=torch.float64),
    )
    assert audit_module._likeliest([view], torch.tensor([1, 0]), halves).labels.tolist() == [1, 0]


def test_probabilities_that_find_all_classes_equally_likely_say_nothing():
    found = audit([0, 1] * 20, probabilities=torch.full((40, 2), 0.5))
    assert math.isnan(found.noise_rate.estimate)
    assert found.noise_rate[1:] == (0, 1)  # not up to 9 %, as if 40 labels had been found right
    assert not found.is_issue.any()
    one = audit(
        [0, 1, 0, 1, 0], probabilities=[[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.1, 0.9], [0.5, 0.5]]
    )
    assert one.noise_rate.estimate == 0
    assert (
        one.noise_rate.high
        > audit([0, 1, 0, 1], probabilities=[[0.9, 0.1], [0.1, 0.9]] * 2).noise_rate.high
    )
    assert (
        audit([0] * 40, probabilities=torch.ones(40, 1)).noise_rate.estimate == 0
    )  # there is no other class


def test_the_kind_of_array_does_not_matter():
    features, _, given = blobs(60)
    names = ["ant", "bee", "cat"]
    one = audit(given, features=features)
    for labels in (
        given.numpy(),
        given.tolist(),
        given.numpy().astype(np.uint8),
        np.array(given.tolist(), object),
    ):
        assert torch.equal(audit(labels, features=features.numpy()).scores, one.scores)
    named = audit([names[number] for number in given.tolist()], features=features)
    assert torch.equal(named.scores, one.scores)
    assert named.classes == ("ant", "bee", "cat")
    array = np.array([names[number] for number in given.tolist()])
    assert torch.equal(audit(array, features=features, classes=names).scores, one.scores)


def test_unlabeled_examples_have_no_score_and_no_vote_but_a_suggestion():
    features, clean, given = blobs(noise=0.1)
    labels = given.clone()
    labels[:60] = -1
    found = audit(labels, features=features)
    assert found.scores[:60].isnan().all()
    assert found.right[:60].isnan().all()
    assert not found.is_issue[:60].any()
    assert (found.suggested.labels[:60] == clean[:60]).all()
    alone = audit(labels[60:], features=features[60:], classes=["0", "1", "2"], k=5)
    assert found.noise_rate.estimate == pytest.approx(alone.noise_rate.estimate, abs=0.01)


@pytest.mark.parametrize(("num", "width"), [(60, 3), (60, 16), (10, 16), (10, 3), (2, 3)])
def test_of_labels_that_all_differ_neighbors_say_nothing(num, width):
    features = np.random.default_rng(0).normal(size=(num, width))
    found = audit(np.arange(num), features=features)
    assert not found.is_issue.any()
    assert math.isnan(found.noise_rate.estimate)
    assert found.noise_rate[1:] == (0, 1)
    assert (found.scores == 0.5).all()
    for labels, is_silent in (
        ([*range(num)], True),
        ([*range(num - 1), 0], False),
    ):  # now one may agree
        read = inputs.read_inputs(labels, None, features, None, None)
        near, graph = scores.gather_evidence(read.features, 20, None)
        views = audit_module._make_views(read, near, torch.ones(num, dtype=torch.bool), graph).beliefs
        assert [not view.any() for view in views.values()] == [is_silent, is_silent]


def test_labels_that_all_differ_are_judged_by_probabilities_and_tell_of_the_unlabeled():
    angles = torch.arange(3).repeat_interleave(20) * 1.0 + torch.arange(60) % 20 * 1e-2
    features, labels = torch.stack([angles.cos(), angles.sin()], dim=1), torch.full((60,), -1)
    labels[::20] = torch.arange(3)
    probabilities = torch.full((60, 3), 1 / 3)
    probabilities[::20] = 0.7 * torch.eye(3) + 0.1
    found = audit(labels, probabilities=probabilities, features=features, k=20)
    assert set(found.parts) > {"neighbors"}
    assert found.parts["neighbors"].isnan().all()
    assert found.noise_rate.estimate == 0
    assert found.suggested.labels.tolist() == [0] * 20 + [1] * 20 + [2] * 20


def test_features_on_disk_are_neither_copied_nor_written_to(tmp_path):
    features, _, given = blobs()
    np.save(tmp_path / "features.npy", features.numpy())
    on_disk = np.load(tmp_path / "features.npy", mmap_mode="r")
    read = inputs.read_inputs(given, None, on_disk, None, None).features
    assert read.data_ptr() == on_disk.ctypes.data
    assert torch.equal(
        audit(given, features=on_disk).scores, audit(given, features=features).scores
    )
    backward = audit(given, features=features.numpy()[:, ::-1])
    torch.testing.assert_close(backward.scores, audit(given, features=features).scores)


def test_none_and_nan_are_unlabeled():
    for labels in (
        [None, 2, 0],
        np.array([NAN, 2, 0], object),
        [NAN, 2, 0],
        np.array([NAN, 2, 0]),
        torch.tensor([NAN, 2, 0]),
    ):
        assert inputs.read_inputs(labels, torch.eye(3), None, None, None).labels.tolist() == [
            -1,
            2,
            0,
        ]
    for none in (None, NAN, ""):  # an empty cell of a CSV file is read as text
        named = inputs.read_inputs([none, "b", "a"], None, torch.eye(3), None, None)
        assert (named.labels.tolist(), named.classes) == ([-1, 1, 0], ("a", "b"))


def test_what_was_never_trained_on_or_has_no_number_is_unknown_in_all_that_training_shows():
    dynamics = {
        "confidence": [0.5, NAN, 0.7, 0.9],
        "margin": [1.0, 2.0, NAN, 3.0],
        "count": [0, 1, 1, 2],
    }
    read = inputs.read_inputs([0, 1, 0, 1], None, None, dynamics, None).dynamics
    torch.testing.assert_close(read.confidence, torch.tensor([NAN, NAN, NAN, 0.9]), equal_nan=True)
    torch.testing.assert_close(read.margin, torch.tensor([NAN, NAN, NAN, 3.0]), equal_nan=True)


def test_the_first_row_that_is_not_finite_is_named_though_few_are_looked_at_in_one_go(monkeypatch):
    monkeypatch.setattr(inputs, "_CHUNK", 4)
    features = torch.ones(9, 2).masked_fill(torch.arange(9)[:, None] >= 5, NAN)
    with pytest.raises(ValueError, match="first in row 5;"):
        inputs.read_inputs([0] * 9, None, features, None, None)


def test_a_large_class_number_is_meant_where_so_many_classes_are_named_or_have_a_probability():
    features, names = torch.eye(2), [f"class {number}" for number in range(20_000)]
    assert inputs.read_inputs([0, 19_999], None, features, None, names).labels.tolist() == [
        0,
        19_999,
    ]
    probabilities = torch.zeros(2, 20_000).index_fill(1, torch.tensor([3]), 1.0)
    assert inputs.read_inputs([0, 19_999], probabilities, None, None, None).labels.tolist() == [
        0,
        19_999,
    ]


def test_classes_that_are_numbers_are_meant_by_the_same_numbers():
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
    read = inputs.read_inputs(
        [0, 1, 1], torch.eye(3), None, None, [2, 0, 1]
    )  # as the columns stand
    assert read.labels.tolist() == [1, 2, 2]
    read = inputs.read_inputs([-1, 1], torch.eye(2), None, None, [-1, 1])
    assert read.labels.tolist() == [0, 1]


def test_copies_of_a_wrong_example_do_not_confirm_each_other():
    features, clean, given = blobs(noise=0.0)
    copies = features[:1].repeat(30, 1)
    wrong = (clean[:1] + 1) % 3
    labels = torch.cat([given, wrong.repeat(30)])
    found = audit(labels, features=torch.cat([features, copies]), k=60)
    assert (found.duplicate_groups[300:] == found.duplicate_groups[0]).all()
    assert found.duplicate_groups[0] >= 0
    assert (found.parts["neighbors"][300:] == 0).all()


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("is_seen", [False, True])
def test_classes_of_few_examples_are_not_silenced_by_those_of_many(noise, is_seen):
    sizes = [40] * 15 + [12] * 5  # the neighbors of the latter are mostly of other classes
    clean = torch.repeat_interleave(torch.arange(20), torch.tensor(sizes))
    centers = 8 * torch.nn.functional.normalize(torch.randn(20, 32, generator=generator(1)))
    features = centers[clean] + torch.randn(len(clean), 32, generator=generator(2))
    given = Symmetric(rate=noise, redraw=False)(
        Labels(clean, clean, tuple(map(str, range(20))))
    ).given
    sure = (
        {"probabilities": 0.3 * torch.eye(20)[clean] + 0.7 * torch.eye(20)[given]}
        if is_seen
        else {}
    )
    found = audit(given, features=features, **sure)
    assert found.noise_rate.low <= (given != clean).double().mean() <= found.noise_rate.high
    assert (found.is_issue == (given != clean)).double().mean() > 0.97
    assert (found.is_issue & (given == clean)).sum() < 0.02 * len(clean)


@pytest.mark.parametrize("size", [6, 10, 19])
def test_a_small_class_is_no_group_of_near_duplicates(size):
    clean = torch.arange(20).repeat_interleave(size)
    centers = torch.nn.functional.normalize(torch.randn(20, 64, generator=generator()).relu())
    features = (
        centers[clean] + 0.02 * torch.randn(len(clean), 64, generator=generator(1))
    ).relu()  # cosines of .98
    features[1] = features[0] + 1e-3
    found = audit(clean, features=features)
    assert found.duplicate_groups.tolist() == [0, 0] + [-1] * (len(clean) - 2)
    assert found.noise_rate.estimate < 0.02
    assert found.noise_rate.low == 0


@pytest.mark.parametrize("lowest", [None, 1.0, -3.0])
def test_one_class_is_always_right(lowest):
    features, _, _ = blobs(40)
    margins = (
        None
        if lowest is None
        else torch.cat([torch.linspace(lowest, lowest + 1, 20), torch.linspace(2, 3, 20)])
    )
    dynamics = None if margins is None else {"confidence": torch.ones(40), "margin": margins}
    found = audit([0] * 40, features=features, probabilities=torch.ones(40, 1), dynamics=dynamics)
    if dynamics is not None:
        alone = audit(["a"] * 39 + [None], dynamics=dynamics)
        assert alone.noise_rate.estimate == 0
        assert not alone.is_issue.any()
        assert audit([-1] * 40, dynamics=dynamics).scores.isnan().all()
    assert found.noise_rate.estimate == 0
    assert not found.is_issue.any()
    assert found.noise_matrix.tolist() == [[1.0]]
    assert found.review_for(0.9) == 0


def test_of_whom_no_view_speaks_nothing_is_suggested():
    features, _, given = blobs(60, noise=0.0)
    features[:2] = 0
    given[1] = -1
    found = audit(given, features=features)
    assert found.suggested.labels[:2].tolist() == [given[0].item(), -1]
    assert found.suggested.probabilities[1].isnan()
    assert (found.suggested.labels[2:] == given[2:]).all()


def test_who_is_the_same_as_its_neighbors_is_not_foreign():
    found = evidence_of([[1, 2], [0, 2], [0, 1]], [[1.0, 1.0]] * 3, [0, 0, 0], [[0.0, 0.0]] * 3)
    assert scores.density_score(found).tolist() == [1, 1, 1]


def test_constant_features_say_nothing():
    found = audit([0, 1] * 20, features=torch.ones(40, 3), k=5)
    assert (found.duplicate_groups >= 0).all()
    assert found.parts["neighbors"].isnan().all()
    assert (found.scores == 0.5).all()
    assert (found.right == 0.5).all()
    assert np.isnan(found.noise_rate.estimate)
    assert found.noise_rate[1:] == (0, 1)
    assert not found.is_issue.any()
    assert found.suggested.labels.tolist() == [0, 1] * 20
    assert found.noise_matrix.tolist() == [[1, 0], [0, 1]]
    assert (
        found.review_for(0.9) == 36
    )  # in no order, nine tenths of the wrong ones are in nine tenths of all


def test_labels_that_nothing_is_known_of_count_neither_as_right_nor_as_wrong():
    features, _, given = blobs()
    is_known = torch.arange(300) % 5 < 3
    alone = audit(given[is_known], features=features[is_known])
    found = audit(given, features=features.where(is_known[:, None], 0.0))
    estimate, low, high = alone.noise_rate
    assert 0.2 < estimate < 0.4
    assert found.noise_rate == pytest.approx((estimate, 0.6 * low, 0.6 * high + 0.4))
    torch.testing.assert_close(found.noise_matrix, alone.noise_matrix)
    assert torch.equal(found.is_issue[is_known], alone.is_issue)
    assert not found.is_issue[~is_known].any()
    assert found.right[~is_known].tolist() == pytest.approx([1 - estimate] * 120)
    assert torch.equal(found.suggested.labels[~is_known], given[~is_known])


def test_the_interval_allows_anything_of_labels_that_were_never_trained_on():
    dynamics = {
        "confidence": [0.9] * 8 + [0.1] * 2 + [0.0] * 10,
        "margin": [3.0] * 8 + [-3.0] * 2 + [0.0] * 10,
        "count": [5] * 10 + [0] * 10,
    }
    found = audit([0, 1] * 10, dynamics=dynamics)
    square = 1.959964**2
    center = (0.2 + square / 20) / (1 + square / 10)
    half = math.sqrt(square) * math.sqrt(0.016 + square / 400) / (1 + square / 10)
    shared = 0.1 * 0.4  # deviations of a share of 0.2
    expected = (0.2, (center - half - shared) / 2, (center + half + shared) / 2 + 0.5)
    assert found.noise_rate == pytest.approx(expected)
    assert found.is_issue.tolist() == [False] * 8 + [True] * 2 + [False] * 10


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_handful_of_examples_is_enough(num):
    found = audit(
        list(range(num)),
        features=torch.eye(3)[:num] + 0.1,
        probabilities=torch.full((num, num), 1 / num),
    )
    assert ((found.scores >= 0) & (found.scores <= 1)).all()
    assert len(found.to_columns()["index"]) == num


def test_nobody_labeled_leaves_the_rate_unknown():
    found = audit([-1, -1], probabilities=[[0.9, 0.1], [0.2, 0.8]])
    assert np.isnan(found.noise_rate.estimate)
    assert found.suggested.labels.tolist() == [0, 1]
    assert found.review_for(0.5) == 0
    assert found.confused() == []


def test_training_alone_knows_who_is_wrong_but_not_what_is_right():
    dynamics = {"confidence": [0.9] * 8 + [0.1] * 2, "margin": [3.0] * 8 + [-3.0] * 2}
    found = audit([0, 1] * 5, dynamics=dynamics)
    assert found.is_issue.tolist() == [False] * 8 + [True] * 2
    assert found.suggested.labels.tolist() == [0, 1] * 4 + [-1, -1]
    assert found.noise_matrix is None
    assert found.confused() == []
    assert found.noise_rate.estimate == pytest.approx(0.2)


def test_scores_are_shares_whatever_is_given():
    features, _, given = blobs(90, noise=0.5)
    for seed in range(5):
        probabilities = torch.randn(90, 3, generator=generator(seed)).mul(5).softmax(dim=1).half()
        dynamics = {
            "confidence": torch.rand(90),
            "margin": 100 * torch.randn(90),
            "count": torch.arange(90) % 3,
        }
        found = audit(
            given,
            probabilities=probabilities,
            features=features,
            dynamics=dynamics,
            k=1 + 30 * seed,
        )
        for values in (found.scores, found.right, found.suggested.probabilities, found.ood_scores):
            assert ((values >= 0) & (values <= 1)).all()


# What comes out


def test_issues_are_what_has_a_likelier_label():
    features, clean, given = blobs()
    found = audit(given, features=features)
    assert torch.equal(found.is_issue, found.suggested.labels != given)
    assert torch.equal(found.is_issue, given != clean)
    assert (1 - found.right).mean().item() == pytest.approx(found.noise_rate.estimate, abs=0.01)


def test_reviewing_more_finds_more():
    features, _, given = blobs(noise=0.4)
    found = audit(given, features=features + 12 * torch.randn(300, 8, generator=generator(5)))
    counts = [found.review_for(recall) for recall in (0.1, 0.5, 0.9, 1.0)]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] <= 300
    doubts = sorted((1 - found.right).tolist(), reverse=True)
    assert (
        sum(doubts[: counts[2]]) >= 0.9 * sum(doubts) - 1e-6 > sum(doubts[: counts[2] - 1]) - 1e-6
    )


@pytest.mark.parametrize(
    ("recall", "wanted"),
    [(0.5, 1), (0.8 / 1.4, 1), (0.6, 2), (1.3 / 1.4, 2), (0.95, 3), (1.0, 3), (1, 3)],
)
def test_as_many_are_reviewed_as_hold_that_share_of_the_doubts(recall, wanted):
    found = audit([0, 0, 0, -1], probabilities=torch.ones(4, 1))
    right = torch.tensor([0.9, 0.5, 0.2, NAN], dtype=torch.float64)  # of doubts .8, .5 and .1
    assert replace(found, scores=right, right=right).review_for(recall) == wanted


def test_the_pairs_that_occur_most_often_come_first_and_at_most_ten():
    names = [f"{number:02}" for number in range(12)]
    given = torch.tensor([*range(12), 7, 7, 5])
    found = audit(given, features=torch.eye(15), classes=names)
    suggested = found.suggested._replace(labels=((given + 1) % 12).masked_fill(given == 4, -1))
    found = replace(found, is_issue=given != 3, suggested=suggested)
    assert found.confused(2) == [("07", "08", 3), ("05", "06", 2)]
    told = [each.given for each in found.confused()]
    assert told == ["07", "05", "00", "01", "02", "06", "08", "09", "10", "11"]
    assert len(found.confused(99)) == 10


@pytest.mark.parametrize("recall", [0, 1.1, -1, True, "0.9", NAN])
def test_a_recall_that_is_no_share_is_refused(recall):
    found = audit([0], probabilities=[[1.0]])
    with pytest.raises(ValueError, match="recall="):
        found.review_for(recall)


def test_the_columns_are_those_that_users_know():
    found = audit(
        ["=a", None, "b"],
        probabilities=[[0.9, 0.1], [0.3, 0.7], [0.9, 0.1]],
        features=torch.eye(3) + 1,
    )
    columns = found.to_columns([10, 20, 30])
    assert columns["index"] == [10, 20, 30]
    assert columns["given_label"] == ["=a", None, "b"]
    assert columns["label_score"][1] is None
    assert columns["status"] == ["ok", "unlabeled", "ok"]
    assert [each[:2] for each in json.loads(columns["neighbors"][0])] == [[20, None], [30, "b"]]
    assert {
        "is_label_issue",
        "predicted_probability",
        "duplicate_group",
        "ood_score",
    } <= columns.keys()
    del columns["neighbors"]
    assert found.to_columns([10, 20, 30], with_neighbors=False) == columns


def test_the_columns_show_who_is_near_and_who_is_the_same_and_nothing_of_what_is_unknown():
    features = torch.tensor([[0.0, 0.0, 1.0], [1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 4.0, 0.0]])
    found = audit([0, 1, 1, 0], features=features, k=3)
    columns = found.to_columns()
    near, same = [2, "1", 0.8], [[3, "0", 1.0], [1, "1", 1.0]]
    assert list(map(json.loads, columns["neighbors"])) == [
        [],
        [same[0], near],
        [[1, "1", 0.8], [3, "0", 0.8]],
        [same[1], near],
    ]
    assert columns["duplicate_group"] == [None, 0, None, 0]
    assert columns["ood_score"] == [round(score, 6) for score in found.ood_scores.tolist()]
    assert found.neighbor_recall is None
    assert replace(found, evidence=found.evidence._replace(recall=0.75)).neighbor_recall == 0.75
    known = audit([0, 1], dynamics={"confidence": [0.1234567, 0.9], "margin": [0.0, 1.0]})
    columns = known.to_columns()
    assert (
        columns["neighbors"] == columns["duplicate_group"] == columns["ood_score"] == [None, None]
    )
    assert columns["label_score"][0] == 0.311728  # the mean of the confidence and one half
    assert known.neighbor_recall is None


def test_what_is_printed_of_an_audit_is_one_line_of_what_was_found():
    found = audit([0, 1, 0, -1], probabilities=[[0.9, 0.1], [0.1, 0.9], [0.2, 0.8], [0.5, 0.5]])
    assert repr(found).startswith("<Audit of 3 labels in 2 classes: 1 seem wrong, noise rate 0.")
    assert len(repr(found)) < 120


@pytest.mark.skipif(
    importlib.util.find_spec("pandas") is None, reason="pandas is no part of the core"
)
def test_the_frame_has_a_row_for_each_example():
    frame = audit([0, 1], probabilities=[[0.9, 0.1], [0.6, 0.4]]).to_frame()
    assert frame.loc[1, "label_score"] == pytest.approx(0.4)
    assert frame["given_label"].tolist() == ["0", "1"]


def test_a_missing_pandas_is_told_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        audit([0], probabilities=[[1.0]]).to_frame()


class Table:
    """A table as pandas and polars have it: its columns have names, and an array can be made of it."""

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
        (
            ["a", "b", "c"],
            ["column_2", "column_0", "column_1"],
            None,
            [0, 1, 2],
        ),  # names that say nothing of classes
        ([0, 1, 2], ["c", "a", "b"], None, [0, 1, 2]),
        (
            ["0", "1", "2"],
            [0, 1, 2],
            ["2", "0", "1"],
            [0, 1, 2],
        ),  # the numbers of columns without a name
        (["0", "1", "2"], ["0", "1", "2"], ["2", "0", "1"], [2, 0, 1]),
    ],
)
def test_columns_that_are_named_as_classes_stand_in_any_order(labels, columns, classes, wanted):
    probabilities = np.array([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6]])
    read = inputs.read_inputs(
        labels, Table(columns, probabilities), None, None, classes
    ).probabilities
    torch.testing.assert_close(
        read.double(), torch.from_numpy(probabilities[:, wanted]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("labels", "columns", "classes", "odd", "missing"),
    [
        (["a", "b", "c"], ["b", "c", "A"], None, "'A'", "'a'"),
        (["a", "b", "c"], ["b", "a", "a"], None, "'a'", "'c'"),
        (
            ["a", "b", "a"],
            ["d", "a", "b"],
            ["a", "b", "c"],
            "'d'",
            "'c'",
        ),  # nobody has the third label
        ([0, 1, 2], ["0", "1", "none"], None, "'none'", "'2'"),
        (
            [1, 2, 1],
            [1, 2, 3],
            None,
            "'3'",
            "'0'",
        ),  # as `classes_` of a classifier, which should be in classes=
        ([3, 17, 3], [17, 3, 90211], [3, 17, 90210], "'90211'", "'90210'"),
    ],
)
def test_columns_of_which_only_some_are_named_as_classes_are_refused(
    labels, columns, classes, odd, missing
):
    probabilities = np.full((3, 3), 1 / 3)
    with pytest.raises(
        ValueError, match=f"columns {odd} of probabilities must be named {missing}, as the others"
    ):
        audit(labels, probabilities=Table(columns, probabilities), classes=classes)
    audit(labels, probabilities=Table(["x", "y", "z"], probabilities), classes=classes)


@pytest.mark.parametrize("classes", [[1, 2, 3], [3, 1, 2], [17, 3, 1]])
def test_numbers_that_pandas_gives_to_columns_are_no_names(classes):
    pandas = pytest.importorskip("pandas")
    probabilities = np.array([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6]])
    read = inputs.read_inputs(
        classes, pandas.DataFrame(probabilities), None, None, classes
    ).probabilities
    torch.testing.assert_close(read.double(), torch.from_numpy(probabilities), rtol=0, atol=1e-6)
    numbered = pandas.DataFrame(np.hstack([probabilities[:, :2], probabilities])).iloc[
        :, 2:
    ]  # 2, 3 and 4: names or not
    with pytest.raises(
        ValueError,
        match=r"must be named .* the names of all columns as classes=, or \.to_numpy\(\)",
    ):
        audit([2, 3, 2], probabilities=numbered, classes=[1, 2, 3])


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int16, np.uint16, np.int64, np.uint64])
def test_features_may_be_whole_numbers(dtype):
    whole = np.random.default_rng(0).integers(0, 2 if dtype is bool else 9, (40, 6)).astype(dtype)
    given = torch.arange(40) % 3
    wanted = audit(given, features=whole.astype(np.float32), k=5)
    assert not wanted.scores.isnan().all()
    for features in (whole, torch.from_numpy(whole), whole.tolist()):
        assert inputs.read_inputs(given, None, features, None, None).features.dtype == torch.float32
        assert audit(given, features=features, k=5).scores.equal(wanted.scores)


def test_what_is_masked_is_missing_where_something_may_be():
    mask = [True, False, False, False]
    for labels in ([1, 2, 0, 1], ["b", "c", "a", "b"], [7.0, 2.0, 0.0, 1.0]):
        read = inputs.read_inputs(
            np.ma.masked_array(labels, mask), torch.full((4, 3), 1 / 3), None, None, None
        )
        assert read.labels.tolist() == [-1, 2, 0, 1]
        assert len(read.classes) == 3
    shown = np.ma.masked_array([0.9, 0.1, 0.2, 0.3], mask)
    read = inputs.read_inputs(
        [0, 1, 0, 1], None, None, {"confidence": shown, "margin": [1.0] * 4}, None
    )
    assert (
        read.dynamics.confidence.isnan().tolist() == read.dynamics.margin.isnan().tolist() == mask
    )
    features = np.ma.masked_array(np.eye(4), mask=False)
    assert (
        inputs.read_inputs([0, 1, 0, 1], None, features, None, None).features.tolist()
        == np.eye(4).tolist()
    )


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


# What cannot be meant

GOOD = {"probabilities": [[0.5, 0.5], [0.1, 0.9]]}


@pytest.mark.parametrize(
    ("labels", "arrays", "complaint"),
    [
        ([0, 1], {}, "labels alone say nothing"),
        ([0, 2], GOOD, "labels hold 2, but with 2 classes"),
        ([0, 2], GOOD, "where numbers are names of classes, give these numbers in classes="),
        ([0, 2], {**GOOD, "classes": [0, 1]}, "label 2 is none of the classes '0', '1'; add it"),
        (
            [3, 90210],
            {"features": torch.eye(2)},
            "labels hold 90210, but only 2 numbers occur; where numbers are names",
        ),
        ([0, -2], GOOD, "labels hold -2"),
        ([0, -100], GOOD, "labels hold -100"),
        ([0.0, 1.5], GOOD, "label 1.5 is neither a class number nor a name"),
        (np.array([False, True]), GOOD, "labels of bool must be whole class numbers"),
        (
            [torch.tensor([0]), torch.tensor([1])],
            GOOD,
            "labels are a list of 2 arrays; there must be one, which torch.cat",
        ),
        ([torch.tensor(0), torch.tensor(1)], GOOD, "labels are a list of 2 arrays"),
        (
            [0, 1],
            {"probabilities": [np.eye(2)[:1], np.eye(2)[1:]]},
            "probabilities are a list of 2 arrays",
        ),
        (
            [0, 1],
            {"features": np.array([np.ones(2), None], object)},
            "numpy.stack(column) makes a matrix",
        ),
        ([True, False], GOOD, "label True is neither"),
        ([0, "a"], GOOD, "label 0 is no name"),
        ([[0], [1]], GOOD, "labels of shape"),
        ([], GOOD, "labels of shape"),
        ([0], GOOD, "1 labels but 2 rows of probabilities"),
        (["a", "b"], {**GOOD, "classes": ["a", "c"]}, "label 'b' is none of the classes 'a', 'c'"),
        (["a", "a"], GOOD, "2 columns but there are 1 classes"),
        ([0, 1], {**GOOD, "classes": ["a", "a"]}, "no name twice"),
        (
            [0, 1],
            {**GOOD, "classes": 2},
            "classes=2 must be the names of the classes in their order, as a list",
        ),
        ([0, 1], {**GOOD, "classes": torch.tensor(2)}, "classes=2 must be the names"),
        (
            ["a", "b"],
            {**GOOD, "classes": {"a"}},
            "classes={'a'} must be the names of the classes in their order",
        ),
        (
            [0, 1],
            {**GOOD, "classes": {0: "a", 1: "b"}},
            "classes={0: 'a', 1: 'b'} must be the names",
        ),
        ([0, 1], {**GOOD, "classes": "ab"}, "classes='ab' must be the names"),
        ([0, 1], {**GOOD, "classes": []}, "at least one name"),
        ([0, 1], {**GOOD, "k": 0}, "k=0 must be"),
        ([0, 1], {**GOOD, "k": 1001}, "k=1001 must be 1000 at most"),
        ([0, 1], {"probabilities": [[3.0, -1.0], [0.5, 0.5]]}, "softmax makes of logits"),
        ([0, 1], {"probabilities": [[0.5, NAN], [0.5, 0.5]]}, "row 0 of probabilities"),
        (
            [0, 1],
            {"probabilities": [[0.5, 0.5], [1.5, -0.5]]},
            "row 1 of probabilities begins with [1.5, -0.5]",
        ),
        ([0, 1], {"probabilities": [0.5, 0.5]}, "must be a matrix (N, C)"),
        ([0, 1], {"features": [[0.5, float("inf")], [0.5, 0.5]]}, "first in row 0"),
        (
            [0, 1],
            {"features": [["a"], ["b"]]},
            "features of <U1 must be numbers; make them numbers, as with astype(fl",
        ),
        (
            [0, 1],
            {"features": np.array([[1, "a"], [2, "b"]], object)},
            "astype(float), or leave such columns out",
        ),
        (
            [0, 1],
            {"features": np.eye(2) * 1j},
            "features of torch.complex128 must be real numbers; give .real and .imag",
        ),
        (
            [0, 1],
            {"features": torch.eye(2) * 1j},
            "features of torch.complex64 must be real numbers",
        ),
        (
            [0, 1],
            {"features": sparse.csr_matrix(np.eye(2))},
            "csr_matrix are sparse and must be dense; give features.toa",
        ),
        ([0, 1], {"probabilities": sparse.coo_array(np.eye(2))}, "give probabilities.toarray()"),
        (
            [0, 1],
            {"features": torch.eye(2).to_sparse()},
            "features of type Tensor are sparse and must be dense; give fe",
        ),
        (torch.arange(2).to_sparse(), GOOD, "give labels.to_dense()"),
        (
            [0, 1],
            {"features": np.ma.masked_equal([[1.0, 2.0], [3.0, 4.0]], 4)},
            "features are masked, first in row 1",
        ),
        (
            [0, 1],
            {"probabilities": np.ma.masked_less(np.eye(2), 1)},
            "probabilities are masked, first in row 0",
        ),
        (
            [2**70, 1],
            GOOD,
            "label 1180591620717411303424 is too large for a class number; write names that are numbers",
        ),
        (
            [2**70, None],
            {**GOOD, "classes": [0, 2**70]},
            "label 1180591620717411303424 is too large",
        ),
        ([1e300, 1], GOOD, "label 1e+300 is too large"),
        ([-(2**63) - 1, 1], GOOD, "label -9223372036854775809 is too large"),
        (np.array([2**64 - 1, 1], np.uint64), GOOD, "label 18446744073709551615 is too large"),
        (
            [0, 1],
            {"dynamics": {"confidence": [0.1, 0.2], "margin": [10**400, 1.0]}},
            "margin of the dynamics must be",
        ),
        ([0, 1], {"features": torch.ones(2, 0)}, "at least one row and column"),
        ([0, 1], {"features": torch.ones(3, 2)}, "2 labels but 3 rows of features"),
        ([0, 1], {"dynamics": {"confidence": [0.1, 0.2]}}, "no 'margin'"),
        ([0, 1], {"dynamics": {"confidence": [0.1, 0.2], "margin": [1.0]}}, "must all be"),
        (
            [0, 1],
            {"dynamics": {"confidence": [[0.1], [0.2]], "margin": [[1.0], [1.0]]}},
            "must all be (N,)",
        ),
        (
            [0, 1],
            {"dynamics": {"confidence": [0.1, 3.0], "margin": [1.0, 1.0]}},
            "a confidence of 3",
        ),
        (
            [0, 1],
            {"dynamics": {"confidence": [0.1, -0.5], "margin": [1.0, 1.0]}},
            "a confidence of -0.5",
        ),
        (
            [0, 1],
            {"dynamics": {"confidence": [0.1], "margin": [1.0]}},
            "2 labels but 1 rows of dynamics",
        ),
        (
            [0, 1],
            {"dynamics": {"confidence": ["a", "b"], "margin": [1.0, 1.0]}},
            "confidence of the dynamics must be",
        ),
        (
            [0, 1],
            {"dynamics": {"confidence": [0.1, 0.2], "margin": [[1.0], [1.0, 2.0]]}},
            "margin of the dynamics must",
        ),
        ([0, 1], {"features": [[1.0, 2.0], [3.0]]}, "features of type list are no matrix"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(labels, arrays, complaint):
    with pytest.raises(ValueError, match=r"must|give|write|name|leave|add|there") as caught:
        audit(labels, **arrays)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


# The index


@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is an extra")
def test_the_index_finds_nearly_all_neighbors_and_says_how_many():
    features, _, given = blobs(4000, classes=5)
    directions, _ = neighbors.normalize(features)
    found = neighbors.nearest_others(directions, 10, approximate=True)
    exact = neighbors.nearest_others(directions, 10)
    assert exact.recall is None
    hits = (exact.neighbors.positions[:, :, None] == found.neighbors.positions[:, None]).any(dim=2)
    assert found.recall > 0.9
    assert hits.float().mean().item() == pytest.approx(found.recall, abs=0.02)
    assert not (found.neighbors.positions == torch.arange(4000)[:, None])[
        found.neighbors.similarities > 0
    ].any()
    judged = audit(given, features=features, approximate=True)
    assert judged.neighbor_recall > 0.9
    assert "propagation" not in judged.parts


def test_the_recall_is_of_neighbors_that_are_there():
    pytest.importorskip("faiss")
    features = torch.eye(200).repeat(2, 1)  # each has one neighbor, and nobody else is on its side
    (similarities, positions), recall = neighbors.nearest_others(features, 5, approximate=True)
    assert recall == 1
    assert (similarities > 0).sum(dim=1).tolist() == [1] * 400
    assert torch.equal(
        positions.gather(1, similarities.argmax(dim=1, keepdim=True))[:, 0] % 200,
        torch.arange(400) % 200,
    )


def test_an_index_is_asked_only_for_very_many_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(neighbors, "APPROXIMATE_FROM", 50)
    features, _, given = blobs(60)
    with pytest.raises(ImportError, match=r'pip install "\.\[audit\]" in the clone'):
        audit(given, features=features)
    audit(given, features=features, approximate=False)
    audit(given[:49], features=features[:49])
