"""Damage in the files of a run: every command names the file, and writes nothing."""

import shutil
import zipfile

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


@pytest.mark.parametrize("verb", VERBS)
def test_a_flipped_bit_in_the_labels_is_named_before_anything_is_written(
    audited, tmp_path, capsys, verb
):
    for part in PARTS if verb == "train" else ("given", "inputs"):
        run = shutil.copytree(audited, tmp_path / part)
        flip_bit(run / "labels.npz", part)
        # Without it the run is not finished, and there is something to train.
        (run / "result.json").unlink()
        before = files_of(run)
        words = [*WORDS, "--out", str(run), "--quiet"] if verb == "train" else [str(run)]
        assert main([verb, *words]) == 65
        message = capsys.readouterr().err
        assert "labels.npz" in message
        assert f"'{part}.npy'" in message
        assert message.count("\n") == 1
        assert files_of(run) == before


def test_a_comparison_gives_no_advice_to_read_a_damaged_file_unsafely(audited, tmp_path, capsys):
    run = shutil.copytree(audited, tmp_path / "run")
    (run / "labels.npz").write_bytes(b"no labels at all")
    assert main(["compare", str(run)]) == 65
    message = capsys.readouterr().err
    assert str(run / "labels.npz") in message
    assert "pickle" not in message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half"])
@pytest.mark.parametrize("verb", ["audit", "clean", "evaluate"])
def test_labels_that_are_damaged_while_a_command_runs_are_told_too(
    audited, tmp_path, monkeypatch, capsys, verb, content
):
    run = shutil.copytree(audited, tmp_path / "run")
    unpack = run_folder.unpack_labels

    def unpack_and_damage(before):
        labels = unpack(before)
        (run / "labels.npz").write_bytes(content)
        return labels

    monkeypatch.setattr(run_folder, "unpack_labels", unpack_and_damage)
    assert main([verb, str(run)]) == 65
    message = capsys.readouterr().err
    assert "labels.npz" in message
    assert message.count("\n") == 1


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
    page = ["--html", str(tmp_path / "page.html")] if verb == "compare" else []
    assert main([verb, str(run), *page]) == 65
    message = capsys.readouterr().err
    assert f"{name}.safetensors" in message
    assert message.count("\n") == 1
    assert files_of(run) == before
