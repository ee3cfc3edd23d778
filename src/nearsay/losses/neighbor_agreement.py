"""Whether the neighbors of an example agree with its label, and whether they are near at all."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearsay import distributed
from nearsay.batch import Batch, Outputs
from nearsay.neighbors import Identity, nearest, normalize

# NCR(start_epoch="auto") counts agreement in so many epochs, and starts at the latest after them.
NUM_EPOCHS = 1024
# Agreement that rises by less than this from one epoch to the next has settled.
_LEAST_RISE = 0.005
# Neighbors that give every class at most this probability are undecided.
_UNDECIDED = 0.5


class Opinion(NamedTuple):
    """What the k nearest rows of the global batch say about each row, without gradient."""

    agrees: Tensor  # (B,) bool: the label of the row wins the vote of its neighbors' labels
    is_asked: Tensor  # (B,) bool: the row has a label, and so has one of its neighbors
    similarity: Tensor  # (B,) mean cosine similarity of the neighbors
    belief: Tensor  # (B, C) mean prediction of the neighbors, weighted by similarity


@torch.no_grad()
def ask_neighbors(outputs: Outputs, batch: Batch, k: int | None) -> Opinion:
    """What the neighbors of each row, among the rows of all processes, say about its label."""
    # A weight of 0 would not keep a NaN in a padding row out of the sums below.
    is_padding = ~batch.is_real[:, None]
    features = outputs.features.float().masked_fill(is_padding, 0)
    logits = outputs.logits.float().masked_fill(is_padding, 0)
    targets = batch.targets.float().masked_fill(is_padding, 0)
    directions, _ = normalize(features)
    labels, beliefs = distributed.gather(targets), distributed.gather(logits.softmax(dim=1))
    who = Identity(batch.indices, distributed.gather(batch.indices))
    keys = distributed.gather(directions)
    similarities, positions = nearest(directions, keys, k, who)  # (B, K) each
    total = similarities.sum(dim=1, keepdim=True)
    weights = similarities / total.clamp(min=torch.finfo(torch.float32).tiny)
    votes = (weights[:, :, None] * labels[positions]).sum(dim=1)  # (B, C)
    belief = (weights[:, :, None] * beliefs[positions]).sum(dim=1)  # (B, C)
    is_asked = (targets.sum(dim=1) > 0) & (votes.sum(dim=1) > 0)
    agrees = (votes.argmax(dim=1) == targets.argmax(dim=1)) & is_asked
    return Opinion(agrees, is_asked, similarities.mean(dim=1), belief)


@torch.no_grad()
def count_agreement_(table: Tensor, opinion: Opinion, epoch: Tensor) -> None:
    """Add how many rows agree and were asked to the row of the epoch in `table` (NUM_EPOCHS, 2)."""
    counts = torch.stack([opinion.agrees.sum(), opinion.is_asked.sum()]).to(table.dtype)
    # An index tensor, not a number: reading the epoch would wait for the device.
    row = epoch.long().clamp(0, len(table) - 1)
    table.index_add_(0, row[None], distributed.total(counts)[None])


def has_settled(table: Tensor, epoch: float) -> bool:
    """Whether agreement of neighbors with labels stopped rising in an epoch before this one.

    While features form, neighbors come to carry the same label more and more often. Once that ends,
    the features are as good as the labels make them, and what follows is memorization.
    """
    num_finished = min(int(epoch), len(table))
    if num_finished == len(table):
        return True
    shares = [agreed / asked for agreed, asked in table[:num_finished].tolist() if asked]
    return any(later - earlier < _LEAST_RISE for earlier, later in pairwise(shares))


def outlying_rows(opinion: Opinion, batch: Batch, share: float) -> Tensor:
    """(B,) bool: the `share` of the global batch with the most distant neighbors, if undecided."""
    # Padding is sorted to the end and counts in no share.
    own = opinion.similarity.masked_fill(~batch.is_real, torch.inf)
    ordered = distributed.gather(own).sort().values
    # The similarity at this place separates the share from the others. index_select takes the place
    # as a tensor, so that the device is not waited for.
    place = (share * ordered.isfinite().sum()).long()
    limit = pad(ordered, (0, 1), value=torch.inf).index_select(0, place[None])
    is_far = opinion.similarity < limit
    return is_far & (opinion.belief.amax(dim=1) < _UNDECIDED) & batch.is_real
