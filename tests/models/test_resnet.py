"""Residual networks against their published sizes and an oracle that reads the state dict only."""

import math
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import avg_pool2d, batch_norm, conv2d, linear, max_pool2d, relu
from torch.testing import assert_close

from nearsay.models import PreActResNet18, ResNet
from nearsay.models.resnet import BLOCKS


@pytest.mark.parametrize(
    ("backbone", "num_classes", "expected"),
    [
        (ResNet(), 10, 11_173_962),
        (ResNet(depth=34), 10, 21_282_122),
        (ResNet(depth=50, small_images=False), 1000, 25_557_032),
        # The published 11 171 146 leave out the normalization of the first convolution.
        (PreActResNet18(), 10, 11_171_146 + 2 * 64),
        # five more shortcuts than usual: 64→64 twice, 128→128, 256→256, 512→512, normalized
        (
            ResNet(projection="all"),
            10,
            11_173_962 + 2 * 64**2 + 128**2 + 256**2 + 512**2 + 2 * (2 * 64 + 896),
        ),
    ],
    ids=repr,
)
def test_number_of_parameters_is_the_published_one(backbone, num_classes, expected):
    network = backbone.build(num_classes)
    assert sum(parameter.numel() for parameter in network.parameters()) == expected


def randomized(backbone, num_classes=5):
    """A network in which no weight, gamma or average is where it started."""
    network = backbone.build(num_classes).double().eval()
    generator = torch.Generator().manual_seed(7)
    for name, value in network.state_dict().items():
        if value.is_floating_point() and value.ndim == 1:
            noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(noise + 0.5 if "var" in name or "weight" in name else noise - 0.5)
    return network


def make_oracle(state):
    """conv(name), norm(name) and has(name) on tensors alone."""

    def conv(name, inputs, stride=1):
        weight = state[f"{name}.weight"]
        return conv2d(inputs, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(name, inputs):
        parts = (
            state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return batch_norm(inputs, *parts)

    return conv, norm


def expected_outputs(backbone, state, images):
    conv, norm = make_oracle(state)
    is_preact = isinstance(backbone, PreActResNet18)
    depth = 18 if is_preact else backbone.depth
    is_small = is_preact or backbone.small_images
    hidden = relu(norm("bn1", conv("conv1", images, 1 if is_small else 2)))
    if not is_small:
        hidden = max_pool2d(hidden, 3, 2, 1)
    for group, number in enumerate(BLOCKS[depth], start=1):
        for place in range(number):
            at, stride = f"layer{group}.{place}", 2 if group > 1 and place == 0 else 1
            if is_preact:
                start = relu(norm(f"{at}.bn1", hidden))
                branch = conv(f"{at}.conv1", start, stride)
                branch = conv(f"{at}.conv2", relu(norm(f"{at}.bn2", branch)))
                has_conv = f"{at}.downsample.weight" in state
                hidden = branch + (conv(f"{at}.downsample", start, stride) if has_conv else start)
                continue
            strides = (1, stride, 1) if depth == 50 else (stride, 1)
            branch = hidden
            for step, own_stride in enumerate(strides, start=1):
                branch = norm(f"{at}.bn{step}", conv(f"{at}.conv{step}", branch, own_stride))
                branch = relu(branch) if step < len(strides) else branch
            if f"{at}.downsample.0.weight" in state:
                hidden = norm(f"{at}.downsample.1", conv(f"{at}.downsample.0", hidden, stride))
            hidden = relu(branch + hidden)
    features = avg_pool2d(hidden, hidden.shape[-1]).flatten(1)
    return features, linear(features, state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize(
    "backbone",
    [
        ResNet(depth=34, width=3),
        ResNet(width=4, small_images=False),
        ResNet(depth=50, width=3, small_images=False),
        ResNet(width=4, projection="all"),
        PreActResNet18(width=4),
    ],
    ids=repr,
)
def test_network_computes_what_the_papers_say(backbone):
    network = randomized(backbone)
    images = torch.randn(
        2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    assert_close(tuple(network(images)), expected_outputs(backbone, network.state_dict(), images))


def test_names_are_those_of_torchvision_and_timm():
    names = ResNet(depth=50, width=2, small_images=False).build(5).state_dict().keys()
    for name in ("conv1.weight", "bn1.running_var", "fc.bias", "layer3.5.conv2.weight"):
        assert name in names
    for name in ("bn3.bias", "downsample.0.weight", "downsample.1.weight"):
        assert f"layer1.0.{name}" in names
    assert "layer1.1.downsample.0.weight" not in names
    layers = {f"layer{number}" for number in range(1, 5)}
    assert {name.split(".")[0] for name in names} == {"conv1", "bn1", "fc", *layers}


@pytest.mark.parametrize("depth", [18, 50])
def test_block_that_starts_at_zero_is_its_shortcut(depth):
    for is_zero in (True, False):
        network = ResNet(depth=depth, width=2, zero_last_gamma=is_zero).build(5)
        for layer in (network.layer1, network.layer2, network.layer3, network.layer4):
            for block in layer:
                places = torch.randn(3, block.conv1.in_channels, 8, 8)
                assert torch.equal(block(places), relu(block.downsample(places))) == is_zero
                *inner, last = (
                    (block.bn1, block.bn2) if depth == 18 else (block.bn1, block.bn2, block.bn3)
                )
                assert (last.weight == (0 if is_zero else 1)).all()
                assert all((norm.weight == 1).all() for norm in inner)


@pytest.mark.parametrize("backbone", [ResNet(width=32), PreActResNet18(width=32)], ids=repr)
def test_convolutions_start_as_he_et_al_draw_them(backbone):
    network = backbone.build(10)
    for layer in (network.conv1, network.layer2[0].conv1, network.layer4[1].conv2):
        weight = layer.weight
        fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
        assert math.isclose(weight.std().item(), math.sqrt(2 / fan_out), rel_tol=0.05)
        assert abs(weight.mean()) < 0.1 * weight.std()


def test_narrow_networks_learn_on_a_cpu():
    """In a process of its own, which torch may end without a word: by large images, or by threads
    that share few.
    """
    code = """
import torch
from nearsay.models import PreActResNet18, ResNet

for network, rows, edge, threads in (
    (ResNet(width=8, small_images=False), 2, 224, 1),
    (ResNet(width=3, small_images=False), 2, 224, 1),
    (PreActResNet18(width=4), 2, 64, 1),
    (ResNet(width=8), 7, 32, 2),
    (ResNet(width=8), 33, 16, 2),
):
    print(network, rows, edge, threads, flush=True)
    torch.set_num_threads(threads)
    learner = network.build(4).to(memory_format=torch.channels_last)
    images = torch.randn(rows, 3, edge, edge).to(memory_format=torch.channels_last)
    learner(images).logits.square().sum().backward()
    assert all(each.grad.isfinite().all() for each in learner.parameters())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("edge", [8, 57])
def test_a_shortcut_of_a_narrow_network_is_a_convolution_with_stride(edge):
    shortcut = ResNet(width=3, small_images=False).build(4).layer2[0].downsample[0].double()
    images = torch.randn(2, 3, edge, edge, dtype=torch.float64, requires_grad=True)
    found = shortcut(images)
    expected = conv2d(images, shortcut.weight, stride=2)
    assert_close(found, expected)
    sources = (images, shortcut.weight)
    slopes = (torch.autograd.grad(each.square().sum(), sources) for each in (found, expected))
    assert_close(next(slopes), next(slopes))


@pytest.mark.parametrize("choice", [("depth", 101), ("projection", "none"), ("width", 0)])
def test_impossible_choices_are_refused(choice):
    with pytest.raises(ValueError, match=choice[0]):
        ResNet(**dict([choice]))
