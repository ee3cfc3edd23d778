"""Image files, decoded safely: the whole picture in RGB, or an error that names the file."""

import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from nearsay.batch import Files
from nearsay.errors import ImageError, one_line

ENDINGS = (
    ".jpg",
    ".jpeg",
    ".jfif",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)
"""Endings of the names of images, in lower case."""
FOREIGN = (".heic", ".heif", ".avif", ".jxl")
"""Photographs that are not decoded. They count as images, so that each is reported as unreadable.
"""
MOST_PIXELS = 64_000_000
# Four channels of 16 bits each, not compressed.
_MOST_BYTES = 8 * MOST_PIXELS
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def is_image(name: str) -> bool:
    """Whether the name of a file is the name of an image."""
    return name.lower().endswith(ENDINGS + FOREIGN)


def decode(path: str | Path) -> Image.Image:
    """The image in mode RGB, turned upright by its EXIF; ImageError if it is no image, or not
    whole.

    It is the first frame of an animation. Transparency becomes white, and 16 bits of gray become 8.
    """
    try:
        with (
            open(_open(path), "rb") as file,
            _strict(),
            Image.open(file, formats=_FORMATS) as image,
        ):
            _check_size(path, *image.size)
            image.load()
            _check_size(path, *image.size)
            # With broken EXIF the pixels stay as they are stored.
            with suppress(Exception):
                ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(path, image)
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{_quoted(path)} is no {', '.join(_FORMATS)} image; {_cure(path)} or remove it"
        ) from error
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"{_quoted(path)} has more than {MOST_PIXELS // 10**6} million pixels; shrink it"
        ) from error
    except OSError as error:
        raise ImageError(
            f"{_quoted(path)} cannot be read: {error.strerror or error}; replace or remove it"
        ) from error
    # Pillow's decoders raise nearly anything on broken bytes.
    except Exception as error:
        reason = one_line(error)
        raise ImageError(
            f"{_quoted(path)} cannot be decoded: {reason}; replace or remove it"
        ) from error


def why_unreadable(files: Files, index: int) -> str:
    """Why the file of an example cannot be decoded, without its path; "" if it can be."""
    path = files.root / files.names[index]
    try:
        decode(path)
    except (ImageError, OSError, ValueError) as error:
        reason = str(error)
        for name in (str(path), files.names[index]):
            reason = reason.replace(repr(name), "it")
        return reason
    return ""


def _open(path: str | Path) -> int:
    """A descriptor of a regular file; the process never waits for a pipe or device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ImageError(f"{_quoted(path)} is not a regular file; replace or remove it")
    descriptor = os.open(path, _FLAGS)
    # Checked once more, because another file may have taken its place.
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and 0 < facts.st_size <= _MOST_BYTES:
        return descriptor
    os.close(descriptor)
    raise ImageError(
        f"{_quoted(path)} has {facts.st_size} bytes, but an image is a regular file of 1 to "
        f"{_MOST_BYTES} bytes; replace or remove it"
    )


@contextmanager
def _strict() -> Iterator[None]:
    """No truncated images, whatever the rest of the program allows, and no warnings of Pillow."""
    allowed = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = allowed


def _check_size(path: str | Path, width: int, height: int) -> None:
    if not 0 < width * height <= MOST_PIXELS:
        raise ImageError(
            f"{_quoted(path)} has {width}×{height} pixels; make it 1 to "
            f"{MOST_PIXELS // 10**6} million, or remove it"
        )


def _to_rgb(path: str | Path, image: Image.Image) -> Image.Image:
    has_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if has_16_bits or image.mode.startswith("I;16"):
        # White is 65535 = 255 · 257; rounded to the nearest of 256 levels.
        levels = np.array(image, dtype=np.int32)
        np.clip(levels, 0, 65535, out=levels)
        levels += 128
        levels //= 257
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ImageError(
            f"{_quoted(path)} has 32-bit pixels without a known white; save it with 8 or 16 bits"
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    rgb = layer.convert("RGB")
    rgb.paste("white", mask=ImageOps.invert(layer.getchannel("A")))
    return rgb


def _cure(path: str | Path) -> str:
    return "convert" if os.fspath(path).lower().endswith(FOREIGN) else "replace"


def _quoted(path: str | Path) -> str:
    return repr(os.fspath(path))
