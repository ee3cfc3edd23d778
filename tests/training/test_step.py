"""One step against a loop of plain torch, and all that a step must leave as it is."""

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

from nearsay import distributed
from nearsay.batch import Batch, Loss, Mix, Outputs, one_hot
from nearsay.data import Toy
from nearsay.data.loader import Rows
from nearsay.experiment import Experiment
from nearsay.losses import ELR, GJS, NCR, Bank, CrossEntropy, NeighborVote
from nearsay.models import MLP, ResNet
from nearsay.optim import SGD, Constant, Cosine, ramp
from nearsay.training.step import (
    Setting,
    Step,
    make_dynamics,
    make_learners,
    observe_,
    restore,
    shard,
)
from nearsay.transforms import (
    PLUS_MINUS_ONE,
    Augment,
    Flip,
    Mixup,
    PadCrop,
    RandomResizedCrop,
    Views,
)

# Of a batch.
NUM_CLASSES, NUM_EXAMPLES, NUM_FEATURES, SIZE = 4, 48, 6, 16
PER_PASS = NUM_EXAMPLES // SIZE
CPU = torch.device("cpu")

FEATURES = Experiment(
    data=Toy(),
    backbone=MLP(hidden=(12,)),
    objective=CrossEntropy(),
    normalize=None,
    optimizer=SGD(lr=0.1, nesterov=True, weight_decay=0.01),
    schedule=Cosine(warmup=1, final=0.1),
    epochs=3,
    batch_size=SIZE,
    seed=5,
)
IMAGES = replace(
    FEATURES,
    backbone=ResNet(width=4),
    normalize=PLUS_MINUS_ONE,
    optimizer=SGD(lr=0.02),
    schedule=Constant(),
    augment=Augment(transforms=(PadCrop(padding=1), Flip())),
)
EXPERIMENTS = {
    "features": FEATURES,
    "images": IMAGES,
    "mixup": replace(FEATURES, mixup=Mixup()),
    "images and mixup": replace(IMAGES, mixup=Mixup(alpha=0.5)),
    "class weights": replace(FEATURES, class_weights=True),
    "clipping": replace(FEATURES, clip=0.05),
    "averaging": replace(FEATURES, averaging=0.9),
    "averaging that ramps up": replace(FEATURES, averaging=0.9, averaging_ramp=2.0),
    "two views": replace(
        IMAGES, objective=GJS(), augment=Views(first=(Flip(),), second=(PadCrop(padding=1), Flip()))
    ),
    "memory": replace(FEATURES, objective=NCR(k=3, alpha=0.5, base=ELR(), bank=Bank(size=32))),
    "a later start": replace(FEATURES, objective=NCR(k=3, alpha=0.5, start_epoch=1)),
    "self taught": replace(
        IMAGES,
        averaging=0.8,
        self_taught=True,
        objective=NeighborVote(k=5, start_epoch=1, threshold=0.3),
        mixup=Mixup(views="first"),
        augment=Views(first=(Flip(),), second=(PadCrop(padding=1), Flip())),
    ),
    "two networks": replace(
        FEATURES,
        networks=2,
        averaging=0.8,
        objective=ELR(),
        mixup=Mixup(),
        clip=0.5,
        class_weights=True,
    ),
}


class Recording:
    """Cross-entropy that keeps what it was given."""

    def __init__(self):
        self.calls = []

    def init_state(self, num_examples, num_classes, num_features):
        return {}

    def phase(self, epoch, state):
        return f"stage {int(epoch)}"

    def __call__(self, outputs, batch, epoch, memory, stage):
        self.calls.append((batch, epoch.clone(), stage))
        return CrossEntropy()(outputs, batch, epoch, {}, "cross_entropy")


def data_of(experiment):
    """(inputs, given): a few without a label."""
    generator = torch.Generator().manual_seed(1)
    given = torch.randint(-1, NUM_CLASSES, (NUM_EXAMPLES,), generator=generator)
    if isinstance(experiment.backbone, ResNet):
        return torch.randint(
            0, 256, (NUM_EXAMPLES, 3, 8, 8), dtype=torch.uint8, generator=generator
        ), given
    return torch.randn(NUM_EXAMPLES, NUM_FEATURES, generator=generator), given


def weights_of(experiment):
    return (
        torch.tensor([0.5, 2.0, 1.0, 0.75]) if experiment.class_weights else torch.ones(NUM_CLASSES)
    )


def ready(experiment, *, per_epoch=PER_PASS, is_resident=True, is_cut=False):
    inputs, given = data_of(experiment)
    setting = Setting(
        source=inputs if is_resident else None,
        given=(given,) * experiment.networks,
        label_weights=weights_of(experiment),
        batches_per_epoch=per_epoch,
        batches_per_pass=PER_PASS,
        is_cut=is_cut,
        device=CPU,
        dtype=torch.float32,
        captures=False,
        compiles=False,
    )
    return Step(
        experiment, setting, make_learners(experiment, NUM_EXAMPLES, NUM_CLASSES, inputs[0], CPU)
    )


def batch_of(number):
    order = torch.randperm(
        NUM_EXAMPLES, generator=torch.Generator().manual_seed(number // PER_PASS)
    )
    return order.view(PER_PASS, SIZE)[number % PER_PASS]


def go(step, numbers):
    for number in numbers:
        epoch = float(number // step.setting.batches_per_epoch)
        step(
            Rows(batch_of(number), None),
            step.experiment.objective.phase(epoch, step.learners[0].state),
        )
    return {name: tensor.clone() for name, tensor in step.tensors().items()}


def by_hand(experiment, num_steps, *, per_epoch=PER_PASS):
    """What the networks, their averages and their memory are after some steps, by a loop that anybody could write."""
    inputs, given = data_of(experiment)
    seeds = [experiment.seed + number * 2**32 for number in range(experiment.networks)]
    networks = [
        experiment.backbone.build(NUM_CLASSES, num_inputs=inputs.shape[1], seed=seed).to(
            memory_format=torch.channels_last if inputs.ndim == 4 else torch.preserve_format
        )
        for seed in seeds
    ]
    averages = [copy.deepcopy(network).eval() for network in networks]
    sizes = (NUM_EXAMPLES, NUM_CLASSES, networks[0].num_features)
    memories = [experiment.objective.init_state(*sizes) for _ in networks]
    spec = experiment.optimizer
    choices = {
        "momentum": spec.momentum,
        "nesterov": spec.nesterov,
        "weight_decay": spec.weight_decay,
    }
    optimizers = [torch.optim.SGD(network.parameters(), lr=1.0, **choices) for network in networks]
    for number in range(num_steps):
        epoch, turn, who = number / per_epoch, number // PER_PASS, batch_of(number)
        stage = experiment.objective.phase(float(number // per_epoch), memories[0])
        for each, (network, optimizer, memory) in enumerate(
            zip(networks, optimizers, memories, strict=True)
        ):
            targets = one_hot(given[who], NUM_CLASSES) * weights_of(experiment)
            batch = Batch(inputs=inputs[who], targets=targets, indices=who)
            if experiment.augment is not None:
                batch = experiment.augment(batch, seed=seeds[each], epoch=turn)
                batch = replace(
                    batch, inputs=batch.inputs.contiguous(memory_format=torch.channels_last)
                )
                batch = replace(
                    batch, inputs=PLUS_MINUS_ONE(batch.inputs, batch.indices, seed=0, epoch=0)
                )
            with torch.no_grad():
                teacher = averages[1 - each](batch.inputs) if experiment.networks == 2 else None
                # By the statistics of the batch, which are forgotten.
                if experiment.self_taught:
                    own = copy.deepcopy(averages[each]).train()(batch.inputs[:SIZE])
                    teacher = Outputs(own.features.repeat(2, 1), own.logits.repeat(2, 1))
            if experiment.mixup is not None:
                batch = experiment.mixup(batch, seed=seeds[each], epoch=turn)
            batch = replace(batch, teacher=teacher)
            loss = experiment.objective(
                network(batch.inputs), batch, torch.tensor(epoch), memory, stage
            )
            optimizer.zero_grad()
            loss.total.backward()
            if experiment.clip is not None:
                clip_grad_norm_(network.parameters(), experiment.clip)
            # Of the first step the middle, since a warm-up begins at 0.
            moment = max(epoch, 0.5 / per_epoch)
            optimizer.param_groups[0]["lr"] = spec.lr * experiment.schedule.factor(
                moment, experiment.epochs
            )
            optimizer.step()
            if experiment.averaging is not None:
                share = ramp(epoch, experiment.averaging_ramp) if experiment.averaging_ramp else 1.0
                average_by_hand(averages[each], network, experiment.averaging * share)
    return networks, averages, memories


def average_by_hand(average, network, decay):
    news = network.state_dict()
    for name, held in average.state_dict().items():
        new = news[name]
        held.copy_(decay * held + (1 - decay) * new if held.is_floating_point() else new)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_steps_are_those_of_a_plain_loop(name):
    experiment, num_steps = EXPERIMENTS[name], 5
    step = ready(experiment)
    go(step, range(num_steps))
    networks, averages, memories = by_hand(experiment, num_steps)
    assert step.is_fine
    assert step.count == num_steps
    # Rates and epochs are float32 in a step.
    close = {"rtol": 1e-5, "atol": 1e-6}
    for learner, network, average, memory in zip(
        step.learners, networks, averages, memories, strict=True
    ):
        assert_close(learner.network.state_dict(), network.state_dict(), **close)
        # Features of averaged weights by the statistics of a small batch carry the rounding of all steps before.
        assert_close(
            learner.state,
            memory,
            **({"rtol": 1e-3, "atol": 1e-4} if experiment.self_taught else close),
        )
        if experiment.averaging is not None:
            assert_close(learner.average.state_dict(), average.state_dict(), **close)


def test_the_rate_of_a_step_is_that_of_its_epoch_even_where_an_epoch_is_no_pass():
    experiment = replace(FEATURES, epochs=2)
    step = ready(experiment, per_epoch=4)
    go(step, range(7))
    networks, _, _ = by_hand(experiment, 7, per_epoch=4)
    assert_close(
        step.learners[0].network.state_dict(), networks[0].state_dict(), rtol=1e-5, atol=1e-6
    )
    assert step.learners[0].optimizer.param_groups[0]["lr"].item() == pytest.approx(
        0.1 * experiment.schedule.factor(6 / 4, 2)
    )


def test_an_objective_hears_of_epochs_and_draws_of_passes():
    objective, seen = Recording(), []

    class Heard(Mixup):
        def __call__(self, batch, *, seed, epoch):
            seen.append((seed, int(epoch)))
            return super().__call__(batch, seed=seed, epoch=epoch)

    step = ready(replace(FEATURES, objective=objective, mixup=Heard()), per_epoch=2)
    go(step, range(7))
    assert [epoch.item() for _, epoch, _ in objective.calls] == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert [stage for _, _, stage in objective.calls] == [
        f"stage {epoch}" for epoch in (0, 0, 1, 1, 2, 2, 3)
    ]
    assert seen == [(5, turn) for turn in (0, 0, 0, 1, 1, 1, 2)]


def test_prepared_rows_are_what_the_network_is_trained_on():
    objective = Recording()
    step = ready(replace(IMAGES, objective=objective))
    go(step, range(4))
    for number, (batch, _, _) in enumerate(objective.calls):
        assert torch.equal(
            step.prepare(Rows(batch_of(number), None), number // PER_PASS), batch.inputs
        )
    assert not torch.equal(step.prepare(Rows(batch_of(3), None), 0), objective.calls[3][0].inputs)


def test_each_network_is_taught_by_the_average_of_the_other_on_images_that_are_not_mixed():
    objective = Recording()
    experiment = replace(IMAGES, objective=objective, networks=2, averaging=0.5, mixup=Mixup())
    step = ready(experiment)
    go(step, range(1))
    before = copy.deepcopy(step.averages())
    go(step, range(1, 2))
    inputs, _ = data_of(experiment)
    who = batch_of(1)
    # The second network comes after the first, whose average has moved by then.
    for number, teacher in enumerate((before[1], step.averages()[0])):
        seed = experiment.seed + number * 2**32
        plain = experiment.augment(
            Batch(inputs=inputs[who], targets=torch.zeros(SIZE, NUM_CLASSES), indices=who),
            seed=seed,
            epoch=0,
        ).inputs
        plain = PLUS_MINUS_ONE(
            plain.contiguous(memory_format=torch.channels_last), who, seed=0, epoch=0
        )
        batch = objective.calls[2 + number][0]
        assert batch.mix is not None
        assert not torch.equal(batch.inputs, plain)
        assert not batch.teacher.logits.requires_grad
        assert_close(batch.teacher.logits, teacher(plain).logits)


def test_rows_that_bring_their_inputs_are_learned_as_those_on_the_device():
    resident, streamed = ready(FEATURES), ready(FEATURES, is_resident=False)
    inputs, _ = data_of(FEATURES)
    for number in range(4):
        resident(Rows(batch_of(number), None), "cross_entropy")
        streamed(Rows(batch_of(number), inputs[batch_of(number)]), "cross_entropy")
    assert_equal(streamed.tensors(), resident.tensors())


def test_views_cut_by_a_worker_and_rows_that_could_not_be_read():
    objective = Recording()
    crops = (RandomResizedCrop(size=8),)
    experiment = replace(IMAGES, objective=objective, augment=Views(first=crops, second=crops))
    step = ready(experiment, is_resident=False, is_cut=True)
    inputs, given = data_of(experiment)
    labeled = (given >= 0).nonzero()[:3, 0]
    who = torch.cat([labeled, torch.tensor([-1])])
    step(Rows(who, inputs[[0, 1, 2, 3, 4, 5, 6, 7]]), "any")
    batch = objective.calls[0][0]
    assert batch.views == 2
    assert batch.indices.tolist() == who.tolist() * 2
    expected = torch.cat([torch.eye(NUM_CLASSES)[given[labeled]], torch.zeros(1, NUM_CLASSES)])
    assert_close(batch.targets, expected.repeat(2, 1))
    assert_close(batch.inputs, inputs[:8].float() / 127.5 - 1)
    assert step.dynamics["count"].nonzero()[:, 0].tolist() == sorted(labeled.tolist())


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


class Steep:
    """A finite loss without a finite gradient."""

    def init_state(self, num_examples, num_classes, num_features):
        return {}

    def phase(self, epoch, state):
        return ""

    def __call__(self, outputs, batch, epoch, memory, stage):
        # At 0 the slope of a root is infinite.
        is_fine = (epoch < 1).float()
        return Loss(
            outputs.logits.square().mean() + (is_fine + 0 * outputs.logits.sum()).sqrt(), {}
        )


@pytest.mark.parametrize(
    "name", [*sorted(EXPERIMENTS.keys() - {"a later start"}), "gradient alone"]
)
def test_what_is_not_finite_changes_nothing_from_then_on(name):
    experiment = EXPERIMENTS.get(name, replace(FEATURES, objective=Steep(), averaging=0.9))
    if isinstance(experiment.backbone, ResNet):
        experiment = replace(experiment, normalize=Poison())
    step = ready(experiment)
    before = go(step, range(PER_PASS))
    Poison.is_on = True
    if name != "gradient alone" and step.setting.source.is_floating_point():
        step.setting.source[batch_of(PER_PASS)[2]] = math.nan
    after = go(step, range(PER_PASS, PER_PASS + 1))
    Poison.is_on = False
    step.setting.source.nan_to_num_()
    later = go(step, range(PER_PASS + 1, PER_PASS + 3))
    assert not step.is_fine
    assert step.bad_step == PER_PASS
    assert (after.pop("count"), later.pop("count"), before.pop("count")) == (
        PER_PASS + 1,
        PER_PASS + 3,
        PER_PASS,
    )
    assert_equal(after, before)
    assert_equal(later, before)


class Poison:
    """Images become numbers, or nothing that is one."""

    num_draws = 0
    is_on = False

    def apply(self, images, draws):
        return images / 255 + (math.inf if Poison.is_on else 0.0)


def test_dynamics_are_those_of_a_scalar_loop():
    num_examples, num_classes = 7, 3
    generator = torch.Generator().manual_seed(2)
    dynamics = make_dynamics(num_examples, CPU)
    histories = [[] for _ in range(num_examples)]
    labels = torch.tensor([0, 1, 2, 0, 1, -1, 2])
    for _ in range(6):
        who = torch.cat(
            [torch.randperm(num_examples, generator=generator)[:5], torch.tensor([-1, -1])]
        )
        logits = 3 * torch.randn(7, num_classes, generator=generator)
        own = labels[who].where(who >= 0, -1)
        right, labeled = observe_(dynamics, logits, own, who)
        counted = [
            (row, index)
            for row, index in enumerate(who.tolist())
            if index >= 0 and labels[index] >= 0
        ]
        assert labeled == len(counted)
        assert right == sum(
            int(logits[row].argmax()) == int(labels[index]) for row, index in counted
        )
        for row, index in counted:
            histories[index].append(logits[row].tolist())
    assert not any(tensor[-1] for tensor in dynamics.values())
    for index, history in enumerate(histories):
        label = int(labels[index])
        sure, margins, classes = [], [], []
        for row in history:
            sure.append(math.exp(row[label]) / sum(math.exp(logit) for logit in row))
            margins.append(
                row[label] - max(logit for number, logit in enumerate(row) if number != label)
            )
            classes.append(max(range(num_classes), key=row.__getitem__))
        num = len(history)
        mean = sum(sure) / num if num else 0.0
        expected = {
            "count": num,
            "confidence": mean,
            "spread": sum((each - mean) ** 2 for each in sure),
            "margin": sum(margins) / num if num else 0.0,
            "changes": sum(old != new for old, new in pairwise(classes)),
            "predicted": classes[-1] if num else 0,
        }
        for name, value in expected.items():
            assert dynamics[name][index].item() == pytest.approx(value, rel=1e-5, abs=1e-6), (
                name,
                index,
            )
    assert dynamics["count"][5] == 0
    assert dynamics["changes"].sum() > 3


def test_an_example_that_is_twice_in_a_batch_is_counted_by_its_first_row():
    """As in a balanced batch of a small class: else it is chance on a GPU, and for each statistic anew."""
    generator = torch.Generator().manual_seed(2)
    found, expected = make_dynamics(4, CPU), make_dynamics(4, CPU)
    labels = torch.tensor([0, 1, 2, 0])
    for indices, first in (([3, 1, 3, -1, 1], [0, 1]), ([1, 2, 1, 2, 3], [0, 1, 4])):
        who, logits = torch.tensor(indices), 3 * torch.randn(5, 3, generator=generator)
        right, labeled = observe_(found, logits, labels[who].where(who >= 0, -1), who, repeats=True)
        observe_(expected, logits[first], labels[who[first]], who[first])
        assert labeled == (who >= 0).sum()
        assert right == ((logits.argmax(dim=1) == labels[who]) & (who >= 0)).sum()
    assert_close(found, expected, rtol=0, atol=0)


def test_a_margin_without_another_class_is_the_logit():
    dynamics = make_dynamics(1, CPU)
    observe_(dynamics, torch.tensor([[2.0]]), torch.tensor([0]), torch.tensor([0]))
    assert {name: tensor[0].item() for name, tensor in dynamics.items()} == {
        "confidence": 1, "spread": 0, "margin": 2, "count": 1, "changes": 0, "predicted": 0,
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_has_its_rows_of_every_view(monkeypatch, rank):
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    # 2 views of 4 examples.
    rows = torch.arange(8)
    mix = Mix(rows + 10, rows + 20, rows.float() / 10)
    batch = Batch(
        inputs=rows.view(8, 1, 1, 1).float(),
        targets=rows[:, None].float(),
        indices=rows % 4,
        views=2,
        mix=mix,
    )
    own = shard(batch)
    kept = [0, 1, 4, 5] if rank == 0 else [2, 3, 6, 7]
    assert own.inputs.flatten().tolist() == own.targets.flatten().tolist() == kept
    assert own.indices.tolist() == [each % 4 for each in kept]
    assert [part.tolist() for part in own.mix] == [part[kept].tolist() for part in mix]
    assert own.views == 2


def test_what_is_logged_are_means_since_the_epoch_began():
    objective = Recording()
    step = ready(replace(FEATURES, objective=objective))
    assert step.means() == {}
    inputs, given = data_of(FEATURES)
    losses, right, labeled = [], 0, 0
    for number in range(3):
        network = copy.deepcopy(step.learners[0].network)
        go(step, range(number, number + 1))
        outputs = network(inputs[batch_of(number)])
        batch = objective.calls[number][0]
        losses.append(CrossEntropy()(outputs, batch, torch.tensor(0.0), {}, "").total.item())
        right += int((outputs.logits.argmax(dim=1) == given[batch_of(number)]).sum())
        labeled += int((given[batch_of(number)] >= 0).sum())
    expected = {
        "loss": sum(losses) / 3,
        "cross_entropy": sum(losses) / 3,
        "train_accuracy": right / labeled,
    }
    assert step.means() == pytest.approx(expected)
    assert step.drain() == pytest.approx(expected)
    assert step.means() == {}
    go(step, range(3, 4))
    assert step.means()["loss"] != pytest.approx(expected["loss"])


def test_under_mixup_there_is_no_accuracy_to_log_and_nothing_to_say_of_examples():
    step = ready(replace(FEATURES, mixup=Mixup()))
    go(step, range(2))
    assert step.means().keys() == {"loss", "cross_entropy"}
    assert not any(tensor.any() for tensor in step.dynamics.values())


def test_of_two_networks_the_first_is_logged():
    step = ready(replace(EXPERIMENTS["two networks"], objective=CrossEntropy(), mixup=None))
    alone = ready(replace(step.experiment, networks=1))
    go(step, range(PER_PASS))
    go(alone, range(PER_PASS))
    assert step.means() == alone.means()
    assert_equal(step.dynamics, alone.dynamics)


@pytest.mark.parametrize("name", ["memory", "two networks", "averaging", "images"])
def test_a_step_that_was_restored_goes_on_bit_for_bit(name):
    step = ready(EXPERIMENTS[name])
    saved = go(step, range(4))
    names = list(step.names)
    whole = go(step, range(4, 7))
    other = ready(replace(EXPERIMENTS[name], seed=99))
    # Other weights at first, and then the same draws.
    other.experiment = EXPERIMENTS[name]
    other.learners[:] = [
        learner._replace(seed=old.seed)
        for learner, old in zip(other.learners, step.learners, strict=True)
    ]
    other.begin_sums(names)
    restore(other, saved)
    assert other.count == 4
    assert_equal(go(other, range(4, 7)), whole)
    assert other.means() == step.means()


def test_what_is_of_another_experiment_is_not_restored():
    step = ready(FEATURES)
    saved = go(step, range(1))
    with pytest.raises(ValueError, match=r"^optimizer0\.0\.momentum_buffer"):
        restore(
            step,
            {
                name: tensor
                for name, tensor in saved.items()
                if name != "optimizer0.0.momentum_buffer"
            },
        )
    with pytest.raises(ValueError, match=r"^memory0\.averages"):
        restore(step, {**saved, "memory0.averages": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"^network0\.fc\.bias .*\(7,\).*\(4,\)"):
        restore(step, {**saved, "network0.fc.bias": torch.zeros(7)})
