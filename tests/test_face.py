"""The public face: complete, sorted, documented, and instant to import."""

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import nearsay

TREE = ast.parse(Path(nearsay.__file__).read_text("utf-8"))


def sorting_key(name: str) -> tuple[int, list[tuple[bool, int, str]]]:
    """As isort and ruff sort __all__: CONSTANTS, Classes, then the rest; numbers inside names by value."""
    if name.isupper() and len(name) > 1:
        kind = 0
    else:
        kind = 1 if name[0].isupper() else 2
    pieces = re.findall(r"\d+|\D+", name)
    return kind, [
        (not piece.isdigit(), int(piece) if piece.isdigit() else 0, piece) for piece in pieces
    ]


def imported_for_types() -> dict[str, str]:
    """Public name -> module, as the type checker sees it."""
    [block] = [
        node
        for node in TREE.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    homes = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom), (
            f"line {node.lineno} is not a `from nearsay... import ...`"
        )
        assert node.level == 0
        for alias in node.names:
            assert alias.asname in (None, alias.name), f"{alias.name} is public under another name"
            assert alias.name not in homes, f"{alias.name} has two homes"
            homes[alias.name] = node.module
    return homes


def imported_lazily() -> dict[str, str]:
    """Public name -> module, as the table behind __getattr__ says."""
    [table] = [
        ast.literal_eval(node.value)
        for node in TREE.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"
    ]
    pairs = [(name, f"nearsay.{module}") for module, names in table.items() for name in names]
    assert len(pairs) == len(dict(pairs)), "a name stands twice in the table"
    return dict(pairs)


def test_all_lists_every_public_name_and_nothing_else():
    assert set(nearsay.__all__) == imported_lazily().keys()
    assert len(nearsay.__all__) == len(set(nearsay.__all__))
    inside = [
        part for node in TREE.body for part in (node.body if isinstance(node, ast.If) else [node])
    ]
    defined = {node.name for node in inside if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert defined == {"__getattr__", "__dir__"}


def test_all_is_sorted():
    assert nearsay.__all__ == sorted(nearsay.__all__, key=sorting_key)


def test_the_sorting_key_sorts_as_ruff_does():
    names = [
        "NCR",
        "SEED",
        "Bank",
        "N",
        "Net9",
        "Net10",
        "_hidden",
        "elr",
        "ncr",
        "view2",
        "view10",
    ]
    shuffled = sorted(names, key=str.lower)
    assert shuffled != names
    assert sorted(shuffled, key=sorting_key) == names


def test_type_checkers_and_the_lazy_table_agree():
    assert imported_for_types() == imported_lazily()


@pytest.mark.parametrize("name", nearsay.__all__)
def test_every_public_name_resolves_and_is_documented(name):
    value = getattr(nearsay, name)
    assert value.__name__ == name
    assert value.__module__.startswith("nearsay.")
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert text, f"{name} has no docstring"
    assert not text.startswith(f"{name}("), f"{name} has only the docstring that Python made up"


def test_dir_lists_the_public_names():
    assert {*nearsay.__all__, "__version__"} <= set(dir(nearsay))


def test_an_unknown_name_is_refused_with_the_list_of_names():
    with pytest.raises(AttributeError, match="no attribute 'nrc'") as caught:
        _ = nearsay.nrc
    assert all(name in str(caught.value) for name in nearsay.__all__)


def test_no_public_name_is_that_of_a_module():
    modules = {module.name for module in pkgutil.iter_modules(nearsay.__path__)}
    assert "batch" in modules
    assert modules.isdisjoint(nearsay.__all__)


def test_importing_nearsay_imports_nothing_heavy():
    code = "import sys, nearsay; print(sorted({'torch', 'numpy', 'scipy'} & sys.modules.keys()))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_the_version_is_that_of_the_package():
    assert nearsay.__version__ == version("nearsay")


def test_what_is_to_be_installed_can_be_as_nearsay_is_on_no_package_index():
    root = Path(__file__).parents[1]
    pages = [
        root / "README.md",
        *root.glob("docs/**/*.md"),
        *root.glob("src/**/*.py"),
        *root.glob("examples/*.py"),
    ]
    told = {
        path.name for path in pages if re.search(r"pip install \S*nearsay", path.read_text("utf-8"))
    }
    assert told == set()
    assert "`nearsay` is not on a package index yet" in (root / "README.md").read_text("utf-8")
