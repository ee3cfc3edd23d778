"""The worker on small stand-ins: what is run, what is left for later, and what survives."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from lab import worker
from lab.record import read_records, take
from lab.run_queue import BY_KEY, Wanted, cell, write_queue
from lab_runs import record

from nearsay.experiment import Machine
from nearsay.training.system import hardware


def toy(name, *arguments, seconds=1.0, **fields):
    words = ("noise=0.4", "epochs=1", *arguments)
    fields |= {"name": name, "arguments": words, "seconds": seconds, "overrides": ()}
    return Wanted(protocol="short", recipe="toy", **fields)


# Nothing is guessed about how long it takes, so it is started.
ENDLESS = replace(toy("endless", seconds=0.0), arguments=("epochs=5000",))


@pytest.fixture
def run(tmp_path, capsys):
    def call(queue, *words):
        (tmp_path / "queue.json").write_text(write_queue(queue))
        places = {"queue": "queue.json", "records": "", "runs": "runs", "out": ""}
        options = [
            word for name, at in places.items() for word in (f"--{name}", str(tmp_path / at))
        ]
        code = worker.main(["run", *options, *words])
        merged = tmp_path / "cifar.json"
        found = json.loads(merged.read_text()) if merged.exists() else {"records": [], "failed": {}}
        merged.unlink(missing_ok=True)  # it is no record itself
        names = [each["name"] for each in found["records"]]
        return code, names, found["failed"], capsys.readouterr().out

    return call


def test_one_run_that_fails_does_not_stop_the_others(run, tmp_path):
    methods = {"first": "standard", "wrong": "nothing", "last": "ncr"}
    queue = [toy(name, f"method={method}") for name, method in methods.items()]
    code, names, failed, _ = run(queue)
    assert (code, names, list(failed)) == (70, ["first", "last"], ["wrong"])
    assert "nothing" in failed["wrong"]
    records = read_records(tmp_path / "runs" / "records")
    assert list(records) == ["first", "last"]
    assert records["first"]["labels"]["requested_rate"] == 0.4
    assert not (tmp_path / "runs" / "first").exists()
    told = run(queue)[3]
    assert "1/1  wrong" in told


def test_runs_that_are_recorded_or_not_chosen_are_left_out(run, tmp_path, capsys):
    queue = [toy(f"{name}-{tier}", tier=tier) for tier in "BA" for name in ("one", "two")]
    assert run(queue, "--tier", "A", "--only", "^one")[1] == ["one-A"]
    merged = {"records": [json.loads((tmp_path / "runs" / "records" / "one-A.json").read_text())]}
    (tmp_path / "merged").write_text(json.dumps(merged))
    words = ["take", str(tmp_path / "merged"), "--records", str(tmp_path / "taken")]
    assert worker.main([*words, "--commit", "abc1234"]) == 0
    capsys.readouterr()
    assert list(read_records(tmp_path / "taken")) == ["one-A"]
    others = ["--records", str(tmp_path / "taken"), "--runs", str(tmp_path / "others")]
    told = run(queue, "--list", *others)[3]
    assert [line.split()[-1] for line in told.splitlines()] == ["one-B", "two-B", "two-A"]


def test_no_run_is_started_that_would_not_end_in_time(run):
    _, names, _, told = run([toy("long", seconds=500.0), toy("brief")], "--seconds", "100")
    assert names == ["brief"]
    assert "508" in told  # the seconds that the long one would take


def test_a_run_is_expected_to_take_as_long_as_the_longest_like_it():
    wanted = cell(BY_KEY["symmetric-40"], "ncr")
    seen = [
        record(cell(BY_KEY["symmetric-80"], "ncr"), seconds=seconds) for seconds in (300.0, 250.0)
    ]
    assert worker.expected(wanted, seen) == wanted.seconds + worker.ENDING  # of other hardware
    here = [{**each, "hardware": hardware(Machine().find_device())} for each in seen]
    assert worker.expected(wanted, here) == pytest.approx(1.08 * 300.0 + worker.ENDING)
    assert worker.expected(cell(BY_KEY["symmetric-40"], "elr"), here) == 95.0 + worker.ENDING


@pytest.mark.parametrize("k", [10, 7])
def test_the_time_of_a_run_whose_recipe_has_changed_is_not_expected_again(run, tmp_path, k):
    run([toy("one", "method=ncr")])
    [found] = read_records(tmp_path / "runs" / "records").values()
    found["seconds"] = found["device_seconds"] = 500.0
    found["experiment"]["objective"]["k"] = k
    (tmp_path / "one.json").write_text(json.dumps(found))
    shutil.rmtree(tmp_path / "runs")
    _, names, _, told = run([toy("two", "method=ncr", "seed=1")], "--seconds", "100")
    assert ("548" in told) == (k == 10)
    assert names == ([] if k == 10 else ["two"])


def test_a_run_that_is_cut_off_leaves_a_checkpoint_and_the_others_their_records(run, tmp_path):
    run([toy("brief")])
    code, names, failed, _ = run([toy("brief"), ENDLESS], "--seconds", "1")
    assert (code, names, failed) == (0, ["brief"], {})
    assert list((tmp_path / "runs" / "endless" / "checkpoints").glob("step-*"))


def test_a_signal_from_outside_ends_it_with_the_code_of_the_signal(run, monkeypatch):
    plain = worker.train

    def train(*words, **more):
        os.kill(os.getpid(), signal.SIGTERM)  # before the training listens
        return plain(*words, **more)

    monkeypatch.setattr(worker, "train", train)
    code, names, failed, told = run([ENDLESS, toy("never")])
    assert (code, names, failed) == (143, [], {})
    assert "never" not in told


def test_a_signal_between_two_runs_ends_it_too(run, monkeypatch):
    plain = worker.run_one

    def run_one(*words):
        plain(*words)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(worker, "run_one", run_one)
    assert run([toy("one"), toy("two")])[:2] == (143, ["one"])


@pytest.fixture
def another():
    """The number of a process that lives."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        yield process.pid
        process.stdin.close()


def test_a_run_that_another_process_has_is_left_to_it_and_one_whose_process_died_is_not(
    run, tmp_path, another
):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    claims = tmp_path / "runs" / "claims"
    claims.mkdir(parents=True)
    (claims / "theirs").symlink_to(str(another))
    (claims / "orphan").symlink_to(str(process.pid))
    code, names, _, _ = run([toy("theirs"), toy("orphan")])
    assert (code, names) == (0, ["orphan"])
    assert [each.name for each in claims.iterdir()] == ["theirs"]


def test_a_run_that_another_process_has_ended_meanwhile_is_not_run_again(
    run, tmp_path, monkeypatch
):
    plain = worker.run_one

    def run_both(wanted, arguments, place):  # as if another process were quicker with the second
        plain(wanted, arguments, place)
        made = json.loads((tmp_path / "runs" / "records" / "one.json").read_text())
        take([{**made, "name": "two", "seed": 77}], tmp_path / "runs" / "records")

    monkeypatch.setattr(worker, "run_one", run_both)
    assert run([toy("one"), toy("two")])[1] == ["one", "two"]
    assert read_records(tmp_path / "runs" / "records")["two"]["seed"] == 77


def test_a_record_counts_half_of_what_was_shared_and_all_of_what_was_done_before(
    run, tmp_path, another, monkeypatch
):
    (tmp_path / "runs" / "sharing").mkdir(parents=True)
    (tmp_path / "runs" / "sharing" / "theirs").symlink_to(str(another))
    plain = worker.train

    def train(experiment, folder, **more):
        time.sleep(0.5)
        result = plain(experiment, folder, **more)
        return {**result, "seconds": 1000.0} if folder.name == "resumed" else result

    monkeypatch.setattr(worker, "train", train)
    run([toy("one"), toy("resumed")])
    records = read_records(tmp_path / "runs" / "records")
    assert 0 < records["one"]["device_seconds"] < 0.6 * records["one"]["seconds"]
    assert records["resumed"]["seconds"] == 1000.0
    assert 900 < records["resumed"]["device_seconds"] < 1000.0


def test_two_processes_in_one_folder_run_everything_once(tmp_path):
    queue = [toy(f"run-{number}", f"seed={number}") for number in range(2)]
    (tmp_path / "queue.json").write_text(write_queue(queue))
    places = {"queue": "queue.json", "records": "", "runs": "runs", "out": "out"}
    options = [word for name, at in places.items() for word in (f"--{name}", str(tmp_path / at))]
    words = [sys.executable, worker.__file__, "run", *options]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = "".join(process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(line.split()[1] for line in told.splitlines() if line.endswith(" ...")) == [
        q.name for q in queue
    ]
    merged = json.loads((tmp_path / "out" / "cifar.json").read_text())
    assert [each["name"] for each in merged["records"]] == [q.name for q in queue]


def test_a_run_whose_recipe_has_changed_since_is_run_again(run, tmp_path):
    run([toy("one")])
    path = tmp_path / "runs" / "records" / "one.json"
    made = json.loads(path.read_text())
    made["experiment"]["optimizer"]["lr"] = 123.0
    take([made], path.parent, overwrite=True)
    run([toy("one")])
    assert json.loads(path.read_text())["experiment"]["optimizer"]["lr"] != 123.0


@pytest.fixture
def words(tmp_path):
    """Options of a queue of one run, in folders of their own."""
    (tmp_path / "queue.json").write_text(write_queue([toy("one")]))
    places = {"queue": "queue.json", "records": "", "runs": "runs"}
    return [word for name, at in places.items() for word in (f"--{name}", str(tmp_path / at))]


@pytest.mark.parametrize("option", ["--cifar10", "--cifar100n"])
def test_a_path_that_is_not_there_is_named_once_and_before_any_run(tmp_path, words, capsys, option):
    assert worker.main(["run", *words, option, str(tmp_path / "nowhere")]) == 65
    assert f"{option} {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--only", "["), ("--audit", "["), ("--seconds", "nan"), ("--seconds", "0")],
)
def test_a_value_that_cannot_be_used_is_refused_before_any_run(
    words, tmp_path, capsys, option, value
):
    with pytest.raises(SystemExit) as stopped:
        worker.main(["run", *words, option, value])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert option in last
    assert value in last
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [
        (["run", "--queue", "three.json", "--list"], 65, "three.json"),
        (["run", "--only", "^none$", "--runs", "three.json"], 74, "three.json/sharing"),
        (["take", "three.json"], 65, "three.json"),
        (["take", "failed.json"], 65, "failed.json"),
        (["take", "none.json"], 65, "none.json"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, monkeypatch, capsys, words, code, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.json").write_text("[3]")
    (tmp_path / "failed.json").write_text('{"records": [], "failed": 3}')
    assert worker.main([*words, "--records", str(tmp_path / "taken")]) == code
    assert name in capsys.readouterr().err.splitlines()[-1]
