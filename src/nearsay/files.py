"""Files that appear whole or not at all, and tensors in files that show when a bit was flipped.

A file is written under a draft name, `.NAME.NUMBER.partial`, and renamed when it is whole. A draft
that a killed process has left is removed by the next writer. A sealed file is a safetensors file
with the SHA-256 of each tensor in its metadata.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

try:
    import fcntl
except ImportError:
    # Windows has no fcntl; drafts then have no locks, and none is removed.
    fcntl = None  # type: ignore[assignment]

# One entry of the metadata holds all digests, because safetensors keeps no order of several.
_DIGESTS = "sha256"


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A draft beside `path`, to be written and renamed to it; it is removed if it was not renamed.

    The process holds a lock on its draft. A draft without a lock was left by a killed process.
    """
    # A long name is cut, so that the name of the draft is not too long for the file system.
    start = f".{path.name[:100]}."
    # The number is random, because processes on two machines may have the same process id.
    draft = path.with_name(f"{start}{secrets.randbits(31)}.partial")
    # A draft that cannot be removed does no harm.
    with suppress(OSError):
        for name in os.listdir(path.parent):
            if re.fullmatch(re.escape(start) + r"\d+\.partial", name):
                _remove_if_left(path.with_name(name))
    with nullcontext() if fcntl is None else _locked(draft):
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def _locked(draft: Path) -> Iterator[None]:
    """Create the file and hold its lock; tried again if another process removed it in between."""
    while True:
        with draft.open("ab") as file:
            # Some file systems have no locks; drafts there are never removed by others.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if draft.exists():
                yield
                return


def _remove_if_left(draft: Path) -> None:
    if fcntl is None:
        return
    with suppress(OSError), draft.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.unlink()


def pack_sealed(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a sealed file."""
    digests = {name: _digest(tensor) for name, tensor in sorted(tensors.items())}
    return safetensors.torch.save(dict(tensors), {_DIGESTS: json.dumps(digests)})


def load_sealed(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """All tensors of a file, or those of `names`; SafetensorError if one differs from its digest.

    A file without digests, made elsewhere or by an early version, is not checked.
    """
    with safe_open(path, framework="pt") as file:
        all_names = [*file.keys()]
        metadata = file.metadata() or {}
        wanted = all_names if names is None else names
        tensors = {name: file.get_tensor(name) for name in wanted}
    if _DIGESTS not in metadata:
        return tensors
    try:
        digests = json.loads(metadata[_DIGESTS])
        changed = [name for name, tensor in tensors.items() if digests[name] != _digest(tensor)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SafetensorError("it is damaged") from error
    if changed or digests.keys() != {*all_names}:
        raise SafetensorError(f"it is damaged{f' in {changed[0]}' if changed else ''}")
    return tensors


def _digest(tensor: Tensor) -> str:
    """SHA-256 of the numbers, their dtype and their shape."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
