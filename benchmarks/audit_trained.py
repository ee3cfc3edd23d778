"""How often the interval of the noise rate contains the truth after trainings on small sets.

    python benchmarks/audit_trained.py --first 80000 --num 100

Each training has its own seed. The set is clouds of 2 to 10 classes, moons, or a small set of
scikit-learn; two of five have no noise, the others up to half wrong labels, as in `audit_rates.py`.
`nearsay train embeddings` trains on it by ncr or standard, with a hidden layer of 128 or 256, for 3
to 100 epochs, and `nearsay audit` audits the run. `miss` is the share of intervals that end below
the truth, and of those that begin above it; `up to` is the largest upper end. There are rows by
kind of set, by length, and for trainings without wrong labels; there `above .2` counts the runs
with a larger estimate.
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from audit_rates import Array, Counted, clouds, parse_seeds, real, spoil, summarize

from nearsay.config import call_recipe
from nearsay.doors.audit import audit_run
from nearsay.training.loop import train

ROWS: dict[str, Callable[[dict[str, Any], Counted], bool]] = {
    "all": lambda _, __: True,
    "clouds, far": lambda chosen, _: chosen.get("apart", 0) >= 6,
    "clouds, near": lambda chosen, _: 0 < chosen.get("apart", 0) < 6,
    "moons": lambda chosen, _: chosen["data"] == "moons",
    "scikit-learn": lambda chosen, _: chosen["data"] in ("wine", "cancer", "digits"),
    "3-10 epochs": lambda chosen, _: chosen["epochs"] <= 10,
    "20-30 epochs": lambda chosen, _: 20 <= chosen["epochs"] <= 30,
    "60-100 epochs": lambda chosen, _: chosen["epochs"] >= 60,
    "right alone": lambda _, counted: counted[0] == 0,
}


def choose(seed: int) -> dict[str, Any]:
    """What a set is like, and how it is trained on."""
    rng = np.random.default_rng(seed)
    chosen: dict[str, Any] = {
        "data": str(rng.choice(["clouds", "clouds", "moons", "wine", "cancer", "digits"]))
    }
    chosen["num"] = int(rng.choice([200, 400, 800, 1800]))
    if chosen["data"] == "clouds":
        chosen["classes"], chosen["dim"] = int(rng.choice([2, 3, 5, 10])), int(rng.choice([8, 32]))
        chosen["apart"], chosen["unequal"] = (
            float(rng.choice([3, 4, 6, 9])),
            float(rng.choice([1, 1, 5])),
        )
    chosen["noise"] = str(rng.choice(["sym", "sym", "pair", "inst"]))
    chosen["rate"] = float(rng.choice([0, 0, 0, 0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5]))
    chosen["method"], chosen["hidden"] = (
        str(rng.choice(["ncr", "standard"])),
        int(rng.choice([128, 256])),
    )
    chosen["epochs"] = int(rng.choice([3, 5, 10, 20, 30, 60, 100]))
    return chosen


def draw(seed: int) -> tuple[Array, Array, Array]:
    """Features, given and true labels."""
    chosen, rng = choose(seed), np.random.default_rng(seed + 10**6)
    is_drawn = chosen["data"] == "clouds"
    points, clean = clouds(rng, chosen) if is_drawn else real(rng, chosen["data"], chosen["num"])
    return (
        points.astype(np.float32),
        spoil(rng, points, clean, chosen["noise"], chosen["rate"]),
        clean,
    )


def count(seed: int) -> Counted:
    """Train and audit in a folder that is not kept."""
    chosen, (features, given, clean) = choose(seed), draw(seed)
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder) / "set.npz", Path(folder) / "run"
        np.savez(path, features=features, labels=given, clean=clean)
        words = [f"{name}={chosen[name]}" for name in ("method", "hidden", "epochs")]
        call = call_recipe("embeddings", [f"path={path}", *words, f"seed={seed}"])
        train(call.experiment, run, origin=call.origin)
        rate = audit_run(run, report=False).summary["noise_rate"]
    return float((given != clean).mean()), rate["estimate"], rate["low"], rate["high"]


def show(name: str, counted: list[Counted]) -> None:
    """Print a row."""
    if not counted:
        return
    true, estimate, _, high = np.array(counted).T
    below, above, width, error = summarize(counted)
    row = f"{len(counted):4}  {1 - below - above:.3f}  {below:.3f}, {above:.3f}"
    row += f"         {width:.3f}  {high.max():.3f}  {error:.3f}"
    num_above = "-" if true.any() else (estimate > 0.2).sum()
    print(f"{name:13}  {row}   {num_above:>8}")


def main() -> None:
    """Train, audit and count."""
    seeds = parse_seeds(__doc__)
    # Batches may have fewer rows than neighbors.
    warnings.filterwarnings("ignore")
    found = [(choose(seed), count(seed)) for seed in seeds]
    print("trainings      runs  held   miss below, above   width  up to  error   above .2")
    for name, is_of_row in ROWS.items():
        show(name, [counted for chosen, counted in found if is_of_row(chosen, counted)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
