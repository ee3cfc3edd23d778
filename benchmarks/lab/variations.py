"""The section of runs that no other table has: methods with one thing changed, beside the method as it is."""

from collections.abc import Sequence

from lab.cells import NOTHING, Numbers, difference, table
from lab.record import as_wanted
from lab.run_queue import BY_KEY, Column, Wanted


def section(numbers: Numbers, wanted: Sequence[Wanted]) -> list[str]:
    """Rows of what differs, its accuracy and how far that is from the method without it; [] if there is none."""
    known = {record["name"] for each in wanted for record in numbers.ever(each)}
    others = {name: record for name, record in numbers.records.items() if name not in known}
    rows: dict[str, list[str]] = {}
    for name in sorted(others):
        one = as_wanted(others[name])
        if _more(one) or _changes(one):  # else it is a cell of the tables above that nobody had asked for
            rows.setdefault(numbers.of(one)[0]["name"], _row(numbers, one))
    if not rows:
        return []
    header = ("noise", "method", "with", "test", "difference", "held out", "difference", "AUROC", "min per run")
    return [
        "### Variations",
        "Runs in which one thing or another is changed. A difference is to the method as it is, trained on as many "
        "examples, and what is better is judged on held-out examples, where there are some.",
        table(header, sorted(rows.values()), num_left=3),
    ]


def _row(numbers: Numbers, one: Wanted) -> list[str]:
    column, more, changes = _column(one), _more(one), _changes(one)
    plain = [word for word in more if word.startswith("held_out=")]
    kept = tuple(word for word in one.arguments if word not in more or word in plain)
    base = Wanted(name="", protocol=one.protocol, recipe=one.recipe, arguments=kept)
    cells = []
    for split in ("test", "validation"):
        ours, before = numbers.accuracy(one, split), numbers.accuracy(base, split)
        is_base = before is None or (not changes and more == plain)
        gap = NOTHING if before is None or is_base else difference(ours, before.mean)
        cells += [NOTHING if ours is None else numbers.shown(one, split), gap]
    told = " ".join(f"`{word}`" for word in (*more, *changes))
    found = NOTHING if numbers.detection(one, "auroc") is None else numbers.detected(one, "auroc")
    noise = one.recipe if column is None else column.title
    return [noise, f"`{one.method}`", told, *cells, found, numbers.minutes([one])]


def _column(one: Wanted) -> Column | None:
    return next((each for each in BY_KEY.values() if set(each.arguments) <= set(one.arguments)), None)


def _more(one: Wanted) -> list[str]:
    """Arguments that a cell of the other tables has not."""
    column = _column(one)
    usual = {*(column.arguments if column is not None else ()), f"method={one.method}", f"protocol={one.protocol}"}
    return [word for word in one.arguments if word not in usual and not word.startswith("seed=")]


def _changes(one: Wanted) -> list[str]:
    return [word for word in one.overrides if not word.startswith("machine.")]
