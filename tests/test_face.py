"""The public face: complete, instant to import, and the same for people and type checkers."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import nearsay

TREE = ast.parse(Path(nearsay.__file__).read_text("utf-8"))


def table(name):
    """The value of a constant of the public face."""
    for node in TREE.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{name} is not there")


def imported_for_types():
    """Public name -> module, as the type checker sees it."""
    homes = {}
    for node in TREE.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                homes.update({alias.name: line.module for alias in line.names})
    return homes


def imported_lazily():
    """Public name -> module, as the tables behind __getattr__ say."""
    homes = dict.fromkeys(table("_SUBMODULES"), "nearsay")
    for module, names in table("_MODULES").items():
        homes.update(dict.fromkeys(names, f"nearsay.{module}"))
    return homes


def test_all_the_type_checker_and_the_lazy_table_agree():
    assert imported_for_types() == imported_lazily()
    assert sorted(nearsay.__all__) == sorted(imported_lazily())


@pytest.mark.parametrize("name", nearsay.__all__)
def test_every_public_name_resolves(name):
    value = getattr(nearsay, name)
    assert value.__name__ in (name, f"nearsay.{name}")
    assert name in dir(nearsay)


def test_an_unknown_name_is_refused_with_the_list_of_names():
    with pytest.raises(AttributeError, match="'nrc'") as caught:
        _ = nearsay.nrc
    assert all(name in str(caught.value) for name in nearsay.__all__)


def test_importing_nearsay_imports_nothing_heavy():
    code = "import sys, nearsay; print(sorted({'torch', 'numpy', 'scipy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_that_of_the_package():
    assert nearsay.__version__ == version("nearsay")
