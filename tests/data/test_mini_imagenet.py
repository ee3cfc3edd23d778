"""Red and Blue Mini-ImageNet from small trees with the layout of the published lists."""

import pytest

from nearsay.data import MiniImageNet, inspect, mini_imagenet
from nearsay.errors import NoSplit

# Not in the order of the classes.
SYNSETS = [f"n{20_000_000 + 31 * (number * 37 % 100):08d}" for number in range(100)]
PLACES = {  # of original images, of those of the web and of those for testing
    "all_images": ("all_images/{name}", "all_images/{name}", "validation/{label}/{name}"),
    "tfds": ("all_images/{name}", "noisy_images/{name}", "all_validation/{name}"),
    "training": (*["training/{file}/{label}/{name}"] * 2, "validation/{name}"),
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
        red, blue = list(pure), list(pure)
        for place, (name, number) in enumerate(pure):
            if place % 5 < num_wrong:
                red[place] = web(number, place)
                blue[place] = (name, (number + 1) % 100)
        found[f"red_noise_nl_{noise}"], found[f"blue_noise_nl_{noise}"] = red, blue
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
    names = "".join(f"thing {number}, object\n" for number in range(100))
    (root / folder / "class_name.txt").write_text(names + "\n")
    for file, pairs in lists().items():
        write_list(root / folder, file, pairs)
        for name, number in pairs:
            kind = 2 if file == "clean_validation" else int(not name.startswith("n"))
            place = PLACES[layout][kind].format(name=name, label=number, file=file)
            (root / folder / place).parent.mkdir(parents=True, exist_ok=True)
            (root / folder / place).touch()
    return root


def refused(data, split="train"):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 — each test looks at the message
        data.open(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def short(names):
    return [name.rpartition("/")[2] for name in names]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("folder", "layout"),
    [*zip([".", "mini-imagenet", "dataset_no_images/mini-imagenet"], PLACES, strict=True)],
)
def test_red_noise_is_of_the_web_and_outside_the_vocabulary(tmp_path, folder, layout):
    data = MiniImageNet(path=make(tmp_path, layout, folder), noise=0.4)
    inputs, labels = data.open("train")
    assert short(inputs.names) == [name for name, _ in lists()["red_noise_nl_0.4"]]
    assert all((inputs.root / name).is_file() for name in inputs.names)
    assert labels.given.tolist() == [0] * 5 + [1] * 5 + [99] * 5
    assert labels.clean.tolist() == [-1, -1, 0, 0, 0, -1, -1, 1, 1, 1, -1, -1, 99, 99, 99]
    assert labels.classes[1] == "thing 1, object"
    assert len(labels.classes) == 100
    inputs, labels = data.open("test")
    assert short(inputs.names) == [f"ILSVRC2012_val_{row:08d}.jpg" for row in range(6)]
    assert all((inputs.root / name).is_file() for name in inputs.names)
    assert labels.given.tolist() == labels.clean.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(NoSplit, match="held_out_set=True"):
        data.open("validation")
    with pytest.raises(NoSplit, match="split"):
        data.open("val")


@pytest.mark.usefixtures("small")
def test_blue_noise_is_of_images_whose_synset_tells_the_true_class(tmp_path):
    inputs, labels = MiniImageNet(path=make(tmp_path), noise=0.2, color="blue").open("train")
    assert labels.given.tolist() == [1, 0, 0, 0, 0, 2, 1, 1, 1, 1, 0, 99, 99, 99, 99]
    assert labels.clean.tolist() == [0] * 5 + [1] * 5 + [99] * 5
    assert inputs.names[5] == f"mini-imagenet/all_images/{SYNSETS[1]}00000000.jpg"
    for color in ("red", "blue"):
        _, labels = MiniImageNet(path=tmp_path, noise=0, color=color).open("train")
        assert labels.clean.equal(labels.given)


@pytest.mark.usefixtures("small")
def test_the_held_out_set_is_clean_and_never_trained_on(tmp_path):
    folder = make(tmp_path) / "mini-imagenet"
    pure, noisy = lists()["red_noise_nl_0.0"], lists()["red_noise_nl_0.2"]
    write_list(folder, "red_noise_nl_0.4", noisy[:5] * 3)
    write_list(folder, "red_noise_nl_0.8", [pure[5], *noisy[:5], *noisy[:5], *noisy[:4]])
    data, held = MiniImageNet(path=tmp_path, noise=0.2, held_out_set=True), (pure[0], pure[10])
    inputs, labels = data.open("validation")
    assert short(inputs.names) == [name for name, _ in held]  # the list with 80 % has pure[5]
    assert labels.given.tolist() == labels.clean.tolist() == [0, 99]
    assert len(data.open("train").inputs) == 15
    for color in ("red", "blue"):
        trained = MiniImageNet(path=tmp_path, noise=0.0, color=color, held_out_set=True)
        inputs, labels = trained.open("train")
        assert short(inputs.names) == [pair[0] for pair in pure if pair not in held]
        assert labels.given.tolist() == [0] * 4 + [1] * 5 + [99] * 4
    assert len(MiniImageNet(path=tmp_path, noise=0.0).open("train").inputs) == 15
    write_list(folder, "red_noise_nl_0.8", pure)
    assert "held_out_set" in refused(data)


def test_choices_are_checked():
    for field, value in (("noise", 0.25), ("noise", False), ("color", "green")):
        with pytest.raises(ValueError, match=field):
            MiniImageNet(**{"path": "x", "noise": 0.2, field: value})


def test_the_published_counts_are_demanded_unless_a_part_is_wanted(tmp_path):
    root = make(tmp_path)
    for noise, count in ((0.0, 50_000), (0.2, 50_000), (0.4, 50_010), (0.8, 50_008)):
        message = refused(MiniImageNet(path=root, noise=noise))
        assert f"red_noise_nl_{noise}" in message
        assert f"{count} images, got 15" in message
    assert "60000" in refused(MiniImageNet(path=root, noise=0.2, color="blue"))
    assert "5000" in refused(MiniImageNet(path=root, noise=0.2), "test")
    part = MiniImageNet(path=root, noise=0.2, partial=True)
    assert len(part.open("train").inputs) == 15
    (tmp_path / "mini-imagenet" / "all_images" / web(0, 0)[0]).unlink()
    inputs, labels = part.open("train")
    assert short(inputs.names) == [name for name, _ in lists()["red_noise_nl_0.2"][1:]]
    assert labels.given.tolist() == [0] * 4 + [1] * 5 + [99] * 5
    assert labels.clean.tolist() == [0] * 4 + [-1] + [1] * 4 + [-1] + [99] * 4


@pytest.mark.usefixtures("small")
def test_missing_images_are_named(tmp_path):
    data = MiniImageNet(path=make(tmp_path), noise=0.4)
    for row in (0, 5, 10, 11):
        (tmp_path / "mini-imagenet" / "all_images" / web(0, row)[0]).unlink()
    message = refused(data)
    assert "4 of 15" in message
    assert web(0, 0)[0] in message


@pytest.mark.usefixtures("small")
def test_lists_that_contradict_each_other_are_refused(tmp_path):
    data = MiniImageNet(path=make(tmp_path), noise=0.2)
    pure, folder = lists()["red_noise_nl_0.0"], tmp_path / "mini-imagenet"
    write_list(folder, "red_noise_nl_0.0", [*pure[:-1], (pure[-1][0], 3)])
    assert f"{SYNSETS[99]!r} in the classes 99 and 3" in refused(data)
    write_list(folder, "red_noise_nl_0.0", pure[:5] * 3)
    assert f"'{SYNSETS[1]}00000001.jpg'" in refused(data)


@pytest.mark.usefixtures("small")
def test_a_wrong_folder_is_refused_in_a_sentence(tmp_path):
    data, folder = MiniImageNet(path=tmp_path, noise=0.2), tmp_path / "mini-imagenet"
    assert "dataset_no_images/mini-imagenet/split" in refused(data)
    make(tmp_path)
    (folder / "split" / "red_noise_nl_0.2").unlink()
    assert "red_noise_nl_0.2" in refused(data)
    (folder / "class_name.txt").write_text("triceratops\n")
    assert "class_name.txt" in refused(data)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("color", ["red", "blue"])
def test_a_check_tells_of_each_level_of_noise(tmp_path, color):
    folder = make(tmp_path) / "mini-imagenet"
    findings = inspect.check(f"mini-imagenet-{color}", tmp_path)
    levels = [f"train with {percent}% noise" for percent in (0, 20, 40, 80)]
    assert [each[:4] for each in findings[:4]] == [(level, "ok", 15, 15) for level in levels]
    assert findings[4][:4] == ("test", "ok", 6, 6)
    write_list(folder, f"{color}_noise_nl_0.2", [("a.jpg", 100)])
    (folder / "all_images" / original(99, 4)[0]).unlink()
    found = {each.part: each for each in inspect.check(f"mini-imagenet-{color}", tmp_path)}
    assert [found[level].status for level in levels] == ["missing", "wrong", "missing", "missing"]
    assert "1 of " in found[levels[2]].message
    assert found["test"].status == "ok"
