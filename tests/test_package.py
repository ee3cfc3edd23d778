"""What is packed for others: all of the project, and nothing else that lies in a clone; and how a clone is set up."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder

ROOT = Path(__file__).parents[1]


def packed(root, out):
    """The files of the source distribution of a folder, which is built into another one."""
    [archive] = SdistBuilder(str(root)).build(directory=str(out))
    with tarfile.open(archive) as opened:
        return {name.partition("/")[2] for name in opened.getnames()}


def test_the_source_distribution_leaves_data_and_environments_of_the_user_out(tmp_path):
    clone = tmp_path / "clone"
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE", "src/nearsay/_version.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    before = packed(clone, tmp_path)
    for name in (".venv-full/lib/torch.py", "data/cifar-10/batch_1", "photos/cat/1.jpg"):
        (clone / name).parent.mkdir(parents=True)
        (clone / name).write_text("of the user")
    assert "src/nearsay/_version.py" in before
    assert packed(clone, tmp_path) == before


def test_the_source_distribution_has_every_file_of_the_project(tmp_path):
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a clone")
    assert set(listed.stdout.splitlines()) - packed(ROOT, tmp_path) == set()


def test_an_environment_that_was_left_without_pip_is_set_up_again(tmp_path):
    """As Debian leaves it where python3-venv is missing, or Ctrl-C."""
    for name in ("Makefile", "pyproject.toml", "requirements/core.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    scripts = {
        ".venv/bin/python": "test -x .venv/bin/pip",
        "python": '[ "$2" != venv ] || cp "$0" .venv/bin/pip',
    }
    # Stand-ins: the one wants pip for all it does, the other makes it.
    for name, line in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    made = subprocess.run(
        ["make", ".venv/core", "PYTHON=./python"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
