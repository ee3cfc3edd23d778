"""Two and three processes equal one: losses, gradients, parameters and memory."""

from functools import cache

import pytest
import torch
from torch.testing import assert_close

from distributed.group import in_groups, results
from distributed.scenarios import SCENARIOS, make_batch, sizes, train

every_scenario = pytest.mark.parametrize("name", SCENARIOS)
with_neighbors = pytest.mark.parametrize("name", [n for n in SCENARIOS if "NCR" in n][::3])


@cache
def alone(name):
    return train(SCENARIOS[name])


def select(seen, kind):
    chosen = {name: value for name, value in seen.items() if name.startswith(kind)}
    assert chosen, f"there is no {kind} among {list(seen)}"
    return chosen


def mean_over(ranks, kind):
    chosen = [select(rank, kind) for rank in ranks]
    return {name: torch.stack([rank[name] for rank in chosen]).mean(dim=0) for name in chosen[0]}


@in_groups
@every_scenario
def test_several_processes_train_as_one(name, num_processes):
    ranks, one = results(num_processes, name), alone(name)
    assert_close(mean_over(ranks, "loss"), select(one, "loss"))
    for rank in ranks:
        assert_close(select(rank, "gradient"), select(one, "gradient"))
    is_remembering = SCENARIOS[name].objective.init_state(1, 1, 1)
    for kind in ("parameter", "memory") if is_remembering else ("parameter",):
        assert_close(select(ranks[0], kind), select(one, kind))
        for rank in ranks[1:]:
            assert_close(select(rank, kind), select(ranks[0], kind), rtol=0, atol=0)


@in_groups
@with_neighbors
def test_shards_on_their_own_would_have_another_loss(name, num_processes):
    """What makes the comparisons above mean something: neighbors do stand on other ranks."""
    scenario = SCENARIOS[name]
    losses = [train(scenario, rank, num_processes)["loss 2 ncr"] for rank in range(num_processes)]
    assert abs(torch.stack(losses).mean() - alone(name)["loss 2 ncr"]) > 1e-3


@every_scenario
def test_every_scenario_has_gradients_worth_comparing(name):
    (gradient,) = select(alone(name), "gradient 2").values()
    assert gradient.isfinite().all()
    assert (gradient.abs() > 1e-3).sum() > len(gradient) / 4


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_duplicates_stand_on_two_ranks(num_ranks):
    scenario = SCENARIOS["ELR, duplicates"]
    per_rank = [
        set(make_batch(scenario, 0, rank, num_ranks).indices.tolist()) for rank in range(num_ranks)
    ]
    assert per_rank[0] & per_rank[-1]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_are_the_batch_cut_in_order_and_padded_to_equal_shapes(num_ranks):
    for scenario in SCENARIOS.values():
        for number in range(len(scenario.rows)):
            batches = [make_batch(scenario, number, rank, num_ranks) for rank in range(num_ranks)]
            assert len({batch.inputs.shape for batch in batches}) == 1
            # (V, W·B).
            views = torch.cat([batch.indices.view(scenario.views, -1) for batch in batches], dim=1)
            whole = make_batch(scenario, number, 0, 1)
            assert_close(views[views >= 0], whole.indices)
            inputs = torch.cat(
                [batch.inputs.unflatten(0, (scenario.views, -1)) for batch in batches], dim=1
            )
            assert_close(inputs[views >= 0], whole.inputs)


def test_uneven_idle_and_unlabeled_ranks_are_what_they_are_called():
    assert sizes(SCENARIOS["NCR, uneven"], 13, 3) == [5, 4, 4]
    assert sizes(SCENARIOS["NCR, last rank idle"], 11, 3) == [6, 5, 0]
    assert sizes(SCENARIOS["NCR, first rank idle"], 11, 2) == [0, 11]
    assert not make_batch(SCENARIOS["NCR, last rank idle"], 1, 1, 2).is_real.any()
    assert not make_batch(SCENARIOS["NCR, a rank without labels"], 1, 2, 3).targets.any()
