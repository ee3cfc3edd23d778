"""The libraries whose loops are adapted to, or no test of theirs."""

import importlib
import warnings

import pytest


def imported(name):
    """What a library warns of while it is imported is its own business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name)
        return importlib.import_module(f"nearsay.integrations.{name}")


@pytest.fixture(scope="session")
def for_lightning():
    return imported("lightning")


@pytest.fixture(scope="session")
def for_timm():
    return imported("timm")


@pytest.fixture(scope="session")
def for_transformers():
    pytest.importorskip("accelerate")
    return imported("transformers")
