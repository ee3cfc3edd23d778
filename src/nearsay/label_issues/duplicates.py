"""Near-duplicates and unusual images, found in the pixels.

The features of two versions of one picture may differ as much as those of two different pictures,
because the network learned to see classes. So duplicates are found in three steps:
1. candidates: pictures with similar tiny color versions, as a whole or with a margin cut off one of
   them; only pictures near the same few centers are compared;
2. pixels that are equal;
3. fine structure: that of one picture, cut by up to an eighth at any place, correlates with that of
   the other, first at 16 pixels, then at full size.

Unusual pictures (drawings among photographs, noise, another camera) differ in plain statistics:
brightness, color, and the amount of detail of each size. The usual values are learned from the
three quarters that are most typical.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Pixels of a thumbnail, at most. Below the second number, different pictures look too much alike.
SIDE, LEAST_SIDE = 32, 16
# Pixels of the first comparison of fine structure, which refuses most candidates.
_COARSE = 16
# Pixels of the color version that is kept, and at which color versions are compared.
_COLORS, _FIELDS = 12, 8
# Thirty-seconds of the side that are cut off a color version. If a picture lost up to twice as
# much, at most half a cut is left over.
_MARGIN = 3
# Candidates per picture, and the least correlation of their color versions.
_CANDIDATES, _ALIKE = 8, 0.92
# Cells, each around one picture, in which candidates are searched.
_PROBED = 8
# Color versions compared at a time.
_QUERIES = 2**15
# Least correlations of the fine structure.
_COARSE_MATCH, _MATCH = 0.9, 0.92
# Thirty-seconds of the side that may be missing, in the coarse and in the fine comparison.
_CUTS = ((0, 2, 4), (0, 1, 2, 3, 4))
# Gray levels of fine structure below which a picture shows nothing.
_CONTRAST = 1.0
_LUMA = (0.299, 0.587, 0.114)
# Sizes of detail, each twice the one before.
_OCTAVES = 4
# Share of the pictures that define what is usual.
_USUAL = 0.75
# A statistic counts at most as this many typical deviations.
_FARTHEST = 20.0
# Numbers in memory at a time.
_CHUNK = 2**24


class Thumbnails(NamedTuple):
    """All that is kept of N pictures to compare them: about a kilobyte each."""

    gray: Tensor  # (N, S, S) uint8
    colors: Tensor  # (N, 3, 12, 12) uint8
    statistics: Tensor  # (N, 18) float32: brightness, color, and amount of detail by size


def shrink(images: Tensor) -> Thumbnails:
    """Thumbnails of (N, 3, H, W) uint8 images of one size."""
    is_images = images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] == 3
    if not is_images or 0 in images.shape[2:]:
        raise ValueError(
            "images must be an (N, 3, H, W) array of uint8, "
            f"got {tuple(images.shape)} of {images.dtype}."
        )
    side = max(1, min(SIDE, *images.shape[2:]))
    grays, colors, statistics = [], [], []
    for chunk in torch.split(images, max(1, _CHUNK // max(1, images[:1].numel()))):
        pixels = chunk.float()
        luma = (pixels * pixels.new_tensor(_LUMA)[:, None, None]).sum(dim=1, keepdim=True)
        statistics.append(_statistics(_resized(pixels, SIDE)).cpu())
        grays.append(_resized(luma, side)[:, 0].round().to(torch.uint8).cpu())
        colors.append(_resized(pixels, _COLORS).round().to(torch.uint8).cpu())
    return Thumbnails(torch.cat(grays), torch.cat(colors), torch.cat(statistics))


def shrink_each(images: Iterable[Any]) -> Thumbnails:
    """Thumbnails of a stream of (H, W, 3) uint8 arrays of any size, which are not kept."""
    thumbnails = []
    for image in images:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        gray, colors, statistics = shrink(pixels)
        # All thumbnails must have one size.
        if gray.shape[1] < SIDE:
            gray = _resized(gray[:, None].float(), SIDE)[:, 0].round().to(torch.uint8)
        thumbnails.append((gray, colors, statistics))
    return Thumbnails(*(torch.cat(parts) for parts in zip(*thumbnails, strict=True)))


def same_pictures(thumbnails: Thumbnails) -> Tensor:
    """(P, 2) positions of pictures that are the same, each pair once; none below 16 pixels."""
    gray = thumbnails.gray
    if len(gray) < 2 or gray.shape[1] < LEAST_SIDE:
        return torch.empty(0, 2, dtype=torch.int64)
    pairs = _candidates(thumbnails)
    equal = []
    for one, other in _chunks(pairs, gray[0].numel()):
        equal.append((gray[one] == gray[other]).flatten(1).all(dim=1))
    is_equal = torch.cat(equal)
    identical, pairs = pairs[is_equal], pairs[~is_equal]
    # Refuse most pairs at a coarse size, because the fine comparison costs far more.
    pairs = pairs[_matches(gray, pairs, _COARSE, _CUTS[0]) >= _COARSE_MATCH]
    pairs = pairs[_matches(gray, pairs, gray.shape[1], _CUTS[1]) >= _MATCH]
    return torch.cat([identical, pairs])


def typicality_score(thumbnails: Thumbnails) -> Tensor:
    """(N,) from 0 to 1: the median distance from the usual over one's own, low if unusual."""
    values = thumbnails.statistics.double()
    values = values - values.median(dim=0).values
    values = values / values.abs().median(dim=0).values.clamp(min=1e-6)
    values = values.clamp(-_FARTHEST, _FARTHEST)
    # The first half is chosen by each statistic alone, so that many pictures of one unusual kind
    # cannot define what is usual. The next rounds use the Mahalanobis distance.
    distances = values.square().sum(dim=1)
    for share in (0.5, *[_USUAL] * 5):
        usual = values[distances <= distances.quantile(share)]
        center = usual.mean(dim=0)
        covariance = (usual - center).T @ (usual - center) / len(usual)
        # A small multiple of the identity makes it invertible.
        covariance = covariance + 1e-3 * torch.eye(values.shape[1])
        centered = values - center
        squares = (centered @ torch.linalg.inv(covariance) * centered).sum(dim=1)
        distances = squares.clamp(min=0).sqrt()
    ratios: Tensor = distances.median() / distances.clamp(min=1e-12)
    return ratios.clamp(max=1).float()


def _candidates(thumbnails: Thumbnails) -> Tensor:
    """(P, 2) pairs with similar color versions, the smaller position first."""
    whole = _color_versions(thumbnails.colors, 0, 0, 0)  # (N, 192)
    num = len(whole)
    # About 2√N pictures are centers of cells, and each picture belongs to the nearest center.
    num_centers = max(1, min(round(2 * num**0.5), num // 64))
    centers = whole[torch.linspace(0, num - 1, num_centers).long()]
    cells = []
    for chunk in torch.split(whole, _QUERIES):
        cells.append((chunk @ centers.T).argmax(dim=1))
    cell = torch.cat(cells)
    sizes = torch.bincount(cell, minlength=len(centers)).tolist()
    members = torch.split(cell.argsort(stable=True), sizes)
    # The whole picture is compared with whole ones and with those without a margin: at each of the
    # four corners, and on all sides.
    half, full = _MARGIN / 2, _MARGIN
    cuts = [(0, 0, 0), (full, 0, 0), (full, 0, full), (full, full, 0), (full, full, full)]
    found = []
    for cut, top, left in (*cuts, (full, half, half)):
        for start in range(0, num, _QUERIES):
            queries = _color_versions(thumbnails.colors[start : start + _QUERIES], cut, top, left)
            found.append(_similar(queries, start, whole, centers, members))
    triples = torch.cat(found)  # row, column, similarity
    pairs = torch.cat([_best_candidates(triples), _flat_pairs(thumbnails)])
    unique: Tensor = torch.unique(pairs, dim=0)
    return unique


def _similar(
    queries: Tensor, start: int, whole: Tensor, centers: Tensor, members: tuple[Tensor, ...]
) -> Tensor:
    """(n, 3) float64: query, other picture, similarity; the first query is picture `start`."""
    num_probed = min(_PROBED, len(centers))
    probed = (queries @ centers.T).topk(num_probed, dim=1, sorted=False).indices
    # Group the queries by cell, so that each cell is one matrix product.
    by_cell = probed.flatten().argsort(stable=True) // num_probed
    sizes = torch.bincount(probed.flatten(), minlength=len(centers)).tolist()
    found = [torch.empty(0, 3, dtype=torch.float64)]
    for rows, keys in zip(torch.split(by_cell, sizes), members, strict=True):
        if not len(rows) or not len(keys):
            continue
        similarities = queries[rows] @ whole[keys].T
        kept = (similarities.amax(dim=1) >= _ALIKE).nonzero()[:, 0]
        # One more than needed, because one may be the picture itself.
        best = similarities[kept].topk(min(_CANDIDATES + 1, len(keys)), dim=1)
        others, own = keys[best.indices], start + rows[kept]
        row, place = ((best.values >= _ALIKE) & (others != own[:, None])).nonzero().unbind(dim=1)
        columns = (own[row], others[row, place], best.values[row, place])
        found.append(torch.stack([column.double() for column in columns], 1))
    return torch.cat(found)


def _best_candidates(triples: Tensor) -> Tensor:
    """(P, 2) the most similar candidates of each picture; the smaller position first."""
    # Two stable sorts: by picture, and within a picture the most similar first.
    triples = triples[triples[:, 2].argsort(descending=True, stable=True)]
    triples = triples[triples[:, 0].argsort(stable=True)]
    _, sizes = torch.unique_consecutive(triples[:, 0], return_counts=True)
    # The place of each row within its picture.
    starts = (sizes.cumsum(dim=0) - sizes).repeat_interleave(sizes)
    place = torch.arange(len(triples)) - starts
    # Twice as many, as the same candidate may be found whole and cut.
    is_kept = place < 2 * _CANDIDATES
    return triples[is_kept, :2].long().sort(dim=1).values


def _color_versions(colors: Tensor, cut: float, top: float, left: float) -> Tensor:
    """(N, 192) float32 color versions without a margin of `cut`, centered and of length 1.

    A picture of one color becomes zeros.
    """
    rows, columns = _fields(top, SIDE - cut), _fields(left, SIDE - cut)
    version = (rows @ colors.float() @ columns.T).flatten(1)
    version = version - version.mean(dim=1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(version, dim=1, keepdim=True)
    return (version / length).where(length > 1e-1, 0.0)


def _fields(start: float, size: float) -> Tensor:
    """(8, 12) matrix from a row of pixels to means of eight fields.

    The fields cover `size` thirty-seconds of the row, from `start` on.
    """
    edges = (start + size * torch.arange(_FIELDS + 1) / _FIELDS) * _COLORS / SIDE
    at = torch.arange(_COLORS)
    # The overlap of each field with each pixel.
    shares = torch.minimum(edges[1:, None], at + 1) - torch.maximum(edges[:-1, None], at)
    return shares.clamp(min=0) * (_FIELDS * SIDE / (_COLORS * size))


def _flat_pairs(thumbnails: Thumbnails) -> Tensor:
    """(P, 2) each picture of a single color with the one before of the same color."""
    tiny = thumbnails.colors.flatten(2)
    flat = (tiny.amax(dim=2) == tiny.amin(dim=2)).all(dim=1).nonzero()[:, 0]
    # Red, green and blue as one number.
    colors = (tiny[flat, :, 0].long() * torch.tensor([2**16, 2**8, 1])).sum(dim=1)
    colors, order = colors.sort(stable=True)
    flat = flat[order]
    return torch.stack([flat[:-1], flat[1:]], dim=1)[colors[1:] == colors[:-1]]


def _matches(gray: Tensor, pairs: Tensor, side: int, cuts: tuple[int, ...]) -> Tensor:
    """(P,) the best correlation of the fine structure of one picture with a part of the other."""
    best = torch.full((len(pairs),), -1.0)
    if not len(pairs):
        return best
    # Each picture is transformed once, however many pairs it is in.
    members, row = torch.unique(pairs, return_inverse=True)
    levels = _resized(gray[members][:, None].float(), side)[:, 0]  # (n, S, S)
    structure = _structure(side).T
    whole = _directions(levels.flatten(1) @ structure)
    for cut in cuts:
        size = side - cut * side / SIDE
        sampled = [_part(side, start * side / SIDE, size) for start in range(cut + 1)]
        for down in sampled:
            narrowed = down @ levels
            for across in sampled:
                part = _directions((narrowed @ across.T).flatten(1) @ structure)
                found = []
                for one, other in _chunks(row, side**2):
                    cut_one = (part[one] * whole[other]).sum(dim=1)
                    cut_other = (whole[one] * part[other]).sum(dim=1)
                    found.append(torch.maximum(cut_one, cut_other))
                best = torch.maximum(best, torch.cat(found))
    return best


def _directions(structures: Tensor) -> Tensor:
    """(n, S²) of length 1, shorter if there is hardly any structure."""
    least = _CONTRAST * structures.shape[1] ** 0.5
    length: Tensor = torch.linalg.vector_norm(structures, dim=1, keepdim=True)
    return structures / length.clamp(min=least)


def _structure(side: int) -> Tensor:
    """(S², S²) matrix from pixels to details: the mean of three pixels less the mean of seven."""
    smooth, around = _window(side, (0.25, 0.5, 0.25)), _window(side, (1 / 7,) * 7)
    details = torch.kron(smooth, smooth) - torch.kron(around @ smooth, around @ smooth)
    return details - details.mean(dim=0)


def _window(side: int, weights: tuple[float, ...]) -> Tensor:
    """(S, S) matrix of a moving average, with the last pixel repeated beyond the edge."""
    window = torch.zeros(side, side)
    at = torch.arange(side)
    for offset, weight in enumerate(weights, start=-(len(weights) // 2)):
        window[at, (at + offset).clamp(0, side - 1)] += weight
    return window


def _part(side: int, start: float, size: float) -> Tensor:
    """(S, S) matrix that stretches `size` pixels from `start` on to the whole row, linearly."""
    at = (start + size * (torch.arange(side) + 0.5) / side - 0.5).clamp(0, side - 1)
    left = at.floor().long().clamp(max=side - 2)
    part = torch.zeros(side, side)
    part[torch.arange(side), left] = 1 - (at - left)
    part[torch.arange(side), left + 1] = at - left
    return part


def _statistics(pixels: Tensor) -> Tensor:
    """(N, 18) statistics of (N, 3, 32, 32) pixels.

    Of brightness and two color differences: mean, deviation, and details by octave.
    """
    red, green, blue = pixels[:, :1], pixels[:, 1:2], pixels[:, 2:]
    rest = torch.cat([pixels.mean(dim=1, keepdim=True), red - green, blue - green], dim=1)
    columns = [rest.mean(dim=(2, 3)), rest.flatten(2).std(dim=2).log1p()]
    for _ in range(_OCTAVES):
        # Detail of one size is what halving the picture removes.
        coarser = functional.avg_pool2d(rest, 2)
        detail = rest - functional.interpolate(coarser, scale_factor=2)
        columns.append((detail.square().mean(dim=(2, 3)).sqrt() + 0.5).log())
        rest = coarser
    return torch.cat(columns, dim=1)


def _resized(pixels: Tensor, side: int) -> Tensor:
    """(N, c, S, S) pixels, without aliasing if they shrink."""
    if tuple(pixels.shape[2:]) == (side, side):
        return pixels
    size = (side, side)
    resized = functional.interpolate(pixels, size=size, mode="bilinear", antialias=True)
    return resized.clamp(0, 255)


def _chunks(pairs: Tensor, width: int) -> list[tuple[Tensor, Tensor]]:
    """The pairs in chunks for which twice `width` numbers per pair fit into memory."""
    chunks = torch.split(pairs, max(1, _CHUNK // width))
    return [(chunk[:, 0], chunk[:, 1]) for chunk in chunks]
