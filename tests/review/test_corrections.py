"""The file of decisions: nothing that was answered is lost, and no crash makes it unreadable."""

import builtins
import csv
import errno
import os
from pathlib import Path

import pytest
import torch

from nearsay.batch import Labels
from nearsay.errors import ChangedFile, RunError, TableError
from nearsay.label_issues.cleaning import clean_run
from nearsay.label_issues.corrections import DECISIONS, Corrections, Entry
from nearsay.training.run_folder import read_labels

NAMES = ("cat", 'a "dog", perhaps', "two\nlines", "=1+1", "ünïcode", " spaces ")
ROWS = [
    Entry(0, 1, "other"),
    Entry(1, 2, "accept"),
    Entry(2, 3, "keep"),
    Entry(3, -1, "drop"),
    Entry(4, 5, "other"),
]


def of_names():
    return Labels(torch.arange(6), None, NAMES)


def test_what_was_written_is_read_again(tmp_path):
    path = tmp_path / "corrections.csv"
    written = Corrections(path, of_names())
    # Looking decides nothing.
    assert not path.exists()
    for entry in ROWS:
        written.append(entry)
    assert Corrections(path, of_names()).entries == ROWS
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["index", "label", "decision"]
    assert rows[1:] == [
        [str(each.index), NAMES[each.label] if each.label >= 0 else "", each.decision]
        for each in ROWS
    ]


def test_a_file_that_ends_anywhere_keeps_all_whole_rows_and_takes_new_ones(tmp_path):
    path = tmp_path / "corrections.csv"
    whole = Corrections(path, of_names())
    ends = []
    for entry in ROWS:
        whole.append(entry)
        ends.append(path.stat().st_size)
    content = path.read_bytes()
    header = len(b"index,label,decision\n")
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        found = Corrections(path, of_names())
        # Only the line break may be missing.
        num_whole = sum(cut >= end - 1 for end in ends)
        assert found.entries == ROWS[:num_whole], cut
        assert bool(found.torn) == (
            cut not in (0, header - 1, header, *ends, *(end - 1 for end in ends))
        ), cut
        found.append(Entry(5, 0, "other"))
        assert Corrections(path, of_names()).entries == [*ROWS[:num_whole], Entry(5, 0, "other")], (
            cut
        )


def test_a_file_that_was_written_by_hand_is_kept_to_the_last_byte(tmp_path):
    path = tmp_path / "corrections.csv"
    by_hand = (
        "\ufeffdecision,index,label,why\nkeep,0,cat,looks right\n,1,cat,\n,2,,\n,3,=1+1,".encode()
    )
    path.write_bytes(by_hand)
    found = Corrections(path, of_names())
    assert found.entries == [Entry(0, 0, "keep"), Entry(1, 0, "other"), Entry(2, -1, "drop")]
    # Without a decision the row may be incomplete.
    assert found.torn == ",3,=1+1,"
    path.write_bytes(by_hand + b"\n")
    found = Corrections(path, of_names())
    assert found.entries[-1] == Entry(3, 3, "keep")
    found.append(Entry(4, 1, "other"))
    assert path.read_bytes() == by_hand + b'\nother,4,"a ""dog"", perhaps",\n'


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"index,label\n0,cat\n", "decision"),
        (b"index,label,decision\n0,bird,keep\n", "corrections.csv:2: label"),
        (b'index,label,decision\n0,"cat,keep\n1,cat,keep\n2,cat,keep\n', "closed"),
        ("index,label,decision\n0,cat,keep\n".encode("utf-16"), "UTF-16"),
        # As clean takes it, and not as we would go on.
        (b"index,label\n0,cat\n1,cat", "decision"),
        (b"index,label,decision\n0,bird,keep\n1,cat,keep", "corrections.csv:2: label"),
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path, content, part):
    path = tmp_path / "corrections.csv"
    path.write_bytes(content)
    with pytest.raises((RunError, TableError)) as caught:
        Corrections(path, of_names())
    assert part in str(caught.value)
    assert path.read_bytes() == content


def test_a_file_that_is_refused_need_not_be_writable(tmp_path, monkeypatch):
    path = tmp_path / "corrections.csv"
    path.write_bytes(b"index,label,decision\n0,bird,keep\n")

    def read_only(name, mode="r", *choices, **named):
        # As chmod 444 makes it, which root does not feel.
        if Path(name) == path and set(mode) & set("wa+"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(name, mode, *choices, **named)

    opened = builtins.open
    monkeypatch.setattr(builtins, "open", read_only)
    with pytest.raises((RunError, TableError), match="label"):
        Corrections(path, of_names())


def test_a_link_that_leads_nowhere_is_not_followed(tmp_path):
    path = tmp_path / "corrections.csv"
    # That would then be a file of somebody else's words.
    path.symlink_to(tmp_path / "profile")
    with pytest.raises(TableError, match="regular file"):
        Corrections(path, of_names()).append(Entry(0, 1, "other"))
    assert not (tmp_path / "profile").exists()


def test_no_decision_begins_another():
    assert [(a, b) for a in DECISIONS for b in DECISIONS if a != b and b.startswith(a)] == []


@pytest.mark.parametrize("function", ["write", "fsync"])
def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, function):
    path = tmp_path / "corrections.csv"
    corrections = Corrections(path, of_names())
    corrections.append(ROWS[0])
    before = path.read_bytes()
    whole = getattr(os, function)

    def half(file, content):
        return whole(file, content[:5])

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, half if function == "write" else full)
    with pytest.raises(RunError, match="cannot write") as caught:
        corrections.append(ROWS[1])
    assert caught.value.code == 74
    assert path.read_bytes() == before
    monkeypatch.undo()
    corrections.append(ROWS[1])
    assert corrections.entries == Corrections(path, of_names()).entries == ROWS[:2]


def test_each_row_is_flushed_to_the_disk_before_it_counts(tmp_path, monkeypatch):
    path = tmp_path / "corrections.csv"
    corrections = Corrections(path, of_names())
    flushed = []
    whole = os.fsync

    def fsync(file):
        flushed.append((os.fstat(file).st_ino, path.stat().st_size, len(corrections.entries)))
        whole(file)

    monkeypatch.setattr(os, "fsync", fsync)
    corrections.append(ROWS[0])
    corrections.append(ROWS[1])
    size = path.stat().st_size
    rows = [each for each in flushed if each[0] == path.stat().st_ino]
    assert [entries for _, _, entries in rows] == [0, 1]
    assert rows[1][1] == size
    # The name of the new file too.
    assert any(each[0] == tmp_path.stat().st_ino for each in flushed)


def test_a_file_that_something_else_has_changed_is_not_written_to(tmp_path):
    path = tmp_path / "corrections.csv"
    corrections = Corrections(path, of_names())
    corrections.append(ROWS[0])
    path.rename(tmp_path / "moved.csv")
    with pytest.raises(ChangedFile, match="changed"):
        corrections.append(ROWS[1])
    assert not path.exists()
    assert corrections.entries == ROWS[:1]


def test_cleaning_takes_what_was_decided(run):
    labels = read_labels(run)
    given = labels.given.tolist()
    corrections = Corrections(run / "corrections.csv", labels)
    automatic = clean_run(run, relabel_above=1, drop_below=0).given
    wanted = [(given[0] + 1) % 10, given[1], (given[2] + 3) % 10, -1, given[4], given[5]]
    corrections.append(Entry(5, (given[5] + 1) % 10, "accept"))
    for index, decision in enumerate(("accept", "keep", "other", "drop", "skip", "undo")):
        corrections.append(Entry(index, wanted[index], decision))
    cleaned = clean_run(run, relabel_above=1, drop_below=0).given
    assert cleaned[:6].tolist() == wanted
    assert torch.equal(cleaned[6:], automatic[6:])


def test_a_number_too_long_to_be_one_is_told_in_our_words(run):
    (run / "corrections.csv").write_text(f"index,label,decision\n{'9' * 5000},,drop\n")
    with pytest.raises(TableError, match=r"index .*'9{40}'"):
        Corrections(run / "corrections.csv", read_labels(run))
