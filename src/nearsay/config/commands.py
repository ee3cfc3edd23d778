"""How runs are called: where they go if nobody says where, and the command that makes one again."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearsay.config.naming import run_name
from nearsay.config.text import split_pairs


def default_folder(origin: Mapping[str, Any]) -> Path:
    """Where a run goes, such as runs/cifar10-method=ncr-noise=0.4."""
    return Path("runs", run_name(origin))


def command_again(origin: Mapping[str, Any], *, relabeled: Path, out: Path) -> str:
    """The command line that trains a run again on other labels, of which none is to be hidden as some were before."""
    kept = [each for each in origin["overrides"] if not each.startswith(("relabeled=", "labeled="))]
    words = [
        "nearsay",
        "train",
        origin["recipe"],
        *(f"{key}={value}" for key, value in origin["arguments"].items()),
    ]
    for change in (*kept, f"relabeled={relabeled}"):
        words += ["--set", change]
    return shlex.join([*words, "--out", str(out)])


def default_sweep_folder(recipe: str, arguments: Sequence[str], overrides: Sequence[str]) -> Path:
    """Where a sweep goes, such as runs/sweep-toy-noise=0.2,0.4: by its lists and ranges, as they were written."""
    origin = {"recipe": recipe, "arguments": split_pairs(arguments), "overrides": overrides}
    split_pairs(overrides)  # refuses what is no key=value before a name is made of it
    return Path("runs", f"sweep-{run_name(origin)}")
