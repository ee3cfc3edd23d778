"""What a sweep would run, as values: lists and ranges read from words, and every mistake found before a run begins."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from nearsay.config import Call, ConfigError, apply_overrides, call_recipe, run_name, to_tree
from nearsay.config.text import NUMBER, quoted, quoted_key, split_pairs
from nearsay.errors import NoSplit

MOST_RUNS = 10_000
_COMMA = re.compile(
    r",(?![^(\[]*[)\]])"
)  # between values; those inside (64,32) belong to one value


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


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a search chooses from."""

    recipe: str
    name: str  # the same on every machine that searches there
    choices: tuple[Choice, ...]


Chosen = Sequence[tuple[Choice, str]]


def grid(recipe: str, arguments: Sequence[str], overrides: Sequence[str] = ()) -> list[Planned]:
    """A run for each combination of the values that are listed, as in method=standard,ncr; the last key turns fastest.

    ConfigError if there is anything wrong with any of them, and for more than 10 000.
    """
    choices = _read_choices(arguments, overrides)
    for choice in choices:
        if choice.range is not None:
            raise ConfigError(
                f"{choice.key}={quoted(choice.text)} is a range; list values, or add --search optuna"
            )
    num = math.prod(len(choice.texts) for choice in choices)
    if num > MOST_RUNS:
        raise ConfigError(
            f"these lists make {num} runs; shorten them to {MOST_RUNS} or fewer, or use --search optuna"
        )
    return [
        plan(recipe, list(zip(choices, texts, strict=True)))
        for texts in product(*(each.texts for each in choices))
    ]


def make_space(recipe: str, arguments: Sequence[str], overrides: Sequence[str] = ()) -> Space:
    """What to search: lists as in `grid`, and ranges as in objective.alpha=0.1..0.5 or optimizer.lr=1e-4..1e-1:log.

    Every end and every value is tried on the configuration, with the first ones of all other keys. A range is of whole
    numbers where the field takes nothing else. ConfigError too if there are no validation examples to judge by, and if
    they would not be the same, with the same labels, for all trials.
    """
    choices = _read_choices(arguments, overrides)
    if not any(choice.is_open for choice in choices):
        raise ConfigError(
            "there is nothing to search; give a range such as optimizer.lr=1e-4..1e-1:log, or a list"
        )
    for choice in choices:
        if choice.is_open and choice.key.split(".")[-1] == "seed":
            raise ConfigError(
                f"{choice.key}={quoted(choice.text)} would choose the luckiest seed; give one of them"
            )
    first = plan(recipe, _firsts(choices))
    for place, choice in enumerate(choices):
        for text in choice.texts[1:]:
            if _judges_differ(first.call, _plan_with(recipe, choices, place, text).call):
                raise ConfigError(
                    f"{choice.key}={quoted(choice.text)} would have trials judged by different labels, and the easiest "
                    "ones would win; give one value"
                )
    _check_validation(recipe, first.call)
    origin = first.call.origin
    written = {
        "recipe": origin["recipe"],
        "arguments": {each.key: each.text for each in choices if not each.is_override},
        "overrides": [f"{each.key}={each.text}" for each in choices if each.is_override],
        "sha256": origin.get("sha256", ""),
    }
    settled = tuple(_settle(recipe, choices, place) for place in range(len(choices)))
    return Space(recipe=recipe, name=run_name(written), choices=settled)


def plan(recipe: str, chosen: Chosen) -> Planned:
    """The run with these choices; ConfigError if they are wrong, or do not go together."""
    arguments = [f"{choice.key}={text}" for choice, text in chosen if not choice.is_override]
    changes = [f"{choice.key}={text}" for choice, text in chosen if choice.is_override]
    call = apply_overrides(call_recipe(recipe, arguments), changes)
    words = (recipe, *arguments, *(word for change in changes for word in ("--set", change)))
    return Planned(run_name(call.origin), call, words)


def _read_choices(arguments: Sequence[str], overrides: Sequence[str]) -> list[Choice]:
    pairs = [(False, *pair) for pair in split_pairs(arguments).items()]
    pairs += [(True, *pair) for pair in split_pairs(overrides).items()]
    return [_read_choice(key, text, is_override) for is_override, key, text in pairs]


def _read_choice(key: str, text: str, is_override: bool) -> Choice:
    if (found := _read_range(key, text)) is not None:
        ends = tuple(text.partition(":")[0].split("..", 1))
        return Choice(key=key, text=text, texts=ends, is_override=is_override, range=found)
    texts = tuple(part.strip() for part in _COMMA.split(text))
    if not all(texts):
        missing = "names no value" if len(texts) == 1 else "has nothing between two commas"
        raise ConfigError(
            f"{quoted_key(key)}={quoted(text)} {missing}; list values as in seed=0,1,2"
        )
    if len(set(texts)) < len(texts):
        twice = next(each for each in texts if texts.count(each) > 1)
        raise ConfigError(
            f"{quoted_key(key)}={quoted(text)} names {quoted(twice)} twice; list each value once"
        )
    if len(texts) > 1 and is_override and key.startswith("machine."):
        raise ConfigError(
            f"{quoted_key(key)}={quoted(text)} must be one value: where a run takes place does not make it another"
        )
    return Choice(key=key, text=text, texts=texts, is_override=is_override)


def _read_range(key: str, text: str) -> Range | None:
    """What `low..high` and `low..high:log` mean, None if it is neither."""
    ends, _, kind = text.partition(":")
    low, dots, high = ends.partition("..")
    if not dots or not re.fullmatch(NUMBER, low) or not re.fullmatch(NUMBER, high):
        return None
    if kind not in ("", "log") or (text.endswith(":") and not kind):
        raise ConfigError(f"{quoted_key(key)}={quoted(text)} must end after the range, or in :log")
    found = Range(low=float(low), high=float(high), is_log=kind == "log")
    if not (math.isfinite(found.low) and math.isfinite(found.high) and found.low < found.high):
        raise ConfigError(
            f"{quoted_key(key)}={quoted(text)} must go from a lower number to a higher one"
        )
    if found.is_log and found.low <= 0:
        raise ConfigError(
            f"{quoted_key(key)}={quoted(text)} must begin above 0, as factors of 0 lead nowhere"
        )
    return found


def _firsts(choices: Sequence[Choice]) -> list[tuple[Choice, str]]:
    return [(choice, choice.texts[0]) for choice in choices]


def _plan_with(recipe: str, choices: Sequence[Choice], place: int, text: str) -> Planned:
    """The run of all first values but this one."""
    chosen = _firsts(choices)
    chosen[place] = (choices[place], text)
    return plan(recipe, chosen)


def _settle(recipe: str, choices: Sequence[Choice], place: int) -> Choice:
    """The choice, its range of whole numbers where the field takes those but not what lies between them."""
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

    By another path are other features of the same examples, or other examples; who searches there has to know.
    """
    (data, held_out), (other_data, other_held_out) = _judge(one), _judge(other)
    return data != other_data or (held_out != other_held_out and not _has_validation(one))


def _judge(call: Call) -> tuple[Any, Any]:
    """What makes validation examples others, and what does so only where they are held out: chosen by given labels."""
    chosen = call.experiment
    data = {
        name: value for name, value in to_tree(chosen.data).items() if name not in ("path", "root")
    }
    given = to_tree([chosen.noise, chosen.relabeled, chosen.labeled]) if chosen.held_out else None
    return (data, chosen.validation_labels), (chosen.held_out, given)


def _has_validation(call: Call) -> bool:
    """Whether the data brings validation examples of its own; then none are held out."""
    try:
        call.experiment.data.open("validation")
    except NoSplit:
        return False
    return True


def _check_validation(recipe: str, call: Call) -> None:
    if not call.experiment.held_out and not _has_validation(call):
        raise ConfigError(
            f"the recipe {recipe} has no validation examples, and hyper-parameters are never chosen on test; "
            "hold some out with --set held_out=0.1"
        )
