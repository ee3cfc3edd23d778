"""One HTML file of finished runs, or of an audit, that opens anywhere without a network."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_report"]

_GENERATOR = b'<meta name="generator" content="nearsay '


def write_report(
    runs: Sequence[Path], target: Path, *, title: str, split: str | None = None
) -> Path:
    """Compare finished run folders in one self-contained HTML file; returns `target`.

    Runs that differ only in their seed form a group. They are compared on `split`, by default on
    the test set, or on held-out examples if there is no test set. The same runs give the same
    bytes.

    Raises:
        ValueError: if a folder cannot be read; it names the file.
        RunError: if `target` exists and is not a page of nearsay.
        ImportError: if the extra is not installed.
    """
    from nearsay.errors import CANNOT_CREATE, RunError  # noqa: PLC0415

    # Drawing is an extra and takes a second to import; checkpoints import torch.
    from nearsay.report.training_page import render  # noqa: PLC0415
    from nearsay.training.checkpoints import write_whole  # noqa: PLC0415

    page = render(runs, title=title, split=split)
    if target.is_dir():
        example = target / "report.html"
        raise RunError(f"{target} is a folder. Name a file, such as {example}.", CANNOT_CREATE)
    if target.is_file() and target.stat().st_size and _GENERATOR not in target.read_bytes():
        raise RunError(
            f"{target} is not a page of nearsay and would be replaced. Choose another file.",
            CANNOT_CREATE,
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, page.encode())
    return target
