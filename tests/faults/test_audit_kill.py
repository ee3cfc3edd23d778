"""SIGKILL while labels are audited, drawn and cleaned: the same commands again leave the very same bytes."""

import random
import shutil
import signal
import time
from collections import Counter

import pytest

from faults.jobs import Job

RUN = [
    "epochs=1",
    "--set",
    "data.num_train=120",
    "--set",
    "data.num_test=40",
    "--set",
    "batch_size=60",
]
WRITTEN = {"audit.csv", "audit.json", "report.html", "cleaned.npz", "cleaned-drop.csv"}


def start(server, folder, verb):
    server.number += 1
    counter, output = (
        server.scratch / f"{verb}-{server.number}.{kind}" for kind in ("steps", "output")
    )
    request = {"words": [verb, str(folder)], "counter": str(counter), "output": str(output)}
    return Job(server, server.ask(request), folder, counter, output)


def finish(server, folder):
    for verb in ("audit", "clean"):
        job = start(server, folder, verb)
        assert job.end() == 0, job.said
    return content(folder)


def content(folder):
    """All files, those of the lock and of training too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def is_writing(folder):
    return any(folder.glob(".*.partial"))


@pytest.fixture(scope="module")
def audited(server, tmp_path_factory):
    """A run that was audited and cleaned without disturbance, what that left, and how long each took."""
    folder = server.finish(tmp_path_factory.mktemp("audited") / "run", "toy", *RUN)
    bare = folder.parent / "bare" / "run"
    shutil.copytree(folder, bare)
    seconds = {}
    for verb in ("audit", "clean"):
        began = time.monotonic()
        job = start(server, folder, verb)
        assert job.end() == 0, job.said
        seconds[verb] = time.monotonic() - began
    found = content(folder)
    assert found.keys() >= WRITTEN
    return bare, found, seconds


def check_kills(server, audited, tmp_path, *, kills):
    """Kill as often, at random times and while files are written, and let it end now and then; says what was hit."""
    bare, expected, seconds = audited
    draw, hits, number = random.Random(kills), Counter(), 0
    while sum(hits.values()) < kills:
        number += 1
        folder = tmp_path / f"{number}" / "run"  # its name is on the page
        shutil.copytree(bare, folder)
        for _ in range(min(10, kills - sum(hits.values()))):
            verb = "clean" if (folder / "audit.csv").exists() and draw.random() < 0.3 else "audit"
            if kill(start(server, folder, verb), draw, seconds[verb]):
                hits[verb, is_writing(folder)] += 1
            left = {
                name: held
                for name, held in content(folder).items()
                if not name.rpartition("/")[2].startswith(".")
            }
            assert not [name for name, held in left.items() if held != expected[name]]
        assert finish(server, folder) == expected
    print(f"{sum(hits.values())} kills in {number} runs: {dict(hits)}")
    return hits


def kill(job, draw, seconds):
    """Kill the job, half of the time as soon as it writes; False if it was faster."""
    code = None
    if draw.random() < 0.5:
        job.until(lambda: is_writing(job.folder))
    else:
        code = job.wait(draw.uniform(0, seconds))
    if code is None:
        job.signal(signal.SIGKILL)
        code = job.end()
    assert code in (0, -signal.SIGKILL), job.said
    return code != 0


def test_a_killed_audit_ends_as_if_it_had_not_been(server, audited, tmp_path):
    check_kills(server, audited, tmp_path, kills=2)


@pytest.mark.slow
def test_fifty_kills_of_audits_change_nothing(server, audited, tmp_path):
    hits = check_kills(server, audited, tmp_path, kills=50)
    assert hits["audit", True] > 0
    assert hits["audit", False] > 0
