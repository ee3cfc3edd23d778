"""From a data set to batches: `Order` says which examples, `Reader` reads them, `Stream` reads
ahead.

The examples of a batch, and the box that is cut out of an image, are pure functions of (seed, step,
example). So the number of workers, the step where a run was resumed and the way of loading change
no batch.
"""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from nearsay import rng
from nearsay.batch import PADDING, Files, Inputs
from nearsay.data.images import decode
from nearsay.errors import BadImage, ImageError, WorkerError
from nearsay.transforms.geometry import RandomResizedCrop
from nearsay.transforms.views import Augment, Transform, Views, make_draws
from nearsay.validation import check_that

_Edges = tuple[float, float, float, float]  # left, top, right and bottom, in pixels
MARGIN = (
    224 / 256
)  # of the shorter side: what evaluation keeps of the middle, as usual for ImageNet
# Pixels of decoded images that wait to be cut, because boxes are computed faster for many at a
# time.
_HELD = 2**22
# Batches that a worker prepares in advance.
_AHEAD = 2
# Seconds for a killed worker to end; a worker that waits for a lost disk may never end.
_PATIENCE = 5.0
# What is raised if a worker dies while it hands over a batch.
_CUT_OFF = (ConnectionResetError, ConnectionRefusedError, EOFError)
# Share of the free memory of a device that resident images may take.
_SHARE = 0.4
# Signals that workers leave to the main process.
_IGNORED = (signal.SIGINT, signal.SIGTERM)


class Rows(NamedTuple):
    """The examples of one step.

    Attributes:
        indices: (B,) which examples; −1 where an image could not be decoded.
        inputs: (V·B, ...) their inputs; None if all inputs are on the device already.
        problems: Examples that could not be decoded, and why.
    """

    indices: Tensor
    inputs: Tensor | None
    problems: tuple[tuple[int, str], ...] = ()


class Lost:
    """Counts how many images in a row could not be decoded; too many mean that the data is gone."""

    def __init__(self, num_examples: int) -> None:
        self.num, self.most = 0, min(32, num_examples)

    def count(self, num: int, reasons: Collection[str]) -> None:
        """Add `num` images and the reasons of failures; BadImage after too many failures."""
        self.num = self.num + num if len(reasons) == num else 0
        if self.num >= self.most:
            reason = next(iter(reasons)).rpartition(";")[0]
            raise BadImage(
                f"{self.num} images in a row cannot be read ({reason}). "
                "Check that the data exists in a known format, and run the same command again."
            )


class Order:
    """Which examples are in the batch of a step: every pass has a new random order.

    A pass leaves out the examples that do not fill a batch. Steps count from the start of training.
    With `kinds`, the classes of the examples, all classes take turns: examples of small classes
    come several times in a pass, and some of large classes do not come.
    """

    def __init__(
        self, examples: Tensor, *, batch_size: int, seed: int, kinds: Tensor | None = None
    ) -> None:
        check_that(len(examples) > 0, "examples", "one or more to train on", len(examples))
        self.examples, self.seed, self.kinds = examples, seed, kinds
        self.batch_size = min(batch_size, len(examples))
        self.batches_per_pass = len(examples) // self.batch_size
        self._pass, self._shuffled = -1, examples

    def batch(self, step: int) -> Tensor:
        """(B,) the examples of a step, over all processes."""
        turn, place = divmod(step, self.batches_per_pass)
        if turn != self._pass:
            if self.kinds is None:
                self._shuffled = self._shuffle(turn, self.examples)
            else:
                self._shuffled = self._take_turns(turn)
            self._pass = turn
        return self._shuffled[place * self.batch_size : (place + 1) * self.batch_size]

    def _shuffle(self, turn: int, examples: Tensor, again: int = 0) -> Tensor:
        purpose = f"order {again}" if again else "order"
        return examples[rng.shuffle(self.seed, purpose, turn, examples)]

    def _take_turns(self, turn: int) -> Tensor:
        """The classes one after another, again and again."""
        assert self.kinds is not None
        numbers = sorted(set(self.kinds.tolist()) - {-1})
        num_rounds = -(-self.batches_per_pass * self.batch_size // len(numbers))
        columns = []
        for number in numbers:
            members = self.examples[self.kinds == number]
            num_shuffles = -(-num_rounds // len(members))
            shuffles = [self._shuffle(turn, members, again) for again in range(num_shuffles)]
            columns.append(torch.cat(shuffles)[:num_rounds])
        # Each row of this table has one example of every class.
        return torch.stack(columns, dim=1).flatten()

    def to(self, device: torch.device) -> None:
        """Compute the order on another device from now on; its bits are the same."""
        self.examples, self._pass = self.examples.to(device), -1
        self.kinds = None if self.kinds is None else self.kinds.to(device)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pass": -1}


@dataclass(frozen=True)
class Reader:
    """Reads the inputs of examples: rows of a tensor, or images decoded, cut and resized to a
    square.

    Args:
        inputs: All inputs of the data set.
        size: Side of the square.
        crops: For each view; None cuts out the middle of the image.
        seed: Of the crops.
        margin: Share of the shorter side that the middle has.
    """

    inputs: Inputs
    size: int
    crops: tuple[RandomResizedCrop | None, ...] = (None,)
    seed: int = 0
    margin: float = MARGIN

    def read(self, indices: Tensor, turn: int) -> Rows:
        """The rows of these examples in pass `turn`; those that cannot be decoded are padding."""
        if isinstance(self.inputs, Tensor):
            return Rows(indices, self.inputs[indices])
        shape = (len(self.crops), len(indices), 3, self.size, self.size)
        images = torch.zeros(shape, dtype=torch.uint8)
        draws: list[Tensor | None] = [None] * len(self.crops)
        for view, crop in enumerate(self.crops):
            if crop is not None:
                num = crop.num_draws
                draws[view] = make_draws(num, indices, seed=self.seed, epoch=turn, view=view)
        problems, held, num_pixels = [], {}, 0
        for row, index in enumerate(indices.tolist()):
            try:
                held[row] = decode(self.inputs.root / self.inputs.names[index])
            except ImageError as error:
                problems.append((index, str(error)))
                continue
            num_pixels += held[row].width * held[row].height
            if num_pixels >= _HELD:
                self._fill(images, held, draws)
                held, num_pixels = {}, 0
        self._fill(images, held, draws)
        bad = torch.tensor([index for index, _ in problems], dtype=torch.int64)
        read = indices.where(~torch.isin(indices, bad), PADDING)
        return Rows(read, images.flatten(0, 1), tuple(problems))

    def _fill(
        self, images: Tensor, held: dict[int, Image.Image], draws: list[Tensor | None]
    ) -> None:
        """Cut the held images, and write them by row into `images` (V, B, 3, size, size)."""
        if not held:
            return
        for view, (crop, drawn) in enumerate(zip(self.crops, draws, strict=True)):
            if crop is None or drawn is None:
                boxes = [_middle(image, self.margin) for image in held.values()]
            else:
                boxes = _cut(list(held.values()), crop, drawn[list(held)])
            for (row, image), box in zip(held.items(), boxes, strict=True):
                images[view, row] = _resized(image, box, self.size)


def training_reader(
    inputs: Inputs, augment: Augment | Views | None, *, size: int, seed: int
) -> Reader:
    """The reader that cuts the boxes of a `RandomResizedCrop` if it is the first of a view."""
    views: Sequence[Sequence[object]] = ((),)
    if isinstance(augment, Views):
        views = (augment.first, augment.second)
    elif augment is not None:
        views = (augment.transforms,)
    crops: list[RandomResizedCrop | None] = []
    for transforms in views:
        first = transforms[0] if transforms else None
        crops.append(first if isinstance(first, RandomResizedCrop) else None)
    is_cut = isinstance(inputs, Files) and any(crop is not None for crop in crops)
    return Reader(inputs, size, tuple(crops) if is_cut else (None,), seed)


def is_resident(inputs: Inputs, device: torch.device, wish: str) -> bool:
    """Whether all inputs are kept on the device, by `machine.loading` and the free memory."""
    if isinstance(inputs, Files):
        check_that(wish != "resident", "loading", "'streaming' or 'auto' for image files", wish)
        return False
    if wish != "auto" or device.type != "cuda":
        return wish != "streaming"
    return inputs.nbytes <= _SHARE * torch.cuda.mem_get_info(device)[0]


class _Flag:
    """An event without a lock; a process that dies while it reads Python's keeps its lock."""

    def __init__(self, context: BaseContext) -> None:
        self._raised = context.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._raised.value)

    def set(self) -> None:
        self._raised.value = 1


def _make_context() -> BaseContext:
    """Forked processes, with an event that a killed process cannot block.

    By this event torch ends its workers. Processes are forked from Python 3.14 on too, where that
    is not the default, because some readers cannot be pickled, and only a fork inherits the blocked
    signals.
    """
    context = copy(multiprocessing.get_context("fork"))
    context.Event = partial(_Flag, context)  # type: ignore[method-assign, assignment]
    return context


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block signals, also in workers that start meanwhile, until they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals(worker: int) -> None:
    """A signal to the group is for the main process, which ends its workers when it is ready."""
    for number in _IGNORED:
        # This also drops a signal that was blocked before.
        signal.signal(number, signal.SIG_IGN)


class _Watch:
    """Passes the end of a child process to torch only while a batch is waited for.

    torch answers with an error wherever the main thread is. In the middle of other work, such as
    writing a checkpoint, that error could be swallowed or mistaken for another.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_on and callable(self._before):
            self._before(number, frame)

    def take_over(self) -> bool:
        """Replace the handler; False if this object is it already, or in another thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGCHLD) is self:
            return False
        self._before = signal.signal(signal.SIGCHLD, self)
        return True

    def give_back(self) -> None:
        """Restore the handler of before."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if self._before is None else self._before)


_WATCH = _Watch()


@dataclass
class Stream:
    """Batches that workers read ahead; their number does not change the bits.

    Args:
        reader: Reads the examples of a step.
        who: From a step to the examples of this process, and the number of the pass.
        workers: How many processes; 0 reads in this process.
        timeout: Seconds to wait for a batch.
        pin: Whether to pin the memory of batches.
    """

    reader: Reader
    who: Callable[[int], tuple[Tensor, int]]
    workers: int
    timeout: float
    pin: bool = False
    # Steps that were not yielded yet, the workers, and whether the watch over children is ours.
    _left: range = field(default=range(0), init=False)
    _processes: list[BaseProcess] = field(default_factory=list, init=False)
    _took_over: bool = field(default=False, init=False)

    def rows(self, steps: range) -> Iterator[Rows]:
        """The rows of each step."""
        loader: DataLoader[Rows] = DataLoader(
            _Steps(self.reader, self.who),
            batch_size=None,
            sampler=steps,
            num_workers=self.workers,
            # Without a batch_size it gets one item and not a list.
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            timeout=self.timeout if self.workers else 0,
            # Without its own generator, iterating would draw from torch's global one.
            generator=torch.Generator(),
            worker_init_fn=_ignore_signals,
            multiprocessing_context=_make_context() if self.workers else None,
            prefetch_factor=_AHEAD if self.workers else None,
            pin_memory=self.pin,
        )
        self._left, others = steps, multiprocessing.active_children()
        with _signals_held_back():
            batches = iter(loader)
        children = multiprocessing.active_children()
        self._processes = [child for child in children if child not in others]
        self._took_over = _WATCH.take_over() or self._took_over
        # Processes that died are not among the children any more.
        if len(self._processes) < self.workers:
            raise RuntimeError("DataLoader worker exited unexpectedly as soon as it had begun")
        for step in steps:
            rows = self._wait(batches)
            self._left = range(step + 1, steps.stop)
            yield Rows(*rows)
        # There is no further batch, but torch ends its workers when it is asked for one.
        next(batches, None)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the death of a worker into WorkerError; on any error no worker is left behind."""
        try:
            yield
        except BaseException as error:
            # Workers ignore all other signals.
            for worker in self._processes:
                worker.kill()
            for worker in self._processes:
                worker.join(_PATIENCE)
            if not self._is_to_blame(error):
                raise
            # The first lines may be a traceback.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise WorkerError(
                f"a worker that reads images failed ({lines[-1][:200]}); in flight were "
                f"{self._in_flight()}; run the same command again to go on, with fewer workers "
                "(--set machine.workers=0) if it happens again"
            ) from error
        finally:
            if self._took_over:
                _WATCH.give_back()

    def _wait(self, batches: Iterator[Rows]) -> Rows:
        """The next batch; the only place where the death of a worker is reported, also an earlier
        one.
        """
        _WATCH.is_on = True
        try:
            dead = [str(process.pid) for process in self._processes if process.exitcode]
            if dead:
                pids = ", ".join(dead)
                raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly")
            return next(batches)
        finally:
            _WATCH.is_on = False

    def _is_to_blame(self, error: BaseException) -> bool:
        """Whether the error is about a worker of this stream; a worker of another may die
        meanwhile.
        """
        if isinstance(error, _CUT_OFF):
            return bool(self._processes)
        is_of_torch = isinstance(error, RuntimeError) and "DataLoader" in str(error)
        if not is_of_torch or isinstance(error, WorkerError):
            return False
        named = re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", str(error))
        # With fewer processes than workers, one died as soon as it had begun.
        if named is None or len(self._processes) < self.workers:
            return True
        return any(str(child.pid) in named[1].split(", ") for child in self._processes)

    def _in_flight(self) -> str:
        """The examples that workers were reading: five names, and how many more."""
        examples: list[int] = []
        for step in self._left[: _AHEAD * max(1, self.workers)]:
            examples += self.who(step)[0].tolist()
        inputs, names = self.reader.inputs, []
        for index in examples[:5]:
            names.append(inputs.names[index] if isinstance(inputs, Files) else f"example {index}")
        return f"{', '.join(names)} and {max(0, len(examples) - 5)} more"


def num_workers(inputs: Inputs, wish: int | None) -> int:
    """How many processes read: 0 for arrays, which are only indexed."""
    if wish is not None:
        return wish
    return min(8, len(os.sched_getaffinity(0))) if isinstance(inputs, Files) else 0


@contextmanager
def sweep(
    inputs: Inputs,
    *,
    size: int,
    margin: float = MARGIN,
    batch_size: int,
    workers: int,
    timeout: float,
    pin: bool,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Iterator[Rows]]:
    """All examples in their order, the last batch shorter; use them inside the `with` block.

    `part` (k, n) is the k-th of n runs of whole batches, counted from 0.
    """
    num = len(inputs)

    def who(step: int) -> tuple[Tensor, int]:
        return torch.arange(step * batch_size, min(num, (step + 1) * batch_size)), 0

    steps = range(-(-num // batch_size))
    own, parts = part
    steps = steps[len(steps) * own // parts : len(steps) * (own + 1) // parts]
    if isinstance(inputs, Tensor):
        yield (Rows(who(step)[0], _slice(inputs, step, batch_size)) for step in steps)
        return
    reader = Reader(inputs, size, margin=margin)
    stream = Stream(reader, who, min(workers, len(steps)), timeout, pin)
    with stream.explained():
        yield stream.rows(steps)


def _slice(inputs: Tensor, step: int, batch_size: int) -> Tensor:
    """The rows of a step in order; a slice costs nothing."""
    return inputs[step * batch_size : (step + 1) * batch_size]


def finish(inputs: Tensor, normalize: Transform | None) -> Tensor:
    """The last step before the network: bytes become numbers around 0."""
    if inputs.ndim == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    if normalize is None or inputs.ndim != 4:
        return inputs if inputs.is_floating_point() else inputs.float() / 255
    return normalize.apply(inputs, inputs.new_zeros(len(inputs), 0, dtype=torch.float32))


class _Steps(Dataset[Rows]):
    """The data set of torch that a worker holds: item n is the rows of step n."""

    def __init__(self, reader: Reader, who: Callable[[int], tuple[Tensor, int]]) -> None:
        self.reader, self.who = reader, who

    def __getitem__(self, step: int) -> Rows:
        rows = self.reader.read(*self.who(step))
        if get_worker_info() is not None:
            for part in (rows.indices, rows.inputs):
                # In the thread that sends a batch, a failure would go unnoticed.
                if part is not None:
                    part.share_memory_()  # type: ignore[no-untyped-call]
        return rows


def _as_it_is(rows: Rows) -> Rows:
    return rows


def _cut(images: Sequence[Image.Image], crop: RandomResizedCrop, draws: Tensor) -> list[_Edges]:
    widths, heights = torch.tensor([image.size for image in images]).unbind(dim=1)
    boxes = torch.stack(crop.box(heights, widths, draws), dim=1).tolist()
    return [(left, top, left + wide, top + tall) for top, left, tall, wide in boxes]


def _middle(image: Image.Image, margin: float) -> _Edges:
    """The square in the center that resizing the shorter side would keep."""
    edge = min(image.size) * margin
    left, top = (image.width - edge) / 2, (image.height - edge) / 2
    return left, top, left + edge, top + edge


def _resized(image: Image.Image, box: _Edges, size: int) -> Tensor:
    """(3, size, size) uint8, with antialiasing."""
    square = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1)
