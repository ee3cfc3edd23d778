"""Label propagation on the features of a finished run (paper Eq. 2): what the neighbors make of its labels."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearsay import metrics
from nearsay.errors import CANNOT_CREATE, RunError
from nearsay.label_propagation import propagate_labels
from nearsay.training.checkpoints import open_run, write_whole
from nearsay.training.predictions import read_predictions
from nearsay.training.run_folder import read_labels
from nearsay.training.splits import pack_relabeled


def propagate(
    folder: Path, *, k: int = 50, mu: float = 0.02, out: Path | None = None
) -> dict[str, Any]:
    """Propagate the given labels of a run over its features, and write what comes out, to be learned by another run.

    The file, by default `propagated.npz` in the folder, is for `--set relabeled=FILE`. Tells how many labels changed
    and, where the truth is known, how many were right before and are now: the transductive accuracy.
    """
    target = folder / "propagated.npz" if out is None else out
    _check_target(target)
    labels = read_labels(folder)
    seen = read_predictions(folder, labels)
    shown = metrics.aligned(labels, seen)
    scores = propagate_labels(seen.features, shown.given, len(labels.classes), k=k, mu=mu)
    found = scores.argmax(dim=1).where(scores.sum(dim=1) > 0, -1)
    given = torch.full_like(labels.given, -1)
    given[seen.indices] = found
    content = pack_relabeled(given, (folder / "labels.npz").read_bytes())
    is_inside = target.absolute().parent.resolve() == folder.resolve()
    with open_run(folder, cure="choose another file with --out") if is_inside else nullcontext():
        write_whole(target, content)
    report = {
        "file": str(target),
        "num_examples": len(found),
        "num_changed": int((found != shown.given).sum()),
    }
    if shown.clean is None:
        return {**report, "accuracy_before": None, "accuracy_after": None}
    is_known = shown.clean >= 0
    before, after = (
        (each == shown.clean)[is_known].double().mean().item() for each in (shown.given, found)
    )
    return {**report, "accuracy_before": before, "accuracy_after": after}


def _check_target(target: Path) -> None:
    """Refuse to replace a file that holds anything else than labels as they are written here."""
    if not target.is_file():
        return
    try:
        with np.load(target, allow_pickle=False) as arrays:
            is_ours = (
                {"given", "classes"} <= {*arrays.files} <= {"given", "classes", "inputs", "names"}
            )
    except Exception:  # what is no such file can raise anything
        is_ours = False
    if not is_ours:
        raise RunError(
            f"{target} holds something else and would be replaced; choose another --out",
            CANNOT_CREATE,
        )
