"""A missing library is one sentence with the extra to install."""

import importlib
import sys

import pytest

from nearsay.integrations import import_library


@pytest.mark.parametrize(
    ("adapter", "extra"),
    [("lightning", "lightning"), ("transformers", "transformers"), ("timm", "vision")],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, adapter, extra):
    monkeypatch.delitem(sys.modules, f"nearsay.integrations.{adapter}", raising=False)
    monkeypatch.setitem(sys.modules, adapter, None)
    with pytest.raises(ImportError, match=rf"^{adapter} .*\[{extra}\]"):
        importlib.import_module(f"nearsay.integrations.{adapter}")


def test_a_library_that_does_not_fit_its_torch_is_named_with_the_reason(monkeypatch):
    def misfit(name):
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr("nearsay.integrations.import_module", misfit)
    with pytest.raises(ImportError, match=r"^timm .*operator torchvision::nms does not exist"):
        import_library("timm", "vision")


def test_what_a_library_itself_misses_is_not_called_a_missing_extra(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr("nearsay.integrations.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="other"):
        import_library("timm", "vision")
