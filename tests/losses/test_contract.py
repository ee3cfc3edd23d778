"""What every objective promises; a new one is tested by being listed."""

from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest
import torch
from torch.testing import assert_close

from nearsay.batch import PADDING, Batch, Loss, Outputs
from nearsay.losses.base import LossFunction, as_objective
from nearsay.losses.bootstrap import Bootstrap
from nearsay.losses.cross_entropy import CrossEntropy
from nearsay.losses.elr import ELR
from nearsay.losses.gjs import GJS
from nearsay.losses.memory_bank import Bank
from nearsay.losses.ncr import NCR
from nearsay.losses.neighbor_vote import NeighborVote


@dataclass(frozen=True)
class SymmetricCrossEntropy:
    """A formula as a user would write it (Wang et al. 2019), which knows nothing of padding."""

    alpha: float = 0.1
    beta: float = 1.0

    def __call__(self, logits, targets):
        log_p = logits.log_softmax(dim=1)
        reverse = -(log_p.exp() * targets.clamp(min=1e-4).log()).sum(dim=1)
        return -self.alpha * (targets * log_p).sum(dim=1) + self.beta * reverse


# The loss of a row does not depend on other rows, and terms sum to the total.
ROW_BY_ROW = [
    CrossEntropy(),
    CrossEntropy(smoothing=0.2),
    Bootstrap(),
    Bootstrap(alpha=0.3, kind="hard"),
    Bootstrap(alpha=0.8, temperature=2.0, stop_gradient=True),
    ELR(),
    ELR(beta=0.0, weight=0.5),
    GJS(),
    GJS(label_weight=0.9),
    as_objective(SymmetricCrossEntropy(beta=0.5)),
]
OBJECTIVES = [
    *ROW_BY_ROW,
    NCR(k=2),
    NCR(alpha=0.5, k=None, variant="released", base=ELR()),
    NCR(alpha=0.3, k=3, temperature=0.5, base=Bootstrap()),
    NCR(alpha=0.5, k=3, base=GJS(), bank=Bank(size=15)),
    NCR(alpha=0.5, k=3, base=ELR(), bank=Bank(kind="examples"), mask_partners=True),
    NCR(k=2, base=SymmetricCrossEntropy()),
    NeighborVote(k=3, start_epoch=0, threshold=0.3),
]
# Whose gradient is meant to be their slope.
SMOOTH = [o for o in OBJECTIVES if not getattr(o, "stop_gradient", False)]
# The terms that need labels.
SUPERVISED = ("cross_entropy", "bootstrap", "gjs", "symmetric_cross_entropy")

B, C, D, N = 6, 5, 3, 20

every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
each_number_of_views = pytest.mark.parametrize("views", [1, 2])


def make_case(views=1, dtype=torch.float64):
    """Six examples: a plain label, soft ones, one of weight ½ and one unlabeled."""
    generator = torch.Generator().manual_seed(6)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = random(B, C).softmax(dim=1)
    targets[0] = torch.eye(C)[3]
    targets[2] *= 0.5
    targets[4] = 0
    batch = Batch(
        inputs=torch.zeros(views * B, 1),
        targets=targets.repeat(views, 1),
        indices=torch.tensor([7, 0, 19, 3, 4, 11]).repeat(views),
        views=views,
        teacher=Outputs(random(views * B, D), random(views * B, C)),
    )
    return Outputs(random(views * B, D), 2 * random(views * B, C)), batch


def select(outputs, batch, examples):
    """These examples, in this order, in every view."""
    rows = torch.cat(
        [
            torch.as_tensor(examples) + view * (len(batch.indices) // batch.views)
            for view in range(batch.views)
        ]
    )
    chosen = replace(
        batch,
        inputs=batch.inputs[rows],
        targets=batch.targets[rows],
        indices=batch.indices[rows],
        teacher=Outputs(*(tensor[rows] for tensor in batch.teacher)),
    )
    return Outputs(*(tensor[rows] for tensor in outputs)), chosen


def fresh_memory(objective):
    """As in the middle of training: filled, and the same at every call."""
    memory = objective.init_state(N, C, D)
    for tensor in memory.values():
        if tensor.is_floating_point() and tensor.ndim == 2:
            rows = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(8))
            tensor[:-1] = torch.nn.functional.normalize(rows, p=1, dim=1)[:-1]
    return memory


def call(objective, outputs, batch, memory=None):
    memory = fresh_memory(objective) if memory is None else memory
    return objective(outputs, batch, torch.tensor(3.0), memory, objective.phase(3.0, memory))


def call_with_gradients(objective, outputs, batch):
    leaves = Outputs(*(tensor.detach().clone().requires_grad_() for tensor in outputs))
    loss = call(objective, leaves, batch)
    return loss, torch.autograd.grad(loss.total, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("objective", ROW_BY_ROW, ids=repr)
@each_number_of_views
def test_the_total_is_the_sum_of_detached_terms(objective, views):
    loss, _ = call_with_gradients(objective, *make_case(views))
    assert isinstance(loss, Loss)
    assert loss.total.shape == ()
    assert loss.total.requires_grad
    for term in loss.terms.values():
        assert term.shape == ()
        assert not term.requires_grad
    assert_close(torch.stack(list(loss.terms.values())).sum(), loss.total.detach())


@pytest.mark.parametrize("objective", SMOOTH, ids=repr)
@each_number_of_views
def test_gradients_of_the_total_are_right(objective, views):
    outputs, batch = make_case(views)
    memory = {
        name: t.double() if t.is_floating_point() else t
        for name, t in fresh_memory(objective).items()
    }

    def total(logits, features):
        own = {name: t.clone() for name, t in memory.items()}
        return call(objective, Outputs(features, logits), batch, own).total

    leaves = outputs.logits.requires_grad_(), outputs.features.requires_grad_()
    # The formulas' own tests are thorough.
    assert torch.autograd.gradcheck(total, leaves, fast_mode=True)


@pytest.mark.parametrize(
    "objective", [o for o in OBJECTIVES if not isinstance(o, NeighborVote)], ids=repr
)
@each_number_of_views
def test_unlabeled_rows_change_nothing_in_the_supervised_mean(objective, views):
    outputs, batch = make_case(views)
    whole = call(objective, outputs, batch)
    labeled = call(objective, *select(outputs, batch, [0, 1, 2, 3, 5]))
    names = [name for name in whole.terms if name in SUPERVISED]
    assert names
    for name in names:
        assert_close(whole.terms[name], labeled.terms[name])


@every_objective
@each_number_of_views
def test_a_batch_without_labels_has_a_finite_loss_and_gradient(objective, views):
    outputs, batch = make_case(views)
    batch = replace(batch, targets=torch.zeros_like(batch.targets))
    loss, gradients = call_with_gradients(objective, outputs, batch)
    assert torch.isfinite(loss.total)
    for gradient in gradients:
        assert torch.isfinite(gradient).all()
    for name in SUPERVISED:
        assert loss.terms.get(name, 0) == 0


@every_objective
@each_number_of_views
def test_a_batch_of_padding_alone_has_no_loss(objective, views):
    outputs, batch = make_case(views)
    batch = replace(batch, indices=torch.full_like(batch.indices, PADDING))
    loss, gradients = call_with_gradients(objective, outputs, batch)
    assert loss.total == 0
    for gradient in gradients:
        assert (gradient == 0).all()


@every_objective
@each_number_of_views
def test_padding_changes_nothing_whatever_it_holds(objective, views):
    outputs, batch = make_case(views)
    real = torch.tensor([0, 1, 2, 3, 4])
    batch.indices.view(views, B)[:, 5] = PADDING
    for tensor in (*outputs, *batch.teacher):
        tensor.view(views, B, -1)[:, 5] = torch.nan
    batch.targets.view(views, B, C)[:, 5] = 1e3
    loss, gradients = call_with_gradients(objective, outputs, batch)
    expected, expected_gradients = call_with_gradients(objective, *select(outputs, batch, real))
    assert_close(loss, expected)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        gradient = gradient.view(views, B, -1)
        assert_close(gradient[:, real].flatten(0, 1), wanted)
        assert (gradient[:, 5] == 0).all()


@every_objective
@each_number_of_views
def test_memory_is_updated_in_place_and_not_by_padding(objective, views):
    outputs, batch = make_case(views)
    memory = fresh_memory(objective)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in memory.items()}
    batch = replace(batch, indices=torch.full_like(batch.indices, PADDING))
    call(objective, outputs, batch, memory)
    for name, (address, values) in before.items():
        assert memory[name].data_ptr() == address
        assert_close(memory[name], values)


@every_objective
def test_sixteen_bit_inputs_are_computed_in_float32(objective):
    dtype = torch.bfloat16
    outputs, batch = make_case(2, torch.float32)
    outputs, teacher = (
        Outputs(*(tensor.to(dtype) for tensor in pair)) for pair in (outputs, batch.teacher)
    )
    batch = replace(batch, targets=batch.targets.to(dtype), teacher=teacher)
    full = replace(
        batch,
        targets=batch.targets.float(),
        teacher=Outputs(*(tensor.float() for tensor in teacher)),
    )
    loss, gradients = call_with_gradients(objective, outputs, batch)
    expected, wanted = call_with_gradients(
        objective, Outputs(*(tensor.float() for tensor in outputs)), full
    )
    assert loss.total.dtype == torch.float32
    assert_close(loss, expected)
    for gradient, reference in zip(gradients, wanted, strict=True):
        # A sum of two losses rounds two gradients to 16 bits and adds them.
        assert_close(gradient, reference.to(dtype), rtol=0.016, atol=1e-3)


@every_objective
def test_autocast_does_not_touch_it(objective):
    outputs, batch = make_case(2, torch.float32)
    expected = call(objective, outputs, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(objective, outputs, batch)
    assert loss.total.dtype == torch.float32
    assert_close(loss, expected)


@every_objective
@each_number_of_views
def test_the_order_of_examples_does_not_matter(objective, views):
    outputs, batch = make_case(views)
    order = torch.tensor([3, 5, 0, 4, 1, 2])
    loss, gradients = call_with_gradients(objective, outputs, batch)
    shuffled, shuffled_gradients = call_with_gradients(objective, *select(outputs, batch, order))
    assert_close(shuffled, loss)
    for gradient, other in zip(gradients, shuffled_gradients, strict=True):
        assert_close(other.view(views, B, -1), gradient.view(views, B, -1)[:, order])


@pytest.mark.parametrize(
    "objective", [*OBJECTIVES, NCR(k=3, reject=0.5), NCR(k=3, start_epoch="auto")], ids=repr
)
@each_number_of_views
def test_a_batch_of_no_rows_costs_nothing_and_is_not_remembered(objective, views):
    outputs, batch = select(*make_case(views), torch.arange(0))
    memory = fresh_memory(objective)
    for epoch in (0.0, 3.0):
        loss = objective(
            outputs, batch, torch.tensor(epoch), memory, objective.phase(epoch, memory)
        )
        assert loss.total == 0
    assert_close(memory, fresh_memory(objective))


@pytest.mark.parametrize(
    "objective", [ELR(ramp=2.0), NCR(start_epoch="auto"), NCR(base=ELR(ramp=2.0))], ids=repr
)
def test_an_epoch_that_is_no_tensor_is_refused_before_anything_is_remembered(objective):
    outputs, batch = make_case()
    memory = objective.init_state(N, C, D)
    with pytest.raises(ValueError, match="epoch"):
        objective(outputs, batch, 1.0, memory, objective.phase(1.0, memory))
    assert_close(memory, objective.init_state(N, C, D))


@every_objective
def test_what_stayed_on_another_device_is_named(objective):
    outputs, batch = make_case()
    memory = objective.init_state(N, C, D)
    phase = objective.phase(3.0, memory)
    for name in ("features", "targets", "indices"):
        wrong_outputs, wrong_batch = outputs, batch
        if name == "features":
            wrong_outputs = outputs._replace(features=outputs.features.to("meta"))
        else:
            wrong_batch = replace(batch, **{name: getattr(batch, name).to("meta")})
        with pytest.raises(ValueError, match=rf"{name}.*meta"):
            objective(wrong_outputs, wrong_batch, torch.tensor(3.0), memory, phase)
    assert_close(memory, objective.init_state(N, C, D))


@every_objective
def test_what_is_not_a_number_in_a_real_row_reaches_the_total(objective):
    for value in (torch.nan, torch.inf):
        for example in (1, 4):  # labeled, and not
            outputs, batch = make_case()
            outputs.logits[example, 2] = value
            assert not torch.isfinite(call(objective, outputs, batch).total)


@every_objective
@each_number_of_views
def test_off_the_cpu_it_never_looks_at_a_value(objective, views):
    """Tensors on "meta" have no values: reading one, or a shape that depends on one, raises."""
    outputs, batch = make_case(views)
    away = [Outputs(*(tensor.to("meta") for tensor in pair)) for pair in (outputs, batch.teacher)]
    given = {name: getattr(batch, name).to("meta") for name in ("targets", "indices")}
    batch = replace(batch, **given, teacher=away[1])
    memory = {name: tensor.to("meta") for name, tensor in fresh_memory(objective).items()}
    away[0].logits.requires_grad_()
    phase = objective.phase(3.0, objective.init_state(N, C, D))
    loss = objective(away[0], batch, torch.tensor(3.0, device="meta"), memory, phase)
    loss.total.backward()
    assert loss.total.shape == ()
    assert away[0].logits.grad.shape == outputs.logits.shape


@every_objective
def test_it_is_a_value(objective):
    assert (
        eval(repr(objective), globals() | {"LossFunction": LossFunction})
        == replace(objective)
        == objective
    )
    assert hash(replace(objective)) == hash(objective)
    with pytest.raises(FrozenInstanceError):
        setattr(objective, fields(objective)[0].name, 0.5)
    with pytest.raises(TypeError):
        type(objective)(0.5)


def with_target(value):
    outputs, batch = make_case()
    batch.targets[1, 2] = value
    return outputs, batch


def test_a_batch_that_cannot_be_meant_is_refused():
    outputs, batch = make_case()
    for field, wrong_outputs, wrong in (
        ("targets", outputs, replace(batch, targets=batch.targets.argmax(dim=1))),
        ("targets", outputs, replace(batch, targets=batch.targets.long())),
        ("indices", outputs, replace(batch, indices=batch.indices[:-1])),
        ("views", outputs, replace(batch, views=4)),
        ("outputs", tuple(outputs), batch),
        ("teacher", outputs, replace(batch, teacher=outputs.logits)),
        ("target", *with_target(torch.nan)),
        ("target", *with_target(torch.inf)),
    ):
        with pytest.raises(ValueError, match=field):
            call(CrossEntropy(), wrong_outputs, wrong)


@every_objective
def test_every_loss_checks_its_batch_and_its_state(objective):
    outputs, batch = make_case()
    memory = objective.init_state(N, C, D)
    phase, epoch = objective.phase(3.0, memory), torch.tensor(3.0)
    for field, wrong in (("target", with_target(-0.25)[1]), ("batch", None), ("batch", {})):
        with pytest.raises(ValueError, match=field):
            objective(outputs, wrong, epoch, memory, phase)
    assert_close(memory, objective.init_state(N, C, D))
    if memory:
        with pytest.raises(ValueError, match="state"):
            objective(outputs, batch, epoch, None, phase)
        away = {name: tensor.to("meta") for name, tensor in memory.items()}
        with pytest.raises(ValueError, match="meta"):
            objective(outputs, batch, epoch, away, phase)
