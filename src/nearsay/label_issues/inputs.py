"""A user's own arrays, read and checked once before anything is computed from them."""

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2**24  # numbers looked at in one go
_MANY, _SPARSE = (
    1000,
    10,
)  # more classes than that, and so many times those that occur: their numbers are names
_TOO_LARGE = 2**63  # for a number of 64 bits
_SUM_TOLERANCE = 1e-2  # of a row of probabilities: half precision must pass, logits must not


class Dynamics(NamedTuple):
    """What training showed of each example; NaN for one that was never trained on."""

    confidence: Tensor  # (N,) mean probability of the given label
    margin: Tensor  # (N,) mean logit of the given label less the largest other


class Inputs(NamedTuple):
    """What is known of N examples."""

    labels: Tensor  # (N,) int64; −1 where unlabeled
    classes: tuple[str, ...]
    probabilities: Tensor | None  # (N, C) float32 on the CPU
    features: Tensor | None  # (N, D) floating point as precise as they came, where the user has it
    dynamics: Dynamics | None


def read_inputs(
    labels: Any,
    probabilities: Any,
    features: Any,
    dynamics: Mapping[str, Any] | None,
    classes: Sequence[str | int] | None,
) -> Inputs:
    """The arrays as tensors; Any, since they may be of numpy, torch, pandas or lists. ValueError says what is odd."""
    if probabilities is None and features is None and dynamics is None:
        raise ValueError(
            "labels alone say nothing of themselves; give probabilities, features or dynamics as well"
        )
    beliefs = None if probabilities is None else _probabilities(probabilities)
    width = None if beliefs is None else beliefs.shape[1]
    if isinstance(classes, Tensor | np.ndarray):
        classes = classes.tolist()  # plain numbers and texts
    if isinstance(classes, str | Mapping | Set) or not isinstance(classes, Iterable | None):
        raise ValueError(
            f"classes={classes!r} must be the names of the classes in their order, as a list"
        )
    given, names = _labels(labels, None if classes is None else tuple(classes), width)
    if width is not None and width != len(names):
        raise ValueError(
            f"probabilities have {width} columns but there are {len(names)} classes ({_few(names)}); name the class of "
            "each column with classes="
        )
    if beliefs is not None:
        beliefs = _as_named(beliefs, getattr(probabilities, "columns", ()), names)
    points = None if features is None else _features(features)
    seen = None if dynamics is None else _dynamics(dynamics)
    for name, rows in (
        ("probabilities", beliefs),
        ("features", points),
        ("dynamics", None if not seen else seen[0]),
    ):
        if rows is not None and len(rows) != len(given):
            raise ValueError(
                f"{len(given)} labels but {len(rows)} rows of {name}; there must be as many"
            )
    return Inputs(given, names, beliefs, points, seen)


def read_images(images: Any) -> Tensor:
    """The pixels as a tensor of whatever shape and type they are; ValueError where they are no numbers at all."""
    if isinstance(images, Tensor):
        return images
    try:
        array = np.asarray(images)
        return _shared(
            array if min(array.strides, default=0) >= 0 else array.copy()
        )  # torch knows no other strides
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"images of type {type(images).__name__} are no array of pixels; they must be stacked as (N, 3, H, W) of "
            "uint8, all of one size"
        ) from error


def _labels(
    labels: Any, classes: tuple[str | int, ...] | None, width: int | None
) -> tuple[Tensor, tuple[str, ...]]:
    """(N,) class numbers, −1 for unlabeled, and the names of the classes."""
    places = None  # of classes that are numbers
    if classes is not None:
        if all(_is_whole(each) for each in classes):
            classes = tuple(map(int, classes))
            places = {-1: -1} | {each: place for place, each in enumerate(classes)}
        classes = tuple(map(str, classes))
        if not classes or len(set(classes)) < len(classes):
            raise ValueError(
                f"classes ({_few(classes)}) must be at least one name, and no name twice"
            )
    _refuse_forms("labels", labels, 0)
    try:
        cells = _array(labels)
    except ValueError as error:
        raise ValueError(
            f"labels of type {type(labels).__name__} are no vector ({error}); give one of each"
        ) from error
    if cells.ndim != 1 or not len(cells):
        raise ValueError(
            f"labels of shape {cells.shape} must be a vector (N,) with at least one of them"
        )
    if cells.dtype.kind in "iu" and np.can_cast(cells.dtype, np.int64):
        numbers = cells.astype(np.int64)
    elif (
        cells.dtype.kind in "ufOU"
    ):  # tables keep whole numbers of which some are missing as floating point
        known = [None if is_missing(cell) else cell for cell in cells.tolist()]
        if any(isinstance(cell, str) for cell in known):
            return _named(known, classes)
        if odd := [
            cell
            for cell in known
            if cell is not None and (isinstance(cell, bool) or not _is_whole(cell))
        ]:
            raise ValueError(
                f"label {odd[0]!r} is neither a class number nor a name; write -1 or None for unlabeled"
            )
        if large := [cell for cell in known if cell is not None and abs(int(cell)) >= _TOO_LARGE]:
            raise ValueError(
                f"label {large[0]} is too large for a class number; write names that are numbers as text"
            )
        numbers = np.array([-1 if cell is None else int(cell) for cell in known], dtype=np.int64)
    else:
        raise ValueError(
            f"labels of {cells.dtype} must be whole class numbers or names; convert them with astype(int)"
        )
    if places is not None:
        assert classes is not None
        if unknown := [each for each in numbers.tolist() if each not in places]:
            raise ValueError(
                f"label {unknown[0]} is none of the classes {_few(classes)}; add it to classes="
            )
        return torch.tensor([places[each] for each in numbers.tolist()]), classes
    num_classes = len(classes) if classes is not None else width or max(1, int(numbers.max()) + 1)
    cure = "; where numbers are names of classes, give these numbers in classes="
    outside = numbers[(numbers < -1) | (numbers >= num_classes)]
    if len(outside):
        raise ValueError(
            f"labels hold {outside[0]}, but with {num_classes} classes they must be 0 to {num_classes - 1}, or -1 for "
            f"unlabeled{cure}"
        )
    if (
        classes is None
        and width is None
        and num_classes > max(_MANY, _SPARSE * (occur := len(np.unique(numbers))))
    ):
        raise ValueError(f"labels hold {num_classes - 1}, but only {occur} numbers occur{cure}")
    return torch.from_numpy(numbers), classes or tuple(map(str, range(num_classes)))


def _named(labels: list[Any], classes: tuple[str, ...] | None) -> tuple[Tensor, tuple[str, ...]]:
    if odd := [label for label in labels if label is not None and not isinstance(label, str)]:
        raise ValueError(
            f"label {odd[0]!r} is no name, but others are; write all of them as text, or None"
        )
    names = classes if classes is not None else tuple(map(str, sorted(set(labels) - {None, ""})))
    numbers: dict[Any, int] = {None: -1, "": -1} | {
        name: number for number, name in enumerate(names)
    }
    if unknown := [label for label in labels if label not in numbers]:
        raise ValueError(
            f"label {unknown[0]!r} is none of the classes {_few(names)}; add it to classes="
        )
    return torch.tensor([numbers[label] for label in labels]), names


def _as_named(beliefs: Tensor, columns: Any, names: tuple[str, ...]) -> Tensor:
    """(N, C) in the order of the classes where a table names its columns so; others stand by position, as in an array.

    Numbers from 0 on, which pandas gives to columns without a name, are no names.
    """
    given = list(columns)
    if given == list(range(len(given))):
        return beliefs
    given = list(map(str, given))
    places = {name: place for place, name in enumerate(given)}
    missing = [name for name in names if name not in places]
    if not missing:
        return beliefs[:, [places[name] for name in names]]
    if len(missing) == len(names):
        return beliefs
    odd = [name for place, name in enumerate(given) if name not in names or place != places[name]]
    raise ValueError(
        f"columns {_few(odd)} of probabilities must be named {_few(missing)}, as the others are named as classes; give "
        "the names of all columns as classes=, or .to_numpy() of a table whose columns are in the order of the classes"
    )


def _probabilities(values: Any) -> Tensor:
    rows = _floating("probabilities", values, "C").float().cpu()
    is_wrong = ~(
        (rows >= 0).all(dim=1) & ((rows.sum(dim=1) - 1).abs() <= _SUM_TOLERANCE)
    )  # true for NaN as well
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0])
        raise ValueError(
            f"row {row} of probabilities begins with {[round(each, 4) for each in rows[row, :3].tolist()]} and sums to "
            f"{rows[row].sum().item():.4g}; rows must be distributions, which softmax makes of logits"
        )
    return rows


def _features(values: Any) -> Tensor:
    rows = _floating("features", values, "D")
    start = 0
    for some in torch.split(rows, max(1, _CHUNK // rows.shape[1])):
        if not some.isfinite().all():
            row = start + int((~some.isfinite()).any(dim=1).nonzero()[0])
            raise ValueError(
                f"features hold NaN or infinity, first in row {row}; leave such examples out"
            )
        start += len(some)
    return rows


def _dynamics(values: Mapping[str, Any]) -> Dynamics:
    missing = [name for name in ("confidence", "margin") if name not in values]
    if missing:
        raise ValueError(
            f"dynamics have {_few(list(values))} but no {missing[0]!r}; give confidence and margin"
        )
    confidence, margin = (_vector(name, values[name]) for name in ("confidence", "margin"))
    count = _vector("count", values["count"]) if "count" in values else torch.ones_like(confidence)
    shapes = {tuple(each.shape) for each in (confidence, margin, count)}
    if len(shapes) > 1 or confidence.ndim != 1:
        raise ValueError(f"dynamics of shapes {sorted(shapes)} must all be (N,)")
    never = (count <= 0) | confidence.isnan() | margin.isnan()
    outside = confidence[~never & ~((confidence >= 0) & (confidence <= 1 + 1e-4))]
    if len(outside):
        raise ValueError(
            f"dynamics hold a confidence of {outside[0].item():g}; it must be a probability from 0 to 1"
        )
    return Dynamics(
        confidence.clamp(max=1).masked_fill(never, torch.nan), margin.masked_fill(never, torch.nan)
    )


def _vector(name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(_array(values).astype(np.float32))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} of the dynamics must be a vector of numbers ({error})") from error


def _floating(name: str, values: Any, width: str) -> Tensor:
    _refuse_forms(name, values, 1)
    rows = values.detach() if isinstance(values, Tensor) else _shared(_numbers(name, values))
    if rows.is_complex():
        raise ValueError(
            f"{name} of {rows.dtype} must be real numbers; give .real and .imag as columns of their own"
        )
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(
            f"{name} of shape {tuple(rows.shape)} must be a matrix (N, {width}) with at least one row and column"
        )
    return rows if rows.is_floating_point() else rows.float()


def _numbers(name: str, values: Any) -> Any:  # an array that torch can take
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(
            f"{name} of type {type(values).__name__} are no matrix ({error}); give rows of one length"
        ) from error
    if array.dtype.kind not in "fiubc":
        cure = "make them numbers, as with astype(float), or leave such columns out"
        if array.dtype.kind == "O" and array.ndim == 1:
            cure = "numpy.stack(column) makes a matrix of a column of vectors"
        raise ValueError(f"{name} of {array.dtype} must be numbers; {cure}")
    if np.ma.is_masked(values):
        row = int(np.ma.getmaskarray(values).nonzero()[0][0])
        raise ValueError(
            f"{name} are masked, first in row {row}; leave such examples out, or fill them with numbers"
        )
    return np.ascontiguousarray(array)  # a copy only where torch could not take it as it is


def _refuse_forms(name: str, values: Any, ndim: int) -> None:
    """Sparse arrays, and batches as a loop collects them, which are told from one row each, which has `ndim` axes."""
    is_tensor = isinstance(values, Tensor)
    if values.layout != torch.strided if is_tensor else hasattr(values, "toarray"):
        dense = "to_dense()" if is_tensor else "toarray()"
        raise ValueError(
            f"{name} of type {type(values).__name__} are sparse and must be dense; give {name}.{dense}"
        )
    first = values[0] if isinstance(values, list | tuple) and values else None
    if (isinstance(first, Tensor) and ndim == 0) or getattr(first, "ndim", ndim) != ndim:
        joined = "torch.cat or torch.stack" if isinstance(first, Tensor) else "numpy.concatenate"
        kind = type(values).__name__
        raise ValueError(
            f"{name} are a {kind} of {len(values)} arrays; there must be one, which {joined} makes"
        )


def _shared(array: Any) -> Tensor:
    """The array as a tensor without copying it, which may be gigabytes on disk; nobody here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _array(values: Any) -> Any:  # an array of whatever the user has
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if isinstance(values, np.ma.MaskedArray):
        cells = values.data.astype(object)
        cells[np.ma.getmaskarray(values)] = None
        return cells
    return np.asarray(values) if hasattr(values, "__array__") else _from_list(values)


def _from_list(values: Any) -> Any:
    """An array of a list, without turning numbers into text where both occur."""
    cells = np.asarray(values, dtype=object)
    kinds = {type(cell) for cell in cells.reshape(-1)}
    try:
        return (
            cells.astype(np.int64)
            if kinds == {int}
            else np.asarray(values)
            if kinds <= {float}
            else cells
        )
    except OverflowError:  # a number of more than 64 bits
        return cells


def is_missing(cell: object) -> bool:
    """Whether a cell of numpy, pandas or a list is none at all: None, NaN, NA or NaT."""
    return (
        cell is None
        or (isinstance(cell, float) and cell != cell)
        or type(cell).__name__ in ("NAType", "NaTType")
    )


def _is_whole(cell: Any) -> bool:
    return isinstance(cell, int | np.integer) or (isinstance(cell, float) and cell.is_integer())


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
