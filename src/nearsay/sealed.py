"""Tensors in a safetensors file that carries the SHA-256 of each, so that no flipped bit is taken for a value."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_SEAL = "sha256"  # what the file says of its tensors; one entry, as safetensors keeps no order of several


def pack_sealed(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of the file."""
    seals = {name: _digest(tensor) for name, tensor in sorted(tensors.items())}
    return safetensors.torch.save(dict(tensors), {_SEAL: json.dumps(seals)})


def load_sealed(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """All tensors of a file, or these; SafetensorError if one is not as it was written.

    Files of others, and of runs before there were seals, have none and are taken as they are.
    """
    with safe_open(path, framework="pt") as file:
        sealed, written = [*file.keys()], (file.metadata() or {}).get(_SEAL)
        tensors = {name: file.get_tensor(name) for name in (sealed if names is None else names)}
    if written is None:
        return tensors
    try:
        seals = json.loads(written)
        changed = [name for name, tensor in tensors.items() if seals[name] != _digest(tensor)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SafetensorError("it is damaged") from error
    if changed or seals.keys() != {*sealed}:
        raise SafetensorError(f"it is damaged{f' in {changed[0]}' if changed else ''}")
    return tensors


def _digest(tensor: Tensor) -> str:
    """Of the numbers, their type and their order."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
