"""The verbs around the paper, as a user types them."""

import json
import shutil

import numpy as np
import pytest

from nearsay import cli


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    assert cli.main(["train", "toy", "epochs=2", "--out", str(folder), "--quiet"]) == 0
    return folder


def test_labels_are_propagated_and_learned(finished, tmp_path, capsys):
    assert cli.main(["propagate", str(finished), "--k", "20"]) == 0
    said = capsys.readouterr().out
    assert "right before" in said
    assert f"--set relabeled={finished / 'propagated.npz'}" in said
    command = [
        "train",
        "toy",
        "epochs=1",
        "--set",
        f"relabeled={finished / 'propagated.npz'}",
        "--out",
        str(tmp_path),
    ]
    assert cli.main([*command, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"]["effective_rate"] < 0.4
    assert (
        cli.main(["propagate", str(finished), "--json", "--out", str(tmp_path / "other.npz")]) == 0
    )
    assert json.loads(capsys.readouterr().out)["file"] == str(tmp_path / "other.npz")
    assert (tmp_path / "other.npz").is_file()
    assert cli.main(["propagate", str(finished), "--out", str(tmp_path / "my labels.npz")]) == 0
    assert f"--set 'relabeled={tmp_path}/my labels.npz'" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["labels.npz", "features.npz", "notes.npz"])
def test_propagated_labels_replace_nothing_else(finished, tmp_path, capsys, name):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    np.savez(run / "features.npz", features=np.zeros((2, 3)), labels=np.zeros(2))
    (run / "notes.npz").write_text("notes")
    content = (run / name).read_bytes()
    assert cli.main(["propagate", str(run), "--out", str(run / name)]) == 73
    assert (
        f"{name} holds something else and would be replaced; choose another --out"
        in capsys.readouterr().err
    )
    assert (run / name).read_bytes() == content


def test_every_recipe_takes_a_share_of_labels_to_keep(tmp_path):
    assert (
        cli.main(["train", "toy", "labeled=0.1", "epochs=1", "--out", str(tmp_path), "--quiet"])
        == 0
    )
    record = json.loads((tmp_path / "experiment.json").read_text())
    assert record["overrides"] == ["labeled=0.1"]
    assert record["experiment"]["labeled"] == 0.1


def test_a_dry_run_of_a_table_lists_its_runs(tmp_path, capsys):
    assert (
        cli.main(
            [
                "reproduce",
                "cifar",
                "--data",
                "toy",
                "--trials",
                "1",
                "--dry-run",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("cifar: runs: 0 done, ")
    assert "to do   toy-method=standard-noise=0.2" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ["reproduce", "tables"],
            2,
            "baselines, realistic, cifar, batch-size, ablation, confidence, similarity",
        ),
        (["reproduce", "cifar", "--data", "/nowhere/at/all"], 65, "/nowhere/at/all"),
        (["reproduce", "cifar", "--trials", "0"], 2, "trials"),
        (["propagate", "/nowhere"], 2, "/nowhere"),
        (["data", "check", "imagenet", "/tmp"], 2, "'imagenet'"),
        (["train", "cifar10", "path=/tmp", "method=nothing"], 2, "ncr+elr+"),
        (["train", "mini_imagenet", "path=/nowhere", "noise=0.3"], 2, "0.2"),
        (["train", "webvision", "path=/nowhere"], 65, "/nowhere"),
        (["train", "clothing1m", "path=/nowhere"], 65, "/nowhere"),
        (["train", "toy", "--set", "labeled=0"], 2, "labeled=0"),
        (["train", "toy", "labeled=2"], 2, "labeled=2"),
        (
            ["train", "cifar10", "path=/tmp", "method=elr+", "start=auto"],
            2,
            "start='auto' is of NCR",
        ),
        (
            ["train", "webvision", "path=/tmp", "method=standard", "alpha=0.5"],
            2,
            "alpha=0.5 is of NCR",
        ),
        (
            ["sweep", "toy", "seed=0,1", "--metric", "speed"],
            2,
            "it is validation, also called held-out",
        ),
        (["propagate", "RUN", "--mu", "-1"], 2, "--mu -1"),
        (["propagate", "RUN", "--mu", "nan"], 2, "--mu nan"),
        (["train", "toy", "--set", "noise_per_network=true"], 2, "networks=2"),
        (["train", "toy", "--set", "relabeled=/nowhere.npz"], 65, "/nowhere.npz"),
        (["train", "toy", "--set", "objective.start_epoch=soon"], 2, "auto"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    words, code, told, finished, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [str(finished) if word == "RUN" else word for word in words]
    assert cli.main(words) == code
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said


def test_a_data_set_that_is_not_there_is_missing_and_told_where_to_get(tmp_path, capsys):
    assert cli.main(["data", "check", "clothing1m", str(tmp_path)]) == 65
    said = capsys.readouterr().out
    assert "missing" in said
    assert cli.main(["data", "check", "cifar10", str(tmp_path), "--json"]) == 65
    assert {each["status"] for each in json.loads(capsys.readouterr().out)["findings"]} == {
        "missing"
    }
