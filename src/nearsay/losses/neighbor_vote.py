"""NeighborVote: a label counts as much as the neighbors of its example agree with it.

The state keeps of every example its features, the belief of an averaged network about its class,
and its present label. One step does this:

1. The neighbors of an example, searched in the whole data set, vote with their present labels. The
   closer its own label comes to winning, the more weight that label gets.
2. Once the network and the neighbors together are confident of a class, this class replaces the
   label, for learning and for voting. Before that, the confusion of labels with classes is counted,
   so the more labels are right, the more it takes to overrule one.
3. As long as the label of an example is uncertain, the example teaches by its similarities: two
   views of it shall be similar to the same other examples.

So a wrong label first loses its weight and is then outvoted and replaced. No noise rate is given.
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

# The share of the old value in running averages over the data, at every step.
_SLOWNESS = 0.99
_TINY = 1e-8
# The least probability of every label in every class.
_RARE = 1e-3


class Vote(NamedTuple):
    """What becomes of the labels of a batch, without gradient."""

    targets: Tensor  # (B, C) a label or a class; its sum is the weight of the example
    agreement: Tensor  # (B,) how near the label comes to winning the vote, from 0 to 1
    is_confident: Tensor  # (B,) bool: belief is strong enough to be a target
    uncertainty: Tensor  # (B,) from 0 to 1: how much weight the target lacks


@dataclass(frozen=True, kw_only=True)
class NeighborVote:
    """Labels weighted by the vote of neighbors in the whole data set, and replaced when outvoted.

    It needs a teacher (an averaged network) on first views before mixup, and works best with two
    views: the first mixed with others, the second strongly augmented. See
    examples/neighbor_vote_loop.py.

    Attributes:
        k: number of neighbors in the whole data set.
        start_epoch: first epoch with the vote. Before, the labels are learned as they are, while
            features and beliefs form.
        similarity_temperature: of the weights exp(cosine / temperature) of the neighbors.
        agreement_power: a label has the weight agreement ** agreement_power.
        momentum: the share of the old belief about an example at each visit, up to 0.999.
        threshold: the probability from which a believed class replaces the label.
        label_power: the exponent of the given label against a belief. It is below 1, because the
            belief has learned from the label.
        strong: weight of the loss of the second view.
        feature_weight: weight of 1 − cosine between the features of the second view and those of
            the teacher.
        relation_weight: weight, where labels are uncertain, of the divergence between the
            similarities that the second view and the teacher have to the rest of the batch.

    >>> state = NeighborVote().init_state(num_examples=100, num_classes=10, num_features=64)
    >>> NeighborVote(start_epoch=10).phase(3.0, state)
    'labels'
    """

    k: int = 200
    start_epoch: float = 10.0
    similarity_temperature: float = 0.1
    agreement_power: float = 4.0
    momentum: float = 0.7
    threshold: float = 0.8
    label_power: float = 0.5
    strong: float = 1.0
    feature_weight: float = 1.0
    relation_weight: float = 0.1

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
        """Tables with a row per example, and running averages over the data."""
        even = torch.full((num_classes,), 1 / num_classes)
        return {
            "features": torch.zeros(num_examples + 1, num_features),
            "beliefs": torch.zeros(num_examples + 1, num_classes),
            "labels": torch.zeros(num_examples + 1, num_classes),
            # The index of the example once it was visited, before that −1.
            "seen": torch.full((num_examples + 1,), PADDING),
            "center": torch.zeros(num_features),
            # The share of each class in what is learned.
            "shares": even,
            # (C, C) how often each class is labeled as each column.
            "noise": 0.5 * torch.eye(num_classes) + 0.5 / num_classes,
        }

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """`labels` before `start_epoch`, `neighbors` from then on."""
        return "labels" if epoch < self.start_epoch else "neighbors"

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        """Update the tables by the teacher, ask the neighbors, and learn the resulting targets."""
        teacher = _checked_teacher(outputs, batch, state, phase)
        num = len(batch.indices) // batch.views
        indices, is_real = batch.indices[:num], batch.is_real[:num]
        given = upcast(batch.targets if batch.plain_targets is None else batch.plain_targets)[:num]
        given = given.where(is_real[:, None], 0.0)
        kind = state["features"].dtype
        first_view = Outputs(*(part[:num].detach().to(kind) for part in teacher))
        with torch.no_grad(), autocast_off(first_view.logits):
            vote = self._vote_on_labels(first_view, indices, given.to(kind), state)
        targets = vote.targets.to(given.dtype) if phase == "neighbors" else given
        targets = _blended(targets.repeat(batch.views, 1), batch)
        rows = cross_entropy(upcast(outputs.logits).where(batch.is_real[:, None], 0.0), targets)
        weights, real = targets.sum(dim=1), batch.is_real.to(rows.dtype)
        # The tables leave out what is not finite in the teacher, so the loss must show it.
        flaws = not_finite(first_view.logits.softmax(dim=1), is_real)
        flaws = flaws + not_finite(first_view.features, is_real)
        first = distributed.mean(rows[:num] + flaws.to(rows.dtype), weights[:num])
        terms = {
            "first": first.detach(),
            "agreement": distributed.mean(vote.agreement, real[:num]),
            "confident": distributed.mean(vote.is_confident.to(rows.dtype), real[:num]),
        }
        if batch.views == 1:
            return Loss(first, terms)
        second = distributed.mean(rows[num:], weights[num:])
        distance, relational = self._feature_losses(
            outputs, batch, first_view, vote, state, real[num:]
        )
        terms |= {
            "second": second.detach(),
            "feature_distance": distance.detach(),
            "relational": relational.detach(),
        }
        total = first + self.strong * second + self.relation_weight * relational
        if phase == "neighbors":
            total = total + self.feature_weight * distance
        return Loss(total, terms)

    def _feature_losses(
        self,
        outputs: Outputs,
        batch: Batch,
        first_view: Outputs,
        vote: Vote,
        state: Mapping[str, Tensor],
        real: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Mean feature distance and mean relational loss of the later views."""
        num, num_later = len(first_view.features), batch.views - 1
        is_real = batch.is_real[num:]
        features = upcast(outputs.features[num:]).where(is_real[:, None], 0.0)
        goal = upcast(first_view.features.repeat(num_later, 1)).where(is_real[:, None], 0.0)
        near = torch.cosine_similarity(features, goal, eps=1e-6)
        distance = distributed.mean((1 - near).where(is_real, 0.0), real)
        with autocast_off(features):
            relational = self._relational_loss(
                features, goal.to(features), batch.indices[:num], state["center"].to(features)
            )
        # No similarity has to be taught where the label is known.
        relational = relational * vote.uncertainty.repeat(num_later)
        return distance, distributed.mean(relational.where(is_real, 0.0), real)

    def _relational_loss(
        self, features: Tensor, goal: Tensor, indices: Tensor, center: Tensor
    ) -> Tensor:
        """(V·B,) KL(teacher ‖ network) of the softmax of the cosines to all others of the batch.

        No label is used. The softmax of the teacher is twice as sharp, so that what is near has to
        come nearer yet, and small differences grow instead of vanishing.
        """
        everyone = distributed.gather(indices)
        # Without the mean of all features, the cosines would all be near 1.
        directions = normalize(distributed.gather(goal[: len(indices)]) - center)[0]
        is_no_other = (indices[:, None] == everyone) | (everyone == PADDING)
        is_no_other = is_no_other.repeat(len(goal) // max(1, len(indices)), 1)

        def shares(rows: Tensor, temperature: float) -> Tensor:
            similarities = normalize(rows - center)[0] @ directions.T / temperature
            # The least number instead of −∞: a row without others must not become NaN.
            similarities = similarities.masked_fill(is_no_other, torch.finfo(rows.dtype).min)
            return similarities.log_softmax(dim=1)

        wanted = shares(goal, 0.5 * self.similarity_temperature)
        actual = shares(features, 1.0 * self.similarity_temperature)
        return divergence(wanted.exp(), actual.exp(), wanted - actual)

    def _vote_on_labels(
        self, first_view: Outputs, indices: Tensor, given: Tensor, state: Mapping[str, Tensor]
    ) -> Vote:
        """Update the tables with these examples and ask them about their labels."""
        self._remember(first_view, indices, given, state)
        places = indices.where(indices != PADDING, len(state["seen"]) - 1)
        directions = normalize(state["features"] - state["center"])[0]
        k = min(self.k, len(directions) - 1)
        who = Identity(indices, state["seen"])
        similarities, positions = nearest(directions[places], directions, k, who)  # (B, K) each
        weights = (similarities / self.similarity_temperature).exp()
        # A similarity of 0 means that there is no neighbor.
        weights = weights.where(similarities > 0, 0.0)
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=_TINY)
        votes = (weights[:, :, None] * state["labels"][positions]).sum(dim=1)  # (B, C)
        theirs = (weights[:, :, None] * state["beliefs"][positions]).sum(dim=1)  # (B, C)
        weight = given.sum(dim=1)
        # The share of the votes for the given label, relative to the winner of the vote.
        own = (votes * given).sum(dim=1) / weight.clamp(min=_TINY)
        has_vote = (weight > 0) & (votes.sum(dim=1) > 0)
        agreement = (own / votes.amax(dim=1).clamp(min=_TINY)).where(has_vote, 0.0)
        trust = (agreement**self.agreement_power)[:, None]  # (B, 1)
        belief = self._weigh(0.5 * (state["beliefs"][places] + theirs), given, state)
        is_confident = (belief.amax(dim=1) >= self.threshold) & (indices != PADDING)
        believed = one_hot(belief.argmax(dim=1), belief.shape[1]).to(given)
        self._relabel(indices, torch.where(is_confident[:, None], believed, given), state)
        targets = torch.where(is_confident[:, None], believed, trust * given)
        # Before the balance of classes, which is no doubt about the label.
        uncertainty = 1 - (trust[:, 0] * (weight > 0)).where(~is_confident, 1.0)
        targets = targets * self._balance(targets, state)
        return Vote(targets, agreement, is_confident, uncertainty)

    def _weigh(self, belief: Tensor, given: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """(B, C) belief ∝ belief · p(label | class) ** label_power: a tempered rule of Bayes.

        How classes are labeled is counted among examples with a confident belief before a look at
        their own label. A network is confident where it errs, too; a right label, if most labels
        are right, then makes it less so.
        """
        weight = given.sum(dim=1, keepdim=True)
        labels = given / weight.clamp(min=_TINY)
        is_counted = (belief.amax(dim=1, keepdim=True) >= self.threshold) & (weight > 0)
        classes = one_hot(belief.argmax(dim=1), belief.shape[1]).to(labels) * is_counted
        # (C, C) sums over the global batch: believed classes in rows, given labels in columns.
        counts = distributed.total(classes.T @ labels)
        sizes = counts.sum(dim=1, keepdim=True)
        _follow_(state["noise"], counts / sizes.clamp(min=_TINY), sizes > 0)
        # (B, C) the probability of the given label in each class; an unlabeled row says nothing.
        likelihood = (labels @ state["noise"].clamp(min=_RARE).T).where(weight > 0, 1.0)
        weighed = belief.clamp(min=_TINY) * likelihood**self.label_power
        return weighed / weighed.sum(dim=1, keepdim=True)

    def _balance(self, targets: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """(C,) factors that let every class count alike in what is learned, from 1/5 to 5."""
        sums = distributed.total(targets.sum(dim=0))
        _follow_(state["shares"], sums / sums.sum().clamp(min=_TINY), sums.sum() > _TINY)
        factors: Tensor = 1 / (len(sums) * state["shares"]).clamp(0.2, 5.0)
        return factors

    def _remember(
        self, first_view: Outputs, indices: Tensor, given: Tensor, state: Mapping[str, Tensor]
    ) -> None:
        """Write features, beliefs and, at the first visit, labels of the global batch."""
        everyone, features = distributed.gather(indices), distributed.gather(first_view.features)
        beliefs = distributed.gather(first_view.logits.softmax(dim=1))
        is_finite = features.isfinite().all(dim=1) & beliefs.isfinite().all(dim=1)
        is_kept = first_rows(everyone) & is_finite
        # What must not be kept goes to the last row, which is cleared below.
        places = everyone.where(is_kept, len(state["seen"]) - 1)
        is_new = (state["seen"][places] == PADDING)[:, None]
        moved = torch.lerp(beliefs, state["beliefs"][places], self.momentum)
        labels = torch.where(is_new, distributed.gather(given), state["labels"][places])
        state["beliefs"].index_copy_(0, places, torch.where(is_new, beliefs, moved))
        state["features"].index_copy_(0, places, features)
        state["labels"].index_copy_(0, places, labels)
        state["seen"].index_copy_(0, places, everyone)
        _clear_last_row(state)
        mean = features.where(is_kept[:, None], 0.0).sum(dim=0) / is_kept.sum().clamp(min=1)
        _follow_(state["center"], mean, is_kept.any())

    def _relabel(self, indices: Tensor, labels: Tensor, state: Mapping[str, Tensor]) -> None:
        everyone = distributed.gather(indices)
        places = everyone.where(first_rows(everyone), len(state["seen"]) - 1)
        state["labels"].index_copy_(0, places, distributed.gather(labels))
        _clear_last_row(state)


def _checked_teacher(
    outputs: Outputs, batch: Batch, state: Mapping[str, Tensor], phase: str
) -> Outputs:
    """The teacher of the batch, if all arguments fit: nothing is written before an error."""
    check_outputs(outputs, batch)
    if phase not in ("labels", "neighbors"):
        raise ValueError(
            f"phase must be what objective.phase(epoch, state) returns, got {phase!r}."
        )
    if batch.teacher is None:
        raise ValueError(
            "teacher must be the outputs of an averaged network, got None. Use "
            "Batch(teacher=...) or, in an experiment, averaging= and self_taught=True."
        )
    check_place(state, outputs)
    if "seen" not in state or state["beliefs"].shape[1] != outputs.logits.shape[1]:
        raise ValueError(
            f"state must hold beliefs of {outputs.logits.shape[1]} classes. "
            "Use objective.init_state(num_examples, num_classes, num_features)."
        )
    expected = (len(batch.indices), state["features"].shape[1])
    if batch.teacher.features.shape != expected:
        raise ValueError(
            f"features of the teacher must be {expected} like the state, "
            f"got {tuple(batch.teacher.features.shape)}."
        )
    check_indices(batch.indices, len(state["seen"]) - 1)
    return batch.teacher


def _follow_(average: Tensor, value: Tensor, is_known: Tensor) -> None:
    """Move a running average a little toward the value, where there is one."""
    average += (1 - _SLOWNESS) * (value - average) * is_known


def _clear_last_row(state: Mapping[str, Tensor]) -> None:
    for name in ("beliefs", "features", "labels"):
        state[name][-1].zero_()
    state["seen"][-1].fill_(PADDING)


def _blended(targets: Tensor, batch: Batch) -> Tensor:
    """(V·B, C) targets, mixed as the images were."""
    if batch.mix is None:
        return targets
    share = upcast(batch.mix.weight)[:, None]
    if distributed.num_processes() == 1:
        partners = targets[batch.mix.partners]
    else:
        partners = _targets_of(batch.mix.partner_indices, targets, batch.indices)
    return share * targets + (1 - share) * partners


def _targets_of(wanted: Tensor, targets: Tensor, indices: Tensor) -> Tensor:
    """The targets of these examples, on whichever process they are; 0 for padding."""
    everyone, rows = distributed.gather(indices), distributed.gather(targets)
    # A stable sort, so that an example in several rows is its first row.
    order = everyone.argsort(stable=True)
    places = torch.searchsorted(everyone[order], wanted.contiguous()).clamp(max=len(order) - 1)
    places = order[places]
    is_there = (everyone[places] == wanted) & (wanted != PADDING)
    return rows[places].where(is_there[:, None], 0.0)
