"""Pieces of HTML from plain values, and the template that makes them one page."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nearsay._version import __version__
from nearsay.training.progress import plain


class Section(NamedTuple):
    """A part of the page."""

    heading: str
    html: Markup


def fill(
    title: str, sections: Sequence[Section], *, source: str, style: str = "", script: str = ""
) -> str:
    """The page of these parts; the browser runs only `script`, because its hash is in the page."""
    environment = Environment(
        loader=PackageLoader("nearsay.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    # The policy of the page allows one script, by its hash, so that no text can become another.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"; script-src 'sha256-{digest}'" if script else ""
    return environment.get_template("page.html").render(
        title=plain(title),
        sections=sections,
        source=source,
        version=__version__,
        style=Markup(style),
        script=Markup(script),
        allowed=Markup(allowed),
    )


def joined(pieces: Iterable[str], between: str = "") -> Markup:
    """One piece after the other; a piece that is not HTML already is escaped."""
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
    """A table that scrolls in a narrow window; the first `num_names` columns are left-aligned."""
    lines = []
    for row in rows:
        cells = [Markup('<th scope="row">{}</th>').format(row[0])]
        for text in row[1:num_names]:
            cells.append(Markup("<td>{}</td>").format(text))
        for text in row[num_names:]:
            cells.append(Markup('<td class="number">{}</td>').format(text))
        lines.append(Markup("<tr>{}</tr>").format(joined(cells)))
    heads = []
    for text in header[:num_names]:
        heads.append(Markup('<th scope="col">{}</th>').format(text))
    for text in header[num_names:]:
        heads.append(Markup('<th scope="col" class="number">{}</th>').format(text))
    return scrolling(caption, Markup("<tr>{}</tr>").format(joined(heads)), joined(lines))


def scrolling(caption: str, head: Markup, body: Markup, *, style: str = "") -> Markup:
    """A table of ready rows below its caption, in a box that scrolls."""
    kind = Markup(' class="{}"').format(style) if style else ""
    return Markup(
        '<figure><figcaption>{}</figcaption><div class="scroll" tabindex="0">'
        "<table{}><thead>{}</thead><tbody>{}</tbody></table></div></figure>"
    ).format(caption, kind, head, body)


def figure(drawing: Markup, caption: str, *, label: str, heading: str = "") -> Markup:
    """A chart between its heading and its caption; screen readers read `label` instead of it."""
    above = Markup("<h3>{}</h3>").format(heading) if heading else ""
    return Markup(
        '<figure>{}<div class="chart" role="img" aria-label="{}">{}</div>'
        "<figcaption>{}</figcaption></figure>"
    ).format(above, label, drawing, caption)


def panels(figures: Iterable[Markup]) -> Markup:
    """Figures beside each other, as many as there is room for."""
    return Markup('<div class="panels">{}</div>').format(joined(figures))


def terms(pairs: Iterable[tuple[str, str]]) -> Markup:
    """A list of terms and what they stand for."""
    items = [Markup("<dt>{}</dt><dd>{}</dd>").format(term, text) for term, text in pairs]
    return Markup("<dl>{}</dl>").format(joined(items))
