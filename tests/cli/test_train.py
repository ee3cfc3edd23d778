"""The verb train."""

import io
import json
import sys

from nearsay import cli

TOY = ["toy", "epochs=2", "--set", "batch_size=50"]
TOY += ["--set", "data.num_train=200", "--set", "data.num_test=120"]


def test_the_result_goes_to_stdout_and_progress_to_stderr(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    assert cli.main(["train", *TOY, "--json", "--seed", "3", "--device", "cpu"]) == 0
    first = json.loads(capsys.readouterr().out)
    progress = errors.getvalue()
    assert first["run"].startswith("runs/toy-epochs=2-seed=3-")
    assert first["seed"] == 3
    assert first["finished"] is True
    assert "epoch 1/2" in progress
    assert "epoch 2/2" in progress
    assert "\x1b" not in progress
    recorded = json.loads((tmp_path / first["run"] / "experiment.json").read_text())
    assert recorded["experiment"]["machine"]["device"] == "cpu"
    assert recorded["arguments"] == {"epochs": "2", "seed": "3"}
    # The same command finds the same folder, on whatever device.
    assert cli.main(["train", *TOY, "--json", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert "epoch" not in errors.getvalue().removeprefix(progress)


def test_the_method_is_an_option_too(tmp_path, capsys):
    for words in (["--method", "standard"], ["method=standard"]):
        assert cli.main(["train", *TOY, *words, "--dry-run", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["arguments"] == {"epochs": "2", "method": "standard"}
        assert plan["experiment"]["objective"]["kind"] == "CrossEntropy"
    assert cli.main(["train", *TOY, "method=ncr", "--method", "ncr", "--dry-run"]) == 2


def test_a_dry_run_prints_the_experiment_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "toy", "--set", "batch_size=64", "--dry-run"]
    assert cli.main(words) == 0
    assert "batch_size: 64" in capsys.readouterr().out.splitlines()
    assert cli.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recipe"] == "toy"
    assert plan["experiment"]["kind"] == "Experiment"
    assert plan["estimate"]["num_parameters"] == 25416
    assert plan["estimate"]["num_steps"] == 50 * (2000 // 64)
    assert list(tmp_path.iterdir()) == []


def test_a_field_that_is_an_argument_too_is_noted(tmp_path, capsys):
    words = ["--set", "seed=1", "--out", str(tmp_path / "run"), "--quiet"]
    assert cli.main(["train", *TOY, *words]) == 0
    err = capsys.readouterr().err
    assert err.startswith("note: ")
    assert "data.seed: 1, not 0" in err


def test_every_recipe_takes_a_share_of_labels_to_keep(tmp_path):
    assert cli.main(["train", *TOY, "labeled=0.1", "--out", str(tmp_path), "--quiet"]) == 0
    record = json.loads((tmp_path / "experiment.json").read_text())
    assert "labeled=0.1" in record["overrides"]
    assert record["experiment"]["labeled"] == 0.1


def test_an_error_in_the_users_loss_is_told_with_its_file_and_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def loss(logits, targets):\n    return logits.wrong\n")
    assert cli.main(["train", *TOY, "method=mine.py:loss", "--out", "run"]) == 70
    error = capsys.readouterr().err
    assert "AttributeError in line 2 of mine.py" in error
    assert "internal error" not in error
