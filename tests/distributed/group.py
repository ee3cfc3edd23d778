"""Starts real gloo process groups, one for each size, and brings home what every rank saw."""

import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

NUM_PROCESSES = (2, 3)
PATIENCE = 90  # seconds until a group counts as hung
TESTS = Path(__file__).parents[1]

in_groups = pytest.mark.parametrize("num_processes", NUM_PROCESSES)


def results(num_processes: int, name: str) -> list[dict[str, Tensor]]:
    """What each rank saw of a scenario, or of the collectives."""
    ranks = _run(num_processes)
    if isinstance(ranks, str):
        pytest.fail(ranks, pytrace=False)
    return [rank[name] for rank in ranks]


@cache
def _run(num_processes: int) -> list[dict[str, dict[str, Tensor]]] | str:
    """Results of all tests at once, because a process takes seconds to start; or the failure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [_start(folder, rank, num_processes) for rank in range(num_processes)]
        try:
            _wait(folder, processes)
        finally:
            _stop(processes)
        # A rank counts by its file, not by its exit code: gloo sometimes aborts after all is done.
        if all((folder / f"{rank}.pt").exists() for rank in range(num_processes)):
            return [
                torch.load(folder / f"{rank}.pt", weights_only=True)
                for rank in range(num_processes)
            ]
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        output = [path.read_text()[-2000:] for path in sorted(folder.glob("*.output"))]
        return "\n".join([f"the group of {num_processes} did not finish:", *(errors or output)])


def _start(folder: Path, rank: int, num_processes: int) -> subprocess.Popen:
    words = ["-m", "distributed.worker", str(folder), str(rank), str(num_processes)]
    with (folder / f"{rank}.output").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-W", "error", *words],
            cwd=TESTS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(folder: Path, processes: list[subprocess.Popen]) -> None:
    """Until all have left their results, one has failed, or patience ends."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        # Asked first: a result comes before the end.
        ended = [process.poll() is not None for process in processes]
        done = [(folder / f"{rank}.pt").exists() for rank in range(len(processes))]
        if all(done) or any(e and not d for e, d in zip(ended, done, strict=True)):
            return
        time.sleep(0.05)


def _stop(processes: list[subprocess.Popen]) -> None:
    """At once: what they had to say is written, and leaving Python takes seconds."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
