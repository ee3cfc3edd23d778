"""Names that are no text, or too long: a sentence with a cure before anything is trained."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from nearsay.cli import main

TOY = [
    "train",
    "toy",
    "epochs=1",
    "--set",
    "data.num_train=120",
    "--set",
    "data.num_test=40",
    "--quiet",
]


def said(words, folder):
    command = [sys.executable, "-m", "nearsay", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_run_folder_whose_name_is_no_text_is_refused_before_training(tmp_path):
    done = said([*TOY, "--out", b"gr\xfcn"], tmp_path)
    assert done.returncode == 73
    assert "gr\\udcfcn" in done.stderr
    assert "UTF-8" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_renamed_to_what_is_no_text_is_not_called_damaged(tmp_path):
    assert main([*TOY, "--out", str(tmp_path / "run")]) == 0
    os.rename(tmp_path / "run", os.fsencode(tmp_path) + b"/gr\xfcn")
    done = said(["audit", b"gr\xfcn"], tmp_path)
    assert done.returncode == 73
    assert "UTF-8" in done.stderr


def test_data_below_a_folder_whose_name_is_no_text_is_told_with_its_place(tmp_path):
    place = os.fsencode(tmp_path) + b"/gr\xfcn"
    for kind, color in (("cat", 50), ("dog", 200)):
        folder = os.path.join(os.fsdecode(place), "photos", kind)
        os.makedirs(folder)
        for number in range(10):
            Image.new("RGB", (8, 8), (color, number, 0)).save(f"{folder}/{number}.png")
    words = [
        "train",
        "folder",
        "path=photos",
        "size=8",
        "epochs=1",
        "backbone=resnet18",
        "weights=none",
        "--quiet",
    ]
    done = said([*words, "--out", str(tmp_path / "run")], os.fsdecode(place))
    assert done.returncode == 65
    assert "UTF-8" in done.stderr
    assert "gr\\udcfcn/photos" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 100] * 50)])
def test_a_name_that_is_too_long_is_one_that_cannot_be_made(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert main([*TOY, "--out", name]) == 73
    assert "File name too long" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
