"""Labels for images or features that no run has seen."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
_PATH_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
_COLUMNS = ("path", "label", "probability", "error")


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelTable:
    """The labels that a run predicts, one row for each example that was asked about.

    Attributes:
        labels: N class names; None where the example could not be read.
        probabilities: (N, C) probability of each class, a numpy array, or a tensor where a tensor
            was asked about; NaN where the example could not be read.
        classes: the C class names, in the order of the columns of `probabilities`.
        paths: N paths of the files, with the row for files of features; None for arrays.
        errors: why an example could not be read, by its row.
        index: the index of a pandas table that was asked about; None for everything else.

    >>> import numpy as np
    >>> table = LabelTable(labels=["cat", None], classes=("cat", "dog"), errors={1: "no image"},
    ...     probabilities=np.array([[0.75, 0.25], [np.nan, np.nan]]), paths=["a.png", "b.png"])
    >>> table.to_columns()["label"]
    ['cat', None]
    """

    labels: Sequence[str | None]
    probabilities: Any
    classes: tuple[str, ...]
    paths: Sequence[str] | None = None
    errors: Mapping[int, str]
    index: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        """How many examples there are, and the labels of the first of them."""
        shown = ", ".join(map(str, self.labels[:5]))
        if len(self) > 5:
            shown += ", ..."
        return f"<LabelTable of {len(self)}: {shown}>"

    def to_columns(self) -> dict[str, list[Any]]:
        """Columns path (or index), label, probability of the label, and error."""
        columns: dict[str, list[Any]] = {}
        if self.paths is None:
            columns["index"] = list(range(len(self)))
        else:
            columns["path"] = list(self.paths)
        columns["label"] = list(self.labels)
        best = torch.as_tensor(self.probabilities).max(dim=1).values
        cells: list[float | None] = [round(share, 6) for share in best.tolist()]
        for row in self.errors:
            cells[row] = None
        columns["probability"] = cells
        columns["error"] = [self.errors.get(row) for row in range(len(self))]
        return columns

    def to_frame(self) -> Any:
        """The columns as a pandas.DataFrame, with the index of the table that was asked about."""
        try:
            import pandas  # noqa: PLC0415  # nothing else here needs it
        except ImportError as error:
            raise ImportError(
                "to_frame needs pandas. Try pip install pandas, or use to_columns."
            ) from error
        columns = self.to_columns()
        columns.pop("index", None)
        return pandas.DataFrame(columns, index=self.index)


def predict(model: Path, data: Any, *, device: str = "auto") -> LabelTable:
    """Predict labels for images or features.

    Args:
        model: a run folder, an ONNX file that was exported from one, or the folder of that file.
        data: an array, tensor or table of features (N, D) or images (N, C, H, W); or a path, or a
            list of paths, of images, of folders of images, of tables with a column `path`
            (.csv, .tsv, .jsonl), or of files of features (.npy, .npz, .parquet).
        device: auto, cpu, cuda or cuda:1.
    """
    # A folder without a model is refused before the data is read.
    is_onnx = _is_onnx(model)
    if is_onnx and device not in ("auto", "cpu"):
        raise ValueError(
            f"device must be cpu for an ONNX model, got {device!r}. Use the run folder for a GPU."
        )
    classes = read_onnx_classes(model) if is_onnx else read_labels(model).classes
    names, inputs, source = _read_inputs(data)
    errors = _replace_not_finite(names, inputs) if isinstance(inputs, Tensor) else {}
    try:
        if is_onnx:
            predictions, unreadable = predict_onnx(model, inputs)
        else:
            predictions, unreadable = predict_run(model, inputs, device=device)
    except ValueError as error:
        # Subclasses of ValueError, such as a missing device, are not about the features.
        if not source or type(error) is not ValueError:
            raise
        raise ValueError(f"{source}: {error}") from error
    # Only pandas tables have `iloc`; lists have an `index`, too, but it is a method.
    index = data.index if hasattr(data, "iloc") else None
    errors = {**unreadable, **errors}
    table = _label_table(names, len(inputs), predictions, errors, classes, index)
    if isinstance(data, Tensor):
        return replace(table, probabilities=torch.from_numpy(table.probabilities))
    return table


def check_target(target: Path) -> None:
    """Refuse to replace a table that does not hold predictions, such as one of labels."""
    if not target.is_file() or not target.stat().st_size:
        return
    try:
        is_ours = tables.read(target, columns=()).header == _COLUMNS
    except TableError:
        is_ours = False
    if not is_ours:
        raise RunError(
            f"{target} holds something else and would be replaced. Choose another --out.",
            CANNOT_CREATE,
        )


def _is_onnx(model: Path) -> bool:
    """Whether it is an exported model; ValueError or RunError if it is neither that nor a run."""
    if not model.is_dir():
        if model.suffix.lower() != ".onnx":
            raise ValueError(
                f"model must be a run folder or an .onnx file, got {str(model)!r}. "
                "Try nearsay export --format onnx."
            )
        return True
    if not (model / "experiment.json").exists():
        if (model / FILES["onnx"]).exists():
            return True
        other = [name for name in FILES.values() if (model / name).exists()]
        if other and (model / "config.json").exists():
            raise ValueError(
                f"{model} holds {other[0]}, which predict cannot run. "
                "Export the run with --format onnx."
            )
    read_origin(model)
    return False


def _label_table(
    names: Sequence[str] | None,
    num: int,
    predictions: Predictions,
    errors: Mapping[int, str],
    classes: Sequence[str],
    index: Any,
) -> LabelTable:
    probabilities = torch.full((num, len(classes)), torch.nan)
    probabilities[predictions.indices] = predictions.logits.float().softmax(dim=1)
    # argmax would take NaN for the largest number.
    best = probabilities.nan_to_num(nan=-1.0).argmax(dim=1).tolist()
    labels: list[str | None] = []
    for row, number in enumerate(best):
        labels.append(None if row in errors else classes[number])
    probabilities[list(errors)] = torch.nan
    paths = None
    if names is not None:
        # The name of a file need not be text, but a table must be.
        paths = [name.encode(errors="backslashreplace").decode() for name in names]
    return LabelTable(
        labels=labels,
        probabilities=probabilities.numpy(),
        classes=tuple(classes),
        paths=paths,
        errors=dict(errors),
        index=index,
    )


def _read_inputs(data: Any) -> tuple[list[str] | None, Tensor | Files, str]:
    """The name of each example, what the network is to see, and the first file of features."""
    if isinstance(data, str | Path):
        data = [data]
    if data is None:
        raise ValueError("data must be an array, a table or paths, got None.")
    are_paths = isinstance(data, list | tuple) and all(isinstance(p, str | Path) for p in data)
    if not are_paths:
        return None, _as_tensor(data), ""
    paths = [Path(path) for path in data]
    if not paths:
        raise ValueError("data must hold at least one path, got an empty list.")
    are_features = [path.suffix.lower() in _FEATURE_FILES for path in paths]
    if any(are_features) and not all(are_features):
        odd = paths[are_features.index(not are_features[0])]
        raise ValueError(
            f"{paths[0]} and {odd} must be both images or both features. Use one kind at a time."
        )
    if are_features[0]:
        names, features = _features(paths)
        return names, features, str(paths[0])
    names, files = _images(paths)
    return names, files, ""


def _as_tensor(data: Any) -> Tensor:
    """An array, a tensor or a table of pandas or polars: (N, D) float32, or images (N, C, H, W)."""
    # Tables of pandas and polars have it.
    if hasattr(data, "to_numpy"):
        data = data.to_numpy()
    if not isinstance(data, Tensor):
        data = torch.from_numpy(np.array(data))
    tensor: Tensor = data.detach().cpu()
    if tensor.ndim not in (2, 4) or not len(tensor):
        raise ValueError(
            f"data must be features (N, D) or images (N, C, H, W), got {tuple(tensor.shape)}."
        )
    if tensor.ndim == 4:
        return tensor
    # A copy, because rows that are not finite are replaced in it.
    return tensor.float().clone()


def _images(paths: Sequence[Path]) -> tuple[list[str], Files]:
    names: list[str] = []
    for path in paths:
        if path.is_dir():
            names += _images_below(path)
        elif path.suffix.lower() in _PATH_TABLES:
            names += _images_of_table(path)
        elif is_image(path.name) or path.exists():
            names.append(str(path))
        else:
            raise ValueError(f"data must be paths that exist, got {str(path)!r}.")
    places = [os.path.abspath(name) for name in names]
    root = os.path.commonpath([os.path.dirname(place) for place in places])
    below = tuple(Path(os.path.relpath(place, root)).as_posix() for place in places)
    return names, Files(Path(root), below)


def _images_below(folder: Path) -> list[str]:
    """All images in a folder and its folders, sorted; hidden ones are left out."""
    images = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if is_image(path.name) and not is_hidden and not path.is_dir():
            images.append(str(path))
    if not images:
        raise ValueError(
            f"{folder} holds no images. Use image files, or a folder of .jpg, .png and the like."
        )
    return images


def _images_of_table(path: Path) -> list[str]:
    """The column `path` of a table; relative paths start at the folder of the table."""
    table = tables.read(path, columns=("path",))
    names = [cell for cell in table.columns.get("path", ()) if cell]
    if not names or len(names) < len(table.lines):
        raise ValueError(f"{path} must have a column path, with a path in every row.")
    return [str(path.parent / name) for name in names]


def _features(paths: Sequence[Path]) -> tuple[list[str], Tensor]:
    """The rows of all files, each named by its file and its number in it, from 0."""
    names: list[str] = []
    parts: list[Tensor] = []
    for path in paths:
        rows = _read_features(path)
        if parts and rows.shape[1] != parts[0].shape[1]:
            raise ValueError(
                f"{path} must have {parts[0].shape[1]} features, as {paths[0]} has, "
                f"got {rows.shape[1]}."
            )
        parts.append(rows)
        names += [f"{path}:{row}" for row in range(len(rows))]
    return names, torch.cat(parts)


def _read_features(path: Path) -> Tensor:
    """(N, D) float32."""
    features = read_parquet(path) if path.suffix.lower() == ".parquet" else _read_numbers(path)
    if features.ndim != 2 or not features.size:
        raise ValueError(f"{path} must hold an array (N, D), got {features.shape}.")
    return torch.from_numpy(features)


def _replace_not_finite(names: Sequence[str] | None, features: Tensor) -> dict[int, str]:
    """Put zeros into rows of features that are not finite; returns what is wrong with each."""
    if features.ndim != 2:
        return {}
    is_odd = ~features.isfinite().all(dim=1)
    features[is_odd] = 0
    errors = {}
    for row in is_odd.nonzero()[:, 0].tolist():
        name = f"row {row}" if names is None else names[row]
        errors[row] = f"{name} must hold finite float32 numbers, got NaN or infinity."
    return errors


def _read_numbers(path: Path) -> NDArray[np.float32]:
    try:
        # Numbers too large for float32 become infinity, and their rows errors.
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(_read_arrays(path), dtype=np.float32)
    except Exception as error:  # a damaged or hostile file can raise anything
        raise ValueError(f"{path} must hold rows of numbers ({one_line(error)})") from error


def _read_arrays(path: Path) -> Any:  # an array of numbers, if all is well
    with path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return loaded
        names = [name for name in loaded.files if name.lower() in FEATURE_NAMES] or loaded.files
        if len(names) != 1:
            raise ValueError(f"it must have an array features, got {', '.join(loaded.files[:9])}")
        return loaded[names[0]]
