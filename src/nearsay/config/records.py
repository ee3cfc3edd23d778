"""What an experiment is made of, as JSON: to be read, and to be compared with another.

`Any` stands here for what JSON can hold.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from nearsay.config.text import LONGEST, quoted
from nearsay.errors import ConfigError

_LATER = re.compile(r"(.*\.)?[^.\d][^.]*: not there, but (null|false|0|0\.0)$")


def to_tree(value: object) -> Any:
    """The value as JSON: dataclasses by `kind` and fields, tensors by their hash; equal for equal values alone."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Integral):  # of numpy
        return int(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [to_tree(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): to_tree(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        # A field may be called kind itself, as Bank's: it moves aside, and the name of the class is always there.
        named = {
            "kind_" if field.name == "kind" else field.name: getattr(value, field.name)
            for field in fields(value)
        }
        return {
            "kind": type(value).__name__,
            **{name: to_tree(each) for name, each in named.items()},
        }
    if hasattr(value, "__array__"):
        return _array_tree(value)
    raise ConfigError(
        f"{quoted(value)} of type {type(value).__name__} cannot be written down; make its class a frozen dataclass"
    )


def differences(tree: Any, other: Any) -> list[str]:
    """`a.b: 1, not 2` for each field that differs between two trees, where the first has 1.

    All below `machine` is passed over: where an experiment runs does not make it another one.
    """
    mine, others = (
        {key: each for key, each in some.items() if key != "machine"}
        if isinstance(some, Mapping)
        else some
        for some in (tree, other)
    )
    return list(_differences(mine, others, ""))


def substantial(found: Iterable[str], places: Collection[str]) -> list[str]:
    """Those of some `differences` that make another experiment.

    What makes none: `places`, the fields that say where files are, and what later versions can do but was not asked
    for. A number in the place of a field is that of an item of a list, and one more of those is another experiment.
    """
    return [
        each
        for each in found
        if not each.startswith(tuple(f"{place}: " for place in places)) and not _LATER.match(each)
    ]


def _differences(mine: Any, other: Any, where: str) -> Iterator[str]:
    dot = "." if where else ""
    if (
        isinstance(mine, Mapping)
        and isinstance(other, Mapping)
        and mine.get("kind") == other.get("kind")
    ):
        for key in dict.fromkeys((*mine, *other)):
            if key not in other:
                yield f"{where}{dot}{key}: {_shown(mine[key])}, not there"
            elif key not in mine:
                yield f"{where}{dot}{key}: not there, but {_shown(other[key])}"
            else:
                yield from _differences(mine[key], other[key], f"{where}{dot}{key}")
    elif isinstance(mine, list) and isinstance(other, list):  # items by their number
        yield from _differences(dict(enumerate(mine)), dict(enumerate(other)), where)
    elif mine != other or isinstance(mine, bool) != isinstance(
        other, bool
    ):  # True == 1, but is something else
        yield f"{where or 'experiment'}: {_shown(mine)}, not {_shown(other)}"


def _shown(value: Any) -> str:
    """A tree by its kind, all else as JSON."""
    text = json.dumps(value["kind"] if isinstance(value, Mapping) and "kind" in value else value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _array_tree(value: Any) -> dict[str, Any]:
    """A tensor, or an array of numpy."""
    import torch  # noqa: PLC0415  # whoever has a tensor has paid for it; the names of recipes shall not

    try:
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
    except TypeError as error:
        raise ConfigError(
            f"an array of {value.dtype} cannot be written down; make it one of numbers"
        ) from error
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = list(tensor.shape)
    return {
        "kind": "tensor",
        "shape": shape,
        "dtype": dtype,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
