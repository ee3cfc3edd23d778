"""What all verbs share: help, streams, errors and their exit codes, and no torch."""

import json
import resource
import shlex
import subprocess
import sys
from typing import get_args

import pytest
import torch

from nearsay import __version__, cli
from nearsay.cli import audit, data, export
from nearsay.config import ConfigError
from nearsay.data.cifar import ORIGINALS
from nearsay.errors import RunError, Stopped, TableError
from nearsay.integrations import export as task
from nearsay.integrations import label_tools

INSTANT = {  # exit codes of command lines that must not wait for torch
    "--help": 0,
    "train --help": 0,
    "audit --help": 0,
    "--version": 0,
    "recipes": 0,
    "trian": 2,
    "train --wrong": 2,
    "train wrong": 2,
    "train toy noise": 2,
}


class Coded(RuntimeError):
    code = 76


class Numbered(OSError):
    """An error whose code is that of an answer over the network, and no exit code."""

    code = 404


ERRORS = [  # error, exit code, a part of what is printed
    (ConfigError("a is wrong"), 2, "a is wrong"),
    (RunError("it is locked", 75), 75, "it is locked"),
    (Coded("it was not finite"), 76, "it was not finite"),
    (Numbered("gone"), 74, "gone"),
    (TableError("list.csv:3: the path is empty"), 65, "list.csv:3: the path is empty"),
    (ValueError("rate=2 must be below 1"), 65, "rate=2 must be below 1"),
    (MemoryError(), 71, "batch_size"),
    (torch.OutOfMemoryError("CUDA out of memory\nmore"), 71, "CUDA out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 71, "memory"),
    (PermissionError(13, "Permission denied", "x/y"), 74, "x/y: Permission denied"),
    (ImportError("libtorch.so: failed to map segment from shared object"), 71, "memory"),
    (ImportError('pyarrow: pip install ".[parquet]"'), 2, "pyarrow"),
    (ZeroDivisionError("division by zero"), 70, "ZeroDivisionError: division by zero"),
    (Stopped(15, "runs/a"), 143, "runs/a"),
    (Stopped(2, "runs/a"), 130, "runs/a"),
]


@pytest.mark.parametrize(("error", "code", "part"), ERRORS)
def test_an_error_ends_in_one_sentence_and_its_exit_code(monkeypatch, capsys, error, code, part):
    def fail(*_):
        raise error

    monkeypatch.setattr("nearsay.cli.train.call_source", fail)
    assert cli.main(["train", "toy"]) == code
    out, err = capsys.readouterr()
    assert part in err
    assert err.startswith("error: ") != isinstance(error, Stopped)
    assert err.count("\n") == 1
    assert out == ""
    assert cli.main(["train", "toy", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError("8 GB"), torch.OutOfMemoryError("CUDA")])
def test_a_command_without_batches_is_not_told_to_make_them_smaller(
    tmp_path, monkeypatch, capsys, error
):
    def fail(*_, **__):
        raise error

    (tmp_path / "experiment.json").write_text("{}")
    monkeypatch.setattr("nearsay.label_issues.cleaning.read_labels", fail)
    assert cli.main(["clean", str(tmp_path)]) == 71
    assert "batch_size" not in capsys.readouterr().err


@pytest.mark.parametrize(("line", "code"), [("train toy", 74), ("--version", 0)])
def test_a_working_directory_that_was_deleted_is_told(tmp_path, line, code):
    (tmp_path / "gone").mkdir()
    inside = [sys.executable, "-m", "nearsay", *line.split()]
    command = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && {shlex.join(inside)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert ("working directory" in done.stderr) == bool(code)
    assert "Traceback" not in done.stderr


def test_an_interrupted_command_says_so_and_ends_as_shells_expect(monkeypatch, capsys):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("nearsay.cli.train.call_source", fail)
    assert cli.main(["train", "toy"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


SLOW = """
import os, signal, sys
signal.signal(signal.SIGINT, {handler})
class Slow:
    def find_spec(self, name, *_):
        if name == "nearsay.cli":
            os.kill(os.getpid(), signal.SIGINT)  # as it would come while this is imported
sys.meta_path.insert(0, Slow())
from nearsay.__main__ import start
sys.argv = ["nearsay", "--version"]
sys.exit(start())
"""


@pytest.mark.parametrize(
    ("handler", "code", "printed"),
    [("signal.default_int_handler", -2, ""), ("signal.SIG_IGN", 0, f"nearsay {__version__}\n")],
)
def test_an_interrupt_while_the_command_is_read_shows_no_traceback(handler, code, printed):
    program = SLOW.format(handler=handler)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, "")


def test_a_command_that_was_read_can_be_interrupted_again():
    # The handler is set, because a shell may have told this process to ignore the signal.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import nearsay.cli; "
        "nearsay.cli.main = lambda: signal.raise_signal(signal.SIGINT); "
        "from nearsay.__main__ import start; start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.endswith("KeyboardInterrupt\n")


def run_python(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    return done.stdout


def test_help_and_mistakes_answer_without_torch():
    program = (
        "import json, sys, nearsay.report; from nearsay.cli import main; "
        "codes = [main(line.split()) for line in json.loads(sys.argv[1])]; "
        "print(json.dumps([codes, sorted({'torch', 'numpy', 'altair'} & sys.modules.keys())]))"
    )
    printed = run_python(program, json.dumps([*INSTANT]))
    assert json.loads(printed.splitlines()[-1]) == [[*INSTANT.values()], []]


def test_what_reads_runs_brings_neither_the_compiler_of_torch_nor_scipy():
    modules = ("doors.run", "doors.compare", "label_issues.cleaning", "training.evaluate")
    program = "import sys\n" + "\n".join(f"import nearsay.{name}" for name in modules)
    program += "\nprint(sorted({'torch', 'torch._dynamo', 'scipy'} & sys.modules.keys()))"
    assert run_python(program) == "['torch']\n"


def test_help_takes_less_than_half_a_second():
    def seconds():
        # Of the processor, because others may be busy on the machine.
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    tries = []
    for _ in range(2):
        before = seconds()
        words = [sys.executable, "-m", "nearsay", "train", "--help"]
        subprocess.run(words, capture_output=True, check=True)
        tries.append(seconds() - before)
    assert min(tries) < 0.5


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"nearsay {__version__}\n"


def test_warnings_are_notes(capsys, monkeypatch):
    def warn(*_):
        cli.warnings.warn("k is large", stacklevel=1)
        raise ConfigError("enough")

    monkeypatch.setattr("nearsay.cli.train.call_source", warn)
    with cli.warnings.catch_warnings():
        cli.warnings.simplefilter("default")
        assert cli.main(["train", "toy"]) == 2
    assert capsys.readouterr().err == "note: k is large\nerror: enough\n"


def test_the_command_line_offers_what_the_functions_behind_it_take():
    """It lists the words itself, because the modules that know them import torch."""
    assert [*audit.Tool] == [*get_args(label_tools.Tool)]
    assert [*export.Format] == [*get_args(task.Format)] == [*task.FILES]
    assert [*data.Public] == [*ORIGINALS]
