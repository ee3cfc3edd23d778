"""An audit in the files of other tools, with hostile names of files and classes."""

import base64
import csv
import io
import json
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
import safetensors.torch
import torch
from integrations.conftest import trained
from PIL import Image

from nearsay import cli, config
from nearsay.doors.audit import audit_run
from nearsay.errors import RunError
from nearsay.integrations.label_tools import hand_over, labeling_interface, read_label_studio
from nearsay.training.run_folder import read_labels

HOSTILE = [
    "\rcarriage",
    "\ttab",
    "+cmd|'C calc'!A0",
    "-1+1",
    '<img src=x onerror="x">&amp;',
    "=1+1",
    "@SUM(A1)",
]
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
NUM = 42  # six of each class
WRONG = (0, 9)  # examples that are predicted to be of the class after theirs


def foretell(run, num, num_classes):
    """Put predictions into the run: sure of every label but two, and none of the last example."""
    given = read_labels(run).given
    best = given.clone()
    best[list(WRONG)] = (best[list(WRONG)] + 1) % num_classes
    places = torch.eye(num_classes)[best]
    noise = torch.rand(num, num_classes, generator=torch.Generator().manual_seed(0))
    tensors = {
        "features": places + 0.02 * noise,
        "logits": 8 * places,
        "indices": torch.arange(num),
    }
    kept = torch.arange(num)[torch.arange(num) != num - 1].flip(0)  # in some order
    content = safetensors.torch.save(
        {name: tensor[kept].contiguous() for name, tensor in tensors.items()}
    )
    (run / "predictions" / "train.safetensors").write_bytes(content)
    (run / "dynamics.safetensors").unlink()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run on files in folders with hostile names."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(NUM):
        place = root / "images" / HOSTILE[number % 7]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (9 * number, 0, 99)).save(place / f"=a&b#{number:02d} %.png")
    small = ["size=16", "weights=none", "epochs=1", "batch_size=8", "method=standard", "held_out=0"]
    overrides = ["machine.workers=0", "backbone.width=4", "machine.device=cpu"]
    trained(root / "run", "folder", overrides, [f"path={root / 'images'}", *small])
    foretell(root / "run", NUM, 7)
    return root


@pytest.fixture(scope="module")
def handed(photos):
    found = audit_run(photos / "run", k=4, device="cpu", spreadsheet=True)
    assert found.audit.is_issue.nonzero()[:, 0].tolist() == list(WRONG)
    done = hand_over(photos / "run", found, ["cleanlab", "fiftyone", "label-studio"])
    assert done.root == photos / "images"
    return photos / "run"


# Spreadsheets


def cells_of(path):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_no_cell_of_the_spreadsheet_is_a_formula_and_the_plain_table_is_raw(handed):
    plain, safe = cells_of(handed / "audit.csv"), cells_of(handed / "audit-spreadsheet.csv")
    assert len(plain) == len(safe) == NUM
    changed = set()
    for raw, quoted in zip(plain, safe, strict=True):
        for name, cell in raw.items():
            assert not quoted[name].startswith(FORMULAS)
            assert quoted[name] == (f"'{cell}" if cell.startswith(FORMULAS) else cell)
            changed |= {(name, cell[0])} if quoted[name] != cell else set()
    assert changed == {
        (name, sign) for name in ("path", "given_label", "predicted_label") for sign in FORMULAS
    }


# cleanlab


def test_cleanlab_gets_a_row_for_each_labeled_example(handed):
    labels = read_labels(handed)
    with np.load(handed / "audit-cleanlab.npz", allow_pickle=False) as arrays:
        assert arrays["index"].tolist() == list(range(NUM - 1))  # the last could not be read
        assert arrays["labels"].tolist() == labels.given[: NUM - 1].tolist()
        assert arrays["pred_probs"].shape == (NUM - 1, 7)
        assert arrays["pred_probs"].sum(axis=1) == pytest.approx(np.ones(NUM - 1))
        own = arrays["pred_probs"][np.arange(NUM - 1), arrays["labels"]]
        sure = np.exp(8) / (np.exp(8) + 6)
        expected = [1 / (np.exp(8) + 6) if row in WRONG else sure for row in range(NUM - 1)]
        assert own == pytest.approx(expected)
        assert arrays["label_quality"].argsort()[:2].tolist() in ([0, 9], [9, 0])
        assert arrays["classes"].tolist() == list(labels.classes)


def test_cleanlab_finds_its_issues_in_it(handed):
    pytest.importorskip("cleanlab")
    from cleanlab.filter import find_label_issues  # noqa: PLC0415  # not everybody has it
    from cleanlab.rank import get_label_quality_scores  # noqa: PLC0415

    with np.load(handed / "audit-cleanlab.npz", allow_pickle=False) as arrays:
        issues = find_label_issues(arrays["labels"], arrays["pred_probs"], n_jobs=1)
        scores = get_label_quality_scores(arrays["labels"], arrays["pred_probs"])
    assert np.flatnonzero(issues).tolist() == list(WRONG)
    assert sorted(scores.argsort()[:2].tolist()) == list(WRONG)


# FiftyOne


def test_fiftyone_gets_samples_by_absolute_path_with_declared_fields(handed, photos):
    content = json.loads((handed / "audit-fiftyone.json").read_text("utf-8"))
    labels = read_labels(handed)
    assert content["media_type"] == "image"
    assert content["default_classes"] == list(labels.classes)
    samples = content["samples"]
    assert [sample["index"] for sample in samples] == list(range(NUM - 1))
    declared = content["sample_fields"]
    kind = "fiftyone.core.fields.EmbeddedDocumentField(fiftyone.core.labels.Classification)"
    assert declared["ground_truth"] == declared["prediction"] == kind
    assert all(sample.keys() - {"filepath", "tags"} == declared.keys() for sample in samples)
    paths = [sample["filepath"] for sample in samples]
    assert sorted(paths) == sorted(map(str, (photos / "images").rglob("*.png")))[: len(paths)]
    assert [sample["ground_truth"]["label"] for sample in samples] == [
        labels.classes[n] for n in labels.given[: NUM - 1]
    ]
    suspicious = [sample for sample in samples if sample["is_label_issue"]]
    assert [sample["index"] for sample in suspicious] == list(WRONG)
    assert all(sample["tags"] == ["label issue"] for sample in suspicious)
    first = suspicious[0]
    assert first["prediction"]["label"] == labels.classes[1]
    assert first["prediction"]["confidence"] > 0.5 > first["label_quality"]


def test_images_of_arrays_are_written_for_fiftyone_and_put_into_tasks(images_run):
    found = audit_run(images_run, device="cpu")
    assert hand_over(images_run, found, ["fiftyone", "label-studio"]).root is None
    samples = json.loads((images_run / "audit-fiftyone.json").read_text("utf-8"))["samples"]
    pixels = (
        config.from_origin(json.loads((images_run / "experiment.json").read_text()))
        .experiment.data.open("train")
        .inputs
    )
    for number in (0, 17):
        with Image.open(samples[number]["filepath"]) as image:
            assert np.array_equal(
                np.asarray(image).reshape(8, 8, -1), pixels[number].permute(1, 2, 0).numpy()
            )
    task = json.loads((images_run / "audit-label-studio.json").read_text("utf-8"))[0]
    kind, _, code = task["data"]["image"].partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(code, validate=True))) as image:
        shown = np.asarray(image).reshape(8, 8, -1)
    assert np.array_equal(shown, pixels[task["data"]["index"]].permute(1, 2, 0).numpy())


# Label Studio


def test_the_labeling_interface_holds_every_class_as_it_is(handed):
    page = ElementTree.fromstring((handed / "audit-label-studio.xml").read_text("utf-8"))
    assert [choice.get("value") for choice in page.iter("Choice")] == list(
        read_labels(handed).classes
    )
    tags = {element.tag for element in page.iter()}
    assert tags == {"View", "Header", "Image", "Choices", "Choice"}


def test_what_xml_cannot_hold_is_replaced_and_must_stay_distinct():
    page = ElementTree.fromstring(labeling_interface(["bell \a", "nothing"]))
    assert [choice.get("value") for choice in page.iter("Choice")] == ["bell \ufffd", "nothing"]
    with pytest.raises(ValueError, match="class"):
        labeling_interface(["bell \a", "bell \b"])


def test_issues_become_tasks_the_most_suspicious_first(handed, photos):
    tasks = json.loads((handed / "audit-label-studio.json").read_text("utf-8"))
    labels = read_labels(handed)
    assert sorted(task["data"]["index"] for task in tasks) == list(WRONG)
    qualities = [task["data"]["label_quality"] for task in tasks]
    assert qualities == sorted(qualities)
    for task in tasks:
        number = int(labels.given[task["data"]["index"]])
        address = urlsplit(task["data"]["image"])
        assert (address.scheme, address.path) == ("", "/data/local-files/")
        [below] = parse_qs(address.query, strict_parsing=True)["d"]
        # The document root is beside the data, as the storage must be below it.
        assert (photos / below).is_file()
        assert below.startswith(f"images/{labels.classes[number]}")
        assert task["data"]["given_label"] == labels.classes[number]
        [prediction] = task["predictions"]
        [result] = prediction["result"]
        named = (result["from_name"], result["to_name"], result["type"])
        assert named == ("label", "image", "choices")
        assert result["value"]["choices"] == [labels.classes[(number + 1) % 7]]
        assert prediction["score"] > 0.5


def answer(task, *choices, **more):
    results = [
        {"from_name": "label", "type": "choices", "value": {"choices": [each]}} for each in choices
    ]
    return {"id": 1, **task, "annotations": [{"result": results, **more}]}


def test_answers_of_label_studio_have_the_last_word(handed, tmp_path, capsys):
    tasks = json.loads((handed / "audit-label-studio.json").read_text("utf-8"))
    first, second = sorted(tasks, key=lambda task: task["data"]["index"])
    classes = read_labels(handed).classes
    old, new = (
        answer(first, classes[n], updated_at=f"2026-0{n}")["annotations"][0] for n in (4, 5)
    )
    export = [{**first, "annotations": [new, old]}, answer(second, classes[0], was_cancelled=True)]
    (tmp_path / "export.json").write_text(json.dumps(export), "utf-8")
    words = ["clean", str(handed), "--corrections", str(tmp_path / "export.json"), "--json"]
    assert cli.main(words) == 0
    done = json.loads(capsys.readouterr().out)
    with np.load(handed / "cleaned.npz") as cleaned:
        given = cleaned["given"].tolist()
    assert given[0] == 5
    assert given[9] != 0
    assert (handed / "corrections-label-studio.csv").read_text(
        "utf-8"
    ) == f"index,label\n0,{classes[5]}\n"
    assert done["relabeled"] >= 1


def test_the_short_export_and_unanswered_tasks_are_read_too(handed, tmp_path):
    short = [{"image": "x", "index": 3, "label": HOSTILE[1]}, {"image": "y", "index": 4}]
    (tmp_path / "short.json").write_text(json.dumps(short), "utf-8")
    read = read_label_studio(handed, tmp_path / "short.json")
    assert read.read_bytes() == b"index,label\n3,\ttab\n"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("nothing", r"export\.json"),
        ("[3]", "task 1.*'3'"),
        ('[{"data": {"index": 99}, "annotations": []}]', "index.*99"),
        ('[{"index": 1, "label": "zebra"}]', "label.*'zebra'"),
    ],
)
def test_a_wrong_export_is_refused_by_what_is_wrong_with_it(handed, tmp_path, content, named):
    (tmp_path / "export.json").write_text(content)
    with pytest.raises(ValueError, match=named) as caught:
        read_label_studio(handed, tmp_path / "export.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "annotations",
    ["5", '[{"result": 7}]', '[{"result": [{"type": "choices", "value": {"choices": 3}}]}]'],
)
def test_answers_of_another_shape_are_none(handed, tmp_path, annotations):
    (tmp_path / "export.json").write_text(
        f'[{{"data": {{"index": 1}}, "annotations": {annotations}}}]'
    )
    assert read_label_studio(handed, tmp_path / "export.json").read_bytes() == b"index,label\n"


# The command


def test_the_same_run_is_handed_over_in_the_same_bytes(handed, capsys):
    ends = ("cleanlab.npz", "fiftyone.json", "label-studio.json", "label-studio.xml")
    names = [f"audit-{end}" for end in ends]
    before = [(handed / name).read_bytes() for name in names]
    words = [word for tool in ("label-studio", "cleanlab", "fiftyone") for word in ("--for", tool)]
    assert cli.main(["audit", str(handed), "--k", "4", *words]) == 0
    said = capsys.readouterr().out
    assert all(f"Wrote {handed / name}" in said for name in names)
    assert f"LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT is {handed.parent}\n" in said
    assert [(handed / name).read_bytes() for name in names] == before


def test_images_that_are_gone_are_told_of(photos, handed):
    found = audit_run(handed, k=4, device="cpu")
    (photos / "images").rename(photos / "moved")
    try:
        with pytest.raises(RunError, match="images"):
            hand_over(handed, found, ["label-studio"])
    finally:
        (photos / "moved").rename(photos / "images")
