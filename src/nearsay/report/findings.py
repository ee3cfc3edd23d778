"""What an audit found, with small pictures of the examples, as values for its page."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from markupsafe import Markup
from PIL import Image, ImageOps
from torch import Tensor

from nearsay.batch import Files, are_pictures
from nearsay.data.images import decode
from nearsay.errors import ImageError
from nearsay.label_issues.result import Audit
from nearsay.report.runs import Comparison
from nearsay.training.progress import plain

UNNAMED = "no label"
SIDE = 96  # pixels of a picture, at most
_TILE = 48  # pixels of a picture in a sheet, at most
_COLUMNS = 16  # of a sheet, and as many rows
_LOSSLESS = 40  # pixels up to which a picture is kept as it is
_BLOCK = 8  # pixels that JPEG writes together: a tile of whole blocks keeps its edges clean
_MOST_BYTES = 2**28  # of files that are decoded for one page


class Sheets(NamedTuple):
    """Square pictures side by side in a few large ones."""

    addresses: list[str]  # data: of each sheet
    places: list[int | None]  # for each example its tile, counted through all sheets
    side: int  # of a tile
    columns: int


class Album:
    """Small pictures by the number of the example; none for features and unreadable files.

    The bytes of the files that are decoded are limited, so that a page of large photographs is
    written as fast as others. Pictures that are asked for first are shown first, and the same
    files give the same pictures.
    """

    def __init__(self, inputs: Tensor | Files | None) -> None:
        is_table = isinstance(inputs, Tensor) and not are_pictures(inputs)
        self._inputs = None if is_table else inputs
        self._kept: dict[int, Image.Image | None] = {}
        self._bytes_left = _MOST_BYTES
        self.num_left_out = 0  # because of the limit

    @property
    def has_pictures(self) -> bool:
        """Whether examples are images at all."""
        return self._inputs is not None

    def picture(self, index: int) -> Image.Image | None:
        """The image, made small; each is read once."""
        if index not in self._kept:
            image = self._read(index)
            if image is not None:
                image.thumbnail((SIDE, SIDE), Image.Resampling.BILINEAR)
            self._kept[index] = image
        return self._kept[index]

    def address(self, index: int) -> str | None:
        """The picture as an address that holds it."""
        image = self.picture(index)
        return None if image is None else _address(image, is_lossless=self.is_tiny(index))

    def is_tiny(self, index: int) -> bool:
        """Whether the picture has so few pixels that each should be seen."""
        image = self.picture(index)
        return image is not None and max(image.size) <= _LOSSLESS

    def sheets(self, indices: Sequence[int]) -> Sheets:
        """The pictures of these examples, cut square."""
        images = [image for index in indices if (image := self.picture(index)) is not None]
        places: list[int | None] = []
        num_tiles = 0
        for index in indices:
            has_picture = self.picture(index) is not None
            places.append(num_tiles if has_picture else None)
            num_tiles += has_picture
        largest = max((max(image.size) for image in images), default=_TILE)
        side = min(_TILE, -(-largest // _BLOCK) * _BLOCK)
        # Images that are no larger than a tile keep sharp pixels.
        method = Image.Resampling.NEAREST if largest <= side else Image.Resampling.BILINEAR
        addresses = []
        for start in range(0, len(images), _COLUMNS**2):
            tiles = images[start : start + _COLUMNS**2]
            sheet = Image.new("RGB", (_COLUMNS * side, -(-len(tiles) // _COLUMNS) * side))
            for place, image in enumerate(tiles):
                corner = place % _COLUMNS * side, place // _COLUMNS * side
                sheet.paste(ImageOps.fit(image, (side, side), method), corner)
            addresses.append(_address(sheet, is_lossless=False))
        return Sheets(addresses, places, side, _COLUMNS)

    def _read(self, index: int) -> Image.Image | None:
        if self._inputs is None:
            return None
        if isinstance(self._inputs, Tensor):
            pixels = self._inputs[index].permute(1, 2, 0).contiguous().numpy()  # (H, W, C)
            if pixels.shape[2] == 1:
                # An image with one channel is an array without it.
                pixels = pixels[:, :, 0]
            return Image.fromarray(pixels)
        path = self._inputs.root / self._inputs.names[index]
        try:
            self._bytes_left -= path.stat().st_size
            # A file that goes over the limit is left out, and so are all that follow it.
            if self._bytes_left < 0:
                self.num_left_out += 1
                return None
            return decode(path)
        except (ImageError, OSError):
            return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings:
    """An audit of a run and what is needed to show it: n examples could be read out of N."""

    name: str  # of the run folder
    audit: Audit  # of the n, in the order of `indices`
    indices: Tensor  # (n,) their numbers in the data set
    features: Tensor  # (n, D)
    confidence: Tensor  # (n,) of the network in the given label; NaN without a label
    clean: Tensor | None  # (n,) the truth, None if unknown
    inputs: Tensor | Files | None  # of all N; None if the data is no longer there
    unreadable: Mapping[int, str]  # number in the data set -> given label
    corrections: Mapping[int, int]  # number in the data set -> label by hand, −1 for none
    problem: str  # why corrections could not be read, or empty
    summary: Mapping[str, Any]  # as in audit.json; Any is the type of JSON
    comparison: Comparison  # of this one run
    album: Album = field(init=False)

    def __post_init__(self) -> None:
        # The album belongs to the inputs, and the dataclass is frozen.
        object.__setattr__(self, "album", Album(self.inputs))

    def label(self, number: int) -> str:
        """The name of a class as it can be shown; −1 is no label."""
        return self.named(self.audit.classes[number]) if number >= 0 else UNNAMED

    def named(self, name: str) -> str:
        """A class by its own name, as it can be shown."""
        return plain(name) or "(empty)"

    def file(self, index: int) -> str:
        """The path of an example below the root of the data, or empty."""
        return plain(self.inputs.names[index]) if isinstance(self.inputs, Files) else ""

    def suspects(self) -> Tensor:
        """(m,) positions of the issues, the most suspicious first."""
        order = self.audit.order()
        return order[self.audit.is_issue[order]]

    def is_wrong(self) -> Tensor | None:
        """(n,) whether a label is known to be wrong; None if the truth is unknown."""
        if self.clean is None:
            return None
        return (self.audit.given != self.clean) & (self.audit.given >= 0)

    def kinds(self) -> dict[str, Tensor]:
        """(n,) masks of two kinds of labels: by the truth, or else by the audit."""
        is_labeled = self.audit.given >= 0
        wrong = self.is_wrong()
        if wrong is not None:
            return {"right label": is_labeled & ~wrong, "wrong label": wrong}
        is_issue = self.audit.is_issue
        return {"other label": is_labeled & ~is_issue, "suspicious label": is_issue}

    def by_hand(self, index: int) -> str | None:
        """What was decided by hand, None if there is no decision."""
        if index not in self.corrections:
            return None
        label = self.corrections[index]
        # −1 is the decision that no class fits.
        return self.label(label) if label >= 0 else "label dropped"

    def picture(self, index: int, text: str, *, is_small: bool = False) -> Markup:
        """The picture of an example, or a placeholder."""
        address = self.album.address(index)
        if address is not None:
            crisp = " crisp" if self.album.is_tiny(index) else ""
            size = "small" if is_small else "large"
            image = Markup('<img class="{}{}" src="{}" alt="{}">')
            return image.format(size, crisp, address, text)
        if self.album.has_pictures:
            return Markup('<span class="blank">no picture</span>')
        return Markup("")


def score_text(value: float) -> str:
    """A score with three digits, or a dash."""
    return "–" if value != value else f"{value:.3f}"


def percent_text(value: float | None, digits: int = 1) -> str:
    """A share such as "33.8 %", or a dash; number and sign stay on one line."""
    return "–" if value is None or value != value else f"{100 * value:.{digits}f}\u00a0%"


def _address(image: Image.Image, *, is_lossless: bool) -> str:
    content = io.BytesIO()
    if is_lossless:
        image.save(content, "PNG", optimize=True)
    else:
        image.save(content, "JPEG", quality=80, subsampling=0)
    kind = "png" if is_lossless else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
