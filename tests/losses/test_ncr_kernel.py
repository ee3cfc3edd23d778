"""The fast version equals the plain one: values, gradients and a short training."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from nearsay import ncr
from nearsay import neighbors as search
from nearsay.losses import _ncr_fast as kernel

SHAPES = [  # rows, classes, features, pool
    (2, 1, 1, 0),
    (17, 3, 9, 0),
    (257, 7, 16, 0),
    (90, 101, 12, 0),
    (5, 4, 6, 50),
    (40, 4, 6, 3),
    (33, 11, 8, 400),
]
FEW_OR_ALL = [1, 10, 40, None]


def problem(num_rows, num_classes, num_features, num_pool, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    pool = None
    if num_pool:
        pool = (
            drawn(num_pool, num_classes),
            drawn(num_pool, num_features),
            torch.arange(1000, 1000 + num_pool),
        )
    indices = torch.arange(num_rows)
    indices[num_rows // 2] = 0  # one copy
    return 3 * drawn(num_rows, num_classes), drawn(num_rows, num_features), indices, pool


def results(implementation, logits, features, indices, pool, **choices):
    """Losses and gradients under an upstream gradient that differs from row to row."""
    leaves = [tensor.clone().requires_grad_() for tensor in (logits, features)]
    if pool is not None:
        leaves += [tensor.clone().requires_grad_() for tensor in pool[:2]]
        pool = (*leaves[2:], pool[2])
    losses = ncr(
        *leaves[:2], indices, pool=pool, reduction="none", implementation=implementation, **choices
    )
    upstream = torch.linspace(-1, 2, len(losses), dtype=losses.dtype)
    return losses.detach(), *torch.autograd.grad((losses * upstream).sum(), leaves)


def assert_equal(logits, features, indices, pool, *, dtype, **choices):
    plain = results("plain", logits, features, indices, pool, **choices)
    fast = results("fast", logits, features, indices, pool, **choices)
    wide = dtype in (torch.float32, torch.float64)
    tolerance = (
        {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-6}
    )
    for actual, expected in zip(fast, plain, strict=True):
        # Half precision gradients are float32 gradients rounded once: off by one last digit.
        assert_close(actual, expected, **(tolerance if wide else {"rtol": 2e-2, "atol": 1e-4}))


@pytest.mark.filterwarnings("ignore:k=")
@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("k", FEW_OR_ALL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_agree(shape, k, variant):
    assert_equal(*problem(*shape, torch.float64), dtype=torch.float64, k=k, variant=variant)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("k", [3, 40])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_all_dtypes_agree(dtype, k, variant):
    assert_equal(*problem(64, 10, 33, 30, dtype), dtype=dtype, k=k, variant=variant)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("k", [3, 40, None])
def test_going_through_logarithms_agrees(k, variant, monkeypatch):
    monkeypatch.setattr(kernel, "_needs_logarithms", lambda log_p: True)
    assert_equal(*problem(64, 10, 33, 30, torch.float64), dtype=torch.float64, k=k, variant=variant)


@pytest.mark.parametrize("temperature", [0.01, 100.0])
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_extreme_temperatures_agree(variant, temperature):
    choices = {"k": 3, "temperature": temperature, "variant": variant}
    assert_equal(*problem(64, 10, 33, 0, torch.float64), dtype=torch.float64, **choices)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("k", [3, 40])
def test_chunks_do_not_show(k, is_exact, monkeypatch):
    logits, features, indices, pool = problem(64, 10, 33, 30, torch.float64)
    monkeypatch.setattr(kernel, "_needs_logarithms", lambda log_p: is_exact)
    whole = results("fast", logits, features, indices, pool, k=k)
    monkeypatch.setitem(search.CHUNK_ROWS, "cpu", 7)
    monkeypatch.setattr(kernel, "CHUNK_NUMBERS", 16 * 5 * k * 10)
    assert_close(results("fast", logits, features, indices, pool, k=k), whole)


def test_a_row_without_neighbors_stays_finite_through_logarithms():
    logits, features, indices, _ = problem(16, 4, 5, 0, torch.float32)
    features[3] = 0
    for result in results("fast", 100 * logits, features, indices, None, k=3, temperature=0.01):
        assert result.isfinite().all()


def test_differences_of_nearly_equal_distributions_keep_their_digits():
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(50, 8, generator=generator, dtype=torch.float64).softmax(dim=1)
    log_ratio = 1e-4 * torch.randn(50, 8, generator=generator, dtype=torch.float64)
    log_ratio[0] = torch.linspace(-90, 90, 8)  # and those of very different ones do not overflow
    q = p * torch.exp(-log_ratio.clamp(min=-1))
    for small in (None, torch.arange(1, 50)):
        difference = kernel._difference(p.float(), q.float(), log_ratio.float(), small)
        assert difference.isfinite().all()
        assert_close(difference[1:].double(), (q - p)[1:], rtol=1e-5, atol=0)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.numel = max([self.numel, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return result


@pytest.mark.parametrize("num_classes", [2, 40])
def test_no_memory_is_quadratic_in_the_batch(num_classes):
    logits, features, _, _ = problem(2000, num_classes, 5, 0, torch.float32)
    leaves = logits.requires_grad_(), features.requires_grad_()
    with Largest() as largest:
        torch.autograd.grad(ncr(*leaves, k=10), leaves)
    assert largest.numel <= 256 * 2000  # a chunk of similarities
