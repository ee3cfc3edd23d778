"""Accuracy and calibration of a finished run, mostly from the predictions that it has saved."""

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
from nearsay.errors import BAD_DATA, RunError
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
from nearsay.validation import check_choice, check_split


def evaluate(
    folder: Path, *, split: str | None = None, data: Path | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Accuracy and calibration on a split, and how well wrong labels of train are found.

    The split is by default test, else validation. Saved predictions are used; another split, or
    other data, costs one pass. Numbers without a meaning are None. In the report, `unreadable`
    names the files that could not be read, and `labels_in_doubt` is true if the labels of the split
    may be as wrong as those of training.
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
        if isinstance(inputs, Files):
            unreadable = [inputs.names[index] for index in sorted(problems)]
        labels = _renumbered(labels, recorded.classes, data)
    labels = metrics.aligned(labels, predictions)
    counting = labels.given if labels.clean is None else labels.clean
    if not (counting >= 0).any():
        where = f"split={split!r} of {folder}" if data is None else str(data)
        problem = ""
        if unreadable:
            number = counted(len(unreadable), "file")
            problem = f" ({number} cannot be read, such as {unreadable[0]})"
        raise RunError(
            f"{where} has no labeled example to judge by{problem}; give some with --data", BAD_DATA
        )
    logits = predictions.logits
    num_classes = logits.shape[1]
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
        "top_5_accuracy": None,
        "nll": metrics.nll(logits, counting),
        "calibration_error": metrics.calibration_error(logits, counting),
        "detection": None,
    }
    if num_classes > 5:
        report["top_5_accuracy"] = metrics.top_k_accuracy(logits, counting, k=5)
    if data is None:
        report["detection"] = _detection(folder, recorded)
    for name, value in report.items():
        if isinstance(value, float) and math.isnan(value):
            report[name] = None
    return report


def evaluation_cells(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table of the report of `evaluate`."""
    shares = ("accuracy", "balanced_accuracy", "top_5_accuracy", "calibration_error")
    rows = []
    for name in shares:
        if report[name] is not None:
            rows.append([name.replace("_", " "), percent(report[name])])
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
    for name in ("test", "validation"):
        if (folder / "predictions" / f"{name}.safetensors").is_file():
            return name
    return "train"


def _kept(
    folder: Path, experiment: Experiment, split: str, recorded: Labels, device: str
) -> tuple[Predictions, Labels]:
    """The saved predictions for a split, or new ones, and the labels that count."""
    path = folder / "predictions" / f"{split}.safetensors"
    if split == "train":
        if path.is_file():
            return _trained_on(folder, _read_predictions(path, recorded)), recorded
        predicted = predict_run(folder, open_splits(experiment).inputs, device=device)
        return _trained_on(folder, predicted.predictions), recorded
    if split == "validation" and path.is_file():
        held_out = _held_out(folder, experiment, recorded)
        if held_out is not None:
            return _read_predictions(path, held_out), held_out
    judged = {part.name: part for part in open_splits(experiment).judged}
    check_split(split, ["train", *judged], f"the data of {folder}")
    labels = Labels(given=judged[split].truth, clean=None, classes=recorded.classes)
    if path.is_file():
        return _read_predictions(path, labels), labels
    return predict_run(folder, judged[split].inputs, device=device).predictions, labels


def _held_out(folder: Path, experiment: Experiment, recorded: Labels) -> Labels | None:
    """The labels of held-out examples, as they were then; None if no example was held out."""
    rows = recorded_rows((folder / "labels.npz").read_bytes(), "validation")
    if not len(rows):
        return None
    return Labels(
        given=truth(recorded, experiment.validation_labels)[rows],
        clean=None,
        classes=recorded.classes,
    )


def _read_predictions(path: Path, labels: Labels) -> Predictions:
    cure = "Remove it; it is computed again."
    try:
        predictions = load_predictions(path)
    except (SafetensorError, KeyError) as error:
        raise RunError(f"{path} is damaged ({error}). {cure}", BAD_DATA) from error
    check_predictions(predictions, path, labels, cure=cure)
    return predictions


def _trained_on(folder: Path, predictions: Predictions) -> Predictions:
    """The rows of examples that were trained on, without those that were held out."""
    rows = torch.isin(
        predictions.indices, recorded_rows((folder / "labels.npz").read_bytes(), "train")
    )
    return Predictions(*(part[rows] for part in predictions))


def _detection(folder: Path, labels: Labels) -> dict[str, float | None] | None:
    """How well low confidence finds wrong labels of train; None if the true ones are unknown."""
    path = folder / "predictions" / "train.safetensors"
    if labels.clean is None or not path.is_file():
        return None
    predictions = _trained_on(folder, _read_predictions(path, labels))
    wrong = measure_train(predictions, labels, predictions.indices)
    detection: dict[str, float | None] | None = wrong["detection"]
    return detection


def _renumbered(labels: Labels, classes: tuple[str, ...], where: Path) -> Labels:
    """The labels by the class numbers of the network."""
    if labels.classes == classes:
        return labels
    for name in labels.classes:
        check_choice(f"class in {where}", name, classes)
    # The last number is for −1, which stays −1.
    numbers = labels.given.new_tensor([*map(classes.index, labels.classes), -1])
    clean = None if labels.clean is None else numbers[labels.clean]
    return Labels(given=numbers[labels.given], clean=clean, classes=classes)
