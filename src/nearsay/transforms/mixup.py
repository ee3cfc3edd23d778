"""Mixup: blend each row of a batch with another, images and targets alike."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nearsay import rng
from nearsay.batch import Batch, Mix
from nearsay.validation import (
    check_choice,
    check_plain,
    check_tensors,
    check_that,
    constant_when_compiled,
)

# Cells of the quantile table: for alpha from 0.1 on, the error in the Beta distribution function is
# at most 5.5e-5.
_CELLS = 2**14
# A table is made once for each alpha and device.
_tables: dict[tuple[float, torch.device], Tensor] = {}


@dataclass(frozen=True, kw_only=True)
class Mixup:
    """Blend each row with another example (Zhang et al., ICLR 2018).

    A row becomes λ · itself + (1 − λ) · partner, and so does its target. An example draws its own λ
    from Beta(alpha, alpha), folded to λ ≥ ½ so that a row stays mostly itself. The partner is the
    next in a random cycle through the real rows; all views share λ and partner. A row is its own
    partner only where no pairing avoids it: padding, a single row, or more than half the rows being
    copies of one example. An unlabeled partner lowers the weight of the label to λ.

    Args:
        alpha: Of the Beta distribution, above 0 and at most 100; larger mixes more.
        views: "all", or "first" to leave all other views as they are.

    >>> import torch
    >>> from nearsay.batch import Batch
    >>> batch = Batch(inputs=torch.eye(2), targets=torch.eye(2), indices=torch.arange(2))
    >>> mixed = Mixup(alpha=1.0)(batch, seed=0, epoch=1)
    >>> mixed.mix.partners
    tensor([1, 0])
    >>> torch.equal(mixed.inputs, mixed.targets)
    True
    """

    alpha: float = 1.0
    views: Literal["all", "first"] = "all"

    def __post_init__(self) -> None:
        check_plain("alpha", self.alpha)
        is_number = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
        is_right = is_number and 0 < self.alpha <= 100
        check_that(is_right, "alpha", "a number above 0 and at most 100", self.alpha)
        check_choice("views", self.views, ("all", "first"))

    def __call__(self, batch: Batch, *, seed: int, epoch: int | Tensor) -> Batch:
        """The mixed batch, with `mix` and `plain_targets` set.

        Call it after the teacher and before the model. The first call on a device copies a small
        table there, so it must come before a CUDA graph is captured.
        """
        _check_batch(batch)
        num_rows, views = len(batch.indices), batch.views
        indices = batch.indices[: num_rows // views]  # (B,)
        device = indices.device
        offsets = torch.arange(0, num_rows, len(indices), device=device)  # (V,)
        # All views have the same partners, each within its own view.
        own_partners = _partners(indices, batch.is_real[: len(indices)], seed, epoch)  # (B,)
        partners = (offsets[:, None] + own_partners).flatten()  # (V·B,)
        uniforms = rng.uniform(seed, "mixup weight", epoch, indices)
        share = _smaller_shares(self.alpha, uniforms).repeat(views)  # (V·B,)
        if self.views == "first":
            rows = torch.arange(num_rows, device=device)
            is_first = rows < len(indices)
            share = share.where(is_first, 0.0)
            partners = partners.where(is_first, rows)
        return replace(
            batch,
            inputs=_blend(batch.inputs, partners, share),
            targets=_blend(batch.targets, partners, share),
            mix=Mix(partners, batch.indices[partners], 1 - share),
            plain_targets=batch.targets,
        )


def _check_batch(batch: Batch) -> None:
    check_tensors(inputs=batch.inputs, targets=batch.targets, indices=batch.indices)
    for name, rows in (("inputs", batch.inputs), ("targets", batch.targets)):
        check_that(rows.is_floating_point(), name, "floating point before mixup", rows.dtype)
    shape = tuple(batch.targets.shape)
    check_that(len(shape) == 2, "targets", "(B, C)", shape, hint="Use nearsay.one_hot.")
    num_rows = len(batch.indices)
    for name, rows in (("inputs", batch.inputs), ("targets", batch.targets)):
        check_that(len(rows) == num_rows > 0, name, "one row per index", tuple(rows.shape))
    if batch.mix is not None:
        raise ValueError("mix must be None before mixup. Apply Mixup once.")
    has_equal_views = batch.views >= 1 and num_rows % batch.views == 0
    check_that(has_equal_views, "views", "a divisor of the number of rows", batch.views)


def _partners(indices: Tensor, is_real: Tensor, seed: int, epoch: int | Tensor) -> Tensor:
    """(B,) position of the partner of each row; a permutation that maps padding to itself.

    Copies of one example stand side by side in the shuffled order. A step as long as the largest
    group of copies leaves every group if that is possible at all. Without copies it is the step to
    the next.
    """
    order = rng.shuffle(seed, "mixup order", epoch, indices)
    # Real rows first, still shuffled, and padding last.
    order = order[is_real[order].argsort(stable=True, descending=True)]
    ordered, places = indices[order], torch.arange(len(order), device=order.device)
    begins = torch.ones_like(is_real)
    begins[1:] = ordered[1:] != ordered[:-1]
    # How many copies of the same example stand before each row.
    num_before = places - places.where(begins, 0).cummax(dim=0).values
    num_real = is_real.sum()
    step = num_before.where(places < num_real, 0).max() + 1
    partner_places = torch.where(places < num_real, (places + step) % num_real.clamp(min=1), places)
    # From the shuffled order back to the order of the batch.
    return torch.empty_like(order).scatter_(0, order, order[partner_places])


def _smaller_shares(alpha: float, uniforms: Tensor) -> Tensor:
    """(B,) quantiles of min(λ, 1 − λ) for λ from Beta(alpha, alpha), interpolated from a table."""
    table = _quantiles(alpha, uniforms.device)
    # Exact, because _CELLS is a power of two.
    cells = uniforms * _CELLS
    left = cells.long()
    return table[left].lerp(table[left + 1], cells - left)


@constant_when_compiled
def _quantiles(alpha: float, device: torch.device) -> Tensor:
    """(cells + 1,) quantiles of min(λ, 1 − λ), which are those of λ at half the probability."""
    if (alpha, device) not in _tables:
        # Imported here, because most runs do not mix.
        from scipy.special import betaincinv  # type: ignore[import-untyped]  # noqa: PLC0415

        quantiles = betaincinv(alpha, alpha, np.linspace(0, 0.5, _CELLS + 1))
        _tables[alpha, device] = torch.from_numpy(quantiles.astype(np.float32)).to(device)
    return _tables[alpha, device]


def _blend(rows: Tensor, partners: Tensor, share: Tensor) -> Tensor:
    """Rows moved toward their partners by `share`; exactly unchanged if both are equal."""
    share = share.reshape(-1, *(1,) * (rows.ndim - 1))
    # In float32 or better, whatever the dtype of the rows.
    wide = rows.to(torch.promote_types(rows.dtype, share.dtype))
    return (wide + share * (wide[partners] - wide)).to(rows.dtype)
