import json
import os
import subprocess
import sys

import pytest
import train as benchmark


def test_on_a_cpu_steps_are_plain_and_called_so():
    assert benchmark.kinds(is_cuda=False, compiles=True) == {
        "eager": {"captures": False, "compiles": False}
    }
    assert list(benchmark.kinds(is_cuda=True, compiles=False)) == ["eager", "graph"]
    found = benchmark.kinds(is_cuda=True, compiles=True)
    assert found["graph"] == {"captures": True, "compiles": False}
    assert found["graph and compile"] == {"captures": True, "compiles": True}


def test_what_was_measured_is_written_in_any_locale_and_to_a_new_folder(tmp_path):
    sizes = {"batch": 8, "width": 4, "steps": 1, "windows": 1, "workers": 0}
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    out = tmp_path / "new" / "train.json"
    words = [sys.executable, benchmark.__file__, "--device", "cpu", *options, "--out", str(out)]
    # Text is ASCII there.
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **locale}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [f"Wrote {out}"]), done.stderr
    assert json.loads(out.read_text("utf-8"))["network"] == "ResNet-18, width 4, 32×32"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batch", "0"], "--batch"),
        (["--workers", "-1"], "--workers"),
        (["--device", "nonsense"], "--device"),
        (["--out", "file/train.json"], "--out file/train.json"),
    ],
)
def test_what_cannot_be_measured_or_written_is_told_before_anything_is(
    tmp_path, monkeypatch, capsys, words, told
):
    def floor(*words):
        raise AssertionError("it has begun")

    monkeypatch.setattr(benchmark, "floor", floor)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert told in capsys.readouterr().err.splitlines()[-1]
