"""The plan of the house, enforced: imports point down, one door per library, files that say what they are for.

Every import counts wherever it stands: in a function it is only later, and under TYPE_CHECKING a name is still known.
The public face, `__init__.py` of the package, is exempt, and nobody inside goes through it except for the version.
Files of one folder are one room and may import each other.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "nearsay"
FACE = "__init__.py"

FLOORS = [  # from the top; a module imports only from floors below its own
    ["__main__"],  # nothing but a call of cli
    ["cli"],
    ["doors", "reproduce", "sweep"],
    ["integrations", "report", "review"],
    ["label_issues"],
    ["training"],
    ["config"],
    ["recipes"],
    ["experiment"],
    ["data"],
    ["losses", "models", "optim", "noise"],
    ["transforms", "metrics", "label_propagation"],
    ["distributed", "neighbors", "rng"],
    ["batch"],
    ["validation", "files"],
    ["errors", "_version"],
]
HEIGHT = {room: -depth for depth, rooms in enumerate(FLOORS) for room in rooms}

DOORS = {  # a star stands for any ending, a slash for every file of a folder
    "triton": ["losses/_ncr_triton.py"],
    "timm": ["models/pretrained.py", "integrations/timm.py"],
    "lightning": ["integrations/lightning.py"],
    "transformers": ["integrations/transformers.py"],
    "datasets": ["data/hub.py"],
    "sklearn": ["integrations/sklearn.py", "data/digits.py", "report/audit_examples.py"],
    "onnx*": ["integrations/export.py"],
    "optuna": ["sweep/"],
    "altair": ["report/"],
    "starlette": ["review/"],
    "uvicorn": ["review/"],
    "faiss": ["neighbors.py"],
    "cleanlab": ["label_issues/"],
    "pyarrow": ["data/tables.py"],
    "torch.distributed": ["distributed.py"],
    "typer": ["cli/", "training/progress.py"],
    "rich": ["cli/", "training/progress.py"],
    "scipy": ["transforms/mixup.py"],
}

IMPORTING = (
    "import_module",
    "__import__",
    "import_library",
)  # calls whose first argument is what they import


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of one file; `path` is relative to the package."""
    if path == FACE:
        return []
    room = room_of(path)
    if room not in HEIGHT:
        return [f"{path} is on no floor; give {room} a place in FLOORS and in the architecture"]
    found = []
    for line, name in known_names(path, ast.parse(source)):
        where = f"{path}:{line}"
        if name == "nearsay" or name.startswith("nearsay."):
            other = name.split(".")[1] if "." in name else ""
            if other == room and "/" in path:
                continue
            if other not in HEIGHT:
                found.append(
                    f"{where} takes {name}, which is on no floor; import names from the module they live in"
                )
            elif HEIGHT[other] > HEIGHT[room]:
                found.append(
                    f"{where} imports {name} from above; {room} may know only floors below its own"
                )
            elif HEIGHT[other] == HEIGHT[room]:
                found.append(f"{where} imports {name}, a room on the same floor as {room}")
        for library, doors in DOORS.items():
            if belongs(name, library) and not path.startswith(tuple(doors)):
                found.append(f"{where} uses {name}; the door to {library} is {' and '.join(doors)}")
    return list(dict.fromkeys(found))


def known_names(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of all that a file imports, or reaches as an attribute of what it imports."""
    bound = {}  # what a name in this file stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = ["nearsay", *path.split("/")[:-1]]  # what one dot means
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{module}.{alias.name}"
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in IMPORTING:
            name = leading_text(node.args[0]) if node.args else ""
            if name and not name.startswith("."):
                yield node.lineno, name.rstrip(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in bound and re.fullmatch(r"[\w.]+", rest):
                yield node.lineno, f"{bound[root]}.{rest}"


def leading_text(node: ast.expr) -> str:
    """The string, or the beginning of the f-string, that an expression is."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def belongs(name: str, library: str) -> bool:
    if library.endswith("*"):
        return name.split(".")[0].startswith(library[:-1])
    return name == library or name.startswith(f"{library}.")


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def shape_violations(path: str, source: str) -> list[str]:
    """What is wrong with the first sentence of a file."""
    found = []
    opening = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    if not opening:
        found.append(f"{path} must open with a docstring that says what it is for")
    elif not opening.endswith(".") or re.search(r"[.!?] [A-Z]", opening):
        found.append(f"{path} must open with one sentence and a full stop, not {opening!r}")
    return found


def files() -> dict[str, str]:
    return {
        path.relative_to(SOURCE).as_posix(): path.read_text("utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


def test_there_are_files_to_look_at():
    assert {FACE, "batch.py", "distributed.py"} <= files().keys()


def test_imports_point_down_and_libraries_have_one_door():
    assert [found for path, source in files().items() for found in violations(path, source)] == []


def test_files_open_with_one_sentence():
    assert [
        found for path, source in files().items() for found in shape_violations(path, source)
    ] == []


def test_every_room_has_one_floor():
    rooms = [room for floor in FLOORS for room in floor]
    assert len(rooms) == len(set(rooms))


def test_every_door_is_a_room():
    assert {room_of(door) for doors in DOORS.values() for door in doors} <= HEIGHT.keys()


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("batch.py", "import torch\nfrom torch import Tensor"),
        ("training/loop.py", "from nearsay.batch import Batch\nfrom nearsay import distributed"),
        ("losses/elr.py", "from nearsay.losses.ncr import ncr\nfrom .ncr import NCR"),
        ("losses/elr.py", "from ..batch import Batch\nfrom .. import rng"),
        ("label_issues/audit.py", "from nearsay.metrics import accuracy\nimport cleanlab"),
        ("files.py", "from nearsay._version import __version__"),
        ("data/hub.py", "import datasets"),
        ("losses/_ncr_triton.py", "import triton\nfrom triton import language"),
        ("distributed.py", "import torch.distributed as there\nthere.get_rank()"),
        ("noise.py", "import torch\n'torch.distributed.all_reduce'\n# torch.distributed.x"),
        (FACE, "from nearsay.training.loop import train"),
    ],
)
def test_what_the_plan_allows_passes(path, source):
    assert violations(path, source) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("batch.py", "from nearsay.rng import draw", "from above"),
        ("batch.py", "from . import experiment", "from above"),
        ("batch.py", "from .training import *", "from above"),
        ("losses/ncr.py", "from ..training.loop import train", "from above"),
        ("losses/ncr.py", "import nearsay.batch\nnearsay.training.loop()", "from above"),
        ("noise.py", "def f():\n    from nearsay.training.loop import train", "from above"),
        ("noise.py", "if TYPE_CHECKING:\n    from nearsay.config import Call", "from above"),
        (
            "noise.py",
            "from importlib import import_module\nimport_module(f'nearsay.recipes.{name}')",
            "from above",
        ),
        ("metrics.py", "from nearsay.transforms import mixup", "same floor"),
        ("models/mlp.py", "from ..losses.ncr import NCR", "same floor"),
        ("rng.py", "import nearsay.distributed as dist", "same floor"),
        ("batch.py", "from nearsay.batch import Batch", "same floor"),
        ("training/loop.py", "from nearsay import one_hot", "on no floor"),
        ("training/loop.py", "import nearsay", "on no floor"),
        ("utils.py", "", "utils.py is on no floor"),
        ("models/mlp.py", "import timm", "door to timm"),
        ("losses/ncr.py", "def f():\n    import triton", "door to triton"),
        ("training/loop.py", "import onnxruntime", "door to onnx*"),
        ("training/loop.py", "__import__('rich')", "door to rich"),
        ("integrations/timm.py", "_x = import_library('lightning', 'x')", "door to lightning"),
        ("noise.py", "from torch import Tensor, distributed as d", "door to torch.distributed"),
        ("noise.py", "from torch.distributed import all_reduce", "door to torch.distributed"),
        ("noise.py", "import torch\ntorch.distributed.all_reduce(x)", "door to torch.distributed"),
        ("noise.py", "import torch as t\nt.distributed.x()", "door to torch.distributed"),
    ],
)
def test_what_the_plan_forbids_is_caught(path, source, complaint):
    found = violations(path, source)
    assert found
    assert all(complaint in each for each in found)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n'Too late.'\n", "must open with a docstring"),
        ("'No full stop'\n", "one sentence"),
        ("'Two sentences. In one.'\n", "one sentence"),
    ],
)
def test_missing_first_sentences_are_caught(source, complaint):
    assert [complaint in each for each in shape_violations("batch.py", source)] == [True]


def test_an_opening_sentence_may_wrap_and_be_followed_by_more():
    source = '"""A sentence that\nwraps, i.e. is long.\n\nMore. And more.\n"""\n'
    assert shape_violations("batch.py", source) == []
