"""One server for all tests of this folder, and the runs that were never disturbed."""

from functools import cache

import pytest

from faults.jobs import serving, words_of


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("jobs")) as process:
        yield process


@pytest.fixture(scope="session")
def whole(server, tmp_path_factory):
    """The folder of an undisturbed run: `whole(experiment)`."""
    return cache(
        lambda experiment: server.finish(
            tmp_path_factory.mktemp("whole") / "run", *words_of(experiment)
        )
    )
