"""Images inside tables of Hugging Face `datasets`, unpacked once, byte for byte, into files of their own.

From there they are read by the same workers and the same careful decoder as all other files. What an unpacked file is
called is a function of its row and its content alone: the same data has the same names on every machine, and other data
has others.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearsay.files import draft_of

_ROWS = 32  # that are in memory at once
_FOLDER = 10_000  # files of one folder
_MISSING = -1  # bytes of an image that a row does not have
_MAGIC = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG": ".png",
    b"RIFF": ".webp",
    b"GIF8": ".gif",
    b"BM": ".bmp",
}


def _rows(pictures: Any, column: str) -> Iterator[tuple[bytes | None, str | None]]:
    """What is stored of each image: its bytes, and the path that it has or once had."""
    for batch in pictures.iter(batch_size=_ROWS):
        for cell in batch[column]:
            yield (None, None) if cell is None else (cell["bytes"], cell["path"])


def find_paths(pictures: Any, column: str, roots: Sequence[str]) -> list[str] | None:
    """Absolute paths where all images are files of their own; None as soon as one is not."""
    paths = []
    for content, path in _rows(pictures, column):
        if content is not None or not path:
            return None
        paths.append(_placed(path, column, roots))
    return paths


def _placed(path: str, column: str, roots: Sequence[str]) -> str:
    """An absolute path below one of the roots; data of others is not to choose among all files of this machine."""
    if "://" in path:
        raise ValueError(
            f"the image {path!r} in column {column!r} is elsewhere; save the data with its images"
        )
    placed = os.path.abspath(os.path.join(roots[0], path))
    if not any(placed.startswith(os.path.join(root, "")) for root in roots):
        raise ValueError(
            f"the image {path!r} in column {column!r} is outside of {roots[0]!r}; copy it there"
        )
    return placed


def name_table(table: Any, image: str, split: str) -> str:
    """A name for what is unpacked from a table; another one as soon as a file of the table has changed."""
    files = [(file["filename"], os.stat(file["filename"])) for file in table.cache_files]
    facts = [[name, found.st_size, found.st_mtime_ns] for name, found in files]
    # The fingerprint is the library's own name for the content; tables that are no files have nothing else.
    text = json.dumps([table._fingerprint, image, split, len(table), facts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def unpack(
    root: Path, pictures: Any, column: str, split: str, roots: Sequence[str]
) -> tuple[str, ...]:
    """The names of the images below the root, written there unless an earlier call has done it.

    Several processes may do this at once, and any may be killed: each file appears whole, and the list of them last.
    """
    listing = root / f"{split}.json"
    try:
        sizes: dict[str, int] = json.loads(listing.read_text("utf-8"))
        if _are_whole(root, sizes):
            return tuple(sizes)
    except (OSError, ValueError):  # not there yet, or damaged
        pass
    sizes = {}
    for row, (content, path) in enumerate(_rows(pictures, column)):
        place = f"{split}/{row // _FOLDER:04d}/{row:08d}"
        if content is None and path and os.path.isfile(placed := _placed(path, column, roots)):
            content = Path(placed).read_bytes()
        if content is None:
            sizes[f"{place}-missing"] = (
                _MISSING  # a file that is not there, and told of as any other such file
            )
            continue
        name = f"{place}-{hashlib.sha256(content).hexdigest()[:16]}{_ending(content)}"
        sizes[name] = len(content)
        if not _are_whole(root, {name: len(content)}):
            _write(root / name, content, listing)
    _write(listing, json.dumps(sizes).encode(), listing)
    return tuple(sizes)


def _are_whole(root: Path, sizes: Mapping[str, int]) -> bool:
    """Whether all files have their lengths, also after a loss of power; their names are of their contents."""
    try:
        return all(
            size == _MISSING or os.stat(root / name).st_size == size for name, size in sizes.items()
        )
    except FileNotFoundError:
        return False


def _ending(content: bytes) -> str:
    return next((ending for start, ending in _MAGIC.items() if content.startswith(start)), ".image")


def _write(path: Path, content: bytes, listing: Path) -> None:
    """The file appears whole or not at all; its draft is one of the list, beside which few others are to be seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(listing) as draft:
        draft.write_bytes(content)
        draft.replace(path)
