"""NCR in training scripts of timm: its networks, task, mixup and averaged networks."""

import pytest
import torch
from integrations.noisy_digits import OBJECTIVE, noisy_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import nearsay
from nearsay.losses import NCR

CHOICES = {"test_byobnet": {}, "test_vit": {"img_size": 8, "patch_size": 4}, "test_resnet": {}}


@pytest.fixture
def timm(for_timm):
    for part in ("data", "optim", "task", "utils"):
        pytest.importorskip(f"timm.{part}")
    return pytest.importorskip("timm")


def build(timm, name="test_byobnet", seed=0, **choices):
    torch.manual_seed(seed)
    return timm.create_model(name, num_classes=10, **CHOICES.get(name, {}), **choices)


@pytest.mark.parametrize("name", CHOICES)
def test_the_loss_is_that_of_the_functions(timm, for_timm, name):
    # Whose statistics would move in training.
    network, data = build(timm, name).eval(), noisy_digits(0)
    images, labels = data.images[:40], data.labels[:40]
    features = network.forward_head(network.forward_features(images), pre_logits=True)
    logits = network.forward_head(network.forward_features(images))
    wanted = 0.1 * cross_entropy(logits, labels) + 0.9 * nearsay.ncr(logits, features, k=10)
    loss_fn = for_timm.ncr_loss(network, OBJECTIVE)
    found = loss_fn(network(images), labels)
    assert_close(found, wanted, rtol=0, atol=1e-6)
    one, other = (torch.autograd.grad(loss, list(network.parameters())) for loss in (found, wanted))
    assert_close(one, other)
    assert one[0].abs().sum() > 0  # of the layer that sees the images


def test_the_task_of_a_script_takes_it_with_mixup_and_averaging(timm, for_timm):
    network, data = build(timm), noisy_digits(0)
    loss_fn = for_timm.ncr_loss(network, OBJECTIVE)
    averaged = timm.utils.ModelEmaV3(network, decay=0.9)
    mixup = timm.data.Mixup(mixup_alpha=0.2, num_classes=10, label_smoothing=0.1)
    task = timm.task.ClassificationTask(network, loss_fn, verbose=False)
    optimizer = timm.optim.create_optimizer_v2(network, opt="adamw", lr=0.003)
    before = network.get_classifier().weight.detach().clone()
    for part in torch.arange(200).split(100):
        images, targets = mixup(data.images[part], data.labels[part].clone())
        result = task(images, targets)
        wanted = 0.1 * cross_entropy(result["output"], targets) + 0.9 * loss_fn.terms["ncr"]
        assert_close(result["loss"], wanted)
        (result["loss"] / 2).backward()  # as scripts accumulate
        with torch.no_grad():
            averaged.module(images)  # whose hook is a copy
    optimizer.step()
    averaged.update(network)
    assert (network.get_classifier().weight != before).all()
    assert 0 < loss_fn.terms["ncr"] < 5


def test_compiled_and_wrapped_networks_are_looked_into(timm, for_timm):
    network, data = build(timm).eval(), noisy_digits(0)
    images, labels = data.images[:20], data.labels[:20]
    wanted = for_timm.ncr_loss(network, OBJECTIVE)(network(images), labels)
    compiled = torch.compile(build(timm).eval(), backend="eager")
    assert_close(for_timm.ncr_loss(compiled, OBJECTIVE)(compiled(images), labels), wanted)
    wrapped = nn.DataParallel(build(timm).eval(), device_ids=[])
    assert_close(for_timm.ncr_loss(wrapped, OBJECTIVE)(wrapped(images), labels), wanted)


def test_the_epoch_is_told_as_samplers_are_told(timm, for_timm):
    network, data = build(timm), noisy_digits(0)
    loss_fn = for_timm.ncr_loss(network, NCR(k=5, start_epoch=1))
    found = []
    for epoch in range(3):
        loss_fn.set_epoch(epoch)
        loss_fn(network(data.images[:30]), data.labels[:30])
        found.append("ncr" in loss_fn.terms)
    assert found == [False, True, True]


def test_networks_without_one_linear_classifier_are_refused(timm, for_timm):
    with pytest.raises(ValueError, match=r"^model .* got Linear"):
        for_timm.ncr_loss(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"^model .* got Identity"):
        for_timm.ncr_loss(timm.create_model("test_byobnet", num_classes=0))
