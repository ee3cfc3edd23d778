"""Charts as SVG inside the page.

Colors are names that the page's style sheet defines, once for light and once for dark. Lines differ in dashes as well,
so that nothing depends on color alone.
"""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from markupsafe import Markup

if not (find_spec("altair") and find_spec("vl_convert")):
    raise ImportError('the report needs an extra; pip install ".[report]" in the clone')

import altair

COLORS = [f"var(--series-{number})" for number in range(1, 8)]
DASHES = [
    [1, 0],
    [7, 3],
    [2, 2],
    [9, 3, 2, 3],
]  # 4 and 7 have no common factor: 28 lines look different
KINDS = ["var(--right)", "var(--wrong)"]  # of labels
_WRONG = (
    "wrong label",
    "suspicious label",
)  # kinds that look as wrong ones do, also where they stand alone
_LEGEND: dict[str, Any] = {  # Any: what altair takes by name
    "orient": "top",
    "title": None,
    "columnPadding": 24,
    "symbolType": "stroke",
    "symbolSize": 700,
    "symbolStrokeWidth": 2.5,
}
_MOST_POINTS = 200  # of a line: more than the eye or the paper can tell apart

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


def curves(lines: Sequence[Line], *, names: Sequence[str], title: str) -> Markup:
    """Accuracy over epochs in two sizes, of which the page shows the one that fits the window."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(
        _drawn(
            _curves(
                lines,
                names,
                title,
                width=800,
                height=320,
                columns=2 if max(map(len, names)) <= 38 else 1,
            )
        ),
        _drawn(_curves(lines, names, title, width=290, height=240, columns=1)),
    )


def histogram(
    histograms: Sequence[Histogram],
    *,
    highest: float,
    title: str = "confidence in the given label (%)",
) -> Markup:
    """A number in percent by kind of label; `highest` is where the axis ends, the same for all that compare."""
    rows: list[Row] = []
    for kind, shares in histograms:
        steps = [
            *shares,
            shares[-1],
        ]  # a step is drawn from its left end, so the last one is said twice
        rows += [
            {"kind": kind, "confidence": 100 * place / len(shares), "share": share}
            for place, share in enumerate(steps)
        ]
    kinds = [each.kind for each in histograms]
    looks = [kind in _WRONG for kind in kinds]
    colors, dashes = ([choices[look] for look in looks] for choices in (KINDS, DASHES))
    legend = altair.Legend(**_LEGEND, columns=2)
    percents = altair.Axis(values=[0, 25, 50, 75, 100])
    area = altair.Chart(altair.InlineData(values=rows), width=290, height=170).mark_area(
        interpolate="step-after", line=True, fillOpacity=0.3
    )
    return _drawn(
        area.encode(
            altair.X("confidence:Q", axis=percents, scale=altair.Scale(domain=[0, 100])).title(
                title
            ),
            altair.Y("share:Q", stack=None, scale=altair.Scale(domain=[0, highest])).title(
                "share of these labels (%)"
            ),
            altair.Color("kind:N", scale=altair.Scale(domain=kinds, range=colors), legend=legend),
            altair.StrokeDash(
                "kind:N", scale=altair.Scale(domain=kinds, range=dashes), legend=legend
            ),
        )
    )


def heat_map(
    shares: Sequence[Sequence[float]], classes: Sequence[str], *, rows_title: str = "true class"
) -> Markup:
    """Shares in percent of the examples of a class (row) that carry a label (column)."""
    names = [
        name if classes.count(name) == 1 and name else f"{name} ({i})"
        for i, name in enumerate(classes)
    ]
    rows: list[Row] = [
        {
            "true": true,
            "given": given,
            "share": share,
            "text": f"{share:.0f}" if share >= 0.5 else "",
        }
        for true, line in zip(names, shares, strict=True)
        for given, share in zip(names, line, strict=True)
    ]
    angle = 0 if max(map(len, names)) <= 2 else -90
    labels: dict[str, Any] = {"labelExpr": _cut(26), "labelLimit": 200, "labelPadding": 5}
    axis: dict[str, Any] = {**labels, "domain": False, "ticks": False, "titlePadding": 8}
    base = altair.Chart(altair.InlineData(values=rows)).encode(
        x=altair.X("given:O").sort(names).title("given label").axis(labelAngle=angle, **axis),
        y=altair.Y("true:O").sort(names).title(rows_title).axis(**axis),
    )
    opacity = (
        altair.Opacity("share:Q")
        .title(f"share of the {rows_title} (%)")
        .scale(
            domain=[0, 100], range=[0.0, 0.7]
        )  # never opaque: the number has to be read on it, in light and dark
        .legend(
            orient="top",
            direction="horizontal",
            values=[10, 40, 70, 100],
            symbolType="square",
            symbolStrokeWidth=0,
        )
    )
    cells = base.mark_rect(fill=COLORS[0], stroke="var(--line)", strokeWidth=0.5).encode(
        opacity=opacity
    )
    numbers = base.mark_text(fontSize=10, fill="var(--ink)").encode(text="text:N")
    side = 26 if len(classes) <= 10 else 20
    chart = altair.layer(cells, numbers).properties(
        width=side * len(classes), height=side * len(classes)
    )
    return _drawn(chart)


def _curves(
    lines: Sequence[Line],
    names: Sequence[str],
    title: str,
    *,
    width: int,
    height: int,
    columns: int,
) -> Chart:
    rows: list[Row] = [
        {
            "name": line.name,
            "line": f"{number}",
            "epoch": epoch,
            "accuracy": accuracy,
            "mean": str(line.is_mean),
        }
        for number, line in enumerate(lines)
        for epoch, accuracy in _thinned(line.points)
    ]
    legend = altair.Legend(**_LEGEND, labelExpr=_cut(width // 7), labelLimit=width, columns=columns)
    are_whole = all(epoch.is_integer() for line in lines for epoch, _ in line.points)
    axis = altair.Axis(tickCount=6, tickMinStep=1 if are_whole else 0)
    marks = (
        altair.OverlayMarkDef(size=18) if max(len(line.points) for line in lines) < 10 else False
    )
    widths = altair.Scale(domain=["False", "True"], range=[0.8, 2.5])
    opacities = altair.Scale(domain=["False", "True"], range=[0.6, 1.0])
    lined = altair.Chart(altair.InlineData(values=rows), width=width, height=height).mark_line(
        point=marks
    )
    chart: altair.Chart = lined.encode(
        x=altair.X("epoch:Q")
        .title("training time (epochs)")
        .scale(zero=False, nice=False)
        .axis(axis),
        y=altair.Y("accuracy:Q").title(title).scale(zero=False),
        color=altair.Color("name:N").scale(domain=names, range=COLORS).legend(legend),
        strokeDash=altair.StrokeDash("name:N").scale(domain=names, range=DASHES).legend(legend),
        strokeWidth=altair.StrokeWidth("mean:N", scale=widths, legend=None),
        opacity=altair.Opacity("mean:N", scale=opacities, legend=None),
        detail="line:N",
    )
    return chart


def _cut(most: int) -> str:
    """What vega shows of a name: of more letters than these the beginning and the end, as many begin alike."""
    half = most // 2
    whole = "datum.label"
    return f"length({whole}) <= {most} ? {whole} : slice({whole}, 0, {half}) + '…' + slice({whole}, -{half})"


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """The last point and evenly many before it."""
    step = -(-len(points) // _MOST_POINTS)
    return points[(len(points) - 1) % step :: step] if points else points


def _drawn(chart: Chart) -> Markup:
    """The chart as SVG, which vega escapes; what it would say to a screen reader is said by the page instead."""
    styled = chart.configure(background="transparent", aria=False).configure_view(stroke=None)
    styled = styled.configure_axis(
        labelFontSize=12, titleFontSize=12, titleFontWeight="normal", gridOpacity=0.6
    )
    styled = styled.configure_legend(labelFontSize=12, titleFontSize=12, titleFontWeight="normal")
    buffer = io.StringIO()
    styled.save(buffer, format="svg")
    return Markup(buffer.getvalue())
