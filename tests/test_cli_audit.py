"""The verbs about labels to distrust, as a user types them."""

import json

import pytest

from nearsay import cli


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    assert cli.main(["train", "toy", "epochs=3", "--out", str(folder), "--quiet"]) == 0
    return folder


def test_labels_are_audited_cleaned_and_learned_again(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nearsay.report.mapping.MOST_POINTS", 50)
    assert cli.main(["audit", str(finished), "--show", "3"]) == 0
    said = capsys.readouterr().out
    assert f"open {finished / 'report.html'} in a browser" in said
    assert "label score" in said
    assert "95 % interval" in said
    assert (finished / "audit.csv").is_file()
    assert cli.main(["audit", str(finished), "--json", "--no-report"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["detection"]["score"]["auroc"] > 0.9
    assert cli.main(["clean", str(finished)]) == 0
    assert f"--set relabeled={finished / 'cleaned.npz'}" in capsys.readouterr().out
    again = ["train", "toy", "epochs=1", "--set", f"relabeled={finished / 'cleaned.npz'}", "--out", str(tmp_path)]
    assert cli.main([*again, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"]["effective_rate"] < 0.2
    assert cli.main(["clean", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["relabeled"] > 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["audit", "EMPTY"], 65, "labels"),
        (["audit", "RUN", "--k", "0"], 2, "k"),
        (["clean", "EMPTY"], 65, "labels"),
        (["clean", "RUN", "--relabel-above", "2"], 2, "--relabel-above 2"),
        (["clean", "RUN", "--drop-below", "nan"], 2, "--drop-below nan"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(words, code, told, finished, tmp_path, capsys):
    places = {"EMPTY": str(tmp_path), "RUN": str(finished)}
    assert cli.main([places.get(word, word) for word in words]) == code
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said
