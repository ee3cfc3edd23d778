"""Neighbors as evidence: votes, near-duplicates, and unusual examples."""

import math

import pytest
import torch
from label_issues.helpers import blobs, evidence_of, generator
from torch.testing import assert_close

from nearsay.label_issues import audit, scores


def test_neighbors_vote_with_their_similarity():
    found = evidence_of(
        [[1, 2], [0, 2], [0, 1]], [[0.9, 0.3], [0.9, 0.5], [0.5, 0.3]], [-1, -1, -1]
    )
    shares = scores.votes(found, torch.tensor([0, 1, 1]), torch.ones(3, dtype=torch.bool), 2)
    expected = torch.tensor([[0, 1], [0.9 / 1.4, 0.5 / 1.4], [0.5 / 0.8, 0.3 / 0.8]])
    assert_close(shares, expected)


def test_unlabeled_and_untrusted_neighbors_have_no_vote():
    found = evidence_of(
        [[1, 2], [0, 2], [0, 1]], [[0.9, 0.3], [0.9, 0.5], [0.5, 0.3]], [-1, -1, -1]
    )
    shares = scores.votes(found, torch.tensor([0, -1, 1]), torch.tensor([False, True, True]), 2)
    assert_close(shares, torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]))


def test_near_duplicates_share_one_vote_and_ones_own_have_none():
    positions = [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    found = evidence_of(positions, [[0.8, 0.8, 0.4]] * 4, [-1, 5, 5, -1])
    shares = scores.votes(found, torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), 2)
    # 1 and 2 count half each.
    assert_close(shares[0], torch.tensor([0.4, 0.4 + 0.4]) / 1.2)
    # 2 is its own duplicate.
    assert_close(shares[1], torch.tensor([0.8, 0.4]) / 1.2)


def test_neighbors_come_nearest_first_with_their_cosines():
    angles = torch.tensor([0.0, 0.1, 0.3, 0.7])
    features = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor(
        [[1.0], [5.0], [0.2], [3.0]]
    )
    found, _ = scores.gather_evidence(features, 2, None)
    assert found.positions.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert_close(found.similarities[0], torch.tensor([0.1, 0.3]).cos())
    assert_close(found.distances[0], 2 * (torch.tensor([0.1, 0.3]) / 2).sin())
    assert found.recall is None


def test_near_duplicates_are_far_nearer_than_the_others_of_either():
    positions = torch.tensor([[1, 4], [2, 3], [1, 3], [1, 2], [5, 0], [4, 0], [7, 0], [6, 0]])
    distances = torch.tensor([[0.1, 1.0], [0.15, 0.2], [0.15, 0.2], [0.2, 0.2], *[[0.9, 1.0]] * 4])
    similarities = torch.full((8, 2), 0.9)
    # 1 has others as near as 0.
    assert (scores.duplicate_groups(positions, similarities, distances) == -1).all()
    distances[1] = 1.0
    assert scores.duplicate_groups(positions, similarities, distances).tolist() == [0, 0] + [-1] * 6


def test_the_usual_distance_is_at_most_that_of_the_fifth_neighbor_and_half_of_it():
    positions = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6], *[[0, 1, 8, 8, 8, 8]] * 7])
    # A fifth of 1.5 is 0.3.
    distances = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 4.0]] * 9)
    for apart, group in ((0.29, 0), (0.31, -1)):
        distances[:2, 0] = apart
        found = scores.duplicate_groups(positions, torch.full((9, 6), 0.9), distances)
        assert found.tolist() == [group, group] + [-1] * 7


def test_rows_equal_to_a_millionth_are_duplicates_in_any_crowd():
    positions = torch.tensor([[1, 2], [0, 3], [3, 0], [2, 1]])
    distances = torch.tensor([[9e-7, 2e-6], [9e-7, 2e-6], [1.1e-6, 2e-6], [1.1e-6, 2e-6]])
    found = scores.duplicate_groups(positions, torch.ones(4, 2), distances)
    assert found.tolist() == [0, 0, -1, -1]


def test_nearly_equal_rows_are_ordered_by_exact_distance():
    center, away = torch.randn(2, 512, generator=generator(), dtype=torch.float64)
    features = center + torch.tensor([0.0, 3e-3, 1e-3, 2e-3, 4e-3])[:, None] * away
    found, _ = scores.gather_evidence(features.float(), 4, None)
    # Which products in float32, right to 1e-7, cannot tell.
    assert found.positions[0].tolist() == [2, 3, 1, 4]
    units = torch.nn.functional.normalize(features)
    exact = torch.linalg.vector_norm(units[0] - units[found.positions[0]], dim=1)
    assert_close(found.distances[0].double(), exact, rtol=1e-3, atol=0)
    assert_close(1 - found.similarities[0].double(), exact.square() / 2, rtol=0, atol=6.1e-8)


@pytest.mark.parametrize("num", [4, 21])
def test_in_a_small_crowd_only_copies_are_near_duplicates(num):
    # All alike, none the same.
    crowd = torch.tensor([3.0] + [0.0] * 7) + 0.15 * torch.randn(num, 8, generator=generator())
    crowd[-1] = crowd[0] * 2
    groups = scores.gather_evidence(crowd, 20, None)[0].groups
    assert groups.tolist() == [0] + [-1] * (num - 2) + [0]


def test_density_and_length_compare_with_the_median():
    positions, similarities = [[1, 2], [0, 2], [0, 1]], [[0.5, 0.5]] * 3
    evidence = evidence_of(positions, similarities, [-1] * 3, [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
    evidence = evidence._replace(lengths=torch.tensor([1.0, 2.0, 4.0]))
    assert_close(scores.density_score(evidence), torch.tensor([1.0, 1.0, 0.5]))
    assert_close(scores.length_score(evidence), torch.tensor([0.5, 1.0, 1.0]))
    copies = evidence_of(positions, [[1.0, 1.0]] * 3, [0] * 3, [[0.0, 0.0]] * 3)
    assert scores.density_score(copies).tolist() == [1, 1, 1]


def test_an_empty_place_is_as_far_as_orthogonal_features():
    found, _ = scores.gather_evidence(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0]]), 2, None)
    assert_close(found.distances, torch.full((3, 2), math.sqrt(2)))
    found, _ = scores.gather_evidence(torch.tensor([[1.0, 0.0], [1.0, 0.1]]), 20, None)
    # There is no other than these.
    assert found.positions.tolist() == [[1], [0]]


@pytest.mark.parametrize("size", [6, 19])
def test_a_small_class_is_no_group_of_near_duplicates(size):
    clean = torch.arange(20).repeat_interleave(size)
    centers = torch.nn.functional.normalize(torch.randn(20, 64, generator=generator()).relu())
    # Cosines of .98.
    features = (centers[clean] + 0.02 * torch.randn(len(clean), 64, generator=generator(1))).relu()
    features[1] = features[0] + 1e-3
    found = audit(clean, features=features)
    assert found.duplicate_groups.tolist() == [0, 0] + [-1] * (len(clean) - 2)
    assert found.noise_rate.estimate < 0.02
    assert found.noise_rate.low == 0


def test_copies_of_a_wrong_example_do_not_confirm_each_other():
    features, clean, given = blobs(noise=0.0)
    copies = features[:1].repeat(30, 1)
    wrong = (clean[:1] + 1) % 3
    labels = torch.cat([given, wrong.repeat(30)])
    found = audit(labels, features=torch.cat([features, copies]), k=60)
    assert (found.duplicate_groups[300:] == found.duplicate_groups[0]).all()
    assert found.duplicate_groups[0] >= 0
    assert (found.parts["neighbors"][300:] == 0).all()
