"""The whole set as witnesses: what an example's neighbors believe, weighed against how labels are seen to err.

Labels are evidence, not truth. The classes that the neighbors of an example and its own past predictions make likely
are the prior, the estimated noise matrix says how likely each class is to be labeled as it was, and Bayes' rule makes
the target of the two. No rate of noise and no threshold is given: where labels err often, they weigh little.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay import dist
from nearsay.core import PADDING, Batch, Loss, Outputs, check_number, check_outputs, check_whole, first_rows
from nearsay.kernels.ncr import autocast_off
from nearsay.neighbors import Identity, nearest, normalize
from nearsay.objectives.cross_entropy import cross_entropy, upcast

_SLOWNESS = 0.99  # per step, of the averages over the data: center of the features, noise matrix
_ROUNDING = 1e-6  # of a probability, so that nothing is ever impossible


class Testimony(NamedTuple):
    """What is known of the examples of a batch, without gradient."""

    prior: Tensor  # (B, C) by their own past predictions and their neighbors'
    targets: Tensor  # (B, C) the prior and the label together
    trust: Tensor  # (B,) the share of the target that is the label


@dataclass(frozen=True, kw_only=True)
class Nearsay:
    """Cross-entropy with targets that neighbors in the whole set and the noise matrix make of the labels.

    Wants a teacher (averaged weights) on un-mixed first views, and two views: the first mixed with others, the second
    strongly augmented. Before `start_epoch` the labels are learned as they are, while beliefs and noise matrix form.
    """

    k: int = 100
    start_epoch: float = 10.0
    similarity_temperature: float = 0.1  # of the weights exp(cosine / temperature) of the neighbors
    momentum: float = 0.7  # of an example's belief, from one visit to the next
    sharpness: float = 2.0  # power of the prior
    neighbors: float = 0.5  # share of the prior that is theirs
    strong: float = 1.0  # weight of the second view
    agreement: float = 1.0  # weight of 1 − cosine between its features and the teacher's

    def __post_init__(self) -> None:
        check_whole("k", self.k, 1)
        check_number("start_epoch", self.start_epoch, 0)
        check_number("similarity_temperature", self.similarity_temperature, 0.01, 100)
        check_number("momentum", self.momentum, 0, 0.999)
        check_number("sharpness", self.sharpness, 1, 100)
        check_number("neighbors", self.neighbors, 0, 1)
        check_number("strong", self.strong, 0, 100)
        check_number("agreement", self.agreement, 0, 100)

    def memory(self, num_examples: int, num_classes: int, num_features: int) -> dict[str, Tensor]:
        """Features and beliefs of every example, who has been seen, and averages over the data."""
        return {
            "features": torch.zeros(num_examples + 1, num_features),
            "beliefs": torch.zeros(num_examples + 1, num_classes),
            "seen": torch.full((num_examples + 1,), PADDING),
            "center": torch.zeros(num_features),
            "noise": torch.full((num_classes, num_classes), _ROUNDING),
        }

    def stage(self, epoch: float, memory: Mapping[str, Tensor]) -> str:
        """`labels` before `start_epoch`, `neighbors` from then on."""
        return "labels" if epoch < self.start_epoch else "neighbors"

    def __call__(self, outputs: Outputs, batch: Batch, epoch: Tensor, memory: Mapping[str, Tensor], stage: str) -> Loss:
        """Remember what the teacher sees, ask the neighbors, and learn what all that makes of the labels."""
        check_outputs(outputs, batch)
        if stage not in ("labels", "neighbors"):
            raise ValueError(f"stage={stage!r} is not one of Nearsay's; pass what objective.stage(epoch, memory) gave")
        if batch.teacher is None:
            raise ValueError("Nearsay needs a teacher: an experiment with averaging= and self_taught=True has one")
        num = len(batch.indices) // batch.views
        labels = upcast(batch.targets if batch.plain_targets is None else batch.plain_targets)[:num]
        seen = Outputs(batch.teacher.features[:num].detach(), batch.teacher.logits[:num].detach())
        with torch.no_grad(), autocast_off(seen.logits):
            known = self._testify(seen, batch.indices[:num], labels, memory)
        targets = known.targets if stage == "neighbors" else labels
        is_real = batch.is_real[:, None]
        logits = upcast(outputs.logits).where(is_real, 0.0)
        rows = cross_entropy(logits, _blended(targets.repeat(batch.views, 1), batch).where(is_real, 0.0))
        first, others = rows[:num], rows[num:]
        real = batch.is_real.to(rows.dtype)
        total = supervised = dist.mean(first, real[:num])
        terms = {"cross_entropy": supervised.detach(), "trust": dist.mean(known.trust, real[:num])}
        if batch.views > 1:
            second = dist.mean(others, real[num:])
            apart = 1 - torch.cosine_similarity(
                upcast(outputs.features[num:]), upcast(seen.features).repeat(batch.views - 1, 1), eps=1e-6
            )
            apart_mean = dist.mean(apart, real[num:])
            total = total + self.strong * second + self.agreement * apart_mean
            terms |= {"strong": second.detach(), "apart": apart_mean.detach()}
        return Loss(total, terms)

    def _testify(self, seen: Outputs, indices: Tensor, labels: Tensor, memory: Mapping[str, Tensor]) -> Testimony:
        """Bring the memory up to date and ask it about these examples."""
        self._remember(seen, indices, memory)
        places = indices.where(indices != PADDING, len(memory["seen"]) - 1)
        own = memory["beliefs"][places]
        keys = normalize(memory["features"] - memory["center"])[0]
        found = nearest(keys[places], keys, min(self.k, len(keys) - 1), Identity(indices, memory["seen"]))
        weights = (found.similarities / self.similarity_temperature).exp().where(found.similarities > 0, 0.0)
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-30)  # (B, K)
        theirs = (weights[:, :, None] * memory["beliefs"][found.positions]).sum(dim=1)  # (B, C)
        mixed = (1 - self.neighbors) * own + self.neighbors * theirs
        prior = _distribution(mixed.clamp(min=_ROUNDING) ** self.sharpness)
        # Neighbors alone have not seen the label of the example itself, so they can tell how labels err.
        self._count(_distribution(theirs.clamp(min=_ROUNDING) ** self.sharpness), labels, memory["noise"])
        weight = labels.sum(dim=1, keepdim=True)
        is_labeled = weight > 0
        given = labels / weight.where(is_labeled, 1.0)
        likelihood = given @ _distribution(memory["noise"]).T  # (B, C): how likely each class is labeled like this
        targets = _distribution(prior * likelihood.where(is_labeled, 1.0))
        return Testimony(prior, targets, (targets * given).sum(dim=1))

    def _remember(self, seen: Outputs, indices: Tensor, memory: Mapping[str, Tensor]) -> None:
        everyone, features = dist.gather(indices), dist.gather(seen.features.float())
        beliefs = dist.gather(seen.logits.float().softmax(dim=1))
        is_kept = first_rows(everyone) & features.isfinite().all(dim=1) & beliefs.isfinite().all(dim=1)
        nobody = len(memory["seen"]) - 1
        places = everyone.where(is_kept, nobody)
        is_new = (memory["seen"][places] == PADDING)[:, None]
        moved = torch.where(is_new, beliefs, torch.lerp(beliefs, memory["beliefs"][places], self.momentum))
        memory["beliefs"].index_copy_(0, places, moved)
        memory["features"].index_copy_(0, places, features)
        memory["seen"].index_copy_(0, places, everyone)
        memory["beliefs"][nobody].zero_()
        memory["features"][nobody].zero_()
        memory["seen"][nobody].fill_(PADDING)
        share = is_kept.to(features.dtype)[:, None]
        mean = (features.where(is_kept[:, None], 0.0)).sum(dim=0) / share.sum().clamp(min=1)
        memory["center"].lerp_(mean, 1 - _SLOWNESS)

    def _count(self, prior: Tensor, labels: Tensor, noise: Tensor) -> None:
        """Move the table of true class by label toward what this batch shows."""
        noise.lerp_(dist.total(prior.T @ labels) / dist.total(labels.sum()).clamp(min=1), 1 - _SLOWNESS)
        noise.clamp_(min=_ROUNDING)


def _distribution(rows: Tensor) -> Tensor:
    return rows / rows.sum(dim=1, keepdim=True)


def _blended(targets: Tensor, batch: Batch) -> Tensor:
    """(V·B, C) as the images were mixed."""
    if batch.mix is None:
        return targets
    share = upcast(batch.mix.weight)[:, None]
    return share * targets + (1 - share) * targets[batch.mix.partners]
