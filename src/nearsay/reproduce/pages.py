"""A page of HTML that opens anywhere, in the dress of the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from nearsay.report.markup import Section, joined
from nearsay.report.page import fill
from nearsay.training.checkpoints import write_whole

# The name of a line stays where it is while its numbers scroll, and takes no more than a third of a narrow window.
_STYLE = """.grouped { border-collapse: separate; border-spacing: 0; }
.grouped th, .grouped td { border-bottom: 0; min-width: 0; padding: .2rem .7rem .2rem 0; }
.grouped td, .grouped .group { white-space: nowrap; }
.grouped tbody th, .grouped .corner { position: sticky; left: 0; max-width: 14rem; background: var(--paper); }
.grouped .corner { z-index: 1; }
.grouped .first > * { border-top: 1px solid var(--line); }
.grouped thead th { max-width: 8.5rem; text-align: right; }
.grouped thead .corner { text-align: left; }
.grouped thead .group { max-width: none; text-align: center; border-bottom: 1px solid var(--line); }
.grouped .group span { position: sticky; left: 9.5rem; right: .5rem; }
.grouped .source { display: inline-block; color: var(--quiet); font-weight: 400; }
@media screen and (max-width: 45rem) {
  .grouped tbody th, .grouped .corner { min-width: 9rem; max-width: 9rem; padding-right: .5rem; }
}
"""


class Head(NamedTuple):
    """What stands above one column or several."""

    text: str
    num_columns: int


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the sections into the template of the report, in one piece."""
    write_whole(
        path, fill(title, sections, source="the folders of finished runs", style=_STYLE).encode()
    )


def grouped_table(
    caption: str, heads: Sequence[Sequence[Head]], lines: Sequence[tuple[str, str, Sequence[str]]]
) -> Markup:
    """A table of numbers below lines of headings; a line is its name, "" if that of the one above, source and texts."""
    head = joined(_head(number, each, len(heads)) for number, each in enumerate(heads))
    return Markup(
        '<figure><figcaption>{}</figcaption><div class="scroll" tabindex="0"><table class="grouped"><thead>{}</thead>'
        "<tbody>{}</tbody></table></div></figure>"
    ).format(caption, head, joined(_line(*line) for line in lines))


def _head(number: int, heads: Sequence[Head], num_lines: int) -> Markup:
    corner = (
        Markup('<th scope="col" class="corner" rowspan="{}">method</th>').format(num_lines)
        if number == 0
        else ""
    )
    return Markup("<tr>{}{}</tr>").format(corner, joined(map(_head_cell, heads)))


def _head_cell(head: Head) -> Markup:
    if head.num_columns == 1:
        whole = head.text.replace(" %", "\u00a0%").replace(
            "-", "\u2011"
        )  # no line ends within a name or a rate
        return Markup('<th scope="col">{}</th>').format(whole)
    return Markup('<th scope="colgroup" class="group" colspan="{}"><span>{}</span></th>').format(
        head.num_columns, head.text
    )


def _line(name: str, source: str, texts: Sequence[str]) -> Markup:
    numbers = joined(Markup('<td class="number">{}</td>').format(text) for text in texts)
    return Markup('<tr{}><th scope="row">{}<span class="source">{}</span></th>{}</tr>').format(
        Markup(' class="first"') if name else "", f"{name} " if name else "", source, numbers
    )
