"""BatchNorm on one process or on several."""

import torch
import torch.distributed
from torch import Tensor, nn

from nearsay.models import MLP, BatchNorm, PreActResNet18, ResNet

C, ROWS = 3, 8
CASES = {  # shape of a row, type, offset of the values, shares of the rows, choices
    "images": ((C, 4, 5), torch.float64, 1.0, None, {}),
    "channels last": ((C, 4, 5), torch.float64, 1.0, None, {}),
    "features": ((C,), torch.float64, 1.0, None, {}),
    "own choices": ((C, 4, 5), torch.float64, 1.0, None, {"eps": 1e-2, "momentum": 0.3}),
    "cumulative": ((C, 4, 5), torch.float64, 1.0, None, {"momentum": None}),
    "uneven": ((C, 4, 5), torch.float64, 1.0, (2, 6), {}),
    "one row each": ((C,), torch.float64, 1.0, (1, 1), {}),
    "float32": ((C, 4, 5), torch.float32, 1.0, None, {}),
    "float32, large mean": ((C, 16, 16), torch.float32, 1000.0, None, {}),
    "bfloat16": ((C, 4, 5), torch.bfloat16, 1.0, None, {}),
    "per process": ((C, 4, 5), torch.float64, 1.0, None, {"statistics": "process"}),
}
NETWORKS = {
    "ResNet": ResNet(width=4, zero_last_gamma=False),
    "PreActResNet18": PreActResNet18(width=4),
    "MLP": MLP(hidden=(8, 8)),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(name: str, rank: int, num_ranks: int) -> slice:
    if num_ranks == 1:
        return slice(None)
    shares = CASES[name][3] if name in CASES else None
    shares = shares or (ROWS // num_ranks,) * num_ranks
    return slice(sum(shares[:rank]), sum(shares[: rank + 1]))


def make_norm(name: str) -> BatchNorm:
    _, dtype, _, _, choices = CASES[name]
    norm = BatchNorm(C, **choices)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.5 * random(C, seed=1))
        norm.bias.copy_(random(C, seed=2))
    return norm.double() if dtype == torch.float64 else norm


def make_inputs(name: str, number: int) -> Tensor:
    shape, dtype, offset, shares, _ = CASES[name]
    scale = torch.arange(1, C + 1).view(C, *(1,) * (len(shape) - 1))
    # So that shards differ in mean.
    drift = torch.arange(sum(shares or (ROWS,))).view(-1, *(1,) * len(shape)) / 4
    inputs = random(len(drift), *shape, seed=10 + number) * scale + drift + offset
    return inputs.to(dtype)


def run_norm(name: str, rank: int, num_ranks: int) -> dict[str, Tensor]:
    """Two steps of training and one of evaluation on this rank's rows."""
    norm, seen = make_norm(name), {}
    rows = rows_of(name, rank, num_ranks)
    layout = torch.channels_last if name == "channels last" else torch.preserve_format
    for number in range(3):
        norm.train(number < 2)
        inputs = make_inputs(name, number)[rows].to(memory_format=layout).detach().requires_grad_()
        prices = random(*make_inputs(name, number).shape, seed=20 + number)[rows].to(inputs.dtype)
        norm.zero_grad()
        outputs = norm(inputs)
        (outputs * prices).sum().backward()
        assert outputs.is_contiguous(memory_format=layout) if name == "channels last" else True
        seen |= {f"outputs {number}": outputs, f"gradient {number}": inputs.grad}
        seen |= {f"weight {number}": norm.weight.grad, f"bias {number}": norm.bias.grad}
        seen |= {f"buffer {number} {kind}": value for kind, value in norm.named_buffers()}
        seen = {key: value.detach().clone() for key, value in seen.items()}
    return seen


def run_network(
    name: str, rank: int, num_ranks: int, *, wrapped: bool = False
) -> dict[str, Tensor]:
    """Two steps of training; gradients are averaged over processes, by hand or by DDP."""
    network = NETWORKS[name].build(4, num_inputs=3).double()
    model = nn.parallel.DistributedDataParallel(network) if wrapped else network
    shape = (ROWS, 3) if name == "MLP" else (ROWS, 3, 16, 16)
    rows, seen = rows_of(name, rank, num_ranks), {}
    for number in range(2):
        outputs = model(random(*shape, seed=30 + number)[rows])
        prices = random(ROWS, 4, seed=40 + number)[rows]
        network.zero_grad()
        (outputs.logits * prices).sum(dim=1).mean().backward()
        gradient = nn.utils.parameters_to_vector(
            [parameter.grad for parameter in network.parameters()]
        )
        if num_ranks > 1 and not wrapped:
            torch.distributed.all_reduce(gradient)
            gradient /= num_ranks
        seen |= {f"outputs {number}": outputs.logits.detach(), f"gradient {number}": gradient}
        parameters = nn.utils.parameters_to_vector(network.parameters()).detach()
        nn.utils.vector_to_parameters(parameters - 0.05 * gradient, network.parameters())
    return seen | {f"buffer {name}": value for name, value in network.named_buffers()}


def refuses_to_differentiate_twice() -> bool:
    norm, inputs = BatchNorm(C).double(), random(ROWS, C, seed=1).requires_grad_()
    (gradient,) = torch.autograd.grad((norm(inputs) ** 3).sum(), inputs, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return "once_differentiable" in str(error)
    return False


def run_all(rank: int, num_ranks: int) -> dict[str, dict[str, Tensor]]:
    results = {f"norm {name}": run_norm(name, rank, num_ranks) for name in CASES}
    results |= {f"norm {name}": run_network(name, rank, num_ranks) for name in NETWORKS}
    results["norm ResNet, wrapped"] = run_network("ResNet", rank, num_ranks, wrapped=True)
    results["norm twice"] = {"is refused": torch.tensor(refuses_to_differentiate_twice())}
    return results
