"""NeighborVote against loops over single numbers, and its treatment of wrong labels."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch.testing import assert_close

from nearsay.batch import PADDING, Batch, Outputs, one_hot
from nearsay.losses import NeighborVote
from nearsay.transforms import Mixup

N, B, C, D = 30, 8, 4, 5
OBJECTIVE = NeighborVote(k=6, start_epoch=2, threshold=0.5)


def make_batch(seed=0, *, views=2):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(N, generator=generator)[:B]
    indices[-1] = PADDING
    labels = torch.randint(0, C, (B,), generator=generator)
    labels[0] = -1  # unlabeled

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = Batch(
        inputs=random(views * B, 2),
        targets=one_hot(labels, C).double().repeat(views, 1),
        indices=indices.repeat(views),
        views=views,
        teacher=Outputs(random(B, D).repeat(views, 1), 2 * random(B, C).repeat(views, 1)),
    )
    return Outputs(random(views * B, D), random(views * B, C)), batch


def make_memory(*, filled=True):
    memory = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in OBJECTIVE.init_state(N, C, D).items()
    }
    if filled:
        generator = torch.Generator().manual_seed(9)
        memory["features"][:-1] = torch.randn(N, D, generator=generator, dtype=torch.float64)
        for name in ("beliefs", "labels"):
            memory[name][:-1] = torch.rand(N, C, generator=generator, dtype=torch.float64).softmax(
                dim=1
            )
        memory["seen"][: N - 4] = torch.arange(N - 4)  # the last few were never seen
    return memory


def by_hand(outputs, batch, memory, stage):
    """The loss by loops over single numbers; changes the memory as the objective must."""
    features, beliefs, labels, seen = (
        memory[name] for name in ("features", "beliefs", "labels", "seen")
    )
    rows = [row for row in range(B) if batch.indices[row] != PADDING]
    given = {
        row: batch.targets[row] if batch.plain_targets is None else batch.plain_targets[row]
        for row in rows
    }
    for row in rows:
        who = int(batch.indices[row])
        fresh = batch.teacher.logits[row].softmax(dim=0)
        beliefs[who] = fresh if seen[who] == PADDING else 0.7 * beliefs[who] + 0.3 * fresh
        labels[who] = given[row] if seen[who] == PADDING else labels[who]
        features[who], seen[who] = batch.teacher.features[row], who
    mean = torch.stack([batch.teacher.features[row] for row in rows]).mean(dim=0)
    memory["center"] += 0.01 * (mean - memory["center"])

    heard = {}
    for row in rows:
        who = int(batch.indices[row])
        own = features[who] - memory["center"]
        near = []
        for other in range(N):
            if seen[other] != PADDING and other != who:
                theirs = features[other] - memory["center"]
                near.append((float(own @ theirs / own.norm() / theirs.norm()), other))
        near = [(cosine, other) for cosine, other in sorted(near, reverse=True)[:6] if cosine > 0]
        total = sum(math.exp(cosine / 0.1) for cosine, _ in near)
        vote, belief = torch.zeros(C, dtype=torch.float64), torch.zeros(C, dtype=torch.float64)
        for cosine, other in near:
            vote += math.exp(cosine / 0.1) / total * labels[other]
            belief += math.exp(cosine / 0.1) / total * beliefs[other]
        is_labeled = given[row].sum() > 0
        trust = float(vote[given[row].argmax()] / vote.max()) ** 4 if is_labeled else 0.0
        heard[row] = (trust, (beliefs[who] + belief) / 2)

    counts = torch.zeros(C, C, dtype=torch.float64)
    for row, (_, belief) in heard.items():
        if belief.max() >= 0.5 and given[row].sum() > 0:
            counts[belief.argmax(), given[row].argmax()] += 1
    for each in range(C):
        if counts[each].sum() > 0:
            memory["noise"][each] += 0.01 * (
                counts[each] / counts[each].sum() - memory["noise"][each]
            )
    made = {}
    for row, (trust, belief) in heard.items():
        if given[row].sum() > 0:
            belief = belief * memory["noise"][:, given[row].argmax()].clamp(min=1e-3).sqrt()
        is_sure = belief.max() / belief.sum() >= 0.5
        believed = one_hot(belief.argmax()[None], C)[0].double()
        made[row] = believed if is_sure else trust * given[row]
        labels[int(batch.indices[row])] = believed if is_sure else given[row]

    taught = sum(made.values())
    memory["shares"] += 0.01 * (taught / taught.sum() - memory["shares"])
    targets = torch.zeros(B, C, dtype=torch.float64)
    for row in rows:
        for each in range(C):
            factor = min(max(1 / C / float(memory["shares"][each]), 0.2), 5)
            targets[row, each] = given[row][each] if stage == "labels" else factor * made[row][each]
    total = torch.zeros((), dtype=torch.float64)
    for view in range(batch.views):
        loss = weight = 0.0
        for row in rows:
            place = view * B + row
            target = targets[row]
            if batch.mix is not None:
                partner = int(batch.mix.partners[place]) % B
                share = float(batch.mix.weight[place])
                target = share * target + (1 - share) * targets[partner]
            loss = loss - (target * outputs.logits[place].log_softmax(dim=0)).sum()
            weight = weight + target.sum()
        total = total + loss / weight
    if stage == "neighbors":
        apart = [
            1
            - torch.cosine_similarity(outputs.features[B + row], batch.teacher.features[row], dim=0)
            for row in rows
        ]
        total = total + sum(apart) / len(apart)
    strange = [
        (1 - made[row].sum()) * strangeness(outputs, batch, memory["center"], rows, row)
        for row in rows
    ]
    return total + 0.1 * sum(strange) / len(strange)


def strangeness(outputs, batch, center, rows, row):
    """KL between the similarities that the teacher and the second view see to all other rows."""
    others = [batch.teacher.features[other] - center for other in rows if other != row]
    sides = []
    for own, temperature in ((batch.teacher.features[row], 0.05), (outputs.features[B + row], 0.1)):
        cosines = [torch.cosine_similarity(own - center, other, dim=0) for other in others]
        total = sum((cosine / temperature).exp() for cosine in cosines)
        sides.append([(cosine / temperature).exp() / total for cosine in cosines])
    return sum(wanted * (wanted / found).log() for wanted, found in zip(*sides, strict=True))


@pytest.mark.parametrize("stage", ["labels", "neighbors"])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("filled", [False, True])
def test_it_is_what_loops_over_numbers_give(stage, is_mixed, filled):
    mine, theirs = make_memory(filled=filled), make_memory(filled=filled)
    for seed in range(3):
        outputs, batch = make_batch(seed)
        if is_mixed:
            teacher, batch = batch.teacher, Mixup(views="first")(batch, seed=seed, epoch=0)
            assert batch.teacher is teacher
        outputs = Outputs(*(part.requires_grad_() for part in outputs))
        wanted = by_hand(outputs, batch, theirs, stage)
        loss = OBJECTIVE(outputs, batch, torch.tensor(3.0), mine, stage)
        assert_close(loss.total, wanted, rtol=1e-9, atol=1e-9)
        slopes, wanted_slopes = (
            torch.autograd.grad(total, outputs) for total in (loss.total, wanted)
        )
        assert_close(slopes, wanted_slopes, rtol=1e-8, atol=1e-9)
        assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_labels_are_learned_as_they_are_until_it_starts():
    assert [OBJECTIVE.phase(epoch, {}) for epoch in (0.0, 1.9, 2.0, 50.0)] == ["labels"] * 2 + [
        "neighbors"
    ] * 2


def clusters(wrong):
    """Two far clusters of features, labeled by cluster except for the examples in `wrong`."""
    truth = torch.arange(N) % 2
    given = truth.clone()
    given[wrong] = 1 - given[wrong]
    directions = torch.eye(2)[truth] + 0.05 * torch.randn(
        N, 2, generator=torch.Generator().manual_seed(1)
    )
    return truth, given, directions


def believed(objective, wrong, logits):
    """The labels after two visits to all examples by a teacher with these `logits`."""
    truth, given, features = clusters(wrong)
    memory = objective.init_state(N, 2, 2)
    batch = Batch(
        inputs=features,
        targets=one_hot(given, 2),
        indices=torch.arange(N),
        teacher=Outputs(features, logits(truth)),
    )
    for _ in range(2):
        loss = objective(
            Outputs(features, torch.zeros(N, 2)), batch, torch.tensor(9.0), memory, "neighbors"
        )
    return truth, memory["labels"][:-1], loss


def test_a_label_that_its_neighbors_do_not_share_has_no_say_and_is_replaced_where_belief_is_sure():
    wrong = torch.tensor([3, 8, 20])
    truth, labels, loss = believed(
        NeighborVote(k=10, start_epoch=0), wrong, lambda truth: 8 * one_hot(truth, 2)
    )
    assert torch.equal(labels.argmax(dim=1), truth)
    assert loss.terms["agreement"].item() == pytest.approx(1 - 3 / N, abs=0.02)
    assert loss.terms["confident"] == 1


@pytest.mark.parametrize(("right", "odds"), [(0.9, 9), (0.1, 1 / 9)])
@pytest.mark.parametrize("power", [0.0, 0.5])
def test_the_more_labels_are_right_the_more_it_takes_to_overrule_one(right, odds, power):
    # So sure that nothing is counted.
    objective = NeighborVote(k=1, start_epoch=0, threshold=0.99, label_power=power)
    memory = objective.init_state(2, 2, 1)
    memory["noise"] = torch.tensor([[right, 1 - right], [1 - right, right]])
    weighed = objective._weigh(torch.tensor([[0.95, 0.05]]), torch.tensor([[0.0, 1.0]]), memory)
    assert weighed[0, 0].item() == pytest.approx(0.95 / (0.95 + 0.05 * odds**power))


@pytest.mark.parametrize("weight", [0.25, 4.0])
@pytest.mark.parametrize("agreement_power", [0.0, 4.0])
def test_what_a_class_weighs_is_no_doubt(weight, agreement_power):
    objective = NeighborVote(k=10, start_epoch=0, threshold=1.0, agreement_power=agreement_power)
    _, given, features = clusters(wrong := torch.tensor([3]))
    given[5] = -1
    memory = objective.init_state(N, 2, 2)
    seen = Outputs(features, torch.zeros(N, 2))
    for _ in range(2):
        known = objective._vote_on_labels(seen, torch.arange(N), weight * one_hot(given, 2), memory)
    wanted = torch.zeros(N)
    # Who has no label is in doubt by any measure.
    wanted[wrong], wanted[5] = (1.0 if agreement_power else 0.0, 1.0)
    assert_close(known.uncertainty, wanted, rtol=0, atol=0.02)


def test_how_classes_are_labeled_is_counted_where_belief_is_sure():
    objective = NeighborVote(k=1, start_epoch=0)
    memory = objective.init_state(4, 2, 1)
    belief = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.6, 0.4], [0.05, 0.95]])
    # One of a class that weighs more, one of none.
    given = torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.0, 1.0], [0.0, 0.0]])
    before = memory["noise"].clone()
    objective._weigh(belief, given, memory)
    assert_close(memory["noise"][0], before[0] + 0.01 * (torch.tensor([0.5, 0.5]) - before[0]))
    assert torch.equal(memory["noise"][1], before[1])


def test_a_rare_class_is_taught_as_much_as_the_others_within_a_factor_of_five():
    objective = NeighborVote(k=10, start_epoch=0)
    memory = objective.init_state(N, 2, 2)
    for share, wanted in ((0.25, 0.5 / 0.25), (0.01, 5.0)):
        memory["shares"] = torch.tensor([1 - share, share])
        # Nothing is taught, so nothing moves.
        factors = objective._balance(torch.zeros(1, 2), memory)
        assert_close(factors, torch.tensor([0.5 / (1 - share), wanted]))
    objective._balance(torch.tensor([[3.0, 0.0]]), memory)
    assert_close(memory["shares"], torch.tensor([0.99 + 0.01 * 0.01, 0.01 - 0.01 * 0.01]))


def test_it_needs_a_teacher_and_a_stage_of_its_own():
    outputs, batch = make_batch()
    with pytest.raises(ValueError, match=r"^teacher"):
        OBJECTIVE(outputs, replace(batch, teacher=None), torch.tensor(0.0), make_memory(), "labels")
    other = OBJECTIVE.init_state(N, C, D + 1)
    with pytest.raises(ValueError, match=r"^features of the teacher"):
        OBJECTIVE(outputs, batch, torch.tensor(0.0), other, "labels")
    assert_close(other, OBJECTIVE.init_state(N, C, D + 1))
    with pytest.raises(ValueError, match=r"^state"):
        OBJECTIVE(outputs, batch, torch.tensor(0.0), {}, "labels")
    outside = batch.indices.where(batch.indices != batch.indices[0], N)
    with pytest.raises(ValueError, match=r"ind(ex|ices)\b.*30"):
        OBJECTIVE(
            outputs, replace(batch, indices=outside), torch.tensor(0.0), make_memory(), "labels"
        )
    with pytest.raises(ValueError, match=r"^phase"):
        OBJECTIVE(outputs, batch, torch.tensor(0.0), make_memory(), "ncr")


@pytest.mark.parametrize("part", ["features", "logits"])
@pytest.mark.parametrize(("row", "is_seen"), [(1, True), (B - 1, False)])  # the last row is padding
@pytest.mark.parametrize("views", [1, 2])
def test_a_teacher_that_is_not_finite_is_seen_in_the_loss_and_not_kept(part, row, is_seen, views):
    outputs, batch = make_batch(views=views)
    getattr(batch.teacher, part)[row::B, 0] = math.inf
    for stage in ("labels", "neighbors"):
        memory = make_memory()
        loss = OBJECTIVE(outputs, batch, torch.tensor(0.0), memory, stage)
        assert loss.total.isfinite().item() == (not is_seen)
        assert all(
            memory[name].isfinite().all()
            for name in ("features", "beliefs", "labels", "center", "shares")
        )


def test_targets_of_no_weight_leave_the_shares_of_the_classes_as_they_are():
    memory = make_memory()
    before = memory["shares"].clone()
    OBJECTIVE._balance(torch.full((B, C), 1e-12, dtype=torch.float64), memory)
    assert torch.equal(memory["shares"], before)


def test_settings_that_cannot_be_meant_are_refused():
    for field in (each.name for each in fields(NeighborVote)):
        with pytest.raises(ValueError, match=field):
            NeighborVote(**{field: -1})
