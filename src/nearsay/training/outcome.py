"""What a run came to: its accuracy over the epochs, how it sees wrong labels, and its weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nearsay import metrics
from nearsay.batch import Labels, Predictions
from nearsay.label_propagation import propagate_labels


def summarize(entries: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """The last accuracy, which is the result; beside it the best, and the mean of the last ten or all, if fewer."""
    seen = [(entry[name], entry["epoch"]) for entry in entries if name in entry]
    best, epoch = max(seen, key=lambda pair: (pair[0], -pair[1]))
    last = [accuracy for accuracy, _ in seen[-10:]]
    return {
        "final": seen[-1][0],
        "best": best,
        "best_epoch": epoch,
        "last_10": sum(last) / len(last),
    }


def propagate(
    seen: Predictions, given: Tensor, clean: Tensor | None, train: Tensor
) -> tuple[Tensor, float | None]:
    """What the neighbors make of the labels `given` (N,) of the examples in `train` (paper Eq. 2).

    Returns all labels (N,), changed where neighbors say otherwise, and the share that is right now, if that is known:
    the transductive accuracy.
    """
    kept = torch.isin(seen.indices, train)
    indices, labels = seen.indices[kept], given.clone()
    scores = propagate_labels(seen.features[kept], given[indices], int(seen.logits.shape[1]))
    labels[indices] = scores.argmax(dim=1).where(scores.sum(dim=1) > 0, given[indices])
    if clean is None:
        return labels, None
    known = indices[clean[indices] >= 0]
    return labels, (labels[known] == clean[known]).double().mean().item()


def wrong_labels(seen: Predictions, labels: Labels, train: Tensor) -> dict[str, Any]:
    """How the examples that were trained on with a wrong label are seen, where the truth is known."""
    nothing = {"detection": None, "confidence": None, "memorization": None}
    is_trained = torch.isin(seen.indices, train)
    seen = Predictions(*(part[is_trained] for part in seen))
    labels = metrics.aligned(labels, seen)
    if labels.clean is None:
        return nothing
    is_wrong, is_known = labels.given != labels.clean, labels.given >= 0
    if not (is_wrong & is_known).any():
        return nothing
    trust = metrics.confidence(seen.logits, labels.given)
    found = {
        "detection": {
            "auroc": metrics.detection_auroc(trust, is_wrong),
            "average_precision": metrics.average_precision(trust, is_wrong),
        },
        "confidence": {
            "right": trust[is_known & ~is_wrong].mean().item(),
            "wrong": trust[is_known & is_wrong].mean().item(),
        },
        "memorization": metrics.memorization(seen.logits, labels)._asdict(),
    }
    # A mean over nothing is NaN, for which JSON has no word.
    return {
        part: {name: None if math.isnan(each) else each for name, each in of.items()}
        for part, of in found.items()
    }


def pack_networks(networks: Sequence[Module]) -> dict[str, Tensor]:
    """The content of `model.safetensors`: the weights of one network, or of several by number."""
    names = [""] if len(networks) == 1 else [f"{number}." for number in range(len(networks))]
    return {
        f"{prefix}{name}": tensor.detach().cpu().contiguous()
        for prefix, network in zip(names, networks, strict=True)
        for name, tensor in network.state_dict().items()
    }
