import sys

import pytest
from lab import open_set as benchmark

from nearsay.noise import OpenSet


def test_a_share_is_replaced_by_other_classes_and_the_final_accuracy_is_told(monkeypatch, capsys):
    seen = []

    def trained(experiment, folder):
        seen.append(experiment)
        return {"accuracy": {"test": {"final": 0.5 + 0.1 * experiment.seed, "best": 0.9}}}

    monkeypatch.setattr(benchmark, "train", trained)
    monkeypatch.setattr(sys, "argv", ["open_set.py", "--seeds", "2"])
    benchmark.main()
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["replaced", "20%", "40%"]
    assert told[1].count("55.0 ± 7.1") == len(benchmark.METHODS)
    assert [each.noise for each in seen[:2]] == [
        OpenSet(rate=0.2, seed=0),
        OpenSet(rate=0.2, seed=1),
    ]
    assert all(each.outside != each.data and each.epochs == 50 for each in seen)
    assert [each.objective.reject for each in seen[4:10:2]] == [0.1, 0.2, 0.4]


@pytest.mark.parametrize("name", ["cross-entropy", "reject=0.2"])
def test_it_trains(name):
    assert 20 < benchmark.accuracy(name, 0.2, 0, 1) < 100
