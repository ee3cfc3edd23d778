"""Short training runs that one process can do with whole batches, or several with a shard each."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from nearsay.batch import PADDING, Batch, Mix, Objective, Outputs, pad
from nearsay.losses import ELR, GJS, NCR, Bank, Bootstrap, CrossEntropy, NeighborVote

NUM_EXAMPLES, NUM_CLASSES, NUM_FEATURES, NUM_INPUTS = 20, 4, 8, 5
LEARNING_RATE = 0.3


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to train, and how batches are made; the same rows for any number of processes."""

    objective: Objective
    rows: tuple[int, ...] = (12, 12, 12)  # of every step; both 2 and 3 divide 12
    epochs: tuple[float, ...] = (0, 1, 2)
    views: int = 1
    labels: Literal["mixed", "first half", "none"] = "mixed"
    duplicates: bool = False  # the same example on two ranks and twice on one
    mixed: bool = False  # partners stand on other ranks, too
    teacher: bool = False
    idle: Literal["first", "last"] | None = None  # the rank that gets nothing but padding
    wrapped: bool = False  # let DistributedDataParallel average the gradients
    dtype: torch.dtype = torch.float64


def _bank(kind):
    return Bank(kind=kind, size=30)  # four batches go around the queue once


def _nearsay(**choices):
    return Scenario(
        objective=NeighborVote(k=6, start_epoch=1, threshold=0.4), views=2, teacher=True, **choices
    )


SCENARIOS = {
    "cross-entropy": Scenario(objective=CrossEntropy()),
    "soft bootstrap": Scenario(objective=Bootstrap(alpha=0.4)),
    "ELR, teacher": Scenario(objective=ELR(), teacher=True),
    "ELR, mixed": Scenario(objective=ELR(), mixed=True),
    "ELR, uneven": Scenario(objective=ELR(), rows=(12, 13, 13)),
    "ELR, duplicates": Scenario(objective=ELR(), duplicates=True),
    "GJS, two views, uneven": Scenario(objective=GJS(), views=2, rows=(12, 13, 13)),
    "NCR, paper, few neighbors": Scenario(objective=NCR(k=3, alpha=0.6)),
    "NCR, released, all neighbors": Scenario(objective=NCR(k=None, alpha=0.6, variant="released")),
    "NCR, float32": Scenario(objective=NCR(k=3, alpha=0.6, base=ELR()), dtype=torch.float32),
    "NCR, two views": Scenario(objective=NCR(k=4, alpha=0.6), views=2),
    "NCR on ELR, wrapped": Scenario(objective=NCR(k=3, alpha=0.6, base=ELR()), wrapped=True),
    "NCR from epoch 1 on": Scenario(objective=NCR(k=3, alpha=0.6, start_epoch=1, base=ELR())),
    "NCR, queue": Scenario(
        objective=NCR(k=6, alpha=0.6, bank=_bank("queue")),
        rows=(12, 12, 12, 12),
        epochs=(0, 1, 2, 3),
    ),
    "NCR, queue, uneven": Scenario(
        objective=NCR(k=6, alpha=0.6, bank=_bank("queue")), rows=(13, 13, 13)
    ),
    "NCR, queue, duplicates": Scenario(
        objective=NCR(k=6, alpha=0.6, bank=_bank("queue")), duplicates=True
    ),
    "NCR, examples": Scenario(objective=NCR(k=6, alpha=0.6, bank=_bank("examples"))),
    "NCR, examples, duplicates": Scenario(
        objective=NCR(k=6, alpha=0.6, bank=_bank("examples")), duplicates=True
    ),
    "NCR, mixed, partners masked": Scenario(
        objective=NCR(k=3, alpha=0.6, mask_partners=True), mixed=True
    ),
    "NCR, mixed, partners masked, queue, uneven": Scenario(
        objective=NCR(k=6, alpha=0.6, mask_partners=True, base=ELR(), bank=_bank("queue")),
        mixed=True,
        rows=(13, 13, 13),
    ),
    "NCR, uneven": Scenario(objective=NCR(k=3, alpha=0.6), rows=(12, 13, 13)),
    "NCR on GJS, two views, uneven": Scenario(
        objective=NCR(k=3, alpha=0.6, base=GJS()), views=2, rows=(13, 13, 13)
    ),
    "NCR, duplicates": Scenario(objective=NCR(k=3, alpha=0.6, base=ELR()), duplicates=True),
    "NCR, rejecting, uneven": Scenario(
        objective=NCR(k=3, alpha=0.6, reject=0.5), rows=(12, 13, 13)
    ),
    "NCR, a rank without labels": Scenario(
        objective=NCR(k=3, alpha=0.6, base=ELR()), labels="first half"
    ),
    "NCR, no labels at all": Scenario(objective=NCR(k=3, alpha=0.6, base=ELR()), labels="none"),
    "NCR, first rank idle": Scenario(
        objective=NCR(k=3, alpha=0.6, base=ELR(), bank=_bank("queue")),
        rows=(12, 11, 10),
        idle="first",
    ),
    "NCR, last rank idle": Scenario(
        objective=NCR(k=3, alpha=0.6, base=ELR(), bank=_bank("examples")),
        rows=(12, 11, 10),
        idle="last",
    ),
    "nearsay": _nearsay(),
    "nearsay, mixed, uneven": _nearsay(mixed=True, rows=(12, 13, 13)),
    "nearsay, duplicates": _nearsay(duplicates=True),
    "nearsay, a rank without labels": _nearsay(mixed=True, labels="first half"),
    "nearsay, last rank idle": _nearsay(mixed=True, rows=(12, 11, 10), idle="last"),
    "bootstrap, last rank idle": Scenario(objective=Bootstrap(), rows=(12, 11, 10), idle="last"),
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_INPUTS, NUM_FEATURES)
        self.to_features = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.to_logits = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator))

    def forward(self, inputs):
        features = self.to_features(self.hidden(inputs).tanh()).relu()
        return features, self.to_logits(features)


class Step(NamedTuple):
    """The examples of one step, all of them, before views are made."""

    inputs: Tensor  # (B, V, NUM_INPUTS)
    targets: Tensor  # (B, C)
    indices: Tensor  # (B,)
    mix: Mix | None
    plain_targets: Tensor | None  # (B, C) before they were mixed
    teacher: Outputs | None


def make_step(scenario: Scenario, number: int) -> Step:
    generator = torch.Generator().manual_seed(100 + number)
    num_rows = scenario.rows[number]

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = random(num_rows, scenario.views, NUM_INPUTS)
    indices = torch.randperm(NUM_EXAMPLES, generator=generator)[:num_rows]
    if scenario.duplicates:
        # Within a rank, and on two ranks of two or of three.
        indices[[3, 6, 11]] = indices[[2, 1, 0]]
    targets = (2 * random(num_rows, NUM_CLASSES)).softmax(dim=1)
    targets[::4] = torch.eye(NUM_CLASSES, dtype=torch.float64)[indices[::4] % NUM_CLASSES]
    targets[1] *= 0.5  # a label of little weight, so that ranks weigh differently
    targets[5] = 0  # unlabeled
    if scenario.labels != "mixed":
        targets[num_rows // 2 if scenario.labels == "first half" else 0 :] = 0
    mix = plain_targets = None
    if scenario.mixed:
        plain_targets = targets.to(scenario.dtype)
        partners = torch.arange(num_rows).roll(5)
        weight = 0.5 + 0.5 * torch.rand(num_rows, generator=generator, dtype=torch.float64)
        inputs = inputs.lerp(inputs[partners], (1 - weight)[:, None, None])
        targets = targets.lerp(targets[partners], (1 - weight)[:, None])
        mix = Mix(partners, indices[partners], weight.to(scenario.dtype))
    teacher = None
    if scenario.teacher:
        teacher = Outputs(
            *(random(num_rows, size).to(scenario.dtype) for size in (NUM_FEATURES, NUM_CLASSES))
        )
    return Step(
        inputs.to(scenario.dtype), targets.to(scenario.dtype), indices, mix, plain_targets, teacher
    )


def sizes(scenario: Scenario, num_rows: int, num_ranks: int) -> list[int]:
    """How many rows each rank gets: as equal as can be among those that are not idle."""
    if num_ranks == 1:
        return [num_rows]
    workers = num_ranks - (scenario.idle is not None)
    shares = [(num_rows + workers - 1 - worker) // workers for worker in range(workers)]
    return {None: shares, "first": [0, *shares], "last": [*shares, 0]}[scenario.idle]


def make_batch(scenario: Scenario, number: int, rank: int, num_ranks: int) -> Batch:
    """The rows of this rank, padded to the largest share; everything, unpadded, on one process."""
    step = make_step(scenario, number)
    shares = sizes(scenario, len(step.indices), num_ranks)
    rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    one = pad(
        Batch(inputs=step.inputs[rows], targets=step.targets[rows], indices=step.indices[rows]),
        max(shares),
    )

    def padded(values, filling):
        missing = max(shares) - shares[rank]
        return torch.cat([values[rows], values.new_full((missing, *values.shape[1:]), filling)])

    def viewed(values, filling):
        return padded(values, filling).repeat(scenario.views, *(1 for _ in values.shape[1:]))

    mix = plain_targets = teacher = None
    if step.mix is not None:
        # Under several processes a loss may only ask who a partner is, not where it stands.
        mix = Mix(
            viewed(step.mix.partners, 0),
            viewed(step.mix.partner_indices, PADDING),
            viewed(step.mix.weight, 1),
        )
        plain_targets = viewed(step.plain_targets, 0)
    if step.teacher is not None:
        teacher = Outputs(*(viewed(part, torch.nan) for part in step.teacher))
    return Batch(
        inputs=one.inputs.transpose(0, 1).flatten(0, 1),
        targets=one.targets.repeat(scenario.views, 1),
        indices=one.indices.repeat(scenario.views),
        views=scenario.views,
        mix=mix,
        plain_targets=plain_targets,
        teacher=teacher,
    )


def train(scenario: Scenario, rank: int = 0, num_ranks: int = 1) -> dict[str, Tensor]:
    """What several processes must share with one, step by step; names begin with the kind."""
    network = Network().to(scenario.dtype)
    memory = scenario.objective.init_state(NUM_EXAMPLES, NUM_CLASSES, NUM_FEATURES)
    memory = {
        name: value.to(scenario.dtype) if value.is_floating_point() else value
        for name, value in memory.items()
    }
    is_distributed = num_ranks > 1 and torch.distributed.is_initialized()
    is_wrapped = scenario.wrapped and is_distributed
    model = nn.parallel.DistributedDataParallel(network) if is_wrapped else network
    seen = {}
    for number, epoch in enumerate(scenario.epochs):
        batch = make_batch(scenario, number, rank, num_ranks)
        # Outputs for padding must not matter: usual numbers, whose gradient would show, or NaN.
        outputs = Outputs(*model(batch.inputs))
        if number % 2 == 0:
            outputs = Outputs(
                *(value.where(batch.is_real[:, None], torch.nan) for value in outputs)
            )
        stage = scenario.objective.phase(epoch, memory)
        loss = scenario.objective(outputs, batch, torch.tensor(float(epoch)), memory, stage)
        network.zero_grad()
        loss.total.backward()
        seen[f"loss {number} total"] = loss.total.detach()
        seen |= {f"loss {number} {name}": term for name, term in loss.terms.items()}
        gradient = nn.utils.parameters_to_vector(
            [parameter.grad for parameter in network.parameters()]
        )
        if is_distributed and not is_wrapped:
            torch.distributed.all_reduce(gradient)
            gradient /= num_ranks
        seen[f"gradient {number}"] = gradient
        parameters = nn.utils.parameters_to_vector(network.parameters()).detach()
        nn.utils.vector_to_parameters(parameters - LEARNING_RATE * gradient, network.parameters())
        seen |= {f"memory {number} {name}": value.clone() for name, value in memory.items()}
    seen["parameters"] = nn.utils.parameters_to_vector(network.parameters()).detach()
    return seen
