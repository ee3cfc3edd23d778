import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy.stats import chisquare
from torch.testing import assert_close

from nearsay.transforms import RandAugment
from nearsay.transforms.strong import OPERATIONS
from nearsay.transforms.views import make_draws

GRAY = (128, 128, 128)
ENHANCE = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "color": ImageEnhance.Color,
    "sharpness": ImageEnhance.Sharpness,
}


def draws_of(*steps):
    """The draws that lead to operations of given strength in [−1, 1)."""
    return [number for name, strength in steps for number in (draw_of(name), (strength + 1) / 2)]


def draw_of(name):
    return (OPERATIONS.index(name) + 0.5) / len(OPERATIONS)


def pictures(num, height=17, width=24, seed=0):
    """Noise of several scales and ranges, so that statistics differ between images and channels."""
    random = np.random.default_rng(seed)
    coarse = (
        random.integers(0, 256, (num, 3, height // 4 + 1, width // 4 + 1))
        .repeat(4, axis=2)
        .repeat(4, axis=3)
    )
    mixed = 0.7 * coarse[:, :, :height, :width] + 0.3 * random.integers(
        0, 256, (num, 3, height, width)
    )
    low, spread = random.uniform(0, 0.4, (num, 3, 1, 1)), random.uniform(0.3, 0.6, (num, 3, 1, 1))
    return torch.tensor(np.clip(mixed * spread + 255 * low, 0, 255).astype(np.uint8))


def smooth_picture(height, width):
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [127 + 100 * np.sin(3 * x + 2 * y), 127 + 100 * np.cos(4 * y - x), 255 * x * y]
    return torch.tensor(np.stack(waves).astype(np.uint8))[None]


def to_pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pillow(image):
    return torch.tensor(np.asarray(image)).permute(2, 0, 1)


def pillow(image, name, strength):
    """An operation on a Pillow image, as its modules have it, about the middle and with gray
    outside.
    """
    width, height = image.size
    if name == "identity":
        return image
    if name in ("autocontrast", "equalize"):
        return getattr(ImageOps, name)(image)
    if name == "solarize":
        return ImageOps.solarize(image, 256 * (1 - abs(strength)))
    if name == "posterize":
        return ImageOps.posterize(image, 8 - round(4 * abs(strength)))
    if name in ENHANCE:
        return ENHANCE[name](image).enhance(1 + 0.9 * strength)
    if name == "rotate":
        return image.rotate(30 * strength, Image.Resampling.BILINEAR, fillcolor=GRAY)
    kind, axis = name.split()
    amount = 0.3 * strength
    across, along = ((0, 0), (0, 0))
    if kind == "shear":
        across = (amount, -amount * height / 2) if axis == "x" else (0, 0)
        along = (amount, -amount * width / 2) if axis == "y" else (0, 0)
    else:
        across = (0, amount * width) if axis == "x" else (0, 0)
        along = (0, amount * height) if axis == "y" else (0, 0)
    coefficients = (1, across[0], across[1], along[0], 1, along[1])
    return image.transform(
        image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR, fillcolor=GRAY
    )


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("strength", [-1.0, -0.625, 0.0, 0.3, 0.96875])
def test_each_operation_agrees_with_pillow(name, strength):
    images = pictures(6)
    results = RandAugment(num_ops=1).apply(images, torch.tensor([draws_of((name, strength))] * 6))
    for image, result in zip(images, results, strict=True):
        expected = from_pillow(pillow(to_pillow(image), name, strength))
        difference = (result.int() - expected.int()).abs()
        if name in ("rotate", "shear x", "shear y", "translate x", "translate y"):
            # a point on the very edge of the image may fall on either side of it
            assert (difference > 1).double().mean() < 0.01
        else:
            # rounding of a product may lose a unit, with Pillow or here
            assert difference.max() <= (1 if name in (*ENHANCE, "autocontrast") else 0)
            assert (difference > 0).double().mean() < (0.1 if name == "autocontrast" else 0.01)


@pytest.mark.parametrize(
    "steps",
    [
        (("rotate", 0.8), ("translate x", 0.7)),
        (("translate x", 0.7), ("rotate", 0.8)),
        (("shear x", -0.9), ("rotate", 0.9)),
        (("rotate", 0.9), ("shear x", -0.9)),
        (("shear y", 0.8), ("shear x", 0.8), ("translate y", -0.5)),
    ],
)
def test_moves_are_composed_in_their_order(steps):
    image = smooth_picture(48, 64)
    result = RandAugment(num_ops=len(steps)).apply(image, torch.tensor([draws_of(*steps)]))[0].int()

    def one_by_one(picture, steps):
        for step in steps:
            picture = pillow(picture, *step)
        return from_pillow(picture).int()

    # pixels that no gray has flowed into on the way, where one warp must equal several
    is_clean = (one_by_one(to_pillow(torch.full_like(image[0], 255)), steps) == 255).all(dim=0)
    assert is_clean.double().mean() > 0.4
    difference = (result - one_by_one(to_pillow(image[0]), steps)).abs().amax(dim=0)[is_clean]
    assert (
        difference > 4
    ).double().mean() < 0.005  # each step of several rounds and moves the edge by a little
    backwards = (result - one_by_one(to_pillow(image[0]), steps[::-1])).abs().amax(dim=0)[is_clean]
    assert (backwards > 4).double().mean() > 0.3


@pytest.mark.parametrize(
    "steps",
    [
        (("posterize", 0.8), ("solarize", 0.6)),
        (("solarize", 0.6), ("posterize", 0.8)),
        (("solarize", 0.5), ("equalize", 0.1)),
        (("posterize", 1 - 1 / 64), ("posterize", 0.3), ("equalize", 0.0)),
    ],
)
def test_colors_change_in_their_order(steps):
    images = pictures(4)
    results = RandAugment(num_ops=len(steps)).apply(images, torch.tensor([draws_of(*steps)] * 4))
    for image, result in zip(images, results, strict=True):
        expected = to_pillow(image)
        for step in steps:
            expected = pillow(expected, *step)
        assert_close(result, from_pillow(expected))


def test_each_image_of_a_batch_has_operations_of_its_own():
    images = pictures(len(OPERATIONS))
    draws = torch.tensor([draws_of((name, 0.6), ("identity", 0.0)) for name in OPERATIONS])
    together = RandAugment().apply(images, draws)
    for row in range(len(OPERATIONS)):
        alone = RandAugment().apply(images[row : row + 1], draws[row : row + 1])[0]
        assert_close(together[row], alone)


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
@pytest.mark.parametrize("value", [0, 77, 255])
def test_an_image_of_one_color_keeps_it(name, value):
    image = torch.full((1, 3, 8, 8), value, dtype=torch.uint8)
    assert_close(RandAugment(num_ops=1).apply(image, torch.tensor([draws_of((name, 0.5))])), image)


def test_equalize_of_few_pixels_agrees_with_pillow():
    draws = torch.tensor([draws_of(("equalize", 0.5))])
    for seed, (height, width) in enumerate([(1, 1), (3, 5), (16, 17), (9, 57)]):
        image = pictures(1, height, width, seed)
        expected = from_pillow(ImageOps.equalize(to_pillow(image[0])))
        assert_close(RandAugment(num_ops=1).apply(image, draws)[0], expected)


@pytest.mark.parametrize("augment", [RandAugment(num_ops=0), RandAugment(num_ops=3, magnitude=0)])
def test_nothing_leaves_the_image_alone(augment):
    images = pictures(50)
    draws = torch.rand(50, augment.num_draws, generator=torch.Generator().manual_seed(0))
    for layer in range(augment.num_ops):  # these two have no strength
        names = (draws[:, 2 * layer] * len(OPERATIONS)).long()
        draws[(names == 1) | (names == 2), 2 * layer] = 0
    assert_close(augment.apply(images, draws), images)


def test_half_the_magnitude_is_half_the_strength():
    images = pictures(len(OPERATIONS))
    strong = torch.tensor([draws_of((name, 0.75)) for name in OPERATIONS])
    weak = torch.tensor([draws_of((name, 0.375)) for name in OPERATIONS])
    half, full = RandAugment(num_ops=1, magnitude=5), RandAugment(num_ops=1, magnitude=10)
    assert_close(half.apply(images, strong), full.apply(images, weak))


def test_every_operation_is_equally_frequent():
    num = 60 * len(OPERATIONS)
    image = pictures(1, 20, 20)
    draws = torch.tensor([draws_of((name, 0.9)) for name in OPERATIONS])
    known = RandAugment(num_ops=1).apply(image.expand(len(draws), -1, -1, -1), draws).flatten(1)
    assert len(known.unique(dim=0)) == len(OPERATIONS)  # so a result tells its operation
    drawn = make_draws(2, torch.arange(num), seed=0, epoch=0)
    drawn[:, 1] = 0.95
    results = RandAugment(num_ops=1).apply(image.expand(num, -1, -1, -1), drawn).flatten(1)
    counts = torch.stack([(results == each).all(dim=1).sum() for each in known])
    assert counts.sum() == num
    assert chisquare(counts).pvalue > 1e-3


def test_what_cannot_be_meant_is_refused():
    for values in ({"num_ops": -1}, {"magnitude": 11}, {"magnitude": math.nan}):
        with pytest.raises(ValueError, match=next(iter(values))):
            RandAugment(**values)
    with pytest.raises(ValueError, match="images"):
        RandAugment()(torch.zeros(2, 3, 4, 4), torch.arange(2), seed=0, epoch=0)
