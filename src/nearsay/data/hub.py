"""Images and labels of Hugging Face `datasets`, by their name on the hub or from your own files.

Images that are stored inside tables are unpacked once, byte for byte, into files in the cache of
that library, and then read like all other image files. The name of an unpacked file is a function
of its row and its content, so it is the same on every machine.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from nearsay.batch import DataInfo, Files, Labels, Split
from nearsay.errors import NoSplit, one_line
from nearsay.files import draft_of
from nearsay.validation import check_choice, check_split, check_that

SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
"""Names of the splits in other data."""
_IMAGE_NAMES = ("image", "img", "path", "file", "file_name", "filename")
_LABEL_NAMES = ("label", "labels", "class", "target", "category")
_FILES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
}
# One of them is in every folder that save_to_disk has written.
_SAVED = ("dataset_dict.json", "state.json")
# Types of columns that may name classes.
_CLASS = re.compile("u?int[0-9]+|bool|(large_)?string")

# Images in memory at once, and files of one folder.
_ROWS = 32
_PER_FOLDER = 10_000
# The size of an image that a row does not have.
_MISSING = -1
# The first bytes of image files.
_MAGIC = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG": ".png",
    b"RIFF": ".webp",
    b"GIF8": ".gif",
    b"BM": ".bmp",
}


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Image classification data that the library `datasets` can read.

    Give either `path` or `name`. A label that is missing, empty or below zero means unlabeled. A
    validation or test split without any label is left out.

    Args:
        path: A folder or file; the network is never used. It may be what `save_to_disk` wrote, or
            Parquet, CSV, JSON or Arrow files, or images in folders.
        name: A data set of the hub; it is downloaded if it is not in the cache.
        config: Of a data set with several configurations.
        revision: Of a data set of the hub.
        image: The column of images; None finds it by its type.
        label: The column of labels; None finds it by its type or name.
        clean: A column of true labels, complete or empty in a split; a name that is no class counts
            as outside the vocabulary.
        train: The name of the training split, if it is not train.
        validation: The name of the validation split, if it is not validation, valid, val or dev.
        test: The name of the test split, if it is not test.

    >>> Hub(path="saved", label="fine_label").label
    'fine_label'
    """

    path: str | Path | None = None
    name: str | None = None
    config: str | None = None
    revision: str | None = None
    image: str | None = None
    label: str | None = None
    clean: str | None = None
    train: str | None = None
    validation: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        is_one = (self.path is None) != (self.name is None)
        check_that(is_one, "path or name", "given, and not both", (self.path, self.name))
        is_right = self.revision is None or self.name is not None
        check_that(is_right, "revision", "None without the name of a data set", self.revision)

    def describe(self) -> DataInfo:
        """Its classes and rows, by the published information or the table; no image is read."""
        library = _import_datasets()
        with _quiet(library), _offline(library) if self.name is None else ExitStack():
            info = self._published_info(library)
            tables = self._load(library) if info is None else info.splits
            parts = self._parts(tables)
            table = tables[parts["train"]]
            if info is not None:
                label = _label_column(library, info.features, self)
                return DataInfo(len(info.features[label].names), None, table.num_examples)
            label = _label_column(library, table.features, self)
            given, classes = self._given(library, tables, parts, "train", label)
        return DataInfo(len(classes), None, len(given))

    def at(self, path: Path, split: str | None = None) -> "Hub | None":
        """What `save_to_disk` has written at another path; None if it is something else."""
        is_saved = any((path / name).is_file() for name in _SAVED)
        return replace(self, path=path, name=None, revision=None) if is_saved else None

    def open(self, split: str) -> Split:
        """The images as files, and their labels."""
        library = _import_datasets()
        with _quiet(library), _offline(library) if self.name is None else ExitStack():
            tables = self._load(library)
        parts = self._parts(tables)
        check_split(split, parts, self._described())
        table = tables[parts[split]]
        image = _image_column(library, table.features, self)
        label = _label_column(library, table.features, self)
        given, classes = self._given(library, tables, parts, split, label)
        if split != "train" and not any(number >= 0 for number in given):
            raise NoSplit(f"split {split!r} of {self._described()} must have labels, got none.")
        clean = None
        if self.clean is not None and self.clean in table.features:
            known = _values(library, table, self.clean)
            if any(value is not None for value in known):
                _check_whole(known, given, self.clean, parts[split])
                clean = torch.tensor(_numbers(known, classes, known_only=False))
        labels = Labels(given=torch.tensor(given), clean=clean, classes=classes)
        with _quiet(library):
            return Split(self._files(library, table, image, split), labels)

    def _published_info(self, library: Any) -> Any:
        """The information of a data set of the hub; None if it does not say classes and sizes."""
        if self.name is None:
            return None
        try:
            builder = library.load_dataset_builder(self.name, self.config, revision=self.revision)
            label = _label_column(library, builder.info.features or {}, self)
        # The library, and the network under it, can raise anything; loading explains it better.
        except Exception:
            return None
        has_names = isinstance(builder.info.features[label], library.ClassLabel)
        return builder.info if has_names and builder.info.splits else None

    def _described(self) -> str:
        return repr(str(self.path)) if self.name is None else repr(self.name)

    # Any, here and below: the objects of the library have no types.
    def _load(self, library: Any) -> dict[str, Any]:
        """All splits by their names; no image is opened."""
        try:
            if self.name is not None:
                return dict(library.load_dataset(self.name, self.config, revision=self.revision))
            path = Path(self.path or "").expanduser()
            if not path.exists():
                hint = "Use name= for a data set of the hub."
                check_that(False, "path", "an existing folder or file", str(self.path), hint=hint)
            if any((path / name).is_file() for name in _SAVED):
                loaded = library.load_from_disk(str(path))
                has_splits = isinstance(loaded, library.DatasetDict)
                return dict(loaded) if has_splits else {"train": loaded}
            if not path.is_file():
                _check_card(path)
                return dict(library.load_dataset(str(path), self.config))
            if path.suffix.lower() not in _FILES:
                condition = f"a folder or a file of {', '.join(_FILES)}"
                check_that(False, "path", condition, str(self.path))
            return dict(library.load_dataset(_FILES[path.suffix.lower()], data_files=str(path)))
        # The library, and the network under it, can raise anything.
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith("path "):
                raise
            reason = one_line(error).rstrip(".")
            if self.name is None:
                raise ValueError(
                    f"path {str(self.path)!r} cannot be read: {reason}. "
                    "Use what save_to_disk wrote, Parquet, CSV, JSON, Arrow or image folders."
                ) from error
            raise ValueError(
                f"name {self.name!r} cannot be loaded: {reason}. Check the name. "
                f"Without a network, download it elsewhere by hf download {self.name} "
                "--repo-type dataset --local-dir FOLDER and use path=FOLDER."
            ) from error

    def _parts(self, tables: Mapping[str, Any]) -> dict[str, str]:
        """The name of each split in the data."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        parts: dict[str, str] = {}
        for split, wish in named.items():
            if wish is not None and wish not in tables:
                check_choice(split, wish, tables)
            taken = {other for other in named.values() if other is not None}
            free = [name for name in SPLITS[split] if name in tables and name not in taken]
            if wish is not None or free:
                parts[split] = wish or free[0]
        if "train" not in parts and len(tables) == 1:
            parts = {"train": next(iter(tables))}
        if "train" not in parts:
            raise ValueError(
                f"{self._described()} has no split called train, only {', '.join(tables)}. "
                "Choose one by train=."
            )
        are_different = len(set(parts.values())) == len(parts)
        check_that(are_different, "train, validation and test", "different splits", parts)
        return parts

    def _given(
        self,
        library: Any,
        tables: Mapping[str, Any],
        parts: Mapping[str, str],
        split: str,
        label: str,
    ) -> tuple[list[int], tuple[str, ...]]:
        """Labels as class numbers, and the names of the classes of train."""
        table = tables[parts[split]]
        if isinstance(table.features[label], library.ClassLabel):
            classes = tuple(map(str, table.features[label].names))
            cells = _column(table, label)
            return [-1 if cell is None or cell < 0 else int(cell) for cell in cells], classes
        values = _values(library, table, label)
        learned = values if split == "train" else _values(library, tables[parts["train"]], label)
        classes = _sorted({value for value in learned if value is not None})
        try:
            return _numbers(values, classes, known_only=True), classes
        except KeyError as error:
            raise ValueError(
                f"label {error.args[0]!r} of {parts[split]!r} must be in {parts['train']!r} too, "
                "where it is learned."
            ) from error

    def _files(self, library: Any, table: Any, image: str, split: str) -> Files:
        if not len(table):
            raise ValueError(f"split={split!r} of {self._described()} has no rows")
        pictures = table.select_columns([image]).cast_column(image, library.Image(decode=False))
        base = os.path.abspath(Path(self.path or "").expanduser())
        base = os.path.dirname(base) if os.path.isfile(base) else base
        roots = _caches(library)
        if self.name is None:
            # The library follows links.
            roots = [base, os.path.realpath(base)]
        paths = _find_paths(pictures, image, roots)
        if paths is not None:
            root = os.path.commonpath([os.path.dirname(path) for path in paths])
            if self.name is None:
                for own in reversed(roots[:2]):
                    if all(path.startswith(os.path.join(own, "")) for path in paths):
                        root = own
            names = tuple(Path(os.path.relpath(path, root)).as_posix() for path in paths)
            return Files(Path(root), names)
        root = os.path.join(
            library.config.HF_DATASETS_CACHE, "nearsay", _name_table(table, image, split)
        )
        return Files(Path(root), _unpack(Path(root), pictures, image, split, roots))


def _import_datasets() -> Any:
    missing = 'data of Hugging Face needs datasets: pip install ".[hub]" in the clone'
    try:
        library = import_module("datasets")
    except ImportError as error:
        raise ImportError(missing) from error
    # It may be a folder of that name somewhere on the path.
    if not hasattr(library, "load_dataset"):
        raise ImportError(missing)
    return library


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """No progress bars of the library without a terminal."""
    is_shown = sys.stderr.isatty() or library.utils.are_progress_bars_disabled()
    if not is_shown:
        library.disable_progress_bars()
    try:
        yield
    finally:
        if not is_shown:
            library.enable_progress_bars()


@contextmanager
def _offline(library: Any) -> Iterator[None]:
    """No download, whatever a description in a local folder asks for."""
    places = [library.config, import_module("huggingface_hub.constants")]
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _check_card(folder: Path) -> None:
    """Refuse a description with files on the network; the library does not always ask if it may."""
    try:
        text = (folder / "README.md").read_text("utf-8", errors="replace")
    except OSError:
        return
    block = re.search(r"^configs:.*?(?=^\w|^---|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if block is not None and (found := re.search(r"[^\s\"']+://[^\s\"']+", block[0])):
        raise ValueError(
            f"path {str(folder)!r} has a README.md that points to {found[0]}. "
            "Download it, or use name=."
        )


def _image_column(library: Any, features: Mapping[str, Any], wish: Hub) -> str:
    """The column of images: by its type or, in local data, one that holds bytes or names files."""
    if wish.image is not None:
        return _wished("image", wish.image, features)
    names = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    if not names and wish.name is None:
        names = [name for name, kind in features.items() if _holds_bytes(kind)]
        names = names or [name for name in _IMAGE_NAMES if name in features][:1]
    return _only("image", names, features)


def _label_column(library: Any, features: Mapping[str, Any], wish: Hub) -> str:
    """The column of labels: by its type, else by a usual name."""
    for key, name in (("label", wish.label), ("clean", wish.clean)):
        if name is not None and (key == "label" or name not in features):
            _wished(key, name, features)
    if wish.label is not None:
        return wish.label
    others = {name: kind for name, kind in features.items() if name != wish.clean}
    names = [name for name, kind in others.items() if isinstance(kind, library.ClassLabel)]
    names = names or [name for name in _LABEL_NAMES if name in others][:1]
    return _only("label", names, features)


def _wished(key: str, name: str, features: Mapping[str, Any]) -> str:
    return check_choice(key, name, features)


def _only(key: str, names: Sequence[str], features: Mapping[str, Any]) -> str:
    """The only candidate for a column."""
    columns = f"one of the columns {', '.join(map(repr, features))}"
    hint = f"Choose by {key}=."
    check_that(len(names) == 1, f"the {key} column", columns, list(names), hint=hint)
    return names[0]


def _holds_bytes(kind: Any) -> bool:
    if isinstance(kind, Mapping):
        return "bytes" in kind
    return str(getattr(kind, "dtype", "")) in ("binary", "large_binary")


def _column(table: Any, name: str) -> list[Any]:
    cells = []
    for batch in table.select_columns([name]).iter(batch_size=1000):
        cells += batch[name]
    return cells


def _values(library: Any, table: Any, name: str) -> list[str | int | None]:
    """Cells that name classes: text or whole numbers, None where a cell is empty."""
    kind = table.features[name]
    cells = _column(table, name)
    if isinstance(kind, library.ClassLabel):
        # A number beyond the last class is no class.
        known = range(len(kind.names))
        return [kind.names[cell] if cell in known else None for cell in cells]
    is_class = _CLASS.fullmatch(str(getattr(kind, "dtype", ""))) is not None
    check_that(is_class, f"column {name!r}", "text or whole numbers", kind)
    values: list[str | int | None] = []
    for cell in cells:
        is_empty = cell == "" or (isinstance(cell, int) and cell < 0)
        values.append(None if is_empty else cell)
    return values


def _sorted(values: set[str | int]) -> tuple[str, ...]:
    """Names in their order; numbers in theirs."""
    return tuple(map(str, sorted(values, key=lambda value: (isinstance(value, str), value))))


def _numbers(
    values: Sequence[str | int | None], classes: Sequence[str], *, known_only: bool
) -> list[int]:
    """Class numbers, −1 for None; an unknown name is a KeyError, or −1 as well."""
    places = {name: number for number, name in enumerate(classes)}
    if known_only:
        return [-1 if value is None else places[str(value)] for value in values]
    return [-1 if value is None else places.get(str(value), -1) for value in values]


def _check_whole(
    known: Sequence[str | int | None], given: Sequence[int], column: str, split: str
) -> None:
    """Refuse true labels of only some rows, because the other labels would count as wrong."""
    for row, (value, number) in enumerate(zip(known, given, strict=True)):
        if value is None and number >= 0:
            raise ValueError(
                f"column {column!r} must be complete or empty in {split!r}, got an empty "
                f"row {row}. Fill it in, or leave out clean=."
            )


def _caches(library: Any) -> list[str]:
    """The folders where the library keeps downloads."""
    hub = import_module("huggingface_hub.constants")
    places = (
        library.config.HF_DATASETS_CACHE,
        library.config.DOWNLOADED_DATASETS_PATH,
        hub.HF_HUB_CACHE,
    )
    return [os.path.abspath(place) for place in places]


def _stored_images(pictures: Any, column: str) -> Iterator[tuple[bytes | None, str | None]]:
    """What the table has of each image: its bytes, and the path that it has or once had."""
    for batch in pictures.iter(batch_size=_ROWS):
        for cell in batch[column]:
            yield (None, None) if cell is None else (cell["bytes"], cell["path"])


def _find_paths(pictures: Any, column: str, roots: Sequence[str]) -> list[str] | None:
    """Absolute paths if all images are files; None if one is stored in the table."""
    paths = []
    for content, path in _stored_images(pictures, column):
        if content is not None or not path:
            return None
        paths.append(_placed(path, column, roots))
    return paths


def _placed(path: str, column: str, roots: Sequence[str]) -> str:
    """An absolute path below one of the roots; foreign data must not read other files of this
    machine.
    """
    if "://" in path:
        raise ValueError(
            f"image {path!r} in column {column!r} must be a local file. "
            "Save the data with its images."
        )
    placed = os.path.abspath(os.path.join(roots[0], path))
    if not any(placed.startswith(os.path.join(root, "")) for root in roots):
        raise ValueError(f"image {path!r} in column {column!r} must be below {roots[0]!r}.")
    return placed


def _name_table(table: Any, image: str, split: str) -> str:
    """A name for the images of a table; it changes if a file of the table changes."""
    facts = []
    for file in table.cache_files:
        status = os.stat(file["filename"])
        facts.append([file["filename"], status.st_size, status.st_mtime_ns])
    # The fingerprint is the library's own name for the content. Tables in memory have no files.
    text = json.dumps([table._fingerprint, image, split, len(table), facts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _unpack(
    root: Path, pictures: Any, column: str, split: str, roots: Sequence[str]
) -> tuple[str, ...]:
    """The names of the images below the root, written there unless an earlier call has done it.

    Several processes may do this at once and be killed: each file appears whole, and their list
    last.
    """
    listing = root / f"{split}.json"
    try:
        sizes: dict[str, int] = json.loads(listing.read_text("utf-8"))
        if _are_whole(root, sizes):
            return tuple(sizes)
    # The list does not exist yet, or is damaged.
    except (OSError, ValueError):
        pass
    sizes = {}
    for row, (content, path) in enumerate(_stored_images(pictures, column)):
        place = f"{split}/{row // _PER_FOLDER:04d}/{row:08d}"
        if content is None and path and os.path.isfile(placed := _placed(path, column, roots)):
            content = Path(placed).read_bytes()
        if content is None:
            # A name without a file: it is reported like any other missing file.
            sizes[f"{place}-missing"] = _MISSING
            continue
        name = f"{place}-{hashlib.sha256(content).hexdigest()[:16]}{_ending(content)}"
        sizes[name] = len(content)
        if not _are_whole(root, {name: len(content)}):
            _write(root / name, content, listing)
    _write(listing, json.dumps(sizes).encode(), listing)
    return tuple(sizes)


def _are_whole(root: Path, sizes: Mapping[str, int]) -> bool:
    """Whether all files have their sizes, also after a loss of power."""
    try:
        return all(
            size == _MISSING or os.stat(root / name).st_size == size for name, size in sizes.items()
        )
    except FileNotFoundError:
        return False


def _ending(content: bytes) -> str:
    return next((ending for start, ending in _MAGIC.items() if content.startswith(start)), ".image")


def _write(path: Path, content: bytes, listing: Path) -> None:
    """The file appears whole or not at all; its draft is in the folder of the list, which has few
    files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(listing) as draft:
        draft.write_bytes(content)
        draft.replace(path)
