"""The verbs about labels to distrust, as a user types them."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nearsay import cli
from nearsay.config.commands import command_again
from nearsay.doors.audit import audit_run
from nearsay.label_issues import audit
from nearsay.training.evaluate import evaluation_cells


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
    assert summary["doubt"] is not None  # 40 % are wrong indeed, which the audit cannot know
    limits = ["--relabel-above", "0.5", "--drop-below", "0.5"]
    assert cli.main(["clean", str(finished), *limits]) == 0
    words = f"nearsay train toy epochs=3 --set relabeled={finished / 'cleaned.npz'} --out {finished}-cleaned"
    assert f"Train on them: {words}\n" in capsys.readouterr().out
    again = [
        "train",
        "toy",
        "epochs=1",
        "--set",
        f"relabeled={finished / 'cleaned.npz'}",
        "--out",
        str(tmp_path),
    ]
    assert cli.main([*again, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"]["effective_rate"] < 0.2
    assert cli.main(["clean", str(finished), "--json", *limits]) == 0
    assert json.loads(capsys.readouterr().out)["relabeled"] > 0


def test_who_cleans_again_is_not_given_the_result_of_the_labels_before(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    said = []
    for limit in (
        "0.5",
        "0.5",
        "0.9",
    ):  # the second cleaning makes the same labels, the third others
        assert cli.main(["clean", str(run), "--relabel-above", limit, "--drop-below", "0.5"]) == 0
        said.append(
            capsys.readouterr().out.splitlines()[-1].removeprefix("Train on them: nearsay ")
        )
        if len(said) < 3:
            assert cli.main([*shlex.split(said[-1]), "--quiet"]) == 0
    assert said[0] == said[1]
    assert said[2] == f"{said[0]}-2"
    assert cli.main([*shlex.split(said[0]), "--quiet"]) == 65
    told = capsys.readouterr().err
    assert (
        f"{run}-cleaned is finished and has learned other labels than relabeled='{run}/cleaned.npz' holds"
        in told
    )
    assert cli.main([*shlex.split(said[2]), "--quiet"]) == 0
    (run / "cleaned.npz").unlink()
    for again in said:  # what is not there says nothing against a result
        assert cli.main([*shlex.split(again), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["audit", "EMPTY"], 2, "holds no run; give the folder that nearsay train has named"),
        (["audit", "RUN", "--k", "0"], 2, "k"),
        (["audit", "RUN", "--k", "1001"], 2, "less than or equal to 1000"),
        (["clean", "EMPTY"], 2, "holds no run"),
        (["review", "EMPTY"], 2, "holds no run"),
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


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of gray, light and dark pictures, one file of them broken, and a run that has learned nothing of it."""
    root = tmp_path_factory.mktemp("my photos")
    random = np.random.default_rng(0)
    for name in ("dark side", "light"):
        (root / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 256, size=(10 + number, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "photos" / name / f"{number}.png")
    (root / "photos/light/x.jpg").write_text("no picture")
    words = [
        f"path={root / 'photos'}",
        "size=8",
        "epochs=1",
        "held_out=0.3",
        "--set",
        "backbone.width=2",
    ]
    assert cli.main(["train", "folder", *words, "--out", str(root / "first"), "--quiet"]) == 0
    return root


def test_an_audit_names_files_says_what_it_could_not_judge_and_what_to_do_next(photographs, capsys):
    assert cli.main(["audit", str(photographs / "first"), "--no-report", "--show", "4"]) == 0
    said = capsys.readouterr().out
    assert said.count(".png") == 4
    assert "Files that could not be read, so that their labels were not judged: 1." in said
    run = shlex.quote(str(photographs / "first"))
    assert (
        f"Next: nearsay review {run} to decide by hand, nearsay clean {run} for labels to train on."
        in said
    )


def test_after_an_audit_that_finds_nothing_there_is_nothing_to_do(tmp_path, capsys):
    clean = torch.arange(60) % 3
    features = 4 * torch.eye(3)[clean] + torch.linspace(-0.1, 0.1, 180).reshape(60, 3)
    for name, is_wrong in (("none", 0), ("one", 1)):
        given = clean.clone()
        given[0] = is_wrong
        np.savez(tmp_path / f"{name}.npz", features=features.numpy(), labels=given.numpy())
        run = str(tmp_path / name)
        words = [
            "train",
            "embeddings",
            f"path={tmp_path / name}.npz",
            "held_out=0",
            "batch_size=20",
            "--set",
        ]
        assert cli.main([*words, "epochs=10", "--out", run, "--quiet"]) == 0
        assert cli.main(["audit", run, "--no-report"]) == 0
        said = capsys.readouterr().out
        assert f"{is_wrong} of 60 labels {'seems' if is_wrong else 'seem'} wrong" in said
        assert ("Next: nearsay review" in said) == bool(is_wrong)
        assert cli.main(["clean", run]) == 0
        assert capsys.readouterr().out.startswith(
            ("0 labels relabeled", "1 label relabeled")[is_wrong]
        )
    (tmp_path / "none" / "corrections.csv").write_text(
        "index,label\n7,2\n"
    )  # decided after an earlier audit
    assert cli.main(["audit", str(tmp_path / "none"), "--no-report"]) == 0
    assert "Next: nearsay review" in capsys.readouterr().out


def test_an_audit_by_a_network_that_has_learned_nothing_doubts_itself_and_so_does_cleaning(
    photographs, capsys
):
    run = photographs / "first"
    assert cli.main(["audit", str(run), "--json", "--no-report"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["noise_rate"]["estimate"] > 0.4
    agreed = json.loads((run / "result.json").read_text())["accuracy"]["validation"]["final"]
    assert (
        f"has learned too little (it agrees with {100 * agreed:.1f} % of the held-out labels)"
        in summary["doubt"]
    )
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    assert f"note: {summary['doubt']}." in capsys.readouterr().err
    assert cli.main(["clean", str(run)]) == 0
    told = capsys.readouterr()
    assert f"{summary['doubt']}; so only what you decided was changed" in told.err
    assert told.out.startswith(
        f"0 labels relabeled, 0 dropped, {summary['num_issues']} to be reviewed."
    )
    assert "nearsay train" not in told.out
    told = told.out.splitlines()[-1]
    assert told.endswith(
        f"nothing new to train on; decide by hand with nearsay review {shlex.quote(str(run))}."
    )
    assert (
        cli.main(["clean", str(run), "--drop-below", "0.9"]) == 0
    )  # who gives a number is told of the doubt as well
    told = capsys.readouterr()
    assert told.err == f"note: {summary['doubt']}.\n"
    words = ["nearsay", "train", "folder", f"path={photographs / 'photos'}"]
    assert shlex.split(told.out.splitlines()[-1].removeprefix("Train on them: "))[:4] == words


def test_the_manifest_of_clean_labels_is_trained_on_by_the_command_that_is_printed(
    photographs, tmp_path, capsys
):
    run = photographs / "first"
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    assert cli.main(["clean", str(run), "--drop-below", "0.9"]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if "train manifest" in line)
    words = shlex.split(told.removeprefix("As a table for other settings: "))
    assert words == [
        "nearsay",
        "train",
        "manifest",
        f"path={run / 'cleaned.csv'}",
        f"root={photographs / 'photos'}",
    ]
    quick = [
        "size=8",
        "epochs=1",
        "--set",
        "backbone.width=2",
        "--quiet",
        "--out",
        str(tmp_path / "again"),
    ]
    assert cli.main([*words[1:], *quick]) == 0
    assert cli.main([*words[1:4], *quick[:-1], str(tmp_path / "lost")]) != 0
    told = "(No such file or directory); put the table there, or give nearsay train a root= if they lie elsewhere\n"
    assert told in capsys.readouterr().err
    assert (
        cli.main(["evaluate", str(run), "--data", str(run / "cleaned.csv")]) == 65
    )  # which takes no root=
    assert told in capsys.readouterr().err
    there = shutil.copytree(photographs / "photos", tmp_path / "photos")
    assert cli.main(["evaluate", str(run), "--data", shutil.copy(run / "cleaned.csv", there)]) == 0


def test_after_the_images_were_moved_away_it_is_said_what_is_left_out_and_no_old_manifest_stays(
    photographs, capsys
):
    run, photos = photographs / "first", photographs / "photos"
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    assert cli.main(["clean", str(run)]) == 0
    assert (run / "cleaned.csv").is_file()
    capsys.readouterr()
    photos.rename(photographs / "elsewhere")
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    told = capsys.readouterr().err
    assert f"note: the data is not as it was (path={str(photos)!r} is no folder; " in told
    assert cli.main(["clean", str(run), "--drop-below", "0.9"]) == 0
    assert not (run / "cleaned.csv").exists()
    told = capsys.readouterr().err
    assert f"note: the data is not as it was (path={str(photos)!r} is no folder; " in told
    assert told.endswith(
        "so there is no manifest of it; put it back before you train on the new labels.\n"
    )
    (photographs / "elsewhere").rename(photos)
    (photos / "light/x.jpg").rename(photographs / "x.jpg")
    for words in (["audit", str(run), "--no-report"], ["clean", str(run)]):
        assert cli.main(words) == 0
        assert "the run has learned 25 examples, and now there are 24" in capsys.readouterr().err
    (photographs / "x.jpg").rename(photos / "light/x.jpg")


def test_where_files_of_a_manifest_are_gone_the_first_of_them_is_named(
    photographs, tmp_path, capsys
):
    shutil.copytree(
        photographs / "photos", tmp_path / "photos", ignore=shutil.ignore_patterns("x.jpg")
    )
    paths = sorted(path.relative_to(tmp_path) for path in (tmp_path / "photos").rglob("*.png"))
    table, run = tmp_path / "labels.csv", str(tmp_path / "run")
    table.write_text("path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in paths))
    quick = ["size=8", "epochs=1", "--set", "backbone.width=2", "--quiet"]
    assert cli.main(["train", "manifest", f"path={table}", *quick, "--out", run]) == 0
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    capsys.readouterr()
    for words in (["audit", run, "--no-report"], ["clean", run]):
        assert cli.main(words) == 0
        told = capsys.readouterr().err
        assert (
            f"note: the data is not as it was ({table}: 24 problems, the first 20: {table}:2: path "
            in told
        )
        assert f"{str(paths[0])!r} names no file below " in told


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


def test_where_no_label_could_be_judged_the_share_of_wrong_ones_is_unknown(
    finished, tmp_path, capsys, monkeypatch
):
    run = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr("nearsay.report.mapping.MOST_POINTS", 50)
    monkeypatch.setattr(
        "nearsay.label_issues.run_audit.audit",
        lambda labels, *, classes, **_: audit(
            labels, features=torch.ones(len(labels), 2), classes=classes
        ),
    )
    assert cli.main(["audit", str(run)]) == 0
    said = capsys.readouterr()
    assert "labels seem wrong; how many are is unknown, as none could be judged.\n" in said.out
    assert said.err == ""
    assert (
        "No label could be judged, so how many are wrong is unknown."
        in (run / "report.html").read_text()
    )
    assert cli.main(["audit", str(run), "--json", "--no-report"]) == 0
    assert json.loads(capsys.readouterr().out)["noise_rate"] == {
        "estimate": None,
        "low": 0,
        "high": 1,
    }


def test_one_label_is_told_of_in_the_singular(finished, tmp_path, capsys, monkeypatch):
    run = shutil.copytree(finished, tmp_path / "run")
    found = {}

    def with_one_issue(*positional, **named):
        found["audit"] = audit(*positional, **named)
        first = torch.arange(len(found["audit"].given)) == found["audit"].order()[0]
        return replace(found["audit"], is_issue=first)

    monkeypatch.setattr("nearsay.label_issues.run_audit.audit", with_one_issue)
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    num_labels = int((found["audit"].given >= 0).sum())
    assert f"1 of {num_labels:,} labels seems wrong; about " in capsys.readouterr().out
    given = np.load(run / "labels.npz")
    other = given["classes"][(given["given"][0] + 1) % len(given["classes"])]
    (run / "corrections.csv").write_text(f"index,label\n0,{other}\n")
    assert cli.main(["clean", str(run), "--relabel-above", "1", "--drop-below", "0"]) == 0
    assert capsys.readouterr().out.startswith("1 label relabeled, 0 dropped, ")


def test_further_tables_of_an_audit_are_named(finished, capsys):
    assert cli.main(["audit", str(finished), "--no-report", "--spreadsheet"]) == 0
    assert f"Wrote {finished / 'audit-spreadsheet.csv'}\n" in capsys.readouterr().out


def test_the_command_to_train_again_replaces_older_labels_and_quotes_what_a_shell_would_read():
    origin = {
        "recipe": "folder",
        "arguments": {"path": "/a b"},
        "overrides": ["epochs=2", "relabeled=/old.npz"],
    }
    told = command_again(origin, relabeled=Path("r/cleaned.npz"), out=Path("r-cleaned"))
    assert (
        told
        == "nearsay train folder 'path=/a b' --set epochs=2 --set relabeled=r/cleaned.npz --out r-cleaned"
    )


def test_the_command_to_train_again_hides_no_label_a_second_time(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    record = json.loads((run / "experiment.json").read_text())
    record["overrides"].append("labeled=0.5")
    (run / "experiment.json").write_text(json.dumps(record))
    assert cli.main(["audit", str(run), "--no-report"]) == 0
    assert cli.main(["clean", str(run), "--relabel-above", "0.5", "--drop-below", "0.5"]) == 0
    told = capsys.readouterr().out.splitlines()[-1].removeprefix("Train on them: nearsay ")
    assert cli.main([*shlex.split(told), "--quiet"]) == 0
    learned, cleaned = (
        np.load(path)["given"] for path in (f"{run}-cleaned/labels.npz", run / "cleaned.npz")
    )
    assert learned.tolist() == cleaned.tolist()


def test_other_data_is_called_by_its_name_when_it_is_judged(photographs, capsys):
    others = str(photographs / "others")
    shutil.copytree(photographs / "photos", others, ignore=shutil.ignore_patterns("x.jpg"))
    assert cli.main(["evaluate", str(photographs / "first"), "--data", others]) == 0
    assert f"{others} (24 examples)" in capsys.readouterr().out
    assert cli.main(["evaluate", str(photographs / "first"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] is None


def test_files_that_cannot_be_read_are_named_when_other_data_is_judged(
    photographs, tmp_path, capsys
):
    others = shutil.copytree(photographs / "photos", tmp_path / "others")
    words = ["evaluate", str(photographs / "first"), "--data", str(others)]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert said.err == "note: 1 of the files was left out, as it could not be read: light/x.jpg.\n"
    assert "(24 examples)" in said.out
    for number in range(6):
        (others / f"dark side/{number}.png").write_text("no picture")
    assert cli.main([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.endswith(
        f": {', '.join(f'dark side/{number}.png' for number in range(5))} and 2 more.\n"
    )
    found = json.loads(said.out)
    assert (found["num_examples"], found["num_unreadable"], found["unreadable"][-1]) == (
        18,
        7,
        "light/x.jpg",
    )


@pytest.mark.parametrize(
    ("names", "told", "code"),
    [
        (["x.jpg"], "1 row with an error is in ", 65),
        (["0.png", "x.jpg"], "2 rows, 1 of them with an error, are in ", 0),
        (["0.png", "1.png"], "2 rows are in ", 0),
    ],
)
def test_rows_with_an_error_are_counted_when_labels_are_written(
    photographs, tmp_path, capsys, names, told, code
):
    images = [str(photographs / "photos/light" / name) for name in names]
    words = ["predict", str(photographs / "first"), *images, "--out", str(tmp_path / "labels.csv")]
    assert cli.main(words) == code
    assert capsys.readouterr().out == f"{told}{tmp_path / 'labels.csv'}.\n"


@pytest.mark.parametrize(
    ("num", "told"), [(1, "nothing was predicted: '"), (2, "predicted: the first of 2 errors: '")]
)
def test_nothing_but_errors_is_an_error_but_the_table_is_there(
    photographs, tmp_path, capsys, num, told
):
    paths = [tmp_path / f"{number}.csv" for number in range(num)]
    for path in paths:
        path.write_text("path,label\n")
    assert cli.main(["predict", str(photographs / "first"), *map(str, paths)]) == 65
    said = capsys.readouterr()
    assert [line.split(",")[0] for line in said.out.splitlines()] == ["path", *map(str, paths)]
    assert f"{told}{paths[0]}' is no JPEG" in said.err


def test_one_example_is_told_of_as_one():
    shares = dict.fromkeys(
        ["accuracy", "balanced_accuracy", "top_5_accuracy", "calibration_error", "nll", "detection"]
    )
    headers, rows = evaluation_cells({**shares, "split": "test", "data": None, "num_examples": 1})
    assert (headers, rows) == (["", "test (1 example)"], [])
