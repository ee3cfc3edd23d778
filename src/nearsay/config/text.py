"""Words of a command line as values of a declared type, and the sentences that say why one is not.

`Any` stands here for a type that somebody declared, or for a value of it.
"""

import difflib
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nearsay.errors import ConfigError, first_line

TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"  # neither infinity nor nan, which JSON has not
NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a path",
    str: "text",
    NoneType: "none",
}
DIGITS = 18  # of a whole number, which 64 bits hold
LONGEST = 80  # of what is quoted from a user

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = LONGEST


class _Unreadable(Exception):
    """Text that is not of the declared type."""


def split_pairs(words: Sequence[str]) -> dict[str, str]:
    """Key -> text of words such as `key=value`, each key once."""
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            example = (
                f"path={word}" if word and "\0" not in word and os.path.exists(word) else "seed=1"
            )
            raise ConfigError(f"{quoted(word)} must be key=value, such as {example}")
        if key in pairs:
            raise ConfigError(
                f"{key} is given twice, as {quoted(pairs[key])} and {quoted(text)}; give it once"
            )
        if "\0" in word or not _is_encodable(word):
            raise ConfigError(
                f"{quoted(word)} holds characters that no text file can; leave them out"
            )
        pairs[key] = text
    return pairs


def read_text(key: str, text: str, declared: Any) -> Any:
    """The text as a value of the declared type; ConfigError says what would be one."""
    try:
        return _read(text, declared)
    except _Unreadable:
        near = nearest(
            text, [str(choice) for kind in members(declared) for choice in _choices(kind)]
        )
        is_long = int in members(declared) and re.fullmatch("[+-]?[0-9]+", text)
        limit = f" of at most {DIGITS} digits" if is_long else ""
        raise ConfigError(
            f"{quoted_key(key)}={quoted(text)} must be {wanted(declared)}{limit}{near}"
        ) from None


def wanted(declared: Any) -> str:
    """What may stand for a value of the declared type."""
    kinds = members(declared)
    choices = [str(choice) for kind in kinds for choice in _choices(kind)]
    ways = [f"one of {', '.join(choices)}"] if len(choices) > 1 else choices
    for kind in kinds:
        if get_origin(kind) is tuple:
            first, *others = get_args(kind)
            if first in NAMES and others == [...]:
                ways.append(f"{NAMES[first]}, or several separated by commas")
            elif first in NAMES:
                ways.append(f"{len(others) + 1} values separated by commas, each {NAMES[first]}")
        elif kind in NAMES:
            ways.append(NAMES[kind])
    return ", or ".join(ways) if ways else "chosen in a recipe, as no text can stand for it"


def members(declared: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)


def declared_types(owner: Callable[..., Any] | type, name: str) -> dict[str, Any]:
    """What a function or a dataclass declares its parameters to be."""
    try:
        return get_type_hints(owner)
    except Exception as error:  # annotations of a user's file can be anything
        raise ConfigError(
            f"the types that {name} declares cannot be read: {first_line(error)}"
        ) from error


def nearest(name: str, names: Iterable[str]) -> str:
    """A question about the closest of the names, if one is close."""
    near = difflib.get_close_matches(name[:LONGEST], list(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def quoted(value: object) -> str:
    """The value as Python writes it, shortened."""
    return _short.repr(value)


def quoted_key(key: str) -> str:
    """A dotted name, shortened."""
    return key if len(key) <= LONGEST else f"{key[:LONGEST]}..."


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _read(text: str, declared: Any) -> Any:
    """As the first type of a union that takes the text; paths and words, which take any, come last."""
    for kind in sorted(members(declared), key=lambda each: (each is str, each is Path)):
        try:
            return _read_as(text, kind)
        except _Unreadable:
            continue
    raise _Unreadable


def _read_as(text: str, kind: Any) -> Any:
    for choice in _choices(kind):
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
            return Path(
                os.path.abspath(Path(text).expanduser())
            )  # one spelling, so that it is one experiment
        except (OSError, RuntimeError):  # ~nobody, or a working folder that is gone
            raise _Unreadable from None
    raise _Unreadable


def _read_tuple(text: str, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("()", "[]"):
        inner = inner[1:-1]
    parts = [part.strip() for part in inner.split(",")]
    if not parts[-1]:  # (64,) and nothing at all
        parts.pop()
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(parts)
    if len(parts) != len(kinds) or any(get_origin(kind) is tuple for kind in kinds):
        raise _Unreadable
    return tuple(_read(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of a command line that are not UTF-8
        return False
    return True
