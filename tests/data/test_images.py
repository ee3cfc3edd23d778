import io
import os
import pickle
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from nearsay.data.images import ENDINGS, FOREIGN, MOST_PIXELS, decode, is_image
from nearsay.errors import ImageError


def pixels(path):
    image = decode(path)
    assert image.mode == "RGB"
    return np.asarray(image)


def picture(width=24, height=16):
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def refused(path, reason):
    with pytest.raises(ImageError) as caught:
        decode(path)
    message = str(caught.value)
    assert repr(os.fspath(path)) in message
    assert reason in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_kind_of_image_is_decoded(tmp_path, ending):
    path = tmp_path / f"a{ending.upper()}"
    assert is_image(path.name)
    assert not is_image(f"a{ending}.txt")
    image = picture().convert("L") if ending == ".pgm" else picture()
    image.save(path, **({"lossless": True} if ending == ".webp" else {}))
    found = pixels(path)
    assert found.shape == (16, 24, 3)
    if ending not in (".jpg", ".jpeg", ".jfif", ".gif"):
        np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("ending", FOREIGN)
def test_photographs_of_other_kinds_are_not_passed_over_but_named(tmp_path, ending):
    path = tmp_path / f"IMG_0001{ending.upper()}"
    assert is_image(path.name)
    path.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    refused(path, "JPEG")


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_sixteen_bits_of_gray_are_scaled_and_not_clipped(tmp_path, ending):
    levels = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(levels).save(tmp_path / f"a.{ending}")
    found = pixels(tmp_path / f"a.{ending}")
    for channel in range(3):
        np.testing.assert_array_equal(found[..., channel], np.round(levels / 257))


def test_sixteen_bits_of_color_are_scaled(tmp_path):
    row = b"\0" + struct.pack(">6H", 0, 65535, 32768, 257, 514, 65280)
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    (tmp_path / "a.png").write_bytes(png(header, zlib.compress(row)))
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), [[[0, 255, 128], [1, 2, 255]]])


def png(header, data):
    chunks = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_refused(tmp_path, mode):
    Image.new(mode, (3, 2), 70000).save(tmp_path / "a.tif")
    refused(tmp_path / "a.tif", "32-bit pixels")


def test_modes_become_rgb_and_transparency_white(tmp_path):
    for mode, color, expected in (
        ("1", 1, (255, 255, 255)),
        ("L", 77, (77, 77, 77)),
        ("RGB", (1, 2, 3), (1, 2, 3)),
        ("CMYK", (0, 255, 0, 0), (255, 0, 255)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (255, 255, 255)),
        ("RGBA", (0, 100, 200, 51), (204, 224, 244)),
        ("LA", (100, 0), (255, 255, 255)),
        ("LA", (100, 255), (100, 100, 100)),
    ):
        Image.new(mode, (3, 2), color).save(tmp_path / "a.tif")
        np.testing.assert_array_equal(pixels(tmp_path / "a.tif"), np.full((2, 3, 3), expected))


def test_palettes_and_their_transparency(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    image.save(tmp_path / "plain.png")
    np.testing.assert_array_equal(pixels(tmp_path / "plain.png"), [[[10, 20, 30], [40, 50, 60]]])
    for name, transparency in (("a.gif", 1), ("a.png", b"\xff\0")):
        image.save(tmp_path / name, transparency=transparency)
        np.testing.assert_array_equal(pixels(tmp_path / name), [[[10, 20, 30], [255, 255, 255]]])


def test_a_color_that_stands_for_transparent_becomes_white(tmp_path):
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    image.save(tmp_path / "a.png", transparency=(9, 9, 9))
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), [[[1, 2, 3], [255, 255, 255]]])


@pytest.mark.parametrize("ending", ["gif", "png", "webp", "tif"])
def test_of_an_animation_the_first_frame_is_decoded(tmp_path, ending):
    frames = [Image.new("RGB", (4, 3), color) for color in ("red", "lime", "blue")]
    lossless = {"lossless": True} if ending == "webp" else {}
    frames[0].save(tmp_path / f"a.{ending}", save_all=True, append_images=frames[1:], **lossless)
    np.testing.assert_array_equal(pixels(tmp_path / f"a.{ending}"), np.full((3, 4, 3), (255, 0, 0)))


TURNS = [(1, 1), (1, -1), (-1, -1), (-1, 1), (1, 1), (-1, 1), (-1, -1), (1, -1)]  # down, across


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(tmp_path, orientation):
    upright = np.asarray(picture())
    deep = np.arange(384, dtype=np.uint16).reshape(16, 24) * 170
    exif, (down, across) = Image.Exif(), TURNS[orientation - 1]
    exif[0x0112] = orientation
    for ending, image in (("png", upright), ("webp", upright), ("tif", upright), ("png", deep)):
        turned = image.swapaxes(0, 1) if orientation > 4 else image
        stored = Image.fromarray(np.ascontiguousarray(turned[::down, ::across]))
        choices = {"lossless": True} if ending == "webp" else {}
        stored.save(tmp_path / f"a.{ending}", exif=exif, **choices)
        found, expected = pixels(tmp_path / f"a.{ending}"), upright
        if image is deep:
            found, expected = found[..., 0], np.round(deep / 257)
        np.testing.assert_array_equal(found, expected)


def test_broken_exif_does_not_cost_the_image(tmp_path):
    picture().save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*garbage that is no directory")
    assert pixels(tmp_path / "a.jpg").shape == (16, 24, 3)
    text = PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n  2\nno digits")  # Pillow raises ValueError
    picture().save(tmp_path / "a.png", pnginfo=text)
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), np.asarray(picture()))


@pytest.mark.parametrize("ending", ["jpg", "png", "gif", "bmp", "tif", "webp", "ppm"])
@pytest.mark.parametrize("is_allowed_elsewhere", [False, True])
def test_half_an_image_is_refused(tmp_path, ending, is_allowed_elsewhere, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", is_allowed_elsewhere)
    path = tmp_path / f"a.{ending}"
    picture(200, 100).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(path, path.name)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is is_allowed_elsewhere


def test_what_is_no_image_is_refused(tmp_path):
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    for content, reason in ((b"", "0 bytes"), (b"no image\n" * 100, "JPEG"), (script, "JPEG")):
        (tmp_path / "a.jpg").write_bytes(content)
        refused(tmp_path / "a.jpg", reason)
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")  # which is not waited for
    for name in ("folder.jpg", "pipe.jpg", "/dev/zero"):
        refused(os.path.join(tmp_path, name), "regular file")
    for name in ("none", "loop", "a\0", "a" * 300, "\udcff"):
        refused(str(tmp_path / f"{name}.jpg"), "")


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "file.jpg").write_bytes(b"x")
    before = os.stat(tmp_path / "file.jpg")
    monkeypatch.setattr(os, "stat", lambda _: before)
    refused(tmp_path / "pipe.jpg", "regular file")


def test_too_large_a_file_is_not_read(tmp_path):
    with (tmp_path / "a.webp").open("wb") as file:
        file.write(b"RIFF\xff\xff\xff\xffWEBP")
        file.truncate(2**40)
    refused(tmp_path / "a.webp", "bytes")


@pytest.mark.parametrize(("width", "height"), [(8000, 8001), (2**31 - 1, 2**31 - 1), (8000, 8000)])
def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path, width, height):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    (tmp_path / "bomb.png").write_bytes(png(header, zlib.compress(b"\0" * 10**6)))
    # The third is not too large; it is only broken.
    assert ("million" in refused(tmp_path / "bomb.png", "")) is (width * height > MOST_PIXELS)


def test_errors_travel_between_processes(tmp_path):
    with pytest.raises(ImageError) as caught:
        decode(tmp_path / "none.jpg")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def originals():
    """Small valid files of every kind, with what decoders are known to stumble over."""
    image = picture()
    exif = Image.Exif()
    exif[0x0112] = 6
    variants = [
        (image, "JPEG", {"exif": exif}),
        (image, "JPEG", {"progressive": True}),
        (image.convert("CMYK"), "JPEG", {}),
        (image, "PNG", {"exif": exif}),
        (image.convert("RGBA"), "PNG", {}),
        (image.convert("P"), "PNG", {"transparency": 3}),
        (Image.fromarray(np.arange(384, dtype=np.uint16).reshape(16, 24)), "PNG", {}),
        (image.convert("P"), "GIF", {"save_all": True, "append_images": [image.convert("P")]}),
        (image, "TIFF", {"exif": exif}),
        (image, "TIFF", {"compression": "tiff_lzw"}),
        (image, "TIFF", {"compression": "tiff_adobe_deflate"}),
        (image.convert("1"), "TIFF", {"compression": "group4"}),
        (image, "WEBP", {}),
        (image.convert("RGBA"), "WEBP", {"lossless": True, "exif": exif}),
        (image, "BMP", {}),
        (image.convert("P"), "BMP", {}),
        (image, "PPM", {}),
    ]
    for each, kind, options in variants:
        buffer = io.BytesIO()
        each.save(buffer, kind, **options)
        yield buffer.getvalue()


def damaged(content, rng):
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        # Headers are what matters most.
        place = rng.randrange(min(len(content), rng.choice([64, 200, len(content)])))
        flipped = content[place] ^ (1 << rng.randrange(8))
        content[place] = rng.choice([0, 0xFF, 0x7F, 0x80, rng.randrange(256), flipped])
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    if rng.random() < 0.1:
        content += rng.randbytes(50)
    return bytes(content)


def test_damaged_files_are_decoded_or_refused_and_nothing_else(tmp_path):
    rng, path, outcomes = random.Random(0), tmp_path / "a.jpg", {True: 0, False: 0}
    with path.open("wb", buffering=0) as file:
        for original in originals():
            for content in (original, *(damaged(original, rng) for _ in range(60))):
                file.seek(0)
                file.truncate(file.write(content))
                try:
                    found = pixels(path)
                except ImageError as error:
                    assert str(path) in str(error)  # noqa: PT017 — both outcomes are right
                    assert content is not original
                    outcomes[False] += 1
                else:
                    assert found.dtype == np.uint8
                    assert found.size <= 3 * MOST_PIXELS
                    outcomes[True] += 1
    assert min(outcomes.values()) > 150
