"""Randomness without state: every draw is a pure function of (seed, purpose, epoch, example).

Resuming, batching, and the number of workers or processes change no draw. The generator is
Philox4x32-10 (Salmon et al., SC 2011) in int64 tensor arithmetic: bit-equal on every device, and it
never waits for the device. In all functions `seed` is any Python int, `purpose` names what the draw
is for, `examples` is an int64 tensor of any shape, and `epoch` an int or a 0-d tensor from 0 to 2³²
− 1 (the fraction of a float is dropped).
"""

import hashlib
from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from nearsay.validation import check_that, check_whole, constant_when_compiled

_MASK = 0xFFFFFFFF


def words(seed: int, purpose: str, epoch: int | Tensor, examples: Tensor, num: int = 4) -> Tensor:
    """(..., num) int64 random 32-bit words for `examples` (...); a larger `num` continues a smaller
    one.

    >>> import torch
    >>> words(0, "order", 1, torch.tensor([5, 6]), num=2).shape
    torch.Size([2, 2])
    """
    check_whole("num", num, 1, 2**31)
    check_that(examples.dtype == torch.int64, "examples", "torch.int64", examples.dtype)
    if isinstance(epoch, Tensor):
        check_that(epoch.ndim == 0, "epoch", "an int or a 0-d tensor", tuple(epoch.shape))
        epoch = epoch.to(torch.int64) & _MASK
    else:
        check_whole("epoch", epoch, 0, _MASK)
        # Filled on the device, because a copy from the host would stall it.
        epoch = torch.full((), epoch, device=examples.device)
    # Each block of four words has its own counter.
    blocks = torch.arange((num + 3) // 4, device=examples.device)
    examples = examples[..., None]
    counter = (examples & _MASK, (examples >> 32) & _MASK, epoch, blocks)
    return philox(counter, _key(seed, purpose)).flatten(-2)[..., :num]


def uniform(
    seed: int, purpose: str, epoch: int | Tensor, examples: Tensor, num: int | None = None
) -> Tensor:
    """Float32 multiples of 2⁻²⁴ in [0, 1): one per example, or (..., num) that start with it."""
    drawn = words(seed, purpose, epoch, examples, 1 if num is None else num)
    # 24 bits fit a float32, so no step rounds.
    fractions = (drawn >> 8).float() * 2.0**-24
    return fractions if num is not None else fractions[..., 0]


def integers(seed: int, purpose: str, epoch: int | Tensor, examples: Tensor, high: int) -> Tensor:
    """Int64 in [0, high), for `high` from 1 to 2³¹, one per example.

    The probability of a value differs from 1/high by less than 2⁻³².
    """
    check_whole("high", high, 1, 2**31)
    return (words(seed, purpose, epoch, examples, 1)[..., 0] * high) >> 32


def shuffle(seed: int, purpose: str, epoch: int | Tensor, examples: Tensor) -> Tensor:
    """(N,) positions that put `examples` (N,) into a random order: `examples[shuffle(...,
    examples)]`.

    The order depends on the examples and not on their positions; copies of one example are
    adjacent.
    """
    check_that(examples.ndim == 1, "examples", "one-dimensional", tuple(examples.shape))
    drawn = words(seed, purpose, epoch, examples, 2) >> 1  # (N, 2)
    # Keys of 62 bits: two different examples have equal keys once in 2⁶² pairs.
    return ((drawn[:, 0] << 31) | drawn[:, 1]).argsort(stable=True)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> Tensor:
    """Philox4x32-10: four int64 tensors of 32-bit words that broadcast to (...), and a key -> (...,
    4).
    """
    first, second, third, fourth = counter
    low_key, high_key = key
    for _ in range(10):
        high, low = _multiply(first, 0xD2511F53)
        other_high, other_low = _multiply(third, 0xCD9E8D57)
        first, second = other_high ^ second ^ low_key, other_low
        third, fourth = high ^ fourth ^ high_key, low
        low_key, high_key = (low_key + 0x9E3779B9) & _MASK, (high_key + 0xBB67AE85) & _MASK
    # Each word depends on all four by now, so their shapes are equal.
    return torch.stack([first, second, third, fourth], dim=-1)


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product, which int64 itself cannot hold."""
    # Both multipliers exceed 2³¹, so this product stays above −2⁶³.
    product = word * (multiplier - 2**32)
    return (product >> 32) + word, product & _MASK


def _key(seed: int, purpose: str) -> tuple[int, int]:
    is_int = isinstance(seed, int) and not isinstance(seed, bool)
    check_that(is_int, "seed", "a Python int", seed)
    check_that(isinstance(purpose, str), "purpose", "a str that names the draw", purpose)
    # index makes a constant of what torch.compile made symbolic.
    return _digest(index(seed), purpose)


# torch.compile cannot look inside hashlib.
@constant_when_compiled
def _digest(seed: int, purpose: str) -> tuple[int, int]:
    """64 bits for a seed and a purpose, separated by a colon, which is no hexadecimal digit."""
    digest = hashlib.blake2b(f"{seed:x}:{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
