"""The parts of the page, each a function of the comparison: heading and HTML, or None where there is nothing to show.

A new part is one more function in `SECTIONS`.
"""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from markupsafe import Markup

from nearsay.report import charts
from nearsay.report.comparison import Comparison, distinct, run_names, source, split_text
from nearsay.report.folders import FinishedRun
from nearsay.report.groups import Group, Spread, single
from nearsay.report.markup import Section, figure, joined, panels, paragraph, table, terms
from nearsay.report.summary import summary
from nearsay.training.progress import counted

NUM_BINS = 20
MOST_CLASSES = 20  # of a heat map that can still be read
NOTHING = "–"


class Column(NamedTuple):
    """A number of the results as a column of a table."""

    heading: str
    path: tuple[str, ...]  # where it stands in result.json
    scale: float
    digits: int

    def text(self, value: Spread | None) -> str:
        """The cell that shows the number."""
        return NOTHING if value is None else value.text(self.digits, self.scale)


def results(comparison: Comparison) -> Section:
    """Numbers of groups, then of every run."""
    groups, split = comparison
    columns = [
        Column("final accuracy (%)", ("accuracy", split or "", "final"), 100, 2),
        Column("mean of last 10 or fewer (%)", ("accuracy", split or "", "last_10"), 100, 2),
        Column("memorized (%)", ("memorization", "memorized"), 100, 1),
        Column("corrected (%)", ("memorization", "corrected"), 100, 1),
        Column("AUROC", ("detection", "auroc"), 1, 3),
    ]
    header, names = [column.heading for column in columns], run_names(comparison)
    by_group = [
        [
            group.name,
            str(group.num_seeds),
            *(column.text(group.spread(*column.path)) for column in columns),
        ]
        for group in groups
    ]
    by_run = [
        [
            names[run.path],
            group.name,
            str(run.seed),
            *(column.text(single(run, *column.path)) for column in columns),
        ]
        for group in groups
        for run in group.runs
    ]
    explained = paragraph(
        f"Accuracy is that on the {split_text(comparison)}: final after the last epoch, and the mean over the last 10 "
        "epochs, or over all of a shorter run; no epoch and no seed is picked.",
        "Memorized and corrected are about training examples whose label is wrong: the share for which the network "
        "predicts that wrong label, and the share for which it predicts the true class.",
        "AUROC is the chance that the network trusts a wrong label less than a right one: 0.5 is guessing, 1 perfect.",
    )
    caption = f"Groups: mean ± standard deviation over runs that differ only in their seed. {source(groups)}"
    return Section(
        "Results",
        joined(
            [
                table(caption, ("method", "seeds", *header), by_group),
                table("Every run.", ("run", "method", "seed", *header), by_run, num_names=2),
                explained,
            ]
        ),
    )


def curves(comparison: Comparison) -> Section | None:
    """Accuracy over epochs."""
    groups, split = comparison
    key = f"{split}_accuracy"
    lines: list[charts.Line] = []
    for group in groups:
        seeds = [
            [points for run in runs if (points := _points(run, key))] for runs in group.by_seed()
        ]
        seeds = [each for each in seeds if each]
        runs = [points for each in seeds for points in each]
        if len(runs) > 1:
            lines += [charts.Line(group.name, False, sorted(points.items())) for points in runs]
        shared = sorted(set.intersection(*map(set, runs))) if runs else []
        means = [
            (epoch, fmean(fmean(points[epoch] for points in each) for each in seeds))
            for epoch in shared
        ]
        if means:
            lines.append(charts.Line(group.name, True, means))
    if not lines:
        return None
    lines.sort(key=lambda line: line.is_mean)  # means are drawn above the runs
    in_order = [group.name for group in groups if any(line.name == group.name for line in lines)]
    drawing = charts.curves(
        lines, names=in_order, title=f"accuracy on the {(split or '').replace('_', ' ')} set (%)"
    )
    caption = (
        f"Accuracy on the {split_text(comparison)}. A thick line is the mean of a group, a thin line one run. "
        f"{source(groups)}"
    )
    return Section(
        "Accuracy during training",
        figure(drawing, caption, label="Line chart: accuracy over epochs"),
    )


def _points(run: FinishedRun, key: str) -> dict[float, float]:
    return {entry["epoch"]: 100 * entry[key] for entry in run.log if key in entry}


def confidence(comparison: Comparison) -> Section:
    """How sure the networks are of the labels they were trained on."""
    drawn = [(group, *_histograms(group)) for group in comparison.groups]
    shares = [share for _, histograms, _ in drawn for each in histograms for share in each.shares]
    highest = 10 * math.ceil(max(shares, default=100) / 10)
    figures = [
        figure(
            charts.histogram(histograms, highest=highest),
            f"{counts}. {source([group])}",
            label=f"Histogram: confidence in the given label, {group.name}",
            heading=group.name,
        )
        for group, histograms, counts in drawn
        if histograms
    ]
    text = paragraph(
        "After training, how likely does the network find the label that each training example was given?",
        "A network that has memorized its labels is sure of all of them; one that has not is unsure of the wrong ones, "
        "and that is how they can be found.",
    )
    return Section("Confidence in the given labels", joined([text, panels(figures)]))


def labels(comparison: Comparison) -> Section | None:
    """What the noise did to the labels, where the truth is known."""
    shown: dict[tuple[str, ...], list[Group]] = {}
    for group in comparison.groups:
        run = group.first()
        if run.labels.clean is not None and len(run.labels.classes) <= MOST_CLASSES:
            draws = tuple(sorted({run.noise.fingerprint for run in group.runs}))
            shown.setdefault(draws, []).append(group)
    if not shown:
        return None
    figures = [_heat_map(draws, groups, are_all=len(shown) == 1) for draws, groups in shown.items()]
    text = "Each row is a true class and adds up to 100 %; the diagonal holds the labels that are right."
    same = (
        "All methods were trained on the same labels."
        if len(shown) == 1 and len(comparison.groups) > 1
        else ""
    )
    return Section("The labels", joined([paragraph(text, same), panels(figures)]))


def experiment(comparison: Comparison) -> Section:
    """What was run, and how to run it again."""
    parts = []
    for group in comparison.groups:
        run = group.first()
        sets = [word for each in run.overrides for word in ("--set", each)]
        pairs = [f"{key}={value}" for key, value in run.arguments.items()]
        command = shlex.join(["nearsay", "train", run.recipe, *pairs, *sets])
        rows: list[tuple[str, str]] = [
            ("recipe", run.recipe),
            (
                "arguments",
                ", ".join(pair for pair in pairs if not pair.startswith("seed=")) or "none",
            ),
            ("overrides", ", ".join(run.overrides) or "none"),
            ("seeds", distinct(str(run.seed) for run in group.runs)),
            ("to repeat the first run", Markup("<code>{}</code>").format(command)),
        ]
        tree = json.dumps(run.settings, indent=2, ensure_ascii=False)
        details = Markup(
            "<details><summary>every setting of its first run</summary><pre>{}</pre></details>"
        )
        parts.append(
            Markup("<h3>{}</h3>{}{}").format(group.name, terms(rows), details.format(tree))
        )
    return Section("The experiment", joined(parts))


def cost(comparison: Comparison) -> Section:
    """Time, memory and machine."""
    columns = [
        Column("time of a run (s)", ("seconds",), 1, 1),
        Column("images per second", ("images_per_second",), 1, 0),
        Column("peak memory (GiB)", ("peak_memory_bytes",), 2.0**-30, 2),
    ]
    rows = [
        [
            group.name,
            distinct(str(run.result.get("hardware", NOTHING)) for run in group.runs),
            distinct(_versions(run) for run in group.runs),
            distinct(f"{epochs:g}" for epochs in group.numbers("epochs")) or NOTHING,
            *(column.text(group.spread(*column.path)) for column in columns),
        ]
        for group in comparison.groups
    ]
    header = ("method", "hardware", "versions", "epochs", *(column.heading for column in columns))
    caption = f"Mean ± standard deviation over the runs of a group. {source(comparison.groups)}"
    return Section("Cost", table(caption, header, rows, num_names=3))


def _histograms(group: Group) -> tuple[list[charts.Histogram], str]:
    """Right and wrong labels apart where the truth of all runs is known, and how many there are of each."""
    trust = torch.cat([run.trust for run in group.runs])
    wrongs = [wrong for run in group.runs if (wrong := run.is_wrong()) is not None]
    if len(wrongs) == len(group.runs):
        is_wrong = torch.cat(wrongs)
        kinds = {"right label": trust[~is_wrong], "wrong label": trust[is_wrong]}
    else:
        kinds = {"given label": trust}
    kinds = {kind: kept for kind, values in kinds.items() if len(kept := values[~values.isnan()])}
    histograms = [
        charts.Histogram(kind, (100 * values.histc(NUM_BINS, 0, 1) / len(values)).tolist())
        for kind, values in kinds.items()
    ]
    return histograms, " and ".join(counted(len(values), kind) for kind, values in kinds.items())


def _heat_map(draws: Sequence[str], groups: Sequence[Group], *, are_all: bool) -> Markup:
    """The noise of some groups that share their labels, each draw of the noise counted once."""
    runs = {run.noise.fingerprint: run for group in groups for run in group.runs}
    counts = sum((runs[draw].noise.matrix for draw in draws), start=torch.tensor(0))  # (C, C)
    shares = 100 * counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    heading = "" if are_all else distinct(group.name for group in groups)
    size = f"{counted(int(counts.sum()), 'training label')} in {counted(len(draws), 'draw')} of the noise"
    num_outside = sum(runs[draw].noise.num_open_set for draw in draws)
    outside = (
        f", and {counted(num_outside, 'label')} of examples that belong to no class"
        if num_outside
        else ""
    )
    caption = f"{size}{outside}. {source(groups)}"
    classes = next(iter(runs.values())).labels.classes
    drawing = charts.heat_map(shares.tolist(), classes)
    return figure(drawing, caption, label="Heat map: given label by true class", heading=heading)


def _versions(run: FinishedRun) -> str:
    versions = run.result.get("versions")
    return (
        ", ".join(f"{key} {value}" for key, value in versions.items())
        if isinstance(versions, dict)
        else NOTHING
    )


SECTIONS: tuple[Callable[[Comparison], Section | None], ...] = (
    summary,
    results,
    curves,
    confidence,
    labels,
    experiment,
    cost,
)
