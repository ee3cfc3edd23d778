"""The loss function that the adapters share: it equals the functional loss, and refuses what it would misunderstand."""

import copy
import importlib
import math
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import nearsay
from nearsay.integrations import NCRCriterion
from nearsay.integrations.libraries import import_library
from nearsay.losses import ELR, NCR, Bank, CrossEntropy

OBJECTIVE = NCR(alpha=0.6, k=5, temperature=3.0)


def small_network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def rows(num=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 6, generator=generator), torch.randint(4, (num,), generator=generator)


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
    criterion = NCRCriterion(network[2], OBJECTIVE)
    found = criterion(network(inputs), labels, indices)
    assert_close(found, wanted, rtol=0, atol=1e-6)
    assert_close(gradients(network, found), gradients(network, wanted))
    assert criterion.terms.keys() == {"cross_entropy", "ncr", "isolated"}
    assert_close(
        0.4 * criterion.terms["cross_entropy"] + 0.6 * criterion.terms["ncr"], wanted.detach()
    )


def test_before_the_start_there_is_only_the_base():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], NCR(alpha=0.6, k=5, temperature=3.0, start_epoch=2))
    for epoch, alpha in ((0, 0), (1.9, 0), (2, 0.6), (5, 0.6)):
        criterion.set_epoch(epoch)
        wanted = functional_loss(network, inputs, labels, alpha=alpha)
        assert_close(criterion(network(inputs), labels), wanted, rtol=0, atol=1e-6)


def test_a_start_that_nobody_announces_is_refused():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], NCR(start_epoch=2))
    with pytest.raises(ValueError, match=r"start_epoch=2 needs criterion.set_epoch\(epoch\)"):
        criterion(network(inputs), labels)


def test_targets_may_be_distributions():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    hard = criterion(network(inputs), labels)
    assert_close(criterion(network(inputs), nearsay.one_hot(labels, 4)), hard)
    mixed = 0.7 * nearsay.one_hot(labels, 4) + 0.3 * nearsay.one_hot(labels.flip(0), 4)
    consistency = criterion.terms["ncr"]
    wanted = 0.4 * cross_entropy(network(inputs), mixed) + 0.6 * consistency
    assert_close(criterion(network(inputs), mixed), wanted)


@pytest.mark.parametrize("unlabeled", [-1, -100])
def test_rows_without_a_label_are_neighbors_but_not_supervised(unlabeled):
    network, (inputs, labels) = small_network(), rows()
    labels[:7] = unlabeled
    criterion = NCRCriterion(network[2], OBJECTIVE)
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
    found = NCRCriterion(network[2], OBJECTIVE)(network(inputs), labels, indices)
    assert_close(found, wanted, rtol=0, atol=1e-6)


def test_without_gradients_it_is_cross_entropy_alone():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], NCR(start_epoch=3, base=CrossEntropy(smoothing=0.1)))
    with torch.no_grad():
        logits = network(inputs)
        assert_close(criterion(logits, labels), cross_entropy(logits, labels))
    with torch.inference_mode():
        assert_close(criterion(network(inputs), labels), cross_entropy(logits, labels))
    assert criterion.terms == {}


def test_half_precision_is_computed_in_single():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
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
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    logits = network(inputs)
    criterion(logits, labels)
    with pytest.raises(
        ValueError, match="nothing has passed the head with gradients since the last loss"
    ):
        criterion(logits, labels)
    network(inputs[:10])  # as one of two replicas would
    with pytest.raises(
        ValueError, match=r"features \(10, 8\) entered the head for 20 rows of logits.*torchrun"
    ):
        criterion(logits, labels)
    network(inputs.view(5, 4, 6))  # as a network for sequences would
    with pytest.raises(ValueError, match=r"features \(5, 4, 8\).*pools before its head"):
        criterion(logits[:5], labels[:5])


def test_logits_of_an_earlier_pass_are_not_taken_for_those_of_the_last():
    """Two views, a pass for each, and a loss of the first: its features would be those of the second."""
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    first = network(inputs)
    network(inputs.flip(0))
    with pytest.raises(
        ValueError, match=r"these logits are not what it made last.*one pass, or .* torch\.no_grad"
    ):
        criterion(first, labels)


@pytest.mark.parametrize(
    "again", [lambda logits: logits, lambda logits: logits[:]], ids=["itself", "view"]
)
@pytest.mark.parametrize("num_between", [0, 1])
def test_logits_that_had_their_loss_are_not_taken_for_those_of_the_last_pass(again, num_between):
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    first = network(inputs)
    criterion(first, labels)
    for _ in range(num_between):
        criterion(network(inputs + 1), labels)
    network(inputs.flip(0))
    with pytest.raises(ValueError, match="these logits are not what it made last"):
        criterion(again(first), labels)
    assert_close(
        criterion(network(inputs), labels),
        functional_loss(network, inputs, labels),
        rtol=0,
        atol=1e-6,
    )


def test_losses_of_pass_after_pass_are_no_doubt_and_keep_nothing_alive(monkeypatch):
    """Accumulated gradients, with all logits kept; nobody looks at values, for which a device would be waited for."""
    monkeypatch.setattr(torch, "equal", None)
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
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
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    inputs.requires_grad_()  # or the checkpoint would warn
    with pytest.raises(
        ValueError, match=r"passed the head with gradients.*activations with use_reentrant=False"
    ):
        criterion(checkpoint(network, inputs, use_reentrant=True), labels)
    for _ in range(2):  # the pass is made again on the way back
        loss = criterion(checkpoint(network, inputs, use_reentrant=False), labels)
        assert_close(
            gradients(network, loss), gradients(network, functional_loss(network, inputs, labels))
        )


@pytest.mark.parametrize("change", [nn.Identity(), torch.Tensor.double, torch.clone])
def test_a_pass_that_no_loss_was_asked_of_does_not_disturb(change):
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    network(inputs.flip(0))
    found = criterion(change(network(inputs)), labels)
    assert_close(found.float(), functional_loss(network, inputs, labels), rtol=0, atol=1e-6)


def test_a_copy_of_the_network_does_not_disturb():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    averaged = copy.deepcopy(network)
    wanted = functional_loss(network, inputs, labels)
    criterion(network(inputs), labels)
    logits = network(inputs)
    averaged(inputs.flip(0))
    assert_close(criterion(logits, labels), wanted, rtol=0, atol=1e-6)


def test_the_network_is_no_part_of_the_state():
    network = small_network()
    assert NCRCriterion(network[2], OBJECTIVE).state_dict() == {}
    assert list(NCRCriterion(network[2], OBJECTIVE).parameters()) == []
    assert set(network.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_memory_is_state_and_needs_indices():
    network, (inputs, labels) = small_network(), rows()
    objective = NCR(alpha=0.6, k=5, base=ELR(), bank=Bank(size=50))
    criterion = NCRCriterion(network[2], objective, num_examples=20)
    with pytest.raises(
        ValueError, match="this objective remembers examples; pass their numbers as indices"
    ):
        criterion(network(inputs), labels)
    for part in torch.arange(20).split(10):
        criterion(network(inputs[part]), labels[part], part)
    other = NCRCriterion(network[2], objective, num_examples=20)
    other.load_state_dict(criterion.state_dict())
    assert other.state["bank.indices"][:20].tolist() == list(range(20))
    assert_close(other.state, criterion.state)
    assert criterion.state["base.averages"].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_of_sixteen_bits_leaves_the_memory_its_digits(dtype):
    """As `precision="bf16-true"` of Lightning: counts beyond 256, and 1 − t of sure predictions, would be rounded."""
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], NCR(k=5, start_epoch="auto", base=ELR()), num_examples=20)
    both = nn.ModuleList([network, criterion])
    kinds = {name: tensor.dtype for name, tensor in criterion.state.items()}
    criterion.state["start.agreement"][0] = torch.tensor([3001.0, 70001.0])
    assert both.to(dtype)[0][0].weight.dtype == dtype
    assert {name: tensor.dtype for name, tensor in criterion.state.items()} == kinds
    assert criterion.state["start.agreement"][0].tolist() == [3001.0, 70001.0]
    criterion.set_epoch(1)
    criterion(network(inputs.to(dtype)), labels, torch.arange(20))
    assert criterion.state["base.averages"].abs().sum() > 0
    assert both.double()[1].state["base.averages"].dtype == torch.float64


@pytest.mark.parametrize("start_epoch", [0, 1])
def test_a_network_may_be_made_before_its_weights(start_epoch):
    """On the device meta, as large ones are."""
    objective, (inputs, labels) = NCR(k=5, start_epoch=start_epoch), rows()
    with torch.device("meta"):
        network = small_network()
        criterion = NCRCriterion(network[2], objective)
    twin = small_network()
    network.to_empty(device="cpu").load_state_dict(twin.state_dict())
    expected = NCRCriterion(twin[2], objective)
    for epoch in range(2):
        for each in (criterion, expected):
            each.set_epoch(epoch)
        assert_close(criterion(network(inputs), labels), expected(twin(inputs), labels))


def test_a_captured_step_reads_the_epoch_where_it_always_is():
    criterion = NCRCriterion(small_network()[2], NCR(k=5))
    place = criterion._now.data_ptr()
    for epoch in (1.0, 2.5):
        criterion.set_epoch(epoch)
        assert (criterion._now.data_ptr(), criterion._now.item()) == (place, epoch)


def test_a_head_that_is_not_linear_is_refused():
    with pytest.raises(ValueError, match=r"head of type Sequential must be the torch.nn.Linear"):
        NCRCriterion(small_network())


@pytest.mark.parametrize(
    ("adapter", "library", "extra"),
    [
        ("lightning", "lightning", "lightning"),
        ("transformers", "transformers", "transformers"),
        ("timm", "timm", "vision"),
    ],
)
def test_a_missing_library_is_one_sentence_with_its_cure(monkeypatch, adapter, library, extra):
    monkeypatch.delitem(sys.modules, f"nearsay.integrations.{adapter}", raising=False)

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("nearsay.integrations.libraries.import_module", missing)
    with pytest.raises(
        ImportError,
        match=rf'^this adapter needs {library}; pip install "\.\[{extra}\]" in the clone$',
    ):
        importlib.import_module(f"nearsay.integrations.{adapter}")


def test_a_library_that_does_not_fit_its_torch_is_said_too(monkeypatch):
    def misfit(name):
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr("nearsay.integrations.libraries.import_module", misfit)
    with pytest.raises(
        ImportError,
        match=r"timm cannot be imported \(operator torchvision::nms does not exist\); let",
    ):
        import_library("timm", "vision")


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32])
def test_class_numbers_may_be_of_any_whole_kind(kind):
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    wanted = criterion(network(inputs), labels)
    assert_close(criterion(network(inputs), labels.to(kind)), wanted)


def test_a_pass_without_a_loss_does_not_keep_the_network_from_being_copied():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    network(inputs)
    twin, twin_criterion = copy.deepcopy((network, criterion))
    assert_close(twin_criterion(twin(inputs), labels), criterion(network(inputs), labels))


def test_a_head_may_be_called_by_keyword():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    logits = network[2](input=network[:2](inputs))
    assert_close(
        criterion(logits, labels), functional_loss(network, inputs, labels), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (NCR(base=ELR(ramp=2.0)), "ramp=2.0"),
        (ELR(ramp=1.0), "ramp=1.0"),
        (NCR(base=NCR(start_epoch=3)), "start_epoch=3"),
    ],
)
def test_a_ramp_that_nobody_announces_is_refused(objective, name):
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], objective, num_examples=20)
    with pytest.raises(ValueError, match=f"{name} needs criterion.set_epoch"):
        criterion(network(inputs), labels, torch.arange(20))
    criterion.set_epoch(0)
    assert criterion(network(inputs), labels, torch.arange(20)).isfinite()


def test_objectives_without_a_start_are_taken():
    network, (inputs, labels) = small_network(), rows()
    assert_close(
        NCRCriterion(network[2], CrossEntropy())(network(inputs), labels),
        cross_entropy(network(inputs), labels),
    )


def test_an_automatic_start_needs_no_indices():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], NCR(k=5, start_epoch="auto"))
    criterion.set_epoch(0)
    assert_close(criterion(network(inputs), labels), cross_entropy(network(inputs), labels))
    assert "agreement" in criterion.terms


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"objective": NCR(base=ELR())},
            "this objective remembers every example; give num_examples=",
        ),
        ({"objective": NCR(bank=Bank(kind="examples"))}, "this objective remembers every example"),
        ({"objective": NCR}, "objective=<class .* must be an objective, such as NCR"),
        ({"objective": "ncr"}, "objective='ncr' must be an objective"),
        ({"num_examples": -3}, "num_examples=-3 must be a whole number of at least 0"),
        ({"num_examples": 2.5}, "num_examples=2.5 must be a whole number"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(choices, message):
    with pytest.raises(ValueError, match=message):
        NCRCriterion(small_network()[2], **choices)


def test_lists_are_refused_by_name():
    network, (inputs, labels) = small_network(), rows()
    criterion = NCRCriterion(network[2], OBJECTIVE)
    with pytest.raises(ValueError, match=r"labels of type list must be a torch\.Tensor"):
        criterion(network(inputs), labels.tolist())
    with pytest.raises(ValueError, match=r"indices of type list must be a torch\.Tensor"):
        criterion(network(inputs), labels, list(range(20)))


def test_all_that_a_network_returns_is_not_taken_for_its_logits():
    network, (inputs, labels) = small_network(), rows()
    with pytest.raises(
        ValueError,
        match=r"logits of type dict must be a torch\.Tensor; take it out .* outputs\.logits",
    ):
        NCRCriterion(network[2], OBJECTIVE)({"logits": network(inputs)}, labels)


def test_a_copy_of_the_loss_alone_says_what_it_misses():
    network, (inputs, labels) = small_network(), rows()
    alone = copy.deepcopy(NCRCriterion(network[2], OBJECTIVE))
    with pytest.raises(
        ValueError, match=r"nothing has passed the head with gradients.*copy network and loss"
    ):
        alone(network(inputs), labels)


def test_a_second_derivative_is_refused_with_what_works():
    network, (inputs, labels) = small_network(), rows()
    loss = NCRCriterion(network[2], OBJECTIVE)(network(inputs), labels)
    with pytest.raises(
        RuntimeError, match=r'nearsay.ncr\(..., implementation="plain"\) in place of NCR'
    ):
        loss.backward(create_graph=True)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # the compiler's own looking around
@pytest.mark.parametrize(
    ("objective", "num_stages"),
    [
        (NCR(k=5, start_epoch=3), 2),
        (NCR(k=5, start_epoch="auto"), 2),
        (NCR(k=5, base=ELR(ramp=4.0)), 1),
        (NCR(k=5), 1),
    ],
)
def test_a_compiled_step_is_compiled_once_for_a_stage_and_not_for_an_epoch(objective, num_stages):
    """Else torch gives up after eight epochs, and the rest of the training is not compiled at all."""
    network, twin, (inputs, labels) = small_network(), small_network(), rows()
    criterion, plain = (
        NCRCriterion(each[2], objective, num_examples=20) for each in (network, twin)
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


@pytest.mark.parametrize("epoch", [None, "first", math.nan, -1])
def test_an_epoch_that_is_none_is_refused(epoch):
    criterion = NCRCriterion(nn.Linear(3, 2), NCR(start_epoch=2))
    with pytest.raises(ValueError, match=rf"epoch={epoch!r} must be a number of at least 0"):
        criterion.set_epoch(epoch)
