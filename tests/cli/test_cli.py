import csv
import io
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from nearsay import __version__, cli
from nearsay.cli import auditing, doctor_report, reading, starting
from nearsay.config import ConfigError
from nearsay.data.cifar import ORIGINALS
from nearsay.doors import compare as comparing
from nearsay.integrations import label_tools
from nearsay.errors import RunError, Stopped, TableError
from nearsay.integrations import export

TOY = [
    "toy",
    "epochs=2",
    "--set",
    "data.num_train=200",
    "--set",
    "data.num_test=120",
    "--set",
    "batch_size=50",
]
INSTANT = [
    ["--help"],
    ["train", "--help"],
    ["--version"],
    ["trian"],
    ["train", "--wrong"],
    ["train", "wrong"],
    ["recipes"],
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    assert cli.main(["train", *TOY, "--out", str(folder), "--quiet"]) == 0
    return folder


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
    (tmp_path / "broken.py").write_text("def recipe(:")
    (tmp_path / "fails.py").write_text("def recipe():\n    return 1 / 0\n")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "experiment.json").write_text(
        '{"recipe": "toy", "arguments": {}, "overrides": []}'
    )
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    return tmp_path


WRONG = [  # command line, exit code, words of the message
    ("trian toy", 2, "no such command 'trian'. Did you mean 'train'?"),
    ("--wrong", 2, "no such option: --wrong"),
    ("train", 2, "missing argument 'RECIPE'"),
    ("train nope", 2, "there is no recipe 'nope'"),
    ("train cifra10", 2, "did you mean cifar10?"),
    ("train toy --noise 0.4", 2, "what a recipe takes is written noise=VALUE"),
    ("train toy noise", 2, "'noise'"),
    ("train toy noise=much", 2, "noise='much' must be a number"),
    ("train toy noise=7", 2, "7"),
    ("train toy color=red", 2, "'color'"),
    ("train toy method=magic", 2, "method='magic' must be"),
    ("train toy seed=1 --seed 2", 2, "seed is given twice"),
    ("train toy --seed one", 2, "'--seed': 'one' should be a valid integer"),
    ("review RUN --port 80000", 2, "'--port': '80000' should be less than or equal to 65535"),
    (
        "train toy --set",
        2,
        "option '--set' requires an argument (nearsay train --help shows what there is)",
    ),
    (
        "compare RUN --html",
        2,
        "option '--html' requires an argument (nearsay compare --help shows what there is)",
    ),
    ("train toy --set objective.q=5", 2, "'q'; it has alpha, k"),
    ("train toy --set objective.k=many", 2, "objective.k='many' must be a whole number"),
    ("train toy --set epochs=-1", 2, "epochs=-1"),
    ("train toy --device gpu9", 2, "gpu9"),
    (
        "train missing.py",
        2,
        "there is no recipe 'missing.py'; check the name, and the folder that it is relative to",
    ),
    ("train broken.py", 2, "broken.py"),
    ("train fails.py", 2, "ZeroDivisionError"),
    ("train toy --out file", 73, "cannot write into file"),
    ("train toy --tensorboard --out new", 2, 'pip install ".[tensorboard]" in the clone'),
    ("train embeddings path=missing.npz --out new", 65, "missing.npz"),
    ("train manifest path=list.csv --out new", 65, "'a.jpg' is also on line 2"),
    ("train folder path=empty --out new", 65, "empty"),
    ("evaluate", 2, "missing argument 'RUN'"),
    ("evaluate missing", 2, "'missing' does not exist"),
    ("evaluate empty", 2, "'empty' holds no run"),
    ("evaluate half", 65, "half"),
    ("evaluate RUN --split dev", 2, "'dev'"),
    ("predict RUN RUN --out nowhere/x.csv", 73, "nowhere is no folder"),
    ("evaluate RUN --data missing", 2, "'missing' does not exist"),
    ("evaluate RUN --data text.npy", 65, "text.npy"),
    ("evaluate RUN --data list.csv", 65, "'a.jpg' is also on line 2"),
    ("evaluate RUN --device tpu", 2, "'tpu' must be auto, cpu, cuda"),
    ("predict RUN", 2, "missing argument 'PATH'"),
    ("predict RUN missing.png", 2, "missing.png"),
    ("predict RUN empty", 65, "empty holds no images"),
    ("predict RUN text.npy", 65, "text.npy is not read"),
    (
        "predict RUN narrow.npy",
        65,
        "narrow.npy: features (2, 3) do not fit: this run was trained on rows of 32; give",
    ),
    ("predict RUN image.png", 65, "features"),
    ("predict RUN narrow.npy image.png", 65, "give one kind at a time"),
    ("predict RUN narrow.npy --out labels.txt", 2, "must end in one of .csv"),
    ("predict half image.png", 65, "half"),
    ("compare", 2, "missing argument 'RUN'"),
    (
        "compare empty",
        65,
        "empty holds no finished run; give folders that nearsay train or nearsay sweep has made",
    ),
    ("compare RUN --split dev", 2, "'dev'"),
    ("compare RUN --split second_test", 65, "has no accuracy on split='second_test'"),
    ("recipes nope", 2, "there is no recipe 'nope'"),
    ("recipes broken.py", 65, "broken.py"),
    ("data", 2, "missing command"),
    ("data get mnist", 2, "'mnist' is not one of 'cifar10', 'cifar100'"),
    ("data get cifar10 --to file", 74, "file"),
    ("doctor now", 2, "unexpected extra argument"),
    ("demo --out file", 73, "cannot write into file"),
]


@pytest.mark.parametrize(("line", "code", "words"), WRONG, ids=[line for line, _, _ in WRONG])
def test_a_wrong_command_line_ends_in_one_sentence(here, run, capsys, line, code, words):
    found = cli.main([str(run) if word == "RUN" else word for word in line.split()])
    out, err = capsys.readouterr()
    complaint = err[err.index("error: ") :]
    assert found == code, err
    assert words in complaint
    assert "Traceback" not in out + err
    assert "internal error" not in err
    assert out == ""


def test_a_model_is_exported_into_the_run_and_over_no_file_of_another(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    for _ in range(2):
        assert cli.main(["export", str(copy)]) == 0
        assert str(copy / "export" / "model.safetensors") in capsys.readouterr().out
    (copy / "export" / "config.json").write_text("{}")
    assert cli.main(["export", str(copy)]) == 65
    assert "config.json is not of nearsay and would be replaced" in capsys.readouterr().err
    assert (copy / "export" / "config.json").read_text() == "{}"


class Coded(RuntimeError):
    code = 76


class Numbered(OSError):
    code = 404  # as that of an answer over the network, which is no exit code


ERRORS = [
    (ConfigError("a is wrong"), 2, "error: a is wrong"),
    (RunError("it is locked", 75), 75, "error: it is locked"),
    (Coded("it was not finite"), 76, "error: it was not finite"),
    (Numbered("gone"), 74, "error: gone"),
    (TableError("list.csv:3: the path is empty"), 65, "error: list.csv:3: the path is empty"),
    (ValueError("rate=2 must be below 1"), 65, "error: rate=2 must be below 1"),
    (
        MemoryError(),
        71,
        "error: out of memory (MemoryError); try a smaller batch_size, or another device",
    ),
    (
        torch.OutOfMemoryError("CUDA out of memory\nmore"),
        71,
        "error: out of memory (CUDA out of memory);",
    ),
    (
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        71,
        "error: out of memory (Default",
    ),
    (
        PermissionError(13, "Permission denied", "x/y"),
        74,
        "error: x/y: Permission denied; change its permissions, or use a place where you may read and write",
    ),
    (
        ImportError("libtorch.so: failed to map segment from shared object"),
        71,
        "error: out of memory before it began (",
    ),
    (
        ImportError('Parquet needs pyarrow: pip install ".[parquet]" in the clone'),
        2,
        "error: Parquet needs pyarrow",
    ),
    (
        ImportError("cannot import name x"),
        70,
        "error: internal error: ImportError: cannot import name x;",
    ),
    (
        ZeroDivisionError("division by zero"),
        70,
        "error: internal error: ZeroDivisionError: division by zero; run again",
    ),
    (
        Stopped(15, "runs/a"),
        143,
        "stopped by SIGTERM; run the same command again to go on in runs/a",
    ),
    (Stopped(2, "runs/a"), 130, "stopped by SIGINT; run the same command again to go on in runs/a"),
]


@pytest.mark.parametrize(
    ("error", "code", "told"), ERRORS, ids=[f"{code}-{told[:30]}" for _, code, told in ERRORS]
)
def test_an_error_is_told_in_one_sentence_with_its_exit_code(
    monkeypatch, capsys, error, code, told
):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli, "call_recipe", fail)
    assert cli.main(["train", "toy"]) == code
    out, err = capsys.readouterr()
    assert err.startswith(told)
    assert err.count("\n") == 1
    assert out == ""
    assert cli.main(["train", "toy", "--debug"]) == code
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert told in err


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (MemoryError("8 GB"), "(8 GB); end other programs, or use a machine with more of it\n"),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "(CUDA out of memory); try another device\n",
        ),
    ],
)
def test_a_command_without_batches_is_not_told_to_make_them_smaller(
    tmp_path, monkeypatch, capsys, error, cure
):
    def fail(*_, **__):
        raise error

    (tmp_path / "experiment.json").write_text("{}")
    monkeypatch.setattr("nearsay.label_issues.cleaning.read_labels", fail)
    assert cli.main(["clean", str(tmp_path)]) == 71
    assert capsys.readouterr().err == f"error: out of memory {cure}"


@pytest.mark.parametrize(
    ("words", "code"), [(["doctor"], 74), (["train", "toy"], 74), (["--version"], 0)]
)
def test_a_working_directory_that_was_deleted_is_told(tmp_path, words, code):
    (tmp_path / "gone").mkdir()
    inside = [sys.executable, "-m", "nearsay", *words]
    command = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && {shlex.join(inside)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    told = (
        "error: the working directory was deleted; change into one that is there\n" if code else ""
    )
    assert (done.returncode, done.stderr) == (code, told)


def test_an_interrupted_command_says_so_and_ends_as_shells_expect(monkeypatch, capsys):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "call_recipe", fail)
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
    ("handler", "code", "told"),
    [("signal.default_int_handler", -2, ""), ("signal.SIG_IGN", 0, f"nearsay {__version__}\n")],
)
def test_an_interrupt_while_the_command_is_read_shows_no_traceback(handler, code, told):
    program = SLOW.format(handler=handler)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, told, "")


def test_a_command_that_was_read_can_be_interrupted_again():
    program = (
        "import nearsay.cli, signal; nearsay.cli.main = lambda: signal.raise_signal(signal.SIGINT)"
    )
    program += "; from nearsay.__main__ import start; start()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_help_and_mistakes_answer_without_torch():
    program = (
        "import json, sys; from nearsay.cli import main; codes = [main(line) for line in json.loads(sys.argv[1])]; "
        "print(json.dumps([codes, sorted({'torch', 'numpy', 'sklearn'} & sys.modules.keys())]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(INSTANT)], capture_output=True, text=True
    )
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0, 0, 2, 2, 2, 0]
    assert loaded == []


def test_what_reads_runs_brings_neither_the_compiler_of_torch_nor_scipy():
    names = ("audit", "clean", "compare", "evaluate", "predict")
    program = "import sys\n" + "\n".join(f"import nearsay.commands.{name}" for name in names)
    program += "\nprint(sorted({'torch', 'torch._dynamo', 'scipy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "['torch']\n"


def test_help_takes_less_than_half_a_second():
    def seconds():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime  # of the processor: others may be busy on the machine

    tries = []
    for _ in range(2):
        before = seconds()
        subprocess.run(
            [sys.executable, "-m", "nearsay", "train", "--help"], capture_output=True, check=True
        )
        tries.append(seconds() - before)
    assert min(tries) < 0.5


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m nearsay recipes | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_help_names_every_verb_and_needs_no_arguments(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    for verb in ("train", "evaluate", "predict", "compare", "recipes", "data", "doctor", "demo"):
        assert re.search(rf"^  {verb} +[A-Z][^.]*\.$", out, re.MULTILINE), verb
    assert "..." not in out.partition("Commands:")[2]  # no sentence is cut


@pytest.mark.parametrize(
    "verb", ["train", "evaluate", "predict", "compare", "recipes", "data", "doctor", "demo"]
)
def test_every_verb_has_help_without_escape_codes(capsys, verb):
    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: nearsay {verb}")
    assert "\x1b" not in out


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"nearsay {__version__}\n"


def test_train_prints_its_result_to_stdout_and_its_progress_to_stderr(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    assert cli.main(["train", *TOY, "--json", "--seed", "3", "--device", "cpu"]) == 0
    first = json.loads(capsys.readouterr().out)
    told = errors.getvalue()
    assert first["run"].startswith("runs/toy-epochs=2-seed=3-")
    assert first["seed"] == 3
    assert first["finished"] is True
    assert "epoch 1/2" in told
    assert "epoch 2/2" in told
    assert "\x1b" not in told
    recorded = json.loads((tmp_path / first["run"] / "experiment.json").read_text())
    assert recorded["experiment"]["machine"]["device"] == "cpu"
    assert recorded["arguments"] == {"epochs": "2", "seed": "3"}

    assert (
        cli.main(["train", *TOY, "--json", "--seed", "3"]) == 0
    )  # the same folder by itself, on whatever device
    assert json.loads(capsys.readouterr().out) == first
    assert errors.getvalue().removeprefix(told).startswith("finished before: 8 steps")


def test_quiet_leaves_stderr_empty_and_the_result_on_stdout(run, capsys):
    assert cli.main(["train", *TOY, "--out", str(run), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"The run is in {run}" in out
    assert "\x1b" not in out


def test_warnings_are_notes(capsys, monkeypatch):
    def warn(*_):
        cli.warnings.warn("k is large", stacklevel=1)
        raise ConfigError("enough")

    monkeypatch.setattr(cli, "call_recipe", warn)
    with cli.warnings.catch_warnings():
        cli.warnings.simplefilter("default")
        assert cli.main(["train", "toy"]) == 2
    assert capsys.readouterr().err == "note: k is large\nerror: enough\n"


def test_a_dry_run_prints_the_experiment_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(["train", "cifar10", "path=nowhere", "--set", "batch_size=64", "--dry-run"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert "batch_size: 64" in lines
    assert any(re.fullmatch(r"parameters: 11,1\d\d,\d{3}", line) for line in lines)
    assert any(re.match(r"memory, an estimate .*activations", line) for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_field_that_is_an_argument_too_is_noted_before_training_and_in_a_dry_run(
    tmp_path, capsys
):
    told = (
        "note: --set seed=1 changes that alone; seed=1 without --set would mean data.seed: 1, not 0"
    )
    assert cli.main(["train", *TOY, "--set", "seed=1", "--dry-run"]) == 0
    assert told in capsys.readouterr().err
    assert (
        cli.main(["train", *TOY, "--set", "seed=1", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    )
    assert told in capsys.readouterr().err


def test_a_dry_run_as_json_is_one_object(capsys):
    assert cli.main(["train", "toy", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == "toy"
    assert found["experiment"]["kind"] == "Experiment"
    assert found["estimate"]["num_parameters"] == 25416
    assert found["estimate"]["num_steps"] == 350


def test_evaluate_prints_the_accuracy_that_training_found(run, capsys):
    result = json.loads((run / "result.json").read_text())
    assert cli.main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == pytest.approx(result["accuracy"]["test"]["final"])
    assert cli.main(["evaluate", str(run)]) == 0
    told = capsys.readouterr().out
    assert f"{100 * found['accuracy']:.1f} %" in told
    assert "test (120 examples)" in told


def test_predict_prints_csv_or_writes_a_table(run, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(3, 32)))
    assert cli.main(["predict", str(run), str(tmp_path / "x.npy")]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["path"] for row in rows] == [f"{tmp_path}/x.npy:{number}" for number in range(3)]
    assert (
        cli.main(["predict", str(run), str(tmp_path / "x.npy"), "--out", str(tmp_path / "y.jsonl")])
        == 0
    )
    assert capsys.readouterr().out == f"3 rows are in {tmp_path}/y.jsonl.\n"
    np.save(tmp_path / "one.npy", np.zeros((1, 32)))
    assert (
        cli.main(
            ["predict", str(run), str(tmp_path / "one.npy"), "--out", str(tmp_path / "one.csv")]
        )
        == 0
    )
    assert capsys.readouterr().out == f"1 row is in {tmp_path}/one.csv.\n"
    written = [json.loads(line) for line in (tmp_path / "y.jsonl").read_text().splitlines()]
    assert [row["label"] for row in written] == [row["label"] for row in rows]
    assert [row["probability"] for row in written] == [float(row["probability"]) for row in rows]


def test_a_device_that_is_not_there_is_no_fault_of_the_features(run, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((3, 32)))
    assert cli.main(["predict", str(run), str(tmp_path / "x.npy"), "--device", "cuda:99"]) == 2
    assert capsys.readouterr().err.startswith("error: device='cuda:99' asks for GPU 99, but ")


def test_predictions_do_not_replace_the_features_they_are_of(run, tmp_path, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({f"f{number}": [0.0, 1.0] for number in range(32)})
    pq.write_table(table, tmp_path / "x.parquet")
    content = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "y.parquet").symlink_to("x.parquet")
    for name in ("x.parquet", "y.parquet"):
        assert (
            cli.main(
                ["predict", str(run), str(tmp_path / "x.parquet"), "--out", str(tmp_path / name)]
            )
            == 2
        )
        assert "would replace what is to be read; choose another file" in capsys.readouterr().err
    assert (tmp_path / "x.parquet").read_bytes() == content


@pytest.mark.parametrize("name", ["labels.csv", "old.jsonl", "notes.tsv"])
def test_predictions_replace_earlier_ones_and_no_other_table(run, tmp_path, capsys, name):
    np.save(tmp_path / "x.npy", np.zeros((2, 32)))
    contents = {
        "labels.csv": "path,label\na.png,1\n",
        "old.jsonl": '{"path": "a", "label": "b"}\n',
        "notes.tsv": "?",
    }
    words = ["predict", str(run), str(tmp_path / "x.npy"), "--out", str(tmp_path / name)]
    (tmp_path / name).write_text(contents[name])
    assert cli.main(words) == 73
    assert (
        f"{name} holds something else and would be replaced; choose another --out"
        in capsys.readouterr().err
    )
    assert (tmp_path / name).read_text() == contents[name]
    (tmp_path / name).write_text("")
    for _ in range(2):
        assert cli.main(words) == 0


def test_a_page_of_a_comparison_replaces_pages_and_nothing_else(run, tmp_path, capsys):
    words = ["compare", str(run), "--html", str(tmp_path / "labels.csv")]
    (tmp_path / "labels.csv").write_text("path,label\na.png,1\n")
    assert cli.main(words) == 73
    assert (
        "labels.csv is no page of nearsay and would be replaced; choose another file"
        in capsys.readouterr().err
    )
    assert (tmp_path / "labels.csv").read_text() == "path,label\na.png,1\n"
    (tmp_path / "labels.csv").unlink()
    for _ in range(2):
        assert cli.main(words) == 0


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_is_no_file_for_a_page(run, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", str(run), "--html", name]) == 73
    assert (
        capsys.readouterr().err == "error: . is a folder; name a file in it, such as report.html\n"
    )


def test_compare_prints_each_run(run, capsys):
    result = json.loads((run / "result.json").read_text())
    assert cli.main(["compare", str(run)]) == 0
    assert f"{100 * result['accuracy']['test']['final']:.1f} %" in capsys.readouterr().out
    assert cli.main(["compare", str(run), "--json"]) == 0
    [group] = json.loads(capsys.readouterr().out)["groups"]
    assert group["runs"][0]["final"] == result["accuracy"]["test"]["final"]
    assert group["means"]["final"]["deviation"] is None


def test_the_page_of_a_comparison_is_of_the_split_that_is_asked_for(tmp_path, capsys):
    run, page = tmp_path / "run", tmp_path / "page.html"
    assert (
        cli.main(["train", *TOY, "--set", "held_out=0.5", "--out", str(run), "--quiet", "--json"])
        == 0
    )
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    assert cli.main(["compare", str(run), "--split", "validation", "--html", str(page)]) == 0
    assert f"{100 * accuracy['validation']['final']:.1f} %" in capsys.readouterr().out
    assert (
        "On the held-out validation set (its labels as they were given), <strong>"
        in page.read_text("utf-8")
    )


@pytest.mark.parametrize("words", [[], ["data"]])
def test_what_a_command_does_is_not_cut_on_80_columns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*words, "--help"]) == 0
    assert "..." not in capsys.readouterr().out.split("Commands:")[1]


def test_recipes_are_listed_and_one_is_told_in_full(capsys):
    assert cli.main(["recipes"]) == 0
    assert re.search(r"^digits +The 1.797 digits", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["recipes", "digits"]) == 0
    assert capsys.readouterr().out.startswith("nearsay train digits method=ncr noise=0.4 ")


def test_the_doctor_prints_problems_as_sentences(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor_report,
        "examine",
        lambda: [doctor_report.Finding("torch", "1.0", "is older than 2.10; upgrade")],
    )
    assert cli.main(["doctor"]) == 0
    assert "Problem: torch is older than 2.10; upgrade." in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == ["torch is older than 2.10; upgrade"]


def test_the_demonstration_shows_all_seeds_and_where_the_report_is(monkeypatch, capsys, tmp_path):
    finals = {("standard", 0): 0.9, ("ncr", 0): 0.85, ("standard", 1): 0.8, ("ncr", 1): 0.95}

    def fake(out, *, display):
        for number, ((method, seed), final) in enumerate(finals.items(), start=1):
            result = {
                "accuracy": {"test": {"final": final}},
                "confidence": {"right": 0.6, "wrong": 0.1},
            }
            yield comparing.Demonstrated(
                number, len(finals), method, seed, out / f"{method}-{seed}", result
            )

    monkeypatch.setattr(comparing, "demonstrate", fake)
    monkeypatch.setattr("nearsay.report.write_report", lambda runs, target, *, title: target)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[1:] == [
        "1/4  standard, seed 0: 90.0 %",
        "2/4  ncr, seed 0: 85.0 %",
        "3/4  standard, seed 1: 80.0 %",
        "4/4  ncr, seed 1: 95.0 %",
    ]
    assert re.search(r"ncr above standard, points +-5\.0 +\+15\.0 +5\.0 ± 14\.1", out)
    assert f"Curves and more: {tmp_path / 'report.html'}" in out
    audit, train, recipes = out[out.index("Try next") :].splitlines()
    assert audit.startswith(f"Try next: nearsay audit {tmp_path / 'ncr-1'} (")
    assert train.startswith("          nearsay train folder path=photos/ (")
    assert recipes.startswith("          nearsay recipes (")


def test_data_get_tells_where_the_data_is(monkeypatch, capsys, tmp_path):
    asked = []

    def fetch(name, folder):
        asked.append((name, folder))
        return folder / "cifar-10-batches-py"

    monkeypatch.setattr("nearsay.data.cifar.fetch", fetch)
    assert cli.main(["data", "get", "cifar10", "--to", str(tmp_path)]) == 0
    assert asked == [("cifar10", tmp_path)]
    assert capsys.readouterr().out == f"cifar10 is in {tmp_path}{os.sep}cifar-10-batches-py.\n"


def test_the_command_line_offers_what_the_functions_behind_it_take():
    """It lists the words itself, as those who know them bring torch."""
    assert [*auditing.Tool] == [*get_args(label_tools.Tool)]
    assert [*reading.Format] == [*get_args(export.Format)] == [*export.FILES]
    assert [*starting.Public] == [*ORIGINALS]
