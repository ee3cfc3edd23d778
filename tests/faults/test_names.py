"""Names that are no text, or too long: a sentence with a cure before anything is trained."""

import os

import pytest
from PIL import Image

from nearsay.cli import main

NO_TEXT = os.fsdecode(b"gr\xfcn")
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


def test_a_run_folder_whose_name_is_no_text_is_refused_before_training(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*TOY, "--out", NO_TEXT]) == 73
    told = capsys.readouterr().err
    assert "gr\\udcfcn" in told
    assert "UTF-8" in told
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_renamed_to_what_is_no_text_is_not_called_damaged(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*TOY, "--out", str(tmp_path / "run")]) == 0
    os.rename(tmp_path / "run", os.fsencode(tmp_path) + b"/gr\xfcn")
    assert main(["audit", NO_TEXT]) == 73
    assert "UTF-8" in capsys.readouterr().err


def test_data_below_a_folder_whose_name_is_no_text_is_told_with_its_place(
    tmp_path, monkeypatch, capsys
):
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
    monkeypatch.chdir(place)
    assert main([*words, "--out", str(tmp_path / "run")]) == 65
    told = capsys.readouterr().err
    assert "UTF-8" in told
    assert "gr\\udcfcn/photos" in told
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 100] * 50)])
def test_a_name_that_is_too_long_is_one_that_cannot_be_made(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert main([*TOY, "--out", name]) == 73
    assert "File name too long" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
