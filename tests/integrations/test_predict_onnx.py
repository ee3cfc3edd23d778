"""`nearsay predict` on exported models: the table that the run itself gives, or one line."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from nearsay import cli
from nearsay.doors.predict import predict
from nearsay.integrations.export import export_run


def assert_same_table(found, wanted):
    assert list(found) == ["path", "label", "probability", "error"]
    for column in ("path", "label", "error"):
        assert found[column] == wanted[column]
    for one, other in zip(found["probability"], wanted["probability"], strict=True):
        assert one == other or one == pytest.approx(other, abs=1e-4)  # None, or another runtime


@pytest.mark.parametrize("is_folder", [False, True])
def test_features_get_the_labels_of_the_run(features_run, onnx_of, tmp_path, is_folder):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(300, 32)))
    np.save(tmp_path / "b.npy", np.random.default_rng(1).normal(size=(5, 32)))
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    model = onnx_of(features_run).parent if is_folder else onnx_of(features_run)
    found = predict(model, paths).to_columns()
    assert len(found["path"]) == 305
    assert len(set(found["label"])) > 3
    assert_same_table(found, predict(features_run, paths, device="cpu").to_columns())


def test_images_get_the_labels_of_the_run_and_broken_ones_an_error(images_run, onnx_of, tmp_path):
    draw = np.random.default_rng(0)
    for number in range(6):
        Image.fromarray(draw.integers(0, 256, (20, 14, 3), dtype=np.uint8)).save(
            tmp_path / f"{number}.png"
        )
    (tmp_path / "3.png").write_bytes(b"no image")
    found = predict(onnx_of(images_run), [tmp_path]).to_columns()
    assert [error is None for error in found["error"]] == [True, True, True, False, True, True]
    wanted = predict(images_run, [tmp_path], device="cpu").to_columns()
    assert_same_table(found, wanted)


def test_what_does_not_fit_the_file_is_one_sentence(features_run, onnx_of, tmp_path, capsys):
    np.save(tmp_path / "narrow.npy", np.zeros((2, 31)))
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    toy = str(onnx_of(features_run))
    for words, code, told in (
        ([toy, "narrow.npy"], 65, "(2, 31)"),
        ([toy, "image.png"], 65, "features"),
        ([toy, "narrow.npy", "--device", "cuda"], 65, "'cuda'"),
        (["bad.onnx", "image.png"], 65, "bad.onnx"),
    ):
        there = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
        assert cli.main(["predict", *there]) == code
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert told in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "facts",
    [
        "{}",
        json.dumps({"label_names": list(range(8)), "image_size": 8}),
        json.dumps({"label_names": list("abcdefgh"), "image_size": "8"}),
    ],
)
def test_a_file_that_does_not_know_its_classes_is_refused(features_run, onnx_of, tmp_path, facts):
    onnx = pytest.importorskip("onnx") if onnx_of(features_run) else None
    proto = onnx.load(str(onnx_of(features_run)))
    [entry] = [entry for entry in proto.metadata_props if entry.key == "nearsay"]
    entry.value = facts
    onnx.save(proto, str(tmp_path / "other.onnx"))
    np.save(tmp_path / "x.npy", np.zeros((2, 32)))
    with pytest.raises(ValueError, match=r"other\.onnx"):
        predict(tmp_path / "other.onnx", [tmp_path / "x.npy"])


@pytest.mark.parametrize(
    ("logits", "shape", "message"),
    [
        (np.full((2, 8), np.nan), ["rows", 8], "logits"),
        (np.zeros((1, 8)), ["rows", 8], r"logits .*\(1, 8\)"),
        (np.zeros(()), [], "classes"),
    ],
)
def test_a_file_with_other_answers_than_logits_is_refused(
    features_run, onnx_of, tmp_path, logits, shape, message
):
    onnx = pytest.importorskip("onnx") if onnx_of(features_run) else None
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    value = onnx.numpy_helper.from_array(logits.astype(np.float32))
    nodes = [helper.make_node("Constant", [], ["logits"], value=value)]
    nodes.append(helper.make_node("Identity", ["inputs"], ["features"]))
    sizes = {"inputs": ["rows", 32], "logits": shape, "features": ["rows", 32]}
    described = [helper.make_tensor_value_info(name, float32, size) for name, size in sizes.items()]
    graph = helper.make_graph(nodes, "constant", described[:1], described[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    facts = json.dumps({"label_names": list("abcdefgh"), "image_size": 8})
    helper.set_model_props(proto, {"nearsay": facts})
    onnx.save(proto, str(tmp_path / "other.onnx"))
    np.save(tmp_path / "x.npy", np.zeros((2, 32)))
    with pytest.raises(ValueError, match=message):
        predict(tmp_path / "other.onnx", [tmp_path / "x.npy"])


def test_what_is_neither_a_run_nor_an_onnx_file_is_said(features_run, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((2, 32)))
    exported = export_run(features_run, tmp_path / "exported").parent
    shutil.copy(exported / "model.safetensors", tmp_path / "model.safetensors")
    for name, told in (
        ("model.safetensors", "model.safetensors"),
        ("exported", "--format onnx"),
        ("", "experiment.json"),
    ):
        assert cli.main(["predict", str(tmp_path / name), str(tmp_path / "x.npy")]) == 65
        assert told in capsys.readouterr().err


def test_nothing_but_where_the_file_is_is_told_of_an_export(features_run, onnx_of, tmp_path):
    onnx_of(features_run)  # or no test
    words = ["export", str(features_run), "--format", "onnx", "--out", str(tmp_path)]
    # What libraries log goes past pytest.
    done = subprocess.run(
        [sys.executable, "-m", "nearsay", *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    [line] = done.stdout.splitlines()
    assert str(tmp_path) in line
