"""What the review page shows: the rows of `audit.csv`, and the pictures of the examples.

A picture is requested by the number of its example, never by a path. The data of the run is opened
once more for it, and may have changed since training; `Source.note` says what the user should know.
"""

import io
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from nearsay import config
from nearsay.batch import Files, Labels, are_pictures
from nearsay.data import tables
from nearsay.data.images import decode
from nearsay.data.labels_file import digest_inputs, digest_names, recorded_digest
from nearsay.errors import BAD_DATA, ImageError, RunError, one_line
from nearsay.experiment import Experiment
from nearsay.training.run_folder import read_origin
from nearsay.training.splits import open_train

# Pixels of the longer side, at most.
LARGE, SMALL = 1024, 160
# Pictures up to this size are sent without loss, pixel by pixel.
_LOSSLESS = 256
# With more files than this, reading the size of every file takes too long.
_MOST_FILES = 200_000
_CHANGED = "The data has changed since training;"
_REQUIRED = (
    "index",
    "given_label",
    "predicted_label",
    "predicted_probability",
    "label_score",
    "is_label_issue",
)
_KNOWN = (*_REQUIRED, "path", "neighbors", "status")


@dataclass(frozen=True)
class Neighbor:
    """A similar example, shown as evidence."""

    index: int
    label: int  # the given label; −1 without one
    similarity: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """The audited examples of a run, in columns of N cells. Classes are numbers, −1 for none."""

    classes: tuple[str, ...]
    given: Sequence[int]
    suggested: Sequence[int]
    probabilities: Sequence[float | None]  # of the suggestion
    scores: Sequence[float | None]  # low is suspicious; None without a score
    is_issue: Sequence[bool]
    statuses: Sequence[str]  # "ok", or why the example has no score
    paths: Sequence[str | None]  # shown as text only: no file is opened by them
    details: dict[str, Sequence[str | None]]  # all other columns
    neighbors_json: Sequence[str | None]  # parsed on request, since there may be millions

    def __len__(self) -> int:
        return len(self.given)

    def order(self) -> list[int]:
        """All examples: the most suspicious first, those without a score last."""

        def key(index: int) -> tuple[bool, float, int]:
            score = self.scores[index]
            return score is None, 0.0 if score is None else score, index

        return sorted(range(len(self)), key=key)

    def neighbors(self, index: int) -> list[Neighbor]:
        """The nearest examples, the most similar first; empty if the cell is empty or damaged."""
        neighbors = []
        try:
            for number, _, cosine in json.loads(self.neighbors_json[index] or "[]"):
                near = Neighbor(int(number), self.given[int(number)], float(cosine))
                if near.index >= 0 and math.isfinite(near.similarity):
                    neighbors.append(near)
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
            return []
        return neighbors


def read_examples(folder: Path, labels: Labels) -> Examples:
    """The audit of a run; RunError if it is missing or is not of these labels."""
    path = folder / "audit.csv"
    if not path.is_file():
        raise RunError(f"{path} is missing. Run nearsay audit {folder} first.", BAD_DATA)
    cells = tables.read(path).columns
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(labels.classes)}
    empty: list[str | None] = [None] * len(labels.given)
    try:
        _check_columns(cells, labels, numbers)
        return Examples(
            classes=labels.classes,
            given=labels.given.tolist(),
            suggested=[numbers.get(name, -1) for name in cells["predicted_label"]],
            probabilities=list(map(tables.as_share, cells["predicted_probability"])),
            scores=list(map(tables.as_share, cells["label_score"])),
            is_issue=list(map(tables.as_claim, cells["is_label_issue"])),
            statuses=[cell or "ok" for cell in cells.get("status", empty)],
            paths=cells.get("path", empty),
            details={name: column for name, column in cells.items() if name not in _KNOWN},
            neighbors_json=cells.get("neighbors", empty),
        )
    except ValueError as error:
        raise RunError(
            f"{path} must be an audit of this run: {error}. Run nearsay audit {folder} again.",
            BAD_DATA,
        ) from error


def _check_columns(
    cells: dict[str, list[str | None]], labels: Labels, numbers: dict[str | None, int]
) -> None:
    for name in _REQUIRED:
        if name not in cells:
            raise ValueError(f"there is no column {name!r}")
    num = len(labels.given)
    if cells["index"] != [str(index) for index in range(num)]:
        raise ValueError(f"index must count the {num} examples in their order")
    if [numbers.get(name, -1) for name in cells["given_label"]] != labels.given.tolist():
        raise ValueError("given_label must hold the labels of the run")


class Picture(NamedTuple):
    """An image in a format that browsers show."""

    media_type: str
    content: bytes


class Pictures:
    """Pictures of the examples of a run, made on request; the latest 256 are kept."""

    def __init__(self, inputs: Tensor | Files | None) -> None:
        self.inputs = inputs
        # Decoding changes the limits of Pillow for the whole process.
        self._lock = threading.Lock()
        self._cached = lru_cache(maxsize=256)(self._make)

    def get(self, index: int, *, side: int = LARGE) -> Picture:
        """The picture of an example; ImageError if there is none."""
        if self.inputs is None or not 0 <= index < len(self.inputs):
            raise ImageError(f"example {index} has no picture")
        return self._cached(index, side)

    def _make(self, index: int, side: int) -> Picture:
        assert self.inputs is not None
        if isinstance(self.inputs, Files):
            with self._lock:
                image = decode(self.inputs.root / self.inputs.names[index])
        else:
            # Pillow takes (H, W) for gray and (H, W, C) for color.
            array = self.inputs[index].movedim(0, 2).contiguous().numpy()  # (H, W, C)
            image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
        if max(image.size) > side:
            image.thumbnail((side, side))
        content = io.BytesIO()
        if max(image.size) <= _LOSSLESS:
            image.save(content, "PNG")
            return Picture("image/png", content.getvalue())
        image.save(content, "JPEG", quality=90)
        return Picture("image/jpeg", content.getvalue())


class Source(NamedTuple):
    """The data of a run as it is now."""

    inputs: Tensor | Files | None  # (N, C, H, W) uint8, or files; None if there is nothing to show
    note: str  # what the user should know about them
    extra: dict[str, Sequence[str | None]]  # (N,) each: other columns of the table of the data


def open_source(folder: Path, num: int) -> Source:
    """Open the data of a run with `num` examples, and compare it with the recorded digests."""
    try:
        origin = read_origin(folder)
        if "recipe" not in origin:
            return Source(None, "A run that Python code started has no pictures to show.", {})
        experiment = config.from_origin(origin).experiment
        inputs = open_train(experiment).inputs
        extra = _extra_columns(experiment, num)
    except (OSError, ValueError, ImportError) as error:
        reason = one_line(error, 300)
        return Source(
            None, f"No pictures are shown, because the data cannot be opened: {reason}", {}
        )
    if len(inputs) != num:
        note = f"No pictures are shown: the data had {num} examples and now has {len(inputs)}."
        return Source(None, note, {})
    names = _recorded(folder, "names")
    if names and isinstance(inputs, Files) and names != digest_names(inputs):
        # The same number now means another file.
        return Source(None, "No pictures are shown: files were renamed, moved or replaced.", {})
    if isinstance(inputs, Tensor) and not are_pictures(inputs):
        # Features have no pictures, but the table beside them may describe the examples.
        is_doubtful = bool(extra) and _has_changed(folder, inputs)
        note = f"{_CHANGED} its table may describe other examples." if is_doubtful else ""
        return Source(None, note, extra)
    is_quick = isinstance(inputs, Tensor) or num <= _MOST_FILES
    is_doubtful = is_quick and _has_changed(folder, inputs)
    note = f"{_CHANGED} a picture may differ from the one in the audit." if is_doubtful else ""
    return Source(inputs, note, extra)


def _extra_columns(experiment: Experiment, num: int) -> dict[str, Sequence[str | None]]:
    """Other columns of the table that lists the examples, if there is one."""
    read: Any = getattr(experiment.data, "extra", None)
    if read is None:
        return {}
    return {name: cells for name, cells in read("train").items() if len(cells) == num}


def _has_changed(folder: Path, inputs: Tensor | Files) -> bool:
    recorded = _recorded(folder, "inputs")
    return bool(recorded) and recorded != digest_inputs(inputs)


def _recorded(folder: Path, name: str) -> str:
    try:
        return recorded_digest((folder / "labels.npz").read_bytes(), name)
    except (OSError, ValueError):
        return ""
