import json
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.testing import assert_close

from nearsay import distributed, optim
from nearsay.data import loader
from nearsay.data.digits import Digits
from nearsay.data.loader import Order, Rows
from nearsay.errors import NotFinite
from nearsay.experiment import Experiment, Machine
from nearsay.losses import ELR, GJS, NCR, Bank, CrossEntropy, NeighborVote
from nearsay.models import MLP, ResNet
from nearsay.noise import Symmetric
from nearsay.optim import SGD, AdamW, Cosine
from nearsay.training import step as step_module
from nearsay.training.loop import train
from nearsay.training.step import Setting, Step, make_learners
from nearsay.transforms import (
    Augment,
    ColorJitter,
    Cutout,
    Flip,
    Mixup,
    PadCrop,
    RandAugment,
    RandomResizedCrop,
    Views,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

SMALL = Experiment(
    data=Digits(),
    noise=Symmetric(rate=0.4),
    backbone=ResNet(width=8),
    augment=Augment(transforms=(PadCrop(padding=1), Flip())),
    optimizer=SGD(lr=0.01),
    schedule=Cosine(warmup=0),
    epochs=2,
    batch_size=64,
)
EXPERIMENTS = {
    "ncr": SMALL,
    "cross-entropy": replace(SMALL, objective=CrossEntropy()),
    "a start in the second epoch": replace(SMALL, objective=NCR(start_epoch=1)),
    "mixup": replace(SMALL, mixup=Mixup()),
    "elr and a bank": replace(
        SMALL, objective=NCR(base=ELR(), bank=Bank(size=128), mask_partners=True), mixup=Mixup()
    ),
    "two views": replace(
        SMALL,
        objective=GJS(),
        augment=Views(first=(PadCrop(padding=1),), second=(PadCrop(padding=1), ColorJitter())),
    ),
    "two networks": replace(
        SMALL, networks=2, averaging=0.9, averaging_ramp=1.0, objective=ELR(), mixup=Mixup()
    ),
    "adamw and clipping": replace(SMALL, optimizer=AdamW(lr=1e-3), clip=1.0),
    # Not NCR: augmented digits can be alike, and either of two equally near ones may be taken.
    "strong": replace(
        SMALL,
        objective=CrossEntropy(),
        augment=Augment(transforms=(RandomResizedCrop(size=8), RandAugment(), Cutout(size=2))),
    ),
    "self taught": replace(
        SMALL,
        objective=NeighborVote(k=20, start_epoch=0),
        averaging=0.9,
        self_taught=True,
        mixup=Mixup(views="first"),
        augment=Views(first=(PadCrop(padding=1),), second=(PadCrop(padding=1), RandAugment())),
    ),
}


def ready(experiment, device, *, captures, compiles=False, dtype=torch.float32):
    images, labels = experiment.data.open("train")
    labels = experiment.noise(labels)
    device = torch.device(device)
    order = Order(torch.arange(len(images)), batch_size=experiment.batch_size, seed=0)
    setting = Setting(
        source=images.to(device),
        given=(labels.given.to(device),) * experiment.networks,
        label_weights=torch.ones(10, device=device),
        batches_per_epoch=order.batches_per_pass,
        batches_per_pass=order.batches_per_pass,
        is_cut=False,
        device=device,
        dtype=dtype,
        captures=captures,
        compiles=compiles,
    )
    return Step(
        experiment, setting, make_learners(experiment, len(images), 10, images[0], device)
    ), order


def go(step, order, numbers):
    for number in numbers:
        epoch = number // order.batches_per_pass
        step(
            Rows(order.batch(number), None),
            step.experiment.objective.phase(float(epoch), step.learners[0].state),
        )
    return {name: tensor.double().cpu() for name, tensor in step.tensors().items()}


def in_float64(monkeypatch):
    """Networks, rounded inputs and memories in float64.

    In float32 a unit at the kink of its ReLU may fall to either side: the last bit of a normalized
    pixel, which depends on how it is compiled, would be enough.
    """

    def make(experiment, *arguments):
        learners = step_module.make_learners(experiment, *arguments)
        for learner in learners:
            learner.network.double()
            if learner.average is not None:
                learner.average.double()
            for name, tensor in learner.state.items():
                learner.state[name] = tensor.double() if tensor.is_floating_point() else tensor
        return [
            learner._replace(optimizer=experiment.optimizer.build(learner.network.parameters()))
            for learner in learners
        ]

    monkeypatch.setitem(globals(), "make_learners", make)
    monkeypatch.setattr(
        step_module,
        "finish",
        lambda *arguments: loader.finish(*arguments).double().mul(4096).round() / 4096,
    )


@contextmanager
def no_waiting():
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def exact():
    """Without TF32, and with convolutions that do not depend on timing."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before


def agree(key, found, wanted, **how):
    assert_close(found[key], wanted, **how, msg=lambda text: f"{key}: {text}")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_captured_step_is_the_plain_one(name):
    with exact():
        captured = go(*(pair := ready(EXPERIMENTS[name], "cuda", captures=True)), range(6))
        plain = go(*ready(EXPERIMENTS[name], "cuda", captures=False), range(6))
    assert pair[0]._graph is not None
    assert captured["count"] == 6
    for key, value in plain.items():
        if "predicted" not in key and "changes" not in key:  # where two classes tie, either may win
            agree(key, captured, value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["ncr", "mixup", "elr and a bank"])
def test_a_gpu_learns_what_a_cpu_learns(name):
    with exact():
        here = go(*ready(EXPERIMENTS[name], "cuda", captures=True), range(3))
    there = go(*ready(EXPERIMENTS[name], "cpu", captures=False), range(3))
    for key, value in there.items():
        if key.startswith("network"):
            agree(key, here, value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("captures", [True, False])
def test_no_step_waits_for_the_device(name, captures):
    step, order = ready(EXPERIMENTS[name], "cuda", captures=captures, dtype=torch.bfloat16)
    order.to(torch.device("cuda"))
    go(step, order, range(5))
    with no_waiting():
        for number in range(5, 10):
            step(Rows(order.batch(number), None), step._phase)
    assert step.is_fine.item()


def test_another_stage_is_captured_again():
    experiment = EXPERIMENTS["a start in the second epoch"]
    step, order = ready(experiment, "cuda", captures=True)
    go(step, order, range(order.batches_per_pass))
    first = step._graph
    assert first is not None
    assert "ncr" not in step.names
    go(step, order, range(order.batches_per_pass, order.batches_per_pass + 5))
    assert step._graph is not None
    assert step._graph is not first
    assert step.means()["ncr"] > 0


@pytest.mark.parametrize("captures", [True, False])
def test_what_is_not_finite_changes_nothing(captures):
    step, order = ready(replace(SMALL, objective=NCR(base=ELR())), "cuda", captures=captures)
    before = go(step, order, range(6))
    step.setting.label_weights.fill_(torch.nan)
    after = go(step, order, range(6, 9))
    assert not step.is_fine.item()
    assert step.bad_step.item() == 6
    for key, value in before.items():
        if key != "count":
            assert torch.equal(after[key], value), key


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
@pytest.mark.parametrize("name", ["ncr", "two networks", "self taught"])
def test_a_compiled_step_learns_what_the_plain_one_learns(name, monkeypatch):
    in_float64(monkeypatch)
    pads = Augment(transforms=(PadCrop(padding=1), Flip()))  # whole pixels, which nothing rounds
    views = Views(first=pads.transforms, second=pads.transforms)
    augment = views if EXPERIMENTS[name].self_taught else pads
    experiment = replace(EXPERIMENTS[name], backbone=ResNet(width=16), augment=augment)
    start = ready(experiment, "cuda", captures=False)[0].tensors()
    compiled = go(*ready(experiment, "cuda", captures=True, compiles=True), range(8))
    plain = go(*ready(experiment, "cuda", captures=False), range(8))
    assert any(
        (plain[key] - value.cpu()).abs().max() > 0.01
        for key, value in start.items()
        if "conv1.weight" in key
    )
    for key, value in plain.items():
        if key.startswith(("network", "average", "memory")):
            agree(key, compiled, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loading", ["resident", "streaming"])
def test_a_run_on_a_gpu_goes_on_where_it_stopped(tmp_path, loading):
    machine = Machine(
        device="cuda", precision="float32", loading=loading, checkpoint_steps=5, workers=2
    )
    experiment = replace(SMALL, epochs=2, machine=machine)
    whole = train(experiment, tmp_path / "whole")
    halves = replace(experiment)
    first = tmp_path / "halves"
    train(halves, first)
    for path in ("result.json", "model.safetensors"):
        (first / path).unlink()
    newest = sorted((first / "checkpoints").iterdir())[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    again = train(halves, first)
    assert again["steps"] == whole["steps"]
    assert abs(again["accuracy"]["test"]["final"] - whole["accuracy"]["test"]["final"]) < 0.1
    assert len((first / "log.jsonl").read_text().splitlines()) == 2
    assert json.loads((first / "result.json").read_text())["images_per_second"] > 0


def test_a_run_on_a_gpu_ends_with_76_where_it_is_not_finite(tmp_path):
    experiment = replace(SMALL, optimizer=SGD(lr=1e30), machine=Machine(device="cuda"))
    with pytest.raises(NotFinite, match="was not finite at step"):
        train(experiment, tmp_path)
    assert json.loads((tmp_path / "not_finite.json").read_text())["examples"]


@pytest.mark.parametrize(
    "transform",
    [
        PadCrop(mode="zeros"),
        Flip(),
        Cutout(size=8, fill=128),
        ColorJitter(),
        RandAugment(),
        RandomResizedCrop(size=32),
    ],
    ids=lambda each: type(each).__name__,
)
def test_transforms_do_the_same_on_a_gpu(transform):
    images = torch.randint(
        0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    indices = torch.arange(64)
    here = transform(images, indices, seed=3, epoch=2)
    there = transform(images.cuda(), indices.cuda(), seed=3, epoch=2).cpu()
    off = (here.int() - there.int()).abs()
    # A pixel on an edge may fall to either side, a rounded one may differ by 1.
    assert (off > 1).float().mean() < 2e-3
    assert (off > 0).float().mean() < 2e-2


def test_averaged_weights_and_steps_that_are_refused_on_a_gpu():
    network = MLP(hidden=(16,)).build(4, num_inputs=8).cuda()
    average = optim.averaged_copy(network)
    optimizer = SGD(lr=0.1).build(network.parameters())
    before = [each.clone() for each in network.parameters()]
    network(torch.randn(32, 8, device="cuda")).logits.square().sum().backward()
    with no_waiting():
        optim.step_if_(optimizer, torch.zeros((), dtype=torch.bool, device="cuda"))
    assert all(torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))
    with no_waiting():
        optim.step_if_(optimizer, torch.ones((), dtype=torch.bool, device="cuda"))
        optim.update_average_(average, network, torch.full((), 0.75, device="cuda"))
    changed = next(iter(network.parameters()))
    assert_close(next(iter(average.parameters())), 0.75 * before[0] + 0.25 * changed)


def test_collectives_and_a_plain_step_run_over_nccl_with_one_process(monkeypatch):
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **place}.items():
        monkeypatch.setenv(name, value)
    distributed._meet("nccl", timedelta(seconds=60))
    try:
        rows = torch.randn(4, 3, device="cuda", requires_grad=True)
        gathered = distributed._Gather.apply(rows)
        gathered.square().sum().backward()
        assert_close(rows.grad, 2 * rows.detach())
        summed = torch.ones(3, device="cuda")
        distributed.distributed.all_reduce(summed)
        distributed.distributed.broadcast(summed, src=0)
        assert summed.tolist() == [1.0, 1.0, 1.0]
        step, order = ready(SMALL, "cuda", captures=False)
        go(step, order, range(3))
        assert step.is_fine.item()
    finally:
        distributed.distributed.destroy_process_group()
