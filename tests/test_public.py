"""Whatever is public is documented: what it is, what each field means, and an example that runs."""

import dataclasses
import doctest
import inspect
import re
from importlib import import_module

import pytest

import nearsay

SUBMODULES = ("data", "losses", "metrics", "models", "noise", "optim", "recipes", "transforms")


def public_things():
    """Dotted name -> class or function, each once."""
    found = {}
    for module in (nearsay, *(import_module(f"nearsay.{name}") for name in SUBMODULES)):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                found.setdefault(f"{thing.__module__}.{thing.__qualname__}", thing)
    return found


THINGS = public_things()
FINDER = doctest.DocTestFinder(recurse=True)


def names_to_describe(thing):
    """The fields of a value, or the parameters of a function or of a constructor."""
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if field.init]
    if hasattr(thing, "_fields"):
        return list(thing._fields)
    if getattr(thing, "_is_protocol", False) or not callable(thing):
        return []
    parameters = inspect.signature(thing).parameters
    return [name for name in parameters if not name.startswith("_") and name != "self"]


@pytest.mark.parametrize("name", THINGS)
def test_every_public_thing_is_described_field_by_field(name):
    thing = THINGS[name]
    text = inspect.getdoc(thing) or ""
    assert text
    missing = [part for part in names_to_describe(thing) if not re.search(rf"\b{part}\b", text)]
    assert missing == []


@pytest.mark.parametrize("name", THINGS)
def test_every_public_thing_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    thing = THINGS[name]
    examples = FINDER.find(thing, name, extraglobs={"nearsay": nearsay})
    assert any(each.examples for each in examples), "it has no >>> example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report = []
    for each in examples:
        runner.run(each, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("name", SUBMODULES)
def test_a_public_submodule_lists_what_is_public(name):
    module = getattr(nearsay, name)
    assert module is import_module(f"nearsay.{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) <= set(dir(module))
