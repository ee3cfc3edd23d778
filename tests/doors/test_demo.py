"""The six runs of the demonstration, and the table of them."""

from nearsay.doors import demo


def demonstrated(finals):
    runs = []
    for number, ((method, seed), final) in enumerate(finals.items(), start=1):
        result = {"accuracy": {"test": {"final": final}}}
        result["confidence"] = {"right": 0.5, "wrong": 0.25}
        runs.append(demo.Demonstrated(number, len(finals), method, seed, None, result))
    return runs


def test_the_demonstration_shows_every_seed_and_a_loss_as_a_loss():
    finals = {("standard", 0): 0.9, ("ncr", 0): 0.8, ("standard", 1): 0.9, ("ncr", 1): 0.95}
    runs = demonstrated(finals)
    headers, rows = demo.to_cells(runs)
    assert headers == ["test accuracy after the last epoch", "seed 0", "seed 1", "mean ± std"]
    assert rows[:3] == [
        ["standard", "90.0 %", "90.0 %", "90.0 ± 0.0"],
        ["ncr", "80.0 %", "95.0 %", "87.5 ± 10.6"],
        ["ncr above standard, points", "-10.0", "+5.0", "-2.5 ± 10.6"],
    ]
    assert rows[-1] == ["confidence in wrong labels, ncr", "25.0 %", "25.0 %", "25.0 ± 0.0"]


def test_the_demonstration_trains_each_method_on_each_seed(monkeypatch, tmp_path):
    trained = []

    def fake(experiment, folder, *, origin, display):
        kind, rate = type(experiment.objective).__name__, experiment.noise.rate
        trained.append((kind, experiment.seed, rate, folder.name))
        return {"seed": experiment.seed}

    monkeypatch.setattr(demo, "train", fake)
    done = list(demo.demonstrate(tmp_path))
    assert trained == [
        (kind, seed, 0.4, f"{method}-seed={seed}")
        for seed in (0, 1, 2)
        for kind, method in (("CrossEntropy", "standard"), ("NCR", "ncr"))
    ]
    assert [each.number for each in done] == [1, 2, 3, 4, 5, 6]
    assert [each.result for each in done] == [{"seed": each.seed} for each in done]
