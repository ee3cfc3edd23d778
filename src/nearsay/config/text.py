"""Words of a command line as values: of a declared type, or in one field of an experiment.

`Any` stands here for a type that somebody declared, or for a value of it.
"""

import difflib
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from nearsay.config.aliases import METHODS
from nearsay.errors import ConfigError, first_line

Value = TypeVar("Value")
"""An experiment, or another frozen dataclass."""

if TYPE_CHECKING:
    pass

TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# Neither infinity nor NaN, because JSON has neither.
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a path",
    str: "text",
    NoneType: "none",
}
DIGITS = 18
"""Digits of a whole number that 64 bits can hold."""
LONGEST = 80
"""Characters of a user's text that a message quotes."""

_OBJECT = "FILE.py:NAME"
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = LONGEST


class _Unreadable(Exception):
    """Text that is not of the declared type."""


def check(is_right: object, sentence: str) -> None:
    """Raise ConfigError with the sentence if something is not right."""
    if not is_right:
        raise ConfigError(sentence)


def split_pairs(words: Sequence[str]) -> dict[str, str]:
    """Key -> text of words such as `key=value`; no key may occur twice."""
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            is_path = word and "\0" not in word and os.path.exists(word)
            example = f"path={word}" if is_path else "seed=1"
            raise ConfigError(f"{quoted(word)} must be key=value, such as {example}.")
        is_text = "\0" not in word and _is_encodable(word)
        check(is_text, f"{quoted(word)} must be text that UTF-8 can encode, without NUL.")
        before = quoted(pairs.get(key))
        check(key not in pairs, f"{key} must be given once, got {before} and {quoted(text)}.")
        pairs[key] = text
    return pairs


def read_text(key: str, text: str, declared: Any, own: Any = None) -> Any:
    """The text as a value of the declared type; ConfigError says what would be one.

    Where an object can stand, FILE.py:NAME is the object of that name in one of the `own` files.
    """
    if own is not None and own.is_object(text) and takes_objects(declared):
        return fit(key, own.read(text), declared)
    try:
        return _read(text, declared)
    except _Unreadable:
        choices = _choices(declared)
        is_long = int in members(declared) and re.fullmatch("[+-]?[0-9]+", text)
        limit = f" of at most {DIGITS} digits" if is_long else ""
        raise ConfigError(
            f"{quoted_key(key)} must be {wanted(declared)}{limit}, got {quoted(text)}"
            f"{nearest(text, choices) or '.'}"
        ) from None


def wanted(declared: Any) -> str:
    """What text can stand for a value of the declared type."""
    choices = _choices(declared)
    ways = [f"one of {', '.join(choices)}"] if len(choices) > 1 else choices
    for kind in members(declared):
        if get_origin(kind) is tuple:
            first, *others = get_args(kind)
            if first in NAMES and others == [...]:
                ways.append(f"{NAMES[first]}, or several separated by commas")
            elif first in NAMES:
                ways.append(f"{len(others) + 1} values separated by commas, each {NAMES[first]}")
        elif kind in NAMES:
            ways.append(NAMES[kind])
    if takes_objects(declared):
        ways.append(_OBJECT)
    return ", or ".join(ways) if ways else "chosen in a recipe, because no text can stand for it"


def members(declared: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type; a path that may be text is a path."""
    if get_origin(declared) not in (Union, UnionType):
        return (declared,)
    kinds = get_args(declared)
    return tuple(kind for kind in kinds if kind is not str or Path not in kinds)


def declared_types(owner: Callable[..., Any] | type, name: str) -> dict[str, Any]:
    """The types that a function or a dataclass declares."""
    try:
        return get_type_hints(owner)
    except Exception as error:
        # The annotations of a user's file can be anything.
        raise ConfigError(f"The types of {name} must be readable: {first_line(error)}.") from error


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a wrong name: the closest of the names, if one is close."""
    known = list(names)
    if METHODS.get(name) in known:
        return f". Use {METHODS[name]}, its new name."
    near = difflib.get_close_matches(name[:LONGEST], known, n=1)
    return f". Did you mean {near[0]}?" if near else ""


def quoted(value: object) -> str:
    """The value as Python writes it, shortened."""
    return _short.repr(value)


def quoted_key(key: str) -> str:
    """A dotted name, shortened."""
    return key if len(key) <= LONGEST else f"{key[:LONGEST]}..."


def takes_objects(declared: Any) -> bool:
    """Whether a value of the declared type can be an object, and not only text or numbers."""
    return any(_is_class(kind) for kind in members(declared))


def fit(key: str, value: Any, declared: Any) -> Any:
    """The object as a value of the declared type; a formula becomes an objective.

    A protocol asks for its methods only. A class asks for its instances.
    """
    from nearsay.batch import Objective  # noqa: PLC0415  # brings torch
    from nearsay.losses.base import as_objective  # noqa: PLC0415  # brings torch

    missing: list[str] = []
    for kind in filter(_is_class, members(declared)):
        if kind is Objective:
            try:
                return as_objective(value)
            except ValueError as error:
                raise ConfigError(f"{key} must be a loss: {first_line(error)}") from error
        if not getattr(kind, "_is_protocol", False):
            if isinstance(value, kind):
                return value
            missing.append(kind.__name__)
            continue
        methods = [name for name in vars(kind) if name == "__call__" or not name.startswith("_")]
        if not isinstance(value, type) and all(hasattr(value, name) for name in methods):
            return value
        missing.append(f"a {kind.__name__} ({', '.join(methods)})")
    raise ConfigError(
        f"{quoted_key(key)} must be {' or '.join(missing)}, got {type(value).__name__}."
    )


def override(experiment: Value, change: str, own: Any = None) -> Value:
    """The experiment with one field changed: `objective.k=5`, `mixup=none`, `mixup.alpha=1`.

    `augment.transforms.0.padding=2` changes an item of a tuple, `objective=my_loss.py:SCE` puts an
    object of one of the `own` files into a field.
    """
    [(key, text)] = split_pairs([change]).items()
    try:
        changed: Value = _Change(key.split("."), text, own).of(experiment, None, 0)
    except ConfigError:
        raise
    except ValueError as error:
        # The dataclasses check themselves, and their messages name the field.
        raise ConfigError(str(error)) from error
    return changed


class _Change:
    """One text that takes the place of one value, some steps inside an experiment."""

    def __init__(self, steps: list[str], text: str, own: Any) -> None:
        self.steps, self.text, self.own = steps, text, own

    def of(self, value: Any, declared: Any, depth: int) -> Any:
        """The value at `depth`, with the text in its place."""
        where = ".".join(self.steps[:depth])
        if depth == len(self.steps):
            return self._leaf(value, declared, where)
        step = self.steps[depth]
        if value is None:
            value = _default(declared, step, where)
        if isinstance(value, tuple):
            number = _place(value, step, where)
            changed = self.of(value[number], _element_type(declared, number), depth + 1)
            return (*value[:number], changed, *value[number + 1 :])
        itself = f"{where} must be set itself, got {quoted(step)} of it. It is {quoted(value)}."
        check(_is_value(value), itself)
        names = _settable(value)
        if step not in names:
            what = f"{where} ({type(value).__name__})" if where else "an experiment"
            # Such as a hyper-parameter of the user's own formula.
            inner = [name for name in names if step in _parts(getattr(value, name), None)]
            path = ".".join([*self.steps[:depth], *inner, step])
            cure = f". Use {path}={self.text}." if where and len(inner) == 1 else ""
            raise ConfigError(
                f"{quoted(step)} must be a field of {what}: {', '.join(names) or 'none'}"
                f"{cure or nearest(step, names) or '.'}"
            )
        kind = declared_types(type(value), type(value).__name__)[step]
        return replace(value, **{step: self.of(getattr(value, step), kind, depth + 1)})

    def _leaf(self, value: Any, declared: Any, where: str) -> Any:
        text = self.text
        if NoneType in members(declared) and text.lower() == "none":
            return None
        if self.own is not None and self.own.is_object(text) and takes_objects(declared):
            return read_text(where, text, declared, self.own)
        parts = _parts(value, declared)
        if not parts and not _is_value(value):
            return read_text(where, text, declared)
        ways = []
        if NoneType in members(declared):
            ways.append("none")
        if takes_objects(declared):
            ways.append(_OBJECT)
        if parts:
            ways.append(f"set by its parts {', '.join(f'{where}.{part}' for part in parts)}")
        else:
            ways.append("chosen in a recipe")
        raise ConfigError(f"{where} must be {', or '.join(ways)}, got {quoted(text)}.")


def _parts(value: Any, declared: Any) -> list[str]:
    """The names of the fields in a dataclass, in a tuple of them, or in what could replace None."""
    if value is None:
        kinds = [kind for kind in members(declared) if is_dataclass(kind)]
        return [name for kind in kinds for name in _settable(kind)]
    if _is_value(value):
        return list(_settable(value))
    names: list[str] = []
    if isinstance(value, tuple):
        for number, item in enumerate(value):
            if _is_value(item):
                names += [f"{number}.{name}" for name in _settable(item)]
    return names


def _default(declared: Any, step: str, where: str) -> Any:
    """A default for a field that is None, so that `mixup.alpha=0.5` turns mixup on."""
    kinds = [kind for kind in members(declared) if is_dataclass(kind) and isinstance(kind, type)]
    fitting = [kind for kind in kinds if step in _settable(kind)]
    if len(fitting) == 1 and not any(map(_is_required, _settable(fitting[0]).values())):
        return fitting[0]()
    if kinds and not fitting:
        names = _parts(None, declared)
        raise ConfigError(
            f"{quoted(step)} must be a field of {where}, which is none: {', '.join(names)}"
            f"{nearest(step, names) or '.'}"
        )
    raise ConfigError(
        f"{where} must be chosen first, got only {quoted_key(step)} of it. "
        f"Use a recipe, or {where}={_OBJECT}."
    )


def _place(values: tuple[Any, ...], step: str, where: str) -> int:
    if re.fullmatch("[0-9]{1,4}", step) and int(step) < len(values):
        return int(step)
    raise ConfigError(f"{quoted(step)} must be a place in {where}, from 0 to {len(values) - 1}.")


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


def _is_class(kind: Any) -> bool:
    """Whether it is a class or a protocol with objects that no text can describe."""
    return isinstance(kind, type) and get_origin(kind) is None and kind not in (*NAMES, object)


def _choices(declared: Any) -> list[str]:
    """The texts of all literals of a declared type."""
    literals = [kind for kind in members(declared) if get_origin(kind) is Literal]
    return [str(choice) for kind in literals for choice in get_args(kind)]


def _read(text: str, declared: Any) -> Any:
    """By the first type of a union that takes the text; a path or text takes any, so it is last."""
    for kind in sorted(members(declared), key=lambda kind: (kind is str, kind is Path)):
        try:
            return _read_as(text, kind)
        except _Unreadable:
            continue
    raise _Unreadable


def _read_as(text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if str(choice) == text:
                return choice
    if get_origin(kind) is tuple:
        return _read_tuple(text, get_args(kind))
    if kind is NoneType and text.lower() == "none":
        return None
    if kind is bool and text.lower() in TRUTHS:
        return TRUTHS[text.lower()]
    if kind is int and re.fullmatch(f"[+-]?[0-9]{{1,{DIGITS}}}", text):
        return int(text)
    if kind is float and re.fullmatch(NUMBER, text) and math.isfinite(float(text)):
        return float(text)
    if kind is str:
        return text
    if kind is Path and text:
        try:
            # One spelling of a path, so that it is one experiment.
            return Path(os.path.abspath(Path(text).expanduser()))
        except (OSError, RuntimeError):
            # The home of an unknown user, or a working directory that was deleted.
            raise _Unreadable from None
    raise _Unreadable


def _read_tuple(text: str, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("()", "[]"):
        inner = inner[1:-1]
    parts = [part.strip() for part in inner.split(",")]
    # After the last comma of (64,) there is nothing, and so in ().
    if not parts[-1]:
        parts.pop()
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(parts)
    is_nested = any(get_origin(kind) is tuple for kind in kinds)
    if len(parts) != len(kinds) or is_nested:
        raise _Unreadable
    return tuple(_read(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode it; a shell can pass bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
