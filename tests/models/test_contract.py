"""What every backbone promises; a new one is tested by being listed."""

from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing import assert_close

from nearsay.batch import Outputs
from nearsay.models import MLP, CosineHead, Linear, PreActResNet18, ResNet, Timm, load_weights

IMAGES = [
    ResNet(width=4),
    ResNet(depth=34, width=2, head=CosineHead()),
    ResNet(depth=50, width=2, small_images=False),
    ResNet(width=2, projection="all", zero_last_gamma=True, statistics="process"),
    PreActResNet18(width=4),
    Timm(name="tiny"),
    Timm(name="narrow", head=CosineHead(scale=4.0)),
]
TABLES = [
    MLP(),
    MLP(hidden=(16, 8), head=CosineHead()),
    MLP(hidden=(8,), batch_norm=False),
    Linear(),
    Linear(head=CosineHead()),
]
BACKBONES = IMAGES + TABLES
NORMALIZED = [b for b in BACKBONES if not isinstance(b, Linear) and getattr(b, "batch_norm", True)]
B, C = 6, 5

every_backbone = pytest.mark.parametrize("backbone", BACKBONES, ids=repr)


def num_inputs_of(backbone):
    return 3 if backbone in IMAGES else 7


def make_inputs(backbone, dtype=torch.float32):
    shape = (B, 3, 32, 32) if backbone in IMAGES else (B, 7)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def build(backbone, seed=0, num_classes=C):
    return backbone.build(num_classes, num_inputs=num_inputs_of(backbone), seed=seed)


def is_equal(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@every_backbone
def test_outputs_are_features_and_the_logits_that_the_head_makes_of_them(backbone):
    state = torch.get_rng_state()
    network = build(backbone)
    outputs = network(make_inputs(backbone))
    assert torch.equal(torch.get_rng_state(), state)  # neither building nor forward draws from it
    assert isinstance(outputs, Outputs)
    assert outputs.features.shape == (B, network.num_features)
    assert outputs.logits.shape == (B, C)
    assert outputs.logits.isfinite().all()
    assert_close(outputs.logits, network.fc(outputs.features), rtol=0, atol=0)
    inputs = make_inputs(backbone)
    if backbone in IMAGES:  # which may have one channel
        one = backbone.build(C, num_inputs=1)
        assert one(inputs[:, :1]).logits.shape == (B, C)
    elif isinstance(backbone, Linear):
        assert outputs.features.equal(inputs)


@every_backbone
def test_gradient_of_the_logits_reaches_every_parameter(backbone):
    network = build(backbone)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # with a gamma of 0 a block is cut off, as is wanted
    prices = torch.randn(B, C, generator=torch.Generator().manual_seed(2))
    (network(make_inputs(backbone)).logits * prices).sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@every_backbone
def test_weights_are_a_function_of_the_seed_alone(backbone):
    torch.manual_seed(1)
    one = build(backbone, seed=3)
    torch.manual_seed(2)
    assert is_equal(one, build(backbone, seed=3))
    assert not is_equal(one, build(backbone, seed=4))
    with torch.device("meta"):  # whatever the default device is
        assert is_equal(one, build(backbone, seed=3))


@every_backbone
def test_rows_do_not_know_each_other_in_evaluation(backbone):
    network = build(backbone).double()
    inputs = make_inputs(backbone, torch.float64)
    network(inputs)
    network.eval()
    before = deepcopy(network.state_dict())
    assert_close(network(inputs[2:4]).logits, network(inputs).logits[2:4])
    assert_close(network.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("backbone", NORMALIZED, ids=repr)
def test_training_normalizes_by_the_batch_and_remembers_it(backbone):
    network = build(backbone).double()
    inputs = make_inputs(backbone, torch.float64)
    before = deepcopy(network.state_dict())
    features = network(inputs).features
    after = network.state_dict()
    counts = [value for name, value in after.items() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(count == 1 for count in counts)
    assert all(not after[name].equal(before[name]) for name in before if "running" in name)
    assert (network.eval()(inputs).features - features).abs().max() > 1e-3


@pytest.mark.parametrize("backbone", IMAGES, ids=repr)
def test_channels_last_changes_nothing_but_speed(backbone):
    network = build(backbone).double()
    other = deepcopy(network).to(memory_format=torch.channels_last)
    inputs = make_inputs(backbone, torch.float64)
    ours = network(inputs)
    theirs = other(inputs.to(memory_format=torch.channels_last))
    assert_close(tuple(theirs), tuple(ours))
    ours.logits.square().sum().backward()
    theirs.logits.square().sum().backward()
    for (name, parameter), twin in zip(network.named_parameters(), other.parameters(), strict=True):
        assert_close(twin.grad, parameter.grad, msg=name)


@every_backbone
def test_lower_precision_stays_finite_and_near(backbone):
    network, inputs = build(backbone), make_inputs(backbone)
    truth = network.eval()(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = network(inputs)
    assert outputs.logits.isfinite().all()
    error = (outputs.features.float() - truth.features).norm() / truth.features.norm()
    assert error < 0.05
    outputs = network.to(torch.bfloat16)(inputs.bfloat16())
    assert outputs.features.dtype == torch.bfloat16
    assert outputs.logits.isfinite().all()


@pytest.mark.parametrize("backbone", [ResNet(width=4), PreActResNet18(width=4)], ids=repr)
def test_features_keep_their_digits_under_autocast(backbone):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = build(backbone)(make_inputs(backbone)).features
    assert features.dtype == torch.float32
    assert (features != features.bfloat16().float()).any()


@every_backbone
def test_weights_survive_a_safetensors_file(backbone, tmp_path):
    network = build(backbone, seed=1)
    network(make_inputs(backbone))  # buffers that are not those of a new network
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    other = build(backbone, seed=2)
    load_weights(other, tmp_path / "weights.safetensors")
    assert is_equal(other, network)


@pytest.mark.parametrize(
    "kind", [ResNet, PreActResNet18, MLP, lambda **choice: Timm(name="tiny", **choice)]
)
def test_statistics_reach_every_normalization(kind):
    choices = {} if kind is MLP or "lambda" in kind.__name__ else {"width": 2}
    network = kind(statistics="process", **choices).build(C, num_inputs=3)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert {module.statistics for module in norms} == {"process"}
    with pytest.raises(ValueError, match="statistics"):
        kind(statistics="rank")


@every_backbone
def test_what_cannot_be_built_is_refused(backbone):
    with pytest.raises(ValueError, match="num_classes"):
        build(backbone, num_classes=0)
    with pytest.raises(ValueError, match="seed"):
        build(backbone, seed=0.5)
    if backbone in TABLES:
        with pytest.raises(ValueError, match="inputs"):
            build(backbone)(torch.zeros(B, 8))
    for hidden in ((), (8, 0)):
        with pytest.raises(ValueError, match="hidden"):
            MLP(hidden=hidden)


def test_layers_of_a_perceptron():
    network = MLP(hidden=(16, 8)).build(C, num_inputs=7)
    names = [type(layer).__name__ for layer in network.body]
    assert names == ["Linear", "BatchNorm", "ReLU"] * 2
    shapes = [tuple(p.shape) for p in network.parameters() if p.ndim == 2]
    assert shapes == [(16, 7), (8, 16), (C, 8)]
    assert (network(torch.randn(B, 7)).features >= 0).all()
    plain = MLP(hidden=(16,), batch_norm=False).build(C, num_inputs=7)
    assert [type(layer).__name__ for layer in plain.body] == ["Linear", "ReLU"]
    assert plain.body[0].bias is not None
