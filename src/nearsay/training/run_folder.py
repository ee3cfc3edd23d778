"""What a run folder holds: the experiment, the labels, the predictions and the result.

`claim` and `check_same` write or compare these when a run starts. The `read_...` functions read
them for other commands.
"""

import json
import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from nearsay import config
from nearsay.batch import Inputs, Labels, Predictions
from nearsay.data.labels_file import (
    digest_inputs,
    pack_labels,
    recorded_digest,
    recorded_rows,
    unpack_labels,
)
from nearsay.errors import BAD_DATA, CANNOT_CREATE, RunError
from nearsay.experiment import Experiment
from nearsay.files import load_sealed
from nearsay.noise import fingerprint
from nearsay.training.checkpoints import LockedRun, write_whole
from nearsay.training.splits import Splits

MADE_ANEW = "Remove it and start the run again, which makes it anew from the last checkpoint."
_OTHER_FOLDER = "choose another folder with --out"
# Files that may be there before the experiment is written down.
_EARLY_FILES = (".lock", "labels.npz", "tensorboard")
# Files that other commands read; the last checkpoint is enough to make the last two again.
_NEEDED_FILES = (
    "experiment.json",
    "labels.npz",
    "log.jsonl",
    "model.safetensors",
    "predictions/train.safetensors",
)
# Experiments of runs that were started from Python, by folder, in this process.
_REMEMBERED: dict[Path, Experiment] = {}


def read_origin(folder: Path) -> Mapping[str, Any]:
    """The content of experiment.json: the experiment, and the recipe that made it."""
    path = folder / "experiment.json"
    try:
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError as error:
        raise RunError(
            f"{folder} is not a run folder, because it has no {path.name}. "
            "Use the folder that nearsay train has printed.",
            BAD_DATA,
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"{folder} is not a run folder: {path.name} cannot be read ({error}).", BAD_DATA
        ) from error
    current: dict[str, Any] = config.current_record(record)
    return current


def read_experiment(folder: Path) -> Experiment:
    """The experiment of a run; RunError if it was started from Python by another process."""
    origin = read_origin(folder)
    if "recipe" in origin:
        experiment: Experiment = config.from_origin(origin).experiment
        return experiment
    if folder.resolve() in _REMEMBERED:
        return _REMEMBERED[folder.resolve()]
    raise RunError(
        f"{folder} was trained from an Experiment, not by a recipe. "
        "Use nearsay.load(folder, experiment=...) in Python.",
        BAD_DATA,
    )


def remember_experiment(folder: Path, experiment: Experiment) -> None:
    """Let `read_experiment` know a run that was started from Python, in this process."""
    tree = _with_absolute_paths(read_origin(folder).get("experiment"))
    other = _with_absolute_paths(config.to_tree(experiment))
    if changed := config.substantial(config.differences(tree, other), ()):
        raise RunError(f"{folder} holds another experiment: {changed[0]}.", BAD_DATA)
    _REMEMBERED[folder.resolve()] = experiment


def read_labels(folder: Path) -> Labels:
    """The labels that were learned in a run."""
    path = folder / "labels.npz"
    try:
        return unpack_labels(path.read_bytes())
    except FileNotFoundError as error:
        raise RunError(
            f"{folder} has no {path.name}. Use a run folder, or start the run again.", BAD_DATA
        ) from error
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: {error}", BAD_DATA) from error


def load_predictions(path: Path) -> Predictions:
    """The content of a file of predictions; OSError, SafetensorError or KeyError if damaged."""
    # safetensors reports a file without permission to read as missing; open does not.
    path.open("rb").close()
    tensors = load_sealed(path)
    return Predictions(tensors["features"], tensors["logits"], tensors["indices"])


def read_predictions(folder: Path, labels: Labels) -> Predictions:
    """The predictions for all training examples, in their order; RunError if missing or damaged."""
    path = folder / "predictions" / "train.safetensors"
    try:
        predictions = load_predictions(path)
    except PermissionError:
        raise
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing. Train the run to its end first.", BAD_DATA) from error
    except (OSError, SafetensorError, KeyError) as error:
        raise RunError(f"{path} cannot be read: {error}. {MADE_ANEW}", BAD_DATA) from error
    check_predictions(predictions, path, labels, cure="Train again in another folder.")
    order = predictions.indices.argsort()
    return Predictions(*(part[order] for part in predictions))


def check_predictions(predictions: Predictions, path: Path, labels: Labels, *, cure: str) -> None:
    """RunError, with the cure, if predictions are not of the examples of the labels."""
    features, logits, indices = predictions
    num_classes, num_examples = len(labels.classes), len(labels.given)
    is_table = logits.ndim == 2 and logits.shape[1] == num_classes
    if not is_table or not logits.isfinite().all():
        raise RunError(
            f"{path} must hold finite logits of {num_classes} classes, got shape "
            f"{tuple(logits.shape)}. {cure}",
            BAD_DATA,
        )
    is_numbered = (
        indices.dtype == torch.int64
        and indices.shape == (len(logits),)
        and len(features) == len(logits)
        and len(torch.unique(indices)) == len(indices)
        and bool(((indices >= 0) & (indices < num_examples)).all())
    )
    if not is_numbered:
        raise RunError(
            f"{path} must number its rows by the {num_examples} examples. {cure}", BAD_DATA
        )


def read_result(folder: Path) -> dict[str, Any] | None:
    """The content of result.json if the run is finished, else None."""
    try:
        result: Any = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(result, dict) or not result.get("finished"):
        return None
    has_labels = isinstance(result.get("labels"), dict)
    return result if has_labels and _are_numbers(result.get("accuracy")) else None


def is_whole(folder: Path) -> bool:
    """Whether the folder has every file that other commands read."""
    return all((folder / name).is_file() for name in _NEEDED_FILES)


def check_same(run: LockedRun, experiment: Experiment) -> None:
    """Refuse a folder that holds another experiment, or something else than a run.

    A field that only later versions have is no difference if it is off.
    """
    path = run.path / "experiment.json"
    if not path.exists():
        names = {path.name for path in run.path.iterdir()}
        foreign = sorted(names.difference(_EARLY_FILES))
        if foreign:
            raise RunError(
                f"{run.path} holds {foreign[0]!r} but no {path.name}, so it is not a run folder; "
                f"{_OTHER_FOLDER}",
                CANNOT_CREATE,
            )
        return
    try:
        before = config.current_record(json.loads(path.read_bytes()))["experiment"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}; {_OTHER_FOLDER}", BAD_DATA) from error
    before, now = _with_absolute_paths(before), _with_absolute_paths(config.to_tree(experiment))
    if changed := config.substantial(config.differences(before, now), ()):
        raise config.ConfigError(
            f"{run.path} holds another experiment ({'; '.join(changed[:5])}); {_OTHER_FOLDER}"
        )


def check_relabeled(run: LockedRun, experiment: Experiment) -> None:
    """Refuse a finished run if the file of `labels_file` holds other labels now.

    After another `nearsay clean` its result could be taken for that of the new labels.
    """
    # With labeled < 1 most labels of the run are hidden, so they differ from the file.
    if experiment.labels_file is None or experiment.labeled != 1:
        return
    try:
        now = recorded_rows(Path(experiment.labels_file).read_bytes(), "given")
    except (OSError, ValueError):
        # The file was moved or removed since, so nothing shows other labels.
        return
    if now.tolist() != read_labels(run.path).given.tolist():
        raise RunError(
            f"{run.path} has learned other labels than labels_file={experiment.labels_file!r} "
            f"holds now; {_OTHER_FOLDER}",
            BAD_DATA,
        )


def claim(
    run: LockedRun, experiment: Experiment, splits: Splits, origin: Mapping[str, Any] | None
) -> list[str]:
    """Write the experiment and its labels, or check that the labels are still the same.

    Returns notes for the user: files may have been repaired since, and then the run continues.
    """
    path = run.path / "labels.npz"
    if not path.exists():
        content = pack_labels(
            splits.labels,
            splits.inputs,
            train=splits.train,
            held_out=splits.held_out,
            requested_rate=getattr(experiment.noise, "rate", None),
        )
        write_whole(path, content)
    try:
        content = path.read_bytes()
        before, inputs = fingerprint(unpack_labels(content)), recorded_digest(content)
    except ValueError as error:
        raise RunError(f"{run.path}: {error}", BAD_DATA) from error
    if before != fingerprint(splits.labels):
        raise RunError(
            f"{path} holds other labels than this experiment makes now, because the data has "
            f"changed. Restore it, or {_OTHER_FOLDER}.",
            BAD_DATA,
        )
    if not (run.path / "experiment.json").exists():
        record = {
            **(origin or {}),
            "num_inputs": splits.example(experiment.image_size).shape[0],
            "image_shape": array_shape(splits.inputs),
            "experiment": config.to_tree(experiment),
        }
        run.write_json("experiment.json", record)
    if inputs != digest_inputs(splits.inputs):
        return [f"the inputs have changed since {run.path} began; the run continues with the new"]
    return []


def array_shape(inputs: Inputs) -> list[int] | None:
    """Height and width of images in an array; None for files and features."""
    if isinstance(inputs, Tensor) and inputs.ndim == 4:
        return list(inputs.shape[2:])
    return None


def _with_absolute_paths(tree: Any) -> Any:
    """The tree of an experiment with absolute paths, however they were written."""
    if not isinstance(tree, dict):
        return tree
    tree = dict(tree)
    for name in config.FILES:
        if isinstance(tree.get(name), str):
            tree[name] = os.path.abspath(tree[name])
    return tree


def _are_numbers(accuracy: Any) -> bool:
    """Whether `accuracy` maps every split to a mapping from names to finite numbers."""
    if not isinstance(accuracy, dict):
        return False
    for numbers in accuracy.values():
        if not isinstance(numbers, dict):
            return False
        for value in numbers.values():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not isfinite(value):
                return False
    return True
