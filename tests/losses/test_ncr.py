import math
import warnings
from dataclasses import replace
from threading import Thread

import oracle_ncr
import pytest
import torch
from torch.testing import assert_close

from nearsay import (
    ELR,
    GJS,
    NCR,
    Bank,
    Batch,
    Bootstrap,
    CrossEntropy,
    Mixup,
    Outputs,
    ncr,
    one_hot,
)
from nearsay.batch import Mix
from nearsay.losses.ncr import Pool, _warn_of_few

IMPLEMENTATIONS = ("plain", "fast")
VARIANTS = ("paper", "released")


def rows(num_rows=13, num_classes=4, num_features=5, seed=0, dtype=torch.float64, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(num_rows, num_classes, generator=generator, dtype=dtype)
    features = torch.randn(num_rows, num_features, generator=generator, dtype=dtype)
    return logits, features


def as_dicts(logits, features, indices=None, partners=None):
    indices = range(len(logits)) if indices is None else indices.tolist()
    partners = [None] * len(logits) if partners is None else partners.tolist()
    columns = zip(logits.tolist(), features.tolist(), indices, partners, strict=True)
    return [
        dict(zip(("logits", "features", "index", "partner"), column, strict=True))
        for column in columns
    ]


def expected(logits, features, indices=None, pool=None, partners=None, *, k, temperature, variant):
    beside = [] if pool is None else as_dicts(*pool[:3], pool[3] if len(pool) > 3 else None)
    losses = oracle_ncr.ncr(
        as_dicts(logits, features, indices, partners),
        beside,
        k=k,
        temperature=temperature,
        variant=variant,
    )
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", [0.5, 10.0])
@pytest.mark.parametrize("k", [1, 5, 12, None])
def test_equation_three_agrees_with_a_scalar_loop(k, temperature, variant, implementation):
    logits, features = rows()
    choices = {"k": k, "temperature": temperature, "variant": variant}
    actual = ncr(logits, features, reduction="none", implementation=implementation, **choices)
    assert_close(actual, expected(logits, features, **choices), rtol=1e-10, atol=1e-10)
    choices["implementation"] = implementation
    assert_close(ncr(logits, features, **choices), actual.mean())
    assert_close(ncr(logits, features, reduction="sum", **choices), actual.sum())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [1, 3, None])
def test_duplicates_views_padding_pool_and_partners_agree_with_a_scalar_loop(
    k, variant, implementation
):
    logits, features = rows(14)
    indices = torch.tensor([3, 7, 3, 1, -1, 0, 9, 7, 20, 21, 22, -1, 23, 24])
    partners = torch.tensor([7, 3, 1, 3, -1, 9, 0, 20, 7, 22, 21, -1, 24, 23])
    pool_indices = torch.tensor([1, 30, 31, -1, 3, 33, 34, 35, 36])
    with_partners = torch.tensor([7, -1, -1, -1, 20, -1, -1, -1, 22])
    choices = {"k": k, "temperature": 2.0, "variant": variant}
    for pool in (None, Pool(*rows(9, seed=1), pool_indices, with_partners)):
        for mixed in (None, partners):
            if mixed is None and pool is not None:
                pool = pool[:3]
            given = {"pool": pool, "partners": mixed, "implementation": implementation, **choices}
            actual = ncr(logits, features, indices, reduction="none", **given)
            oracle = expected(logits, features, indices, pool, mixed, **choices)
            assert_close(actual, oracle, rtol=1e-10, atol=1e-10)
            assert (actual[indices == -1] == 0).all()
            assert_close(ncr(logits, features, indices, **given), oracle.sum() / 12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [1, 3, None])
def test_gradients_agree_with_finite_differences(k, variant, implementation):
    logits, features = rows(7, 3, 4)
    inputs = (logits.requires_grad_(), features.requires_grad_())

    def loss(logits, features):
        return ncr(
            logits, features, k=k, variant=variant, reduction="none", implementation=implementation
        )

    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [2, 30])
def test_gradients_flow_into_a_pool_that_wants_them(k, variant, implementation):
    logits, features = rows(6, 3, 4)
    pool_logits, pool_features = rows(26, 3, 4, seed=1)
    indices, pool_indices = torch.tensor([0, 1, 2, 0, -1, 5]), torch.arange(3, 29)
    pool_indices[7] = -1
    leaves = (logits, features, pool_logits, pool_features)
    inputs = tuple(tensor.requires_grad_() for tensor in leaves)
    choices = {"k": k, "variant": variant, "implementation": implementation}

    def loss(logits, features, pool_logits, pool_features):
        pool = (pool_logits, pool_features, pool_indices)
        return ncr(logits, features, indices, pool=pool, reduction="none", **choices)

    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


# Laws and limits


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_features_does_not_matter(scale, implementation):
    logits, features = rows(dtype=torch.float32)
    scales = torch.tensor([scale, 1.0, 1 / scale]).repeat(5)[:13, None]
    choices = {"k": 4, "reduction": "none", "implementation": implementation}
    assert_close(ncr(logits, scales * features, **choices), ncr(logits, features, **choices))
    assert_close(ncr(logits, scale * features, **choices), ncr(logits, features, **choices))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_high_temperature_has_the_limits_of_the_two_variants(implementation):
    """The paper's term falls like 1/T², the released one has a finite limit."""
    logits, features = rows(30, spread=1.0)
    unit = features / features.norm(dim=1, keepdim=True)
    similarities = torch.relu(unit @ unit.T).fill_diagonal_(0)
    nearest, positions = similarities.topk(10)
    weights = nearest / nearest.sum(dim=1, keepdim=True)
    centered = logits - logits.mean(dim=1, keepdim=True)
    difference = centered - (weights[:, :, None] * centered[positions]).sum(dim=1)
    limit = 0.5 * (difference**2).mean()
    choices = {"k": 10, "temperature": 100.0, "implementation": implementation}
    assert_close(ncr(logits, features, variant="released", **choices), limit, rtol=0.02, atol=0)
    assert_close(ncr(logits, features, variant="paper", **choices) * 1e4, limit, rtol=0.02, atol=0)
    fifty = ncr(logits, features, k=10, temperature=50.0, implementation=implementation)
    hundred = ncr(logits, features, **choices)
    assert_close(fifty / hundred, torch.tensor(4.0, dtype=torch.float64), rtol=0.02, atol=0)
    target = (weights[:, :, None] * (logits / 100)[positions].softmax(dim=2)).sum(dim=1)
    assert_close(target, torch.full_like(target, 1 / 4), rtol=0.05, atol=0)


# The objective


def batch_of(logits, labels=None, indices=None, **more):
    num_rows, num_classes = logits.shape
    labels = torch.arange(num_rows) % num_classes if labels is None else labels
    indices = torch.arange(num_rows) if indices is None else indices
    targets = one_hot(labels, num_classes).to(logits.dtype)
    return Batch(inputs=torch.zeros(num_rows, 1), targets=targets, indices=indices, **more)


def call(objective, logits, features, batch, epoch=0.0, memory=None):
    memory = (
        objective.init_state(100, logits.shape[1], features.shape[1]) if memory is None else memory
    )
    stage = objective.phase(epoch, memory)
    return objective(Outputs(features, logits), batch, torch.tensor(epoch), memory, stage)


BASES = (CrossEntropy(smoothing=0.1), Bootstrap(), ELR(), GJS())


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_equation_four_weighs_base_and_consistency(alpha, base):
    logits, features = rows()
    batch = batch_of(logits)
    total, terms = call(NCR(alpha=alpha, k=3, base=base), logits, features, batch)
    alone = call(base, logits, features, batch).total
    consistency = ncr(logits, features, batch.indices, k=3)
    assert_close(total, (1 - alpha) * alone + alpha * consistency)
    assert_close(terms["ncr"], consistency)
    assert set(terms) > set(call(base, logits, features, batch).terms)


def test_the_term_begins_exactly_at_start_epoch():
    logits, features = rows()
    batch = batch_of(logits)
    objective = NCR(alpha=0.5, k=3, start_epoch=2.0)
    alone = call(CrossEntropy(), logits, features, batch).total
    both = 0.5 * alone + 0.5 * ncr(logits, features, k=3)
    for epoch, value in ((0.0, alone), (1.999, alone), (2.0, both), (2.5, both), (100.0, both)):
        assert_close(call(objective, logits, features, batch, epoch).total, value)
    assert "ncr" not in call(objective, logits, features, batch, 1.0).terms


def test_a_second_view_is_not_a_neighbor():
    logits, features = rows(12)
    indices = torch.arange(6).repeat(2)
    batch = batch_of(logits, indices=indices, views=2)
    # The views would be each other's nearest.
    features = torch.cat([features[:6], 0.99 * features[:6]])
    total = call(NCR(alpha=1.0, k=2), logits, features, batch).total
    separate = ncr(logits, features, indices, k=2)
    assert_close(total, separate)
    assert total != ncr(logits, features, k=2)


def test_partners_are_masked_only_when_asked():
    logits, features = rows(12, dtype=torch.float32)
    batch = Mixup()(batch_of(logits), seed=0, epoch=0)
    partners = batch.mix.partner_indices
    kept = call(NCR(alpha=1.0, k=3), logits, features, batch).total
    masked = call(NCR(alpha=1.0, k=3, mask_partners=True), logits, features, batch).total
    assert_close(kept, ncr(logits, features, batch.indices, k=3))
    assert_close(masked, ncr(logits, features, batch.indices, k=3, partners=partners))
    assert kept != masked


def test_rows_without_neighbors_are_counted():
    logits, features = rows()
    features[2] = 0
    features[5] = 0
    for indices, share in (
        (torch.arange(13), 2 / 13),
        (torch.tensor([*range(11), -1, -1]), 2 / 11),
    ):
        terms = call(NCR(k=3), logits, features, batch_of(logits, indices=indices)).terms
        assert_close(terms["isolated"], torch.tensor(share, dtype=torch.float64))


def test_memory_keeps_the_bases_under_its_name():
    objective = NCR(base=ELR(), bank=Bank(size=8))
    memory = objective.init_state(100, 4, 5)
    parts = [f"bank.{name}" for name in ("cursor", "features", "indices", "logits")]
    assert sorted(memory) == [*parts, "base.averages"]
    assert memory["base.averages"].shape == (101, 4)
    logits, features = rows(5)
    call(objective, logits, features, batch_of(logits), memory=memory)
    assert (memory["base.averages"][:5] > 0).all()
    assert_close(memory["bank.features"][:5].double(), features, rtol=1e-6, atol=1e-6)
    assert memory["bank.indices"].tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1]


# Bad input


POOL = {
    "indices": torch.arange(13),
    "pool": (torch.zeros(3, 4), torch.zeros(3, 5), torch.arange(3)),
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"k": 0}, "k"),
        ({"temperature": 0.009}, "temperature"),
        ({"temperature": 101.0}, "temperature"),
        ({"variant": "papre"}, "variant"),
        ({"reduction": "avg"}, "reduction"),
        ({"implementation": "quick"}, "implementation"),
        ({"features": torch.zeros(12, 5)}, "features of the batch"),
        ({"features": torch.zeros(13, 0)}, "features of the batch"),
        ({"features": torch.zeros(13, 5, device="meta")}, "features of the batch"),
        ({"logits": torch.zeros(13, 4, dtype=torch.int32)}, "logits of the batch"),
        ({"indices": torch.arange(-2, 11)}, "indices of the batch"),
        ({"indices": torch.arange(12)}, "indices of the batch"),
        ({"partners": torch.arange(13)}, "indices"),
        (POOL | {"indices": None}, "indices"),
        (POOL | {"pool": ()}, "pool"),
        (POOL | {"pool": (*POOL["pool"][:2], torch.arange(2))}, "indices of the pool"),
        (POOL | {"pool": (torch.zeros(3, 4), torch.zeros(3, 6), torch.arange(3))}, "pool"),
        (
            POOL | {"pool": (torch.zeros(3, 4), torch.zeros(2, 5), torch.arange(3))},
            "features of the pool",
        ),
    ],
)
def test_bad_input_is_named(change, field):
    logits, features = rows(dtype=torch.float32)
    arguments = {"logits": logits, "features": features} | change
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        ncr(arguments.pop("logits"), arguments.pop("features"), **arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", 1.1),
        ("k", 0),
        ("temperature", 1000.0),
        ("start_epoch", "soon"),
        ("variant", "other"),
        ("reject", 1.5),
        ("base", CrossEntropy),
        ("bank", 64),
    ],
)
def test_bad_hyper_parameters_are_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        NCR(**{field: value})


def test_labels_may_be_of_any_whole_type():
    for dtype in (torch.uint8, torch.int8, torch.int32):
        labels = torch.tensor([0, 100], dtype=dtype)
        assert one_hot(labels, 300).argmax(dim=1).tolist() == [0, 100]


def test_batches_of_odd_shapes_are_refused_by_every_objective():
    logits, features = rows()
    batch = batch_of(logits)
    for wrong, words in (
        (replace(batch, indices=batch.indices[:, None]), "indices"),
        (replace(batch, teacher=Outputs(features, logits[:1])), "teacher"),
        (replace(batch, mix=Mix(batch.indices, batch.indices, torch.ones(1))), "mix"),
        (replace(batch, targets=[[1.0]]), "targets"),
    ):
        for objective in (*BASES, NCR()):
            with pytest.raises(ValueError, match=words):
                call(objective, logits, features, wrong)


def test_it_compiles_whole():
    logits, features = rows(dtype=torch.float32)

    def loss(logits, features):
        # More than there are: a warning, when not compiled.
        return ncr(logits, features, torch.arange(13), k=50)

    leaves = [tensor.clone().requires_grad_() for tensor in (logits, features)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves)
    expected = ncr(*leaves, k=None)
    assert_close(compiled, expected)
    assert_close(
        torch.autograd.grad(compiled, leaves),
        torch.autograd.grad(expected, leaves),
        rtol=1e-4,
        atol=1e-6,
    )


def test_threads_leave_the_precision_of_matrix_products_as_it_was():
    logits, features = rows(dtype=torch.float32)
    torch.set_float32_matmul_precision("high")
    try:
        threads = [
            Thread(target=lambda: [ncr(logits, features, k=3) for _ in range(50)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_labels_out_of_range_and_bad_targets_are_named():
    logits, features = rows()
    with pytest.raises(ValueError, match="labels"):
        one_hot(torch.tensor([0, 4]), 4)
    for value in (math.nan, -1.0):
        batch = batch_of(logits)
        batch.targets[3, 1] = value
        with pytest.raises(ValueError, match="target"):
            call(NCR(), logits, features, batch)


def test_too_many_neighbors_are_warned_of_once_and_all_are_used():
    logits, features = rows()
    _warn_of_few.cache_clear()
    with pytest.warns(UserWarning, match=r"^k=50"):
        loss = ncr(logits, features, k=50)
    assert_close(loss, ncr(logits, features, k=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ncr(logits, features, k=50)


def test_a_stage_of_somebody_else_is_refused():
    logits, features = rows()
    for stage in ("", "cross_entropy", "NCR/cross_entropy", 3):
        with pytest.raises(ValueError, match=r"^phase"):
            NCR()(Outputs(features, logits), batch_of(logits), torch.tensor(0.0), {}, stage)
