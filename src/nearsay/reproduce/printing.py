"""A table of the paper with our numbers beside it, as Markdown, LaTeX, CSV and HTML."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nearsay.data import tables
from nearsay.report.groups import Spread, spread
from nearsay.report.markup import Section, joined, paragraph
from nearsay.reproduce.cells import Cell, Column, Data, entitled
from nearsay.reproduce.pages import Head, grouped_table, write_page
from nearsay.reproduce.paper import Printed, Row
from nearsay.reproduce.plans import TABLES, Table
from nearsay.reproduce.runs import Runs
from nearsay.training.checkpoints import write_whole

NOT_RUN = "not run"
STAND_IN = (
    "These runs are of small stand-ins for the data: they show that all goes together, and nothing of them can be "
    "compared with the paper's numbers, which are of the data sets that the columns name."
)
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


class Number(NamedTuple):
    """What the runs of one cell came to, in percent; None where none is finished."""

    final: Spread | None
    best: Spread | None
    last_10: Spread | None
    cells: list[Cell]  # finished ones


class Line(NamedTuple):
    """A printed line: the name of the row, where its numbers are from, and these by column."""

    name: str
    source: str
    texts: list[str]


def write_table(name: str, cells: Sequence[Cell], runs: Runs, out: Path, data: Data) -> list[Path]:
    """Write `name.md`, `.tex`, `.csv` and `.html` into `out`; returns their paths."""
    table = TABLES[name]
    numbers = {
        (row.name, column.title): _number(
            [c for c in cells if (c.row, c.column) == (row.name, column.title)], runs
        )
        for row in table.rows
        for column in table.columns
    }
    lines = make_lines(table, numbers, has_differences=data != "toy")
    notes = [
        *([STAND_IN] if data == "toy" else []),
        _caption(has_differences=data != "toy"),
        *table.notes,
    ]
    out.mkdir(parents=True, exist_ok=True)
    paths = {ending: out / f"{name}.{ending}" for ending in ("md", "tex", "csv", "html")}
    write_whole(paths["md"], as_markdown(table, lines, notes, data).encode())
    write_whole(paths["tex"], as_latex(name, table, lines, notes, data).encode())
    tables.write(paths["csv"], as_columns(table, numbers, data))
    body = grouped_table(
        notes[0], _heads(table, data), [(line.name, line.source, line.texts) for line in lines]
    )
    name_of_section = "Accuracy on stand-ins" if data == "toy" else "Accuracy"
    section = Section(name_of_section, joined([body, *(paragraph(note) for note in notes[1:])]))
    write_page(paths["html"], entitled(table.title, data), [section])
    return list(paths.values())


def make_lines(
    table: Table, numbers: dict[tuple[str, str], Number], *, has_differences: bool
) -> list[Line]:
    """Three lines for a row that is run (ours, the paper's, their difference), and one for what is only quoted."""
    counts = {number.final.num for number in numbers.values() if number.final is not None}
    same = f" (n={min(counts)})" if len(counts) == 1 else ""
    lines = []
    for row in table.rows:
        printed = [each.text for each in row.printed]
        if row.method is None:
            lines.append(Line(f"{row.name} ({row.cited})", "quoted", printed))
            continue
        ours = [numbers[row.name, column.title].final for column in table.columns]
        texts = [_text(each, tells_num=not same) for each in ours]
        lines += [Line(row.name, f"nearsay{same}", texts), Line("", "paper", printed)]
        if has_differences:
            lines.append(Line("", "difference", list(map(_difference, ours, row.printed))))
    return lines


def as_markdown(table: Table, lines: Sequence[Line], notes: Sequence[str], data: Data) -> str:
    """A table that also reads as plain text."""
    header = ["method", "source", *(column.heading(data) for column in table.columns)]
    rows = [header, *([each.name, each.source, *each.texts] for each in lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    ruler = [
        "-" * width if place < 2 else f"{'-' * (width - 1)}:" for place, width in enumerate(widths)
    ]
    printed = [line(rows[0]), line(ruler), *map(line, rows[1:])]
    return "\n".join(
        [f"# {entitled(table.title, data)}", "", *printed, "", *(f"{note}\n" for note in notes)]
    )


def as_latex(
    name: str, table: Table, lines: Sequence[Line], notes: Sequence[str], data: Data
) -> str:
    r"""A table environment for the package booktabs."""
    groups = list(dict.fromkeys(column.group for column in table.columns))
    sizes = [sum(column.group == group for column in table.columns) for group in groups]
    heads = [
        rf"\multicolumn{{{size}}}{{c}}{{{_latex(group)}}}"
        for group, size in zip(groups, sizes, strict=True)
    ]
    names = [_latex(column.name) for column in table.columns]
    stands = [_latex(column.stand_in.recipe) for column in table.columns]
    body = []
    for number, line in enumerate(lines):
        if number and line.name:
            is_other = (line.source == "quoted") != (lines[number - 1].source == "quoted")
            body.append(r"\midrule" if is_other else r"\addlinespace[2pt]")
        body.append(rf"{' & '.join(map(_latex, (line.name, line.source, *line.texts)))} \\")
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering\scriptsize",
            rf"  \caption{{{_latex(' '.join([f'{entitled(table.title, data)}.', *notes]))}}}",
            rf"  \label{{tab:{name}}}",
            rf"  \begin{{tabular}}{{ll{'c' * len(names)}}}",
            r"    \toprule",
            rf"    & & {' & '.join(heads)} \\",
            *([rf"    Method & Source & {' & '.join(names)} \\"] if any(names) else []),
            *([rf"    & stand-in & {' & '.join(stands)} \\"] if data == "toy" else []),
            r"    \midrule",
            *(f"    {each}" for each in body),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def as_columns(
    table: Table, numbers: dict[tuple[str, str], Number], data: Data
) -> dict[str, list[tables.Cell]]:
    """A row for each number; the best accuracy and the mean of the last ten are here, and nowhere else."""
    rows = [
        _record(row, column, printed, numbers[row.name, column.title], data)
        for row in table.rows
        for column, printed in zip(table.columns, row.printed, strict=True)
    ]
    return {key: [each[key] for each in rows] for key in rows[0]}


def _heads(table: Table, data: Data) -> list[list[Head]]:
    """The lines above the numbers: data sets, then noise or the like if there is any, then what stands in for them."""
    groups = Counter(
        column.group for column in table.columns
    )  # in their order, as columns of a group are together
    stand_in = "stand-in for " if data == "toy" else ""
    heads = [[Head(f"{stand_in}{group}", size) for group, size in groups.items()]]
    if any(column.name for column in table.columns):
        heads.append([Head(column.name, 1) for column in table.columns])
    if data == "toy":
        heads.append([Head(column.stand_in.recipe, 1) for column in table.columns])
    return heads


def _number(cells: Sequence[Cell], runs: Runs) -> Number:
    finished = runs.finished(cells)

    def over_seeds(kind: str) -> Spread | None:
        shares = (runs.accuracy(cell, "test", kind) for cell in finished)
        return spread(100 * share for share in shares if share is not None)

    return Number(over_seeds("final"), over_seeds("best"), over_seeds("last_10"), finished)


def _text(number: Spread | None, *, tells_num: bool) -> str:
    if number is None:
        return NOT_RUN
    return f"{number.text()} (n={number.num})" if tells_num else number.text()


def _gap(ours: Spread | None, printed: Printed) -> float | None:
    """Points above the paper."""
    return None if ours is None or printed.mean is None else ours.mean - printed.mean


def _difference(ours: Spread | None, printed: Printed) -> str:
    """Such as "+0.4"; what rounds to nothing is not below."""
    gap = _gap(ours, printed)
    return "–" if gap is None else f"{round(gap, 1) + 0.0:+.1f}".replace("-", "−")


def _record(
    row: Row, column: Column, printed: Printed, number: Number, data: Data
) -> dict[str, tables.Cell]:
    return {
        "method": row.name,
        "column": column.title,
        "stand_in": column.stand_in.recipe if data == "toy" else None,
        "kind": "quoted" if row.method is None else "run",
        "mean": _mean(number.final),
        "deviation": None if number.final is None else _rounded(number.final.deviation),
        "n": 0 if number.final is None else number.final.num,
        "paper": None if printed.mean is None else printed.text,
        "paper_mean": printed.mean,
        "paper_deviation": printed.deviation,
        "difference": None if data == "toy" else _rounded(_gap(number.final, printed)),
        "best_mean": _mean(number.best),
        "last_10_mean": _mean(number.last_10),
        "seeds": " ".join(str(cell.seed) for cell in number.cells) or None,
        "runs": " ".join(cell.run for cell in number.cells) or None,
        "quoted_from": row.cited or None,
    }


def _caption(*, has_differences: bool) -> str:
    gap = (
        " The difference is in points, above (+) or below (−) the paper." if has_differences else ""
    )
    return (
        "Accuracy in percent on the test set after the last epoch, mean ± standard deviation of the sample over n runs "
        f"with the seeds 0, 1, and so on.{gap} What is marked as quoted are numbers of other works as the paper prints "
        "them, and not of runs."
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _mean(number: Spread | None) -> float | None:
    return None if number is None else _rounded(number.mean)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
