"""The verbs to start with: demo, recipes and data get."""

import os
import re

from nearsay import cli
from nearsay.doors import demo as door


def test_the_demonstration_shows_all_seeds_and_where_the_report_is(monkeypatch, capsys, tmp_path):
    finals = {("standard", 0): 0.9, ("ncr", 0): 0.85, ("standard", 1): 0.8, ("ncr", 1): 0.95}

    def fake(out, *, display):
        confidence = {"right": 0.6, "wrong": 0.1}
        for number, ((method, seed), final) in enumerate(finals.items(), start=1):
            result = {"accuracy": {"test": {"final": final}}, "confidence": confidence}
            folder = out / f"{method}-{seed}"
            yield door.Demonstrated(number, len(finals), method, seed, folder, result)

    monkeypatch.setattr(door, "demonstrate", fake)
    monkeypatch.setattr("nearsay.report.write_report", lambda runs, target, *, title: target)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "4/4  ncr, seed 1: 95.0 %"
    assert re.search(r"-5\.0 +\+15\.0 +5\.0 ± 14\.1", out)
    assert str(tmp_path / "report.html") in out
    assert f"nearsay audit {tmp_path / 'ncr-1'} " in out


def test_data_get_tells_where_the_data_is(monkeypatch, capsys, tmp_path):
    asked = []

    def fetch(name, folder):
        asked.append((name, folder))
        return folder / "cifar-10-batches-py"

    monkeypatch.setattr("nearsay.data.cifar.fetch", fetch)
    assert cli.main(["data", "get", "cifar10", "--to", str(tmp_path)]) == 0
    assert asked == [("cifar10", tmp_path)]
    assert f"{tmp_path}{os.sep}cifar-10-batches-py" in capsys.readouterr().out
