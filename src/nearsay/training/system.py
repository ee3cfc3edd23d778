"""The machine of a run: signals, speed, memory, torch's settings and its random generators."""

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
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay import distributed
from nearsay.experiment import Machine

# The host waits for the device after this many steps, or about this many seconds.
_LOOK_STEPS = 64
_LOOK_SECONDS = 0.25
# The environment variable with the number of the process to end with.
PARENT = "NEARSAY_PARENT"


class Clock:
    """Images per second of training, without evaluation, checkpoints and the first steps."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        # The last look at the device: when it was, and after which step.
        self._at, self._step = time.perf_counter(), 0
        # What counts, from the second look on.
        self._seconds, self._steps, self._is_warm = 0.0, 0, False
        # Images per second of the first steps, or of an earlier process.
        self._first = 0.0

    def resume(self, rate: float) -> None:
        """Use the images per second of an earlier process until this one has made a step."""
        self._first = rate

    @property
    def rate(self) -> float:
        """Images per second; of the first steps if there were no others."""
        return self.batch_size * self._steps / self._seconds if self._seconds else self._first

    def is_due(self, step: int) -> bool:
        """Whether it is time to look at the device."""
        is_late = time.perf_counter() - self._at >= _LOOK_SECONDS
        return is_late or step - self._step >= _LOOK_STEPS

    def look(self, step: int) -> None:
        """Count the steps until `step`, which the device has now done."""
        now, steps = time.perf_counter(), step - self._step
        if steps and self._is_warm:
            self._seconds += now - self._at
            self._steps += steps
        elif steps:
            self._first = self.batch_size * steps / (now - self._at)
            self._is_warm = True
        self._at, self._step = now, step

    def restart(self, step: int) -> None:
        """Leave out the time since the last look."""
        self._at, self._step = time.perf_counter(), step


@contextmanager
def signals() -> Iterator[list[int]]:
    """A list that gets SIGTERM and SIGINT as they arrive; they do not end the process."""
    received: list[int] = []
    # Python gives signals to the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_parent() -> None:
    """End as by SIGTERM when the process named by the variable `PARENT` ends.

    A process that is killed cannot stop its children, which would keep their folders locked.
    """
    # Removed, so that children of this process do not follow it too.
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        threading.Thread(target=_follow, args=(int(parent),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def backend(machine: Machine, device: torch.device, seed: int) -> Iterator[None]:
    """Let torch choose the fastest or deterministic algorithms; restore its settings after."""
    benchmark = torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices=devices),
            torch.cuda.device(device) if devices else nullcontext(),
        ):
            # Only modules with draws of their own, such as dropout, use this generator.
            torch.manual_seed(seed)
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
    """Use one thread, for tensors so small that more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def own_states(device: torch.device, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """The states that differ between processes, of all processes one after another.

    They are torch's generators and the buffers of networks. All processes must call this together.
    """
    states = {}
    for name, state in _states_of_process(device, buffers).items():
        states[name] = distributed.gather(state.read().to(device)).cpu()
    return states


def set_own_states(
    saved: Mapping[str, Tensor], device: torch.device, buffers: Sequence[Tensor]
) -> None:
    """Restore the states of all processes from `saved`, which the first process has.

    If they are of another number of processes, only the first is restored. The others keep the
    generators and the buffers that they have.
    """
    num = distributed.num_processes()
    for name, state in _states_of_process(device, buffers).items():
        size, content = len(state.read()), saved.get(name)
        is_whole = content is not None and len(content) == size * num
        if distributed.share("whole" if is_whole else "", device):
            states = torch.zeros(size * num, dtype=torch.uint8, device=device)
            if content is not None:
                states.copy_(content)
            distributed.broadcast_([states])
            state.write(states[distributed.rank() * size :][:size].cpu().clone())
        elif content is not None:
            state.write(content[:size].clone())


class _State(NamedTuple):
    """A state of this process, which is read and written as bytes."""

    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]


def _states_of_process(device: torch.device, buffers: Sequence[Tensor]) -> dict[str, _State]:
    states = {"generator.cpu": _State(torch.get_rng_state, torch.set_rng_state)}
    if device.type == "cuda":
        states["generator.cuda"] = _State(
            partial(torch.cuda.get_rng_state, device),
            partial(torch.cuda.set_rng_state, device=device),
        )
    # On one process, buffers are restored with the networks.
    if distributed.num_processes() > 1 and buffers:
        states["own.buffers"] = _State(partial(_bytes_of, buffers), partial(_set_bytes, buffers))
    return states


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts)


def _set_bytes(tensors: Sequence[Tensor], content: Tensor) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for tensor, piece in zip(tensors, torch.split(content, sizes), strict=True):
        # A clone, because a view as another dtype needs an aligned start.
        tensor.copy_(piece.clone().view(tensor.dtype).view_as(tensor))


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the processor with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def peak_memory(device: torch.device) -> int:
    """The largest number of bytes in use: on the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
