"""What the pictures themselves show: who is the same picture twice, and who looks like no other.

A network's features of two versions of a picture may differ as much as those of two strangers, as it was taught to see
classes and no pictures. Here candidates are those whose tiny color versions are most alike, as a whole or with a margin
cut off one of them; only pictures of which the same few are most typical are compared. Two candidates are the same
picture if the fine structure of one, cut by up to an eighth in any place, correlates with that of the other.

Foreign pictures (drawings among photographs, noise, another camera) differ in plain statistics: how bright and colorful
they are, and how much detail there is of each size. What is usual is learned from the three quarters most so.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

SIDE = 32  # pixels of a thumbnail, at most
LEAST_SIDE = 16  # smaller pictures of different things are too much alike
_COARSE = 16  # pixels at which most candidates are refused
_COLORS = 12  # pixels of the color version that is kept
_FIELDS = 8  # pixels at which color versions are compared
_MARGIN = 3  # thirty-seconds of the side that are cut off a color version: half a cut too much or too little is left
_CANDIDATES = 8
_ALIKE = 0.92  # correlation of color versions, at least
_ASKED = 8  # cells, each around a picture, in which candidates are looked for
_QUERIES = 2**15  # color versions compared at a time
_COARSE_MATCH, _MATCH = 0.9, 0.92  # correlations of the fine structure, at least
_CUTS = ((0, 2, 4), (0, 1, 2, 3, 4))  # thirty-seconds of the side that may be missing: coarse, fine
_CONTRAST = 1.0  # gray levels of fine structure, below which there is nothing to see
_LUMA = (0.299, 0.587, 0.114)
_OCTAVES = 4  # sizes of detail, each twice the one before
_USUAL = 0.75  # share of the pictures by which the others are judged
_FARTHEST = 20.0  # typical deviations that a statistic counts at most
_CHUNK = 2**24  # numbers held at a time


class Thumbnails(NamedTuple):
    """What is kept of N pictures to tell whether two are the same; about a kilobyte of each."""

    gray: Tensor  # (N, S, S) uint8
    colors: Tensor  # (N, 3, 12, 12) uint8
    statistics: (
        Tensor  # (N, 18) float32: brightness, color, and how much detail there is of each size
    )


def shrink(images: Tensor) -> Thumbnails:
    """Thumbnails of (N, 3, H, W) uint8 images that are all of one size."""
    if (
        images.dtype != torch.uint8
        or images.ndim != 4
        or images.shape[1] != 3
        or 0 in images.shape[2:]
    ):
        raise ValueError(
            f"images of shape {tuple(images.shape)} and {images.dtype} must be (N, 3, H, W) of uint8"
        )
    side = max(1, min(SIDE, *images.shape[2:]))
    grays, colors, statistics = [], [], []
    for some in torch.split(images, max(1, _CHUNK // max(1, images[:1].numel()))):
        pixels = some.float()
        luma = (pixels * pixels.new_tensor(_LUMA)[:, None, None]).sum(dim=1, keepdim=True)
        statistics.append(_statistics(_resized(pixels, SIDE)).cpu())
        grays.append(_resized(luma, side)[:, 0].round().to(torch.uint8).cpu())
        colors.append(_resized(pixels, _COLORS).round().to(torch.uint8).cpu())
    return Thumbnails(torch.cat(grays), torch.cat(colors), torch.cat(statistics))


def shrink_each(images: Iterable[Any]) -> Thumbnails:
    """Thumbnails of pictures of any size, (H, W, 3) uint8 arrays that come one after another and are not kept."""
    found = []
    for image in images:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        gray, colors, statistics = shrink(pixels)
        if gray.shape[1] < SIDE:  # all must be of one size
            gray = _resized(gray[:, None].float(), SIDE)[:, 0].round().to(torch.uint8)
        found.append((gray, colors, statistics))
    return Thumbnails(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def same_pictures(thumbnails: Thumbnails) -> Tensor:
    """(P, 2) positions of pictures that are the same, each pair once; none for pictures below 16 pixels."""
    gray = thumbnails.gray
    if len(gray) < 2 or gray.shape[1] < LEAST_SIDE:
        return torch.empty(0, 2, dtype=torch.int64)
    pairs = _candidates(thumbnails)
    is_equal = torch.cat(
        [(gray[a] == gray[b]).flatten(1).all(dim=1) for a, b in _chunks(pairs, gray[0].numel())]
    )
    equal, pairs = pairs[is_equal], pairs[~is_equal]
    for side, cuts, least in (
        (_COARSE, _CUTS[0], _COARSE_MATCH),
        (gray.shape[1], _CUTS[1], _MATCH),
    ):
        pairs = pairs[_matches(gray, pairs, side, cuts) >= least]
    return torch.cat([equal, pairs])


def usualness(thumbnails: Thumbnails) -> Tensor:
    """(N,) from 0 to 1: the typical distance from what is usual over one's own, low for what looks like no other."""
    values = thumbnails.statistics.double()
    values = values - values.median(dim=0).values
    values = values / values.abs().median(dim=0).values.clamp(min=1e-6)
    values = values.clamp(-_FARTHEST, _FARTHEST)
    distances = values.square().sum(dim=1)
    for share in (
        0.5,
        *[_USUAL] * 5,
    ):  # the first half by each statistic alone: many of one foreign kind hide nothing
        usual = values[distances <= distances.quantile(share)]
        center = usual.mean(dim=0)
        spread = (usual - center).T @ (usual - center) / len(usual) + 1e-3 * torch.eye(
            values.shape[1]
        )
        distances = (
            ((values - center) @ torch.linalg.inv(spread) * (values - center))
            .sum(dim=1)
            .clamp(min=0)
            .sqrt()
        )
    ratios: Tensor = distances.median() / distances.clamp(min=1e-12)
    return ratios.clamp(max=1).float()


def _candidates(thumbnails: Thumbnails) -> Tensor:
    """(P, 2) the smaller position first."""
    whole = _color_versions(thumbnails.colors, 0, 0, 0)  # (N, 192)
    num = len(whole)
    centers = whole[torch.linspace(0, num - 1, max(1, min(round(2 * num**0.5), num // 64))).long()]
    homes = torch.cat([(some @ centers.T).argmax(dim=1) for some in torch.split(whole, _QUERIES)])
    members = torch.split(
        homes.argsort(stable=True), torch.bincount(homes, minlength=len(centers)).tolist()
    )
    half, full = _MARGIN / 2, _MARGIN
    found = []
    for cut, top, left in (
        (0, 0, 0),
        *[(full, *at) for at in ((0, 0), (0, full), (full, 0), (full, full), (half, half))],
    ):
        for start in range(0, num, _QUERIES):
            queries = _color_versions(thumbnails.colors[start : start + _QUERIES], cut, top, left)
            found += [_alike(queries, start, whole, centers, members)]
    triples = torch.cat(found)  # row, column, similarity
    unique: Tensor = torch.unique(
        torch.cat([_best_of_each(triples), _flat_pairs(thumbnails)]), dim=0
    )
    return unique


def _alike(
    queries: Tensor, start: int, whole: Tensor, centers: Tensor, members: tuple[Tensor, ...]
) -> Tensor:
    """(n, 3) float64: picture, another that is alike, and how much; of the queries, which are from `start` on."""
    asked = (queries @ centers.T).topk(min(_ASKED, len(centers)), dim=1, sorted=False).indices
    by_cell = asked.flatten().argsort(stable=True) // asked.shape[1]
    askers = torch.split(by_cell, torch.bincount(asked.flatten(), minlength=len(centers)).tolist())
    found = [torch.empty(0, 3, dtype=torch.float64)]
    for rows, keys in zip(askers, members, strict=True):
        if not len(rows) or not len(keys):
            continue
        similarities = queries[rows] @ whole[keys].T
        kept = (similarities.amax(dim=1) >= _ALIKE).nonzero()[:, 0]
        best = similarities[kept].topk(min(_CANDIDATES + 1, len(keys)), dim=1)  # one may be itself
        others, own = keys[best.indices], start + rows[kept]
        row, place = ((best.values >= _ALIKE) & (others != own[:, None])).nonzero().unbind(dim=1)
        found.append(
            torch.stack(
                [own[row].double(), others[row, place].double(), best.values[row, place].double()],
                1,
            )
        )
    return torch.cat(found)


def _best_of_each(triples: Tensor) -> Tensor:
    """(P, 2) the candidates most alike of each picture, as many as are looked at; the smaller position first."""
    triples = triples[triples[:, 2].argsort(descending=True, stable=True)]
    triples = triples[triples[:, 0].argsort(stable=True)]  # by picture, the most alike first
    _, sizes = torch.unique_consecutive(triples[:, 0], return_counts=True)
    place = torch.arange(len(triples)) - (sizes.cumsum(dim=0) - sizes).repeat_interleave(sizes)
    is_kept = place < 2 * _CANDIDATES  # the same one may be found whole and cut
    return triples[is_kept, :2].long().sort(dim=1).values


def _color_versions(colors: Tensor, cut: float, top: float, left: float) -> Tensor:
    """(N, 192) float32 of length 1 and without their mean: without a margin of `cut`; zeros for one color."""
    rows, columns = (_fields(start, SIDE - cut) for start in (top, left))
    found = (rows @ colors.float() @ columns.T).flatten(1)
    found = found - found.mean(dim=1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(found, dim=1, keepdim=True)
    return (found / length).where(length > 1e-1, 0.0)


def _fields(start: float, size: float) -> Tensor:
    """(8, 12) what takes `size` thirty-seconds of a row of pixels, from `start` on, to the means of eight fields."""
    edges = (start + size * torch.arange(_FIELDS + 1) / _FIELDS) * _COLORS / SIDE
    at = torch.arange(_COLORS)
    shares = torch.minimum(edges[1:, None], at + 1) - torch.maximum(edges[:-1, None], at)
    return shares.clamp(min=0) * (_FIELDS * SIDE / (_COLORS * size))


def _flat_pairs(thumbnails: Thumbnails) -> Tensor:
    """(P, 2) each picture of one color with the one before of the same color."""
    tiny = thumbnails.colors.flatten(2)
    flat = (tiny.amax(dim=2) == tiny.amin(dim=2)).all(dim=1).nonzero()[:, 0]
    colors = (tiny[flat, :, 0].long() * torch.tensor([2**16, 2**8, 1])).sum(dim=1)
    colors, order = colors.sort(stable=True)
    flat = flat[order]
    return torch.stack([flat[:-1], flat[1:]], dim=1)[colors[1:] == colors[:-1]]


def _matches(gray: Tensor, pairs: Tensor, side: int, cuts: tuple[int, ...]) -> Tensor:
    """(P,) the best correlation of the fine structure of one with that of a part of the other, both ways round."""
    best = torch.full((len(pairs),), -1.0)
    if not len(pairs):
        return best
    members, which = torch.unique(pairs, return_inverse=True)
    levels = _resized(gray[members][:, None].float(), side)[:, 0]  # (n, S, S)
    structure = _structure(side).T
    whole = _directions(levels.flatten(1) @ structure)
    for cut in cuts:
        sampled = [
            _part(side, start * side / SIDE, side - cut * side / SIDE) for start in range(cut + 1)
        ]
        for down in sampled:
            narrowed = down @ levels
            for across in sampled:
                part = _directions((narrowed @ across.T).flatten(1) @ structure)
                found = [
                    torch.maximum(
                        (part[one] * whole[other]).sum(dim=1), (whole[one] * part[other]).sum(dim=1)
                    )
                    for one, other in _chunks(which, side**2)
                ]
                best = torch.maximum(best, torch.cat(found))
    return best


def _directions(structures: Tensor) -> Tensor:
    """(n, S²) of length 1, shorter where there is hardly anything to see."""
    least = _CONTRAST * structures.shape[1] ** 0.5
    length: Tensor = torch.linalg.vector_norm(structures, dim=1, keepdim=True)
    return structures / length.clamp(min=least)


def _structure(side: int) -> Tensor:
    """(S², S²) what takes a picture to its details: smoothed over three pixels, less the mean of seven around."""
    smooth, around = _window(side, (0.25, 0.5, 0.25)), _window(side, (1 / 7,) * 7)
    details = torch.kron(smooth, smooth) - torch.kron(around @ smooth, around @ smooth)
    return details - details.mean(dim=0)


def _window(side: int, weights: tuple[float, ...]) -> Tensor:
    """(S, S) weighted means of the pixels around each, where the last pixel goes on beyond the edge."""
    found = torch.zeros(side, side)
    at = torch.arange(side)
    for offset, weight in enumerate(weights, start=-(len(weights) // 2)):
        found[at, (at + offset).clamp(0, side - 1)] += weight
    return found


def _part(side: int, start: float, size: float) -> Tensor:
    """(S, S) what takes a row of pixels to `size` of them from `start` on, stretched to the whole length."""
    at = (start + size * (torch.arange(side) + 0.5) / side - 0.5).clamp(0, side - 1)
    left = at.floor().long().clamp(max=side - 2)
    found = torch.zeros(side, side)
    found[torch.arange(side), left] = 1 - (at - left)
    found[torch.arange(side), left + 1] = at - left
    return found


def _statistics(pixels: Tensor) -> Tensor:
    """(N, 18) of (N, 3, 32, 32): means, deviations and details by octave, of brightness and two color differences."""
    red, green, blue = pixels[:, :1], pixels[:, 1:2], pixels[:, 2:]
    rest = torch.cat([pixels.mean(dim=1, keepdim=True), red - green, blue - green], dim=1)
    found = [rest.mean(dim=(2, 3)), rest.flatten(2).std(dim=2).log1p()]
    for _ in range(_OCTAVES):
        coarser = functional.avg_pool2d(rest, 2)
        detail = rest - functional.interpolate(coarser, scale_factor=2)
        found.append((detail.square().mean(dim=(2, 3)).sqrt() + 0.5).log())
        rest = coarser
    return torch.cat(found, dim=1)


def _resized(pixels: Tensor, side: int) -> Tensor:
    """(N, c, S, S), where shrunk without aliasing."""
    if tuple(pixels.shape[2:]) == (side, side):
        return pixels
    return functional.interpolate(pixels, size=(side, side), mode="bilinear", antialias=True).clamp(
        0, 255
    )


def _chunks(pairs: Tensor, width: int) -> list[tuple[Tensor, Tensor]]:
    """The pairs, so many at a time that twice `width` numbers of each can be held."""
    return [(some[:, 0], some[:, 1]) for some in torch.split(pairs, max(1, _CHUNK // width))]
