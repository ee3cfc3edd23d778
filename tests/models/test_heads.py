import math

import pytest
import torch
from torch.testing import assert_close

from nearsay.models import CosineHead, LinearHead
from nearsay.models.heads import drawn

B, D, C = 6, 8, 5


def make_cosine(scale=16.0, dtype=torch.float64):
    with drawn(5):
        return CosineHead(scale=scale).build(D, C).to(dtype)


def make_features(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(B, D, generator=generator, dtype=torch.float64).to(dtype)


def test_linear_head_is_linear():
    head, features = LinearHead().build(D, C), make_features(torch.float32)
    assert_close(head(features), features @ head.weight.T + head.bias)


@pytest.mark.parametrize("scale", [16.0, 3.0])
def test_cosine_head_is_scale_times_the_cosine(scale):
    head, features = make_cosine(scale), make_features()
    logits = head(features)
    for row in range(B):
        for label in range(C):
            xs, ws = features[row].tolist(), head.weight[label].tolist()
            product = sum(x * w for x, w in zip(xs, ws, strict=True))
            expected = scale * product / (math.hypot(*xs) * math.hypot(*ws))
            assert math.isclose(logits[row, label].item(), expected)


@pytest.mark.parametrize("factor", [1e-30, 0.3, 1e30])
def test_cosine_head_does_not_know_lengths(factor):
    head, features = make_cosine(dtype=torch.float32), make_features(torch.float32)
    logits = head(features)
    assert logits.abs().max() <= 16 + 1e-4
    assert_close(head(features * factor), logits)
    with torch.no_grad():
        head.weight *= factor
    assert_close(head(features), logits)


def test_zero_features_have_no_direction_and_no_gradient():
    head, features = make_cosine(), make_features()
    features[2] = 0
    features.requires_grad_()
    logits = head(features)
    assert_close(logits[2], torch.zeros(C).double())
    (logits * torch.arange(1.0, C + 1)).sum().backward()
    assert_close(features.grad[2], torch.zeros(D).double())
    assert features.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()
    assert features.grad[1].any()


def test_gradient_of_cosine_head_is_its_slope():
    head, features = make_cosine(), make_features().requires_grad_()
    weight = head.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda features, weight: torch.func.functional_call(head, {"weight": weight}, features),
        (features, weight),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cosine_head_keeps_full_precision_under_autocast(dtype):
    head, features = make_cosine(dtype=torch.float32), make_features(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(features)
    assert logits.dtype == torch.float32
    assert_close(logits, head(features.float()), rtol=0, atol=0)


def test_not_a_number_is_seen():
    features = make_features()
    features[1, 3] = torch.nan
    logits = make_cosine()(features)
    assert logits[1].isnan().all()
    assert logits[0].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_impossible_scale_is_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        CosineHead(scale=scale)


def test_seeds_of_any_size_draw_different_numbers():
    numbers = set()
    for seed in (0, 1, -1, 2**64, 2**64 + 1):
        with drawn(seed):
            numbers.add(torch.rand(()).item())
    assert len(numbers) == 5


def test_generator_is_given_back_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="num_classes"), drawn(0):
        LinearHead().build(torch.randint(3, (1,)).item(), 0)
    assert torch.equal(torch.get_rng_state(), state)
