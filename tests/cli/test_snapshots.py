"""What each verb says, in whole sentences: one file for each verb, and the only place for them.

After a change of words run `pytest tests/cli --renew-snapshots`, and look at the difference. The
exit codes stand here, and are never renewed.
"""

import re
import shlex
from pathlib import Path

import pytest

from nearsay import cli

FOLDER = Path(__file__).parent / "snapshots"
CURE = "pytest tests/cli --renew-snapshots writes the snapshots anew"
SMALL = "epochs=1 --set data.num_train=100 --device cpu"

LINES = {  # verb -> command line, exit code
    "nearsay": [("", 0), ("--wrong", 2), ("trian toy", 2)],
    "train": [
        ("train --help", 0),
        (f"train toy {SMALL} --out new --quiet", 0),
        (f"train toy {SMALL} --out new --set seed=1 --quiet", 2),
        ("train", 2),
        ("train nope", 2),
        ("train cifra10", 2),
        ("train missing.py", 2),
        ("train broken.py", 2),
        ("train fails.py", 2),
        ("train toy --noise 0.4", 2),
        ("train toy noise", 2),
        ("train toy noise=much", 2),
        ("train toy noise=7", 2),
        ("train toy color=red", 2),
        ("train toy method=magic", 2),
        ("train toy --method magic", 2),
        ("train toy seed=1 --seed 2", 2),
        ("train toy --seed one", 2),
        ("train toy --set", 2),
        ("train toy --set objective.q=5", 2),
        ("train toy --set objective.k=many", 2),
        ("train toy --set objective.start_epoch=soon", 2),
        ("train toy --set noise_per_network=true", 2),
        ("train toy --set epochs=-1", 2),
        ("train toy --set labeled=0", 2),
        ("train toy --set labels_file=nowhere.npz --out new2", 65),
        ("train toy labeled=2", 2),
        ("train toy --device gpu9", 2),
        ("train toy --device cuda:99 --out new2", 2),
        ("train toy --out file", 73),
        ("train toy --tensorboard --out new2", 2),
        ("train embeddings path=missing.npz --out new2", 65),
        ("train manifest path=list.csv --out new2", 65),
        ("train folder path=empty --out new2", 65),
        ("train cifar10 path=empty method=nothing", 2),
        ("train cifar10 path=empty method=elr+ start=auto", 2),
        ("train webvision path=empty method=standard alpha=0.5", 2),
        ("train mini_imagenet path=nowhere noise=0.3", 2),
        ("train webvision path=nowhere --out new2", 65),
        ("train clothing1m path=nowhere --out new2", 65),
    ],
    "sweep": [
        ("sweep --help", 0),
        ("sweep toy seed=0,1 method=standard --dry-run", 0),
        ("sweep toy seed=0,1 --metric speed", 2),
        ("sweep toy seed=0,1 --metric test", 2),
        ("sweep toy --search optuna", 2),
        ("sweep toy seed=0,1 --trials 3", 2),
    ],
    "evaluate": [
        ("evaluate --help", 0),
        ("evaluate run", 0),
        ("evaluate", 2),
        ("evaluate missing", 2),
        ("evaluate empty", 2),
        ("evaluate half", 65),
        ("evaluate run --split dev", 2),
        ("evaluate run --split validation", 65),
        ("evaluate run --data missing", 2),
        ("evaluate run --data text.npy", 65),
        ("evaluate run --data list.csv", 65),
        ("evaluate run --device tpu", 2),
    ],
    "predict": [
        ("predict --help", 0),
        ("predict run rows.npy", 0),
        ("predict run rows.npy --out labels.csv", 0),
        ("predict run", 2),
        ("predict run missing.png", 2),
        ("predict run empty", 65),
        ("predict run text.npy", 65),
        ("predict run narrow.npy", 65),
        ("predict run image.png", 65),
        ("predict run narrow.npy image.png", 65),
        ("predict run narrow.npy --out labels.txt", 2),
        ("predict run rows.npy --out nowhere/x.csv", 73),
        ("predict run rows.npy --out rows.npy", 2),
        ("predict run rows.npy --out list.csv", 73),
        ("predict run rows.npy --device cuda:99", 2),
        ("predict half image.png", 65),
        ("predict file image.png", 65),
    ],
    "compare": [
        ("compare --help", 0),
        ("compare run file --html page.html", 0),
        ("compare run --html", 2),
        ("compare run --html list.csv", 73),
        ("compare run --html .", 73),
        ("compare", 2),
        ("compare empty", 65),
        ("compare run --split dev", 2),
        ("compare run --split second_test", 65),
    ],
    "audit": [
        ("audit --help", 0),
        ("audit run --show 2 --spreadsheet --for cleanlab", 0),
        ("audit empty", 2),
        ("audit run --k 0", 2),
        ("audit run --k 1001", 2),
        ("audit run --for paint", 2),
    ],
    "review": [("review --help", 0), ("review empty", 2), ("review run --port 80000", 2)],
    "clean": [
        ("clean --help", 0),
        ("clean run", 65),
        ("audit run --no-report --show 0", 0),
        ("clean run", 0),
        ("clean run --relabel-above 0.5 --drop-below 0.5", 0),
        ("clean empty", 2),
        ("clean run --relabel-above 2", 2),
        ("clean run --drop-below nan", 2),
    ],
    "export": [
        ("export --help", 0),
        ("export run", 0),
        ("export run --out empty --format jpeg", 2),
        ("export run --out run", 65),
    ],
    "reproduce": [
        ("reproduce --help", 0),
        ("reproduce cifar --data toy --trials 1 --only *standard* --dry-run", 0),
        ("reproduce tables", 2),
        ("reproduce cifar --data nowhere", 65),
        ("reproduce cifar --trials 0", 2),
    ],
    "propagate": [
        ("propagate --help", 0),
        ("propagate run --k 20", 0),
        ("propagate nowhere", 2),
        ("propagate run --mu -1", 2),
        ("propagate run --mu nan", 2),
        ("propagate run --out rows.npy", 73),
    ],
    "recipes": [
        ("recipes --help", 0),
        ("recipes", 0),
        ("recipes nope", 2),
        ("recipes broken.py", 65),
    ],
    "doctor": [("doctor --help", 0), ("doctor now", 2)],
    "demo": [("demo --help", 0), ("demo --out file", 73)],
    "data": [
        ("data --help", 0),
        ("data get --help", 0),
        ("data check --help", 0),
        ("data", 2),
        ("data get mnist", 2),
        ("data get cifar10 --to file", 74),
        ("data check imagenet empty", 2),
        ("data check cifar10 empty", 65),
    ],
}


@pytest.mark.parametrize("verb", LINES)
def test_a_verb_says_what_its_snapshot_says(verb, here, run, capsys, monkeypatch, request):
    monkeypatch.setenv("COLUMNS", "100")
    parts = []
    for line, code in LINES[verb]:
        words = shlex.split(line)
        assert cli.main(words) == code, (line, capsys.readouterr().err)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "internal error" not in err
        # A complaint is one sentence or two on stderr, and nothing goes to stdout.
        assert code not in (2, 73, 74) or (out == "" and "error: " in err), line
        text = out + (f"--- stderr\n{err}" if err else "")
        if code == 0 and words and words[-1] != "--help":
            text = without_numbers(text)
        parts.append(f"$ nearsay {line}\n[{code}]\n{text.replace(str(here), '/here')}")
    path, content = FOLDER / f"{verb}.txt", "\n".join(parts)
    if request.config.getoption("--renew-snapshots", False):
        path.write_text(content, "utf-8")
    assert content == path.read_text("utf-8"), CURE


def without_numbers(text):
    """The text with # for each number, as results differ a little from machine to machine."""
    text = re.sub(r"[ \t─]+\n", "\n", re.sub(r"\d+(,\d{3})*(\.\d+)?(e-\d+)?", "#", text))
    return re.sub(r"[ \t]+", " ", text)


def test_every_verb_has_a_snapshot_and_every_snapshot_a_verb():
    verbs = {command.callback.__name__ for command in cli.app.registered_commands}
    groups = {group.name for group in cli.app.registered_groups}
    assert verbs | groups == LINES.keys() - {"nearsay"}
    assert {path.stem for path in FOLDER.iterdir()} == LINES.keys()
