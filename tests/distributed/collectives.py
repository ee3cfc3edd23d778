"""One call of everything in `nearsay.distributed`, with inputs that anybody can compute again."""

from unittest import mock

import torch
from torch import Tensor

from nearsay import distributed

NUM_ROWS = 3


def rows_of(rank: int) -> Tensor:
    """(B, 2) what this rank holds."""
    return torch.randn(
        NUM_ROWS, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )


def prices_of(rank: int, num_rows: int) -> Tensor:
    """(num_rows, 2) what the rows it sees cost this rank: not the same for any two ranks."""
    return torch.randn(
        num_rows, 2, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64
    )


def weights_of(rank: int) -> Tensor:
    """(B,) the last row weighs nothing."""
    return torch.tensor([1.0, 0.25 + rank, 0.0], dtype=torch.float64)


def call_all(rank: int) -> dict[str, Tensor]:
    seen = {
        "num_processes": torch.tensor(distributed.num_processes()),
        "rank": torch.tensor(distributed.rank()),
    }
    for name, collective in (("gather", distributed.gather), ("others", distributed.others)):
        own = rows_of(rank).requires_grad_()
        seen[name] = collective(own)
        # 0 if there is no gradient.
        cost = (prices_of(rank, len(seen[name])) * seen[name] ** 2).sum() + 0 * own.sum()
        (seen[f"gradient of {name}"],) = torch.autograd.grad(cost, own)
        seen[f"{name} of integers"] = collective(torch.arange(NUM_ROWS) + 10 * rank)
    own = rows_of(rank).requires_grad_()
    # Strides of 0.
    (seen["gradient of a plain sum"],) = torch.autograd.grad(
        distributed.gather(own).sum() + 0 * own.sum(), own
    )
    seen["second gradient of gather is refused"] = torch.tensor(
        _refuses_to_differentiate_twice(rank)
    )
    seen["gather of a transposed tensor"] = distributed.gather(rows_of(rank).T)
    cpu = torch.device("cpu")
    seen["join"] = distributed.join(rows_of(rank)[:rank], cpu)  # the first process has none
    seen["join in parts"], seen["the largest part"] = _join_in_parts(rank, 9 - 2 * rank)
    seen["join in parts of all but the first"], _ = _join_in_parts(rank, rank * NUM_ROWS)
    seen["join of nothing"] = distributed.join(rows_of(rank)[:0], cpu)
    seen["join_texts"] = torch.tensor(
        [ord(each) for each in distributed.join_texts(f"{rank}é" * rank, cpu)]
    )

    own = rows_of(rank).requires_grad_()
    summed = distributed.total(own)
    seen |= {"total": summed, "total has a gradient": torch.tensor(summed.requires_grad)}
    seen["own after total"] = own

    weights = weights_of(rank)
    own = rows_of(rank)[:, 0].requires_grad_()
    seen["mean"] = distributed.mean(own * weights, weights)
    (seen["gradient of mean"],) = torch.autograd.grad(seen["mean"], own)
    alone = weights if rank == 0 else torch.zeros_like(weights)
    seen["mean where only rank 0 has weight"] = distributed.mean(own * alone, alone)
    nothing = torch.zeros_like(weights)
    seen["mean without weight"] = distributed.mean(own * nothing, nothing)
    (seen["gradient of mean without weight"],) = torch.autograd.grad(
        seen["mean without weight"], own
    )
    return {name: value.detach().clone() for name, value in seen.items()}


def _refuses_to_differentiate_twice(rank: int) -> bool:
    own = rows_of(rank).requires_grad_()
    (gradient,) = torch.autograd.grad(
        (distributed.gather(own) ** 3).sum() + 0 * own.sum(), own, create_graph=True
    )
    try:
        gradient.sum().backward()
    except (RuntimeError, UserWarning) as error:  # torch warns where a collective has no gradient
        return "once_differentiable" in str(error)
    return False


def _join_in_parts(rank: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows, four numbers at a time, and how many there were at most in one message."""
    gather, sizes = distributed.gather, []

    def counted(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return gather(tensor)

    with (
        mock.patch.object(distributed, "_AT_ONCE", 4),
        mock.patch.object(distributed, "gather", counted),
    ):
        joined = distributed.join(rows_of(rank).repeat(3, 1)[:num_rows], torch.device("cpu"))
    return joined, torch.tensor(max(sizes, default=0))
