"""A benchmark records the commit of its own code, wherever it is started."""

import shutil
import subprocess

import loss
import pytest
import train


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git to ask")
@pytest.mark.parametrize("benchmark", [loss, train])
def test_the_commit_is_that_of_the_code(benchmark, tmp_path, monkeypatch):
    hashes = {}
    for name in ("code", "elsewhere"):
        git = ["git", "-C", str(tmp_path / name), "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "init", "-q", str(tmp_path / name)], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", name], check=True)
        told = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        )
        hashes[name] = told.stdout.strip()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "code" / "benchmark.py"))
    assert benchmark.commit() == hashes["code"] != hashes["elsewhere"]


@pytest.mark.parametrize("benchmark", [loss, train])
def test_without_git_there_is_no_commit(benchmark, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert benchmark.commit() == ""
