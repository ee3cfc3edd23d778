"""Clothing1M from small trees with the layout of the original."""

import pytest

from nearsay.data import Clothing1M, clothing1m, inspect
from nearsay.errors import NoSplit

COUNTS = {"noisy_train": 20, "clean_train": 4, "clean_val": 6, "clean_test": 5}


@pytest.fixture
def small(monkeypatch):
    """The published counts, of a data set as small as that of the tests."""
    parts = {split: (part, COUNTS[part]) for split, (part, _) in clothing1m._PARTS.items()}
    monkeypatch.setattr(clothing1m, "_PARTS", parts)


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))


NAMES = "T-Shirt Shirt Knitwear Chiffon Sweater Hoodie Windbreaker Jacket Downcoat Suit Shawl"
CLASSES = [*NAMES.split(), "Dress", "Vest", "Underwear"]


def names(part):
    start, rows = 100 * list(COUNTS).index(part), range(COUNTS[part])
    return [f"images/{row % 10}/{row % 7:02d}/{start + row},{row}.jpg" for row in rows]


def make(root, annotations="."):
    folder = root / annotations
    folder.mkdir(exist_ok=True)
    write(folder / "category_names_eng.txt", CLASSES)
    for part in COUNTS:
        write(folder / f"{part}_key_list.txt", names(part))
        for name in names(part):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    clean = [*names("clean_test"), *names("clean_val"), *names("clean_train")]
    # Some have both, in another order than the keys.
    noisy = [*names("clean_val"), *reversed(names("noisy_train"))]
    for kind, keys in (("clean", clean), ("noisy", noisy)):
        write(folder / f"{kind}_label_kv.txt", (f"{key} {n % 14}" for n, key in enumerate(keys)))
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
    # The verified ones, though there are noisy ones too.
    for split, part, numbers in (
        ("validation", "clean_val", [5, 6, 7, 8, 9, 10]),
        ("test", "clean_test", [0, 1, 2, 3, 4]),
    ):
        inputs, labels = data.open(split)
        assert list(inputs.names) == names(part)
        assert labels.given.tolist() == labels.clean.tolist() == numbers
    with pytest.raises(NoSplit, match="split"):
        data.open("clean_train")


@pytest.mark.usefixtures("small")
def test_the_folder_images_may_be_left_out(tmp_path):
    data = make(tmp_path)
    for path in (tmp_path / "images").iterdir():
        path.rename(tmp_path / path.name)
    inputs, _ = data.open("test")
    assert list(inputs.names) == [name.removeprefix("images/") for name in names("clean_test")]


def test_the_published_counts_are_demanded_unless_a_part_is_wanted(tmp_path):
    data = make(tmp_path)
    for split, num in (("train", 1_000_000), ("validation", 14_313), ("test", 10_526)):
        assert str(num) in refused(data, split)
    keys = names("clean_test")
    (tmp_path / keys.pop(1)).unlink()
    inputs, labels = Clothing1M(path=tmp_path, partial=True).open("test")
    assert list(inputs.names) == keys
    assert labels.given.tolist() == labels.clean.tolist() == [0, 2, 3, 4]


@pytest.mark.usefixtures("small")
def test_an_image_without_a_label_is_named(tmp_path):
    data, keys = make(tmp_path), names("clean_test")
    lines = [f"{name} 13" for name in keys[:3]]
    write(tmp_path / "clean_label_kv.txt", lines)
    message = refused(data, "test")
    assert "clean_test_key_list.txt, line 4" in message
    assert keys[3] in message
    write(tmp_path / "clean_label_kv.txt", [*lines, f"{keys[3]} 14"])
    assert "clean_label_kv.txt, line 4 " in refused(data, "test")
    write(tmp_path / "clean_label_kv.txt", lines)
    write(tmp_path / "clean_test_key_list.txt", ["../secret.jpg"])
    assert "clean_test_key_list.txt" in refused(data, "test")


@pytest.mark.usefixtures("small")
def test_a_wrong_folder_is_refused_in_a_sentence(tmp_path):
    assert "annotations/category_names_eng.txt" in refused(Clothing1M(path=tmp_path))
    data = make(tmp_path)
    (tmp_path / "noisy_label_kv.txt").unlink()
    assert "noisy_label_kv.txt" in refused(data)
    write(tmp_path / "category_names_eng.txt", CLASSES[:13])
    assert "category_names_eng.txt" in refused(data)


@pytest.mark.usefixtures("small")
def test_a_check_tells_of_each_split(tmp_path):
    make(tmp_path)
    expected = [(name, "ok", n, n) for name, n in (("train", 20), ("validation", 6), ("test", 5))]
    assert [each[:4] for each in inspect.check("clothing1m", tmp_path)] == expected
    for name in names("clean_val"):
        (tmp_path / name).unlink()
    (tmp_path / names("noisy_train")[1]).unlink()  # not among the first that are looked for
    write(tmp_path / "clean_test_key_list.txt", names("clean_test")[:-1])
    train, validation, test = inspect.check("clothing1m", tmp_path)
    assert train[:4] == ("train", "missing", 19, 20)
    assert names("noisy_train")[1] in train.message
    assert validation[:4] == ("validation", "missing", 0, 6)
    assert f"such as {', '.join(names('clean_val')[:3])}; " in validation.message
    assert test[:2] == ("test", "wrong")
    assert "got 4" in test.message
