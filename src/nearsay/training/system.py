"""The machine that a run is on: its signals, its clock, its memory, and what torch shall do and draw there."""

import os
import platform
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nearsay import distributed
from nearsay.experiment import Machine

_LOOK = 64  # steps, at most, between two looks at the device
_PAUSE = 0.25  # seconds, about, between two looks
PARENT = "NEARSAY_PARENT"  # the variable that names the process to end with


class Clock:
    """Counts images per second while training, leaving out evaluation, checkpoints and the first steps."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._at, self._step = time.perf_counter(), 0
        self._seconds, self._steps, self._is_warm = 0.0, 0, False
        self._first = 0.0

    def resume(self, rate: float) -> None:
        """Images per second of an earlier process, which are those of the run until this one has made a step."""
        self._first = rate

    @property
    def rate(self) -> float:
        """Images per second of the steady state; of the first steps, if there were no others."""
        return self.batch_size * self._steps / self._seconds if self._seconds else self._first

    def is_due(self, step: int) -> bool:
        """Whether it is time to look at the device."""
        return step - self._step >= _LOOK or time.perf_counter() - self._at >= _PAUSE

    def look(self, step: int) -> None:
        """The device has done `step` steps now."""
        now, steps = time.perf_counter(), step - self._step
        if steps and self._is_warm:
            self._seconds += now - self._at
            self._steps += steps
        elif steps:
            self._first = self.batch_size * steps / (now - self._at)
            self._is_warm = True
        self._at, self._step = now, step

    def restart(self, step: int) -> None:
        """What was done since the last look is not to be counted."""
        self._at, self._step = time.perf_counter(), step


@contextmanager
def signals() -> Iterator[list[int]]:
    """A list to which SIGTERM and SIGINT are added as they come, instead of ending the process."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python gives signals to the main thread only
        return
    watched = (signal.SIGTERM, signal.SIGINT)
    before = {
        each: signal.signal(each, lambda number, _: received.append(number)) for each in watched
    }
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def follow_parent() -> None:
    """End as by SIGTERM when the process that started this one is gone, if it asked for that in the environment.

    What was killed cannot tell its children, and they would go on and keep their folders locked.
    """
    parent = os.environ.pop(PARENT, None)  # not for the children of this process
    if parent is not None:
        threading.Thread(target=_follow, args=(int(parent),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def backend(machine: Machine, device: torch.device, seed: int) -> Iterator[None]:
    """Let torch choose the fastest algorithms, or those that always give the same bits; afterwards all is as before."""
    benchmark, deterministic = (
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices=devices),
            torch.cuda.device(device) if devices else nullcontext(),
        ):
            torch.manual_seed(
                seed
            )  # only modules with draws of their own, such as dropout, take from there
            torch.backends.cudnn.benchmark = not machine.deterministic
            if machine.deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True)
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)


@contextmanager
def one_thread() -> Iterator[None]:
    """Calculate without others, for tensors so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def own_states(device: torch.device, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """What differs between processes, of all of them one after another: where torch's generators stand, and buffers.

    All of them ask for it at once.
    """
    return {
        name: distributed.gather(look().to(device)).cpu()
        for name, (look, _) in _own(device, buffers).items()
    }


def set_own_states(
    saved: Mapping[str, Tensor], device: torch.device, buffers: Sequence[Tensor]
) -> None:
    """Let all processes go on from the states that the first of them has in `saved`.

    Of states of another number of processes only the first is used; the others draw as they began, and keep the buffers
    that they have.
    """
    for name, (look, put) in _own(device, buffers).items():
        size, state = len(look()), saved.get(name)
        is_whole = state is not None and len(state) == size * distributed.num_processes()
        if distributed.share("whole" if is_whole else "", device):
            states = torch.zeros(
                size * distributed.num_processes(), dtype=torch.uint8, device=device
            )
            if state is not None:
                states.copy_(state)
            distributed.broadcast_([states])
            put(states[distributed.rank() * size :][:size].cpu().clone())
        elif state is not None:
            put(state[:size].clone())


def _own(
    device: torch.device, buffers: Sequence[Tensor]
) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    """How to look at each state of this process, as bytes, and how to set it."""
    found: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]
    found = {"generator.cpu": (torch.get_rng_state, torch.set_rng_state)}
    if device.type == "cuda":
        look, put = (
            partial(torch.cuda.get_rng_state, device),
            partial(torch.cuda.set_rng_state, device=device),
        )
        found["generator.cuda"] = (look, put)
    if (
        distributed.num_processes() > 1 and buffers
    ):  # of a single process they are in its checkpoint by their names
        found["own.buffers"] = (partial(_bytes, buffers), partial(_set_bytes, buffers))
    return found


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])


def _set_bytes(tensors: Sequence[Tensor], content: Tensor) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for tensor, piece in zip(tensors, torch.split(content, sizes), strict=True):
        tensor.copy_(
            piece.clone().view(tensor.dtype).view_as(tensor)
        )  # a clone, as numbers begin at whole multiples


def hardware(device: torch.device) -> str:
    """The name of what computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def peak_memory(device: torch.device) -> int:
    """Bytes that were in use at most: on the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
