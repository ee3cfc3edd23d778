"""The page and the queue as files, written or compared with what the records make of them."""

from pathlib import Path

from nearsay.results.page import make_page
from nearsay.results.queue import FILE, queue, write_queue
from nearsay.results.record import read_records, unchanged
from nearsay.training.checkpoints import write_whole


def write_results(folder: Path, page: Path) -> list[Path]:
    """Write the page of the records in `folder`, and the queue into it; returns what has changed."""
    stale = _stale(folder, page)
    for path, content in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return list(stale)


def stale_files(folder: Path, page: Path) -> list[Path]:
    """Which of the files are not as the records would make them; ValueError if `folder` is none."""
    return list(_stale(folder, page))


def _stale(folder: Path, page: Path) -> dict[Path, bytes]:
    """What the files should hold that are not as the records would make them."""
    if not any(
        folder.glob("*.json")
    ):  # of an empty one a page of nothing would take the place of the page there is
        told = "holds no result" if folder.is_dir() else "is no folder of results"
        raise ValueError(f"{folder} {told}; give the one that benchmarks/cifar.py take writes into")
    contents = {
        page: make_page(folder),
        folder / FILE: write_queue(queue(), unchanged(read_records(folder))),
    }
    wanted = {path: text.encode() for path, text in contents.items()}
    return {
        path: content
        for path, content in wanted.items()
        if not path.is_file() or path.read_bytes() != content
    }
