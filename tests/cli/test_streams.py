import os
import shlex
import subprocess
import sys

import pytest

SMALL = [
    "epochs=4",
    "--set",
    "data.num_train=200",
    "--set",
    "data.num_test=120",
    "--set",
    "batch_size=50",
]


def in_shell(words, redirected, **variables):
    """A command as a shell starts it; bash, since only that has `>(...)`."""
    command = f"{shlex.join([sys.executable, '-m', 'nearsay', *words])} {redirected}"
    environment = {**os.environ, **variables}
    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2> >(head -1 >/dev/null)", "2>&-"])
def test_progress_that_cannot_be_shown_ends_no_training(tmp_path, redirected):
    done = in_shell(["train", "toy", *SMALL, "--out", str(tmp_path / "run")], redirected)
    assert done.returncode == 0, done
    assert f"The run is in {tmp_path / 'run'}." in done.stdout
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 4


def test_a_training_whose_stdout_is_closed_ends_as_others_do(tmp_path):
    done = in_shell(["train", "toy", *SMALL, "--out", str(tmp_path / "run"), "--quiet"], ">&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(
    ("words", "redirected", "code"),
    [
        (["--version"], ">&-", 0),
        (["train", "wrong"], "2>/dev/full", 2),
        (["train", "wrong"], "2>&-", 2),
        (["train", "wrong", "--debug"], "2>/dev/full", 2),
    ],
)
def test_a_stream_that_takes_nothing_leaves_the_exit_code_as_it_is(words, redirected, code):
    done = in_shell(words, redirected)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_result_without_a_reader_is_still_told_by_the_exit_code():
    done = in_shell(["recipes"], "| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stdout, done.stderr) == (74, "", "")


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("words", [["recipes"], ["--help"], ["--version"], ["doctor", "--json"]])
def test_a_full_stdout_is_named(words, buffered):
    done = in_shell(words, ">/dev/full", PYTHONUNBUFFERED=buffered)
    told = "error: stdout: No space left on device; send it where it can be written\n"
    assert (done.returncode, done.stderr) == (74, told)
