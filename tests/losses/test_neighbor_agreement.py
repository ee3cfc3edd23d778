import math

import pytest
import torch

from nearsay import NCR, Batch, Outputs, one_hot
from nearsay.losses.neighbor_agreement import (
    NUM_EPOCHS,
    ask_neighbors,
    count_agreement_,
    has_settled,
    outlying_rows,
)

ANGLES = [0, 5, 11, 90, 96, 180]  # two groups, and one row alone
LABELS = [0, 0, 1, 1, 1, 0]


def case(labels=LABELS, angles=ANGLES, indices=None, logits=None):
    radians = torch.tensor(angles, dtype=torch.float64) * math.pi / 180
    features = torch.stack([radians.cos(), radians.sin()], dim=1).float()
    targets = one_hot(torch.tensor(labels), 3)
    indices = torch.arange(len(labels)) if indices is None else torch.tensor(indices)
    logits = 4 * targets if logits is None else logits
    return Outputs(features, logits), Batch(inputs=features, targets=targets, indices=indices)


def by_hand(outputs, batch, k):
    """Agreement, mean similarity and belief, row by row."""
    found = []
    for row in range(len(batch.indices)):
        pairs = []
        for other in range(len(batch.indices)):
            if batch.indices[other] not in (-1, batch.indices[row]):
                pairs.append(
                    (torch.dot(outputs.features[row], outputs.features[other]).item(), other)
                )
        nearest = sorted(pairs, reverse=True)[:k]
        nearest = [(max(similarity, 0.0), other) for similarity, other in nearest]
        total = sum(similarity for similarity, _ in nearest)
        votes, belief = torch.zeros(3), torch.zeros(3)
        for similarity, other in nearest:
            if total > 1e-6:
                votes += similarity / total * batch.targets[other]
                belief += similarity / total * outputs.logits[other].softmax(dim=0)
        agrees = total > 1e-6 and votes.argmax() == batch.targets[row].argmax()
        found.append((bool(agrees), sum(similarity for similarity, _ in nearest) / k, belief))
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
def test_neighbors_are_asked_as_by_hand(k):
    outputs, batch = case()
    opinion = ask_neighbors(outputs, batch, k)
    for row, (agrees, similarity, belief) in enumerate(by_hand(outputs, batch, k)):
        assert opinion.agrees[row].item() == agrees, row
        assert opinion.similarity[row].item() == pytest.approx(similarity, abs=1e-5)
        torch.testing.assert_close(opinion.belief[row], belief, rtol=1e-4, atol=1e-5)


def test_padding_unlabeled_rows_and_rows_alone_are_not_asked():
    outputs, batch = case(labels=[0, 0, -1, 1, 1, 0], indices=[0, 1, 2, 3, -1, 5])
    opinion = ask_neighbors(outputs, batch, 2)
    # The last has nobody on its side.
    assert opinion.is_asked.tolist() == [True, True, False, True, False, False]
    assert not opinion.agrees[[2, 4, 5]].any()


@pytest.mark.parametrize("content", [torch.nan, torch.inf])
def test_what_padding_holds_is_not_heard(content):
    outputs, batch = case(indices=[0, 1, 2, 3, -1, 5])
    # Everybody is a neighbor, so that nobody stands in some places.
    expected = ask_neighbors(outputs, batch, None)
    for rows in (*outputs, batch.targets):
        rows[4] = content
    opinion = ask_neighbors(outputs, batch, None)
    for name, found, wished in zip(opinion._fields, opinion, expected, strict=True):
        torch.testing.assert_close(found[batch.is_real], wished[batch.is_real], msg=name)


def test_agreement_is_counted_in_the_row_of_its_epoch():
    table = torch.zeros(NUM_EPOCHS, 2, dtype=torch.float64)
    opinion = ask_neighbors(*case(), 1)
    count_agreement_(table, opinion, torch.tensor(2.75))
    count_agreement_(table, opinion, torch.tensor(2.9))
    assert table[2].tolist() == [
        2.0 * opinion.agrees.sum().item(),
        2.0 * opinion.is_asked.sum().item(),
    ]
    assert table.sum() == table[2].sum()


@pytest.mark.parametrize(
    ("shares", "epoch", "expected"),
    [
        ([], 0, False),
        ([0.3], 1, False),
        ([0.3, 0.4], 2, False),
        ([0.3, 0.4, 0.404], 3, True),
        ([0.3, 0.4, 0.404], 2, False),  # the third epoch is not over
        ([0.3, 0.4, 0.35], 3, True),
        ([0.3, 0.4, 0.35, 0.6], 4, True),  # what has begun goes on
        ([], NUM_EPOCHS, True),
    ],
)
def test_the_start_is_where_agreement_stops_to_rise(shares, epoch, expected):
    table = torch.zeros(NUM_EPOCHS, 2, dtype=torch.float64)
    for row, share in enumerate(shares):
        table[row] = torch.tensor([1000 * share, 1000])
    assert has_settled(table, epoch) is expected
    assert (
        NCR(start_epoch="auto")
        .phase(epoch, {"start.agreement": table})
        .startswith("ncr" if expected else "watch")
    )


def test_while_it_watches_ncr_is_its_base_and_counts():
    outputs, batch = case()
    objective = NCR(start_epoch="auto", k=2)
    memory = objective.init_state(6, 3, 2)
    stage = objective.phase(0.0, memory)
    loss = objective(outputs, batch, torch.tensor(0.5), memory, stage)
    plain = objective.base(outputs, batch, torch.tensor(0.5), {}, "cross_entropy")
    assert loss.total == plain.total
    asked, agreed = memory["start.agreement"][0, 1].item(), memory["start.agreement"][0, 0].item()
    assert asked == ask_neighbors(outputs, batch, 2).is_asked.sum()
    assert loss.terms["agreement"].item() == pytest.approx(agreed / asked)


def test_far_and_undecided_rows_lose_their_label():
    logits = torch.zeros(6, 3)  # nobody knows anything
    outputs, batch = case(logits=logits)
    opinion = ask_neighbors(outputs, batch, 2)
    foreign = outlying_rows(opinion, batch, 0.17)
    assert foreign.tolist() == [False, False, False, False, False, True]
    objective = NCR(k=2, reject=0.17)
    loss = objective(outputs, batch, torch.tensor(0.0), {}, objective.phase(0.0, {}))
    assert loss.terms["rejected"].item() == pytest.approx(1 / 6)
    labels = [*LABELS[:5], -1]
    without = NCR(k=2)(
        *case(labels=labels, logits=logits), torch.tensor(0.0), {}, "ncr/cross_entropy"
    )
    torch.testing.assert_close(loss.total, without.total)


def test_far_rows_whose_neighbors_are_sure_keep_their_label():
    outputs, batch = case(
        angles=[0, 5, 10, 90, 95, 150], logits=10 * one_hot(torch.tensor([0, 0, 0, 1, 1, 1]), 3)
    )
    assert not outlying_rows(ask_neighbors(outputs, batch, 2), batch, 0.5).any()
    undecided = Outputs(outputs.features, torch.zeros(6, 3))
    assert outlying_rows(ask_neighbors(undecided, batch, 2), batch, 0.5).sum() == 3


@pytest.mark.parametrize(("share", "num"), [(0, 0), (0.25, 2), (0.5, 4), (0.75, 6), (1, 8)])
@pytest.mark.parametrize("num_padding", [0, 8])
def test_the_share_is_of_the_rows_that_are_not_padding(share, num, num_padding):
    angles = [0, 1, 3, 7, 15, 31, 50, 80] + [40] * num_padding
    indices = [*range(8), *[-1] * num_padding]
    outputs, batch = case([0] * len(angles), angles, indices, logits=torch.zeros(len(angles), 3))
    assert outlying_rows(ask_neighbors(outputs, batch, 1), batch, share).sum() == num
