"""Runs that the tests of all verbs share, and the option that writes their snapshots anew."""

import shutil

import numpy as np
import pytest
from PIL import Image

from nearsay import cli

TOY = ["toy", "epochs=10", "noise=0.2", "--set", "batch_size=50"]
TOY += ["--set", "data.num_train=400", "--set", "data.num_test=120"]


def pytest_addoption(parser):
    parser.addoption(
        "--renew-snapshots",
        action="store_true",
        help="write tests/cli/snapshots anew; look at the difference before you commit it",
    )


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A finished run on features; tests do not change it."""
    folder = tmp_path_factory.mktemp("runs") / "toy"
    assert cli.main(["train", *TOY, "--device", "cpu", "--out", str(folder), "--quiet"]) == 0
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return folder


@pytest.fixture
def run(original, tmp_path):
    """A copy of the run, which a test may change."""
    return shutil.copytree(original, tmp_path / "run")


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """A folder of images, one of them broken, and a run that has learned nothing from it."""
    root = tmp_path_factory.mktemp("my photos")
    random = np.random.default_rng(0)
    for name in ("dark side", "light"):
        (root / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 256, size=(10 + number, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "photos" / name / f"{number}.png")
    (root / "photos/light/x.jpg").write_text("no picture")
    words = [f"path={root / 'photos'}", "size=8", "epochs=1", "held_out=0.3"]
    words += ["--set", "backbone.width=2", "--device", "cpu", "--quiet"]
    assert cli.main(["train", "folder", *words, "--out", str(root / "first")]) == 0
    return root


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with something of everything in it, and no TensorBoard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nearsay.training.progress.find_spec", lambda name: None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "list.csv").write_text("path,label\na.jpg,cat\na.jpg,dog\n")
    (tmp_path / "text.npy").write_text("text")
    np.save(tmp_path / "narrow.npy", np.zeros((2, 3), dtype=np.float32))
    np.save(tmp_path / "rows.npy", np.zeros((3, 32), dtype=np.float32))
    (tmp_path / "broken.py").write_text("def recipe(:")
    (tmp_path / "fails.py").write_text("def recipe():\n    return 1 / 0\n")
    (tmp_path / "half").mkdir()
    half = '{"recipe": "toy", "arguments": {}, "overrides": []}'
    (tmp_path / "half" / "experiment.json").write_text(half)
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    return tmp_path
