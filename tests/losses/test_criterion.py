"""NCRLoss equals the functional loss in both ways to call it, and refuses what it cannot mean."""

import copy
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import nearsay
from nearsay.losses import ELR, GJS, NCR, Bank, CrossEntropy, NCRLoss, NeighborVote

OBJECTIVE = NCR(alpha=0.6, k=5, temperature=3.0)


def small_network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def rows(num=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 6, generator=generator), torch.randint(4, (num,), generator=generator)


def case(objective=OBJECTIVE, **choices):
    network, (inputs, labels) = small_network(), rows()
    return network, inputs, labels, NCRLoss(head=network[2], objective=objective, **choices)


def functional_loss(network, inputs, labels, indices=None, *, alpha=0.6):
    features = network[:2](inputs)
    logits = network[2](features)
    consistency = nearsay.ncr(logits, features, indices, k=5, temperature=3.0)
    return (1 - alpha) * cross_entropy(logits, labels) + alpha * consistency


def gradients(network, loss):
    return torch.autograd.grad(loss, list(network.parameters()))


@pytest.mark.parametrize("with_indices", [False, True])
def test_loss_and_gradients_are_those_of_the_functions(with_indices):
    network, (inputs, labels) = small_network(), rows()
    indices = torch.arange(20) // 2 if with_indices else None  # every example twice
    wanted = functional_loss(network, inputs, labels, indices)
    criterion = NCRLoss(head=network[2], objective=OBJECTIVE)
    found = criterion(network(inputs), labels, indices)
    assert_close(found, wanted, rtol=0, atol=1e-6)
    assert_close(gradients(network, found), gradients(network, wanted))
    assert criterion.terms.keys() == {"cross_entropy", "ncr", "isolated"}
    assert_close(
        0.4 * criterion.terms["cross_entropy"] + 0.6 * criterion.terms["ncr"], wanted.detach()
    )


def test_before_the_start_there_is_only_the_base():
    network, inputs, labels, criterion = case(NCR(alpha=0.6, k=5, temperature=3.0, start_epoch=2))
    for epoch, alpha in ((0, 0), (1.9, 0), (2, 0.6), (5, 0.6)):
        criterion.set_epoch(epoch)
        wanted = functional_loss(network, inputs, labels, alpha=alpha)
        assert_close(criterion(network(inputs), labels), wanted, rtol=0, atol=1e-6)


def test_targets_may_be_distributions():
    network, inputs, labels, criterion = case()
    hard = criterion(network(inputs), labels)
    assert_close(criterion(network(inputs), nearsay.one_hot(labels, 4)), hard)
    mixed = 0.7 * nearsay.one_hot(labels, 4) + 0.3 * nearsay.one_hot(labels.flip(0), 4)
    consistency = criterion.terms["ncr"]
    wanted = 0.4 * cross_entropy(network(inputs), mixed) + 0.6 * consistency
    assert_close(criterion(network(inputs), mixed), wanted)


def test_rows_without_a_label_are_neighbors_but_not_supervised():
    network, (inputs, labels) = small_network(), rows()
    labels[:7], labels[3] = -1, -100
    criterion = NCRLoss(head=network[2], objective=OBJECTIVE)
    total = criterion(network(inputs), labels)
    features = network[:2](inputs)
    logits = network[2](features)
    wanted = 0.4 * cross_entropy(logits[7:], labels[7:]) + 0.6 * nearsay.ncr(
        logits, features, k=5, temperature=3.0
    )
    assert_close(total, wanted, rtol=0, atol=1e-6)


def test_padding_has_no_part_in_the_loss():
    network, (inputs, labels) = small_network(), rows()
    wanted = functional_loss(network, inputs[:15], labels[:15])
    indices = torch.arange(20)
    indices[15:], labels[15:] = -1, -1
    found = NCRLoss(head=network[2], objective=OBJECTIVE)(network(inputs), labels, indices)
    assert_close(found, wanted, rtol=0, atol=1e-6)


def test_without_gradients_it_is_cross_entropy_alone():
    network, inputs, labels, criterion = case(NCR(start_epoch=3, base=CrossEntropy(smoothing=0.1)))
    with torch.no_grad():
        logits = network(inputs)
        assert_close(criterion(logits, labels), cross_entropy(logits, labels))
    with torch.inference_mode():
        assert_close(criterion(network(inputs), labels), cross_entropy(logits, labels))
    assert criterion.terms == {}


def test_half_precision_is_computed_in_single():
    network, inputs, labels, criterion = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = network[:2](inputs)
        logits = network[2](features)
        loss = criterion(network(inputs), labels)
    assert features.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    features, logits = features.float(), logits.float()
    consistency = nearsay.ncr(logits, features, k=5, temperature=3.0)
    assert_close(loss, 0.4 * cross_entropy(logits, labels) + 0.6 * consistency, rtol=0, atol=1e-6)
    assert all(part.abs().sum() > 0 for part in gradients(network, loss))


def test_features_are_used_once_and_belong_to_the_rows():
    network, inputs, labels, criterion = case()
    logits = network(inputs)
    criterion(logits, labels)
    with pytest.raises(ValueError, match=r"^head"):
        criterion(logits, labels)
    network(inputs[:10])  # as one of two replicas would
    with pytest.raises(ValueError, match=r"^features .*10, 8"):
        criterion(logits, labels)
    network(inputs.view(5, 4, 6))  # as a network for sequences would
    with pytest.raises(ValueError, match=r"^features .*5, 4, 8"):
        criterion(logits[:5], labels[:5])


def test_logits_of_an_earlier_pass_are_not_taken_for_those_of_the_last():
    """After a pass for each of two views, the features are those of the second."""
    network, inputs, labels, criterion = case()
    first = network(inputs)
    network(inputs.flip(0))
    with pytest.raises(ValueError, match=r"^logits"):
        criterion(first, labels)


@pytest.mark.parametrize(
    "again", [lambda logits: logits, lambda logits: logits[:]], ids=["itself", "view"]
)
@pytest.mark.parametrize("num_between", [0, 1])
def test_logits_that_had_their_loss_are_not_taken_for_those_of_the_last_pass(again, num_between):
    network, inputs, labels, criterion = case()
    first = network(inputs)
    criterion(first, labels)
    for _ in range(num_between):
        criterion(network(inputs + 1), labels)
    network(inputs.flip(0))
    with pytest.raises(ValueError, match=r"^logits"):
        criterion(again(first), labels)
    assert_close(
        criterion(network(inputs), labels),
        functional_loss(network, inputs, labels),
        rtol=0,
        atol=1e-6,
    )


def test_losses_of_pass_after_pass_are_no_doubt_and_keep_nothing_alive(monkeypatch):
    """Accumulated gradients, with all logits kept; no values are compared."""
    monkeypatch.setattr(torch, "equal", None)
    network, inputs, labels, criterion = case()
    kept = []
    for part in torch.arange(20).split(10):
        kept.append(network(inputs[part])[:, :])
        criterion(kept[-1], labels[part]).backward()
    seen = weakref.ref(kept[0]._base)
    del kept
    assert seen() is None
    twin = pickle.loads(pickle.dumps(nn.ModuleList([network, criterion])))
    assert_close(twin[1](twin[0](inputs), labels), criterion(network(inputs), labels))


def test_a_head_in_a_reentrant_checkpoint_is_refused_with_what_works():
    network, inputs, labels, criterion = case()
    inputs.requires_grad_()  # or the checkpoint would warn
    with pytest.raises(ValueError, match=r"^head .*use_reentrant=False"):
        criterion(checkpoint(network, inputs, use_reentrant=True), labels)
    for _ in range(2):  # the pass is made again on the way back
        loss = criterion(checkpoint(network, inputs, use_reentrant=False), labels)
        assert_close(
            gradients(network, loss), gradients(network, functional_loss(network, inputs, labels))
        )


@pytest.mark.parametrize("change", [nn.Identity(), torch.Tensor.double, torch.clone])
def test_a_pass_that_no_loss_was_asked_of_does_not_disturb(change):
    network, inputs, labels, criterion = case()
    network(inputs.flip(0))
    found = criterion(change(network(inputs)), labels)
    assert_close(found.float(), functional_loss(network, inputs, labels), rtol=0, atol=1e-6)


def test_a_copy_of_the_network_does_not_disturb():
    network, inputs, labels, criterion = case()
    averaged = copy.deepcopy(network)
    wanted = functional_loss(network, inputs, labels)
    criterion(network(inputs), labels)
    logits = network(inputs)
    averaged(inputs.flip(0))
    assert_close(criterion(logits, labels), wanted, rtol=0, atol=1e-6)


def test_the_network_is_no_part_of_the_state():
    network = small_network()
    assert NCRLoss(head=network[2], objective=OBJECTIVE).state_dict() == {}
    assert list(NCRLoss(head=network[2], objective=OBJECTIVE).parameters()) == []
    assert set(network.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_memory_is_state_and_needs_indices():
    network, (inputs, labels) = small_network(), rows()
    objective = NCR(alpha=0.6, k=5, base=ELR(), bank=Bank(size=50))
    criterion = NCRLoss(head=network[2], objective=objective, num_examples=20)
    with pytest.raises(ValueError, match=r"^indices"):
        criterion(network(inputs), labels)
    for part in torch.arange(20).split(10):
        criterion(network(inputs[part]), labels[part], part)
    other = NCRLoss(head=network[2], objective=objective, num_examples=20)
    other.load_state_dict(criterion.state_dict())
    assert other.state["bank.indices"][:20].tolist() == list(range(20))
    assert_close(other.state, criterion.state)
    assert criterion.state["base.averages"].abs().sum() > 0


def test_a_network_of_sixteen_bits_leaves_the_memory_its_digits():
    """As `precision="bf16-true"` of Lightning: counts beyond 256 would be rounded."""
    network, inputs, labels, criterion = case(
        NCR(k=5, start_epoch="auto", base=ELR()), num_examples=20
    )
    both = nn.ModuleList([network, criterion])
    kinds = {name: tensor.dtype for name, tensor in criterion.state.items()}
    criterion.state["start.agreement"][0] = torch.tensor([3001.0, 70001.0])
    assert both.bfloat16()[0][0].weight.dtype == torch.bfloat16
    assert {name: tensor.dtype for name, tensor in criterion.state.items()} == kinds
    assert criterion.state["start.agreement"][0].tolist() == [3001.0, 70001.0]
    criterion.set_epoch(1)
    criterion(network(inputs.bfloat16()), labels, torch.arange(20))
    assert criterion.state["base.averages"].abs().sum() > 0
    assert both.double()[1].state["base.averages"].dtype == torch.float64


def test_a_network_may_be_made_before_its_weights():
    """On the device meta, as large ones are."""
    objective, (inputs, labels) = NCR(k=5, start_epoch=1), rows()
    with torch.device("meta"):
        network = small_network()
        criterion = NCRLoss(head=network[2], objective=objective)
    twin = small_network()
    network.to_empty(device="cpu").load_state_dict(twin.state_dict())
    expected = NCRLoss(head=twin[2], objective=objective)
    for epoch in range(2):
        for each in (criterion, expected):
            each.set_epoch(epoch)
        assert_close(criterion(network(inputs), labels), expected(twin(inputs), labels))


def test_a_head_that_is_not_linear_is_refused():
    with pytest.raises(ValueError, match=r"^head"):
        NCRLoss(head=small_network())


def test_a_pass_without_a_loss_does_not_keep_the_network_from_being_copied():
    network, inputs, labels, criterion = case()
    network(inputs)
    twin, twin_criterion = copy.deepcopy((network, criterion))
    assert_close(twin_criterion(twin(inputs), labels), criterion(network(inputs), labels))


def test_a_head_may_be_called_by_keyword():
    network, inputs, labels, criterion = case()
    logits = network[2](input=network[:2](inputs))
    assert_close(
        criterion(logits, labels), functional_loss(network, inputs, labels), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (NCR(base=ELR(ramp=2.0)), "ramp=2.0"),
        (ELR(ramp=1.0), "ramp=1.0"),
        (NCR(start_epoch=2), "start_epoch=2"),
        (NCR(base=NCR(start_epoch=3)), "start_epoch=3"),
    ],
)
def test_a_ramp_that_nobody_announces_is_refused(objective, name):
    network, inputs, labels, criterion = case(objective, num_examples=20)
    with pytest.raises(ValueError, match=name):
        criterion(network(inputs), labels, torch.arange(20))
    criterion.set_epoch(0)
    assert criterion(network(inputs), labels, torch.arange(20)).isfinite()


def test_an_automatic_start_needs_no_indices():
    network, inputs, labels, criterion = case(NCR(k=5, start_epoch="auto"))
    criterion.set_epoch(0)
    assert_close(criterion(network(inputs), labels), cross_entropy(network(inputs), labels))
    assert "agreement" in criterion.terms


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ({"objective": NCR(base=ELR())}, "num_examples"),
        ({"bank": Bank(kind="examples")}, "num_examples"),
        ({"num_examples": -3}, "num_examples"),
        ({"objective": "ncr"}, "objective"),
        ({"objective": ELR(), "num_examples": 20, "k": 5}, "objective"),
        ({"num_classes": 4}, "num_classes"),
        ({"k": 0}, "k"),
        ({"base": ELR}, "base"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(choices, field):
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        NCRLoss(head=small_network()[2], **choices)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # the compiler's own looking around
@pytest.mark.parametrize(
    ("objective", "num_stages"),
    [(NCR(k=5, start_epoch="auto"), 2), (NCR(k=5, base=ELR(ramp=4.0)), 1)],
)
def test_a_compiled_step_is_compiled_once_for_a_stage_and_not_for_an_epoch(objective, num_stages):
    """Otherwise torch gives up after eight epochs, and the rest is not compiled at all."""
    network, twin, (inputs, labels) = small_network(), small_network(), rows()
    criterion, plain = (
        NCRLoss(head=each[2], objective=objective, num_examples=20) for each in (network, twin)
    )
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()  # or the limit on recompilations counts all tests together
    step = torch.compile(
        lambda: criterion(network(inputs), labels, torch.arange(20)),
        backend=count,
        fullgraph=True,
        dynamic=False,
    )
    for epoch in range(10):
        for each in (criterion, plain):
            each.set_epoch(epoch)
        assert_close(step(), plain(twin(inputs), labels, torch.arange(20)))
    assert len(graphs) == num_stages


# Features given by hand: loss(logits, features, labels, indices)


def outputs_of(network, inputs):
    features = network[:2](inputs)
    return network[2](features), features


def test_features_may_be_given_in_the_call():
    network, (inputs, labels) = small_network(), rows()
    indices = torch.arange(20) // 2
    wanted = functional_loss(network, inputs, labels, indices)
    loss = NCRLoss(alpha=0.6, k=5, temperature=3.0)
    found = loss(*outputs_of(network, inputs), labels, indices)
    assert_close(found, wanted, rtol=0, atol=1e-6)
    assert_close(gradients(network, found), gradients(network, wanted))
    logits, features = outputs_of(network, inputs)
    assert_close(loss(logits, features=features, labels=labels, indices=indices), wanted)


def test_both_ways_have_the_same_state_step_by_step():
    network, (inputs, labels) = small_network(), rows()
    choices = {"k": 5, "base": ELR(), "bank": Bank(size=30), "num_examples": 20, "start_epoch": 1}
    by_head, by_hand = NCRLoss(head=network[2], **choices), NCRLoss(**choices)
    assert by_hand.state == {}
    for epoch in range(3):
        for loss in (by_head, by_hand):
            loss.set_epoch(epoch)
        for part in torch.arange(20).split(10):
            wanted = by_head(network(inputs[part]), labels[part], part)
            found = by_hand(*outputs_of(network, inputs[part]), labels[part], part)
            assert_close(found, wanted)
    assert_close(by_hand.state, by_head.state)
    assert by_hand.state_dict().keys() == by_head.state_dict().keys()


def test_known_sizes_make_the_state_at_once():
    loss = NCRLoss(base=ELR(), num_examples=20, num_classes=4, num_features=8)
    assert loss.state["base.averages"].shape == (21, 4)
    assert NCRLoss(start_epoch="auto").state["start.agreement"].shape == (1024, 2)


def test_a_fresh_loss_takes_a_saved_state_before_its_first_call():
    network, (inputs, labels) = small_network(), rows()
    choices = {"k": 5, "base": ELR(), "bank": Bank(size=30), "num_examples": 20}
    loss, fresh = NCRLoss(**choices), NCRLoss(**choices)
    for part in torch.arange(20).split(10):
        loss(*outputs_of(network, inputs[part]), labels[part], part)
    wrapped = nn.ModuleDict({"loss": fresh})
    wrapped.load_state_dict(nn.ModuleDict({"loss": loss}).state_dict())
    assert_close(fresh.state, loss.state)
    results = []
    for each in (loss, copy.deepcopy(loss), fresh):
        results.append(each(*outputs_of(network, inputs), labels, torch.arange(20)))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])
    assert_close(fresh.state, loss.state)


def test_a_state_that_lacks_a_part_is_not_loaded():
    network, (inputs, labels) = small_network(), rows()
    loss = NCRLoss(bank=Bank(size=30))
    loss(*outputs_of(network, inputs), labels, torch.arange(20))
    state = loss.state_dict()
    del state["bank_cursor"]
    with pytest.raises(RuntimeError, match="bank_"):
        NCRLoss(bank=Bank(size=30)).load_state_dict(state)


@pytest.mark.parametrize("objective", [GJS(), lambda logits, targets: -(targets * logits).sum(1)])
def test_any_objective_and_any_formula_fits(objective):
    network, (inputs, labels) = small_network(), rows()
    loss = NCRLoss(objective=objective)
    loss(*outputs_of(network, inputs), labels).backward()
    assert network[0].weight.grad.abs().sum() > 0


def test_a_batch_brings_mixup_views_and_a_teacher():
    network, (inputs, labels) = small_network(), rows()
    batch = nearsay.Batch(
        inputs=inputs, targets=nearsay.one_hot(labels, 4), indices=torch.arange(20)
    )
    batch = nearsay.Mixup()(batch, seed=0, epoch=0)
    loss = NCRLoss(k=5, mask_partners=True)
    logits, features = outputs_of(network, batch.inputs)
    found = loss(logits, features, batch)
    outputs, zero = nearsay.Outputs(features, logits), torch.tensor(0.0)
    objective = NCR(k=5, mask_partners=True)
    wanted = objective(outputs, batch, zero, {}, objective.phase(0.0, {})).total
    assert found == wanted
    with torch.no_grad():
        teacher = nearsay.Outputs(features.detach(), logits.detach())
    batch = nearsay.Batch(
        inputs=inputs, targets=nearsay.one_hot(labels, 4), indices=torch.arange(20), teacher=teacher
    )
    vote = NCRLoss(objective=NeighborVote(k=5, start_epoch=0), num_examples=20)
    assert vote(logits, features, batch).isfinite()


def test_a_step_with_features_in_the_call_is_compiled_whole():
    network, (inputs, labels) = small_network(), rows()
    loss, plain = (
        NCRLoss(k=5, base=ELR(), num_examples=20, num_classes=4, num_features=8) for _ in range(2)
    )

    def step():
        return loss(*outputs_of(network, inputs), labels, torch.arange(20))

    torch.compiler.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    for _ in range(2):
        assert_close(compiled(), plain(*outputs_of(network, inputs), labels, torch.arange(20)))


def test_calls_that_cannot_be_meant_are_refused():
    network, inputs, labels, criterion = case()
    logits, features = outputs_of(network, inputs)
    with pytest.raises(ValueError, match=r"^labels"):
        criterion(network(inputs), labels.tolist())
    with pytest.raises(ValueError, match=r"^indices"):
        criterion(network(inputs), labels, list(range(20)))
    with pytest.raises(ValueError, match=r"^logits"):
        criterion({"logits": network(inputs)}, labels)
    with pytest.raises(TypeError, match="logits, labels, indices"):
        criterion(logits, features, labels, torch.arange(20))
    with pytest.raises(ValueError, match=r"^head"):
        copy.deepcopy(criterion)(network(inputs), labels)
    for wrong, named in (((logits, labels), {}), ((logits, features), {"features": features})):
        with pytest.raises(TypeError, match="logits, features, labels, indices"):
            NCRLoss()(*wrong, **named)
    for epoch in (None, math.nan, -1):
        with pytest.raises(ValueError, match=r"^epoch"):
            criterion.set_epoch(epoch)


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (torch.zeros(7, dtype=torch.int64), r"\(7,\)"),
        (torch.zeros(8), r"\(8,\).*long\(\)"),
        (torch.zeros(8, 3, dtype=torch.int64), r"\(8, 3\).*float\(\)"),
        (torch.zeros(8, 6), r"\(8, 6\)"),
    ],
)
def test_labels_of_a_wrong_shape_are_named_and_shown_as_they_were_given(labels, shown):
    logits, features = torch.zeros(8, 3), torch.zeros(8, 6)
    with pytest.raises(ValueError, match=f"labels .*{shown}"):
        NCRLoss(k=3)(logits, features, labels)


def test_logits_without_classes_are_refused():
    with pytest.raises(ValueError, match="logits"):
        NCRLoss(k=3)(torch.zeros(8), torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64))
