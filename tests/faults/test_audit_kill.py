"""SIGKILL while labels are audited, drawn and cleaned: the same commands again leave the very same bytes."""

import random
import shutil
import signal
from collections import Counter

import pytest

from faults.server import Hold

RUN = [
    "epochs=1",
    "--set",
    "data.num_train=120",
    "--set",
    "data.num_test=40",
    "--set",
    "batch_size=60",
]
# Functions of every file that is written: the first is called before there is a draft of it, the
# second before the draft is filled.
PLACES = ("_explained", "_write_flushed")
WRITTEN = {"audit.csv", "audit.json", "report.html", "cleaned.npz", "cleaned-drop.csv"}


def finish(server, folder):
    for verb in ("audit", "clean"):
        job = server.start(folder, verb=verb)
        assert job.end() == 0, job.said
    return content(folder)


def content(folder):
    """All files, those of the lock and of training too."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def is_writing(folder):
    return any(folder.glob(".*.partial"))


@pytest.fixture(scope="module")
def audited(server, tmp_path_factory):
    """A run before and after it was audited and cleaned without disturbance."""
    folder = server.finish(tmp_path_factory.mktemp("audited") / "run", "toy", *RUN)
    bare = shutil.copytree(folder, folder.parent / "bare" / "run")
    found = finish(server, folder)
    assert found.keys() >= WRITTEN
    return bare, found


def check_kills(server, audited, tmp_path, *, kills):
    """Kill as often, before and while files are written, and let it end now and then."""
    bare, expected = audited
    draw, hits, number = random.Random(kills), Counter(), 0
    while sum(hits.values()) < kills:
        number += 1
        # The name of the folder is on the page.
        folder = shutil.copytree(bare, tmp_path / f"{number}" / "run")
        for _ in range(min(10, kills - sum(hits.values()))):
            verb = "clean" if (folder / "audit.csv").exists() and draw.random() < 0.3 else "audit"
            hold = Hold(f"nearsay.training.checkpoints:{draw.choice(PLACES)}", draw.randint(1, 4))
            if kill(server.start(folder, verb=verb, hold=hold)):
                hits[verb, is_writing(folder)] += 1
            for name, held in content(folder).items():
                is_hidden = name.rpartition("/")[2].startswith(".")
                assert is_hidden or held == expected[name], name
        assert finish(server, folder) == expected
    print(f"{sum(hits.values())} kills in {number} runs: {dict(hits)}")
    return hits


def kill(job):
    """Kill the job where it is held; False if it ended before."""
    if not job.until(job.counter.with_suffix(".held").exists):
        assert job.end() == 0, job.said
        return False
    job.until_held()
    job.signal(signal.SIGKILL)
    assert job.end() == -signal.SIGKILL, job.said
    return True


def test_a_killed_audit_ends_as_if_it_had_not_been(server, audited, tmp_path):
    check_kills(server, audited, tmp_path, kills=2)


@pytest.mark.slow
def test_fifty_kills_of_audits_change_nothing(server, audited, tmp_path):
    hits = check_kills(server, audited, tmp_path, kills=50)
    assert hits["audit", True] > 0
    assert hits["audit", False] > 0
