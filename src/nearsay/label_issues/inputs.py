"""Reading and checking a user's arrays, once, before anything is computed from them.

Arrays may be of numpy or torch, lists, or columns and tables of pandas or polars, so their type is
`Any` here. Everything is turned into tensors; features stay where they are, without a copy.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Numbers that are checked at a time.
_CHUNK = 2**24
# With more classes than the first, and the second times as many as occur, numbers are names.
_MANY, _SPARSE = 1000, 10
_TOO_LARGE = 2**63
# Of the sum of a row of probabilities: half precision passes, logits do not.
_SUM_TOLERANCE = 1e-2


class Dynamics(NamedTuple):
    """What training showed of each example; NaN for an example that was never trained on."""

    confidence: Tensor  # (N,) mean probability of the given label
    margin: Tensor  # (N,) mean logit of the given label minus the largest other


class Inputs(NamedTuple):
    """All that is known about N examples."""

    labels: Tensor  # (N,) int64; −1 where unlabeled
    classes: tuple[str, ...]
    probabilities: Tensor | None  # (N, C) float32 on the CPU
    features: Tensor | None  # (N, D) floating point, in the precision and place of the user
    dynamics: Dynamics | None


def read_inputs(
    labels: Any,
    probabilities: Any,
    features: Any,
    dynamics: Mapping[str, Any] | None,
    classes: Sequence[str | int] | None,
) -> Inputs:
    """The arrays as tensors; ValueError names the array that does not fit."""
    if probabilities is None and features is None and dynamics is None:
        raise ValueError("labels must come with probabilities, features or dynamics.")
    beliefs = None if probabilities is None else _read_probabilities(probabilities)
    width = None if beliefs is None else beliefs.shape[1]
    numbers, names = _read_labels(labels, _read_classes(classes), width)
    if beliefs is not None:
        if width != len(names):
            raise ValueError(
                f"probabilities must have one column per class ({_few(names)}), got {width}. "
                "Name the class of each column with classes=."
            )
        beliefs = _in_class_order(beliefs, getattr(probabilities, "columns", ()), names)
    points = None if features is None else _read_features(features)
    shown = None if dynamics is None else _read_dynamics(dynamics)
    confidence = None if shown is None else shown.confidence
    for name, rows in (("probabilities", beliefs), ("features", points), ("dynamics", confidence)):
        if rows is not None and len(rows) != len(numbers):
            raise ValueError(
                f"{name} must have one row for each of the {len(numbers)} labels, got {len(rows)}."
            )
    return Inputs(numbers, names, beliefs, points, shown)


def read_images(images: Any) -> Tensor:
    """The pixels as a tensor of any shape and type; ValueError if they are not numbers."""
    if isinstance(images, Tensor):
        return images
    try:
        array = np.asarray(images)
        # Torch cannot share memory with negative strides, as images[:, ::-1] has.
        if min(array.strides, default=0) < 0:
            array = array.copy()
        return _share(array)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"images must be an (N, 3, H, W) array of uint8, got {type(images).__name__}."
        ) from error


def is_missing(cell: object) -> bool:
    """Whether a cell of numpy, pandas or a list is empty: None, NaN, NA or NaT."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(cell, float) and cell != cell


class _Classes(NamedTuple):
    names: tuple[str, ...]
    numbers: dict[int, int] | None  # the position of each class, if the classes are numbers


def _read_classes(classes: Any) -> _Classes | None:
    if classes is None:
        return None
    # Plain numbers and texts, not scalars of numpy or torch.
    if isinstance(classes, Tensor | np.ndarray):
        classes = classes.tolist()
    if isinstance(classes, str | Mapping | Set) or not isinstance(classes, Iterable):
        raise ValueError(f"classes must be a list of names in order, got {classes!r}.")
    values = tuple(classes)
    numbers = None
    if all(map(_is_whole, values)):
        values = tuple(map(int, values))
        positions = {value: position for position, value in enumerate(values)}
        # −1 means unlabeled, unless a class has that number.
        numbers = {-1: -1} | positions
    names = tuple(map(str, values))
    if not names or len(set(names)) < len(names):
        raise ValueError(f"classes must be different names, at least one, got {_few(names)}.")
    return _Classes(names, numbers)


def _read_labels(
    labels: Any, classes: _Classes | None, width: int | None
) -> tuple[Tensor, tuple[str, ...]]:
    """(N,) class numbers, −1 for unlabeled, and the names of the classes."""
    cells = _label_cells(labels)
    if cells.dtype.kind in "iu" and np.can_cast(cells.dtype, np.int64):
        numbers = cells.astype(np.int64)
    else:
        # Tables store whole numbers as floating point where a cell is empty.
        known = [None if is_missing(cell) else cell for cell in cells.tolist()]
        if any(isinstance(cell, str) for cell in known):
            return _number_names(known, None if classes is None else classes.names)
        numbers = np.array(list(map(_class_number, known)), dtype=np.int64)
    if classes is not None and classes.numbers is not None:
        return _look_up(numbers.tolist(), classes.numbers, classes.names), classes.names
    if classes is not None:
        num_classes = len(classes.names)
    else:
        num_classes = width or max(1, int(numbers.max()) + 1)
    outside = numbers[(numbers < -1) | (numbers >= num_classes)]
    if len(outside):
        raise ValueError(
            f"labels must be 0 to {num_classes - 1}, or -1 for unlabeled, got {outside[0]}. "
            "If numbers are names of classes, list them in classes=."
        )
    if classes is not None:
        return torch.from_numpy(numbers), classes.names
    num_different = len(np.unique(numbers))
    if width is None and num_classes > max(_MANY, _SPARSE * num_different):
        raise ValueError(
            f"labels must count classes from 0, got {num_classes - 1} and only {num_different} "
            "different numbers. If numbers are names of classes, list them in classes=."
        )
    return torch.from_numpy(numbers), tuple(map(str, range(num_classes)))


def _label_cells(labels: Any) -> Any:
    """(N,) array of whole numbers, numbers, texts or objects."""
    _check_one_array("labels", labels, 0)
    try:
        cells = _as_array(labels)
    except ValueError as error:
        kind = type(labels).__name__
        raise ValueError(f"labels must be a vector (N,), got {kind}: {error}.") from error
    if cells.ndim != 1 or not len(cells):
        raise ValueError(f"labels must be a vector (N,) that is not empty, got {cells.shape}.")
    if cells.dtype.kind not in "iufOU":
        raise ValueError(f"labels must be whole class numbers or names, got {cells.dtype}.")
    return cells


def _class_number(cell: Any) -> int:
    if cell is None:
        return -1
    if isinstance(cell, bool) or not _is_whole(cell) or abs(int(cell)) >= _TOO_LARGE:
        raise ValueError(
            f"labels must be class numbers below 2**63 or names, got {cell!r}. "
            "Write -1 or None for unlabeled."
        )
    return int(cell)


def _number_names(
    labels: list[Any], classes: tuple[str, ...] | None
) -> tuple[Tensor, tuple[str, ...]]:
    if classes is None:
        classes = tuple(sorted({label for label in labels if isinstance(label, str) and label}))
    numbers: dict[Any, int] = {None: -1, "": -1}
    numbers.update({name: number for number, name in enumerate(classes)})
    return _look_up(labels, numbers, classes), classes


def _look_up(labels: list[Any], numbers: Mapping[Any, int], classes: tuple[str, ...]) -> Tensor:
    for label in labels:
        if label not in numbers:
            raise ValueError(f"labels must be among the classes {_few(classes)}, got {label!r}.")
    return torch.tensor([numbers[label] for label in labels])


def _in_class_order(beliefs: Tensor, columns: Any, classes: tuple[str, ...]) -> Tensor:
    """(N, C) in the order of the classes, if a table names its columns after them.

    Other columns count by position, as in an array. So do the numbers from 0 on, which pandas gives
    to columns without a name.
    """
    columns = list(columns)
    if columns == list(range(len(columns))):
        return beliefs
    columns = list(map(str, columns))
    positions = {name: position for position, name in enumerate(columns)}
    missing = [name for name in classes if name not in positions]
    if not missing:
        return beliefs[:, [positions[name] for name in classes]]
    if len(missing) == len(classes):
        return beliefs
    odd = []
    for position, name in enumerate(columns):
        if name not in classes or position != positions[name]:
            odd.append(name)
    raise ValueError(
        f"probabilities must have the columns {_few(missing)}, got {_few(odd)}. "
        "List the names of all columns in classes=, or give probabilities.to_numpy()."
    )


def _read_probabilities(values: Any) -> Tensor:
    rows = _read_matrix("probabilities", values, "C").float().cpu()
    is_valid = (rows >= 0).all(dim=1) & ((rows.sum(dim=1) - 1).abs() <= _SUM_TOLERANCE)
    # A comparison with NaN is false, so a row with NaN is not valid either.
    if not is_valid.all():
        row = int((~is_valid).nonzero()[0])
        first = [round(value, 4) for value in rows[row, :3].tolist()]
        raise ValueError(
            f"probabilities must be rows that sum to 1, got row {row}: {first}... with the sum "
            f"{rows[row].sum().item():.4g}. Apply softmax to logits first."
        )
    return rows


def _read_features(values: Any) -> Tensor:
    rows = _read_matrix("features", values, "D")
    start = 0
    for part in torch.split(rows, max(1, _CHUNK // rows.shape[1])):
        if not part.isfinite().all():
            row = start + int((~part.isfinite()).any(dim=1).nonzero()[0])
            raise ValueError(f"features must be finite, got NaN or infinity in row {row}.")
        start += len(part)
    return rows


def _read_dynamics(values: Mapping[str, Any]) -> Dynamics:
    for name in ("confidence", "margin"):
        if name not in values:
            raise ValueError(f"dynamics must have {name!r}, got {_few(list(values))}.")
    confidence = _read_vector("confidence", values["confidence"])
    margin = _read_vector("margin", values["margin"])
    count = torch.ones_like(confidence)
    if "count" in values:
        count = _read_vector("count", values["count"])
    shapes = {tuple(vector.shape) for vector in (confidence, margin, count)}
    if len(shapes) > 1 or confidence.ndim != 1:
        raise ValueError(f"dynamics must all have the shape (N,), got {sorted(shapes)}.")
    is_unknown = (count <= 0) | confidence.isnan() | margin.isnan()
    outside = confidence[~is_unknown & ~((confidence >= 0) & (confidence <= 1 + 1e-4))]
    if len(outside):
        raise ValueError(f"dynamics must hold a confidence from 0 to 1, got {outside[0].item():g}.")
    confidence = confidence.clamp(max=1).masked_fill(is_unknown, torch.nan)
    return Dynamics(confidence, margin.masked_fill(is_unknown, torch.nan))


def _read_vector(name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(_as_array(values).astype(np.float32))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"dynamics must hold numbers as {name}, got {error}.") from error


def _read_matrix(name: str, values: Any, width: str) -> Tensor:
    _check_one_array(name, values, 1)
    rows = values.detach() if isinstance(values, Tensor) else _share(_number_array(name, values))
    if rows.is_complex():
        raise ValueError(
            f"{name} must be real numbers, got {rows.dtype}. Use .real and .imag as columns."
        )
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(
            f"{name} must be a matrix (N, {width}) that is not empty, got {tuple(rows.shape)}."
        )
    return rows if rows.is_floating_point() else rows.float()


def _number_array(name: str, values: Any) -> Any:
    try:
        array = np.asarray(values)
    except ValueError as error:
        kind = type(values).__name__
        raise ValueError(f"{name} must be rows of equal length, got {kind}: {error}.") from error
    if array.dtype.kind not in "fiubc":
        cure = "Convert them with astype(float), or leave out these columns."
        if array.dtype.kind == "O" and array.ndim == 1:
            cure = "For a column of vectors, use numpy.stack(column)."
        raise ValueError(f"{name} must be numbers, got {array.dtype}. {cure}")
    if np.ma.is_masked(values):
        row = int(np.ma.getmaskarray(values).nonzero()[0][0])
        raise ValueError(f"{name} must have no masked cells, got one in row {row}.")
    # This copies only what torch cannot share.
    return np.ascontiguousarray(array)


def _check_one_array(name: str, values: Any, ndim: int) -> None:
    """Refuse sparse arrays, and lists of batches, where each row must have `ndim` axes."""
    kind = type(values).__name__
    is_tensor = isinstance(values, Tensor)
    if values.layout != torch.strided if is_tensor else hasattr(values, "toarray"):
        dense = "to_dense()" if is_tensor else "toarray()"
        raise ValueError(f"{name} must be dense, got a sparse {kind}. Use {name}.{dense}.")
    first = values[0] if isinstance(values, list | tuple) and values else None
    if (isinstance(first, Tensor) and ndim == 0) or getattr(first, "ndim", ndim) != ndim:
        join = "torch.cat or torch.stack" if isinstance(first, Tensor) else "numpy.concatenate"
        raise ValueError(
            f"{name} must be one array, got a {kind} of {len(values)} arrays. Use {join}."
        )


def _share(array: Any) -> Tensor:
    """The array as a tensor without a copy, as it may be gigabytes on disk; we only read it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _as_array(values: Any) -> Any:
    """A numpy array; masked cells become None."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        # Numpy has no bfloat16.
        if values.dtype == torch.bfloat16:
            values = values.float()
        return values.numpy()
    if isinstance(values, np.ma.MaskedArray):
        cells = values.data.astype(object)
        cells[np.ma.getmaskarray(values)] = None
        return cells
    return np.asarray(values) if hasattr(values, "__array__") else _from_list(values)


def _from_list(values: Any) -> Any:
    """An array of a list. Numpy alone would turn numbers into texts if the list holds both."""
    cells = np.asarray(values, dtype=object)
    kinds = {type(cell) for cell in cells.reshape(-1)}
    try:
        if kinds == {int}:
            return cells.astype(np.int64)
        return np.asarray(values) if kinds <= {float} else cells
    except OverflowError:
        # A number of more than 64 bits; `_class_number` refuses it.
        return cells


def _is_whole(cell: Any) -> bool:
    return isinstance(cell, int | np.integer) or (isinstance(cell, float) and cell.is_integer())


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
