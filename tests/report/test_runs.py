import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nearsay.report import write_report
from nearsay.report.runs import Spread, compare, group_runs, read_run, spread
from report.making import write_run


def test_means_and_deviations_are_those_of_a_sample():
    assert spread([]) is None
    assert spread([0.25]) == Spread(0.25, None, 1)
    assert spread([1, 2, 6]) == Spread(3, 7**0.5, 3)
    assert spread([1, 2, 6]).text(2, 10) == "30.00 ± 26.46"
    assert spread([95.1, 94.2, 95.9]).text() == "95.1 ± 0.9"  # 95.07 and 0.850
    assert spread([95.14]).text() == "95.1"


def names_of(*runs):
    groups = group_runs(list(map(read_run, runs)))
    return [(group.name, [run.seed for run in group.runs]) for group in groups]


def test_runs_that_differ_in_seed_or_machine_only_are_one_group(tmp_path):
    elsewhere = {"settings": {"machine": {"device": "cuda"}}, "overrides": ["machine.device=cuda"]}
    runs = [write_run(tmp_path / "a", seed=5), write_run(tmp_path / "b", seed=2, **elsewhere)]
    assert names_of(*runs) == [("ncr", [2, 5])]


def test_a_run_that_was_made_again_is_no_further_seed(tmp_path):
    settings = {"machine": {"device": "cuda"}}
    again = {"finals": [0.9], "arguments": {"kind": "unused"}, "settings": settings}
    runs = [
        write_run(tmp_path / "a", finals=[0.7]),
        write_run(tmp_path / "b", **again),
        write_run(tmp_path / "c", seed=1, finals=[0.6]),
    ]
    [group] = compare(runs).groups
    assert (len(group.runs), group.num_seeds) == (3, 2)
    assert group.numbers("accuracy", "test", "final") == [pytest.approx(0.8), 0.6]


@pytest.mark.parametrize("labeled", [1.0, 0.5])
def test_runs_on_labels_that_were_cleaned_again_since_are_not_one_group(tmp_path, labeled):
    settings = {"labels_file": "run/cleaned.npz", "labeled": labeled}
    runs = []
    for name, seed in (("first", 0), ("second", 1), ("again", 0)):
        runs.append(write_run(tmp_path / name, seed=seed, settings=settings, num_trained=20))
    arrays = dict(np.load(runs[-1] / "labels.npz"))
    arrays["given"][25] = -1  # held out
    np.savez(runs[-1] / "labels.npz", **arrays)
    if labeled == 1:
        assert names_of(*runs) == [("ncr (1)", [0, 1]), ("ncr (2)", [0])]
    else:  # each seed hides others, so that nothing can be said
        assert names_of(*runs) == [("ncr", [0, 0, 1])]


def test_a_seed_of_the_noise_that_was_chosen_makes_another_group(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", seed=1, overrides=["noise.seed=7"]),
    ]
    assert names_of(*runs) == [("ncr", [0]), ("noise.seed=7", [1])]


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"method": "standard"}, {"method": "ncr"}, ["standard", "ncr"]),
        (
            {"arguments": {"noise": "0.2"}, "settings": {"rate": 2}},
            {"settings": {"rate": 4}},
            ["noise=0.2", "noise=0.4"],
        ),
        (
            {"method": "gjs", "arguments": {"noise": "0.2"}},
            {"recipe": "toy"},
            ["digits gjs noise=0.2", "toy ncr noise=0.4"],
        ),
        (
            {"overrides": ["k=3"], "settings": {"k": 3}},
            {"overrides": ["k=5"], "settings": {"k": 5}},
            ["k=3", "k=5"],
        ),
        (
            {"settings": {"epochs": 3.0}},
            {"settings": {"epochs": 9.0}},
            ["ncr epochs=3.0", "ncr epochs=9.0"],
        ),
        ({"settings": {"a": []}}, {"settings": {"a": {}}}, ["ncr (1)", "ncr (2)"]),
    ],
)
def test_groups_are_named_by_their_differences(tmp_path, first, second, names):
    runs = [write_run(tmp_path / "a", **first), write_run(tmp_path / "b", **second)]
    assert [name for name, _ in names_of(*runs)] == names


def test_a_folder_named_twice_counts_once_and_the_order_stays(tmp_path):
    first, second = write_run(tmp_path / "a", method="standard"), write_run(tmp_path / "b")
    third = write_run(tmp_path / "c", seed=1)
    groups = compare([first, second, third, first, tmp_path / "x" / ".." / "b"]).groups
    assert [(group.name, len(group.runs)) for group in groups] == [("standard", 1), ("ncr", 2)]


def test_without_a_split_runs_are_compared_where_most_have_an_accuracy(tmp_path):
    accuracies = {"test": {"test": {"final": 0.5}}, "validation": {"validation": {"final": 0.5}}}
    accuracies["both"] = accuracies["test"] | accuracies["validation"]
    runs = {
        name: write_run(tmp_path / name, result={"accuracy": accuracy})
        for name, accuracy in {**accuracies, "none": {}}.items()
    }
    expected = {
        ("both",): "test",
        ("both", "validation"): "validation",  # all runs have it
        ("test", "validation"): "test",  # some runs have it
        ("validation", "none"): "validation",
        ("none",): None,
    }
    for names, split in expected.items():
        assert compare([runs[name] for name in names]).split == split
    assert compare([runs["both"]], "second_test").split == "second_test"


def test_only_finite_numbers_are_numbers_of_a_result(tmp_path):
    odd = {"nan": float("nan"), "yes": True, "huge": 10**400, "text": "1", "whole": 3}
    run = read_run(write_run(tmp_path / "a", result={"metrics": {"test": odd, "odd": 1}}))
    assert run.metrics() == [("metrics", "test", "whole")]
    assert run.number("metrics", "test", "whole") == 3.0
    for name in ("nan", "yes", "huge", "text", "missing"):
        assert run.number("metrics", "test", name) is None


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_text(name, text):
    return lambda run: (run / name).write_text(text)


def remove(name):
    return lambda run: (run / name).unlink()


def write_labels(**arrays):
    return lambda run: np.savez(run / "labels.npz", classes=np.array(["a"]), **arrays)


def write_predictions(**tensors):
    def write(run):
        indices = {"indices": torch.arange(3)}
        save_file(indices | tensors, run / "predictions" / "train.safetensors")

    return write


TRAIN = "predictions/train.safetensors"
DAMAGES = [  # a part of the complaint, and the damage
    ("result.json", remove("result.json")),
    ("result.json", lambda run: rewrite(run / "result.json", finished=False)),
    ("seed .*result.json", lambda run: rewrite(run / "result.json", seed="1")),
    ("result.json", write_text("result.json", "{")),
    ("result.json", write_text("result.json", "[" * 100_000)),
    ("result.json", write_text("result.json", "[]")),
    ("result.json", lambda run: (run / "result.json").write_bytes(b"\xff")),
    ("experiment.json", remove("experiment.json")),
    ("experiment.json", lambda run: rewrite(run / "experiment.json", arguments=[])),
    ("log.jsonl", remove("log.jsonl")),
    ("log.jsonl", write_text("log.jsonl", "")),
    ("line 2 of", write_text("log.jsonl", '{"epoch": 1}\n{"epo')),
    ("line 1 of", write_text("log.jsonl", '{"epoch": NaN}\n')),
    ("labels.npz", remove("labels.npz")),
    ("labels.npz", write_text("labels.npz", "PK\x03\x04 not a zip")),
    ("labels.npz", write_labels()),
    ("labels.npz", write_labels(given=[7])),
    ("train.safetensors", remove(TRAIN)),
    ("train.safetensors", write_text(TRAIN, "short")),
    ("train.safetensors", write_predictions()),
    ("2 columns", write_predictions(logits=torch.zeros(3, 2))),
    ("row 0", write_predictions(logits=torch.full((3, 3), torch.nan))),
]


def test_a_run_folder_that_cannot_be_read_is_refused_by_its_file(tmp_path):
    (tmp_path / "report.html").write_text("as it was")
    for number, (complaint, damage) in enumerate(DAMAGES):
        run = write_run(tmp_path / f"run-{number}")
        damage(run)
        with pytest.raises(ValueError, match=complaint) as caught:
            write_report([run], tmp_path / "report.html", title="T")
        assert str(run) in str(caught.value)
    assert (tmp_path / "report.html").read_text() == "as it was"


def test_no_run_or_no_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="runs"):
        write_report([], tmp_path / "r.html", title="T")
    with pytest.raises(ValueError, match="nowhere"):
        write_report([tmp_path / "nowhere"], tmp_path / "r.html", title="T")
    assert not (tmp_path / "r.html").exists()
