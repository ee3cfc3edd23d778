"""WebVision and ImageNet's validation images from small trees with the layout of the originals."""

import csv

import pytest

from nearsay.data import ImageNetValidation, MiniWebVision, WebVision, inspect, webvision
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


def write_google(root, pairs):
    write(root / "info" / "train_filelist_google.txt", (f"{name} {label}" for name, label in pairs))


def make(root):
    """The info folder with the synsets."""
    lines = (f"{synset} thing{n}, Res {n}" for n, synset in enumerate(SYNSETS))
    write(root / "info" / "synsets.txt", lines)


def make_tree(root):
    """A dozen images of each engine in classes 0, 49, 50 and 999, and of validation."""
    numbers = [0, 49, 50, 999] * 3
    make(root)
    for engine in ("google", "flickr"):
        names = [f"{engine}/q{number + 1:04d}/{row}.jpg" for row, number in enumerate(numbers)]
        lines = (f"{name} {number}" for name, number in zip(names, numbers, strict=True))
        write(root / "info" / f"train_filelist_{engine}.txt", lines)
        touch(root, names)
    names = [f"val{row:06d}.jpg" for row in range(1, 13)]
    lines = (f"{name} {number}" for name, number in zip(names, numbers, strict=True))
    write(root / "info" / "val_filelist.txt", lines)
    touch(root / "val_images_256", names)


def listing(split):
    return dict(zip(split.inputs.names, split.labels.given.tolist(), strict=True))


def refused(data, split="train"):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 — each test looks at the message
        data.open(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mini(path, **choices):
    return MiniWebVision(path=path, partial=True, **choices)


def test_mini_webvision_has_the_published_numbers_of_images(tmp_path):
    train = [(f"google/q{row % 50:04d}/{row}.jpg", row % 50) for row in range(65_944)]
    others = [(f"google/q0999/{row}.jpg", 50 + row % 950) for row in range(100)]
    val = [(f"val{row + 1:06d}.jpg", row // 50) for row in range(50_000)]
    make(tmp_path)
    write_google(tmp_path, others[:50] + train + others[50:])
    write(tmp_path / "info" / "val_filelist.txt", (f"{a} {b}" for a, b in val))
    # Nobody asks for the others.
    touch(tmp_path, (train[round(65_943 * part / 7)][0] for part in range(8)))
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
    assert inputs.names[50] == "val_images_256/val000051.jpg"
    assert labels.given.tolist() == [row // 50 for row in range(2500)]
    assert labels.clean.equal(labels.given)
    assert labels.clean is not labels.given
    write_google(tmp_path, train[:-1])
    assert "partial=True" in refused(data)
    with pytest.raises(NoSplit, match="split"):
        data.open("validation")


def test_webvision_is_google_and_then_flickr_in_all_classes(tmp_path, monkeypatch):
    make_tree(tmp_path)
    assert webvision._NUM_TRAIN[0] == 2_400_000
    assert "got 24" in refused(WebVision(path=tmp_path))
    monkeypatch.setattr(webvision, "_NUM_TRAIN", range(24, 30))
    inputs, labels = WebVision(path=tmp_path).open("train")
    assert inputs.names[0] == "google/q0001/0.jpg"
    assert inputs.names[12] == "flickr/q0001/0.jpg"
    assert labels.given.tolist() == [0, 49, 50, 999] * 6
    assert len(labels.classes) == 1000
    found = listing(WebVision(path=tmp_path, partial=True).open("test"))
    assert found["val_images_256/val000002.jpg"] == 49


@pytest.mark.parametrize(
    ("folder", "val_folder"),
    [("", "val_images_256"), ("google_resized_256/", "val_images"), ("train/", "val")],
)
def test_images_are_found_where_the_archives_put_them(tmp_path, folder, val_folder):
    make_tree(tmp_path)
    if folder:
        (tmp_path / folder).mkdir()
        (tmp_path / "google").rename(tmp_path / folder / "google")
        for path in (tmp_path / "info").iterdir():  # the lists may lie beside the images
            path.rename(tmp_path / path.name)
    (tmp_path / "val_images_256").rename(tmp_path / val_folder)
    rows = {0: 0, 1: 49, 4: 0, 5: 49, 8: 0, 9: 49}
    expected = {f"{folder}google/q{n + 1:04d}/{row}.jpg": n for row, n in rows.items()}
    assert listing(mini(tmp_path).open("train")) == expected
    assert f"{val_folder}/val000001.jpg" in listing(mini(tmp_path).open("test"))


def test_partial_takes_what_is_there_and_keeps_labels_with_their_images(tmp_path):
    make_tree(tmp_path)
    for row in (0, 5, 9):
        next((tmp_path / "google").rglob(f"{row}.jpg")).unlink()
    kept = {"google/q0050/1.jpg": 49, "google/q0001/4.jpg": 0, "google/q0001/8.jpg": 0}
    assert listing(mini(tmp_path).open("train")) == kept
    for path in (tmp_path / "google").rglob("*.jpg"):
        path.unlink()
    assert "6 of 6" in refused(mini(tmp_path))


def test_a_single_image_of_many_is_found_with_partial(tmp_path):
    make(tmp_path)
    write_google(tmp_path, [(f"google/q0001/{row}.jpg", 3) for row in range(1000)])
    name = "train/google/q0001/77.jpg"  # between those that are looked for first
    touch(tmp_path, [name])
    assert listing(mini(tmp_path).open("train")) == {name: 3}


def test_missing_images_are_counted_and_three_are_named(tmp_path, monkeypatch):
    make_tree(tmp_path)
    monkeypatch.setattr(webvision, "_NUM_MINI_TRAIN", 6)
    data = MiniWebVision(path=tmp_path)
    assert len(data.open("train").inputs) == 6
    for row in (0, 4, 5, 9):
        next((tmp_path / "google").rglob(f"{row}.jpg")).unlink()
    text = refused(data)
    assert "4 of 6" in text
    assert "google/q0001/0.jpg, google/q0001/4.jpg, google/q0050/5.jpg;" in text


def test_a_wrong_line_is_named(tmp_path):
    make(tmp_path)
    wrong = [("google/a.jpg", label) for label in ("", 1000, -1, "1.0", "cat")]
    names = ["../a.jpg", "google/../../a.jpg", "/etc/passwd", "google\\a.jpg", "google//a.jpg"]
    wrong += [(name, 1) for name in (*names, "google/\0.jpg")]
    for pair in wrong:
        write_google(tmp_path, [("google/q0001/0.jpg", 0), pair])
        assert "train_filelist_google.txt, line 2" in refused(mini(tmp_path)), pair
    names = ["google/q0001/a..jpg", "google/q0001/...jpg", "google/q..1/.a.jpg"]  # no way out
    touch(tmp_path, names)
    write_google(tmp_path, [("", ""), *((name, 2) for name in names)])
    assert listing(mini(tmp_path).open("train")) == dict.fromkeys(names, 2)


def test_what_is_no_webvision_is_refused_in_a_sentence(tmp_path):
    data, google = mini(tmp_path), tmp_path / "info" / "train_filelist_google.txt"
    assert "info/synsets.txt" in refused(data)
    make(tmp_path)
    assert google.name in refused(data)
    google.write_bytes(b"google/\xff.jpg 0\n")
    assert google.name in refused(data)
    write_google(tmp_path, [("google/q0051/0.jpg", 50)])
    assert "65944" in refused(data)
    write(tmp_path / "info" / "synsets.txt", [f"{synset} a" for synset in SYNSETS[:-1]])
    assert "999" in refused(data)
    write(tmp_path / "info" / "synsets.txt", ["n01440764 tench", "tench"])
    assert "line" in refused(data)


def make_imagenet(root, layout, num=3):
    """The first synsets, each with as many images as its number + 1, in another order."""
    images = [SYNSETS[number] for number in range(num) for _ in range(number + 1)][::-1]
    pairs = [(f"ILSVRC2012_val_{row:08d}", synset) for row, synset in enumerate(images, start=1)]
    for name, synset in pairs:
        touch(root, [f"val/{synset if layout == 'folders' else '.'}/{name}.JPEG"])
    if layout == "lines":
        write(root / webvision.SYNSET_LABELS, images)
    if layout == "csv":
        rows = [f"{name},{synset} 1 2 3 4 {synset} 5 6 7 8" for name, synset in pairs]
        write(root / "LOC_val_solution.csv", ["ImageId,PredictionString", *reversed(rows)])


@pytest.mark.parametrize("layout", ["folders", "lines", "csv"])
def test_imagenet_validation_is_numbered_as_webvision_is(tmp_path, layout):
    make(tmp_path)
    make_imagenet(tmp_path / "imagenet", layout)
    choices = {"synsets": tmp_path, "num_classes": 2, "partial": True}
    data = ImageNetValidation(path=tmp_path / "imagenet", **choices)
    inputs, labels = data.open("test")
    assert [int(name[-13:-5]) for name in inputs.names] == [6, 4, 5]
    assert labels.given.tolist() == labels.clean.tolist() == [0, 1, 1]
    assert labels.classes == ("n10000000 thing0", "n10000007 thing1")
    assert all((inputs.root / name).is_file() for name in inputs.names)
    with pytest.raises(NoSplit, match="split"):
        data.open("train")


def test_imagenet_validation_has_fifty_images_a_class(tmp_path):
    make(tmp_path)
    file = tmp_path / "info" / "synsets.txt"
    touch(tmp_path, (f"val/{synset}/{row}.JPEG" for synset in SYNSETS[:2] for row in range(50)))
    touch(tmp_path, [f"val/{SYNSETS[0]}/notes.txt"])
    data = ImageNetValidation(path=tmp_path / "val", synsets=file, num_classes=2)
    assert len(data.open("test").inputs) == 100
    (tmp_path / "val" / SYNSETS[1] / "7.JPEG").unlink()
    assert "49 validation images of the class 'n10000007 thing1'" in refused(data, "test")
    data = ImageNetValidation(path=tmp_path / "val", synsets=file)
    touch(tmp_path, [f"val/{SYNSETS[1]}/7.JPEG"])
    assert "0 validation images of the class 'n10000014 thing2'" in refused(data, "test")
    for num_classes in (0, 1001, True, 2.5):
        with pytest.raises(ValueError, match="num_classes"):
            ImageNetValidation(path="x", synsets="y", num_classes=num_classes)


def test_imagenet_labels_must_be_synsets(tmp_path):
    def attempt(name=None, content=b"", path=tmp_path):
        if name is not None:
            (tmp_path / name).write_bytes(content)
        labels = None if name is None else tmp_path / name
        data = ImageNetValidation(path=path, synsets=tmp_path, labels=labels, partial=True)
        return refused(data, "test")

    make(tmp_path)
    make_imagenet(tmp_path, "flat")
    assert "6 images in one folder" in attempt()
    assert "synset" in attempt("truth.txt", b"490\n361\n171\n822\n297\n482\n")
    assert "00000006.JPEG" in attempt("truth.txt", "\n".join(SYNSETS[:5]).encode())
    assert "truth.csv" in attempt("truth.csv", b"ILSVRC2012_val_00000001,\xff")
    assert "truth.csv" in attempt("truth.csv", b"a" * (csv.field_size_limit() + 1))
    (tmp_path / "empty").mkdir()
    assert "folder" in attempt(path=tmp_path / "empty")
    touch(tmp_path, [f"other/{SYNSETS[70]}/1.JPEG"])
    data = {"path": tmp_path / "other", "synsets": tmp_path, "num_classes": 50, "partial": True}
    assert "no image" in refused(ImageNetValidation(**data), "test")


@pytest.mark.parametrize("name", inspect.NAMES)
def test_a_check_of_nothing_says_where_to_get_it(tmp_path, name):
    [finding] = inspect.check(name, tmp_path / "nowhere")
    for each in (finding, *inspect.check(name, tmp_path)):
        assert (each.status, each.found) == ("missing", 0)
        assert "https://" in each.message
    assert str(tmp_path / "nowhere") in finding.message
    with pytest.raises(ValueError, match="name"):
        inspect.check("mnist", tmp_path)


def test_a_check_counts_every_image(tmp_path, monkeypatch):
    make_tree(tmp_path)
    monkeypatch.setattr(webvision, "_NUM_TRAIN", range(24, 25))
    monkeypatch.setattr(webvision, "_NUM_MINI_TRAIN", 6)
    train, test = inspect.check("webvision", tmp_path)
    assert train[:4] == ("train", "ok", 24, 24)
    assert test[:2] == ("test", "wrong")
    assert "50000 images, got 12" in test.message
    assert inspect.check("mini-webvision", tmp_path)[0][:4] == ("train", "ok", 6, 6)
    next((tmp_path / "google").rglob("1.jpg")).unlink()  # not among the first that are looked for
    train, _ = inspect.check("webvision", tmp_path)
    assert train[:4] == ("train", "missing", 23, 24)
    assert "google/q0050/1.jpg" in train.message


def test_a_check_of_imagenet_counts_images_and_synsets(tmp_path):
    touch(tmp_path, (f"val/{synset}/{row}.JPEG" for synset in SYNSETS[:3] for row in range(2)))
    [finding] = inspect.check("imagenet-validation", tmp_path)
    assert finding[:4] == ("test", "missing", 6, 50_000)
    assert "6 images of 3 synsets" in finding.message


def test_a_check_of_cifar_tells_a_damaged_file_from_none(tmp_path):
    touch(tmp_path / "cifar-10-batches-py", ["batches.meta", "test_batch"])
    found = {each.part: each for each in inspect.check("cifar10", tmp_path)}
    assert found["train"][1:4] == ("missing", 0, 50_000)
    assert found["test"][1:4] == ("wrong", 0, 10_000)
    assert "md5" in found["test"].message
