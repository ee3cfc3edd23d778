"""What the doctor finds out about an installation."""

import json
from importlib import metadata

import torch

from nearsay import cli
from nearsay.cli import doctor


def test_the_doctor_finds_versions_and_the_device():
    found = {each.name: each for each in doctor.examine()}
    # A build for GPUs has no +cu… after it here.
    assert found["torch"].value == metadata.version("torch")
    assert found["rich"].problem == ""
    assert "device" in found
    assert "pyarrow [parquet]" in found


def test_the_doctor_tells_what_is_too_old_or_missing(monkeypatch):
    versions = {"old": "1.9", "new": "1.10.2", "torchvision": "0.25", "torch": "2.13+cpu"}

    def version(name):
        if name not in versions:
            raise doctor.metadata.PackageNotFoundError(name)
        return versions[name]

    required = ["old>=1.10", "new>=1.10", "gone>=1", "extra>=2; extra == 'more'"]
    required += ["torchvision>=0.25; extra == 'vision'"]
    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: required)
    found = {each.name: each for each in doctor._packages()}
    assert "pip install --upgrade old" in found["old"].problem
    assert found["new"].problem == ""
    assert found["gone"].problem
    assert '".[more]"' in found["extra [more]"].value
    assert found["extra [more]"].problem == ""
    assert "2.13+cpu" in found["torchvision [vision]"].problem


def test_the_doctor_does_not_fail_on_a_broken_torch(monkeypatch):
    def broken():
        raise RuntimeError("the driver\nis on fire")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    name, value, problem = doctor._device()
    assert (name, value) == ("device", "unknown")
    assert problem.endswith("the driver is on fire")


def test_problems_are_printed_and_are_fields_of_the_json(capsys, monkeypatch):
    found = [doctor.Finding("torch", "1.0", "is older than 2.10; upgrade")]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert cli.main(["doctor"]) == 0
    assert "torch is older than 2.10; upgrade" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == ["torch is older than 2.10; upgrade"]
