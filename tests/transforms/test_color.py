import colorsys
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch.testing import assert_close

from nearsay.transforms import CIFAR10_COLORS, PLUS_MINUS_ONE, ColorJitter, Normalize
from nearsay.transforms.color import turn_hue

NOTHING = ColorJitter(brightness=0, contrast=0, saturation=0, hue=0)
DRAWS = [0.0, 0.2, 0.5, 0.77, 1 - 2.0**-24]


def pictures(num, height=6, width=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, 3, height, width), dtype=torch.uint8, generator=draw)


def clamped(values):
    return np.clip(values, 0, 1)


def jitter_oracle(image, draws, jitter):
    """(H, W, 3) in [0, 1], one operation after another in float64, hue by the standard library."""

    def factor(spread, draw):
        return max(0, 1 - spread) + (1 + spread - max(0, 1 - spread)) * draw

    def luma(values):
        return (values * [0.299, 0.587, 0.114]).sum(axis=-1, keepdims=True)

    image = clamped(image * factor(jitter.brightness, draws[0]))
    by = factor(jitter.contrast, draws[1])
    image = clamped(luma(image).mean() * (1 - by) + image * by)
    by = factor(jitter.saturation, draws[2])
    image = clamped(luma(image) * (1 - by) + image * by)
    turn = (2 * draws[3] - 1) * jitter.hue
    for pixel in image.reshape(-1, 3):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        pixel[:] = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
    return image


@pytest.mark.parametrize(
    "jitter",
    [
        replace(NOTHING, brightness=0.8),
        replace(NOTHING, contrast=0.8),
        replace(NOTHING, saturation=1.7),
        replace(NOTHING, hue=0.5),
        ColorJitter(brightness=1.5, contrast=1.2, saturation=0.3, hue=0.3),
    ],
)
def test_jitter_follows_the_scalar_formulas_in_the_order_it_states(jitter):
    images = pictures(40)
    draws = torch.rand(40, 4, generator=torch.Generator().manual_seed(1))
    inputs = images.permute(0, 2, 3, 1).double().numpy() / 255
    expected = np.stack(
        [jitter_oracle(*pair, jitter) for pair in zip(inputs, draws.double().tolist(), strict=True)]
    )
    expected = expected.transpose(0, 3, 1, 2)
    exact = jitter.apply(images.double() / 255, draws)
    assert_close(exact, torch.tensor(expected))
    assert_close(jitter.apply(images.float() / 255, draws), exact.float(), rtol=0, atol=1e-5)
    bytes_ = jitter.apply(images, draws)
    assert bytes_.dtype == torch.uint8
    assert ((bytes_.double() / 255 - exact).abs() <= 0.501 / 255).all()


@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ],
)
@pytest.mark.parametrize("draw", DRAWS)
def test_jitter_agrees_with_pillow(name, enhance, draw):
    images = pictures(5, 16, 16)
    jittered = replace(NOTHING, **{name: 0.8}).apply(images, torch.full((5, 4), draw))
    for image, result in zip(images, jittered, strict=True):
        theirs = enhance(Image.fromarray(image.permute(1, 2, 0).numpy())).enhance(0.2 + 1.6 * draw)
        difference = result.permute(1, 2, 0).numpy().astype(int) - np.asarray(theirs)
        assert np.abs(difference).max() <= 2  # Pillow drops fractions, twice


@pytest.mark.parametrize("turns", [-0.5, -1 / 3, 0.0, 0.25, 1.0])
def test_turning_the_hue_agrees_with_the_standard_library(turns):
    levels = torch.tensor([0, 0.25, 0.5, 1.0], dtype=torch.float64)
    corners = torch.cartesian_prod(levels, levels, levels)  # (64, 3)
    turn = torch.full((1, 1, 1, 1), turns, dtype=torch.float64)
    turned = turn_hue(corners.T[None, :, :, None], turn)[0, :, :, 0].T
    for before, after in zip(corners.tolist(), turned.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        expected = colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value)
        assert after == pytest.approx(expected, abs=1e-12)


def test_jitter_of_nothing_changes_nothing():
    images, draws = pictures(9), torch.rand(9, 4)
    assert_close(NOTHING.apply(images, draws), images)
    assert_close(NOTHING.apply(images / 255, draws), images / 255, rtol=0, atol=0)


@pytest.mark.parametrize("colors", [CIFAR10_COLORS, PLUS_MINUS_ONE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_normalize_scales_bytes_and_standardizes_channels(colors, dtype):
    images = pictures(4)
    mean, std = (torch.tensor(x).double()[:, None, None] for x in (colors.mean, colors.std))
    expected = ((images.double() / 255 - mean) / std).to(getattr(torch, dtype))
    for inputs in (images, images.float() / 255, images.double() / 255):
        result = replace(colors, dtype=dtype)(inputs, torch.arange(4), seed=0, epoch=0)
        # zero is a difference of ones
        assert_close(result, expected, **{"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {})


def test_plus_minus_one_reaches_exactly_both():
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    found = PLUS_MINUS_ONE.apply(ends, torch.zeros(2, 0)).flatten()
    assert found.tolist() == [-1.0] * 3 + [1.0] * 3


def test_what_cannot_be_meant_is_refused():
    for values in ({"brightness": -0.1}, {"contrast": math.nan}, {"hue": 0.6}):
        with pytest.raises(ValueError, match=next(iter(values))):
            ColorJitter(**values)
    for field, value in (("mean", (0, 0)), ("mean", (0, 0, math.nan)), ("std", (1, 0, 1))):
        with pytest.raises(ValueError, match=field):
            Normalize(**{"mean": (0, 0, 0), "std": (1, 1, 1), field: value})
    with pytest.raises(ValueError, match="dtype"):
        replace(CIFAR10_COLORS, dtype="int8")
