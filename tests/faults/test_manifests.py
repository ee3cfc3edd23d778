"""A manifest that is not right ends a command with the lines, before anything is trained."""

from PIL import Image

from nearsay import cli

SMALL = ["size=8", "epochs=1", "batch_size=4", "held_out=0", "weights=none", "method=standard"]
SET = ["--set", "backbone.width=2", "--set", "machine.workers=0", "--device", "cpu", "--quiet"]
BAD = b"path,label\n0.png,cat \n../1.png,dog\n2.png,-100\n2.png,cat\nnone.png,dog\n"


def test_a_bad_manifest_is_told_by_line_and_the_same_command_trains_once_it_is_right(
    tmp_path, capsys
):
    for number in range(8):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / f"{number}.png")
    manifest, out = tmp_path / "m.csv", tmp_path / "run"
    words = ["train", "manifest", f"path={manifest}", *SMALL, *SET, "--out", str(out)]
    for content, lines in ((BAD, ("m.csv:2: ", "m.csv:3: ", "m.csv:5: ")), (b"", ("m.csv: ",))):
        manifest.write_bytes(content)
        assert cli.main(words) == 65
        captured = capsys.readouterr()
        assert captured.out == ""
        assert [line for line in lines if line not in captured.err] == []
        assert not (out / "checkpoints").exists()
        assert not (out / "experiment.json").exists()
    rows = [b"%d.png,%s" % (number, (b"cat", b"dog", b"")[number % 3]) for number in range(8)]
    manifest.write_bytes("\ufeffpath,label\n".encode() + b"\n".join(rows))
    assert cli.main(words) == 0
    assert (out / "result.json").exists()
