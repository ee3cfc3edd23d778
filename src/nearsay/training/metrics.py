"""The numbers in result.json: add a metric to `TRAIN_METRICS` or `SPLIT_METRICS`, nowhere else.

A metric is a function of predictions and labels in the same order. It returns a number, a mapping
from names to numbers, or None if the data cannot tell. The summary on the terminal and the report
show every metric in result.json; see `metric_rows` in training/progress.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nearsay import metrics
from nearsay.batch import Labels, Predictions
from nearsay.training.splits import Judged

Metric = Callable[[Predictions, Labels], float | Mapping[str, float] | None]


def detection(predictions: Predictions, labels: Labels) -> dict[str, float] | None:
    """How well a low probability of the given label finds the wrong labels."""
    if labels.clean is None or not _has_wrong(labels):
        return None
    trust = metrics.confidence(predictions.logits, labels.given)
    is_wrong = labels.given.ne(labels.clean)
    return {
        "auroc": metrics.detection_auroc(trust, is_wrong),
        "average_precision": metrics.average_precision(trust, is_wrong),
    }


def confidence(predictions: Predictions, labels: Labels) -> dict[str, float] | None:
    """The mean probability of the given label, for right and for wrong labels."""
    if not _has_wrong(labels):
        return None
    trust = metrics.confidence(predictions.logits, labels.given)
    is_known, is_wrong = labels.given >= 0, labels.given != labels.clean
    return {
        "right": trust[is_known & ~is_wrong].mean().item(),
        "wrong": trust[is_known & is_wrong].mean().item(),
    }


def memorization(predictions: Predictions, labels: Labels) -> dict[str, float] | None:
    """Of the wrong labels: the shares predicted as the given class, the true class or another."""
    if not _has_wrong(labels):
        return None
    return metrics.memorization(predictions.logits, labels)._asdict()


# Of the examples that were trained on; `labels` are the learned ones, and `labels.clean` may be
# None. result.json has each under its own name.
TRAIN_METRICS: dict[str, Metric] = {
    "detection": detection,
    "confidence": confidence,
    "memorization": memorization,
}

# Of each split that is evaluated; `labels.given` are the labels that count, `labels.clean` is None.
# result.json has each as a mapping from the split's name to its value, as in
# {"balanced_accuracy": {"test": 0.81}} for
#     "balanced_accuracy": lambda predictions, labels: metrics.class_accuracy(
#         predictions.logits, labels.given
#     ).mean,
SPLIT_METRICS: dict[str, Metric] = {}


def summarize_accuracy(entries: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Of one accuracy in the log: the final value, which is the result, the best and a late mean.

    `last_10` is the mean of the last ten evaluations, or of all if there are fewer.
    """
    evaluated = [entry for entry in entries if name in entry]
    # Of equal accuracies the first is the best.
    best = max(evaluated, key=lambda entry: (entry[name], -entry["epoch"]))
    last = [entry[name] for entry in evaluated[-10:]]
    return {
        "final": evaluated[-1][name],
        "best": best[name],
        "best_epoch": best["epoch"],
        "last_10": sum(last) / len(last),
    }


def measure_train(predictions: Predictions, labels: Labels, train: Tensor) -> dict[str, Any]:
    """Every metric of `TRAIN_METRICS`, of the examples `train` (n,)."""
    is_trained = torch.isin(predictions.indices, train)
    predictions = Predictions(*(part[is_trained] for part in predictions))
    labels = metrics.aligned(labels, predictions)
    return {name: _as_json(metric(predictions, labels)) for name, metric in TRAIN_METRICS.items()}


def measure_splits(
    tables: Mapping[str, Predictions], judged: Sequence[Judged], classes: tuple[str, ...]
) -> dict[str, Any]:
    """Every metric of `SPLIT_METRICS`, of each split."""
    measured: dict[str, Any] = {name: {} for name in SPLIT_METRICS}
    for split in judged:
        predictions = tables[split.name]
        labels = metrics.aligned(Labels(split.truth, None, classes), predictions)
        for name, metric in SPLIT_METRICS.items():
            measured[name][split.name] = _as_json(metric(predictions, labels))
    return measured


def _has_wrong(labels: Labels) -> bool:
    """Whether the true classes are known and a given label differs from them."""
    if labels.clean is None:
        return False
    return bool(((labels.given != labels.clean) & (labels.given >= 0)).any())


def _as_json(value: float | Mapping[str, float] | None) -> Any:
    """The value with None for NaN, which is the mean of nothing and has no word in JSON."""
    if isinstance(value, Mapping):
        return {name: _as_json(part) for name, part in value.items()}
    if value is None or math.isnan(value):
        return None
    return value
