"""NCRLoss in a training loop of one's own, under DDP and FSDP where there are two processes."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nearsay.losses import NCR, NCRLoss


def step(rank=0, num_ranks=1):
    """Loss and gradients of one step; nobody says who the rows are."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    inputs, labels = torch.randn(20, 6).double(), torch.randint(4, (20,))
    criterion = NCRLoss(head=network[2], objective=NCR(alpha=0.6, k=5))
    wrapped = DistributedDataParallel(network) if num_ranks > 1 else network
    loss = criterion(wrapped(inputs.chunk(num_ranks)[rank]), labels.chunk(num_ranks)[rank])
    loss.backward()
    terms = torch.stack([*criterion.terms.values()])
    judged = torch.zeros(())
    if rank == 0:  # alone, as a validation may be
        with torch.no_grad():
            judged = criterion(network(inputs), labels.where(torch.arange(20) < 7, -1))
    return {
        "judged": judged,
        "loss": loss.detach(),
        "terms": terms,
        "gradients": nn.utils.parameters_to_vector([part.grad for part in network.parameters()]),
        "sharded": _losses(rank, num_ranks),
    }


def _losses(rank, num_ranks):
    """Of three steps on parameters of which each process holds a part (FSDP)."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    inputs, labels = (
        part.chunk(num_ranks)[rank]
        for part in (torch.randn(20, 6).double(), torch.randint(4, (20,)))
    )
    criterion = NCRLoss(head=network[2], objective=NCR(alpha=0.6, k=5))
    sharded = fully_shard(network) if num_ranks > 1 else network
    optimizer, losses = torch.optim.SGD(sharded.parameters(), lr=0.5), []
    for _ in range(3):
        losses.append(criterion(sharded(inputs), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()
