import json

import numpy as np
import pytest

from nearsay import cli
from nearsay.config import ConfigError
from nearsay.sweep import grid, make_space


def test_a_grid_is_the_product_of_its_lists_with_the_last_changing_fastest():
    lists = ["optimizer.lr=0.1,0.2", "batch_size=50"]
    planned = grid("toy", ["method=standard,ncr", "epochs=1"], lists)
    names, objectives = [], []
    for method, kind in (("standard", "CrossEntropy"), ("ncr", "NCR")):
        for rate in (0.1, 0.2):
            names.append(f"toy-epochs=1-method={method}-batch_size=50-optimizer.lr={rate}")
            objectives.append((kind, rate))
    assert [run.name for run in planned] == names
    experiments = [run.call.experiment for run in planned]
    assert [(type(e.objective).__name__, e.optimizer.lr) for e in experiments] == objectives
    changes = ("--set", "optimizer.lr=0.2", "--set", "batch_size=50")
    assert planned[1].words == ("toy", "method=standard", "epochs=1", *changes)


def test_commas_in_brackets_belong_to_one_value():
    planned = grid("toy", [], ["backbone.hidden=(64,32),[16],8", "seed=1, 2"])
    hidden = [run.call.experiment.backbone.hidden for run in planned[::2]]
    assert hidden == [(64, 32), (16,), (8,)]
    assert [run.call.experiment.seed for run in planned[:2]] == [1, 2]


MANY = f"seed={','.join(map(str, range(101)))} noise={','.join(f'0.{n}' for n in range(100, 200))}"
WRONG = [  # a command without a search, and what the error names
    ("sede=1,2", "sede"),
    ("seed=1,two", "'two'"),
    ("seed=1,,2", "'1,,2'"),
    ("seed=1,2,1", "'1,2,1'"),
    ("noise=0.1..0.5", "--search optuna"),
    ("noise=0.1,7", "7"),
    ("--set objective.q=1,2", "'q'"),
    ("--set machine.device=cpu,auto", "machine.device"),
    (MANY, "10100"),
    ("seed=1,2 --trials 3", "--trials 3"),
    ("seed=1,2 --storage sqlite://", "--storage sqlite://"),
    ("seed=1,2 --metric test", "--metric"),
    ("seed=1,2 --at-once 0", "--at-once"),
]
WRONG_SEARCHES = [  # what to search in two trials, and what the error names
    ("noise=0..1 --metric test", "--metric"),
    ("noise=0..1", "validation"),  # there are no examples to judge by
    ("noise=0.5", "nothing to search"),
    ("seed=0..9", "seed"),
    ("noise=0.5..0.1", "'0.5..0.1'"),
    ("noise=0..0.1:log", "'0..0.1:log'"),
    ("noise=0..7", "7"),
    ("--set objective.k=1.5..9", "objective.k"),
    ("method=ncr,magic", "'magic'"),
]
JUDGES = [  # choices that would change the validation examples or their labels
    "--set held_out=0.1 noise=0.1..0.5",
    "--set held_out=0.1 --set noise.redraw=true,false",
    "--set held_out=0.1 --set labels_file=none,a.npz",
    "--set held_out=0.1,0.2",
    "--set validation_labels=given,clean",
    "--set held_out=0.1 --set data.distance=4..9",
    "--set held_out=0.1 --set validation_labels=clean --set labeled=0.2..1",
    "--set held_out=0.1 --set validation_labels=clean --set noise.rate=0.1,0.4",
]
SEARCH = "--search optuna --trials 2"
HUMAN = "cifar10 path=data labels=CIFAR-10_human.pt kind=human column=worse,aggre"
LINES = [(f"toy {line}", words) for line, words in WRONG]
LINES += [(f"toy {line} {SEARCH}", words) for line, words in WRONG_SEARCHES]
LINES += [(f"toy {line} {SEARCH}", "different labels") for line in JUDGES]
LINES += [
    (f"{HUMAN} --set held_out=0.1 {SEARCH}", "different labels"),
    ("toy noise=0..1 --search optuna --trials 0", "--trials"),
]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[line[:60] for line, _ in LINES])
def test_a_wrong_sweep_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys, line, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])


def test_labels_may_be_searched_if_the_data_has_its_own_validation_set(tmp_path):
    table, labels = np.eye(8, dtype=np.float32), np.arange(8) % 2
    arguments, lists = [f"path={tmp_path / 'f.npz'}"], ["labels_file=none,a.npz"]
    split = ["train"] * 6 + ["val", "test"]
    np.savez(tmp_path / "f.npz", features=table, labels=labels, split=split)
    space = make_space("embeddings", arguments, lists)
    assert [choice.texts for choice in space.choices if choice.is_open] == [("none", "a.npz")]
    # Without a split, some of the training examples are held out.
    np.savez(tmp_path / "f.npz", features=table, labels=labels)
    with pytest.raises(ConfigError, match="labels_file"):
        make_space("embeddings", arguments, lists)


def test_a_dry_run_prints_commands_and_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "toy", "seed=0,1", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    folder = "runs/sweep-toy-seed=0,1"
    command = "nearsay train toy seed={0} --out {1}/toy-seed={0}"
    assert out.splitlines() == [command.format(seed, folder) for seed in (0, 1)]
    assert err == f"2 runs would be in {folder}.\n"
    search = ["sweep", "toy", "--set", "objective.k=1..9", "--set", "held_out=0.1", "--dry-run"]
    assert cli.main([*search, "--search", "optuna", "--trials", "3", "--json"]) == 0
    space = json.loads(capsys.readouterr().out)["space"]
    assert space == {"objective.k": "1..9", "held_out": "0.1"}
    assert cli.main([*search, "--search", "optuna", "--trials", "1"]) == 0
    assert capsys.readouterr().err.startswith("1 trial would be in runs/")
    assert list(tmp_path.iterdir()) == []
