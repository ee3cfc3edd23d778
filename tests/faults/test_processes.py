"""Several processes: two runs in one folder, and two ranks of one run of which one is lost."""

import json
import os
import random
import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from faults.jobs import SMALL, STEPS, assert_same, at_step, is_over, last_checkpoint, words_of
from nearsay.data import Toy
from nearsay.metrics import accuracy

CHILDREN = "/proc/{0}/task/{0}/children"
# Seconds that a rank waits for another. Only one that hangs is noticed by it; the end of one that
# was killed is noticed at once, however slow the machine is.
TIMEOUT, SHORT = 600, 10
FAULTS = {
    "killed": signal.SIGKILL,
    "raising": signal.SIGUSR1,
    "hanging": signal.SIGSTOP,
    "told": signal.SIGTERM,
}
DIGITS = ["digits", "--set", "backbone.width=4", "--set", "batch_size=64"]
TOGETHER = {  # residual networks for one step: rounding of 6e-8 parts two such runs of one process by 1e-2 in eight
    "a perceptron": [*words_of("ncr"), "--set", "backbone.batch_norm=true", "--set", "epochs=2"],
    "a mixed perceptron": [*words_of("mixup"), "--set", "epochs=1"],
    "a residual network": [*DIGITS, "epochs=0.05", "method=ncr+elr"],
    "a mixed residual network": [*DIGITS, "epochs=0.05", "method=ncr+mixup"],
}


FORGETFUL = '''
"""A toy whose network draws for itself."""

from dataclasses import dataclass, replace

from torch import nn

from nearsay import Outputs
from nearsay.models.heads import drawn
from nearsay.recipes import toy


class Network(nn.Module):
    def __init__(self, num_inputs, num_classes):
        super().__init__()
        self.num_features = 16
        self.body = nn.Sequential(nn.Linear(num_inputs, 16), nn.ReLU(), nn.Dropout(0.5))
        self.fc = nn.Linear(16, num_classes)

    def forward(self, inputs):
        features = self.body(inputs)
        return Outputs(features, self.fc(features))


@dataclass(frozen=True, kw_only=True)
class Forgetful:
    def build(self, num_classes, *, num_inputs, seed=0):
        with drawn(seed):
            return Network(num_inputs, num_classes)


def recipe(epochs: float = 4):
    return replace(toy(epochs=epochs), backbone=Forgetful())
'''


NOTING = '''
"""A toy whose network leaves a line in a file for every batch that it evaluates."""

import os
from dataclasses import dataclass, replace

from torch import nn

from nearsay.data import Toy
from nearsay.models import MLP
from nearsay.recipes import toy


def note(network, _):
    if not network.training:
        with open(NOTES + os.environ["RANK"], "a") as file:
            file.write("a batch\\n")


@dataclass(frozen=True, kw_only=True)
class Noting:
    inner: MLP = MLP(hidden=(16,))

    def build(self, num_classes, *, num_inputs, seed=0):
        network = self.inner.build(num_classes, num_inputs=num_inputs, seed=seed)
        network.register_forward_pre_hook(note)
        return network


def recipe():
    return replace(toy(epochs=1), data=Toy(num_train=500, num_test=6000), backbone=Noting(), batch_size=64)
'''


def check_second_runs(server, whole, tmp_path, *, attempts):
    """Others try to train in a folder that is in use; who has it does not notice."""
    draw = random.Random(0)
    for attempt in range(attempts):
        folder = tmp_path / str(attempt)
        words = words_of("ncr", draw.choice(["resident", "two workers"]))
        first = server.start(folder, *words, hold=at_step(draw.randrange(1, STEPS // 2)))
        first.until_held()
        second = server.start(folder, *words)
        assert second.end() == 75, second.said
        first.signal(signal.SIGCONT)
        assert f"process {first.pid} on {socket.gethostname()}" in second.said
        assert first.end() == 0, first.said
        assert_same(folder, whole("ncr"))


def test_a_second_run_in_a_folder_is_sent_away(server, whole, tmp_path):
    check_second_runs(server, whole, tmp_path, attempts=1)


@pytest.mark.slow
def test_twenty_second_runs_are_sent_away(server, whole, tmp_path):
    check_second_runs(server, whole, tmp_path, attempts=20)


def test_workers_do_not_keep_the_lock_of_a_run_that_was_killed(server, whole, tmp_path):
    words = words_of("ncr", "two workers")
    job = server.start(tmp_path / "run", *words, hold=at_step(5))
    job.until_held()
    workers = [Path(f"/proc/{pid}") for pid in Path(CHILDREN.format(job.pid)).read_text().split()]
    assert len(workers) == 2
    # So that the workers do not see that they are alone.
    job.signal_group(signal.SIGSTOP)
    job.signal(signal.SIGKILL)
    assert job.end() == -signal.SIGKILL
    try:
        assert all(worker.exists() for worker in workers)
        server.finish(tmp_path / "run", *words)
    finally:
        job.signal_group(signal.SIGKILL)
    assert_same(tmp_path / "run", whole("ncr"))


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def weights(folder):
    """All numbers of the final network, one after another."""
    named = load_file(folder / "model.safetensors")
    return torch.cat([named[name].double().flatten() for name in sorted(named)])


def check_together(server, tmp_path, name):
    """Two ranks learn what one process learns: float32 sums in another order, over one or tens of steps."""
    one = server.finish(tmp_path / "one", *TOGETHER[name])
    two = server.finish(tmp_path / "two", *TOGETHER[name], launch="fork")
    assert json.loads((two / "result.json").read_text())["processes"] == 2
    found, expected = load_file(two / "model.safetensors"), load_file(one / "model.safetensors")
    print(name, max(float((found[key] - expected[key]).abs().max()) for key in expected))
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    log, alone = read_log(two), read_log(one)
    assert len(log) == len(alone)
    for entry, other in zip(log, alone, strict=True):
        assert entry == pytest.approx(other, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["a perceptron", "a mixed residual network"])
def test_two_ranks_learn_what_one_process_learns(server, tmp_path, name):
    check_together(server, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a mixed perceptron", "a residual network"])
def test_two_ranks_learn_what_one_process_learns_with_other_losses(server, tmp_path, name):
    check_together(server, tmp_path, name)


def test_ranks_share_the_work_of_an_evaluation(server, tmp_path):
    """So that none waits for another until its patience is over."""
    (tmp_path / "noting.py").write_text(f"{NOTING}\nNOTES = {str(tmp_path / 'batches')!r}\n")
    run = server.finish(tmp_path / "run", str(tmp_path / "noting.py"), launch="fork")
    batches = [(tmp_path / f"batches{rank}").read_text().count("batch") for rank in range(2)]
    # 6000 test examples are 6 batches. At the end the first rank alone makes the predictions, of
    # these and of the training examples.
    assert batches == [3 + 6 + 1, 3]
    alone = load_file(run / "predictions" / "test.safetensors")["logits"]
    truth = Toy(num_train=500, num_test=6000).open("test").labels.clean
    assert read_log(run)[-1]["test_accuracy"] == accuracy(alone, truth)


@pytest.mark.parametrize(
    ("first", "second"), [(None, "fork"), ("fork", None)], ids=["one, then two", "two, then one"]
)
def test_a_run_goes_on_with_another_number_of_ranks(server, whole, tmp_path, first, second):
    hold = at_step(STEPS // 2)
    job = server.start(tmp_path / "run", *words_of("mixup"), launch=first, hold=hold)
    job.until_held()
    job.signal_group(signal.SIGKILL)
    job.end()
    assert last_checkpoint(tmp_path / "run") > 0
    run, one = server.finish(tmp_path / "run", *words_of("mixup"), launch=second), whole("mixup")
    found, expected = weights(run), weights(one)
    # A ReLU that rounding turns over moves a row of weights.
    assert (found - expected).norm() < 1e-3 * expected.norm()
    for entry, other in zip(read_log(run), read_log(one), strict=True):
        # An accuracy is of 200 examples.
        assert entry == pytest.approx(other, rel=1e-3, abs=0.01)


@pytest.fixture(scope="module")
def pair(server, tmp_path_factory):
    """The folder of two ranks that were never disturbed."""
    return server.finish(tmp_path_factory.mktemp("pair") / "run", *words_of("mixup"), launch="fork")


def check_fault(server, pair, folder, *, fault, draw, launch="fork", words=()):
    """One rank is lost, the agent starts both again, and nothing is seen of it later."""
    timeout = SHORT if fault == "hanging" else TIMEOUT
    words = [*(words or words_of("mixup")), "--set", f"machine.timeout={timeout}"]
    hold = at_step(draw.randrange(2, STEPS - 10), rank=draw.randrange(2))
    job = server.start(folder, *words, launch=launch, hold=hold)
    victim = job.until_held()
    os.kill(victim, FAULTS[fault])
    if fault in ("raising", "told"):
        os.kill(victim, signal.SIGCONT)
    assert job.until(lambda: is_over(victim)), job.said
    job.end()
    # Only the result counts: gloo may abort after everything is done.
    assert json.loads((folder / "result.json").read_text())["finished"]
    assert_same(folder, pair)


def test_a_rank_that_was_killed_goes_on_with_the_draws_of_its_own_network(server, tmp_path):
    """What dropout leaves out, on each rank, is what it would have left out; the clock of one says when to save."""
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    words = [str(tmp_path / "forgetful.py"), *SMALL, "--set", "machine.checkpoint_seconds=0.02"]
    whole = server.finish(tmp_path / "whole", *words, launch="fork")
    check_fault(server, whole, tmp_path / "run", fault="killed", draw=random.Random(0), words=words)


def test_ranks_that_count_statistics_each_for_itself_go_on_with_their_own(server, tmp_path):
    """By which the averaged weights of the other network teach, and labels are propagated."""
    words = [
        *words_of("two networks"),
        "--set",
        "backbone.batch_norm=true",
        "--set",
        "backbone.statistics=process",
        "--set",
        "propagate_at=1",
    ]
    whole = server.finish(tmp_path / "whole", *words, launch="fork")
    check_fault(server, whole, tmp_path / "run", fault="killed", draw=random.Random(0), words=words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "launch", "attempts"),
    [
        ("killed", "fork", 6),
        ("raising", "fork", 6),
        ("told", "fork", 4),
        ("hanging", "fork", 3),
        ("killed", "anew", 1),
    ],
)
def test_two_ranks_survive_the_loss_of_one_each_time(
    server, pair, tmp_path, fault, launch, attempts
):
    draw = random.Random(f"{fault} {launch}")
    for attempt in range(attempts):
        check_fault(server, pair, tmp_path / str(attempt), fault=fault, draw=draw, launch=launch)
