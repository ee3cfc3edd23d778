"""Labels judged by all that is known of them: give what you have, get what can be said.

The score of a label is the mean of two numbers from 0 to 1, or the one of them that there is:

- what training showed: the mean of the label's mean probability and of the logistic of its mean margin, over training;
- what the finished state shows: the mean margin, over the views that there are, between the label and the best other
  class. The views are the probabilities, the vote of the k nearest, and label propagation. In the last two only those
  labels count that a first round, with the vote of everybody, found trustworthy.

How likely a label is wrong follows from its score: the share of views that disagree with it, smoothed so that it falls
with the score and bent so that its mean is the estimated noise rate. Where the mean margins over training fall into two
heaps that are not the classes themselves, that rate is the mean of two sizes of the lower one: below the best cut,
which misses the wrong labels that were learned, and as a bell curve beside another, which takes hard examples for wrong
ones, but at least the former. Heaps count for nothing where neighbors accept half of the lower one, as they do where
classes overlap or training was short. Otherwise it is the share that the views together reject, which is too low if
they were learned from the labels; after a training, the share that neighbors reject while all of them vote if that is
smaller, and the network alone rejects more, as one that has learned little rejects right labels too. These may as well
be hard examples that are labeled right, so that the interval then begins at none; without dynamics it does so where the
scores do not fall into two heaps, or where there are probabilities alone, as nothing then tells a wrong label from an
error of the classifier, and it holds the share that confident learning finds as well, and the share rejected among the
tenth that the views are surest of, as overlapping classes make them reject right labels elsewhere. Labels of which
nothing is known are left out of the estimate, and the interval allows all or none of them to be wrong.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsay.label_issues import noise_rate
from nearsay.label_issues.duplicates import LEAST_SIDE, Thumbnails, same_pictures, shrink, usualness
from nearsay.label_issues.inputs import Dynamics, Inputs, read_images, read_inputs
from nearsay.label_issues.noise_rate import NoiseRate
from nearsay.label_issues.result import Audit, Suggested
from nearsay.label_issues.scores import (
    Evidence,
    closeness,
    connected,
    fullness,
    gather_evidence,
    votes,
)
from nearsay.label_propagation import spread
from nearsay.neighbors import Neighbors
from nearsay.validation import check_whole

_MOST = 1000  # neighbors; the command says so too
_HELD = 2**22  # numbers that are judged at a time
_SURE = 0.8  # probability of a label that the network has learned
_CLEAR = 100.0  # a margin that leaves no doubt
_LEAST = 0.1  # what a view says at least of all classes together, in equal shares, as none of them is that sure


class _Beliefs(NamedTuple):
    """What each view says of the true classes: (N, C) distributions by name, zeros where it says nothing."""

    views: dict[str, Tensor]
    margins: dict[
        str, Tensor
    ]  # (N,) of the given label over the best other, from 0 to 1; NaN where unknown


@torch.no_grad()
def audit(
    labels: Any,
    *,
    probabilities: Any = None,
    features: Any = None,
    dynamics: Mapping[str, Any] | None = None,
    classes: Sequence[str | int] | None = None,
    k: int = 20,
    approximate: bool | None = None,
    images: Any = None,
) -> Audit:
    """Say which labels to distrust; arrays may be of numpy or torch, lists, or columns and tables of pandas or polars.

    Args:
        labels: (N,) class numbers, or names; −1, None, NaN, masked or an empty name for unlabeled.
        probabilities: (N, C) distributions, best of a network that has not seen the example; the columns are the
            classes in the order of `classes`, by default sorted; those of a table that are named as the classes may
            stand in any order.
        features: (N, D) numbers by which neighbors are found. Tensors on an accelerator are searched there.
        dynamics: (N,) arrays `confidence` and `margin`, means over training of the probability of the given label and
            of its logit less the largest other; `count`, if there, is 0 for an example that was not trained on.
        classes: names of the classes, by default those that occur, sorted. Where they are numbers, so are the labels
            that mean them, as with `classes_` of scikit-learn.
        k: neighbors that are asked, at most 1000; everybody where there are fewer others.
        approximate: whether to find neighbors by an index; by default from 200 000 rows on a CPU.
        images: (N, 3, H, W) uint8, or thumbnails of them: near-duplicates are then seen in the pictures and not in the
            features, which are needed all the same, and so is what is foreign.

    Raises:
        ValueError: for arrays that cannot be meant; the message says which and what would work.
    """
    if check_whole("k", k, 1) > _MOST:
        raise ValueError(
            f"k={k} must be {_MOST} at most: so many are no neighbors, and each pair of them takes time"
        )
    inputs = read_inputs(labels, probabilities, features, dynamics, classes)
    if (
        len(inputs.classes) < 2 and inputs.dynamics is not None
    ):  # there is no other, which low margins would tell of
        known = inputs.dynamics.margin.isnan().logical_not()
        inputs = inputs._replace(
            dynamics=Dynamics(*(torch.where(known, each, torch.nan) for each in (1.0, _CLEAR)))
        )
    pictures = _pictures(images, len(inputs.labels))
    evidence, exact = (
        (None, None)
        if inputs.features is None
        else gather_evidence(inputs.features, k, approximate)
    )
    if evidence is not None and pictures is not None:
        pairs = same_pictures(pictures)
        evidence = evidence._replace(groups=connected(len(inputs.labels), *pairs.T))
    in_training = None if inputs.dynamics is None else _in_training(inputs)
    everybody = _beliefs(inputs, evidence, torch.ones_like(inputs.labels, dtype=torch.bool))
    first = _combined(in_training, everybody, inputs.labels)
    beliefs = everybody
    if evidence is not None:
        is_trusted = _is_trusted(first, inputs.labels, everybody, in_training)
        beliefs = _beliefs(inputs, evidence, is_trusted, exact)
    scores = _combined(in_training, beliefs, inputs.labels)
    is_judged = ~scores.isnan()
    outvoted = None if evidence is None else _outvoted(everybody.views["neighbors"], inputs.labels)
    end = _training_end(inputs, beliefs, outvoted)
    rate = _noise_rate(inputs, scores, beliefs, outvoted, end)
    doubts = _doubts(inputs, scores, beliefs, end, rate.estimate)
    suggested = _suggested(inputs, beliefs, doubts, is_judged)
    judged = inputs.labels.where(is_judged, -1)
    matrix = (
        noise_rate.noise_matrix(judged, suggested.labels, len(inputs.classes))
        if beliefs.views
        else None
    )
    parts = (
        dict(beliefs.margins)
        if in_training is None
        else {**beliefs.margins, "training": in_training}
    )
    return Audit(
        given=inputs.labels,
        classes=inputs.classes,
        scores=scores.nan_to_num(0.5).where(inputs.labels >= 0, torch.nan),
        parts=parts,
        right=1 - doubts,
        suggested=suggested,
        is_issue=(inputs.labels >= 0) & (suggested.labels != inputs.labels),
        evidence=evidence,
        ood_scores=_ood_scores(inputs, evidence, pictures),
        noise_rate=rate,
        noise_matrix=matrix,
    )


def margin(beliefs: Tensor, labels: Tensor) -> Tensor:
    """(N,) half of 1 + belief in the label − in the best other class; NaN where unlabeled or nothing is believed."""
    own, other = noise_rate.own_and_other(beliefs, labels)
    return (
        ((1 + own - other.clamp(min=0)) / 2)
        .where((labels >= 0) & (beliefs.sum(dim=1) > 0), torch.nan)
        .clamp(0, 1)
    )


def _in_training(inputs: Inputs) -> Tensor:
    """(N,) from 0 to 1; NaN where unlabeled or never trained on."""
    assert inputs.dynamics is not None
    confidence, mean_margin = inputs.dynamics
    return ((confidence + mean_margin.sigmoid()) / 2).where(inputs.labels >= 0, torch.nan)


def _beliefs(
    inputs: Inputs, evidence: Evidence | None, is_voter: Tensor, graph: Neighbors | None = None
) -> _Beliefs:
    """What each view believes where only voters tell; labels propagate over a graph, if there is one."""
    views = (
        {} if inputs.probabilities is None else {"probabilities": _telling(inputs.probabilities)}
    )
    if evidence is not None:
        num_classes = len(inputs.classes)
        views["neighbors"] = votes(evidence, inputs.labels, is_voter, num_classes)
        trusted = inputs.labels.where(is_voter, -1)
        if graph is not None and (trusted >= 0).any():
            scores = spread(graph, trusted, num_classes).cpu()
            views["propagation"] = (
                scores / scores.sum(dim=1, keepdim=True).clamp(min=1e-30)
            ).float()
        is_labeled = inputs.labels >= 0
        if (
            len(torch.unique(inputs.labels[is_labeled])) == is_labeled.sum()
        ):  # no neighbor can have one's own
            for name in views.keys() - {"probabilities"}:
                views[name] = views[name].masked_fill(is_labeled[:, None], 0.0)
    return _Beliefs(views, {name: margin(view, inputs.labels) for name, view in views.items()})


def _telling(probabilities: Tensor) -> Tensor:
    """(N, C) the probabilities, and zeros where all classes are equally likely, which says nothing."""
    is_flat = probabilities.amax(dim=1) == probabilities.amin(dim=1)
    is_telling = probabilities.shape[1] == 1 or not is_flat.any()
    return probabilities if is_telling else probabilities.masked_fill(is_flat[:, None], 0.0)


def _combined(in_training: Tensor | None, beliefs: _Beliefs, labels: Tensor) -> Tensor:
    """(N,) scores: the mean of what training and what the views show; NaN where nothing is known or unlabeled."""
    halves = [] if in_training is None else [in_training.float()]
    if beliefs.margins:
        halves.append(torch.stack(list(beliefs.margins.values())).float().nanmean(dim=0))
    return torch.stack(halves).nanmean(dim=0).where(labels >= 0, torch.nan)


def _is_trusted(
    scores: Tensor, labels: Tensor, beliefs: _Beliefs, in_training: Tensor | None
) -> Tensor:
    """(N,) bool: the labels that vote. If the scores fall into two heaps, those of the upper one, else those above ½.

    Without training to tell of them, the lower heap must be of labels that most often lose in some view; or else they
    are merely rare, and their class would be silenced.
    """
    threshold = noise_rate.split(scores, labels)
    if threshold is not None and in_training is None:
        least = torch.stack(list(beliefs.margins.values())).nan_to_num(1.0).amin(dim=0)  # (N,)
        threshold = threshold if least[scores <= threshold].median() < 0.5 else None
    return scores > (0.5 if threshold is None else threshold)


def _is_rejected(beliefs: _Beliefs, labels: Tensor) -> Tensor | None:
    """(N,) bool: the views together believe in another class more; None without views."""
    if not beliefs.views:
        return None
    own, other = noise_rate.own_and_other(
        sum(beliefs.views.values(), start=torch.zeros(())), labels
    )
    return other > own


def _outvoted(view: Tensor, labels: Tensor) -> Tensor:
    """(N,) float: 1 where a view rejects the label, 0 where it does not; NaN where it says nothing or unlabeled."""
    own, other = noise_rate.own_and_other(view, labels)
    return (other > own).float().where((labels >= 0) & (view.sum(dim=1) > 0), torch.nan)


def _training_end(inputs: Inputs, beliefs: _Beliefs, outvoted: Tensor | None) -> float | None:
    """Where the margins over training of wrong labels end; None without them, or unless they fall into two heaps.

    The lower heap is none where neighbors, of whom all vote, accept half of it: where classes overlap, or training was
    short, it is of right labels. What the network has become sure of does not count for it, as features are then of
    labels that were learned by heart.
    """
    if inputs.dynamics is None:
        return None
    margins = inputs.dynamics.margin.where(inputs.labels >= 0, torch.nan)
    end = noise_rate.split(margins, inputs.labels, _is_rejected(beliefs, inputs.labels))
    if end is None or outvoted is None:
        return end
    if inputs.probabilities is not None:
        own, _ = noise_rate.own_and_other(inputs.probabilities, inputs.labels)
        outvoted = outvoted.where(own <= _SURE, 1.0)
    return None if outvoted[margins <= end].nanmean() <= 0.5 else end


def _noise_rate(
    inputs: Inputs,
    scores: Tensor,
    beliefs: _Beliefs,
    outvoted: Tensor | None,
    training_end: float | None,
) -> NoiseRate:
    is_labeled, is_judged = inputs.labels >= 0, ~scores.isnan()
    num = int(is_judged.sum())
    if not num:
        return NoiseRate(math.nan, 0.0, 1.0)
    found = _judged_rate(inputs, scores, beliefs, outvoted, training_end)
    return noise_rate.widened(found, num / int(is_labeled.sum()))


def _judged_rate(
    inputs: Inputs,
    scores: Tensor,
    beliefs: _Beliefs,
    outvoted: Tensor | None,
    training_end: float | None,
) -> NoiseRate:
    """Of the labels that have a score, of which there is one at least."""
    is_judged = ~scores.isnan()
    num = int(is_judged.sum())
    rejected = low = (scores < 0.5)[is_judged].double().mean().item()
    confident, surest = [], []
    if beliefs.views:
        total = sum(beliefs.views.values(), start=torch.zeros(()))  # (N, C)
        is_seen = is_judged & (total.sum(dim=1) > 0)
        if is_seen.any():
            own, other = noise_rate.own_and_other(total, inputs.labels)
            rejected = (other > own)[is_seen].double().mean().item()
            if inputs.dynamics is None:
                confident.append(noise_rate.confident_share(total[is_seen], inputs.labels[is_seen]))
                surest.append(noise_rate.surest_share(total[is_seen], inputs.labels[is_seen]))
    if inputs.dynamics is None:
        others = [low, *confident]
        if inputs.features is None or noise_rate.split(scores, inputs.labels) is None:
            others.append(0.0)  # nothing tells wrong labels from hard examples labeled right
        else:
            others += surest
        return noise_rate.pooled(rejected, others, num)
    if training_end is None:
        trained = scores.where(
            ~inputs.dynamics.margin.isnan(), torch.nan
        )  # of others the views alone make the score
        end = noise_rate.split(trained, inputs.labels, _is_rejected(beliefs, inputs.labels))
        others = [low, 0.0]  # as above
        if end is not None:  # wrong labels may have been learned in training
            others.append((trained <= end).sum().item() / int((~trained.isnan()).sum()))
        found = noise_rate.pooled(rejected, others, num)
        return (
            found
            if outvoted is None
            else found._replace(estimate=_less_rejected(rejected, inputs, outvoted))
        )
    seen = inputs.dynamics.margin.where(is_judged, torch.nan)
    below = (seen <= training_end).sum().item() / max(1, int((~seen.isnan()).sum()))
    lower = noise_rate.mixture_share(seen)
    return noise_rate.pooled((below + max(below, lower)) / 2, [below, lower, rejected, low], num)


def _less_rejected(rejected: float, inputs: Inputs, outvoted: Tensor) -> float:
    """The share that is outvoted, where the network alone rejects more: it has learned little then; else `rejected`."""
    if inputs.probabilities is None:
        return rejected
    by_network, by_neighbors = (
        _outvoted(inputs.probabilities, inputs.labels).nanmean(),
        outvoted.nanmean(),
    )
    return (
        by_neighbors.item() if by_neighbors < rejected and by_neighbors < by_network else rejected
    )


def _doubts(
    inputs: Inputs, scores: Tensor, beliefs: _Beliefs, end: float | None, rate: float
) -> Tensor:
    """(N,) float64 how likely each label is wrong: as any other where nothing is known; NaN where unlabeled."""
    opinions = [_outvoted(view, inputs.labels) for view in beliefs.views.values()]
    if inputs.dynamics is not None:
        seen = inputs.dynamics.margin
        is_against = (seen <= (end if end is not None else 0.0)).float()
        opinions.append(is_against.where(~seen.isnan(), torch.nan))
    disagreement = torch.stack(opinions).nanmean(dim=0).nan_to_num(0.5)
    usual = 0.5 if math.isnan(rate) else rate
    doubts = noise_rate.bent(noise_rate.falling(scores, disagreement), usual)
    return doubts.where(~scores.isnan() | (inputs.labels < 0), usual)


def _together(views: list[Tensor]) -> Tensor:
    """(N, C) float64 what the views say together, their geometric mean; all ones where they are silent.

    They are no independent witnesses, as all go by one network: their product would be far too sure of itself.
    """
    least = _LEAST / views[0].shape[1]
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for view in views:
        speaks = view.sum(dim=1, keepdim=True) > 0
        total = total + view.double().clamp(min=least).log().where(speaks, 0.0)
        count = count + speaks
    return (total / count.clamp(min=1)).exp()


def _suggested(inputs: Inputs, beliefs: _Beliefs, doubts: Tensor, is_judged: Tensor) -> Suggested:
    """The likeliest class of each example: its label as far as that is right, else what the views say together.

    A label of which nothing is known stays.
    """
    found = _likeliest_of_all(inputs, beliefs, doubts)
    is_free = is_judged | (inputs.labels < 0)
    sure = found.probabilities.where(is_free, (1 - doubts).float())
    return Suggested(found.labels.where(is_free, inputs.labels), sure)


def _likeliest_of_all(inputs: Inputs, beliefs: _Beliefs, doubts: Tensor) -> Suggested:
    labels = inputs.labels
    if not beliefs.views:  # it is known who is wrong, but not what is right
        is_kept = (labels >= 0) & (doubts <= 0.5)
        sure = (1 - doubts).where(is_kept, torch.nan)
        return Suggested(labels.where(is_kept, -1), sure.float())
    found = []
    for rows in torch.split(torch.arange(len(labels)), max(1, _HELD // len(inputs.classes))):
        views = [view[rows] for view in beliefs.views.values()]
        found.append(_likeliest(views, labels[rows], doubts[rows]))
    return Suggested(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _likeliest(views: list[Tensor], labels: Tensor, doubts: Tensor) -> Suggested:
    belief = _together(views)
    own = labels.clamp(min=0)[:, None]
    others = belief.scatter(1, own, 0.0)
    others = others / others.sum(dim=1, keepdim=True).clamp(min=1e-30)
    judged = (others * doubts[:, None]).scatter(1, own, (1 - doubts)[:, None])
    free = belief / belief.sum(dim=1, keepdim=True)
    sure, best = judged.where((labels >= 0)[:, None], free).max(dim=1)
    best = labels.where((labels >= 0) & (sure == 1 - doubts), best)  # of equals the label stays
    is_silent = torch.stack([view.sum(dim=1) == 0 for view in views]).all(dim=0)
    best = best.where(~(is_silent & (best != labels)), -1)
    return Suggested(best, sure.where(best >= 0, torch.nan).float())


def _pictures(images: Any, num: int) -> Thumbnails | None:
    """None also for pictures that are too small to be told apart."""
    if images is None:
        return None
    pictures = images if isinstance(images, Thumbnails) else shrink(read_images(images))
    if len(pictures.gray) != num:
        raise ValueError(f"{num} labels but {len(pictures.gray)} images; there must be as many")
    return pictures if pictures.gray.shape[1] >= LEAST_SIDE else None


def _ood_scores(
    inputs: Inputs, evidence: Evidence | None, pictures: Thumbnails | None
) -> Tensor | None:
    """(N,) from 0 to 1, low for what is like nothing else; without features and pictures the largest probability.

    Far from all neighbors, with features shorter than usual (networks say little about what they do not know), or a
    picture with unusual statistics: the product of what is known, each 1 for what is as usual as most.
    """
    signs = [] if pictures is None else [usualness(pictures)]
    if evidence is not None:
        signs += [closeness(evidence).float(), fullness(evidence)]
    if signs:
        return torch.stack(signs).prod(dim=0)
    return None if inputs.probabilities is None else inputs.probabilities.amax(dim=1).clamp(max=1)
