"""Collectives: the identity on one process, and on several what the sums say."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache

import pytest
import torch
from torch.testing import assert_close

from distributed.collectives import NUM_ROWS, call_all, prices_of, rows_of, weights_of
from distributed.group import in_groups, results
from nearsay import cli, distributed


def collectives(num_processes):
    return results(num_processes, "collectives")


def everyone(num_processes):
    return torch.cat([rows_of(rank) for rank in range(num_processes)])


def place_among_others(rank, of):
    """Rows of rank `of` in what `rank` sees as the others."""
    place = of if of < rank else of - 1
    return slice(place * NUM_ROWS, (place + 1) * NUM_ROWS)


def test_one_process_is_alone():
    assert (distributed.num_processes(), distributed.rank()) == (1, 0)


def test_on_one_process_collectives_are_the_identity():
    seen, rows, weights = call_all(0), rows_of(0), weights_of(0)
    assert_close(seen["gather"], rows)
    assert_close(seen["gradient of gather"], 2 * prices_of(0, NUM_ROWS) * rows)
    assert_close(seen["gather of integers"], torch.arange(NUM_ROWS))
    assert seen["others"].shape == (0, 2)
    assert seen["others of integers"].shape == (0,)
    assert seen["others of integers"].dtype == torch.int64
    assert_close(seen["gradient of others"], torch.zeros_like(rows))
    assert_close(seen["total"], rows)
    assert not seen["total has a gradient"]
    assert_close(seen["mean"], (rows[:, 0] * weights).sum() / weights.sum())
    assert_close(seen["gradient of mean"], weights / weights.sum())
    assert_close(seen["mean without weight"], torch.tensor(0.0).double())
    assert_close(seen["gradient of mean without weight"], torch.zeros(NUM_ROWS).double())


@in_groups
def test_every_process_knows_its_rank_and_how_many_there_are(num_processes):
    for rank, seen in enumerate(collectives(num_processes)):
        assert (seen["num_processes"], seen["rank"]) == (num_processes, rank)


@in_groups
def test_gather_is_in_order_of_rank_on_every_process(num_processes):
    integers = torch.cat([torch.arange(NUM_ROWS) + 10 * rank for rank in range(num_processes)])
    columns = torch.cat([rows_of(rank).T for rank in range(num_processes)])
    for seen in collectives(num_processes):
        assert_close(seen["gather"], everyone(num_processes), rtol=0, atol=0)
        assert_close(seen["gather of integers"], integers)
        assert_close(seen["gather of a transposed tensor"], columns, rtol=0, atol=0)


@in_groups
def test_join_is_in_order_of_rank_whatever_each_process_has(num_processes):
    def joined(num_rows):
        each = [rows_of(rank).repeat(3, 1)[: num_rows(rank)] for rank in range(num_processes)]
        return torch.cat(each)

    texts = "".join(f"{rank}é" * rank for rank in range(num_processes))
    for seen in collectives(num_processes):
        assert_close(seen["join"], joined(lambda rank: rank), rtol=0, atol=0)
        assert_close(seen["join in parts"], joined(lambda rank: 9 - 2 * rank), rtol=0, atol=0)
        assert seen["the largest part"] <= 4
        whole = joined(lambda rank: rank * NUM_ROWS)
        assert_close(seen["join in parts of all but the first"], whole, rtol=0, atol=0)
        assert seen["join of nothing"].shape == (0, 2)
        assert "".join(map(chr, seen["join_texts"].tolist())) == texts


@in_groups
def test_gradient_of_gather_is_what_all_processes_want_of_the_row(num_processes):
    prices = [prices_of(rank, num_processes * NUM_ROWS) for rank in range(num_processes)]
    for rank, seen in enumerate(collectives(num_processes)):
        mine = slice(rank * NUM_ROWS, (rank + 1) * NUM_ROWS)
        truth = sum(2 * rows_of(rank) * price[mine] for price in prices)
        assert_close(seen["gradient of gather"], truth)
        # A gather without gradient would know only what this process wants of its own rows.
        detached = 2 * rows_of(rank) * prices[rank][mine]
        assert (truth - detached).abs().min() > 1e-3
        assert_close(seen["gradient of a plain sum"], torch.full_like(truth, num_processes))


@in_groups
def test_gradient_of_a_gradient_through_gather_is_refused_not_wrong(num_processes):
    assert all(seen["second gradient of gather is refused"] for seen in collectives(num_processes))


@in_groups
def test_others_are_in_order_of_rank_without_oneself(num_processes):
    for rank, seen in enumerate(collectives(num_processes)):
        rest = [other for other in range(num_processes) if other != rank]
        assert_close(seen["others"], torch.cat([rows_of(other) for other in rest]), rtol=0, atol=0)
        assert_close(
            seen["others of integers"],
            torch.cat([torch.arange(NUM_ROWS) + 10 * other for other in rest]),
        )


@in_groups
def test_gradient_of_others_is_what_the_others_want_of_the_row(num_processes):
    prices = [prices_of(rank, (num_processes - 1) * NUM_ROWS) for rank in range(num_processes)]
    for rank, seen in enumerate(collectives(num_processes)):
        wanted = [prices[o][place_among_others(o, rank)] for o in range(num_processes) if o != rank]
        assert_close(seen["gradient of others"], sum(2 * rows_of(rank) * price for price in wanted))


@in_groups
def test_total_is_the_sum_over_processes_and_leaves_its_argument_alone(num_processes):
    summed = sum(rows_of(rank) for rank in range(num_processes))
    for rank, seen in enumerate(collectives(num_processes)):
        assert_close(seen["total"], summed)
        assert not seen["total has a gradient"]
        assert_close(seen["own after total"], rows_of(rank), rtol=0, atol=0)


@in_groups
def test_mean_over_processes_of_mean_is_the_mean_over_all_rows(num_processes):
    weights = torch.cat([weights_of(rank) for rank in range(num_processes)])
    rows = everyone(num_processes)[:, 0]
    seen = collectives(num_processes)
    assert_close(
        torch.stack([rank["mean"] for rank in seen]).mean(), (rows * weights).sum() / weights.sum()
    )
    # Averaged over processes, as parameters' gradients are: a row counts weight / all weights.
    gradient = torch.cat([rank["gradient of mean"] for rank in seen]) / num_processes
    assert_close(gradient, weights / weights.sum())


@in_groups
def test_mean_divides_by_the_weight_of_others_where_a_process_has_none(num_processes):
    own, weights = rows_of(0)[:, 0], weights_of(0)
    seen = [rank["mean where only rank 0 has weight"] for rank in collectives(num_processes)]
    assert_close(torch.stack(seen).mean(), (own * weights).sum() / weights.sum())
    assert_close(torch.stack(seen[1:]), torch.zeros(num_processes - 1).double())


@in_groups
def test_mean_without_weight_is_zero_on_every_process(num_processes):
    for seen in collectives(num_processes):
        assert_close(seen["mean without weight"], torch.tensor(0.0).double())
        assert_close(seen["gradient of mean without weight"], torch.zeros(NUM_ROWS).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_keeps_the_precision_of_its_rows(dtype):
    ones = torch.ones(4, dtype=dtype)
    assert distributed.mean(ones, ones).dtype == dtype


def test_on_one_process_nothing_is_averaged_sent_or_joined(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    tensor = torch.tensor([1.0, 2.0])
    with distributed.joined(torch.device("cpu"), 1.0):
        distributed.average_([tensor])
        distributed.broadcast_([tensor])
        assert distributed.num_processes() == 1
        assert distributed.share("nächste", torch.device("cpu")) == "nächste"
        assert distributed.join_texts("nächste", torch.device("cpu")) == "nächste"
        assert distributed.join(tensor, torch.device("cpu")) is tensor
    assert tensor.tolist() == [1, 2]
    assert distributed.launch() == (1, 0, 0)


PLACE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
LAUNCHED = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", **PLACE}
HALF = {
    "WORLD_SIZE": ("x", "0", None),
    "RANK": ("", "8", None),
    "LOCAL_RANK": ("8",),
    "MASTER_ADDR": ("", None),
    "MASTER_PORT": ("abc", "65536", None),
}


@pytest.mark.parametrize("name", HALF)
def test_half_of_what_torchrun_sets_is_refused_at_once(monkeypatch, tmp_path, capsys, name):
    for value in HALF[name]:
        for each, usual in LAUNCHED.items():
            monkeypatch.setenv(each, usual)
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
        assert cli.main(["train", "toy", "epochs=1", "--out", str(tmp_path / "run")]) == 2
        # Without WORLD_SIZE there is one process, which has no rank 5.
        field = "RANK" if (name, value) == ("WORLD_SIZE", None) else name
        assert capsys.readouterr().err.startswith(f"error: {field} ")
        assert not (tmp_path / "run").exists()


def test_ranks_are_known_before_the_processes_have_met(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert (distributed.launch(), distributed.rank()) == ((8, 5, 1), 0)


def test_an_error_that_is_no_other_process_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with (
        pytest.raises(RuntimeError, match=r"^connection$"),
        distributed.joined(torch.device("cpu"), 1.0),
    ):
        raise RuntimeError("connection")


# One of two processes of torchrun: what it sees, and how it learns that the other has gone.
PROGRAM = """
import glob, json, torch
from nearsay.errors import ProcessError
from nearsay import distributed as dist

cpu, seen = torch.device("cpu"), {"launched": dist.launch().rank, "before": dist.num_processes()}
try:
    with dist.joined(cpu, 20.0):
        rank = seen["rank"] = dist.rank()
        # Imports the compiler, which looks for groups.
        torch.optim.SGD([torch.ones(1, requires_grad=True)])
        seen["during"] = dist.num_processes()
        wide = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last) + rank
        tensors = [torch.tensor([1.0, 5.0]) * (1 + rank), torch.tensor(4.0 * rank), wide]
        dist.average_(tensor for tensor in tensors)
        seen["averaged"] = [tensor.tolist() for tensor in tensors]
        tensors = [torch.tensor([7, 8]) + rank, torch.tensor(0.5 + rank), wide + rank]
        dist.broadcast_(tensor for tensor in tensors)
        seen["broadcast"] = [tensor.tolist() for tensor in tensors]
        texts = (f"nächste {rank}", "" if rank == 0 else "lost")
        seen["shared"] = [dist.share(text, cpu) for text in texts]
        try:
            with dist.joined(cpu, 20.0):
                raise RuntimeError("gloo")
        except RuntimeError as error:
            seen["joined twice"] = type(error).__name__
        if rank == 0:
            raise ValueError("gone")
        dist.total(torch.ones(1))
except ValueError as error:
    seen["own"] = str(error)
except ProcessError as error:
    seen["lost"], seen["code"] = str(error), error.code
seen["after"] = dist.num_processes()
names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
seen["threads"] = [name for name in names if "gloo" in name]
print(json.dumps(seen))
"""


def free_place():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


@cache
def pair():
    """What two processes saw."""
    group = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **free_place()}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(output for output, _ in told), told
    return [json.loads(output.splitlines()[-1]) for output, _ in told]


def test_processes_meet_where_the_environment_says_and_part_again():
    averaged = (torch.arange(24.0).view(2, 3, 2, 2) + 0.5).tolist()
    for rank, seen in enumerate(pair()):
        assert (seen["launched"], seen["rank"]) == (rank, rank)
        assert (seen["before"], seen["during"], seen["after"]) == (1, 2, 1)
        # Who has joined already is only passed through.
        assert seen["joined twice"] == "RuntimeError"
        assert seen["averaged"] == [[1.5, 7.5], 2.0, averaged]
        assert seen["broadcast"] == [[7, 8], 0.5, averaged]
        assert seen["shared"] == ["nächste 0", ""]
        # No thread of the group is left that could abort the process at its end.
        assert seen["threads"] == []


def test_a_process_learns_that_another_one_has_gone():
    first, second = pair()
    assert first["own"] == "gone"
    assert "lost" not in first
    assert "process 1" in second["lost"]
    assert second["code"] == 70


# Waits for a process that never comes; leaves by Ctrl-C, as a terminal sends it, and not before.
ALONE = """
import signal, torch
from nearsay import distributed as dist

signal.signal(signal.SIGINT, signal.default_int_handler)
print("waiting", flush=True)
with dist.joined(torch.device("cpu"), 60.0):
    pass
"""


def test_ctrl_c_ends_the_wait_for_the_others():
    waiting = []
    for rank in ("0", "1"):
        group = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, **free_place()}
        waiting.append(
            subprocess.Popen(
                [sys.executable, "-c", ALONE],
                env={**os.environ, **group},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
    try:
        for process in waiting:
            assert process.stdout.readline() == b"waiting\n"
        time.sleep(1)
        for process in waiting:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == -signal.SIGINT
    finally:
        for process in waiting:
            process.kill()
            process.communicate()
