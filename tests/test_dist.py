"""Collectives: the identity on one process, and on several what the sums say."""

import pytest
import torch
from distributed.collectives import NUM_ROWS, call_all, prices_of, rows_of, weights_of
from distributed.group import in_groups, results
from torch.testing import assert_close

from nearsay import dist


def collectives(num_processes):
    return results(num_processes, "collectives")


def everyone(num_processes):
    return torch.cat([rows_of(rank) for rank in range(num_processes)])


def place_among_others(rank, of):
    """Rows of rank `of` in what `rank` sees as the others."""
    place = of if of < rank else of - 1
    return slice(place * NUM_ROWS, (place + 1) * NUM_ROWS)


def test_one_process_is_alone():
    assert (dist.num_processes(), dist.rank()) == (1, 0)


def test_on_one_process_gather_is_the_tensor_itself_and_so_is_its_gradient():
    seen = call_all(0)
    assert_close(seen["gather"], rows_of(0))
    assert_close(seen["gradient of gather"], 2 * prices_of(0, NUM_ROWS) * rows_of(0))
    assert_close(seen["gather of integers"], torch.arange(NUM_ROWS))


def test_on_one_process_there_are_no_others():
    seen = call_all(0)
    assert seen["others"].shape == (0, 2)
    assert seen["others of integers"].shape == (0,)
    assert seen["others of integers"].dtype == torch.int64
    assert_close(seen["gradient of others"], torch.zeros_like(rows_of(0)))


def test_on_one_process_total_is_the_tensor_without_gradient():
    seen = call_all(0)
    assert_close(seen["total"], rows_of(0))
    assert not seen["total has a gradient"]


def test_on_one_process_mean_divides_by_the_weights():
    seen = call_all(0)
    weights = weights_of(0)
    assert_close(seen["mean"], (rows_of(0)[:, 0] * weights).sum() / weights.sum())
    assert_close(seen["gradient of mean"], weights / weights.sum())


def test_on_one_process_mean_without_weight_is_zero():
    seen = call_all(0)
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
        assert_close(seen["others of integers"], torch.cat([torch.arange(NUM_ROWS) + 10 * other for other in rest]))


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
    assert_close(torch.stack([rank["mean"] for rank in seen]).mean(), (rows * weights).sum() / weights.sum())
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
    assert dist.mean(ones, ones).dtype == dtype
