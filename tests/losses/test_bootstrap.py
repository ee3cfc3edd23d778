import oracles
import pytest
import torch
from torch.testing import assert_close

from nearsay.batch import Batch, Outputs
from nearsay.losses.bootstrap import Bootstrap, bootstrap
from nearsay.losses.cross_entropy import cross_entropy

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def random_rows(num_rows=7, num_classes=5, spread=2.0):
    """Logits and soft targets of different weights, one of them unlabeled."""
    generator = torch.Generator().manual_seed(1)
    logits = spread * torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64)
    targets = torch.rand(num_rows, num_classes, generator=generator, dtype=torch.float64)
    targets[0] = torch.eye(num_classes, dtype=torch.float64)[2]
    targets[3] = 0
    return logits, targets


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_it_agrees_with_the_scalar_loop(alpha, kind, temperature):
    logits, targets = random_rows()
    expected = oracles.bootstrap(logits.tolist(), targets.tolist(), alpha, kind, temperature)
    rows = bootstrap(logits, targets, alpha=alpha, kind=kind, temperature=temperature)
    assert_close(rows, torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize(
    "choice", [{"kind": "hard"}, {"kind": "soft"}, {"kind": "soft", "temperature": 3.0}]
)
def test_gradients_of_logits_and_targets_are_right(choice):
    logits, targets = (rows.requires_grad_() for rows in random_rows())
    assert torch.autograd.gradcheck(
        lambda z, y: bootstrap(z, y, alpha=0.4, **choice), (logits, targets)
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_stopping_the_gradient_treats_the_prediction_as_a_given_target(temperature):
    logits, targets = random_rows()
    weights = targets.sum(dim=1, keepdim=True)
    blended = 0.6 * targets + 0.4 * weights * (logits / temperature).softmax(dim=1)
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(cross_entropy(logits, blended).sum(), logits)
    rows = bootstrap(logits, targets, alpha=0.4, temperature=temperature, stop_gradient=True)
    (stopped,) = torch.autograd.grad(rows.sum(), logits)
    flowing = bootstrap(logits, targets, alpha=0.4, temperature=temperature)
    assert_close(stopped, expected)
    assert_close(rows, flowing)
    assert not torch.allclose(torch.autograd.grad(flowing.sum(), logits)[0], expected)


def test_soft_at_a_low_temperature_is_hard():
    logits, targets = random_rows()
    # Whole numbers: the runner-up is a factor exp(-100) behind.
    logits = logits.argsort(dim=1).double()
    soft = bootstrap(logits, targets, kind="soft", temperature=0.01)
    assert_close(soft, bootstrap(logits, targets, kind="hard"))


@pytest.mark.parametrize(
    "choice",
    [
        {"alpha": 0.3, "kind": "hard"},
        {"alpha": 0.8, "temperature": 2.0},
        {"temperature": 0.5, "stop_gradient": True},
    ],
)
def test_the_objective_is_the_mean_over_labels_with_all_its_choices(choice):
    logits, targets = random_rows()
    logits.requires_grad_()
    batch = Batch(inputs=logits, targets=targets, indices=torch.arange(7))
    loss = Bootstrap(**choice)(Outputs(logits, logits), batch, torch.tensor(0.0), {}, "bootstrap")
    expected = bootstrap(logits, targets, **choice).sum() / targets.sum()
    assert_close(loss.total, expected)
    assert_close(*(torch.autograd.grad(total, logits)[0] for total in (loss.total, expected)))


@pytest.mark.parametrize(
    ("field", "value"), [("alpha", 1.5), ("kind", "firm"), ("temperature", 0.0)]
)
def test_choices_outside_their_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Bootstrap(**{field: value})
    with pytest.raises(ValueError, match=field):
        bootstrap(torch.zeros(1, 2), torch.zeros(1, 2), **{field: value})
