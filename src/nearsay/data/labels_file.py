"""The file labels.npz of a run, and files of other labels for `labels_file=`.

`labels.npz` holds the labels that were learned, what is known of their noise, which examples were
trained on or held out, and digests that show whether the data has changed since.
"""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearsay.batch import Files, Inputs, Labels
from nearsay.errors import one_line
from nearsay.noise import fingerprint, measure_noise

_RELABELED_HINT = "Use a file made by nearsay clean or nearsay propagate."


def pack_labels(
    labels: Labels, inputs: Inputs, *, train: Tensor, held_out: Tensor, requested_rate: float | None
) -> bytes:
    """The content of `labels.npz`; `train` and `held_out` are numbers of examples."""
    realized = measure_noise(labels)
    # NaN stands for an unknown rate.
    rates = [requested_rate, realized.effective_rate]
    requested, effective = [np.nan if rate is None else rate for rate in rates]
    arrays = {
        "given": labels.given.numpy(),
        "classes": np.array(labels.classes, dtype=np.str_),
        "train": train.numpy(),
        "validation": held_out.numpy(),
        "requested_rate": np.array(requested),
        "effective_rate": np.array(effective),
        "num_open_set": np.array(realized.num_open_set),
        "fingerprint": np.array(realized.fingerprint),
        "inputs": np.array(digest_inputs(inputs)),
        "names": np.array(digest_names(inputs)),
    }
    if labels.clean is not None:
        arrays["clean"] = labels.clean.numpy()
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def unpack_labels(content: bytes) -> Labels:
    """The labels of a `labels.npz`; ValueError if the file is damaged."""
    with _opened(content) as arrays:
        given, classes = torch.from_numpy(arrays["given"]), tuple(map(str, arrays["classes"]))
        clean = torch.from_numpy(arrays["clean"]) if "clean" in arrays.files else None
        labels = Labels(given, clean, classes)
        # Read every array now, so that damage anywhere shows before a part is needed.
        for name in arrays.files:
            arrays[name]
        if fingerprint(labels) != str(arrays["fingerprint"]):
            raise ValueError("its fingerprint is of other labels")
        return labels


def recorded_rows(content: bytes, name: str) -> Tensor:
    """(n,) one array of numbers: the examples of `train` or `validation`, or the labels `given`."""
    with _opened(content) as arrays:
        if name in arrays.files:
            return torch.from_numpy(arrays[name])
    return torch.empty(0, dtype=torch.int64)


def recorded_digest(content: bytes, name: str = "inputs") -> str:
    """The digest of the `inputs`, or of their `names`; empty if the file has none."""
    with _opened(content) as arrays:
        return str(arrays[name]) if name in arrays.files else ""


def pack_relabeled(given: Tensor, content: bytes) -> bytes:
    """The content of a file for `labels_file=`: other labels for the examples of a `labels.npz`."""
    with _opened(content) as arrays:
        kept = {}
        for name in ("classes", "inputs", "names"):
            if name in arrays.files:
                kept[name] = arrays[name]
    packed = io.BytesIO()
    np.savez(packed, given=given.numpy(), **kept)
    return packed.getvalue()


def read_relabeled(path: Path, labels: Labels, inputs: Inputs) -> Tensor:
    """(N,) the labels of a file for `labels_file=`; ValueError if they are of other data."""
    field = f"labels_file={str(path)!r}"
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            missing = {"given", "classes"}.difference(arrays.files)
            if not missing:
                given, classes = arrays["given"], tuple(map(str, arrays["classes"]))
                names = str(arrays["names"]) if "names" in arrays.files else ""
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{field} does not exist. {_RELABELED_HINT}") from error
    # What is no .npz file can raise any exception.
    except Exception as error:
        raise ValueError(f"{field} cannot be read: {_reason(error)}. {_RELABELED_HINT}") from error
    if missing:
        raise ValueError(f"{field} must hold an array {max(missing)!r}. {_RELABELED_HINT}")
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise ValueError(
            f"{field} must hold class numbers, one per example, got {given.dtype} of shape "
            f"{given.shape}."
        )
    if given.shape != tuple(labels.given.shape) or classes != labels.classes:
        raise ValueError(
            f"{field} must hold labels of this data, {len(labels.given)} examples of "
            f"{len(labels.classes)} classes, got {len(given)} of {len(classes)}."
        )
    if names and isinstance(inputs, Files) and names != digest_names(inputs):
        raise ValueError(
            f"{field} must be made for the same files, but files were renamed, moved or replaced. "
            "Put them back, or audit a new run on them."
        )
    return torch.from_numpy(given.astype(np.int64))


def digest_inputs(inputs: Inputs) -> str:
    """SHA-256 of arrays, or of the names and sizes of files: have the inputs changed?"""
    digest = hashlib.sha256()
    if isinstance(inputs, Files):
        for name in inputs.names:
            text = f"{name}\0{file_size(inputs, name)}\0"
            digest.update(text.encode(errors="surrogateescape"))
    else:
        digest.update(f"{inputs.dtype} {tuple(inputs.shape)}".encode())
        digest.update(inputs.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_names(inputs: Inputs) -> str:
    """SHA-256 of the names of files: is each number still the same file? Empty for arrays."""
    if not isinstance(inputs, Files):
        return ""
    return hashlib.sha256("\0".join(inputs.names).encode(errors="surrogateescape")).hexdigest()


def file_size(files: Files, name: str) -> int:
    """The size of a file in bytes, −1 if it does not exist."""
    try:
        return (files.root / name).stat().st_size
    except OSError:
        return -1


@contextmanager
def _opened(content: bytes) -> Iterator[Any]:
    """The arrays of a `labels.npz`; ValueError if the file is damaged."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            yield arrays
    # What is no .npz file can raise any exception.
    except Exception as error:
        raise ValueError(
            f"labels.npz cannot be read: {_reason(error)}. Start again in another folder."
        ) from error


def _reason(error: Exception) -> str:
    """The message in one line; numpy answers to most damage with the name of an argument."""
    reason = one_line(error)
    return "it is damaged or holds Python objects" if "allow_pickle" in reason else reason
