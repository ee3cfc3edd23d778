"""The verbs audit and clean, and the commands that they tell to type next."""

import json
import shlex
import shutil

import numpy as np
import pytest
import torch

from nearsay import cli
from nearsay.doors.audit import audit_run
from nearsay.label_issues import audit

LIMITS = ["--relabel-above", "0.5", "--drop-below", "0.5"]
QUICK = ["size=8", "epochs=1", "--set", "backbone.width=2", "--quiet"]


def printed_command(out, words):
    """The words of the command that a printed line tells to type."""
    [line] = [line for line in out.splitlines() if f"nearsay {words}" in line]
    return shlex.split(line[line.index("nearsay ") :])[1:]


def test_labels_are_audited_cleaned_and_learned_again(run, capsys, monkeypatch):
    monkeypatch.setattr("nearsay.report.audit_examples.MOST_POINTS", 50)
    assert cli.main(["audit", str(run), "--show", "3"]) == 0
    out = capsys.readouterr().out
    for name in ("audit.csv", "report.html"):
        assert str(run / name) in out
        assert (run / name).is_file()
    assert cli.main(["audit", str(run), "--json", "--no-report"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["detection"]["score"]["auroc"] > 0.9
    assert cli.main(["clean", str(run), *LIMITS]) == 0
    again = printed_command(capsys.readouterr().out, "train")
    assert again[-4:] == ["--set", f"labels_file={run / 'cleaned.npz'}", "--out", f"{run}-cleaned"]
    assert cli.main([*again, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"]["effective_rate"] < 0.1
    assert cli.main(["clean", str(run), "--json", *LIMITS]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["relabeled"] > 0
    assert str(run / "cleaned.npz") in counts["files"]


def test_who_cleans_again_is_not_given_the_result_of_the_labels_before(run, capsys):
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    commands = []
    # The second cleaning makes the same labels, the third others.
    for limit in ("0.5", "0.5", "0.9"):
        capsys.readouterr()
        assert cli.main(["clean", str(run), "--relabel-above", limit, "--drop-below", "0.5"]) == 0
        commands.append(printed_command(capsys.readouterr().out, "train toy"))
        if len(commands) < 3:
            assert cli.main([*commands[-1], "--quiet"]) == 0
    assert commands[0] == commands[1]
    assert commands[2] == [*commands[0][:-1], f"{commands[0][-1]}-2"]
    assert cli.main([*commands[0], "--quiet"]) == 65
    err = capsys.readouterr().err
    assert f"{run}-cleaned" in err
    assert "labels_file=" in err
    assert cli.main([*commands[2], "--quiet"]) == 0
    # What is not there says nothing against a result.
    (run / "cleaned.npz").unlink()
    for command in commands:
        assert cli.main([*command, "--quiet"]) == 0


def test_an_audit_names_files_counts_unreadable_ones_and_tells_what_to_do_next(photographs, capsys):
    assert cli.main(["audit", str(photographs / "first"), "--no-report", "--show", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count(".png") == 4
    run = shlex.quote(str(photographs / "first"))
    assert f"nearsay review {run}" in out
    assert f"nearsay clean {run}" in out
    assert cli.main(["audit", str(photographs / "first"), "--no-report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_unreadable"] == 1


def test_after_an_audit_without_issues_there_is_nothing_to_do(tmp_path, capsys):
    clean = torch.arange(60) % 3
    features = 4 * torch.eye(3)[clean] + torch.linspace(-0.1, 0.1, 180).reshape(60, 3)
    for name, num_wrong in (("none", 0), ("one", 1)):
        given = clean.clone()
        given[0] = num_wrong
        np.savez(tmp_path / f"{name}.npz", features=features.numpy(), labels=given.numpy())
        run = str(tmp_path / name)
        words = [f"path={tmp_path / name}.npz", "held_out=0", "batch_size=20"]
        words += ["--set", "epochs=10", "--out", run, "--quiet"]
        assert cli.main(["train", "embeddings", *words]) == 0
        assert cli.main(["audit", run, "--no-report"]) == 0
        out = capsys.readouterr().out
        assert f"{num_wrong} of 60 labels" in out
        assert ("nearsay review" in out) == bool(num_wrong)
        assert cli.main(["clean", run, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["relabeled"] == num_wrong
    # Decided after an earlier audit.
    (tmp_path / "none" / "corrections.csv").write_text("index,label\n7,2\n")
    assert cli.main(["audit", str(tmp_path / "none"), "--no-report"]) == 0
    assert "nearsay review" in capsys.readouterr().out


def test_an_audit_by_a_network_that_has_learned_nothing_doubts_itself_and_so_does_cleaning(
    photographs, capsys
):
    run = photographs / "first"
    assert cli.main(["audit", str(run), "--json", "--no-report"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["noise_rate"]["estimate"] > 0.4
    agreement = json.loads((run / "result.json").read_text())["accuracy"]["validation"]["final"]
    assert f"{100 * agreement:.1f} %" in summary["doubt"]
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    assert summary["doubt"] in capsys.readouterr().err
    assert cli.main(["clean", str(run), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["relabeled"], counts["dropped"]) == (0, 0)
    assert counts["review"] == summary["num_issues"]
    assert cli.main(["clean", str(run)]) == 0
    out, err = capsys.readouterr()
    assert summary["doubt"] in err
    assert "--relabel-above 0.5 --drop-below 0.5" in err
    assert "nearsay train" not in out
    assert f"nearsay review {shlex.quote(str(run))}" in out
    # Who sets a limit is told of the doubt as well.
    assert cli.main(["clean", str(run), "--drop-below", "0.9"]) == 0
    out, err = capsys.readouterr()
    assert summary["doubt"] in err
    assert "--relabel-above" not in err
    again = printed_command(out, "train folder")
    assert again[:3] == ["train", "folder", f"path={photographs / 'photos'}"]


def test_the_manifest_of_clean_labels_is_trained_on_by_the_command_that_is_printed(
    photographs, tmp_path, capsys
):
    run = photographs / "first"
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    assert cli.main(["clean", str(run), "--drop-below", "0.9"]) == 0
    words = printed_command(capsys.readouterr().out, "train manifest")
    root = f"root={photographs / 'photos'}"
    assert words == ["train", "manifest", f"path={run / 'cleaned.csv'}", root]
    assert cli.main([*words, *QUICK, "--out", str(tmp_path / "again")]) == 0
    assert cli.main([*words[:3], *QUICK, "--out", str(tmp_path / "lost")]) != 0
    assert "root=" in capsys.readouterr().err
    # evaluate takes no root=, so the table must lie beside the images.
    assert cli.main(["evaluate", str(run), "--data", str(run / "cleaned.csv")]) == 65
    there = shutil.copytree(photographs / "photos", tmp_path / "photos")
    assert cli.main(["evaluate", str(run), "--data", shutil.copy(run / "cleaned.csv", there)]) == 0


def test_after_the_images_were_moved_away_their_names_are_left_out_and_no_old_manifest_stays(
    photographs, tmp_path, capsys
):
    root = shutil.copytree(photographs / "photos", tmp_path / "photos")
    run = tmp_path / "run"
    words = [f"path={root}", *QUICK, "--out", str(run), "held_out=0.3"]
    assert cli.main(["train", "folder", *words]) == 0
    audit_words, clean_words = ["audit", str(run), "--no-report"], ["clean", str(run)]
    assert cli.main(audit_words) == 0
    assert cli.main(clean_words) == 0
    assert (run / "cleaned.csv").is_file()
    root.rename(tmp_path / "elsewhere")
    for words in (audit_words, [*clean_words, "--drop-below", "0.9"]):
        capsys.readouterr()
        assert cli.main(words) == 0
        assert str(root) in capsys.readouterr().err
    assert not (run / "cleaned.csv").exists()
    (tmp_path / "elsewhere").rename(root)
    (root / "light/x.jpg").unlink()
    for words in (audit_words, clean_words):
        assert cli.main(words) == 0
        err = capsys.readouterr().err
        assert "25" in err
        assert "24" in err


def test_an_audit_is_doubted_above_a_share_of_wrong_labels_and_not_at_it(
    photographs, capsys, monkeypatch
):
    run = photographs / "first"
    estimate = audit_run(run, report=False).audit.noise_rate.estimate
    monkeypatch.setattr("nearsay.label_issues.run_audit.DOUBTFUL", estimate)
    assert audit_run(run, report=False).summary["doubt"] is None
    assert cli.main(["clean", str(run)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("nearsay.label_issues.run_audit.DOUBTFUL", estimate - 1e-9)
    assert audit_run(run, report=False).summary["doubt"] is not None


def test_where_no_label_could_be_judged_the_noise_rate_is_unknown(run, capsys, monkeypatch):
    monkeypatch.setattr(
        "nearsay.label_issues.run_audit.audit",
        lambda labels, *, classes, **_: audit(
            labels, features=torch.ones(len(labels), 2), classes=classes
        ),
    )
    assert cli.main(["audit", str(run)]) == 0
    out, err = capsys.readouterr()
    assert "unknown" in out
    assert err == ""
    assert (run / "report.html").is_file()
    assert cli.main(["audit", str(run), "--json", "--no-report"]) == 0
    rate = json.loads(capsys.readouterr().out)["noise_rate"]
    assert rate == {"estimate": None, "low": 0, "high": 1}


def test_the_command_to_train_again_hides_no_label_a_second_time(run, capsys):
    record = json.loads((run / "experiment.json").read_text())
    record["overrides"].append("labeled=0.5")
    (run / "experiment.json").write_text(json.dumps(record))
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    assert cli.main(["clean", str(run), *LIMITS]) == 0
    again = printed_command(capsys.readouterr().out, "train toy")
    assert cli.main([*again, "--quiet"]) == 0
    learned, cleaned = (
        np.load(path)["given"] for path in (f"{run}-cleaned/labels.npz", run / "cleaned.npz")
    )
    assert learned.tolist() == cleaned.tolist()


@pytest.mark.parametrize("verb", ["audit", "clean", "review", "evaluate", "export", "propagate"])
def test_a_folder_without_a_run_is_refused(verb, tmp_path):
    assert cli.main([verb, str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())
