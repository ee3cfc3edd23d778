"""Passes over examples by all processes together, beside the same pass by each alone."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from nearsay import distributed
from nearsay.batch import Files, Outputs
from nearsay.models import MLP
from nearsay.training.predict import Pass, Predicted

CPU = torch.device("cpu")
# Three batches, two and one: for some groups there are fewer than processes.
NUM_ROWS = (2500, 1025, 900)
NUM_FILES, BAD = 7, (0, 6)  # files are large, so that each is a batch


class Counting(nn.Module):
    """Knows how often it was asked."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.num_asked = inner, 0

    def forward(self, inputs: Tensor) -> Outputs:
        self.num_asked += 1
        return self.inner(inputs)


class Colors(nn.Module):
    def forward(self, inputs: Tensor) -> Outputs:
        means = inputs.mean(dim=(2, 3))
        return Outputs(means, means)


def look_all(folder: Path, rank: int) -> dict[str, Tensor]:
    """Whether all together find what the first finds, and how many batches this process read.

    The statistics of BatchNorm are not the same on all processes.
    """
    draw, seen = torch.Generator().manual_seed(0), {}
    for num_rows in NUM_ROWS:
        network = Counting(MLP(hidden=(6,)).build(3, num_inputs=4))
        network.inner.body[1].running_mean += rank
        rows = torch.randn(num_rows, 4, generator=draw)
        found, num, alone = _look(network, rows)
        distributed.broadcast_(alone.predictions)
        seen[f"{num_rows} rows"] = torch.tensor([_is_same(found, alone), num])
        seen["mean"] = network.inner.body[1].running_mean
    root = folder / "images"
    if rank == 0:
        root.mkdir()
        for number in set(range(NUM_FILES)) - set(BAD):
            Image.fromarray(np.full((9, 9, 3), 10 * number, dtype=np.uint8)).save(
                root / f"{number}.png"
            )
    distributed.share("all files are there", CPU)
    for name, numbers in (("files", range(NUM_FILES)), ("bad files", BAD * 2)):
        found, num, alone = _look(
            Counting(Colors()), Files(root, tuple(f"{number}.png" for number in numbers))
        )
        seen[name] = torch.tensor([_is_same(found, alone), num])
        seen[f"unreadable of {name}"] = torch.tensor(list(found.unreadable))
    return seen


def _look(network: Counting, inputs: Tensor | Files) -> tuple[Predicted, int, Predicted]:
    how = Pass(normalize=None, size=1024, device=CPU, dtype=torch.float32, workers=0)
    found, num = how.together([network], inputs), network.num_asked
    return found, num, how.over([network], inputs, with_features=False)


def _is_same(found: Predicted, alone: Predicted) -> bool:
    is_same = [
        one.equal(other) for one, other in zip(found.predictions, alone.predictions, strict=True)
    ]
    return all(is_same) and list(found.unreadable.items()) == list(alone.unreadable.items())
