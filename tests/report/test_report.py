import json
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
import torch
from markupsafe import Markup
from safetensors.torch import save_file

from nearsay.report import charts, write_report
from nearsay.report.runs import Spread, compare, group_runs, read_run, spread

CLASSES = ("cat", "dog", "emu")


def write_run(
    folder, *, method="ncr", seed=0, finals=None, classes=CLASSES, knows_truth=True, **changes
):
    """A run folder as training leaves it: 30 examples, every cat labeled a dog, sure of right ones."""
    arguments = {
        "method": method,
        "noise": "0.4",
        "seed": str(seed),
        **changes.get("arguments", {}),
    }
    settings = {
        "kind": "Experiment",
        "data": {"kind": "Digits", "seed": 0},
        "noise": {"kind": "Symmetric", "seed": seed},
    }
    settings |= {
        "objective": {"kind": method.upper()},
        "epochs": 4.0,
        "seed": seed,
        "machine": {"device": "cpu"},
    }
    settings |= changes.get("settings", {})
    accuracies = finals or [0.5, 0.6, 0.7, 0.8 + seed / 100]
    entries = [
        {
            "epoch": float(epoch),
            "step": 10 * epoch,
            "rate": 0.1,
            "loss": 1 / epoch,
            "test_accuracy": value,
        }
        for epoch, value in enumerate(accuracies, start=1)
    ]
    num, num_classes = changes.get("num", 30), len(classes)
    clean = torch.arange(num) % num_classes
    given = (clean + (torch.arange(num) % 3 == 0)) % num_classes
    trust = torch.where(
        given == clean, torch.tensor(0.92), torch.tensor(changes.get("wrong_trust", 0.12))
    )
    logits = ((1 - trust) / (num_classes - 1)).log()[:, None].repeat(1, num_classes)
    logits[torch.arange(num), given] = trust.log()
    held_out = torch.arange(num) >= changes.get("num_trained", num)
    result = {
        "accuracy": {
            "test": {
                "final": accuracies[-1],
                "best": 0.99,
                "best_epoch": 2.0,
                "last_10": np.mean(accuracies),
            }
        },
        "labels": {
            "effective_rate": 0.4,
            "requested_rate": 0.4,
            "num_examples": num,
            "num_classes": num_classes,
        },
        "detection": {"auroc": 0.95, "average_precision": 0.9},
        "memorization": {"memorized": 0.125, "corrected": 0.75, "other": 0.125},
        "seed": seed,
        "epochs": 4.0,
        "seconds": 12.5,
        "images_per_second": 2000.0,
        "peak_memory_bytes": 2**30,
        "hardware": "a small CPU",
        "versions": {"nearsay": "0.1.0", "torch": "2.10"},
        "finished": True,
    } | changes.get("result", {})
    origin = {
        "recipe": changes.get("recipe", "digits"),
        "arguments": arguments,
        "overrides": changes.get("overrides", []),
    }
    (folder / "predictions").mkdir(parents=True)
    (folder / "experiment.json").write_text(json.dumps(origin | {"experiment": settings}))
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "result.json").write_text(json.dumps(result))
    truth = {"clean": clean.numpy()} if knows_truth else {}
    parts = {
        "train": (~held_out).nonzero()[:, 0].numpy(),
        "validation": held_out.nonzero()[:, 0].numpy(),
    }
    np.savez(
        folder / "labels.npz", given=given.numpy(), classes=np.array(classes), **truth, **parts
    )
    tensors = {"features": torch.zeros(num, 2), "logits": logits, "indices": torch.arange(num)}
    save_file(tensors, folder / "predictions" / "train.safetensors")
    return folder


class Reader(HTMLParser):
    """Tags, attributes and text of a page as a browser would see them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.drawn = [], [], "", ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text += data
        if self.tags[-1:] == ["text"]:  # of a chart
            self.drawn += data

    def words(self):
        return " ".join(self.text.split())


@pytest.fixture
def report(tmp_path):
    """Write a report of runs and read it; the title is plain."""

    def read(*runs, title="A title", **choices):
        return Reader(
            write_report(runs, tmp_path / "out" / "report.html", title=title, **choices).read_text(
                "utf-8"
            )
        )

    return read


@pytest.fixture
def told(report, monkeypatch):
    """The same without drawing, for what is said in words."""
    monkeypatch.setattr(charts, "_drawn", lambda chart: Markup("<svg></svg>"))
    return report


@pytest.fixture
def two_methods(tmp_path):
    """NCR ends at 80, 81 and 82 %, cross-entropy at 60, 62 and 64 %."""
    better = [write_run(tmp_path / f"ncr-{seed}", seed=seed) for seed in range(3)]
    forgets = {"memorization": {"memorized": 0.5, "corrected": 0.25, "other": 0.25}}
    worse = [
        write_run(
            tmp_path / f"ce-{seed}",
            method="standard",
            seed=seed,
            finals=[0.7, 0.6 + seed / 50],
            result=forgets,
        )
        for seed in range(3)
    ]
    return [*worse, *better]


def test_a_method_that_was_left_to_the_recipe_is_explained_too(told, tmp_path):
    run = write_run(tmp_path / "a")
    record = json.loads((run / "experiment.json").read_text())
    assert record["arguments"].pop("method") == "ncr"
    (run / "experiment.json").write_text(json.dumps(record))
    assert "Neighbor Consistency Regularization" in told(run).words()


def test_two_numbers_have_the_deviation_of_a_sample_and_one_has_none():
    assert spread([]) is None
    assert spread([0.5]) == (0.5, None, 1)
    assert spread([0.25, 0.75]) == pytest.approx((0.5, statistics.stdev([0.25, 0.75]), 2))
    assert spread([95.1, 94.2, 95.9]).text() == "95.1 ± 0.9"  # 95.07 and 0.850
    assert spread([95.14]).text() == "95.1"


def test_the_summary_says_who_ends_higher_by_how_much_and_what_became_of_wrong_labels(
    told, two_methods
):
    words = told(*two_methods).words()
    assert (
        "On the clean test set, ncr ends at 81.0 ± 1.0 % accuracy and standard at 62.0 ± 2.0 %"
        in words
    )
    assert "(mean ± standard deviation over 3 runs each)" in words
    assert "is 19.0 percentage points; every run of ncr ends above every run of standard." in words
    assert (
        "Of the training labels, 40 % are wrong. After training, ncr repeats the wrong label for 12.5 ± 0.0 %"
        in words
    )
    assert (
        "standard repeats the wrong label for 50.0 ± 0.0 % of them and gives the true class for 25.0 ± 0.0 %."
        in words
    )


def test_runs_that_overlap_or_stand_alone_may_differ_by_chance(told, tmp_path):
    high = [
        write_run(tmp_path / f"a{seed}", seed=seed, finals=[final])
        for seed, final in enumerate([0.7, 0.9])
    ]
    low = [
        write_run(tmp_path / f"b{seed}", method="elr", seed=seed, finals=[0.71])
        for seed in range(2)
    ]
    assert (
        "is 9.0 percentage points; the runs of the two overlap, so that may be chance."
        in told(*high, *low).words()
    )
    assert (
        "is 1.0 percentage points; with one run each, that may be chance."
        in told(high[0], low[0]).words()
    )


def test_of_three_groups_the_first_two_and_the_last_are_named(told, tmp_path):
    finals = {"gjs": 0.5, "ncr": 0.9, "elr": 0.7, "mixup": 0.6}
    runs = [
        write_run(tmp_path / name, method=name, finals=[final]) for name, final in finals.items()
    ]
    expected = "ncr ends highest at 90.0 % accuracy, elr follows at 70.0 %, and gjs ends lowest at 50.0 % (one run)."
    assert expected in told(*runs).words()


def test_of_groups_of_different_sizes_the_numbers_of_runs_are_told_whoever_ends_higher(
    told, tmp_path
):
    alone = write_run(tmp_path / "a", finals=[0.9])
    others = [
        write_run(tmp_path / f"b{seed}", method="elr", seed=seed, finals=[0.7]) for seed in range(3)
    ]
    words = told(alone, *others).words()
    assert (
        "ncr ends at 90.0 % accuracy and elr at 70.0 ± 0.0 % (mean ± standard deviation over 1 to 3 runs each)"
        in words
    )


def test_a_table_shows_every_seed_and_nothing_that_was_picked(told, two_methods):
    reader = told(*two_methods)
    for name, final in [
        ("ce-0", "60.00"),
        ("ce-1", "62.00"),
        ("ce-2", "64.00"),
        ("ncr-0", "80.00"),
        ("ncr-2", "82.00"),
    ]:
        assert re.search(rf"{name}(standard|ncr)\d{re.escape(final)}", reader.text)
    assert "standard362.00 ± 2.00" in reader.text
    assert "99.00" not in reader.text  # the best epoch of every run


def test_what_was_run_and_what_it_cost_is_told(told, tmp_path):
    run = write_run(tmp_path / "a", overrides=["objective.k=5", "name=two words"])
    words = told(run).words()
    assert (
        "nearsay train digits method=ncr noise=0.4 seed=0 --set objective.k=5 --set 'name=two words'"
        in words
    )
    assert "a small CPU" in words
    assert "nearsay 0.1.0, torch 2.10" in words
    assert re.search(r"torch 2.104\s*12.5\s*2000\s*1.00", words)
    assert "Neighbor Consistency Regularization" in words


def test_means_and_deviations_are_those_of_a_sample():
    assert spread([]) is None
    assert spread([0.25]) == Spread(0.25, None, 1)
    assert spread([1, 2, 6]) == Spread(3, 7**0.5, 3)
    assert spread([1, 2, 6]).text(2, 10) == "30.00 ± 26.46"


def names_of(*runs):
    return [
        (group.name, [run.seed for run in group.runs])
        for group in group_runs(list(map(read_run, runs)))
    ]


def test_runs_that_differ_in_seed_or_machine_only_are_one_group(tmp_path):
    elsewhere = {"settings": {"machine": {"device": "cuda"}}, "overrides": ["machine.device=cuda"]}
    runs = [write_run(tmp_path / "a", seed=5), write_run(tmp_path / "b", seed=2, **elsewhere)]
    assert names_of(*runs) == [("ncr", [2, 5])]


def test_a_run_that_was_made_again_is_no_further_seed(told, tmp_path):
    again = {
        "finals": [0.9],
        "arguments": {"kind": "unused"},
        "settings": {"machine": {"device": "cuda"}},
    }
    runs = [
        write_run(tmp_path / "a", finals=[0.7]),
        write_run(tmp_path / "b", **again),
        write_run(tmp_path / "c", seed=1, finals=[0.6]),
    ]
    [group] = compare(runs).groups
    assert (len(group.runs), group.num_seeds) == (3, 2)
    assert group.numbers("accuracy", "test", "final") == [pytest.approx(0.8), 0.6]
    words = told(*runs).words()
    assert "(mean ± standard deviation over 2 runs)" in words
    assert "ncr270.00 ± 14.14" in words


@pytest.mark.parametrize("labeled", [1.0, 0.5])
def test_runs_on_labels_that_were_cleaned_again_since_are_not_one_group(told, tmp_path, labeled):
    settings = {"relabeled": "run/cleaned.npz", "labeled": labeled}
    held_out = {"accuracy": {"validation": {"final": 0.625}}}
    runs = [
        write_run(
            tmp_path / f"seed-{seed}", seed=seed, settings=settings, num_trained=20, result=held_out
        )
        for seed in (0, 1)
    ]
    runs.append(write_run(tmp_path / "again", settings=settings, num_trained=20, result=held_out))
    arrays = dict(np.load(runs[-1] / "labels.npz"))
    arrays["given"][25] = -1  # held out
    np.savez(runs[-1] / "labels.npz", **arrays)
    if labeled == 1:
        assert names_of(*runs) == [("ncr (1)", [0, 1]), ("ncr (2)", [0])]
    else:  # each seed hides others, so that nothing can be said
        assert names_of(*runs) == [("ncr", [0, 0, 1])]
    assert ("were judged by different labels" in told(*runs).words()) == (labeled == 1)


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
def test_groups_are_named_by_what_tells_them_apart(tmp_path, first, second, names):
    runs = [write_run(tmp_path / "a", **first), write_run(tmp_path / "b", **second)]
    assert [name for name, _ in names_of(*runs)] == names


def test_a_folder_named_twice_counts_once_and_the_order_stays(two_methods, tmp_path):
    groups = compare([*two_methods, two_methods[0], tmp_path / "x" / ".." / "ncr-1"]).groups
    assert [(group.name, len(group.runs)) for group in groups] == [("standard", 3), ("ncr", 3)]
    first, *_, last = two_methods
    assert [group.name for group in compare([first, last, first]).groups] == ["standard", "ncr"]


def captured(monkeypatch, name):
    """What is handed to a function that draws."""
    calls, original = [], getattr(charts, name)

    def record(*positional, **named):
        calls.append((*positional, named))
        return original(*positional, **named)

    monkeypatch.setattr(charts, name, record)
    return calls


def test_curves_are_each_run_and_their_mean_at_the_epochs_they_share(told, tmp_path, monkeypatch):
    runs = [
        write_run(tmp_path / f"{seed}", seed=seed, finals=finals)
        for seed, finals in enumerate([[0.25, 0.5, 1], [0.75, 1]])
    ]
    calls = captured(monkeypatch, "curves")
    told(*runs)
    [(lines, named)] = calls
    assert [(line.is_mean, list(line.points)) for line in lines] == [
        (False, [(1, 25), (2, 50), (3, 100)]),
        (False, [(1, 75), (2, 100)]),
        (True, [(1, 50), (2, 75)]),
    ]
    assert named == {"names": ["ncr"], "title": "accuracy on the test set (%)"}


def test_a_run_that_was_made_again_weighs_in_the_mean_curve_as_in_the_table(
    told, tmp_path, monkeypatch
):
    runs = [
        write_run(tmp_path / f"{place}", seed=seed, finals=[final])
        for place, (seed, final) in enumerate([(0, 0.75), (0, 0.75), (1, 0.25)])
    ]
    calls = captured(monkeypatch, "curves")
    assert "ncr250.00 ± 35.36" in told(*runs).words()
    [(lines, _)] = calls
    assert [list(line.points) for line in lines if line.is_mean] == [[(1, 50)]]


@pytest.mark.parametrize("num", [1, 2, 199, 200, 201, 400, 401, 5000])
def test_a_long_curve_is_thinned_evenly_and_keeps_its_end(num):
    points = [(float(epoch), 0.0) for epoch in range(num)]
    kept = charts._thinned(points)
    assert kept[-1] == points[-1]
    assert min(num, 100) <= len(kept) <= 200
    assert len({after[0] - before[0] for before, after in pairwise(kept)}) <= 1


def test_confidence_is_pooled_over_seeds_and_split_by_truth_for_trained_examples_only(
    told, tmp_path, monkeypatch
):
    runs = [
        write_run(tmp_path / f"{seed}", seed=seed, num_trained=12, wrong_trust=0.32 + 0.4 * seed)
        for seed in range(2)
    ]
    calls = captured(monkeypatch, "histogram")
    words = told(*runs).words()
    [(histograms, named)] = calls
    right, wrong = histograms
    assert (right.kind, wrong.kind) == ("right label", "wrong label")
    assert np.flatnonzero(right.shares).tolist() == [18]  # of 20 bins, the one from 90 to 95 %
    assert right.shares[18] == 100
    assert {place: wrong.shares[place] for place in np.flatnonzero(wrong.shares).tolist()} == {
        6: 50,
        14: 50,
    }
    assert named == {"highest": 100}
    assert "16 right labels and 8 wrong labels. Data: Digits; 2 runs; seeds 0, 1." in words


def test_without_the_truth_there_is_one_histogram_and_no_noise_matrix(told, tmp_path, monkeypatch):
    calls = captured(monkeypatch, "histogram")
    unknown = {"memorization": None, "detection": None, "labels": {"effective_rate": None}}
    words = told(write_run(tmp_path / "a", knows_truth=False, result=unknown)).words()
    assert [[each.kind for each in histograms] for histograms, _ in calls] == [["given label"]]
    assert "30 given labels. Data: Digits; 1 run; seed 0." in words
    assert "On the test set, ncr ends at 80.0 % accuracy (one run)." in words
    assert "Which training labels are wrong is not known here" in words
    assert "The labels" not in words


def test_labels_that_are_all_right_are_called_so(told, tmp_path):
    nothing = {"memorization": {"memorized": float("nan")}, "labels": {"effective_rate": 0.0}}
    assert (
        "none of the training labels is wrong"
        in told(write_run(tmp_path / "a", result=nothing)).words()
    )


def test_wrong_labels_of_none_of_the_classes_are_called_wrong(told, tmp_path):
    outside = {
        "memorization": {"memorized": None, "corrected": None},
        "labels": {"effective_rate": 0.4},
    }
    words = told(write_run(tmp_path / "a", result=outside)).words()
    assert (
        "Of the training labels, 40 % are wrong. Nothing was trained on a wrong one whose true class is one"
        in words
    )
    assert "is not known here" not in words


def test_the_noise_matrix_has_true_classes_as_rows_and_counts_each_draw_once(
    told, two_methods, monkeypatch
):
    calls = captured(monkeypatch, "heat_map")
    words = told(*two_methods).words()
    assert calls == [([[0, 100, 0], [0, 100, 0], [0, 0, 100]], CLASSES, {})]
    assert "30 training labels in 1 draw of the noise" in words
    assert "All methods were trained on the same labels." in words


@pytest.mark.parametrize(("num_classes", "num_maps"), [(20, 1), (21, 0)])
def test_a_matrix_too_large_to_be_read_is_left_out(
    told, tmp_path, monkeypatch, num_classes, num_maps
):
    calls = captured(monkeypatch, "heat_map")
    told(write_run(tmp_path / "a", classes=["same"] * num_classes))
    assert len(calls) == num_maps


def test_a_run_of_fewer_than_ten_epochs_is_not_said_to_have_them(told, tmp_path):
    words = told(write_run(tmp_path / "a")).words()
    assert "mean of last 10 or fewer (%)" in words
    assert "the mean over the last 10 epochs, or over all of a shorter run;" in words


def test_runs_without_a_test_set_are_compared_on_held_out_examples(told, tmp_path):
    held_out = {"accuracy": {"validation": {"final": 0.625, "last_10": 0.5}}}
    as_given = write_run(tmp_path / "a", result=held_out)
    clean = write_run(tmp_path / "b", result=held_out, settings={"validation_labels": "clean"})
    neither = write_run(tmp_path / "c", result={"accuracy": {}})
    text = "On the held-out validation set (its labels as they were given), ncr ends at 62.5 % accuracy"
    assert text in told(as_given).words()
    assert (
        "On the held-out validation set with clean labels, ncr ends at 62.5 %"
        in told(clean).words()
    )
    unknown = write_run(
        tmp_path / "d", result=held_out, knows_truth=False, settings={"validation_labels": "clean"}
    )  # what is not known cannot be asked for
    assert text in told(unknown).words()
    words = told(neither).words()
    assert "None of these runs was judged on a test or validation set." in words
    assert "Accuracy during training" not in words


@pytest.mark.parametrize(
    ("split", "place", "title"),
    [
        ("validation", "held-out validation set (its labels as they were given)", "validation set"),
        ("second_test", "second test set", "second test set"),
        ("test", "clean test set", "test set"),
    ],
)
def test_runs_are_compared_on_the_split_that_is_asked_for(
    told, tmp_path, monkeypatch, split, place, title
):
    finals = {"test": 0.8, "validation": 0.625, "second_test": 0.25}
    accuracy = {name: {"final": final, "last_10": final} for name, final in finals.items()}
    run = write_run(tmp_path / "a", result={"accuracy": accuracy})
    entry = {"epoch": 1.0, **{f"{name}_accuracy": final for name, final in finals.items()}}
    (run / "log.jsonl").write_text(json.dumps(entry) + "\n")
    calls = captured(monkeypatch, "curves")
    words = told(run, split=split).words()
    assert f"On the {place}, ncr ends at {100 * finals[split]:.1f} % accuracy (one run)." in words
    [([line], named)] = calls
    assert (list(line.points), named["title"]) == (
        [(1, 100 * finals[split])],
        f"accuracy on the {title} (%)",
    )


def test_labels_before_and_after_cleaning_are_said_to_be_different_judges(told, tmp_path):
    held_out = {"accuracy": {"validation": {"final": 0.625}}}
    before = write_run(tmp_path / "a", result=held_out, num_trained=20)
    after = write_run(
        tmp_path / "b", result=held_out, num_trained=20, settings={"relabeled": "a/cleaned.npz"}
    )
    words = told(before, after).words()
    assert "On the held-out validation set (its labels as each run has them)" in words
    assert "The runs were judged by different labels, which makes cleaned ones look better" in words
    for alike in (
        (before,),
        (after,),
        (before, write_run(tmp_path / "c", method="standard", result=held_out)),
    ):
        assert "different labels" not in told(*alike).words()
    own = write_run(tmp_path / "g", result=held_out, settings={"relabeled": "a/cleaned.npz"})
    assert (
        "different labels" not in told(before, own).words()
    )  # the data has a validation set of its own
    known = {"validation_labels": "clean"}
    before = write_run(tmp_path / "d", result=held_out, num_trained=20, settings=known)
    after = write_run(
        tmp_path / "e",
        result=held_out,
        num_trained=20,
        settings=known | {"relabeled": "a/cleaned.npz"},
    )
    words = told(before, after).words()
    assert "On the held-out validation set with clean labels" in words
    assert "different labels" not in words
    before, after = (
        write_run(tmp_path / f"f{file}", num_trained=20, settings={"relabeled": file})
        for file in (None, "cleaned.npz")
    )
    assert "different labels" not in told(before, after).words()  # judged on the test set


def test_the_page_needs_nothing_but_itself(report, two_methods, tmp_path):
    reader = report(*two_methods)
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    names = {name for name, _ in reader.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {
        "src",
        "srcset",
        "xlink:href",
        "action",
        "style",
    }
    assert [value for name, value in reader.attributes if name == "href"] == ["data:,"]
    assert not {"script", "iframe", "object", "img", "foreignobject", "base", "form"} & set(
        reader.tags
    )
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page
    assert "url(" not in page
    assert "@import" not in page
    assert not set(re.findall(r"https?://[^\s\"<]*", page)) - {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_every_color_is_defined_for_light_and_for_dark(report, two_methods, tmp_path):
    report(*two_methods)
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    light, dark = (
        set(re.findall(r"(--[\w-]+):", block))
        for block in re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    )
    assert (
        set(re.findall(r"var\((--[\w-]+)\)", page))
        | {f"--series-{number}" for number in range(1, 8)}
        <= light
    )
    assert light == dark
    assert 'fill="white"' not in page


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "]]><script>alert(1)</script>",
    "</style></svg></title></pre><script>alert(1)</script>",
    "<!--",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&amp;",
    "${alert(1)} datum['x'] \\u003cscript\\u003e",
    "javascript:alert(1)",
]


def test_hostile_names_stay_text_wherever_they_come_from(report, tmp_path):
    plain = [f"word {number}" for number in range(len(HOSTILE))]
    harmless = report(*(hostile_run(tmp_path / text, text, plain) for text in plain))
    reader = report(
        *(hostile_run(tmp_path / f"{i}", text, HOSTILE) for i, text in enumerate(HOSTILE)),
        title=HOSTILE[4],
    )
    assert set(reader.tags) == set(harmless.tags)
    assert {name for name, _ in reader.attributes} == {name for name, _ in harmless.attributes}
    for text, word in zip(HOSTILE, plain, strict=True):
        assert reader.text.count(text) >= 30 <= harmless.text.count(word), text
        assert text[:9] in reader.drawn, text  # long labels are cut
    assert reader.text.count("49") == harmless.text.count("49")


def hostile_run(folder, text, classes):
    where = {"data": {"kind": text, text: text}, "objective": {"kind": text}, text: text}
    cost = {"hardware": text, "versions": {text: text}}
    choices = {"recipe": text, "overrides": [f"{text}={text}"], "arguments": {text: text}}
    return write_run(folder, method=text, classes=classes, settings=where, result=cost, **choices)


def test_a_folder_with_a_hostile_name_and_text_that_cannot_be_encoded_are_shown(report, tmp_path):
    run = write_run(tmp_path / "<b>bold", result={"hardware": "a\ud800b\u202ec\x00d"})
    reader = report(run)
    assert "b" not in reader.tags
    assert "<b>bold" in reader.text
    assert "a\ufffdb\ufffdc\ufffdd" in reader.text


def test_numbers_that_are_none_are_left_out(told, tmp_path):
    odd = {
        "detection": {"auroc": float("nan")},
        "memorization": "none",
        "seconds": True,
        "images_per_second": 10**400,
    }
    run = write_run(tmp_path / "a", finals=[0.5, float("nan"), 0.75], result=odd)
    text = told(run).text
    assert "ncr075.00" in text  # the only run, of seed 0
    assert "nan" not in text.lower()
    assert "inf" not in text


def test_the_same_runs_give_the_same_bytes(two_methods, tmp_path):
    first, second = (
        write_report(two_methods, tmp_path / name, title="T") for name in ("1.html", "2.html")
    )
    assert first == tmp_path / "1.html"
    assert first.read_bytes() == second.read_bytes()


def test_the_curves_of_many_long_runs_stay_below_a_megabyte():
    draws = np.random.default_rng(0).random((24, 900)).tolist()
    lines = [
        charts.Line(f"{number // 3}", False, [(i + 0.5, each) for i, each in enumerate(values)])
        for number, values in enumerate(draws)
    ]
    assert (
        100_000 < len(charts.curves(lines, names=[*"01234567"], title="accuracy (%)")) < 1_000_000
    )


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "result.json is missing": lambda run: (run / "result.json").unlink(),
    "result.json is not of a finished run": lambda run: rewrite(
        run / "result.json", finished=False
    ),
    "result.json has the seed '1'": lambda run: rewrite(run / "result.json", seed="1"),
    "result.json cannot be read as JSON (Exp": lambda run: (run / "result.json").write_text("{"),
    "result.json cannot be read as JSON (max": lambda run: (run / "result.json").write_text(
        "[" * 100_000
    ),
    "result.json holds no JSON object": lambda run: (run / "result.json").write_text("[]"),
    "result.json cannot be read (": lambda run: (run / "result.json").write_bytes(b"\xff"),
    "experiment.json is missing": lambda run: (run / "experiment.json").unlink(),
    "experiment.json does not hold": lambda run: rewrite(run / "experiment.json", arguments=[]),
    "log.jsonl is missing": lambda run: (run / "log.jsonl").unlink(),
    "log.jsonl has no line": lambda run: (run / "log.jsonl").write_text(""),
    "line 2 of": lambda run: (run / "log.jsonl").write_text('{"epoch": 1}\n{"epo'),
    "line 1 of": lambda run: (run / "log.jsonl").write_text('{"epoch": NaN}\n'),
    "labels.npz is missing": lambda run: (run / "labels.npz").unlink(),
    "labels.npz cannot be used (": lambda run: (run / "labels.npz").write_bytes(
        b"PK\x03\x04 not a zip"
    ),
    "labels.npz cannot be used (Obj": lambda run: np.savez(
        run / "labels.npz", given=np.array([{}]), classes=["a"]
    ),
    "labels.npz cannot be used (it holds no given": lambda run: np.savez(
        run / "labels.npz", classes=["a"]
    ),
    "labels.npz cannot be used (given holds 7": lambda run: np.savez(
        run / "labels.npz", given=[7], classes=["a"]
    ),
    "train.safetensors is missing": lambda run: shutil.rmtree(run / "predictions"),
    "train.safetensors cannot be used (": lambda run: (
        run / "predictions/train.safetensors"
    ).write_bytes(b"short"),
    "(File does not contain tensor logits": lambda run: predict(run, indices=torch.arange(3)),
    "(2 columns of logits for 3 classes": lambda run: predict(
        run, logits=torch.zeros(3, 2), indices=torch.arange(3)
    ),
    "logits of row 0 are not finite": lambda run: predict(
        run, logits=torch.full((3, 3), torch.nan), indices=torch.arange(3)
    ),
    "train.safetensors cannot be used (The": lambda run: predict(
        run, logits=torch.zeros(4, 3), indices=torch.arange(3)
    ),
}


def predict(run, **tensors):
    save_file(tensors, run / "predictions" / "train.safetensors")


@pytest.mark.parametrize("complaint", DAMAGES)
def test_a_run_folder_that_cannot_be_read_is_refused_in_one_sentence(tmp_path, complaint):
    run = write_run(tmp_path / "run")
    DAMAGES[complaint](run)
    (tmp_path / "report.html").write_text("as it was")
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        write_report([run], tmp_path / "report.html", title="T")
    assert str(run) in str(caught.value)
    assert "leave it out" in str(caught.value)
    assert (tmp_path / "report.html").read_text() == "as it was"


def test_no_run_or_no_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run was given; name at least one"):
        write_report([], tmp_path / "r.html", title="T")
    with pytest.raises(ValueError, match="nowhere is not a folder; give run folders"):
        write_report([tmp_path / "nowhere"], tmp_path / "r.html", title="T")
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_a_missing_extra_is_said_in_one_sentence(tmp_path, monkeypatch, library):
    for name in ("charts", "sections", "page"):
        monkeypatch.delitem(sys.modules, f"nearsay.report.{name}", raising=False)
    monkeypatch.delattr("nearsay.report.charts")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ImportError,
        match=re.escape('the report needs an extra; pip install ".[report]" in the clone'),
    ):
        write_report([], tmp_path / "r.html", title="T")


def test_importing_the_package_brings_neither_torch_nor_altair():
    code = "import sys, nearsay.report; sys.exit(bool({'torch', 'altair', 'jinja2'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_that_begin_alike_can_be_told_apart_in_charts():
    classes = [f"golden retriever with {color} collar" for color in ("red", "blue", "green")]
    on_axes = re.findall(r">(golden[^<]*)<", charts.heat_map(torch.eye(3).tolist(), classes))
    assert sorted(on_axes) == sorted(
        2
        * [
            "golden retrie…th red collar",
            "golden retrie…h blue collar",
            "golden retrie… green collar",
        ]
    )
    names = [
        f"folder path=/data/photos size=64 epochs=10{end}"
        for end in ("", " relabeled=/runs/first/cleaned.npz")
    ]
    lines = [charts.Line(name, True, [(1.0, 50.0), (2.0, 60.0)]) for name in names]
    in_legends = re.findall(
        r">(folder[^<]*)<", charts.curves(lines, names=names, title="accuracy (%)")
    )
    assert in_legends == [
        *names,
        "folder path=/data/ph…os size=64 epochs=10",
        "folder path=/data/ph…ns/first/cleaned.npz",
    ]
