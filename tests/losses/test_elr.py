import math

import oracles
import pytest
import torch
from torch.testing import assert_close

from nearsay.batch import PADDING, Batch, Mix, Outputs
from nearsay.losses.elr import ELR, elr, update_averages

EXACT = {"rtol": 1e-10, "atol": 1e-10}
EPOCH = torch.tensor(0.0)


def random_tensor(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_averages(num_examples, num_classes, seed=4):
    """A table as it looks in the middle of training: distributions, and the last row of zeros."""
    averages = random_tensor(num_examples + 1, num_classes, seed=seed).softmax(dim=1)
    averages[-1] = 0
    return averages


def make_batch(indices, num_classes=4, **fields):
    indices = torch.tensor(indices)
    targets = random_tensor(len(indices), num_classes, seed=5).softmax(dim=1)
    return Batch(inputs=torch.zeros(len(indices), 1), targets=targets, indices=indices, **fields)


def call(objective, logits, batch, averages):
    return objective(
        Outputs(torch.zeros(len(logits), 1), logits), batch, EPOCH, {"averages": averages}, "elr"
    )


def updated(averages, logits, indices, beta):
    return torch.tensor(
        oracles.elr_update(averages.tolist(), logits.tolist(), indices, beta), dtype=torch.float64
    )


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_the_formula_agrees_with_the_scalar_loop(spread):
    logits, averages = spread * random_tensor(6, 4), random_averages(5, 4)
    expected = torch.tensor(oracles.elr(logits.tolist(), averages.tolist()), dtype=torch.float64)
    assert_close(elr(logits, averages), expected, **EXACT)


def test_gradients_flow_through_the_prediction():
    averages = random_averages(5, 4)
    assert torch.autograd.gradcheck(
        lambda z: elr(z, averages), random_tensor(6, 4).requires_grad_()
    )


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_the_update_agrees_with_the_scalar_loop_and_touches_no_other_row(beta):
    averages, logits = random_averages(8, 4), 5 * random_tensor(6, 4)
    indices = [3, PADDING, 0, 3, 7, 0]
    expected = updated(averages, logits, indices, beta)
    before = averages.clone()
    update_averages(averages, logits, torch.tensor(indices), beta=beta)
    assert_close(averages, expected, **EXACT)
    untouched = [1, 2, 4, 5, 6, 8]  # 8 is the row of nobody
    assert torch.equal(averages[untouched], before[untouched])


def test_the_loss_agrees_with_the_scalar_loop_of_public_elr():
    averages, logits = random_averages(8, 4), 2 * random_tensor(5, 4)
    batch = make_batch([3, 5, 0, 7, 1])
    expected_averages = updated(averages, logits, batch.indices.tolist(), 0.7)
    rows = oracles.elr(logits.tolist(), expected_averages[batch.indices].tolist())
    labels = oracles.cross_entropy(logits.tolist(), batch.targets.tolist(), 0.0)
    loss = call(ELR(beta=0.7, weight=3.0), logits, batch, averages)
    expected = oracles.weighted_mean(labels, [1] * 5) + 3.0 * oracles.weighted_mean(rows, [1] * 5)
    assert_close(loss.total, torch.tensor(expected, dtype=torch.float64), **EXACT)
    assert_close(averages, expected_averages, **EXACT)


def test_memory_is_one_row_per_example_and_one_for_nobody():
    averages = ELR().init_state(10, 4, 7)["averages"]
    assert_close(averages, torch.zeros(11, 4))


def test_the_first_view_writes_and_all_views_read_it():
    averages, logits = random_averages(6, 4), random_tensor(4, 4)
    batch = make_batch([5, 2, 5, 2], views=2)
    expected = updated(averages, logits[:2], [5, 2], 0.7)
    loss = call(ELR(beta=0.7, weight=1.0), logits, batch, averages)
    assert_close(averages, expected, **EXACT)
    assert_close(loss.terms["elr"], elr(logits, expected[batch.indices]).mean(), **EXACT)


def test_padding_leaves_the_memory_as_it_was_even_if_it_is_not_a_number():
    averages, logits = random_averages(6, 4), random_tensor(3, 4)
    logits[1] = torch.nan
    expected = updated(averages, logits[[0, 2]], [4, 1], 0.7)
    teacher = Outputs(torch.zeros(3, 1), logits)
    mix = Mix(torch.arange(3), torch.tensor([4, PADDING, 1]), torch.tensor([1.0, torch.nan, 1.0]))
    for fields in ({}, {"teacher": teacher}, {"teacher": teacher, "mix": mix}):
        memory = averages.clone()
        leaf = logits.clone().requires_grad_()
        loss = call(ELR(beta=0.7), leaf, make_batch([4, PADDING, 1], **fields), memory)
        assert_close(memory, expected, **EXACT)
        (gradient,) = torch.autograd.grad(loss.total, leaf)
        assert torch.isfinite(loss.total)
        assert (gradient[1] == 0).all()
        assert (gradient[[0, 2]] != 0).all()


def test_what_is_not_finite_is_seen_in_the_loss_and_leaves_no_trace():
    averages, logits = random_averages(6, 4), random_tensor(3, 4)
    logits[1] = torch.nan
    expected = updated(averages, logits[[0, 2]], [4, 1], 0.7)
    loss = call(ELR(beta=0.7), logits, make_batch([4, 3, 1]), averages)
    assert_close(averages, expected, **EXACT)
    assert loss.total.isnan()


@pytest.mark.parametrize(
    ("epoch", "share"), [(0.0, math.exp(-5)), (3.0, math.exp(-1.25)), (9.0, 1.0)]
)
def test_the_weight_rises_over_the_ramp(epoch, share):
    logits, batch = random_tensor(3, 4), make_batch([4, 3, 1])
    outputs = Outputs(torch.zeros(3, 1), logits)
    for ramp, expected in ((0.0, 1.0), (6.0, share)):
        memory = {"averages": random_averages(6, 4)}
        loss = ELR(beta=0.7, weight=2.0, ramp=ramp)(
            outputs, batch, torch.tensor(epoch), memory, "elr"
        )
        regularizer = 2 * expected * elr(logits, memory["averages"][batch.indices]).mean()
        assert_close(loss.terms["elr"], regularizer, rtol=1e-6, atol=0)
        assert_close(loss.total, loss.terms["cross_entropy"] + regularizer, rtol=1e-6, atol=0)


def test_a_teacher_writes_in_place_of_the_network():
    averages, logits = random_averages(6, 4), random_tensor(3, 4)
    teacher = random_tensor(3, 4, seed=9)
    batch = make_batch([5, 0, 2], teacher=Outputs(torch.zeros(3, 1), teacher))
    expected = updated(averages, teacher, [5, 0, 2], 0.9)
    loss = call(ELR(beta=0.9, weight=2.0), logits, batch, averages)
    assert_close(averages, expected, **EXACT)
    assert_close(loss.terms["elr"], 2 * elr(logits, expected[[5, 0, 2]]).mean(), **EXACT)


def test_mixup_blends_the_averages_as_it_blended_the_images():
    averages, logits = random_averages(6, 4), random_tensor(3, 4)
    teacher = random_tensor(3, 4, seed=9)
    share = torch.tensor([0.5, 0.75, 1.0], dtype=torch.float64)
    mix = Mix(
        partners=torch.tensor([1, 2, 0]), partner_indices=torch.tensor([0, 2, 5]), weight=share
    )
    batch = make_batch([5, 0, 2], teacher=Outputs(torch.zeros(3, 1), teacher), mix=mix)
    expected = updated(averages, teacher, [5, 0, 2], 0.7)
    loss = call(ELR(weight=1.0), logits, batch, averages)
    blended = torch.stack(
        [
            0.5 * expected[5] + 0.5 * expected[0],
            0.75 * expected[0] + 0.25 * expected[2],
            expected[2],
        ]
    )
    assert_close(averages, expected, **EXACT)
    assert_close(loss.terms["elr"], elr(logits, blended).mean(), **EXACT)


def test_a_certain_prediction_that_agrees_with_its_past_stays_finite():
    logits = torch.tensor([[1e4, 0.0, 0.0]]).requires_grad_()
    averages = ELR().init_state(1, 3, 1)["averages"]
    for _ in range(50):
        total = call(ELR(), logits, make_batch([0], num_classes=3), averages).terms["elr"]
    # 1 − (1 − 1e-4)·(1 − 2e-4).
    assert_close(total, 3 * torch.tensor(3e-4).log(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("index", [6, -2])
def test_an_index_outside_the_memory_is_refused(index):
    averages, logits = random_averages(6, 4), random_tensor(2, 4)
    message = rf"ind(ex|ices)\b.*{index}"
    with pytest.raises(ValueError, match=message):
        call(ELR(), logits, make_batch([1, index]), averages)
    mix = Mix(torch.arange(2), torch.tensor([0, index]), torch.ones(2))
    with pytest.raises(ValueError, match=message):
        call(ELR(), logits, make_batch([1, 0], mix=mix), averages)


def test_averages_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="averages"):
        elr(torch.zeros(2, 4), torch.zeros(4))


@pytest.mark.parametrize(("field", "value"), [("beta", 1.0), ("weight", -1.0), ("ramp", -1.0)])
def test_choices_outside_their_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        ELR(**{field: value})


def test_a_teacher_that_is_not_finite_is_seen_in_the_loss_and_not_kept():
    logits, averages = random_tensor(3, 4), random_averages(5, 4)
    for row, is_seen in ((0, True), (2, False)):  # the last row is padding
        told = random_tensor(3, 4, seed=8)
        told[row, 1] = math.nan
        batch = make_batch([4, 1, PADDING], teacher=Outputs(torch.zeros(3, 1), told))
        kept = averages.clone()
        loss = call(ELR(), logits, batch, kept)
        assert loss.total.isnan().item() == is_seen
        assert kept.isfinite().all()
