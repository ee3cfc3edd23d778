import json
from dataclasses import replace

import pytest
from lab.cells import Numbers
from lab.page import RECORDS
from lab.record import changed_since, check_queued, make_record, read_records, take
from lab.run_queue import BY_KEY, Wanted, cell, queue
from lab_runs import record, result

from nearsay import config

ONE = cell(BY_KEY["symmetric-40"], "ncr", tier="A")


def test_a_record_keeps_the_numbers_and_no_place_of_this_machine():
    places = {"cifar10": "/home/somebody/cifar", "cifar10n": "/home/somebody/labels.pt"}
    settings = {
        "data": {"path": "/home/somebody/cifar", "labels": "/home/somebody/labels.pt"},
        "epochs": 100,
    }
    made = make_record(ONE, result(0.9123, seconds=60.0), settings, seconds=75.04, places=places)
    assert made["accuracy"]["test"]["final"] == 0.9123
    assert made["detection"] == {"auroc": 0.95, "average_precision": 0.875}
    assert made["labels"] == {"fingerprint": "ab12", "requested_rate": 0.4, "effective_rate": 0.361}
    assert made["seconds"] == 75.0
    assert made["command"] == ONE.command()
    assert made["experiment"] == {
        "data": {"path": "data", "labels": "data/CIFAR-10_human.pt"},
        "epochs": 100,
    }
    assert "somebody" not in json.dumps(made)


def test_no_path_of_a_machine_is_recorded(tmp_path):
    secret = "/home/some body"
    arguments = (*ONE.arguments, f"labels_file={secret}/runs/first/labels.npz")
    wanted = replace(
        ONE, arguments=arguments, overrides=(f"init={secret}/w.safetensors", "epochs=100")
    )
    settings = {
        "data": {
            "path": f"{secret}/cifar",
            "more": [f"{secret}/cifar/cifar-10-batches-py", None, 0.5],
        },
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


def test_a_record_with_a_path_of_a_machine_is_refused(tmp_path):
    made = record(ONE)
    made["experiment"]["data"]["path"] = "/home/somebody/cifar"
    with pytest.raises(ValueError, match="absolute path"):
        take([made], tmp_path)


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


def test_a_commit_that_is_known_is_not_overwritten(tmp_path):
    take([record(ONE, commit="1111111")], tmp_path, commit="2222222")
    assert read_records(tmp_path)[ONE.name]["commit"] == "1111111"


def test_a_commit_that_was_not_the_code_that_ran_is_named_anew(tmp_path):
    take([record(ONE, commit="1111111-dirty")], tmp_path, commit="2222222")
    assert read_records(tmp_path)[ONE.name]["commit"] == "2222222"


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


def test_nothing_and_everything_are_shares_and_whole_numbers_are_numbers(tmp_path):
    made = record(ONE)
    made["accuracy"]["test"] |= {"final": 0, "best": 1, "last_10": 0.0}
    made |= {"detection": {"auroc": 1, "average_precision": 0}, "seconds": 60, "device_seconds": 60}
    assert take([made], tmp_path) == [ONE.name]


def test_the_runs_of_a_cell_come_by_seed(tmp_path):
    records = {
        f"run-{seed}": {**record(ONE, seed=seed), "name": f"run-{seed}"} for seed in (2, 0, 10, 1)
    }
    assert [each["seed"] for each in Numbers(records=records).of(ONE)] == [0, 1, 2, 10]


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


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            {"accuracy": {"test": {"final": float("nan"), "best": 0.9, "last_10": 0.9}}},
            "accuracies",
        ),
        ({"accuracy": {"test": {"final": 94.1, "best": 0.9, "last_10": 0.9}}}, "accuracies"),
        ({"accuracy": {"test": {"final": "0.9", "best": 0.9, "last_10": 0.9}}}, "accuracies"),
        ({"accuracy": {}}, "accuracies"),
        ({"accuracy": []}, "'accuracy'"),
        ({"detection": {"auroc": None}}, "'auroc'"),
        ({"detection": {"auroc": 95.0, "average_precision": 0.9}}, "'auroc'"),
        ({"detection": {"auroc": 0.9}}, "'average_precision'"),
        ({"detection": 5}, "'detection'"),
        ({"audit": 5}, "'audit'"),
        ({"audit": {"auroc": 0.9}}, "'average_precision'"),
        ({"audit": {"auroc": 0.9, "average_precision": 0.9, "seconds": None}}, "'seconds'"),
        ({"audit": {"auroc": 0.9, "average_precision": 0.9, "seconds": float("inf")}}, "'seconds'"),
        ({"versions": {"torch": 3}}, "torch"),
        ({"labels": {"effective_rate": "x"}}, "'effective_rate'"),
        ({"command": "nearsay train toy"}, "command"),
        ({"overrides": ["machine.device=cpu"]}, "command"),
        ({"protocol": "paper"}, "'protocol'"),
        ({"protocol": "long"}, "protocol"),
        ({"seed": 3}, "'seed'"),
        ({"seed": "x"}, "'seed'"),
        ({"seconds": None}, "'seconds'"),
        ({"seconds": float("inf")}, "'seconds'"),
        ({"seconds": 60.0, "device_seconds": 61.0}, "'device_seconds'"),
        ({"device_seconds": "few"}, "'device_seconds'"),
        ({"arguments": [1]}, "word of a command"),
        ({"name": "../elsewhere"}, "name of a run"),
        ({"name": "/elsewhere"}, "absolute path"),
        ({"name": "queue"}, "name of a run"),
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


@pytest.mark.parametrize("content", ["[]", '"text"', "5", "[" * 100_000])
def test_a_file_without_an_object_is_not_a_record(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json"):
        read_records(tmp_path)
