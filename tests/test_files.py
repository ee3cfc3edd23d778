import fcntl
import os
import signal
import subprocess
import sys

import pytest

from nearsay.data import tables
from nearsay.files import draft_of
from nearsay.training.checkpoints import write_whole


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
@pytest.mark.parametrize("name", ["t.csv", "[t]*.csv", f"{'t' * 250}.csv"])
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


def test_drafts_of_processes_that_have_one_number_on_two_machines_differ(tmp_path):
    with draft_of(tmp_path / "t.csv") as one, draft_of(tmp_path / "t.csv") as other:
        assert one != other
        assert one.exists()
        assert other.exists()


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
    names = [
        ".t.csv.partial",
        ".t.csv.mine.partial",
        ".t.csv.12.partial.old",
        ".t.csv.gz.12.partial",
        "t.csv.12.partial",
    ]
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
from nearsay import tables
found = nearsay.audit([0, 1] * 10, features=[[1.0, 0.1 * i] for i in range(20)])
tables.write(sys.argv[1], {"score": found.scores.tolist()})
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "scores.csv")], check=True)
    assert os.listdir(tmp_path) == ["scores.csv"]
    assert len(tables.read(tmp_path / "scores.csv").columns["score"]) == 20
