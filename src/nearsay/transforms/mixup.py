"""Mixup: blend each row of a batch with another, images and targets alike."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nearsay import rng
from nearsay.batch import Batch, Mix
from nearsay.validation import check_plain, check_tensors, constant_when_compiled

_CELLS = (
    2**14
)  # of the quantile table: at most 5.5e-5 off the Beta distribution function for alpha from 0.1
_tables: dict[tuple[float, torch.device], Tensor] = {}  # made once for each alpha and device


@dataclass(frozen=True, kw_only=True)
class Mixup:
    """Blend each row with another example (Zhang et al., ICLR 2018): λ · itself + (1 − λ) · partner, targets alike.

    An example draws its own λ from Beta(alpha, alpha), folded to λ ≥ ½ so that a row stays mostly itself. The partner
    is the next in a random cycle through the real rows, so nobody is left out; all views share λ and partner. A row
    gets itself, or a copy of its example, only where no pairing avoids it: padding, a lone row, more than half the
    rows being one example. An unlabeled partner lowers the weight of the label to λ.
    """

    alpha: float = 1.0
    views: Literal["all", "first"] = "all"  # "first" leaves all other views as they are

    def __post_init__(self) -> None:
        check_plain("alpha", self.alpha)
        if (
            isinstance(self.alpha, bool)
            or not isinstance(self.alpha, (int, float))
            or not 0 < self.alpha <= 100
        ):
            raise ValueError(
                f"alpha={self.alpha!r} must be a number above 0 and at most 100; for no mixup, leave Mixup out"
            )
        if self.views not in ("all", "first"):
            raise ValueError(f'views={self.views!r} must be "all" or "first"')

    def __call__(self, batch: Batch, *, seed: int, epoch: int | Tensor) -> Batch:
        """The mixed batch, which says in `mix` who was mixed with whom; call it after the teacher, before the model.

        The first call on a device copies a small table there: let it come before a CUDA graph is captured.
        """
        check_tensors(inputs=batch.inputs, targets=batch.targets, indices=batch.indices)
        if not batch.inputs.is_floating_point():
            raise ValueError(
                f"inputs of {batch.inputs.dtype} cannot be blended; make them floating point before mixup"
            )
        if not batch.targets.is_floating_point() or batch.targets.ndim != 2:
            raise ValueError(
                f"targets {tuple(batch.targets.shape)} of {batch.targets.dtype} cannot be blended; make them (B, C) "
                "distributions with nearsay.one_hot"
            )
        if not len(batch.inputs) == len(batch.targets) == len(batch.indices) > 0:
            raise ValueError(
                f"{len(batch.inputs)} inputs, {len(batch.targets)} targets and {len(batch.indices)} indices must be as "
                "many, and at least one"
            )
        if batch.mix is not None:
            raise ValueError(
                "this batch was mixed before, and `mix` can tell of one mixup only; apply it once"
            )
        num_rows, views = len(batch.indices), batch.views
        if views < 1 or num_rows % views:
            raise ValueError(f"{num_rows} rows cannot be {views} views of the same examples")
        indices = batch.indices[: num_rows // views]  # (B,)
        offsets = torch.arange(0, num_rows, len(indices), device=indices.device)  # (V,)
        partners = (
            offsets[:, None] + _partners(indices, batch.is_real[: len(indices)], seed, epoch)
        ).flatten()
        share = _smaller_shares(
            self.alpha, rng.uniform(seed, "mixup weight", epoch, indices)
        ).repeat(views)
        if self.views == "first":
            is_first = torch.arange(num_rows, device=indices.device) < len(indices)
            share = share.where(is_first, 0.0)
            partners = partners.where(is_first, torch.arange(num_rows, device=indices.device))
        return replace(
            batch,
            inputs=_blend(batch.inputs, partners, share),
            targets=_blend(batch.targets, partners, share),
            mix=Mix(partners, batch.indices[partners], 1 - share),
            plain_targets=batch.targets,
        )


def _partners(indices: Tensor, is_real: Tensor, seed: int, epoch: int | Tensor) -> Tensor:
    """(B,) position of each row's partner; a permutation that maps padding to itself.

    Copies of one example stand side by side in the shuffled order. A step as long as the largest group of copies
    leaves every group if anything can, and without copies it is the step to the next.
    """
    order = rng.shuffle(seed, "mixup order", epoch, indices)
    order = order[
        is_real[order].argsort(stable=True, descending=True)
    ]  # real rows first, still shuffled
    ordered, places = indices[order], torch.arange(len(order), device=order.device)
    begins = torch.ones_like(is_real)
    begins[1:] = ordered[1:] != ordered[:-1]
    num_before = (
        places - places.where(begins, 0).cummax(dim=0).values
    )  # copies of this example that stand before it
    num_real = is_real.sum()
    step = num_before.where(places < num_real, 0).max() + 1
    partner_places = torch.where(places < num_real, (places + step) % num_real.clamp(min=1), places)
    return torch.empty_like(order).scatter_(0, order, order[partner_places])


def _smaller_shares(alpha: float, uniforms: Tensor) -> Tensor:
    """(B,) quantiles of min(λ, 1 − λ) for λ from Beta(alpha, alpha), linear between the entries of a table."""
    table = _quantiles(alpha, uniforms.device)
    cells = uniforms * _CELLS  # exact, as _CELLS is a power of two
    left = cells.long()
    return table[left].lerp(table[left + 1], cells - left)


@constant_when_compiled  # a compiled step need not look inside
def _quantiles(alpha: float, device: torch.device) -> Tensor:
    """(cells + 1,) the quantiles of min(λ, 1 − λ), which are those of λ at half the probability."""
    if (alpha, device) not in _tables:
        from scipy.special import betaincinv  # type: ignore[import-untyped]  # noqa: PLC0415  # most runs do not mix

        quantiles = betaincinv(alpha, alpha, np.linspace(0, 0.5, _CELLS + 1))
        _tables[alpha, device] = torch.from_numpy(quantiles.astype(np.float32)).to(device)
    return _tables[alpha, device]


def _blend(rows: Tensor, partners: Tensor, share: Tensor) -> Tensor:
    """Rows moved toward their partners by `share`, in float32 or better; exactly themselves if both are equal."""
    share = share.reshape(-1, *(1,) * (rows.ndim - 1))
    wide = rows.to(torch.promote_types(rows.dtype, share.dtype))
    return (wide + share * (wide[partners] - wide)).to(rows.dtype)
