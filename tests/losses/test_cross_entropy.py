import oracles
import pytest
import torch
from torch.testing import assert_close

from nearsay.batch import Batch, Outputs, one_hot
from nearsay.losses.cross_entropy import CrossEntropy, cross_entropy

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def random_rows(num_rows=7, num_classes=5, spread=3.0):
    """Logits and soft targets of different weights, one of them unlabeled."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64)
    targets = torch.rand(num_rows, num_classes, generator=generator, dtype=torch.float64)
    targets[0] = torch.eye(num_classes, dtype=torch.float64)[2]
    targets[3] = 0
    return logits, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 1.0])
def test_it_agrees_with_the_scalar_loop(smoothing):
    logits, targets = random_rows()
    expected = oracles.cross_entropy(logits.tolist(), targets.tolist(), smoothing)
    rows = cross_entropy(logits, targets, smoothing=smoothing)
    assert_close(rows, torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradients_of_logits_and_targets_are_right(smoothing):
    logits, targets = (rows.requires_grad_() for rows in random_rows())
    assert torch.autograd.gradcheck(
        lambda z, y: cross_entropy(z, y, smoothing=smoothing), (logits, targets)
    )


def test_without_smoothing_it_is_what_torch_computes_from_class_numbers():
    logits, _ = random_rows()
    labels = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert_close(cross_entropy(logits, one_hot(labels, 5)), expected)


def test_the_objective_is_the_mean_over_labels():
    logits, targets = random_rows()
    rows = oracles.cross_entropy(logits.tolist(), targets.tolist(), 0.2)
    expected = oracles.weighted_mean(rows, targets.sum(dim=1).tolist())
    batch = Batch(inputs=logits, targets=targets, indices=torch.arange(7))
    loss = CrossEntropy(smoothing=0.2)(
        Outputs(logits, logits), batch, torch.tensor(0.0), {}, "cross_entropy"
    )
    assert_close(loss.total, torch.tensor(expected, dtype=torch.float64), **EXACT)


def test_class_numbers_in_place_of_targets_are_refused():
    with pytest.raises(ValueError, match="targets"):
        cross_entropy(torch.zeros(3, 3), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, None])
def test_smoothing_outside_its_range_is_refused(smoothing):
    with pytest.raises(ValueError, match="smoothing"):
        CrossEntropy(smoothing=smoothing)
    with pytest.raises(ValueError, match="smoothing"):
        cross_entropy(torch.zeros(1, 2), torch.zeros(1, 2), smoothing=smoothing)
