"""The verb doctor: what is installed, and what does not fit together; it never fails itself."""

import platform
import re
import shutil
import sys
from importlib import metadata
from typing import NamedTuple

from nearsay._version import __version__
from nearsay.cli.options import Json, print_json
from nearsay.errors import one_line
from nearsay.training.progress import make_table, print_table

# A name, the lowest version, and the extra that needs it: "altair>=5.5; extra == 'report'".
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?")


class Finding(NamedTuple):
    """Something that was examined."""

    name: str
    value: str
    problem: str = ""  # empty where all is well


def doctor(as_json: Json = False) -> None:
    """Show what is installed and what does not fit together."""
    findings = examine()
    problems = [f"{part.name} {part.problem}" for part in findings if part.problem]
    if as_json:
        print_json({"found": {part.name: part.value for part in findings}, "problems": problems})
        return
    print_table(make_table(("", ""), [(part.name, part.value) for part in findings]))
    for problem in problems:
        print(f"Problem: {problem}.")
    if not problems:
        print("Everything fits together.")


def examine() -> list[Finding]:
    """Versions, device and extras, each with what is wrong with it."""
    return [
        Finding("nearsay", __version__),
        Finding("Python", f"{platform.python_version()} ({sys.executable})"),
        Finding("system", f"{platform.system()} {platform.machine()}"),
        *_packages(),
        _device(),
    ]


def _packages() -> list[Finding]:
    try:
        required = metadata.requires("nearsay") or []
    except metadata.PackageNotFoundError:
        problem = "nearsay runs without being installed; pip install . in the clone"
        return [Finding("packages", "unknown", problem)]
    matches = map(_REQUIREMENT.match, required)
    return [_package(*match.groups()) for match in matches if match]


def _package(name: str, least: str | None, extra: str | None) -> Finding:
    label = f"{name} [{extra}]" if extra else name
    version = _version(name)
    if not version:
        # Extras are optional, so a missing one is no problem.
        if extra:
            return Finding(label, f'not installed; pip install ".[{extra}]" in the clone')
        return Finding(label, "not installed", "is missing; pip install . in the clone again")
    problem = ""
    torch = _version("torch")
    if least and _numbers(version) < _numbers(least):
        problem = f"is older than {least}; pip install --upgrade {name}"
    # A torchvision for CPUs does not load beside a torch for CUDA, nor the reverse.
    elif name == "torchvision" and ("+cpu" in version) != ("+cpu" in torch):
        problem = f"is not of one build with torch {torch}; install both from one index"
    return Finding(label, version, problem)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version without zeros at the end: 1.10 is newer than 1.9."""
    release = re.match(r"[\d.]*", version)
    numbers = [int(part) for part in (release[0] if release else "").split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _device() -> Finding:
    try:
        import torch  # noqa: PLC0415  # a broken torch is shown, not an error

        if torch.cuda.is_available():
            numbers = range(torch.cuda.device_count())
            names = ", ".join(torch.cuda.get_device_name(number) for number in numbers)
            return Finding("device", f"{names}; CUDA {torch.version.cuda}")
        threads = torch.get_num_threads()
        problem = ""
        if shutil.which("nvidia-smi") is not None:
            build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
            problem = (
                f"there is an NVIDIA driver, but torch cannot use it: torch is built for {build}"
            )
        return Finding("device", f"CPU, {threads} thread{'s' if threads > 1 else ''}", problem)
    except Exception as error:  # drivers and broken installations raise nearly anything
        return Finding("device", "unknown", f"torch cannot be used: {one_line(error)}")
