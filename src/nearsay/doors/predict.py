"""Labels for images or features that no run has seen, as a table with a row for everything that was given."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearsay.batch import Files, Predictions
from nearsay.data import tables
from nearsay.data.embeddings import FEATURE_NAMES, read_parquet
from nearsay.data.images import is_image
from nearsay.errors import CANNOT_CREATE, RunError, TableError, one_line
from nearsay.integrations.export import FILES, predict_onnx, read_onnx_classes
from nearsay.training.predict import predict_run
from nearsay.training.run_folder import read_labels, read_origin

_FEATURE_FILES = (".npy", ".npz", ".parquet")
_COLUMNS = ("path", "label", "probability", "error")


def predict(model: Path, paths: Sequence[Path], *, device: str = "auto") -> dict[str, list[Any]]:
    """Columns path, label, probability and error: a row for each image, or for each row of features.

    The model is a run folder, an ONNX file that was exported from one, or the folder of that file.
    """
    is_onnx = _is_onnx(model)  # no use to look at images for what is no model
    if is_onnx and device not in ("auto", "cpu"):
        raise ValueError(
            f"{model} is run on the CPU, not on {device}; leave the device out, or give the run folder"
        )
    classes = read_onnx_classes(model) if is_onnx else read_labels(model).classes
    are_features = [path.suffix.lower() in _FEATURE_FILES for path in paths]
    if any(are_features) and not all(are_features):
        odd = paths[are_features.index(not are_features[0])]
        raise ValueError(
            f"{paths[0]} and {odd} are not both images or both features; give one kind at a time"
        )
    names, inputs = _features(paths) if are_features[0] else _images(paths)
    odd_rows = _take_out(names, inputs) if isinstance(inputs, Tensor) else {}
    try:
        found, unreadable = (
            predict_onnx(model, inputs) if is_onnx else predict_run(model, inputs, device=device)
        )
    except ValueError as error:
        if (
            not are_features[0] or type(error) is not ValueError
        ):  # of another kind, it is about something else
            raise
        raise ValueError(f"{paths[0]}: {error}") from error
    return _columns(names, found, {**unreadable, **odd_rows}, classes)


def check_target(target: Path) -> None:
    """Refuse to replace a table that holds anything else than predictions, such as one of labels."""
    if not target.is_file() or not target.stat().st_size:
        return
    try:
        is_ours = tables.read(target, columns=()).header == _COLUMNS
    except TableError:
        is_ours = False
    if not is_ours:
        raise RunError(
            f"{target} holds something else and would be replaced; choose another --out",
            CANNOT_CREATE,
        )


def _is_onnx(model: Path) -> bool:
    """Whether it is an exported model rather than a run; refuses what is neither."""
    if not model.is_dir():
        if model.suffix.lower() != ".onnx":
            raise ValueError(
                f"{model} is neither a run folder nor an .onnx file; nearsay export --format onnx makes one"
            )
        return True
    if not (model / "experiment.json").exists():
        if (model / FILES["onnx"]).exists():
            return True
        other = [name for name in FILES.values() if (model / name).exists()]
        if other and (model / "config.json").exists():
            raise ValueError(
                f"{model} holds {other[0]}, which predict cannot run; export the run with --format onnx"
            )
    read_origin(model)
    return False


def _columns(
    names: Sequence[str],
    predictions: Predictions,
    unreadable: Mapping[int, str],
    classes: Sequence[str],
) -> dict[str, list[Any]]:
    best, numbers = predictions.logits.float().softmax(dim=1).max(dim=1)
    rows = zip(predictions.indices.tolist(), numbers.tolist(), best.tolist(), strict=True)
    found = {index: (classes[number], round(probability, 6)) for index, number, probability in rows}
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for index, name in enumerate(names):
        error = unreadable.get(index)
        label, probability = (None, None) if error else found[index]
        shown = name.encode(
            errors="backslashreplace"
        ).decode()  # a name need not be text, as a table must
        for column, cell in zip(columns.values(), (shown, label, probability, error), strict=True):
            column.append(cell)
    return columns


def _images(paths: Sequence[Path]) -> tuple[list[str], Files]:
    names = [
        name for path in paths for name in (_images_below(path) if path.is_dir() else [str(path)])
    ]
    places = [os.path.abspath(name) for name in names]
    root = os.path.commonpath([os.path.dirname(place) for place in places])
    return names, Files(
        Path(root), tuple(Path(os.path.relpath(place, root)).as_posix() for place in places)
    )


def _images_below(folder: Path) -> list[str]:
    """All images in a folder and its folders, by name; what is hidden is passed over."""
    found = sorted(path for path in folder.rglob("*") if is_image(path.name) and not path.is_dir())
    seen = [
        path
        for path in found
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not seen:
        raise ValueError(
            f"{folder} holds no images; give files, or a folder of .jpg, .png and the like"
        )
    return [str(path) for path in seen]


def _features(paths: Sequence[Path]) -> tuple[list[str], Tensor]:
    """The rows of all files, and for each the file and the number of the row in it, from 0."""
    parts = [_read_features(path) for path in paths]
    for path, rows in zip(paths, parts, strict=True):
        if rows.shape[1] != parts[0].shape[1]:
            raise ValueError(
                f"{paths[0]} has {parts[0].shape[1]} features and {path} {rows.shape[1]}; they must agree"
            )
    names = [
        f"{path}:{row}" for path, rows in zip(paths, parts, strict=True) for row in range(len(rows))
    ]
    return names, torch.cat(parts)


def _read_features(path: Path) -> Tensor:
    """(N, D) float32."""
    features = read_parquet(path) if path.suffix.lower() == ".parquet" else _read_numbers(path)
    if features.ndim != 2 or not features.size:
        raise ValueError(
            f"{path} holds an array of {features.shape}; it must be (N, D), one row an example"
        )
    return torch.from_numpy(features)


def _take_out(names: Sequence[str], features: Tensor) -> dict[int, str]:
    """Put zeros into rows that are not finite; what is told of each instead of a label."""
    is_odd = ~features.isfinite().all(dim=1)
    features[is_odd] = 0
    told = "holds NaN or infinity; replace it by a finite float32"
    return {row: f"{names[row]} {told}" for row in is_odd.nonzero()[:, 0].tolist()}


def _read_numbers(path: Path) -> NDArray[np.float32]:
    try:
        with np.errstate(over="ignore"):  # what is too large is found by who asks
            return np.ascontiguousarray(_read_arrays(path), dtype=np.float32)
    except Exception as error:  # what is no such file, or a hostile one, can raise anything
        reason = one_line(error)
        raise ValueError(f"{path} is not read: {reason}; expected are rows of numbers") from error


def _read_arrays(path: Path) -> Any:  # an array of numbers, if all is well
    with path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return loaded
        names = [name for name in loaded.files if name.lower() in FEATURE_NAMES] or loaded.files
        if len(names) != 1:
            raise ValueError(
                f"it has the arrays {', '.join(loaded.files[:9])}, none of them called features"
            )
        return loaded[names[0]]
