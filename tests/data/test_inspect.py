"""What data sets say of themselves is true, and data at another path is of the right kind."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nearsay.batch import DataInfo, Labels, Split
from nearsay.data import (
    Cifar10,
    Cifar100,
    Clothing1M,
    Digits,
    Embeddings,
    Folder,
    ImageNetValidation,
    Manifest,
    MiniImageNet,
    MiniWebVision,
    Toy,
    WebVision,
    describe,
    tables,
)
from nearsay.data.inspect import dataset_at


@dataclass(frozen=True)
class Stripes:
    """A data set of a user that says nothing of itself."""

    path: str | Path = "stripes"

    def open(self, split):
        inputs = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
        return Split(inputs, Labels(torch.tensor([0, 1, 0, -1]), None, ("across", "down")))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Small data of every kind that has files of any size, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/cat/1.png", "photos/cat/2.png", "photos/dog/3.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 7)).save(name)
    rows = {"path": ["cat/1.png", "dog/3.png"], "label": ["cat", "dog"], "split": ["train", "test"]}
    tables.write("list.csv", {**rows, "label": ["cat", ""]})
    features, words = np.ones((5, 6)), np.array(["train", "test", "val", "train", "train"])
    np.savez("all.npz", x=features, y=[0, 1, 2, 1, 0], split=words)
    np.savez_compressed("named.npz", features=features, labels=["a", "b", "", "b", "a"])
    np.save("features.npy", features)
    tables.write("labels.csv", {"label": ["a", "b", "c", "", "a"]})
    pytest.importorskip("pyarrow")
    columns = {f"f{number}": features[:, number].tolist() for number in range(6)}
    tables.write("all.parquet", {**columns, "label": list("abcab")})


@pytest.mark.parametrize(
    "data",
    [
        Toy(num_classes=3, num_features=4, num_train=7),
        Digits(),
        Stripes(),
        Folder(path="photos", validation=0.4),
        Manifest(path="list.csv", root="photos"),
        Embeddings(path="all.npz"),
        Embeddings(path="named.npz"),
        Embeddings(path="features.npy", labels="labels.csv"),
        Embeddings(path="all.parquet"),
    ],
    ids=repr,
)
def test_what_a_data_set_says_of_itself_is_what_opening_finds(here, data):
    inputs, labels = data.open("train")
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else None
    assert describe(data) == DataInfo(len(labels.classes), shape, len(inputs))


def test_published_data_sets_know_their_sizes_without_files():
    at = {"path": "nowhere"}
    for data, expected in (
        (Cifar10(**at), (10, (3, 32, 32), 50_000)),
        (Cifar10(**at, classes=("cat", "dog")), (2, (3, 32, 32), 10_000)),
        (Cifar100(**at), (100, (3, 32, 32), 50_000)),
        (Clothing1M(**at), (14, None, 1_000_000)),
        (Clothing1M(**at, partial=True), (14, None, None)),
        (MiniImageNet(**at, noise=0.4), (100, None, 50_010)),
        (MiniImageNet(**at, noise=0.4, color="blue"), (100, None, 60_000)),
        (MiniImageNet(**at, noise=0.4, held_out_set=True), (100, None, None)),
        (MiniWebVision(**at), (50, None, 65_944)),
        (WebVision(**at), (1000, None, None)),
        (ImageNetValidation(**at, synsets="nowhere", num_classes=50), (50, None, None)),
    ):
        assert describe(data) == expected, data


def test_the_features_are_not_read_to_be_described(here):
    header = {"descr": "<f4", "fortran_order": False, "shape": (5, 2**20)}
    with open("cut.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    assert describe(Embeddings(path="cut.npy", labels="labels.csv")) == (3, (2**20,), 5)


def test_data_of_a_user_moves_by_its_path_or_its_own_method(tmp_path):
    class Movable(Stripes):
        def at(self, path, split=None):
            return Stripes(path="moved") if path.suffix == ".stripes" else None

    assert dataset_at(tmp_path, Stripes()) == Stripes(path=tmp_path)
    assert dataset_at(tmp_path / "x.stripes", Movable()) == Stripes(path="moved")
    assert dataset_at(tmp_path, Movable()) == Folder(path=tmp_path)
    assert dataset_at(tmp_path / "x.npz", Toy()) == Embeddings(path=tmp_path / "x.npz")


def test_published_data_is_known_by_its_lists_and_other_folders_are_photographs(tmp_path):
    for data, marker in (
        (Clothing1M(path="old"), "annotations/category_names_eng.txt"),
        (MiniImageNet(path="old", noise=0.2), "mini-imagenet/split/list"),
        (MiniWebVision(path="old"), "info/synsets.txt"),
        (Cifar100(path="old"), "cifar-100-python/meta"),
    ):
        path = tmp_path / type(data).__name__
        path.mkdir()
        assert dataset_at(path, data) == Folder(path=path)
        (path / marker).parent.mkdir(parents=True, exist_ok=True)
        (path / marker).touch()
        moved = dataset_at(path, data)
        assert type(moved) is type(data)
        assert moved.path == path
