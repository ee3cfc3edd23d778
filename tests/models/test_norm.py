"""BatchNorm on one process; tests/distributed has it on several."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing import assert_close

from nearsay.models.norm import BatchNorm, _global_moments, _Normalize, synchronize

C = 4
LAYOUTS = [
    ((6, C, 5, 3), torch.contiguous_format),
    ((6, C, 5, 3), torch.channels_last),
    ((6, C), torch.contiguous_format),
    ((6, C, 1, 1), torch.contiguous_format),
]
every_layout = pytest.mark.parametrize(("shape", "layout"), LAYOUTS)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def make_pair(shape, **choices):
    """torch's and ours, with the same parameters that are not those of the start."""
    theirs = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(C, **choices)
    nn.init.uniform_(theirs.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(1))
    nn.init.uniform_(theirs.bias, generator=torch.Generator().manual_seed(2))
    ours = BatchNorm(C, **choices)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choices", [{"eps": 1e-3, "momentum": 0.3}, {"momentum": None}])
def test_one_process_is_torch_bit_for_bit(shape, layout, dtype, choices):
    pair = make_pair(shape, **choices)
    seen = []
    for norm in pair:
        inputs = [
            random(*shape, seed=s, dtype=dtype).to(memory_format=layout).requires_grad_()
            for s in (3, 4, 5)
        ]
        outputs = [norm(inputs[0]), norm(inputs[1]), norm.eval()(inputs[2])]
        sum((output * random(*shape, seed=9, dtype=dtype)).sum() for output in outputs).backward()
        assert all(output.is_contiguous(memory_format=layout) for output in outputs)
        gradients = [value.grad for value in (*inputs, norm.weight, norm.bias)]
        seen.append([*outputs, *gradients, *norm.state_dict().values()])
    for theirs, ours in zip(*seen, strict=True):
        assert torch.equal(theirs, ours)
    assert list(pair[0].state_dict()) == list(pair[1].state_dict())


@every_layout
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_general_path_is_torch_on_one_process(shape, layout, dtype):
    """What several processes run, where one can check it: its collectives are the identity here."""
    theirs, ours = (norm.double() if dtype == torch.float64 else norm for norm in make_pair(shape))
    seen = []
    for norm in (theirs, ours):
        inputs = (
            (3 + random(*shape, seed=3, dtype=dtype))
            .to(memory_format=layout)
            .detach()
            .requires_grad_()
        )
        if norm is theirs:
            outputs = norm(inputs)
        else:
            moments = _global_moments(inputs.detach())
            norm._track(*moments)
            outputs = _Normalize.apply(inputs, norm.weight, norm.bias, *moments, norm.eps)
        (outputs * random(*shape, seed=9, dtype=dtype)).sum().backward()
        assert outputs.dtype == inputs.grad.dtype == dtype
        seen.append(
            [outputs, inputs.grad, norm.weight.grad, norm.bias.grad, *norm.state_dict().values()]
        )
    rounding = (
        {} if dtype == torch.float64 else {"rtol": 0.016, "atol": 0.01}
    )  # torch itself rounds in between
    for expected, actual in zip(*seen, strict=True):
        assert_close(actual, expected, **rounding)


@pytest.mark.parametrize("shape", [(6, C, 2, 3), (6, C)])
def test_gradient_of_the_general_path_is_its_slope(shape):
    def normalize(inputs, weight, bias):
        return _Normalize.apply(inputs, weight, bias, *_global_moments(inputs.detach()), 1e-5)

    values = [random(*shape, seed=1), random(C, seed=2), random(C, seed=3)]
    assert torch.autograd.gradcheck(normalize, [value.requires_grad_() for value in values])


@pytest.mark.parametrize("mean", [0.0, 10_000.0])
def test_moments_keep_their_digits_where_the_mean_is_large(mean):
    inputs = (random(64, C, 8, 8) + mean).float()
    actual, variance, count = _global_moments(inputs)
    assert count == 64 * 64
    truth = inputs.double()
    assert_close(actual.double(), truth.mean(dim=(0, 2, 3)), rtol=1e-6, atol=1e-6)
    # Sums of squares in float32 would be wrong by any amount.
    assert_close(variance.double(), truth.var(dim=(0, 2, 3), correction=0), rtol=1e-5, atol=0)


def test_nothing_looks_at_a_number():
    """Values of these tensors do not exist, so that asking for one, which would stall a device, is
    an error.
    """
    with FakeTensorMode():
        for momentum in (0.1, None):
            norm = BatchNorm(C, momentum=momentum)
            # The one it had is a known constant.
            norm.num_batches_tracked = torch.empty((), dtype=torch.int64)
            inputs = torch.randn(6, C, 5, 3, requires_grad=True)
            moments = _global_moments(inputs.detach())
            norm._track(*moments)
            _Normalize.apply(inputs, norm.weight, norm.bias, *moments, norm.eps).sum().backward()
            assert inputs.grad.shape == inputs.shape


@pytest.mark.parametrize("shape", [(6,), (6, C, 5), (6, C + 1, 2, 2)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="inputs"):
        BatchNorm(C)(torch.zeros(shape))


class Activated(nn.BatchNorm2d):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, inputs):
        return self.act(self.drop(super().forward(inputs)))


class Foreign(nn.BatchNorm2d):
    pass


def make_network():
    return nn.Sequential(
        nn.Conv2d(3, C, 3),
        nn.BatchNorm2d(C, eps=1e-3, momentum=0.2),
        nn.Sequential(Activated(C), Foreign(C), nn.BatchNorm2d(C, affine=False)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(C, momentum=None),
    )


def test_synchronize_replaces_what_it_knows_and_moves_the_tensors_over():
    network = make_network()
    network[5].eval()
    parameters, names = list(network.parameters()), list(network.state_dict())
    kept = [network[2][1], network[2][2]]
    changed = synchronize(network, "process")
    assert changed is network
    assert [
        isinstance(module, BatchNorm) for module in (network[1], network[2][0], network[5])
    ] == [True] * 3
    assert [network[2][1], network[2][2]] == kept
    assert all(one is other for one, other in zip(network.parameters(), parameters, strict=True))
    assert list(network.state_dict()) == names
    assert (network[1].eps, network[1].momentum, network[1].statistics) == (1e-3, 0.2, "process")
    assert network[5].momentum is None
    assert (network[1].training, network[5].training) == (True, False)


def test_synchronized_network_computes_the_same():
    theirs = make_network()
    ours = synchronize(deepcopy(theirs))
    inputs = random(6, 3, 8, 8, dtype=torch.float32)
    assert torch.equal(ours(inputs), theirs(inputs))
    assert torch.equal(ours.eval()(inputs), theirs.eval()(inputs))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
    assert (functional.silu(random(3)) < 0).any()  # so that an activation left out would show


def test_synchronize_of_a_lone_layer_gives_its_successor():
    assert isinstance(synchronize(nn.BatchNorm2d(C)), BatchNorm)
