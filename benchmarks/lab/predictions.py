"""Predictions of a finished run in half precision, kept so that the run can be audited again.

A record holds numbers only. For each run whose name matches REGEX, `worker.py run
--keep-predictions REGEX` also writes the features and logits of its training examples, the dynamics
of its training and its labels into one file, `predictions/NAME.safetensors` in the folder of the
merged records. The record has the SHA-256 of that file.

`worker.py take` copies the file to `benchmarks/records/predictions/`, which git ignores: 50 000
examples of CIFAR-100 with 512 features take 60 MB. `worker.py audit` audits such runs again.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.record import Record
from nearsay import metrics
from nearsay.files import load_sealed, pack_sealed
from nearsay.label_issues import Audit, audit
from nearsay.training.checkpoints import write_whole
from nearsay.training.run_folder import read_labels, read_predictions

FOLDER = "predictions"  # beside the records
_LARGEST = torch.finfo(torch.float16).max
_DYNAMICS = ("confidence", "margin", "count")


class AuditedAgain(NamedTuple):
    """An audit of kept predictions, and the summary that a record holds of it."""

    audit: Audit
    summary: dict[str, Any]  # {} where no label is known to be wrong


def path_of(name: str, folder: Path) -> Path:
    """Where the predictions of a run are, if they were kept in `folder`."""
    return folder / FOLDER / f"{name}.safetensors"


def keep_predictions(run: Path, path: Path) -> str:
    """Write what a later audit of a finished run needs into one file; returns its SHA-256."""
    labels = read_labels(run)
    predictions = read_predictions(run, labels)
    shown = metrics.aligned(labels, predictions)
    tensors = {
        "indices": predictions.indices,
        "features": _half(predictions.features),
        "logits": _half(predictions.logits),
        "given": shown.given,
    }
    if shown.clean is not None:
        tensors["clean"] = shown.clean
    dynamics = run / "dynamics.safetensors"
    if dynamics.is_file():
        kept = load_sealed(dynamics, _DYNAMICS)
        tensors |= {name: tensor[predictions.indices] for name, tensor in kept.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = pack_sealed(tensors)
    write_whole(path, content)
    return hashlib.sha256(content).hexdigest()


def audit_again(record: Record, path: Path, *, k: int = 20) -> AuditedAgain:
    """Audit a recorded run by its kept predictions; ValueError if they are of another run.

    Images are not looked at, so near-duplicates are found by features alone.
    """
    if hashlib.sha256(path.read_bytes()).hexdigest() != record.get("predictions"):
        raise ValueError(
            f"{path} must be the predictions of the record {record['name']}, got another file."
        )
    kept = load_sealed(path)
    has_dynamics = set(_DYNAMICS) <= kept.keys() and bool((kept["count"] > 0).any())
    found = audit(
        kept["given"],
        probabilities=kept["logits"].double().softmax(dim=1),
        features=kept["features"].float(),
        dynamics={name: kept[name] for name in _DYNAMICS} if has_dynamics else None,
        k=k,
    )
    return AuditedAgain(found, _summary(found, kept.get("clean")))


def _summary(found: Audit, clean: Tensor | None) -> dict[str, Any]:
    if clean is None:
        return {}
    is_wrong = (found.given >= 0) & (found.given != clean)
    if not is_wrong.any():
        return {}
    rate = found.noise_rate._asdict()
    return {
        "auroc": round(metrics.detection_auroc(found.scores, is_wrong), 6),
        "average_precision": round(metrics.average_precision(found.scores, is_wrong), 6),
        "noise_rate": {
            key: round(share, 6) for key, share in rate.items() if share == share
        },  # not NaN
        "review_for_recall": {
            f"{recall:g}": found.review_for(recall) for recall in (0.8, 0.9, 0.95)
        },
    }


def _half(values: Tensor) -> Tensor:
    return values.clamp(-_LARGEST, _LARGEST).half()
