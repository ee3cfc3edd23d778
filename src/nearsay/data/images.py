"""One image file, decoded safely: what comes back is the whole picture in RGB, or an error that names the file."""

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
"""What the name of an image ends with, in lower case."""
FOREIGN = (".heic", ".heif", ".avif", ".jxl")
"""Photographs that are not decoded: they count as images, so that each is named as unreadable and none is missed."""
MOST_PIXELS = 64_000_000
_MOST_BYTES = 8 * MOST_PIXELS  # four channels of 16 bits each, not compressed
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def is_image(name: str) -> bool:
    """Whether a file is called as images are."""
    return name.lower().endswith(ENDINGS + FOREIGN)


def decode(path: str | Path) -> Image.Image:
    """The image in mode RGB, turned upright as its EXIF says; ImageError if it is not one, or not whole.

    The first frame of an animation; transparency on white; 16 bits of gray scaled to 8.
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
            with suppress(
                Exception
            ):  # broken EXIF says nothing of the pixels, which then stay as they are stored
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
    except Exception as error:  # Pillow's decoders raise nearly anything on broken bytes
        reason = one_line(error)
        raise ImageError(
            f"{_quoted(path)} cannot be decoded: {reason}; replace or remove it"
        ) from error


def why_unreadable(files: Files, index: int) -> str:
    """Why the file of an example cannot be decoded, without saying where it lies; "" if it can be."""
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
    """A descriptor of a regular file; a pipe or device is never waited for."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ImageError(f"{_quoted(path)} is not a regular file; replace or remove it")
    descriptor = os.open(path, _FLAGS)
    found = os.fstat(descriptor)  # once more, as another file may have taken its place
    if stat.S_ISREG(found.st_mode) and 0 < found.st_size <= _MOST_BYTES:
        return descriptor
    os.close(descriptor)
    raise ImageError(
        f"{_quoted(path)} has {found.st_size} bytes, but an image is a regular file of 1 to {_MOST_BYTES} bytes; "
        "replace or remove it"
    )


@contextmanager
def _strict() -> Iterator[None]:
    """No half images, whatever the rest of the program allows, and no warnings about what is decoded or refused."""
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
            f"{_quoted(path)} has {width}×{height} pixels; make it 1 to {MOST_PIXELS // 10**6} million, or remove it"
        )


def _to_rgb(path: str | Path, image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (
        image.mode == "I" and image.format in ("PNG", "PPM")
    ):  # white is 65535
        levels = np.array(image, dtype=np.int32)
        np.clip(levels, 0, 65535, out=levels)
        levels += 128
        levels //= 257
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ImageError(
            f"{_quoted(path)} has 32-bit pixels, which do not say how bright white is; save it with 8 or 16 bits"
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
