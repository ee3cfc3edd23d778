"""Trainings as processes that a test can hold, signal and wait for; and when two folders are the same."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.server import COUNTER, Hold
from nearsay.training.checkpoints import LockedRun

TESTS = Path(__file__).parents[1]
# Seconds until a process counts as hung, also on a machine with many times as many processes as
# cores. No test that passes waits so long.
PATIENCE = 900
# Steps between two checkpoints.
INTERVAL = 3
SMALL = [
    "epochs=4",
    "--set",
    "data.num_train=800",
    "--set",
    "data.num_test=200",
    "--set",
    "batch_size=64",
]
# That each of them takes.
STEPS = 48
EXPERIMENTS = {
    "ncr": ["toy", "method=ncr", *SMALL],
    "mixup": [
        "toy",
        "method=ncr+mixup",
        *SMALL,
        "--set",
        "backbone.batch_norm=true",
        "--set",
        "averaging=0.9",
    ],
    "two networks": [
        "toy",
        "method=ncr+elr",
        *SMALL,
        "--set",
        "networks=2",
        "--set",
        "averaging=0.9",
    ],
}
LOADINGS = {
    "resident": ["--set", "machine.loading=resident"],
    "no worker": ["--set", "machine.loading=streaming", "--set", "machine.workers=0"],
    "one worker": ["--set", "machine.loading=streaming", "--set", "machine.workers=1"],
    "two workers": ["--set", "machine.loading=streaming", "--set", "machine.workers=2"],
}


@dataclass
class Job:
    """A training in a process of its own."""

    server: "Server"
    pid: int
    folder: Path
    counter: Path
    output: Path

    @property
    def steps(self) -> int:
        """How many steps the run has done, those of earlier processes included; −1 before its first."""
        return read_counter(self.counter)[1]

    @property
    def said(self) -> str:
        """All that it has printed."""
        return self.output.read_text()

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """Its exit code, negative for a signal; None if it is still running after that long."""
        return self.server.ask({"wait": self.pid, "seconds": seconds})

    def until_held(self) -> int:
        """Wait until the process that was to be held has stopped itself; its process id."""
        mark = self.counter.with_suffix(".held")
        assert self.until(lambda: mark.exists() and mark.read_text() != ""), self.said
        pid = int(mark.read_text())
        assert self.until(lambda: state(pid) == "T"), self.said
        return pid

    def end(self) -> int:
        """Its exit code; a job that never ends is a failure."""
        code = self.wait()
        assert code is not None, f"it hangs, and has said: {self.said}"
        return code

    def signal(self, number: int) -> None:
        """To the process alone."""
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """To the process and its workers, if any of them is left."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def until(self, is_so: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Whether it becomes so before the job ends."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline or is_over(self.pid):
                return is_so()
            time.sleep(0.0005)
        return True


class Server:
    """Starts jobs; see `faults.server`."""

    def __init__(self, process: "subprocess.Popen[str]", scratch: Path) -> None:
        self.process, self.scratch, self.number = process, scratch, 0

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to a request."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        folder: Path,
        *words: str,
        verb: str = "train",
        launch: str | None = None,
        hold: Hold | None = None,
    ) -> Job:
        """Train into the folder, or resume there; `launch` starts two ranks, by "fork" or "anew"."""
        self.number += 1
        counter, output = (self.scratch / f"{self.number}.{kind}" for kind in ("steps", "output"))
        request: dict[str, Any] = {
            "words": ["train", *words, "--out", str(folder), "--quiet"],
            "counter": str(counter),
            "output": str(output),
        }
        if verb != "train":
            request["words"] = [verb, str(folder), *words]
        if launch is not None:
            request["launch"] = launch
        if hold is not None:
            request["hold"] = hold
        pid = self.ask(request)
        return Job(self, pid, folder, counter, output)

    def finish(self, folder: Path, *words: str, launch: str | None = None) -> Path:
        """Train to the end; the folder."""
        job = self.start(folder, *words, launch=launch)
        code = job.end()
        assert code == 0, job.said
        return folder


@contextmanager
def serving(scratch: Path) -> Iterator[Server]:
    """A server that ends with the block; jobs that still run then are none of its business."""
    command = [sys.executable, "-m", "faults.server"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=TESTS,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Server(process, scratch)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def words_of(experiment: str, loading: str = "resident", *, every: int = INTERVAL) -> list[str]:
    """A command line, with a checkpoint after every so many steps."""
    return [
        *EXPERIMENTS[experiment],
        *LOADINGS[loading],
        "--set",
        f"machine.checkpoint_steps={every}",
    ]


def read_counter(path: Path) -> tuple[int, int]:
    """The process that counts, and the steps that it has seen done."""
    try:
        process, steps = COUNTER.unpack(path.read_bytes())
    except FileNotFoundError:
        return 0, -1
    return process, steps


def last_checkpoint(folder: Path) -> int:
    """The step that the run would go on from."""
    found = LockedRun(folder).load()
    return 0 if found is None else found.step


def content(folder: Path) -> dict[str, bytes]:
    """All that two runs of one experiment must have in common, byte for byte."""
    paths = [
        folder / name
        for name in ("model.safetensors", "dynamics.safetensors", "log.jsonl", "labels.npz")
    ]
    paths += sorted((folder / "predictions").iterdir())
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    newest = LockedRun(folder).checkpoints()[0]
    return {**found, f"{newest.name}/tensors": (newest / "tensors.safetensors").read_bytes()}


def assert_same(folder: Path, whole: Path) -> None:
    """The run in `folder` has ended as the one in `whole` has."""
    found, expected = content(folder), content(whole)
    assert found.keys() == expected.keys(), f"{sorted(found)}, not {sorted(expected)}"
    different = [name for name in found if found[name] != expected[name]]
    assert not different, f"{folder} and {whole} differ in {different}"
    leftovers = [path.name for path in folder.rglob(".*") if path.name != ".lock"]
    assert not leftovers, f"{folder} still holds {leftovers}"


def is_over(pid: int) -> bool:
    """Whether the process has ended, even if nobody has asked for its exit code yet."""
    return state(pid) in ("", "Z")


def state(pid: int) -> str:
    """The state of a process as `ps` writes it, such as T for stopped; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def at_step(number: int, rank: int = 0) -> Hold:
    """The moment before the n-th step of a process."""
    return Hold("nearsay.training.step:Step.__call__", number, rank)
