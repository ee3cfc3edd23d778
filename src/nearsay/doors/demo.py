"""The demonstration: six short runs on digits that show what NCR does to noisy labels."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearsay import config
from nearsay.report.runs import spread
from nearsay.training.loop import train
from nearsay.training.progress import Display, percent
from nearsay.training.system import one_thread

TITLE = "Digits, 40 % of the labels drawn at random"
METHODS = ("standard", "ncr")
SEEDS = (0, 1, 2)


class Demonstrated(NamedTuple):
    """One run of the demonstration."""

    number: int  # from 1
    total: int
    method: str
    seed: int
    folder: Path
    result: dict[str, Any]


def demonstrate(folder: Path, *, display: Display | None = None) -> Iterator[Demonstrated]:
    """Train on digits with 40 % of the labels drawn at random: cross-entropy and NCR, three seeds.

    Runs that are finished in the folder are not trained again.
    """
    pairs = [(method, seed) for seed in SEEDS for method in METHODS]
    for number, (method, seed) in enumerate(pairs, start=1):
        call = config.call_recipe("digits", ["noise=0.4", f"method={method}", f"seed={seed}"])
        target = folder / f"{method}-seed={seed}"
        # The networks are so small that threads would only wait for each other.
        with one_thread():
            result = train(call.experiment, target, origin=call.origin, display=display)
        yield Demonstrated(number, len(pairs), method, seed, target, result)


def to_cells(runs: Sequence[Demonstrated]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table: every seed, mean and deviation; the gain; and confidence."""
    seeds = sorted({run.seed for run in runs})
    results = {(run.method, run.seed): run.result for run in runs}
    rows = []
    finals: dict[str, list[float]] = {}
    for method in METHODS:
        finals[method] = [results[method, seed]["accuracy"]["test"]["final"] for seed in seeds]
        rows.append([method, *map(percent, finals[method]), _mean(finals[method])])
    plain, better = METHODS
    gains = [after - before for before, after in zip(finals[plain], finals[better], strict=True)]
    points = [f"{100 * gain:+.1f}" for gain in gains]
    rows.append([f"{better} above {plain}, points", *points, _mean(gains)])
    for kind in ("right", "wrong"):
        for method in METHODS:
            values = [results[method, seed]["confidence"][kind] for seed in seeds]
            name = f"confidence in {kind} labels, {method}"
            rows.append([name, *map(percent, values), _mean(values)])
    first = "test accuracy after the last epoch"
    return [first, *(f"seed {seed}" for seed in seeds), "mean ± std"], rows


def _mean(shares: Sequence[float]) -> str:
    mean = spread(shares)
    return "-" if mean is None else mean.text(scale=100)
