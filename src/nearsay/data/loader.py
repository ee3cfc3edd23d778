"""From a data set to batches: all of it on the device, or read and decoded by workers as it is needed.

Who is in a batch, and which part of an image is cut out, are pure functions of (seed, step, example), so neither the
number of workers, nor the point where a run was resumed, nor the way of loading changes a batch.
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
from nearsay.batch import PADDING, Files
from nearsay.data.images import decode
from nearsay.errors import BadImage, ImageError, WorkerError
from nearsay.transforms import Augment, RandomResizedCrop, Transform, Views
from nearsay.transforms.draws import make_draws

Inputs = Tensor | Files
_Edges = tuple[float, float, float, float]  # left, top, right and bottom, in pixels
MARGIN = (
    224 / 256
)  # of the shorter side: what evaluation keeps of the middle, as usual for ImageNet
_HELD = (
    2**22
)  # pixels of images that wait to be cut: a box is quickly drawn for many at a time, slowly for each
_AHEAD = 2  # batches that a worker prepares in advance
_PATIENCE = (
    5.0  # seconds for a killed worker to be gone; one that waits for a lost disk may never be
)
_CUT_OFF = (
    ConnectionResetError,
    ConnectionRefusedError,
    EOFError,
)  # a worker died while it handed over a batch
_SHARE = 0.4  # of the free memory of a device that resident images may take


class Rows(NamedTuple):
    """The examples of one step."""

    indices: Tensor  # (B,) who they are; −1 where an image could not be decoded
    inputs: (
        Tensor | None
    )  # (V·B, ...) what they look like, None where all inputs are on the device already
    problems: tuple[tuple[int, str], ...] = ()  # examples that could not be decoded, and why


class Lost:
    """How many images in a row could not be decoded; so many cannot be chance, but mean that the data is gone."""

    def __init__(self, num_examples: int) -> None:
        self.num, self.most = 0, min(32, num_examples)

    def count(self, num: int, reasons: Collection[str]) -> None:
        """So many more, and why some could not be; BadImage, which no run passes over, once all were for too long."""
        self.num = self.num + num if len(reasons) == num else 0
        if self.num >= self.most:
            told = f"none of {self.num} images in a row could be read ({next(iter(reasons)).rpartition(';')[0]})"
            cure = "see that the data is there, in a format that is read, and run the same command again"
            raise BadImage(f"{told}; {cure}")


class Order:
    """Which examples are in the batch of a step: pass after pass through all of them, each in a new random order.

    A pass leaves out what does not fill a batch. Steps count from the start of training. With `kinds`, the classes of
    the examples, all classes take turns: small ones come several times in a pass, large ones not as a whole.
    """

    def __init__(
        self, examples: Tensor, *, batch_size: int, seed: int, kinds: Tensor | None = None
    ) -> None:
        if not len(examples):
            raise ValueError("there is no example to train on")
        self.examples, self.batch_size, self.seed, self.kinds = (
            examples,
            min(batch_size, len(examples)),
            seed,
            kinds,
        )
        self.batches_per_pass = len(examples) // self.batch_size
        self._pass, self._shuffled = -1, examples

    def batch(self, step: int) -> Tensor:
        """(B,) the examples of a step, over all processes."""
        turn, place = divmod(step, self.batches_per_pass)
        if turn != self._pass:
            self._shuffled = (
                self._shuffle(turn, self.examples) if self.kinds is None else self._take_turns(turn)
            )
            self._pass = turn
        return self._shuffled[place * self.batch_size : (place + 1) * self.batch_size]

    def _shuffle(self, turn: int, examples: Tensor, again: int = 0) -> Tensor:
        return examples[
            rng.shuffle(self.seed, f"order {again}" if again else "order", turn, examples)
        ]

    def _take_turns(self, turn: int) -> Tensor:
        """The classes one after another, again and again."""
        assert self.kinds is not None
        kinds = [
            self.examples[self.kinds == kind]
            for kind in sorted(set(self.kinds.tolist()))
            if kind >= 0
        ]
        num_rounds = -(-self.batches_per_pass * self.batch_size // len(kinds))
        columns = [
            torch.cat(
                [
                    self._shuffle(turn, members, again)
                    for again in range(-(-num_rounds // len(members)))
                ]
            )
            for members in kinds
        ]
        return torch.stack([column[:num_rounds] for column in columns], dim=1).flatten()

    def to(self, device: torch.device) -> None:
        """Make the order on another device from here on; its bits are the same."""
        self.examples, self._pass = self.examples.to(device), -1
        self.kinds = None if self.kinds is None else self.kinds.to(device)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pass": -1}


@dataclass(frozen=True)
class Reader:
    """Makes the inputs of examples: rows of a tensor, or images decoded, cut and resized to a square."""

    inputs: Inputs
    size: int
    crops: tuple[RandomResizedCrop | None, ...] = (
        None,
    )  # for each view; None is the middle of the image
    seed: int = 0
    margin: float = MARGIN  # of the shorter side, that is kept of the middle

    def read(self, indices: Tensor, turn: int) -> Rows:
        """The rows of these examples in pass `turn`; those that cannot be decoded are padding."""
        if isinstance(self.inputs, Tensor):
            return Rows(indices, self.inputs[indices])
        images = torch.zeros(
            len(self.crops), len(indices), 3, self.size, self.size, dtype=torch.uint8
        )
        draws = [
            make_draws(crop.num_draws, indices, seed=self.seed, epoch=turn, view=view)
            if crop
            else None
            for view, crop in enumerate(self.crops)
        ]
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
        return Rows(
            indices.where(~torch.isin(indices, bad), PADDING), images.flatten(0, 1), tuple(problems)
        )

    def _fill(
        self, images: Tensor, held: dict[int, Image.Image], draws: list[Tensor | None]
    ) -> None:
        """Write what is cut of the images, by row, into the (V, B, 3, size, size)."""
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
    """The reader that cuts the boxes of a `RandomResizedCrop`, where one stands first in a view of `augment`."""
    views: Sequence[Sequence[object]]
    views = (
        (augment.first, augment.second)
        if isinstance(augment, Views)
        else (augment.transforms if augment else (),)
    )
    firsts = (transforms[0] if transforms else None for transforms in views)
    crops = tuple(first if isinstance(first, RandomResizedCrop) else None for first in firsts)
    is_cut = isinstance(inputs, Files) and any(crop is not None for crop in crops)
    return Reader(inputs, size, crops if is_cut else (None,), seed)


def is_resident(inputs: Inputs, device: torch.device, wish: str) -> bool:
    """Whether all inputs shall lie on the device; ValueError if that is wished and cannot be."""
    if isinstance(inputs, Files):
        if wish == "resident":
            raise ValueError(
                "loading='resident' is for arrays, but these images are files; use 'streaming' or 'auto'"
            )
        return False
    if wish != "auto" or device.type != "cuda":
        return wish != "streaming"
    return inputs.nbytes <= _SHARE * torch.cuda.mem_get_info(device)[0]


_IGNORED = (signal.SIGINT, signal.SIGTERM)


class _Flag:
    """An event without a lock. Whoever dies while looking at one of Python's keeps its lock, and all others wait."""

    def __init__(self, context: BaseContext) -> None:
        self._raised = context.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._raised.value)

    def set(self) -> None:
        self._raised.value = 1


def _make_context() -> BaseContext:
    """Forked processes, but for the event by which torch lets its workers go: a killed one must not block it.

    Forked also from Python 3.14 on, where that is not the default: what workers read by cannot all be pickled, and
    signals are held back only from those that inherit it.
    """
    context = copy(multiprocessing.get_context("fork"))
    context.Event = partial(_Flag, context)  # type: ignore[method-assign, assignment]
    return context


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Let signals wait, for workers that begin meanwhile too: none must die of what it is about to ignore."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals(worker: int) -> None:
    """A signal to the whole group is for the main process, which ends its workers when it is ready."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)  # one that was held back is gone with it


class _Watch:
    """Hands the end of a child on to torch while a batch is waited for, and at no other moment.

    Torch answers with an error wherever the main thread happens to be. In the middle of other work, such as writing a
    checkpoint, that error could be swallowed or taken for another.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_on and callable(self._before):
            self._before(number, frame)

    def take_over(self) -> bool:
        """Stand before the handler that is there; False if that is this very one, or cannot be replaced from here."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGCHLD) is self:
            return False
        self._before = signal.signal(signal.SIGCHLD, self)
        return True

    def give_back(self) -> None:
        """Put the handler of before back."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if self._before is None else self._before)


_WATCH = _Watch()


@dataclass
class Stream:
    """Batches that workers read ahead; 0 workers read in this process. Same bits whatever their number."""

    reader: Reader
    who: Callable[[int], tuple[Tensor, int]]  # step -> examples of this process, and the pass
    workers: int
    timeout: float
    pin: bool = False
    _left: range = field(default=range(0), init=False)  # steps that were not given out yet
    _processes: list[BaseProcess] = field(default_factory=list, init=False)
    _took_over: bool = field(default=False, init=False)  # the watch over children

    def rows(self, steps: range) -> Iterator[Rows]:
        """The rows of each step."""
        loader: DataLoader[Rows] = DataLoader(
            _Steps(self.reader, self.who),
            batch_size=None,
            sampler=steps,
            num_workers=self.workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type]  # without a batch_size it gets one item, not a list
            timeout=self.timeout if self.workers else 0,
            generator=torch.Generator(),  # or iterating would draw from torch's global one
            worker_init_fn=_ignore_signals,
            multiprocessing_context=_make_context() if self.workers else None,
            prefetch_factor=_AHEAD if self.workers else None,
            pin_memory=self.pin,
        )
        self._left, others = steps, multiprocessing.active_children()
        with _signals_held_back():
            batches = iter(loader)
        self._processes = [
            child for child in multiprocessing.active_children() if child not in others
        ]
        self._took_over = _WATCH.take_over() or self._took_over
        if len(self._processes) < self.workers:  # the dead are not among the children any more
            raise RuntimeError("DataLoader worker exited unexpectedly as soon as it had begun")
        for step in steps:
            rows = self._wait(batches)
            self._left = range(step + 1, steps.stop)
            yield Rows(*rows)
        next(batches, None)  # there is none, but by asking for it the workers are let go

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the death of a worker, of this stream or of one around it, into a sentence.

        Whatever ends the work early, no worker is left behind.
        """
        try:
            yield
        except BaseException as error:
            for worker in self._processes:
                worker.kill()  # they ignore all other signals
            for worker in self._processes:
                worker.join(_PATIENCE)
            if not self._is_to_blame(error):
                raise
            lines = str(error).strip().splitlines() or [
                type(error).__name__
            ]  # at first a traceback, perhaps
            raise WorkerError(
                f"a worker that reads images failed ({lines[-1][:200]}); in flight were {self._in_flight()}; "
                "run the same command again to go on, with fewer workers (--set machine.workers=0) if it happens again"
            ) from error
        finally:
            if self._took_over:
                _WATCH.give_back()

    def _wait(self, batches: Iterator[Rows]) -> Rows:
        """The next batch; the only place where the death of a worker is told, and if it died before, it is told now."""
        _WATCH.is_on = True
        try:
            if dead := [str(each.pid) for each in self._processes if each.exitcode]:
                raise RuntimeError(
                    f"DataLoader worker (pid(s) {', '.join(dead)}) exited unexpectedly"
                )
            return next(batches)
        finally:
            _WATCH.is_on = False

    def _is_to_blame(self, error: BaseException) -> bool:
        """Whether it is about a worker of this very stream; one of another may die meanwhile."""
        told = str(error)
        if isinstance(error, _CUT_OFF):
            return bool(self._processes)
        if (
            not isinstance(error, RuntimeError)
            or isinstance(error, WorkerError)
            or "DataLoader" not in told
        ):
            return False
        named = re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", told)
        if (
            named is None or len(self._processes) < self.workers
        ):  # in the latter case they have only just begun
            return True
        return any(str(child.pid) in named[1].split(", ") for child in self._processes)

    def _in_flight(self) -> str:
        steps = self._left[: _AHEAD * max(1, self.workers)]
        examples = [index for step in steps for index in self.who(step)[0].tolist()]
        inputs = self.reader.inputs
        named = [
            inputs.names[index] if isinstance(inputs, Files) else f"example {index}"
            for index in examples[:5]
        ]
        return f"{', '.join(named)} and {max(0, len(examples) - 5)} more"


def num_workers(inputs: Inputs, wish: int | None) -> int:
    """How many processes to read with: none for arrays, which only need to be indexed."""
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
    """All examples in their order, the last batch as short as it is; what is done with them belongs inside.

    `part` (k, n) is the k-th of n runs of whole batches, from 0.
    """
    num = len(inputs)

    def who(step: int) -> tuple[Tensor, int]:
        return torch.arange(step * batch_size, min(num, (step + 1) * batch_size)), 0

    steps = range(-(-num // batch_size))
    own, parts = part
    steps = steps[len(steps) * own // parts : len(steps) * (own + 1) // parts]
    if isinstance(inputs, Tensor):  # slices, which cost nothing
        yield (
            Rows(who(step)[0], inputs[step * batch_size : (step + 1) * batch_size])
            for step in steps
        )
        return
    stream = Stream(
        Reader(inputs, size, margin=margin), who, min(workers, len(steps)), timeout, pin
    )
    with stream.explained():
        yield stream.rows(steps)


def finish(inputs: Tensor, normalize: Transform | None) -> Tensor:
    """The last step before the network: bytes become numbers around 0."""
    if inputs.ndim == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    if normalize is None or inputs.ndim != 4:
        return inputs if inputs.is_floating_point() else inputs.float() / 255
    return normalize.apply(inputs, inputs.new_zeros(len(inputs), 0, dtype=torch.float32))


class _Steps(Dataset[Rows]):
    """What a worker holds: give it the number of a step, and it reads the rows."""

    def __init__(self, reader: Reader, who: Callable[[int], tuple[Tensor, int]]) -> None:
        self.reader, self.who = reader, who

    def __getitem__(self, step: int) -> Rows:
        rows = self.reader.read(*self.who(step))
        if get_worker_info() is not None:
            for part in (rows.indices, rows.inputs):
                if part is not None:
                    part.share_memory_()  # type: ignore[no-untyped-call]  # here a failure is an error; in the thread that sends it nobody would know
        return rows


def _as_it_is(rows: Rows) -> Rows:
    return rows


def _cut(images: Sequence[Image.Image], crop: RandomResizedCrop, draws: Tensor) -> list[_Edges]:
    widths, heights = torch.tensor([image.size for image in images]).unbind(dim=1)
    boxes = torch.stack(crop.box(heights, widths, draws), dim=1).tolist()
    return [(left, top, left + wide, top + tall) for top, left, tall, wide in boxes]


def _middle(image: Image.Image, margin: float) -> _Edges:
    """The square that resizing the shorter side and cutting out the center would keep."""
    edge = min(image.size) * margin
    left, top = (image.width - edge) / 2, (image.height - edge) / 2
    return left, top, left + edge, top + edge


def _resized(image: Image.Image, box: _Edges, size: int) -> Tensor:
    """(3, size, size) uint8, with antialiasing."""
    square = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1)
