"""The parts of an audit's page that show examples: cards, rows of small pictures and the map."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from nearsay import rng
from nearsay.batch import Files
from nearsay.data.images import why_unreadable
from nearsay.report.findings import UNNAMED, Findings, percent_text, score_text
from nearsay.report.html import Section, joined, paragraph, table
from nearsay.training.progress import counted, plain

MOST_SUSPECTS = 100
_NUM_NEIGHBORS = 5
_MOST_GROUPS = 24
_MOST_MEMBERS = 8
_MOST_OUTSIDERS = 24
_MOST_UNREADABLE = 100

MOST_POINTS = 3000  # of the map: what a page can show and a minute can place
_SUSPECT_SHARE = 3  # one point of so many may be shown because it is suspicious
_COMPONENTS = 50  # that the features are reduced to first
_PERPLEXITY = 30.0
_STEPS = 500


def gallery(findings: Findings) -> Section:
    """The most suspicious labels, each with the evidence."""
    heading = "The most suspicious labels"
    suspects = findings.suspects()
    shown = suspects[:MOST_SUSPECTS].tolist()
    if not shown:
        return Section(heading, paragraph("There are none."))
    first, elsewhere = "", ""
    if len(shown) < len(suspects):
        first = f"The first {len(shown):,} of "
        elsewhere = "The other suspicious labels are in audit.csv of the run."
    text = paragraph(
        f"{first}{counted(len(suspects), 'suspicious label')}; the lowest score is the most "
        "suspicious. Below each are its nearest examples with their labels and similarities (%).",
        "Those that carry the suggested label have a solid frame, those that carry the given one a "
        "dashed one.",
        elsewhere,
    )
    cards = []
    for number, position in enumerate(shown, start=1):
        cards.append(_card(findings, position, number))
    return Section(
        heading, joined([text, Markup('<ol class="cards">{}</ol>').format(joined(cards))])
    )


def duplicates(findings: Findings) -> Section | None:
    """Groups of near-duplicates; those with different labels come first."""
    groups = findings.audit.duplicate_groups
    if groups is None or not (groups >= 0).any():
        return None
    members: dict[int, list[int]] = {}
    for position in (groups >= 0).nonzero()[:, 0].tolist():
        members.setdefault(int(groups[position]), []).append(position)
    ranked = sorted(members.values(), key=lambda group: not _differ(findings, group))
    num_mixed = sum(_differ(findings, group) for group in ranked)
    shown = ""
    if len(ranked) > _MOST_GROUPS:
        shown = f"The first {_MOST_GROUPS} are shown, those that differ first."
    text = paragraph(
        f"{counted(len(ranked), 'group')} of examples that are nearly the same; in {num_mixed:,} "
        "of them the labels differ.",
        shown,
    )
    rows = joined(_group(findings, group) for group in ranked[:_MOST_GROUPS])
    html = joined([text, Markup('<ul class="groups">{}</ul>').format(rows)])
    return Section("Near-duplicates", html)


def outsiders(findings: Findings) -> Section | None:
    """Examples that are unlike all others."""
    # Low scores are far from all neighbors, and lists start with them.
    scores = findings.audit.ood_scores
    if scores is None or not len(scores):
        return None
    text = paragraph(
        "Examples that are least like all others: perhaps of no known class. The number says how "
        "near their neighbors are, 1 for as near as is usual, low for far away."
    )
    given = findings.audit.given.tolist()
    items = []
    for position in scores.argsort(stable=True)[:_MOST_OUTSIDERS].tolist():
        score = score_text(scores[position].item())
        items.append(_example(findings, position, given[position], score))
    html = joined([text, Markup('<ul class="row">{}</ul>').format(joined(items))])
    return Section("Least like the others", html)


def unreadable(findings: Findings) -> Section | None:
    """Files that are not images, and why."""
    num = len(findings.unreadable)
    if not num:
        return None
    rows = []
    for index, label in list(findings.unreadable.items())[:_MOST_UNREADABLE]:
        file = findings.file(index) or "–"
        rows.append((f"{index}", file, plain(label) or UNNAMED, _reason(findings, index)))
    caption = f"Could not be read, and so not judged: {counted(num, 'example')}."
    if len(rows) < num:
        caption += f" The first {len(rows)}."
    header = ("number", "file", "given label", "why")
    return Section("Unreadable files", table(caption, header, rows, num_names=4))


def atlas(findings: Findings) -> Section:
    """All examples, or a part of them, as points on a map of the features."""
    heading = "Map of the examples"
    num_examples = len(findings.indices)
    chosen = choose_points(findings.suspects(), num_examples)
    if not len(chosen):
        return Section(heading, paragraph("There is nothing to show."))
    num_issues = int(findings.audit.is_issue[chosen].sum())
    which = counted(len(chosen), "example")
    if len(chosen) < num_examples:
        which = (
            f"{len(chosen):,} of {counted(num_examples, 'example')}: of the suspicious ones the "
            "first, of the others a random draw"
        )
    have = "has" if num_issues == 1 else "have"
    caption = (
        f"{which}; {num_issues:,} {have} a suspicious label. Features as t-SNE places them (of "
        "their first 50 principal components, with a fixed seed): what is near is similar, but "
        "distances between far groups, and their sizes, mean little."
    )
    text = paragraph(
        "A dot is an example, its color the label it was given. A diamond with an outline is "
        "suspicious: among dots of another color it is probably mislabeled.",
        "Point at it, tap it, or move with the arrow keys to see what it is.",
    )
    # It is safe as Markup: the JSON escapes every <, so that no text in it can end the element.
    data = Markup(_json(_points(findings, chosen)))
    return Section(heading, joined([text, Markup(_MAP).format(caption=caption, data=data)]))


def choose_points(suspects: Tensor, num: int) -> Tensor:
    """Positions on the map, in order: the first suspects, and a fixed draw of all others."""
    first = suspects[: MOST_POINTS // _SUSPECT_SHARE]
    is_other = torch.ones(num, dtype=torch.bool)
    is_other[first] = False
    others = is_other.nonzero()[:, 0]
    drawn = others[rng.shuffle(0, "report map", 0, others)[: MOST_POINTS - len(first)]]
    return torch.cat([first, drawn]).sort().values


def place(features: Tensor, chosen: Tensor) -> Tensor:
    """(n, 2) from 0 to 1: places for the chosen rows of the (N, D) features, similar ones near.

    It takes principal components of their directions, then t-SNE. t-SNE starts from the first two
    components and uses one thread, so that the same features give the same map.
    """
    directions = torch.nn.functional.normalize(features[chosen].double(), dim=1)
    directions = directions - directions.mean(dim=0)
    values, axes = torch.linalg.eigh(directions.T @ directions / max(1, len(directions)))
    # eigh sorts upward, so the last columns are the main components.
    kept = axes[:, -_COMPONENTS:].flip(1)  # (D, ≤ 50)
    # The sign of an eigenvector is arbitrary: make its largest entry positive.
    kept = kept * kept.gather(0, kept.abs().argmax(dim=0)[None]).sign()
    reduced = directions @ kept  # (n, ≤ 50)
    if reduced.shape[1] == 1:
        reduced = torch.cat([reduced, torch.zeros_like(reduced)], dim=1)
    # t-SNE needs some points that are not all the same.
    if len(chosen) >= 10 and values[-1] > 1e-12:
        reduced = torch.from_numpy(_unfolded(reduced.float().numpy())).double()
    flat = reduced[:, :2] - reduced[:, :2].amin(dim=0)  # (n, 2)
    # One factor for both axes keeps the shape; a single point goes to the middle.
    extent = flat.max() if len(flat) else torch.tensor(0.0)
    return flat / extent if extent > 0 else torch.full_like(flat, 0.5)


def _unfolded(
    reduced: np.ndarray[Any, np.dtype[np.float32]],
) -> np.ndarray[Any, np.dtype[np.float32]]:
    # These take two seconds to import, which only this page should cost.
    from sklearn.manifold import TSNE  # noqa: PLC0415
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415

    # The usual scale of a start from principal components, which scikit-learn recommends.
    start = reduced[:, :2] / max(float(reduced[:, 0].std()), 1e-12) * 1e-4
    with threadpool_limits(limits=1):
        method = TSNE(
            2,
            perplexity=min(_PERPLEXITY, (len(reduced) - 1) / 3),
            init=start,
            max_iter=_STEPS,
            random_state=0,
            n_jobs=1,
        )
        places: np.ndarray[Any, np.dtype[np.float32]] = method.fit_transform(reduced)
    return places


def _points(findings: Findings, chosen: Tensor) -> dict[str, Any]:
    """What the script draws: one list for each property of the points; Any is the type of JSON."""
    audit = findings.audit
    indices = findings.indices[chosen].tolist()
    where = place(findings.features, chosen)
    # Suspicious ones are read first, because the bytes for pictures are limited.
    is_issue = audit.is_issue[chosen]
    order = findings.indices[torch.cat([chosen[is_issue], chosen[~is_issue]])].tolist()
    sheets = findings.album.sheets(order)
    tiles = dict(zip(order, sheets.places, strict=True))
    return {
        "classes": [findings.label(number) for number in range(len(audit.classes))],
        "x": _numbers(where[:, 0], 4),
        "y": _numbers(where[:, 1], 4),
        "given": audit.given[chosen].tolist(),
        "seems": audit.suggested.labels[chosen].tolist(),
        "sure": _numbers(audit.suggested.probabilities[chosen], 3),
        "score": _numbers(audit.scores[chosen], 3),
        "issue": is_issue.long().tolist(),
        "index": indices,
        "file": list(map(findings.file, indices)),
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


def _card(findings: Findings, position: int, number: int) -> Markup:
    audit, index = findings.audit, int(findings.indices[position])
    given, suggested = int(audit.given[position]), int(audit.suggested.labels[position])
    details = [Markup('<dt>given</dt><dd class="given">{}</dd>').format(findings.label(given))]
    if suggested >= 0:
        probability = percent_text(audit.suggested.probabilities[position].item())
        seems = Markup('<dt>seems</dt><dd class="seems">{} <span>{}</span></dd>')
        details.append(seems.format(findings.label(suggested), probability))
    if findings.clean is not None:
        # A true class of −1 is outside the vocabulary.
        truth = int(findings.clean[position])
        name = findings.label(truth) if truth >= 0 else "not one of the classes"
        details.append(Markup("<dt>truth</dt><dd>{}</dd>").format(name))
    decision = findings.by_hand(index)
    if decision is not None:
        details.append(Markup('<dt>by hand</dt><dd class="seems">{}</dd>').format(decision))
    score = score_text(audit.scores[position].item())
    details.append(Markup("<dt>score</dt><dd>{}</dd>").format(score))
    file = findings.file(index)
    name = f": {file}" if file else ""
    return Markup(
        '<li class="card"><div class="who">{}<dl>{}</dl></div>{}'
        '<p class="name">{}. example {}{}</p></li>'
    ).format(
        findings.picture(index, f"example {index}, labeled {findings.label(given)}"),
        joined(details),
        _neighbors(findings, position, given, suggested),
        number,
        index,
        name,
    )


def _neighbors(findings: Findings, position: int, given: int, suggested: int) -> Markup:
    evidence = findings.audit.evidence
    if evidence is None:
        return Markup("")
    item = Markup('<li class="{}">{}<b title="{}">{}</b><span>{:.0f}</span></li>')
    items = []
    positions = evidence.positions[position].tolist()[:_NUM_NEIGHBORS]
    similarities = evidence.similarities[position].tolist()[:_NUM_NEIGHBORS]
    for other, similarity in zip(positions, similarities, strict=True):
        if similarity <= 0:
            continue
        label, index = int(findings.audit.given[other]), int(findings.indices[other])
        # The frame says which label the neighbor speaks for.
        kind = ""
        if label == suggested:
            kind = "for"
        elif label == given:
            kind = "against"
        name = findings.label(label)
        picture = findings.picture(index, f"neighbor {index}", is_small=True)
        items.append(item.format(kind, picture, name, name, 100 * similarity))
    return Markup('<ul class="near" aria-label="nearest examples">{}</ul>').format(joined(items))


def _differ(findings: Findings, group: Sequence[int]) -> bool:
    """Whether two examples of a group carry different labels; no label does not differ."""
    return len(set(findings.audit.given[list(group)].tolist()) - {-1}) > 1


def _group(findings: Findings, group: Sequence[int]) -> Markup:
    given = findings.audit.given.tolist()
    labels = {given[position] for position in group}
    items = []
    for position in group[:_MOST_MEMBERS]:
        items.append(_example(findings, position, given[position], ""))
    if len(group) > _MOST_MEMBERS:
        items.append(Markup("<li>and {} more</li>").format(len(group) - _MOST_MEMBERS))
    if _differ(findings, group):
        note: str = Markup("<b>labels differ</b>")
    elif -1 in labels:
        note = UNNAMED if len(labels) == 1 else "same label, where there is one"
    else:
        note = "same label"
    return Markup('<li><p>{}</p><ul class="row">{}</ul></li>').format(note, joined(items))


def _example(findings: Findings, position: int, label: int, text: str) -> Markup:
    index, name = int(findings.indices[position]), findings.label(label)
    file = findings.file(index) or f"#{index}"
    short = file.rpartition("/")[2] or file
    return Markup(
        '<li>{}<b title="{}">{}</b><span>{}</span><span class="name" title="{}">{}</span></li>'
    ).format(findings.picture(index, f"example {index}"), name, name, text, file, short)


def _reason(findings: Findings, index: int) -> str:
    """Why a file cannot be read, asked of the file itself."""
    if not isinstance(findings.inputs, Files):
        return "not known any more"
    reason = plain(why_unreadable(findings.inputs, index))
    return reason or "can be read now; train again to have it judged"


_MAP = """<figure class="atlas" id="atlas" hidden>
<div class="tools">
<label>Color by <select id="atlas-by"><option value="given">given label</option>\
<option value="seems">suggested label
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
