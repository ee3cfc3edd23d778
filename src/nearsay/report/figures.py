"""The figures of a reproduction: drawings that stand alone as SVG and PNG, and fit into a page.

In a page colors are names of its style sheet, as in all charts; alone they are what that sheet says for light paper.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import altair
import vl_convert
from markupsafe import Markup

from nearsay.report import charts

_SIMILARITIES = {  # kind -> color and dashes: color tells whether labels agree, dashes whether both are right
    "same label, both right": (charts.COLORS[0], charts.DASHES[0]),
    "same label, one wrong or both": (charts.COLORS[0], charts.DASHES[2]),
    "different labels, both right": (charts.COLORS[1], charts.DASHES[0]),
    "different labels, one wrong or both": (charts.COLORS[1], charts.DASHES[2]),
}
SIMILARITIES = tuple(_SIMILARITIES)
LABELS = ("right labels", "wrong labels")


class Drawing(NamedTuple):
    """One chart, for a page and by itself."""

    html: Markup
    svg: str
    png: bytes


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
    title: str
    is_log: bool = False


class Panel(NamedTuple):
    """Distributions in one panel of a grid: shares in percent, by kind, over bins of equal width."""

    row: str
    column: str
    shares: Mapping[str, Sequence[float]]


def curves(points: Sequence[Point], axes: Sequence[Axis], *, title: str) -> Drawing:
    """Accuracy over each of the axes, side by side; what was chosen has a ring, deviations are bars."""
    names = list(dict.fromkeys(point.line for point in points))
    ends = [point.mean + sign * (point.deviation or 0) for point in points for sign in (-1, 1)]
    panels = [
        _curve([point for point in points if point.axis == axis.name], axis, names, (min(ends), max(ends)), title)
        for axis in axes
    ]
    return _drawing(altair.hconcat(*panels, spacing=28), altair.vconcat(*panels, spacing=28))


def confidences(panels: Sequence[Panel]) -> Drawing:
    """Confidence in right and in wrong labels."""
    kinds = dict(zip(LABELS, zip(charts.KINDS, charts.DASHES, strict=False), strict=True))
    grids = [
        _grid(panels, kinds, title, (0, 100), fill_opacity=0.3, is_narrow=is_narrow)
        for title, is_narrow in (("confidence in given label (%)", False), ("confidence (%)", True))
    ]
    return _drawing(*grids)


def similarities(panels: Sequence[Panel], *, lowest: float) -> Drawing:
    """Cosine similarity of two examples, from `lowest` to 1, by whether their labels agree and are right."""
    grids = [
        _grid(panels, _SIMILARITIES, "cosine similarity", (lowest, 1), fill_opacity=0.08, is_narrow=is_narrow)
        for is_narrow in (False, True)
    ]
    return _drawing(*grids)


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
    scale = altair.Scale(type="log" if axis.is_log else "linear", zero=False, nice=False, padding=10)
    margin = max(0.5, 0.05 * (ends[1] - ends[0]))
    heights = altair.Scale(domain=[ends[0] - margin, ends[1] + margin], nice=True)
    legend = altair.Legend(**{**charts._LEGEND, "columns": 3})  # of the same room
    color = altair.Color("line:N").scale(domain=names, range=charts.COLORS).legend(legend)
    dash = altair.StrokeDash("line:N").scale(domain=names, range=charts.DASHES).legend(legend)
    base = altair.Chart(altair.InlineData(values=rows), width=230, height=200).encode(
        x=altair.X("value:Q", scale=scale).title(axis.title).axis(values=values, labelOverlap=True),
        y=altair.Y("mean:Q", scale=heights).title(title),
    )
    line = base.mark_line(point=altair.OverlayMarkDef(size=30)).encode(color=color, strokeDash=dash)
    bars = base.mark_rule().encode(y=altair.Y("low:Q").title(title), y2="high:Q", color=color)
    rings = base.transform_filter("datum.chosen").mark_point(size=160, strokeWidth=2, filled=False).encode(color=color)
    return altair.layer(line, bars, rings)


def _grid(
    panels: Sequence[Panel],
    kinds: Mapping[str, tuple[str, Sequence[int]]],
    title: str,
    domain: tuple[float, float],
    *,
    fill_opacity: float,
    is_narrow: bool,
) -> altair.FacetChart:
    """Rows and columns of panels; where the window is narrow, what are rows elsewhere are columns."""
    across, down = ("row", "column") if is_narrow else ("column", "row")
    width, height, label_size = (135, 115, 12) if is_narrow else (180, 130, 13)
    rows: list[dict[str, Any]] = []  # Any: text or numbers
    for panel in panels:
        for kind, shares in panel.shares.items():
            step = (domain[1] - domain[0]) / len(shares)
            steps = [*shares, shares[-1]]  # a step is drawn from its left end, so the last one is said twice
            rows += [
                {"row": panel.row, "column": panel.column, "kind": kind, "x": domain[0] + step * place, "share": share}
                for place, share in enumerate(steps)
            ]
    colors, dashes = zip(*kinds.values(), strict=True)
    legend = altair.Legend(**{**charts._LEGEND, "columns": 1 if is_narrow else 2, "labelLimit": 300})
    area = altair.Chart(altair.InlineData(values=rows), width=width, height=height).mark_area(
        interpolate="step-after", line=True, fillOpacity=fill_opacity
    )
    ticks = altair.Axis(tickCount=2 if is_narrow else 4)
    encoded = area.encode(
        altair.X("x:Q", scale=altair.Scale(domain=list(domain)), axis=ticks).title(title),
        altair.Y("share:Q", stack=None).title("share (%)" if is_narrow else "share of its kind (%)"),
        altair.Color("kind:N", scale=altair.Scale(domain=list(kinds), range=list(colors)), legend=legend),
        altair.StrokeDash("kind:N", scale=altair.Scale(domain=list(kinds), range=list(dashes)), legend=legend),
    )
    head = altair.Header(title=None, labelFontSize=label_size)
    order = {side: list(dict.fromkeys(getattr(panel, side) for panel in panels)) for side in ("row", "column")}
    facets: altair.FacetChart = encoded.facet(
        row=altair.Row(f"{down}:N", header=head, sort=order[down]),
        column=altair.Column(f"{across}:N", header=head, sort=order[across]),
        spacing=16,
    )
    return facets


def _drawing(wide: Any, narrow: Any) -> Drawing:
    """Both sizes for a page, which shows the one that fits, and the wide one alone; Any is any of altair's charts."""
    drawn = charts._drawn(wide)
    html = Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(drawn, charts._drawn(narrow))
    named = dict(re.findall(r"--([\w-]+): (#\w+);", _light_colors()))
    svg = re.sub(r"var\(--([\w-]+)\)", lambda found: named[found[1]], str(drawn))
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    svg = re.sub(r"(<svg[^>]*>)", rf"\1{paper}", svg, count=1)
    return Drawing(html, svg, vl_convert.svg_to_png(svg, scale=2))


def _light_colors() -> str:
    """What the style sheet of the page says before it speaks of dark windows."""
    page = resources.files("nearsay.report").joinpath("page.html").read_text("utf-8")
    return page.partition("@media")[0]
