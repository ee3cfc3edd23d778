"""A process that decodes images dies, hangs or finds no shared memory: the run says whom it took along, and ends."""

import gc
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from faults.jobs import PATIENCE, is_over
from nearsay.data import Folder, loader
from nearsay.data.loader import Stream, sweep, training_reader
from nearsay.errors import WorkerError
from nearsay.experiment import Experiment, Machine
from nearsay.losses import CrossEntropy
from nearsay.models import ResNet
from nearsay.optim import SGD, Constant
from nearsay.training.checkpoints import open_run
from nearsay.training.loop import train
from nearsay.training.predict import Pass
from nearsay.transforms import Augment, RandomResizedCrop

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
    # Python forgets a socket whose other end dies while the two shake hands.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NUM = 48
HOUR = 3600.0


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(NUM):
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(
            folder / f"{number:02}.png"
        )
    return root


@pytest.fixture(autouse=True)
def own_processes():
    """No test finds or leaves a process, or a watch over them; and none hangs for ever."""

    def ring(number, frame):
        raise TimeoutError("the test hangs")

    assert multiprocessing.active_children() == []
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert multiprocessing.active_children() == []
    assert not isinstance(signal.getsignal(signal.SIGCHLD), loader._Watch)


def experiment(photos, **machine):
    return Experiment(
        data=Folder(path=photos),
        backbone=ResNet(width=2),
        objective=CrossEntropy(),
        augment=Augment(transforms=(RandomResizedCrop(size=8),)),
        image_size=8,
        optimizer=SGD(lr=0.01),
        schedule=Constant(),
        epochs=2,
        batch_size=6,
        machine=Machine(**{"workers": 2, "timeout": HOUR, "checkpoint_steps": 3, **machine}),
    )


def make_ill(monkeypatch, name, illness):
    """Let `illness` befall the worker that decodes the file of that name; the main process is never ill."""
    decode, main = loader.decode, os.getpid()

    def decode_or_suffer(path):
        if path.name == name and os.getpid() != main:
            illness()
        return decode(path)

    monkeypatch.setattr(loader, "decode", decode_or_suffer)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_looking():
    """With what a worker holds for a moment after each step, when it looks whether it may go."""
    frame = sys._getframe()
    while "done_event" not in frame.f_locals:
        frame = frame.f_back
    if lock := getattr(frame.f_locals["done_event"], "_cond", None):
        lock.acquire()
    die()


def hang():
    time.sleep(HOUR)


def complain():
    raise RuntimeError("something odd")


ILLNESSES = {
    "killed": (die, r"DataLoader worker .*exited unexpectedly|killed by signal"),
    "hung": (hang, "timed out after 1 seconds"),
}


@pytest.mark.parametrize("illness", ILLNESSES)
def test_a_run_whose_worker_dies_or_hangs_names_who_was_in_flight(
    photos, tmp_path, monkeypatch, illness
):
    act, told = ILLNESSES[illness]
    make_ill(monkeypatch, "17.png", act)
    wished = experiment(photos, timeout=1 if illness == "hung" else HOUR)
    with pytest.raises(WorkerError, match=told) as caught:
        train(wished, tmp_path)
    assert caught.value.code == 70
    assert re.search(r"(cat|dog)/\d\d\.png, .* and \d+ more", str(caught.value))
    assert "\n" not in str(caught.value)


def test_after_the_death_of_a_worker_the_run_goes_on_as_if_nothing_had_been(
    photos, tmp_path, monkeypatch
):
    train(experiment(photos), tmp_path / "right")
    order = loader.Order(torch.arange(NUM), batch_size=6, seed=0)
    victim = (
        Folder(path=photos).open("train").inputs.names[int(order.batch(7)[3])].partition("/")[2]
    )
    broken = tmp_path / "broken"

    def die_once_there_is_a_checkpoint():
        if (broken / "checkpoints").exists():
            die()

    with monkeypatch.context() as patch:
        make_ill(patch, victim, die_once_there_is_a_checkpoint)
        with pytest.raises(WorkerError):
            train(experiment(photos), broken)
    with open_run(broken) as run:
        assert run.load().step >= 3
    train(experiment(photos), broken)
    assert (broken / "model.safetensors").read_bytes() == (
        tmp_path / "right" / "model.safetensors"
    ).read_bytes()


def test_full_shared_memory_is_a_failure_of_a_worker(photos, tmp_path, monkeypatch):
    """A limit on the size of files counts for shared memory too, which then cannot be had."""
    prepare = loader._ignore_signals

    def prepare_without_memory(worker):
        prepare(worker)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

    monkeypatch.setattr(loader, "_ignore_signals", prepare_without_memory)
    with pytest.raises(WorkerError, match=r"torch_\d+"):
        train(experiment(photos), tmp_path)


def test_an_error_in_a_worker_is_told_as_such(photos, tmp_path, monkeypatch):
    make_ill(monkeypatch, "17.png", complain)
    with pytest.raises(
        WorkerError, match=r"failed \(RuntimeError: something odd\); in flight were"
    ):
        train(experiment(photos), tmp_path)


def files_of(photos):
    return Folder(path=photos).open("train").inputs


def test_a_pass_over_a_data_set_names_them_too(photos, monkeypatch):
    make_ill(monkeypatch, files_of(photos).names[-1].partition("/")[2], die)
    how = Pass(
        normalize=None,
        size=8,
        device=torch.device("cpu"),
        dtype=torch.float32,
        workers=2,
        timeout=HOUR,
    )
    network = ResNet(width=2).build(2).train()
    with pytest.raises(WorkerError, match=r"cat/00\.png"):
        how.over([network], files_of(photos))
    assert network.training


def idle(photos, workers=1):
    """A stream over the photos, and its rows."""
    reader = training_reader(files_of(photos), None, size=8, seed=0)
    stream = Stream(reader, lambda step: (torch.arange(step, step + 1), 0), workers, HOUR)
    return stream, stream.rows(range(10, NUM))


def fail_after(rows, error):
    next(rows)
    raise error


def test_a_death_is_told_when_a_batch_is_waited_for_and_of_the_stream_it_belongs_to(photos):
    """The main thread is elsewhere, and then in a pass of other workers, when one of the outer stream dies."""
    stream, rows = idle(photos)
    finished = []

    def work():
        next(rows)
        (worker,) = multiprocessing.active_children()
        with sweep(
            files_of(photos), size=8, batch_size=1, workers=1, timeout=HOUR, pin=False
        ) as batches:
            next(batches)
            os.kill(worker.pid, signal.SIGKILL)
            while not is_over(worker.pid):
                pass
            finished.append("waiting")
            list(batches)
        next(rows)

    with pytest.raises(WorkerError, match=r"cat/22\.png, cat/24\.png"), stream.explained():
        work()
    assert finished == ["waiting"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_worker_that_has_only_begun_is_ignored_too(photos, monkeypatch, number):
    """Some workers may have read already when others do not ignore it yet."""
    ignore_signals = loader._ignore_signals

    def prepare_too_late(worker):
        os.kill(os.getpid(), number)
        ignore_signals(worker)

    monkeypatch.setattr(loader, "_ignore_signals", prepare_too_late)
    stream, rows = idle(photos)
    with stream.explained():
        assert len([next(rows) for _ in range(2)]) == 2
    rows.close()
    # The main process hears them again.
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_worker_that_dies_at_once_is_missed(photos, monkeypatch):
    """So early that it is gone before the first look at the children."""
    monkeypatch.setattr(loader, "_ignore_signals", lambda worker: die())
    children = multiprocessing.active_children

    def late():
        for child in list(multiprocessing.process._children):
            child.join()
        return children()

    monkeypatch.setattr(multiprocessing, "active_children", late)
    stream, rows = idle(photos)
    with pytest.raises(WorkerError, match=r"cat/20\.png"), stream.explained():
        next(rows)


def test_a_worker_that_dies_while_it_looks_whether_it_may_go_does_not_keep_the_others(
    photos, monkeypatch
):
    make_ill(monkeypatch, "20.png", die_while_looking)
    stream, rows = idle(photos)
    with pytest.raises(WorkerError, match=r"cat/20\.png"), stream.explained():
        next(rows)
    del rows
    # Here torch lets its workers go, and would wait for the lock of the dead one.
    gc.collect()


def test_whatever_ends_the_work_ends_a_hanging_worker(photos, monkeypatch):
    make_ill(monkeypatch, "26.png", hang)
    stream, rows = idle(photos)
    with pytest.raises(KeyError, match="mine"), stream.explained():
        fail_after(rows, KeyError("mine"))
    # Before torch itself gives up waiting for it.
    assert multiprocessing.active_children() == []


def test_processes_of_others_live_on(photos, monkeypatch):
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(HOUR,))
    other.start()
    try:
        make_ill(monkeypatch, "20.png", die)
        stream, rows = idle(photos)
        with pytest.raises(WorkerError), stream.explained():
            next(rows)
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


@pytest.mark.slow
def test_forty_failures_of_workers_end_forty_runs(photos, tmp_path, monkeypatch):
    draw, names = random.Random(0), [name.partition("/")[2] for name in files_of(photos).names]
    for number in range(40):
        illness = draw.choice(["killed", "hung"])
        timeout = 1 if illness == "hung" else HOUR
        with monkeypatch.context() as patch:
            make_ill(patch, draw.choice(names), ILLNESSES[illness][0])
            with pytest.raises(WorkerError):
                train(
                    experiment(photos, timeout=timeout, workers=draw.choice([1, 2, 4])),
                    tmp_path / str(number),
                )
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset by peer"), EOFError()])
def test_a_worker_that_dies_while_it_hands_over_a_batch_is_told_as_such(photos, error):
    stream, rows = idle(photos)
    with pytest.raises(WorkerError, match="cat/22"), stream.explained():
        fail_after(rows, error)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "nobody reads"), FileNotFoundError(2, "elsewhere")]
)
def test_other_errors_of_the_system_are_left_as_they_are(photos, error):
    stream, rows = idle(photos)
    with pytest.raises(type(error)), stream.explained():
        fail_after(rows, error)


def test_where_there_are_no_files_numbers_are_named():
    stream = Stream(
        loader.Reader(torch.zeros(9, 2), 8), lambda step: (torch.arange(step, step + 1), 0), 0, 60.0
    )
    with pytest.raises(WorkerError, match="example 3, example 4"), stream.explained():
        fail_after(stream.rows(range(2, 9)), RuntimeError("DataLoader is unhappy"))
