"""The verbs that read runs: evaluate, predict, compare and export."""

import csv
import io
import json
import shutil

import numpy as np
import pytest

from nearsay import cli


def test_evaluate_prints_the_accuracy_that_training_measured(run, capsys):
    result = json.loads((run / "result.json").read_text())
    assert cli.main(["evaluate", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["accuracy"] == pytest.approx(result["accuracy"]["test"]["final"])
    assert report["data"] is None
    assert cli.main(["evaluate", str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"{100 * report['accuracy']:.1f} %" in printed
    assert "test (120 examples)" in printed


def test_other_data_is_called_by_its_name_and_its_unreadable_files_are_named(
    photographs, tmp_path, capsys
):
    others = shutil.copytree(photographs / "photos", tmp_path / "others")
    words = ["evaluate", str(photographs / "first"), "--data", str(others)]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert f"{others} (24 examples)" in out
    assert "light/x.jpg" in err
    for number in range(6):
        (others / f"dark side/{number}.png").write_text("no picture")
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    # The first five of seven are named.
    assert err.count("dark side/") == 5
    assert "light/x.jpg" not in err
    report = json.loads(out)
    assert (report["num_examples"], report["num_unreadable"]) == (18, 7)
    assert report["unreadable"][-1] == "light/x.jpg"


def test_predict_prints_csv_or_writes_a_table(run, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(3, 32)))
    assert cli.main(["predict", str(run), str(tmp_path / "x.npy")]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["path"] for row in rows] == [f"{tmp_path}/x.npy:{number}" for number in range(3)]
    out = tmp_path / "y.jsonl"
    assert cli.main(["predict", str(run), str(tmp_path / "x.npy"), "--out", str(out)]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["label"] for row in written] == [row["label"] for row in rows]
    assert [row["probability"] for row in written] == [float(row["probability"]) for row in rows]


def test_a_device_that_is_not_there_is_no_fault_of_the_features(run, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((3, 32)))
    assert cli.main(["predict", str(run), str(tmp_path / "x.npy"), "--device", "cuda:99"]) == 2
    assert "x.npy" not in capsys.readouterr().err


def test_predictions_do_not_replace_the_features_they_are_of(run, tmp_path, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({f"f{number}": [0.0, 1.0] for number in range(32)})
    pq.write_table(table, tmp_path / "x.parquet")
    content = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "y.parquet").symlink_to("x.parquet")
    for name in ("x.parquet", "y.parquet"):
        words = [str(run), str(tmp_path / "x.parquet"), "--out", str(tmp_path / name)]
        assert cli.main(["predict", *words]) == 2
        assert name in capsys.readouterr().err
    assert (tmp_path / "x.parquet").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "content"),
    [("labels.csv", "path,label\na.png,1\n"), ("old.jsonl", '{"path": "a", "label": "b"}\n')],
)
def test_predictions_replace_earlier_ones_and_no_other_table(run, tmp_path, name, content):
    np.save(tmp_path / "x.npy", np.zeros((2, 32)))
    words = ["predict", str(run), str(tmp_path / "x.npy"), "--out", str(tmp_path / name)]
    (tmp_path / name).write_text(content)
    assert cli.main(words) == 73
    assert (tmp_path / name).read_text() == content
    (tmp_path / name).write_text("")
    for _ in range(2):
        assert cli.main(words) == 0


@pytest.mark.parametrize(
    ("names", "code", "num_errors"), [(["x.jpg"], 65, 1), (["0.png", "x.jpg"], 0, 1)]
)
def test_files_that_cannot_be_read_are_rows_with_an_error(
    photographs, tmp_path, capsys, names, code, num_errors
):
    images = [str(photographs / "photos/light" / name) for name in names]
    out = tmp_path / "labels.csv"
    assert cli.main(["predict", str(photographs / "first"), *images, "--out", str(out)]) == code
    rows = list(csv.DictReader(out.read_text("utf-8").splitlines()))
    assert [row["path"] for row in rows] == images
    assert sum(bool(row["error"]) for row in rows) == num_errors
    assert ("x.jpg" in capsys.readouterr().err) == bool(code)


def test_the_page_of_a_comparison_is_of_the_split_that_is_asked_for(photographs, tmp_path, capsys):
    run, page = photographs / "first", tmp_path / "page.html"
    final = json.loads((run / "result.json").read_text())["accuracy"]["validation"]["final"]
    assert cli.main(["compare", str(run), "--split", "validation", "--html", str(page)]) == 0
    assert f"{100 * final:.1f} %" in capsys.readouterr().out
    assert "validation" in page.read_text("utf-8")


def test_a_model_is_exported_into_the_run_and_over_no_file_of_another(run, capsys):
    for _ in range(2):
        assert cli.main(["export", str(run)]) == 0
        assert (run / "export" / "model.safetensors").is_file()
    (run / "export" / "config.json").write_text("{}")
    assert cli.main(["export", str(run)]) == 65
    assert "config.json" in capsys.readouterr().err
    assert (run / "export" / "config.json").read_text() == "{}"
