"""Small pictures of examples, for pages that carry all they show.

How many there are is bounded by the bytes of the files that have to be decoded, so that a page of large photographs
takes no longer than others; who is asked for first is shown first, and the same files give the same pictures.
"""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageOps
from torch import Tensor

from nearsay.batch import Files, are_pictures
from nearsay.data.images import decode
from nearsay.errors import ImageError

SIDE = 96  # pixels of a picture, at most
_TILE = 48  # of one in a sheet, at most
_COLUMNS = 16  # of a sheet, and as many rows
_LOSSLESS = 40  # pixels up to which a picture is kept as it is
_BLOCK = 8  # pixels that JPEG writes together: a tile of whole blocks does not run into the next
_MOST_BYTES = 2**28  # of files that are decoded for one page


class Sheets(NamedTuple):
    """Square pictures side by side in a few large ones."""

    addresses: list[str]  # data: of each sheet
    places: list[int | None]  # of each example asked for: tile number, counted through all sheets
    side: int  # of a tile
    columns: int


class Album:
    """Pictures by the number of the example; of features, or of files that cannot be read, there are none."""

    def __init__(self, inputs: Tensor | Files | None) -> None:
        self._inputs = None if isinstance(inputs, Tensor) and not are_pictures(inputs) else inputs
        self._kept: dict[int, Image.Image | None] = {}
        self._left = _MOST_BYTES
        self.num_left_out = 0  # for want of bytes

    @property
    def has_pictures(self) -> bool:
        """Whether examples are images at all."""
        return self._inputs is not None

    def picture(self, index: int) -> Image.Image | None:
        """The image, made small; each is read once."""
        if index not in self._kept:
            self._kept[index] = self._read(index)
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
        found = [(index, image) for index in indices if (image := self.picture(index)) is not None]
        largest = max((max(image.size) for _, image in found), default=_TILE)
        side = min(_TILE, -(-largest // _BLOCK) * _BLOCK)
        method = Image.Resampling.NEAREST if largest <= side else Image.Resampling.BILINEAR
        addresses = []
        for start in range(0, len(found), _COLUMNS**2):
            some = found[start : start + _COLUMNS**2]
            sheet = Image.new("RGB", (_COLUMNS * side, -(-len(some) // _COLUMNS) * side))
            for place, (_, image) in enumerate(some):
                corner = place % _COLUMNS * side, place // _COLUMNS * side
                sheet.paste(ImageOps.fit(image, (side, side), method), corner)
            addresses.append(_address(sheet, is_lossless=False))
        numbers = {index: place for place, (index, _) in enumerate(found)}
        return Sheets(addresses, [numbers.get(index) for index in indices], side, _COLUMNS)

    def _read(self, index: int) -> Image.Image | None:
        if isinstance(self._inputs, Files):
            path = self._inputs.root / self._inputs.names[index]
            try:
                self._left -= path.stat().st_size
                if self._left < 0:
                    self.num_left_out += 1
                    return None
                image = decode(path)
            except (ImageError, OSError):
                return None
        elif self._inputs is not None:
            pixels = self._inputs[index].permute(1, 2, 0).contiguous().numpy()  # (H, W, C)
            image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        else:
            return None
        image.thumbnail((SIDE, SIDE), Image.Resampling.BILINEAR)
        return image


def _address(image: Image.Image, *, is_lossless: bool) -> str:
    content = io.BytesIO()
    if is_lossless:
        image.save(content, "PNG", optimize=True)
    else:
        image.save(content, "JPEG", quality=80, subsampling=0)
    kind = "png" if is_lossless else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
