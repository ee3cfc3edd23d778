"""A recipe called from a command line, and called again from what a run folder recorded of it.

`Any` stands here for what JSON can hold, or for a value of a type that a recipe declares.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from nearsay.config.aliases import current_record, current_source
from nearsay.config.fields import override
from nearsay.config.text import declared_types, nearest, quoted, read_text, split_pairs, wanted
from nearsay.config.trees import differences, to_tree
from nearsay.errors import ConfigError, first_line

if TYPE_CHECKING:
    from nearsay.experiment import Experiment


FILES = ("relabeled", "init")  # fields of an experiment that are files, or folders


class Call(NamedTuple):
    """An experiment, and the words that made it: calling the recipe with them again gives it again."""

    experiment: "Experiment"
    origin: dict[
        str, Any
    ]  # recipe, arguments, overrides; for a user's own file also source and sha256


def recipe_names() -> list[str]:
    """The built-in recipes, by the names of their files."""
    files = [entry.name for entry in resources.files("nearsay").joinpath("recipes").iterdir()]
    stems = [
        name.removesuffix(".py")
        for name in files
        if name.endswith(".py") and not name.startswith("_")
    ]
    return sorted(stem for stem in stems if stem != "methods")


def call_recipe(name_or_path: str, arguments: Sequence[str]) -> Call:
    """The experiment of a built-in recipe, or of a user's own `.py` file that defines `recipe`.

    `arguments` are `key=value`, read as the types that the signature of the recipe declares. Every recipe also takes
    `labeled`, the share of labels to keep, which is then an override.
    """
    if not name_or_path.endswith(".py"):
        return _call(_built_in(name_or_path), name_or_path, split_pairs(arguments), {})
    path = Path(name_or_path)
    try:
        source = path.expanduser().read_text("utf-8-sig")
    except FileNotFoundError as error:
        cure = "check the name, and the folder that it is relative to"
        raise ConfigError(f"there is no recipe {quoted(name_or_path)}; {cure}") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the recipe {quoted(name_or_path)} cannot be read: {first_line(error)}"
        ) from error
    record = {"source": source, "sha256": _sha256(source)}
    return _call(_from_source(source, path.name), path.name, split_pairs(arguments), record)


def call_source(source: str | Path, arguments: Mapping[str, object]) -> Call:
    """The experiment of a source; arguments are words, or Python values."""
    return call_recipe(str(source), [f"{key}={value}" for key, value in arguments.items()])


def apply_overrides(call: Call, overrides: Sequence[str]) -> Call:
    """The call with some fields changed.

    Their order is free: one that only another makes possible, such as fewer epochs than the warm-up takes, waits for
    it. They are recorded in the order in which they were possible.
    """
    pending = [f"{key}={_placed(key, text)}" for key, text in split_pairs(overrides).items()]
    experiment = call.experiment
    done: list[str] = []
    while pending:
        complaints: dict[str, ConfigError] = {}
        for change in pending:
            try:
                experiment = override(experiment, change)
                done.append(change)
            except ConfigError as error:
                complaints[change] = error
        if len(complaints) == len(pending):
            raise complaints[pending[0]]
        pending = list(complaints)
    return Call(experiment, {**call.origin, "overrides": [*call.origin["overrides"], *done]})


def left_behind(call: Call) -> list[str]:
    """What an override did not change, but would have changed as an argument of the recipe, a sentence for each."""
    origin, told = call.origin, []
    types = _parameters(_recipe_of(origin), origin["recipe"])
    for change in origin["overrides"]:
        key, _, text = change.partition("=")
        if key not in types:
            continue
        others = [each for each in origin["overrides"] if each != change]
        try:
            wished = apply_overrides(
                _call_again(origin, {**origin["arguments"], key: text}), others
            )
        except ConfigError:
            continue
        found = differences(to_tree(wished.experiment), to_tree(call.experiment))
        if found:
            told.append(
                f"--set {change} changes that alone; {change} without --set would mean {'; '.join(found)}"
            )
    return told


def _placed(key: str, text: str) -> str:
    """The text of an override, but of a file its absolute path, so that the record means the same in any folder."""
    is_path = key in FILES and text and text.lower() != "none"
    return os.path.abspath(os.path.expanduser(text)) if is_path else text


def from_origin(origin: Mapping[str, Any]) -> Call:
    """The same call again, from what a run folder recorded; what else stands in the record is passed over."""
    if not isinstance(origin, Mapping):
        raise ConfigError(
            f"the record of an experiment is {quoted(origin)}; it must be a JSON object"
        )
    origin = current_record(origin)
    name, arguments, overrides = (origin.get(key) for key in ("recipe", "arguments", "overrides"))
    if not isinstance(name, str):
        raise ConfigError(f"the recipe is recorded as {quoted(name)}; it must be a name")
    if not isinstance(arguments, Mapping) or not all(map(_is_pair, arguments.items())):
        raise ConfigError(
            f"the arguments are recorded as {quoted(arguments)}; they must be words by their keys"
        )
    if not isinstance(overrides, list) or not all(isinstance(each, str) for each in overrides):
        raise ConfigError(
            f"the overrides are recorded as {quoted(overrides)}; they must be a list of a.b=c"
        )
    pairs = split_pairs([f"{key}={text}" for key, text in arguments.items()])
    call = _call_again(origin, pairs)
    experiment = call.experiment
    for change in overrides:
        experiment = override(experiment, change)
    return Call(experiment, {**call.origin, "overrides": list(overrides)})


def _call_again(origin: Mapping[str, Any], pairs: Mapping[str, str]) -> Call:
    """The recipe of a record, without its overrides, on these arguments."""
    record = {key: origin[key] for key in ("source", "sha256") if key in origin}
    return _call(_recipe_of(origin), origin["recipe"], pairs, record)


def _recipe_of(origin: Mapping[str, Any]) -> Callable[..., Any]:
    name = origin["recipe"]
    if (
        "source" not in origin
    ):  # then only recipes of ours: nothing that a record names is ever imported
        return _built_in(name)
    # The user's own recipe in the user's own run folder: to run it again is what was asked for. The hash guards
    # against damage and second thoughts; a folder from somebody else is to be trusted as little as a script.
    source = origin["source"]
    if not isinstance(source, str) or _sha256(source) != origin.get("sha256"):
        raise ConfigError(
            f"the source of the recipe {quoted(name)} is not as it was recorded: its sha256 differs"
        )
    return _from_source(current_source(source), name)


def _built_in(name: str) -> Callable[..., Any]:
    names = recipe_names()
    if name not in names:
        raise ConfigError(
            f"there is no recipe {quoted(name)}{nearest(name, names)}; there are {', '.join(names)}, "
            f"and one of your own is given by the path of its .py file{_meant(name)}"
        )
    recipe: Callable[..., Any] = import_module(f"nearsay.recipes.{name}").recipe
    return recipe


def _meant(name: str) -> str:
    """What trains on data whose path stands where a recipe should; nothing for other names."""
    endings = {
        ".csv": "manifest",
        ".tsv": "manifest",
        ".parquet": "manifest",
        ".npz": "embeddings",
        ".npy": "embeddings",
    }
    ending = endings.get(Path(name).suffix.lower()) if os.path.isfile(name) else None
    recipe = (
        "folder" if os.path.isdir(name) else ending
    )  # of os.path, which take a name that cannot be for none
    return f"; for data, nearsay train {recipe} path={name}" if recipe else ""


def _from_source(source: str, name: str) -> Callable[..., Any]:
    """The function `recipe` of a user's file; it must stand alone, as its text is all that a run folder keeps."""
    key = f"nearsay_recipe_{_sha256(source)}"
    if (
        key not in sys.modules
    ):  # run once: its classes are then the same ones each time it is called
        module = sys.modules[key] = ModuleType(
            key
        )  # where dataclasses and pickle look for what it defines
        try:
            exec(compile(source, name, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:  # a user's code can raise anything
            del sys.modules[key]
            raise ConfigError(f"the recipe {quoted(name)} fails with {_told(error)}") from error
    recipe = vars(sys.modules[key]).get("recipe")
    if not inspect.isfunction(recipe):
        raise ConfigError(
            f"{quoted(name)} defines no function `recipe`; write `def recipe(...) -> Experiment:` in it"
        )
    return recipe


def _call(
    recipe: Callable[..., Any], name: str, pairs: Mapping[str, str], record: dict[str, Any]
) -> Call:
    """Read the arguments as the signature declares them, and call."""
    types = _parameters(recipe, name)
    if "labeled" in pairs and "labeled" not in types:
        others = {key: text for key, text in pairs.items() if key != "labeled"}
        return apply_overrides(_call(recipe, name, others, record), [f"labeled={pairs['labeled']}"])
    values: dict[str, Any] = {}
    for key, text in pairs.items():
        if key not in types:
            takes = ", ".join(types) or "nothing"
            if "." in key:
                raise ConfigError(
                    f"{quoted(key)} is a field, not what the recipe {name} takes; --set {key}={text} changes it"
                )
            raise ConfigError(
                f"the recipe {name} has no {quoted(key)}{nearest(key, types)}; it takes {takes}"
            )
        values[key] = read_text(key, text, types[key])
    for key, parameter in inspect.signature(recipe).parameters.items():
        if key in types and key not in values and parameter.default is parameter.empty:
            raise ConfigError(f"the recipe {name} needs {key}=, which must be {wanted(types[key])}")
    try:
        experiment = recipe(**values)
    except ValueError as error:  # the dataclasses check themselves, and say it well
        raise ConfigError(str(error)) from error
    except (Exception, SystemExit) as error:
        if not record:
            raise
        raise ConfigError(f"the recipe {name} fails with {_told(error)}") from error
    from nearsay.experiment import Experiment  # noqa: PLC0415  # brings torch, which a list of names shall not

    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"the recipe {name} returned {quoted(experiment)}; it must return an Experiment"
        )
    # Absolute paths, so that the record means the same in any folder.
    words = {
        key: str(values[key]) if isinstance(values[key], Path) else text
        for key, text in pairs.items()
    }
    return Call(experiment, {"recipe": name, "arguments": words, "overrides": [], **record})


def _parameters(recipe: Callable[..., Any], name: str) -> dict[str, Any]:
    """Key -> declared type; where none is declared, that of the default."""
    hints = declared_types(recipe, name)
    types: dict[str, Any] = {}
    for key, parameter in inspect.signature(recipe).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            has_type = parameter.default is not parameter.empty and parameter.default is not None
            types[key] = hints.get(key, type(parameter.default) if has_type else str)
    return types


def _is_pair(pair: tuple[Any, Any]) -> bool:
    key, text = pair
    return isinstance(key, str) and isinstance(text, str) and "=" not in key


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _told(error: BaseException) -> str:
    """The error by its name and, where it is known, its line of the user's file."""
    place = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    return f"{type(error).__name__}{place}: {first_line(error)}"
