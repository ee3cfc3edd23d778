import sys

import audit_rates as benchmark
import numpy as np
import pytest


@pytest.mark.parametrize("kind", ["sym", "pair", "one", "inst"])
def test_about_the_wished_share_of_the_labels_is_made_wrong(kind):
    rng = np.random.default_rng(0)
    choice = {"classes": 3, "num": 3000, "dim": 4, "apart": 3.0, "unequal": 1.0}
    points, clean = benchmark.clouds(rng, choice)
    given = benchmark.spoil(rng, points, clean, kind, 0.15)
    assert (given != clean).mean() == pytest.approx(0.15, abs=0.02)
    assert set(np.unique(given)) == {0, 1, 2}
    assert np.array_equal(benchmark.spoil(rng, points, clean, kind, 0), clean)


def test_sets_are_drawn_again_alike_and_counted(monkeypatch, capsys):
    one, other = benchmark.draw(70002), benchmark.draw(70002)
    assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
    assert one[1].sum(axis=1) == pytest.approx(1, abs=1e-4)
    monkeypatch.setattr(sys, "argv", ["audit_rates.py", "--first", "70002", "--num", "1"])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["given", "both", "features", "probabilities"]
