"""Features from another network, with their labels, from files of arrays."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearsay.batch import DataInfo, Labels, Split
from nearsay.data import tables
from nearsay.errors import one_line
from nearsay.validation import check_split, check_that

_Array = NDArray[Any]
FEATURE_NAMES = ("features", "embeddings", "embedding", "x")
"""Names of an array of features, in lower case."""
# Names of all arrays.
_NAMES = {
    "features": FEATURE_NAMES,
    "labels": ("labels", "label", "y"),
    "clean": ("clean", "clean_labels", "clean_label"),
    "split": ("split",),
    "classes": ("classes",),
}
_KNOWN = {name for names in _NAMES.values() for name in names}
_LABELS = "class numbers, -1 where there is none, or names (text)"
_SPLITS = {
    "": "train",
    "train": "train",
    "val": "validation",
    "validation": "validation",
    "test": "test",
}


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """Features (N, D) and labels (N,) in one `.npz` or Parquet file, or in two files.

    The arrays of an `.npz` are features (or embeddings, or x) and labels (or y). There may also be
    clean, the true labels; split, with the words train, validation and test; and classes, the names
    of the classes in order. In a Parquet file the features are a column of lists, or all columns of
    numbers but these, id, index and the index of pandas.

    Labels are class numbers, −1 or NaN where unlabeled, or names, empty where unlabeled. Names are
    sorted unless classes are given. A clean name that is no class, or a clean −1, is outside the
    vocabulary. Clean labels exist for all labels of a split or for no label. Without split all
    examples are for training. The given labels of the test split are the clean ones, if these are
    known.

    Args:
        path: A `.npz` or Parquet file with all, or a `.npy` or other file with the features.
        labels: A `.npy`, or a table (CSV, TSV, JSON lines, Parquet) with the column label and
            perhaps clean and split, or with one column and no header. None if `path` has the
            labels.

    >>> Embeddings(path="features.npy", labels="labels.csv").labels
    'labels.csv'
    """

    path: str | Path
    labels: str | Path | None = None

    def describe(self) -> DataInfo:
        """Its classes and sizes, by the labels and the header of the features."""
        path = Path(self.path).expanduser()
        arrays = self._arrays(path, only_shape=True)
        given, _, classes = _numbers(arrays, path)
        rows = _rows(arrays.get("split"), "train", path)
        num_examples = len(given) if rows is None else int(rows.sum())
        return DataInfo(len(classes), arrays["features"].shape[1:], num_examples)

    def at(self, path: Path, split: str | None = None) -> "Embeddings | None":
        """The file of features at another path, with its own labels; None if it is none."""
        is_one = path.suffix.lower() in (".npy", ".npz", ".parquet")
        return Embeddings(path=path) if is_one else None

    def open(self, split: str) -> Split:
        """The split "train", "validation" or "test" if it exists: float32 features (N, D)."""
        path = Path(self.path).expanduser()
        arrays = self._arrays(path)
        features = _features(arrays["features"], path)
        given, clean, classes = _numbers(arrays, path)
        rows = _rows(arrays.get("split"), split, path)
        if clean is not None and not _is_known(arrays, given, rows, split, path):
            clean = None
        if rows is not None:
            features, given = features[rows], given[rows]
            clean = None if clean is None else clean[rows]
        if split == "test" and clean is not None:
            given = clean.clone()
        return Split(features, Labels(given=given, clean=clean, classes=classes))

    def extra(self, split: str) -> dict[str, list[str | None]]:
        """The other columns of the table of labels, for the rows of a split; {} without a table."""
        where = None if self.labels is None else Path(self.labels).expanduser()
        if where is None or where.suffix.lower() not in tables.ENDINGS:
            return {}
        table = tables.read(where)
        used = set(_keys(table.columns, where).values())
        # The labels alone, without a header.
        if not used:
            return {}
        path = Path(self.path).expanduser()
        rows = _rows(self._arrays(path).get("split"), split, path)
        others = {}
        for name, cells in table.columns.items():
            if name not in used:
                others[name] = cells if rows is None else list(compress(cells, rows))
        return others

    def _arrays(self, path: Path, *, only_shape: bool = False) -> dict[str, _Array]:
        """The arrays of both files by their meaning: features and labels, as many of each.

        With `only_shape`, features are zeros of the right shape that take no memory.
        """
        arrays = _read(path, "features", only_shape=only_shape)
        if self.labels is not None:
            others = _read(Path(self.labels).expanduser(), "labels")
            if twice := arrays.keys() & others.keys():
                raise ValueError(
                    f"{min(twice)} must be in one file, got {path} and {str(self.labels)!r}."
                )
            arrays |= others
        if missing := [name for name in ("features", "labels") if name not in arrays]:
            names = " or ".join(_NAMES[missing[0]])
            where = path if self.labels is None or missing[0] == "features" else self.labels
            raise ValueError(
                f"{where} has no {missing[0]}. Name an array {names}, or use labels=FILE."
            )
        num_rows = len(arrays["features"])
        for name in ("labels", "clean", "split"):
            if name in arrays and arrays[name].shape != (num_rows,):
                raise ValueError(
                    f"{name} in {path} must have one entry for each of {num_rows} rows of "
                    f"features, got shape {arrays[name].shape}."
                )
        return arrays


def read_parquet(path: Path) -> NDArray[np.float32]:
    """(N, D) the features of a Parquet file: a column of lists, or all other columns of numbers."""
    return tables.read_features(path, named=FEATURE_NAMES, others=_KNOWN - {"x"})


def _read(path: Path, content: str, *, only_shape: bool = False) -> dict[str, _Array]:
    """Arrays by their meaning; `content` is the meaning of an array without a name."""
    if not path.is_file():
        raise ValueError(f"{path} with {content} does not exist. Check its name and folder.")
    if content == "labels" and path.suffix.lower() in tables.ENDINGS:
        return _read_table(path)
    if path.suffix.lower() == ".parquet":
        present = tables.read(path, columns=()).header
        others = [name for name in present if name.lower() in _KNOWN - set(FEATURE_NAMES)]
        return {"features": read_parquet(path), **_read_table(path, columns=others)}
    try:
        # Opened here, because numpy would leave a broken file open.
        with path.open("rb") as file:
            if only_shape and path.suffix.lower() == ".npy":
                return {content: _zeros(_header_shape(file))}
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                return {content: loaded}
            arrays = {}
            for name, key in _keys(loaded.files, path).items():
                if only_shape and name == "features":
                    assert loaded.zip is not None
                    with loaded.zip.open(f"{key}.npy") as member:
                        arrays[name] = _zeros(_header_shape(member))
                else:
                    arrays[name] = loaded[key]
            return arrays
    # A file of another kind, or a hostile one, can raise anything.
    except Exception as error:
        reason = one_line(error)
        # numpy advises to allow pickles, which would run code of the file.
        if "allow_pickle" in reason:
            is_array = "Object arrays" in reason
            reason = "it holds objects" if is_array else "it is not a file of numpy"
        hint = "Write it by numpy.savez or numpy.save, names as text and not as objects."
        raise ValueError(f"{path} cannot be read: {reason}. {hint}") from error


def _header_shape(file: IO[bytes]) -> tuple[int, ...]:
    """The shape of an array in numpy's format, without reading the array."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape: tuple[int, ...] = read(file)[0]
    if len(shape) != 2:
        raise ValueError(f"features must be (N, D), got shape {shape}.")
    return shape


def _zeros(shape: tuple[int, ...]) -> _Array:
    """A read-only array of that shape in the memory of one number."""
    return np.broadcast_to(np.zeros((), np.float32), shape)


def _read_table(path: Path, columns: Sequence[str] | None = None) -> dict[str, _Array]:
    """Columns by their meaning; a table of one column needs no header."""
    table = tables.read(path, columns=columns)
    keys = _keys(table.columns, path)
    if not keys and columns is None and len(table.header) == 1:
        return {"labels": _cells([*table.header, *table.columns[table.header[0]]])}
    arrays: dict[str, _Array] = {}
    for name in ("labels", "clean", "split"):
        if name in keys and any(table.columns[keys[name]]):
            arrays[name] = _cells(table.columns[keys[name]])
    if "clean" in arrays:
        # Among numbers an empty cell becomes −1, which would mean a known class outside the
        # vocabulary.
        arrays["empty"] = np.array([cell is None for cell in table.columns[keys["clean"]]])
    return arrays


def _cells(cells: Sequence[str | None]) -> _Array:
    """Class numbers if every cell is one or missing, names otherwise; 007 is a name."""
    if any(cells) and all(
        cell is None or re.fullmatch("0|-?[1-9][0-9]{0,17}", cell) for cell in cells
    ):
        return np.array([-1 if cell is None else int(cell) for cell in cells], dtype=np.int64)
    return np.array([cell or "" for cell in cells], dtype=np.str_)


def _keys(present: Iterable[str], path: Path) -> dict[str, str]:
    """The key in the file for each meaning."""
    keys: dict[str, str] = {}
    for key in present:
        for name, names in _NAMES.items():
            if key.lower() not in names:
                continue
            if name in keys:
                raise ValueError(
                    f"{keys[name]!r} and {key!r} in {path} mean the same. Rename one of them."
                )
            keys[name] = key
    return keys


def _features(values: _Array, path: Path) -> Tensor:
    where = f"features in {path}"
    check_that(values.ndim == 2 and 0 not in values.shape, where, "(N, D)", values.shape)
    check_that(values.dtype.kind in "fiub", where, "real numbers", values.dtype)
    # Numbers that are too large for float32 become infinite, which is an error below.
    with np.errstate(over="ignore"):
        features = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    is_finite = features.isfinite().all(dim=1)
    if not is_finite.all():
        row = int((~is_finite).nonzero()[0])
        wrong = values[row][~features[row].isfinite().numpy()][0]
        raise ValueError(f"row {row} of the {where} must be finite in float32, got {wrong}.")
    return features


def _numbers(
    arrays: dict[str, _Array], path: Path
) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Given and clean labels as class numbers, and the names of the classes."""
    labels = [_decoded(arrays[name], name, path) for name in ("labels", "clean") if name in arrays]
    are_names = [values.dtype.kind == "U" for values in labels]
    is_right = len(set(are_names)) == 1
    types = [values.dtype for values in labels]
    check_that(is_right, f"labels and clean in {path}", "both numbers or both names", types)
    classes: Sequence[str] | None = None
    if "classes" in arrays:
        names = _decoded(arrays["classes"], "classes", path).ravel().tolist()
        classes = [str(name) for name in names]
        is_right = len(set(classes)) == len(classes) and "" not in classes
        check_that(is_right, f"classes in {path}", "different names, not empty", classes)
    if are_names[0]:
        names = sorted({*labels[0].tolist()} - {""})
        if classes is None:
            classes = names
            _warn_of_nan(labels[0], path)
        unknown = [name for name in names if name not in classes]
        check_that(not unknown, f"label in {path}", "one of the classes", *unknown[:1] or [""])
        numbers = {"": -1} | {name: number for number, name in enumerate(classes)}
        labels = [_lookup(values, numbers) for values in labels]
    else:
        least = min(int(values.min()) for values in labels)
        largest = max(int(values.max()) for values in labels)
        limit = len(labels[0]) if classes is None else len(classes)
        check_that(
            least >= -1 and largest < limit,
            f"label in {path}",
            f"from 0 to {limit - 1}, or -1 for none",
            least if least < -1 else largest,
            hint="If numbers are names of classes, write them like 'class 7'.",
        )
        if classes is None:
            classes = [str(number) for number in range(largest + 1)]
            _warn_of_gaps(labels, largest, path)
    if not classes:
        raise ValueError(f"labels in {path} must not all be empty. Name the classes.")
    given, *clean = (torch.from_numpy(values.astype(np.int64)) for values in labels)
    return given, clean[0] if clean else None, tuple(classes)


def _lookup(values: _Array, numbers: Mapping[str, int]) -> _Array:
    """The number of each name; −1 for names that are no class."""
    return np.array([numbers.get(name, -1) for name in values.tolist()], dtype=np.int64)


def _is_known(
    arrays: dict[str, _Array], given: Tensor, rows: Tensor | None, split: str, path: Path
) -> bool:
    """Whether a split has true labels; ValueError if only some exist, as the others would seem
    wrong.
    """
    clean = arrays["clean"]
    if "empty" in arrays:
        empty = arrays["empty"]
    elif clean.dtype.kind in "SU":
        empty = np.char.str_len(clean) == 0
    else:
        # NaN is not equal to itself.
        empty = clean != clean
    is_here = torch.ones(len(given), dtype=torch.bool) if rows is None else rows
    is_empty = torch.from_numpy(empty) & is_here
    if is_empty.equal(is_here):
        return False
    lacking = (is_empty & (given >= 0)).nonzero()[:, 0]
    if split != "test" and len(lacking):
        raise ValueError(
            f"clean for {path} must be complete or empty in a split, got an empty row "
            f"{int(lacking[0])}. Fill it in, or leave out clean."
        )
    return True


def _warn_of_nan(labels: _Array, path: Path) -> None:
    words = [name for name in labels.tolist() if name.lower() == "nan"]
    if words:
        warnings.warn(
            f"Leave labels empty where there are none: {words[0]!r} is taken for a class in "
            f"{path}, {len(words)} times",
            stacklevel=2,
        )


def _warn_of_gaps(labels: Sequence[_Array], largest: int, path: Path) -> None:
    used = set(np.unique(np.concatenate(labels)).tolist()) - {-1}
    if num_empty := largest + 1 - len(used):
        warnings.warn(
            f"Use names, or numbers without gaps: labels 0 to {largest} in {path} leave "
            f"{num_empty} classes without examples",
            stacklevel=2,
        )


def _decoded(values: _Array, name: str, path: Path) -> _Array:
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    # pandas keeps whole numbers with missing ones among them as floats.
    if values.dtype.kind == "f":
        numbers = np.where(np.isnan(values), -1, values)
        is_whole = np.isfinite(numbers) & (numbers == np.floor(numbers)) & (abs(numbers) < 2**53)
        check_that(is_whole.all(), f"{name} in {path}", _LABELS, numbers[~is_whole][:1].tolist())
        return numbers.astype(np.int64)
    check_that(values.dtype.kind in "iuU", f"{name} in {path}", _LABELS, values.dtype)
    return values


def _rows(splits: _Array | None, split: str, path: Path) -> Tensor | None:
    """(N,) bool, or None for all."""
    if splits is None:
        check_split(split, ["train"], path, hint="It has no array called split.")
        return None
    words = [str(word) for word in _decoded(splits, "split", path).tolist()]
    for row, word in enumerate(words):
        known = "train, validation or test"
        check_that(word in _SPLITS, f"row {row} of split in {path}", known, word)
    parts = [_SPLITS[word] for word in words]
    check_split(split, parts, path)
    return torch.tensor([part == split for part in parts])
