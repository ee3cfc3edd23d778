"""Recipes called with words or values, and called again from the record of a run.

`Any` stands here for what JSON can hold, or for a value of a type that a recipe declares.
"""

import ast
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from nearsay.config.aliases import current_record
from nearsay.config.own_files import OwnFiles, check_digest, describe, digest, user_code
from nearsay.config.records import differences, to_tree
from nearsay.config.text import (
    check,
    declared_types,
    fit,
    nearest,
    override,
    quoted,
    read_text,
    split_pairs,
    takes_objects,
    wanted,
)
from nearsay.errors import ConfigError

FILES = ("labels_file", "init")
"""Fields of an experiment that are files, or folders."""

# What trains on data with these endings.
_ENDINGS = {
    ".csv": "manifest",
    ".tsv": "manifest",
    ".jsonl": "manifest",
    ".parquet": "manifest",
    ".npz": "embeddings",
    ".npy": "embeddings",
}


class Call(NamedTuple):
    """An experiment, and what makes it again.

    Attributes:
        experiment: the experiment.
        origin: recipe, arguments and overrides, all text; source and sha256 for a recipe in a file;
            folder and files for the user's own files. If the experiment was made of Python objects
            there is no recipe in it, because no text can stand for them.
    """

    experiment: Any
    origin: dict[str, Any]


class Described(NamedTuple):
    """A recipe as its file describes it.

    Attributes:
        name: the name, or the path of the file.
        summary: the first line of the docstring.
        docstring: all of it.
        parameters: the defaults as on a command line, empty for what must be given.
    """

    name: str
    summary: str
    docstring: str
    parameters: dict[str, str]


def _recipes() -> ModuleType:
    """The package of the recipes. It imports torch only when a recipe is called."""
    return import_module("nearsay.recipes")


def recipe_names() -> list[str]:
    """The names of the built-in recipes."""
    return sorted(_recipes().__all__)


def describe_recipe(name: str) -> Described:
    """The recipe of that name or in a file, read without running it.

    ConfigError if there is no such recipe, ValueError if its file cannot be read.
    """
    path, function = Path(name), "recipe"
    if name in _recipes().HOMES:
        home = _recipes().HOMES[name]
        path, function = Path(str(_recipes().__file__)).with_name(f"{home}.py"), name
    elif not name.endswith(".py") or not path.is_file():
        raise _no_recipe(name)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} must be valid Python: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            docstring = inspect.cleandoc(ast.get_docstring(node) or ast.get_docstring(tree) or "")
            summary = docstring.partition("\n")[0]
            return Described(name, summary, docstring, _defaults(node.args))
    raise ValueError(f"{path} must define a function {function} that returns an Experiment.")


def call_recipe(name_or_path: str, arguments: Sequence[str]) -> Call:
    """The experiment of a recipe or of data, with arguments that are words `key=value`.

    The name is that of a built-in recipe, the path of a `.py` file that defines `recipe`, or the
    path of data as in `call_source`. The words are read as the types that the recipe declares.
    """
    return _call_typed(name_or_path, split_pairs(arguments), {}, [])


def call_source(source: object, arguments: Mapping[str, object]) -> Call:
    """The experiment of a recipe or of data, with arguments that are Python values or words.

    Args:
        source: the name of a recipe; a `.py` file that defines `recipe`; data: a folder of images,
            a table (.csv, .tsv, .jsonl, .parquet), features (.npz, .npy), a data set of your own
            (`my_data.py:Stripes`); or a data set as a Python object.
        arguments: what the recipe takes, and fields of the experiment; a dotted name such as
            `objective.k` changes one field. Python objects are allowed, but then the origin cannot
            be written as text and has no recipe.
    """
    words: dict[str, str] = {}
    objects: dict[str, object] = {}
    changes: list[str] = []
    for key, value in arguments.items():
        text = _as_text(value)
        if text is None:
            objects[key] = value
        elif "." in key:
            changes.append(f"{key}={text}")
        else:
            words[key] = text
    if isinstance(source, str):
        name = source
    elif isinstance(source, os.PathLike):
        # A path is never the name of a recipe.
        name = os.path.join(".", str(os.fspath(source)))
    else:
        check(
            hasattr(source, "open"),
            "source must be a recipe, the path of data, an Experiment or a data set with a method "
            f"open(split), got {quoted(source)}.",
        )
        name = "dataset"
        objects = {"data": source, **objects}
    split_pairs([f"{key}={text}" for key, text in words.items()])
    return _call_typed(name, words, objects, changes)


def apply_overrides(call: Call, overrides: Sequence[str]) -> Call:
    """The call with some fields changed.

    The order is free: an override that is possible only after another, such as fewer epochs than
    the warm-up, waits for it. They are recorded in an order that works.
    """
    pairs = split_pairs(overrides)
    return _change(call, [f"{key}={_placed(key, text)}" for key, text in pairs.items()])


def left_behind(call: Call) -> list[str]:
    """A sentence for each override that would change more if it were an argument of the recipe."""
    origin = call.origin
    if "recipe" not in origin:
        return []
    notes: list[str] = []
    types = _parameters(_recipe_of(origin), origin["recipe"])
    for change in origin["overrides"]:
        key, _, text = change.partition("=")
        if key not in types:
            continue
        others = [other for other in origin["overrides"] if other != change]
        try:
            wished = _call_again(origin, {**origin["arguments"], key: text})
            wished = _change(wished, others, is_typed=False)
        except ConfigError:
            continue
        changes = differences(to_tree(wished.experiment), to_tree(call.experiment))
        if changes:
            notes.append(
                f"--set {change} changes that alone; {change} without --set would mean "
                f"{'; '.join(changes)}"
            )
    return notes


def from_origin(origin: Mapping[str, Any]) -> Call:
    """The same call again from the record of a run, which may hold other things, too."""
    is_object = isinstance(origin, Mapping)
    check(is_object, f"The recorded experiment must be a JSON object, got {quoted(origin)}.")
    origin = current_record(origin)
    name, arguments, overrides = (origin.get(key) for key in ("recipe", "arguments", "overrides"))
    are_pairs = isinstance(arguments, Mapping) and all(map(_is_pair, arguments.items()))
    are_texts = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
    check(isinstance(name, str), f"The recorded recipe must be a name, got {quoted(name)}.")
    check(are_pairs, f"The recorded arguments must be key: text, got {quoted(arguments)}.")
    check(are_texts, f"The recorded overrides must be a list of a.b=c, got {quoted(overrides)}.")
    return _replay(origin, arguments or {}, overrides or [])


def _replay(origin: Mapping[str, Any], arguments: Mapping[str, str], overrides: list[str]) -> Call:
    pairs = split_pairs([f"{key}={text}" for key, text in arguments.items()])
    call = _call_again(origin, pairs)
    own = OwnFiles(origin, is_typed=False)
    experiment = call.experiment
    for change in overrides:
        experiment = override(experiment, change, own)
    return Call(experiment, {**call.origin, "overrides": list(overrides)})


def _call_typed(
    source: str, pairs: Mapping[str, str], objects: Mapping[str, object], changes: list[str]
) -> Call:
    """The call of what a user typed or gave in Python."""
    own = OwnFiles()
    name, data = _resolve(source)
    for key in data:
        is_twice = key in pairs or key in objects
        check(not is_twice, f"{key} must be left out, because {quoted(source)} is the {key}.")
    pairs, record = {**data, **pairs}, {}
    if name in _recipes().HOMES:
        recipe = _built_in(name)
    else:
        text = own.keep_recipe(Path(name).expanduser())
        name = os.path.basename(name)
        record = {"source": text, "sha256": digest(text)}
        recipe = _function(own, name, text)
    if name == "dataset" and "shape" not in pairs:
        pairs = {**pairs, "shape": _shape(pairs, objects, own)}
    call = _call(recipe, name, pairs, record, own, objects)
    return _change(call, changes)


def _resolve(source: str) -> tuple[str, dict[str, str]]:
    """The recipe of a source, and the arguments that the source stands for."""
    if source in _recipes().HOMES:
        return source, {}
    if OwnFiles.is_object(source):
        return "dataset", {"data": source}
    if source.endswith(".py"):
        is_there = os.path.isfile(os.path.expanduser(source))
        check(is_there, f"{quoted(source)} must be a file that is there. Check its path.")
        return source, {}
    path = os.path.expanduser(source)
    ending = Path(source).suffix.lower()
    if os.path.isdir(path):
        return "folder", {"path": source}
    if os.path.isfile(path) and ending in _ENDINGS:
        return _ENDINGS[ending], {"path": source}
    known = f"a folder or a file with one of the endings {', '.join(_ENDINGS)}"
    check(not os.path.isfile(path), f"{quoted(source)} must be {known}.")
    is_path = ending in _ENDINGS or "/" in source or os.sep in source
    check(not is_path, f"{quoted(source)} must be a path that is there. Check its spelling.")
    raise _no_recipe(source)


def _no_recipe(name: str) -> ConfigError:
    names = recipe_names()
    return ConfigError(
        f"The recipe must be one of {', '.join(names)}, a .py file, or the path of data, "
        f"got {quoted(name)}{nearest(name, names) or '.'}"
    )


def _shape(pairs: Mapping[str, str], objects: Mapping[str, object], own: OwnFiles) -> str:
    """The shape of an example of a data set, as text.

    It is recorded with the run, so that the run can be read where the data is not.
    """
    if "data" in objects:
        data: Any = objects["data"]
    elif "data" in pairs and own.is_object(pairs["data"]):
        data = own.read(pairs["data"])
    else:
        return "auto"
    from nearsay.recipes.own_data import find_shape  # noqa: PLC0415  # brings torch

    with user_code("data must open its training split"):
        return str(_as_text(find_shape(data)))


def _change(call: Call, pending: list[str], *, is_typed: bool = True) -> Call:
    """The call with overrides, each as soon as it is possible."""
    own = OwnFiles(call.origin, is_typed=is_typed)
    experiment = call.experiment
    done: list[str] = []
    while pending:
        complaints: dict[str, ConfigError] = {}
        for change in pending:
            key, _, text = change.partition("=")
            try:
                experiment = override(experiment, change, own)
            except ConfigError as error:
                complaints[change] = error
            else:
                done.append(f"{key}={own.words.get(text, text)}")
        if len(complaints) == len(pending):
            raise complaints[pending[0]]
        pending = list(complaints)
    if own.words:
        # Refuses what cannot be recorded before a run begins.
        to_tree(experiment)
    overrides = [*call.origin["overrides"], *done]
    return Call(experiment, {**call.origin, **own.record(), "overrides": overrides})


def _placed(key: str, text: str) -> str:
    """The text of an override; for a file its absolute path, which means the same in any folder."""
    is_path = key in FILES and text and text.lower() != "none"
    return os.path.abspath(os.path.expanduser(text)) if is_path else text


def _call_again(origin: Mapping[str, Any], pairs: Mapping[str, str]) -> Call:
    """The recipe of a record, without its overrides, on these arguments."""
    record = {key: origin[key] for key in ("source", "sha256") if key in origin}
    own = OwnFiles(origin, is_typed=False)
    has_data = any(change.startswith("data=") for change in origin["overrides"])
    recipe = _recipe_of(origin)
    return _call(recipe, origin["recipe"], pairs, record, own, {}, has_data=has_data)


def _recipe_of(origin: Mapping[str, Any]) -> Callable[..., Any]:
    name = origin["recipe"]
    if "source" not in origin:
        # Only recipes of ours: a name in a record is never imported.
        return _built_in(name)
    # The user's own recipe, in the user's own run folder. The hash protects against damage, not
    # against a folder from somebody else, which can be trusted as little as a script.
    source = origin["source"]
    check_digest(name, source, origin.get("sha256"))
    return _function(OwnFiles(origin, is_typed=False), name, source)


def _built_in(name: str) -> Callable[..., Any]:
    if name not in _recipes().HOMES:
        raise _no_recipe(name)
    recipe: Callable[..., Any] = getattr(_recipes(), name)
    return recipe


def _function(own: OwnFiles, name: str, text: str) -> Callable[..., Any]:
    """The function `recipe` of a user's file with this text."""
    recipe = vars(own.load_recipe(name, text)).get("recipe")
    is_function = inspect.isfunction(recipe)
    cure = f"Use {name}:NAME for a data set." if OwnFiles.is_object(f"{name}:NAME") else ""
    check(is_function, f"{quoted(name)} must define a function `recipe(...)`. {cure}".rstrip())
    return cast(Callable[..., Any], recipe)


def _call(
    recipe: Callable[..., Any],
    name: str,
    pairs: Mapping[str, str],
    record: dict[str, Any],
    own: OwnFiles,
    objects: Mapping[str, object],
    *,
    has_data: bool = False,
) -> Call:
    """Call a recipe with words and objects; `has_data` if an override replaces its data."""
    types = _parameters(recipe, name)
    values, changes, replaced = _read_arguments(name, types, pairs, objects, own)
    has_data = has_data or "data" in replaced or "data" in split_pairs(changes)
    if has_data and not record and "path" in types:
        # The data of the recipe is replaced, so its path does not matter.
        values.setdefault("path", Path("data"))
    for key, parameter in inspect.signature(recipe).parameters.items():
        is_missing = key in types and key not in values and parameter.default is parameter.empty
        if is_missing:
            raise ConfigError(f"{key} must be given to the recipe {name}: {wanted(types[key])}.")
    experiment = _run(recipe, name, values, is_own=bool(record))
    words = {key: own.words.get(text, text) for key, text in pairs.items() if key in values}
    # Absolute paths mean the same in any folder.
    words |= {key: str(values[key]) for key in words if isinstance(values[key], Path)}
    origin = {"recipe": name, "arguments": words, "overrides": [], **record, **own.record()}
    for key in list(replaced):
        described = _as_changes(experiment, key, replaced[key])
        if described is not None:
            changes += described
            del replaced[key]
    unspoken = {key: to_tree(objects[key]) for key in objects if key in values or key in replaced}
    if unspoken:
        experiment = replace(experiment, **replaced)
        del origin["recipe"]
        origin |= {"called": name, "objects": unspoken}
    if own.words:
        # Refuses what cannot be recorded before a run begins.
        to_tree(experiment)
    return _change(Call(experiment, origin), changes, is_typed=own.is_typed)


def _read_arguments(
    name: str,
    types: Mapping[str, Any],
    pairs: Mapping[str, str],
    objects: Mapping[str, object],
    own: OwnFiles,
) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """The arguments of a recipe, and what changes fields: overrides, and objects by their fields.

    Every field of an experiment that the recipe does not take is changed after the call.
    """
    from nearsay.experiment import Experiment  # noqa: PLC0415  # brings torch

    settable = declared_types(Experiment, "Experiment")
    values: dict[str, Any] = {}
    changes: list[str] = []
    replaced: dict[str, Any] = {}
    for key, text in pairs.items():
        is_own = own.is_object(text) and not takes_objects(types.get(key, str))
        if key in settable and (key not in types or is_own):
            changes.append(f"{key}={_placed(key, text)}")
        elif key in types:
            values[key] = read_text(key, text, types[key], own)
        else:
            raise _no_parameter(name, key, text, types)
    for key, value in objects.items():
        if key in types:
            values[key] = value
        elif key in settable:
            replaced[key] = fit(key, value, settable[key])
        else:
            raise _no_parameter(name, key, "...", types)
    return values, changes, replaced


def _run(recipe: Callable[..., Any], name: str, values: Mapping[str, Any], *, is_own: bool) -> Any:
    from nearsay.experiment import Experiment  # noqa: PLC0415  # brings torch

    try:
        experiment = recipe(**values)
    except ValueError as error:
        # The dataclasses check themselves, and their messages name the field.
        raise ConfigError(str(error)) from error
    except (Exception, SystemExit) as error:
        if not is_own:
            raise
        raise ConfigError(f"The recipe {name} fails with {describe(error)}") from error
    is_experiment = isinstance(experiment, Experiment)
    check(is_experiment, f"The recipe {name} must return an Experiment, got {quoted(experiment)}.")
    return experiment


def _no_parameter(name: str, key: str, text: str, types: Mapping[str, Any]) -> ConfigError:
    if "." in key:
        return ConfigError(
            f"{quoted(key)} must be an argument of the recipe {name}. "
            f"Use --set {key}={text} for a field."
        )
    return ConfigError(
        f"{quoted(key)} must be an argument of the recipe {name}: {', '.join(types) or 'none'}"
        f"{nearest(key, types) or '.'}"
    )


def _parameters(recipe: Callable[..., Any], name: str) -> dict[str, Any]:
    """Key -> declared type; where none is declared, that of the default."""
    hints = declared_types(recipe, name)
    types: dict[str, Any] = {}
    for key, parameter in inspect.signature(recipe).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            is_typed = parameter.default is not parameter.empty and parameter.default is not None
            types[key] = hints.get(key, type(parameter.default) if is_typed else str)
    return types


def _as_changes(experiment: Any, key: str, value: Any) -> list[str] | None:
    """The overrides that make a field equal to a value, None if no text can."""
    changes: list[str] = []
    pending = [(key, getattr(experiment, key), value)]
    while pending:
        where, old, new = pending.pop()
        if type(old) is type(new) and is_dataclass(new):
            for field in fields(new):
                pending.append(
                    (f"{where}.{field.name}", getattr(old, field.name), getattr(new, field.name))
                )
        elif to_tree(old) != to_tree(new):
            text = _as_text(new)
            if text is None:
                return None
            changes.append(f"{where}={text}")
    return changes


def _as_text(value: object) -> str | None:
    """A Python value as it is written on a command line; None for an object."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (Integral, float)):
        return str(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, (tuple, list)):
        items = [_as_text(item) for item in value]
        return None if None in items else ",".join(map(str, items))
    return None


def _is_pair(pair: tuple[Any, Any]) -> bool:
    key, text = pair
    return isinstance(key, str) and isinstance(text, str) and "=" not in key


def _defaults(arguments: ast.arguments) -> dict[str, str]:
    """Parameter -> its default as on a command line, text without quotes."""
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    nodes = [*missing, *arguments.defaults, *arguments.kw_defaults]
    words: dict[str, str] = {}
    for parameter, default in zip([*positional, *arguments.kwonlyargs], nodes, strict=True):
        if default is None:
            words[parameter.arg] = ""
        elif isinstance(default, ast.Constant) and isinstance(default.value, str):
            words[parameter.arg] = default.value
        else:
            words[parameter.arg] = ast.unparse(default)
    return words
