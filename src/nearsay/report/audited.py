"""The page of an audited run: its parts, the map that can be explored, and the one script that lets it."""

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from nearsay.report import overview, suspects
from nearsay.report.findings import Findings
from nearsay.report.mapping import choose_points, place
from nearsay.report.markup import Section, joined, paragraph
from nearsay.report.page import fill
from nearsay.report.sections import cost, experiment
from nearsay.training.progress import counted


def render(findings: Findings) -> str:
    """The page as text: a pure function of what was found."""
    sections = [section for make in SECTIONS if (section := make(findings)) is not None]
    style, script = (
        resources.files("nearsay.report").joinpath(name).read_text("utf-8") for name in FILES
    )
    if findings.album.num_left_out:
        text = f"{counted(findings.album.num_left_out, 'picture')} left out, as decoding so many large files takes long."
        sections[0] = Section(sections[0].heading, joined([sections[0].html, paragraph(text)]))
    return fill(
        f"Which labels to distrust: {findings.name}",
        sections,
        source="an audited run; it needs no network",
        style=style,
        script=script,
    )


def atlas(findings: Findings) -> Section:
    """All examples, or a part of them, as points on a map of the features."""
    chosen = choose_points(findings.suspects(), len(findings.indices))
    if not len(chosen):
        return Section("Map of the examples", paragraph("There is nothing to show."))
    num_issues = int(findings.audit.is_issue[chosen].sum())
    which = (
        f"{counted(len(chosen), 'example')}"
        if len(chosen) == len(findings.indices)
        else f"{len(chosen):,} of {counted(len(findings.indices), 'example')}: of the suspicious ones the first, of "
        "the others a random draw"
    )
    have = "has" if num_issues == 1 else "have"
    caption = (
        f"{which}; {num_issues:,} {have} a suspicious label. Features as t-SNE places them (of their first 50 "
        "principal components, with a fixed seed): what is near is similar, but distances between far groups, and "
        "their sizes, mean little."
    )
    text = paragraph(
        "A dot is an example, its color the label it was given. A diamond with an outline is suspicious: among dots of "
        "another color it is probably mislabeled.",
        "Point at it, tap it, or move with the arrow keys to see what it is.",
    )
    # Markup, as nothing in it can end the element: every < is written as an escape of JSON.
    data = Markup(_json(_points(findings, chosen)))
    return Section(
        "Map of the examples",
        joined([text, Markup(_MAP).format(caption=caption, data=data)]),
    )


def _points(findings: Findings, chosen: Tensor) -> dict[str, Any]:
    """What the script draws and tells, one list for each thing known of the points; Any is the type of JSON."""
    audit = findings.audit
    indices = findings.indices[chosen].tolist()
    where = place(findings.features, chosen)
    # Those that matter most are read before the bytes for pictures are spent.
    order = torch.cat([chosen[audit.is_issue[chosen]], chosen[~audit.is_issue[chosen]]])
    ordered = findings.indices[order].tolist()
    sheets = findings.album.sheets(ordered)
    tiles = dict(zip(ordered, sheets.places, strict=True))
    return {
        "classes": [findings.label(number) for number in range(len(audit.classes))],
        "x": _numbers(where[:, 0], 4),
        "y": _numbers(where[:, 1], 4),
        "given": audit.given[chosen].tolist(),
        "seems": audit.suggested.labels[chosen].tolist(),
        "sure": _numbers(audit.suggested.probabilities[chosen], 3),
        "score": _numbers(audit.scores[chosen], 3),
        "issue": audit.is_issue[chosen].long().tolist(),
        "index": indices,
        "file": [findings.file(index) for index in indices],
        "tile": [tiles[index] for index in indices],
        "sheets": sheets.addresses,
        "side": sheets.side,
        "columns": sheets.columns,
    }


def _numbers(values: Tensor, digits: int) -> list[float | None]:
    return [None if value != value else round(value, digits) for value in values.tolist()]


def _json(value: object) -> str:
    """JSON that can stand in HTML."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _experiment(findings: Findings) -> Section:
    return experiment(findings.comparison)


def _cost(findings: Findings) -> Section:
    return cost(findings.comparison)


FILES = ("audit.css", "map.js")
SECTIONS: tuple[Callable[[Findings], Section | None], ...] = (
    overview.overview,
    suspects.gallery,
    atlas,
    overview.matrix,
    overview.histograms,
    suspects.duplicates,
    suspects.outsiders,
    suspects.unreadable,
    overview.curves,
    _experiment,
    _cost,
)
_MAP = """<figure class="atlas" id="atlas" hidden>
<div class="tools">
<label>Color by <select id="atlas-by"><option value="given">given label</option><option value="seems">suggested label
</option></select></label>
<label>Class <select id="atlas-class"><option value="">all</option></select></label>
<label><input type="checkbox" id="atlas-only"> suspicious only</label>
</div>
<div class="stage"><canvas id="atlas-canvas" tabindex="0" role="application"
 aria-label="Map of the examples; arrow keys move from point to point"></canvas>
<div id="atlas-tip" class="tip" role="status" aria-live="polite" hidden></div></div>
<ul id="atlas-legend" class="legend"></ul>
<figcaption>{caption}</figcaption></figure>
<noscript><p>The map needs scripts; everything else on this page does not.</p></noscript>
<script type="application/json" id="atlas-data">{data}</script>"""
