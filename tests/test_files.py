"""Drafts of files that are written whole, and tensors with digests."""

import fcntl
import os
import random
import signal
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch.testing import assert_close

from nearsay.data import tables
from nearsay.files import draft_of, load_sealed, pack_sealed
from nearsay.training.checkpoints import write_whole

TENSORS = {
    "weight": torch.arange(12.0).view(3, 4).T,
    "half": torch.tensor([1.5, -2.0]).to(torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0, 5),
}
WHOLE = {name: tensor.contiguous() for name, tensor in TENSORS.items()}


def write_table(path, content):
    tables.write(path, {"a": [content]})


def write_bytes(path, content):
    write_whole(path, content.encode())


def killed_while_writing(path):
    """A process that has a draft of the file, and then no time to remove it."""
    child = os.fork()
    if not child:
        with draft_of(path) as draft:
            draft.write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize("write", [write_table, write_bytes])
@pytest.mark.parametrize("name", ["[t]*.csv", f"{'t' * 250}.csv"])
def test_what_a_killed_process_has_left_goes_when_the_file_is_written_again(tmp_path, write, name):
    path = tmp_path / name
    killed_while_writing(path)
    assert [each.suffix for each in tmp_path.iterdir()] == [".partial"]
    write(path, "whole")
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("write", [write_table, write_bytes])
def test_the_draft_of_a_process_that_lives_stays(tmp_path, write):
    path, (waits, go_on), (told, tell) = tmp_path / "t.csv", os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        with draft_of(path) as draft:
            draft.write_bytes(b"a\nof the other\n")
            os.write(tell, b".")
            os.read(waits, 1)
            draft.replace(path)
        os._exit(0)
    os.read(told, 1)
    write(path, "mine")
    assert "mine" in path.read_text()
    os.write(go_on, b".")
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_text() == "a\nof the other\n"
    assert [*tmp_path.iterdir()] == [path]


def test_a_draft_that_was_taken_for_left_behind_before_it_was_locked_is_made_again(
    tmp_path, monkeypatch
):
    real, taken = fcntl.flock, []

    def flock(file, operation):
        if not taken:
            taken.append(os.unlink(file.name))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with draft_of(tmp_path / "t.csv") as draft:
        write_table(tmp_path / "t.csv", "of another process")
        draft.replace(tmp_path / "t.csv")
    assert taken
    assert (tmp_path / "t.csv").read_bytes() == b""


def test_nothing_else_is_removed(tmp_path):
    names = [".t.csv.partial", ".t.csv.mine.partial", ".t.csv.12.partial.old"]
    names += [".t.csv.gz.12.partial", "t.csv.12.partial"]
    for name in names:
        (tmp_path / name).write_text("precious")
    write_table(tmp_path / "t.csv", "whole")
    assert {each.name for each in tmp_path.iterdir()} == {*names, "t.csv"}


def test_arrays_are_audited_and_tables_written_where_files_have_no_such_locks(tmp_path):
    """As on Windows, which has no fcntl."""
    code = """
import sys
sys.modules["fcntl"] = None
import nearsay
from nearsay.data import tables
result = nearsay.audit([0, 1] * 10, features=[[1.0, 0.1 * i] for i in range(20)])
tables.write(sys.argv[1], {"score": result.scores.tolist()})
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "scores.csv")], check=True)
    assert os.listdir(tmp_path) == ["scores.csv"]
    assert len(tables.read(tmp_path / "scores.csv").columns["score"]) == 20


def test_tensors_come_back_as_they_were(tmp_path):
    (tmp_path / "t").write_bytes(pack_sealed(WHOLE))
    assert_close(load_sealed(tmp_path / "t"), WHOLE, rtol=0, atol=0)
    assert_close(
        load_sealed(tmp_path / "t", ("count",)), {"count": torch.tensor(7)}, rtol=0, atol=0
    )
    assert_close(safetensors.torch.load_file(tmp_path / "t"), WHOLE, rtol=0, atol=0)


def test_a_file_without_digests_is_read_as_it_is(tmp_path):
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file(WHOLE, tmp_path / "t", metadata)
        assert_close(load_sealed(tmp_path / "t"), WHOLE, rtol=0, atol=0)


def test_no_flipped_bit_is_taken_for_a_value(tmp_path):
    sound, draw, messages = pack_sealed(WHOLE), random.Random(0), []
    places = range(0, len(sound), 3)
    for place in places:
        content = bytearray(sound)
        content[place] ^= 1 << draw.randrange(8)
        (tmp_path / "t").write_bytes(content)
        try:
            tensors = load_sealed(tmp_path / "t")
        except SafetensorError as error:
            messages.append(str(error))
        else:
            # Only the name of the metadata entry may change unnoticed.
            assert_close(tensors, WHOLE, rtol=0, atol=0)
    assert len(messages) > 0.95 * len(places)
    assert "it is damaged in weight" in messages


def test_damaged_digests_are_reported_when_only_a_part_is_read(tmp_path):
    content = pack_sealed(WHOLE)
    (tmp_path / "t").write_bytes(content.replace(b'\\"half\\"', b'\\"hair\\"'))
    with pytest.raises(SafetensorError, match="it is damaged"):
        load_sealed(tmp_path / "t", ("count",))


def test_the_same_tensors_are_always_the_same_bytes():
    orders = ("cadb", "abcd") * 9
    assert len({pack_sealed({name: torch.ones(3) for name in names}) for names in orders}) == 1
