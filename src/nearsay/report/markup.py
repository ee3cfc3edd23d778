"""Pieces of HTML from plain values; whatever is not HTML already is escaped."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup


class Section(NamedTuple):
    """A part of the page."""

    heading: str
    html: Markup


def joined(pieces: Iterable[str], between: str = "") -> Markup:
    """One piece after the other."""
    return Markup(between).join(pieces)


def paragraph(*pieces: str) -> Markup:
    """Sentences, each of which may hold markup."""
    return Markup("<p>{}</p>").format(joined(pieces, " "))


def strong(text: str) -> Markup:
    """Text that the eye should find first."""
    return Markup("<strong>{}</strong>").format(text)


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, num_names: int = 1
) -> Markup:
    """A table that scrolls by itself on a narrow window; the first `num_names` columns are text, the others numbers."""

    def cell(column: int, text: str) -> Markup:
        if column == 0:
            return Markup('<th scope="row">{}</th>').format(text)
        return Markup("<td>{}</td>" if column < num_names else '<td class="number">{}</td>').format(
            text
        )

    def head(column: int, text: str) -> Markup:
        return Markup('<th scope="col"{}>{}</th>').format(
            Markup("" if column < num_names else ' class="number"'), text
        )

    def line(row: Sequence[str]) -> Markup:
        return Markup("<tr>{}</tr>").format(
            joined(cell(column, text) for column, text in enumerate(row))
        )

    body = Markup("<thead><tr>{}</tr></thead><tbody>{}</tbody>").format(
        joined(head(column, text) for column, text in enumerate(header)), joined(map(line, rows))
    )
    return Markup(
        '<figure><figcaption>{}</figcaption><div class="scroll" tabindex="0"><table>{}</table></div></figure>'
    ).format(caption, body)


def figure(drawing: Markup, caption: str, *, label: str, heading: str = "") -> Markup:
    """A chart between its heading and its caption; `label` says what it is to those who cannot see it."""
    above = Markup("<h3>{}</h3>").format(heading) if heading else ""
    return Markup(
        '<figure>{}<div class="chart" role="img" aria-label="{}">{}</div><figcaption>{}</figcaption></figure>'
    ).format(above, label, drawing, caption)


def panels(figures: Iterable[Markup]) -> Markup:
    """Figures beside each other, as many as there is room for."""
    return Markup('<div class="panels">{}</div>').format(joined(figures))


def terms(pairs: Iterable[tuple[str, str]]) -> Markup:
    """A list of terms and what they stand for."""
    return Markup("<dl>{}</dl>").format(
        joined(Markup("<dt>{}</dt><dd>{}</dd>").format(term, text) for term, text in pairs)
    )
