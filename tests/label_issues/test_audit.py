"""The audit as a whole: scores, noise rate, suggestions, laws, and the tables of its result."""

import importlib
import json
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from label_issues.helpers import NAN, blobs, generator, noisy
from sklearn.datasets import load_digits
from torch.testing import assert_close

from nearsay import metrics, neighbors
from nearsay.label_issues import audit, inputs, noise_rate, scores
from nearsay.label_propagation import propagate_over_graph

# The name of the module is that of a function too.
audit_module = importlib.import_module("nearsay.label_issues.audit")


def dynamics_of(margins, confidence):
    return {"confidence": torch.as_tensor(confidence).expand_as(margins), "margin": margins}


def two_groups(is_low):
    """Dynamics with margins in two groups that are not classes."""
    noise = 0.2 * torch.randn(len(is_low), generator=generator())
    return dynamics_of(torch.where(is_low, -1.0, 1.0) + noise, 0.5)


def sure_of(labels, logit):
    return (logit * torch.eye(3)[labels]).softmax(dim=1)


def test_the_margin_compares_the_label_with_the_best_other_class():
    beliefs = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.0, 0.0, 0.0]])
    result = audit_module.belief_margin(beliefs, torch.tensor([0, 2, -1, 1]))
    assert_close(result, torch.tensor([0.75, 0.2, NAN, NAN]), equal_nan=True)


def test_training_is_the_mean_of_confidence_and_of_the_logistic_of_the_margin():
    result = audit([0, 1, 0], dynamics={"confidence": [0.9, 0.2, 0.6], "margin": [2.0, -1.0, 0.0]})
    expected = (torch.tensor([0.9, 0.2, 0.6]) + torch.tensor([2.0, -1.0, 0.0]).sigmoid()) / 2
    assert_close(result.scores, expected)
    assert_close(result.parts["training"], expected)


def test_the_score_is_the_mean_of_training_and_of_the_views():
    probabilities = [[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]
    dynamics = {"confidence": [0.5, 0.5, 0.5], "margin": [0.0, 0.0, 0.0], "count": [3, 3, 0]}
    result = audit([0, 1, 0], probabilities=probabilities, dynamics=dynamics)
    assert_close(result.scores, torch.tensor([(0.8 + 0.5) / 2, (0.4 + 0.5) / 2, 0.1]))


def test_an_audit_searches_once_and_propagates_over_the_result(monkeypatch):
    features, _, given = blobs(num=200)
    # Similarities of nearly equal rows are refined for the evidence but not for the graph.
    features[100:110] = features[110:120] * (1 + 1e-6)
    searched, graphs, references, cosines = [], [], [], neighbors.cosines

    def spied_cosines(queries, keys):
        searched.append(len(queries))
        return cosines(queries, keys)

    def spied_propagation(graph, *others):
        references.append(weakref.ref(graph.similarities))
        graphs.append([part.clone() for part in graph])
        return propagate_over_graph(graph, *others)

    monkeypatch.setattr(neighbors, "cosines", spied_cosines)
    monkeypatch.setattr(audit_module, "propagate_over_graph", spied_propagation)
    result = audit(given, features=features)
    assert searched == [200]
    # The result must not hold the graph, which may be in the memory of an accelerator.
    assert [reference() for reference in references] == [None]
    units, _ = neighbors.normalize(features)
    for part, expected in zip(graphs[0], neighbors.nearest(units, units, 20, None), strict=True):
        assert part.equal(expected)
    assert "propagation" in result.parts


def test_unusual_examples_have_a_low_ood_score():
    pixels = torch.from_numpy(load_digits().data).float()
    noise = 16 * torch.rand(50, 64, generator=generator())
    result = audit([0] * (len(pixels) + 50), features=torch.cat([pixels, noise]))
    is_noise = torch.arange(len(pixels) + 50) >= len(pixels)
    assert result.ood_scores.min() > 0
    assert result.ood_scores.max() == 1
    assert metrics.detection_auroc(result.ood_scores, is_noise) > 0.95


# Noise rate


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_interval_allows_for_classes_that_overlap(rate):
    drawn = generator()
    clean = torch.randint(0, 2, (1500,), generator=drawn)
    # A sixth of them are on the side of the other class.
    place = 2.0 * clean + torch.randn(1500, generator=drawn)
    wrong = torch.rand(1500, generator=drawn) < rate
    labels = clean.where(~wrong, 1 - clean)
    features = torch.stack([torch.cos(place / 2), torch.sin(place / 2)], dim=1)
    probabilities = torch.stack([2 - 2 * place, 2 * place - 2], dim=1).softmax(dim=1)
    result = audit(labels, probabilities=probabilities, features=features)
    # The scores form two groups, although both hold right labels.
    assert noise_rate.bimodal_threshold(result.scores, labels) is not None
    assert result.noise_rate.low <= wrong.double().mean() <= result.noise_rate.high


@pytest.mark.parametrize("temperature", [0.3, 3])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.4])
def test_the_interval_of_probabilities_alone_contains_the_truth(rate, temperature):
    clean = torch.arange(1000) % 10
    # The classifier is right for 51, 80 and 99 %.
    for seed, strength in enumerate((1.5, 2.5, 4)):
        given = noisy(clean, rate, seed)
        logits = strength * torch.eye(10)[clean] + torch.randn(1000, 10, generator=generator(seed))
        probabilities = (strength * logits / temperature).softmax(dim=1)
        _, low, high = audit(given, probabilities=probabilities).noise_rate
        assert low <= (given != clean).double().mean() <= high


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_noise_rate_of_digits_is_estimated_from_their_pixels(rate):
    pixels, truth = load_digits(return_X_y=True)
    clean = torch.from_numpy(truth).long()
    given = noisy(clean, rate, seed=1)
    result, is_wrong = audit(given, features=pixels), given != clean
    # Neighbors in pixels reject 4 % of clean digits, which nothing else corrects here.
    assert result.noise_rate.estimate == pytest.approx(is_wrong.float().mean().item(), abs=0.05)
    assert (result.noise_rate.low == 0) == (rate == 0)
    if rate:
        assert metrics.detection_auroc(result.scores, is_wrong) > 0.97
        assert (result.suggested.labels == clean).float().mean() > 0.95
        num_wrong = is_wrong[result.order()].cumsum(0)
        needed = int((num_wrong >= 0.9 * is_wrong.sum()).nonzero()[0]) + 1
        assert result.review_for(0.9) == pytest.approx(needed, rel=0.15)


def test_the_interval_begins_at_zero_if_training_shows_one_group():
    drawn = generator()
    labels = torch.randint(0, 4, (2000,), generator=drawn)
    probabilities = torch.full((2000, 4), 0.01).scatter(1, labels[:, None], 0.97)
    # The network rejects a tenth: hard examples or wrong labels.
    probabilities[:200] = probabilities[:200].roll(1, dims=1)
    margins = torch.randn(2000, generator=drawn) + 5
    one = audit(labels, probabilities=probabilities, dynamics=dynamics_of(margins, 0.9)).noise_rate
    assert one.estimate == pytest.approx(0.1)
    assert one.low == 0
    assert one.high > 0.1
    margins[:400] -= 12
    two = audit(labels, probabilities=probabilities, dynamics=dynamics_of(margins, 0.9)).noise_rate
    assert two.estimate == pytest.approx(0.2, abs=0.01)
    assert two.low > 0.03


def test_the_rate_of_two_groups_is_the_mean_of_two_sizes():
    drawn = generator(3)
    narrow, wide = torch.randn(300, generator=drawn), torch.randn(700, generator=drawn)
    margins, labels = torch.cat([narrow - 3, 2.5 * wide + 4]), torch.arange(1000) % 2
    # The wide group reaches below the cut; mirrored, it is the lower one.
    for sign, is_above in ((1, False), (-1, True)):
        values = sign * margins
        below = (values <= noise_rate.otsu_cut(values).threshold).double().mean().item()
        lower = noise_rate.mixture_share(values)
        assert abs(lower - below) > 0.01
        assert (lower > below) == is_above
        rate = audit(labels, dynamics=dynamics_of(values, values.sigmoid())).noise_rate
        assert rate.estimate == pytest.approx((below + max(below, lower)) / 2)
    # A network that has learned all labels rejects none.
    shown = dynamics_of(margins, margins.sigmoid())
    assert audit(labels, dynamics=shown, probabilities=torch.eye(2)[labels]).noise_rate.low == 0


def test_groups_of_scores_widen_the_interval_if_training_shows_one_group():
    labels = torch.arange(300) % 2
    own = torch.where(torch.arange(300) % 10 < 3, 0.6, 0.99)
    probabilities = torch.stack([1 - own, 1 - own], dim=1).scatter(1, labels[:, None], own[:, None])
    shown = dynamics_of(torch.full((300,), 2.0), 0.9)
    rate = audit(labels, dynamics=shown, probabilities=probabilities).noise_rate
    assert rate == (0, 0, pytest.approx(noise_rate.wilson_interval(0.3, 300)[1]))


def test_the_lower_group_has_no_vote_if_training_or_a_view_rejects_it():
    scores = torch.tensor([0.6] * 3 + [0.95] * 7)
    is_upper = scores > 0.9
    margins = torch.where(is_upper, 0.9, 0.7)
    agreed = audit_module._Views({}, {"neighbors": margins, "probabilities": margins})
    refused = audit_module._Views({}, {"neighbors": margins - 0.3, "probabilities": margins})
    labels = torch.arange(10) % 2
    assert audit_module._is_trusted(scores, labels, agreed, None).all()
    assert torch.equal(audit_module._is_trusted(scores, labels, refused, None), is_upper)
    assert torch.equal(audit_module._is_trusted(scores, labels, agreed, scores), is_upper)


def test_groups_that_are_half_classes_and_that_no_view_rejects_are_not_wrong():
    drawn = generator()
    labels = torch.arange(600) % 3
    # Most of two classes are learned later.
    is_late = (labels > 0) & (torch.rand(600, generator=drawn) < 0.9)
    margins = torch.where(is_late, 0.4, 2.0) + 0.1 * torch.randn(600, generator=drawn)
    by_class = noise_rate._explained_by_class(margins, labels)
    assert 0.5 < by_class / noise_rate.otsu_cut(margins).explained < 0.9
    none = torch.zeros(600, dtype=torch.bool)
    some = is_late & (torch.arange(600) % 4 == 0)
    for is_rejected, is_split in ((None, True), (none, False), (some, True)):
        threshold = noise_rate.bimodal_threshold(margins, labels, is_rejected)
        assert (threshold is not None) == is_split
    shown = dynamics_of(margins, margins.sigmoid())
    result = audit(labels, dynamics=shown, probabilities=sure_of(labels, 6))
    assert result.noise_rate.estimate == 0
    assert result.noise_rate.high < 0.01
    assert not result.is_issue.any()


def test_a_lower_group_that_neighbors_accept_is_not_wrong():
    features, clean, given = blobs(noise=0.3)
    known = {"probabilities": 0.5 * torch.eye(3)[clean] + 0.5 / 3, "features": features}
    is_low = torch.rand(300, generator=generator(1)) < 0.3
    right = audit(clean, **known, dynamics=two_groups(is_low))
    assert right.noise_rate[:2] == (0, 0)
    assert not right.is_issue.any()
    wrong = audit(given, **known, dynamics=two_groups(given != clean))
    share = (given != clean).double().mean().item()
    assert wrong.noise_rate.estimate == pytest.approx(share, abs=0.01)
    assert wrong.noise_rate.low > share / 2
    assert torch.equal(wrong.is_issue, given != clean)


@pytest.mark.parametrize(
    ("rejects", "is_group"),
    [([1, 1, 0, 0], False), ([1, 1, 1, 0], True), ([1, NAN, NAN, 0], False)],
)
def test_neighbors_must_reject_most_of_the_lower_group(rejects, is_group):
    labels, is_low = torch.arange(400) % 2, torch.arange(400) % 20 < 4
    read = inputs.read_inputs(labels, None, None, two_groups(is_low), None)
    rejects = torch.zeros(400).masked_scatter(is_low, torch.tensor(rejects).float().repeat(20))
    views = audit_module._Views({}, {})
    threshold = audit_module._training_threshold(read, views, rejects)
    assert (threshold is not None) == is_group


def test_a_lower_group_that_was_memorized_still_counts():
    _, clean, given = blobs(num=600, noise=0.3)
    # Neighbors accept all labels.
    features = torch.eye(3)[given] + 0.02 * torch.randn(600, 3, generator=generator())
    share = (given != clean).double().mean().item()
    shown = two_groups(given != clean)
    for own, wanted in ((0.95, share), (0.7, 0.0)):
        probabilities = torch.full((600, 3), (1 - own) / 2).scatter(1, given[:, None], own)
        result = audit(given, probabilities=probabilities, features=features, dynamics=shown)
        assert result.noise_rate.estimate == pytest.approx(wanted, abs=0.01)


def test_the_rate_of_an_untrained_network_is_that_of_its_neighbors():
    labels, tenth = torch.arange(300) % 3, torch.arange(300) % 10
    shown = dynamics_of(torch.randn(300, generator=generator()), 0.6)

    def belief(num_tenths):
        """Rejects so many tenths of the labels."""
        return (0.3 * torch.eye(3) + 0.7 / 3)[(labels + (tenth < num_tenths)) % 3]

    def rate(rejects, by_network=3):
        read = inputs.read_inputs(labels, belief(by_network), None, shown, None)
        views = audit_module._Views({"all": belief(4)}, {})
        return audit_module._rate_of_scored(read, torch.full((300,), 0.6), views, rejects, None)

    first = (tenth < 1).float()
    assert rate(first).estimate == pytest.approx(0.1)
    # A network that rejects nothing has learned the labels.
    assert rate(first, by_network=0).estimate == pytest.approx(0.4)
    assert rate((tenth < 5).float(), by_network=7).estimate == pytest.approx(0.4)
    assert rate(torch.full((300,), NAN)) == rate(None)
    assert rate(None).estimate == pytest.approx(0.4)
    # The views may be right, so the interval is the same.
    assert rate(first)[1:] == rate(None)[1:]
    assert rate(None).low == 0


def test_a_view_rejects_a_label_if_it_believes_more_in_another_class():
    view = torch.tensor([[0.2, 0.8], [0.8, 0.2], [0.0, 0.0], [0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])
    result = audit_module._rejects(view, torch.tensor([0, 0, 1, 0, -1, 1]))
    assert_close(result, torch.tensor([1, 0, NAN, 0, NAN, 1]), equal_nan=True)


def test_without_a_view_scores_below_one_half_are_rejected():
    dynamics = {"confidence": [0.5] * 16 + [0.2] * 4, "margin": [0.0] * 20}
    assert audit([0, 1] * 10, dynamics=dynamics).noise_rate.estimate == pytest.approx(4 / 20)


def test_silent_views_do_not_count_as_agreement():
    probabilities = torch.tensor([[0.1, 0.9]] * 3 + [[0.9, 0.1]] * 7 + [[0.5, 0.5]] * 10)
    dynamics = {"confidence": [0.9] * 20, "margin": [2.0] * 20}
    rate = audit([0] * 20, probabilities=probabilities, dynamics=dynamics).noise_rate
    assert rate.estimate == pytest.approx(3 / 10)


def test_the_interval_of_probabilities_alone_contains_confident_learning():
    probabilities = torch.tensor(
        [[1.0, 0, 0]] * 10 + [[0.55, 0.45, 0]] * 10 + [[0.3, 0.4, 0.3]] * 20
    )
    # Usual are 0.775 and 0.4, which the second ten fall short of and reach.
    labels = torch.tensor([0] * 20 + [1] * 20)
    result = audit(labels, probabilities=probabilities).noise_rate
    assert result.estimate == 0
    assert result.high == pytest.approx(noise_rate.wilson_interval(1 / 4, 40)[1])


@pytest.mark.parametrize("are_two", [False, True])
def test_all_labels_may_be_right_if_scores_form_one_group(are_two):
    labels, features = torch.arange(300) % 3, torch.ones(300, 2)
    is_wrong = torch.arange(300) % 10 < 3
    view = (0.3 * torch.eye(3) + 0.7 / 3)[(labels + is_wrong) % 3]
    scores = torch.randn(300, generator=generator()).sigmoid()
    if are_two:
        scores = torch.where(is_wrong, 0.2, 0.8)
    read = inputs.read_inputs(labels, None, features, None, None)
    views = audit_module._Views({"all": view}, {})
    rate = audit_module._rate_of_scored(read, scores, views, None, None)
    assert rate.estimate == pytest.approx(0.3)
    low = noise_rate.wilson_interval(0.3, 300)[0] - 0.1 * math.sqrt(0.3 * 0.7)
    assert rate.low == pytest.approx(low if are_two else 0)


def test_untrained_labels_are_not_a_group():
    labels = torch.arange(600) % 3
    features = torch.eye(3)[labels] + 0.02 * torch.randn(600, 3, generator=generator())
    is_held_out = torch.rand(600, generator=generator(1)) < 0.1
    shown = dynamics_of(1 + 0.1 * torch.randn(600, generator=generator(2)), 0.5)
    shown["count"] = (~is_held_out).float()
    result = audit(labels, dynamics=shown, probabilities=sure_of(labels, 6), features=features)
    # The views alone give higher scores.
    assert result.scores[is_held_out].min() > result.scores[~is_held_out].max() + 0.1
    assert result.noise_rate.estimate == 0
    assert result.noise_rate.high < 0.01


def test_labels_without_a_score_count_neither_as_right_nor_as_wrong():
    features, _, given = blobs()
    is_known = torch.arange(300) % 5 < 3
    alone = audit(given[is_known], features=features[is_known])
    result = audit(given, features=features.where(is_known[:, None], 0.0))
    estimate, low, high = alone.noise_rate
    assert 0.2 < estimate < 0.4
    assert result.noise_rate == pytest.approx((estimate, 0.6 * low, 0.6 * high + 0.4))
    assert_close(result.noise_matrix, alone.noise_matrix)
    assert torch.equal(result.is_issue[is_known], alone.is_issue)
    assert not result.is_issue[~is_known].any()
    assert result.right[~is_known].tolist() == pytest.approx([1 - estimate] * 120)
    assert torch.equal(result.suggested.labels[~is_known], given[~is_known])


# Suggestions


def test_views_are_combined_by_a_geometric_mean_that_excludes_no_class():
    first = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    second = torch.tensor([[0.2, 0.8], [0.3, 0.7], [0.0, 0.0]])
    # A tenth for two classes.
    wanted = torch.tensor([[0.2**0.5, (0.05 * 0.8) ** 0.5], [0.3, 0.7], [1.0, 1.0]]).double()
    assert_close(audit_module._geometric_mean([first, second]), wanted)


def test_a_suggestion_weighs_the_label_against_the_other_classes():
    view = torch.tensor([[0.7, 0.2, 0.1]] * 3)
    result = audit_module._likeliest(
        [view], torch.tensor([0, 0, -1]), torch.tensor([0.7, 0.5, NAN]).double()
    )
    assert result.labels.tolist() == [1, 0, 0]
    assert result.probabilities.tolist() == pytest.approx([0.7 * 2 / 3, 0.5, 0.7])
    # 2 : 1 in the geometric mean.
    views = [torch.tensor([[0.8, 0.2]]), torch.tensor([[0.5, 0.5]])]
    result = audit_module._likeliest(views, torch.tensor([-1]), torch.tensor([NAN]).double())
    assert result.probabilities.tolist() == pytest.approx([2 / 3])


def test_without_a_view_a_label_stays_if_it_is_as_likely_right_as_wrong():
    read = inputs.read_inputs([1, 1, 0, -1], None, torch.eye(4), None, None)
    p_wrong = torch.tensor([0.4, 0.6, 0.5, NAN]).double()
    result = audit_module._likeliest_of_all(read, audit_module._Views({}, {}), p_wrong)
    assert result.labels.tolist() == [1, -1, 0, -1]
    assert result.probabilities.tolist() == pytest.approx([0.6, NAN, 0.5, NAN], nan_ok=True)


def test_training_alone_finds_wrong_labels_but_not_right_ones():
    dynamics = {"confidence": [0.9] * 8 + [0.1] * 2, "margin": [3.0] * 8 + [-3.0] * 2}
    result = audit([0, 1] * 5, dynamics=dynamics)
    assert result.is_issue.tolist() == [False] * 8 + [True] * 2
    assert result.suggested.labels.tolist() == [0, 1] * 4 + [-1, -1]
    assert result.noise_matrix is None
    assert result.confused() == []
    assert result.noise_rate.estimate == pytest.approx(0.2)


# Laws


def test_the_order_of_the_examples_does_not_matter():
    features, _, given = blobs()
    probabilities = torch.rand(300, 3, generator=generator(1)).softmax(dim=1)
    shown = dynamics_of(torch.randn(300, generator=generator(2)), 0.5)
    one = audit(given, probabilities=probabilities, features=features, dynamics=shown)
    order = torch.randperm(300, generator=generator(3))
    probabilities, features = probabilities[order], features[order]
    shown = {name: values[order] for name, values in shown.items()}
    other = audit(given[order], probabilities=probabilities, features=features, dynamics=shown)
    # Propagation stops at a tolerance.
    assert_close(other.scores, one.scores[order], atol=1e-4, rtol=0)
    assert torch.equal(other.suggested.labels, one.suggested.labels[order])
    assert_close(other.noise_matrix, one.noise_matrix)


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_order_of_the_classes_does_not_matter_even_with_ties(is_trained):
    # As of a few trees, or of a few people.
    probabilities = torch.randint(0, 3, (200, 3), generator=generator(4)) + 0.5
    probabilities /= probabilities.sum(dim=1, keepdim=True)
    given = torch.randint(0, 3, (200,), generator=generator(2))
    dynamics = {"confidence": torch.rand(200, generator=generator(3)), "margin": torch.randn(200)}
    more = {"dynamics": dynamics} if is_trained else {}
    one = audit(given, probabilities=probabilities, **more)
    other = audit(2 - given, probabilities=probabilities.flip(1), **more)
    assert other.noise_rate == one.noise_rate
    assert_close(other.right, one.right)
    assert torch.equal(other.is_issue, one.is_issue)


def test_flat_probabilities_say_nothing():
    flat = audit([0, 1] * 20, probabilities=torch.full((40, 2), 0.5))
    assert math.isnan(flat.noise_rate.estimate)
    assert flat.noise_rate[1:] == (0, 1)
    assert not flat.is_issue.any()
    sure = [[0.9, 0.1], [0.1, 0.9]] * 2
    one = audit([0, 1, 0, 1, 0], probabilities=[*sure, [0.5, 0.5]]).noise_rate
    assert one.estimate == 0
    assert one.high > audit([0, 1, 0, 1], probabilities=sure).noise_rate.high
    # With a single class, equal probabilities are sure ones.
    assert audit([0] * 40, probabilities=torch.ones(40, 1)).noise_rate.estimate == 0


def test_unlabeled_examples_have_no_score_and_no_vote_but_a_suggestion():
    features, clean, given = blobs(noise=0.1)
    labels = given.clone()
    labels[:60] = -1
    result = audit(labels, features=features)
    assert result.scores[:60].isnan().all()
    assert result.right[:60].isnan().all()
    assert not result.is_issue[:60].any()
    assert (result.suggested.labels[:60] == clean[:60]).all()
    alone = audit(labels[60:], features=features[60:], classes=["0", "1", "2"], k=5)
    assert result.noise_rate.estimate == pytest.approx(alone.noise_rate.estimate, abs=0.01)


@pytest.mark.parametrize(("num", "width"), [(60, 16), (2, 3)])
def test_neighbors_say_nothing_if_all_labels_differ(num, width):
    features = np.random.default_rng(0).normal(size=(num, width))
    result = audit(np.arange(num), features=features)
    assert not result.is_issue.any()
    assert math.isnan(result.noise_rate.estimate)
    assert result.noise_rate[1:] == (0, 1)
    assert (result.scores == 0.5).all()
    # With two equal labels, one neighbor may agree.
    for last, is_silent in ((num - 1, True), (0, False)):
        read = inputs.read_inputs([*range(num - 1), last], None, features, None, None)
        evidence, graph = scores.gather_evidence(read.features, 20, None)
        views = audit_module._make_views(read, evidence, read.labels >= 0, graph).beliefs
        assert [not view.any() for view in views.values()] == [is_silent, is_silent]


def test_labels_that_all_differ_still_propagate_to_the_unlabeled():
    angles = torch.arange(3).repeat_interleave(20) * 1.0 + torch.arange(60) % 20 * 1e-2
    features, labels = torch.stack([angles.cos(), angles.sin()], dim=1), torch.full((60,), -1)
    labels[::20] = torch.arange(3)
    probabilities = torch.full((60, 3), 1 / 3)
    probabilities[::20] = 0.7 * torch.eye(3) + 0.1
    result = audit(labels, probabilities=probabilities, features=features, k=20)
    assert set(result.parts) > {"neighbors"}
    assert result.parts["neighbors"].isnan().all()
    assert result.noise_rate.estimate == 0
    assert result.suggested.labels.tolist() == [0] * 20 + [1] * 20 + [2] * 20


@pytest.mark.parametrize(("noise", "is_seen"), [(0.0, False), (0.2, True)])
def test_small_classes_keep_their_votes(noise, is_seen):
    # Most neighbors of the small classes are of other classes.
    clean = torch.repeat_interleave(torch.arange(20), torch.tensor([40] * 15 + [12] * 5))
    centers = 8 * torch.nn.functional.normalize(torch.randn(20, 32, generator=generator(1)))
    features = centers[clean] + torch.randn(len(clean), 32, generator=generator(2))
    given = noisy(clean, noise)
    probabilities = 0.3 * torch.eye(20)[clean] + 0.7 * torch.eye(20)[given] if is_seen else None
    result = audit(given, features=features, probabilities=probabilities)
    is_wrong = given != clean
    assert result.noise_rate.low <= is_wrong.double().mean() <= result.noise_rate.high
    assert (result.is_issue == is_wrong).double().mean() > 0.97
    assert (result.is_issue & ~is_wrong).sum() < 0.02 * len(clean)


@pytest.mark.parametrize("lowest", [None, -3.0])
def test_a_single_class_is_always_right(lowest):
    features, _, _ = blobs(40)
    shown = None
    if lowest is not None:
        low, high = torch.linspace(lowest, lowest + 1, 20), torch.linspace(2, 3, 20)
        shown = dynamics_of(torch.cat([low, high]), 1.0)
        alone = audit(["a"] * 39 + [None], dynamics=shown)
        assert alone.noise_rate.estimate == 0
        assert not alone.is_issue.any()
        assert audit([-1] * 40, dynamics=shown).scores.isnan().all()
    result = audit([0] * 40, features=features, probabilities=torch.ones(40, 1), dynamics=shown)
    assert result.noise_rate.estimate == 0
    assert not result.is_issue.any()
    assert result.noise_matrix.tolist() == [[1.0]]
    assert result.review_for(0.9) == 0


def test_constant_features_say_nothing():
    result = audit([0, 1] * 20, features=torch.ones(40, 3), k=5)
    assert (result.duplicate_groups >= 0).all()
    assert result.parts["neighbors"].isnan().all()
    assert (result.scores == 0.5).all()
    assert (result.right == 0.5).all()
    assert result.noise_rate[1:] == (0, 1)
    assert result.suggested.labels.tolist() == [0, 1] * 20
    assert result.noise_matrix.tolist() == [[1, 0], [0, 1]]
    # In no order, nine tenths of the wrong labels are in nine tenths of all.
    assert result.review_for(0.9) == 36


def test_without_labels_the_rate_is_unknown():
    result = audit([-1, -1], probabilities=[[0.9, 0.1], [0.2, 0.8]])
    assert np.isnan(result.noise_rate.estimate)
    assert result.suggested.labels.tolist() == [0, 1]
    assert result.review_for(0.5) == 0
    assert result.confused() == []


@pytest.mark.parametrize("k", [1, 120])
def test_scores_are_from_0_to_1_for_any_input(k):
    features, _, given = blobs(90, noise=0.5)
    probabilities = torch.randn(90, 3, generator=generator(k)).mul(5).softmax(dim=1).half()
    shown = dynamics_of(100 * torch.randn(90, generator=generator(k)), 0.3)
    shown["count"] = torch.arange(90) % 3
    result = audit(given, probabilities=probabilities, features=features, dynamics=shown, k=k)
    suggested = result.suggested.probabilities
    for values in (result.scores, result.right, suggested, result.ood_scores):
        assert ((values >= 0) & (values <= 1)).all()


# The result


@pytest.mark.parametrize(("recall", "wanted"), [(0.5, 1), (0.8 / 1.4, 1), (0.6, 2), (1, 3)])
def test_the_review_ends_at_the_wanted_share_of_wrong_labels(recall, wanted):
    result = audit([0, 0, 0, -1], probabilities=torch.ones(4, 1))
    # The labels are wrong with probabilities 0.8, 0.5 and 0.1.
    right = torch.tensor([0.9, 0.5, 0.2, NAN], dtype=torch.float64)
    assert replace(result, scores=right, right=right).review_for(recall) == wanted


def test_the_most_frequent_confusions_come_first():
    names = [f"{number:02}" for number in range(12)]
    given = torch.tensor([*range(12), 7, 7, 5])
    result = audit(given, features=torch.eye(15), classes=names)
    suggested = result.suggested._replace(labels=((given + 1) % 12).masked_fill(given == 4, -1))
    result = replace(result, is_issue=given != 3, suggested=suggested)
    assert result.confused(2) == [("07", "08", 3), ("05", "06", 2)]
    given = [pair.given for pair in result.confused()]
    assert given == ["07", "05", "00", "01", "02", "06", "08", "09", "10", "11"]
    assert len(result.confused(99)) == 10


@pytest.mark.parametrize("recall", [0, 1.1, NAN])
def test_a_recall_outside_0_to_1_is_refused(recall):
    result = audit([0], probabilities=[[1.0]])
    with pytest.raises(ValueError, match="recall"):
        result.review_for(recall)


def test_the_columns_have_the_names_of_cleanlab():
    probabilities = [[0.9, 0.1], [0.3, 0.7], [0.9, 0.1]]
    result = audit(["=a", None, "b"], probabilities=probabilities, features=torch.eye(3) + 1)
    columns = result.to_columns([10, 20, 30])
    assert columns["index"] == [10, 20, 30]
    assert columns["given_label"] == ["=a", None, "b"]
    assert columns["label_score"][1] is None
    assert columns["status"] == ["ok", "unlabeled", "ok"]
    assert [cell[:2] for cell in json.loads(columns["neighbors"][0])] == [[20, None], [30, "b"]]
    assert {"is_label_issue", "predicted_probability"} <= columns.keys()
    del columns["neighbors"]
    assert result.to_columns([10, 20, 30], with_neighbors=False) == columns


def test_the_columns_show_neighbors_and_duplicates():
    features = torch.tensor([[0.0, 0.0, 1.0], [1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 4.0, 0.0]])
    result = audit([0, 1, 1, 0], features=features, k=3)
    columns = result.to_columns()
    near, same = [2, "1", 0.8], [[3, "0", 1.0], [1, "1", 1.0]]
    others = [[1, "1", 0.8], [3, "0", 0.8]]
    expected = [[], [same[0], near], others, [same[1], near]]
    assert list(map(json.loads, columns["neighbors"])) == expected
    assert columns["duplicate_group"] == [None, 0, None, 0]
    assert columns["ood_score"] == [round(score, 6) for score in result.ood_scores.tolist()]
    assert result.neighbor_recall is None
    assert replace(result, evidence=result.evidence._replace(recall=0.75)).neighbor_recall == 0.75


def test_columns_of_unknown_values_are_empty():
    result = audit([0, 1], dynamics={"confidence": [0.1234567, 0.9], "margin": [0.0, 1.0]})
    columns = result.to_columns()
    for name in ("neighbors", "duplicate_group", "ood_score"):
        assert columns[name] == [None, None]
    # The mean of the confidence and one half, with six digits.
    assert columns["label_score"][0] == 0.311728
    assert result.neighbor_recall is None


def test_the_frame_has_a_row_for_each_example():
    pytest.importorskip("pandas")
    frame = audit([0, 1], probabilities=[[0.9, 0.1], [0.6, 0.4]]).to_frame()
    assert frame.loc[1, "label_score"] == pytest.approx(0.4)
    assert frame["given_label"].tolist() == ["0", "1"]
