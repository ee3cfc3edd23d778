"""Two and three processes equal one: losses, gradients, parameters and memory."""

from functools import cache

import pytest
import torch
from torch.testing import assert_close

from distributed.group import in_groups, results
from distributed.scenarios import SCENARIOS, Network, make_batch, sizes, train

every_scenario = pytest.mark.parametrize("name", SCENARIOS)
remembering = pytest.mark.parametrize(
    "name", [n for n, s in SCENARIOS.items() if s.objective.init_state(1, 1, 1)]
)
with_neighbors = pytest.mark.parametrize("name", [n for n in SCENARIOS if n.startswith("NCR")])


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
def test_mean_of_losses_and_terms_is_that_of_the_whole_batch(name, num_processes):
    assert_close(mean_over(results(num_processes, name), "loss"), select(alone(name), "loss"))


@in_groups
@every_scenario
def test_mean_of_gradients_is_that_of_the_whole_batch(name, num_processes):
    for rank in results(num_processes, name):
        assert_close(select(rank, "gradient"), select(alone(name), "gradient"))


@in_groups
@every_scenario
def test_parameters_end_up_the_same_on_every_rank_and_as_on_one_process(name, num_processes):
    ranks = results(num_processes, name)
    assert_close(select(ranks[0], "parameter"), select(alone(name), "parameter"))
    for rank in ranks[1:]:
        assert_close(select(rank, "parameter"), select(ranks[0], "parameter"), rtol=0, atol=0)


@in_groups
@remembering
def test_memory_is_the_same_on_every_rank_and_as_on_one_process(name, num_processes):
    ranks = results(num_processes, name)
    assert_close(select(ranks[0], "memory"), select(alone(name), "memory"))
    for rank in ranks[1:]:
        assert_close(select(rank, "memory"), select(ranks[0], "memory"), rtol=0, atol=0)


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


@in_groups
@pytest.mark.parametrize("name", [n for n in SCENARIOS if "duplicates" in n])
def test_example_on_several_ranks_is_remembered_once_by_its_first_row(name, num_processes):
    objective, batch = SCENARIOS[name].objective, make_batch(SCENARIOS[name], 0, 0, 1)
    first = [
        batch.indices.tolist().index(who) for who in batch.indices.unique().tolist()
    ]  # in order of example
    features, logits = (value.detach()[first] for value in Network().double()(batch.inputs))
    memory = select(results(num_processes, name)[0], "memory 0")
    if batch.teacher is not None:
        for part, rows in (
            ("features", batch.teacher.features),
            ("beliefs", batch.teacher.logits.softmax(dim=1)),
        ):
            assert_close(memory[f"memory 0 {part}"][batch.indices.unique()], rows[first])
    elif "memory 0 bank.indices" in memory:
        kept, order = memory["memory 0 bank.indices"].sort()
        order = order[kept >= 0]
        assert_close(kept[kept >= 0], batch.indices.unique())
        assert_close(memory["memory 0 bank.features"][order], features)
        assert_close(memory["memory 0 bank.logits"][order], logits)
    else:
        elr = getattr(objective, "base", objective)
        (averages,) = memory.values()
        probabilities = logits.softmax(dim=1).clamp(1e-4, 1 - 1e-4)
        fresh = (1 - elr.beta) * probabilities / probabilities.sum(dim=1, keepdim=True)
        assert_close(
            averages, torch.zeros_like(averages).index_copy(0, batch.indices.unique(), fresh)
        )


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
            views = torch.cat(
                [batch.indices.view(scenario.views, -1) for batch in batches], dim=1
            )  # (V, W·B)
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
