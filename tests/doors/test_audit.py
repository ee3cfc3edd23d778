import errno
import json
import os
import shutil
import sys
import time

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from nearsay import config
from nearsay.batch import Labels
from nearsay.data import Manifest, Toy, tables
from nearsay.doors.audit import audit_run
from nearsay.errors import RunError, TableError
from nearsay.experiment import Experiment
from nearsay.label_issues import audit
from nearsay.label_issues import run_audit as command
from nearsay.label_issues.cleaning import clean_run
from nearsay.models import MLP
from nearsay.noise import OpenSet
from nearsay.training import checkpoints as runs
from nearsay.training.checkpoints import write_whole
from nearsay.training.loop import train
from nearsay.training.predict import propagate
from nearsay.training.run_folder import read_labels
from nearsay.training.splits import open_splits

TOY = ["data.num_train=400", "data.num_test=100", "batch_size=100"]
DYNAMICS = "dynamics.safetensors"
PHOTOS = ["size=16", "backbone=resnet18", "weights=none", "epochs=1", "batch_size=8"]
PHOTOS += ["method=standard"]


def trained(folder, recipe, arguments, overrides=()):
    call = config.call_recipe(recipe, arguments)
    call = config.apply_overrides(call, [*overrides, "machine.device=cpu"])
    return train(call.experiment, folder, origin=call.origin)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    trained(folder, "toy", ["epochs=15", "noise=0.3"], [*TOY, "held_out=40"])
    return folder


@pytest.fixture
def run(original, tmp_path):
    """A copy of the run that a test may change."""
    without = shutil.ignore_patterns("checkpoints")
    return shutil.copytree(original, tmp_path / "run", ignore=without)


@pytest.fixture(scope="module")
def original_audited(original, tmp_path_factory):
    folder = shutil.copytree(original, tmp_path_factory.mktemp("audited") / "run")
    audit_run(folder, device="cpu", report=False)
    return folder


@pytest.fixture
def audited(original_audited, tmp_path):
    """A copy of the run and its audit."""
    return shutil.copytree(original_audited, tmp_path / "run")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run on files: two names that a spreadsheet would calculate, and one broken image."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(12):
        place = root / "images" / ("=cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number, 0, 99)).save(place / f"{number}.png")
    (root / "images" / "dog" / "broken.png").write_bytes(b"no image")
    arguments = [f"path={root / 'images'}", *PHOTOS, "held_out=0.2"]
    trained(root / "run", "folder", arguments, ["machine.workers=0", "backbone.width=4"])
    return root


# Auditing


@pytest.mark.parametrize("num_classes", [100, 101])
def test_the_summary_of_many_classes_holds_no_matrix_of_them(num_classes):
    given = torch.arange(2 * num_classes) % num_classes
    found = audit(given, probabilities=torch.eye(num_classes)[given])
    summary = command._summary(found, Labels(given, None, found.classes), 20, ["ok"] * len(given))
    assert (summary["noise_matrix"] is None) == (num_classes > 100)
    assert len(json.dumps(summary, indent=2)) < 250_000
    # Who asks for it in Python has it.
    assert found.noise_matrix.shape == (num_classes, num_classes)


def test_wrong_labels_of_a_run_are_found(run):
    found = audit_run(run, k=10, device="cpu", report=False)
    assert found.summary["detection"]["score"]["auroc"] > 0.95
    parts = {"score", "probabilities", "neighbors", "propagation", "training"}
    assert set(found.summary["detection"]) == parts
    effective = (read_labels(run).given != read_labels(run).clean).float().mean().item()
    assert found.summary["noise_rate"]["estimate"] == pytest.approx(effective, abs=0.04)
    assert found.summary["review_for_recall"].keys() == {"0.8", "0.9", "0.95"}
    assert json.loads((run / "audit.json").read_text()) == found.summary


def test_the_table_has_a_row_for_each_example(run):
    found = audit_run(run, k=7, device="cpu", report=False)
    cells = tables.read(run / "audit.csv").columns
    labels = read_labels(run)
    assert cells["index"] == [str(number) for number in range(400)]
    assert cells["given_label"] == [labels.classes[number] for number in labels.given.tolist()]
    assert [cell == "true" for cell in cells["is_label_issue"]] == found.audit.is_issue.tolist()
    scores = list(map(float, cells["label_score"]))
    assert scores == pytest.approx(found.audit.scores.tolist(), abs=1e-6)
    assert cells["status"].count("held out") == 40
    nearest = json.loads(cells["neighbors"][3])
    assert len(nearest) == 7
    assert nearest[0][1] == labels.classes[labels.given[nearest[0][0]]]


def test_the_same_run_gives_the_same_bytes(run):
    contents = []
    for pause in (0.0, 1.1):  # archives may hold the second when they were written
        time.sleep(pause)
        audit_run(run, device="cpu", report=False)
        clean_run(run)
        contents.append({path.name: path.read_bytes() for path in run.iterdir() if path.is_file()})
    assert contents[0] == contents[1]


def test_other_formats_are_written_when_asked_for(run):
    found = audit_run(run, device="cpu", report=False, parquet=True, spreadsheet=True)
    names = {path.name for path in found.files}
    assert names == {"audit.csv", "audit.json", "audit.parquet", "audit-spreadsheet.csv"}
    parquet, csv = (tables.read(run / f"audit.{kind}").columns for kind in ("parquet", "csv"))
    assert parquet["index"] == csv["index"]


def locked(_, operation):
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def closed(path, content):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize(
    ("kind", "told"), [("locked", "in use"), ("closed", "Read-only file system")]
)
def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_computed(
    run, monkeypatch, kind, told
):
    audit_run(run, device="cpu", report=False)
    if kind == "locked":
        monkeypatch.setattr(runs.fcntl, "lockf", locked)
    else:
        monkeypatch.setattr(runs, "_write_flushed", closed)
    monkeypatch.setattr(command, "audit", None)
    for verb in (audit_run, clean_run):
        with pytest.raises(RunError, match=told):
            verb(run)
    with pytest.raises(RunError, match=told):
        propagate(run)
    if kind == "locked":
        assert propagate(run, out=run.parent / "elsewhere.npz")["num_examples"] == 400


def test_an_audit_that_is_cut_short_leaves_no_table_without_its_doubts(run, monkeypatch):
    def cut_short(path, content):
        write_whole(path, content)
        raise KeyboardInterrupt

    monkeypatch.setattr("nearsay.doors.audit.write_whole", cut_short)
    with pytest.raises(KeyboardInterrupt):
        audit_run(run, device="cpu", report=False)
    assert [path.name for path in run.glob("audit*")] == ["audit.json"]


@pytest.mark.parametrize("change", ["shifted", "twice", "floating", "too few"])
def test_predictions_that_do_not_say_whose_they_are_are_refused(run, change):
    path = run / "predictions" / "train.safetensors"
    tensors = safetensors.torch.load_file(path)
    wrong = {
        "shifted": tensors["indices"] - 1,
        "twice": tensors["indices"].index_fill(0, torch.tensor([3]), int(tensors["indices"][4])),
        "floating": tensors["indices"].double(),
        "too few": tensors["indices"][:-1],
    }
    path.write_bytes(safetensors.torch.save({**tensors, "indices": wrong[change].contiguous()}))
    with pytest.raises(RunError, match=r"train\.safetensors"):
        audit_run(run, device="cpu", report=False)
    with pytest.raises(RunError, match=r"train\.safetensors"):
        propagate(run)
    assert not (run / "audit.csv").exists()
    assert not (run / "propagated.npz").exists()


GRAY = """
from dataclasses import dataclass
import torch
from nearsay.batch import Labels, Split
from nearsay.errors import NoSplit
from nearsay.experiment import Experiment
from nearsay.models import ResNet
from nearsay.optim import Constant

@dataclass(frozen=True, kw_only=True)
class Gray:
    num_channels: int

    def open(self, split):
        if split != "train":
            raise NoSplit(split)
        labels, shape = torch.arange(40) % 2, (40, self.num_channels, 16, 16)
        noise = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0))
        pixels = (noise + 100 * labels[:, None, None, None]).to(torch.uint8)
        pixels[39] = pixels[1]
        return Split(pixels, Labels(labels, None, ("dark", "bright")))

def recipe(num_channels: int) -> Experiment:
    data, network = Gray(num_channels=num_channels), ResNet(width=4)
    return Experiment(
        data=data, backbone=network, normalize=None, schedule=Constant(), epochs=1, batch_size=20, held_out=0
    )
"""


def test_gray_images_are_pictures_and_those_of_other_channels_none(tmp_path):
    for num_channels, are_pictures in ((1, True), (3, True), (2, False)):
        inputs = torch.zeros(4, num_channels, 16, 16, dtype=torch.uint8)
        assert (command._pictures(inputs, torch.arange(4)) is not None) == are_pictures
    (tmp_path / "gray.py").write_text(GRAY)
    trained(tmp_path / "run", str(tmp_path / "gray.py"), ["num_channels=1"])
    groups = audit_run(tmp_path / "run", device="cpu", report=False).audit.duplicate_groups
    assert (groups >= 0).nonzero()[:, 0].tolist() == [1, 39]


def test_the_images_of_open_set_noise_are_those_that_the_network_saw():
    both = {"backbone": MLP(hidden=(4,)), "normalize": None}
    experiment = Experiment(
        data=Toy(num_train=40), outside=Toy(num_train=40, seed=1), noise=OpenSet(rate=0.5), **both
    )
    inputs, _ = command._open_inputs(experiment, "train", 40, "")
    assert inputs.equal(open_splits(experiment).inputs)
    assert int((inputs != experiment.data.open("train").inputs).any(dim=1).sum()) == 20


def test_examples_that_are_not_in_the_table_of_predictions_are_unreadable(run):
    path = run / "predictions" / "train.safetensors"
    tensors = safetensors.torch.load_file(path)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    order = order[(order != 5) & (order != 17)]
    others = {name: tensor[order] for name, tensor in tensors.items()}
    path.write_bytes(safetensors.torch.save(others))
    found = audit_run(run, device="cpu", report=False)
    cells = tables.read(run / "audit.csv").columns
    assert [row for row, status in enumerate(cells["status"]) if status == "unreadable"] == [5, 17]
    assert cells["label_score"][5] is None
    assert cells["given_label"][5] is not None
    assert found.summary["num_unreadable"] == 2
    nearest = [near for row in cells["neighbors"] if row for near, _, _ in json.loads(row)]
    assert not {5, 17} & set(nearest)
    readable = [number for number in range(400) if number not in (5, 17)]
    assert found.indices.tolist() == readable
    dynamics = safetensors.torch.load_file(run / DYNAMICS)
    dynamics = {name: values[readable] for name, values in dynamics.items()}
    expected = (dynamics["confidence"] + dynamics["margin"].sigmoid()) / 2
    expected[dynamics["count"] == 0] = torch.nan
    torch.testing.assert_close(found.audit.parts["training"], expected, equal_nan=True)


def test_a_run_without_dynamics_is_audited_without_them(run):
    (run / "dynamics.safetensors").unlink()
    assert "training" not in audit_run(run, device="cpu", report=False).audit.parts


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("predictions/train.safetensors", b"nothing", r"train\.safetensors"),
        ("dynamics.safetensors", b"nothing", r"dynamics\.safetensors"),
        ("labels.npz", b"nothing", r"labels\.npz"),
        ("experiment.json", b"[]", r"experiment\.json"),
        ("experiment.json", b"{}", "experiment="),
    ],
)
def test_a_damaged_run_is_refused_by_the_name_of_the_file(run, name, content, named):
    (run / name).write_bytes(content)
    with pytest.raises(RunError, match=named) as caught:
        audit_run(run, device="cpu", report=False)
    assert caught.value.code == 65
    assert not (run / "audit.csv").exists()


def test_dynamics_of_other_examples_are_refused(run):
    tensors = safetensors.torch.load_file(run / "dynamics.safetensors")
    short = {name: tensor[:-1] for name, tensor in tensors.items()}
    (run / "dynamics.safetensors").write_bytes(safetensors.torch.save(short))
    with pytest.raises(RunError, match=r"dynamics\.safetensors .*400"):
        audit_run(run, device="cpu", report=False)


def test_the_page_is_drawn_unless_it_is_not_wanted(run):
    assert audit_run(run, device="cpu", report=False).page is None
    assert not (run / "report.html").exists()
    found = audit_run(run, device="cpu")
    assert (found.page, found.remark) == (run / "report.html", "")
    assert found.files[-1] == run / "report.html"
    page = (run / "report.html").read_bytes()
    assert f"<b>{found.summary['num_issues']}</b>".encode() in page
    (run / "corrections.csv").write_text("index,label\n7,nowhere\n")
    audit_run(run, device="cpu")
    assert b"&#39;nowhere&#39;" in (run / "report.html").read_bytes()
    (run / "corrections.csv").unlink()
    audit_run(run, device="cpu")
    assert (run / "report.html").read_bytes() == page


def test_a_page_that_cannot_be_drawn_is_no_reason_not_to_audit(run, monkeypatch):
    (run / "result.json").unlink()
    found = audit_run(run, device="cpu")
    assert (found.page, (run / "audit.csv").is_file()) == (None, True)
    assert "result.json" in found.remark
    monkeypatch.setitem(sys.modules, "nearsay.report.audit_page", None)
    assert "nearsay.report.audit_page" in audit_run(run, device="cpu").remark


# Files


def test_paths_are_told_and_formulas_are_quoted_for_spreadsheets_only(photos):
    audit_run(photos / "run", device="cpu", report=False, k=3, spreadsheet=True)
    cells = tables.read(photos / "run" / "audit.csv").columns
    assert cells["path"][0] == "=cat/1.png"
    assert set(cells["given_label"]) == {"=cat", "dog"}
    broken = cells["path"].index("dog/broken.png")
    assert (cells["status"][broken], cells["label_score"][broken]) == ("unreadable", None)
    assert cells["reason"][broken].startswith("it ")
    assert str(photos) not in cells["reason"][broken]
    assert cells["reason"][0] is None
    quoted = tables.read(photos / "run" / "audit-spreadsheet.csv").columns
    assert quoted["path"][0] == "'=cat/1.png"
    cells = [cell for column in quoted.values() for cell in column if cell]
    assert not [cell for cell in cells if cell[0] in "=+-@\t"]


def test_a_manifest_of_the_cleaned_files_can_be_trained_on(photos):
    audit_run(photos / "run", device="cpu", report=False, k=3)
    found = clean_run(photos / "run", relabel_above=0.5)
    assert photos / "run" / "cleaned.csv" in found.files
    split = Manifest(path=photos / "run" / "cleaned.csv", root=photos / "images").open("train")
    assert len(split.labels.given) == len(found.given)
    assert split.labels.classes == ("=cat", "dog")
    assert torch.equal(split.labels.given, found.given)


# Cleaning


def test_sure_suggestions_are_taken_and_poor_labels_dropped(run):
    audited = audit_run(run, device="cpu", report=False).audit
    found = clean_run(run, relabel_above=0.9, drop_below=0.3)
    labels = read_labels(run)
    sure = audited.is_issue & (audited.suggested.probabilities.double().round(decimals=6) >= 0.9)
    poor = audited.is_issue & ~sure & (audited.scores < 0.3)
    assert torch.equal(found.relabeled, sure.nonzero()[:, 0])
    assert torch.equal(found.dropped, poor.nonzero()[:, 0])
    assert torch.equal(found.review, (audited.is_issue & ~sure & ~poor).nonzero()[:, 0])
    expected = audited.suggested.labels.where(sure, labels.given).masked_fill(poor, -1)
    assert torch.equal(found.given, expected)
    with np.load(run / "cleaned.npz") as arrays:
        assert torch.equal(torch.from_numpy(arrays["given"]), found.given)
        assert tuple(arrays["classes"]) == labels.classes
    listed = tables.read(run / "cleaned-relabel.csv").columns
    assert [int(cell) for cell in listed["index"]] == found.relabeled.tolist()
    assert listed["label"] == [labels.classes[found.given[row]] for row in found.relabeled.tolist()]


def test_cleaned_labels_are_nearer_to_the_truth_and_originals_stay(audited):
    before = (audited / "labels.npz").read_bytes()
    found = clean_run(audited)
    labels = read_labels(audited)
    kept = found.given >= 0
    share = (labels.given != labels.clean).float().mean()
    assert (found.given != labels.clean)[kept].float().mean() < 0.3 * share
    assert (audited / "labels.npz").read_bytes() == before


def test_corrections_have_the_last_word(audited):
    automatic = clean_run(audited)
    classes = read_labels(audited).classes
    first, second, third = automatic.relabeled[:3].tolist()
    given = read_labels(audited).given
    rows = [
        f"{first},{classes[3]},other",
        f"{first},{classes[5]},other",
        f"{second},{classes[given[second]]},keep",
        f"{third},{classes[0]},skip",
    ]
    table = ["index,label,decision", *rows, "399,,drop", ""]
    (audited / "corrections.csv").write_text("\n".join(table))
    found = clean_run(audited)
    assert found.given[[first, second, 399]].tolist() == [5, given[second].item(), -1]
    assert found.given[third] == automatic.given[third]
    assert second not in found.relabeled.tolist() + found.review.tolist()
    (audited / "corrections.csv").rename(audited / "mine.csv")
    assert torch.equal(clean_run(audited, corrections=audited / "mine.csv").given, found.given)


def test_what_was_undone_is_undecided_again(audited):
    automatic = clean_run(audited)
    classes, given = read_labels(audited).classes, read_labels(audited).given
    first = automatic.relabeled[0].item()
    kept = f"{first},{classes[given[first]]},keep\n"
    (audited / "corrections.csv").write_text("index,label,decision\n" + kept)
    assert clean_run(audited).given[first] == given[first]
    undone = kept + kept.replace("keep", "undo")
    (audited / "corrections.csv").write_text("index,label,decision\n" + undone)
    assert torch.equal(clean_run(audited).given, automatic.given)


def test_corrections_that_cannot_be_meant_are_refused(audited):
    for content, named in (
        ("index\n1\n", "label"),
        ("index,label\n400,0\n", r"mine\.csv:2.*400"),
        ("index,label\n-1,0\n", "-1"),
        ("index,label\n,0\n", "index"),
        ("index,label\n²,0\n", "²"),
        ("index,label\n1,unheard of\n", r"mine\.csv:2.*unheard of"),
    ):
        (audited / "mine.csv").write_text(content)
        with pytest.raises(TableError, match=named):
            clean_run(audited, corrections=audited / "mine.csv")
    assert not (audited / "cleaned.npz").exists()


def test_cleaning_needs_an_audit_of_these_labels(run):
    with pytest.raises(RunError, match=r"audit\.csv"):
        clean_run(run)
    audit_run(run, device="cpu", report=False)
    lines = (run / "audit.csv").read_text().splitlines(keepends=True)
    (run / "audit.csv").write_text("".join(lines[:-1]))
    with pytest.raises(RunError, match=r"audit\.csv.*400"):
        clean_run(run)
    (run / "audit.csv").write_text("index,given_label\n0,1\n")
    with pytest.raises(RunError, match=r"audit\.csv"):
        clean_run(run)


def test_files_of_another_number_are_not_told_as_paths(photos):
    experiment = command.read_experiment(photos / "run")
    files, absence = command.file_names(experiment, "train")
    assert files is not None
    assert absence == ""
    files_of_more, absence = command.file_names(experiment, "train", len(files) + 1)
    assert files_of_more is None
    assert str(len(files)) in absence
    assert command.file_names(experiment, "test")[0] is None


# Slow: figures on digits


@pytest.mark.slow
def test_cleaning_pays_on_digits(tmp_path):
    words = ["noise=0.4", "seed=3"]
    before = trained(tmp_path / "before", "digits", words)
    audit_run(tmp_path / "before", device="cpu", report=False)
    clean_run(tmp_path / "before")
    relabeled = [f"labels_file={tmp_path / 'before' / 'cleaned.npz'}"]
    after = trained(tmp_path / "after", "digits", words, relabeled)
    finals = [result["accuracy"]["test"]["final"] for result in (before, after)]
    assert finals[1] > finals[0] + 0.02
