import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from nearsay import optim
from nearsay.batch import Labels
from nearsay.optim import (
    SGD,
    AdamW,
    Constant,
    Cosine,
    CosineRestarts,
    MultiStep,
    averaged_copy,
    class_weights,
    clip_gradients_,
    grad_norm,
    keep_old_,
    optimizer_state,
    ramp,
    recalibrate_,
    set_rate_,
    snapshot,
    step_if_,
    update_average_,
)

OPTIMIZERS = [
    SGD(),
    SGD(nesterov=True),
    SGD(momentum=0.0),
    AdamW(betas=(0.8, 0.9)),
    AdamW(decay_all=False),
    SGD(decay_all=False),
]
SCHEDULES = [
    Constant(),
    Constant(warmup=3),
    Cosine(),
    Cosine(warmup=0, final=0.01),
    MultiStep(milestones=(7, 11.5)),
    MultiStep(milestones=(8,), gamma=0.3, warmup=2),
    CosineRestarts(period=4),
    CosineRestarts(period=2.5, multiplier=1.7, minimum=0.1),
]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 5)
    )


def images(num=8, seed=1):
    return torch.randn(num, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def fill_gradients(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def bits(tensors):
    return [
        tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for tensor in tensors
    ]


# Optimizers


def plain(spec, module):
    """torch's own, one parameter at a time and with a number as rate."""
    if isinstance(spec, SGD):
        build, choices = torch.optim.SGD, {"momentum": spec.momentum, "nesterov": spec.nesterov}
    else:
        build, choices = torch.optim.AdamW, {"betas": spec.betas}
    groups = [
        {
            "params": [each],
            "weight_decay": spec.weight_decay if spec.decay_all or each.ndim > 1 else 0.0,
        }
        for each in module.parameters()
    ]
    return build(groups, lr=spec.lr, foreach=False, **choices)


@pytest.mark.parametrize("spec", OPTIMIZERS)
def test_optimizers_step_as_torch_does_while_the_rate_changes(spec):
    ours, theirs = network().double(), network().double()
    optimizer, oracle = spec.build(ours.parameters()), plain(spec, theirs)
    for step in range(4):
        rate = spec.lr * (0.3 + step)
        set_rate_(optimizer, rate if step % 2 else torch.tensor(rate))
        for group in oracle.param_groups:
            group["lr"] = optimizer.param_groups[0]["lr"].item()
        for module, each in ((ours, optimizer), (theirs, oracle)):
            fill_gradients(module, step)
            each.step()
    assert_close(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("spec", [SGD(), AdamW(), SGD(decay_all=False)])
def test_the_rate_is_one_tensor_that_stays_where_it_is(spec):
    optimizer = spec.build(network().parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(
        rate is rates[0] and rate.ndim == 0 and rate.dtype == torch.float32 for rate in rates
    )
    set_rate_(optimizer, torch.tensor(0.25, dtype=torch.float64))
    assert optimizer.param_groups[-1]["lr"] is rates[0]
    assert rates[0].item() == 0.25


def test_biases_and_norms_are_spared_from_decay_only_when_asked():
    module = network()
    for spec, expected in ((SGD(), {5e-4}), (SGD(decay_all=False), {5e-4, 0.0})):
        decays = {
            id(p): g["weight_decay"]
            for g in spec.build(module.parameters()).param_groups
            for p in g["params"]
        }
        assert set(decays.values()) == expected
        for parameter in module.parameters():
            assert decays[id(parameter)] == (5e-4 if spec.decay_all or parameter.ndim > 1 else 0.0)


def test_frozen_parameters_are_left_alone():
    module = network()
    module[0].requires_grad_(False)
    held = [
        each for group in SGD().build(module.parameters()).param_groups for each in group["params"]
    ]
    assert len(held) == 4
    assert all(each.requires_grad for each in held)


@pytest.mark.parametrize("spec", [SGD(nesterov=True), AdamW()])
def test_a_state_copied_in_place_continues_bit_for_bit(spec):
    module = network()
    optimizer = spec.build(module.parameters())
    fresh_names = optimizer_state(optimizer).keys()
    fill_gradients(module, 0)
    optimizer.step()
    # Allocated from the start, so a graph can hold it.
    assert optimizer_state(optimizer).keys() == fresh_names
    twin = copy.deepcopy(module)
    other = spec.build(twin.parameters())
    for name, tensor in optimizer_state(other).items():
        tensor.copy_(optimizer_state(optimizer)[name])
    for each, its_optimizer in ((module, optimizer), (twin, other)):
        fill_gradients(each, 1)
        its_optimizer.step()
    assert bits(twin.parameters()) == bits(module.parameters())


# Schedules


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_and_tensors_give_the_same_factors(schedule):
    epochs = [step / 7 for step in range(15 * 7 + 1)]
    factors = [schedule.factor(epoch, 15) for epoch in epochs]
    assert all(isinstance(factor, float) for factor in factors)
    exact = torch.tensor(epochs, dtype=torch.float64)
    assert [schedule.factor(epoch, 15).item() for epoch in exact] == factors
    assert_close(schedule.factor(exact.float(), 15), torch.tensor(factors), atol=2e-6, rtol=1e-5)
    for dtype in (torch.int64, torch.bfloat16):
        assert_close(
            schedule.factor(torch.tensor(7, dtype=dtype), 15), torch.tensor(schedule.factor(7, 15))
        )
    assert all(0 <= factor <= 1 for factor in factors)


def by_scheduler(make, num_epochs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(num_epochs):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Cosine(warmup=0), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30)),
        (
            Cosine(warmup=0, final=0.1),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30, eta_min=0.1),
        ),
        (MultiStep(milestones=(4, 20)), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 20])),
        (
            MultiStep(milestones=(9,), gamma=0.5),
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [9], gamma=0.5),
        ),
        (
            CosineRestarts(),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 10, eta_min=0.05),
        ),
        (
            CosineRestarts(period=3, multiplier=2, minimum=0.0),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
        ),
    ],
)
def test_schedules_agree_with_torch_at_every_epoch(schedule, make):
    ours = [schedule.factor(float(epoch), 30) for epoch in range(30)]
    assert ours == pytest.approx(by_scheduler(make, 30), abs=1e-12)


def test_cosine_at_its_landmarks():
    schedule = Cosine(warmup=4, final=0.2)
    values = [schedule.factor(epoch, 24) for epoch in (0, 1, 4, 14, 24, 99)]
    assert values == pytest.approx([0, 0.25, 1, 0.6, 0.2, 0.2])


def test_steps_fall_exactly_at_their_milestones():
    schedule = MultiStep(milestones=(4, 8), warmup=2)
    before = math.nextafter(4, 0)
    values = [schedule.factor(epoch, 10) for epoch in (0, 1, 2, before, 4, 8, 10)]
    assert values == pytest.approx([0, 0.5, 1, 1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("multiplier", "restarts"), [(1, (10, 20, 30)), (2, (10, 30, 70)), (1.5, (10, 25, 47.5))]
)
def test_restarts_fall_exactly_where_a_period_ends(multiplier, restarts):
    schedule = CosineRestarts(multiplier=multiplier)
    start = 0.0
    for restart in restarts:
        assert schedule.factor(restart, 100) == 1
        assert schedule.factor(torch.tensor(restart, dtype=torch.float32), 100).item() == 1
        assert schedule.factor(restart - 1e-6, 100) == pytest.approx(0.05, abs=1e-6)
        assert schedule.factor((start + restart) / 2, 100) == pytest.approx(0.525)
        start = restart


def test_ramp_is_the_sigmoid_shaped_one():
    assert [ramp(epoch, 8.0) for epoch in (0, 4, 8, 9)] == pytest.approx(
        [math.exp(-5), math.exp(-1.25), 1, 1]
    )
    assert ramp(0.0, 0) == 1
    epochs = torch.arange(10, dtype=torch.float64)
    assert ramp(epochs, 8.0).tolist() == [ramp(epoch, 8.0) for epoch in epochs.tolist()]
    assert ramp(torch.tensor(0), 0).item() == 1


# Gradients and the gate


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_shrinks_all_gradients_alike(max_norm):
    module = network()
    fill_gradients(module, 0)
    before = snapshot(each.grad for each in module.parameters())
    norm = math.sqrt(sum(each.double().square().sum().item() for each in before))
    assert grad_norm(module.parameters()).item() == pytest.approx(norm)
    module[-1].bias.requires_grad_(False)
    given = clip_gradients_(module.parameters(), max_norm)
    assert given.ndim == 0
    assert given.item() == pytest.approx(norm)
    scale = min(1, max_norm / norm)
    assert_close(
        [each.grad for each in module.parameters()],
        [scale * each for each in before],
        atol=1e-6,
        rtol=1e-4,
    )


def test_norm_of_a_bad_gradient_is_not_finite():
    for bad in (math.nan, math.inf):
        module = network()
        fill_gradients(module, 0)
        module[0].bias.grad[1] = bad
        module[4].bias.grad = None
        assert not clip_gradients_(module.parameters(), 1.0).isfinite()


@pytest.mark.parametrize("spec", OPTIMIZERS)
@pytest.mark.parametrize("num_good", [0, 2])
def test_a_bad_step_changes_no_bit_and_leaves_no_trace(spec, num_good):
    module, twin = network(), network()
    optimizer, other = spec.build(module.parameters()), spec.build(twin.parameters())
    average = averaged_copy(module)
    memory = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    for step in range(num_good):
        for each, its_optimizer in ((module, optimizer), (twin, other)):
            fill_gradients(each, step)
            step_if_(its_optimizer, torch.tensor(True))
    kept = [*module.buffers(), *average.parameters(), *average.buffers(), memory]
    old = snapshot(kept)
    everything = [*module.parameters(), *optimizer_state(optimizer).values(), *kept]
    before = bits(everything)

    # Moves the running statistics.
    module(images()).sum().backward()
    module[0].weight.grad[0, 0, 0, 0] = math.nan
    memory[2] = math.nan
    is_finite = grad_norm(module.parameters()).isfinite()
    step_if_(optimizer, is_finite)
    update_average_(average, module, torch.tensor(0.9))
    # There is something to undo.
    assert bits(kept) != before[-len(kept) :]
    keep_old_(kept, old, is_finite)
    assert bits(everything) == before

    for each, its_optimizer in ((module, optimizer), (twin, other)):
        fill_gradients(each, 7)
        step_if_(its_optimizer, torch.tensor(True))
    assert bits(module.parameters()) == bits(twin.parameters())


def test_a_good_step_is_an_ordinary_one_and_keeps_the_new_values():
    module, twin = network(), network()
    optimizer, other = SGD().build(module.parameters()), SGD().build(twin.parameters())
    for step in range(2):
        fill_gradients(module, step)
        fill_gradients(twin, step)
        step_if_(optimizer, torch.tensor(True))
        other.step()
    assert bits(module.parameters()) == bits(twin.parameters())
    # A later step of its own is not gated by an old flag.
    assert not hasattr(optimizer, "found_inf")
    new, old = torch.tensor([1.0, math.nan]), torch.zeros(2)
    keep_old_([new], [old], torch.tensor(True))
    assert new[0] == 1
    assert new[1].isnan()


def test_copies_are_equal_and_of_their_own():
    tensors = [
        torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.tensor([math.nan, -0.0]),
        nn.Parameter(torch.ones(2)),
        torch.randn(4, 6).T,
    ]
    copies = snapshot(iter(tensors))
    assert bits(copies) == bits(tensors)
    for copied, tensor in zip(copies, tensors, strict=True):
        assert copied.dtype == tensor.dtype
        assert copied.stride() == tensor.stride()
        assert copied.data_ptr() != tensor.data_ptr()
        assert not copied.requires_grad
    tensors[1].add_(1)
    assert copies[1] == 3
    assert snapshot([]) == []


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("is_finite", [True, False])
def test_old_values_of_every_kind_come_back_bit_for_bit(dtype, is_finite):
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        old = [limits.min, limits.max, -0.0, math.inf, math.nan, limits.smallest_normal]
        new = [limits.max, limits.min, 0.0, -math.inf, 1.0, math.nan]
    elif dtype == torch.bool:
        old, new = [True, False, True], [False, True, True]
    else:
        limits = torch.iinfo(dtype)
        old, new = [limits.min, limits.max, 1], [limits.max, limits.min, 0]
    tensors = [
        torch.tensor(new, dtype=dtype),
        torch.tensor(new[0], dtype=dtype),
        torch.tensor(2**40 + 1),
    ]
    before = [
        torch.tensor(old, dtype=dtype),
        torch.tensor(old[0], dtype=dtype),
        torch.tensor(-(2**41) - 3),
    ]
    expected = bits(tensors if is_finite else before)
    keep_old_(tensors, before, torch.tensor(is_finite))
    assert bits(tensors) == expected


def test_old_values_come_back_whatever_the_order_in_memory():
    old = torch.randn(2, 4, 3, 3)
    new = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    keep_old_([new], [old], torch.tensor(False))
    assert torch.equal(new, old)
    assert new.is_contiguous(memory_format=torch.channels_last)


# Averages


@pytest.mark.parametrize("as_tensor", [False, True])
def test_averages_follow_parameters_and_statistics_and_copy_the_rest(as_tensor):
    module = network()
    module.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
    average = averaged_copy(module)
    assert not average.training
    assert not any(each.requires_grad for each in average.parameters())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    module(images())
    module.mask[1] = 5
    expected = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    for decay in (0.9, 0.5, 0.0, 1.0):
        update_average_(average, module, torch.tensor(decay) if as_tensor else decay)
        for name, tensor in module.state_dict().items():
            if name == "mask" or tensor.dtype == torch.int64:
                expected[name] = tensor
            else:
                expected[name] = decay * expected[name] + (1 - decay) * tensor
        assert_close(dict(average.state_dict()), expected)
    assert average[1].num_batches_tracked == 1
    module[0].weight.detach().zero_()
    # A copy, not the same tensors.
    assert average[0].weight.any()


def test_an_average_of_equals_does_not_drift():
    module = network()
    average = averaged_copy(module)
    for _ in range(3):
        update_average_(average, module, 0.997)
    assert bits(average.parameters()) == bits(module.parameters())


def test_recalibration_is_the_mean_over_batches_and_touches_nothing_else():
    module, oracle = network(), network()
    for each in (module, oracle):
        each(images(seed=5))
    batches = [images(seed=seed) for seed in range(4)]
    # What was there before does not matter.
    module[1].running_mean[0] = math.nan
    module[1].momentum = 0.3
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fill_gradients(module, 0)
    gradients = bits(each.grad for each in module.parameters())
    generator = torch.get_rng_state()

    recalibrate_(module, iter(batches))

    activations = [oracle[0](batch).detach() for batch in batches]
    means = torch.stack([each.mean(dim=(0, 2, 3)) for each in activations])
    variances = torch.stack([each.var(dim=(0, 2, 3)) for each in activations])
    assert_close(module[1].running_mean, means.mean(dim=0))
    assert_close(module[1].running_var, variances.mean(dim=0))
    for name, tensor in module.state_dict().items():
        if "running" not in name:
            assert torch.equal(tensor, before[name]), name
    assert (module[1].momentum, module.training, module[1].training, module[2].training) == (
        0.3,
        True,
        True,
        True,
    )
    assert bits(each.grad for each in module.parameters()) == gradients
    # Dropout was off.
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_failed_recalibration_changes_nothing():
    module = averaged_copy(network())
    before = bits(module.state_dict().values())
    with pytest.raises(RuntimeError):
        recalibrate_(module, [images(), torch.zeros(2, 7, 6, 6)])
    with pytest.raises(ValueError, match="batches"):
        recalibrate_(module, [])
    assert bits(module.state_dict().values()) == before
    assert not any(each.training for each in module.modules())


# Class weights and complaints


def test_class_weights_balance_the_classes_that_occur():
    given = torch.tensor([0, 0, 0, 2, -1, 2, 3])
    weights = class_weights(Labels(given, None, ("a", "b", "c", "d")))
    assert_close(weights, torch.tensor([6 / 9, 0, 1.0, 2.0]))
    labeled = given[given >= 0]
    assert_close(weights[labeled].mean(), torch.tensor(1.0))
    sums = torch.zeros(4).index_add(0, labeled, weights[labeled])
    assert_close(sums[[0, 2, 3]], torch.full((3,), 2.0))
    assert class_weights(Labels(torch.tensor([-1]), None, ("a", "b"))).tolist() == [0, 0]


BAD_CHOICES = [
    ("lr", lambda: SGD(lr=-0.1)),
    ("lr", lambda: SGD(lr=math.nan)),
    ("momentum", lambda: SGD(momentum=1.0)),
    ("weight_decay", lambda: SGD(weight_decay=math.inf)),
    ("nesterov", lambda: SGD(nesterov=True, momentum=0)),
    ("parameters", lambda: SGD().build([])),
    ("parameters", lambda: AdamW().build(averaged_copy(network()).parameters())),
    ("meta", lambda: SGD().build([nn.Parameter(torch.ones(1, device=d)) for d in ("cpu", "meta")])),
    ("betas", lambda: AdamW(betas=(0.9, 1.0))),
    ("lr", lambda: AdamW(lr=-0.1)),
    ("final", lambda: Cosine(final=1.5)),
    ("warmup", lambda: Cosine(warmup=-1)),
    ("warmup", lambda: Cosine(warmup=5).factor(0.0, 5)),
    ("warmup", lambda: Constant(warmup=math.inf)),
    ("milestones", lambda: MultiStep(milestones=(3, -1))),
    ("gamma", lambda: MultiStep(milestones=(3,), gamma=10)),
    ("period", lambda: CosineRestarts(period=0)),
    ("period", lambda: CosineRestarts(period=math.inf)),
    ("multiplier", lambda: CosineRestarts(multiplier=0.5)),
    ("minimum", lambda: CosineRestarts(minimum=2)),
    ("length", lambda: ramp(1.0, -2)),
    ("max_norm", lambda: clip_gradients_([], 0)),
    ("fused", lambda: step_if_(torch.optim.SGD([nn.Parameter(torch.ones(1))]), torch.tensor(True))),
    ("4.bias", lambda: update_average_(network(), network()[:2], 0.5)),
]


@pytest.mark.parametrize(("name", "make"), BAD_CHOICES)
def test_a_bad_choice_is_refused_by_its_name(name, make):
    with pytest.raises(ValueError, match=name):
        make()


def test_a_teacher_goes_by_its_batch_and_keeps_its_statistics():
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5)
    )
    teacher = optim.averaged_copy(network)
    optim.by_batch_(teacher)
    images = 5 + 3 * torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    before = {
        name: tensor.clone()
        for name, tensor in teacher[1].named_buffers()
        if name.startswith("running")
    }
    seen = teacher(images)
    torch.testing.assert_close(seen.mean(dim=(0, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        seen.var(dim=(0, 2, 3), correction=0), torch.ones(4), atol=1e-2, rtol=0
    )
    assert all(torch.equal(getattr(teacher[1], name), tensor) for name, tensor in before.items())
    # Nothing is dropped.
    assert torch.equal(seen, teacher(images))
