"""The figures of a reproduction: drawings that stand alone as SVG and PNG, and fit into a page.

In a page colors are names of its style sheet, as in all charts; alone they are what that sheet says for light paper.
Alone they also carry their title and a few lines below it, which in a page stand around them.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import altair
import vl_convert
from markupsafe import Markup

from nearsay.report import charts


class Look(NamedTuple):
    """How one kind is drawn; dashes and fill tell kinds apart where there is no color."""

    color: str
    dashes: Sequence[int]
    fill_opacity: float


RIGHT_PAIRS, WRONG_PAIRS = "both labels right", "one wrong or both"
_PAIRS = {
    "same label": Look(charts.COLORS[0], charts.DASHES[0], 0.25),
    "different labels": Look(charts.COLORS[1], charts.DASHES[1], 0.0),
}
SIMILARITIES = tuple((kind, half) for kind in _PAIRS for half in (RIGHT_PAIRS, WRONG_PAIRS))
LABELS = ("right labels", "wrong labels")
_LABELS = {
    LABELS[0]: Look(charts.KINDS[0], charts.DASHES[0], 0.35),
    LABELS[1]: Look(charts.KINDS[1], charts.DASHES[1], 0.1),
}
_TWO_LINES = r"split(replace(datum.label, / for |, /, '$&\n'), '\n')"  # of vega: of the first of the two only
_LINE_LENGTH = 125  # letters below the title, which is about as wide as four panels


class Drawing(NamedTuple):
    """One chart, for a page and by itself."""

    html: Markup
    svg: str
    png: bytes


class Heading(NamedTuple):
    """What a drawing says of itself where no page does."""

    title: str
    remarks: Sequence[str]  # sentences: the data, the number of runs, what marks mean


class Point(NamedTuple):
    """A value on one of several axes, and the accuracy it leads to, in percent."""

    axis: str
    line: str
    value: float
    mean: float
    deviation: float | None
    is_chosen: bool


class Axis(NamedTuple):
    """What a panel of curves varies."""

    name: str
    title: Sequence[str]  # lines
    is_log: bool = False


class Panel(NamedTuple):
    """Distributions in one panel of a grid: shares in percent over bins of equal width, by kind and half.

    The half of pairs that are not both right hangs down from zero; what has no halves says "" and stands.
    """

    row: str
    column: str
    shares: Mapping[tuple[str, str], Sequence[float]]


def curves(
    points: Sequence[Point], axes: Sequence[Axis], *, title: str, heading: Heading
) -> Drawing:
    """Accuracy over each of the axes, side by side; what was chosen has a ring, deviations are bars."""
    names = list(dict.fromkeys(point.line for point in points))
    ends = [point.mean + sign * (point.deviation or 0) for point in points for sign in (-1, 1)]

    def panel(axis: Axis, shown: str) -> charts.Chart:
        here = [point for point in points if point.axis == axis.name]
        return _curve(here, axis, names, (min(ends), max(ends)), shown)

    beside = [panel(axis, "" if number else title) for number, axis in enumerate(axes)]
    below = [panel(axis, title) for axis in axes]
    return _drawing(
        altair.hconcat(*beside, spacing=28), altair.vconcat(*below, spacing=28), heading
    )


def confidences(panels: Sequence[Panel], *, heading: Heading) -> Drawing:
    """Confidence in right and in wrong labels."""
    wide = _grid(
        panels, _LABELS, "confidence in given label (%)", [0, 20, 40, 60, 80, 100], is_narrow=False
    )
    narrow = _grid(panels, _LABELS, "confidence (%)", [0, 50, 100], is_narrow=True)
    return _drawing(wide, narrow, heading)


def similarities(panels: Sequence[Panel], *, lowest: float, heading: Heading) -> Drawing:
    """Cosine similarity of two examples, from `lowest` to 1: up where both labels are right, and down where not."""
    ticks = [0, 0.2, 0.4, 0.6, 0.8, 1] if lowest == 0 else [lowest, lowest / 2, 0, 0.5, 1]
    wide = _grid(panels, _PAIRS, "cosine similarity", ticks, is_narrow=False)
    narrow = _grid(
        panels, _PAIRS, "cosine similarity", [lowest, (lowest + 1) / 2, 1], is_narrow=True
    )
    return _drawing(wide, narrow, heading)


def _curve(
    points: Sequence[Point], axis: Axis, names: Sequence[str], ends: tuple[float, float], title: str
) -> charts.Chart:
    rows = [
        {
            "line": point.line,
            "value": point.value,
            "mean": point.mean,
            "low": point.mean - (point.deviation or 0),
            "high": point.mean + (point.deviation or 0),
            "chosen": point.is_chosen,
        }
        for point in points
    ]
    values = sorted({point.value for point in points})
    scale = altair.Scale(
        type="log" if axis.is_log else "linear", zero=False, nice=False, padding=10
    )
    margin = max(0.5, 0.05 * (ends[1] - ends[0]))
    heights = altair.Scale(domain=[ends[0] - margin, ends[1] + margin], nice=True)
    legend = altair.Legend(**{**charts._LEGEND, "columns": 3})  # of the same room
    color = altair.Color("line:N").scale(domain=names, range=charts.COLORS).legend(legend)
    dash = altair.StrokeDash("line:N").scale(domain=names, range=charts.DASHES).legend(legend)
    base = altair.Chart(altair.InlineData(values=rows), width=230, height=200).encode(
        x=altair.X("value:Q", scale=scale)
        .title(list(axis.title))
        .axis(values=values, labelOverlap=True),
        y=altair.Y("mean:Q", scale=heights).title(title or None),
    )
    line = base.mark_line(point=altair.OverlayMarkDef(size=30)).encode(color=color, strokeDash=dash)
    bars = base.mark_rule().encode(
        y=altair.Y("low:Q").title(title or None), y2="high:Q", color=color
    )
    rings = (
        base.transform_filter("datum.chosen")
        .mark_point(size=160, strokeWidth=2, filled=False)
        .encode(color=color)
    )
    return altair.layer(line, bars, rings)


def _grid(
    panels: Sequence[Panel],
    looks: Mapping[str, Look],
    title: str,
    ticks: Sequence[float],
    *,
    is_narrow: bool,
) -> altair.FacetChart:
    """Rows and columns of panels; where the window is narrow, what are rows elsewhere are columns."""
    across, down = ("row", "column") if is_narrow else ("column", "row")
    highest = max(share for panel in panels for shares in panel.shares.values() for share in shares)
    has_halves = any(half for panel in panels for _, half in panel.shares)
    top = (1.3 if has_halves else 1.05) * max(
        highest, 1
    )  # above and below the halves are their names
    heights = altair.Scale(domain=[-top if has_halves else 0, top])
    legend = altair.Legend(
        **{**charts._LEGEND, "columns": 1 if is_narrow else 2, "symbolOpacity": 1}
    )
    names, (colors, dashes, fills) = list(looks), zip(*looks.values(), strict=True)
    # Labels stay below their grid lines at both ends, which vega would otherwise move into the panel.
    axis = altair.Axis(values=list(ticks), labelFlush=False, labelOverlap=False)
    minus = "replace(datum.label, '\u2212', '')"  # what hangs down is a share as well
    x = altair.X("x:Q", scale=altair.Scale(domain=[ticks[0], ticks[-1]]), axis=axis).title(title)
    y = altair.Y("share:Q", stack=None, scale=heights).title(
        "share (%)" if is_narrow else "share of its kind (%)"
    )
    y = y.axis(labelExpr=minus, tickCount=6 if has_halves else 4)
    base = altair.Chart(
        width=135 if is_narrow else 195, height=150 if has_halves or is_narrow else 130
    )
    area = (
        base.transform_filter("!datum.note")
        .mark_area(interpolate="step-after", line=True)
        .encode(
            x,
            y,
            altair.Color(
                "kind:N", scale=altair.Scale(domain=names, range=list(colors)), legend=legend
            ),
            altair.StrokeDash(
                "kind:N", scale=altair.Scale(domain=names, range=list(dashes)), legend=legend
            ),
            altair.FillOpacity(
                "kind:N", scale=altair.Scale(domain=names, range=list(fills)), legend=None
            ),
            altair.Detail("half:N"),
        )
    )
    notes = (
        base.transform_filter("datum.note")
        .mark_text(align="left", dx=4, fontSize=11, fill="var(--quiet)")
        .encode(x, y, altair.Text("note:N"))
    )
    rows = _steps(panels, ticks[0], ticks[-1]) + (
        _names_of_halves(panels, ticks[0], 0.9 * top) if has_halves else []
    )
    order = {
        side: list(dict.fromkeys(getattr(panel, side) for panel in panels))
        for side in ("row", "column")
    }
    head = altair.Header(title=None, labelFontSize=12, labelLimit=0)
    lines = altair.Header(title=None, labelFontSize=11, labelLimit=0, labelExpr=_TWO_LINES)
    zero = base.mark_rule(stroke="var(--quiet)", strokeWidth=0.5).encode(y=altair.datum(0))
    facets: altair.FacetChart = altair.layer(area, zero, notes).facet(
        data=altair.InlineData(values=rows),
        row=altair.Row(f"{down}:N", header=lines if is_narrow else head, sort=order[down]),
        column=altair.Column(f"{across}:N", header=head, sort=order[across]),
        spacing=24,
    )
    return facets


def _steps(panels: Sequence[Panel], lowest: float, highest: float) -> list[dict[str, Any]]:
    """The left end of each bin and its share; Any is text or a number."""
    rows: list[dict[str, Any]] = []
    for panel in panels:
        for (kind, half), shares in panel.shares.items():
            place = {"row": panel.row, "column": panel.column, "kind": kind, "half": half}
            sign, width = -1 if half == WRONG_PAIRS else 1, (highest - lowest) / len(shares)
            steps = [
                *shares,
                shares[-1],
            ]  # a step is drawn from its left end, so the last one is said twice
            rows += [
                {**place, "x": lowest + width * bin, "share": sign * share}
                for bin, share in enumerate(steps)
            ]
    return rows


def _names_of_halves(panels: Sequence[Panel], x: float, y: float) -> list[dict[str, Any]]:
    return [
        {"row": panel.row, "column": panel.column, "note": half, "x": x, "share": sign * y}
        for panel in panels
        for half, sign in ((RIGHT_PAIRS, 1), (WRONG_PAIRS, -1))
    ]


def _drawing(wide: Any, narrow: Any, heading: Heading) -> Drawing:
    """Both sizes for a page, which shows the one that fits, and the wide one alone; Any is any of altair's charts."""
    html = Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(
        charts._drawn(wide), charts._drawn(narrow)
    )
    title = altair.TitleParams(
        heading.title,
        subtitle=[
            line for remark in heading.remarks for line in textwrap.wrap(remark, _LINE_LENGTH)
        ],
        anchor="start",
        fontSize=16,
        color="var(--ink)",
        subtitleFontSize=12,
        subtitleColor="var(--quiet)",
        subtitleLineHeight=16,
        subtitlePadding=6,
        offset=14,
    )
    named = dict(re.findall(r"--([\w-]+): (#\w+);", _light_colors()))
    svg = re.sub(
        r"var\(--([\w-]+)\)",
        lambda found: named[found[1]],
        str(charts._drawn(wide.properties(title=title))),
    )
    paper = Markup('<title>{}</title><rect width="100%" height="100%" fill="#fff"/>').format(
        heading.title
    )
    svg = re.sub(r"<svg[^>]*>", lambda found: found[0] + str(paper), svg, count=1)
    return Drawing(html, svg, vl_convert.svg_to_png(svg, scale=2))


def _light_colors() -> str:
    """What the style sheet of the page says before it speaks of dark windows."""
    page = resources.files("nearsay.report").joinpath("page.html").read_text("utf-8")
    return page.partition("@media")[0]
