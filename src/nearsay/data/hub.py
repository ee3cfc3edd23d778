"""Images and labels of Hugging Face `datasets`, by their name on the hub or from your own files.

Images that are stored inside tables are unpacked once, byte for byte, into files in the cache of that
library, and then read like all other image files. The name of an unpacked file is a function of its
row and its content, so it is the same on every machine.
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

SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
"""What the splits may be called there."""
_IMAGE_NAMES = ("image", "img", "path", "file", "file_name", "filename")
_LABEL_NAMES = ("label", "labels", "class", "target", "category")
_FILES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
}
_SAVED = (
    "dataset_dict.json",
    "state.json",
)  # one of them is in every folder that save_to_disk has written
_CLASS = re.compile("u?int[0-9]+|bool|(large_)?string")  # types of columns that may name classes

_ROWS = 32  # that are in memory at once
_PER_FOLDER = 10_000  # files of one folder
_MISSING = -1  # bytes of an image that a row does not have
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

    Either `path`, a folder or file of your own, which never touches the network: what `save_to_disk` wrote, or Parquet,
    CSV, JSON or Arrow files, or images in folders. Or `name`, a data set of the hub, downloaded if it is not there yet.
    The columns are found by their types if they are not named; `clean` is a column of true labels, if there is one,
    which may be empty in all of a split, but not for some of its labels; a name that is no class is outside of them. A
    label that is missing, empty or a number below zero means unlabeled; a validation or test split without any
    label is left out. The splits are called train, validation (or valid, val, dev) and test, or as you say.
    """

    path: str | Path | None = None
    name: str | None = None
    config: str | None = None  # of a data set that has several
    revision: str | None = None
    image: str | None = None
    label: str | None = None
    clean: str | None = None
    train: str | None = None
    validation: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.name is None):
            raise ValueError(
                f"path={self.path!r} and name={self.name!r} must not both be given or both be left out; path= is a "
                "folder or file of your own, name= a data set of the hub"
            )
        if self.revision is not None and self.name is None:
            raise ValueError(
                f"revision={self.revision!r} is for a data set of the hub; give its name=, or leave it out"
            )

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
        """The images as files, and their labels; ValueError if a column or split is not there, and says what is."""
        library = _import_datasets()
        with _quiet(library), _offline(library) if self.name is None else ExitStack():
            tables = self._load(library)
        parts = self._parts(tables)
        if split not in parts:
            raise NoSplit(f"split={split!r} is not in {self._told()}; it has {' and '.join(parts)}")
        table = tables[parts[split]]
        image = _image_column(library, table.features, self)
        label = _label_column(library, table.features, self)
        given, classes = self._given(library, tables, parts, split, label)
        if split != "train" and not any(number >= 0 for number in given):
            raise NoSplit(
                f"split={split!r} of {self._told()} has no labels, so nothing can be judged on it"
            )
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

    def _told(self) -> str:
        return repr(str(self.path)) if self.name is None else repr(self.name)

    def _load(
        self, library: Any
    ) -> dict[str, Any]:  # Any, here and below: what the library makes has no types
        """All splits by their names; no image is opened."""
        try:
            if self.name is not None:
                return dict(library.load_dataset(self.name, self.config, revision=self.revision))
            path = Path(self.path or "").expanduser()
            if not path.exists():
                raise ValueError(
                    f"path={str(self.path)!r} is no folder or file; a data set of the hub is given by name="
                )
            if any((path / name).is_file() for name in _SAVED):
                loaded = library.load_from_disk(str(path))
                return (
                    dict(loaded) if isinstance(loaded, library.DatasetDict) else {"train": loaded}
                )
            if not path.is_file():
                _check_card(path)
                return dict(library.load_dataset(str(path), self.config))
            if path.suffix.lower() not in _FILES:
                raise ValueError(
                    f"path={str(self.path)!r} is none of {', '.join(_FILES)} and no folder"
                )
            return dict(library.load_dataset(_FILES[path.suffix.lower()], data_files=str(path)))
        except Exception as error:  # the library, and the network under it, can raise anything
            if isinstance(error, ValueError) and str(error).startswith("path="):
                raise
            reason = one_line(error)
            if self.name is None:
                cure = "it must be what save_to_disk wrote, or Parquet, CSV, JSON or Arrow files, or images in folders"
                raise ValueError(
                    f"path={str(self.path)!r} cannot be read ({reason}); {cure}"
                ) from error
            cure = (
                f"check the name, or where there is no network, download it elsewhere by hf download {self.name} "
                "--repo-type dataset --local-dir FOLDER and give path=FOLDER"
            )
            raise ValueError(f"name={self.name!r} cannot be had ({reason}); {cure}") from error

    def _parts(self, tables: Mapping[str, Any]) -> dict[str, str]:
        """What each split is called there."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        parts: dict[str, str] = {}
        for split, wish in named.items():
            if wish is not None and wish not in tables:
                raise ValueError(
                    f"{split}={wish!r} is no split of {self._told()}; it has {', '.join(tables)}"
                )
            taken = {other for other in named.values() if other is not None}
            free = [name for name in SPLITS[split] if name in tables and name not in taken]
            if wish is not None or free:
                parts[split] = wish or free[0]
        if "train" not in parts and len(tables) == 1:
            parts = {"train": next(iter(tables))}
        if "train" not in parts:
            raise ValueError(
                f"{self._told()} has no split called train, only {', '.join(tables)}; choose one by train="
            )
        if len(set(parts.values())) < len(parts):
            raise ValueError(
                f"the splits {', '.join(f'{a}={b!r}' for a, b in parts.items())} must differ"
            )
        return parts

    def _given(
        self,
        library: Any,
        tables: Mapping[str, Any],
        parts: Mapping[str, str],
        split: str,
        label: str,
    ) -> tuple[list[int], tuple[str, ...]]:
        """Labels as class numbers, and the names of the classes, which those of train are."""
        table = tables[parts[split]]
        if isinstance(table.features[label], library.ClassLabel):
            classes = tuple(map(str, table.features[label].names))
            numbers = [
                -1 if value is None or value < 0 else int(value) for value in _column(table, label)
            ]
            return numbers, classes
        values = _values(library, table, label)
        learned = values if split == "train" else _values(library, tables[parts["train"]], label)
        classes = _sorted({value for value in learned if value is not None})
        try:
            return _numbers(values, classes, known_only=True), classes
        except KeyError as error:
            raise ValueError(
                f"label {error.args[0]!r} is in {parts[split]!r} but never in {parts['train']!r}, where it would have "
                "to be learned"
            ) from error

    def _files(self, library: Any, table: Any, image: str, split: str) -> Files:
        if not len(table):
            raise ValueError(f"split={split!r} of {self._told()} has no rows")
        pictures = table.select_columns([image]).cast_column(image, library.Image(decode=False))
        base = os.path.abspath(Path(self.path or "").expanduser())
        base = os.path.dirname(base) if os.path.isfile(base) else base
        roots = (
            [base, os.path.realpath(base)] if self.name is None else _caches(library)
        )  # the library follows links
        paths = _find_paths(pictures, image, roots)
        if paths is not None:
            inside = [
                root
                for root in roots[:2]
                if all(path.startswith(os.path.join(root, "")) for path in paths)
            ]
            is_own = self.name is None and inside
            root = (
                inside[0]
                if is_own
                else os.path.commonpath([os.path.dirname(path) for path in paths])
            )
            return Files(
                Path(root), tuple(Path(os.path.relpath(path, root)).as_posix() for path in paths)
            )
        root = os.path.join(
            library.config.HF_DATASETS_CACHE, "nearsay", _name_table(table, image, split)
        )
        return Files(Path(root), _unpack(Path(root), pictures, image, split, roots))


def _import_datasets() -> Any:  # a module
    missing = 'data of Hugging Face needs datasets: pip install ".[hub]" in the clone'
    try:
        library = import_module("datasets")
    except ImportError as error:
        raise ImportError(missing) from error
    if not hasattr(library, "load_dataset"):  # a folder of that name, somewhere on the path
        raise ImportError(missing)
    return library


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """No bars of the library where nobody would see them move."""
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
    """Nothing is fetched, whatever a description in a local folder asks for."""
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
    """Refuse a description whose files are on the network; not every way there asks whether it is allowed."""
    try:
        text = (folder / "README.md").read_text("utf-8", errors="replace")
    except OSError:
        return
    block = re.search(r"^configs:.*?(?=^\w|^---|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if block is not None and (found := re.search(r"[^\s\"']+://[^\s\"']+", block[0])):
        raise ValueError(
            f"path={str(folder)!r} has a README.md that points to {found[0]}; download it, or give name="
        )


def _image_column(library: Any, features: Mapping[str, Any], wish: Hub) -> str:
    """The column of images: the one of that type, else, in data of one's own, one that holds bytes or names files."""
    if wish.image is not None:
        return _wished("image", wish.image, features)
    found = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    if not found and wish.name is None:
        found = [name for name, kind in features.items() if _holds_bytes(kind)]
        found = found or [name for name in _IMAGE_NAMES if name in features][:1]
    if len(found) != 1:
        raise ValueError(
            f"{_counted('image', found)} among {', '.join(map(repr, features))}; choose by image="
        )
    return found[0]


def _label_column(library: Any, features: Mapping[str, Any], wish: Hub) -> str:
    """The column of labels: the one of that type, else one of a usual name."""
    for key, name in (("label", wish.label), ("clean", wish.clean)):
        if name is not None and (key == "label" or name not in features):
            _wished(key, name, features)
    if wish.label is not None:
        return wish.label
    others = {name: kind for name, kind in features.items() if name != wish.clean}
    found = [name for name, kind in others.items() if isinstance(kind, library.ClassLabel)]
    found = found or [name for name in _LABEL_NAMES if name in others][:1]
    if len(found) != 1:
        raise ValueError(
            f"{_counted('label', found)} among {', '.join(map(repr, features))}; choose by label="
        )
    return found[0]


def _wished(key: str, name: str, features: Mapping[str, Any]) -> str:
    if name not in features:
        raise ValueError(f"{key}={name!r} is no column; there are {', '.join(map(repr, features))}")
    return name


def _counted(what: str, found: Sequence[str]) -> str:
    return (
        f"{' and '.join(map(repr, found))} could both be the {what}"
        if found
        else f"no column is the {what}"
    )


def _holds_bytes(kind: Any) -> bool:
    if isinstance(kind, Mapping):
        return "bytes" in kind
    return str(getattr(kind, "dtype", "")) in ("binary", "large_binary")


def _column(table: Any, name: str) -> list[Any]:
    return [
        value
        for batch in table.select_columns([name]).iter(batch_size=1000)
        for value in batch[name]
    ]


def _values(library: Any, table: Any, name: str) -> list[str | int | None]:
    """Cells that name classes: text or whole numbers, None where there is nothing."""
    kind = table.features[name]
    if isinstance(kind, library.ClassLabel):
        known = range(len(kind.names))  # a number beyond the last class is no class of ours
        return [kind.names[value] if value in known else None for value in _column(table, name)]
    if not _CLASS.fullmatch(str(getattr(kind, "dtype", ""))):
        raise ValueError(
            f"column {name!r} is {kind}; a label must be one class, as text or as a whole number"
        )
    cells = _column(table, name)
    return [
        None if value == "" or (isinstance(value, int) and value < 0) else value for value in cells
    ]


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
    """Refuse true labels of some labeled rows alone, as the other labels would count as wrong."""
    for row, (value, number) in enumerate(zip(known, given, strict=True)):
        if value is None and number >= 0:
            raise ValueError(
                f"row {row} of the column {column!r} is empty, but not everywhere in {split!r}; fill it in, or leave "
                "out clean="
            )


def _caches(library: Any) -> list[str]:
    """Where the library keeps what it has downloaded."""
    hub = import_module("huggingface_hub.constants")
    places = (
        library.config.HF_DATASETS_CACHE,
        library.config.DOWNLOADED_DATASETS_PATH,
        hub.HF_HUB_CACHE,
    )
    return [os.path.abspath(place) for place in places]


def _stored_images(pictures: Any, column: str) -> Iterator[tuple[bytes | None, str | None]]:
    """What is stored of each image: its bytes, and the path that it has or once had."""
    for batch in pictures.iter(batch_size=_ROWS):
        for cell in batch[column]:
            yield (None, None) if cell is None else (cell["bytes"], cell["path"])


def _find_paths(pictures: Any, column: str, roots: Sequence[str]) -> list[str] | None:
    """Absolute paths where all images are files of their own; None as soon as one is not."""
    paths = []
    for content, path in _stored_images(pictures, column):
        if content is not None or not path:
            return None
        paths.append(_placed(path, column, roots))
    return paths


def _placed(path: str, column: str, roots: Sequence[str]) -> str:
    """An absolute path below one of the roots; data of others is not to choose among all files of this machine."""
    if "://" in path:
        raise ValueError(
            f"the image {path!r} in column {column!r} is elsewhere; save the data with its images"
        )
    placed = os.path.abspath(os.path.join(roots[0], path))
    if not any(placed.startswith(os.path.join(root, "")) for root in roots):
        raise ValueError(
            f"the image {path!r} in column {column!r} is outside of {roots[0]!r}; copy it there"
        )
    return placed


def _name_table(table: Any, image: str, split: str) -> str:
    """A name for what is unpacked from a table; another one as soon as a file of the table has changed."""
    files = [(file["filename"], os.stat(file["filename"])) for file in table.cache_files]
    facts = [[name, found.st_size, found.st_mtime_ns] for name, found in files]
    # The fingerprint is the library's own name for the content; tables that are no files have nothing else.
    text = json.dumps([table._fingerprint, image, split, len(table), facts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _unpack(
    root: Path, pictures: Any, column: str, split: str, roots: Sequence[str]
) -> tuple[str, ...]:
    """The names of the images below the root, written there unless an earlier call has done it.

    Several processes may do this at once, and any may be killed: each file appears whole, and the list of them last.
    """
    listing = root / f"{split}.json"
    try:
        sizes: dict[str, int] = json.loads(listing.read_text("utf-8"))
        if _are_whole(root, sizes):
            return tuple(sizes)
    except (OSError, ValueError):  # not there yet, or damaged
        pass
    sizes = {}
    for row, (content, path) in enumerate(_stored_images(pictures, column)):
        place = f"{split}/{row // _PER_FOLDER:04d}/{row:08d}"
        if content is None and path and os.path.isfile(placed := _placed(path, column, roots)):
            content = Path(placed).read_bytes()
        if content is None:
            sizes[f"{place}-missing"] = (
                _MISSING  # a file that is not there, and told of as any other such file
            )
            continue
        name = f"{place}-{hashlib.sha256(content).hexdigest()[:16]}{_ending(content)}"
        sizes[name] = len(content)
        if not _are_whole(root, {name: len(content)}):
            _write(root / name, content, listing)
    _write(listing, json.dumps(sizes).encode(), listing)
    return tuple(sizes)


def _are_whole(root: Path, sizes: Mapping[str, int]) -> bool:
    """Whether all files have their lengths, also after a loss of power; their names are of their contents."""
    try:
        return all(
            size == _MISSING or os.stat(root / name).st_size == size for name, size in sizes.items()
        )
    except FileNotFoundError:
        return False


def _ending(content: bytes) -> str:
    return next((ending for start, ending in _MAGIC.items() if content.startswith(start)), ".image")


def _write(path: Path, content: bytes, listing: Path) -> None:
    """The file appears whole or not at all; its draft is one of the list, beside which few others are to be seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(listing) as draft:
        draft.write_bytes(content)
        draft.replace(path)
