"""The runs of a sweep as values: lists and ranges are read, and mistakes found, before any run."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from nearsay.config.calling import Call, apply_overrides, call_recipe
from nearsay.config.records import run_name, to_tree
from nearsay.config.text import NUMBER, quoted, quoted_key, split_pairs
from nearsay.errors import ConfigError, NoSplit

MOST_RUNS = 10_000
# A comma between values; a comma inside (64,32) belongs to one value.
_COMMA = re.compile(r",(?![^(\[]*[)\]])")


class Planned(NamedTuple):
    """One run of a sweep."""

    name: str  # of its folder
    call: Call
    words: tuple[str, ...]  # that `nearsay train` would take for it


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    is_log: bool = False  # equal factors are equally likely, instead of equal distances
    is_whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A key and what it may be; one text means that there is nothing to choose."""

    key: str
    text: str  # as it was written
    texts: tuple[str, ...]  # the values, or the ends of the range
    is_override: bool  # a field of the experiment, rather than an argument of the recipe
    range: Range | None = None

    @property
    def label(self) -> str:
        """The key as on a command line, where an argument and a field may have one name."""
        return f"--set {self.key}" if self.is_override else self.key

    @property
    def is_open(self) -> bool:
        """Whether there is something to choose."""
        return len(self.texts) > 1

    def error(self, condition: str, cure: str) -> ConfigError:
        """What is wrong with its text, as an exception."""
        return _error(self.key, self.text, condition, cure)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a search chooses from."""

    recipe: str
    name: str  # the same on every machine that searches there
    choices: tuple[Choice, ...]


Chosen = Sequence[tuple[Choice, str]]


def grid(recipe: str, arguments: Sequence[str], overrides: Sequence[str] = ()) -> list[Planned]:
    """A run for each combination of listed values, as in method=standard,ncr.

    The last key changes fastest. ConfigError if any of them is wrong, and for more than 10 000.
    """
    choices = _read_choices(arguments, overrides)
    for choice in choices:
        if choice.range is not None:
            raise choice.error("a list of values", "For a range add --search optuna.")
    num = math.prod(len(choice.texts) for choice in choices)
    if num > MOST_RUNS:
        raise ConfigError(
            f"runs must be {MOST_RUNS} or fewer, got {num}. Shorten the lists, or use "
            "--search optuna."
        )
    planned = []
    for texts in product(*(choice.texts for choice in choices)):
        planned.append(plan(recipe, list(zip(choices, texts, strict=True))))
    return planned


def make_space(recipe: str, arguments: Sequence[str], overrides: Sequence[str] = ()) -> Space:
    """What to search: lists, and ranges as objective.alpha=0.1..0.5 or optimizer.lr=1e-4..1e-1:log.

    Every end and every value is tried on the configuration, with the first values of all other
    keys. A range is of whole numbers if the field takes nothing else. ConfigError also if there are
    no validation examples, or if trials would have different ones or different labels for them.
    """
    choices = _read_choices(arguments, overrides)
    if not any(choice.is_open for choice in choices):
        raise ConfigError(
            "there is nothing to search. Give a range such as optimizer.lr=1e-4..1e-1:log, or a "
            "list."
        )
    for choice in choices:
        if choice.is_open and choice.key.split(".")[-1] == "seed":
            raise choice.error("one seed", "A search would choose the luckiest one.")
    first = plan(recipe, _firsts(choices))
    for place, choice in enumerate(choices):
        for text in choice.texts[1:]:
            if _judges_differ(first.call, _plan_with(recipe, choices, place, text).call):
                raise choice.error(
                    "one value",
                    "Trials would be judged by different labels, and the easiest ones would win.",
                )
    _check_validation(recipe, first.call)
    origin = first.call.origin
    written = {
        "recipe": origin["recipe"],
        "arguments": {choice.key: choice.text for choice in choices if not choice.is_override},
        "overrides": [f"{choice.key}={choice.text}" for choice in choices if choice.is_override],
        "sha256": origin.get("sha256", ""),
    }
    settled = tuple(_settle(recipe, choices, place) for place in range(len(choices)))
    return Space(recipe=recipe, name=run_name(written), choices=settled)


def plan(recipe: str, chosen: Chosen) -> Planned:
    """The run with these choices; ConfigError if they are wrong, or do not go together."""
    arguments, overrides, words = [], [], [recipe]
    for choice, text in chosen:
        pair = f"{choice.key}={text}"
        if choice.is_override:
            overrides.append(pair)
            words += ["--set", pair]
        else:
            arguments.append(pair)
            words.append(pair)
    call = apply_overrides(call_recipe(recipe, arguments), overrides)
    return Planned(run_name(call.origin), call, tuple(words))


def _read_choices(arguments: Sequence[str], overrides: Sequence[str]) -> list[Choice]:
    choices = [_read_choice(key, text, False) for key, text in split_pairs(arguments).items()]
    choices += [_read_choice(key, text, True) for key, text in split_pairs(overrides).items()]
    return choices


def _read_choice(key: str, text: str, is_override: bool) -> Choice:
    span = _read_range(key, text)
    if span is not None:
        ends = tuple(text.partition(":")[0].split("..", 1))
        return Choice(key=key, text=text, texts=ends, is_override=is_override, range=span)
    texts = tuple(part.strip() for part in _COMMA.split(text))
    choice = Choice(key=key, text=text, texts=texts, is_override=is_override)
    if not all(texts):
        raise choice.error("values between commas", "List values as in seed=0,1,2.")
    if len(set(texts)) < len(texts):
        twice = next(value for value in texts if texts.count(value) > 1)
        raise choice.error("different values", f"List {quoted(twice)} once.")
    if choice.is_open and is_override and key.startswith("machine."):
        raise choice.error("one value", "The machine does not make another run.")
    return choice


def _read_range(key: str, text: str) -> Range | None:
    """The range of `low..high` or `low..high:log`, None for other text."""
    ends, _, kind = text.partition(":")
    low, dots, high = ends.partition("..")
    if not dots or not re.fullmatch(NUMBER, low) or not re.fullmatch(NUMBER, high):
        return None
    if kind not in ("", "log") or (text.endswith(":") and not kind):
        raise _error(key, text, "low..high or low..high:log", f"Try {ends}:log.")
    span = Range(low=float(low), high=float(high), is_log=kind == "log")
    if not (math.isfinite(span.low) and math.isfinite(span.high) and span.low < span.high):
        raise _error(key, text, "a range from a lower number to a higher one", "")
    if span.is_log and span.low <= 0:
        raise _error(key, text, "a range above 0 for :log", "Leave out :log for equal distances.")
    return span


def _error(key: str, text: str, condition: str, cure: str) -> ConfigError:
    return ConfigError(f"{quoted_key(key)} must be {condition}, got {quoted(text)}. {cure}".strip())


def _firsts(choices: Sequence[Choice]) -> list[tuple[Choice, str]]:
    return [(choice, choice.texts[0]) for choice in choices]


def _plan_with(recipe: str, choices: Sequence[Choice], place: int, text: str) -> Planned:
    """The run of all first values but this one."""
    chosen = _firsts(choices)
    chosen[place] = (choices[place], text)
    return plan(recipe, chosen)


def _settle(recipe: str, choices: Sequence[Choice], place: int) -> Choice:
    """The choice; its range is of whole numbers if the field takes no number between them."""
    choice = choices[place]
    if choice.range is None or not all(re.fullmatch("[+-]?[0-9]+", text) for text in choice.texts):
        return choice
    try:
        _plan_with(recipe, choices, place, repr(choice.range.low + 0.5))
    except ConfigError:
        return replace(choice, range=replace(choice.range, is_whole=True))
    return choice


def _judges_differ(one: Call, other: Call) -> bool:
    """Whether validation examples are others, or have other labels.

    A path is left out: it may hold other features of the same examples, which only the user knows.
    """
    (data, held_out), (other_data, other_held_out) = _judge(one), _judge(other)
    return data != other_data or (held_out != other_held_out and not _has_validation(one))


def _judge(call: Call) -> tuple[Any, Any]:
    """What the validation examples depend on, first always, then only if they are held out."""
    experiment = call.experiment
    data = to_tree(experiment.data)
    data = {name: value for name, value in data.items() if name not in ("path", "root")}
    # Held-out examples are chosen by their given labels.
    given = None
    if experiment.held_out:
        given = to_tree([experiment.noise, experiment.labels_file, experiment.labeled])
    return (data, experiment.validation_labels), (experiment.held_out, given)


def _has_validation(call: Call) -> bool:
    """Whether the data brings its own validation examples; then none are held out."""
    try:
        call.experiment.data.open("validation")
    except NoSplit:
        return False
    return True


def _check_validation(recipe: str, call: Call) -> None:
    if not call.experiment.held_out and not _has_validation(call):
        raise ConfigError(
            f"the recipe {recipe} has no validation examples, and hyper-parameters are never "
            "chosen on test. Hold some out with --set held_out=0.1."
        )


class Outcome(NamedTuple):
    """The end of a planned run; Any is the type of JSON."""

    name: str
    words: tuple[str, ...]  # that `nearsay train` would take for it
    folder: Path
    result: dict[str, Any] | None = None  # None if it failed
    code: int = 0  # the exit code of the failure
    error: str = ""  # its message
    is_new: bool = True  # not finished before


class Found(NamedTuple):
    """The result of a search."""

    outcomes: list[Outcome]  # of all trials with runs in this folder, in their order
    best: Planned | None  # None if no trial has succeeded
    accuracy: float | None  # of the best on validation, after the last epoch
    num_elsewhere: int  # finished trials of other machines, or with runs that are gone
