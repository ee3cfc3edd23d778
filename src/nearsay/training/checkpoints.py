"""Checkpoints, and the lock and the files of a run folder, written so that no crash can spoil them.

A file appears under its name only when it is whole: it is written beside it under a temporary name,
flushed to disk and renamed. A checkpoint holds the SHA-256 of its content, and the newest one that
is undamaged is loaded. The lock of a folder keeps a second process out.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from nearsay.errors import BAD_DATA, CANNOT_CREATE, IO_FAILED, LOCKED, RunError
from nearsay.files import draft_of

# The cure if a command cannot write into the folder that it reads.
COPY = "copy the run to another folder and use that"
# Checkpoints to keep: the newest, and the one before in case the newest is damaged.
_NUM_KEPT = 2
# The files of a checkpoint beside its manifest.
_TENSORS, _STATE = "tensors.safetensors", "state.json"
# Temporary names that only this module gives.
_LEFTOVER = re.compile(r"\.probe-\d+|\..+\.\d+\.partial|\.step-\d+\.partial")


class Checkpoint(NamedTuple):
    """Everything that a training needs to continue as if it had not been interrupted."""

    step: int
    tensors: dict[str, Tensor]
    # What JSON can hold.
    state: dict[str, Any]
    # Newer checkpoints that are damaged, with the reason.
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class LockedRun:
    """A run folder that this process has locked for writing; made by `open_run`."""

    path: Path
    # Checkpoints that `load` could not read.
    _damaged: set[Path] = field(default_factory=set, init=False, repr=False, compare=False)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write `name` in the folder, whole or not at all."""
        content = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
        write_whole(self.path / name, content)

    @property
    def log(self) -> Path:
        """The log, one line of JSON per epoch."""
        return self.path / "log.jsonl"

    def log_end(self) -> int:
        """The size of the log, for a checkpoint."""
        return self.log.stat().st_size if self.log.exists() else 0

    def append_log(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with _explained(self.log, len(line)), open(self.log, "ab") as file:
            file.write(line)

    def read_log(self, end: int | None = None) -> list[dict[str, Any]]:
        """The lines of the log before byte `end`; RunError if one is not a JSON object."""
        content = self.log.read_bytes()[:end] if self.log.exists() else b""
        entries = []
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError("it is not a JSON object")
            except (ValueError, RecursionError) as error:
                raise RunError(
                    f"line {number} of {self.log} cannot be read: {error}. "
                    "Restore the file, or start again in another folder.",
                    BAD_DATA,
                ) from error
            entries.append(entry)
        return entries

    def cut_log(self, end: int) -> None:
        """Remove what was logged after a checkpoint; RunError if lines before it are missing."""
        if self.log_end() < end:
            raise RunError(
                f"{self.log} must have {end} bytes or more, as at the last checkpoint, got "
                f"{self.log_end()}. Restore it, or start again in another folder.",
                BAD_DATA,
            )
        # Find damage now and not after the last step.
        self.read_log(end)
        if self.log_end() > end:
            with _explained(self.log):
                os.truncate(self.log, end)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint; older ones are removed after this one was read back and is right."""
        folder = self.path / "checkpoints"
        final, draft = folder / _name(step), folder / f".{_name(step)}.partial"
        # Clones, because tensors may share memory, which safetensors refuses.
        copies = {name: part.detach().cpu().contiguous().clone() for name, part in tensors.items()}
        files = {
            _TENSORS: safetensors.torch.save(copies),
            _STATE: json.dumps(state, ensure_ascii=False).encode(),
        }
        files["manifest.json"] = _manifest(step, files)
        need = sum(map(len, files.values()))
        try:
            with _explained(final, need):
                folder.mkdir(exist_ok=True)
                self._flush_log()
                if shutil.disk_usage(folder).free < need:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                for name, content in files.items():
                    _write_flushed(draft / name, content)
                flush_folder(draft)
                # The same step was reached before the crash from which the run resumed.
                if final.exists():
                    shutil.rmtree(final)
                draft.rename(final)
                flush_folder(folder)
                read(final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._damaged.discard(final)
        self._remove_old()
        return final

    def _remove_old(self) -> None:
        """Remove all checkpoints but the newest; damaged ones do not count among those."""
        num_sound = 0
        for path in self.checkpoints():
            is_sound = path not in self._damaged
            num_sound += is_sound
            if not is_sound or num_sound > _NUM_KEPT:
                shutil.rmtree(path, ignore_errors=True)

    def _flush_log(self) -> None:
        """Put the log on the disk before the checkpoint that needs it, in case power fails."""
        if self.log.exists():
            with open(self.log, "rb") as file:
                os.fsync(file.fileno())
        flush_folder(self.path)

    def checkpoints(self) -> list[Path]:
        """The folders of checkpoints, damaged or not, the newest first."""
        folder = self.path / "checkpoints"
        try:
            names = os.listdir(folder)
        except OSError as error:
            reason = error.strerror
            if isinstance(error, FileNotFoundError):
                if not folder.is_symlink():
                    return []
                reason = "the target of the link does not exist"
            raise RunError(
                f"{folder} cannot be read: {reason}. Nothing was changed.", IO_FAILED
            ) from error
        steps = [name for name in names if re.fullmatch("step-[0-9]+", name)]
        return [folder / name for name in sorted(steps, key=lambda name: -int(name[5:]))]

    def load(self) -> Checkpoint | None:
        """The newest undamaged checkpoint, None if there is none; RunError if all are damaged."""
        damaged: list[str] = []
        for path in self.checkpoints():
            try:
                return read(path)._replace(damaged=tuple(damaged))
            except (OSError, ValueError) as error:
                damaged.append(f"{path.name}: {error}")
                self._damaged.add(path)
        if damaged:
            raise RunError(
                f"every checkpoint in {self.path} is damaged ({'; '.join(damaged)}). "
                "Restore one, or start again in another folder.",
                BAD_DATA,
            )
        return None


@contextmanager
def open_run(path: Path, *, cure: str = "choose another folder with --out") -> Iterator[LockedRun]:
    """Make the folder if needed, test that it is writable, and lock it; RunError with the cure.

    Folders that were made here are removed again if an error comes before a run is in them.
    """
    try:
        # A name that is not UTF-8 could be written into the run but not be read again.
        str(path).encode()
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        _write_flushed(probe, b"")
        # The process that holds the lock may have removed it.
        probe.unlink(missing_ok=True)
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is not UTF-8"
        raise RunError(f"cannot write into {path}: {reason}; {cure}", CANNOT_CREATE) from error
    _check_regular_files(path)
    is_first = not (path / ".lock").exists()
    with _explained(path / ".lock"):
        opened = open(path / ".lock", "a+b", buffering=0)  # noqa: SIM115
    with opened as lock:
        _take(lock, path, cure)
        try:
            _remove_leftovers(path)
            yield LockedRun(path)
        except BaseException:
            # What cannot be removed does no harm.
            with suppress(OSError):
                if is_first and not (path / "experiment.json").exists():
                    (path / ".lock").unlink()
                    for folder in made:
                        folder.rmdir()
            raise
        finally:
            lock.truncate(0)


def write_whole(path: Path, content: bytes) -> None:
    """Write the file, or leave it as it was."""
    with _explained(path, len(content)), draft_of(path) as draft:
        _write_flushed(draft, content)
        draft.replace(path)
        flush_folder(path.parent)


def read(path: Path) -> Checkpoint:
    """A checkpoint, checked byte by byte; ValueError says what is damaged."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        step, hashes, seal = manifest["step"], manifest["sha256"], manifest["seal"]
        if not isinstance(step, int) or not isinstance(hashes, dict):
            raise TypeError("step or sha256 has another type")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("its manifest cannot be read") from error
    if seal != _seal(step, hashes):
        raise ValueError("its manifest is damaged")
    if path.name != _name(step):
        raise ValueError(f"it is the checkpoint of step {step} under another name")
    # Another name could lead to any file.
    if hashes.keys() != {_TENSORS, _STATE}:
        raise ValueError("its manifest names other files than a checkpoint has")
    contents = {}
    for name, expected in hashes.items():
        contents[name] = (path / name).read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise ValueError(f"{name} is damaged")
    try:
        tensors, state = safetensors.torch.load(contents[_TENSORS]), json.loads(contents[_STATE])
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError("it holds something else than tensors and their state") from error
    return Checkpoint(step, tensors, state)


def _check_regular_files(path: Path) -> None:
    """Refuse links as files that are written in place: they may lead to any file."""
    for name in (".lock", "log.jsonl"):
        file = path / name
        if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
            raise RunError(f"{file} must be a regular file. Remove it.", CANNOT_CREATE)


def _take(lock: IO[bytes], path: Path, cure: str) -> None:
    """Lock the open file. The lock ends with the process; forked workers do not inherit it."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().decode(errors="replace").strip() or "another process"
        raise RunError(f"{path} is in use by {owner}; wait for it, or {cure}", LOCKED) from error
    lock.seek(0)
    if not re.match(b"process |$", lock.read(8)):
        raise RunError(f"{path / '.lock'} was not written by nearsay; {cure}", CANNOT_CREATE)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    with _explained(path / ".lock", len(owner)):
        lock.truncate(0)
        lock.write(owner.encode())


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files that killed processes have left."""
    for leftover in (*path.glob(".*"), *path.glob("*/.*.partial")):
        if not _LEFTOVER.fullmatch(leftover.name):
            continue
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            # What cannot be removed does no harm.
            with suppress(OSError):
                leftover.unlink()


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _manifest(step: int, files: Mapping[str, bytes]) -> bytes:
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return json.dumps({"step": step, "sha256": hashes, "seal": _seal(step, hashes)}).encode()


def _seal(step: int, hashes: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([step, sorted(hashes.items())]).encode()).hexdigest()


def _write_flushed(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush the names in a folder: a new file is on the disk only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path, need: int = 0) -> Iterator[None]:
    """Turn the error of a failed write into a RunError with the reason."""
    try:
        yield
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = path.parent if path.parent.exists() else path.parent.parent
            free = shutil.disk_usage(place).free
            reason = f"the disk is full: {path} needs {need} bytes and {free} are free"
        raise RunError(f"{reason}. What was saved before is kept.", IO_FAILED) from error
