"""The whole page: its parts, set into the one template."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from nearsay import __version__
from nearsay.report.comparison import compare
from nearsay.report.folders import plain
from nearsay.report.sections import SECTIONS


def render(runs: Sequence[Path], *, title: str) -> str:
    """The page as text; see `write_report`."""
    comparison = compare(runs)
    sections = [section for make in SECTIONS if (section := make(comparison)) is not None]
    environment = Environment(
        loader=PackageLoader("nearsay.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(title=plain(title), sections=sections, version=__version__)
