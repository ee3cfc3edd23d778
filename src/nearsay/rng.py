"""Randomness without state: every draw is a pure function of (seed, purpose, epoch, example).

Nothing else enters, so the resume point, the batching, the number of workers and of processes change no draw. The
generator is Philox4x32-10 (Salmon et al., SC 2011) in int64 tensor arithmetic: bit-equal on every device, and nothing
waits for the device. In all functions `seed` is any Python int, `purpose` names what the draw is for, `examples` is an
int64 tensor of any shape, and `epoch` an int or a 0-d tensor from 0 to 2³² − 1 (the fraction of a float is dropped).
"""

import hashlib
from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from nearsay.validation import constant_when_compiled

_MASK = 0xFFFFFFFF


def words(seed: int, purpose: str, epoch: int | Tensor, examples: Tensor, num: int = 4) -> Tensor:
    """(..., num) int64 random 32-bit words for `examples` of shape (...); a larger `num` continues a smaller one."""
    _check_whole("num", num, 1, 2**31)
    if examples.dtype != torch.int64:
        raise ValueError(f"examples of {examples.dtype} must be torch.int64")
    if isinstance(epoch, Tensor):
        if epoch.ndim:
            raise ValueError(f"epoch of shape {tuple(epoch.shape)} must be an int or a 0-d tensor")
        epoch = epoch.to(torch.int64) & _MASK
    else:
        _check_whole("epoch", epoch, 0, _MASK)
        epoch = torch.full(
            (), epoch, device=examples.device
        )  # filled in place: a copy from the host would stall
    blocks = torch.arange((num + 3) // 4, device=examples.device)
    examples = examples[..., None]
    counter = (examples & _MASK, (examples >> 32) & _MASK, epoch, blocks)
    return philox(counter, _key(seed, purpose)).flatten(-2)[..., :num]


def uniform(
    seed: int, purpose: str, epoch: int | Tensor, examples: Tensor, num: int | None = None
) -> Tensor:
    """Float32 multiples of 2⁻²⁴ in [0, 1): one per example, or (..., num), of which the first is that one."""
    drawn = words(seed, purpose, epoch, examples, 1 if num is None else num)
    fractions = (drawn >> 8).float() * 2.0**-24  # 24 bits fit a float32, so no step rounds
    return fractions if num is not None else fractions[..., 0]


def integers(seed: int, purpose: str, epoch: int | Tensor, examples: Tensor, high: int) -> Tensor:
    """Int64 in [0, high), for `high` from 1 to 2³¹, one per example.

    The probability of a value differs from 1/high by less than 2⁻³².
    """
    _check_whole("high", high, 1, 2**31)
    return (words(seed, purpose, epoch, examples, 1)[..., 0] * high) >> 32


def shuffle(seed: int, purpose: str, epoch: int | Tensor, examples: Tensor) -> Tensor:
    """(N,) positions that put `examples` (N,) into a random order: `examples[shuffle(..., examples)]` is shuffled.

    The order depends on who the examples are and not on where they stand; copies of one example come out adjacent.
    """
    if examples.ndim != 1:
        raise ValueError(
            f"examples of shape {tuple(examples.shape)} must be a vector to be shuffled"
        )
    drawn = words(seed, purpose, epoch, examples, 2) >> 1  # (N, 2)
    return ((drawn[:, 0] << 31) | drawn[:, 1]).argsort(
        stable=True
    )  # 62 bits: equal keys are once in 2⁶² pairs


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> Tensor:
    """Philox4x32-10: four int64 tensors of 32-bit words, which broadcast to (...), and a key -> (..., 4) words."""
    first, second, third, fourth = counter
    low_key, high_key = key
    for _ in range(10):
        (high, low), (other_high, other_low) = (
            _multiply(first, 0xD2511F53),
            _multiply(third, 0xCD9E8D57),
        )
        first, second, third, fourth = (
            other_high ^ second ^ low_key,
            other_low,
            high ^ fourth ^ high_key,
            low,
        )
        low_key, high_key = (low_key + 0x9E3779B9) & _MASK, (high_key + 0xBB67AE85) & _MASK
    return torch.stack(
        [first, second, third, fourth], dim=-1
    )  # by now each depends on all, so shapes are equal


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product, which int64 itself cannot hold."""
    product = word * (multiplier - 2**32)  # both multipliers exceed 2³¹, so this stays above −2⁶³
    return (product >> 32) + word, product & _MASK


def _key(seed: int, purpose: str) -> tuple[int, int]:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed {seed!r} must be a Python int, such as 0")
    if not isinstance(purpose, str):
        raise ValueError(f"purpose {purpose!r} must be a str that names the draw, such as 'crop'")
    return _digest(
        index(seed), purpose
    )  # index makes a constant of what torch.compile made symbolic


@constant_when_compiled  # torch.compile cannot look inside
def _digest(seed: int, purpose: str) -> tuple[int, int]:
    """64 bits for a seed and a purpose; hexadecimal digits have no colon, so no two pairs are written alike."""
    digest = hashlib.blake2b(f"{seed:x}:{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _check_whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} {value!r} must be a whole number from {low} to {high}")
