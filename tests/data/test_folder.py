import os

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
    folder = make(tmp_path, "dog/b.jpg", "cat/z.PNG", "cat/a.webp", "dog/deep/c.tiff", "cat/H.HEIC")
    inputs, labels = folder.open("train")
    assert inputs.root == tmp_path
    assert inputs.names == ("cat/H.HEIC", "cat/a.webp", "cat/z.PNG", "dog/b.jpg", "dog/deep/c.tiff")
    assert labels.classes == ("cat", "dog")
    assert labels.given.dtype == torch.int64
    assert labels.given.tolist() == [0, 0, 0, 1, 1]
    assert "split" in refused(folder, "test")


def test_two_classes_that_look_the_same_are_refused(tmp_path):
    message = refused(make(tmp_path, "caf\u00e9/a.jpg", "cafe\u0301/b.jpg", "tea/c.jpg"))
    assert r"'cafe\u0301' and 'caf\xe9'" in message


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
    expected = ["a/B.jpg", "a/a.jpg", "a/c-d/1.jpg", "a/c.jpg", "a/c/1.jpg", "a/é.jpg"]
    expected += ["a-b/1.jpg", "b/10.jpg", "b/9.jpg"]
    inputs, labels = make(tmp_path, *sorted(expected, reverse=True)).open("train")
    assert labels.classes == ("a", "a-b", "b")
    assert inputs.names == tuple(expected)


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
    make(tmp_path, "cat/a.jpg", "cat/notes.txt", "cat/.a.jpg", "cat/.hidden/b.jpg", "cat/deep/T.db")
    folder = make(tmp_path, ".git/x.jpg", "README.md", "loose.jpg", "dog/b.jpg")
    found = folder.scan("train")
    assert found.names == ("cat/a.jpg", "dog/b.jpg")
    assert found.classes == ("cat", "dog")
    assert found.num_skipped == 7


def test_a_class_may_be_called_like_a_split(tmp_path):
    found, classes = listing(make(tmp_path, "tank/a.jpg", "train/b.jpg", "test/c.jpg"))
    assert found == {"tank/a.jpg": 0, "test/c.jpg": 1, "train/b.jpg": 2}
    assert classes == ("tank", "test", "train")


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["train/cat/a.jpg", "valid/cat/b.jpg"], "'valid'"),
        (["train/cat/a.jpg", "val/cat/b.jpg", "validation/cat/c.jpg"], "validation"),
        (["cat/a.jpg", "runs/first/.lock"], "/runs'"),
        (["cat/a.jpg", "dog/"], "dog'"),
        (["cat/a.jpg", "dog/notes.txt"], "dog'"),
        (["train/cat/a.jpg", "train/dog/"], "train/dog'"),
        (["a.jpg", "b.jpg"], "CLASS/image.jpg"),
        ([], "CLASS/image.jpg"),
        (["train/a.jpg", "test/b.jpg"], "train'"),
    ],
)
def test_another_layout_is_refused(tmp_path, names, word):
    assert word in refused(make(tmp_path, *names))


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    assert "path" in refused(Folder(path=tmp_path / "none"))
    (tmp_path / "file").write_text("")
    assert "manifest" in refused(Folder(path=str(tmp_path / "file")))


def test_the_folder_above_the_one_that_holds_the_classes_is_refused_with_the_right_one(tmp_path):
    make(tmp_path, "photos/cat/a.jpg")
    assert listing(Folder(path=tmp_path))[1] == ("photos",)
    make(tmp_path, "photos/dog/b.jpg")
    assert f"path={tmp_path / 'photos'}" in refused(Folder(path=tmp_path))
    assert listing(Folder(path=tmp_path / "photos"))[1] == ("cat", "dog")
    make(tmp_path, "photos/c.jpg")  # so a class with folders of its own
    assert listing(Folder(path=tmp_path))[1] == ("photos",)


def test_links_out_of_the_root_are_refused(tmp_path):
    make(tmp_path, "elsewhere/x.jpg", "elsewhere/deep/y.jpg", "root/cat/a.jpg", "root2/x.jpg")
    (tmp_path / "link").symlink_to("root")  # the root itself may be one
    folder, root = Folder(path=tmp_path / "link"), tmp_path / "root"
    for link, target in (
        ("cat/b.jpg", "elsewhere/x.jpg"),
        ("dog", "elsewhere"),
        ("cat/deep", "elsewhere/deep"),
        ("cat/c.jpg", "root2/x.jpg"),
    ):
        (root / link).symlink_to(tmp_path / target)
        assert "is a link to" in refused(folder)
        (root / link).unlink()
    (root / "cat/notes").symlink_to(tmp_path / "elsewhere/x.jpg")
    (root / "cat/b.jpg").symlink_to("../.store/b.jpg")
    make(root, ".store/b.jpg")
    # An image that cannot be read, like others.
    (root / "cat/d.jpg").symlink_to(tmp_path / "none.jpg")
    assert listing(folder)[0] == {"cat/a.jpg": 0, "cat/b.jpg": 0, "cat/d.jpg": 0}


def test_links_inside_the_root_do_not_count_twice(tmp_path):
    folder = make(tmp_path, "train/cat/a.jpg", "test/cat/b.jpg", ".store/c.jpg")
    (tmp_path / "test/cat/c.jpg").symlink_to("../../.store/c.jpg")
    assert [*listing(folder, "test")[0]] == ["test/cat/b.jpg", "test/cat/c.jpg"]
    (tmp_path / "test/cat/d.jpg").symlink_to("../../train/cat/a.jpg")
    assert "twice" in refused(folder, "test")
    (tmp_path / "test/cat/d.jpg").unlink()
    (tmp_path / "test/cat/up").symlink_to("..")
    assert "link" in refused(folder, "test")


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
    assert "\\udcff.jpg'" in refused(Folder(path=tmp_path))


def test_a_share_of_each_class_is_held_out(tmp_path):
    for name, count in {"a": 40, "b": 7, "c": 2, "d": 1}.items():
        make(tmp_path, *(f"{name}/{number:02}.jpg" for number in range(count)))
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
    assert "split" in refused(folder, "test")
    for share in (0, 1, float("nan")):
        with pytest.raises(ValueError, match="validation"):
            Folder(path=tmp_path, validation=share)


def test_nothing_is_held_out_where_there_is_a_folder_for_it(tmp_path):
    make(tmp_path, "train/a/1.jpg", "train/a/2.jpg", "test/a/4.jpg", "test/a/5.jpg")
    folder = Folder(path=tmp_path, validation=0.5)
    assert [*listing(folder, "test")[0]] == ["test/a/4.jpg", "test/a/5.jpg"]
    assert len(listing(folder)[0]) == len(listing(folder, "validation")[0]) == 1
    make(tmp_path, "val/a/3.jpg")
    assert [*listing(folder)[0]] == ["train/a/1.jpg", "train/a/2.jpg"]
    assert [*listing(folder, "validation")[0]] == ["val/a/3.jpg"]


def test_a_share_of_nothing_is_refused(tmp_path):
    make(tmp_path, "a/1.jpg", "b/2.jpg")
    assert "class" in refused(Folder(path=tmp_path, validation=0.5), "validation")
