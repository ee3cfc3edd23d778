"""The environment with every extra: nothing of the others is missing in it, and no skip goes unnoticed there."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import GOOD_REASONS, judged

ROOT = Path(__file__).parents[1]


def wanted(name):
    """The packages that a file of wishes names, without versions."""
    lines = (ROOT / "requirements" / name).read_text("utf-8").splitlines()
    return {
        re.split(r"[=<>~ ]", line)[0] for line in lines if line and not line.startswith(("#", "-"))
    }


def pinned(name):
    lines = (ROOT / "requirements" / name).read_text("utf-8").splitlines()
    return {line.split("==")[0] for line in lines}


def test_the_full_environment_has_what_the_others_have():
    assert (wanted("core.in") | wanted("test.in")) - wanted("full.in") == set()
    assert (pinned("core.txt") | pinned("test.txt")) - pinned("full.txt") == set()


def test_the_full_environment_has_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    names = {re.split(r"[=<>~\[ ]", each)[0] for each in (*project["dependencies"], *extras)}
    assert names - wanted("full.in") == set()
    assert names - pinned("full.txt") == set()


def test_every_pin_is_a_version_and_no_address():
    lines = (ROOT / "requirements" / "full.txt").read_text("utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[\w.]+( ; .+)?", line)] == []
    assert [line for line in lines if line.startswith(("nvidia", "cuda", "triton"))] == []


def report(outcome, reason="", **more):
    longrepr = ("test_a.py", 1, f"Skipped: {reason}")
    return SimpleNamespace(
        nodeid="test_a", outcome=outcome, skipped=outcome == "skipped", longrepr=longrepr, **more
    )


def config(*, no_skips):
    return SimpleNamespace(getoption=lambda name: {"--no-skips": no_skips}[name])


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (report("skipped", "could not import 'timm'"), "failed"),
        (report("skipped", "needs a CUDA device, or patience"), "failed"),
        *((report("skipped", reason), "skipped") for reason in GOOD_REASONS),
        (report("skipped", "known", wasxfail="known"), "skipped"),
        (report("passed"), "passed"),
    ],
)
def test_a_skip_without_a_good_reason_fails_where_none_may_be(given, outcome):
    before = given.outcome
    assert judged(given, config(no_skips=False)).outcome == before
    assert judged(given, config(no_skips=True)).outcome == outcome
    assert ("test_a was skipped" in given.longrepr) == (outcome == "failed")
