"""What the neighbors of an example say of its label: whether they agree with it, and whether they are near at all."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearsay import distributed
from nearsay.batch import Batch, Outputs
from nearsay.neighbors import Identity, nearest, normalize

NUM_EPOCHS = 1024  # that agreement is remembered of; NCR would start at the latest then
_RISE = 0.005  # from one epoch to the next: agreement that rises by less has settled
_UNDECIDED = (
    0.5  # neighbors that give no class more than this much belief do not know what they see
)


class Opinion(NamedTuple):
    """What the k nearest rows of the global batch say of each row, without gradient."""

    agrees: Tensor  # (B,) bool: the label of the row wins the vote of its neighbors' labels
    is_asked: Tensor  # (B,) bool: the row has a label, and neighbors that have one
    similarity: Tensor  # (B,) mean cosine similarity of the neighbors
    belief: Tensor  # (B, C) mean prediction of the neighbors, weighted by similarity


@torch.no_grad()
def ask(outputs: Outputs, batch: Batch, k: int | None) -> Opinion:
    """Ask the neighbors of each row among the rows of all processes."""
    is_nobody = ~batch.is_real[
        :, None
    ]  # whatever padding holds, a weight of 0 would not keep a NaN from the sums
    features, logits, targets = (
        each.float().masked_fill(is_nobody, 0)
        for each in (outputs.features, outputs.logits, batch.targets)
    )
    directions, _ = normalize(features)
    labels, beliefs = distributed.gather(targets), distributed.gather(logits.softmax(dim=1))
    who = Identity(batch.indices, distributed.gather(batch.indices))
    similarities, positions = nearest(
        directions, distributed.gather(directions), k, who
    )  # (B, K) each
    weights = similarities / similarities.sum(dim=1, keepdim=True).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    votes = (weights[:, :, None] * labels[positions]).sum(dim=1)  # (B, C)
    belief = (weights[:, :, None] * beliefs[positions]).sum(dim=1)
    is_asked = (targets.sum(dim=1) > 0) & (votes.sum(dim=1) > 0)
    agrees = (votes.argmax(dim=1) == targets.argmax(dim=1)) & is_asked
    return Opinion(agrees, is_asked, similarities.mean(dim=1), belief)


@torch.no_grad()
def count_agreement_(table: Tensor, opinion: Opinion, epoch: Tensor) -> None:
    """Add how many rows were asked and agree to the row of the epoch in `table` (NUM_EPOCHS, 2)."""
    counts = distributed.total(
        torch.stack([opinion.agrees.sum(), opinion.is_asked.sum()]).to(table.dtype)
    )
    row = epoch.long().clamp(0, len(table) - 1)
    table.index_add_(0, row[None], counts[None])


def has_settled(table: Tensor, epoch: float) -> bool:
    """Whether the neighbors' agreement with the labels has stopped to rise in an epoch that is over.

    While features form, neighbors come to carry the same label more and more often. Once that ends, the features are
    as good as the labels make them, and what follows is memorization.
    """
    done = min(int(epoch), len(table))
    if done == len(table):
        return True
    shares = [agreed / asked for agreed, asked in table[:done].tolist() if asked]
    return any(later - earlier < _RISE for earlier, later in pairwise(shares))


def foreign_rows(opinion: Opinion, batch: Batch, share: float) -> Tensor:
    """(B,) bool: the `share` of the global batch whose neighbors are farthest, where those are undecided as well."""
    everyone = (
        distributed.gather(opinion.similarity.masked_fill(~batch.is_real, torch.inf)).sort().values
    )
    place = (
        share * everyone.isfinite().sum()
    ).long()  # padding stands at the end, and is part of no share
    is_far = opinion.similarity < pad(everyone, (0, 1), value=torch.inf).index_select(
        0, place[None]
    )
    return is_far & (opinion.belief.amax(dim=1) < _UNDECIDED) & batch.is_real
