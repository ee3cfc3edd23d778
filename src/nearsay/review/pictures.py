"""Pictures of the examples by their number, never by a path: files decoded, arrays as they are."""

import io
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from nearsay import config
from nearsay.batch import Files, are_pictures
from nearsay.data.images import decode
from nearsay.errors import ImageError, one_line
from nearsay.experiment import Experiment
from nearsay.training.run_folder import read_origin
from nearsay.training.splits import digest_inputs, digest_names, open_train, recorded_digest

LARGE, SMALL = 1024, 160  # pixels of the longer side, at most
_CRISP = 256  # up to here nothing is lost: small pictures are sent pixel by pixel
_CHANGED = "The data is not what it was when the run was trained;"
_MANY = 200_000  # files: of more, looking at every size takes too long


class Picture(NamedTuple):
    """An image as a browser takes it."""

    media_type: str
    content: bytes


class Source(NamedTuple):
    """Where the pictures of a run come from, and what is known of its examples beside them."""

    inputs: Tensor | Files | None  # (N, C, H, W) uint8, or files; None if there is nothing to see
    note: str  # what the user should know of them
    extra: dict[
        str, Sequence[str | None]
    ]  # (N,) each: other columns of a manifest or a table of labels


class Pictures:
    """Pictures of the examples of a run, made when they are asked for and kept for a while."""

    def __init__(self, inputs: Tensor | Files | None) -> None:
        self.inputs = inputs
        self._lock = (
            threading.Lock()
        )  # decoding sets what Pillow shall refuse, for the whole process
        self._kept = lru_cache(maxsize=256)(self._make)

    def find(self, index: int, *, side: int = LARGE) -> Picture:
        """The picture of an example; ImageError says why there is none."""
        if self.inputs is None or not 0 <= index < len(self.inputs):
            raise ImageError(f"example {index} has no picture")
        return self._kept(index, side)

    def _make(self, index: int, side: int) -> Picture:
        assert self.inputs is not None
        if isinstance(self.inputs, Files):
            with self._lock:
                image = decode(self.inputs.root / self.inputs.names[index])
        else:
            array = self.inputs[index].movedim(0, 2).contiguous().numpy()  # (H, W, C)
            image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
        if max(image.size) > side:
            image.thumbnail((side, side))
        kind = "PNG" if max(image.size) <= _CRISP else "JPEG"
        content = io.BytesIO()
        image.save(content, kind, **({"quality": 90} if kind == "JPEG" else {}))
        return Picture(f"image/{kind.lower()}", content.getvalue())


def open_source(folder: Path, num: int) -> Source:
    """What the examples of a run look like, if that can still be seen."""
    try:
        origin = read_origin(folder)
        if "recipe" not in origin:
            return Source(
                None, "The run was trained from Python, so there are no pictures to show.", {}
            )
        experiment = config.from_origin(origin).experiment
        inputs = open_train(experiment).inputs
        extra = _extra(experiment, num)
    except (OSError, ValueError, ImportError) as error:
        reason = one_line(error, 300)
        return Source(
            None, f"The pictures cannot be shown, because the data cannot be opened: {reason}", {}
        )
    if len(inputs) != num:
        return Source(
            None,
            f"The data has {len(inputs)} examples now and had {num}, so no pictures are shown.",
            {},
        )
    names = _recorded(folder, "names")
    if (
        names and isinstance(inputs, Files) and names != digest_names(inputs)
    ):  # then a number means another file
        return Source(
            None,
            "Files were renamed, moved or replaced since training, so no pictures are shown.",
            {},
        )
    if isinstance(inputs, Tensor) and not are_pictures(inputs):
        if extra and _has_changed(folder, inputs):
            return Source(
                None, f"{_CHANGED} what its table says of an example may be about another.", extra
            )
        return Source(None, "", extra)  # features: there never were any pictures
    note = ""
    if (isinstance(inputs, Tensor) or num <= _MANY) and _has_changed(folder, inputs):
        note = f"{_CHANGED} a picture may be another than the one judged."
    return Source(inputs, note, extra)


def _extra(experiment: Experiment, num: int) -> dict[str, Sequence[str | None]]:
    """Other columns of the table that the examples are listed in, if they are."""
    find = getattr(experiment.data, "extra", None)
    found: dict[str, Sequence[str | None]] = {} if find is None else find("train")
    return {name: cells for name, cells in found.items() if len(cells) == num}


def _has_changed(folder: Path, inputs: Tensor | Files) -> bool:
    recorded = _recorded(folder, "inputs")
    return bool(recorded) and recorded != digest_inputs(inputs)


def _recorded(folder: Path, name: str) -> str:
    try:
        return recorded_digest((folder / "labels.npz").read_bytes(), name)
    except (OSError, ValueError):
        return ""
