"""A bit that flipped in the labels of a run is told by every command as what it is, and nothing is written."""

import shutil
import zipfile
from importlib import import_module

import pytest

from nearsay.cli import main
from nearsay.training import run_folder

WORDS = [
    "toy",
    "epochs=1",
    "--set",
    "data.num_train=120",
    "--set",
    "data.num_test=40",
    "--set",
    "held_out=20",
]
VERBS = ("audit", "clean", "evaluate", "propagate", "export", "train")
PARTS = ("given", "classes", "clean", "train", "validation", "fingerprint", "inputs")


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    assert main(["train", *WORDS, "--out", str(folder), "--quiet"]) == 0
    assert main(["audit", str(folder), "--no-report"]) == 0
    return folder


def flip_bit(path, part):
    """The last bit of one array in the file."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        found = file.getinfo(f"{part}.npy")
    content[content.index(b"\x93NUMPY", found.header_offset) + found.file_size - 1] ^= 1
    path.write_bytes(content)


def files_of(folder):
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_bit_that_flipped_in_the_labels_is_told_before_anything_is_written(
    audited, tmp_path, capsys, verb, part
):
    run = shutil.copytree(audited, tmp_path / "run")
    flip_bit(run / "labels.npz", part)
    (run / "result.json").unlink()  # or there is nothing left to train
    before = files_of(run)
    words = [*WORDS, "--out", str(run), "--quiet"] if verb == "train" else [str(run)]
    assert main([verb, *words]) == 65
    told = capsys.readouterr().err
    assert (
        f"labels.npz cannot be read: Bad CRC-32 for file '{part}.npy'; start again in another folder"
        in told
    )
    assert told.count("\n") == 1
    assert files_of(run) == before


def test_a_comparison_gives_no_advice_to_read_a_damaged_file_unsafely(audited, tmp_path, capsys):
    run = shutil.copytree(audited, tmp_path / "run")
    (run / "labels.npz").write_bytes(b"no labels at all")
    assert main(["compare", str(run)]) == 65
    told = capsys.readouterr().err
    assert (
        told
        == f"error: {run / 'labels.npz'} cannot be used (it is damaged); train the run again, or leave it out\n"
    )


WORK = {  # where each verb reads the labels
    "audit": "label_issues.run_audit",
    "clean": "label_issues.cleaning",
    "evaluate": "training.evaluate",
    "propagate": "training.predict",
}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half", b"no labels at all"])
@pytest.mark.parametrize("verb", WORK)
def test_labels_that_are_damaged_while_a_command_runs_are_told_too(
    audited, tmp_path, monkeypatch, capsys, verb, content
):
    run = shutil.copytree(audited, tmp_path / "run")
    module = import_module(f"nearsay.{WORK[verb]}")

    def read_labels(folder):
        labels = run_folder.read_labels(folder)
        (run / "labels.npz").write_bytes(content)
        return labels

    monkeypatch.setattr(module, "read_labels", read_labels)
    assert main([verb, str(run)]) == 65
    told = capsys.readouterr().err
    assert "labels.npz" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("audit", "predictions/train"),
        ("audit", "dynamics"),
        ("evaluate", "predictions/test"),
        ("propagate", "predictions/train"),
        ("compare", "predictions/train"),
        ("export", "model"),
    ],
)
def test_a_bit_that_flipped_in_what_a_run_has_learned_is_told(
    audited, tmp_path, capsys, verb, name
):
    run = shutil.copytree(audited, tmp_path / "run")
    content = bytearray((run / f"{name}.safetensors").read_bytes())
    content[-100] ^= 1
    (run / f"{name}.safetensors").write_bytes(content)
    before = files_of(run)
    assert (
        main(
            [
                verb,
                str(run),
                *(["--html", str(tmp_path / "page.html")] if verb == "compare" else []),
            ]
        )
        == 65
    )
    told = capsys.readouterr().err
    assert f"{name}.safetensors" in told
    assert "(it is damaged in " in told
    assert told.count("\n") == 1
    assert files_of(run) == before
