"""The first parts of an audit's page: what was found in words, and how the labels are distributed."""

import math
import shlex

import torch
from markupsafe import Markup
from torch import Tensor

from nearsay.report import charts
from nearsay.report.comparison import source
from nearsay.report.findings import Findings, known, percent_text
from nearsay.report.markup import Section, figure, joined, panels, paragraph, strong, table, terms
from nearsay.training.progress import counted

_CONFUSED = "Which labels are confused"
NUM_BINS = 20
MOST_CLASSES = 30  # of a heat map that can still be read
MOST_CELLS = 20  # of a matrix that is told as a list
_CURVES = {
    "test_accuracy": "test set",
    "validation_accuracy": "held-out examples",
    "train_accuracy": "training labels, as given",
}


def overview(findings: Findings) -> Section:
    """How many labels seem wrong, what is confused, how much to review, and what to do next."""
    summary = findings.summary
    rate = summary["noise_rate"]
    num_labeled, num_issues = summary["num_labeled"], summary["num_issues"]
    span = f"95 % interval {percent_text(rate['low'])} to {percent_text(rate['high'])}"
    reviews = summary["review_for_recall"]
    unreadable = f", {summary['num_unreadable']:,} unreadable" if summary["num_unreadable"] else ""
    tiles = [
        (
            "labels",
            f"{num_labeled:,}",
            f"of {counted(summary['num_examples'], 'example')}{unreadable}",
        ),
        ("seem wrong", f"{num_issues:,}", "another label is likelier"),
        ("estimated to be wrong", percent_text(rate["estimate"]), span),
        ("to review", f"{reviews['0.9']:,}", "to find about 90 % of the wrong ones"),
    ]
    boxes = joined(
        Markup("<li><b>{}</b>{} <span>{}</span></li>").format(n, name, text)
        for name, n, text in tiles
    )
    parts = [Markup('<ul class="tiles">{}</ul>').format(boxes), _in_words(findings)]
    if doubt := summary["doubt"]:
        parts.append(paragraph(strong("Beware: "), f"{doubt}."))
    if findings.problem:
        parts.append(paragraph("Decisions by hand could not be read: ", strong(findings.problem)))
    elif findings.corrections:
        parts.append(
            paragraph(f"{counted(len(findings.corrections), 'label')} decided by hand so far.")
        )
    if (
        num_issues or findings.corrections
    ):  # else there is nothing to look at, and nothing that clean would change
        parts.append(_next_steps(findings))
    return Section("In short", joined(parts))


def curves(findings: Findings) -> Section | None:
    """Accuracy of the run over epochs."""
    run = findings.comparison.groups[0].runs[0]
    lines = [
        charts.Line(name, True, points)
        for key, name in _CURVES.items()
        if (points := [(entry["epoch"], 100 * entry[key]) for entry in run.log if key in entry])
    ]
    if not lines:
        return None
    drawing = charts.curves(lines, names=[line.name for line in lines], title="accuracy (%)")
    caption = (
        "How often the network is right, as it learns. Where labels are wrong, agreeing less with the training labels "
        f"than with a clean test set is a good sign. {source(findings.comparison.groups)}"
    )
    return Section(
        "Accuracy during training",
        figure(drawing, caption, label="Line chart: accuracy over epochs"),
    )


def histograms(findings: Findings) -> Section:
    """Scores, confidence and neighbors by kind of label."""
    audit = findings.audit
    judged: list[tuple[str, str, Tensor]] = [
        ("Score of the audit", "score of the label, × 100 (low is suspicious)", audit.scores),
        ("Confidence of the network", "confidence in the given label (%)", findings.confidence),
    ]
    if audit.evidence is not None:
        near = audit.evidence.similarities  # (n, K)
        is_same = audit.given[audit.evidence.positions] == audit.given[:, None]
        total = near.sum(dim=1)
        share = ((near * is_same).sum(dim=1) / total.clamp(min=1e-12)).where(total > 0, torch.nan)
        judged += [
            (
                "Similarity to the neighbors",
                f"mean cosine to the {near.shape[1]} nearest, × 100",
                near.mean(dim=1),
            ),
            ("Agreement of the neighbors", "nearest with the same label, by similarity (%)", share),
        ]
    kinds = findings.kinds()
    figures = []
    for heading, title, values in judged:
        groups = {kind: kept for kind, mask in kinds.items() if len(kept := known(values[mask]))}
        drawn = [
            charts.Histogram(kind, (100 * kept.float().histc(NUM_BINS, 0, 1) / len(kept)).tolist())
            for kind, kept in groups.items()
        ]
        if drawn:
            highest = 10 * math.ceil(max(share for each in drawn for share in each.shares) / 10)
            caption = " and ".join(counted(len(kept), kind) for kind, kept in groups.items()) + "."
            drawing = charts.histogram(drawn, highest=highest, title=title)
            figures.append(figure(drawing, caption, label=f"Histogram: {heading}", heading=heading))
    known_by = (
        "by what is known to be true"
        if findings.clean is not None
        else "by what the audit says of them"
    )
    text = paragraph(
        f"The labels of all examples, told apart {known_by}.",
        "The further apart the two shapes are, the more easily wrong labels can be found.",
    )
    return Section("How labels are judged", joined([text, panels(figures)]))


def matrix(findings: Findings) -> Section | None:
    """Which class is labeled as which."""
    found = findings.audit.noise_matrix
    if found is None:
        return None
    classes = [findings.label(number) for number in range(len(found))]
    if len(classes) <= MOST_CLASSES:
        text = (
            "Each row holds the examples that seem to be of a class and adds up to 100 %; the columns are their "
            "labels, and the diagonal those that seem right."
        )
        drawing = charts.heat_map((100 * found).tolist(), classes, rows_title="likely class")
        caption = f"{counted(findings.summary['num_labeled'], 'label')}, as estimated by the audit."
        drawn = figure(drawing, caption, label="Heat map: given label by likely class")
        return Section(_CONFUSED, joined([paragraph(text), panels([drawn, _pairs(findings)])]))
    off = (100 * found).fill_diagonal_(0).flatten()
    largest = [
        cell
        for cell in off.argsort(descending=True, stable=True)[:MOST_CELLS].tolist()
        if off[cell] > 0
    ]
    shares = off[largest].tolist()
    rows = [
        [
            classes[cell // len(classes)],
            classes[cell % len(classes)],
            f"{share:.1f}",
            _bar(share / shares[0]),
        ]
        for cell, share in zip(largest, shares, strict=True)
    ]
    if not rows:
        return Section(
            _CONFUSED,
            paragraph("None: no example seems to be of another class than its label says."),
        )
    first = "The largest" if len(rows) == 1 else f"The {len(rows)} largest"
    caption = f"{first} of {len(classes) ** 2 - len(classes):,} ways to be wrong."
    header = ("seems to be", "is labeled", "share of the class (%)", "")
    return Section(_CONFUSED, table(caption, header, rows, num_names=2))


def _confused(findings: Findings) -> list[tuple[str, str, int]]:
    """Given and suggested label of the pairs that occur most often among the issues, and how often they do."""
    return [
        (findings.named(each["given"]), findings.named(each["suggested"]), each["num_examples"])
        for each in findings.summary["most_confused"]
    ]


def _pairs(findings: Findings) -> Markup:
    rows = [(given, suggested, f"{num:,}") for given, suggested, num in _confused(findings)]
    if not rows:
        return Markup("")
    return table(
        "Most often confused.", ("is labeled", "seems to be", "examples"), rows, num_names=2
    )


def _in_words(findings: Findings) -> Markup:
    summary = findings.summary
    num_issues, reviews = summary["num_issues"], summary["review_for_recall"]
    if summary["noise_rate"]["estimate"] is None:
        sentences: list[str] = ["No label could be judged, so how many are wrong is unknown."]
    elif not num_issues:
        sentences = ["No label seems wrong: for each, the given one is the likeliest."]
    else:
        pairs = [
            Markup("{:,} labeled {} that {} to be {}").format(
                num, strong(given), "seems" if num == 1 else "seem", strong(suggested)
            )
            for given, suggested, num in _confused(findings)[:3]
        ]
        sentences = (
            [Markup("Most often confused: {}.").format(joined(pairs, "; "))] if pairs else []
        )
        counts = ", ".join(
            f"{num:,} to find {percent_text(float(recall), 0)}" for recall, num in reviews.items()
        )
        sentences.append(
            f"To review, the most suspicious first: about {counts} of all wrong labels."
        )
    wrong = findings.is_wrong()
    if wrong is not None and summary["detection"]:
        auroc = summary["detection"]["score"]["auroc"]
        share = percent_text(wrong[findings.audit.given >= 0].double().mean().item())
        num = int(wrong.sum())
        sentences.append(
            f"Here the truth is known: {counted(num, 'label')} ({share}) {'is' if num == 1 else 'are'} wrong, and the "
            f"audit ranks a wrong label below a right one in {percent_text(auroc)} of pairs."
        )
    return joined(map(paragraph, sentences))


def _next_steps(findings: Findings) -> Markup:
    """Commands that work where the run folder lies, so that the page says the same wherever that is."""
    name = shlex.quote(findings.name)
    steps = [
        (f"nearsay review {name}", "go through the suspicious labels and decide, by keyboard"),
        (
            f"nearsay clean {name}",
            "write labels without the wrong ones; nothing of yours is changed",
        ),
        (f"nearsay train … --set relabeled={name}/cleaned.npz", "train again on them"),
    ]
    code = Markup("<code>{}</code>")
    heading = Markup("<h3>What to do next, in the folder that holds the run</h3>")
    return joined([heading, terms([(code.format(command), text) for command, text in steps])])


def _bar(share: float) -> Markup:
    return Markup(
        '<svg class="bar" viewBox="0 0 100 10" aria-hidden="true"><rect width="{}" height="10"/></svg>'
    ).format(round(100 * share, 1))
