from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import betainc
from scipy.stats import beta, chi2, kstest
from torch.testing import assert_close

from nearsay.batch import Batch, Mix, Outputs, one_hot
from nearsay.transforms.mixup import _CELLS, Mixup, _quantiles, _smaller_shares

CPU = torch.device("cpu")


def batch_of(indices, *, views=1, num_classes=3, shape=(4,), dtype=torch.float32):
    rows = torch.as_tensor(indices).repeat(views)
    generator = torch.Generator().manual_seed(0)
    return Batch(
        inputs=torch.randn(len(rows), *shape, generator=generator).to(dtype),
        targets=one_hot(rows.clamp(min=0) % num_classes, num_classes) * (rows >= 0)[:, None],
        indices=rows,
        views=views,
    )


def folded_beta_cdf(alpha):
    return lambda weight: 2 * beta.cdf(weight, alpha, alpha) - 1


def pairs(batch):
    return sorted(zip(batch.indices.tolist(), batch.mix.partner_indices.tolist(), strict=True))


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 10.0, 100.0])
def test_weights_follow_the_folded_beta_law(alpha):
    mixed = Mixup(alpha=alpha)(batch_of(range(20_000)), seed=0, epoch=3)
    weight = mixed.mix.weight.double().numpy()
    assert weight.min() >= 0.5
    assert weight.max() <= 1
    assert (
        kstest(weight, folded_beta_cdf(alpha)).pvalue > 1e-3
    )  # the seed is fixed: this either holds or does not
    mean = beta.expect(lambda value: max(value, 1 - value), (alpha, alpha))
    assert abs(weight.mean() - mean) < 4 * weight.std() / len(weight) ** 0.5


@pytest.mark.parametrize("alpha", [0.01, 0.1])
def test_weights_of_a_small_alpha_follow_the_law_up_to_rounding(alpha):
    # a fifth of the law of Beta(0.1, 0.1) lies nearer to 1 than a float32 can say, so compare below
    # that
    weight = (
        Mixup(alpha=alpha)(batch_of(range(20_000)), seed=0, epoch=3).mix.weight.double().numpy()
    )
    for bound in (0.6, 0.7, 0.8, 0.9, 0.99, 0.9999, 0.99999):
        expected = folded_beta_cdf(alpha)(bound)
        assert (
            abs((weight <= bound).mean() - expected)
            < 4 * (expected * (1 - expected) / len(weight)) ** 0.5
        )


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0])
def test_the_quantile_table_is_within_6e5_of_the_distribution_function(alpha):
    first_cells = (
        torch.arange(0, 2**14) / 2**24
    )  # where the error is largest, with every value a draw can take
    uniforms = torch.cat([first_cells, torch.arange(0, 2**24, 61) / 2**24])
    shares = _smaller_shares(alpha, uniforms).double().numpy()
    assert np.abs(2 * betainc(alpha, alpha, shares) - uniforms.double().numpy()).max() < 6e-5
    assert shares.max() <= 0.5


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.01, 1.0, 100.0])
def test_the_quantile_table_is_finite_and_ordered_and_ends_at_a_half(alpha):
    table = _quantiles(alpha, CPU)
    assert table.shape == (_CELLS + 1,)
    assert table.isfinite().all()
    assert (table.diff() >= 0).all()
    assert table[0] == 0
    assert table[-1] == 0.5


@pytest.mark.parametrize("num", [2, 3, 4, 5, 8, 257])
@pytest.mark.parametrize("num_padding", [0, 1, 3])
@pytest.mark.parametrize("views", [1, 3])
def test_partners_are_a_permutation_without_fixed_points(num, num_padding, views):
    rows = torch.cat([torch.arange(num) * 11, torch.full((num_padding,), -1)])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(num))]
    for epoch in range(3):
        mixed = Mixup()(batch_of(rows, views=views), seed=1, epoch=epoch)
        partners, places = mixed.mix.partners, torch.arange(len(rows) * views)
        assert_close(partners.sort().values, places)
        assert_close(partners == places, ~mixed.is_real)
        assert_close(mixed.mix.partner_indices, mixed.indices[partners])
        assert_close(partners // len(rows), places // len(rows))  # a partner is of the same view
        assert_close(
            partners.view(views, -1) % len(rows), (partners[: len(rows)]).expand(views, -1)
        )
        assert_close(
            mixed.mix.weight.view(views, -1), mixed.mix.weight[: len(rows)].expand(views, -1)
        )


@pytest.mark.parametrize("num_padding", [0, 2])
def test_real_rows_form_one_cycle(num_padding):
    rows = torch.cat([torch.full((num_padding,), -1), torch.arange(30)])
    partners = Mixup()(batch_of(rows), seed=0, epoch=0).mix.partners
    seen, position = set(), num_padding
    while position not in seen:
        seen.add(position)
        position = int(partners[position])
    assert len(seen) == 30


@pytest.mark.parametrize("rows", [[7], [7, -1], [-1, 7, -1], [-1, -1]])
def test_a_lone_row_and_padding_stay_themselves(rows):
    batch = batch_of(rows, views=2)
    mixed = Mixup()(batch, seed=0, epoch=0)
    assert_close(mixed.mix.partners, torch.arange(2 * len(rows)))
    assert_close(mixed.inputs, batch.inputs, rtol=0, atol=0)
    assert_close(mixed.targets, batch.targets, rtol=0, atol=0)


def test_every_cycle_of_four_is_equally_frequent():
    partners = [
        tuple(Mixup()(batch_of(range(4)), seed=seed, epoch=0).mix.partners.tolist())
        for seed in range(600)
    ]
    counts = np.unique(partners, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert chi2.sf(((counts - 100) ** 2 / 100).sum(), 5) > 1e-4


@pytest.mark.parametrize(
    "rows",
    [
        [3, 3, 8, 8],
        [3, 8, 3, 5, 8, 3],
        [3, 8, 3, 5, -1, 8, 3, -1],
        [1, 1, 1, 2, 3, 4],
        [1, 1, 1, 2],
        [1, 1, 1, 2, 2],
        [6, 6, 6],
        [9, 9, 1, 2, 3, 4, 5, 6, 6, 6, 0],
    ],
)
def test_copies_are_partners_only_where_no_pairing_avoids_it(rows):
    real = [row for row in rows if row >= 0]
    most = max(map(real.count, real))
    for epoch in range(10):
        mixed = Mixup()(batch_of(rows), seed=0, epoch=epoch)
        assert_close(mixed.mix.partners.sort().values, torch.arange(len(rows)))
        same = ((mixed.mix.partner_indices == mixed.indices) & mixed.is_real).sum()
        assert same == max(0, 2 * most - len(real))


@pytest.mark.parametrize("shape", [(), (4,), (3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inputs_and_targets_mix_by_the_formula(shape, dtype):
    batch = batch_of([4, 0, 9, -1, 2], views=2, shape=shape, dtype=dtype)
    mixed = Mixup(alpha=0.8)(batch, seed=0, epoch=1)
    assert mixed.inputs.dtype == dtype
    for row in range(10):
        weight, partner = mixed.mix.weight[row].double(), mixed.mix.partners[row]
        inputs = weight * batch.inputs[row].double() + (1 - weight) * batch.inputs[partner].double()
        assert_close(mixed.inputs[row], inputs.to(dtype))
        targets = (
            weight * batch.targets[row].double() + (1 - weight) * batch.targets[partner].double()
        )
        assert_close(mixed.targets[row], targets.float())


def test_sixteen_bit_inputs_are_blended_in_float32():
    batch = batch_of(range(64), dtype=torch.bfloat16)
    mixed, exact = (
        Mixup()(each, seed=0, epoch=0)
        for each in (batch, replace(batch, inputs=batch.inputs.float()))
    )
    assert_close(mixed.inputs, exact.inputs.bfloat16(), rtol=0, atol=0)


def test_order_of_rows_does_not_change_who_mixes_with_whom():
    rows = torch.tensor([10, 4, 7, -1, 21, 4, 2, 33, -1])
    mixed = Mixup()(batch_of(rows), seed=0, epoch=4)
    elsewhere = Mixup()(batch_of(rows.flip(0).roll(3)), seed=0, epoch=4)
    assert pairs(mixed) == pairs(elsewhere)
    assert dict(zip(mixed.indices.tolist(), mixed.mix.weight.tolist(), strict=True)) == dict(
        zip(elsewhere.indices.tolist(), elsewhere.mix.weight.tolist(), strict=True)
    )


def test_draws_are_repeatable_and_change_with_epoch_and_seed():
    batch = batch_of(range(50))
    first, again = Mixup()(batch, seed=0, epoch=1), Mixup()(batch, seed=0, epoch=torch.tensor(1.0))
    assert_close(first.inputs, again.inputs, rtol=0, atol=0)
    assert pairs(first) == pairs(again)
    for other in (Mixup()(batch, seed=0, epoch=2), Mixup()(batch, seed=1, epoch=1)):
        assert pairs(first) != pairs(other)
        assert (first.mix.weight != other.mix.weight).all()


def test_an_unlabeled_partner_lowers_the_weight_of_the_label():
    batch = batch_of([0, 1])
    batch.targets[1] = 0
    mixed = Mixup()(batch, seed=0, epoch=0)
    weight = mixed.mix.weight
    assert_close(mixed.targets.sum(dim=1), torch.stack([weight[0], 1 - weight[1]]))


def test_teacher_views_and_indices_are_kept():
    teacher = Outputs(torch.zeros(6, 2), torch.zeros(6, 3))
    batch = replace(batch_of([5, 6, 7], views=2), teacher=teacher)
    mixed = Mixup()(batch, seed=0, epoch=0)
    assert mixed.teacher is teacher
    assert mixed.views == 2
    assert mixed.indices is batch.indices
    assert batch.mix is None


def test_gradient_reaches_a_row_and_its_partner():
    batch = batch_of([5, 6, 7])
    batch.inputs.requires_grad_()
    mixed = Mixup()(batch, seed=0, epoch=0)
    mixed.inputs[0].sum().backward()
    expected = torch.zeros_like(batch.inputs)
    expected[0], expected[mixed.mix.partners[0]] = mixed.mix.weight[0], 1 - mixed.mix.weight[0]
    assert_close(batch.inputs.grad, expected)


def test_nothing_looks_at_values_on_the_device():
    batch = batch_of([5, 6, -1], views=2)
    there = replace(  # meta tensors have no values to look at
        batch,
        inputs=batch.inputs.to("meta"),
        targets=batch.targets.to("meta"),
        indices=batch.indices.to("meta"),
    )
    assert (
        Mixup()(there, seed=0, epoch=torch.tensor(1.0, device="meta")).inputs.shape
        == batch.inputs.shape
    )


def test_mixup_compiles_into_one_graph():
    batch = batch_of([5, 6, -1, 9, 9], views=2)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(batch, seed, epoch):
        mixed = Mixup(alpha=0.5)(batch, seed=seed, epoch=epoch)
        return mixed.inputs, mixed.mix.partners

    for seed in range(3):
        inputs, partners = compiled(batch, seed, torch.tensor(2.0))
        expected = Mixup(alpha=0.5)(batch, seed=seed, epoch=2)
        assert_close(inputs, expected.inputs)
        assert_close(partners, expected.mix.partners)


@pytest.mark.parametrize("alpha", [0, -1.0, 100.5, float("nan"), float("inf"), "1", True])
def test_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        Mixup(alpha=alpha)


def test_alpha_of_numpy_is_refused_with_what_makes_it_a_number():
    with pytest.raises(
        ValueError,
        match="alpha",
    ):
        Mixup(alpha=np.float32(1))


def test_batches_that_cannot_be_mixed_are_refused():
    batch = batch_of([1, 2, 3])
    with pytest.raises(ValueError, match="inputs"):
        Mixup()(replace(batch, inputs=batch.inputs.to(torch.uint8)), seed=0, epoch=0)
    mixed = Mixup()(batch, seed=0, epoch=0)
    assert isinstance(mixed.mix, Mix)
    with pytest.raises(ValueError, match="before"):
        Mixup()(mixed, seed=0, epoch=0)
    with pytest.raises(ValueError, match="views"):
        Mixup()(replace(batch, views=2), seed=0, epoch=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": torch.tensor([0, 1])}, "targets"),
        ({"inputs": [[0.0], [1.0]]}, "inputs"),
        ({"targets": [[0.0], [1.0]]}, "targets"),
        ({"indices": [0, 1]}, "indices"),
        ({"indices": torch.tensor([0])}, r"views|inputs"),
    ],
)
def test_batches_that_cannot_be_blended_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Mixup()(replace(batch_of([0, 1]), **change), seed=0, epoch=0)


def test_further_views_can_be_left_as_they_are():
    batch = Batch(
        inputs=torch.rand(12, 3),
        targets=torch.rand(12, 4),
        indices=torch.arange(6).repeat(2),
        views=2,
    )
    whole, first = (Mixup(views=views)(batch, seed=1, epoch=2) for views in ("all", "first"))
    assert torch.equal(first.inputs[:6], whole.inputs[:6])
    assert torch.equal(first.targets[:6], whole.targets[:6])
    assert not torch.equal(whole.inputs[6:], batch.inputs[6:])
    assert torch.equal(first.inputs[6:], batch.inputs[6:])
    assert torch.equal(first.targets[6:], batch.targets[6:])
    assert first.mix.weight[6:].tolist() == [1.0] * 6
    assert first.mix.partners[6:].tolist() == list(range(6, 12))
    with pytest.raises(ValueError, match="'second'"):
        Mixup(views="second")


def test_targets_from_before_are_kept():
    batch = Batch(inputs=torch.rand(6, 3), targets=torch.rand(6, 4), indices=torch.arange(6))
    mixed = Mixup()(batch, seed=1, epoch=2)
    assert mixed.plain_targets is batch.targets
    assert not torch.equal(mixed.targets, batch.targets)
