"""What a finished run has kept of its examples: features, logits, and whose they are."""

from pathlib import Path

import torch
from safetensors import SafetensorError

from nearsay.batch import Labels, Predictions
from nearsay.errors import BAD_DATA, RunError
from nearsay.sealed import load_sealed
from nearsay.training.run_folder import MADE_ANEW


def load_predictions(path: Path) -> Predictions:
    """The content of one file; OSError, SafetensorError or KeyError if it is none."""
    path.open(
        "rb"
    ).close()  # safetensors takes a file that may not be read for one that is not there
    tensors = load_sealed(path)
    return Predictions(tensors["features"], tensors["logits"], tensors["indices"])


def read_predictions(folder: Path, labels: Labels) -> Predictions:
    """What the run has said of its training examples, in their order; RunError if that is missing or damaged."""
    path = folder / "predictions" / "train.safetensors"
    try:
        seen = load_predictions(path)
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing; train the run to its end first", BAD_DATA) from error
    except PermissionError:
        raise
    except (OSError, SafetensorError, KeyError) as error:
        raise RunError(f"{path} cannot be read ({error}); {MADE_ANEW}", BAD_DATA) from error
    check_predictions(seen, path, labels, cure="train again in another folder")
    order = seen.indices.argsort()
    return Predictions(*(part[order] for part in seen))


def check_predictions(seen: Predictions, path: Path, labels: Labels, *, cure: str) -> None:
    """RunError, with a cure, if the content of a file is not of the examples that the labels are of."""
    num_classes, num_examples = len(labels.classes), len(labels.given)
    if (
        seen.logits.ndim != 2
        or seen.logits.shape[1] != num_classes
        or not seen.logits.isfinite().all()
    ):
        told = f"has logits {tuple(seen.logits.shape)} where finite ones of {num_classes} classes should be"
        raise RunError(f"{path} {told}; {cure}", BAD_DATA)
    indices = seen.indices
    is_whole = indices.dtype == torch.int64 and indices.shape == (len(seen.logits),) == (
        len(seen.features),
    )
    if (
        not is_whole
        or len(torch.unique(indices)) < len(indices)
        or not ((indices >= 0) & (indices < num_examples)).all()
    ):
        raise RunError(
            f"{path} does not say which of the {num_examples} examples its rows are; {cure}",
            BAD_DATA,
        )
