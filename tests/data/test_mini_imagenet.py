"""Red and Blue Mini-ImageNet from small trees with the layout of the published lists."""

import pytest
from PIL import Image

from nearsay.data import MiniImageNet, inspect, mini_imagenet
from nearsay.data.images import decode
from nearsay.errors import NoSplit

SYNSETS = [
    f"n{20_000_000 + 31 * (number * 37 % 100):08d}" for number in range(100)
]  # not in the order of the classes
PLACES = {
    "all_images": {
        "original": "all_images/{name}",
        "web": "all_images/{name}",
        "test": "validation/{label}/{name}",
    },
    "tfds": {
        "original": "all_images/{name}",
        "web": "noisy_images/{name}",
        "test": "all_validation/{name}",
    },
    "training": {
        "original": "training/{file}/{label}/{name}",
        "web": "training/{file}/{label}/{name}",
        "test": "validation/{name}",
    },
}


def original(number, row):
    return f"{SYNSETS[number]}{row:08d}.jpg", number


def web(number, row):
    return f"{row:02d}22767e5677aef4.jpg", number


def lists():
    """Three classes of five images; noise replaces images of the web (red) or moves labels on by
    one (blue).
    """
    pure = [original(number, row) for number in (0, 1, 99) for row in range(5)]
    found = {"clean_validation": [(f"ILSVRC2012_val_{row:08d}.jpg", row % 3) for row in range(6)]}
    for noise, num_wrong in ((0.0, 0), (0.2, 1), (0.4, 2), (0.8, 4)):
        found[f"red_noise_nl_{noise}"] = [
            web(number, row) if row % 5 < num_wrong else (name, number)
            for row, (name, number) in enumerate(pure)
        ]
        found[f"blue_noise_nl_{noise}"] = [
            (name, (number + 1) % 100 if row % 5 < num_wrong else number)
            for row, (name, number) in enumerate(pure)
        ]
    return found


def write_list(folder, name, pairs):
    (folder / "split" / name).write_text("".join(f"{image} {number}\n" for image, number in pairs))


@pytest.fixture
def small(monkeypatch):
    """The published counts, of a data set as small as that of the tests."""
    monkeypatch.setattr(mini_imagenet, "_NUM_RED", dict.fromkeys(mini_imagenet._NUM_RED, 15))
    monkeypatch.setattr(mini_imagenet, "_NUM_BLUE", 15)
    monkeypatch.setattr(mini_imagenet, "_NUM_TEST", 6)


def make(root, layout="all_images", folder="mini-imagenet"):
    (root / folder / "split").mkdir(parents=True)
    (root / folder / "class_name.txt").write_text(
        "".join(f"thing {number}, object\n" for number in range(100)) + "\n"
    )
    for file, pairs in lists().items():
        write_list(root / folder, file, pairs)
        for name, number in pairs:
            kind = (
                "test"
                if file == "clean_validation"
                else "original"
                if name.startswith("n")
                else "web"
            )
            path = root / folder / PLACES[layout][kind].format(name=name, label=number, file=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return root


def refused(data, split="train"):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 — each test looks at the message
        data.open(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def short(names):
    return [name.rpartition("/")[2] for name in names]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("folder", [".", "mini-imagenet", "dataset_no_images/mini-imagenet"])
@pytest.mark.parametrize("layout", PLACES)
def test_red_noise_is_of_the_web_and_outside_the_vocabulary(tmp_path, folder, layout):
    data = MiniImageNet(path=make(tmp_path, layout, folder), noise=0.4)
    inputs, labels = data.open("train")
    assert short(inputs.names) == [name for name, _ in lists()["red_noise_nl_0.4"]]
    assert all((inputs.root / name).is_file() for name in inputs.names)
    assert labels.given.tolist() == [0] * 5 + [1] * 5 + [99] * 5
    assert labels.clean is not None
    assert labels.clean.tolist() == [-1, -1, 0, 0, 0, -1, -1, 1, 1, 1, -1, -1, 99, 99, 99]
    assert labels.classes[1] == "thing 1, object"
    assert len(labels.classes) == 100
    inputs, labels = data.open("test")
    assert short(inputs.names) == [f"ILSVRC2012_val_{row:08d}.jpg" for row in range(6)]
    assert all((inputs.root / name).is_file() for name in inputs.names)
    assert labels.given.tolist() == [0, 1, 2, 0, 1, 2]
    assert labels.clean is not None
    assert labels.clean.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.usefixtures("small")
def test_blue_noise_is_of_images_whose_synset_tells_the_true_class(tmp_path):
    inputs, labels = MiniImageNet(path=make(tmp_path), noise=0.2, color="blue").open("train")
    assert labels.given.tolist() == [1, 0, 0, 0, 0, 2, 1, 1, 1, 1, 0, 99, 99, 99, 99]
    assert labels.clean is not None
    assert labels.clean.tolist() == [0] * 5 + [1] * 5 + [99] * 5
    assert inputs.names[5] == f"mini-imagenet/all_images/{SYNSETS[1]}00000000.jpg"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("color", ["red", "blue"])
def test_without_noise_all_labels_are_true(tmp_path, color):
    _, labels = MiniImageNet(path=make(tmp_path), noise=0, color=color).open("train")
    assert labels.clean is not None
    assert labels.clean.equal(labels.given)


@pytest.mark.usefixtures("small")
def test_the_held_out_set_is_clean_and_never_trained_on(tmp_path):
    root = make(tmp_path)
    pure, noisy = lists()["red_noise_nl_0.0"], lists()["red_noise_nl_0.2"]
    write_list(root / "mini-imagenet", "red_noise_nl_0.4", noisy[:5] + noisy[:5] + noisy[:5])
    write_list(
        root / "mini-imagenet", "red_noise_nl_0.8", [pure[5], *noisy[:5], *noisy[:5], *noisy[:4]]
    )
    data = MiniImageNet(path=root, noise=0.2, held_out_set=True)
    inputs, labels = data.open("validation")
    assert short(inputs.names) == [pure[0][0], pure[10][0]]  # pure[5] is left in the list with 80 %
    assert labels.given.tolist() == [0, 99]
    assert labels.clean is not None
    assert labels.clean.tolist() == [0, 99]
    assert len(data.open("train").inputs) == 15
    for color in ("red", "blue"):
        trained = MiniImageNet(path=root, noise=0.0, color=color, held_out_set=True).open("train")
        assert short(trained.inputs.names) == [
            name for name, _ in pure if name not in (pure[0][0], pure[10][0])
        ]
        assert trained.labels.given.tolist() == [0] * 4 + [1] * 5 + [99] * 4
    assert len(MiniImageNet(path=root, noise=0.0).open("train").inputs) == 15
    write_list(root / "mini-imagenet", "red_noise_nl_0.8", pure)
    assert "held_out_set must be" in refused(data)


@pytest.mark.usefixtures("small")
def test_splits_that_are_not_there_are_named(tmp_path):
    data = MiniImageNet(path=make(tmp_path), noise=0.2)
    with pytest.raises(NoSplit, match="held_out_set=True"):
        data.open("validation")
    with pytest.raises(NoSplit, match="split"):
        data.open("val")


def test_choices_are_checked():
    with pytest.raises(
        ValueError,
        match="noise",
    ):
        MiniImageNet(path="x", noise=0.25)
    with pytest.raises(ValueError, match="noise"):
        MiniImageNet(path="x", noise=False)
    with pytest.raises(ValueError, match="color"):
        MiniImageNet(path="x", noise=0.2, color="green")


def test_the_published_counts_are_demanded_unless_a_part_is_wanted(tmp_path):
    root = make(tmp_path)
    for noise, count in ((0.0, 50_000), (0.2, 50_000), (0.4, 50_010), (0.8, 50_008)):
        message = refused(MiniImageNet(path=root, noise=noise))
        assert (
            f"split/red_noise_nl_{noise} must list {count} images, got 15; the lists are in"
            in message
        )
    assert "must list 60000 images, got 15" in refused(
        MiniImageNet(path=root, noise=0.2, color="blue")
    )
    assert "must list 5000 images, got 6" in refused(MiniImageNet(path=root, noise=0.2), "test")
    part = MiniImageNet(path=root, noise=0.2, partial=True)
    assert len(part.open("train").inputs) == 15
    (tmp_path / "mini-imagenet" / "all_images" / web(0, 0)[0]).unlink()
    inputs, labels = part.open("train")
    assert short(inputs.names) == [name for name, _ in lists()["red_noise_nl_0.2"][1:]]
    assert labels.given.tolist() == [0] * 4 + [1] * 5 + [99] * 5
    assert labels.clean is not None
    assert labels.clean.tolist() == [0] * 4 + [-1] + [1] * 4 + [-1] + [99] * 4


@pytest.mark.usefixtures("small")
def test_images_can_be_decoded_and_missing_ones_are_named(tmp_path):
    root = make(tmp_path)
    for path in root.rglob("*.jpg"):
        Image.new("RGB", (8, 8), "blue").save(path)
    data = MiniImageNet(path=root, noise=0.4)
    inputs, _ = data.open("train")
    assert {decode(inputs.root / name).size for name in inputs.names} == {(8, 8)}
    for row in (0, 5, 10, 11):
        (root / "mini-imagenet" / "all_images" / web(0, row)[0]).unlink()
    message = refused(data)
    assert (
        f"4 of 15 images are not in {root}, such as mini-imagenet/all_images/0022767e5677aef4.jpg, "
        in message
    )
    assert "mini-imagenet/all_images/1022767e5677aef4.jpg; the lists are in https://" in message


@pytest.mark.usefixtures("small")
def test_lists_that_contradict_each_other_are_refused(tmp_path):
    root = make(tmp_path)
    data = MiniImageNet(path=root, noise=0.2)
    pure = lists()["red_noise_nl_0.0"]
    write_list(root / "mini-imagenet", "red_noise_nl_0.0", [*pure[:-1], (pure[-1][0], 3)])
    message = refused(data)
    assert (
        f"split/red_noise_nl_0.0 puts the synset {SYNSETS[99]!r} in the classes 99 and 3" in message
    )
    write_list(root / "mini-imagenet", "red_noise_nl_0.0", pure[:5] * 3)
    assert f"has no image of the synset of '{SYNSETS[1]}00000001.jpg'" in refused(data)


@pytest.mark.usefixtures("small")
def test_a_wrong_folder_is_refused_in_a_sentence(tmp_path):
    data = MiniImageNet(path=tmp_path, noise=0.2)
    expected = f"{tmp_path} must hold one of the folders split, mini-imagenet/split, dataset_no_images/mini-imagenet/split; "
    assert expected in refused(data)
    make(tmp_path)
    (tmp_path / "mini-imagenet" / "split" / "red_noise_nl_0.2").unlink()
    assert "red_noise_nl_0.2 does not exist; the lists are in" in refused(data)
    (tmp_path / "mini-imagenet" / "class_name.txt").write_text("triceratops\n")
    assert "class_name.txt has 1 classes, but the original has 100" in refused(data)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("color", ["red", "blue"])
def test_a_check_tells_of_each_level_of_noise(tmp_path, color):
    root = make(tmp_path)
    levels = [
        "train with 0% noise",
        "train with 20% noise",
        "train with 40% noise",
        "train with 80% noise",
    ]
    findings = inspect.check(f"mini-imagenet-{color}", root)
    assert [each[:4] for each in findings[:4]] == [(level, "ok", 15, 15) for level in levels]
    assert findings[4][:4] == ("test", "ok", 6, 6)
    write_list(root / "mini-imagenet", f"{color}_noise_nl_0.2", [("a.jpg", 100)])
    (root / "mini-imagenet" / "all_images" / original(99, 4)[0]).unlink()
    found = {each.part: each for each in inspect.check(f"mini-imagenet-{color}", root)}
    assert [found[level].status for level in levels] == ["missing", "wrong", "missing", "missing"]
    assert "_noise_nl_" in found[levels[1]].message
    assert "1 of " in found[levels[2]].message
    assert found["test"].status == "ok"
