"""The whole page: its parts, set into the one template."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nearsay import __version__
from nearsay.report.comparison import compare
from nearsay.report.markup import Section
from nearsay.report.sections import SECTIONS
from nearsay.training.progress import plain


def render(runs: Sequence[Path], *, title: str, split: str | None = None) -> str:
    """The page that compares runs, as text; see `write_report`."""
    comparison = compare(runs, split)
    sections = [section for make in SECTIONS if (section := make(comparison)) is not None]
    return fill(title, sections, source="the folders of finished runs")


def fill(
    title: str, sections: Sequence[Section], *, source: str, style: str = "", script: str = ""
) -> str:
    """The template with these parts; of scripts only `script` runs, as its hash is all that the page allows."""
    environment = Environment(
        loader=PackageLoader("nearsay.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        title=plain(title),
        sections=sections,
        source=source,
        version=__version__,
        style=Markup(style),
        script=Markup(script),
        allowed=Markup(f"; script-src 'sha256-{digest}'" if script else ""),
    )
