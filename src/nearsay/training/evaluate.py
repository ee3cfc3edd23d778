"""How right and how sure a finished run is, mostly from the predictions that it has kept."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from nearsay import metrics
from nearsay.batch import Files, Labels, Predictions
from nearsay.data.inspect import dataset_at, open_first
from nearsay.data.labels_file import recorded_rows
from nearsay.errors import BAD_DATA, NoSplit, RunError
from nearsay.experiment import Experiment
from nearsay.training.metrics import measure_train
from nearsay.training.predict import predict_run
from nearsay.training.progress import counted, percent
from nearsay.training.run_folder import (
    check_predictions,
    load_predictions,
    read_experiment,
    read_labels,
)
from nearsay.training.splits import are_in_doubt, open_splits, truth


def evaluate(
    folder: Path, *, split: str | None = None, data: Path | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Accuracy and calibration on a split, by default test, else validation; and how wrong labels of train are found.

    Predictions that the run has kept are used; another split, or data in another place, costs one pass. Numbers that
    mean nothing are None. `unreadable` names the files of such data that were left out as they could not be read;
    `labels_in_doubt` tells whether it was judged by labels that may be as wrong as those that were learned.
    """
    experiment = read_experiment(folder)
    recorded = read_labels(folder)
    unreadable: list[str] = []
    if data is None:
        split = split or _default_split(folder)
        predictions, labels = _kept(folder, experiment, split, recorded, device)
    else:
        split, (inputs, labels) = open_first(dataset_at(data, experiment.data, split), split)
        predictions, problems = predict_run(folder, inputs, device=device)
        unreadable = (
            [inputs.names[index] for index in sorted(problems)] if isinstance(inputs, Files) else []
        )
        labels = _renumbered(labels, recorded.classes, data)
    labels = metrics.aligned(labels, predictions)
    counting = labels.given if labels.clean is None else labels.clean
    if not (counting >= 0).any():
        where = f"split={split!r} of {folder}" if data is None else str(data)
        lost = (
            f" ({counted(len(unreadable), 'file')} cannot be read, such as {unreadable[0]})"
            if unreadable
            else ""
        )
        raise RunError(
            f"{where} has no labeled example to judge by{lost}; give some with --data", BAD_DATA
        )
    logits = predictions.logits
    report: dict[str, Any] = {
        "split": split,
        "data": None if data is None else str(data),
        "num_examples": int((counting >= 0).sum()),
        "num_unreadable": None if data is None else len(unreadable),
        "unreadable": unreadable,
        "labels_in_doubt": data is None
        and are_in_doubt(split, experiment.validation_labels, recorded),
        "accuracy": metrics.accuracy(logits, counting),
        "balanced_accuracy": metrics.class_accuracy(logits, counting).mean,
        "top_5_accuracy": metrics.top_k_accuracy(logits, counting, k=5)
        if logits.shape[1] > 5
        else None,
        "nll": metrics.nll(logits, counting),
        "calibration_error": metrics.calibration_error(logits, counting),
        "detection": None if data is not None else _detection(folder, recorded),
    }
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in report.items()
    }


def evaluation_cells(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table of what `evaluate` has found."""
    shares = ("accuracy", "balanced_accuracy", "top_5_accuracy", "calibration_error")
    rows = [
        [name.replace("_", " "), percent(report[name])]
        for name in shares
        if report[name] is not None
    ]
    if report["nll"] is not None:
        rows.append(["negative log-likelihood", f"{report['nll']:.4f}"])
    if report["detection"] is not None:
        rows.append(["wrong labels of train found, AUROC", percent(report["detection"]["auroc"])])
        rows.append(
            ["the same, average precision", percent(report["detection"]["average_precision"])]
        )
    where = report["split"] if report["data"] is None else report["data"]
    return ["", f"{where} ({counted(report['num_examples'], 'example')})"], rows


def _default_split(folder: Path) -> str:
    """Test if the run was judged on one, else validation, else what it was trained on."""
    kept = (
        name
        for name in ("test", "validation")
        if (folder / "predictions" / f"{name}.safetensors").is_file()
    )
    return next(kept, "train")


def _kept(
    folder: Path, experiment: Experiment, split: str, recorded: Labels, device: str
) -> tuple[Predictions, Labels]:
    """What a run has predicted for a split, or predicts now, and the labels that count."""
    path = folder / "predictions" / f"{split}.safetensors"
    if split == "train":
        if path.is_file():
            return _trained_on(folder, _read_predictions(path, recorded)), recorded
        predicted = predict_run(folder, open_splits(experiment).inputs, device=device)
        return _trained_on(folder, predicted.predictions), recorded
    if (
        split == "validation"
        and path.is_file()
        and (kept := _held_out(folder, experiment, recorded)) is not None
    ):
        return _read_predictions(path, kept), kept
    judged = {each.name: each for each in open_splits(experiment).judged}
    if split not in judged:
        known = " and ".join(["train", *judged])
        raise NoSplit(f"split={split!r} is not in the data of {folder}; it has {known}")
    labels = Labels(given=judged[split].truth, clean=None, classes=recorded.classes)
    if path.is_file():
        return _read_predictions(path, labels), labels
    return predict_run(folder, judged[split].inputs, device=device).predictions, labels


def _held_out(folder: Path, experiment: Experiment, recorded: Labels) -> Labels | None:
    """The labels that count of what was held out, as they were then; None if nothing was."""
    rows = recorded_rows((folder / "labels.npz").read_bytes(), "validation")
    if not len(rows):
        return None
    return Labels(
        given=truth(recorded, experiment.validation_labels)[rows],
        clean=None,
        classes=recorded.classes,
    )


def _read_predictions(path: Path, labels: Labels) -> Predictions:
    cure = "remove it, and it is computed again"
    try:
        seen = load_predictions(path)
    except (SafetensorError, KeyError) as error:
        raise RunError(f"{path} is damaged ({error}); {cure}", BAD_DATA) from error
    check_predictions(seen, path, labels, cure=cure)
    return seen


def _trained_on(folder: Path, predictions: Predictions) -> Predictions:
    """The rows of examples that were trained on, without those that were held out."""
    rows = torch.isin(
        predictions.indices, recorded_rows((folder / "labels.npz").read_bytes(), "train")
    )
    return Predictions(*(part[rows] for part in predictions))


def _detection(folder: Path, labels: Labels) -> dict[str, float | None] | None:
    """How well low confidence in a label of train tells that it is wrong; None where that is unknown."""
    path = folder / "predictions" / "train.safetensors"
    if labels.clean is None or not path.is_file():
        return None
    seen = _trained_on(folder, _read_predictions(path, labels))
    found: dict[str, float | None] | None = measure_train(seen, labels, seen.indices)["detection"]
    return found


def _renumbered(labels: Labels, classes: tuple[str, ...], where: Path) -> Labels:
    """The labels by the numbers that the network has learned."""
    if labels.classes == classes:
        return labels
    if unknown := [name for name in labels.classes if name not in classes]:
        known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        raise ValueError(
            f"class {unknown[0]!r} in {where} is none that the run has learned; these are {known}"
        )
    numbers = labels.given.new_tensor(
        [*(classes.index(name) for name in labels.classes), -1]
    )  # −1 stays −1
    clean = None if labels.clean is None else numbers[labels.clean]
    return Labels(given=numbers[labels.given], clean=clean, classes=classes)
