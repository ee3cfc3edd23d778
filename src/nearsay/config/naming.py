"""The name of a run, which says what was chosen and is the same for the same choices."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_LONGEST = 100  # characters, well below what file systems allow
_FOLDERS = re.compile(r"[^,]*/(?=[^,/])|/+$")  # of each path of a list, all but what it leads to


def run_name(origin: Mapping[str, Any]) -> str:
    """Such as cifar10-method=ncr-noise=0.4: the recipe and what was chosen, whatever the order it was given in.

    Where the run takes place is left out, so that it can go on elsewhere. Of a path only the last part is in the name.
    A hash follows where the name alone does not tell two runs apart: when it was cut or cleaned, and for a recipe in a
    file, by what is in the file.
    """
    recipe, arguments = str(origin["recipe"]), dict(origin["arguments"])
    chosen = dict(
        each.split("=", 1) for each in origin["overrides"] if not each.startswith("machine.")
    )
    pairs = [
        f"{key}={value}"
        for choices in (arguments, chosen)
        for key, value in sorted(choices.items())
    ]
    plain = "-".join([PurePath(recipe).stem, *pairs])
    shown = [
        f"{key}={_FOLDERS.sub('', value)}"
        for key, _, value in (each.partition("=") for each in pairs)
    ]
    name = re.sub(r"[^\w.=+,-]+", "_", "-".join([PurePath(recipe).stem, *shown]), flags=re.ASCII)[
        :_LONGEST
    ]
    source = origin.get("sha256", "")
    if name != plain or source:
        content = json.dumps([recipe, pairs, source])
        name = f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    return name
