"""The whole set as witnesses: a label counts as much as the neighbors of its example agree with it.

Every example remembers its features, what an averaged network has believed of it, and its present label. The neighbors
of an example in the whole set vote with their present labels; its own label is learned with a weight that follows how
near it comes to winning that vote. Once the network and the neighbors together are sure of a class in the face of the
label, that class takes the place of the label, for learning and for voting. How often each class is labeled as what is
counted on the way, so that the more labels are right, the more it takes to overrule one. So a wrong label is first left
out, then outvoted and replaced. As long as nobody knows its label, an example teaches by those it looks like: two views
of it shall resemble the same others. No rate of noise is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay import distributed
from nearsay.batch import (
    PADDING,
    Batch,
    Loss,
    Outputs,
    check_indices,
    check_outputs,
    check_place,
    first_rows,
    one_hot,
)
from nearsay.losses._ncr_fast import divergence
from nearsay.losses.base import not_finite, upcast
from nearsay.losses.cross_entropy import cross_entropy
from nearsay.neighbors import Identity, autocast_off, nearest, normalize
from nearsay.validation import check_number, check_whole

_SLOWNESS = 0.99  # per step, of averages over the data
_TINY = 1e-8
_RARE = 1e-3  # share that every label is taken to have in every class


class Vote(NamedTuple):
    """What is made of the labels of a batch, without gradient."""

    targets: Tensor  # (B, C) a label or a belief; its sum is the weight of the example
    agreement: (
        Tensor  # (B,) how near the label comes to winning the vote of the neighbors, from 0 to 1
    )
    is_sure: Tensor  # (B,) bool: belief is strong enough to be a target
    uncertainty: (
        Tensor  # (B,) what the target falls short of the weight of a certain one, from 0 to 1
    )


@dataclass(frozen=True, kw_only=True)
class NeighborVote:
    """Cross-entropy with sure beliefs, and with the labels that neighbors in the whole set agree with where none is.

    Wants a teacher (averaged weights) on un-mixed first views, and two views: the first mixed with others, the second
    strongly augmented. Before `start_epoch` the labels are learned as they are, while features and beliefs form.
    """

    k: int = 200
    start_epoch: float = 10.0
    similarity_temperature: float = 0.1  # of the weights exp(cosine / temperature) of the neighbors
    agreement_power: float = 4.0  # power of the agreement with which a label is weighed
    momentum: float = 0.7  # of an example's belief, from one visit to the next
    threshold: float = (
        0.8  # probability from which a belief is a target, and votes in place of the label
    )
    label_power: float = (
        0.5  # of the given label against a belief; below 1, as the belief has learned from it
    )
    strong: float = 1.0  # weight of the second view
    feature_weight: float = (
        1.0  # weight of 1 − cosine between the features of the second view and the teacher's
    )
    relation_weight: float = 0.1  # weight, where labels are in doubt, of how differently both see the others of the batch

    def __post_init__(self) -> None:
        check_whole("k", self.k, 1)
        check_number("start_epoch", self.start_epoch, 0)
        check_number("similarity_temperature", self.similarity_temperature, 0.01, 100)
        check_number("agreement_power", self.agreement_power, 0, 100)
        check_number("momentum", self.momentum, 0, 0.999)
        check_number("threshold", self.threshold, 0, 1)
        check_number("label_power", self.label_power, 0, 1)
        check_number("strong", self.strong, 0, 100)
        check_number("feature_weight", self.feature_weight, 0, 100)
        check_number("relation_weight", self.relation_weight, 0, 100)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """Features, beliefs and present labels of every example, who has been seen, and averages over the data."""
        return {
            "features": torch.zeros(num_examples + 1, num_features),
            "beliefs": torch.zeros(num_examples + 1, num_classes),
            "labels": torch.zeros(num_examples + 1, num_classes),
            "seen": torch.full((num_examples + 1,), PADDING),
            "center": torch.zeros(num_features),
            "shares": torch.full(
                (num_classes,), 1 / num_classes
            ),  # of the classes in what is learned
            "noise": 0.5 * torch.eye(num_classes)
            + 0.5 / num_classes,  # (C, C) how each class is labeled, by columns
        }

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """`labels` before `start_epoch`, `neighbors` from then on."""
        return "labels" if epoch < self.start_epoch else "neighbors"

    def __call__(
        self,
        outputs: Outputs,
        batch: Batch,
        epoch: Tensor,
        state: Mapping[str, Tensor],
        phase: str,
    ) -> Loss:
        """Remember what the teacher sees, ask the neighbors, and learn what they make of the labels."""
        check_outputs(outputs, batch)
        if phase not in ("labels", "neighbors"):
            raise ValueError(
                f"phase={phase!r} is not one of NeighborVote's; pass what objective.phase(epoch, state) gave"
            )
        if batch.teacher is None:
            raise ValueError(
                "NeighborVote needs a teacher: give the batch teacher=Outputs(features, logits) of averaged weights, as "
                "examples/neighbor_vote_loop.py does; an experiment with averaging= and self_taught=True has one"
            )
        check_place(state, outputs)
        if "seen" not in state or state["beliefs"].shape[1] != outputs.logits.shape[1]:
            raise ValueError(
                f"NeighborVote finds no beliefs of {outputs.logits.shape[1]} classes in its memory; make it with "
                "objective.init_state(num_examples, num_classes, num_features)"
            )
        if batch.teacher.features.shape != (len(batch.indices), state["features"].shape[1]):
            raise ValueError(
                f"features {tuple(batch.teacher.features.shape)} of the teacher must be {len(batch.indices)} rows of "
                f"the {state['features'].shape[1]} that the memory was made for; make it with "
                "objective.init_state(num_examples, num_classes, num_features)"
            )
        check_indices(batch.indices, len(state["seen"]) - 1)
        num = len(batch.indices) // batch.views
        given = upcast(batch.targets if batch.plain_targets is None else batch.plain_targets)[:num]
        given = given.where(batch.is_real[:num, None], 0.0)
        kind = state["features"].dtype
        seen = Outputs(*(part[:num].detach().to(kind) for part in batch.teacher))
        with torch.no_grad(), autocast_off(seen.logits):
            known = self._vote_on_labels(seen, batch.indices[:num], given.to(kind), state)
        targets = known.targets.to(given.dtype) if phase == "neighbors" else given
        targets = _blended(targets.repeat(batch.views, 1), batch)
        rows = cross_entropy(upcast(outputs.logits).where(batch.is_real[:, None], 0.0), targets)
        weights, real = targets.sum(dim=1), batch.is_real.to(rows.dtype)
        is_here = batch.is_real[:num]
        flaws = not_finite(seen.logits.softmax(dim=1), is_here) + not_finite(seen.features, is_here)
        first = distributed.mean(rows[:num] + flaws.to(rows.dtype), weights[:num])
        terms = {
            "first": first.detach(),
            "agreement": distributed.mean(known.agreement, real[:num]),
            "sure": distributed.mean(known.is_sure.to(rows.dtype), real[:num]),
        }
        if batch.views == 1:
            return Loss(first, terms)
        second = distributed.mean(rows[num:], weights[num:])
        features, goal = (
            upcast(part).where(batch.is_real[num:, None], 0.0)
            for part in (outputs.features[num:], seen.features.repeat(batch.views - 1, 1))
        )
        near = torch.cosine_similarity(features, goal, eps=1e-6)
        apart = distributed.mean((1 - near).where(batch.is_real[num:], 0.0), real[num:])
        with autocast_off(features):
            relational = self._relational_loss(
                features, goal.to(features), batch.indices[:num], state["center"].to(features)
            )
        relational = relational * known.uncertainty.repeat(batch.views - 1)
        relational = distributed.mean(relational.where(batch.is_real[num:], 0.0), real[num:])
        terms |= {
            "second": second.detach(),
            "apart": apart.detach(),
            "relational": relational.detach(),
        }
        total = first + self.strong * second + self.relation_weight * relational
        return Loss(total + self.feature_weight * apart if phase == "neighbors" else total, terms)

    def _relational_loss(
        self, features: Tensor, goal: Tensor, indices: Tensor, center: Tensor
    ) -> Tensor:
        """(V·B,) KL(teacher ‖ network) of the softmax of the cosines of every row with all others of the batch.

        No label is asked. The teacher's softmax is twice as sharp, so that what is near has to come nearer yet and
        small differences grow, where they would otherwise vanish.
        """
        everyone, everywhere = (
            distributed.gather(indices),
            normalize(distributed.gather(goal[: len(indices)]) - center)[0],
        )
        is_no_other = ((indices[:, None] == everyone) | (everyone == PADDING)).repeat(
            len(goal) // max(1, len(indices)), 1
        )

        def shares(rows: Tensor, temperature: float) -> Tensor:
            cosines = normalize(rows - center)[0] @ everywhere.T
            return (
                (cosines / temperature)
                .masked_fill(is_no_other, torch.finfo(rows.dtype).min)
                .log_softmax(dim=1)
            )

        wanted, found = (
            shares(rows, share * self.similarity_temperature)
            for rows, share in ((goal, 0.5), (features, 1.0))
        )
        return divergence(wanted.exp(), found.exp(), wanted - found)

    def _vote_on_labels(
        self, seen: Outputs, indices: Tensor, given: Tensor, state: Mapping[str, Tensor]
    ) -> Vote:
        """Bring the memory up to date and ask it about these examples."""
        self._remember(seen, indices, given, state)
        places = indices.where(indices != PADDING, len(state["seen"]) - 1)
        directions = normalize(state["features"] - state["center"])[0]
        found = nearest(
            directions[places],
            directions,
            min(self.k, len(directions) - 1),
            Identity(indices, state["seen"]),
        )
        weights = (
            (found.similarities / self.similarity_temperature)
            .exp()
            .where(found.similarities > 0, 0.0)
        )
        weights = (weights / weights.sum(dim=1, keepdim=True).clamp(min=_TINY))[
            :, :, None
        ]  # (B, K, 1)
        votes, theirs = (
            (weights * state[name][found.positions]).sum(dim=1) for name in ("labels", "beliefs")
        )
        weight = given.sum(dim=1)
        own = (votes * given).sum(dim=1) / weight.clamp(min=_TINY)
        agreement = (own / votes.amax(dim=1).clamp(min=_TINY)).where(
            (weight > 0) & (votes.sum(dim=1) > 0), 0.0
        )
        trust = (agreement**self.agreement_power)[:, None]  # (B, 1)
        belief = self._weigh(0.5 * (state["beliefs"][places] + theirs), given, state)
        is_sure = (belief.amax(dim=1) >= self.threshold) & (indices != PADDING)
        believed = one_hot(belief.argmax(dim=1), belief.shape[1]).to(given)
        self._relabel(indices, torch.where(is_sure[:, None], believed, given), state)
        targets = torch.where(is_sure[:, None], believed, trust * given)
        uncertainty = 1 - (trust[:, 0] * (weight > 0)).where(
            ~is_sure, 1.0
        )  # whatever the classes weigh
        return Vote(targets * self._balance(targets, state), agreement, is_sure, uncertainty)

    def _weigh(self, belief: Tensor, given: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """(B, C) what to believe of examples that are labeled as given, by a tempered rule of Bayes.

        How classes are labeled is counted among examples whose class is sure without a look at their own label. What
        the network is sure of, it is also sure of where it errs; a right label, if most are, then keeps it in doubt.
        """
        weight = given.sum(dim=1, keepdim=True)
        labels = given / weight.clamp(min=_TINY)
        is_counted = (belief.amax(dim=1, keepdim=True) >= self.threshold) & (weight > 0)
        counts = distributed.total(
            (one_hot(belief.argmax(dim=1), belief.shape[1]).to(labels) * is_counted).T @ labels
        )
        sizes = counts.sum(dim=1, keepdim=True)
        _follow_(state["noise"], counts / sizes.clamp(min=_TINY), sizes > 0)
        told = (labels @ state["noise"].clamp(min=_RARE).T).where(weight > 0, 1.0)
        weighed = belief.clamp(min=_TINY) * told**self.label_power
        return weighed / weighed.sum(dim=1, keepdim=True)

    def _balance(self, targets: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """(C,) what makes every class count alike in what is learned, within a factor of five."""
        sums = distributed.total(targets.sum(dim=0))
        _follow_(state["shares"], sums / sums.sum().clamp(min=_TINY), sums.sum() > _TINY)
        factors: Tensor = 1 / (len(sums) * state["shares"]).clamp(0.2, 5.0)
        return factors

    def _remember(
        self, seen: Outputs, indices: Tensor, given: Tensor, state: Mapping[str, Tensor]
    ) -> None:
        everyone, features = distributed.gather(indices), distributed.gather(seen.features)
        beliefs = distributed.gather(seen.logits.softmax(dim=1))
        is_kept = (
            first_rows(everyone) & features.isfinite().all(dim=1) & beliefs.isfinite().all(dim=1)
        )
        nobody = len(state["seen"]) - 1
        places = everyone.where(is_kept, nobody)
        is_new = (state["seen"][places] == PADDING)[:, None]
        moved = torch.where(
            is_new, beliefs, torch.lerp(beliefs, state["beliefs"][places], self.momentum)
        )
        labels = torch.where(is_new, distributed.gather(given), state["labels"][places])
        for name, rows in (
            ("beliefs", moved),
            ("features", features),
            ("labels", labels),
            ("seen", everyone),
        ):
            state[name].index_copy_(0, places, rows)
        _forget_nobody(state)
        mean = features.where(is_kept[:, None], 0.0).sum(dim=0) / is_kept.sum().clamp(min=1)
        _follow_(state["center"], mean, is_kept.any())

    def _relabel(self, indices: Tensor, labels: Tensor, state: Mapping[str, Tensor]) -> None:
        everyone = distributed.gather(indices)
        nobody = len(state["seen"]) - 1
        state["labels"].index_copy_(
            0, everyone.where(first_rows(everyone), nobody), distributed.gather(labels)
        )
        _forget_nobody(state)


def _follow_(average: Tensor, news: Tensor, is_known: Tensor) -> None:
    """Move a running average a little toward the news, where there are any."""
    average += (1 - _SLOWNESS) * (news - average) * is_known


def _forget_nobody(state: Mapping[str, Tensor]) -> None:
    """The last row takes what must not be kept."""
    for name in ("beliefs", "features", "labels"):
        state[name][-1].zero_()
    state["seen"][-1].fill_(PADDING)


def _blended(targets: Tensor, batch: Batch) -> Tensor:
    """(V·B, C) as the images were mixed."""
    if batch.mix is None:
        return targets
    share = upcast(batch.mix.weight)[:, None]
    alone = distributed.num_processes() == 1
    theirs = (
        targets[batch.mix.partners]
        if alone
        else _of_others(batch.mix.partner_indices, targets, batch.indices)
    )
    return share * targets + (1 - share) * theirs


def _of_others(wanted: Tensor, targets: Tensor, indices: Tensor) -> Tensor:
    """The targets of these examples, wherever they stand; 0 for padding."""
    everyone, rows = distributed.gather(indices), distributed.gather(targets)
    order = everyone.argsort(stable=True)  # an example that is there twice is its first row
    places = order[
        torch.searchsorted(everyone[order], wanted.contiguous()).clamp(max=len(order) - 1)
    ]
    is_there = (everyone[places] == wanted) & (wanted != PADDING)
    return rows[places].where(is_there[:, None], 0.0)
