"""Features that some other network has computed, with their labels, from files of arrays."""

import re
import warnings
from collections.abc import Iterable, Sequence
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
from nearsay.errors import NoSplit, one_line

_Array = NDArray[Any]
FEATURE_NAMES = ("features", "embeddings", "embedding", "x")
"""What an array of features may be called, whatever the case."""
_NAMES = {  # the same of all arrays
    "features": FEATURE_NAMES,
    "labels": ("labels", "label", "y"),
    "clean": ("clean", "clean_labels", "clean_label"),
    "split": ("split",),
    "classes": ("classes",),
}
_KNOWN = {name for names in _NAMES.values() for name in names}
_LABELS = "they must be class numbers, -1 where there is none, or names (text)"
_SPLITS = {
    "": "train",
    "train": "train",
    "val": "validation",
    "validation": "validation",
    "test": "test",
}


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """Features (N, D) and labels (N,): all in one `.npz` or Parquet, or features in a `.npy` and labels elsewhere.

    The arrays of an `.npz` are called features (or embeddings, or x) and labels (or y); there may also be clean, the
    true labels; split, with the words train, validation and test; and classes, the names of the classes in order. In a
    Parquet file features are a column of lists of that name, or all columns of numbers that are called nothing else,
    neither id nor index, and are no index of pandas.
    `labels` is a `.npy`, or a table (CSV, TSV, JSON lines, Parquet) with the column label and perhaps clean and split,
    or with one column and no header. Labels are class numbers, −1 or NaN where there is none, or names, empty where
    there is none; names are sorted unless classes are given. A clean name that is no class, or a clean −1, is outside
    the vocabulary; clean may be left empty in all of a split, but not for some of its labels. Without split all
    examples are for training. In the test split clean labels, where they are known, are also given.
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
        """The split "train", or "validation" or "test" if the file has it: float32 features (N, D)."""
        path = Path(self.path).expanduser()
        arrays = self._arrays(path)
        features = _features(arrays["features"], path)
        given, clean, classes = _numbers(arrays, path)
        rows = _rows(arrays.get("split"), split, path)
        if clean is not None and not _is_known(arrays, given, rows, split, path):
            clean = None
        if rows is not None:
            features, given, clean = (
                features[rows],
                given[rows],
                None if clean is None else clean[rows],
            )
        if split == "test" and clean is not None:
            given = clean.clone()
        return Split(features, Labels(given=given, clean=clean, classes=classes))

    def extra(self, split: str) -> dict[str, list[str | None]]:
        """The other columns of the table of labels, for the rows of a split; nothing where there is no such table."""
        where = None if self.labels is None else Path(self.labels).expanduser()
        if where is None or where.suffix.lower() not in tables.ENDINGS:
            return {}
        table = tables.read(where)
        used = set(_keys(table.columns, where).values())
        if not used:  # the labels alone, without a header
            return {}
        path = Path(self.path).expanduser()
        rows = _rows(self._arrays(path).get("split"), split, path)
        others = {name: cells for name, cells in table.columns.items() if name not in used}
        return (
            others
            if rows is None
            else {name: list(compress(cells, rows)) for name, cells in others.items()}
        )

    def _arrays(self, path: Path, *, only_shape: bool = False) -> dict[str, _Array]:
        """The arrays of both files by their meaning: features and labels, as many of each.

        With `only_shape`, features are zeros of the right shape that take no memory.
        """
        arrays = _read(path, "features", only_shape=only_shape)
        if self.labels is not None:
            others = _read(Path(self.labels).expanduser(), "labels")
            if twice := arrays.keys() & others.keys():
                raise ValueError(
                    f"{min(twice)} are both in {path} and in labels={str(self.labels)!r}; leave one out"
                )
            arrays |= others
        if missing := [name for name in ("features", "labels") if name not in arrays]:
            names = " or ".join(_NAMES[missing[0]])
            where = path if self.labels is None or missing[0] == "features" else self.labels
            raise ValueError(
                f"{where} has no {missing[0]}; name an array {names}, or give nearsay train labels=FILE"
            )
        num_rows = len(arrays["features"])
        for name in ("labels", "clean", "split"):
            if name in arrays and arrays[name].shape != (num_rows,):
                raise ValueError(
                    f"{name} in {path} must have one entry for each of {num_rows} rows of features, "
                    f"got shape {arrays[name].shape}."
                )
        return arrays


def read_parquet(path: Path) -> NDArray[np.float32]:
    """(N, D) the features of a Parquet file: a column of lists, or all columns of numbers that mean nothing else."""
    return tables.read_features(path, named=FEATURE_NAMES, others=_KNOWN - {"x"})


def _read(path: Path, content: str, *, only_shape: bool = False) -> dict[str, _Array]:
    """Arrays by their meaning; `content` is the meaning of an array without a name."""
    if not path.is_file():
        raise ValueError(
            f"there is no file {path} with {content}; check the name, and the folder that it is relative to"
        )
    if content == "labels" and path.suffix.lower() in tables.ENDINGS:
        return _read_table(path)
    if path.suffix.lower() == ".parquet":
        present = tables.read(path, columns=()).header
        others = [name for name in present if name.lower() in _KNOWN - set(FEATURE_NAMES)]
        return {"features": read_parquet(path), **_read_table(path, columns=others)}
    try:
        with path.open("rb") as file:  # by itself numpy would leave a broken file open
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
    except Exception as error:  # what is no such file, or a hostile one, can raise anything
        reason = one_line(error)
        if "allow_pickle" in reason:  # advice that nobody should follow
            reason = "it holds objects" if "Object arrays" in reason else "it is no file of numpy"
        raise ValueError(
            f"{path} is not read: {reason}; write it by numpy.savez or numpy.save, names as text and not as objects"
        ) from error


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
    """Columns by what they mean; a table of one column needs no header."""
    table = tables.read(path, columns=columns)
    keys = _keys(table.columns, path)
    if not keys and columns is None and len(table.header) == 1:
        return {"labels": _cells([*table.header, *table.columns[table.header[0]]])}
    used = {name: key for name, key in keys.items() if name in ("labels", "clean", "split")}
    arrays = {
        name: _cells(table.columns[key]) for name, key in used.items() if any(table.columns[key])
    }
    if (
        "clean" in arrays
    ):  # where an empty cell would be −1 among numbers, which says that it is known
        arrays["empty"] = np.array([cell is None for cell in table.columns[used["clean"]]])
    return arrays


def _cells(cells: Sequence[str | None]) -> _Array:
    """Class numbers if every cell is one or missing, names otherwise: 007 is a name, as no number is written so."""
    if any(cells) and all(
        cell is None or re.fullmatch("0|-?[1-9][0-9]{0,17}", cell) for cell in cells
    ):
        return np.array([-1 if cell is None else int(cell) for cell in cells], dtype=np.int64)
    return np.array([cell or "" for cell in cells], dtype=np.str_)


def _keys(present: Iterable[str], path: Path) -> dict[str, str]:
    """What stands for what in a file."""
    keys: dict[str, str] = {}
    for key in present:
        for name in (name for name, names in _NAMES.items() if key.lower() in names):
            if name in keys:
                raise ValueError(
                    f"{keys[name]!r} and {key!r} in {path} mean the same; rename one of them"
                )
            keys[name] = key
    return keys


def _features(values: _Array, path: Path) -> Tensor:
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(
            f"features in {path} have the shape {values.shape}; they must be (N, D), one row an example"
        )
    if values.dtype.kind not in "fiub":
        raise ValueError(f"features in {path} are {values.dtype}; they must be real numbers")
    with np.errstate(over="ignore"):  # what is too large for float32 is found below
        features = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    is_finite = features.isfinite().all(dim=1)
    if not is_finite.all():
        row = int((~is_finite).nonzero()[0])
        wrong = values[row][~features[row].isfinite().numpy()][0]
        raise ValueError(
            f"row {row} of the features in {path} holds {wrong}; remove it, or replace it by a finite float32"
        )
    return features


def _numbers(
    arrays: dict[str, _Array], path: Path
) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Given and clean labels as class numbers, and the names of the classes."""
    labels = [_decoded(arrays[name], name, path) for name in ("labels", "clean") if name in arrays]
    kinds = {values.dtype.kind == "U" for values in labels}
    if len(kinds) > 1:
        raise ValueError(f"labels and clean in {path} must both be class numbers or both be names")
    classes: Sequence[str] | None = None
    if "classes" in arrays:
        classes = [
            str(name) for name in _decoded(arrays["classes"], "classes", path).ravel().tolist()
        ]
        if len(set(classes)) < len(classes) or "" in classes:
            raise ValueError(
                f"classes in {path} are {', '.join(map(repr, classes))}; they must differ and not be empty"
            )
    if kinds == {True}:
        names = sorted({*labels[0].tolist()} - {""})
        if classes is None:
            classes = names
            _warn_of_nan(labels[0], path)
        if unknown := next((name for name in names if name not in classes), None):
            raise ValueError(
                f"label {unknown!r} in {path} is not one of the classes {', '.join(classes)}; add it to them"
            )
        place = {"": -1} | {name: number for number, name in enumerate(classes)}
        labels = [
            np.array([place.get(name, -1) for name in values.tolist()], dtype=np.int64)
            for values in labels
        ]
    else:
        least, largest = (
            min(int(values.min()) for values in labels),
            max(int(values.max()) for values in labels),
        )
        limit = len(labels[0]) if classes is None else len(classes)
        if least < -1 or largest >= limit:
            raise ValueError(
                f"label {least if least < -1 else largest} in {path} must be from 0 to {limit - 1}, or -1 for none; "
                "where numbers are names of classes, write them as no number is, such as 'class 7'"
            )
        if classes is None:
            classes = [str(number) for number in range(largest + 1)]
            _warn_of_gaps(labels, largest, path)
    if not classes:
        raise ValueError(
            f"no example in {path} has a label; name the classes, or label at least one"
        )
    given, *clean = (torch.from_numpy(values.astype(np.int64)) for values in labels)
    return given, clean[0] if clean else None, tuple(classes)


def _is_known(
    arrays: dict[str, _Array], given: Tensor, rows: Tensor | None, split: str, path: Path
) -> bool:
    """Whether the true labels of a split are there; ValueError where only some are, as the others would seem wrong."""
    clean = arrays["clean"]
    empty = arrays.get(
        "empty", np.char.str_len(clean) == 0 if clean.dtype.kind in "SU" else clean != clean
    )  # or NaN
    is_here = torch.ones(len(given), dtype=torch.bool) if rows is None else rows
    is_empty = torch.from_numpy(empty) & is_here
    if is_empty.equal(is_here):
        return False
    lacking = (is_empty & (given >= 0)).nonzero()[:, 0]
    if split != "test" and len(lacking):
        raise ValueError(
            f"row {int(lacking[0])} of clean for {path} is empty, but not everywhere in this split; fill it in, or "
            "leave out clean"
        )
    return True


def _warn_of_nan(labels: _Array, path: Path) -> None:
    words = [name for name in labels.tolist() if name.lower() == "nan"]
    if words:
        told = f"{words[0]!r} is taken for a class in {path}, {len(words)} times"
        warnings.warn(
            f"{told}; where it means that there is no label, leave it empty", stacklevel=2
        )


def _warn_of_gaps(labels: Sequence[_Array], largest: int, path: Path) -> None:
    num_empty = (
        largest
        + 1
        - len({number for values in labels for number in np.unique(values).tolist()} - {-1})
    )
    if num_empty:
        told = f"labels 0 to {largest} in {path} leave {num_empty} classes without examples"
        warnings.warn(f"{told}; give names or numbers without gaps", stacklevel=2)


def _decoded(values: _Array, name: str, path: Path) -> _Array:
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind == "f":  # whole numbers beside missing ones, as pandas keeps them
        numbers = np.where(np.isnan(values), -1, values)
        odd = numbers[
            ~(np.isfinite(numbers) & (numbers == np.floor(numbers)) & (abs(numbers) < 2**53))
        ]
        if len(odd):
            raise ValueError(f"{name} in {path} hold {odd[0]}; {_LABELS}")
        return numbers.astype(np.int64)
    if values.dtype.kind not in "iuU":
        raise ValueError(f"{name} in {path} are {values.dtype}; {_LABELS}")
    return values


def _rows(splits: _Array | None, split: str, path: Path) -> Tensor | None:
    """(N,) bool, or None for all."""
    words = (
        ["train"]
        if splits is None
        else [str(word) for word in _decoded(splits, "split", path).tolist()]
    )
    for row, word in enumerate(words):
        if word not in _SPLITS:
            raise ValueError(
                f"row {row} of split in {path} is {word!r}; it must be {', '.join(dict.fromkeys(_SPLITS.values()))}"
            )
    parts = [_SPLITS[word] for word in words]
    if split not in parts:
        raise NoSplit(
            f"split={split!r} is not in {path}; it has {' and '.join(sorted(set(parts)))}"
            + (", since it has no array called split" if splits is None else "")
        )
    return None if splits is None else torch.tensor([part == split for part in parts])
