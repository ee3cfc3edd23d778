"""The page and the queue as files, written or compared with what the records make of them."""

from pathlib import Path

from nearsay.results.page import make_page
from nearsay.results.queue import FILE, queue, write_queue
from nearsay.results.record import read_records, unchanged
from nearsay.run import write_whole


def write_results(folder: Path, page: Path) -> list[Path]:
    """Write the page of the records in `folder`, and the queue into it; returns what has changed."""
    stale = stale_files(folder, page)
    contents = _contents(folder, page)
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, contents[path].encode())
    return stale


def stale_files(folder: Path, page: Path) -> list[Path]:
    """Which of the files are not as the records would make them; ValueError if `folder` is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of results; give the one that benchmarks/cifar.py take writes into")
    return [
        path
        for path, content in _contents(folder, page).items()
        if not path.is_file() or path.read_bytes() != content.encode()
    ]


def _contents(folder: Path, page: Path) -> dict[Path, str]:
    return {page: make_page(folder), folder / FILE: write_queue(queue(), unchanged(read_records(folder)))}
