import json
from dataclasses import replace

import pytest
from lab.page import RECORDS
from lab.record import changed_since, check_queued, make_record, read_records, take
from lab.run_queue import BY_KEY, Wanted, cell, queue
from lab_runs import record, result

from nearsay import config

ONE = cell(BY_KEY["symmetric-40"], "ncr", tier="A")


def test_no_path_of_a_machine_is_recorded(tmp_path):
    secret = "/home/some body"
    arguments = (*ONE.arguments, f"labels_file={secret}/runs/first/labels.npz")
    wanted = replace(
        ONE, arguments=arguments, overrides=(f"init={secret}/w.safetensors", "epochs=100")
    )
    more = [f"{secret}/cifar/cifar-10-batches-py", None, 0.5]
    settings = {
        "data": {"path": f"{secret}/cifar", "more": more},
        "init": r"C:\Users\somebody\w.safetensors",
        "labels": "~/labels.pt",
        "mapping": "cifar10",
    }
    made = make_record(
        wanted, result(), settings, seconds=1.0, places={"cifar10": f"{secret}/cifar"}
    )
    assert "some" not in json.dumps(made)
    assert made["experiment"] == {
        "data": {"path": "data", "more": ["data/cifar-10-batches-py", None, 0.5]},
        "init": "data/w.safetensors",
        "labels": "data/labels.pt",
        "mapping": "cifar10",
    }
    assert made["arguments"][-1] == "labels_file=data/labels.npz"
    assert made["overrides"] == ["init=data/w.safetensors", "epochs=100"]
    assert take([made], tmp_path) == [ONE.name]


def test_the_probes_and_records_of_the_project_can_be_read():
    assert len(read_records(RECORDS)) >= 54
    assert all(each["recipe"] == "cifar100" for each in read_records(RECORDS / "probes").values())


def test_a_run_that_went_on_after_a_stop_counts_the_time_before():
    assert make_record(ONE, result(seconds=300.0), {}, seconds=20.0, places={})["seconds"] == 300.0


def test_records_are_taken_once_with_their_commit(tmp_path):
    fresh = record(ONE, commit="")
    assert take([fresh], tmp_path, commit="abc1234") == [ONE.name]
    assert read_records(tmp_path) == {ONE.name: {**fresh, "commit": "abc1234"}}
    assert take([fresh], tmp_path) == []
    assert read_records(tmp_path)[ONE.name]["commit"] == "abc1234"
    # A commit that is known stays, unless the code that ran was another.
    for number, (known, kept) in enumerate([("1111111", "1111111"), ("1111111-dirty", "2222222")]):
        folder = tmp_path / f"{number}"
        take([record(ONE, commit=known)], folder, commit="2222222")
        assert read_records(folder)[ONE.name]["commit"] == kept


def test_another_result_is_not_overwritten_silently(tmp_path):
    other = cell(BY_KEY["symmetric-80"], "ncr")
    take([record(ONE, 0.90)], tmp_path)
    with pytest.raises(ValueError, match=ONE.name):
        take([record(other), record(ONE, 0.91)], tmp_path)
    assert list(read_records(tmp_path)) == [ONE.name]
    take([record(ONE, 0.91)], tmp_path, overwrite=True)
    assert read_records(tmp_path)[ONE.name]["accuracy"]["test"]["final"] == 0.91


def test_a_result_of_the_recipe_as_it_was_gives_way_to_one_of_today(tmp_path):
    old = record(ONE, 0.90)
    old["experiment"]["objective"]["alpha"] = 0.5
    take([old], tmp_path)
    another = {**old, "accuracy": record(ONE, 0.89)["accuracy"]}
    with pytest.raises(ValueError, match=ONE.name):
        take([another], tmp_path)
    assert take([record(ONE, 0.91)], tmp_path) == [ONE.name]
    assert read_records(tmp_path)[ONE.name]["accuracy"]["test"]["final"] == 0.91
    with pytest.raises(ValueError, match=ONE.name):
        take([old], tmp_path)


def test_a_damaged_or_misnamed_file_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json"):
        read_records(tmp_path)
    (tmp_path / "a.json").write_text('{"name": "a"}')
    with pytest.raises(ValueError, match="'accuracy'"):
        read_records(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(record(ONE)))
    with pytest.raises(ValueError, match=ONE.name):
        read_records(tmp_path)


def test_one_more_item_of_a_list_is_a_change_whatever_it_is(monkeypatch):
    made = record(ONE)
    removed = made["experiment"]["augment"]["transforms"].pop()
    assert changed_since(made) == [f'augment.transforms.1: not there, but "{removed["kind"]}"']
    monkeypatch.setattr(
        config, "to_tree", lambda _: {"new": 0, "old": {"new": None, "values": [1, 0]}}
    )
    assert changed_since({**made, "experiment": {"old": {"values": [1]}}}) == [
        "old.values.1: not there, but 0"
    ]


def test_a_record_under_the_name_of_another_run_is_refused():
    check_queued(record(ONE), queue())
    other = Wanted(name=ONE.name, protocol="short", arguments=(*ONE.arguments, "k=5"))
    with pytest.raises(ValueError, match=ONE.name):
        check_queued(record(other), queue())


def test_a_changed_recipe_is_noticed():
    made = record(ONE)
    assert changed_since(made) == []
    made["experiment"]["objective"]["alpha"] = 0.5
    assert changed_since(made) == ["objective.alpha: 0.5, not 0.9"]
    del made["experiment"]["self_taught"]  # a field of later, which is off
    assert changed_since(made) == ["objective.alpha: 0.5, not 0.9"]
    made["arguments"] = ["method=forgotten"]
    assert "'forgotten'" in changed_since(made)[0]


GOOD = {"auroc": 0.9, "average_precision": 0.9, "seconds": 1.0}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"accuracy": {"test": {"final": 94.1, "best": 0.9, "last_10": 0.9}}}, "accuracies"),
        ({"accuracy": []}, "accuracy"),
        ({"detection": {"auroc": 95.0, "average_precision": 0.9}}, "auroc"),
        ({"detection": 5}, "detection"),
        ({"audit": {**GOOD, "seconds": float("inf")}}, "seconds"),
        ({"audit": {"auroc": 0.9}}, "average_precision"),
        ({"labels": {"effective_rate": "x"}}, "effective_rate"),
        ({"overrides": ["machine.device=cpu"]}, "command"),
        ({"protocol": "paper"}, "protocol"),
        ({"seed": 3}, "seed"),
        ({"seconds": 60.0, "device_seconds": 61.0}, "device_seconds"),
        ({"arguments": [1]}, "word of a command"),
        ({"name": "../elsewhere"}, "name of a run"),
        ({"name": "/elsewhere"}, "absolute path"),
    ],
)
def test_a_record_that_was_edited_by_hand_is_refused_and_nothing_is_written(
    tmp_path, changes, field
):
    edited = {**record(ONE), **changes}
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=field):
        take([record(cell(BY_KEY["symmetric-80"], "ncr")), edited], tmp_path / "a")
    (tmp_path / "a" / f"{ONE.name}.json").write_text(json.dumps(edited))
    with pytest.raises(ValueError, match=field):
        read_records(tmp_path / "a")
    assert [path.name for path in tmp_path.rglob("*.json")] == [f"{ONE.name}.json"]
