"""Processes that read ahead: what signals do to them, and how their end is told."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from multiprocessing.context import BaseContext
from types import FrameType

_IGNORED = (signal.SIGINT, signal.SIGTERM)


class _Flag:
    """An event without a lock. Whoever dies while looking at one of Python's keeps its lock, and all others wait."""

    def __init__(self, context: BaseContext) -> None:
        self._raised = context.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._raised.value)

    def set(self) -> None:
        self._raised.value = 1


def make_context() -> BaseContext:
    """Forked processes, but for the event by which torch lets its workers go: a killed one must not block it.

    Forked also from Python 3.14 on, where that is not the default: what workers read by cannot all be pickled, and
    signals are held back only from those that inherit it.
    """
    context = copy(multiprocessing.get_context("fork"))
    context.Event = partial(_Flag, context)  # type: ignore[method-assign, assignment]
    return context


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Let signals wait, for workers that begin meanwhile too: none must die of what it is about to ignore."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(worker: int) -> None:
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


WATCH = _Watch()
