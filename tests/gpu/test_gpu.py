"""What only a CUDA device shows: same bits, same values, no waiting, captured steps."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from nearsay import (
    ELR,
    GJS,
    NCR,
    Bank,
    Batch,
    Bootstrap,
    CrossEntropy,
    Mixup,
    Outputs,
    ncr,
    one_hot,
    propagate_labels,
    rng,
)
from nearsay.losses._ncr_fast import _function_for, _triton_function
from nearsay.losses.criterion import NCRLoss
from nearsay.neighbors import nearest, normalize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OBJECTIVES = [
    CrossEntropy(smoothing=0.1),
    Bootstrap(),
    Bootstrap(kind="hard"),
    ELR(),
    GJS(),
    NCR(k=5),
    NCR(k=None, variant="released", base=ELR()),
    NCR(k=5, base=GJS(), bank=Bank(size=300)),
    NCR(k=5, base=ELR(), bank=Bank(kind="examples"), mask_partners=True),
]


@contextlib.contextmanager
def no_waiting():
    """The host never waits for the device inside."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(0)


def case(num_rows=64, num_classes=7, num_features=12, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_rows, num_features, generator=generator)
    indices = torch.randperm(200, generator=generator)[: num_rows // 2].repeat(2)
    indices[[5, 5 + num_rows // 2]] = -1
    labels = torch.randint(-1, num_classes, (num_rows // 2,), generator=generator).repeat(2)
    batch = Batch(
        inputs=inputs.to(device),
        targets=one_hot(labels, num_classes).to(device),
        indices=indices.to(device),
        views=2,
    )
    body = torch.randn(num_features, 16, generator=generator).to(device)
    head = torch.randn(16, num_classes, generator=generator).to(device)
    return batch, body, head


def step(objective, batch, weights, memory, stage, epoch):
    batch = Mixup()(batch, seed=3, epoch=epoch)
    body, head = (weight.detach().requires_grad_() for weight in weights)
    features = torch.relu(batch.inputs @ body)
    loss = objective(Outputs(features, features @ head), batch, epoch, memory, stage)
    return loss.total, *torch.autograd.grad(loss.total, (body, head))


def test_random_numbers_have_the_same_bits():
    examples = torch.cat([torch.arange(5000), torch.tensor([2**40 + 7, -1, 2**62])])
    for epoch in (0, 17, 2**31):
        for draw in (
            lambda device, epoch=epoch: rng.words(5, "test", epoch, examples.to(device), 7),
            lambda device, epoch=epoch: rng.uniform(5, "test", epoch, examples.to(device)),
            lambda device, epoch=epoch: rng.integers(5, "test", epoch, examples.to(device), 1000),
            lambda device, epoch=epoch: rng.shuffle(5, "test", epoch, examples.to(device)),
        ):
            assert torch.equal(draw("cpu"), draw("cuda").cpu())


def test_mixup_is_the_same():
    for views in (1, 2):
        batch, _, _ = case()
        batch = replace(batch, views=views)
        there = Mixup(alpha=0.4)(batch, seed=1, epoch=torch.tensor(3, device="cuda"))
        moved = {name: getattr(batch, name).cpu() for name in ("inputs", "targets", "indices")}
        here = replace(batch, **moved)
        here = Mixup(alpha=0.4)(here, seed=1, epoch=3)
        assert torch.equal(there.mix.partners.cpu(), here.mix.partners)
        assert_close(there.mix.weight.cpu(), here.mix.weight)
        assert_close(there.inputs.cpu(), here.inputs)


@pytest.fixture(params=["triton", "torch"])
def _path(request):
    """Both fast versions: float32 takes Triton unless the order of additions must be fixed."""
    torch.use_deterministic_algorithms(request.param == "torch", warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_both_fast_versions_exist():
    assert _triton_function() is not None
    logits = torch.zeros(2, 2, device="cuda")
    assert _function_for(logits) is _triton_function()
    assert _function_for(logits.double()) is not _triton_function()


@pytest.mark.usefixtures("_path")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("k", [1, 5, 40, 300, None])
@pytest.mark.parametrize(
    "size",
    [(2, 1, 1, 0), (64, 10, 16, 0), (33, 7, 5, 50), (500, 1100, 33, 0), (300, 11, 5000, 3)],
    ids=str,
)
def test_float32_agrees_with_float64_on_the_cpu(size, k, variant):
    num_rows, num_classes, num_features, num_pool = size
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    leaves = [3 * drawn(num_rows, num_classes), drawn(num_rows, num_features)]
    if num_pool:
        leaves += [3 * drawn(num_pool, num_classes), drawn(num_pool, num_features)]
    indices = torch.randint(-1, 2 * num_rows, (num_rows + num_pool,), generator=generator)
    partners = torch.randint(0, 2 * num_rows, (num_rows,), generator=generator)
    upstream = torch.linspace(-1, 2, num_rows, dtype=torch.float64)
    k = k if k is None or k < num_rows + num_pool else None
    results = []
    for device, dtype, kind in (("cpu", torch.float64, "fast"), ("cuda", torch.float32, "fast")):
        moved = [leaf.to(device, dtype).requires_grad_() for leaf in leaves]
        pool = (*moved[2:], indices[num_rows:].to(device)) if num_pool else None
        given = {"k": k, "variant": variant, "implementation": kind, "pool": pool}
        who = indices[:num_rows].to(device)
        loss = ncr(
            *moved[:2],
            who,
            partners=partners.to(device) if num_pool else None,
            reduction="none",
            **given,
        )
        results.append(
            [loss, *torch.autograd.grad((loss * upstream.to(device, dtype)).sum(), moved)]
        )
    for there, here in zip(results[1], results[0], strict=True):
        close = 1e-4 * float(here.detach().abs().max()) + 1e-9
        assert_close(there.cpu().double(), here, rtol=1e-3, atol=close)


@pytest.mark.parametrize("place", ["logits", "features"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_passed_on(value, place):
    logits, features = torch.randn(24, 5, device="cuda"), torch.randn(24, 6, device="cuda")
    {"logits": logits, "features": features}[place][4] = 0
    {"logits": logits, "features": features}[place][4, 2] = value
    assert not ncr(logits, features, k=3).isfinite()


def test_rows_without_neighbors_have_neither_loss_nor_gradient():
    logits, features = torch.randn(24, 5, device="cuda"), torch.randn(24, 6, device="cuda")
    features[[3, 7]] = torch.tensor([[0.0], [1e-42]], device="cuda")
    leaves = logits.requires_grad_(), features.requires_grad_()
    loss = ncr(*leaves, k=23, reduction="none")
    assert (loss[[3, 7]] == 0).all()
    for gradient in torch.autograd.grad(loss.sum(), leaves):
        assert (gradient[[3, 7]] == 0).all()
        assert gradient.isfinite().all()
    assert loss.isfinite().all()


def test_the_gradient_cannot_be_differentiated_silently():
    logits = torch.randn(24, 5, device="cuda", requires_grad=True)
    loss = ncr(logits, torch.randn(24, 6, device="cuda"), k=3)
    with pytest.raises(RuntimeError, match='implementation="plain"'):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("implementation", ["plain", "fast"])
@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("k", [1, 5, 40, None])
@pytest.mark.parametrize("size", [(64, 10, 16), (1500, 11, 33)], ids=str)
def test_float64_agrees_with_float64_on_the_cpu(size, k, variant, implementation):
    num_rows, num_classes, num_features = size
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64)
    features = torch.randn(num_rows, num_features, generator=generator, dtype=torch.float64)
    indices = torch.arange(num_rows)
    indices[::9] = -1
    results = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.to(device).requires_grad_() for tensor in (logits, features)]
        kind = "fast" if device == "cpu" else implementation
        loss = ncr(
            *leaves, indices.to(device), k=k, variant=variant, reduction="none", implementation=kind
        )
        upstream = torch.linspace(-1, 2, num_rows, dtype=torch.float64, device=device)
        results.append([loss, *torch.autograd.grad((loss * upstream).sum(), leaves)])
    for there, here in zip(results[1], results[0], strict=True):
        assert_close(there.cpu(), here, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precisions_agree_with_float64(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(512, 10, generator=generator).to(dtype)
    features = torch.randn(512, 64, generator=generator).to(dtype)
    exact = ncr(logits.double(), features.double(), k=5)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = ncr(logits.cuda(), features.cuda(), k=5)
    assert loss.dtype == torch.float32
    assert_close(loss.cpu().double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_neighbors_are_found_in_full_precision_whatever_is_allowed_elsewhere(precision):
    generator = torch.Generator().manual_seed(0)
    crowd = normalize(1 + 0.1 * torch.randn(512, 256, generator=generator, dtype=torch.float64))[0]
    exact = nearest(crowd, crowd, 10, None).positions
    torch.set_float32_matmul_precision(precision)
    try:
        there = crowd.float().cuda()
        found = nearest(there, there, 10, None).positions.cpu()
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    shared = (exact[:, :, None] == found[:, None]).any(dim=2).double().mean()
    assert shared > 0.999


def test_extreme_logits_are_exact():
    generator = torch.Generator().manual_seed(1)
    logits = 500 * torch.randn(128, 10, generator=generator)
    features = torch.randn(128, 16, generator=generator)
    features[3] = 0
    exact = ncr(logits.double(), features.double(), k=5, temperature=0.01, reduction="none")
    leaves = [logits.cuda().requires_grad_(), features.cuda().requires_grad_()]
    loss = ncr(*leaves, k=5, temperature=0.01, reduction="none")
    assert_close(loss.cpu().double(), exact, rtol=1e-4, atol=1e-8)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss.sum(), leaves))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_a_step_equals_the_cpus_and_never_waits(objective):
    results = []
    for device in ("cpu", "cuda"):
        batch, *weights = case(device=device)
        memory = {
            name: tensor.to(device) for name, tensor in objective.init_state(200, 7, 16).items()
        }
        stage = objective.phase(1.0, memory)
        epoch = torch.tensor(1.0, device=device)
        # Tables and handles are made by the first call.
        step(objective, batch, weights, memory, stage, epoch)
        with no_waiting() if device == "cuda" else contextlib.nullcontext():
            result = step(objective, batch, weights, memory, stage, epoch)
        results.append([*result, *memory.values()])
    for here, there in zip(*results, strict=True):
        assert_close(there.cpu(), here, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_a_captured_step_replays_as_it_runs(objective):
    batch, *weights = case()
    memory = {name: tensor.cuda() for name, tensor in objective.init_state(200, 7, 16).items()}
    stage = objective.phase(1.0, memory)
    epoch = torch.tensor(1.0, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(objective, batch, weights, memory, stage, epoch)
    torch.cuda.synchronize()
    start = {name: tensor.clone() for name, tensor in memory.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(objective, batch, weights, memory, stage, epoch)
    for name, tensor in memory.items():
        tensor.copy_(start[name])
    by_hand = {name: tensor.clone() for name, tensor in start.items()}
    # Another epoch means other partners and weights, without another capture.
    for value in (1.0, 2.0, 3.0):
        epoch.fill_(value)
        graph.replay()
        expected = step(objective, batch, weights, by_hand, stage, epoch.clone())
        assert_close(captured, expected, rtol=1e-4, atol=1e-5)
        assert_close(memory, by_hand, rtol=1e-4, atol=1e-5)


def test_a_captured_loop_of_a_users_own_follows_the_epoch_that_its_criterion_is_told():
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(32, 6, generator=generator).cuda(), torch.arange(32).cuda() % 4
    indices, head = torch.arange(32).cuda(), torch.nn.Linear(6, 4).cuda()
    criterion = NCRLoss(head=head, objective=NCR(k=5, base=ELR(ramp=10.0)), num_examples=32)

    def loss_and_gradient():
        loss = criterion(head(inputs), labels, indices)
        return loss.detach(), *torch.autograd.grad(loss, (head.weight, head.bias))

    def reset():
        for tensor in criterion.state.values():
            tensor.zero_()

    criterion.set_epoch(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        loss_and_gradient()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_and_gradient()
    seen = []
    for epoch in (1, 4, 8):
        criterion.set_epoch(epoch)
        reset()
        graph.replay()
        seen.append(captured[0].item())
        reset()
        assert_close(captured, loss_and_gradient(), rtol=1e-4, atol=1e-5)
    assert len(set(seen)) == 3  # as the ramp rises


def test_propagation_agrees_with_the_cpu():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(500, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, 5, (500,), generator=generator)
    here = propagate_labels(features, labels, k=10)
    assert_close(
        propagate_labels(features.cuda(), labels.cuda(), k=10).cpu(), here, rtol=1e-4, atol=1e-7
    )
