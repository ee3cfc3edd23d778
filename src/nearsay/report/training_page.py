"""The page that compares runs: a summary in words, tables, charts, settings and cost.

Each part is a function of the comparison that returns its section, or None if there is nothing to
show. A new part is one more function in `SECTIONS`.
"""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from markupsafe import Markup

from nearsay.report import charts
from nearsay.report.html import (
    Section,
    figure,
    fill,
    joined,
    panels,
    paragraph,
    strong,
    table,
    terms,
)
from nearsay.report.runs import (
    Comparison,
    FinishedRun,
    Group,
    Spread,
    compare,
    distinct,
    judges_differ,
    run_names,
    single,
    source,
    split_text,
)
from nearsay.training.progress import counted

NUM_BINS = 20
MOST_CLASSES = 20  # of a heat map that can still be read
NOTHING = "–"
METHODS = {  # for readers who do not know their names
    "standard": "plain training with cross-entropy, which believes every label",
    "ncr": "Neighbor Consistency Regularization: examples with similar features are pulled to "
    "similar predictions, so that neighbors outvote a wrong label",
    "elr": "Early-Learning Regularization: what the network predicted early in training keeps "
    "counting later",
    "gjs": "generalized Jensen–Shannon loss: predictions for two views of an image should agree, "
    "with each other and with the label",
    "bootstrap": "Bootstrapping: the label is mixed with what the network itself predicts",
    "label-smoothing": "label smoothing: a part of each label is spread over all classes",
    "mixup": "mixup: pairs of images and their labels are blended",
}


class Column(NamedTuple):
    """A number of the results as a column of a table."""

    heading: str
    path: tuple[str, ...]  # where it stands in result.json
    scale: float
    digits: int

    def text(self, value: Spread | None) -> str:
        """The cell that shows the number."""
        return NOTHING if value is None else value.text(self.digits, self.scale)


def render(runs: Sequence[Path], *, title: str, split: str | None = None) -> str:
    """The page as text; see `write_report`."""
    comparison = compare(runs, split)
    sections = []
    for make in SECTIONS:
        section = make(comparison)
        if section is not None:
            sections.append(section)
    return fill(title, sections, source="the folders of finished runs")


def summary(comparison: Comparison) -> Section:
    """Which method ends higher and how surely, what became of wrong labels, what methods are."""
    ranked = _ranked(comparison)
    pieces = [
        paragraph(_accuracy(comparison, ranked)),
        paragraph(_wrong_labels(comparison, ranked)),
    ]
    parts: list[str] = []
    for group in comparison.groups:
        parts += group.first().method().split("+")
    known = [(part, METHODS[part]) for part in dict.fromkeys(parts) if part in METHODS]
    if known:
        pieces.append(terms(known))
    return Section("In short", joined(pieces))


def results(comparison: Comparison) -> Section:
    """Numbers of groups, then of every run, then whatever else runs have recorded."""
    split = comparison.split or ""
    columns = [
        Column("final accuracy (%)", ("accuracy", split, "final"), 100, 2),
        Column("mean of last 10 or fewer (%)", ("accuracy", split, "last_10"), 100, 2),
        Column("memorized (%)", ("memorization", "memorized"), 100, 1),
        Column("corrected (%)", ("memorization", "corrected"), 100, 1),
        Column("AUROC", ("detection", "auroc"), 1, 3),
    ]
    explained = paragraph(
        f"Accuracy is that on the {split_text(comparison)}: final after the last epoch, and the "
        "mean over the last 10 epochs, or over all of a shorter run; no epoch and no seed is "
        "picked.",
        "Memorized and corrected are about training examples whose label is wrong: the share for "
        "which the network predicts that wrong label, and the share for which it predicts the true "
        "class.",
        "AUROC is the chance that the network trusts a wrong label less than a right one: 0.5 is "
        "guessing, 1 perfect.",
    )
    caption = (
        "Groups: mean ± standard deviation over runs that differ only in their seed. "
        f"{source(comparison.groups)}"
    )
    parts = [*_tables(comparison, columns, caption, "Every run."), explained]
    metrics = _metric_columns(comparison)
    if metrics:
        caption = "Further metrics of groups: mean ± standard deviation over seeds."
        parts += _tables(comparison, metrics, caption, "Further metrics of every run.")
    return Section("Results", joined(parts))


def curves(comparison: Comparison) -> Section | None:
    """Accuracy over epochs."""
    key = f"{comparison.split}_accuracy"
    thin: list[charts.Line] = []
    thick: list[charts.Line] = []
    for group in comparison.groups:
        seeds = []
        lines_of_group = []
        for runs in group.by_seed():
            curves_of_seed = list(filter(None, (_points(run, key) for run in runs)))
            for points in curves_of_seed:
                lines_of_group.append(charts.Line(group.name, False, sorted(points.items())))
            if curves_of_seed:
                seeds.append(curves_of_seed)
        # One run is its own mean and needs no thin line.
        if len(lines_of_group) > 1:
            thin += lines_of_group
        means = _mean_curve(seeds)
        if means:
            thick.append(charts.Line(group.name, True, means))
    # Means come last, so that they are drawn above the runs.
    lines = [*thin, *thick]
    if not lines:
        return None
    drawn = {line.name for line in lines}
    names = [group.name for group in comparison.groups if group.name in drawn]
    place = (comparison.split or "").replace("_", " ")
    drawing = charts.curves(lines, names=names, title=f"accuracy on the {place} set (%)")
    caption = (
        f"Accuracy on the {split_text(comparison)}. A thick line is the mean of a group, a thin "
        f"line one run. {source(comparison.groups)}"
    )
    chart = figure(drawing, caption, label="Line chart: accuracy over epochs")
    return Section("Accuracy during training", chart)


def confidence(comparison: Comparison) -> Section:
    """How sure the networks are of the labels they were trained on."""
    drawn = []
    highest = 0.0
    for group in comparison.groups:
        bars, counts = _histograms(group)
        drawn.append((group, bars, counts))
        for histogram in bars:
            highest = max(highest, *histogram.shares)
    # All charts have the same axis, so that they can be compared.
    highest = 10 * math.ceil(highest / 10)
    figures = []
    for group, bars, counts in drawn:
        if bars:
            drawing = charts.histogram(bars, highest=highest)
            label = f"Histogram: confidence in the given label, {group.name}"
            caption = f"{counts}. {source([group])}"
            figures.append(figure(drawing, caption, label=label, heading=group.name))
    text = paragraph(
        "After training, how likely does the network find the label that each training example was "
        "given?",
        "A network that has memorized its labels is sure of all of them; one that has not is "
        "unsure of the wrong ones, and that is how they can be found.",
    )
    return Section("Confidence in the given labels", joined([text, panels(figures)]))


def labels(comparison: Comparison) -> Section | None:
    """What the noise did to the labels, if the truth is known."""
    # Groups that were trained on the same draws of the noise share one heat map.
    by_draws: dict[tuple[str, ...], list[Group]] = {}
    for group in comparison.groups:
        run = group.first()
        if run.labels.clean is not None and len(run.labels.classes) <= MOST_CLASSES:
            draws = tuple(sorted({run.noise.fingerprint for run in group.runs}))
            by_draws.setdefault(draws, []).append(group)
    if not by_draws:
        return None
    are_all = len(by_draws) == 1
    figures = [_heat_map(draws, groups, are_all=are_all) for draws, groups in by_draws.items()]
    text = (
        "Each row is a true class and adds up to 100 %; the diagonal holds the labels that are "
        "right."
    )
    is_shared = are_all and len(comparison.groups) > 1
    same = "All methods were trained on the same labels." if is_shared else ""
    return Section("The labels", joined([paragraph(text, same), panels(figures)]))


def experiment(comparison: Comparison) -> Section:
    """What was run, and how to run it again."""
    parts = []
    details = Markup(
        "<details><summary>every setting of its first run</summary><pre>{}</pre></details>"
    )
    for group in comparison.groups:
        run = group.first()
        pairs = [f"{key}={value}" for key, value in run.arguments.items()]
        command = ["nearsay", "train", run.recipe, *pairs]
        for override in run.overrides:
            command += ["--set", override]
        arguments = [pair for pair in pairs if not pair.startswith("seed=")]
        rows: list[tuple[str, str]] = [
            ("recipe", run.recipe),
            ("arguments", ", ".join(arguments) or "none"),
            ("overrides", ", ".join(run.overrides) or "none"),
            ("seeds", distinct(str(run.seed) for run in group.runs)),
            ("to repeat the first run", Markup("<code>{}</code>").format(shlex.join(command))),
        ]
        tree = json.dumps(run.settings, indent=2, ensure_ascii=False)
        heading = Markup("<h3>{}</h3>").format(group.name)
        parts.append(joined([heading, terms(rows), details.format(tree)]))
    return Section("The experiment", joined(parts))


def cost(comparison: Comparison) -> Section:
    """Time, memory and machine."""
    columns = [
        Column("time of a run (s)", ("seconds",), 1, 1),
        Column("images per second", ("images_per_second",), 1, 0),
        Column("peak memory (GiB)", ("peak_memory_bytes",), 2.0**-30, 2),
    ]
    rows = []
    for group in comparison.groups:
        hardware = distinct(str(run.result.get("hardware", NOTHING)) for run in group.runs)
        versions = distinct(map(_versions, group.runs))
        epochs = distinct(f"{epochs:g}" for epochs in group.numbers("epochs"))
        numbers = [column.text(group.spread(*column.path)) for column in columns]
        rows.append([group.name, hardware, versions, epochs or NOTHING, *numbers])
    header = ("method", "hardware", "versions", "epochs", *(column.heading for column in columns))
    caption = f"Mean ± standard deviation over the runs of a group. {source(comparison.groups)}"
    return Section("Cost", table(caption, header, rows, num_names=3))


def percent(value: Spread) -> str:
    """Such as "95.1 ± 0.4 %"."""
    return f"{value.text(1, 100)} %"


def _ranked(comparison: Comparison) -> list[tuple[Group, Spread]]:
    """Groups by the mean of their final accuracy, the highest first."""
    ranked = []
    for group in comparison.groups:
        accuracy = group.spread("accuracy", comparison.split or "", "final")
        if accuracy is not None:
            ranked.append((group, accuracy))
    return sorted(ranked, key=lambda pair: -pair[1].mean)


def _accuracy(comparison: Comparison, ranked: list[tuple[Group, Spread]]) -> Markup:
    if not ranked:
        return Markup("No run was judged on a test or validation set.")
    place = split_text(comparison)
    spreads = [accuracy for _, accuracy in ranked]
    has_means = any(accuracy.num > 1 for accuracy in spreads)
    runs = f"mean ± standard deviation over {_num_runs(spreads)}" if has_means else "one run"
    # The best, the second and the last; with fewer groups some are the same.
    names = []
    for group, accuracy in (*ranked[:2], ranked[-1]):
        names += [strong(group.name), strong(percent(accuracy))]
    if len(ranked) == 1:
        text = Markup("On the {}, {} ends at {} accuracy ({}).")
        return text.format(place, *names[:2], runs)
    if len(ranked) == 2:
        text = Markup("On the {}, {} ends at {} accuracy and {} at {} ({}). ")
        text = text.format(place, *names[:4], runs)
    else:
        text = Markup(
            "On the {}, {} ends highest at {} accuracy, {} follows at {}, and {} ends lowest at "
            "{} ({}). "
        )
        text = text.format(place, *names, runs)
    text += _difference(comparison, ranked[0][0], ranked[1][0])
    groups = tuple(group for group, _ in ranked)
    if judges_differ(Comparison(groups, None).runs(), comparison.split):
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
    """What is predicted for training examples with a wrong label, by the best and the worst."""
    groups = list(comparison.groups[:2])
    if ranked:
        groups = list(dict.fromkeys([ranked[0][0], ranked[-1][0]]))
    rates, pieces = [], []
    for group in groups:
        rate = group.spread("labels", "effective_rate")
        if rate is not None:
            rates.append(rate.mean)
        memorized = group.spread("memorization", "memorized")
        corrected = group.spread("memorization", "corrected")
        if memorized is not None and corrected is not None:
            text = "{} repeats the wrong label for {} of them and gives the true class for {}"
            numbers = strong(percent(memorized)), strong(percent(corrected))
            pieces.append(Markup(text).format(strong(group.name), *numbers))
    if not rates:
        return Markup(
            "Which training labels are wrong is not known here, so what became of them cannot be "
            "said."
        )
    if max(rates) == 0:
        return Markup("As far as is known, no training label is wrong.")
    low, high = f"{100 * min(rates):.0f}", f"{100 * max(rates):.0f}"
    share = f"{low} %" if low == high else f"{low} to {high} %"
    if not pieces:
        return Markup(
            "Of the training labels, {} are wrong. Nothing was trained on a wrong one whose true "
            "class is one of the classes, so what became of them cannot be said."
        ).format(share)
    return Markup("Of the training labels, {} are wrong. After training, {}.").format(
        share, joined(pieces, "; ")
    )


def _num_runs(spreads: list[Spread]) -> str:
    numbers = sorted({spread.num for spread in spreads})
    if len(spreads) == 1:
        return counted(numbers[0], "run")
    if len(numbers) == 1:
        return f"{counted(numbers[0], 'run')} each"
    return f"{numbers[0]} to {numbers[-1]} runs each"


def _tables(
    comparison: Comparison, columns: Sequence[Column], caption: str, caption_of_runs: str
) -> list[Markup]:
    """A table with a line for each group, and one with a line for each run."""
    names = run_names(comparison)
    by_group, by_run = [], []
    for group in comparison.groups:
        cells = [column.text(group.spread(*column.path)) for column in columns]
        by_group.append([group.name, str(group.num_seeds), *cells])
        for run in group.runs:
            cells = [column.text(single(run, *column.path)) for column in columns]
            by_run.append([names[run.path], group.name, str(run.seed), *cells])
    header = [column.heading for column in columns]
    return [
        table(caption, ("method", "seeds", *header), by_group),
        table(caption_of_runs, ("run", "method", "seed", *header), by_run, num_names=2),
    ]


def _metric_columns(comparison: Comparison) -> list[Column]:
    """A column for each number in the result of a run that no other table shows."""
    metrics: list[tuple[str, ...]] = []
    for run in comparison.runs():
        metrics += run.metrics()
    columns = []
    for path in dict.fromkeys(metrics):
        # metrics, split, name is how another program adds them; name, split is how we do.
        name, *split = (path[2], path[1]) if len(path) == 3 else path
        heading = f"{name} ({split[0].replace('_', ' ')})" if split else name
        columns.append(Column(heading, path, 1, 4))
    return columns


def _points(run: FinishedRun, key: str) -> dict[float, float]:
    return {entry["epoch"]: 100 * entry[key] for entry in run.log if key in entry}


def _mean_curve(seeds: Sequence[Sequence[dict[float, float]]]) -> list[tuple[float, float]]:
    """The mean over seeds, at the epochs that all runs have; repetitions share one vote."""
    if not seeds:
        return []
    shared = set.intersection(*(set(points) for runs in seeds for points in runs))
    means = []
    for epoch in sorted(shared):
        of_seeds = [fmean(points[epoch] for points in runs) for runs in seeds]
        means.append((epoch, fmean(of_seeds)))
    return means


def _histograms(group: Group) -> tuple[list[charts.Histogram], str]:
    """Histograms of right and wrong labels, or of all if the truth is unknown; and their counts."""
    # The runs of a group are pooled; right and wrong are only told apart if all know the truth.
    trust = torch.cat([run.trust for run in group.runs])
    wrongs = [wrong for run in group.runs if (wrong := run.is_wrong()) is not None]
    if len(wrongs) == len(group.runs):
        is_wrong = torch.cat(wrongs)
        kinds = {"right label": trust[~is_wrong], "wrong label": trust[is_wrong]}
    else:
        kinds = {"given label": trust}
    histograms, counts = [], []
    for kind, values in kinds.items():
        known = values[~values.isnan()]
        if len(known):
            shares = 100 * known.histc(NUM_BINS, 0, 1) / len(known)
            histograms.append(charts.Histogram(kind, shares.tolist()))
            counts.append(counted(len(known), kind))
    return histograms, " and ".join(counts)


def _heat_map(draws: Sequence[str], groups: Sequence[Group], *, are_all: bool) -> Markup:
    """The noise of some groups that share their labels, each draw of the noise counted once."""
    # Runs with the same fingerprint learned the same labels, so any of them will do.
    runs = {run.noise.fingerprint: run for run in Comparison(tuple(groups), None).runs()}
    counts = sum((runs[draw].noise.matrix for draw in draws), start=torch.tensor(0))  # (C, C)
    shares = 100 * counts / counts.sum(dim=1, keepdim=True).clamp(min=1)  # (C, C), rows sum to 100
    heading = "" if are_all else distinct(group.name for group in groups)
    num_labels, num_draws = int(counts.sum()), len(draws)
    caption = (
        f"{counted(num_labels, 'training label')} in {counted(num_draws, 'draw')} of the noise"
    )
    num_outside = sum(runs[draw].noise.num_open_set for draw in draws)
    if num_outside:
        caption += f", and {counted(num_outside, 'label')} of examples that belong to no class"
    drawing = charts.heat_map(shares.tolist(), next(iter(runs.values())).labels.classes)
    label = "Heat map: given label by true class"
    return figure(drawing, f"{caption}. {source(groups)}", label=label, heading=heading)


def _versions(run: FinishedRun) -> str:
    versions = run.result.get("versions")
    if not isinstance(versions, dict):
        return NOTHING
    return ", ".join(f"{key} {value}" for key, value in versions.items())


SECTIONS: tuple[Callable[[Comparison], Section | None], ...] = (
    summary,
    results,
    curves,
    confidence,
    labels,
    experiment,
    cost,
)
