"""The numerical rules of the NCR term: each one broke an obvious formulation."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from nearsay import ncr

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["plain", "fast"])
VARIANTS = pytest.mark.parametrize("variant", ["paper", "released"])


def rows(num_rows=24, num_classes=5, num_features=6, seed=0, dtype=torch.float32, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64)
    features = torch.randn(num_rows, num_features, generator=generator, dtype=torch.float64)
    return logits.to(dtype), features.to(dtype)


@IMPLEMENTATIONS
@VARIANTS
def test_without_others_or_with_one_class_there_is_no_loss(variant, implementation):
    choices = {"variant": variant, "implementation": implementation}
    assert ncr(torch.zeros(0, 5), torch.zeros(0, 6), **choices) == 0
    logits, features = (tensor.requires_grad_() for tensor in rows(1))
    loss = ncr(logits, features, **choices)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(loss, logits, features))
    loss = ncr(*rows(num_classes=1), reduction="none", **choices)
    assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-12)


@IMPLEMENTATIONS
@VARIANTS
def test_what_is_not_finite_is_passed_on(variant, implementation):
    for value in (math.nan, math.inf, -math.inf):
        for place in (0, 1):
            tensors = rows()
            tensors[place][4, 2] = value
            loss = ncr(*tensors, k=3, variant=variant, implementation=implementation)
            assert not loss.isfinite()


def gradients(loss, *leaves):
    return torch.autograd.grad(loss.sum(), leaves)


@IMPLEMENTATIONS
@VARIANTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype, variant, implementation):
    logits, features = rows(dtype=dtype)
    leaves = logits.requires_grad_(), features.requires_grad_()
    loss = ncr(*leaves, variant=variant, implementation=implementation)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = ncr(*wide, variant=variant, implementation=implementation)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, rtol=0, atol=0)
    for actual, wanted in zip(gradients(loss, *leaves), gradients(expected, *wide), strict=True):
        assert actual.dtype == dtype
        assert_close(actual, wanted.to(dtype), rtol=0, atol=0)


@VARIANTS
@pytest.mark.parametrize("temperature", [0.01, 2.0, 100.0])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
def test_gradients_of_the_fast_version_are_as_good_as_those_of_the_plain_one(
    spread, temperature, variant
):
    """Rows that nearly agree or disagree strongly: a careless order of terms loses all digits."""
    logits, features = rows(200, 10, 16, spread=spread)
    choices = {"k": 10, "temperature": temperature, "variant": variant}

    def measured(implementation, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (logits, features)]
        return gradients(ncr(*leaves, implementation=implementation, **choices), *leaves)

    exact = measured("plain", torch.float64)
    plain, fast = measured("plain", torch.float32), measured("fast", torch.float32)
    for ours, theirs, truth in zip(fast, plain, exact, strict=True):
        errors = [
            float((gradient.double() - truth).norm() / truth.norm()) for gradient in (ours, theirs)
        ]
        assert errors[0] < 3 * errors[1] + 1e-5


@IMPLEMENTATIONS
def test_rounding_is_nobodys_neighbor(implementation):
    """Orthogonal rows have similarities of 1e-8 or so: weights made of them would be noise."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))[0]
    # In float32 qr itself is off by more than products are.
    features = exact.float().requires_grad_()
    logits = torch.randn(64, 5, generator=generator)
    loss = ncr(logits, features, k=5, implementation=implementation, reduction="none")
    (gradient,) = gradients(loss, features)
    assert not loss.any()
    assert not gradient.any()


@IMPLEMENTATIONS
@VARIANTS
def test_autocast_changes_nothing(variant, implementation):
    logits, features = (tensor.requires_grad_() for tensor in rows(num_features=64))
    plain = ncr(logits, features, variant=variant, implementation=implementation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ncr(logits, features, variant=variant, implementation=implementation)
        if implementation == "fast":  # even with the backward pass under it
            found = gradients(cast, logits, features)
    if implementation == "plain":
        found = gradients(cast, logits, features)
    assert_close(cast, plain, rtol=0, atol=0)
    assert_close(found, gradients(plain, logits, features), rtol=0, atol=0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("scale", [1e-37, 1e37])
def test_features_of_any_size_have_finite_losses_and_gradients(scale, implementation):
    logits, features = rows()
    leaves = logits.requires_grad_(), (scale * features).requires_grad_()
    loss = ncr(*leaves, k=3, implementation=implementation)
    assert_close(loss, ncr(logits, features, k=3, implementation=implementation))
    for gradient in gradients(loss, *leaves):
        assert gradient.isfinite().all()
        assert (gradient != 0).any()


@IMPLEMENTATIONS
@VARIANTS
@pytest.mark.parametrize("tiny", [0.0, 1e-39])
def test_a_row_of_zeros_has_no_loss_no_gradient_and_is_nobodys_neighbor(
    tiny, variant, implementation
):
    logits, features = rows()
    features[[3, 7]] = tiny
    leaves = logits.requires_grad_(), features.requires_grad_()
    choices = {"variant": variant, "implementation": implementation}
    loss = ncr(*leaves, k=23, reduction="none", **choices)
    grad_logits, grad_features = gradients(loss, *leaves)
    assert (loss[[3, 7]] == 0).all()
    assert (grad_logits[[3, 7]] == 0).all()
    assert (grad_features[[3, 7]] == 0).all()
    rest = [row for row in range(24) if row not in (3, 7)]
    assert_close(loss[rest], ncr(logits[rest], features[rest], k=21, reduction="none", **choices))
    assert_close(ncr(*leaves, k=23, **choices), loss.sum() / 24)  # counted


@IMPLEMENTATIONS
@VARIANTS
def test_a_row_that_resembles_nobody_has_no_loss_and_no_gradient(variant, implementation):
    logits, features = rows()
    features = features.abs()
    features[5] *= -1
    leaves = logits.requires_grad_(), features.requires_grad_()
    loss = ncr(*leaves, k=5, variant=variant, implementation=implementation, reduction="none")
    assert loss[5] == 0
    assert (loss > 0).sum() == 23
    assert all((gradient[5] == 0).all() for gradient in gradients(loss, *leaves))


@IMPLEMENTATIONS
@VARIANTS
def test_self_is_masked_by_index_when_all_features_are_equal(variant, implementation):
    """By rank, a row would keep itself among equals."""
    logits, _ = rows(8, seed=3)
    features = torch.ones(8, 4)
    everyone = ncr(
        logits, features, k=7, variant=variant, implementation=implementation, reduction="none"
    )
    p = (logits / 2).softmax(dim=1)
    others = (p.sum(dim=0) - p) / 7
    if variant == "paper":
        expected = (p * (p / others).log()).sum(dim=1)
    else:
        expected = 4 * (others * (others / p).log()).sum(dim=1)
    assert_close(everyone, expected)


@IMPLEMENTATIONS
def test_what_is_not_finite_is_passed_on_even_by_a_row_without_neighbors(implementation):
    logits, features = rows()
    features[4] = 0
    logits[4, 2] = math.inf
    loss = ncr(logits, features, k=3, implementation=implementation, reduction="none")
    assert loss[4].isnan()
    assert loss[:4].isfinite().all()


@IMPLEMENTATIONS
@VARIANTS
def test_one_neighbor_gives_features_no_gradient(variant, implementation):
    logits, features = (tensor.requires_grad_() for tensor in rows())
    loss = ncr(logits, features, k=1, variant=variant, implementation=implementation)
    (gradient,) = gradients(loss, features)
    assert_close(
        gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7 if implementation == "plain" else 0
    )


@VARIANTS
@pytest.mark.parametrize("temperature", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize("spread", [1e-2, 1.0, 1000.0])
def test_float32_keeps_four_digits_of_any_confidence(spread, temperature, variant):
    """Where probabilities underflow, where distributions nearly agree, and between."""
    logits, features = rows(dtype=torch.float64, spread=spread)
    logits, features = logits.float().double(), features.float().double()
    choices = {"k": 4, "temperature": temperature, "variant": variant, "reduction": "none"}
    exact = ncr(logits, features, implementation="plain", **choices)
    scale = temperature**2 if variant == "released" else 1.0
    for implementation in ("plain", "fast"):
        loss = ncr(logits.float(), features.float(), implementation=implementation, **choices)
        assert_close(loss.double(), exact, rtol=1e-4, atol=1e-9 * scale)


def reach(similarities, k):
    """The smallest gap between the k-th and the next similarity of a row with so many."""
    if k is None or k >= similarities.shape[1]:
        return math.inf
    ordered = similarities.sort(dim=1, descending=True).values
    gaps = (ordered[:, k - 1] - ordered[:, k])[ordered[:, k - 1] > 0]
    return float(gaps.min()) if len(gaps) else math.inf


@st.composite
def problems(draw):
    num_rows = draw(st.integers(1, 8) | st.integers(9, 24))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    num_classes, num_features = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    logits = draw(st.sampled_from([0.0, 0.1, 1.0, 10.0, 100.0])) * torch.randn(
        num_rows, num_classes, generator=generator
    )
    features = torch.randn(num_rows, num_features, generator=generator)
    if draw(st.booleans()):
        features = features.relu()
    features *= 10.0 ** draw(st.integers(-25, 25))
    if draw(st.booleans()):  # collapsed classes: many rows alike
        features = features[
            torch.randint(0, max(1, num_rows // 3), (num_rows,), generator=generator)
        ]
    indices = torch.arange(num_rows)
    if draw(st.booleans()):  # views and padding
        indices = torch.randint(-1, max(1, num_rows - 2), (num_rows,), generator=generator)
    k = draw(st.sampled_from([None, 1, 2, 3, 4, 5, 10, 23]))
    temperature = draw(st.sampled_from([0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 100.0]))
    variant = draw(st.sampled_from(["paper", "released"]))
    choices = {"k": k, "temperature": temperature, "variant": variant, "reduction": "none"}
    choices["implementation"] = draw(st.sampled_from(["plain", "fast"]))
    return logits, features, indices, choices


def check(problem):
    logits, features, indices, choices = problem
    leaves = logits.requires_grad_(), features.requires_grad_()
    loss = ncr(*leaves, indices, **choices)
    assert loss.isfinite().all()
    assert (loss >= -1e-6).all()
    assert (loss[indices == -1] == 0).all()
    for gradient in gradients(loss, *leaves):
        assert gradient.isfinite().all()
    wide = features.detach().double()
    wide = wide / wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-300)
    unit = wide / wide.norm(dim=1, keepdim=True).clamp(min=1e-300)
    same = (indices[:, None] == indices) | (indices == -1)
    similarities = (unit @ unit.T).relu().masked_fill(same, 0)[indices != -1]
    if reach(similarities, choices["k"]) > 1e-5:
        exact = ncr(logits.detach().double(), features.detach().double(), indices, **choices)
        scale = choices["temperature"] ** 2 if choices["variant"] == "released" else 1.0
        # Of a logit that float32 has rounded.
        steepest = float(logits.detach().abs().max()) / choices["temperature"]
        rtol = max(1e-4, 4 * torch.finfo(torch.float32).eps * steepest)
        assert_close(loss.detach().double(), exact, rtol=rtol, atol=1e-8 * scale)


COMMON = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.filterwarnings("ignore:k=")
@settings(max_examples=300, **COMMON)
@given(problem=problems())
def test_any_batch_has_a_finite_loss_that_float64_confirms(problem):
    check(problem)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:k=")
@settings(max_examples=60_000, **COMMON)
@given(problem=problems())
def test_very_many_batches_have_a_finite_loss_that_float64_confirms(problem):
    check(problem)


def test_the_gradient_of_the_fast_version_cannot_be_differentiated_silently():
    logits, features = (tensor.requires_grad_() for tensor in rows())
    with pytest.raises(RuntimeError, match='implementation="plain"'):
        torch.autograd.grad(ncr(logits, features, k=3), logits, create_graph=True)
    (gradient,) = torch.autograd.grad(
        ncr(logits, features, k=3, implementation="plain"), logits, create_graph=True
    )
    gradient.square().sum().backward()
    assert logits.grad.isfinite().all()


def test_torch_func_is_told_to_take_the_plain_version():
    logits, features = (tensor.detach() for tensor in rows())
    with pytest.raises(RuntimeError, match=r'^torch\.func .*implementation="plain"'):
        torch.func.grad(lambda z: ncr(z, features, k=3))(logits)
    found = torch.func.grad(lambda z: ncr(z, features, k=3, implementation="plain"))(logits)
    (expected,) = torch.autograd.grad(ncr(logits.requires_grad_(), features, k=3), logits)
    assert_close(found, expected)


def test_a_row_below_what_is_normal_in_float16_has_no_neighbors_and_no_gradient():
    generator = torch.Generator().manual_seed(0)
    logits, features = (torch.randn(16, size, generator=generator).half() for size in (4, 8))
    features[3] = 0
    features[3, 0] = 6e-8
    features.requires_grad_()
    for implementation in ("plain", "fast"):
        (gradient,) = torch.autograd.grad(
            ncr(logits, features, implementation=implementation), features
        )
        assert gradient.isfinite().all()
        assert not gradient[3].any()
        assert gradient.any()
