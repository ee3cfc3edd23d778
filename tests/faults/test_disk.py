"""A disk that is full or closed: a run says so before it begins, or keeps what it has, and goes on when it can."""

import errno
import os
import re
import shutil
import subprocess
from collections import Counter
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from faults.jobs import INTERVAL, assert_same, last_checkpoint, words_of
from nearsay.cli import main
from nearsay.training import checkpoints as runs
from nearsay.training import loop as trains


def command(folder):
    return ["train", *words_of("ncr"), "--out", str(folder), "--quiet"]


def fill_after(monkeypatch, num_files, *, kind):
    """Let so many files be written and no more: the disk is full before the next, or in the middle of it."""
    write, usage, written = runs._write_flushed, shutil.disk_usage, []

    def limited(path, content):
        written.append(path)
        if len(written) > num_files:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    def used(path):
        return usage(path)._replace(
            free=0 if kind == "before" and len(written) >= num_files else 10**9
        )

    monkeypatch.setattr(runs, "_write_flushed", limited)
    monkeypatch.setattr(runs.shutil, "disk_usage", used)


@pytest.mark.parametrize(("kind", "num_files"), [("before", 12), ("in the middle", 16)])
def test_a_full_disk_ends_a_run_that_then_goes_on(
    whole, tmp_path, monkeypatch, capsys, kind, num_files
):
    fill_after(monkeypatch, num_files, kind=kind)
    assert main(command(tmp_path / "run")) == 74
    assert f"{tmp_path / 'run' / 'checkpoints' / 'step-'}" in capsys.readouterr().err
    monkeypatch.undo()
    # The probe, the labels and the experiment come first; a checkpoint is three files.
    saves = (num_files - 3) // 3
    assert last_checkpoint(tmp_path / "run") == saves * INTERVAL
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert main(command(tmp_path / "run")) == 0
    assert_same(tmp_path / "run", whole("ncr"))


def test_a_log_that_cannot_be_written_ends_a_run_that_then_goes_on(
    whole, tmp_path, monkeypatch, capsys
):
    write, entries = runs.LockedRun.append_log, []

    def limited(self, entry):
        entries.append(entry)
        with runs._explained(self.path / "log.jsonl"):
            if len(entries) == 3:
                with open(self.path / "log.jsonl", "ab") as log:
                    log.write(b'{"epoch": 3.0, "st')
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, entry)

    monkeypatch.setattr(runs.LockedRun, "append_log", limited)
    assert main(command(tmp_path / "run")) == 74
    assert "log.jsonl" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(command(tmp_path / "run")) == 0
    assert_same(tmp_path / "run", whole("ncr"))


@contextmanager
def disk_of(num_bytes, folder):
    """A real disk of that size, and how to make it larger."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", folder], capture_output=True
    )
    if made.returncode:
        pytest.skip("only root may make a small disk")
    try:
        yield lambda larger: subprocess.run(
            ["mount", "-o", f"remount,size={larger}", folder], check=True
        )
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_disks_of_all_sizes_lose_nothing_when_they_are_full(server, whole, tmp_path):
    newest = runs.LockedRun(whole("ncr")).checkpoints()[0]
    one = sum(path.stat().st_size for path in newest.iterdir())
    codes = Counter()
    for tenths in range(10, 35):
        with disk_of(one * tenths // 10, tmp_path / str(tenths)) as grow:
            folder = tmp_path / str(tenths) / "run"
            job = server.start(folder, *words_of("ncr"))
            code = job.end()
            codes[code] += 1
            assert code == 74, job.said
            assert "error: the disk is full" in job.said
            assert not [path for path in folder.rglob(".*") if path.name != ".lock"]
            # The labels take some room, too.
            assert last_checkpoint(folder) > 0 or tenths < 13
            grow("64m")
            server.finish(folder, *words_of("ncr"))
            assert_same(folder, whole("ncr"))
    print(f"exit codes on full disks: {dict(codes)}")


def test_a_disk_that_is_full_to_the_last_byte_is_told_with_the_file(whole, tmp_path, capsys):
    np.save(tmp_path / "one.npy", np.zeros((1, 32), dtype=np.float32))
    with disk_of(2**20, tmp_path / "full"):
        folder = tmp_path / "full" / "run"
        shutil.copytree(whole("ncr"), folder, ignore=shutil.ignore_patterns("checkpoints"))
        with suppress(OSError), open(tmp_path / "full" / "filling", "wb", buffering=0) as filling:
            while True:
                filling.write(bytes(512))
        out = tmp_path / "full" / "new"
        for words, file in (
            (command(folder), folder / ".lock"),
            (command(out), out / ".lock"),
            (["audit", str(folder)], folder / ".lock"),
        ):
            assert main(words) == 74
            assert re.search(f"{file} .*[1-9][0-9]* bytes and 0 ", capsys.readouterr().err)
        assert main(["sweep", "toy", "seed=0,1", "--out", str(out)]) == 74
        assert str(out / "sweep.csv") in capsys.readouterr().err
        table = tmp_path / "full" / "table.csv"
        assert main(["predict", str(folder), str(tmp_path / "one.npy"), "--out", str(table)]) == 74
        assert str(table) in capsys.readouterr().err


def refuse(*_):
    raise AssertionError("training has begun")


def test_a_folder_that_cannot_be_is_told_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trains, "_Training", refuse)
    (tmp_path / "file").write_text("mine")
    assert main(command(tmp_path / "file" / "run")) == 73
    assert f"{tmp_path / 'file' / 'run'}: Not a directory" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_read_only_is_told_before_training(tmp_path, monkeypatch, capsys):
    def closed(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(trains, "_Training", refuse)
    monkeypatch.setattr(runs, "_write_flushed", closed)
    assert main(command(tmp_path / "run")) == 73
    assert "Read-only file system" in capsys.readouterr().err
