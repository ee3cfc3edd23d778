"""What is installed and what does not fit together, found out without ever failing."""

import platform
import re
import shutil
import sys
from importlib import metadata
from typing import NamedTuple

from nearsay import __version__
from nearsay.errors import one_line

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?")


class Finding(NamedTuple):
    """Something that was looked at."""

    name: str
    value: str
    problem: str = ""  # empty where all is well


def examine() -> list[Finding]:
    """Versions, device and extras, each with what is wrong with it."""
    return [
        Finding("nearsay", __version__),
        Finding("Python", f"{platform.python_version()} ({sys.executable})"),
        Finding("system", f"{platform.system()} {platform.machine()}"),
        *_packages(),
        *_device(),
    ]


def _packages() -> list[Finding]:
    try:
        required = metadata.requires("nearsay") or []
    except metadata.PackageNotFoundError:
        return [
            Finding(
                "packages",
                "unknown",
                "nearsay runs without being installed; pip install . in the clone",
            )
        ]
    return [_package(*found.groups()) for found in map(_REQUIREMENT.match, required) if found]


def _package(name: str, least: str | None, extra: str | None) -> Finding:
    label = f"{name} [{extra}]" if extra else name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        cure = "" if extra else "is missing; pip install . in the clone again"
        told = f'; pip install ".[{extra}]" in the clone' if extra else ""
        return Finding(label, f"not installed{told}", cure)
    if least and _numbers(version) < _numbers(least):
        return Finding(label, version, f"is older than {least}; pip install --upgrade {name}")
    if name == "torchvision" and ("+cpu" in version) != ("+cpu" in _version("torch")):
        return Finding(
            label,
            version,
            f"is not of one build with torch {_version('torch')}; install both from one index",
        )
    return Finding(label, version)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without zeros at the end: 1.10 comes after 1.9, and 2 is 2.0."""
    release = re.match(r"[\d.]*", version)
    numbers = [int(each) for each in (release[0] if release else "").split(".") if each]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _device() -> list[Finding]:
    try:
        import torch  # noqa: PLC0415  # a broken torch is something to tell, not to fail on

        threads = torch.get_num_threads()
        cores = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        if torch.cuda.is_available():
            names = [
                torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
            ]
            return [Finding("device", f"{', '.join(names)}; CUDA {torch.version.cuda}")]
        has_driver = shutil.which("nvidia-smi") is not None
        build = (
            f"torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch is built for CPUs only"
        )
        problem = (
            f"there is an NVIDIA driver, but torch cannot use it: {build}" if has_driver else ""
        )
        return [Finding("device", cores, problem)]
    except Exception as error:  # drivers and broken installations raise nearly anything
        reason = one_line(error)
        return [Finding("device", "unknown", f"torch cannot be used: {reason}")]
