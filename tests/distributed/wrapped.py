"""One of two processes with half a batch each: `python -m integrations.ddp_worker FOLDER RANK`."""

import gc
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
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
        "gradients": [part.grad for part in network.parameters()],
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


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    torch.save(step(rank, 2), folder / f"{rank}.unfinished")
    (folder / f"{rank}.unfinished").rename(folder / f"{rank}.pt")
    gc.collect()  # a model that outlives its group can abort the process
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
