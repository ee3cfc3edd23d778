"""Sections of the page that answer one question each, and the variations of methods."""

from collections.abc import Sequence
from typing import NamedTuple

from lab.cells import NOTHING, Numbers, difference, table
from lab.record import as_wanted
from lab.run_queue import (
    BY_KEY,
    OPEN_SET,
    OPEN_SET_METHODS,
    OWN,
    PAIRS,
    PARTS,
    PARTS_COLUMNS,
    RATES,
    STAGES,
    VARIANTS,
    Column,
    Point,
    Wanted,
    ablated,
    cell,
    full_title,
    leak,
    without,
)
from nearsay.recipes.cifar import LEARNED
from nearsay.report.runs import Spread

_STAGE_TITLES = {
    "alpha": "α, the weight of NCR",
    "k": "k, the neighbors",
    "e": "e, the epoch at which NCR starts",
}


class Best(NamedTuple):
    """The setting that is best on held-out examples."""

    point: Point
    held_out: Spread


def sections(numbers: Numbers) -> list[str]:
    """All of them, as blocks of Markdown."""
    return [
        *_leak(numbers),
        *_open_set(numbers),
        *_ablation(numbers),
        *_variant(numbers),
        *_parts(numbers),
    ]


def best(numbers: Numbers, rate: int, points: Sequence[Point]) -> Best | None:
    """The first of the best on held-out examples, None unless all were run."""
    found = [(point, numbers.accuracy(ablated(rate, point), "validation")) for point in points]
    known = [Best(point, number) for point, number in found if number is not None]
    return max(known, key=lambda each: each.held_out.mean) if len(known) == len(points) else None


def _leak(numbers: Numbers) -> list[str]:
    rows = []
    for method in PAIRS:
        shared, apart = cell(BY_KEY["symmetric-40"], method), leak(method)
        one, other = numbers.accuracy(shared), numbers.accuracy(apart)
        gap = NOTHING if one is None else difference(other, one.mean)
        texts = [numbers.shown(shared), numbers.shown(apart)]
        rows.append([f"`{method}`", *texts, gap, numbers.minutes([shared, apart])])
    return [
        "### What other noise for each network would gain",
        "The public ELR+ draws noise and split anew for each of its two networks, so that each is "
        "taught by one that has seen right labels of its wrong ones. Here both learn the same "
        "labels; `noise_per_network=true` draws it for each as the public code does (nothing is "
        "split off), to measure the difference. Symmetric noise, 40 %.",
        table(("method", "shared noise", "noise per network", "difference", "min per run"), rows),
        f"The command: `{leak(PAIRS[-1]).command()}`, and the same with `method={PAIRS[0]}`.",
    ]


def _open_set(numbers: Numbers) -> list[str]:
    rows = []
    for method in OPEN_SET_METHODS:
        wanted = [cell(column, method) for column in OPEN_SET]
        texts = []
        for each in wanted:
            texts += [
                numbers.shown(each),
                *(numbers.detected(each, kind) for kind in ("auroc", "average_precision")),
            ]
        rows.append([f"`{method}`", *texts, numbers.minutes(wanted)])
    parts = [
        f"{column.title}: {part}" for column in OPEN_SET for part in ("accuracy", "AUROC", "AP")
    ]
    commands = [f"`{cell(column, 'ncr').command()}`" for column in OPEN_SET]
    return [
        "### Images from outside",
        "40 % of the images are replaced by others and keep their labels, as a stand-in for noise "
        f"from the web: six classes of CIFAR-10 ({', '.join(LEARNED)}) by images of the four left "
        "out, which are neither to be learned nor tested; and all of CIFAR-10 by images of "
        "CIFAR-100. What is detected are the replaced images.",
        table(("method", *parts, "min per run"), rows),
        f"The commands: {commands[0]} and {commands[1]}, with other methods alike.",
    ]


def _ablation(numbers: Numbers) -> list[str]:
    blocks = [
        "### α, k and e",
        "One setting of `ncr` varies, the others are the recipe's (α 0.9, k 10, e 0). 45 000 "
        "examples are trained on; the best value is chosen by the accuracy on the other 5 000, "
        "whose labels are as noisy as the rest, and the test accuracy below it decides nothing. "
        "With noisy labels to compare with, an accuracy on held-out examples is low even where "
        "all is right, and serves to compare values at one rate of noise.",
    ]
    for stage, points in STAGES.items():
        rows = []
        for rate in RATES:
            chosen = best(numbers, rate, points)
            for split, title in (("validation", "held out"), ("test", "test")):
                texts = [numbers.shown(ablated(rate, point), split) for point in points]
                is_choice = split == "validation"
                value = NOTHING if chosen is None or not is_choice else _value(stage, chosen.point)
                cost = (
                    numbers.minutes(ablated(rate, point) for point in points) if is_choice else ""
                )
                rows.append(
                    [
                        f"{rate} %" if is_choice else "",
                        title,
                        *texts,
                        value if is_choice else "",
                        cost,
                    ]
                )
        values = [_value(stage, point) for point in points]
        header = ("noise", "accuracy", *values, "best held out", "min per run")
        blocks += [f"#### {_STAGE_TITLES[stage]}", table(header, rows, num_left=2)]
    return [*blocks, f"The command: `{ablated(40, Point()).command()}`, with other values alike."]


def _variant(numbers: Numbers) -> list[str]:
    """The direction of KL: as the paper prints it, or as its released code has it."""
    rows, gaps, seeds = [], [], []
    alphas = [point.alpha for point in VARIANTS["paper"]]
    for rate in RATES:
        found = {name: best(numbers, rate, points) for name, points in VARIANTS.items()}
        for name, points in VARIANTS.items():
            texts = []
            for alpha in alphas:
                point = next((each for each in points if each.alpha == alpha), None)
                texts.append(
                    NOTHING if point is None else numbers.shown(ablated(rate, point), "validation")
                )
            chosen = found[name]
            test = NOTHING if chosen is None else numbers.shown(ablated(rate, chosen.point))
            cost = numbers.minutes(ablated(rate, point) for point in points)
            value = NOTHING if chosen is None else _value("alpha", chosen.point)
            rows.append(
                [f"{rate} %" if name == "paper" else "", f"`{name}`", *texts, value, test, cost]
            )
        paper, released = found["paper"], found["released"]
        if paper is not None and released is not None:
            gaps.append(paper.held_out.mean - released.held_out.mean)
            seeds += [paper.held_out.num, released.held_out.num]
    example = ablated(40, VARIANTS["released"][-2])
    header = (
        "noise",
        "variant",
        *(f"α {alpha}" for alpha in alphas),
        "best α",
        "its test",
        "min per run",
    )
    return [
        "### The direction of KL",
        "`variant=paper` takes KL(own ‖ neighbors), `variant=released` KL(neighbors ‖ own) and "
        "times T². Accuracy on the 5 000 that are held out, whose labels are as noisy as the "
        "rest, by α; k is 10 and e is 0. At one α NCR weighs four times as much in `released`: "
        "its α 0.7 and 0.9 weigh as 0.9 and 0.973 of `paper`.",
        table(header, rows, num_left=2),
        _verdict(gaps, seeds),
        f"The command: `{example.command()}`, with other values alike.",
    ]


def _parts(numbers: Numbers) -> list[str]:
    """What each part of our own method is worth."""
    rows = []
    for part in (None, *PARTS):
        texts, runs = [], [without(key, part) for key in PARTS_COLUMNS]
        for key, run in zip(PARTS_COLUMNS, runs, strict=True):
            whole = numbers.accuracy(without(key, None), "validation")
            found = numbers.accuracy(run, "validation")
            gap = NOTHING if whole is None or part is None else difference(found, whole.mean)
            texts += [numbers.shown(run, "validation"), gap, numbers.shown(run)]
        name = ["nothing", NOTHING] if part is None else [part.title, f"`{part.override}`"]
        rows.append([*name, *texts, numbers.minutes(runs)])
    example = without(PARTS_COLUMNS[-1], PARTS[-1])
    heads = [
        f"{BY_KEY[key].title}: {kind}"
        for key in PARTS_COLUMNS
        for kind in ("held out", "difference", "test")
    ]
    return [
        f"### What each part of `{OWN}` is worth",
        "One part is left out, and with it goes what needs it: without the vote no label is in "
        "doubt, so that relations have no part, and without sure beliefs no label is weighed "
        "against one. All else is as the recipe has it. 45 000 examples are trained on; the "
        "difference is that on the other 5 000, whose labels are as noisy as the rest, and the "
        "test accuracy decides nothing.",
        table(("left out", "by", *heads, "min per run"), rows, num_left=2),
        f"The command: `{example.command()}`, with other changes alike.",
    ]


def _verdict(gaps: Sequence[float], seeds: Sequence[int]) -> str:
    if not gaps:
        told = (
            "Which of them is better on held-out examples is not known before all runs of a noise "
        )
        return f"{told}rate are done."
    mean = sum(gaps) / len(gaps)
    wins = sum(gap > 0 for gap in gaps)
    better = "paper" if mean > 0 else "released"
    told = "one seed" if min(seeds) == 1 else f"{min(seeds)} seeds"
    found = "they tie" if round(mean, 2) == 0 else f"`{better}` is, by {abs(mean):.2f} points"
    return (
        f"With α chosen for each, `paper` is ahead at {wins} of {len(gaps)} noise rates on "
        f"held-out examples; on average {found} ({told} of each setting)."
    )


def _value(stage: str, point: Point) -> str:
    value = getattr(point, stage)
    return "all" if value is None else str(value)


def variations(numbers: Numbers, wanted: Sequence[Wanted]) -> list[str]:
    """Runs with one thing changed, beside the method as it is; [] if there are none."""
    known = {record["name"] for each in wanted for record in numbers.ever(each)}
    others = {name: record for name, record in numbers.records.items() if name not in known}
    rows: dict[str, list[str]] = {}
    for name in sorted(others):
        one = as_wanted(others[name])
        if _more(one) or _changes(
            one
        ):  # else it is a cell of the tables above that nobody had asked for
            rows.setdefault(numbers.of(one)[0]["name"], _row(numbers, one))
    if not rows:
        return []
    header = (
        "noise",
        "method",
        "with",
        "test",
        "difference",
        "held out",
        "difference",
        "AUROC",
        "min per run",
    )
    return [
        "### Variations",
        "Runs in which one thing or another is changed. A difference is to the method as it is, "
        "trained on as many examples, and what is better is judged on held-out examples, where "
        "there are some.",
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
    noise = one.recipe if column is None else full_title(column)
    return [noise, f"`{one.method}`", told, *cells, found, numbers.minutes([one])]


def _column(one: Wanted) -> Column | None:
    same = [column for column in BY_KEY.values() if column.recipe == one.recipe]
    return next((column for column in same if set(column.arguments) <= set(one.arguments)), None)


def _more(one: Wanted) -> list[str]:
    """Arguments that a cell of the other tables has not."""
    column = _column(one)
    usual = {
        *(column.arguments if column is not None else ()),
        f"method={one.method}",
        f"protocol={one.protocol}",
    }
    return [word for word in one.arguments if word not in usual and not word.startswith("seed=")]


def _changes(one: Wanted) -> list[str]:
    return [word for word in one.overrides if not word.startswith("machine.")]
