"""A small finished run that tests of several doors read, and how it is made."""

import pytest

from nearsay import config
from nearsay.training.loop import train

TOY = ["data.num_train=200", "data.num_test=120", "batch_size=50", "held_out=40"]


def made(seed=0, method="ncr"):
    call = config.call_recipe("toy", [f"seed={seed}", f"method={method}", "epochs=2"])
    return config.apply_overrides(call, TOY)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of the run; tests do not change it."""
    folder = tmp_path_factory.mktemp("runs") / "ncr"
    call = made()
    train(call.experiment, folder, origin=call.origin)
    return folder
