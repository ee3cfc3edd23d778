"""A run in its record: the experiment as JSON, how two experiments differ, the name of the run.

`Any` stands here for what JSON can hold.
"""

import hashlib
import inspect
import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Integral
from pathlib import Path, PurePath
from typing import Any

from nearsay.config.own_files import code_of, digests, whole_path
from nearsay.config.text import LONGEST, split_pairs
from nearsay.errors import ConfigError

# A field that only later versions have, and that is off.
_LATER = re.compile(r"(.*\.)?[^.\d][^.]*: not there, but (null|false|0|0\.0)$")
# Characters of a name, well below what file systems allow.
_LONGEST_NAME = 100
# Of each path of a list, everything but its last part.
_FOLDERS = re.compile(r"[^,]*/(?=[^,/])|/+$")


def to_tree(value: object) -> Any:
    """The value as JSON: dataclasses by kind and fields, tensors by their hash.

    Only equal values have equal trees. For classes and functions from a user's file the tree names
    the file and the hash of its code.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Integral):
        # An integer of numpy.
        return int(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [to_tree(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_tree(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass_tree(value)
    if inspect.isfunction(value):
        return {"kind": value.__qualname__, "code": code_of(value) or _source_digest(value)}
    if hasattr(value, "__array__"):
        return _array_tree(value)
    raise ConfigError(f"{type(value).__name__} must be a frozen dataclass to be recorded.")


def differences(tree: Any, other: Any) -> list[str]:
    """`a.b: 1, not 2` for each field that differs between two trees, where the first has 1.

    Fields below `machine` do not count, because an experiment is the same wherever it runs.
    """
    return list(_differences(_without_machine(tree), _without_machine(other), ""))


def substantial(changes: Iterable[str], places: Collection[str]) -> list[str]:
    """Those of some `differences` that make another experiment.

    The others are `places`, the fields that say where files are, and fields that only later
    versions have and that are off. An item more in a list is another experiment.
    """
    prefixes = tuple(f"{place}: " for place in places)
    return [
        change for change in changes if not change.startswith(prefixes) and not _LATER.match(change)
    ]


def run_name(origin: Mapping[str, Any]) -> str:
    """Such as cifar10-method=ncr-noise=0.4: the recipe and the choices, in alphabetical order.

    The name does not say where the run takes place, so that it can continue elsewhere. Paths are
    shortened to their last part. A hash follows where the name alone could belong to two runs: if
    something was cut or replaced, and by the content of the user's own files.
    """
    recipe = str(origin.get("recipe", origin.get("called", "python")))
    chosen = [change.split("=", 1) for change in origin["overrides"]]
    overrides = {key: text for key, text in chosen if not key.startswith("machine.")}
    objects = origin.get("objects", {})
    named = {key: str(tree.get("kind")) for key, tree in objects.items()}
    pairs = [
        f"{key}={text}"
        for choices in ({**origin["arguments"], **named}, overrides)
        for key, text in sorted(choices.items())
    ]
    stem = PurePath(recipe).stem
    shown = [stem]
    for pair in pairs:
        key, _, text = pair.partition("=")
        shown.append(f"{key}={_FOLDERS.sub('', text)}")
    name = re.sub(r"[^\w.=+,-]+", "_", "-".join(shown), flags=re.ASCII)[:_LONGEST_NAME]
    source = origin.get("sha256", "")
    content = [recipe, pairs, source]
    own = digests(origin)
    if own or objects:
        content += [own, objects]
    if name != "-".join([stem, *pairs]) or source or len(content) > 3:
        name = f"{name}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]}"
    return name


def default_folder(origin: Mapping[str, Any]) -> Path:
    """The folder of a run by default, such as runs/cifar10-method=ncr-noise=0.4."""
    return Path("runs", run_name(origin))


def default_sweep_folder(recipe: str, arguments: Sequence[str], overrides: Sequence[str]) -> Path:
    """The folder of a sweep by default, such as runs/sweep-toy-noise=0.2,0.4."""
    origin = {"recipe": recipe, "arguments": split_pairs(arguments), "overrides": overrides}
    # Refuses overrides that are not key=value, before they become a name.
    split_pairs(overrides)
    return Path("runs", f"sweep-{run_name(origin)}")


def command_again(origin: Mapping[str, Any], *, labels_file: Path, out: Path) -> str:
    """The command line that repeats a run with other labels, all of them labeled."""
    words = ["nearsay", "train", origin["recipe"]]
    words += [f"{key}={whole_path(text, origin)}" for key, text in origin["arguments"].items()]
    for change in origin["overrides"]:
        key, _, text = change.partition("=")
        if key not in ("labels_file", "labeled"):
            words += ["--set", f"{key}={whole_path(text, origin)}"]
    return shlex.join([*words, "--set", f"labels_file={labels_file}", "--out", str(out)])


def _dataclass_tree(value: Any) -> dict[str, Any]:
    tree = {"kind": type(value).__name__}
    if code := code_of(type(value)):
        tree["code"] = code
    # A field may be called kind, as that of Bank. It moves aside for the name of the class.
    taken = set(tree)
    for field in fields(value):
        name = f"{field.name}_" if field.name in taken else field.name
        tree[name] = to_tree(getattr(value, field.name))
    return tree


def _source_digest(function: Any) -> str:
    """The hash of a function's source, for one that was given in Python."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        # There is none in an interpreter that reads from a terminal.
        source = function.__module__
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _without_machine(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {key: value for key, value in tree.items() if key != "machine"}


def _differences(mine: Any, other: Any, where: str) -> Iterator[str]:
    dot = "." if where else ""
    are_trees = isinstance(mine, Mapping) and isinstance(other, Mapping)
    if are_trees and mine.get("kind") == other.get("kind"):
        for key in dict.fromkeys((*mine, *other)):
            if key not in other:
                yield f"{where}{dot}{key}: {_shown(mine[key])}, not there"
            elif key not in mine:
                yield f"{where}{dot}{key}: not there, but {_shown(other[key])}"
            else:
                yield from _differences(mine[key], other[key], f"{where}{dot}{key}")
    elif isinstance(mine, list) and isinstance(other, list):
        # Items are compared by their number.
        yield from _differences(dict(enumerate(mine)), dict(enumerate(other)), where)
    elif mine != other or isinstance(mine, bool) != isinstance(other, bool):
        # True == 1 in Python, but they are different settings.
        yield f"{where or 'experiment'}: {_shown(mine)}, not {_shown(other)}"


def _shown(value: Any) -> str:
    """A tree by its kind, all else as JSON."""
    is_object = isinstance(value, Mapping) and "kind" in value
    text = json.dumps(value["kind"] if is_object else value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _array_tree(value: Any) -> dict[str, Any]:
    """A tensor, or an array of numpy."""
    import torch  # noqa: PLC0415  # already loaded if there is a tensor

    try:
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
    except TypeError as error:
        raise ConfigError(
            f"An array must hold numbers to be recorded, got {value.dtype}."
        ) from error
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "kind": "tensor",
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
