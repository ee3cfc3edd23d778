import json
import re
import sys
from itertools import pairwise

import pytest
from markupsafe import Markup

from nearsay.errors import RunError
from nearsay.report import charts, write_report
from report.making import CLASSES, Reader, write_run


@pytest.fixture
def report(tmp_path):
    """Write a report of runs and read it."""

    def read(*runs, title="A title", **choices):
        target = tmp_path / "out" / "report.html"
        return Reader(write_report(runs, target, title=title, **choices).read_text("utf-8"))

    return read


@pytest.fixture
def undrawn(report, monkeypatch):
    """The same without drawing, for tests of the words."""
    monkeypatch.setattr(charts, "_drawn", lambda chart: Markup("<svg></svg>"))
    return report


@pytest.fixture
def two_methods(tmp_path):
    """NCR ends at 80, 81 and 82 %, cross-entropy at 60, 62 and 64 %."""
    forgets = {"memorization": {"memorized": 0.5, "corrected": 0.25, "other": 0.25}}
    worse, better = [], []
    for seed in range(3):
        better.append(write_run(tmp_path / f"ncr-{seed}", seed=seed))
        finals = [0.7, 0.6 + seed / 50]
        choices = {"method": "standard", "finals": finals, "result": forgets}
        worse.append(write_run(tmp_path / f"ce-{seed}", seed=seed, **choices))
    return [*worse, *better]


# Words and tables


def test_the_summary_says_who_ends_higher_by_how_much_and_what_became_of_wrong_labels(
    undrawn, two_methods
):
    words = undrawn(*two_methods).words("In short")
    numbers = (
        "81.0 ± 1.0 %",
        "62.0 ± 2.0 %",
        "over 3 runs",
        "19.0",
        "12.5 ± 0.0 %",
        "25.0 ± 0.0 %",
    )
    assert [number for number in numbers if number not in words] == []


def test_runs_that_overlap_or_stand_alone_may_differ_by_chance(undrawn, tmp_path):
    high, low = [], []
    for seed, final in enumerate([0.7, 0.9]):
        high.append(write_run(tmp_path / f"a{seed}", seed=seed, finals=[final]))
        low.append(write_run(tmp_path / f"b{seed}", method="elr", seed=seed, finals=[0.71]))
    words = undrawn(*high, *low).words()
    assert "is 9.0 percentage points; the runs of the two overlap" in words
    words = undrawn(high[0], low[0]).words()
    assert "is 1.0 percentage points; with one run each, that may be chance." in words


def test_a_table_shows_every_seed_and_no_best_epoch(undrawn, two_methods):
    reader = undrawn(*two_methods)
    finals = {"ce-0": "60.00", "ce-1": "62.00", "ce-2": "64.00", "ncr-0": "80.00", "ncr-2": "82.00"}
    for name, final in finals.items():
        assert re.search(rf"{name}(standard|ncr)\d{re.escape(final)}", reader.text)
    assert "standard362.00 ± 2.00" in reader.text
    assert "99.00" not in reader.text  # the best epoch of every run


def test_a_metric_that_a_run_has_recorded_is_a_column_by_its_own_name(undrawn, tmp_path):
    before = undrawn(write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1))
    assert "Further metrics" not in before.text
    runs = []
    for seed in range(2):
        metrics = {"test": {"top-5": 0.5 + seed / 4}, "second_test": {"F1 <macro>": 0.125}}
        runs.append(write_run(tmp_path / f"m{seed}", seed=seed, result={"metrics": metrics}))
    runs.append(write_run(tmp_path / "c", method="elr"))
    reader = undrawn(*runs)
    assert reader.text.count("top-5 (test)F1 <macro> (second test)") == 2  # groups and runs
    assert "ncr20.6250 ± 0.17680.1250 ± 0.0000" in reader.text
    assert "elr1––" in reader.text
    assert "m1ncr10.75000.1250" in reader.text


# Charts


def captured(monkeypatch, name):
    """The arguments of a function that draws."""
    calls, original = [], getattr(charts, name)

    def record(*positional, **named):
        calls.append((*positional, named))
        return original(*positional, **named)

    monkeypatch.setattr(charts, name, record)
    return calls


def test_curves_are_each_run_and_their_mean_at_the_epochs_they_share(
    undrawn, tmp_path, monkeypatch
):
    runs = []
    for seed, finals in enumerate([[0.25, 0.5, 1], [0.75, 1]]):
        runs.append(write_run(tmp_path / f"{seed}", seed=seed, finals=finals))
    calls = captured(monkeypatch, "curves")
    undrawn(*runs)
    [(lines, named)] = calls
    assert [(line.is_mean, list(line.points)) for line in lines] == [
        (False, [(1, 25), (2, 50), (3, 100)]),
        (False, [(1, 75), (2, 100)]),
        (True, [(1, 50), (2, 75)]),
    ]
    assert named == {"names": ["ncr"], "title": "accuracy on the test set (%)"}


@pytest.mark.parametrize("num", [1, 2, 200, 201, 401, 5000])
def test_a_long_curve_is_thinned_evenly_and_keeps_its_end(num):
    points = [(float(epoch), 0.0) for epoch in range(num)]
    kept = charts._thinned(points)
    assert kept[-1] == points[-1]
    assert min(num, 100) <= len(kept) <= 200
    assert len({after[0] - before[0] for before, after in pairwise(kept)}) <= 1


def test_confidence_is_pooled_over_seeds_and_split_by_truth_for_trained_examples_only(
    undrawn, tmp_path, monkeypatch
):
    runs = []
    for seed, trust in enumerate((0.32, 0.72)):
        runs.append(write_run(tmp_path / f"{seed}", seed=seed, num_trained=12, wrong_trust=trust))
    calls = captured(monkeypatch, "histogram")
    words = undrawn(*runs).words()
    [(histograms, named)] = calls
    shares = {}
    for kind, bins in histograms:
        shares[kind] = {place: share for place, share in enumerate(bins) if share}
    # Of 20 bins, the one from 90 to 95 % holds the right labels.
    assert shares == {"right label": {18: 100}, "wrong label": {6: 50, 14: 50}}
    assert named == {"highest": 100}
    assert "16 right labels and 8 wrong labels" in words


def test_without_the_truth_there_is_one_histogram_and_no_noise_matrix(
    undrawn, tmp_path, monkeypatch
):
    calls = captured(monkeypatch, "histogram")
    unknown = {"memorization": None, "detection": None, "labels": {"effective_rate": None}}
    reader = undrawn(write_run(tmp_path / "a", knows_truth=False, result=unknown))
    assert [[bars.kind for bars in histograms] for histograms, _ in calls] == [["given label"]]
    assert "30 given labels" in reader.words()
    assert "The labels" not in reader.parts


def test_the_noise_matrix_has_true_classes_as_rows_and_counts_each_draw_once(
    undrawn, two_methods, monkeypatch
):
    calls = captured(monkeypatch, "heat_map")
    words = undrawn(*two_methods).words()
    assert calls == [([[0, 100, 0], [0, 100, 0], [0, 0, 100]], CLASSES, {})]
    assert "30 training labels in 1 draw" in words


@pytest.mark.parametrize(("num_classes", "num_maps"), [(20, 1), (21, 0)])
def test_a_matrix_too_large_to_be_read_is_left_out(
    undrawn, tmp_path, monkeypatch, num_classes, num_maps
):
    calls = captured(monkeypatch, "heat_map")
    undrawn(write_run(tmp_path / "a", classes=["same"] * num_classes))
    assert len(calls) == num_maps


# Splits

HELD_OUT = {"accuracy": {"validation": {"final": 0.625, "last_10": 0.5}}}
CLEANED = {"labels_file": "a/cleaned.npz"}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"settings": {"validation_labels": "clean"}}, "held-out validation set with clean labels"),
        (  # what is not known cannot be asked for
            {"settings": {"validation_labels": "clean"}, "knows_truth": False},
            "held-out validation set (its labels as they were given)",
        ),
    ],
)
def test_runs_without_a_test_set_are_compared_on_held_out_examples(
    undrawn, tmp_path, changes, place
):
    run = write_run(tmp_path / "a", result=HELD_OUT, **changes)
    assert f"On the {place}, ncr ends at 62.5 % accuracy" in undrawn(run).words()


@pytest.mark.parametrize(
    ("split", "title"), [("validation", "validation set"), ("second_test", "second test set")]
)
def test_runs_are_compared_on_the_split_that_is_asked_for(
    undrawn, tmp_path, monkeypatch, split, title
):
    finals = {"test": 0.8, "validation": 0.625, "second_test": 0.25}
    accuracy = {name: {"final": final, "last_10": final} for name, final in finals.items()}
    run = write_run(tmp_path / "a", result={"accuracy": accuracy})
    entry = {"epoch": 1.0, **{f"{name}_accuracy": final for name, final in finals.items()}}
    (run / "log.jsonl").write_text(json.dumps(entry) + "\n")
    calls = captured(monkeypatch, "curves")
    words = undrawn(run, split=split).words()
    assert f"{title}" in words
    assert f"ncr ends at {100 * finals[split]:.1f} % accuracy" in words
    [([line], named)] = calls
    assert list(line.points) == [(1, 100 * finals[split])]
    assert named["title"] == f"accuracy on the {title} (%)"


def test_labels_before_and_after_cleaning_are_said_to_be_different_judges(undrawn, tmp_path):
    def run(name, **changes):
        choices = {"result": HELD_OUT, "num_trained": 20}
        return write_run(tmp_path / name, **(choices | changes))

    before, after = run("a"), run("b", settings=CLEANED)
    assert "different labels" in undrawn(before, after).words()
    clean = {"validation_labels": "clean"}
    on_test = {"result": {}}
    alike = [
        (before,),
        (after,),
        (before, run("c", method="standard")),
        (before, run("d", num_trained=30, settings=CLEANED)),  # with its own validation set
        (run("e", settings=clean), run("f", settings=clean | CLEANED)),
        (run("g", **on_test), run("h", settings=CLEANED, **on_test)),
    ]
    for runs in alike:
        assert "different labels" not in undrawn(*runs).words()


# The page as a file


def test_the_page_needs_no_network_and_runs_no_script(report, two_methods, tmp_path):
    reader = report(*two_methods)
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    names = {name for _, name, _ in reader.attributes}
    assert not [name for name in names if name.startswith("on")]
    assert not names & {"src", "srcset", "xlink:href", "action", "style"}
    assert [value for _, name, value in reader.attributes if name == "href"] == ["data:,"]
    active = {"script", "iframe", "object", "img", "foreignobject", "base", "form"}
    assert not active & set(reader.tags)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page
    assert "url(" not in page
    assert "@import" not in page
    addresses = set(re.findall(r"https?://[^\s\"<]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></svg></title></pre><script>alert(1)</script>",
    "{{ 7 * 7 }}{% raw %}",
    "${alert(1)} &lt;b&gt;&amp; datum['x'] \\u003cscript\\u003e",
]


def test_hostile_names_stay_text_wherever_they_come_from(report, tmp_path):
    plain = [f"word {number}" for number in range(len(HOSTILE))]
    harmless = report(*(hostile_run(tmp_path / text, text, plain) for text in plain))
    runs = [hostile_run(tmp_path / f"{i}", text, HOSTILE) for i, text in enumerate(HOSTILE)]
    reader = report(*runs, title=HOSTILE[3])
    assert set(reader.tags) == set(harmless.tags)
    assert {name for _, name, _ in reader.attributes} == {
        name for _, name, _ in harmless.attributes
    }
    for text, word in zip(HOSTILE, plain, strict=True):
        assert reader.text.count(text) >= 30 <= harmless.text.count(word), text
        assert text[:9] in reader.drawn, text  # long labels are cut
    assert reader.text.count("49") == harmless.text.count("49")


def hostile_run(folder, text, classes):
    where = {"data": {"kind": text, text: text}, "objective": {"kind": text}, text: text}
    cost = {"hardware": text, "versions": {text: text}, "metrics": {text: {text: 0.5}}}
    choices = {"recipe": text, "overrides": [f"{text}={text}"], "arguments": {text: text}}
    return write_run(folder, method=text, classes=classes, settings=where, result=cost, **choices)


def test_a_folder_with_a_hostile_name_and_text_that_cannot_be_encoded_are_shown(report, tmp_path):
    reader = report(write_run(tmp_path / "<b>bold", result={"hardware": "a\ud800b\u202ec\x00d"}))
    assert "b" not in reader.tags
    assert "<b>bold" in reader.text
    assert "a\ufffdb\ufffdc\ufffdd" in reader.text


def test_the_same_runs_give_the_same_bytes(two_methods, tmp_path):
    first = write_report(two_methods, tmp_path / "1.html", title="T")
    second = write_report(two_methods, tmp_path / "2.html", title="T")
    assert first == tmp_path / "1.html"
    assert first.read_bytes() == second.read_bytes()


def test_only_a_page_of_ours_is_replaced(tmp_path, undrawn):
    run = write_run(tmp_path / "a")
    target = tmp_path / "report.html"
    write_report([run], target, title="first")
    assert "second" in write_report([run], target, title="second").read_text("utf-8")
    target.write_text("mine")
    for place in (target, tmp_path):
        with pytest.raises(RunError, match=re.escape(str(place))) as caught:
            write_report([run], place, title="third")
        assert caught.value.code == 73
    assert target.read_text() == "mine"


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_a_missing_extra_is_an_import_error_with_its_cure(tmp_path, monkeypatch, library):
    for name in ("charts", "training_page"):
        monkeypatch.delitem(sys.modules, f"nearsay.report.{name}", raising=False)
    monkeypatch.delattr("nearsay.report.charts")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"pip install .*report"):
        write_report([], tmp_path / "r.html", title="T")


def test_a_metric_that_was_added_to_the_result_is_a_column_of_the_report(undrawn, tmp_path):
    added = {"macro_f1": {"test": 0.625}, "entropy": 0.25, "seconds": 3.0}
    text = undrawn(write_run(tmp_path / "a", result=added)).text
    assert "macro_f1 (test)entropy" in text
    assert "0.62500.2500" in text
