"""The comparison in a few sentences, with the numbers they rest on."""

from markupsafe import Markup

from nearsay.report.comparison import Comparison, judges_differ, split_text
from nearsay.report.groups import Group, Spread
from nearsay.report.markup import Section, joined, paragraph, strong, terms
from nearsay.training.progress import counted

METHODS = {  # for readers who do not know their names
    "standard": "plain training with cross-entropy, which believes every label",
    "ncr": "Neighbor Consistency Regularization: examples with similar features are pulled to similar predictions, so "
    "that neighbors outvote a wrong label",
    "elr": "Early-Learning Regularization: what the network predicted early in training keeps counting later",
    "gjs": "generalized Jensen–Shannon loss: predictions for two views of an image should agree, with each other and "
    "with the label",
    "bootstrap": "Bootstrapping: the label is mixed with what the network itself predicts",
    "label-smoothing": "label smoothing: a part of each label is spread over all classes",
    "mixup": "mixup: pairs of images and their labels are blended",
}


def summary(comparison: Comparison) -> Section:
    """Who ends higher, by how much and how surely; then what became of the wrong labels; then the methods in words."""
    ranked = _ranked(comparison)
    pieces = [_accuracy(comparison, ranked), _wrong_labels(comparison, ranked)]
    words = list(dict.fromkeys(part for group in comparison.groups for part in _parts(group)))
    known = [(part, METHODS[part]) for part in words if part in METHODS]
    return Section(
        "In short",
        joined([*(paragraph(piece) for piece in pieces), *([terms(known)] if known else [])]),
    )


def _accuracy(comparison: Comparison, ranked: list[tuple[Group, Spread]]) -> Markup:
    if not ranked:
        return Markup("None of these runs was judged on a test or validation set.")
    (best, high), (lowest, low) = ranked[0], ranked[-1]
    place = split_text(comparison)
    spreads = [each for _, each in ranked]
    has_means = any(each.num > 1 for each in spreads)
    runs = f"mean ± standard deviation over {_num_runs(spreads)}" if has_means else "one run"
    if len(ranked) == 1:
        return Markup("On the {}, {} ends at {} accuracy ({}).").format(
            place, strong(best.name), strong(percent(high)), runs
        )
    second, after = ranked[1]
    if len(ranked) == 2:
        text = Markup("On the {}, {} ends at {} accuracy and {} at {} ({}). ").format(
            place,
            strong(best.name),
            strong(percent(high)),
            strong(second.name),
            strong(percent(after)),
            runs,
        )
    else:
        text = Markup(
            "On the {}, {} ends highest at {} accuracy, {} follows at {}, and {} ends lowest at {} ({}). "
        )
        text = text.format(
            place,
            strong(best.name),
            strong(percent(high)),
            strong(second.name),
            strong(percent(after)),
            strong(lowest.name),
            strong(percent(low)),
            runs,
        )
    text += _difference(comparison, best, second)
    if judges_differ((run for group, _ in ranked for run in group.runs), comparison.split):
        text += (
            " The runs were judged by different labels, which makes cleaned ones look better: "
            "nearsay evaluate with --data judges them by the same."
        )
    return text


def _difference(comparison: Comparison, best: Group, second: Group) -> Markup:
    """By how much the best is ahead of the next, and whether that could be chance."""
    path = ("accuracy", comparison.split or "", "final")
    high, low = best.numbers(*path), second.numbers(*path)
    points = 100 * (sum(high) / len(high) - sum(low) / len(low))
    if len(high) == len(low) == 1:
        chance = "with one run each, that may be chance."
    elif min(high) > max(low):
        chance = f"every run of {best.name} ends above every run of {second.name}."
    else:
        chance = "the runs of the two overlap, so that may be chance."
    return Markup("The difference between {} and {} is {}; {}").format(
        best.name, second.name, strong(f"{points:.1f} percentage points"), chance
    )


def _wrong_labels(comparison: Comparison, ranked: list[tuple[Group, Spread]]) -> Markup:
    """What is predicted for training examples whose label is wrong."""
    groups = list(dict.fromkeys(each for each, _ in (ranked[:1] + ranked[-1:]))) or list(
        comparison.groups[:2]
    )
    told = [
        (
            group,
            group.spread("memorization", "memorized"),
            group.spread("memorization", "corrected"),
        )
        for group in groups
    ]
    told_known = [
        (group.name, wrong, right)
        for group, wrong, right in told
        if wrong is not None and right is not None
    ]
    rates = [rate.mean for group in groups if (rate := group.spread("labels", "effective_rate"))]
    if rates and max(rates) == 0:
        return Markup("As far as is known, none of the training labels is wrong.")
    if not rates:
        return Markup(
            "Which training labels are wrong is not known here, so what became of them cannot be said."
        )
    low, high = (f"{100 * rate:.0f}" for rate in (min(rates), max(rates)))
    share = f"{low} %" if low == high else f"{low} to {high} %"
    if not told_known:
        return Markup(
            "Of the training labels, {} are wrong. Nothing was trained on a wrong one whose true class is one of the "
            "classes, so what became of them cannot be said."
        ).format(share)
    pieces = [
        Markup("{} repeats the wrong label for {} of them and gives the true class for {}").format(
            strong(name), strong(percent(wrong)), strong(percent(right))
        )
        for name, wrong, right in told_known
    ]
    return Markup("Of the training labels, {} are wrong. After training, {}.").format(
        share, joined(pieces, "; ")
    )


def percent(value: Spread) -> str:
    """Such as "95.1 ± 0.4 %"."""
    return f"{value.text(1, 100)} %"


def _ranked(comparison: Comparison) -> list[tuple[Group, Spread]]:
    """Groups by the mean of their final accuracy, the highest first."""
    found = [
        (group, group.spread("accuracy", comparison.split or "", "final"))
        for group in comparison.groups
    ]
    return sorted(
        [(group, each) for group, each in found if each is not None], key=lambda pair: -pair[1].mean
    )


def _num_runs(spreads: list[Spread]) -> str:
    numbers = sorted({each.num for each in spreads})
    if len(spreads) == 1:
        return counted(numbers[0], "run")
    return (
        f"{counted(numbers[0], 'run')} each"
        if len(numbers) == 1
        else f"{numbers[0]} to {numbers[-1]} runs each"
    )


def _parts(group: Group) -> list[str]:
    return group.first().method().split("+")
