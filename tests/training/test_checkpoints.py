import errno
import json
import os
import random
import shutil
import signal

import pytest
import torch
from torch.testing import assert_close

from nearsay.errors import RunError
from nearsay.training import checkpoints as runs
from nearsay.training.checkpoints import open_run


def tensors_of(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(40, 30, generator=generator),
        "step": torch.tensor(step),
        "mask": torch.rand(17, generator=generator) > 0.5,
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
    }


def state_of(step):
    return {"epoch": step / 10, "log_end": 12, "name": "Käse"}


def save(run, *steps):
    for step in steps:
        run.save(step, tensors_of(step), state_of(step))


def assert_is(checkpoint, step):
    assert checkpoint.step == step
    assert checkpoint.state == state_of(step)
    assert_close(checkpoint.tensors, tensors_of(step), rtol=0, atol=0)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    with open_run(tmp_path / "new" / "run") as run:
        assert run.load() is None
        save(run, 7)
        assert_is(run.load(), 7)


def test_the_newest_two_are_kept(tmp_path):
    with open_run(tmp_path) as run:
        save(run, 1, 20, 3, 100, 99)
        assert [path.name for path in run.checkpoints()] == ["step-00000100", "step-00000099"]
        assert_is(run.load(), 100)


def test_what_is_damaged_is_not_counted_among_those_that_are_kept(tmp_path):
    with open_run(tmp_path) as run:
        save(run, 10, 20)
        (run.checkpoints()[0] / "tensors.safetensors").write_bytes(b"x")
        assert_is(run.load(), 10)
        save(run, 25)
        assert [path.name for path in run.checkpoints()] == ["step-00000025", "step-00000010"]
        (run.checkpoints()[0] / "tensors.safetensors").write_bytes(b"x")
        assert_is(run.load(), 10)
        # Again, and whole this time.
        save(run, 25)
        save(run, 30)
        assert [path.name for path in run.checkpoints()] == ["step-00000030", "step-00000025"]


def test_older_ones_stay_if_what_is_written_does_not_come_back(tmp_path, monkeypatch):
    real = runs._write_flushed

    def spoiled(path, content):
        real(
            path,
            content[:-1] + bytes([content[-1] ^ 1])
            if path.name == "tensors.safetensors"
            else content,
        )

    with open_run(tmp_path) as run:
        save(run, 1, 2)
        monkeypatch.setattr(runs, "_write_flushed", spoiled)
        with pytest.raises(ValueError, match=r"tensors\.safetensors"):
            save(run, 3)
        monkeypatch.undo()
        assert {"step-00000001", "step-00000002"} <= {path.name for path in run.checkpoints()}
        assert_is(run.load(), 2)


def test_views_and_shared_memory_are_saved(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    with open_run(tmp_path) as run:
        run.save(1, {"a": base, "b": base.T, "c": base[:, 1]}, {})
        loaded = run.load().tensors
    assert_close(loaded, {"a": base, "b": base.T.contiguous(), "c": base[:, 1].contiguous()})


def damage(path, kind, draw):
    """One way of spoiling a checkpoint; says what was done."""
    file = path / draw.choice(["tensors.safetensors", "state.json", "manifest.json"])
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    if kind == "flip":
        content[place] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "zeros":
        content[place : place + 64] = bytes(len(content[place : place + 64]))
    elif kind == "missing":
        file.unlink()
        return f"{file.name} gone"
    file.write_bytes(content)
    return f"{kind} at {place} of {file.name}"


def check_damage(tmp_path, attempts):
    """No damaged byte is ever loaded: either the old checkpoint comes, or what comes is exactly right."""
    with open_run(tmp_path / "run") as run:
        save(run, 10, 20)
    draw = random.Random(0)
    sound = tmp_path / "sound"
    shutil.copytree(tmp_path / "run", sound)
    newest = tmp_path / "run" / "checkpoints" / "step-00000020"
    for attempt in range(attempts):
        before = {file.name: file.read_bytes() for file in newest.iterdir()}
        what = damage(
            newest, draw.choice(["flip", "flip", "flip", "cut", "zeros", "missing"]), draw
        )
        is_changed = {file.name: file.read_bytes() for file in newest.iterdir()} != before
        with open_run(tmp_path / "run") as run:
            checkpoint = run.load()
        assert_is(checkpoint, 10 if is_changed and checkpoint.damaged else 20)
        if is_changed:
            # A flip inside white space or a key of the manifest cannot change what is loaded: seals cover the rest.
            assert checkpoint.damaged or "manifest" in what, (attempt, what)
        shutil.rmtree(newest)
        shutil.copytree(sound / "checkpoints" / "step-00000020", newest)


def test_damage_is_never_loaded(tmp_path):
    check_damage(tmp_path, 60)


@pytest.mark.slow
def test_damage_is_never_loaded_in_ten_thousand_tries(tmp_path):
    check_damage(tmp_path, 10_000)


def test_swapped_files_and_names_are_noticed(tmp_path):
    with open_run(tmp_path) as run:
        save(run, 10, 20)
        old, new = run.checkpoints()[::-1]
        (old / "tensors.safetensors").rename(tmp_path / "x")
        shutil.copy(new / "tensors.safetensors", old / "tensors.safetensors")
        shutil.copy(tmp_path / "x", new / "tensors.safetensors")
        with pytest.raises(
            RunError, match=r"step-00000020: tensors.safetensors.*step-00000010"
        ) as caught:
            run.load()
        assert caught.value.code == 65
        shutil.rmtree(new)
        old.rename(new)
        shutil.copy(tmp_path / "x", new / "tensors.safetensors")
        with pytest.raises(RunError, match="step 10 "):
            run.load()
        # Nothing was deleted.
        assert new.exists()


def test_a_second_run_is_told_who_has_the_folder(tmp_path):
    ready, parent = os.pipe()
    child = os.fork()
    if not child:
        with open_run(tmp_path):
            os.write(parent, b"x")
            signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)
        with pytest.raises(RunError, match=f"process {child} ") as caught, open_run(tmp_path):
            pass
        assert caught.value.code == 75
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    # The lock goes with the process.
    with open_run(tmp_path):
        pass


def test_files_are_whole_or_as_before(tmp_path, monkeypatch):
    with open_run(tmp_path) as run:
        run.write_json("result.json", {"accuracy": 0.5})
        monkeypatch.setattr(
            runs.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error"))
        )
        with pytest.raises(RunError, match=r"result.json: I/O error"):
            run.write_json("result.json", {"accuracy": 0.9})
        monkeypatch.undo()
        assert '"accuracy": 0.5' in (tmp_path / "result.json").read_text()
        assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_the_log_is_on_the_disk_before_the_checkpoint_that_counts_on_it(tmp_path, monkeypatch):
    """After a loss of power a file is as long as when it was last flushed."""
    kept, fsync = {}, os.fsync

    def flush(descriptor):
        fsync(descriptor)
        found = os.fstat(descriptor)
        kept[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", flush)
    with open_run(tmp_path / "run") as run:
        run.append_log({"epoch": 1.0})
        run.append_log({"epoch": 2.0})
        final = run.save(7, tensors_of(7), {**state_of(7), "log_end": run.log_end()})
        monkeypatch.undo()
    assert kept[(final / "state.json").stat().st_ino] > 0
    assert kept.get((tmp_path / "run" / "log.jsonl").stat().st_ino, 0) == run.log_end()
    flushed = list(kept)
    assert flushed.index((run.path / "log.jsonl").stat().st_ino) < flushed.index(
        (final / "state.json").stat().st_ino
    )
    # And the names in both folders.
    assert {run.path.stat().st_ino, final.stat().st_ino} <= kept.keys()


def test_the_log_is_cut_to_where_the_checkpoint_stood(tmp_path):
    with open_run(tmp_path) as run:
        run.append_log({"step": 1})
        end = run.log_end()
        run.append_log({"step": 2})
        run.cut_log(end)
        run.append_log({"step": 3})
        assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'


def save_without_end(folder, pipe):
    """Save checkpoint after checkpoint; a byte goes into the pipe before each file is written."""
    write = runs._write_flushed

    def announced(path, content):
        os.write(pipe, b"x")
        write(path, content)

    runs._write_flushed = announced
    with open_run(folder) as run:
        checkpoint = run.load()
        step = checkpoint.step if checkpoint else 0
        while True:
            step += 1
            run.save(step, tensors_of(step), state_of(step))


def check_kills(tmp_path, attempts):
    """Kill a process that saves without end; afterwards there is always a whole checkpoint."""
    draw, last = random.Random(0), 0
    for _ in range(attempts):
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            save_without_end(tmp_path, write_end)
        os.close(write_end)
        # The kill follows an event, not a clock: the start of the n-th file. Opening a run writes
        # one file and a checkpoint three, so up to four checkpoints are whole by then.
        for _ in range(draw.randint(1, 14)):
            assert os.read(read_end, 1) == b"x"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read_end)
        with open_run(tmp_path) as run:
            checkpoint = run.load()
        assert not list(tmp_path.glob("checkpoints/.*"))
        if checkpoint is not None:
            assert_is(checkpoint, checkpoint.step)
            assert not checkpoint.damaged
            assert checkpoint.step >= last
            last = checkpoint.step
    assert last > 1


def test_a_kill_leaves_a_checkpoint_to_go_on_from(tmp_path):
    check_kills(tmp_path, 12)


@pytest.mark.slow
def test_two_hundred_kills_leave_a_checkpoint_to_go_on_from(tmp_path):
    check_kills(tmp_path, 200)


def test_a_folder_that_was_made_for_nothing_is_removed_again(tmp_path):
    with pytest.raises(ValueError, match="bad data"), open_run(tmp_path / "runs/new"):
        raise ValueError("bad data")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old/cat.jpg").write_text("of somebody else")
    with pytest.raises(ValueError, match="bad data"), open_run(tmp_path / "old"):
        raise ValueError("bad data")
    assert [each.name for each in (tmp_path / "old").iterdir()] == ["cat.jpg"]
    # This too.
    (tmp_path / "old/.lock").touch()
    with pytest.raises(ValueError, match="bad data"), open_run(tmp_path / "old"):
        raise ValueError("bad data")
    assert (tmp_path / "old/.lock").exists()
    (tmp_path / "old/.lock").unlink()
    (tmp_path / "old/experiment.json").write_text("")
    with pytest.raises(ValueError, match="bad data"), open_run(tmp_path / "old"):
        raise ValueError("bad data")
    assert (tmp_path / "old/.lock").exists()
    used = open_run(tmp_path / "used")
    (used.__enter__().path / "log.jsonl").write_text("")
    assert not used.__exit__(ValueError, ValueError("bad data"), None)
    assert (tmp_path / "used/log.jsonl").exists()


@pytest.mark.parametrize("kind", ["a link that leads nowhere", "a file"])
def test_checkpoints_that_cannot_be_reached_are_not_taken_for_none(tmp_path, kind):
    with open_run(tmp_path) as run:
        assert run.checkpoints() == []
        if kind == "a file":
            (tmp_path / "checkpoints").write_bytes(b"")
        else:
            (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
        with pytest.raises(RunError, match="checkpoints") as caught:
            run.load()
    assert caught.value.code == 74


@pytest.mark.parametrize("name", [".lock", "log.jsonl"])
def test_a_link_in_the_folder_of_another_leads_to_no_file_of_mine(tmp_path, name):
    (tmp_path / "mine.txt").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to("../mine.txt")
    with pytest.raises(RunError, match=name) as caught, open_run(tmp_path / "run"):
        pass
    assert caught.value.code == 73
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_folder_that_is_no_run_keeps_all_that_is_in_it(tmp_path):
    mine = [
        "movie.mkv.partial",
        ".movie.mkv.partial",
        "sub/.other.partial",
        ".folder.partial/file",
        ".probe-results",
    ]
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    left = [
        f".result.json.{os.getpid()}.partial",
        ".probe-123",
        "checkpoints/.step-00000007.partial/state.json",
    ]
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("of a run that was killed")
    with open_run(tmp_path):
        pass
    assert [name for name in mine if not (tmp_path / name).exists()] == []
    assert [name for name in left if (tmp_path / name).exists()] == []


def test_the_lock_of_another_program_is_left_as_it_is(tmp_path):
    (tmp_path / ".lock").write_text("pid 17")
    with pytest.raises(RunError, match=r"\.lock"), open_run(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "pid 17"


def sealed(hashes):
    return json.dumps({"step": 2, "sha256": hashes, "seal": runs._seal(2, hashes)})


def test_a_manifest_that_is_none_or_leads_elsewhere_is_a_damaged_one(tmp_path):
    outside = dict.fromkeys(["../../mine.txt", "tensors.safetensors", "state.json"], "0" * 64)
    no_step = '{"step": [], "sha256": {}, "seal": 3}'
    spoiled = {"tensors.safetensors": b"\xff" * 40, "state.json": b"[" * 100_000}
    whole_seal = runs._manifest(2, spoiled).decode()
    with open_run(tmp_path) as run:
        save(run, 1, 2)
        newest = run.checkpoints()[0]
        unsealed = json.dumps({**json.loads((newest / "manifest.json").read_text()), "seal": ""})
        broken = (unsealed, no_step, "[" * 100_000, sealed({}), sealed(outside))
        for manifest in (*broken, whole_seal):
            (newest / "manifest.json").write_text(manifest)
            if manifest == whole_seal:
                for name, content in spoiled.items():
                    (newest / name).write_bytes(content)
            found = run.load()
            assert_is(found, 1)
            assert len(found.damaged) == 1
