"""The worth of rejecting the labels of foreign rows, on toy data of which a share is replaced.

    python benchmarks/lab/open_set.py

Trains `nearsay train toy` by cross-entropy, by NCR and by NCR with `reject`, three seeds each, and
replaces a share of the examples by those of other Gaussian classes (`OpenSet`). Prints mean and
standard deviation of the final accuracy on the clean test set.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace

import torch

from nearsay.config import ConfigError, apply_overrides, call_recipe
from nearsay.data import Toy
from nearsay.noise import OpenSet
from nearsay.training.loop import train

RATES = (0.2, 0.4)
METHODS = {
    "cross-entropy": ("method=standard", []),
    "NCR": ("method=ncr", []),
    **{
        f"reject={share}": ("method=ncr", [f"objective.reject={share}"])
        for share in (0.1, 0.2, 0.4)
    },
}
OTHER = 1000  # added to the seed of the data, for classes around other centers


def accuracy(name: str, rate: float, seed: int, epochs: float) -> float:
    """Of one run, in percent, in a folder that is not kept."""
    method, changes = METHODS[name]
    call = apply_overrides(
        call_recipe("toy", [method, "noise=0", f"epochs={epochs}", f"seed={seed}"]), changes
    )
    noisy = replace(
        call.experiment, noise=OpenSet(rate=rate, seed=seed), outside=Toy(seed=seed + OTHER)
    )
    with tempfile.TemporaryDirectory() as folder:
        return 100 * float(train(noisy, folder)["accuracy"]["test"]["final"])


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=float, default=50)
    parser.add_argument("--seeds", type=int, default=3, help="so many, from 0 on")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds} must be at least 1")
    try:
        call_recipe("toy", [f"epochs={arguments.epochs}"])
    except ConfigError as error:
        parser.error(f"--{error}")
    print("replaced  " + "  ".join(f"{name:>13}" for name in METHODS))
    for rate in RATES:
        cells = []
        for name in METHODS:
            found = [
                accuracy(name, rate, seed, arguments.epochs) for seed in range(arguments.seeds)
            ]
            spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.1f}{spread}")
        print(f"{rate:8.0%}  " + "  ".join(f"{cell:>13}" for cell in cells), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
