"""A manifest that is not right ends a command with the lines and the reasons, before anything is trained."""

import pytest
from PIL import Image

from nearsay import cli

SMALL = ["size=8", "epochs=1", "batch_size=4", "held_out=0", "weights=none", "method=standard"]
SET = ["--set", "backbone.width=2", "--set", "machine.workers=0", "--device", "cpu", "--quiet"]
REFUSED = {  # what is written, and what is told of it
    "an unclosed quote": (
        b'path,label\n0.png,cat\n1.png,"dog\n2.png,cat\n',
        ["m.csv:3: a quote that opens in this row is never closed"],
    ),
    "labels and paths": (
        b"path,label\n0.png,cat \n../1.png,dog\n2.png,-100\n2.png,cat\nnone.png,dog\n",
        ["m.csv:2: ", "'cat '", "m.csv:3: ", "'../1.png'", "m.csv:4: ", "'-100'", "m.csv:5: "],
    ),
    "missing files": (b"path,label\n0.png,cat\nnone.png,dog\n", ["m.csv:3: ", "'none.png'"]),
    "NUL": (b"path,label\n0.png,c\0t\n", ["m.csv:2: "]),
    "two headers alike": (b"path,label,label\n0.png,cat,dog\n", ["m.csv:1: ", "'label'"]),
    "a hundred lines": (
        b"path,label\n" + b"".join(b"none%d.png,cat\n" % number for number in range(100)),
        ["100 ", "m.csv:21: ", "'none19.png'"],
    ),
    "no labels": (b"path,label\n0.png,\n1.png,\n", ["labels"]),
    "nothing": (b"", ["m.csv: "]),
}


@pytest.fixture
def photos(tmp_path):
    for number in range(8):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / f"{number}.png")
    return tmp_path


def run(photos, content):
    (photos / "m.csv").write_bytes(content)
    return cli.main(
        [
            "train",
            "manifest",
            f"path={photos / 'm.csv'}",
            *SMALL,
            *SET,
            "--out",
            str(photos / "run"),
        ]
    )


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_manifest_is_told_by_line_and_reason(photos, capsys, case):
    content, expected = REFUSED[case]
    assert run(photos, content) == 65
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 22
    for told in expected:
        assert told in captured.err
    assert not (photos / "run" / "checkpoints").exists()
    assert not (photos / "run" / "experiment.json").exists()


def test_the_same_command_trains_once_the_manifest_is_right(photos, capsys):
    assert run(photos, REFUSED["missing files"][0]) == 65
    rows = [b"%d.png,%s" % (number, (b"cat", b"dog", b"")[number % 3]) for number in range(8)]
    assert run(photos, "\ufeffpath,label\n".encode() + b"\n".join(rows)) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert (photos / "run" / "result.json").exists()
