"""One field of an experiment, changed by its dotted name.

`Any` stands here for whatever a field may hold: a number, a dataclass, a tuple of them, None.
"""

import re
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from nearsay.config.text import (
    declared_types,
    members,
    nearest,
    quoted,
    quoted_key,
    read_text,
    split_pairs,
)
from nearsay.errors import ConfigError

if TYPE_CHECKING:
    from nearsay.experiment import Experiment


def override(experiment: "Experiment", change: str) -> "Experiment":
    """The experiment with one field changed: `objective.k=5`, `mixup=none`, `augment.transforms.0.padding=2`."""
    [(key, text)] = split_pairs([change]).items()
    try:
        changed: Experiment = _changed(experiment, None, key.split("."), text, "")
    except ConfigError:
        raise
    except ValueError as error:  # the dataclasses check themselves, and say it well
        raise ConfigError(str(error)) from error
    return changed


def _changed(value: Any, declared: Any, steps: list[str], text: str, where: str) -> Any:
    """What stands at `where`, after `text` has taken the place that `steps` lead to from there."""
    if not steps:
        return _leaf(value, declared, text, where)
    step, rest = steps[0], steps[1:]
    inside = f"{where}.{step}" if where else step
    if value is None:
        value = _made(declared, step, where)
    if isinstance(value, tuple):
        number = _place(value, step, where)
        changed = _changed(value[number], _element_type(declared, number), rest, text, inside)
        return (*value[:number], changed, *value[number + 1 :])
    if not _is_value(value):
        raise ConfigError(
            f"{where} is {quoted(value)} and has no {quoted(step)}; set {where} itself"
        )
    names = _settable(value)
    if step not in names:
        what = f"{where} ({type(value).__name__})" if where else "an experiment"
        raise ConfigError(
            f"{what} has no field {quoted(step)}{nearest(step, names)}; it has {', '.join(names) or 'none'}"
        )
    kind = declared_types(type(value), type(value).__name__)[step]
    return replace(value, **{step: _changed(getattr(value, step), kind, rest, text, inside)})


def _leaf(value: Any, declared: Any, text: str, where: str) -> Any:
    may_be_none = NoneType in members(declared)
    if may_be_none and text.lower() == "none":
        return None
    inside = [f"{where}.{name}" for name in _inside(value)]
    if value is None:
        inside = [
            f"{where}.{name}"
            for kind in members(declared)
            if is_dataclass(kind)
            for name in _settable(kind)
        ]
    if not inside and not _is_value(value):
        return read_text(where, text, declared)
    problem = "must be none, or" if may_be_none else "cannot be read;"
    parts = f"set its parts: {', '.join(inside)}" if inside else "choose it in a recipe"
    raise ConfigError(f"{where}={quoted(text)} {problem} {parts}")


def _inside(value: Any) -> list[str]:
    """The names of what can be set in a dataclass, or in a tuple that holds dataclasses."""
    if _is_value(value):
        return list(_settable(value))
    if isinstance(value, tuple) and any(map(_is_value, value)):
        return [
            f"{number}.{name}"
            for number, each in enumerate(value)
            if _is_value(each)
            for name in _settable(each)
        ]
    return []


def _made(declared: Any, step: str, where: str) -> Any:
    """A default for a field that is none, so that `mixup.alpha=0.5` turns mixup on."""
    kinds = [kind for kind in members(declared) if is_dataclass(kind) and isinstance(kind, type)]
    fitting = [kind for kind in kinds if step in _settable(kind)]
    if len(fitting) == 1 and not any(
        _is_required(field) for field in _settable(fitting[0]).values()
    ):
        return fitting[0]()
    names = [name for kind in kinds for name in _settable(kind)]
    if kinds and not fitting:
        raise ConfigError(
            f"{where} is none and could not have {quoted(step)}{nearest(step, names)}; it could have {', '.join(names)}"
        )
    raise ConfigError(
        f"{where} is none, and {quoted_key(step)} alone does not make one; choose it in a recipe"
    )


def _place(values: tuple[Any, ...], step: str, where: str) -> int:
    if re.fullmatch("[0-9]{1,4}", step) and int(step) < len(values):
        return int(step)
    places = f"numbers 0 to {len(values) - 1}" if values else "nothing in it"
    raise ConfigError(f"{where} has no {quoted(step)}; it has {places}")


def _element_type(declared: Any, number: int) -> Any:
    """The type of one place of a tuple."""
    for kind in members(declared):
        if get_origin(kind) is tuple:
            kinds = get_args(kind)
            return kinds[0] if kinds[-1] is ... else kinds[number]
    return None


def _is_value(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _settable(owner: Any) -> dict[str, "Field[Any]"]:
    return {field.name: field for field in fields(owner) if field.init}


def _is_required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING
