"""The page of an audited run: summary, confused classes, histograms, and the examples."""

import math
import shlex
from collections.abc import Callable
from importlib import resources

import torch
from markupsafe import Markup
from torch import Tensor

from nearsay.report import audit_examples, charts, training_page
from nearsay.report.findings import Findings, percent_text
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
from nearsay.report.runs import source
from nearsay.training.progress import counted

NUM_BINS = 20
MOST_CLASSES = 30  # of a heat map that can still be read
MOST_CELLS = 20  # of a matrix that is shown as a list
_CONFUSED = "Which labels are confused"
_CURVES = {
    "test_accuracy": "test set",
    "validation_accuracy": "held-out examples",
    "train_accuracy": "training labels, as given",
}


def render(findings: Findings) -> str:
    """The page as text: a pure function of the findings."""
    sections = []
    for make in SECTIONS:
        section = make(findings)
        if section is not None:
            sections.append(section)
    num_left_out = findings.album.num_left_out
    if num_left_out:
        note = paragraph(
            f"{counted(num_left_out, 'picture')} left out, as decoding so many large files takes "
            "long."
        )
        sections[0] = Section(sections[0].heading, joined([sections[0].html, note]))
    files = resources.files("nearsay.report")
    return fill(
        f"Which labels to distrust: {findings.name}",
        sections,
        source="an audited run; it needs no network",
        style=files.joinpath("audit.css").read_text("utf-8"),
        script=files.joinpath("map.js").read_text("utf-8"),
    )


def overview(findings: Findings) -> Section:
    """How many labels seem wrong, what is confused, how much to review, and what to do next."""
    summary = findings.summary
    rate = summary["noise_rate"]
    num_issues, num_unreadable = summary["num_issues"], summary["num_unreadable"]
    num_examples = counted(summary["num_examples"], "example")
    unreadable = f", {num_unreadable:,} unreadable" if num_unreadable else ""
    span = f"95 % interval {percent_text(rate['low'])} to {percent_text(rate['high'])}"
    num_reviews = summary["review_for_recall"]["0.9"]
    tiles = [
        (f"{summary['num_labeled']:,}", "labels", f"of {num_examples}{unreadable}"),
        (f"{num_issues:,}", "seem wrong", "another label is likelier"),
        (percent_text(rate["estimate"]), "estimated to be wrong", span),
        (f"{num_reviews:,}", "to review", "to find about 90 % of the wrong ones"),
    ]
    boxes = joined(Markup("<li><b>{}</b>{} <span>{}</span></li>").format(*tile) for tile in tiles)
    parts = [Markup('<ul class="tiles">{}</ul>').format(boxes), _in_words(findings)]
    if summary["doubt"]:
        parts.append(paragraph(strong("Beware: "), f"{summary['doubt']}."))
    if findings.problem:
        parts.append(paragraph("Decisions by hand could not be read: ", strong(findings.problem)))
    elif findings.corrections:
        num_decided = counted(len(findings.corrections), "label")
        parts.append(paragraph(f"{num_decided} decided by hand so far."))
    # Without issues and decisions there is nothing to review, and clean would change nothing.
    if num_issues or findings.corrections:
        parts.append(_next_steps(findings))
    return Section("In short", joined(parts))


def curves(findings: Findings) -> Section | None:
    """Accuracy of the run over epochs."""
    run = findings.comparison.groups[0].first()
    lines = []
    for key, name in _CURVES.items():
        points = [(entry["epoch"], 100 * entry[key]) for entry in run.log if key in entry]
        if points:
            lines.append(charts.Line(name, True, points))
    if not lines:
        return None
    drawing = charts.curves(lines, names=[line.name for line in lines], title="accuracy (%)")
    caption = (
        "How often the network is right, as it learns. Where labels are wrong, agreeing less with "
        "the training labels than with a clean test set is a good sign. "
        f"{source(findings.comparison.groups)}"
    )
    chart = figure(drawing, caption, label="Line chart: accuracy over epochs")
    return Section("Accuracy during training", chart)


def histograms(findings: Findings) -> Section:
    """Scores, confidence and neighbors by kind of label."""
    audit = findings.audit
    figures = [
        _histogram(
            findings,
            "Score of the audit",
            "score of the label, × 100 (low is suspicious)",
            audit.scores,
        ),
        _histogram(
            findings,
            "Confidence of the network",
            "confidence in the given label (%)",
            findings.confidence,
        ),
    ]
    if audit.evidence is not None:
        near = audit.evidence.similarities  # (n, K)
        is_same = audit.given[audit.evidence.positions] == audit.given[:, None]  # (n, K)
        total = near.sum(dim=1)
        # The share of similarity that speaks for the given label; NaN without any neighbor.
        share = ((near * is_same).sum(dim=1) / total.clamp(min=1e-12)).where(total > 0, torch.nan)
        similar = f"mean cosine to the {near.shape[1]} nearest, × 100"
        agree = "nearest with the same label, by similarity (%)"
        figures += [
            _histogram(findings, "Similarity to the neighbors", similar, near.mean(dim=1)),
            _histogram(findings, "Agreement of the neighbors", agree, share),
        ]
    known_by = "by what is known to be true"
    if findings.clean is None:
        known_by = "by what the audit says of them"
    text = paragraph(
        f"The labels of all examples, told apart {known_by}.",
        "The further apart the two shapes are, the more easily wrong labels can be found.",
    )
    return Section("How labels are judged", joined([text, panels(filter(None, figures))]))


def matrix(findings: Findings) -> Section | None:
    """Which class is labeled as which."""
    noise = findings.audit.noise_matrix
    if noise is None:
        return None
    classes = [findings.label(number) for number in range(len(noise))]
    if len(classes) <= MOST_CLASSES:
        text = paragraph(
            "Each row holds the examples that seem to be of a class and adds up to 100 %; the "
            "columns are their labels, and the diagonal those that seem right."
        )
        drawing = charts.heat_map((100 * noise).tolist(), classes, rows_title="likely class")
        caption = f"{counted(findings.summary['num_labeled'], 'label')}, as estimated by the audit."
        chart = figure(drawing, caption, label="Heat map: given label by likely class")
        return Section(_CONFUSED, joined([text, panels([chart, _pairs(findings)])]))
    # The diagonal holds the labels that seem right, which are not confused with anything.
    off = (100 * noise).fill_diagonal_(0).flatten()
    rows: list[list[str]] = []
    for cell in off.argsort(descending=True, stable=True)[:MOST_CELLS].tolist():
        if off[cell] > 0:
            row, column = divmod(cell, len(classes))
            # The bars are as long as the shares, and the first share is the largest.
            bar = _bar(off[cell].item() / off.max().item())
            rows.append([classes[row], classes[column], f"{off[cell].item():.1f}", bar])
    if not rows:
        nothing = "None: no example seems to be of another class than its label says."
        return Section(_CONFUSED, paragraph(nothing))
    first = "The largest" if len(rows) == 1 else f"The {len(rows)} largest"
    caption = f"{first} of {len(classes) ** 2 - len(classes):,} ways to be wrong."
    header = ("seems to be", "is labeled", "share of the class (%)", "")
    return Section(_CONFUSED, table(caption, header, rows, num_names=2))


def experiment(findings: Findings) -> Section:
    """What was run, and how to run it again."""
    return training_page.experiment(findings.comparison)


def cost(findings: Findings) -> Section:
    """Time, memory and machine."""
    return training_page.cost(findings.comparison)


def _in_words(findings: Findings) -> Markup:
    summary = findings.summary
    sentences: list[str] = []
    if summary["noise_rate"]["estimate"] is None:
        sentences.append("No label could be judged, so how many are wrong is unknown.")
    elif not summary["num_issues"]:
        sentences.append("No label seems wrong: for each, the given one is the likeliest.")
    else:
        pairs = []
        for given, suggested, num in _confused(findings)[:3]:
            seem = "seems" if num == 1 else "seem"
            text = Markup("{:,} labeled {} that {} to be {}")
            pairs.append(text.format(num, strong(given), seem, strong(suggested)))
        if pairs:
            sentences.append(Markup("Most often confused: {}.").format(joined(pairs, "; ")))
        counts = []
        for recall, num in summary["review_for_recall"].items():
            counts.append(f"{num:,} to find {percent_text(float(recall), 0)}")
        sentences.append(
            f"To review, the most suspicious first: about {', '.join(counts)} of all wrong labels."
        )
    wrong = findings.is_wrong()
    if wrong is not None and summary["detection"]:
        auroc = percent_text(summary["detection"]["score"]["auroc"])
        share = percent_text(wrong[findings.audit.given >= 0].double().mean().item())
        num = int(wrong.sum())
        be = "is" if num == 1 else "are"
        sentences.append(
            f"Here the truth is known: {counted(num, 'label')} ({share}) {be} wrong, and the audit "
            f"ranks a wrong label below a right one in {auroc} of pairs."
        )
    return joined(map(paragraph, sentences))


def _next_steps(findings: Findings) -> Markup:
    """Commands for the folder that holds the run, so that the page is the same everywhere."""
    name = shlex.quote(findings.name)
    steps = {
        f"nearsay review {name}": "go through the suspicious labels and decide, by keyboard",
        f"nearsay clean {name}": "write labels without the wrong ones; nothing of yours is changed",
        f"nearsay train … --set labels_file={name}/cleaned.npz": "train again on them",
    }
    code = Markup("<code>{}</code>")
    heading = Markup("<h3>What to do next, in the folder that holds the run</h3>")
    commands = [(code.format(command), text) for command, text in steps.items()]
    return joined([heading, terms(commands)])


def _histogram(findings: Findings, heading: str, title: str, values: Tensor) -> Markup | None:
    bars, counts, highest = [], [], 0.0
    for kind, mask in findings.kinds().items():
        kept = values[mask]
        kept = kept[~kept.isnan()]
        if len(kept):
            shares = (100 * kept.float().histc(NUM_BINS, 0, 1) / len(kept)).tolist()
            bars.append(charts.Histogram(kind, shares))
            counts.append(counted(len(kept), kind))
            highest = max(highest, *shares)
    if not bars:
        return None
    drawing = charts.histogram(bars, highest=10 * math.ceil(highest / 10), title=title)
    caption = f"{' and '.join(counts)}."
    return figure(drawing, caption, label=f"Histogram: {heading}", heading=heading)


def _confused(findings: Findings) -> list[tuple[str, str, int]]:
    """Given label, suggested label and number of the pairs that are most frequent in the issues."""
    pairs = []
    for pair in findings.summary["most_confused"]:
        names = findings.named(pair["given"]), findings.named(pair["suggested"])
        pairs.append((*names, pair["num_examples"]))
    return pairs


def _pairs(findings: Findings) -> Markup:
    rows = [(given, suggested, f"{num:,}") for given, suggested, num in _confused(findings)]
    if not rows:
        return Markup("")
    header = ("is labeled", "seems to be", "examples")
    return table("Most often confused.", header, rows, num_names=2)


def _bar(share: float) -> Markup:
    return Markup(
        '<svg class="bar" viewBox="0 0 100 10" aria-hidden="true">'
        '<rect width="{}" height="10"/></svg>'
    ).format(round(100 * share, 1))


SECTIONS: tuple[Callable[[Findings], Section | None], ...] = (
    overview,
    audit_examples.gallery,
    audit_examples.atlas,
    matrix,
    histograms,
    audit_examples.duplicates,
    audit_examples.outsiders,
    audit_examples.unreadable,
    curves,
    experiment,
    cost,
)
