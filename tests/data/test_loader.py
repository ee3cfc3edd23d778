"""Who is in a batch and what it looks like, whoever reads it and wherever one begins."""

import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from nearsay.batch import Files
from nearsay.data import loader
from nearsay.data.loader import (
    Order,
    Reader,
    Stream,
    finish,
    is_resident,
    num_workers,
    sweep,
    training_reader,
)
from nearsay.transforms import PLUS_MINUS_ONE, Augment, Flip, PadCrop, RandomResizedCrop, Views
from nearsay.transforms.views import make_draws

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create"
)  # more workers than cores
CPU = torch.device("cpu")
SIZES = [(40, 30), (30, 40), (64, 64), (7, 90), (1, 1), (33, 20), (25, 25)]  # width, height
CROP = RandomResizedCrop(size=16)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images of odd sizes, of which the fourth is broken."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        noise = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / f"{number}.png")
    (root / "3.png").write_bytes((root / "3.png").read_bytes()[:100])
    return Files(root, tuple(f"{number}.png" for number in range(len(SIZES))))


def order(num=10, batch_size=3, seed=0):
    return Order(torch.arange(100, 100 + num), batch_size=batch_size, seed=seed)


def test_every_example_comes_once_a_pass():
    found = order(num=12)
    for turn in range(3):
        seen = torch.cat([found.batch(4 * turn + place) for place in range(4)])
        assert seen.sort().values.equal(torch.arange(100, 112))


def test_each_pass_and_each_seed_has_an_order_of_its_own():
    pairs = [(seed, turn) for seed in (0, 1) for turn in (0, 1)]
    orders = [order(64, 64, seed).batch(turn).tolist() for seed, turn in pairs]
    assert len({tuple(each) for each in orders}) == 4
    assert orders[0] != sorted(orders[0])


def test_what_does_not_fill_a_batch_is_left_out_of_its_pass_only():
    found = order(num=10, batch_size=3)
    assert found.batches_per_pass == 3
    passes = torch.stack([found.batch(step) for step in range(120)]).view(40, 9)
    assert all(len(each.unique()) == 9 for each in passes)
    assert len(passes.unique()) == 10


def test_an_order_that_was_sent_to_a_worker_goes_on_as_before():
    found = order()
    found.batch(4)
    copy = pickle.loads(pickle.dumps(found))
    found.to(CPU)
    for step in (5, 4, 100):
        assert copy.batch(step).equal(order().batch(step))
        assert found.batch(step).equal(order().batch(step))


def test_a_small_class_comes_several_times_in_a_pass_each_time_in_another_order():
    kinds = torch.tensor([0] * 40 + [1] * 8)
    found = Order(torch.arange(48), batch_size=48, seed=0, kinds=kinds).batch(0)
    small = found[found >= 40].view(3, 8)  # as many as of the large class
    assert small.sort(dim=1).values.equal(torch.arange(40, 48).expand(3, 8))
    assert len({tuple(each) for each in small.tolist()}) == 3


def test_fewer_examples_than_a_batch_holds_are_one_batch():
    found = order(num=2, batch_size=256)
    assert (found.batch_size, found.batches_per_pass) == (2, 1)
    assert sorted(found.batch(5).tolist()) == [100, 101]
    with pytest.raises(ValueError, match="examples"):
        order(num=0)


def by_hand(image, box, size=16):
    """What Pillow makes of the box, antialiased."""
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def box_of(crop, height, width, indices, *, seed, epoch, view=0):
    """The box that is cut from images of one size, or of a size each."""
    draws = make_draws(crop.num_draws, indices, seed=seed, epoch=epoch, view=view)
    return crop.box(*(torch.as_tensor(each).expand_as(indices) for each in (height, width)), draws)


def cut_of(files, crop, index, **choices):
    """What the reader should cut from a file."""
    width, height = SIZES[index]
    box = map(int, box_of(crop, height, width, torch.tensor(index), **choices))
    top, left, tall, wide = box
    assert 0 <= top <= top + tall <= height
    image = Image.open(files.root / files.names[index])
    return by_hand(image, (left, top, left + wide, top + tall))


def test_the_box_that_is_cut_is_that_of_the_crop(files):
    reader = training_reader(files, Augment(transforms=(CROP, Flip())), size=16, seed=5)
    indices = torch.tensor([6, 0, 5, 1])
    found = reader.read(indices, 3).inputs
    assert found.shape == (4, 3, 16, 16)
    assert found.dtype == torch.uint8
    for row, index in enumerate(indices.tolist()):
        expected = cut_of(files, CROP, index, seed=5, epoch=3)
        np.testing.assert_array_equal(found[row].permute(1, 2, 0).numpy(), expected)


def test_each_view_has_a_box_of_its_own_and_views_follow_each_other(files):
    wide = RandomResizedCrop(size=16, area=(0.5, 1.0))
    reader = training_reader(files, Views(first=(CROP,), second=(wide, Flip())), size=16, seed=0)
    assert reader.crops == (CROP, wide)
    indices = torch.tensor([0, 2])
    rows = reader.read(indices, 0)
    assert rows.indices.equal(indices)
    assert rows.inputs.shape == (4, 3, 16, 16)
    alone = training_reader(files, Augment(transforms=(CROP,)), size=16, seed=0).read(indices, 0)
    assert rows.inputs[:2].equal(alone[1])
    expected = cut_of(files, wide, 2, seed=0, epoch=0, view=1)
    np.testing.assert_array_equal(rows.inputs[3].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("augment", [None, Augment(transforms=(PadCrop(), Flip()))])
def test_without_a_crop_the_middle_is_read(files, augment):
    reader = training_reader(files, augment, size=16, seed=0)
    assert reader.crops == (None,)
    found = reader.read(torch.tensor([1, 2]), 9).inputs.permute(0, 2, 3, 1).numpy()
    middle, one, two = 13.125, files.root / "1.png", files.root / "2.png"
    box = (15 - middle, 20 - middle, 15 + middle, 20 + middle)
    expected = np.stack([by_hand(Image.open(one), box), by_hand(Image.open(two), (4, 4, 60, 60))])
    np.testing.assert_array_equal(found, expected)
    images = torch.arange(5 * 3 * 4 * 4, dtype=torch.uint8).view(5, 3, 4, 4)  # arrays are not cut
    reader = training_reader(images, Augment(transforms=(CROP,)), size=16, seed=0)
    rows = reader.read(torch.tensor([4, 1]), 0)
    assert rows.inputs.equal(images[[4, 1]])
    assert rows.problems == ()


def test_the_size_of_an_image_changes_only_how_finely_it_is_seen(tmp_path):
    ramp = np.linspace(0, 255, 512).astype(np.uint8)
    for width in (512, 64):
        level = np.broadcast_to(ramp[:: 512 // width, None], (width, width, 3))
        Image.fromarray(np.ascontiguousarray(level)).save(tmp_path / f"{width}.png")
    rows = Reader(Files(tmp_path, ("512.png", "64.png")), 16).read(torch.tensor([0, 1]), 0)
    seen = rows.inputs.float().mean(dim=(1, 2))  # (2, 16) brightness from left to right
    expected = 255 * (1 / 16 + 7 / 8 * (torch.arange(16) + 0.5) / 16)
    # whole levels, and half a pixel of the small one
    assert_close(seen, expected.expand(2, -1), rtol=0, atol=4.0)


def test_what_cannot_be_decoded_is_padding_and_never_another_example(files):
    indices = torch.tensor([2, 3, 0, 3])
    rows = training_reader(files, Augment(transforms=(CROP,)), size=16, seed=0).read(indices, 0)
    assert rows.indices.tolist() == [2, -1, 0, -1]
    assert not rows.inputs[[1, 3]].any()
    assert rows.inputs[[0, 2]].any()
    assert [index for index, _ in rows.problems] == [3, 3]
    assert str(files.root / "3.png") in rows.problems[0][1]


@pytest.mark.parametrize("held", [1, 2000, 2**22])
def test_an_example_is_cut_alike_whoever_is_beside_it_and_however_many_wait(
    files, held, monkeypatch
):
    # pixels: each image alone, two or three, all of them
    monkeypatch.setattr(loader, "_HELD", held)
    views = Views(first=(CROP,), second=(RandomResizedCrop(size=16, area=(0.5, 1.0)),))
    reader = training_reader(files, views, size=16, seed=0)
    indices = torch.tensor([3, 6, 0, 3, 4, 2, 5, 1])  # number 3 cannot be decoded
    alone = [reader.read(index[None], 2).inputs for index in indices]
    assert reader.read(indices, 2).inputs.equal(torch.stack(alone, dim=1).flatten(0, 1))


def stream(files, workers):
    who, augment = order(num=7, batch_size=3), Augment(transforms=(CROP,))

    def step(number):
        return who.batch(number) - 100, number // who.batches_per_pass

    return Stream(training_reader(files, augment, size=16, seed=1), step, workers, 60.0)


def read_all(stream, steps):
    # Restores the handler of ended workers.
    with stream.explained():
        return list(stream.rows(steps))


def same(left, right):
    assert left.indices.equal(right.indices)
    assert left.inputs.equal(right.inputs)
    assert left.problems == right.problems


def test_any_number_of_workers_reads_the_same_bits_from_any_step(files):
    alone = read_all(stream(files, 0), range(6))
    assert [len(rows.indices) for rows in alone] == [3] * 6
    assert any(rows.problems for rows in alone)
    for workers, start in ((1, 0), (2, 3), (0, 5)):
        found = read_all(stream(files, workers), range(start, 6))
        assert len(found) == 6 - start
        for left, right in zip(alone[start:], found, strict=True):
            same(left, right)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sweep_covers_all_files_in_their_order(files, workers):
    with sweep(files, size=16, batch_size=3, workers=workers, timeout=60.0, pin=False) as batches:
        found = list(batches)
    assert [rows.indices.tolist() for rows in found] == [[0, 1, 2], [-1, 4, 5], [6]]
    same(found[2], Reader(files, 16).read(torch.tensor([6]), 0))


def test_workers_read_where_processes_are_not_forked_by_default(files, monkeypatch):
    as_asked = multiprocessing.get_context
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: as_asked(method or "forkserver")
    )
    with sweep(files, size=16, batch_size=3, workers=1, timeout=60.0, pin=False) as batches:
        assert sum(len(rows.indices) for rows in batches) == len(files)


def test_arrays_are_resident_unless_told_otherwise_and_files_never():
    images, here = torch.zeros(2, 3, 4, 4), Files(Path(), ("a.jpg",))
    for wish in ("auto", "resident", "streaming"):
        assert is_resident(images, CPU, wish) is (wish != "streaming")
        assert wish == "resident" or not is_resident(here, CPU, wish)
    with pytest.raises(ValueError, match="loading"):
        is_resident(here, CPU, "resident")


def test_large_arrays_stay_off_a_small_device(monkeypatch):
    images, device = torch.zeros(100, dtype=torch.uint8), torch.device("cuda")
    for free, fits in ((251, True), (249, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 1000))
        assert is_resident(images, device, "auto") is fits
        assert is_resident(images, device, "resident")


def test_only_files_need_workers(monkeypatch):
    images, here = torch.zeros(2, 3, 4, 4), Files(Path(), ("a.jpg",))
    for cores, expected in ((3, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert num_workers(here, None) == expected
    assert num_workers(images, None) == 0
    assert [num_workers(each, 5) for each in (images, here)] == [5, 5]


def test_bytes_become_numbers_around_zero_and_features_stay():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    assert_close(finish(images, PLUS_MINUS_ONE).flatten(), torch.tensor([-1.0, -0.6, 1.0]))
    assert_close(finish(images, None).flatten(), torch.tensor([0.0, 0.2, 1.0]))
    assert finish(torch.zeros(2, 3, 4, 4), None).is_contiguous(memory_format=torch.channels_last)
    features = torch.randn(2, 5)
    assert finish(features, PLUS_MINUS_ONE) is features
