"""The audit: from labels and what is known about them to scores, noise rate and suggestions.

The score of a label is the mean of two numbers from 0 to 1, or the one that is available:

- training: the mean of the label's mean probability and of the logistic of its mean margin;
- views: the mean margin between the label and the best other class, over the views. The views are
  the probabilities, the vote of the k nearest neighbors, and label propagation. In the last two
  only those labels vote that a first round, in which all labels vote, found trustworthy.

The probability that a label is wrong follows from its score: the share of views that reject it,
smoothed so that it falls with the score, and raised to a power so that its mean is the noise rate.

The noise rate depends on what is known:

- If the mean margins over training form two groups that are not the classes themselves, it is the
  mean of two sizes of the lower group, but at least the first: the share below the best cut (which
  misses wrong labels that were learned), and the share of the lower of two normal distributions
  (which includes hard examples). The groups are ignored if neighbors accept half of the lower one,
  as happens if classes overlap or training was short.
- Otherwise it is the share that the views together reject. It is too low if the views learned the
  labels. After a training, it is the share that neighbors reject while all labels vote, if that is
  smaller and the network alone rejects more, because a network that has learned little rejects
  right labels.

The interval includes 0 if nothing distinguishes a wrong label from a hard example: after a training
without two groups; and without dynamics, if the scores do not form two groups or if there are
probabilities alone. Without dynamics it also includes the share of confident learning and the share
rejected among the surest tenth, because overlapping classes make views reject right labels. Labels
without a score are left out of the estimate, and the interval allows all or none to be wrong.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsay.label_issues import noise_rate
from nearsay.label_issues.duplicates import (
    LEAST_SIDE,
    Thumbnails,
    same_pictures,
    shrink,
    typicality_score,
)
from nearsay.label_issues.inputs import Dynamics, Inputs, read_images, read_inputs
from nearsay.label_issues.noise_rate import NoiseRate, bimodal_threshold, own_and_best_other
from nearsay.label_issues.result import Audit, Suggested
from nearsay.label_issues.scores import (
    Evidence,
    connected_components,
    density_score,
    gather_evidence,
    length_score,
    votes,
)
from nearsay.label_propagation import propagate_over_graph
from nearsay.neighbors import Neighbors
from nearsay.validation import check_whole

# Neighbors, at most; the command has the same limit.
_MOST = 1000
# Numbers in memory at a time.
_CHUNK = 2**22
# Probability of a label that the network has learned.
_LEARNED = 0.8
# A margin that leaves no doubt.
_CLEAR = 100.0
# The least belief in all classes together, in equal shares, since no view excludes a class.
_LEAST = 0.1


class _Views(NamedTuple):
    """What each view believes about the true classes."""

    beliefs: dict[str, Tensor]  # (N, C) distributions; zeros where the view is silent
    margins: dict[str, Tensor]  # (N,) margins of the given labels, from 0 to 1; NaN where unknown


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
    """Find the labels that are probably wrong, from whatever is known about the examples.

    Arrays may be of numpy or torch, lists, or columns and tables of pandas or polars. At least one
    of probabilities, features and dynamics is needed; more of them give a better result.

    >>> import nearsay
    >>> features = [[1, 0], [1, 0.1], [1, 0.2], [1, 0.3], [0, 1], [0.1, 1], [0.2, 1], [0.3, 1]]
    >>> labels = ["cat", "cat", "dog", "cat", "dog", "dog", "dog", "dog"]
    >>> result = nearsay.audit(labels, features=features, k=3)
    >>> result
    <Audit of 8 labels in 2 classes: 1 seem wrong, noise rate 0.125 from 0.000 to 0.504>
    >>> result.is_issue.nonzero().flatten().tolist()
    [2]
    >>> result.classes[result.suggested.labels[2]]
    'cat'

    Args:
        labels: (N,) class numbers or names; −1, None, NaN, masked or an empty name for unlabeled.
        probabilities: (N, C) distributions, best of a network that was not trained on the example.
            Columns are in the order of `classes`. Columns of a table that are named after the
            classes may be in any order.
        features: (N, D) numbers in which similar examples are near. Tensors on an accelerator are
            searched there.
        dynamics: (N,) arrays `confidence` and `margin`: means over training of the probability of
            the given label, and of its logit minus the largest other logit. An optional `count` is
            0 for examples without training.
        classes: names of the classes. The default is the labels that occur, sorted. If the names
            are numbers, labels are these numbers, like `classes_` of scikit-learn.
        k: number of neighbors, at most 1000.
        approximate: whether to search with an index; by default from 200 000 rows on a CPU.
        images: (N, 3, H, W) uint8, or thumbnails of them. Then near-duplicates are found in the
            pictures instead of the features, and unusual pictures lower `ood_scores`.

    Returns:
        An `Audit`, with one score for each label.

    Raises:
        ValueError: if an array does not fit; the message names it.
    """
    if check_whole("k", k, 1) > _MOST:
        raise ValueError(f"k must be {_MOST} or less, got {k}.")
    inputs = read_inputs(labels, probabilities, features, dynamics, classes)
    inputs = _without_rivals(inputs)
    pictures = _read_pictures(images, len(inputs.labels))
    evidence, graph = None, None
    if inputs.features is not None:
        evidence, graph = gather_evidence(inputs.features, k, approximate)
        if pictures is not None:
            pairs = same_pictures(pictures)
            groups = connected_components(len(inputs.labels), *pairs.T)
            evidence = evidence._replace(groups=groups)
    in_training = None if inputs.dynamics is None else _training_score(inputs)

    # In the first round all labels vote, in the second those that the first one trusts.
    views = first = _make_views(inputs, evidence, torch.ones_like(inputs.labels, dtype=torch.bool))
    scores = _combine(in_training, first, inputs.labels)
    rejects = None
    if evidence is not None:
        is_trusted = _is_trusted(scores, inputs.labels, first, in_training)
        views = _make_views(inputs, evidence, is_trusted, graph)
        scores = _combine(in_training, views, inputs.labels)
        rejects = _rejects(first.beliefs["neighbors"], inputs.labels)

    is_scored = ~scores.isnan()
    threshold = _training_threshold(inputs, views, rejects)
    rate = _estimate_rate(inputs, scores, views, rejects, threshold)
    p_wrong = _wrong_probabilities(inputs, scores, views, threshold, rate.estimate)
    suggested = _suggest(inputs, views, p_wrong, is_scored)
    matrix = None
    if views.beliefs:
        scored = inputs.labels.where(is_scored, -1)
        matrix = noise_rate.noise_matrix(scored, suggested.labels, len(inputs.classes))
    parts = dict(views.margins)
    if in_training is not None:
        parts["training"] = in_training
    return Audit(
        given=inputs.labels,
        classes=inputs.classes,
        scores=scores.nan_to_num(0.5).where(inputs.labels >= 0, torch.nan),
        parts=parts,
        right=1 - p_wrong,
        suggested=suggested,
        is_issue=(inputs.labels >= 0) & (suggested.labels != inputs.labels),
        evidence=evidence,
        ood_scores=_ood_scores(inputs, evidence, pictures),
        noise_rate=rate,
        noise_matrix=matrix,
    )


def belief_margin(beliefs: Tensor, labels: Tensor) -> Tensor:
    """(N,) half of 1 + belief in the label − in the best other; NaN if unlabeled or silent."""
    own, other = own_and_best_other(beliefs, labels)
    margins = (1 + own - other.clamp(min=0)) / 2
    is_known = (labels >= 0) & (beliefs.sum(dim=1) > 0)
    return margins.where(is_known, torch.nan).clamp(0, 1)


def _without_rivals(inputs: Inputs) -> Inputs:
    """With a single class no label can be wrong, so low margins of a training mean nothing."""
    if len(inputs.classes) > 1 or inputs.dynamics is None:
        return inputs
    is_known = ~inputs.dynamics.margin.isnan()
    confidence = torch.where(is_known, 1.0, torch.nan)
    margin = torch.where(is_known, _CLEAR, torch.nan)
    return inputs._replace(dynamics=Dynamics(confidence, margin))


def _training_score(inputs: Inputs) -> Tensor:
    """(N,) from 0 to 1; NaN where unlabeled or never trained on."""
    assert inputs.dynamics is not None
    confidence, margin = inputs.dynamics
    return ((confidence + margin.sigmoid()) / 2).where(inputs.labels >= 0, torch.nan)


def _make_views(
    inputs: Inputs, evidence: Evidence | None, is_voter: Tensor, graph: Neighbors | None = None
) -> _Views:
    """The beliefs of all views. Labels propagate only over a graph, from the voters."""
    beliefs = {}
    if inputs.probabilities is not None:
        beliefs["probabilities"] = _informative(inputs.probabilities)
    if evidence is not None:
        num_classes = len(inputs.classes)
        beliefs["neighbors"] = votes(evidence, inputs.labels, is_voter, num_classes)
        trusted = inputs.labels.where(is_voter, -1)
        if graph is not None and (trusted >= 0).any():
            shares = propagate_over_graph(graph, trusted, num_classes).cpu()
            total = shares.sum(dim=1, keepdim=True).clamp(min=1e-30)
            beliefs["propagation"] = (shares / total).float()
        is_labeled = inputs.labels >= 0
        # If all labels differ, no neighbor can confirm a label, so their votes say nothing.
        if len(torch.unique(inputs.labels[is_labeled])) == is_labeled.sum():
            for name in beliefs.keys() - {"probabilities"}:
                beliefs[name] = beliefs[name].masked_fill(is_labeled[:, None], 0.0)
    margins = {}
    for name, belief in beliefs.items():
        margins[name] = belief_margin(belief, inputs.labels)
    return _Views(beliefs, margins)


def _informative(probabilities: Tensor) -> Tensor:
    """(N, C) the probabilities; zeros where all classes are equally likely."""
    is_flat = probabilities.amax(dim=1) == probabilities.amin(dim=1)
    if probabilities.shape[1] == 1 or not is_flat.any():
        return probabilities
    return probabilities.masked_fill(is_flat[:, None], 0.0)


def _combine(in_training: Tensor | None, views: _Views, labels: Tensor) -> Tensor:
    """(N,) scores: the mean of the training score and of the views; NaN where both are unknown."""
    halves = [] if in_training is None else [in_training.float()]
    if views.margins:
        halves.append(torch.stack(list(views.margins.values())).float().nanmean(dim=0))
    return torch.stack(halves).nanmean(dim=0).where(labels >= 0, torch.nan)


def _is_trusted(
    scores: Tensor, labels: Tensor, views: _Views, in_training: Tensor | None
) -> Tensor:
    """(N,) bool: the labels that vote: the upper of two groups of scores, else those above ½.

    Without a training, the lower group counts only if some view rejects most of its labels.
    Otherwise its labels are just rare, and their class would lose all votes.
    """
    threshold = bimodal_threshold(scores, labels)
    if threshold is not None and in_training is None:
        least = torch.stack(list(views.margins.values())).nan_to_num(1.0).amin(dim=0)  # (N,)
        if not least[scores <= threshold].median() < 0.5:
            threshold = None
    return scores > (0.5 if threshold is None else threshold)


def _sum_of(views: _Views) -> Tensor:
    """(N, C) the beliefs of all views together."""
    return sum(views.beliefs.values(), start=torch.zeros(()))


def _is_rejected(views: _Views, labels: Tensor) -> Tensor | None:
    """(N,) bool: the views together believe more in another class; None without views."""
    if not views.beliefs:
        return None
    own, other = own_and_best_other(_sum_of(views), labels)
    return other > own


def _rejects(belief: Tensor, labels: Tensor) -> Tensor:
    """(N,) 1.0 where a view rejects the label, else 0.0; NaN if it is silent or unlabeled."""
    own, other = own_and_best_other(belief, labels)
    is_known = (labels >= 0) & (belief.sum(dim=1) > 0)
    return (other > own).float().where(is_known, torch.nan)


def _training_threshold(inputs: Inputs, views: _Views, rejects: Tensor | None) -> float | None:
    """Where the lower group of the margins over training ends; None without two groups.

    If neighbors accept half of the lower group, it consists of right labels: classes overlap, or
    training was short. Labels that the network has learned count as rejected, because its features
    are then features of the labels.
    """
    if inputs.dynamics is None:
        return None
    margins = inputs.dynamics.margin.where(inputs.labels >= 0, torch.nan)
    threshold = bimodal_threshold(margins, inputs.labels, _is_rejected(views, inputs.labels))
    if threshold is None or rejects is None:
        return threshold
    if inputs.probabilities is not None:
        own, _ = own_and_best_other(inputs.probabilities, inputs.labels)
        rejects = rejects.where(own <= _LEARNED, 1.0)
    return None if rejects[margins <= threshold].nanmean() <= 0.5 else threshold


def _estimate_rate(
    inputs: Inputs, scores: Tensor, views: _Views, rejects: Tensor | None, threshold: float | None
) -> NoiseRate:
    num = int((~scores.isnan()).sum())
    if not num:
        return NoiseRate(math.nan, 0.0, 1.0)
    rate = _rate_of_scored(inputs, scores, views, rejects, threshold)
    return noise_rate.extend_to_all(rate, num / int((inputs.labels >= 0).sum()))


def _rate_of_scored(
    inputs: Inputs, scores: Tensor, views: _Views, rejects: Tensor | None, threshold: float | None
) -> NoiseRate:
    """The noise rate among the labels with a score; there must be at least one."""
    is_scored = ~scores.isnan()
    num = int(is_scored.sum())
    rejected = low = (scores < 0.5)[is_scored].double().mean().item()
    total = is_seen = None
    if views.beliefs:
        total = _sum_of(views)  # (N, C)
        is_seen = is_scored & (total.sum(dim=1) > 0)
        if is_seen.any():
            own, other = own_and_best_other(total, inputs.labels)
            rejected = (other > own)[is_seen].double().mean().item()
    if inputs.dynamics is None:
        others = [low]
        surest = []
        if total is not None and is_seen is not None and is_seen.any():
            beliefs, seen_labels = total[is_seen], inputs.labels[is_seen]
            others.append(noise_rate.confident_share(beliefs, seen_labels))
            surest.append(noise_rate.surest_share(beliefs, seen_labels))
        if inputs.features is None or bimodal_threshold(scores, inputs.labels) is None:
            # Nothing distinguishes wrong labels from hard examples.
            others.append(0.0)
        else:
            others += surest
        return noise_rate.pooled_rate(rejected, others, num)
    if threshold is None:
        rate = _rate_of_one_group(inputs, scores, views, rejected, low)
        if rejects is None:
            return rate
        return rate._replace(estimate=_least_rejected(rejected, inputs, rejects))
    margins = inputs.dynamics.margin.where(is_scored, torch.nan)
    below = (margins <= threshold).sum().item() / max(1, int((~margins.isnan()).sum()))
    lower = noise_rate.mixture_share(margins)
    estimate = (below + max(below, lower)) / 2
    return noise_rate.pooled_rate(estimate, [below, lower, rejected, low], num)


def _rate_of_one_group(
    inputs: Inputs, scores: Tensor, views: _Views, rejected: float, low: float
) -> NoiseRate:
    """The noise rate if the margins over training do not form two groups."""
    assert inputs.dynamics is not None
    # Without a training the score has fewer parts, which would look like a group of its own.
    trained = scores.where(~inputs.dynamics.margin.isnan(), torch.nan)
    end = bimodal_threshold(trained, inputs.labels, _is_rejected(views, inputs.labels))
    others = [low, 0.0]
    # Training may have learned the wrong labels, while the scores still show them.
    if end is not None:
        others.append((trained <= end).sum().item() / int((~trained.isnan()).sum()))
    return noise_rate.pooled_rate(rejected, others, int((~scores.isnan()).sum()))


def _least_rejected(rejected: float, inputs: Inputs, rejects: Tensor) -> float:
    """The share that neighbors reject, if it is the smallest; else `rejected`.

    A network that rejects more labels than neighbors do has learned too little.
    """
    if inputs.probabilities is None:
        return rejected
    by_network = _rejects(inputs.probabilities, inputs.labels).nanmean()
    by_neighbors = rejects.nanmean()
    if by_neighbors < rejected and by_neighbors < by_network:
        return by_neighbors.item()
    return rejected


def _wrong_probabilities(
    inputs: Inputs, scores: Tensor, views: _Views, threshold: float | None, rate: float
) -> Tensor:
    """(N,) float64: how likely each label is wrong; the noise rate without a score."""
    opinions = [_rejects(belief, inputs.labels) for belief in views.beliefs.values()]
    if inputs.dynamics is not None:
        margins = inputs.dynamics.margin
        is_against = (margins <= (0.0 if threshold is None else threshold)).float()
        opinions.append(is_against.where(~margins.isnan(), torch.nan))
    disagreement = torch.stack(opinions).nanmean(dim=0).nan_to_num(0.5)
    usual = 0.5 if math.isnan(rate) else rate
    fitted = noise_rate.decreasing_fit(scores, disagreement)
    p_wrong = noise_rate.raised_to_mean(fitted, usual)
    return p_wrong.where(~scores.isnan() | (inputs.labels < 0), usual)


def _suggest(inputs: Inputs, views: _Views, p_wrong: Tensor, is_scored: Tensor) -> Suggested:
    """The likeliest class of each example. A label without a score stays."""
    likeliest = _likeliest_of_all(inputs, views, p_wrong)
    is_free = is_scored | (inputs.labels < 0)
    probabilities = likeliest.probabilities.where(is_free, (1 - p_wrong).float())
    return Suggested(likeliest.labels.where(is_free, inputs.labels), probabilities)


def _likeliest_of_all(inputs: Inputs, views: _Views, p_wrong: Tensor) -> Suggested:
    labels = inputs.labels
    if not views.beliefs:
        # Training alone shows who is wrong, but not what is right.
        is_kept = (labels >= 0) & (p_wrong <= 0.5)
        probabilities = (1 - p_wrong).where(is_kept, torch.nan)
        return Suggested(labels.where(is_kept, -1), probabilities.float())
    chunks = []
    for rows in torch.split(torch.arange(len(labels)), max(1, _CHUNK // len(inputs.classes))):
        beliefs = [belief[rows] for belief in views.beliefs.values()]
        chunks.append(_likeliest(beliefs, labels[rows], p_wrong[rows]))
    return Suggested(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _likeliest(beliefs: list[Tensor], labels: Tensor, p_wrong: Tensor) -> Suggested:
    """The label with its probability to be right, or another class with a share of the rest."""
    belief = _geometric_mean(beliefs)  # (n, C)
    own = labels.clamp(min=0)[:, None]
    others = belief.scatter(1, own, 0.0)
    others = others / others.sum(dim=1, keepdim=True).clamp(min=1e-30)
    # The label has 1 − p_wrong, the other classes share p_wrong in proportion to the belief.
    labeled = (others * p_wrong[:, None]).scatter(1, own, (1 - p_wrong)[:, None])
    unlabeled = belief / belief.sum(dim=1, keepdim=True)
    most, best = labeled.where((labels >= 0)[:, None], unlabeled).max(dim=1)
    # If another class is equally likely, the label stays.
    best = labels.where((labels >= 0) & (most == 1 - p_wrong), best)
    # Without any view there is no reason to suggest another class.
    is_silent = torch.stack([view.sum(dim=1) == 0 for view in beliefs]).all(dim=0)
    best = best.where(~(is_silent & (best != labels)), -1)
    return Suggested(best, most.where(best >= 0, torch.nan).float())


def _geometric_mean(beliefs: list[Tensor]) -> Tensor:
    """(N, C) float64 geometric mean of the views that are not silent; ones if all are silent.

    The views are not independent, as all use one network, so their product would be far too sure.
    """
    least = _LEAST / beliefs[0].shape[1]
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for belief in beliefs:
        speaks = belief.sum(dim=1, keepdim=True) > 0  # (N, 1)
        total = total + belief.double().clamp(min=least).log().where(speaks, 0.0)
        count = count + speaks
    return (total / count.clamp(min=1)).exp()


def _read_pictures(images: Any, num: int) -> Thumbnails | None:
    """Thumbnails of the images; None also if they are too small to be compared."""
    if images is None:
        return None
    pictures = images if isinstance(images, Thumbnails) else shrink(read_images(images))
    if len(pictures.gray) != num:
        raise ValueError(
            f"images must have one row for each of the {num} labels, got {len(pictures.gray)}."
        )
    return pictures if pictures.gray.shape[1] >= LEAST_SIDE else None


def _ood_scores(
    inputs: Inputs, evidence: Evidence | None, pictures: Thumbnails | None
) -> Tensor | None:
    """(N,) from 0 to 1, low if out of distribution: the product of the available signs.

    The signs are a picture with unusual statistics, far neighbors, and short features, as a network
    responds weakly to what it does not know. Each is 1 for at least half of the examples. Without
    features and pictures the score is the largest probability.
    """
    signs = [] if pictures is None else [typicality_score(pictures)]
    if evidence is not None:
        signs += [density_score(evidence).float(), length_score(evidence)]
    if signs:
        return torch.stack(signs).prod(dim=0)
    return None if inputs.probabilities is None else inputs.probabilities.amax(dim=1).clamp(max=1)
