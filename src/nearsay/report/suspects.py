"""The parts of an audit's page that show examples: suspicious ones, near-duplicates, outsiders, unreadable ones."""

from collections.abc import Sequence

from markupsafe import Markup

from nearsay.batch import Files
from nearsay.data.images import why_unreadable
from nearsay.report.findings import UNNAMED, Findings, percent_text, picture, score_text
from nearsay.report.markup import Section, joined, paragraph, table
from nearsay.training.progress import counted, plain

MOST_SUSPECTS = 100
_NUM_NEIGHBORS = 5
_MOST_GROUPS = 24
_MOST_MEMBERS = 8
_MOST_OUTSIDERS = 24
_MOST_UNREADABLE = 100


def gallery(findings: Findings) -> Section:
    """The most suspicious labels, each with the evidence."""
    suspects = findings.suspects()
    shown = suspects[:MOST_SUSPECTS].tolist()
    if not shown:
        return Section("The most suspicious labels", paragraph("There are none."))
    are_all = len(shown) == len(suspects)
    text = paragraph(
        f"{'' if are_all else f'The first {len(shown):,} of '}{counted(len(suspects), 'suspicious label')}; the lowest "
        "score is the most suspicious. Below each are its nearest examples with their labels and similarities (%).",
        "Those that carry the suggested label have a solid frame, those that carry the given one a dashed one.",
        "" if are_all else "The other suspicious labels are in audit.csv of the run.",
    )
    cards = joined(
        _card(findings, position, number) for number, position in enumerate(shown, start=1)
    )
    return Section(
        "The most suspicious labels",
        joined([text, Markup('<ol class="cards">{}</ol>').format(cards)]),
    )


def duplicates(findings: Findings) -> Section | None:
    """Groups of near-duplicates, those whose labels differ first."""
    groups = findings.audit.duplicate_groups
    if groups is None or not (groups >= 0).any():
        return None
    members: dict[int, list[int]] = {}
    for position in (groups >= 0).nonzero()[:, 0].tolist():
        members.setdefault(int(groups[position]), []).append(position)
    ranked = sorted(members.values(), key=lambda group: not _differ(findings, group))
    num_mixed = sum(_differ(findings, group) for group in ranked)
    text = paragraph(
        f"{counted(len(ranked), 'group')} of examples that are nearly the same; in {num_mixed:,} of them the labels "
        "differ.",
        f"The first {_MOST_GROUPS} are shown, those that differ first."
        if len(ranked) > _MOST_GROUPS
        else "",
    )
    rows = joined(_group(findings, group) for group in ranked[:_MOST_GROUPS])
    return Section(
        "Near-duplicates", joined([text, Markup('<ul class="groups">{}</ul>').format(rows)])
    )


def outsiders(findings: Findings) -> Section | None:
    """Examples that are like nothing else."""
    scores = findings.audit.ood_scores
    if scores is None or not len(scores):
        return None
    order = scores.argsort(stable=True)[:_MOST_OUTSIDERS].tolist()
    text = paragraph(
        "Examples that are least like all others: perhaps of none of the classes. The number says how near their "
        "neighbors are, 1 for as near as is usual, low for far away."
    )
    given = findings.audit.given.tolist()
    items = joined(
        _example(findings, position, given[position], score_text(scores[position].item()))
        for position in order
    )
    return Section(
        "Least like the others", joined([text, Markup('<ul class="row">{}</ul>').format(items)])
    )


def unreadable(findings: Findings) -> Section | None:
    """Files that are no images, and why."""
    if not findings.unreadable:
        return None
    shown = list(findings.unreadable.items())[:_MOST_UNREADABLE]
    rows = [
        (f"{index}", findings.file(index) or "–", plain(label) or UNNAMED, _reason(findings, index))
        for index, label in shown
    ]
    caption = (
        f"Could not be read, and so not judged: {counted(len(findings.unreadable), 'example')}."
    )
    if len(shown) < len(findings.unreadable):
        caption += f" The first {len(shown)}."
    return Section(
        "Unreadable files",
        table(caption, ("number", "file", "given label", "why"), rows, num_names=4),
    )


def _card(findings: Findings, position: int, number: int) -> Markup:
    audit, index = findings.audit, int(findings.indices[position])
    given, suggested = int(audit.given[position]), int(audit.suggested.labels[position])
    probability = percent_text(audit.suggested.probabilities[position].item())
    details = [Markup('<dt>given</dt><dd class="given">{}</dd>').format(findings.label(given))]
    if suggested >= 0:
        name = findings.label(suggested)
        details.append(
            Markup('<dt>seems</dt><dd class="seems">{} <span>{}</span></dd>').format(
                name, probability
            )
        )
    if findings.clean is not None:
        truth = int(findings.clean[position])
        name = findings.label(truth) if truth >= 0 else "none of the classes"
        details.append(Markup("<dt>truth</dt><dd>{}</dd>").format(name))
    if (decided := findings.by_hand(index)) is not None:
        details.append(Markup('<dt>by hand</dt><dd class="seems">{}</dd>').format(decided))
    details.append(
        Markup("<dt>score</dt><dd>{}</dd>").format(score_text(audit.scores[position].item()))
    )
    return Markup(
        '<li class="card"><div class="who">{}<dl>{}</dl></div>{}<p class="name">{}. example {}{}</p></li>'
    ).format(
        picture(findings, index, f"example {index}, labeled {findings.label(given)}"),
        joined(details),
        _neighbors(findings, position, given, suggested),
        number,
        index,
        f": {file}" if (file := findings.file(index)) else "",
    )


def _neighbors(findings: Findings, position: int, given: int, suggested: int) -> Markup:
    evidence = findings.audit.evidence
    if evidence is None:
        return Markup("")
    items = []
    near = zip(
        evidence.positions[position].tolist(), evidence.similarities[position].tolist(), strict=True
    )
    for other, similarity in list(near)[:_NUM_NEIGHBORS]:
        if similarity <= 0:
            continue
        label, index = int(findings.audit.given[other]), int(findings.indices[other])
        name = findings.label(label)
        kind = "for" if label == suggested else "against" if label == given else ""
        items.append(
            Markup('<li class="{}">{}<b title="{}">{}</b><span>{:.0f}</span></li>').format(
                kind,
                picture(findings, index, f"neighbor {index}", is_small=True),
                name,
                name,
                100 * similarity,
            )
        )
    return Markup('<ul class="near" aria-label="nearest examples">{}</ul>').format(joined(items))


def _differ(findings: Findings, group: Sequence[int]) -> bool:
    """Whether two of a group carry different labels; to carry none is not to differ."""
    return len(set(findings.audit.given[list(group)].tolist()) - {-1}) > 1


def _group(findings: Findings, group: Sequence[int]) -> Markup:
    given = findings.audit.given.tolist()
    items = [
        _example(findings, position, given[position], "") for position in group[:_MOST_MEMBERS]
    ]
    if len(group) > _MOST_MEMBERS:
        items.append(Markup("<li>and {} more</li>").format(len(group) - _MOST_MEMBERS))
    found = {given[position] for position in group}
    if _differ(findings, group):
        note: str = Markup("<b>labels differ</b>")
    elif -1 in found:
        note = UNNAMED if len(found) == 1 else "same label, where there is one"
    else:
        note = "same label"
    return Markup('<li><p>{}</p><ul class="row">{}</ul></li>').format(note, joined(items))


def _example(findings: Findings, position: int, label: int, text: str) -> Markup:
    index, name = int(findings.indices[position]), findings.label(label)
    file = findings.file(index) or f"#{index}"
    return Markup(
        '<li>{}<b title="{}">{}</b><span>{}</span><span class="name" title="{}">{}</span></li>'
    ).format(
        picture(findings, index, f"example {index}"),
        name,
        name,
        text,
        file,
        file.rpartition("/")[2] or file,
    )


def _reason(findings: Findings, index: int) -> str:
    """Why a file cannot be read, asked of the file itself."""
    if not isinstance(findings.inputs, Files):
        return "not known any more"
    return (
        plain(why_unreadable(findings.inputs, index))
        or "can be read now; train again to have it judged"
    )
