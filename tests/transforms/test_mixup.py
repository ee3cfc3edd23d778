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


@pytest.mark.parametrize("alpha", [0.5, 1.0, 10.0])
def test_weights_follow_the_folded_beta_law(alpha):
    mixed = Mixup(alpha=alpha)(batch_of(range(20_000)), seed=0, epoch=3)
    weight = mixed.mix.weight.double().numpy()
    assert weight.min() >= 0.5
    assert weight.max() <= 1
    # The seed is fixed: this either holds or does not.
    assert kstest(weight, folded_beta_cdf(alpha)).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0, 100.0])
def test_the_quantile_table_is_within_6e5_of_the_distribution_function(alpha):
    first_cells = (
        torch.arange(0, 2**14) / 2**24
    )  # where the error is largest, with every value a draw can take
    uniforms = torch.cat([first_cells, torch.arange(0, 2**24, 61) / 2**24])
    shares = _smaller_shares(alpha, uniforms).double().numpy()
    assert np.abs(2 * betainc(alpha, alpha, shares) - uniforms.double().numpy()).max() < 6e-5
    assert shares.max() <= 0.5


@pytest.mark.parametrize("alpha", [1e-6, 1.0, 100.0])
def test_the_quantile_table_is_finite_and_ordered_and_ends_at_a_half(alpha):
    table = _quantiles(alpha, CPU)
    assert table.shape == (_CELLS + 1,)
    assert table.isfinite().all()
    assert (table.diff() >= 0).all()
    assert table[0] == 0
    assert table[-1] == 0.5


@pytest.mark.parametrize("num", [2, 3, 8, 257])
@pytest.mark.parametrize(("num_padding", "views"), [(0, 1), (1, 3), (3, 1)])
def test_partners_are_a_permutation_without_fixed_points(num, num_padding, views):
    rows = torch.cat([torch.arange(num) * 11, torch.full((num_padding,), -1)])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(num))]
    size = len(rows)
    for epoch in range(3):
        mixed = Mixup()(batch_of(rows, views=views), seed=1, epoch=epoch)
        partners, places = mixed.mix.partners, torch.arange(size * views)
        assert_close(partners.sort().values, places)
        assert_close(partners == places, ~mixed.is_real)
        assert_close(mixed.mix.partner_indices, mixed.indices[partners])
        assert_close(partners // size, places // size)  # a partner is of the same view
        assert_close(partners.view(views, -1) % size, partners[:size].expand(views, -1))
        weight = mixed.mix.weight
        assert_close(weight.view(views, -1), weight[:size].expand(views, -1))


@pytest.mark.parametrize("rows", [[7], [7, -1], [-1, 7, -1], [-1, -1]])
def test_a_lone_row_and_padding_stay_themselves(rows):
    batch = batch_of(rows, views=2)
    mixed = Mixup()(batch, seed=0, epoch=0)
    assert_close(mixed.mix.partners, torch.arange(2 * len(rows)))
    assert_close(mixed.inputs, batch.inputs, rtol=0, atol=0)
    assert_close(mixed.targets, batch.targets, rtol=0, atol=0)


def test_every_cycle_of_four_is_equally_frequent():
    batch = batch_of(range(4))
    found = [tuple(Mixup()(batch, seed=n, epoch=0).mix.partners.tolist()) for n in range(300)]
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert chi2.sf(((counts - 50) ** 2 / 50).sum(), 5) > 1e-4


@pytest.mark.parametrize(
    "rows", [[3, 3, 8, 8], [3, 8, 3, 5, -1, 8, 3, -1], [1, 1, 1, 2, 3, 4], [1, 1, 1, 2], [6, 6, 6]]
)
def test_copies_are_partners_only_where_no_pairing_avoids_it(rows):
    real = [row for row in rows if row >= 0]
    most = max(map(real.count, real))
    for epoch in range(10):
        mixed = Mixup()(batch_of(rows), seed=0, epoch=epoch)
        assert_close(mixed.mix.partners.sort().values, torch.arange(len(rows)))
        same = ((mixed.mix.partner_indices == mixed.indices) & mixed.is_real).sum()
        assert same == max(0, 2 * most - len(real))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.float32), ((3, 2, 2), torch.bfloat16), ((4,), torch.float64)]
)
def test_inputs_and_targets_mix_by_the_formula(shape, dtype):
    batch = batch_of([4, 0, 9, -1, 2], views=2, shape=shape, dtype=dtype)
    mixed = Mixup(alpha=0.8)(batch, seed=0, epoch=1)
    assert mixed.inputs.dtype == dtype
    for row in range(10):
        weight, partner = mixed.mix.weight[row].double(), mixed.mix.partners[row]
        for found, before in ((mixed.inputs, batch.inputs), (mixed.targets, batch.targets)):
            expected = weight * before[row].double() + (1 - weight) * before[partner].double()
            assert_close(found[row], expected.to(found.dtype))
    # The blend is made in float32 and then rounded.
    exact = Mixup(alpha=0.8)(replace(batch, inputs=batch.inputs.float()), seed=0, epoch=1)
    assert dtype != torch.bfloat16 or torch.equal(mixed.inputs, exact.inputs.bfloat16())


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


def test_teacher_views_indices_and_plain_targets_are_kept():
    teacher = Outputs(torch.zeros(6, 2), torch.zeros(6, 3))
    batch = replace(batch_of([5, 6, 7], views=2), teacher=teacher)
    mixed = Mixup()(batch, seed=0, epoch=0)
    assert mixed.teacher is teacher
    assert mixed.views == 2
    assert mixed.indices is batch.indices
    assert mixed.plain_targets is batch.targets
    assert not torch.equal(mixed.targets, batch.targets)
    assert batch.mix is None


@pytest.mark.parametrize("alpha", [0, 100.5, float("nan"), "1", True, np.float32(1)])
def test_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        Mixup(alpha=alpha)


def test_batches_that_cannot_be_mixed_are_refused():
    batch = batch_of([1, 2, 3])
    mixed = Mixup()(batch, seed=0, epoch=0)
    assert isinstance(mixed.mix, Mix)
    for words, wrong in (
        ("inputs", replace(batch, inputs=batch.inputs.to(torch.uint8))),
        ("before", mixed),
        ("views", replace(batch, views=2)),
        ("targets", replace(batch, targets=torch.tensor([0, 1, 2]))),
        ("inputs", replace(batch, inputs=[[0.0]] * 3)),
        ("indices", replace(batch, indices=[0, 1, 2])),
        ("views|inputs", replace(batch, indices=torch.tensor([0]))),
    ):
        with pytest.raises(ValueError, match=words):
            Mixup()(wrong, seed=0, epoch=0)


def test_further_views_can_be_left_as_they_are():
    batch = batch_of(range(6), views=2)
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
