"""Charts as SVG: inside a page, or alone as the figures of a reproduction.

In a page, colors are names that its style sheet defines once for light and once for dark. Alone,
they are what the sheet says for light paper. Lines differ in dashes as well, so that nothing
depends on color alone.
"""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

if not (find_spec("altair") and find_spec("vl_convert")):
    raise ImportError('the report needs an extra; pip install ".[report]" in the clone')

import altair
import vl_convert

COLORS = [f"var(--series-{number})" for number in range(1, 8)]
# 4 dashes and 7 colors have no common factor: 28 lines look different.
DASHES = [[1, 0], [7, 3], [2, 2], [9, 3, 2, 3]]
KINDS = ["var(--right)", "var(--wrong)"]  # of labels
# Both kinds look wrong, also if a chart shows only one of them.
_WRONG = ("wrong label", "suspicious label")
_LEGEND: dict[str, Any] = {  # Any: what altair takes by name
    "orient": "top",
    "title": None,
    "columnPadding": 24,
    "symbolType": "stroke",
    "symbolSize": 700,
    "symbolStrokeWidth": 2.5,
}
_MOST_POINTS = 200  # of a line: more than the eye or the paper can tell apart
_MOST_LETTERS = 38  # of a name beside which there is room for a second column of the legend

LABELS = ("right labels", "wrong labels")
RIGHT_PAIRS, WRONG_PAIRS = "both labels right", "one wrong or both"
# A label such as "toy for CIFAR-10, 20 %" goes to two lines, in the language of vega.
_TWO_LINES = r"split(replace(datum.label, / for |, /, '$&\n'), '\n')"
_LINE_LENGTH = 125  # letters below the title, which is about as wide as four panels

Chart = altair.Chart | altair.LayerChart | altair.FacetChart
Row = dict[str, str | float]


class Line(NamedTuple):
    """A curve: of one run, or the mean of its group."""

    name: str
    is_mean: bool
    points: Sequence[tuple[float, float]]  # epoch, accuracy in percent


class Histogram(NamedTuple):
    """What share of a kind of labels, in percent, falls into each of equal bins from 0 to 100 %."""

    kind: str
    shares: Sequence[float]


class Look(NamedTuple):
    """How one kind is drawn; dashes and fill tell kinds apart without color."""

    color: str
    dashes: Sequence[int]
    fill_opacity: float


_PAIRS = {
    "same label": Look(COLORS[0], DASHES[0], 0.25),
    "different labels": Look(COLORS[1], DASHES[1], 0.0),
}
_LABELS = {LABELS[0]: Look(KINDS[0], DASHES[0], 0.35), LABELS[1]: Look(KINDS[1], DASHES[1], 0.1)}
SIMILARITIES = tuple((kind, half) for kind in _PAIRS for half in (RIGHT_PAIRS, WRONG_PAIRS))


class Drawing(NamedTuple):
    """One chart, for a page and by itself."""

    html: Markup
    svg: str
    png: bytes


class Heading(NamedTuple):
    """What a drawing that stands alone says of itself."""

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
    """Distributions in one panel of a grid: shares in percent over bins of equal width.

    The keys are kind and half. The half of pairs with a wrong label is drawn down from zero; data
    without halves has the half "" and is drawn up.
    """

    row: str
    column: str
    shares: Mapping[tuple[str, str], Sequence[float]]


def curves(lines: Sequence[Line], *, names: Sequence[str], title: str) -> Markup:
    """Accuracy over epochs in two sizes; the page shows the one that fits the window."""
    num_columns = 2 if max(map(len, names)) <= _MOST_LETTERS else 1
    wide = _curves(lines, names, title, width=800, height=320, columns=num_columns)
    narrow = _curves(lines, names, title, width=290, height=240, columns=1)
    return _both_sizes(wide, narrow)


def histogram(
    histograms: Sequence[Histogram],
    *,
    highest: float,
    title: str = "confidence in the given label (%)",
) -> Markup:
    """A number in percent by kind of label; `highest` is the end of the axis."""
    rows: list[Row] = []
    kinds, colors, dashes = [], [], []
    for kind, shares in histograms:
        kinds.append(kind)
        colors.append(KINDS[kind in _WRONG])
        dashes.append(DASHES[kind in _WRONG])
        for place, share in enumerate(_closed(shares)):
            rows.append({"kind": kind, "confidence": 100 * place / len(shares), "share": share})
    x = altair.X("confidence:Q", scale=altair.Scale(domain=[0, 100])).title(title)
    x = x.axis(values=[0, 25, 50, 75, 100])
    y = altair.Y("share:Q", stack=None, scale=altair.Scale(domain=[0, highest]))
    legend = altair.Legend(**_LEGEND, columns=2)
    area = altair.Chart(altair.InlineData(values=rows), width=290, height=170).mark_area(
        interpolate="step-after", line=True, fillOpacity=0.3
    )
    return _drawn(
        area.encode(
            x,
            y.title("share of these labels (%)"),
            altair.Color("kind:N").scale(domain=kinds, range=colors).legend(legend),
            altair.StrokeDash("kind:N").scale(domain=kinds, range=dashes).legend(legend),
        )
    )


def heat_map(
    shares: Sequence[Sequence[float]], classes: Sequence[str], *, rows_title: str = "true class"
) -> Markup:
    """Shares in percent of the examples of a class (row) that carry a label (column)."""
    names = []
    for number, name in enumerate(classes):
        is_unique = classes.count(name) == 1 and name
        names.append(name if is_unique else f"{name} ({number})")
    rows: list[Row] = []
    for true, line in zip(names, shares, strict=True):
        for given, share in zip(names, line, strict=True):
            text = f"{share:.0f}" if share >= 0.5 else ""
            rows.append({"true": true, "given": given, "share": share, "text": text})
    # Only very short names fit below a cell without turning them.
    angle = 0 if max(map(len, names)) <= 2 else -90
    labels: dict[str, Any] = {"labelExpr": _cut(26), "labelLimit": 200, "labelPadding": 5}
    axis: dict[str, Any] = {**labels, "domain": False, "ticks": False, "titlePadding": 8}
    base = altair.Chart(altair.InlineData(values=rows)).encode(
        x=altair.X("given:O").sort(names).title("given label").axis(labelAngle=angle, **axis),
        y=altair.Y("true:O").sort(names).title(rows_title).axis(**axis),
    )
    legend = altair.Legend(
        orient="top",
        direction="horizontal",
        values=[10, 40, 70, 100],
        symbolType="square",
        symbolStrokeWidth=0,
    )
    # Cells are never opaque, so that their numbers can be read in light and in dark.
    scale = altair.Scale(domain=[0, 100], range=[0.0, 0.7])
    opacity = altair.Opacity("share:Q", scale=scale, legend=legend)
    cells = base.mark_rect(fill=COLORS[0], stroke="var(--line)", strokeWidth=0.5).encode(
        opacity=opacity.title(f"share of the {rows_title} (%)")
    )
    numbers = base.mark_text(fontSize=10, fill="var(--ink)").encode(text="text:N")
    side = (26 if len(classes) <= 10 else 20) * len(classes)
    return _drawn(altair.layer(cells, numbers).properties(width=side, height=side))


def ablation(
    points: Sequence[Point], axes: Sequence[Axis], *, title: str, heading: Heading
) -> Drawing:
    """Accuracy over each axis, side by side; the chosen value has a ring, deviations are bars."""
    names = list(dict.fromkeys(point.line for point in points))
    lowest = min(point.mean - (point.deviation or 0) for point in points)
    highest = max(point.mean + (point.deviation or 0) for point in points)
    beside, below = [], []
    for number, axis in enumerate(axes):
        here = [point for point in points if point.axis == axis.name]
        below.append(_ablation_panel(here, axis, names, (lowest, highest), title))
        # Side by side, the first panel carries the title of the common axis.
        shown = "" if number else title
        beside.append(_ablation_panel(here, axis, names, (lowest, highest), shown))
    wide, narrow = altair.hconcat(*beside, spacing=28), altair.vconcat(*below, spacing=28)
    return _drawing(wide, narrow, heading)


def confidences(panels: Sequence[Panel], *, heading: Heading) -> Drawing:
    """Confidence in right and in wrong labels."""
    ticks = [0, 20, 40, 60, 80, 100]
    wide = _grid(panels, _LABELS, "confidence in given label (%)", ticks, is_narrow=False)
    narrow = _grid(panels, _LABELS, "confidence (%)", [0, 50, 100], is_narrow=True)
    return _drawing(wide, narrow, heading)


def similarities(panels: Sequence[Panel], *, lowest: float, heading: Heading) -> Drawing:
    """Cosine similarity of pairs, from `lowest` to 1: up if both labels are right, else down."""
    title = "cosine similarity"
    ticks = [0, 0.2, 0.4, 0.6, 0.8, 1] if lowest == 0 else [lowest, lowest / 2, 0, 0.5, 1]
    few_ticks = [lowest, (lowest + 1) / 2, 1]
    wide = _grid(panels, _PAIRS, title, ticks, is_narrow=False)
    narrow = _grid(panels, _PAIRS, title, few_ticks, is_narrow=True)
    return _drawing(wide, narrow, heading)


def _curves(
    lines: Sequence[Line],
    names: Sequence[str],
    title: str,
    *,
    width: int,
    height: int,
    columns: int,
) -> Chart:
    rows: list[Row] = []
    for number, line in enumerate(lines):
        for epoch, accuracy in _thinned(line.points):
            row: Row = {"name": line.name, "line": f"{number}", "epoch": epoch}
            rows.append({**row, "accuracy": accuracy, "mean": str(line.is_mean)})
    legend = altair.Legend(**_LEGEND, labelExpr=_cut(width // 7), labelLimit=width, columns=columns)
    # Whole epochs have no ticks between them.
    are_whole = all(epoch.is_integer() for line in lines for epoch, _ in line.points)
    axis = altair.Axis(tickCount=6, tickMinStep=int(are_whole))
    # Few points are marked, because a line of one point would be invisible.
    is_short = max(len(line.points) for line in lines) < 10
    marks = altair.OverlayMarkDef(size=18) if is_short else False
    widths = altair.Scale(domain=["False", "True"], range=[0.8, 2.5])
    opacities = altair.Scale(domain=["False", "True"], range=[0.6, 1.0])
    base = altair.Chart(altair.InlineData(values=rows), width=width, height=height)
    x = altair.X("epoch:Q").title("training time (epochs)").scale(zero=False, nice=False)
    chart: altair.Chart = base.mark_line(point=marks).encode(
        x=x.axis(axis),
        y=altair.Y("accuracy:Q").title(title).scale(zero=False),
        color=altair.Color("name:N").scale(domain=names, range=COLORS).legend(legend),
        strokeDash=altair.StrokeDash("name:N").scale(domain=names, range=DASHES).legend(legend),
        strokeWidth=altair.StrokeWidth("mean:N", scale=widths, legend=None),
        opacity=altair.Opacity("mean:N", scale=opacities, legend=None),
        detail="line:N",
    )
    return chart


def _ablation_panel(
    points: Sequence[Point], axis: Axis, names: Sequence[str], ends: tuple[float, float], title: str
) -> Chart:
    rows: list[Row] = []
    for point in points:
        deviation = point.deviation or 0
        row: Row = {"line": point.line, "value": point.value, "mean": point.mean}
        row |= {"low": point.mean - deviation, "high": point.mean + deviation}
        rows.append({**row, "chosen": point.is_chosen})
    values = sorted({point.value for point in points})
    kind: Literal["log", "linear"] = "log" if axis.is_log else "linear"
    scale = altair.Scale(type=kind, zero=False, nice=False, padding=10)
    margin = max(0.5, 0.05 * (ends[1] - ends[0]))
    heights = altair.Scale(domain=[ends[0] - margin, ends[1] + margin], nice=True)
    legend = altair.Legend(**_LEGEND, columns=3)
    color = altair.Color("line:N").scale(domain=names, range=COLORS).legend(legend)
    dash = altair.StrokeDash("line:N").scale(domain=names, range=DASHES).legend(legend)
    x = altair.X("value:Q", scale=scale).title(list(axis.title))
    base = altair.Chart(altair.InlineData(values=rows), width=230, height=200).encode(
        x=x.axis(values=values, labelOverlap=True),
        y=altair.Y("mean:Q", scale=heights).title(title or None),
    )
    line = base.mark_line(point=altair.OverlayMarkDef(size=30)).encode(color=color, strokeDash=dash)
    low = altair.Y("low:Q").title(title or None)
    bars = base.mark_rule().encode(y=low, y2="high:Q", color=color)
    chosen = base.transform_filter("datum.chosen")
    rings = chosen.mark_point(size=160, strokeWidth=2, filled=False).encode(color=color)
    return altair.layer(line, bars, rings)


def _grid(
    panels: Sequence[Panel],
    looks: Mapping[str, Look],
    title: str,
    ticks: Sequence[float],
    *,
    is_narrow: bool,
) -> altair.FacetChart:
    """Rows and columns of panels, which change places in a narrow window."""
    rows = _steps(panels, ticks[0], ticks[-1])
    highest = max(1, *(abs(row["share"]) for row in rows))
    has_halves = any(row["half"] for row in rows)
    if has_halves:
        # Halves leave room for their names above and below.
        top, bottom, num_ticks, height = 1.3 * highest, -1.3 * highest, 6, 150
        rows += _names_of_halves(panels, ticks[0], 0.9 * top)
    else:
        top, bottom, num_ticks, height = 1.05 * highest, 0, 4, 130
    width, columns, share_title = 195, 2, "share of its kind (%)"
    if is_narrow:
        width, height, columns, share_title = 135, 150, 1, "share (%)"
    # Labels stay below their grid lines at both ends; vega would move them into the panel.
    axis = altair.Axis(values=list(ticks), labelFlush=False, labelOverlap=False)
    x = altair.X("x:Q", scale=altair.Scale(domain=[ticks[0], ticks[-1]]), axis=axis).title(title)
    y = altair.Y("share:Q", stack=None).scale(domain=[bottom, top]).title(share_title)
    # A share that is drawn down is a positive number as well, so the axis shows no minus sign.
    y = y.axis(labelExpr="replace(datum.label, '\u2212', '')", tickCount=num_ticks)
    base = altair.Chart(width=width, height=height)
    names = list(looks)
    colors, dashes, fills = map(list, zip(*looks.values(), strict=True))
    legend = altair.Legend(**_LEGEND, columns=columns, symbolOpacity=1)
    steps = base.transform_filter("!datum.note").mark_area(interpolate="step-after", line=True)
    area = steps.encode(
        x,
        y,
        altair.Color("kind:N").scale(domain=names, range=colors).legend(legend),
        altair.StrokeDash("kind:N").scale(domain=names, range=dashes).legend(legend),
        altair.FillOpacity("kind:N").scale(domain=names, range=fills).legend(None),
        altair.Detail("half:N"),
    )
    words = base.transform_filter("datum.note").mark_text(
        align="left", dx=4, fontSize=11, fill="var(--quiet)"
    )
    notes = words.encode(x, y, altair.Text("note:N"))
    zero = base.mark_rule(stroke="var(--quiet)", strokeWidth=0.5).encode(y=altair.datum(0))
    return _faceted(altair.layer(area, zero, notes), panels, rows, is_narrow=is_narrow)


def _faceted(
    chart: Chart, panels: Sequence[Panel], rows: list[dict[str, Any]], *, is_narrow: bool
) -> altair.FacetChart:
    row_names = list(dict.fromkeys(panel.row for panel in panels))
    column_names = list(dict.fromkeys(panel.column for panel in panels))
    head = altair.Header(title=None, labelFontSize=12, labelLimit=0)
    row = altair.Row("row:N", header=head, sort=row_names)
    column = altair.Column("column:N", header=head, sort=column_names)
    if is_narrow:
        lines = altair.Header(title=None, labelFontSize=11, labelLimit=0, labelExpr=_TWO_LINES)
        row = altair.Row("column:N", header=lines, sort=column_names)
        column = altair.Column("row:N", header=head, sort=row_names)
    data = altair.InlineData(values=rows)
    facets: altair.FacetChart = chart.facet(data=data, row=row, column=column, spacing=24)
    return facets


def _steps(panels: Sequence[Panel], lowest: float, highest: float) -> list[dict[str, Any]]:
    """The left end of each bin and its share; Any is text or a number."""
    rows: list[dict[str, Any]] = []
    for panel in panels:
        for (kind, half), shares in panel.shares.items():
            place = {"row": panel.row, "column": panel.column, "kind": kind, "half": half}
            width = (highest - lowest) / len(shares)
            # Pairs with a wrong label hang down from zero.
            sign = -1 if half == WRONG_PAIRS else 1
            for number, share in enumerate(_closed(shares)):
                rows.append({**place, "x": lowest + width * number, "share": sign * share})
    return rows


def _names_of_halves(panels: Sequence[Panel], x: float, y: float) -> list[dict[str, Any]]:
    rows = []
    for panel in panels:
        for half, sign in ((RIGHT_PAIRS, 1), (WRONG_PAIRS, -1)):
            place = {"row": panel.row, "column": panel.column, "note": half}
            rows.append({**place, "x": x, "share": sign * y})
    return rows


def _closed(shares: Sequence[float]) -> list[float]:
    """The shares with the last one twice, because a step is drawn from its left end."""
    return [*shares, shares[-1]]


def _drawing(wide: Any, narrow: Any, heading: Heading) -> Drawing:
    """Both sizes for a page, and the wide one alone; Any is any of altair's charts."""
    remarks: list[str] = []
    for remark in heading.remarks:
        remarks += textwrap.wrap(remark, _LINE_LENGTH)
    title = altair.TitleParams(
        heading.title,
        subtitle=remarks,
        anchor="start",
        fontSize=16,
        color="var(--ink)",
        subtitleFontSize=12,
        subtitleColor="var(--quiet)",
        subtitleLineHeight=16,
        subtitlePadding=6,
        offset=14,
    )
    svg = _with_light_colors(str(_drawn(wide.properties(title=title))))
    paper = Markup('<title>{}</title><rect width="100%" height="100%" fill="#fff"/>')
    paper = paper.format(heading.title)
    svg = re.sub(r"<svg[^>]*>", lambda match: match[0] + str(paper), svg, count=1)
    return Drawing(_both_sizes(wide, narrow), svg, vl_convert.svg_to_png(svg, scale=2))


def _with_light_colors(svg: str) -> str:
    """The chart with real colors: those of the page's style sheet before its rules for dark."""
    page = resources.files("nearsay.report").joinpath("page.html").read_text("utf-8")
    colors = dict(re.findall(r"--([\w-]+): (#\w+);", page.partition("@media")[0]))
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colors[match[1]], svg)


def _both_sizes(wide: Any, narrow: Any) -> Markup:
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(
        _drawn(wide), _drawn(narrow)
    )


def _cut(most: int) -> str:
    """A label in the language of vega; a long one loses its middle, because many begin alike."""
    half, label = most // 2, "datum.label"
    short = f"slice({label}, 0, {half}) + '…' + slice({label}, -{half})"
    return f"length({label}) <= {most} ? {label} : {short}"


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """The last point and evenly many before it."""
    step = -(-len(points) // _MOST_POINTS)
    return points[(len(points) - 1) % step :: step] if points else points


def _drawn(chart: Chart) -> Markup:
    """The chart as SVG, in which vega escapes texts; the page describes it for screen readers."""
    styled = chart.configure(background="transparent", aria=False).configure_view(stroke=None)
    styled = styled.configure_axis(
        labelFontSize=12, titleFontSize=12, titleFontWeight="normal", gridOpacity=0.6
    )
    styled = styled.configure_legend(labelFontSize=12, titleFontSize=12, titleFontWeight="normal")
    buffer = io.StringIO()
    styled.save(buffer, format="svg")
    return Markup(buffer.getvalue())
