import os
import shlex
import subprocess
import sys

import pytest

from nearsay import cli

SMALL = ["epochs=4", "--set", "data.num_train=200", "--set", "data.num_test=120"]
SMALL += ["--set", "batch_size=50", "--device", "cpu"]


def full():
    return open("/dev/full", "w")


def without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("broken", [full, without_reader, lambda: None])
def test_progress_that_cannot_be_shown_ends_no_training(tmp_path, monkeypatch, capsys, broken):
    monkeypatch.setattr(sys, "stderr", broken())
    assert cli.main(["train", "toy", *SMALL, "--out", str(tmp_path / "run")]) == 0
    sys.stderr.close()
    assert str(tmp_path / "run") in capsys.readouterr().out
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 4


def test_a_training_whose_stdout_is_closed_ends_as_others_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["train", "toy", *SMALL, "--out", str(tmp_path), "--quiet"]) == 0
    sys.stdout.close()
    assert capsys.readouterr().err == ""
    assert (tmp_path / "result.json").exists()


def in_shell(words, redirected, **variables):
    """A command as a shell starts it, to the end of its process."""
    command = f"{shlex.join([sys.executable, '-m', 'nearsay', *words])} {redirected}"
    environment = {**os.environ, **variables}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "redirected", "code"),
    [
        (["--version"], ">&-", 0),
        (["train", "wrong"], "2>/dev/full", 2),
        (["train", "wrong", "--debug"], "2>&-", 2),
        (["recipes"], "| true; exit ${PIPESTATUS[0]}", 74),
    ],
)
def test_a_stream_that_takes_nothing_leaves_the_exit_code_as_it_is(words, redirected, code):
    assert in_shell(words, redirected) == (code, "", "")


@pytest.mark.parametrize(
    ("words", "buffered"), [(["recipes"], ""), (["recipes"], "1"), (["--help"], "")]
)
def test_a_full_stdout_is_named(words, buffered):
    code, _, err = in_shell(words, ">/dev/full", PYTHONUNBUFFERED=buffered)
    assert (code, err.count("\n")) == (74, 1)
    assert err.startswith("error: stdout: ")
