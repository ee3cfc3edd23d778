import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from torch.nn.functional import interpolate
from torch.testing import assert_close

from nearsay.transforms import Cutout, Flip, PadCrop, RandomResizedCrop
from nearsay.transforms.views import make_draws, whole

LARGEST = 1 - 2.0**-24  # draw


def pictures(num, height=9, width=9, dtype=torch.uint8, seed=0):
    values = torch.randint(
        0, 256, (num, 3, height, width), generator=torch.Generator().manual_seed(seed)
    )
    return values.to(dtype) if dtype == torch.uint8 else values.to(dtype) / 255


def places(num, height, width):
    """Images whose pixels say where they stand: row · 100 + column."""
    values = torch.arange(height)[:, None] * 100 + torch.arange(width)
    return values.expand(num, 3, height, width)


@pytest.mark.parametrize("high", [1, 2, 9, 14, 224, 1000, 2**20 + 7])
def test_whole_numbers_are_exact_and_stay_below_their_bound(high):
    draws = torch.tensor([0, 2.0**-24, 0.25, 0.5, 0.9, LARGEST])
    expected = [math.floor(draw * high) for draw in draws.double().tolist()]
    assert whole(draws, high).tolist() == expected
    assert whole(draws, torch.full((6,), high)).tolist() == expected
    assert max(expected) == high - 1


@pytest.mark.parametrize(("height", "width"), [(5, 7), (1, 1), (3, 12)])
@pytest.mark.parametrize("padding", [0, 1, 6])
@pytest.mark.parametrize("mode", ["reflect", "zeros"])
def test_a_padded_crop_is_a_window_of_the_padded_image_at_every_offset(
    height, width, padding, mode
):
    num_offsets = 2 * padding + 1
    tops, lefts = (axis.flatten() for axis in np.mgrid[:num_offsets, :num_offsets])
    draws = (torch.tensor(np.stack([tops, lefts], axis=1)) + 0.5) / num_offsets
    margins = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    for dtype in (torch.uint8, torch.float32):
        images = pictures(len(tops), height, width, dtype)
        crops = PadCrop(padding=padding, mode=mode).apply(images, draws)
        assert crops.dtype == dtype
        padded = np.pad(images.numpy(), margins, "reflect" if mode == "reflect" else "constant")
        for crop, image, top, left in zip(crops.numpy(), padded, tops, lefts, strict=True):
            np.testing.assert_array_equal(crop, image[:, top : top + height, left : left + width])


def test_every_offset_of_a_padded_crop_is_equally_frequent():
    num = 81 * 100
    crops = PadCrop(padding=4)(places(num, 9, 9), torch.arange(num), seed=0, epoch=0)
    found, counts = crops[:, 0, 4, 4].unique(
        return_counts=True
    )  # the middle came from 4 up or down
    assert found.tolist() == [row * 100 + column for row in range(9) for column in range(9)]
    assert chisquare(counts).pvalue > 1e-3  # the seed is fixed: this either holds or does not


@pytest.mark.parametrize("width", [1, 2, 7])
def test_a_flip_mirrors_columns_and_nothing_else(width):
    images = pictures(4, 5, width)
    flipped = Flip(probability=0.3).apply(images, torch.tensor([[0.0], [0.29], [0.31], [LARGEST]]))
    expected = np.concatenate([images.numpy()[:2, :, :, ::-1], images.numpy()[2:]])
    np.testing.assert_array_equal(flipped.numpy(), expected)


@pytest.mark.parametrize("probability", [0.0, 0.2, 1.0])
def test_flips_are_as_frequent_as_asked(probability):
    num = 10_000
    flip, images = Flip(probability=probability), places(num, 1, 2)
    share = (flip(images, torch.arange(num), seed=0, epoch=0)[:, 0, 0, 0] == 1).double().mean()
    assert abs(share - probability) <= 4 * (probability * (1 - probability) / num) ** 0.5
    ends = flip.apply(images[:2], torch.tensor([[0.0], [LARGEST]]))[:, 0, 0, 0]
    assert probability == 0.2 or (ends == probability).all()


@pytest.mark.parametrize(("height", "width"), [(5, 7), (1, 1)])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 30])
def test_cutout_covers_the_square_around_its_center(height, width, size):
    rows, columns = (axis.flatten() for axis in np.mgrid[:height, :width])
    images = pictures(len(rows), height, width)
    draws = torch.tensor(np.stack([(rows + 0.5) / height, (columns + 0.5) / width], axis=1)).float()
    covered = Cutout(size=size, fill=7).apply(images, draws)
    for image, result, row, column in zip(images, covered, rows, columns, strict=True):
        top, left = row - size // 2, column - size // 2
        expected = image.clone()
        expected[:, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 7
        assert_close(result, expected)


def test_every_pixel_is_equally_often_the_center_of_a_cutout():
    num = 20 * 200
    covered = Cutout(size=1, fill=-1)(torch.zeros(num, 3, 4, 5), torch.arange(num), seed=0, epoch=0)
    assert chisquare((covered[:, 0] == -1).sum(dim=0).flatten()).pvalue > 1e-3


def box_of(crop, height, width, indices, *, seed, epoch, view=0):
    """The box that is cut from images of one size, or of a size each."""
    draws = make_draws(crop.num_draws, indices, seed=seed, epoch=epoch, view=view)
    return crop.box(*(torch.as_tensor(each).expand_as(indices) for each in (height, width)), draws)


def box_oracle(height, width, draws, area, ratio):
    """Torchvision's way to a box, one image at a time in Python numbers."""
    for attempt in range(10):
        target = height * width * (area[0] + (area[1] - area[0]) * draws[2 * attempt])
        shape = math.exp(
            math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * draws[2 * attempt + 1]
        )
        w, h = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
        if 0 < w <= width and 0 < h <= height:
            return (
                math.floor(draws[20] * (height - h + 1)),
                math.floor(draws[21] * (width - w + 1)),
                h,
                w,
            )
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(height * ratio[1]))
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(("height", "width"), [(480, 640), (17, 5), (1, 40), (2000, 3)])
@pytest.mark.parametrize(
    ("area", "ratio"),
    [((0.08, 1.0), (3 / 4, 4 / 3)), ((1.0, 1.0), (1.0, 1.0)), ((0.9, 1.0), (0.2, 0.3))],
)
def test_boxes_are_those_of_the_scalar_algorithm(height, width, area, ratio):
    indices = torch.arange(200)
    crop = RandomResizedCrop(size=8, area=area, ratio=ratio)
    box = box_of(crop, height, width, indices, seed=3, epoch=1)
    draws = make_draws(22, indices, seed=3, epoch=1).double().tolist()
    expected = [box_oracle(height, width, row, area, ratio) for row in draws]
    assert list(zip(*(each.tolist() for each in box), strict=True)) == expected
    assert ((box.top >= 0) & (box.top + box.height <= height) & (box.height >= 1)).all()
    assert ((box.left >= 0) & (box.left + box.width <= width) & (box.width >= 1)).all()


def test_boxes_have_uniform_area_log_uniform_shape_and_uniform_place():
    side, num = 10_000, 4000
    crop = RandomResizedCrop(size=8, area=(0.1, 0.5))  # every first attempt fits
    box = box_of(crop, side, side, torch.arange(num), seed=0, epoch=0)
    shares = (box.height * box.width).double() / side**2
    assert kstest((shares - 0.1) / 0.4, "uniform").pvalue > 1e-3
    shapes = (box.width.double() / box.height).log() / math.log(4 / 3)
    assert kstest((shapes + 1) / 2, "uniform").pvalue > 1e-3
    for start, length in ((box.top, box.height), (box.left, box.width)):
        assert kstest(start.double() / (side - length), "uniform").pvalue > 1e-3


def test_a_worker_draws_the_box_of_one_image_as_the_device_draws_those_of_a_batch():
    heights, widths = torch.tensor([32, 480, 1, 900]), torch.tensor([32, 640, 5, 30])
    indices = torch.tensor([5, 2**40 + 1, 7, 0])
    crop = RandomResizedCrop(size=8)
    together = box_of(crop, heights, widths, indices, seed=1, epoch=2, view=1)
    for row in range(4):
        height, width = int(heights[row]), int(widths[row])
        alone = box_of(crop, height, width, indices[row], seed=1, epoch=2, view=1)
        assert [int(each) for each in alone] == [int(each[row]) for each in together]


@pytest.mark.parametrize(("height", "width"), [(5, 7), (1, 1), (40, 12)])
@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_resized_crop_is_the_resized_box_alone(height, width, size, dtype):
    images, indices = pictures(20, height, width, dtype), torch.arange(20) * 7
    crop = RandomResizedCrop(size=size, area=(0.05, 1.0))
    resized = crop(images, indices, seed=0, epoch=4, view=1)
    assert resized.dtype == dtype
    box = box_of(crop, height, width, indices, seed=0, epoch=4, view=1)
    for image, result, *where in zip(images, resized, *box, strict=True):
        top, left, rows, columns = map(int, where)
        cut = image[None, :, top : top + rows, left : left + columns].double()
        expected = interpolate(cut, (size, size), mode="bilinear", align_corners=False)[0]
        # bytes are rounded
        assert (result.double() - expected).abs().max() < (0.51 if dtype == torch.uint8 else 2e-5)


def test_the_whole_box_at_its_own_size_is_the_image():
    images, crop = pictures(30, 11, 11), RandomResizedCrop(size=11, area=(1, 1), ratio=(1, 1))
    assert_close(crop(images, torch.arange(30), seed=0, epoch=0), images)


def test_what_cannot_be_meant_is_refused():
    for kind, field, values in (
        (PadCrop, "padding", (-1, 1.5, True)),
        (PadCrop, "mode", ("edge",)),
        (Flip, "probability", (1.1, float("nan"))),
        (Cutout, "size", (-2,)),
        (Cutout, "fill", (float("nan"),)),
        (RandomResizedCrop, "size", (0,)),
        (RandomResizedCrop, "area", ((0, 1), (0.5, 0.4), (0.5, 1.5))),
        (RandomResizedCrop, "ratio", ((0, 1), (2, 1))),
    ):
        for value in values:
            choices = {"size": 8} if kind is RandomResizedCrop else {}
            with pytest.raises(ValueError, match=field):
                kind(**choices | {field: value})
    for fill in (0.5, -1):
        with pytest.raises(ValueError, match="fill"):
            Cutout(fill=fill)(pictures(2), torch.arange(2), seed=0, epoch=0)
