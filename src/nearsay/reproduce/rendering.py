"""The tables and figures as files, drawn from what finished runs have left.

A table is written as Markdown, LaTeX, CSV and HTML, with our numbers beside those of the paper; a
figure as PNG, SVG and HTML.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from nearsay import metrics
from nearsay.batch import Labels, Predictions
from nearsay.data import tables
from nearsay.files import load_sealed
from nearsay.report import charts
from nearsay.report.charts import LABELS, SIMILARITIES, Axis, Drawing, Heading, Panel
from nearsay.report.html import Section, figure, fill, joined, paragraph, scrolling
from nearsay.report.runs import Spread, read_run, seeds_text, spread
from nearsay.reproduce import plans
from nearsay.reproduce.paper import Printed, Row
from nearsay.reproduce.plans import PANELS, TABLES, Cell, Column, Data, Table, entitled
from nearsay.reproduce.runs import Runs
from nearsay.training.checkpoints import write_whole
from nearsay.training.run_folder import read_labels

NOT_RUN = "not run"
STAND_IN = (
    "These runs are of small stand-ins for the data: they show that all goes together, and nothing "
    "of them can be compared with the paper's numbers, which are of the data sets that the columns "
    "name."
)
_CONFIDENCE_BINS, _SIMILARITY_BINS = 20, 80
_NUM_PAIRS = 50_000  # of one label, and as many of different ones, in each run
_STAND_IN_FIGURE = (
    "These are runs of small stand-ins, and do not show the data that the paper learns from."
)
_CHOSEN = (
    "A ring is the value with the highest mean, of equals the first, which the next panels use."
)
_NOT_CHOSEN = "No value is marked as the best before all of its panel and noise rate are run."
_SHARES = {
    "confidence": "Share of the right and of the wrong training labels, by the confidence of the "
    "trained network in them.",
    "similarity": "Share of pairs of training examples, by the cosine similarity of their features "
    "after training: up from zero the pairs with two right labels, down the pairs with one wrong "
    "label or two.",
}
_LATEX = {
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "#": r"\#",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "–": "--",
    "−": "$-$",
}
# The name of a line stays while its numbers scroll, and takes up to a third of a narrow window.
_STYLE = """.grouped { border-collapse: separate; border-spacing: 0; }
.grouped th, .grouped td { border-bottom: 0; min-width: 0; padding: .2rem .7rem .2rem 0; }
.grouped td, .grouped .group { white-space: nowrap; }
.grouped tbody th, .grouped .corner { position: sticky; left: 0; max-width: 14rem; \
background: var(--paper); }
.grouped .corner { z-index: 1; }
.grouped .first > * { border-top: 1px solid var(--line); }
.grouped thead th { max-width: 8.5rem; text-align: right; }
.grouped thead .corner { text-align: left; }
.grouped thead .group { max-width: none; text-align: center; \
border-bottom: 1px solid var(--line); }
.grouped .group span { position: sticky; left: 9.5rem; right: .5rem; }
.grouped .source { display: inline-block; color: var(--quiet); font-weight: 400; }
@media screen and (max-width: 45rem) {
  .grouped tbody th, .grouped .corner { min-width: 9rem; max-width: 9rem; padding-right: .5rem; }
}
"""

Shares = dict[tuple[str, str], list[float]]  # by kind and half, see Panel


class Number(NamedTuple):
    """The result of the runs of one cell, in percent; None if no run is finished."""

    final: Spread | None
    best: Spread | None
    last_10: Spread | None
    cells: list[Cell]  # finished ones


class Line(NamedTuple):
    """A printed line: the name of its row, the source of its numbers, and these by column."""

    name: str  # empty for a further line of the row above
    source: str
    texts: list[str]


Numbers = dict[tuple[str, str], Number]  # by row and column


def write_table(name: str, cells: Sequence[Cell], runs: Runs, out: Path, data: Data) -> list[Path]:
    """Write `name.md`, `.tex`, `.csv` and `.html` into `out`; returns their paths."""
    # A row that is only quoted has no cells, and its numbers stay empty.
    table = TABLES[name]
    by_place = _by_place(cells)
    numbers = {}
    for row in table.rows:
        for column in table.columns:
            place = (row.name, column.title)
            numbers[place] = _number(by_place.get(place, []), runs)
    lines = make_lines(table, numbers, has_differences=data != "toy")
    notes = [_caption(has_differences=data != "toy"), *table.notes]
    if data == "toy":
        notes.insert(0, STAND_IN)
    md, tex, csv, html = _paths(out, name, "md", "tex", "csv", "html")
    write_whole(md, as_markdown(table, lines, notes, data).encode())
    write_whole(tex, as_latex(name, table, lines, notes, data).encode())
    tables.write(csv, as_columns(table, numbers, data))
    body = joined([as_html(table, lines, notes[0], data), *map(paragraph, notes[1:])])
    heading = "Accuracy on stand-ins" if data == "toy" else "Accuracy"
    _write_page(html, entitled(table.title, data), Section(heading, body))
    return [md, tex, csv, html]


def write_panels(name: str, cells: Sequence[Cell], runs: Runs, out: Path, data: Data) -> list[Path]:
    """Write the figure of confidences or similarities as `name.png`, `.svg` and `.html`."""
    shares = confidence_shares if name == "confidence" else similarity_shares
    columns = {column.title: column for column in PANELS[name].columns}
    panels, stand_ins, left_out = [], {}, []
    for (row, column_title), trials in _by_place(cells).items():
        column = columns[column_title]
        title = column.panel(data)
        trial_shares = [shares(runs.path(cell)) for cell in runs.finished(trials)]
        if trial_shares:
            panels.append(Panel(row, title, _mean_shares(trial_shares)))
            stand_ins[column.group] = column.stand_in.recipe
        else:
            left_out.append(f"{row}, {title}")
    _check_any(name, panels)
    source = f"{_source(stand_ins, data)} {describe_runs(cells, runs, 'panel')}"
    heading = Heading(entitled(PANELS[name].title, data), [_SHARES[name], source])
    if name == "confidence":
        drawing = charts.confidences(panels, heading=heading)
    else:
        lowest, panels = _without_empty_half(panels)
        drawing = charts.similarities(panels, lowest=lowest, heading=heading)
    missing = [f"Not run: {'; '.join(left_out)}."] if left_out else []
    return _write_figure(name, drawing, heading, missing, out, data)


def write_ablation(
    trials: int, cells: Sequence[Cell], runs: Runs, out: Path, data: Data
) -> list[Path]:
    """Write the figure of the ablation as `ablation.png`, `.svg` and `.html`."""
    points = []
    has_choice = False
    for point in plans.ablation_points(data, trials, runs.validation, runs.is_settled):
        has_choice |= point.is_chosen
        mean = _percent_spread(map(runs.validation, runs.finished(point.cells)))
        if mean is not None:
            place = (point.stage, f"{100 * point.rate:.0f} % noise", point.value)
            points.append(charts.Point(*place, mean.mean, mean.deviation, point.is_chosen))
    _check_any("ablation", points)
    drawn = {point.axis for point in points}
    axes = [axis for axis in _axes(data) if axis.name in drawn]
    what = (
        "Accuracy after the last epoch on training examples that were held out, by their true "
        "labels."
    )
    source = f"{_source({'CIFAR-10': 'toy'}, data)} {describe_runs(cells, runs, 'point')}"
    if any(point.deviation is not None for point in points):
        source += " Bars are standard deviations of the sample."
    marks = _CHOSEN if has_choice else _NOT_CHOSEN
    remarks = [what, marks, source]
    heading = Heading(entitled(plans.ABLATION_TITLE, data), remarks)
    title = "accuracy on held-out examples (%)"
    drawing = charts.ablation(points, axes, title=title, heading=heading)
    more = [
        "The last k is all of the batch (k = m). The paper finds alpha = 0.9 best wherever there "
        "is noise, k about 10, and e = 0 from 40 % noise on; it prints no table of its curves."
    ]
    if data == "toy":
        more.append(
            f"The paper's runs have {plans.ABLATION_EPOCHS} epochs; e is here at the same shares "
            "of a shorter run."
        )
    return _write_figure("ablation", drawing, heading, more, out, data)


def confidence_shares(folder: Path) -> Shares:
    """What share in percent of right and of wrong labels falls into each bin of confidence."""
    run = read_run(folder)
    is_wrong = run.is_wrong()
    if is_wrong is None:
        raise ValueError(
            f"{folder} does not know which labels are wrong. Use data with known true labels."
        )
    is_known = ~run.trust.isnan()
    shares = {}
    for kind, is_kind in zip(LABELS, (~is_wrong, is_wrong), strict=True):
        trust = run.trust[is_kind & is_known].float()
        shares[kind, ""] = _percent(torch.histc(trust, _CONFIDENCE_BINS, 0, 1))
    return shares


def similarity_shares(folder: Path) -> Shares:
    """What share in percent of each kind of pairs falls into each bin of similarity, from −1."""
    features, labels = _trained_on(folder)
    counts = metrics.similarity_histogram(
        features, labels, bins=_SIMILARITY_BINS, num_pairs=_NUM_PAIRS
    ).counts  # (2, 2, bins): same or different labels, right or wrong
    return dict(zip(SIMILARITIES, map(_percent, counts.flatten(0, 1)), strict=True))


def describe_runs(cells: Sequence[Cell], runs: Runs, place: str) -> str:
    """How many runs a panel or point has, and their seeds."""
    finished = runs.finished(cells)
    trials = Counter((cell.recipe, cell.arguments, cell.overrides) for cell in finished)
    number, most = str(min(trials.values())), max(trials.values())
    if number != str(most):
        number = f"{number} to {most}"
    seeds = seeds_text(cell.seed for cell in finished)
    return f"Runs: n = {number} per {place}, {seeds}."


def make_lines(table: Table, numbers: Numbers, *, has_differences: bool) -> list[Line]:
    """Ours, the paper's and their difference for a row that is run; one line for a quoted row."""
    # The number of runs is said once if it is the same everywhere, else beside each number.
    counts = {number.final.num for number in numbers.values() if number.final is not None}
    same = f" (n={min(counts)})" if len(counts) == 1 else ""
    lines = []
    for row in table.rows:
        printed = [number.text for number in row.printed]
        if row.method is None:
            lines.append(Line(f"{row.name} ({row.cited})", "quoted", printed))
            continue
        texts, differences = [], []
        for column, number in zip(table.columns, row.printed, strict=True):
            ours = numbers[row.name, column.title].final
            texts.append(_text(ours, has_count=not same))
            differences.append(_difference(ours, number))
        lines += [Line(row.name, f"nearsay{same}", texts), Line("", "paper", printed)]
        if has_differences:
            lines.append(Line("", "difference", differences))
    return lines


def as_markdown(table: Table, lines: Sequence[Line], notes: Sequence[str], data: Data) -> str:
    """A table that also reads as plain text."""
    columns = [["method"], ["source"], *([column.heading(data)] for column in table.columns)]
    for line in lines:
        for column, text in zip(columns, (line.name, line.source, *line.texts), strict=True):
            column.append(text)
    # The first two columns are text, all others numbers, which are aligned on the right.
    for number, column in enumerate(columns):
        width = max(map(len, column))
        is_text = number < 2
        ruler = "-" * width if is_text else f"{'-' * (width - 1)}:"
        column.insert(1, ruler)
        aligned = str.ljust if is_text else str.rjust
        columns[number] = [aligned(cell, width) for cell in column]
    printed = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
    title = f"# {entitled(table.title, data)}"
    return "\n".join([title, "", *printed, "", *(f"{note}\n" for note in notes)])


def as_latex(
    name: str, table: Table, lines: Sequence[Line], notes: Sequence[str], data: Data
) -> str:
    r"""A table environment for the package booktabs."""
    heads = []
    for group, size in _groups(table).items():
        heads.append(rf"\multicolumn{{{size}}}{{c}}{{{_latex(group)}}}")
    names = [_latex(column.name) for column in table.columns]
    caption = _latex(" ".join([f"{entitled(table.title, data)}.", *notes]))
    parts = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering\scriptsize",
        rf"  \caption{{{caption}}}",
        rf"  \label{{tab:{name}}}",
        rf"  \begin{{tabular}}{{ll{'c' * len(names)}}}",
        r"    \toprule",
        rf"    & & {' & '.join(heads)} \\",
    ]
    if any(names):
        parts.append(rf"    Method & Source & {' & '.join(names)} \\")
    if data == "toy":
        stand_ins = [_latex(column.stand_in.recipe) for column in table.columns]
        parts.append(rf"    & stand-in & {' & '.join(stand_ins)} \\")
    parts.append(r"    \midrule")
    # Rules separate quoted rows from those that are run, and small gaps all others.
    for number, line in enumerate(lines):
        if number and line.name:
            is_other = (line.source == "quoted") != (lines[number - 1].source == "quoted")
            rule = r"    \midrule" if is_other else r"    \addlinespace[2pt]"
            parts.append(rule)
        cells = map(_latex, (line.name, line.source, *line.texts))
        parts.append(rf"    {' & '.join(cells)} \\")
    return "\n".join([*parts, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])


def as_columns(table: Table, numbers: Numbers, data: Data) -> dict[str, list[tables.Cell]]:
    """A row for each number; only this file has best accuracies and means of the last ten."""
    rows = []
    for row in table.rows:
        for column, printed in zip(table.columns, row.printed, strict=True):
            rows.append(_record(row, column, printed, numbers[row.name, column.title], data))
    return {key: [row[key] for row in rows] for key in rows[0]}


def as_html(table: Table, lines: Sequence[Line], caption: str, data: Data) -> Markup:
    """A table with groups of columns; a cell of the head spans the columns of its group."""
    heads: list[list[Markup]] = [[]]
    stand_ins = [column.stand_in.recipe for column in table.columns]
    names = [column.name for column in table.columns]
    prefix = "stand-in for " if data == "toy" else ""
    group_cell = Markup('<th scope="colgroup" class="group" colspan="{}"><span>{}</span></th>')
    for group, size in _groups(table).items():
        text = f"{prefix}{group}"
        cell = _head_cell(text) if size == 1 else group_cell.format(size, text)
        heads[0].append(cell)
    if any(names):
        heads.append(list(map(_head_cell, names)))
    if data == "toy":
        heads.append(list(map(_head_cell, stand_ins)))
    corner = Markup('<th scope="col" class="corner" rowspan="{}">method</th>').format(len(heads))
    heads[0].insert(0, corner)
    head = joined(Markup("<tr>{}</tr>").format(joined(cells)) for cells in heads)
    body = []
    for line in lines:
        numbers = joined(map(Markup('<td class="number">{}</td>').format, line.texts))
        # The first line of a row carries its name and a rule above.
        kind, name = "", ""
        if line.name:
            kind, name = Markup(' class="first"'), f"{line.name} "
        row = Markup('<tr{}><th scope="row">{}<span class="source">{}</span></th>{}</tr>')
        body.append(row.format(kind, name, line.source, numbers))
    return scrolling(caption, head, joined(body), style="grouped")


def _by_place(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """The trials of each number, by row and column."""
    trials: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        trials.setdefault((cell.row, cell.column), []).append(cell)
    return trials


def _head_cell(text: str) -> Markup:
    # No line ends within a name or a rate.
    whole = text.replace(" %", "\u00a0%").replace("-", "\u2011")
    return Markup('<th scope="col">{}</th>').format(whole)


def _groups(table: Table) -> Counter[str]:
    """How many columns each data set has; the columns of one stand together."""
    return Counter(column.group for column in table.columns)


def _axes(data: Data) -> list[Axis]:
    batch, epochs = plans.ABLATION_BATCH, plans.num_epochs(data)
    neighbors = (f"k, number of neighbors ({batch}: all, k = m)", "with the best alpha and e = 0")
    starts = (f"e, start of NCR (epochs, of {epochs})", "with the best alpha and k")
    return [
        Axis("alpha", ("alpha", "with k = m and e = 0")),
        Axis("k", neighbors, is_log=True),
        Axis("e", starts),
    ]


def _check_any(name: str, drawn: Sequence[object]) -> None:
    if not drawn:
        raise ValueError(f"no run of {name} is finished, so there is nothing to draw. Change only.")


def _trained_on(folder: Path) -> tuple[Tensor, Labels]:
    """Features (n, D) and labels of the examples that were trained on."""
    path = folder / "predictions" / "train.safetensors"
    try:
        tensors = load_sealed(path)
        with np.load(folder / "labels.npz", allow_pickle=False) as arrays:
            rows = torch.isin(tensors["indices"], torch.from_numpy(arrays["train"]))
    except Exception as error:
        # A damaged file can raise anything.
        raise ValueError(
            f"{path} or {folder / 'labels.npz'} cannot be used ({error}). Train the run again."
        ) from error
    predictions = Predictions(*(tensors[name][rows] for name in Predictions._fields))
    return predictions.features, metrics.aligned(read_labels(folder), predictions)


def _without_empty_half(panels: Sequence[Panel]) -> tuple[float, list[Panel]]:
    """From 0 instead of −1 if no similarity is negative, as after a ReLU."""
    # The lower half of the bins is of negative similarities.
    half = _SIMILARITY_BINS // 2
    upper = []
    for panel in panels:
        if any(any(shares[:half]) for shares in panel.shares.values()):
            return -1.0, list(panels)
        shares = {kind: shares[half:] for kind, shares in panel.shares.items()}
        upper.append(panel._replace(shares=shares))
    return 0.0, upper


def _source(stand_ins: dict[str, str], data: Data) -> str:
    """The data sets behind a figure, each with its stand-in."""
    if data != "toy":
        return f"Data: {', '.join(stand_ins)}."
    pairs = [f"{recipe} data for {group}" for group, recipe in stand_ins.items()]
    noun = "Stand-in" if len(pairs) == 1 else "Stand-ins"
    return f"{noun}: {', '.join(pairs)}."


def _percent(counts: Tensor) -> list[float]:
    """Counts as shares in percent of their sum, or zeros."""
    shares: list[float] = (100 * counts.double() / counts.sum().clamp(min=1)).tolist()
    return shares


def _mean_shares(trials: Sequence[Shares]) -> Shares:
    """The mean over trials, which count alike."""
    means = {}
    for kind in trials[0]:
        by_bin = zip(*(shares[kind] for shares in trials), strict=True)
        means[kind] = [sum(shares) / len(shares) for shares in by_bin]
    return means


def _write_figure(
    name: str, drawing: Drawing, heading: Heading, more: Sequence[str], out: Path, data: Data
) -> list[Path]:
    """The three files; the page says more below the figure than a picture can."""
    png, svg, html = _paths(out, name, "png", "svg", "html")
    write_whole(png, drawing.png)
    write_whole(svg, drawing.svg.encode())
    title, remarks = "Figure", [*heading.remarks, *more]
    if data == "toy":
        title, remarks = "Figure from stand-ins", [_STAND_IN_FIGURE, *remarks]
    section = Section(title, figure(drawing.html, " ".join(remarks), label=heading.title))
    _write_page(html, heading.title, section)
    return [png, svg, html]


def _paths(out: Path, name: str, *endings: str) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    return [out / f"{name}.{ending}" for ending in endings]


def _write_page(path: Path, title: str, section: Section) -> None:
    page = fill(title, [section], source="the folders of finished runs", style=_STYLE)
    write_whole(path, page.encode())


def _number(cells: Sequence[Cell], runs: Runs) -> Number:
    finished = runs.finished(cells)

    def over_seeds(kind: str) -> Spread | None:
        return _percent_spread(runs.accuracy(cell, "test", kind) for cell in finished)

    return Number(over_seeds("final"), over_seeds("best"), over_seeds("last_10"), finished)


def _percent_spread(shares: Iterable[float | None]) -> Spread | None:
    return spread(100 * share for share in shares if share is not None)


def _text(number: Spread | None, *, has_count: bool) -> str:
    if number is None:
        return NOT_RUN
    return f"{number.text()} (n={number.num})" if has_count else number.text()


def _gap(ours: Spread | None, printed: Printed) -> float | None:
    """Points above the paper."""
    return None if ours is None or printed.mean is None else ours.mean - printed.mean


def _difference(ours: Spread | None, printed: Printed) -> str:
    """Such as "+0.4"; a difference that rounds to zero has a plus sign."""
    gap = _gap(ours, printed)
    return "–" if gap is None else f"{round(gap, 1) + 0.0:+.1f}".replace("-", "−")


def _record(
    row: Row, column: Column, printed: Printed, number: Number, data: Data
) -> dict[str, tables.Cell]:
    # Missing numbers are None, which is an empty cell.
    mean, deviation, num = number.final or (None, None, 0)
    stand_in, difference = None, _rounded(_gap(number.final, printed))
    if data == "toy":
        stand_in, difference = column.stand_in.recipe, None
    return {
        "method": row.name,
        "column": column.title,
        "stand_in": stand_in,
        "kind": "quoted" if row.method is None else "run",
        "mean": _rounded(mean),
        "deviation": _rounded(deviation),
        "n": num,
        "paper": None if printed.mean is None else printed.text,
        "paper_mean": printed.mean,
        "paper_deviation": printed.deviation,
        "difference": difference,
        "best_mean": _mean(number.best),
        "last_10_mean": _mean(number.last_10),
        "seeds": " ".join(str(cell.seed) for cell in number.cells) or None,
        "runs": " ".join(cell.run for cell in number.cells) or None,
        "quoted_from": row.cited or None,
    }


def _caption(*, has_differences: bool) -> str:
    gap = ""
    if has_differences:
        gap = " The difference is in points, above (+) or below (−) the paper."
    return (
        "Accuracy in percent on the test set after the last epoch, mean ± standard deviation of "
        f"the sample over n runs with the seeds 0, 1, and so on.{gap} What is marked as quoted are "
        "numbers of other works as the paper prints them, and not of runs."
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _mean(number: Spread | None) -> float | None:
    return None if number is None else _rounded(number.mean)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
