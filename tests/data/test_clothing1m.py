"""Clothing1M from small trees with the layout of the original."""

import pytest
from PIL import Image

from nearsay.data import Clothing1M, clothing1m, inspect
from nearsay.data.images import decode
from nearsay.errors import NoSplit

CLASSES = [
    "T-Shirt",
    "Shirt",
    "Knitwear",
    "Chiffon",
    "Sweater",
    "Hoodie",
    "Windbreaker",
    "Jacket",
    "Downcoat",
    "Suit",
]
CLASSES += ["Shawl", "Dress", "Vest", "Underwear"]
COUNTS = {"noisy_train": 20, "clean_train": 4, "clean_val": 6, "clean_test": 5}


@pytest.fixture
def small(monkeypatch):
    """The published counts, of a data set as small as that of the tests."""
    parts = {split: (part, COUNTS[part]) for split, (part, _) in clothing1m._PARTS.items()}
    monkeypatch.setattr(clothing1m, "_PARTS", parts)


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))


def names(part):
    start = 100 * list(COUNTS).index(part)
    return [
        f"images/{row % 10}/{row % 7:02d}/{start + row},{row}.jpg" for row in range(COUNTS[part])
    ]


def make(root, annotations="."):
    folder = root / annotations
    folder.mkdir(exist_ok=True)
    write(folder / "category_names_eng.txt", CLASSES)
    for part in COUNTS:
        write(folder / f"{part}_key_list.txt", names(part))
        for name in names(part):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    clean = [name for part in ("clean_test", "clean_val", "clean_train") for name in names(part)]
    noisy = [
        *names("clean_val"),
        *reversed(names("noisy_train")),
    ]  # some have both, in another order than the keys
    write(folder / "clean_label_kv.txt", (f"{name} {row % 14}" for row, name in enumerate(clean)))
    write(folder / "noisy_label_kv.txt", (f"{name} {row % 14}" for row, name in enumerate(noisy)))
    return Clothing1M(path=root)


def refused(data, split="train"):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 — each test looks at the message
        data.open(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("annotations", [".", "annotations"])
def test_labels_are_those_of_the_file_that_a_split_is_of(tmp_path, annotations):
    data = make(tmp_path, annotations)
    inputs, labels = data.open("train")
    assert inputs.root == tmp_path
    assert list(inputs.names) == names("noisy_train")
    assert labels.given.tolist() == [(6 + row) % 14 for row in reversed(range(20))]
    assert labels.clean is None
    assert labels.classes == tuple(CLASSES)
    inputs, labels = data.open("validation")
    assert list(inputs.names) == names("clean_val")
    assert labels.given.tolist() == [
        5,
        6,
        7,
        8,
        9,
        10,
    ]  # the verified ones, though there are noisy ones too
    assert labels.clean is not None
    assert labels.clean.equal(labels.given)
    inputs, labels = data.open("test")
    assert list(inputs.names) == names("clean_test")
    assert labels.given.tolist() == [0, 1, 2, 3, 4]
    assert labels.clean is not None
    assert labels.clean.equal(labels.given)
    with pytest.raises(NoSplit, match="split"):
        data.open("clean_train")


@pytest.mark.usefixtures("small")
def test_the_folder_images_may_be_left_out_and_images_are_decoded(tmp_path):
    data = make(tmp_path)
    for path in (tmp_path / "images").iterdir():
        path.rename(tmp_path / path.name)
    for path in tmp_path.rglob("*.jpg"):
        Image.new("RGB", (8, 8)).save(path)
    inputs, _ = data.open("test")
    assert list(inputs.names) == [name.removeprefix("images/") for name in names("clean_test")]
    assert {decode(inputs.root / name).size for name in inputs.names} == {(8, 8)}


def test_the_published_counts_are_demanded_unless_a_part_is_wanted(tmp_path):
    data = make(tmp_path)
    assert "noisy_train_key_list.txt must list 1000000 images, got 20" in refused(data)
    assert "clean_val_key_list.txt must list 14313 images, got 6" in refused(data, "validation")
    assert "clean_test_key_list.txt must list 10526 images, got 5" in refused(data, "test")
    (tmp_path / names("clean_test")[1]).unlink()
    inputs, labels = Clothing1M(path=tmp_path, partial=True).open("test")
    assert list(inputs.names) == names("clean_test")[:1] + names("clean_test")[2:]
    assert labels.given.tolist() == [0, 2, 3, 4]
    assert labels.clean is not None
    assert labels.clean.tolist() == [0, 2, 3, 4]


@pytest.mark.usefixtures("small")
def test_an_image_without_a_label_is_named(tmp_path):
    data = make(tmp_path)
    lines = [f"{name} 13" for name in names("clean_test")[:3]]
    write(tmp_path / "clean_label_kv.txt", lines)
    message = refused(data, "test")
    assert (
        f"clean_test_key_list.txt, line 4: {names('clean_test')[3]!r} has no label in " in message
    )
    write(tmp_path / "clean_label_kv.txt", [*lines, f"{names('clean_test')[3]} 14"])
    assert "clean_label_kv.txt, line 4 " in refused(data, "test")
    assert "from 0 to 13" in refused(data, "test")


@pytest.mark.usefixtures("small")
def test_a_path_out_of_the_folder_is_refused(tmp_path):
    data = make(tmp_path)
    write(tmp_path / "clean_test_key_list.txt", ["../secret.jpg"])
    assert "clean_test_key_list.txt" in refused(data, "test")


@pytest.mark.usefixtures("small")
def test_a_wrong_folder_is_refused_in_a_sentence(tmp_path):
    assert (
        "has no category_names_eng.txt and no annotations/category_names_eng.txt; https://"
        in refused(Clothing1M(path=tmp_path))
    )
    data = make(tmp_path)
    (tmp_path / "noisy_label_kv.txt").unlink()
    assert "noisy_label_kv.txt does not exist; https://github.com/Cysu/noisy_label" in refused(data)
    write(tmp_path / "category_names_eng.txt", CLASSES[:13])
    assert "category_names_eng.txt has 13 classes, but the original has 14" in refused(data)


@pytest.mark.usefixtures("small")
def test_a_check_tells_of_each_split(tmp_path):
    make(tmp_path)
    findings = inspect.check("clothing1m", tmp_path)
    assert [each[:4] for each in findings] == [
        ("train", "ok", 20, 20),
        ("validation", "ok", 6, 6),
        ("test", "ok", 5, 5),
    ]
    for name in names("clean_val"):
        (tmp_path / name).unlink()
    (tmp_path / names("noisy_train")[1]).unlink()  # not among the first that are looked for
    write(tmp_path / "clean_test_key_list.txt", names("clean_test")[:-1])
    train, validation, test = inspect.check("clothing1m", tmp_path)
    assert train[:4] == ("train", "missing", 19, 20)
    assert (
        f"1 of 20 images is not in {tmp_path}, such as {names('noisy_train')[1]}; " in train.message
    )
    assert validation[:4] == ("validation", "missing", 0, 6)
    assert (
        f"6 of 6 images are not in {tmp_path}, such as {', '.join(names('clean_val')[:3])}; "
        in validation.message
    )
    assert test[:2] == ("test", "wrong")
    assert "must list 5 images, got 4" in test.message
