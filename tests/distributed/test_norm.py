"""BatchNorm over two processes equals BatchNorm over one, in outputs, gradients and averages."""

from functools import cache

import pytest
import torch
from torch.testing import assert_close

from distributed import group
from distributed.norms import (
    CASES,
    NETWORKS,
    make_inputs,
    make_norm,
    random,
    rows_of,
    run_network,
    run_norm,
)

NUM_PROCESSES = 2
GLOBAL = [name for name, case in CASES.items() if case[4].get("statistics") != "process"]
every_case = pytest.mark.parametrize("name", GLOBAL)
every_network = pytest.mark.parametrize("name", NETWORKS)


def results(name):
    return group.results(NUM_PROCESSES, f"norm {name}")


@cache
def alone(name):
    return run_norm(name, 0, 1)


def tolerance(name):
    """Larger where 16 bits, or large means in 32, cost one process digits as well."""
    return {
        "bfloat16": {"rtol": 2e-2, "atol": 2e-2},
        "float32, large mean": {"rtol": 1e-3, "atol": 1e-3},
    }.get(name, {})


@every_case
@pytest.mark.parametrize("kind", ["outputs", "gradient"])
def test_rows_are_normalized_as_on_one_process(name, kind):
    ranks = results(name)
    for number in range(3):
        together = torch.cat([rank[f"{kind} {number}"] for rank in ranks])
        assert_close(together, alone(name)[f"{kind} {number}"], **tolerance(name))


@every_case
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_gradients_of_parameters_add_up_to_those_of_one_process(name, kind):
    ranks = results(name)
    for number in range(3):
        summed = sum(rank[f"{kind} {number}"] for rank in ranks)
        assert_close(summed, alone(name)[f"{kind} {number}"], **tolerance(name))


@every_case
def test_running_averages_are_those_of_one_process_and_the_same_everywhere(name):
    first, second = results(name)
    buffers = [key for key in first if key.startswith("buffer")]
    assert len(buffers) == 9
    for key in buffers:
        assert torch.equal(first[key], second[key])
        assert_close(first[key], alone(name)[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in GLOBAL if name != "one row each"]
)  # which alone has no variance
def test_shards_on_their_own_would_be_normalized_otherwise(name):
    """What makes the comparisons above mean something."""
    own = torch.cat(
        [run_norm(name, rank, NUM_PROCESSES)["outputs 0"] for rank in range(NUM_PROCESSES)]
    )
    assert (own - alone(name)["outputs 0"]).abs().max() > 0.1


def test_statistics_of_the_process_are_those_of_its_rows_alone():
    for rank, seen in enumerate(results("per process")):
        assert_close(seen, run_norm("per process", rank, NUM_PROCESSES), rtol=0, atol=0)


def test_large_means_cost_no_more_digits_than_torch_loses_itself():
    name = "float32, large mean"
    inputs = make_inputs(name, 0).double()
    norm = make_norm(name).double()
    truth = norm(inputs)
    outputs = torch.cat([rank["outputs 0"] for rank in results(name)]).double()
    own = (alone(name)["outputs 0"].double() - truth).abs().max()
    assert own < 1e-3
    assert (outputs - truth).abs().max() < 2 * own + 1e-5
    seen = results(name)[0]
    assert_close(seen["buffer 0 running_var"].double(), norm.running_var, rtol=1e-5, atol=0)


def test_prices_differ_between_processes():
    """Otherwise a sum left out of the backward pass could hide."""
    prices = random(*make_inputs("images", 0).shape, seed=20)
    halves = [
        prices[rows_of("images", rank, NUM_PROCESSES)].sum(dim=(0, 2, 3))
        for rank in range(NUM_PROCESSES)
    ]
    assert (halves[0] - halves[1]).abs().min() > 1


def test_second_derivative_is_refused_not_wrong():
    assert all(rank["is refused"] for rank in results("twice"))


@every_network
def test_networks_train_as_on_one_process(name):
    expected = run_network(name, 0, 1)
    check_network(results(name), expected)


def test_network_in_the_wrapper_of_torch_trains_as_on_one_process():
    check_network(results("ResNet, wrapped"), run_network("ResNet", 0, 1))


def check_network(ranks, expected):
    for key, value in expected.items():
        if key.startswith("outputs"):
            assert_close(torch.cat([rank[key] for rank in ranks]), value, msg=key)
        else:
            for rank in ranks:
                assert_close(rank[key], value, msg=key)
