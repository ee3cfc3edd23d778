"""WebVision and ImageNet's validation images from small trees with the layout of the originals."""

import csv
import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from nearsay.data import ImageNetValidation, MiniWebVision, WebVision, inspect, webvision
from nearsay.data.images import decode
from nearsay.errors import NoSplit

SYNSETS = [f"n{10_000_000 + 7 * number:08d}" for number in range(1000)]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def touch(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def make(root):
    """The info folder with the synsets."""
    write(
        root / "info" / "synsets.txt",
        (f"{synset} thing{n}, Res {n}" for n, synset in enumerate(SYNSETS)),
    )


def make_tree(root):
    """A dozen images of each engine in classes 0, 49, 50 and 999, and of validation."""
    numbers = [0, 49, 50, 999] * 3
    make(root)
    for engine in ("google", "flickr"):
        pairs = [
            (f"{engine}/q{number + 1:04d}/{row}.jpg", number) for row, number in enumerate(numbers)
        ]
        write(
            root / "info" / f"train_filelist_{engine}.txt",
            (f"{name} {number}" for name, number in pairs),
        )
        touch(root, (name for name, _ in pairs))
    pairs = [(f"val{row:06d}.jpg", number) for row, number in enumerate(numbers, start=1)]
    write(root / "info" / "val_filelist.txt", (f"{name} {number}" for name, number in pairs))
    touch(root / "val_images_256", (name for name, _ in pairs))


def listing(split):
    return dict(zip(split.inputs.names, split.labels.given.tolist(), strict=True))


def refused(data, split="train"):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 — each test looks at the message
        data.open(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mini_webvision_has_the_published_numbers_of_images(tmp_path):
    train = [(f"google/q{row % 50:04d}/{row}.jpg", row % 50) for row in range(65_944)]
    others = [(f"google/q0999/{row}.jpg", 50 + row % 950) for row in range(1000)]
    val = [(f"val{row + 1:06d}.jpg", row // 50) for row in range(50_000)]
    make(tmp_path)
    write(
        tmp_path / "info" / "train_filelist_google.txt",
        (f"{a} {b}" for a, b in others[:500] + train + others[500:]),
    )
    write(tmp_path / "info" / "val_filelist.txt", (f"{a} {b}" for a, b in val))
    last = 65_943
    touch(
        tmp_path, (train[round(last * part / 7)][0] for part in range(8))
    )  # of all others nobody asks
    touch(tmp_path / "val_images_256", (val[round(2499 * part / 7)][0] for part in range(8)))
    data = MiniWebVision(path=tmp_path)
    inputs, labels = data.open("train")
    assert inputs.root == tmp_path
    assert inputs.names == tuple(name for name, _ in train)
    assert labels.given.tolist() == [number for _, number in train]
    assert labels.clean is None
    assert labels.classes[:2] == ("n10000000 thing0", "n10000007 thing1")
    assert len(labels.classes) == 50
    inputs, labels = data.open("test")
    assert inputs.names[::50] == tuple(
        f"val_images_256/val{50 * number + 1:06d}.jpg" for number in range(50)
    )
    assert labels.given.tolist() == [row // 50 for row in range(2500)]
    assert labels.clean is not None
    assert labels.clean.equal(labels.given)
    assert labels.clean is not labels.given
    write(tmp_path / "info" / "train_filelist_google.txt", (f"{a} {b}" for a, b in train[:-1]))
    message = refused(data)
    assert "train_filelist_google.txt" in message
    assert "partial=True" in message


def test_webvision_is_google_and_then_flickr_in_all_classes(tmp_path, monkeypatch):
    make_tree(tmp_path)
    monkeypatch.setattr(webvision, "_NUM_TRAIN", range(24, 30))
    inputs, labels = WebVision(path=tmp_path).open("train")
    assert inputs.names[0] == "google/q0001/0.jpg"
    assert inputs.names[12] == "flickr/q0001/0.jpg"
    assert labels.given.tolist() == [0, 49, 50, 999] * 6
    assert len(labels.classes) == 1000
    monkeypatch.setattr(webvision, "_NUM_TRAIN", range(25, 30))
    expected = (
        "train_filelist_google.txt and train_filelist_flickr.txt must list 25 to 29 images, got 24"
    )
    assert expected in refused(WebVision(path=tmp_path))
    assert (
        listing(WebVision(path=tmp_path, partial=True).open("test"))["val_images_256/val000002.jpg"]
        == 49
    )


def test_the_published_size_of_webvision_is_two_million_four_hundred_thousand():
    assert 2_400_000 in webvision._NUM_TRAIN
    assert 2_399_999 not in webvision._NUM_TRAIN
    assert 2_500_000 not in webvision._NUM_TRAIN


@pytest.mark.parametrize("folder", ["", "google_resized_256", "train"])
@pytest.mark.parametrize("val_folder", ["val_images_256", "val_images", "val"])
def test_images_are_found_where_the_archives_put_them(tmp_path, folder, val_folder):
    make_tree(tmp_path)
    if folder:
        (tmp_path / folder).mkdir()
        (tmp_path / "google").rename(tmp_path / folder / "google")
    (tmp_path / "val_images_256").rename(tmp_path / val_folder)
    data = MiniWebVision(path=tmp_path, partial=True)
    prefix = f"{folder}/" if folder else ""
    rows = {0: 0, 1: 49, 4: 0, 5: 49, 8: 0, 9: 49}
    expected = {
        f"{prefix}google/q{number + 1:04d}/{row}.jpg": number for row, number in rows.items()
    }
    assert listing(data.open("train")) == expected
    assert f"{val_folder}/val000001.jpg" in listing(data.open("test"))


def test_an_image_of_the_listing_can_be_decoded(tmp_path):
    make_tree(tmp_path)
    for path in (tmp_path / "google").rglob("*.jpg"):
        Image.new("RGB", (8, 8), "red").save(path)
    inputs, _ = MiniWebVision(path=tmp_path, partial=True).open("train")
    assert [decode(inputs.root / name).size for name in inputs.names] == [(8, 8)] * 6


def test_lists_may_lie_beside_the_images(tmp_path):
    make_tree(tmp_path)
    for path in (tmp_path / "info").iterdir():
        path.rename(tmp_path / path.name)
    assert len(MiniWebVision(path=tmp_path, partial=True).open("train").inputs) == 6


def test_partial_takes_what_is_there_and_keeps_labels_with_their_images(tmp_path):
    make_tree(tmp_path)
    for row in (0, 5, 9):
        next((tmp_path / "google").rglob(f"{row}.jpg")).unlink()
    data = MiniWebVision(path=tmp_path, partial=True)
    assert listing(data.open("train")) == {
        "google/q0050/1.jpg": 49,
        "google/q0001/4.jpg": 0,
        "google/q0001/8.jpg": 0,
    }
    for path in (tmp_path / "google").rglob("*.jpg"):
        path.unlink()
    assert "6 of 6 images are not in" in refused(data)


def test_a_single_image_of_many_is_found_with_partial(tmp_path):
    make(tmp_path)
    write(
        tmp_path / "info" / "train_filelist_google.txt",
        (f"google/q0001/{row}.jpg 3" for row in range(1000)),
    )
    touch(tmp_path, ["train/google/q0001/77.jpg"])  # between those that are looked for first
    assert listing(MiniWebVision(path=tmp_path, partial=True).open("train")) == {
        "train/google/q0001/77.jpg": 3
    }


def test_missing_images_are_counted_and_three_are_named(tmp_path, monkeypatch):
    make_tree(tmp_path)
    monkeypatch.setattr(webvision, "_NUM_MINI_TRAIN", 6)
    data = MiniWebVision(path=tmp_path)
    assert len(data.open("train").inputs) == 6
    for row in (0, 4, 5, 9):
        next((tmp_path / "google").rglob(f"{row}.jpg")).unlink()
    named = "google/q0001/0.jpg, google/q0001/4.jpg, google/q0050/5.jpg;"
    assert f"4 of 6 images are not in {tmp_path}, such as {named}" in refused(data)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "google/q0001/a.jpg",
            "line",
        ),
        ("google/q0001/a.jpg 1000", "a path and a class from 0 to 999"),
        ("google/q0001/a.jpg -1", "a path and a class from 0 to 999"),
        ("google/q0001/a.jpg 1.0", "a path and a class from 0 to 999"),
        ("google/q0001/a.jpg cat", "a path and a class from 0 to 999"),
        ("../a.jpg 1", "line"),
        ("google/../../a.jpg 1", "path must"),
        ("/etc/passwd 1", "path must"),
        ("google\\a.jpg 1", "path must"),
        ("google//a.jpg 1", "path must"),
        ("google/\0.jpg 1", "path must"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, reason):
    make(tmp_path)
    write(tmp_path / "info" / "train_filelist_google.txt", ["google/q0001/0.jpg 0", line])
    message = refused(MiniWebVision(path=tmp_path, partial=True))
    assert reason in message
    assert "train_filelist_google.txt, line 2" in message


def test_dots_in_names_are_no_way_out(tmp_path):
    make(tmp_path)
    names = ["google/q0001/a..jpg", "google/q0001/...jpg", "google/q..1/.a.jpg"]
    touch(tmp_path, names)
    write(
        tmp_path / "info" / "train_filelist_google.txt", ["", *(f"{name}\t2" for name in names), ""]
    )
    assert listing(MiniWebVision(path=tmp_path, partial=True).open("train")) == dict.fromkeys(
        names, 2
    )


def test_what_is_no_webvision_is_refused_in_a_sentence(tmp_path):
    data = MiniWebVision(path=tmp_path, partial=True)
    assert f"{tmp_path} has no info/synsets.txt; info.tar" in refused(data)
    make(tmp_path)
    assert "train_filelist_google.txt does not exist" in refused(data)
    (tmp_path / "info" / "train_filelist_google.txt").write_bytes(b"google/\xff.jpg 0\n")
    assert "cannot be read" in refused(data)
    write(tmp_path / "info" / "train_filelist_google.txt", ["google/q0051/0.jpg 50"])
    assert refused(data).endswith("webvision/download.html")
    assert "must list 65944 images, got 0" in refused(data)
    write(tmp_path / "info" / "synsets.txt", [f"{synset} a" for synset in SYNSETS[:-1]])
    assert "has 999 classes, but the original has 1000" in refused(data)
    write(tmp_path / "info" / "synsets.txt", ["n01440764 tench", "tench"])
    assert "line" in refused(data)


@pytest.mark.parametrize("data", [WebVision(path="x"), MiniWebVision(path="x")])
def test_webvision_has_no_validation_split(data):
    with pytest.raises(NoSplit, match="split"):
        data.open("validation")


def make_imagenet(root, layout, num=3):
    """The first synsets, each with as many images as its number + 1, in the order of ImageNet,
    which is another.
    """
    images = [SYNSETS[number] for number in range(num) for _ in range(number + 1)][::-1]
    names = [f"ILSVRC2012_val_{row:08d}.JPEG" for row in range(1, len(images) + 1)]
    for name, synset in zip(names, images, strict=True):
        touch(root, [f"val/{synset}/{name}" if layout == "folders" else f"val/{name}"])
    if layout == "lines":
        write(root / webvision.SYNSET_LABELS, images)
    if layout == "csv":
        rows = [
            f"{name[:-5]},{synset} 1 2 3 4 {synset} 5 6 7 8"
            for name, synset in zip(names, images, strict=True)
        ]
        write(root / "LOC_val_solution.csv", ["ImageId,PredictionString", *reversed(rows)])


@pytest.mark.parametrize("layout", ["folders", "lines", "csv"])
def test_imagenet_validation_is_numbered_as_webvision_is(tmp_path, layout):
    make(tmp_path / "webvision")
    make_imagenet(tmp_path / "imagenet", layout)
    data = ImageNetValidation(
        path=tmp_path / "imagenet", synsets=tmp_path / "webvision", num_classes=2, partial=True
    )
    inputs, labels = data.open("test")
    assert [name[-13:] for name in inputs.names] == [
        "00000006.JPEG",
        "00000004.JPEG",
        "00000005.JPEG",
    ]
    assert labels.given.tolist() == [0, 1, 1]
    assert labels.clean is not None
    assert labels.clean.tolist() == [0, 1, 1]
    assert labels.classes == ("n10000000 thing0", "n10000007 thing1")
    assert all((inputs.root / name).is_file() for name in inputs.names)
    with pytest.raises(NoSplit, match="split"):
        data.open("train")


def test_imagenet_validation_has_fifty_images_a_class(tmp_path):
    make(tmp_path)
    file = tmp_path / "info" / "synsets.txt"
    touch(tmp_path, (f"val/{synset}/{row}.JPEG" for synset in SYNSETS[:2] for row in range(50)))
    touch(tmp_path, [f"val/{SYNSETS[0]}/notes.txt"])
    assert (
        len(
            ImageNetValidation(path=tmp_path / "val", synsets=file, num_classes=2)
            .open("test")
            .inputs
        )
        == 100
    )
    (tmp_path / "val" / SYNSETS[1] / "7.JPEG").unlink()
    message = refused(ImageNetValidation(path=tmp_path, synsets=file, num_classes=2), "test")
    assert (
        "has 49 validation images of the class 'n10000007 thing1', but the original has 50"
        in message
    )
    touch(tmp_path, [f"val/{SYNSETS[1]}/7.JPEG"])
    message = refused(ImageNetValidation(path=tmp_path, synsets=file), "test")
    assert "has 0 validation images of the class 'n10000014 thing2'" in message


def test_images_of_other_classes_alone_are_none(tmp_path):
    make(tmp_path)
    touch(tmp_path, [f"val/{SYNSETS[70]}/1.JPEG"])
    data = ImageNetValidation(path=tmp_path, synsets=tmp_path, num_classes=50, partial=True)
    assert f"{tmp_path} has no image of the lists; ILSVRC2012_img_val.tar is on" in refused(
        data, "test"
    )


@pytest.mark.parametrize("num_classes", [0, 1001, True, 2.5])
def test_a_wrong_number_of_imagenet_classes_is_refused(num_classes):
    with pytest.raises(ValueError, match="num_classes"):
        ImageNetValidation(path="x", synsets="y", num_classes=num_classes)


def test_imagenet_labels_must_be_synsets(tmp_path):
    make(tmp_path)
    make_imagenet(tmp_path, "flat")
    data = ImageNetValidation(path=tmp_path, synsets=tmp_path, partial=True)
    assert "6 images in one folder" in refused(data, "test")
    write(tmp_path / "truth.txt", [490, 361, 171, 822, 297, 482])
    wrong = ImageNetValidation(
        path=tmp_path, synsets=tmp_path, labels=tmp_path / "truth.txt", partial=True
    )
    assert "synset" in refused(wrong, "test")
    write(tmp_path / "truth.txt", SYNSETS[:5])
    assert "ILSVRC2012_val_00000006.JPEG" in refused(wrong, "test")
    (tmp_path / "truth.csv").write_bytes(b"ILSVRC2012_val_00000001,\xff")
    table = ImageNetValidation(
        path=tmp_path, synsets=tmp_path, labels=tmp_path / "truth.csv", partial=True
    )
    assert f"{tmp_path / 'truth.csv'} cannot be read" in refused(table, "test")
    (tmp_path / "truth.csv").write_text("a" * (csv.field_size_limit() + 1))
    assert f"{tmp_path / 'truth.csv'} cannot be read" in refused(table, "test")
    (tmp_path / "empty").mkdir()
    empty = ImageNetValidation(path=tmp_path / "empty", synsets=tmp_path)
    assert "has no folder like n01440764" in refused(empty, "test")


@pytest.mark.parametrize("name", inspect.NAMES)
def test_a_check_of_nothing_says_where_to_get_it(tmp_path, name):
    [finding] = inspect.check(name, tmp_path / "nowhere")
    assert finding.status == "missing"
    assert f"{tmp_path / 'nowhere'} is not a folder" in finding.message
    assert "https://" in finding.message
    findings = inspect.check(name, tmp_path)
    assert {each.status for each in findings} == {"missing"}
    assert all(
        each.found == 0 and "https://" in each.message and each.message.endswith(".")
        for each in findings
    )


def test_a_check_of_an_unknown_name_lists_those_that_exist(tmp_path):
    with pytest.raises(ValueError, match="name"):
        inspect.check("mnist", tmp_path)


def test_a_check_counts_every_image(tmp_path, monkeypatch):
    make_tree(tmp_path)
    monkeypatch.setattr(webvision, "_NUM_TRAIN", range(24, 25))
    monkeypatch.setattr(webvision, "_NUM_MINI_TRAIN", 6)
    train, test = inspect.check("webvision", tmp_path)
    assert train == ("train", "ok", 24, 24, f"All 24 images are in {tmp_path}.")
    assert test[:2] == ("test", "wrong")
    assert "val_filelist.txt must list 50000 images, got 12" in test.message
    assert inspect.check("mini-webvision", tmp_path)[0][:4] == ("train", "ok", 6, 6)
    next((tmp_path / "google").rglob("1.jpg")).unlink()  # not among the first that are looked for
    train, _ = inspect.check("webvision", tmp_path)
    assert train[:4] == ("train", "missing", 23, 24)
    assert "1 of 24 images is not in" in train.message
    assert "such as google/q0050/1.jpg; info.tar" in train.message


def test_a_check_of_imagenet_counts_images_and_synsets(tmp_path):
    touch(tmp_path, (f"val/{synset}/{row}.JPEG" for synset in SYNSETS[:3] for row in range(2)))
    [finding] = inspect.check("imagenet-validation", tmp_path)
    assert finding[:4] == ("test", "missing", 6, 50_000)
    assert "has 6 images of 3 synsets, but the original has 50000 of 1000" in finding.message


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_check_of_cifar_tells_a_damaged_file_from_none(tmp_path, name):
    folder = tmp_path / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    meta, test = {"cifar10": ("batches.meta", "test_batch"), "cifar100": ("meta", "test")}[name]
    touch(folder, [meta, test])
    found = {each.part: each for each in inspect.check(name, tmp_path)}
    assert found["train"][1:4] == ("missing", 0, 50_000)
    assert found["test"][1:4] == ("wrong", 0, 10_000)
    assert "md5" in found["test"].message


SCALE = """
import json, pathlib, re, sys, time
from nearsay.data import WebVision

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 2**10

before, start = peak(), time.perf_counter()
inputs, labels = WebVision(path=sys.argv[1]).open("train")
print(json.dumps([len(inputs), int(labels.given.sum()), time.perf_counter() - start, before, peak()]))
"""


@pytest.mark.slow
def test_two_million_four_hundred_thousand_names_are_indexed_in_half_a_minute_and_a_gibibyte(
    tmp_path,
):
    make(tmp_path)
    counts = {"google": 980_000, "flickr": 1_459_000}
    for engine, count in counts.items():
        names = [
            f"train/{engine}/q{row % 1631 + 1:04d}/{'x' * 20}{row:08d}.jpg" for row in range(count)
        ]
        lines = (f"{name[6:]} {row % 1000}" for row, name in enumerate(names))
        write(tmp_path / "info" / f"train_filelist_{engine}.txt", lines)
        touch(
            tmp_path,
            (
                names[place]
                for place in torch.linspace(0, count - 1, 8, dtype=torch.float64).round().int()
            ),
        )
    ran = subprocess.run(
        [sys.executable, "-c", SCALE, tmp_path], capture_output=True, text=True, check=True
    )
    num, total, seconds, before, peak = json.loads(ran.stdout)
    print(f"{num} names in {seconds:.1f} s, {before:.0f} MiB before and {peak:.0f} MiB at most")
    assert num == sum(counts.values())
    assert total == num // 1000 * 499_500
    assert seconds < 30
    assert peak < 1024
