"""Runs what is left of benchmarks/records/queue.json, one run after another, within a given time.

    python benchmarks/lab/worker.py run --cifar10 data --cifar100 data --seconds 3600 --out out
    python benchmarks/lab/worker.py take out/cifar.json --commit 1234abc
    python benchmarks/lab/page.py

`run` leaves out what benchmarks/records/ and its own folder of runs already have, unless the recipe
has changed since. It starts no run that would not end in time, and goes on after one that fails.
Everything it finds is in one file, so it can work on another machine; `take` copies the records of
that file into benchmarks/records/, one small file for each run. All runs share one process, so its
imports and the compiler's caches stay warm.

Several such processes may share one folder of runs and one device, each on another run. They fill
the device better, most of all with NVIDIA's MPS. The record then says how long the run took, and
how much of that was its share of the device.
"""

import argparse
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `lab` is found when this file is run

import torch

from lab.predictions import audit_again, keep_predictions, path_of
from lab.record import (
    MERGED,
    device_seconds,
    make_record,
    read_records,
    take,
    unchanged,
    write_json,
)
from lab.run_queue import FILE, PLACES, Tier, read_queue
from nearsay import config
from nearsay.doors.audit import audit_run
from nearsay.errors import INTERNAL, Stopped, exit_code, explain
from nearsay.experiment import Machine
from nearsay.training.loop import train
from nearsay.training.system import hardware

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
AUDITED = (
    "^(paper|short)-(human-(aggre|worse)|cifar100-human)-"  # the runs that are audited by default
)
LONGER = 1.08  # a run may take so many times as long as the longest like it
ENDING = 8.0  # seconds, to write the last predictions and this file


def main(words=None):
    """Run or take; returns the exit code."""
    arguments = _parse(words)
    try:
        return arguments.act(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {explain(error, exit_code(error))}", file=sys.stderr)
        return exit_code(error)


def _parse(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    run = verbs.add_parser("run", help="run what is left")
    run.add_argument("--cifar10", type=Path, help="folder that holds cifar-10-batches-py")
    run.add_argument("--cifar10n", type=Path, help="the file of CIFAR-10N")
    run.add_argument("--cifar100", type=Path, help="folder that holds cifar-100-python")
    run.add_argument("--cifar100n", type=Path, help="the file of CIFAR-100N")
    run.add_argument(
        "--only",
        type=_expression,
        default="",
        help="a regular expression to be found in names of runs",
    )
    run.add_argument(
        "--tier", choices=get_args(Tier), help="of docs/results.md; by default all, in order"
    )
    run.add_argument(
        "--seconds", type=_seconds, default=float("inf"), help="when to stop; by default at the end"
    )
    run.add_argument("--out", type=Path, default=Path("runs/cifar"), help=f"folder for {MERGED}")
    run.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/cifar"),
        help="folder of the runs; who shares it shares the work",
    )
    run.add_argument(
        "--keep",
        type=_expression,
        default="$^",
        help="a regular expression: run folders that stay once recorded",
    )
    run.add_argument(
        "--audit",
        type=_expression,
        default=AUDITED,
        help="a regular expression: runs to audit as well",
    )
    run.add_argument(
        "--keep-predictions",
        type=_expression,
        default="$^",
        help="a regular expression: runs whose predictions are kept in OUT/predictions",
    )
    run.add_argument("--queue", type=Path, default=RECORDS / FILE)
    run.add_argument(
        "--records", type=Path, default=RECORDS, help="what is done; nothing is written there"
    )
    run.add_argument("--again", action="store_true", help="also run what is done")
    run.add_argument("--list", action="store_true", help="print what is left, and run nothing")
    run.add_argument(
        "--split",
        action="store_true",
        help="also start what will not end in time, to go on another time",
    )
    run.add_argument("--commit", default="", help="of the code, where there is no git to ask")
    run.set_defaults(act=run_queue)
    put = verbs.add_parser("take", help="put what was run elsewhere into benchmarks/records/")
    put.add_argument("merged", type=Path, help=f"a {MERGED}")
    put.add_argument("--records", type=Path, default=RECORDS)
    put.add_argument("--commit", default="", help="of the code that ran")
    put.add_argument("--replace", action="store_true", help="overwrite results that differ")
    put.set_defaults(act=take_merged)
    again = verbs.add_parser(
        "audit", help="audit recorded runs again, by the predictions that were kept"
    )
    again.add_argument(
        "--only",
        type=_expression,
        default="",
        help="a regular expression to be found in names of runs",
    )
    again.add_argument(
        "--records", type=Path, default=RECORDS, help="folder of the records and of predictions/"
    )
    again.set_defaults(act=audit_recorded)
    return parser.parse_args(words)


def _expression(text):
    try:
        return re.compile(text)
    except re.error as error:
        cure = "write \\ before a sign that stands for itself"
        raise argparse.ArgumentTypeError(
            f"{text!r} is no regular expression ({error}); {cure}"
        ) from error


def _seconds(text):
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise argparse.ArgumentTypeError(f"{text} seconds are no time to run in; give a number above 0")


def run_queue(arguments):
    """Run what is left and fits; returns 0 if no run failed and no signal from outside came."""
    deadline = time.monotonic() + arguments.seconds
    given = {name: getattr(arguments, name) for name in PLACES}
    place = {
        key: str(path.expanduser().absolute()) for key, path in given.items() if path is not None
    }
    recorded, sharing = read_records(arguments.records), arguments.runs / "sharing"
    known = {name: recorded[name] for name in unchanged(recorded)}
    began, (here, failed) = time.time(), _found(arguments)
    done = set() if arguments.again else {*known, *unchanged(here)}
    left = _left(arguments, done, place, failed)
    if not left:
        print("nothing is left of what --tier, --only and the files given choose", file=sys.stderr)
    if arguments.list:
        for each in left:
            print(f"{each.tier}  {each.seconds:5.0f} s  {each.name}")
        return 0
    for key, path in place.items():
        if not Path(path).exists():  # else every run would fail, one after another
            raise ValueError(
                f"--{key} {path} is not there; give a path that exists, or leave it out"
            )
    for folder in (sharing, arguments.runs / "claims", arguments.runs / "records" / "failed"):
        folder.mkdir(parents=True, exist_ok=True)
    code = 0
    with _stopped_at(deadline) as (signals, is_over):
        for number, each in enumerate(left, start=1):
            if signals:
                code = 128 + signals[0]
                break
            here, others = _found(arguments)[0], len(_living(sharing))
            needed = (1 + others) * expected(each, [*known.values(), *here.values()])
            remaining = deadline - time.monotonic()
            if needed > remaining and not (arguments.split and remaining > ENDING):
                time_left = f"{needed:.0f} of {remaining:.0f} s"
                print(f"{number}/{len(left)}  {each.name} would take {time_left}: later")
                continue
            with _claimed(each.name, arguments, began) as mine:
                if not mine:
                    print(
                        f"{number}/{len(left)}  {each.name} is left to another process", flush=True
                    )
                    continue
                print(f"{number}/{len(left)}  {each.name} ...", flush=True)
                failure = _failure(arguments, each.name)
                try:
                    run_one(each, arguments, place)
                    failure.unlink(missing_ok=True)
                except Stopped as stop:
                    print(f"{each.name}: {stop}", flush=True)
                    code = stop.code
                    break
                except Exception as error:  # whatever it is, the other runs may do better
                    reason = explain(error, exit_code(error))
                    if exit_code(error) == INTERNAL:  # all else is told by its sentence
                        traceback.print_exc()
                    write_json(failure, {"reason": reason})
                    print(f"{each.name} failed: {reason}", flush=True)
            _write(arguments)
            if not _recover():
                print(
                    f"the device does not answer any more after {each.name}; start again",
                    flush=True,
                )
                return INTERNAL
    _write(arguments)
    if code and not is_over.is_set():
        return code
    return INTERNAL if _found(arguments)[1] else 0


def run_one(wanted, arguments, place):
    """Train one run in its folder, or go on with it; write and return its record."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began, folder = time.perf_counter(), arguments.runs / wanted.name
    recipe, *words = wanted.words(place)
    call = config.apply_overrides(config.call_recipe(recipe, words), wanted.overrides)
    with _share(arguments.runs / "sharing") as share:
        result = train(call.experiment, folder, origin=call.origin)
    seconds = time.perf_counter() - began
    result["versions"] = {**result["versions"], "cuda": torch.version.cuda or ""}
    record = make_record(
        wanted, result, config.to_tree(call.experiment), seconds=seconds, places=place
    )
    if share[0] < 0.98 * seconds:  # what was done before it went on counts in full
        record["device_seconds"] = round(record["seconds"] - seconds + share[0], 1)
    if re.search(arguments.audit, wanted.name):
        record["audit"] = _audit(folder, arguments.runs / "sharing")
    if re.search(arguments.keep_predictions, wanted.name):
        record["predictions"] = keep_predictions(folder, path_of(wanted.name, arguments.out))
    record["commit"] = arguments.commit or _commit()
    write_json(arguments.runs / "records" / f"{wanted.name}.json", record)
    _tell(record)
    if not re.search(arguments.keep, wanted.name):
        shutil.rmtree(folder, ignore_errors=True)
    return record


def _audit(folder, sharing):
    """The figures of an audit of a run, and its time; {} if no label is known to be wrong."""
    began, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(
        max(1, threads // (1 + len(_living(sharing))))
    )  # more would wait for each other
    try:
        found = audit_run(folder, report=False).summary
    finally:
        torch.set_num_threads(threads)
    if found["detection"] is None:
        return {}
    return {
        **found["detection"]["score"],
        "noise_rate": found["noise_rate"],
        "review_for_recall": found["review_for_recall"],
        "seconds": round(time.perf_counter() - began, 1),
    }


def expected(wanted, records):
    """Seconds that a run will take: longer than the longest like it, or what the queue guesses.

    Records of other hardware tell nothing, so only those of this device count.
    """
    device = hardware(Machine().find_device())
    alike = [
        device_seconds(each)
        for each in records
        if f"method={wanted.method}" in each["arguments"]
        and (each["protocol"], each["hardware"]) == (wanted.protocol, device)
    ]
    return (LONGER * max(alike) if alike else wanted.seconds) + (ENDING if wanted.seconds else 0.0)


def take_merged(arguments):
    """Put the records of a merged file into benchmarks/records/."""
    try:
        merged = json.loads(arguments.merged.read_text("utf-8"))
        records, failed = list(merged["records"]), dict(merged.get("failed", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        cure = f"give the {MERGED} that run has written into its --out"
        raise ValueError(
            f"{arguments.merged} is no file of this script: {error}; {cure}"
        ) from error
    fresh = take(records, arguments.records, commit=arguments.commit, overwrite=arguments.replace)
    for name in fresh:
        kept = path_of(name, arguments.merged.parent)
        if kept.is_file():
            copy = path_of(name, arguments.records)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(kept, copy)
    print(f"{len(fresh)} of {len(records)} results are new in {arguments.records}.")
    print("Write the page with python benchmarks/lab/page.py.")
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")
    return 0


def audit_recorded(arguments):
    """Audit runs whose predictions were kept, and write the new figures into their records."""
    for name, record in read_records(arguments.records).items():
        path = path_of(name, arguments.records)
        if re.search(arguments.only, name) and path.is_file():
            began = time.perf_counter()
            summary = audit_again(record, path).summary
            if summary:
                seconds = round(time.perf_counter() - began, 1)
                write_json(
                    arguments.records / f"{name}.json",
                    {**record, "audit": {**summary, "seconds": seconds}},
                )
                print(
                    f"{name}: AUROC {summary['auroc']:.4f}, AP {summary['average_precision']:.4f}",
                    flush=True,
                )
    return 0


def _left(arguments, done, place, failed):
    """What is to be run: in the order of the queue, but what failed before comes last."""
    wanted = [each for each in read_queue(arguments.queue) if each.name not in done]
    wanted = [each for each in wanted if re.search(arguments.only, each.name)]
    wanted = [each for each in wanted if arguments.tier in (None, each.tier)]
    for key in PLACES:
        lacking = [each for each in wanted if key in each.needs().values() and key not in place]
        if lacking:
            told = (
                "1 run needs --{} and is"
                if len(lacking) == 1
                else f"{len(lacking)} runs need --{{}} and are"
            )
            print(f"{told.format(key)} left out", file=sys.stderr)
        wanted = [each for each in wanted if each not in lacking]
    return sorted(wanted, key=lambda each: each.name in failed)


def _found(arguments):
    """What is recorded in the folder of runs, and why others failed, also by other processes."""
    told = {
        path.stem: _reason(path) for path in sorted(_failure(arguments, "").parent.glob("*.json"))
    }
    return read_records(arguments.runs / "records"), {
        name: reason for name, reason in told.items() if reason
    }


def _reason(path):
    try:
        return str(json.loads(path.read_text("utf-8"))["reason"])
    except FileNotFoundError:
        return ""  # another process has made up for it meanwhile
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not tell why a run failed: {error}; remove it, and it is run again"
        ) from error


def _failure(arguments, name):
    return arguments.runs / "records" / "failed" / f"{name}.json"


def _write(arguments):
    """Everything that was found, after each run: whatever happens next, it is not lost."""
    records, failed = _found(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / MERGED, {"records": list(records.values()), "failed": failed})


@contextmanager
def _claimed(name, arguments, began):
    """Whether the run is for this process: no other has it, or has ended it since this one `began`.

    A claim is a link to the number of a process, made in one piece. It counts while that lives.
    """
    path = arguments.runs / "claims" / name
    if path.is_symlink() and not _lives(path):
        path.unlink(missing_ok=True)
    try:
        path.symlink_to(str(os.getpid()))
    except FileExistsError:
        yield False
        return
    ended = (arguments.runs / "records" / f"{name}.json", _failure(arguments, name))
    try:
        yield not any(each.exists() and each.stat().st_mtime > began for each in ended)
    finally:
        path.unlink(
            missing_ok=True
        )  # two that find the same dead process's claim may take it from each other


def _living(folder):
    """The links in a folder whose processes live."""
    return [path for path in folder.iterdir() if _lives(path)]


def _lives(link):
    try:
        os.kill(int(os.readlink(link)), 0)
    except PermissionError:
        return True  # of another user
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _share(sharing):
    """Seconds of the device, in a list of one: each is divided among the processes that train."""
    spent, over, mine = [0.0], threading.Event(), sharing / str(os.getpid())
    mine.unlink(missing_ok=True)  # of a process that died, and had this number
    mine.symlink_to(mine.name)

    def count():
        before, ended = time.perf_counter(), False
        while not ended:
            ended = over.wait(1.0)
            now = time.perf_counter()
            spent[0] += (now - before) / max(1, len(_living(sharing)))
            before = now

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield spent
    finally:
        over.set()
        thread.join()
        mine.unlink()


@contextmanager
def _stopped_at(deadline):
    """End a run at the deadline as a signal would: after a checkpoint, so that it can go on later.

    Gives the signals that come between two runs, and an event that is set once the time is over.
    """
    received, is_over, ended = [], threading.Event(), threading.Event()

    def watch():
        while not ended.wait(1.0):
            if time.monotonic() >= deadline:
                is_over.set()
            if (
                received or is_over.is_set()
            ):  # again and again, because a run that is starting does not listen yet
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield received, is_over
    finally:
        ended.set()
        thread.join()  # its last signal must not meet the handler of before
        signal.signal(signal.SIGTERM, before)


def _recover():
    """Forget compiled code and memory of a run; whether the device still answers.

    Compiled code is kept by function, and torch gives up on one seen in too many settings.
    """
    torch.compiler.reset()
    gc.collect()
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.empty_cache()
        return torch.ones(2, device="cuda").sum().item() == 2
    except RuntimeError:
        return False


def _tell(record):
    test, detection = record["accuracy"]["test"], record["detection"] or {}
    found = "" if not detection else f", AUROC {detection['auroc']:.4f}"
    print(
        f"{record['name']}: {100 * test['final']:.2f} % (best {100 * test['best']:.2f}){found}, "
        f"{record['seconds']:.0f} s, {record['images_per_second']:.0f} images/s",
        flush=True,
    )


def _commit():
    with suppress(OSError, subprocess.CalledProcessError):
        words = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(
            words, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip()
    return ""


if __name__ == "__main__":
    sys.exit(main())
