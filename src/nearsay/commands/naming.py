"""Where runs go if nobody says where: a readable name that is the same for the same command."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearsay.config.naming import run_name
from nearsay.config.text import split_pairs


def default_folder(origin: Mapping[str, Any]) -> Path:
    """Where a run goes, such as runs/cifar10-method=ncr-noise=0.4."""
    return Path("runs", run_name(origin))


def default_sweep_folder(recipe: str, arguments: Sequence[str], overrides: Sequence[str]) -> Path:
    """Where a sweep goes, such as runs/sweep-toy-noise=0.2,0.4: by its lists and ranges, as they were written."""
    origin = {"recipe": recipe, "arguments": split_pairs(arguments), "overrides": overrides}
    split_pairs(overrides)  # refuses what is no key=value before a name is made of it
    return Path("runs", f"sweep-{run_name(origin)}")
