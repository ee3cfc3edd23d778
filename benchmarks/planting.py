"""Data that a benchmark plants: changed copies of pictures, foreign pictures, features on disk."""

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor
from torch.nn import functional

CHANGES = ("crop", "jpeg", "resize", "brightness", "all")
KINDS = ("digit", "grating", "noise", "drawing", "text", "blotches", "building")
# The independent rule moves one picture over another by up to so many pixels of 32, and calls them
# the same from this correlation on.
SHIFT, SAME = 4, 0.9

# Spread of the centers of classes: a vote of 20 neighbors is mostly right, a single one for half.
OVERLAP = 0.25


class Planted(NamedTuple):
    """Pictures, at the end of which stand those that were planted."""

    images: Tensor  # (N, 3, H, W) uint8
    pairs: set[tuple[int, int]]  # original and planted
    changes: dict[tuple[int, int], str]


def plant(images: Tensor, num: int, seed: int) -> Planted:
    """Add changed versions of the first `num` pictures, the kinds of change taking turns."""
    draw = np.random.default_rng(seed)
    changes = {(at, len(images) + at): CHANGES[at % len(CHANGES)] for at in range(num)}
    copies = [changed(images[original], kind, draw) for (original, _), kind in changes.items()]
    return Planted(torch.cat([images, torch.stack(copies)]), set(changes), changes)


def changed(image: Tensor, kind: str, draw: np.random.Generator) -> Tensor:
    """The picture cut by up to an eighth, compressed, resized, or with another brightness."""
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    side = picture.width
    if kind in ("crop", "all"):
        cut = int(draw.integers(1, 5)) * side // 32
        left, top = (int(each) for each in draw.integers(0, cut + 1, 2))
        picture = picture.crop((left, top, left + side - cut, top + side - cut))
        picture = picture.resize((side, side), Image.Resampling.BICUBIC)
    if kind in ("brightness", "all"):
        picture = ImageEnhance.Brightness(picture).enhance(1 + float(draw.choice([-0.05, 0.05])))
    if kind in ("jpeg", "all"):
        content = io.BytesIO()
        picture.save(content, "JPEG", quality=int(draw.integers(60, 96)))
        picture = Image.open(content).convert("RGB")
    if kind == "resize":
        smaller = int(draw.integers(20, 29)) * side // 32
        picture = picture.resize((smaller, smaller), Image.Resampling.BILINEAR)
        picture = picture.resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def photographs(side: int = 224, tile: int = 48) -> Tensor:
    """(N, 3, side, side) enlarged tiles of two photographs that do not overlap and show detail."""
    found = []
    for photo in load_sample_images().images:
        for top in range(0, photo.shape[0] - tile + 1, tile):
            for left in range(0, photo.shape[1] - tile + 1, tile):
                part = photo[top : top + tile, left : left + tile]
                if part.mean(axis=2).std() > 20:
                    picture = Image.fromarray(part).resize((side, side), Image.Resampling.BICUBIC)
                    found.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    return torch.stack(found)


def foreign(num: int, seed: int) -> tuple[Tensor, list[str]]:
    """(num, 3, 32, 32) pictures of other kinds, which take turns, and their kinds."""
    draw = np.random.default_rng(seed)
    kinds = [KINDS[at % len(KINDS)] for at in range(num)]
    found = [_foreign(kind, draw) for kind in kinds]
    return torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in found]), kinds


def _foreign(kind: str, draw: np.random.Generator) -> Image.Image:
    if kind == "digit":
        levels = (load_digits().images[draw.integers(1797)] * 15).astype(np.uint8)
        return Image.fromarray(levels).resize((32, 32), Image.Resampling.BICUBIC).convert("RGB")
    if kind == "grating":
        across, down = np.meshgrid(np.arange(32), np.arange(32))
        angle, frequency, phase = draw.uniform(0, np.pi), draw.uniform(0.2, 2), draw.uniform(0, 6)
        wave = np.sin(frequency * (across * np.cos(angle) + down * np.sin(angle)) + phase)
        return Image.fromarray(
            (127 + 120 * wave[:, :, None] * draw.uniform(-1, 1, 3)).astype(np.uint8)
        )
    if kind in ("noise", "blotches"):
        levels = Image.fromarray(draw.integers(0, 256, (48, 48, 3)).astype(np.uint8))
        if kind == "noise":
            return levels.crop((8, 8, 40, 40))
        smooth = np.asarray(
            levels.filter(ImageFilter.GaussianBlur(draw.uniform(0.6, 3))).crop((8, 8, 40, 40)),
            float,
        )
        return Image.fromarray(
            (128 + (smooth - smooth.mean()) * 60 / smooth.std()).clip(0, 255).astype(np.uint8)
        )
    if kind == "building":
        photo = load_sample_images().images[0]
        top, left = (int(draw.integers(0, size - 128)) for size in photo.shape[:2])
        part = Image.fromarray(photo[top : top + 128, left : left + 128])
        return part.resize((32, 32), Image.Resampling.BILINEAR)
    return _drawn(kind, draw).resize((32, 32), Image.Resampling.BILINEAR)


def _drawn(kind: str, draw: np.random.Generator) -> Image.Image:
    """Lines, or letters, on a bright sheet."""
    sheet = Image.new("RGB", (64, 64), tuple(draw.integers(200, 256, 3).tolist()))
    pen = ImageDraw.Draw(sheet)
    if kind == "drawing":
        for _ in range(draw.integers(2, 6)):
            points = [tuple(draw.integers(0, 64, 2).tolist()) for _ in range(draw.integers(2, 5))]
            pen.line(
                points,
                fill=tuple(draw.integers(0, 200, 3).tolist()),
                width=int(draw.integers(1, 4)),
            )
    else:
        for row in range(0, 64, 12):
            pen.text(
                (2, row), "".join(draw.choice(list("abcdefghij klmnop"), 12)), fill=(40, 40, 60)
            )
    return sheet


def is_same(images: Tensor, pairs: Tensor) -> Tensor:
    """(P,) bool by a rule independent of the search: gray pixels correlate after a shift."""
    gray = functional.interpolate(
        images[pairs.flatten()].float().mean(dim=1, keepdim=True), size=(32, 32), mode="area"
    )
    one, other = gray[:, 0].reshape(-1, 2, 32, 32).unbind(dim=1)
    middle = _standard(one[:, SHIFT:-SHIFT, SHIFT:-SHIFT])
    best = torch.full((len(pairs),), -1.0)
    for down in range(2 * SHIFT + 1):
        for right in range(2 * SHIFT + 1):
            moved = _standard(
                other[:, down : down + 32 - 2 * SHIFT, right : right + 32 - 2 * SHIFT]
            )
            best = torch.maximum(best, (middle * moved).sum(dim=1))
    return best >= SAME


def _standard(patches: Tensor) -> Tensor:
    flat = patches.flatten(1) - patches.flatten(1).mean(dim=1, keepdim=True)
    return flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-6)


def write_features(
    path: Path, clean: Tensor, num_classes: int
) -> Any:  # an array that stays on disk
    """(N, 512) float16: near centers, 64 directions with variances that fall as 1/i, and noise."""
    drawn = torch.Generator().manual_seed(1)
    centers = torch.randn(num_classes, 512, generator=drawn)
    spreads = 3 / torch.arange(1, 65).sqrt()
    mixing = torch.randn(64, 512, generator=drawn) / 8 * spreads[:, None]
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(len(clean), 512))
    for start in range(0, len(clean), 20_000):
        some = clean[start : start + 20_000]
        inside = torch.randn(len(some), 64, generator=drawn) @ mixing
        values = (
            OVERLAP * centers[some] + inside + 0.1 * torch.randn(len(some), 512, generator=drawn)
        )
        rows[start : start + len(some)] = values.clamp(min=0).half().numpy()
    rows.flush()
    return np.load(path, mmap_mode="r")
