"""An exported model gives what the run gave, on raw inputs and for any number of rows."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from integrations.conftest import FEATURES, IMAGES, library, needs_onnx, trained
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close

from nearsay.batch import Files, Labels
from nearsay.config import apply_overrides, call_recipe
from nearsay.errors import RunError
from nearsay.integrations import export
from nearsay.integrations.export import export_run, predict_onnx, read_onnx_classes
from nearsay.training.predict import open_trained, predict_run


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """A noise that knows where a file lies."""

    path: str


def some_features(num=5):
    return torch.from_numpy(np.random.RandomState(0).randn(num, 32).astype(np.float32))


def some_images(num=5, height=8, width=8):
    return torch.from_numpy(
        np.random.RandomState(0).randint(0, 256, (num, 3, height, width), dtype=np.uint8)
    )


def expected(run, inputs):
    return predict_run(run, inputs, device="cpu").predictions


def test_safetensors_hold_the_weights_and_what_to_know_of_them(images_run, tmp_path):
    path = export_run(images_run, tmp_path / "out", format="safetensors")
    assert path == tmp_path / "out" / "model.safetensors"
    assert_close(load_file(path), load_file(images_run / "model.safetensors"), rtol=0, atol=0)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    facts = json.loads((tmp_path / "out" / "config.json").read_text())
    assert facts["architecture"] == "ResNet"
    assert facts["label_names"] == [str(digit) for digit in range(10)]
    assert (facts["num_classes"], facts["num_features"]) == (10, 32)
    assert facts["library"]["backbone"]["width"] == 4
    assert facts["pretrained_cfg"]["mean"] == [0.5, 0.5, 0.5]
    assert facts["pretrained_cfg"]["std"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("run", "inputs"), [("images_run", some_images(3, 8, 10)), ("pair_run", some_features(1))]
)
def test_torch_export_says_what_the_run_says_of_raw_inputs(run, inputs, tmp_path, request):
    folder = request.getfixturevalue(run)
    path = export_run(folder, tmp_path, format="torch-export")
    files = {"config.json": ""}
    program = torch.export.load(path, extra_files=files)
    logits, features = program.module()(inputs)
    assert_close(logits, expected(folder, inputs).logits)
    assert_close(features, expected(folder, inputs).features)
    assert json.loads(files["config.json"]) == json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("run", "inputs"),
    [
        ("features_run", some_features(300)),
        ("images_run", some_images(5)),
        ("images_run", some_images(1, 9, 12)),
        ("pair_run", some_features(5)),
    ],
)
def test_onnx_says_what_the_run_says_of_raw_inputs(run, inputs, onnx_of, request):
    folder = request.getfixturevalue(run)
    path = onnx_of(folder)
    found, unreadable = predict_onnx(path, inputs)
    # Another runtime.
    assert_close(found._asdict(), expected(folder, inputs)._asdict(), rtol=0, atol=1e-4)
    assert found.indices.equal(torch.arange(len(inputs)))
    assert unreadable == {}
    assert read_onnx_classes(path.parent) == open_trained(folder).labels.classes


def test_an_onnx_file_stands_alone_and_refuses_what_does_not_fit(features_run, onnx_of, tmp_path):
    alone = shutil.copy(onnx_of(features_run), tmp_path / "alone.onnx")
    found = predict_onnx(alone, some_features()).predictions
    assert_close(found.logits, expected(features_run, some_features()).logits, rtol=0, atol=1e-4)
    double = torch.zeros(2, 32, dtype=torch.float64)
    files = Files(tmp_path, ("a.png",))
    for wrong in (some_images(), files, torch.zeros(2, 31), double, torch.zeros(0, 32)):
        with pytest.raises(ValueError, match=r"^inputs"):
            predict_onnx(alone, wrong)
    with pytest.raises(ValueError, match=r"model\.onnx"):
        predict_onnx(tmp_path, torch.zeros(2, 32))
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"bad\.onnx .*ONNX"):
        read_onnx_classes(tmp_path / "bad.onnx")


def test_images_on_disk_are_decoded_for_onnx(images_run, onnx_of, tmp_path):
    image = importlib.import_module("PIL.Image").fromarray(
        some_images(1, 20, 20)[0].permute(1, 2, 0).numpy()
    )
    image.save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    files = Files(tmp_path, ("b.png", "a.png"))
    found, unreadable = predict_onnx(onnx_of(images_run), files)
    assert_close(found._asdict(), expected(images_run, files)._asdict(), rtol=0, atol=1e-4)
    assert found.indices.tolist() == [1]
    assert list(unreadable) == [0]


def as_files(images, folder):
    """(N, 3, H, W) bytes as files."""
    for number, image in enumerate(images):
        picture = importlib.import_module("PIL.Image").fromarray(image.permute(1, 2, 0).numpy())
        picture.save(folder / f"{number}.png")
    return Files(folder, tuple(f"{number}.png" for number in range(len(images))))


def test_files_are_not_made_to_fit_an_exported_run_on_arrays_that_are_not_square(
    images_run, tmp_path
):
    needs_onnx()
    oblong = shutil.copytree(images_run, tmp_path / "oblong")
    origin = json.loads((oblong / "experiment.json").read_text())
    (oblong / "experiment.json").write_text(json.dumps(origin | {"image_shape": [8, 10]}))
    path = export_run(oblong, tmp_path / "out", format="onnx")
    assert_close(predict_onnx(path, some_images(2, 8, 10)).predictions.indices, torch.arange(2))
    with pytest.raises(ValueError, match=r"^inputs .*not square"):
        predict_onnx(path, as_files(some_images(1), tmp_path))


@pytest.mark.parametrize(("shape", "margin"), [(None, 0.875), ([8, 10], 1.0)])
def test_the_configuration_says_one_thing_of_the_size_of_images(
    images_run, tmp_path, shape, margin
):
    run = shutil.copytree(images_run, tmp_path / "run")
    origin = json.loads((run / "experiment.json").read_text())
    (run / "experiment.json").write_text(json.dumps(origin | {"image_shape": shape}))
    facts = json.loads((export_run(run, tmp_path / "out").parent / "config.json").read_text())
    height, width = shape or [open_trained(run).experiment.image_size] * 2
    assert facts["image_size"] == (height if height == width else None)
    assert facts["pretrained_cfg"]["input_size"] == [3, height, width]
    assert facts["pretrained_cfg"]["crop_pct"] == margin


def test_the_card_tells_data_method_noise_accuracy_and_limits(features_run, tmp_path):
    export_run(features_run, tmp_path, format="torch-export")
    card = (tmp_path / "README.md").read_text()
    result = json.loads((features_run / "result.json").read_text())
    assert "A classifier of 8 classes" in card
    assert "60 training examples; label noise of 40.0% was added on purpose; " in card
    assert f"; {result['labels']['effective_rate']:.1%} of labels are wrong." in card
    assert f"| test | {result['accuracy']['test']['final']:.4f} |" in card
    assert "| split | final epoch | mean of the last ten at most |" in card  # there is one
    assert '"kind": "NCR"' in card
    assert "normalized inside" in card
    assert "## Limits" in card


def test_hostile_names_stay_inside_json(features_run, tmp_path, monkeypatch):
    script, license = "<script>alert(1)</script>", "---\nlicense: none"
    hostile = ["```", "\n```\n# Heading", script, license, "| a |", "\u202e", "g", "h"]

    def renamed(folder):
        found = open_trained(folder)
        return found._replace(labels=Labels(found.labels.given, None, tuple(hostile)))

    monkeypatch.setattr(export, "open_trained", renamed)
    export_run(features_run, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["label_names"] == hostile
    lines = (tmp_path / "README.md").read_text().split("\n")
    assert lines.count("```") == 2
    start = lines.index("## Classes") + 2
    assert lines[start] == "```json"
    assert json.loads("\n".join(lines[start + 1 : lines.index("```", start)])) == hostile
    assert lines[-3].strip() == "]"
    assert [line for line in lines if line.startswith("#")] == [
        "# Model card", "## Use", "## Data and noise", "## Accuracy", "## Method", "## Limits",
        "## Classes",
    ]  # fmt: skip


def test_paths_of_the_machine_are_not_published(features_run, tmp_path, monkeypatch):
    def placed(folder):
        found = open_trained(folder)
        noise = replace(found.experiment, labels_file="/home/me/labels.npz")
        origin = {"recipe": "/home/me/mine.py", "num_inputs": 32}
        return found._replace(
            experiment=replace(noise, noise=Hidden(path="/home/me/secret.npz")), origin=origin
        )

    monkeypatch.setattr(export, "open_trained", placed)
    export_run(features_run, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "/home/me" not in card + (tmp_path / "config.json").read_text()
    assert '"recipe": "mine.py"' in card
    assert '"path": "secret.npz"' in card


def test_a_network_of_timm_is_written_by_the_names_of_timm(tmp_path, monkeypatch):
    timm = library("timm")
    call = apply_overrides(call_recipe("digits", []), [*IMAGES])
    backbone = export.Timm(name="test_resnet")
    experiment = replace(call.experiment, backbone=backbone, image_size=32)
    network = backbone.build(10, num_inputs=3).eval()
    labels = Labels(torch.zeros(1, dtype=torch.int64), None, tuple("0123456789"))
    timmed = export.Trained([network], experiment, labels, {"recipe": "digits", "num_inputs": 3})
    monkeypatch.setattr(export, "open_trained", lambda folder: timmed)
    export_run(tmp_path / "run", tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.rand(2, 3, 32, 32)
    assert_close(model(images), network(images).logits)
    assert model.pretrained_cfg["mean"] == [0.5, 0.5, 0.5]
    assert "library_name: timm" in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_exported_is_said_in_one_sentence(features_run, tmp_path):
    with pytest.raises(ValueError, match=r"^format .*h5"):
        export_run(features_run, tmp_path, format="h5")
    with pytest.raises(ValueError, match=r"^target .*run folder"):
        export_run(features_run, features_run)
    with pytest.raises(RunError):
        export_run(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("README.md", None),
        ("model.safetensors", b'{"library": {"name": "timm"}}'),
        ("model.safetensors", b"\xff"),
        ("README.md", b'{"library": "nearsay"}'),
    ],
)
def test_files_that_are_not_of_an_export_are_not_replaced(name, config, features_run, tmp_path):
    (tmp_path / name).write_text("mine")
    if config is not None:
        (tmp_path / "config.json").write_bytes(config)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    taken = tmp_path / (name if config is None else "config.json")
    with pytest.raises(ValueError, match=f"^target .*{re.escape(str(taken))}"):
        export_run(features_run, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_export_lies_beside_other_files_and_replaces_an_earlier_one(features_run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    path = export_run(features_run, tmp_path)
    path.write_bytes(b"older")
    assert export_run(features_run, tmp_path).stat().st_size > 5
    config = json.loads((tmp_path / "config.json").read_bytes())
    del config["library"]["card"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "README.md").write_text("of a version that did not say what it wrote")
    export_run(features_run, tmp_path)
    assert (tmp_path / "README.md").read_text().startswith("---")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_export_replaces_no_model_card_that_somebody_has_changed(features_run, tmp_path):
    export_run(features_run, tmp_path)
    with (tmp_path / "README.md").open("a") as card:
        card.write("My own words.")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"^target .*README\.md"):
        export_run(features_run, tmp_path, format="torch-export")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "README.md").rename(tmp_path / "mine.md")
    assert export_run(features_run, tmp_path).exists()


def test_an_export_that_ended_between_two_files_blames_nobody_for_its_card(
    features_run, tmp_path, monkeypatch
):
    export_run(features_run, tmp_path, format="torch-export")

    def killed(path, content):
        return path.write_bytes(content) if path.name == "config.json" else 1 / 0

    monkeypatch.setattr(export, "write_whole", killed)
    with pytest.raises(ZeroDivisionError):
        export_run(features_run, tmp_path)
    monkeypatch.undo()
    assert export_run(features_run, tmp_path).exists()
    assert "holds the weights" in (tmp_path / "README.md").read_text()


def test_a_file_is_no_folder_to_export_to(features_run, tmp_path):
    (file := tmp_path / "model").write_text("mine")
    with pytest.raises(ValueError, match=f"^target .*{re.escape(str(file))} is a file"):
        export_run(features_run, file / "deeper/still")
    assert file.read_text() == "mine"


def test_a_missing_extra_is_named_before_anything_is_written(features_run, tmp_path, monkeypatch):
    for name in ("onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"^onnxscript .*\[export\]"):
        export_run(features_run, tmp_path / "out", format="onnx")
    with pytest.raises(ImportError, match=r"^onnxruntime .*\[export\]"):
        predict_onnx(tmp_path, torch.zeros(1, 32))
    assert not (tmp_path / "out").exists()


def test_the_card_says_where_accuracy_is_by_labels_in_doubt(tmp_path):
    run = tmp_path / "run"
    trained(run, "toy", [*FEATURES, "held_out=0.2", "validation_labels=given"])
    result = json.loads((run / "result.json").read_text())
    for split, is_doubtful in (("validation", True), ("test", False)):
        one = result | {"accuracy": {split: result["accuracy"][split]}}
        (run / "result.json").write_text(json.dumps(one))
        export_run(run, tmp_path / split)
        card = (tmp_path / split / "README.md").read_text()
        assert ("may be as wrong as the training labels" in card) == is_doubtful
