"""Forks trainings out of one process that has torch loaded: `python -m faults.server` reads requests from stdin.

A request is a line of JSON, and so is its answer. `{"words": ..., "counter": ..., "output": ...}`
starts a command line of nearsay in a session of its own, and answers its process id. With
`"launch"` two ranks run it under the agent of torchrun, which forks them ("fork") or starts them as
torchrun does ("anew"). With `"hold"` the process stops itself, as by SIGSTOP, before the call that
the request names, so that a test can act at this very moment on a machine of any speed.
`{"wait": pid, "seconds": ...}` answers an exit code, negative for a signal, or null if it is still
running.
"""

import atexit
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nearsay import config
from nearsay.cli import main
from nearsay.recipes import digits, toy  # noqa: F401  # loaded here once, not in every fork
from nearsay.training.loop import train  # noqa: F401
from nearsay.training.step import Step

# The process that counts, and the steps of the run that are done, −1 before the first.
COUNTER = struct.Struct("=qq")
# Where a process learns whether it is to be held; ranks inherit it from the agent.
HOLD = "NEARSAY_TESTS_HOLD"
TORCHRUN = ["--standalone", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1"]


def serve() -> int:
    """Until stdin ends."""
    # A fork has only the thread that forked.
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
    config.call_recipe("toy", [])
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _answer(_wait(request["wait"], request["seconds"]))
        elif pid := os.fork():
            _answer(pid)
        else:
            code = _run(request)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            # As taking down a forked interpreter copies every page of it, which takes a second.
            os._exit(code)
    return 0


def _answer(value: int | None) -> None:
    print(json.dumps(value), flush=True)


def _wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.001)


def _run(request: dict[str, Any]) -> int:
    # A process group to signal, as a terminal or a scheduler does.
    os.setsid()
    with open(os.devnull) as nothing, open(request["output"], "ab") as output:
        # Nobody but the server may hold its pipes.
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if "hold" in request:
        os.environ[HOLD] = json.dumps(request["hold"])
    if "launch" in request:
        return _launch(request)
    _hold(Path(request["counter"]))
    _count(Path(request["counter"]))
    return main(request["words"])


def _launch(request: dict[str, Any]) -> int:
    """What torchrun does; to load torch anew for every rank takes seconds, so forking them is the rule."""
    counter, words = request["counter"], request["words"]
    if request["launch"] == "anew":
        torchrun.main([*TORCHRUN, "-m", "faults.server", counter, *words])
        return 0
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=3,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(settings, run_rank)(counter, words)
    return 0


def run_rank(counter: str, words: list[str]) -> None:
    """One process of several; SIGUSR1 makes it fail."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, _fail)
    # Not as the agent, of which this is a copy.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _hold(Path(counter))
    _count(Path(f"{counter}-{os.environ['RANK']}"))
    if code := main(words):
        sys.exit(code)


class Hold(NamedTuple):
    """A moment in the life of a process: before the n-th call of a function, on one rank."""

    # "module:function" or "module:Class.method"
    place: str
    number: int
    rank: int = 0


def _hold(counter: Path) -> None:
    """Stop this process at the moment that the request names; only the first one that gets there."""
    if HOLD not in os.environ:
        return
    hold = Hold(*json.loads(os.environ[HOLD]))
    if hold.rank != int(os.environ.get("RANK", 0)):
        return
    module, _, path = hold.place.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    call: Callable[..., Any] = getattr(owner, name)
    num_calls = 0

    def held(*arguments: Any, **choices: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        # A rank that is started again goes past this moment; the file says that it was there.
        mark = counter.with_suffix(".held")
        if num_calls == hold.number and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(*arguments, **choices)

    setattr(owner, name, held)


def _fail(number: int, frame: object) -> None:
    raise ArithmeticError("told to fail")


def _count(path: Path) -> None:
    """Let every step leave its number where a kill cannot take it away."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(COUNTER.pack(os.getpid(), -1))
    draft.rename(path)
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    call = Step.__call__

    def counted(self: Step, *arguments: Any) -> None:
        call(self, *arguments)
        COUNTER.pack_into(shared, 0, os.getpid(), int(self.count))

    Step.__call__ = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else serve())
