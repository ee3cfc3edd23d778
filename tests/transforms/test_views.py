from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from nearsay import rng
from nearsay.batch import Batch, Outputs, one_hot
from nearsay.transforms import (
    CIFAR10_COLORS,
    Augment,
    ColorJitter,
    Cutout,
    Flip,
    Mixup,
    Normalize,
    PadCrop,
    RandAugment,
    RandomResizedCrop,
    Views,
)
from nearsay.transforms.views import make_draws

TRANSFORMS = [
    PadCrop(padding=2, mode="zeros"),
    Flip(),
    RandomResizedCrop(size=8),
    ColorJitter(),
    RandAugment(num_ops=3, magnitude=7),
    Cutout(size=4),
    CIFAR10_COLORS,
    replace(CIFAR10_COLORS, dtype="bfloat16"),
]
WEAK = (PadCrop(), Flip(), CIFAR10_COLORS)
STRONG = (
    RandomResizedCrop(size=9),
    Flip(),
    RandAugment(),
    ColorJitter(),
    CIFAR10_COLORS,
    Cutout(size=4),
)
named = pytest.mark.parametrize("transform", TRANSFORMS, ids=str)


def pictures(num, height=9, width=9, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, 3, height, width), dtype=torch.uint8, generator=draw)


def batch_of(indices, *, height=9, width=9):
    indices = torch.as_tensor(indices, dtype=torch.int64)
    return Batch(
        inputs=pictures(len(indices), height, width),
        targets=one_hot(indices.clamp(min=0) % 3, 3),
        indices=indices,
    )


def same(one, other):
    assert_close(one, other, rtol=0, atol=0)


def one_by_one(transforms, images, draws):
    start = 0
    for transform in transforms:
        images = transform.apply(images, draws[:, start : start + transform.num_draws])
        start += transform.num_draws
    return images


class Recorder(TorchDispatchMode):
    """Notes the name of every operation that torch carries out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@named
def test_an_example_is_augmented_alike_in_any_company(transform):
    images = pictures(17)
    indices = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[:17]
    together = transform(images, indices, seed=5, epoch=3, view=1)
    orders = (torch.tensor([0]), torch.arange(16, -1, -1), torch.arange(3, 13))
    for order in orders:
        same(transform(images[order], indices[order], seed=5, epoch=3, view=1), together[order])


@named
def test_seed_epoch_view_and_example_each_change_the_draws(transform):
    if not transform.num_draws:
        return
    image, indices = pictures(1).expand(40, -1, -1, -1), torch.arange(40)
    first = transform(image, indices, seed=5, epoch=3)
    same(transform(image, indices, seed=5, epoch=torch.tensor(3.7)), first)
    for seed, epoch, view in ((6, 3, 0), (5, 4, 0), (5, 3, 1)):
        others = transform(image, indices, seed=seed, epoch=epoch, view=view)
        assert (others != first).flatten(1).any(dim=1).double().mean() > 0.3
    assert len(first.flatten(1).unique(dim=0)) > 1


@named
def test_a_call_is_the_pure_function_of_its_draws(transform):
    images, indices, num = pictures(12), torch.arange(12) * 3, transform.num_draws
    kept = images.clone()
    draws = make_draws(max(num, 1), indices, seed=2, epoch=1)[:, :num]
    same(transform(images, indices, seed=2, epoch=1), transform.apply(images, draws))
    same(images, kept)


@named
def test_odd_shapes_empty_batches_and_all_types_pass(transform):
    for num, height, width in ((0, 5, 7), (1, 1, 1), (3, 12, 3), (3, 2, 2)):
        images = pictures(num, height, width)
        result = transform(images, torch.arange(num), seed=0, epoch=0)
        size = (8, 8) if isinstance(transform, RandomResizedCrop) else (height, width)
        assert result.shape == (num, 3, *size)
    for dtype in (torch.uint8, torch.float32, torch.float64, torch.bfloat16):
        if dtype.is_floating_point and isinstance(transform, RandAugment):
            continue
        images = pictures(6)
        images = (images.double() / 255).to(dtype) if dtype.is_floating_point else images
        result = transform(images, torch.arange(6), seed=0, epoch=0)
        wanted = getattr(torch, transform.dtype) if isinstance(transform, Normalize) else dtype
        assert result.dtype == wanted
        assert result.isfinite().all()


@named
def test_channels_last_is_the_same(transform):
    images, indices = pictures(7, 10, 6), torch.arange(7)
    last = images.contiguous(memory_format=torch.channels_last)
    same(transform(last, indices, seed=0, epoch=0), transform(images, indices, seed=0, epoch=0))


@named
def test_nothing_looks_at_values_on_the_device(transform):
    epoch = torch.tensor(1.0, device="meta")  # meta tensors have no values to look at
    images, indices = pictures(5), torch.arange(5)
    there = transform(images.to("meta"), indices.to("meta"), seed=0, epoch=epoch)
    here = transform(images, indices, seed=0, epoch=1)
    assert there.shape == here.shape
    assert there.dtype == here.dtype


def test_augment_hands_out_its_draws_one_transform_after_another():
    batch = batch_of([4, 9, -1, 2])
    draws = make_draws(
        sum(transform.num_draws for transform in STRONG), batch.indices, seed=1, epoch=2
    )
    augmented = Augment(transforms=STRONG)(batch, seed=1, epoch=2)
    same(augmented.inputs, one_by_one(STRONG, batch.inputs, draws))
    assert augmented.targets is batch.targets
    assert augmented.indices is batch.indices
    assert augmented.views == 1


def test_views_stand_one_after_the_other_with_draws_of_their_own():
    batch = batch_of([4, 9, -1, 2, 4])
    views = Views(first=WEAK, second=STRONG)(batch, seed=1, epoch=torch.tensor(2.0))
    assert views.views == 2
    same(views.indices, torch.tensor([4, 9, -1, 2, 4] * 2))
    same(views.targets, torch.cat([batch.targets] * 2))
    same(views.inputs[:5], Augment(transforms=WEAK)(batch, seed=1, epoch=2).inputs)
    num = sum(transform.num_draws for transform in STRONG)
    draws = make_draws(num, batch.indices, seed=1, epoch=2, view=1)
    same(views.inputs[5:], one_by_one(STRONG, batch.inputs, draws))


def test_padding_is_harmless():
    batch = batch_of([4, 9, 2])
    padded = replace(
        batch,
        inputs=torch.cat([batch.inputs, torch.zeros_like(batch.inputs)]),
        targets=torch.cat([batch.targets, torch.zeros_like(batch.targets)]),
        indices=torch.cat([batch.indices, torch.full((3,), -1)]),
    )
    views = Views(first=STRONG, second=STRONG)
    full, short = views(padded, seed=0, epoch=0), views(batch, seed=0, epoch=0)
    same(full.inputs[full.is_real], short.inputs)
    assert full.inputs.isfinite().all()


def test_a_worker_may_cut_the_boxes_and_nothing_else_changes():
    batch = batch_of(range(6), height=20, width=14)
    views = Views(first=STRONG, second=(RandomResizedCrop(size=9, area=(0.05, 1)), *STRONG[1:]))
    crops = (views.first[0], views.second[0])
    cut = [
        crop(batch.inputs, batch.indices, seed=3, epoch=1, view=v) for v, crop in enumerate(crops)
    ]
    targets, indices = batch.targets.repeat(2, 1), batch.indices.repeat(2)
    two = replace(batch, inputs=torch.cat(cut), targets=targets, indices=indices, views=2)
    same(views(two, seed=3, epoch=1, is_cut=True).inputs, views(batch, seed=3, epoch=1).inputs)
    one, augment = replace(batch, inputs=cut[0]), Augment(transforms=STRONG)
    same(augment(one, seed=3, epoch=1, is_cut=True).inputs, augment(batch, seed=3, epoch=1).inputs)
    weak = Augment(transforms=WEAK)  # which has no box that could have been cut
    same(weak(batch, seed=3, epoch=1, is_cut=True).inputs, weak(batch, seed=3, epoch=1).inputs)


def test_nothing_is_brought_from_the_host():
    batch = batch_of([4, 9, -1])
    with Recorder() as recorder:
        Views(first=WEAK, second=STRONG)(batch, seed=0, epoch=torch.tensor(1.0))
    recorder.names.remove("lift_fresh")  # the epoch, made here
    assert recorder.names
    # a tensor made of Python numbers, a number read back, and shapes that wait for values
    assert not {"lift_fresh", "_local_scalar_dense", "nonzero", "masked_select", "_unique2"} & set(
        recorder.names
    )


def test_all_draws_of_a_view_are_made_in_one_call(monkeypatch):
    calls = []
    uniform = rng.uniform
    monkeypatch.setattr(
        rng, "uniform", lambda *args, **choices: calls.append(args[1]) or uniform(*args, **choices)
    )
    Views(first=WEAK, second=STRONG)(batch_of([4, 9]), seed=0, epoch=0)
    assert calls == ["augment view 0", "augment view 1"]
    Augment(transforms=(CIFAR10_COLORS,))(batch_of([4, 9]), seed=0, epoch=0)
    assert len(calls) == 2  # none where none is needed


def test_views_compile_into_one_graph():
    batch = batch_of([4, 9, -1, 2])
    views = Views(first=(PadCrop(padding=2, mode="zeros"), *WEAK), second=STRONG)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(batch, seed, epoch):
        made = Mixup()(views(batch, seed=seed, epoch=epoch), seed=seed, epoch=epoch)
        return made.inputs, made.indices

    for epoch in (2, 3):
        inputs, indices = compiled(batch, 5, torch.tensor(float(epoch)))
        expected = Mixup()(views(batch, seed=5, epoch=epoch), seed=5, epoch=epoch)
        assert_close(inputs, expected.inputs)
        assert_close(indices, expected.indices)


def test_what_cannot_be_meant_is_refused():
    batch, two = batch_of([1, 2]), replace(batch_of([1, 2]), views=2)
    taught = replace(batch, teacher=Outputs(torch.zeros(2, 2), torch.zeros(2, 3)))
    at = {"seed": 0, "epoch": 0}
    for name, make in (
        ("transforms", lambda: Augment(transforms=Flip())),
        ("first", lambda: Views(first=[Flip()], second=())),
        ("RandomResizedCrop", lambda: Augment(transforms=(Flip(), RandomResizedCrop(size=8)))),
        ("2", lambda: Augment(transforms=WEAK)(two, **at)),
        ("2", lambda: Views(first=(), second=())(two, **at)),
        ("2", lambda: Views(first=(), second=())(batch, **at, is_cut=True)),
        ("batch", lambda: Augment(transforms=WEAK)(taught, **at)),
        ("images", lambda: Flip()(torch.zeros(4, 1, 8, 8), torch.arange(4), **at)),
        ("indices", lambda: Flip()(torch.zeros(5, 3, 8, 8), torch.arange(4), **at)),
    ):
        with pytest.raises(ValueError, match=name):
            make()
