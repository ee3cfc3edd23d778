"""Python files of the user, recorded with every local file that they import.

`FILE.py:NAME` or `FILE.py:NAME(q=0.7)` on a command line is the object NAME of that file. The text
of the file, and of every file beside or below it that it imports, is recorded in the run. Objects
are always made from the recorded text, so a run can be read after the files have changed, and on
another machine. Each set of files is loaded once, as a private package with a name that depends on
the content alone. Nothing is put on the import path, and no module of the present folder can
replace a recorded one.
"""

import ast
import hashlib
import json
import os
import posixpath
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from nearsay.config.aliases import current_source
from nearsay.config.text import check, nearest, quoted
from nearsay.errors import ConfigError, first_line

# Modules of Python and of nearsay are never local, whatever files there are.
_NEVER_LOCAL = {*sys.stdlib_module_names, "nearsay"}
_OBJECT = re.compile(r"(?P<path>.+?\.py):(?P<name>[^\W\d]\w*)(?P<arguments>\(.*\))?", re.DOTALL)
_OWN, _RECIPE = "nearsay_own_", "nearsay_recipe_"

# The text of a file by its path below a folder, None if there is no such file.
_Read = Callable[[str], str | None]


class _Reference(NamedTuple):
    """FILE.py:NAME(arguments) in its parts."""

    path: str
    name: str
    arguments: str


class OwnFiles:
    """The files of one experiment, by their paths below the folder of the first one.

    With `is_typed`, text names files as a user does, relative to the working directory, and they
    are read and kept. Otherwise text names what is kept already. `words` has, for each text that
    was typed, the text that names the same in the record.
    """

    def __init__(self, origin: Mapping[str, Any] | None = None, *, is_typed: bool = True) -> None:
        """The files of a recorded origin, or none yet; ConfigError if they were changed in it."""
        origin = origin or {}
        self.is_typed = is_typed
        self.folder = str(origin.get("folder", ""))
        self.words: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        files = origin.get("files", {})
        is_object = isinstance(files, Mapping)
        check(is_object, f"The recorded files must be a JSON object, got {quoted(files)}.")
        for path, file in files.items():
            text = file.get("source") if isinstance(file, Mapping) else None
            check_digest(path, text, file.get("sha256") if isinstance(file, Mapping) else None)
            self._texts[str(path)] = str(text)

    def record(self) -> dict[str, Any]:
        """The files as the origin of a run keeps them; empty if there are none."""
        if not self._texts:
            return {}
        files = {
            path: {"source": text, "sha256": digest(text)}
            for path, text in sorted(self._texts.items())
        }
        return {"folder": self.folder, "files": files}

    @staticmethod
    def is_object(text: str) -> bool:
        """Whether the text has the form FILE.py:NAME or FILE.py:NAME(...)."""
        return _OBJECT.fullmatch(text) is not None

    def read(self, text: str) -> Any:
        """The object that FILE.py:NAME stands for; a class is replaced by an instance of it."""
        reference = _parse(text)
        if self.is_typed:
            reference = self._keep(reference)
            self.words[text] = f"{reference.path}:{reference.name}{reference.arguments}"
        return self._load(reference)

    def keep_recipe(self, path: Path) -> str:
        """Read a recipe and every local file that it imports; returns the text of the recipe."""
        first = os.path.abspath(path)
        self.folder = os.path.dirname(first)
        texts = _closure(os.path.basename(first), _reader(self.folder))
        text = texts.pop(os.path.basename(first))
        self._texts.update(texts)
        return text

    def load_recipe(self, name: str, text: str) -> ModuleType:
        """The module of a recipe with this text, which imports the files that are kept."""
        texts = {**self._texts, name: text}
        return _load_module(name, _closure(name, texts.get), self.folder, _RECIPE)

    def _keep(self, reference: _Reference) -> _Reference:
        """Read a file and every local file that it imports; returns the reference as recorded."""
        first = os.path.abspath(os.path.expanduser(reference.path))
        folder, name = os.path.split(first)
        self.folder = self.folder or folder
        below = os.path.relpath(folder, self.folder).replace(os.sep, "/")
        for path, text in _closure(name, _reader(folder)).items():
            place = _join(below, path)
            is_same = self._texts.setdefault(place, text) == text
            check(is_same, f"{place} must not change while it is read. Try again.")
        return reference._replace(path=_join(below, name))

    def _load(self, reference: _Reference) -> Any:
        below, name = posixpath.split(reference.path)
        texts = _closure(name, lambda path: self._texts.get(_join(below, path)))
        module = _load_module(name, texts, os.path.join(self.folder, below), _OWN)
        names = [name for name in vars(module) if not name.startswith("_")]
        near = nearest(reference.name, names) or "."
        is_there = hasattr(module, reference.name)
        check(is_there, f"{reference.path} must define {reference.name}{near}")
        value = getattr(module, reference.name)
        arguments = _arguments(reference)
        if isinstance(value, type):
            words = reference.arguments or "()"
            with user_code(f"{reference.path}:{reference.name} must take the arguments {words}"):
                return value(**arguments)
        kind = type(value).__name__
        check(not arguments, f"{reference.name} must be a class to take arguments, got {kind}.")
        return value


def digest(text: str) -> str:
    """The SHA-256 of a source."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def check_digest(name: object, text: object, recorded: object) -> None:
    """Refuse the source of a record that is not as it was recorded."""
    is_same = isinstance(text, str) and digest(text) == recorded
    check(is_same, f"The recorded source of {quoted(name)} must have its recorded sha256.")


def digests(origin: Mapping[str, Any]) -> dict[str, str]:
    """The hashes of the user's own files in the origin of a run."""
    return {path: file["sha256"] for path, file in origin.get("files", {}).items()}


def whole_path(text: str, origin: Mapping[str, Any]) -> str:
    """The text of an argument; for FILE.py:NAME with the path of the file on this machine."""
    match = _OBJECT.fullmatch(text)
    if match is None or match["path"] not in origin.get("files", {}):
        return text
    return os.path.normpath(os.path.join(origin["folder"], text))


def code_of(owner: Any) -> str | None:
    """The file of a user's own class or function and the hash of its code; None for others."""
    prefix, _, dotted = str(owner.__module__).partition(".")
    if not prefix.startswith(_OWN):
        return None
    path = _FINDER.packages[prefix].paths.get(dotted, dotted)
    return f"{path} {prefix.removeprefix(_OWN)}"


def describe(error: BaseException) -> str:
    """An error of a user's code by its name and, if it is known, its line in the user's file."""
    line = ""
    if isinstance(error, SyntaxError) and error.lineno:
        line = f" in line {error.lineno}"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in _FINDER.filenames:
            line = f" in line {frame.lineno} of {os.path.basename(frame.filename)}"
    return f"{type(error).__name__}{line}: {first_line(error)}"


def explain_own(error: BaseException) -> str | None:
    """The error in one sentence if a user's file has raised it, or called what raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames if frame.filename in _FINDER.filenames]
    if not files:
        return None
    return f"{quoted(os.path.basename(files[-1]))} must run without errors: {describe(error)}"


@contextmanager
def user_code(sentence: str) -> Iterator[None]:
    """Turn any error of a user's code into a ConfigError that begins with the sentence."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{sentence}: {describe(error)}") from error


def _parse(text: str) -> _Reference:
    match = _OBJECT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{quoted(text)} must be FILE.py:NAME or FILE.py:NAME(key=value).")
    return _Reference(match["path"], match["name"], match["arguments"] or "")


def _arguments(reference: _Reference) -> dict[str, Any]:
    """The keyword arguments in the parentheses, which must be literals: nothing is evaluated."""
    if not reference.arguments:
        return {}
    try:
        call = ast.parse(f"f{reference.arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("no keyword arguments")
        # A keyword without a name is **mapping.
        if None in [word.arg for word in call.keywords]:
            raise ValueError("a mapping")
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{reference.name} must have keyword arguments that are literals, such as (q=0.7), "
            f"got {quoted(reference.arguments)}."
        ) from error


# Reading: which files belong to an object.


def _reader(folder: str) -> _Read:
    """Reads files below a folder of this machine."""

    def read(path: str) -> str | None:
        file = Path(folder, path)
        try:
            return file.read_text("utf-8-sig") if file.is_file() else None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file} must be a readable UTF-8 file: {first_line(error)}."
            ) from error

    return read


def _closure(first: str, read: _Read) -> dict[str, str]:
    """The text of a file and of every local file that it imports, directly or not, by path."""
    text = read(first)
    check(text is not None, f"{quoted(first)} must be a file that is there. Check its path.")
    texts, pending = {first: str(text)}, [first]
    while pending:
        path = pending.pop()
        for dotted in sorted(_imported(path, _tree(path, texts[path]))):
            # All packages above a module are imported before it.
            parts = dotted.split(".")
            for depth in range(1, len(parts) + 1):
                stem = "/".join(parts[:depth])
                for candidate in (f"{stem}/__init__.py", f"{stem}.py"):
                    if candidate in texts:
                        break
                    content = read(candidate)
                    if content is not None:
                        texts[candidate] = content
                        pending.append(candidate)
                        break
    return texts


def _imported(path: str, tree: ast.Module) -> set[str]:
    """The dotted names of all modules that a file may import from the folder of the first file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names if _may_be_local(alias.name))
        elif isinstance(node, ast.ImportFrom):
            start = _package(path, node.level)
            is_foreign = not node.level and not _may_be_local(str(node.module))
            if start is None or is_foreign:
                continue
            module = ".".join(filter(None, [start, node.module]))
            names.add(module)
            # What is imported from a package may be a module of it.
            names.update(f"{module}.{alias.name}".lstrip(".") for alias in node.names)
    return names - {""}


def _may_be_local(dotted: str) -> bool:
    return dotted.split(".")[0] not in _NEVER_LOCAL


def _package(path: str, level: int) -> str | None:
    """The package that so many dots mean in a file: "" is the folder, None is outside of it."""
    if not level:
        return ""
    parents = path.split("/")[:-1]
    if level - 1 > len(parents):
        return None
    return ".".join(parents[: len(parents) - level + 1])


def _tree(path: str, text: str) -> ast.Module:
    try:
        return ast.parse(current_source(text), path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{quoted(path)} must be valid Python: {describe(error)}") from error


def _join(below: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(below, path))


# Loading: the files as modules of a private package.


class _Package(NamedTuple):
    """Files that are imported as modules of a private package."""

    folder: str
    texts: Mapping[str, str]
    paths: Mapping[str, str]  # the file of each dotted name of a module

    def has(self, dotted: str) -> bool:
        """Whether there is a module or a package of that name."""
        return any(name == dotted or name.startswith(f"{dotted}.") for name in self.paths)


class _Finder(MetaPathFinder, InspectLoader):
    """Imports the modules of private packages, and nothing else."""

    def __init__(self) -> None:
        self.packages: dict[str, _Package] = {}
        self.filenames: set[str] = set()

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        prefix, _, dotted = fullname.partition(".")
        package = self.packages.get(prefix)
        if package is None or (dotted and not package.has(dotted)):
            return None
        file = package.paths.get(dotted)
        is_package = file is None or posixpath.basename(file) == "__init__.py"
        spec = ModuleSpec(fullname, self, is_package=is_package)
        if file is not None:
            spec.origin = os.path.join(package.folder, file)
            spec.has_location = True
        return spec

    def get_source(self, fullname: str) -> str:
        prefix, _, dotted = fullname.partition(".")
        package = self.packages[prefix]
        # A folder without __init__.py is a package without code.
        return (
            current_source(package.texts[package.paths[dotted]]) if dotted in package.paths else ""
        )

    def exec_module(self, module: ModuleType) -> None:
        prefix = module.__name__.partition(".")[0]
        filename = str(module.__spec__.origin) if module.__spec__ else module.__name__
        self.filenames.add(filename)
        tree = ast.parse(self.get_source(module.__name__), filename)
        tree = ast.fix_missing_locations(_LocalImports(prefix, self.packages[prefix]).visit(tree))
        exec(compile(tree, filename, "exec", dont_inherit=True), module.__dict__)


class _LocalImports(ast.NodeTransformer):
    """Rewrites imports of local modules, such as `import helpers`, to imports from the package.

    Imports with dots in front need no change, because the file is a module of the package.
    """

    def __init__(self, prefix: str, package: _Package) -> None:
        self.prefix, self.package = prefix, package

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        """`import a.b` binds a, `import a.b as c` binds b."""
        statements: list[ast.stmt] = []
        for alias in node.names:
            if not self._is_local(alias.name):
                statements.append(ast.Import([alias]))
                continue
            parent, _, last = f"{self.prefix}.{alias.name}".rpartition(".")
            if alias.asname:
                names = [ast.alias(last, alias.asname)]
                statements.append(ast.ImportFrom(parent, names, 0))
                continue
            top = alias.name.partition(".")[0]
            if parent != self.prefix:
                statements.append(ast.ImportFrom(parent, [ast.alias(last, f"_{last}_of_{top}")], 0))
            statements.append(ast.ImportFrom(self.prefix, [ast.alias(top)], 0))
        return [ast.copy_location(statement, node) for statement in statements]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        """`from a import b` imports from the package if a is local."""
        if not node.level and node.module and self._is_local(node.module):
            node.module = f"{self.prefix}.{node.module}"
        return node

    def _is_local(self, name: str) -> bool:
        return _may_be_local(name) and self.package.has(name)


_FINDER = _Finder()


def _load_module(first: str, texts: Mapping[str, str], folder: str, kind: str) -> ModuleType:
    """The module of the first file.

    The same texts are loaded only once, so their classes are the same.
    """
    paths: dict[str, str] = {}
    for path in texts:
        parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        paths.setdefault(".".join(re.sub(r"\W", "_", part) for part in parts), path)
    content = json.dumps(sorted(texts.items()))
    prefix = kind + digest(content)[:16]
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    _FINDER.packages.setdefault(prefix, _Package(folder, texts, paths))
    dotted = next(dotted for dotted, path in paths.items() if path == first)
    with user_code(f"{quoted(first)} must be importable"):
        return import_module(f"{prefix}.{dotted}")
