import os
import time

import pytest
import torch

from nearsay.batch import Files
from nearsay.data.folder import Folder


def make(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(b"")
    return Folder(path=root)


def listing(folder, split="train"):
    inputs, labels = folder.open(split)
    assert isinstance(inputs, Files)
    assert labels.clean is None
    return dict(zip(inputs.names, labels.given.tolist(), strict=True)), labels.classes


def refused(folder, split="train"):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 — each test looks at the message
        folder.open(split)
    return str(caught.value)


def test_folders_are_classes(tmp_path):
    folder = make(tmp_path, "dog/b.jpg", "cat/z.PNG", "cat/a.webp", "dog/deep/er/c.tiff")
    inputs, labels = folder.open("train")
    assert inputs.root == tmp_path
    assert inputs.names == ("cat/a.webp", "cat/z.PNG", "dog/b.jpg", "dog/deep/er/c.tiff")
    assert labels.classes == ("cat", "dog")
    assert labels.given.dtype == torch.int64
    assert labels.given.tolist() == [0, 0, 1, 1]
    assert "split must be" in refused(folder, "test")
    assert "split must be" in refused(folder, "nonsense")


def test_two_classes_that_look_the_same_are_refused(tmp_path):
    message = refused(make(tmp_path, "caf\u00e9/a.jpg", "cafe\u0301/b.jpg", "tea/c.jpg"))
    assert (
        message
        == r"classes 'cafe\u0301' and 'caf\xe9' look the same. Move their images into one folder."
    )


@pytest.mark.parametrize("validation", ["val", "validation", "VAL"])
def test_folders_of_splits_hold_folders_of_classes(tmp_path, validation):
    folder = make(
        tmp_path, "train/cat/a.jpg", "train/dog/b.jpg", f"{validation}/dog/c.jpg", "test/cat/d.jpg"
    )
    assert listing(folder) == ({"train/cat/a.jpg": 0, "train/dog/b.jpg": 1}, ("cat", "dog"))
    assert listing(folder, "validation") == ({f"{validation}/dog/c.jpg": 1}, ("cat", "dog"))
    assert listing(folder, "test") == ({"test/cat/d.jpg": 0}, ("cat", "dog"))
    assert "'val'" in refused(folder, "val")


def test_a_test_split_alone_has_its_own_classes(tmp_path):
    folder = make(tmp_path, "test/cat/a.jpg", "test/dog/b.jpg")
    assert listing(folder, "test")[1] == ("cat", "dog")
    assert "'train'" in refused(folder)


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_class_that_cannot_be_learned_is_named(tmp_path, split):
    folder = make(tmp_path, "train/cat/a.jpg", f"{split}/cat/b.jpg", f"{split}/zebra/c.jpg")
    assert f"class 'zebra' of '{split}'" in refused(folder)


def test_order_is_by_class_and_then_by_bytes(tmp_path):
    names = [
        "a-b/1.jpg",
        "a/B.jpg",
        "a/a.jpg",
        "a/c/1.jpg",
        "a/c-d/1.jpg",
        "a/c.jpg",
        "a/é.jpg",
        "b/10.jpg",
        "b/9.jpg",
    ]
    inputs, labels = make(tmp_path, *reversed(names)).open("train")
    assert labels.classes == ("a", "a-b", "b")
    assert inputs.names == (
        "a/B.jpg",
        "a/a.jpg",
        "a/c-d/1.jpg",
        "a/c.jpg",
        "a/c/1.jpg",
        "a/é.jpg",
        "a-b/1.jpg",
        "b/10.jpg",
        "b/9.jpg",
    )


def test_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    folder = make(tmp_path, *(f"{name}/{number}.jpg" for name in "abc" for number in range(20)))
    before, scandir = folder.open("train"), os.scandir

    class Reversed:
        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Reversed)
    after = folder.open("train")
    assert before.inputs == after.inputs
    assert before.labels.given.equal(after.labels.given)


def test_what_is_hidden_or_no_image_is_skipped_and_counted(tmp_path):
    make(
        tmp_path,
        "cat/a.jpg",
        "cat/notes.txt",
        "cat/.a.jpg",
        "cat/.hidden/b.jpg",
        "cat/deep/Thumbs.db",
    )
    folder = make(tmp_path, ".git/x.jpg", "README.md", "loose.jpg", "dog/b.jpg")
    found = folder.scan("train")
    assert found.names == ("cat/a.jpg", "dog/b.jpg")
    assert found.classes == ("cat", "dog")
    assert found.num_skipped == 7


def test_photographs_that_cannot_be_decoded_are_listed(tmp_path):
    folder = make(tmp_path, "cat/a.jpg", "cat/IMG_1.HEIC", "dog/b.jfif", "dog/c.avif")
    assert folder.open("train").inputs.names == (
        "cat/IMG_1.HEIC",
        "cat/a.jpg",
        "dog/b.jfif",
        "dog/c.avif",
    )


def test_a_class_may_be_called_like_a_split(tmp_path):
    folder = make(tmp_path, "tank/a.jpg", "train/b.jpg", "test/c.jpg")
    assert listing(folder) == (
        {"tank/a.jpg": 0, "test/c.jpg": 1, "train/b.jpg": 2},
        ("tank", "test", "train"),
    )


def test_a_folder_beside_the_splits_is_refused(tmp_path):
    assert "'valid'" in refused(make(tmp_path, "train/cat/a.jpg", "valid/cat/b.jpg"))


def test_two_folders_for_one_split_are_refused(tmp_path):
    folder = make(tmp_path, "train/cat/a.jpg", "val/cat/b.jpg", "validation/cat/c.jpg")
    assert "validation" in refused(folder)


def test_a_folder_for_runs_among_the_classes_is_refused(tmp_path):
    told = refused(make(tmp_path, "cat/a.jpg", "runs/first/.lock"))
    assert (
        told
        == f"'{tmp_path}/runs' is for runs, but here every folder is a class. Use another --out."
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["cat/a.jpg", "dog/"], "dog' is a class without images"),
        (["cat/a.jpg", "dog/notes.txt"], "dog' is a class without images"),
        (["train/cat/a.jpg", "train/dog/"], "train/dog' is a class without images"),
        (["a.jpg", "b.jpg"], "must hold a folder of images per class"),
        ([], "must hold a folder of images per class"),
        (["train/a.jpg", "test/b.jpg"], "train' must hold a folder of images per class"),
    ],
)
def test_without_images_the_expected_layout_is_shown(tmp_path, names, expected):
    lines = refused(make(tmp_path, *names)).splitlines()
    assert expected in lines[0]
    skipped = sum(
        name.endswith((".txt", "/a.jpg", "b.jpg")) and "cat" not in name for name in names
    )
    assert lines[1].startswith("found: ")
    assert skipped == 0 or "found: 0 " not in lines[1]
    assert lines[2:] == [
        f"  {tmp_path}/CLASS/image.jpg",
        f"  {tmp_path}/train/CLASS/image.jpg, with val and test next to train",
        "or, with a table of paths and labels: nearsay train manifest path=TABLE.csv",
    ]


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    assert "path must be a folder" in refused(Folder(path=tmp_path / "none"))
    (tmp_path / "file").write_text("")
    told = "nearsay train manifest"
    assert told in refused(Folder(path=str(tmp_path / "file")))


def test_one_class_whose_images_lie_in_one_folder_of_it_is_a_class(tmp_path):
    make(tmp_path, "cat/2024/a.jpg", "cat/2024/b.jpg")
    assert Folder(path=tmp_path).open("train").labels.classes == ("cat",)


def test_the_folder_above_the_one_that_holds_the_classes_is_refused_with_the_right_one(tmp_path):
    make(tmp_path, "photos/cat/a.jpg", "photos/dog/b.jpg")
    told = refused(Folder(path=tmp_path))
    assert "would be the only class" in told
    assert told.endswith(f"use path={tmp_path / 'photos'}")
    assert listing(Folder(path=tmp_path / "photos"))[1] == ("cat", "dog")
    make(tmp_path, "photos/c.jpg")  # so a class with folders of its own
    assert listing(Folder(path=tmp_path))[1] == ("photos",)


def test_links_out_of_the_root_are_refused(tmp_path):
    make(tmp_path, "elsewhere/x.jpg", "elsewhere/deep/y.jpg", "root/cat/a.jpg", "root2/x.jpg")
    folder = Folder(path=tmp_path / "root")
    for link, target in (
        ("cat/b.jpg", "elsewhere/x.jpg"),
        ("dog", "elsewhere"),
        ("cat/deep", "elsewhere/deep"),
        ("cat/c.jpg", "root2/x.jpg"),
    ):
        (tmp_path / "root" / link).symlink_to(tmp_path / target)
        assert "is a link to" in refused(folder)
        assert f"outside of {str(tmp_path / 'root')!r}. Copy it there." in refused(folder)
        (tmp_path / "root" / link).unlink()
    (tmp_path / "root/cat/notes").symlink_to(tmp_path / "elsewhere/x.jpg")
    assert listing(folder)[0] == {"cat/a.jpg": 0}
    (tmp_path / "root/cat/d.jpg").symlink_to(
        tmp_path / "none.jpg"
    )  # an image that cannot be read, like others
    assert listing(folder)[0] == {"cat/a.jpg": 0, "cat/d.jpg": 0}


def test_the_root_itself_may_be_a_link(tmp_path):
    make(tmp_path, "root/cat/a.jpg", "root/.store/b.jpg")
    (tmp_path / "link").symlink_to("root")
    (tmp_path / "root/cat/b.jpg").symlink_to("../.store/b.jpg")
    assert listing(Folder(path=tmp_path / "link"))[0] == {"cat/a.jpg": 0, "cat/b.jpg": 0}


def test_links_inside_the_root_do_not_count_twice(tmp_path):
    folder = make(tmp_path, "train/cat/a.jpg", "test/cat/b.jpg", ".store/c.jpg")
    (tmp_path / "test/cat/c.jpg").symlink_to("../../.store/c.jpg")
    assert [*listing(folder, "test")[0]] == ["test/cat/b.jpg", "test/cat/c.jpg"]
    (tmp_path / "test/cat/d.jpg").symlink_to("../../train/cat/a.jpg")
    assert "which would count twice" in refused(folder, "test")
    (tmp_path / "test/cat/d.jpg").unlink()
    (tmp_path / "test/cat/up").symlink_to("..")
    assert "is a link to a folder" in refused(folder, "test")


def test_what_cannot_be_decoded_is_listed_for_the_decoder_to_name(tmp_path):
    folder = make(tmp_path, "cat/a.jpg")
    os.mkfifo(tmp_path / "cat/pipe.jpg")
    (tmp_path / "cat/loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "cat/gone.jpg").symlink_to("nothing.jpg")
    (tmp_path / "cat/loop").symlink_to("loop")
    (tmp_path / "loop").symlink_to("loop")
    assert [*listing(folder)[0]] == ["cat/a.jpg", "cat/gone.jpg", "cat/loop.jpg", "cat/pipe.jpg"]


def test_names_that_are_no_text_are_refused(tmp_path):
    make(tmp_path, "cat/a.jpg")
    with open(os.fsencode(tmp_path / "cat") + b"/\xff.jpg", "wb"):
        pass
    assert "\\udcff.jpg' must have a UTF-8 name" in refused(Folder(path=tmp_path))


def test_a_share_of_each_class_is_held_out(tmp_path):
    counts = {"a": 40, "b": 7, "c": 2, "d": 1}
    make(
        tmp_path,
        *(f"{name}/{number:02}.jpg" for name, count in counts.items() for number in range(count)),
    )
    folder = Folder(path=tmp_path, validation=0.2)
    train, classes = listing(folder)
    held, held_classes = listing(folder, "validation")
    assert classes == held_classes == ("a", "b", "c", "d")
    assert not train.keys() & held.keys()
    assert {**train, **held} == listing(Folder(path=tmp_path))[0]
    assert [*train] == sorted(train)
    assert [*held.values()] == [0] * 8 + [1] * 1 + [2] * 1
    assert listing(Folder(path=tmp_path, validation=0.2))[0] == train
    assert listing(Folder(path=tmp_path, validation=0.2, seed=1))[0] != train
    assert [*held][:8] != [f"a/{number:02}.jpg" for number in range(8)]
    assert "'train' or 'validation'" in refused(folder, "test")


def test_nothing_is_held_out_where_there_is_a_folder_for_it(tmp_path):
    make(tmp_path, "train/a/1.jpg", "train/a/2.jpg", "val/a/3.jpg", "test/a/4.jpg")
    folder = Folder(path=tmp_path, validation=0.5)
    assert [*listing(folder)[0]] == ["train/a/1.jpg", "train/a/2.jpg"]
    assert [*listing(folder, "validation")[0]] == ["val/a/3.jpg"]


def test_the_test_split_is_never_held_out(tmp_path):
    make(tmp_path, "train/a/1.jpg", "train/a/2.jpg", "test/a/3.jpg", "test/a/4.jpg")
    folder = Folder(path=tmp_path, validation=0.5)
    assert [*listing(folder, "test")[0]] == ["test/a/3.jpg", "test/a/4.jpg"]
    assert len(listing(folder)[0]) == len(listing(folder, "validation")[0]) == 1


@pytest.mark.parametrize("validation", [0, 1, -0.1, 2, float("nan")])
def test_the_share_is_a_share(tmp_path, validation):
    with pytest.raises(ValueError, match="between"):
        Folder(path=tmp_path, validation=validation)


def test_a_share_of_nothing_is_refused(tmp_path):
    make(tmp_path, "a/1.jpg", "b/2.jpg")
    assert "class" in refused(Folder(path=tmp_path, validation=0.5), "validation")


@pytest.mark.slow
def test_a_hundred_thousand_files_take_seconds(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:02}").mkdir()
        for file in range(1000):
            os.close(
                os.open(tmp_path / f"{number:02}" / f"{file:03}.jpg", os.O_CREAT | os.O_WRONLY)
            )
    start = time.process_time()
    assert len(Folder(path=tmp_path).open("train").inputs) == 100_000
    assert time.process_time() - start < 5
