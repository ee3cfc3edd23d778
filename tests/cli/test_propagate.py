"""The verbs around the paper: propagate, reproduce and data check."""

import json
import shlex

import numpy as np
import pytest

from nearsay import cli


def test_labels_are_propagated_and_learned(run, tmp_path, capsys):
    assert cli.main(["propagate", str(run), "--k", "20"]) == 0
    assert f"--set labels_file={run / 'propagated.npz'}" in capsys.readouterr().out
    words = ["toy", "epochs=1", "--set", f"labels_file={run / 'propagated.npz'}"]
    words += ["--set", "data.num_train=400", "--out", str(tmp_path / "again")]
    assert cli.main(["train", *words, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"]["effective_rate"] < 0.2
    other = str(tmp_path / "other.npz")
    assert cli.main(["propagate", str(run), "--json", "--out", other]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["file"] == other
    assert report["accuracy_after"] > report["accuracy_before"]
    spaced = tmp_path / "my labels.npz"
    assert cli.main(["propagate", str(run), "--out", str(spaced)]) == 0
    assert spaced.is_file()
    assert f"--set {shlex.quote(f'labels_file={spaced}')}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["labels.npz", "features.npz", "notes.npz"])
def test_propagated_labels_replace_nothing_else(run, name):
    np.savez(run / "features.npz", features=np.zeros((2, 3)), labels=np.zeros(2))
    (run / "notes.npz").write_text("notes")
    content = (run / name).read_bytes()
    assert cli.main(["propagate", str(run), "--out", str(run / name)]) == 73
    assert (run / name).read_bytes() == content


def test_a_data_set_that_is_not_there_is_missing(tmp_path, capsys):
    assert cli.main(["data", "check", "cifar10", str(tmp_path)]) == 65
    assert "missing" in capsys.readouterr().out
    assert cli.main(["data", "check", "cifar10", str(tmp_path), "--json"]) == 65
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {part["status"] for part in findings} == {"missing"}
