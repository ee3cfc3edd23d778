import math

import oracles
import pytest
import torch
from torch.testing import assert_close

from nearsay.batch import Batch, Outputs
from nearsay.losses.cross_entropy import cross_entropy
from nearsay.losses.gjs import GJS, gjs

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def random_views(num_views, num_rows=6, num_classes=4, spread=2.0):
    """Logits of views and targets of different weights: the first one-hot, the fourth unlabeled."""
    generator = torch.Generator().manual_seed(2)
    logits = spread * torch.randn(
        num_views, num_rows, num_classes, generator=generator, dtype=torch.float64
    )
    targets = torch.rand(num_rows, num_classes, generator=generator, dtype=torch.float64)
    targets[0] = torch.eye(num_classes, dtype=torch.float64)[2]
    targets[3] = 0
    return logits, targets


@pytest.mark.parametrize("label_weight", [0.1, 0.9])
@pytest.mark.parametrize("num_views", [1, 2, 3])
def test_it_agrees_with_the_scalar_loop_over_the_definition(num_views, label_weight):
    logits, targets = random_views(num_views)
    supervised, consistency = oracles.gjs(logits.tolist(), targets.tolist(), label_weight)
    parts = gjs(logits, targets, label_weight=label_weight)
    assert_close(parts.supervised, torch.tensor(supervised, dtype=torch.float64), **EXACT)
    assert_close(parts.consistency, torch.tensor(consistency, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("num_views", [1, 2, 3])
def test_gradients_are_right(num_views):
    logits, targets = random_views(num_views)
    assert torch.autograd.gradcheck(
        lambda z: gjs(z, targets, label_weight=0.3), logits.requires_grad_()
    )


def test_label_and_views_that_nowhere_overlap_reach_the_bound():
    logits = 1e3 * torch.eye(3, dtype=torch.float64)[[0, 1]][:, None]
    target = torch.eye(3, dtype=torch.float64)[[2]]
    parts = gjs(logits, target, label_weight=0.4)
    scale = -0.6 * math.log(0.6)
    bound = torch.special.entr(torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.float64)).sum(dim=1)
    assert_close((parts.supervised + parts.consistency) * scale, bound)


def test_equal_views_are_consistent_and_count_as_one():
    logits, targets = random_views(1)
    three, one = gjs(logits.expand(3, -1, -1), targets), gjs(logits, targets)
    assert_close(three.consistency, torch.zeros_like(three.consistency))
    assert_close(three.supervised, one.supervised)
    assert (one.consistency == 0).all()


def test_with_a_small_label_weight_it_tends_to_cross_entropy():
    logits, _ = random_views(1)
    targets = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 3, 0, 1]]
    expected = cross_entropy(logits[0], targets)
    previous = math.inf
    for label_weight in (0.3, 1e-1, 1e-2, 1e-3):
        supervised = gjs(logits, targets, label_weight=label_weight).supervised
        gap = (supervised - expected).abs().max().item()
        assert gap < previous
        previous = gap
    # The gap shrinks like the label weight over the probability of the label.
    assert previous < 0.1 * expected.max().item()


def test_a_target_counts_by_its_weight_in_the_supervised_part_alone():
    logits, targets = random_views(2)
    whole, half = gjs(logits, targets), gjs(logits, 0.5 * targets)
    assert_close(half.supervised, 0.5 * whole.supervised)
    assert_close(half.consistency, whole.consistency)
    assert whole.supervised[3] == 0
    assert whole.consistency[3] > 0


@pytest.mark.parametrize("size", [1e2, 1e38])
def test_extreme_logits_have_finite_values_and_gradients(size):
    views = (
        [[1.0, -1.0, 0.0], [1.0, 1.0, -1.0], [1.0, -1.0, 0.0]],
        [[-1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, -1.0, 0.0]],
    )
    logits = (size * torch.tensor(views)).requires_grad_()
    # Nobody believes in class 1 of the last.
    targets = torch.tensor([[0.0, 0.0, 1.0], [0.2, 0.0, 0.8], [0.0, 0.0, 1.0]])
    parts = gjs(logits, targets)
    (gradient,) = torch.autograd.grad(parts.supervised.sum() + parts.consistency.sum(), logits)
    assert torch.isfinite(torch.stack(parts)).all()
    assert torch.isfinite(gradient).all()


def test_the_objective_finds_the_views_below_each_other_and_takes_the_first_target():
    logits, targets = random_views(2)
    other = torch.rand_like(targets)
    batch = Batch(
        inputs=logits,
        targets=torch.cat([targets, other]),
        indices=torch.arange(6).repeat(2),
        views=2,
    )
    outputs = Outputs(features=torch.zeros(12, 2), logits=logits.flatten(0, 1))
    loss = GJS(label_weight=0.2)(outputs, batch, torch.tensor(0.0), {}, "gjs")
    supervised, consistency = oracles.gjs(logits.tolist(), targets.tolist(), 0.2)
    expected = oracles.weighted_mean(supervised, targets.sum(dim=1).tolist()) + sum(consistency) / 6
    assert_close(loss.total, torch.tensor(expected, dtype=torch.float64), **EXACT)
    assert loss.terms["consistency"] > 0


def test_views_of_different_examples_are_refused():
    batch = Batch(
        inputs=torch.zeros(4),
        targets=torch.zeros(4, 2),
        indices=torch.tensor([0, 1, 0, 2]),
        views=2,
    )
    with pytest.raises(ValueError, match=r"^views .*1, 2"):
        GJS()(Outputs(torch.zeros(4, 1), torch.zeros(4, 2)), batch, torch.tensor(0.0), {}, "gjs")


@pytest.mark.parametrize("wrong", [-0.5, math.nan])
def test_targets_without_a_logarithm_are_refused(wrong):
    logits, targets = random_views(2)
    targets[1, 2] = wrong
    with pytest.raises(ValueError, match=rf"^targets .*{wrong}"):
        gjs(logits, targets)


def test_logits_without_an_axis_of_views_are_refused():
    # The second would stand for three.
    for logits, targets in (((3, 2), (3, 2)), ((2, 3, 2), (1, 2)), ((0, 3, 2), (3, 2))):
        with pytest.raises(ValueError, match=r"^logits"):
            gjs(torch.zeros(logits), torch.zeros(targets))


@pytest.mark.parametrize("label_weight", [0.0, 1e-4, 1.0])
def test_label_weights_outside_their_range_are_refused(label_weight):
    with pytest.raises(ValueError, match="label_weight"):
        GJS(label_weight=label_weight)
    with pytest.raises(ValueError, match="label_weight"):
        gjs(torch.zeros(1, 1, 2), torch.zeros(1, 2), label_weight=label_weight)


def test_targets_are_not_looked_at_under_vmap():
    logits = torch.randn(5, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(1)).softmax(dim=2)
    mapped = torch.func.vmap(lambda one, other: gjs(one, other).supervised)(logits, targets)
    assert_close(mapped[2], gjs(logits[2], targets[2]).supervised)
