import sys

import audit_trained as benchmark
import numpy as np


def test_sets_are_drawn_again_alike_and_are_wrong_as_they_say():
    for seed in range(80000, 80020):
        one, other = benchmark.draw(seed), benchmark.draw(seed)
        assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
        _, given, clean = one
        assert (given != clean).any() == (benchmark.choose(seed)["rate"] > 0)


def test_a_training_is_audited_and_counted(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["audit_trained.py", "--first", "80025", "--num", "1"])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    starts = ["trainings", "all", "clouds, far", "3-10 epochs"]
    assert [line[:13].rstrip() for line in lines] == starts


def test_ends_on_the_wrong_side_of_the_truth_are_counted_apart(capsys):
    benchmark.show(
        "all",
        [(0.2, 0.1, 0.05, 0.15), (0.2, 0.1, 0, 0.19), (0.2, 0.3, 0.25, 0.35), (0.2, 0.2, 0.2, 0.2)],
    )
    assert capsys.readouterr().out.split()[1:5] == ["4", "0.250", "0.500,", "0.250"]
    benchmark.show("right alone", [(0.0, 0.3, 0.0, 0.5), (0.0, 0.1, 0.0, 0.2)])
    assert capsys.readouterr().out.split()[-1] == "1"
