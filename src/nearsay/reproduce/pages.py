"""A page of HTML that opens anywhere, in the dress of the report."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from nearsay import __version__
from nearsay.report.markup import Section
from nearsay.run import write_whole


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the sections into the template of the report, in one piece."""
    environment = Environment(
        loader=PackageLoader("nearsay.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("page.html").render(title=title, sections=sections, version=__version__)
    write_whole(path, page.encode())
