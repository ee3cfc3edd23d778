"""Odd images are learned from, broken ones end a run or are left out by name, and no file stands in for another."""

import os
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from faults.jobs import PATIENCE
from nearsay.data import Folder
from nearsay.errors import BadImage
from nearsay.experiment import Experiment, Machine
from nearsay.losses import NCR
from nearsay.models import ResNet
from nearsay.optim import SGD, Constant
from nearsay.training.checkpoints import open_run
from nearsay.training.loop import train
from nearsay.training.progress import Silent
from nearsay.transforms import IMAGENET_COLORS, Augment, Flip, RandomResizedCrop

# More workers than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
BROKEN = ("truncated", "empty", "text", "pipe", "loop", "bomb")


def picture(draw, width, height):
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def odd_images(draw):
    """Name, image and how to save it: every format, mode and shape that a folder of photos may hold."""
    sizes = [(24, 16), (16, 24), (1, 1), (1, 300), (300, 1), (17, 19)]
    for number, (width, height) in enumerate(sizes):
        yield f"size{number}.jpg", picture(draw, width, height), {}
        yield f"size{number}.png", picture(draw, width, height), {}
    yield "tall.jpg", picture(draw, 1, 3000), {}
    for mode in ("1", "L", "LA", "P", "RGBA", "RGB"):
        yield f"mode{mode}.png", picture(draw, 30, 20).convert(mode), {}
    for mode in ("1", "L", "RGB", "CMYK", "RGBA"):
        yield f"mode{mode}.tif", picture(draw, 30, 20).convert(mode), {}
    for mode in ("L", "CMYK"):
        yield f"mode{mode}.jpeg", picture(draw, 30, 20).convert(mode), {}
    for ending in ("gif", "webp", "bmp", "ppm", "GIF"):
        yield f"kind.{ending}", picture(draw, 21, 22), {}
    deep = Image.fromarray(draw.integers(0, 2**16, (20, 30), dtype=np.uint16))
    yield "deep.png", deep, {}
    yield "deep.tiff", deep, {}
    frames = [picture(draw, 12, 12).convert("P") for _ in range(3)]
    for ending in ("gif", "webp"):
        yield f"moving.{ending}", frames[0], {"save_all": True, "append_images": frames[1:]}
    for turn in (3, 6, 8):
        exif = Image.Exif()
        exif[0x0112] = turn
        yield f"turned{turn}.jpg", picture(draw, 40, 10), {"exif": exif}
    yield "progressive.jpg", picture(draw, 64, 48), {"progressive": True}
    yield "shouting.JPG", picture(draw, 64, 48), {}


def fill(folder, *, classes=("cat", "dog"), seed=0):
    """A folder of odd images, a class for every second of them."""
    draw = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
    made = []
    for number, (name, image, options) in enumerate(odd_images(draw)):
        path = folder / classes[number % len(classes)] / name
        image.save(path, **options)
        made.append(path)
    return made


def bomb():
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(10**5))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def spoil(folder, kinds=BROKEN):
    """Put what only looks like an image into the folder; gives the paths."""
    made = []
    for kind in kinds:
        path = folder / f"{kind}.jpg"
        if kind == "truncated":
            picture(np.random.default_rng(1), 90, 90).save(path)
            path.write_bytes(path.read_bytes()[:2000])
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path.name)
        else:
            path.write_bytes({"empty": b"", "text": b"no image\n" * 99, "bomb": bomb()}[kind])
        made.append(str(path))
    return made


def experiment(folder, **choices):
    return Experiment(
        **{
            "data": Folder(path=folder),
            "backbone": ResNet(width=4),
            "objective": NCR(k=3),
            "augment": Augment(transforms=(RandomResizedCrop(size=16), Flip())),
            "normalize": IMAGENET_COLORS,
            "image_size": 16,
            "optimizer": SGD(lr=0.01),
            "schedule": Constant(),
            "epochs": 1,
            "batch_size": 8,
            "machine": Machine(workers=0),
            **choices,
        }
    )


class Notes(Silent):
    """Remembers what the user is told."""

    def __init__(self):
        self.told = []

    def note(self, message):
        self.told.append(message)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    assert len(fill(folder)) >= 40
    return folder


@pytest.fixture
def broken(tmp_path):
    """The same images, and broken ones among the dogs."""
    fill(tmp_path / "photos")
    return tmp_path / "photos", spoil(tmp_path / "photos" / "dog")


def test_images_of_all_kinds_and_shapes_are_trained_on_alike_by_workers(photos, tmp_path):
    num = len(Folder(path=photos).open("train").inputs)
    for workers in (0, 2):
        display, folder = Notes(), tmp_path / str(workers)
        machine = Machine(workers=workers, timeout=PATIENCE)
        result = train(experiment(photos, held_out=0.2, machine=machine), folder, display=display)
        assert result["skipped"] == 0
        assert display.told == []
        seen = load_file(folder / "predictions" / "train.safetensors")
        assert seen["indices"].equal(torch.arange(num))
        assert seen["logits"].isfinite().all()
    learned = [(tmp_path / name / "model.safetensors").read_bytes() for name in "02"]
    assert learned[0] == learned[1]


@pytest.mark.parametrize("kind", ["truncated", "pipe"])
def test_a_broken_image_stops_a_run_by_its_name(tmp_path, kind):
    fill(tmp_path / "photos")
    (path,) = spoil(tmp_path / "photos" / "dog", [kind])
    with pytest.raises(BadImage, match="bad_images") as caught:
        train(experiment(tmp_path / "photos", batch_size=50), tmp_path / "run")
    assert caught.value.code == 65
    assert repr(path) in str(caught.value)
    assert not (tmp_path / "run" / "result.json").exists()


def test_broken_images_are_left_out_and_named_once(broken, tmp_path):
    folder, paths = broken
    display = Notes()
    wished = experiment(
        folder,
        bad_images="skip",
        epochs=3,
        batch_size=7,
        machine=Machine(workers=2, timeout=PATIENCE),
    )
    result = train(wished, tmp_path / "run", display=display)
    assert result["skipped"] == len(BROKEN)
    assert sorted(note.split("'")[1] for note in display.told) == sorted(paths)
    assert all(note.startswith("left out: ") for note in display.told)
    names = Folder(path=folder).open("train").inputs.names
    bad = {number for number, name in enumerate(names) if str(folder / name) in paths}
    seen = load_file(tmp_path / "run" / "predictions" / "train.safetensors")
    assert seen["indices"].tolist() == [number for number in range(len(names)) if number not in bad]
    counts = load_file(tmp_path / "run" / "dynamics.safetensors")["count"]
    assert not counts[list(bad)].any()
    assert counts.sum() >= 3 * len(names) * 0.7


def test_a_broken_image_is_nobody_and_never_another_one(broken, tmp_path):
    """Twice the same run, with other broken files under the same names: the same is learned, bit for bit."""
    folder, paths = broken
    learned = []
    for number in range(2):
        train(experiment(folder, bad_images="skip"), tmp_path / str(number))
        learned.append((tmp_path / str(number) / "model.safetensors").read_bytes())
        for path in paths:
            os.unlink(path)
            with open(path, "wb") as file:
                file.write(b"other bytes")
    assert learned[0] == learned[1]


def test_a_run_that_goes_on_names_no_image_again(broken, tmp_path):
    folder, _ = broken
    wished = experiment(
        folder, bad_images="skip", batch_size=50, machine=Machine(workers=0, checkpoint_steps=1)
    )
    first = Notes()
    train(replace(wished, epochs=2), tmp_path / "whole", display=first)
    with open_run(tmp_path / "whole") as run:
        assert sorted(run.load().state["skipped"]) == sorted(
            note.removeprefix("left out: ") for note in first.told
        )
    (tmp_path / "whole" / "result.json").unlink()
    again = Notes()
    result = train(replace(wished, epochs=2), tmp_path / "whole", display=again)
    assert result["skipped"] == len(BROKEN)
    assert again.told == []


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_broken_images_count_where_a_network_is_judged_as_well(tmp_path, policy):
    fill(tmp_path / "photos" / "train")
    fill(tmp_path / "photos" / "test", seed=1)
    (path,) = spoil(tmp_path / "photos" / "test" / "cat", ["empty"])
    display = Notes()
    wished = experiment(tmp_path / "photos", bad_images=policy)
    if policy == "stop":
        with pytest.raises(BadImage, match="empty"):
            train(wished, tmp_path / "run", display=display)
        return
    assert train(wished, tmp_path / "run", display=display)["skipped"] == 1
    assert [repr(path) in note for note in display.told] == [True]


class Movers(Silent):
    """Takes the images away after some epochs, as a disk that is no longer there."""

    def __init__(self, folder, epoch):
        self.folder, self.epoch_of_loss = folder, epoch

    def epoch(self, entry):
        if entry["epoch"] == self.epoch_of_loss:
            self.folder.rename(self.folder.with_name("away"))


@pytest.mark.parametrize("epoch", [1, 3])  # between two steps, and after the last one
def test_a_run_whose_images_are_all_gone_stops_and_goes_on_when_they_are_back(tmp_path, epoch):
    photos = tmp_path / "photos"
    fill(photos)
    wished = experiment(
        photos,
        epochs=3,
        batch_size=32,
        bad_images="skip",
        machine=Machine(workers=0, checkpoint_steps=1),
    )
    train(wished, tmp_path / "whole")
    with pytest.raises(BadImage, match="No such file"):
        train(wished, tmp_path / "run", display=Movers(photos, epoch))
    assert not (tmp_path / "run" / "result.json").exists()
    (tmp_path / "away").rename(photos)
    train(wished, tmp_path / "run")
    for name in ("model.safetensors", "predictions/train.safetensors", "log.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (
            name
        )


@pytest.mark.parametrize("ending", ["jpg", "heic"])
def test_images_that_are_all_broken_or_of_other_formats_are_nothing_to_learn_from(tmp_path, ending):
    for name in (f"cat/1.{ending}", f"cat/2.{ending}", f"dog/1.{ending}"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(b"no image")
    with pytest.raises(BadImage, match=rf"3 images .*{ending}"):
        train(experiment(tmp_path / "photos", bad_images="skip"), tmp_path / "run")
