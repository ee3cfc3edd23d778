"""One pass over a data set: every row once, as the networks say, and what cannot be read beside it."""

import numpy as np
import pytest
import torch
from distributed.group import in_groups, results
from distributed.looks import BAD, NUM_FILES, NUM_ROWS
from PIL import Image
from torch import nn
from torch.testing import assert_close

from nearsay.batch import Files, Outputs
from nearsay.models import MLP, ResNet
from nearsay.training.predict import Pass

# More workers than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
CPU = torch.device("cpu")


def over(networks, inputs, *, normalize=None, size=8, **choices):
    workers = choices.pop("workers", 0)
    how = Pass(normalize=normalize, size=size, device=CPU, dtype=torch.float32, workers=workers)
    return how.over(networks, inputs, **choices)


def network(seed=0, num_inputs=4):
    return MLP(hidden=(6,)).build(3, num_inputs=num_inputs, seed=seed)


class Watcher(nn.Module):
    """Remembers what it was shown."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def forward(self, inputs):
        self.shown.append(inputs)
        flat = inputs.flatten(1)
        return Outputs(flat, flat[:, :2])


def test_every_row_is_looked_at_once_and_the_last_batch_is_short():
    features, watcher = torch.randn(2500, 4), Watcher()
    predictions, unreadable = over([watcher], features)
    assert [len(shown) for shown in watcher.shown] == [1024, 1024, 452]
    assert predictions.indices.equal(torch.arange(2500))
    assert predictions.features.equal(features)
    assert predictions.logits.equal(features[:, :2])
    assert unreadable == {}


@pytest.mark.parametrize(("size", "largest"), [(32, 1024), (64, 256), (224, 20)])
def test_fewer_large_images_go_in_one_batch(size, largest):
    watcher = Watcher()
    over(
        [watcher],
        torch.zeros(largest + 1, 3, size, size, dtype=torch.uint8).expand(
            largest + 1, 3, size, size
        ),
    )
    assert [len(shown) for shown in watcher.shown] == [largest, 1]


def test_networks_are_asked_in_evaluation_mode_and_left_as_they_were():
    features = torch.randn(50, 4)
    for was_training in (True, False):
        asked = network().train(was_training)
        before = {name: tensor.clone() for name, tensor in asked.state_dict().items()}
        found = over([asked], features).predictions
        assert asked.training is was_training
        assert all(module.training is was_training for module in asked.modules())
        assert_close(asked.state_dict(), before, rtol=0, atol=0)
        with torch.no_grad():
            assert_close(found.logits, asked.eval()(features).logits)


def test_networks_are_left_as_they_were_after_an_error():
    asked = network().train()
    with pytest.raises(ValueError, match="inputs"):
        over([asked], torch.randn(5, 7))
    assert asked.training


def test_two_networks_believe_the_mean_of_their_probabilities():
    features, pair = torch.randn(20, 4), [network(0), network(1)]
    found = over(pair, features).predictions
    with torch.no_grad():
        answers = [each.eval()(features) for each in pair]
    mean = (answers[0].logits.softmax(dim=1) + answers[1].logits.softmax(dim=1)) / 2
    assert_close(found.logits.softmax(dim=1), mean)
    assert_close(found.features, answers[0].features)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_read_is_left_out_and_named(tmp_path, workers):
    draw = np.random.default_rng(0)
    names = [f"{number}.png" for number in range(5)]
    for name in names:
        Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(tmp_path / name)
    whole = over([ResNet(width=2).build(3)], Files(tmp_path, tuple(names))).predictions
    (tmp_path / "1.png").write_bytes(b"")
    (tmp_path / "4.png").unlink()
    found = over([ResNet(width=2).build(3)], Files(tmp_path, tuple(names)), workers=workers)
    assert found.predictions.indices.tolist() == [0, 2, 3]
    assert_close(found.predictions.logits, whole.logits[[0, 2, 3]])
    assert sorted(found.unreadable) == [1, 4]
    assert "1.png' has 0 bytes" in found.unreadable[1]
    assert "No such file" in found.unreadable[4]


def test_nothing_readable_is_an_empty_table(tmp_path):
    found = over([ResNet(width=2).build(3)], Files(tmp_path, ("none.png",)))
    assert found.predictions.logits.shape == (0, 3)
    assert found.predictions.indices.shape == (0,)
    assert list(found.unreadable) == [0]


@in_groups
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_processes_find_together_what_one_finds_and_share_the_work(num_processes, num_rows):
    seen = [rank[f"{num_rows} rows"].tolist() for rank in results(num_processes, "looks")]
    assert all(is_same for is_same, _ in seen)
    num = -(-num_rows // 1024)
    shares = (
        {2: [1, num - 1], 3: [1, 1, 1]}[num_processes]
        if num >= num_processes
        else [num] * num_processes
    )
    # Where there are too few batches to share, all look at all.
    assert [asked for _, asked in seen] == shares


@in_groups
def test_processes_keep_the_statistics_that_they_count_each_for_itself(num_processes):
    for rank, seen in enumerate(results(num_processes, "looks")):
        assert_close(seen["mean"], torch.full((6,), float(rank)))


@in_groups
def test_processes_tell_each_other_what_cannot_be_read(num_processes):
    for seen in results(num_processes, "looks"):
        assert [bool(seen[name][0]) for name in ("files", "bad files")] == [True, True]
        assert seen["unreadable of files"].tolist() == list(BAD)
        assert seen["unreadable of bad files"].tolist() == list(range(4))
        assert seen["files"][1] < NUM_FILES
