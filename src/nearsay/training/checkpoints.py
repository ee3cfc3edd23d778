"""The run folder: what one command leaves for the next, written so that no crash, full disk or second run can spoil it.

A file appears under its name only when it is whole: it is written beside under a temporary name, flushed to disk and
renamed. A checkpoint carries the SHA-256 of all it holds, and the newest one that is right wins.
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

COPY = "copy the run to another folder and use that"  # where a command writes beside what it reads
KEPT = 2  # checkpoints: the newest, and the one to fall back to
_TENSORS, _STATE = (
    "tensors.safetensors",
    "state.json",
)  # what a checkpoint holds beside its manifest
_LEFTOVER = re.compile(
    r"\.probe-\d+|\..+\.\d+\.partial|\.step-\d+\.partial"
)  # names that only we give


class Checkpoint(NamedTuple):
    """All that a training needs to go on as if nothing had happened."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]  # what JSON can hold: Any is its type
    damaged: tuple[str, ...] = ()  # newer checkpoints that had to be passed over, and why


@dataclass(frozen=True)
class Run:
    """A run folder that this process alone may write to; made by `open_run`."""

    path: Path
    _damaged: set[Path] = field(
        default_factory=set, init=False, repr=False, compare=False
    )  # as `load` has found

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """`name` in the folder, in one piece."""
        write_whole(
            self.path / name, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
        )

    def log_end(self) -> int:
        """Where the log ends, to be kept in a checkpoint."""
        log = self.path / "log.jsonl"
        return log.stat().st_size if log.exists() else 0

    def append_log(self, entry: Mapping[str, Any]) -> None:
        """One more line of `log.jsonl`."""
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with (
            _explained(self.path / "log.jsonl", len(line)),
            open(self.path / "log.jsonl", "ab") as log,
        ):
            log.write(line)

    def read_log(self, end: int | None = None) -> list[dict[str, Any]]:
        """The lines of `log.jsonl` that end before `end`; RunError if one of them is none of ours."""
        path = self.path / "log.jsonl"
        entries = []
        for number, line in enumerate(
            path.read_bytes()[:end].splitlines() if path.exists() else (), start=1
        ):
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError("it is no JSON object")
            except (ValueError, RecursionError) as error:
                told = f"line {number} of {path} cannot be read ({error})"
                raise RunError(
                    f"{told}; restore it, or start again in another folder", BAD_DATA
                ) from error
            entries.append(entry)
        return entries

    def cut_log(self, end: int) -> None:
        """Forget what was logged after the checkpoint from which the run goes on; RunError if some of it is missing."""
        if self.log_end() < end:
            raise RunError(
                f"{self.path / 'log.jsonl'} has {self.log_end()} bytes, but {end} were written before the checkpoint; "
                "restore it, or start again in another folder",
                BAD_DATA,
            )
        self.read_log(end)  # rather now than after the last step
        if self.log_end() > end:
            with _explained(self.path / "log.jsonl"):
                os.truncate(self.path / "log.jsonl", end)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint; older ones go only after this one has been read back and found right."""
        folder = self.path / "checkpoints"
        final, draft = folder / _name(step), folder / f".{_name(step)}.partial"
        whole = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()
        }
        files = {
            _TENSORS: safetensors.torch.save(whole),
            _STATE: json.dumps(state, ensure_ascii=False).encode(),
        }
        files["manifest.json"] = _manifest(step, files)
        need = sum(map(len, files.values()))
        try:
            with _explained(final, need):
                folder.mkdir(exist_ok=True)
                self._flush_log()
                free = shutil.disk_usage(folder).free
                if free < need:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                for name, content in files.items():
                    _write_flushed(draft / name, content)
                flush_folder(draft)
                if (
                    final.exists()
                ):  # the same step was reached before the crash that brought us back
                    shutil.rmtree(final)
                draft.rename(final)
                flush_folder(folder)
                read(final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._damaged.discard(final)
        kept = [path for path in self.checkpoints() if path not in self._damaged][:KEPT]
        for old in self.checkpoints():
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def _flush_log(self) -> None:
        """No checkpoint is on the disk before the lines of the log that it counts on, or power may fail in between."""
        if (self.path / "log.jsonl").exists():
            with open(self.path / "log.jsonl", "rb") as log:
                os.fsync(log.fileno())
        flush_folder(self.path)

    def checkpoints(self) -> list[Path]:
        """Folders of checkpoints, right or damaged, the newest first; RunError if nobody can tell which there are."""
        folder = self.path / "checkpoints"
        try:
            names = os.listdir(folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not folder.is_symlink():
                return []
            reason = (
                "the link leads nowhere" if isinstance(error, FileNotFoundError) else error.strerror
            )
            raise RunError(
                f"cannot look into {folder}: {reason}; nothing was changed", IO_FAILED
            ) from error
        found = [name for name in names if re.fullmatch("step-[0-9]+", name)]
        return [folder / name for name in sorted(found, key=lambda name: -int(name[5:]))]

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is right, None if there is none at all; RunError (65) if all are damaged."""
        damaged: list[str] = []
        for path in self.checkpoints():
            try:
                return read(path)._replace(damaged=tuple(damaged))
            except (OSError, ValueError) as error:
                damaged.append(f"{path.name}: {error}")
                self._damaged.add(path)
        if damaged:
            raise RunError(
                f"no checkpoint in {self.path} can be used ({'; '.join(damaged)}); nothing was deleted, "
                "restore one of them or start again in another folder",
                BAD_DATA,
            )
        return None


@contextmanager
def open_run(path: Path, *, cure: str = "choose another folder with --out") -> Iterator[Run]:
    """The folder, made if need be, writable and locked; RunError, with a cure, if it cannot be.

    What was made here is removed again if an error comes before the folder is that of a run.
    """
    try:
        str(path).encode()  # or what is written there could not be read again
        made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        _write_flushed(probe, b"")
        probe.unlink(missing_ok=True)  # who holds the lock may have cleared it away
    except OSError as error:
        raise RunError(
            f"cannot write into {path}: {error.strerror}; {cure}", CANNOT_CREATE
        ) from error
    except UnicodeEncodeError as error:
        raise RunError(
            f"cannot write into {path}: its name is not UTF-8; {cure}", CANNOT_CREATE
        ) from error
    _check_written_in_place(path)
    is_first = not (path / ".lock").exists()
    with _explained(path / ".lock"):
        opened = open(path / ".lock", "a+b", buffering=0)  # noqa: SIM115  # nothing is left to be written on closing
    with opened as lock:
        _take(lock, path, cure)
        try:
            _clear(path)
            yield Run(path)
        except BaseException:
            with suppress(OSError):  # it is in nobody's way
                if is_first and not (path / "experiment.json").exists():
                    (path / ".lock").unlink()
                    for each in made:
                        each.rmdir()
            raise
        finally:
            lock.truncate(0)


def write_whole(path: Path, content: bytes) -> None:
    """The file with this content, or as it was before."""
    with _explained(path, len(content)), draft_of(path) as draft:
        _write_flushed(draft, content)
        draft.replace(path)
        flush_folder(path.parent)


def read(path: Path) -> Checkpoint:
    """A checkpoint of which every byte is as it was written; ValueError says what is not."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        step, hashes, seal = manifest["step"], manifest["sha256"], manifest["seal"]
        if not isinstance(step, int) or not isinstance(hashes, dict):
            raise TypeError("it does not say which files are in it")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("its manifest cannot be read") from error
    if seal != _seal(step, hashes):
        raise ValueError("its manifest is damaged")
    if path.name != _name(step):
        raise ValueError(f"it is the checkpoint of step {step} under another name")
    if hashes.keys() != {_TENSORS, _STATE}:  # a name could lead anywhere
        raise ValueError("its manifest names other files than a checkpoint has")
    contents = {}
    for name, expected in hashes.items():
        contents[name] = (path / name).read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise ValueError(f"{name} is damaged")
    try:
        return Checkpoint(
            step, safetensors.torch.load(contents[_TENSORS]), json.loads(contents[_STATE])
        )
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError("it holds something else than tensors and their state") from error


def _check_written_in_place(path: Path) -> None:
    """Refuse a folder in which what is written to in place is no file of its own: a link may lead to anybody's."""
    for name in (".lock", "log.jsonl"):
        found = path / name
        if os.path.lexists(found) and (found.is_symlink() or not found.is_file()):
            raise RunError(
                f"{found} is a link, or no regular file, and would be written to; remove it",
                CANNOT_CREATE,
            )


def _take(lock: IO[bytes], path: Path, cure: str) -> None:
    """Lock the open file; the lock goes with the process, and forked workers do not inherit it."""
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


def _clear(path: Path) -> None:
    """Remove what processes that were killed have left under temporary names."""
    for leftover in (*path.glob(".*"), *path.glob("*/.*.partial")):
        if not _LEFTOVER.fullmatch(leftover.name):
            continue
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with suppress(OSError):  # it is in nobody's way
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
    """A new name is on the disk only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path, need: int = 0) -> Iterator[None]:
    """Turn what the system says of a failed write into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(
                path.parent if path.parent.exists() else path.parent.parent
            ).free
            raise RunError(
                f"the disk is full: {path} needs {need} bytes and {free} are free; what was saved before is kept",
                IO_FAILED,
            ) from error
        raise RunError(
            f"cannot write {path}: {error.strerror}; what was saved before is kept", IO_FAILED
        ) from error
