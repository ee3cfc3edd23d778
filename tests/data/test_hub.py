"""Data of Hugging Face `datasets`, made here in all the layouts that the library reads; nothing is
downloaded.
"""

import io
import json
import os
import shutil
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from nearsay import config
from nearsay.data import Hub
from nearsay.data import hub as hub_module
from nearsay.data.images import decode
from nearsay.data.labels_file import digest_inputs
from nearsay.errors import NoSplit
from nearsay.training.loop import train


@pytest.fixture(scope="session")
def library():
    pytest.importorskip(
        "datasets.arrow_dataset"
    )  # the folder of these tests could be taken for the library itself
    return import_module("datasets")


@pytest.fixture(autouse=True)
def cache(request, monkeypatch, tmp_path):
    """A cache of this test's own, and no way to the network."""
    if "library" in request.fixturenames:
        monkeypatch.setattr(
            request.getfixturevalue("library").config, "HF_DATASETS_CACHE", tmp_path / "cache"
        )
        for place, name in ((socket, "getaddrinfo"), (socket.socket, "connect")):
            monkeypatch.setattr(place, name, lambda *_, **__: pytest.fail("a way to the network"))
    return tmp_path / "cache"


def picture(number):
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (7 * number % 256, 40, 90)).save(content, "PNG")
    return content.getvalue()


def table(library, num=6, *, start=0, labels=None):
    """Pictures inside a table, cats and dogs by turns."""
    cells = [{"bytes": picture(start + row), "path": None} for row in range(num)]
    animals = [row % 2 for row in range(num)] if labels is None else labels
    features = {"picture": library.Image(), "animal": library.ClassLabel(names=["cat", "dog"])}
    columns = {"picture": cells, "animal": animals}
    return library.Dataset.from_dict(columns, features=library.Features(features))


def save(library, path, **splits):
    library.disable_progress_bars()
    library.DatasetDict(splits).save_to_disk(str(path))
    return Hub(path=path)


def plain(library, path, columns, features=None):
    """A data set of one split whose images nobody looks at."""
    num = len(next(iter(columns.values())))
    kinds = None if features is None else library.Features({"image": library.Image(), **features})
    cells = {"image": [{"bytes": picture(row), "path": None} for row in range(num)], **columns}
    made = library.Dataset.from_dict(cells, features=kinds)
    if kinds is None:
        made = made.cast_column("image", library.Image())
    return save(library, path, train=made)


def contents(split):
    return [(split.inputs.root / name).read_bytes() for name in split.inputs.names]


def refused(hub, split="train"):
    with pytest.raises(ValueError, match=r".") as caught:
        hub.open(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is read


def test_pictures_in_tables_become_files_byte_for_byte(library, tmp_path):
    hub = save(library, tmp_path / "saved", train=table(library), valid=table(library, 2, start=6))
    split = hub.open("train")
    assert contents(split) == [picture(row) for row in range(6)]
    assert split.labels.classes == ("cat", "dog")
    assert split.labels.given.tolist() == [0, 1, 0, 1, 0, 1]
    assert split.labels.clean is None
    assert contents(hub.open("validation")) == [picture(6), picture(7)]
    assert decode(split.inputs.root / split.inputs.names[3]).getpixel((0, 0)) == (21, 40, 90)
    with pytest.raises(NoSplit, match="split"):
        hub.open("test")


def test_the_same_data_has_the_same_digest_in_every_layout(library, tmp_path):
    made, path = table(library), tmp_path / "parquet"
    path.mkdir()
    made.to_parquet(str(path / "train.parquet"))
    made.save_to_disk(str(tmp_path / "alone"))
    hubs = [Hub(path=place) for place in (path, path / "train.parquet", tmp_path / "alone")]
    hubs.append(save(library, tmp_path / "saved", train=made))
    assert len({digest_inputs(hub.open("train").inputs) for hub in hubs}) == 1


def test_data_that_changes_in_place_is_unpacked_anew(library, tmp_path):
    hub = save(library, tmp_path / "saved", train=table(library, 3))
    before = hub.open("train").inputs
    save(library, tmp_path / "other", train=table(library, 3, start=9))
    for path in (tmp_path / "other").rglob("*.arrow"):
        (tmp_path / "saved" / path.relative_to(tmp_path / "other")).write_bytes(path.read_bytes())
    after = hub.open("train").inputs
    assert digest_inputs(before) != digest_inputs(after)
    assert (after.root / after.names[0]).read_bytes() == picture(9)


def test_unpacking_happens_once_and_mends_what_was_removed(library, tmp_path):
    hub = save(library, tmp_path / "saved", train=table(library))
    first = hub.open("train").inputs
    paths = [first.root / name for name in first.names]
    times = [path.stat().st_mtime_ns for path in paths]
    assert hub.open("train").inputs == first
    paths[2].unlink()
    paths[4].write_bytes(b"")  # as after a loss of power
    assert hub.open("train").inputs == first
    kept = [place for place in range(6) if place not in (2, 4)]
    assert [paths[place].stat().st_mtime_ns for place in kept] == [times[place] for place in kept]
    assert [paths[place].read_bytes() for place in (2, 4)] == [picture(2), picture(4)]


def test_an_unpacking_that_was_killed_is_finished(library, tmp_path):
    hub = save(library, tmp_path / "saved", train=table(library))
    whole = hub.open("train").inputs
    (whole.root / "train.json").unlink()
    for name in whole.names[3:]:
        (whole.root / name).unlink()
    (whole.root / whole.names[1]).write_bytes(b"half")
    (whole.root / whole.names[2]).with_name(".left-behind").write_bytes(b"half")
    assert hub.open("train").inputs == whole
    assert contents(hub.open("train")) == [picture(row) for row in range(6)]


def test_what_a_killed_unpacking_has_left_half_written_goes_with_the_next(library, tmp_path):
    hub = save(library, tmp_path / "saved", train=table(library))
    root = hub.open("train").inputs.root
    shutil.rmtree(root)
    child = os.fork()
    if not child:
        os.replace = Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        hub.open("train")
    os.waitpid(child, 0)
    assert list(root.rglob(".*"))
    assert contents(hub.open("train")) == [picture(row) for row in range(6)]
    assert not list(root.rglob(".*"))


def test_images_in_folders_are_read_where_they_are(library, tmp_path, cache):
    root = tmp_path / "images"
    for name in ("train/b/0.png", "train/a/0.png", "train/a/1.png", "test/b/0.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(0))
    inputs, labels = Hub(path=root).open("train")
    assert inputs.root == root
    found = dict(zip(inputs.names, labels.given.tolist(), strict=True))
    assert found == {"train/a/0.png": 0, "train/a/1.png": 0, "train/b/0.png": 1}
    assert Hub(path=root).open("test").labels.given.tolist() == [1]
    assert not (cache / "nearsay").exists()


def test_a_csv_names_files_beside_it_and_labels_in_words(library, tmp_path):
    (tmp_path / "photos").mkdir()
    lines = ["file,label,truth"]
    for number, labels in enumerate(("zebra,zebra", "ant,gnu", ",ant")):
        (tmp_path / "photos" / f"{number}.png").write_bytes(picture(number))
        lines.append(f"photos/{number}.png,{labels}")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    split = Hub(path=tmp_path / "rows.csv", clean="truth").open("train")
    assert split.inputs.names == ("photos/0.png", "photos/1.png", "photos/2.png")
    assert split.labels.classes == ("ant", "zebra")
    assert split.labels.given.tolist() == [1, 0, -1]
    assert split.labels.clean.tolist() == [1, -1, 0]


def test_numbers_below_zero_and_missing_labels_mean_unlabeled(library, tmp_path):
    hub = save(library, tmp_path / "saved", train=table(library, 4, labels=[1, -1, None, 0]))
    assert hub.open("train").labels.given.tolist() == [1, -1, -1, 0]


def test_a_missing_true_label_is_not_the_class_called_none(library, tmp_path):
    plain(library, tmp_path / "saved", {"label": ["None", None, "a"], "truth": ["None", None, "a"]})
    split = Hub(path=tmp_path / "saved", label="label", clean="truth").open("train")
    assert (split.labels.classes, split.labels.given.tolist()) == (("None", "a"), [0, -1, 1])
    assert split.labels.clean.tolist() == [0, -1, 1]


@pytest.mark.parametrize("empty", [None, ""])
def test_a_true_label_that_is_empty_among_others_is_not_taken_for_a_class_from_outside(
    library, tmp_path, empty
):
    plain(library, tmp_path / "saved", {"label": ["a", "b", "b"], "truth": ["a", empty, "b"]})
    told = refused(Hub(path=tmp_path / "saved", label="label", clean="truth"))
    assert "column 'truth'" in told
    assert "row 1" in told


def test_true_labels_that_one_split_lacks_are_unknown_there(library, tmp_path):
    text = library.Value("string")
    kinds = library.Features({"image": library.Image(), "label": text, "truth": text})
    cells = [{"bytes": picture(number), "path": None} for number in range(2)]
    parts = {}
    for name, truth in (("train", [None, None]), ("test", ["b", "a"])):
        rows = {"image": cells, "label": ["a", "b"], "truth": truth}
        parts[name] = library.Dataset.from_dict(rows, features=kinds)
    library.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    hub = Hub(path=tmp_path / "saved", label="label", clean="truth")
    assert hub.open("train").labels.clean is None
    assert hub.open("test").labels.clean.tolist() == [1, 0]


def test_a_true_label_may_stand_in_a_column_of_classes(library, tmp_path):
    kind, path = library.ClassLabel(names=["a", "b"]), tmp_path / "saved"
    cells = {"label": [0, 1, -1], "truth": [0, 0, -1]}
    plain(library, path, cells, {"label": kind, "truth": kind})
    labels = Hub(path=path, clean="truth").open("train").labels
    assert (labels.given.tolist(), labels.clean.tolist()) == ([0, 1, -1], [0, 0, -1])
    assert "['label', 'truth']" in refused(Hub(path=path))
    assert Hub(path=path, label="truth").open("train").labels.given.tolist() == [0, 0, -1]


def test_a_true_label_beyond_the_last_class_is_none_of_them(library, tmp_path):
    table = library.Dataset.from_dict({"truth": [0, 9, 1]})
    table.info.features["truth"] = library.ClassLabel(names=["a", "b"])
    assert hub_module._values(library, table, "truth") == ["a", None, "b"]


# Splits


def test_splits_are_called_as_the_user_says(library, tmp_path):
    names, path = ("full", "validation", "dev"), tmp_path / "saved"
    save(library, path, **{name: table(library, 2, start=10 * n) for n, name in enumerate(names)})
    hub = Hub(path=path, train="full", test="validation")
    assert contents(hub.open("test")) == [picture(10), picture(11)]
    assert contents(hub.open("validation")) == [picture(20), picture(21)]
    assert "full, validation, dev" in refused(Hub(path=path))
    assert "test" in refused(Hub(path=path, train="full", test="x"))
    assert "differ" in refused(Hub(path=path, train="full", test="full"))


def test_a_split_whose_labels_are_hidden_is_left_out(library, tmp_path):
    hidden = table(library, 2, start=6, labels=[-1, -1])
    hub = save(library, tmp_path / "saved", train=table(library), test=hidden)
    with pytest.raises(NoSplit, match="labels"):
        hub.open("test")


def test_a_label_that_is_never_trained_on_is_refused(library, tmp_path):
    parts = {}
    for place, (name, labels) in enumerate({"train": ["a", "b"], "test": ["a", "c"]}.items()):
        cells = {"image": [{"bytes": picture(place), "path": None}] * 2, "label": labels}
        parts[name] = library.Dataset.from_dict(cells).cast_column("image", library.Image())
    hub = save(library, tmp_path / "saved", **parts)
    assert "label 'c' of 'test'" in refused(hub, "test")


# What is refused


def test_an_unknown_column_is_answered_by_those_there_are(library, tmp_path):
    save(library, tmp_path / "saved", train=table(library))
    for wish in ("image", "label", "clean"):
        told = refused(Hub(path=tmp_path / "saved", **{wish: "nothing"}))
        assert wish in told
        assert "'picture', 'animal'" in told


@pytest.mark.parametrize("labels", [[0.5, 1.5], [["a"], ["b"]]])
def test_a_label_is_one_class(library, tmp_path, labels):
    assert "column" in refused(plain(library, tmp_path / "saved", {"label": labels}))


def test_what_is_not_there_is_not_looked_for_on_the_hub(library, tmp_path):
    assert "path" in refused(Hub(path="user/photos"))
    (tmp_path / "notes.txt").write_text("hello")
    assert "path" in refused(Hub(path=tmp_path / "notes.txt"))


def pointing(folder, address):
    folder.mkdir()
    lines = ["---", "license_link: https://example.org", "configs:", "- config_name: default"]
    lines += ["  data_files:", f'  - "{address}"', "size: 1", "---", "See https://example.org."]
    (folder / "README.md").write_text("\n".join(lines))
    return Hub(path=folder)


@pytest.mark.parametrize(
    "address", ["https://example.org/a.parquet", "hf://datasets/user/photos/a.parquet"]
)
def test_a_local_folder_that_points_to_the_network_is_refused(library, tmp_path, address):
    assert address in refused(pointing(tmp_path / "remote", address))
    hub = pointing(tmp_path / "local", "rows.parquet")
    table(library, 2).to_parquet(str(tmp_path / "local" / "rows.parquet"))
    assert hub.open("train").labels.given.tolist() == [0, 1]


def test_images_that_are_elsewhere_are_not_fetched(library, tmp_path):
    (tmp_path / "rows.csv").write_text("image,label\nhttps://example.org/a.png,cat\n")
    assert "'https://example.org/a.png' in column 'image'" in refused(
        Hub(path=tmp_path / "rows.csv")
    )


@pytest.mark.parametrize("address", ["{}/secret.png", "../secret.png", "inner/../../secret.png"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_data_does_not_choose_among_files_outside_of_its_folder(
    library, tmp_path, address, is_mixed
):
    (tmp_path / "secret.png").write_bytes(picture(0))
    (tmp_path / "data").mkdir()
    secret = {"bytes": None, "path": address.format(tmp_path)}
    first = {"bytes": picture(1), "path": None} if is_mixed else secret
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, path = {"image": [first, secret], "label": ["a", "b"]}, tmp_path / "data" / "rows.parquet"
    parquet.write_table(pyarrow.table(rows), path)
    assert repr(str(tmp_path / "data")) in refused(Hub(path=path))


@pytest.mark.parametrize("way", ["data", "link", "link/../data", "data/a/.."])
def test_a_folder_may_be_named_in_any_way(library, tmp_path, way):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "0.png").write_bytes(picture(0))
    (tmp_path / "link").symlink_to(tmp_path / "data")
    split = Hub(path=f"{tmp_path}/{way}").open("train")
    assert split.inputs.names == ("a/0.png", "b/0.png")
    assert contents(split) == [picture(0)] * 2


def test_data_of_the_hub_is_read_from_the_cache_alone(library, tmp_path, cache, monkeypatch):
    def opened(*paths):
        rows = library.Dataset.from_dict({"image": list(paths), "label": ["a", "b"]})
        split = rows.cast_column("image", library.Image())
        monkeypatch.setattr(library, "load_dataset", lambda *_, **__: {"train": split})
        return Hub(name="user/photos")

    hub = opened(str(cache / "x" / "0.png"), str(cache / "1.png"))
    assert hub.open("train").inputs.names == ("x/0.png", "1.png")
    assert "'/1.png'" in refused(opened("0.png", "/1.png"))


def test_a_name_is_asked_for_with_its_configuration_and_revision(library, monkeypatch):
    asked = []

    def load(*words, **more):
        asked.append((words, more, library.config.HF_HUB_OFFLINE))
        return {"train": table(library, 2)}

    monkeypatch.setattr(library, "load_dataset", load)
    is_offline = library.config.HF_HUB_OFFLINE
    split = Hub(name="user/photos", config="small", revision="v2").open("train")
    assert asked == [(("user/photos", "small"), {"revision": "v2"}, is_offline)]
    assert contents(split) == [picture(0), picture(1)]


def test_the_library_is_left_as_it_was(library, tmp_path):
    hub = save(library, tmp_path / "saved", train=table(library))
    library.enable_progress_bars()
    before = library.config.HF_HUB_OFFLINE
    hub.open("train")
    assert before == library.config.HF_HUB_OFFLINE
    assert not library.utils.are_progress_bars_disabled()


def test_either_a_path_or_a_name_is_given():
    for fields in ({}, {"path": "here", "name": "there"}):
        with pytest.raises(ValueError, match="path or name"):
            Hub(**fields)
    with pytest.raises(ValueError, match="revision"):
        Hub(path="here", revision="v1")


@pytest.mark.parametrize("found", [None, ModuleType("datasets")])
def test_a_missing_library_is_told_with_its_cure(found, monkeypatch):
    # Nothing, or a folder that happens to be called so.
    monkeypatch.setitem(sys.modules, "datasets", found)
    with pytest.raises(ImportError, match=r"\[hub\]"):
        Hub(path="here").open("train")


# A run


def recipe(path, *more):
    small = ["size=16", "weights=none", "epochs=1", "batch_size=4", "method=standard", "held_out=0"]
    call = config.call_recipe("hub", [f"path={path}", *small, *more])
    machine = ["machine.device=cpu", "machine.workers=0", "backbone.width=4"]
    return config.apply_overrides(call, machine)


def test_a_run_skips_or_stops_at_what_is_no_image(library, tmp_path):
    broken = table(library, 8).to_dict()
    broken["picture"][2] = {"bytes": b"no image", "path": None}
    broken["picture"][5] = None
    made = library.Dataset.from_dict(broken, features=table(library).features)
    names = save(library, tmp_path / "saved", train=made).open("train").inputs.names
    call, run = recipe(tmp_path / "saved"), tmp_path / "run"
    assert train(call.experiment, run, origin=call.origin)["labels"]["num_examples"] == 8
    origin = json.loads((run / "experiment.json").read_text())
    assert config.from_origin(origin).experiment == call.experiment
    load_file = import_module("safetensors.torch").load_file
    seen = load_file(run / "predictions" / "train.safetensors")
    assert sorted(seen["indices"].tolist()) == [0, 1, 3, 4, 6, 7]
    assert torch.isfinite(seen["logits"]).all()
    stopping = recipe(tmp_path / "saved", "bad_images=stop").experiment
    with pytest.raises(ValueError, match=f"{names[2]}|{names[5]}"):
        train(stopping, tmp_path / "stopped")
