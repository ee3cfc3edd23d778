"""The paper's ablation of alpha, k and e, stage by stage, each with the best of the stages before.

First alpha varies, with all of the batch as neighbors (k = m) from the first epoch on (e = 0); then k, with the best
alpha; then e, with the best of both. What is best is chosen for each noise rate by the accuracy on examples held out
from training, never by the test set.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from nearsay.reproduce.cells import TOY_EPOCHS, Cell, Data, Setting, make_cells

# The paper draws curves without a table of their points; these are the values that its text and appendix name.
ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEIGHBORS = (1, 5, 10, 50, 100, None)  # None is all of the batch
STARTS = (0, 50, 100, 150, 200)  # epochs
RATES = (0.0, 0.2, 0.4)
EPOCHS = 250  # of the paper on CIFAR
BATCH = 256
TRIALS = 1  # the paper does not say
TITLE = "Ablation of alpha, k and e on CIFAR-10"
NUM_POINTS = (
    len(ALPHAS) + len(NEIGHBORS) + len(STARTS) - 2
)  # of a noise rate; two are also of the stage before

Stage = Literal["alpha", "k", "e"]
STAGES: tuple[Stage, ...] = ("alpha", "k", "e")


class Choice(NamedTuple):
    """Values of the three, in words as a command line has them."""

    alpha: str = ""
    k: str = "none"
    e: str = "0"


class Point(NamedTuple):
    """A value of one stage, and the runs that tell how good it is."""

    stage: Stage
    rate: float
    value: float  # for k = m the size of a batch, for e an epoch of the run itself
    cells: list[Cell]
    is_chosen: bool  # as the best of its stage


def plan(
    data: Data,
    trials: int,
    validation: Callable[[Cell], float | None],
    is_settled: Callable[[Cell], bool],
) -> list[Cell]:
    """The runs of all stages that can be named."""
    return [cell for point in points(data, trials, validation, is_settled) for cell in point.cells]


def points(
    data: Data,
    trials: int,
    validation: Callable[[Cell], float | None],
    is_settled: Callable[[Cell], bool],
) -> list[Point]:
    """The points of all stages that can be named."""
    found: list[Point] = []
    for rate in RATES:
        choice = Choice()
        for stage in STAGES:
            words = _words(stage, data)
            options = [
                _cells(data, rate, stage, choice._replace(**{stage: word}), trials)
                for word in words
            ]
            best = None
            if all(is_settled(cell) for cells in options for cell in cells):
                best = _best(options, validation)
            for number, cells in enumerate(options):
                found.append(
                    Point(stage, rate, _values(stage, data)[number], cells, number == best)
                )
            if best is None:
                break
            choice = choice._replace(**{stage: words[best]})
    return found


def num_epochs(data: Data) -> int:
    """How long each run is."""
    return TOY_EPOCHS if data == "toy" else EPOCHS


def _best(options: list[list[Cell]], validation: Callable[[Cell], float | None]) -> int | None:
    """The option with the highest mean over its finished runs, the first of equals; None if none is finished."""
    means = []
    for cells in options:
        known = [accuracy for cell in cells if (accuracy := validation(cell)) is not None]
        means.append(sum(known) / len(known) if known else -math.inf)
    return means.index(max(means)) if max(means) > -math.inf else None


def _cells(data: Data, rate: float, stage: Stage, choice: Choice, trials: int) -> list[Cell]:
    chosen = (
        f"objective.alpha={choice.alpha}",
        f"objective.k={choice.k}",
        f"objective.start_epoch={choice.e}",
    )
    if data == "toy":
        setting = Setting(
            "toy", (f"noise={rate}", f"epochs={TOY_EPOCHS}"), ("held_out=400", *_CLEAN, *chosen)
        )
    else:
        setting = Setting(
            "cifar10", (f"noise={rate}", "protocol=paper"), ("held_out=5000", *_CLEAN, *chosen)
        )
    column = f"{stage}={getattr(choice, stage)}"
    return make_cells(f"{100 * rate:.0f} % noise", column, setting, "ncr", trials)


def _words(stage: Stage, data: Data) -> list[str]:
    if stage == "alpha":
        return [str(alpha) for alpha in ALPHAS]
    if stage == "k":
        return ["none" if k is None else str(k) for k in NEIGHBORS]
    scale = num_epochs(data) / EPOCHS  # the same share of a shorter run
    return [f"{start * scale:g}" for start in STARTS]


def _values(stage: Stage, data: Data) -> list[float]:
    if stage == "k":
        return [BATCH if k is None else k for k in NEIGHBORS]
    return [float(word) for word in _words(stage, data)]


_CLEAN = ("validation_labels=clean",)  # the paper's validation sets are clean
