"""The queue of runs: every run that the page of results wants, in the order in which they are run.

`benchmarks/records/queue.json` is this queue as a file; page.py writes it and worker.py reads it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Our own method, as `method=` names it: the name of its records and of its rows.
OWN = "neighbor-vote"
Tier = Literal["A", "B", "C", "D"]
Protocol = Literal["short", "paper"]
EPOCHS: dict[Protocol, int] = {"paper": 250, "short": 100}  # in the order of the page
FILE = "queue.json"
PLACES = {  # of the files that runs need, in the commands that are printed
    "cifar10": "data",
    "cifar10n": "data/CIFAR-10_human.pt",
    "cifar100": "data",
    "cifar100n": "data/CIFAR-100_human.pt",
}
_FILES = {  # recipe -> what its arguments of files name, in the words of PLACES
    "cifar10": {"path": "cifar10", "labels": "cifar10n", "outside": "cifar100"},
    "cifar100": {"path": "cifar100", "labels": "cifar100n", "outside": "cifar10"},
}
_COMPILED: tuple[str, ...] = ("machine.compile=true",)
_START = 30.0  # seconds to compile, and to predict at the end
_SECONDS = {
    "one": 0.65,
    "pair": 1.75,
    "own": 1.8,
}  # an epoch on an H200, guessed until runs tell better


class Column(NamedTuple):
    """A kind of noise: a column of a table."""

    key: str  # in the names of runs
    title: str
    arguments: tuple[str, ...]
    recipe: str = "cifar10"


class DataSet(NamedTuple):
    """The columns that have tables of their own."""

    name: str
    synthetic: tuple[Column, ...]
    human_name: str
    human: tuple[Column, ...]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One run, without the places of files."""

    name: str  # the same for ever: the name of its file
    tier: Tier = "C"
    protocol: Protocol
    recipe: str = "cifar10"
    arguments: tuple[str, ...]  # key=value
    overrides: tuple[str, ...] = _COMPILED  # a.b=c
    seconds: float = 0.0  # that it is guessed to take on an H200

    def words(self, places: Mapping[str, str]) -> list[str]:
        """The arguments of `nearsay train`; `places` has the keys of PLACES."""
        files = [f"{argument}={places[name]}" for argument, name in self.needs().items()]
        return [self.recipe, *files, *self.arguments]

    def needs(self) -> dict[str, str]:
        """The arguments that name files, and which files, as PLACES names them."""
        files = _FILES.get(self.recipe, {})
        wanted = {"path"}
        if "kind=human" in self.arguments:
            wanted.add("labels")
        if "kind=open-set" in self.arguments:
            wanted.add("outside")
        return {argument: name for argument, name in files.items() if argument in wanted}

    def command(self) -> str:
        """The line that does it again."""
        changes = (f"--set {change}" for change in self.overrides)
        return " ".join(["nearsay train", *self.words(PLACES), *changes])

    @property
    def method(self) -> str:
        """What it trains with."""
        return next(
            (word.partition("=")[2] for word in self.arguments if word.startswith("method=")), ""
        )


METHODS = (
    "standard",
    "mixup",
    "label-smoothing",
    "ncr",
    "ncr+mixup",
    "elr",
    "ncr+elr",
    "elr+",
    "ncr+elr+",
    OWN,
)
SYMMETRIC = tuple(
    Column(f"symmetric-{rate}", f"sym {rate} %", ("kind=symmetric", f"noise={rate / 100}"))
    for rate in (20, 40, 50, 80, 90)
)
ASYMMETRIC = Column("asymmetric-40", "asym 40 %", ("kind=asymmetric", "noise=0.4"))
HUMAN = tuple(
    Column(f"human-{column}", f"10N {title}", ("kind=human", f"column={column}"))
    for column, title in (("aggre", "aggregate"), ("random1", "random 1"), ("worse", "worst"))
)
COLUMNS = (*SYMMETRIC, ASYMMETRIC, *HUMAN)
SYNTHETIC100 = (
    *(column._replace(key=f"cifar100-{column.key}", recipe="cifar100") for column in SYMMETRIC),
    Column(
        "cifar100-asymmetric-40", "asym 40 %", ("kind=asymmetric-next", "noise=0.4"), "cifar100"
    ),
)
HUMAN100 = (Column("cifar100-human", "100N", ("kind=human",), "cifar100"),)
COLUMNS100 = (*SYNTHETIC100, *HUMAN100)

OPEN_SET = (
    Column("open-set-within-40", "left-out classes", ("kind=open-set-within", "noise=0.4")),
    Column("open-set-40", "CIFAR-100", ("kind=open-set", "noise=0.4")),
)
DATA_SETS = {  # by recipe
    "cifar10": DataSet("CIFAR-10", (*SYMMETRIC, ASYMMETRIC), "CIFAR-10N", HUMAN),
    "cifar100": DataSet("CIFAR-100", SYNTHETIC100, "CIFAR-100N", HUMAN100),
}
BY_KEY = {column.key: column for column in (*COLUMNS, *COLUMNS100, *OPEN_SET)}

FIRST_METHODS = ("standard", "ncr", "ncr+mixup", "elr+", "ncr+elr+")
FIRST_COLUMNS = ("symmetric-40", "human-worse", "symmetric-80", "asymmetric-40")
HEADLINE_METHODS = ("ncr+mixup", "ncr+elr+", OWN)
HEADLINE_COLUMNS = ("symmetric-40", "human-worse")
HEADLINE_SEEDS = (0, 1, 2)
OPEN_SET_METHODS = (*FIRST_METHODS, OWN)
PAIRS = ("elr+", "ncr+elr+")  # of networks, which alone can be given different noise

RATES = (0, 20, 40)
ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEIGHBORS: tuple[int | None, ...] = (1, 5, 10, 50, 100, None)  # None is all of the batch
STARTS = (0, 20, 40, 60, 80)  # the shares of the run at which the paper's figure has its points
RELEASED_ALPHAS = (0.3, 0.5, 0.7, 0.9)
# With 0.973, `paper` weighs as much as `released` with 0.9, since that term is four times as large.
HEAVY = 0.973


class Point(NamedTuple):
    """A setting of NCR in the ablation; the default is what the recipe takes."""

    alpha: float = 0.9
    k: int | None = 10
    e: int = 0
    variant: Literal["paper", "released"] = "paper"


STAGES: dict[str, tuple[Point, ...]] = {
    "alpha": tuple(Point(alpha=alpha) for alpha in ALPHAS),
    "k": tuple(Point(k=k) for k in NEIGHBORS),
    "e": tuple(Point(e=start) for start in STARTS),
}
VARIANTS: dict[str, tuple[Point, ...]] = {
    "paper": (*STAGES["alpha"], Point(alpha=HEAVY)),
    "released": tuple(Point(alpha=alpha, variant="released") for alpha in RELEASED_ALPHAS),
}


class Part(NamedTuple):
    """Something that our own method does, and the change that leaves it out."""

    key: str  # in the names of runs
    title: str
    override: str


PARTS = (
    Part("vote", "labels weighed by the vote of their neighbors", "objective.agreement_power=0"),
    Part("beliefs", "sure beliefs in the place of labels", "objective.threshold=1"),
    Part("given-label", "the given label against a belief", "objective.label_power=0"),
    Part("strong-view", "learning from the strong view", "objective.strong=0"),
    Part("feature-weight", "its features near those of the teacher", "objective.feature_weight=0"),
    Part("relation-weight", "relations of examples in doubt", "objective.relation_weight=0"),
    Part("mixup", "mixup", "mixup=none"),
)
PARTS_COLUMNS = ("symmetric-80", "human-worse")


def full_title(column: Column) -> str:
    """The title of a column in a table of several data sets."""
    return (
        column.title
        if column.recipe == "cifar10"
        else f"{DATA_SETS[column.recipe].name} {column.title}"
    )


def queue() -> list[Wanted]:
    """All runs, each once: first what is required, then the rest."""
    found: dict[str, Wanted] = {}
    for each in (*_first(), *_headlines(), *_rest(), *_hundred()):
        found.setdefault(each.name, each)
    return list(found.values())


def cell(
    column: Column, method: str, *, protocol: Protocol = "short", seed: int = 0, tier: Tier = "C"
) -> Wanted:
    """The run of one method under one kind of noise."""
    arguments = (f"method={method}", *column.arguments)
    name = f"{protocol}-{column.key}-{method}"
    return _wanted(name, arguments, protocol, seed, tier, recipe=column.recipe)


def leak(method: str) -> Wanted:
    """A pair of networks at 40 % symmetric noise, each with a draw of noise of its own."""
    column = BY_KEY["symmetric-40"]
    arguments = (f"method={method}", *column.arguments, "noise_per_network=true")
    return _wanted(f"short-{column.key}-{method}-noise-per-network", arguments, "short", 0, "C")


def ablated(rate: int, point: Point) -> Wanted:
    """NCR with a setting of its own, judged on 5 000 examples that it is not trained on."""
    k = "all" if point.k is None else point.k
    settings = (
        f"alpha={point.alpha}",
        f"start={point.e}",
        f"variant={point.variant}",
        "held_out=5000",
        f"k={k}",
    )
    name = (
        f"short-held-out-symmetric-{rate}-ncr-{point.variant}-alpha-{point.alpha}-k-{k}-e-{point.e}"
    )
    return _wanted(
        name, ("method=ncr", "kind=symmetric", f"noise={rate / 100}", *settings), "short", 0, "C"
    )


def without(key: str, part: Part | None) -> Wanted:
    """Our own method in a column, without a part of it or as it is, judged on held-out examples."""
    stem, overrides = f"short-held-out-{key}-{OWN}", _COMPILED
    if part is not None:
        stem, overrides = f"{stem}-without-{part.key}", (part.override, *overrides)
    arguments = (f"method={OWN}", *BY_KEY[key].arguments, "held_out=5000")
    return _wanted(stem, arguments, "short", 0, "C", overrides)


def write_queue(wanted: Iterable[Wanted], done: Iterable[str] = ()) -> str:
    """The queue as JSON, a run a line; each says whether it is done."""
    finished = set(done)
    lines = [
        json.dumps({**asdict(each), "done": each.name in finished}, ensure_ascii=False)
        for each in wanted
    ]
    return "[\n " + ",\n ".join(lines) + "\n]\n"


def read_queue(path: Path) -> list[Wanted]:
    """What a file of `write_queue` says; ValueError if it is none."""
    try:
        return [_read(each) for each in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        cure = "Write it again with python benchmarks/lab/page.py."
        raise ValueError(f"{path} is no queue of runs: {error}. {cure}") from error


def _read(entry: dict[str, Any]) -> Wanted:  # Any: what JSON can hold
    fields = {key: value for key, value in entry.items() if key != "done"}
    fields |= {key: tuple(fields[key]) for key in ("arguments", "overrides") if key in fields}
    if fields["protocol"] not in EPOCHS:
        raise ValueError(f"the protocol {fields['protocol']!r} is none of {', '.join(EPOCHS)}")
    return Wanted(**fields)


def _first() -> Iterator[Wanted]:
    for key, method in product(FIRST_COLUMNS, FIRST_METHODS):
        yield cell(BY_KEY[key], method, tier="A")


def _headlines() -> Iterator[Wanted]:
    for seed, method, key in product(HEADLINE_SEEDS, HEADLINE_METHODS, HEADLINE_COLUMNS):
        yield cell(BY_KEY[key], method, protocol="paper", seed=seed, tier="B")


def _rest() -> Iterator[Wanted]:
    """What has a target, then the questions with an answer, then the other cells."""
    for column in COLUMNS:
        yield cell(column, OWN)
    for rate, points in product(reversed(RATES), VARIANTS.values()):
        for point in points:
            yield ablated(rate, point)
    for column in COLUMNS:
        yield cell(column, "ncr+elr+")
    yield cell(BY_KEY["human-aggre"], "ncr+mixup")  # for the detection of wrong labels
    yield from map(leak, PAIRS)
    for key, part in product(PARTS_COLUMNS, (None, *PARTS)):
        yield without(key, part)
    for column, method in product(OPEN_SET, OPEN_SET_METHODS):
        yield cell(column, method)
    for method, column in product(METHODS, COLUMNS):
        yield cell(column, method)
    for rate, points in product(reversed(RATES), STAGES.values()):
        for point in points:
            yield ablated(rate, point)


def _hundred() -> Iterator[Wanted]:
    """CIFAR-100: our own method, then the methods of the first tier, then the others."""
    for method in dict.fromkeys((OWN, *reversed(FIRST_METHODS), *METHODS)):
        for column in COLUMNS100:
            yield cell(column, method, tier="D")


def _wanted(
    stem: str,
    arguments: tuple[str, ...],
    protocol: Protocol,
    seed: int,
    tier: Tier,
    overrides: tuple[str, ...] = _COMPILED,
    recipe: str = "cifar10",
) -> Wanted:
    method = arguments[0].partition("=")[2]
    pace = _SECONDS["pair" if method in PAIRS else "own" if method == OWN else "one"]
    return Wanted(
        name=f"{stem}-seed-{seed}",
        tier=tier,
        protocol=protocol,
        recipe=recipe,
        arguments=(*arguments, f"protocol={protocol}", f"seed={seed}"),
        overrides=overrides,
        seconds=_START + pace * EPOCHS[protocol],
    )
