"""A formula of logits and targets as an objective; the contract test covers the rest."""

from dataclasses import dataclass, replace

import pytest
import torch
from losses.test_contract import SymmetricCrossEntropy, call, make_case
from torch.testing import assert_close

from nearsay.batch import one_hot
from nearsay.losses import ELR, NCR, CrossEntropy, LossFunction, as_objective, cross_entropy


@dataclass(frozen=True)
class GCE:
    """Generalized cross-entropy, which is not linear in its target."""

    q: float = 0.7

    def __call__(self, logits, targets):
        return (1 - (targets * logits.softmax(dim=1)).sum(dim=1) ** self.q) / self.q


def test_our_own_formula_gives_our_own_objective():
    outputs, batch = make_case()
    total, terms = call(as_objective(cross_entropy), outputs, batch)
    expected = call(CrossEntropy(), outputs, batch)
    assert_close(total, expected.total)
    assert_close(terms, expected.terms)


def test_the_weight_of_a_label_is_applied_outside_the_formula():
    outputs, batch = make_case()
    weights = torch.tensor([2.0, 1.0, 0.5, 0.0, 1.5, 1.0], dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    batch = replace(batch, targets=one_hot(labels, 5) * weights[:, None])
    rows = GCE()(outputs.logits, one_hot(labels, 5).double())
    expected = (rows * weights).sum() / weights.sum()
    assert_close(call(as_objective(GCE()), outputs, batch).total, expected)


def test_a_formula_that_fails_at_zero_sees_no_row_of_zeros():
    def logarithmic(logits, targets):
        return -(targets.sum(dim=1).log() + (targets * logits.log_softmax(dim=1)).sum(dim=1))

    outputs, batch = make_case()
    outputs.logits.requires_grad_()
    loss = call(as_objective(logarithmic), outputs, replace(batch, targets=0 * batch.targets))
    loss.total.backward()
    assert loss.total == 0
    assert (outputs.logits.grad == 0).all()


@pytest.mark.parametrize(
    ("formula", "name"),
    [
        (cross_entropy, "cross_entropy"),
        (GCE(), "gce"),
        (SymmetricCrossEntropy(), "symmetric_cross_entropy"),
        (lambda logits, targets: logits.sum(dim=1), "formula"),
    ],
)
def test_its_term_has_the_name_of_the_formula(formula, name):
    objective = as_objective(formula)
    assert objective.phase(0.0, {}) == name
    assert call(objective, *make_case()).terms.keys() == {name}


def test_the_name_of_the_total_in_the_log_is_not_taken():
    def loss(logits, targets):
        return logits.sum(dim=1)

    assert as_objective(loss).name == "formula"


def test_an_objective_stays_itself():
    objective = ELR()
    assert as_objective(objective) is objective


def test_a_formula_is_a_base():
    assert NCR(base=GCE()).base == LossFunction(function=GCE())
    assert NCR(base=GCE()) == NCR(base=LossFunction(function=GCE()))


@pytest.mark.parametrize("value", [None, "ncr", GCE])
def test_what_is_neither_an_objective_nor_a_formula_is_refused(value):
    with pytest.raises(ValueError, match=r"^objective"):
        as_objective(value)


def test_a_formula_that_takes_the_mean_is_refused():
    def mean(logits, targets):
        return logits.mean()

    with pytest.raises(ValueError, match=r"^mean"):
        call(as_objective(mean), *make_case())


@pytest.mark.parametrize(
    "function", [lambda logits: logits, lambda q=0.7: lambda logits, targets: q * logits.sum(1)]
)
def test_a_function_of_one_argument_is_refused_before_training(function):
    with pytest.raises(ValueError, match="two arguments"):
        as_objective(function)


def test_a_formula_without_a_gradient_is_refused_by_its_name():
    def constant(logits, targets):
        return logits.detach().sum(dim=1)

    outputs, batch = make_case()
    assert call(as_objective(constant), outputs, batch).total.isfinite()
    outputs.logits.requires_grad_()
    with pytest.raises(ValueError, match="constant must have a gradient"):
        call(as_objective(constant), outputs, batch)
    with torch.no_grad():
        call(as_objective(constant), outputs, batch)
