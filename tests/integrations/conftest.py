"""Small runs, and the libraries that are adapted to, or no test of theirs."""

import importlib
import warnings

import pytest

from nearsay.config import apply_overrides, call_recipe
from nearsay.integrations.export import export_run
from nearsay.training.loop import train

QUICK = ["epochs=0.5", "schedule.warmup=0", "machine.device=cpu"]
FEATURES = ["data.num_train=60", "data.num_test=40", "batch_size=20", "backbone.hidden=16", *QUICK]
IMAGES = ["backbone.width=4", "batch_size=32", "data.test_share=0.95", *QUICK]


def trained(folder, recipe, overrides, arguments=()):
    call = apply_overrides(call_recipe(recipe, arguments), overrides)
    train(call.experiment, folder, origin=call.origin)
    return folder


@pytest.fixture(scope="session")
def features_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "toy", "toy", FEATURES)


@pytest.fixture(scope="session")
def images_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "digits", "digits", IMAGES)


@pytest.fixture(scope="session")
def pair_run(tmp_path_factory):
    overrides = [*FEATURES, "averaging=0.9", "networks=2"]
    return trained(tmp_path_factory.mktemp("runs") / "pair", "toy", overrides)


def library(name):
    """The library, or no test; what it warns of while it is imported is its own business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def needs_onnx():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name)


@pytest.fixture(scope="session")
def onnx_of(tmp_path_factory):
    """The ONNX file of a run, made once."""
    needs_onnx()
    made = {}

    def of(run):
        if run not in made:
            made[run] = export_run(run, tmp_path_factory.mktemp("onnx"), format="onnx")
        return made[run]

    return of


def imported(name):
    library(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
