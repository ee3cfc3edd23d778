"""One HTML file that shows finished runs, or an audit of one, and opens anywhere, without a network."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_report"]

_OURS = b'<meta name="generator" content="nearsay '


def write_report(
    runs: Sequence[Path], target: Path, *, title: str, split: str | None = None
) -> Path:
    """Compare finished run folders in one self-contained HTML file; returns `target`.

    Runs that differ only in their seed form a group. They are compared on `split`, by default on the test set or, where
    there is none, on held-out examples. The same runs give the same bytes. Raises ValueError for a folder
    that cannot be read, naming the file, RunError for a target that is there and no page of nearsay, and ImportError
    if the extra is not installed.
    """
    from nearsay.errors import (  # noqa: PLC0415
        CANNOT_CREATE,
        RunError,
    )
    from nearsay.report.page import render  # noqa: PLC0415  # drawing is an extra, and takes a second to import

    # brings torch, which `import nearsay.report` should not
    from nearsay.training.checkpoints import write_whole  # noqa: PLC0415

    page = render(runs, title=title, split=split)
    if target.is_dir():
        raise RunError(
            f"{target} is a folder; name a file in it, such as {target / 'report.html'}",
            CANNOT_CREATE,
        )
    if target.is_file() and target.stat().st_size and _OURS not in target.read_bytes():
        raise RunError(
            f"{target} is no page of nearsay and would be replaced; choose another file",
            CANNOT_CREATE,
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, page.encode())
    return target
