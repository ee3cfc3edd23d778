"""What recipes there are and what they take, read from their files without running them."""

import ast
import inspect
from pathlib import Path
from typing import NamedTuple

from nearsay import config


class Described(NamedTuple):
    """A recipe as its file tells of it."""

    name: str
    summary: str  # the first line of its docstring
    docstring: str
    parameters: dict[
        str, str
    ]  # name -> default as on a command line; empty where one must be given


def describe_recipe(name: str) -> Described:
    """The recipe of that name, or in a file; ConfigError if there is none, ValueError if it cannot be read."""
    path = (
        Path(name) if name.endswith(".py") else Path(__file__).parents[1] / "recipes" / f"{name}.py"
    )
    if name not in config.recipe_names() and not (name.endswith(".py") and path.is_file()):
        raise config.ConfigError(
            f"there is no recipe {name!r}; choose {', '.join(config.recipe_names())}, or give a .py file of your own"
        )
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is no Python that can be read: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "recipe":
            docstring = inspect.cleandoc(ast.get_docstring(node) or ast.get_docstring(tree) or "")
            return Described(name, docstring.partition("\n")[0], docstring, _parameters(node.args))
    raise ValueError(f"{path} has no function called recipe; define one that returns an Experiment")


def _parameters(arguments: ast.arguments) -> dict[str, str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
    return {
        each.arg: "" if default is None else _word(default)
        for each, default in zip([*plain, *arguments.kwonlyargs], defaults, strict=True)
    }


def _word(default: ast.expr) -> str:
    """A default as it would be written on a command line: text without quotes."""
    if isinstance(default, ast.Constant) and isinstance(default.value, str):
        return default.value
    return ast.unparse(default)
