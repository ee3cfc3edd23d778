"""Which runs a table or a figure needs, and how each is called."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from nearsay import config
from nearsay.reproduce import paper
from nearsay.reproduce.paper import Row

Data = Path | Literal["toy"]
Stage = Literal["alpha", "k", "e"]

TOY_EPOCHS, DIGITS_EPOCHS = 5, 2  # of stand-ins: seconds, and enough to see that all parts work
_FOLDERS = {"webvision": ("webvision", "WebVision"), "clothing1m": ("clothing1m", "Clothing1M")}
_WEIGHTS = "resnet50.safetensors"  # of ImageNet, which Clothing1M starts from
# Folders with the validation images of ImageNet, and where they are in the archive of Kaggle.
_IMAGENET = ("ILSVRC/val", "ILSVRC2012/val", "imagenet/val", "ImageNet/val")
_KAGGLE = "ILSVRC/Data/CLS-LOC/val"
_USUAL_BATCH = 1024  # of the recipe of WebVision
_STAND_IN_SHRINKS = 8  # its batches, because digits has only 1 347 images

# The ablation. The paper draws curves without a table of their points; these are the values that
# its text and appendix name.
ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEIGHBORS = (1, 5, 10, 50, 100, None)  # None is all of the batch
STARTS = (0, 50, 100, 150, 200)  # epochs
RATES = (0.0, 0.2, 0.4)
STAGES: tuple[Stage, ...] = ("alpha", "k", "e")
ABLATION_EPOCHS = 250  # of the paper on CIFAR
ABLATION_BATCH = 256
ABLATION_TRIALS = 1  # the paper does not say
ABLATION_TITLE = "Ablation of alpha, k and e on CIFAR-10"
# Points of a noise rate; two are also of the stage before.
NUM_POINTS = len(ALPHAS) + len(NEIGHBORS) + len(STARTS) - 2
_CLEAN = ("validation_labels=clean",)  # the paper's validation sets are clean


class Setting(NamedTuple):
    """A recipe and its arguments, without path, seed and method."""

    recipe: str
    arguments: tuple[str, ...]  # key=value
    overrides: tuple[str, ...] = ()  # a.b=c


@dataclass(frozen=True, kw_only=True)
class Column:
    """Data and noise: a column of a table, or a panel of a figure."""

    group: str
    name: str
    setting: Setting
    stand_in: Setting  # small data for trying everything without the real data

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group} {self.name}".strip()

    def heading(self, data: Data) -> str:
        """What to print above its numbers; it names a stand-in, which is easily mistaken."""
        return f"{self.stand_in.recipe} for {self.title}" if data == "toy" else self.title

    def panel(self, data: Data) -> str:
        """The same above a panel, where noise is named as such."""
        if data == "toy":
            return f"{self.stand_in.recipe} for {self.group}, {self.name}"
        return f"{self.group}, {self.name} noise"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run, by what it is called with, and where its number belongs."""

    row: str
    column: str
    recipe: str
    arguments: tuple[str, ...]
    overrides: tuple[str, ...]
    seed: int

    @property
    def run(self) -> str:
        """The name of its folder: the same for the same run, wherever its number belongs."""
        return "-".join([self.recipe, *self.arguments, *self.overrides, f"seed={self.seed}"])

    @property
    def method(self) -> str:
        """What it trains with."""
        return dict(pair.split("=", 1) for pair in self.arguments).get("method", "")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper: its rows, and what its columns are run with."""

    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    trials: int  # of the paper, 1 if it does not say
    notes: tuple[str, ...] = ()

    def methods(self) -> list[tuple[str, str]]:
        """Name and method of the rows that are run."""
        return [(row.name, row.method) for row in self.rows if row.method is not None]


@dataclass(frozen=True, kw_only=True)
class Panels:
    """A figure of the paper that compares methods, panel by panel."""

    title: str
    columns: tuple[Column, ...]
    trials: int = 1

    def methods(self) -> list[tuple[str, str]]:
        """Name and method of the rows."""
        return [("Standard", "standard"), ("NCR", "ncr")]


class Choice(NamedTuple):
    """Values of the three hyper-parameters of the ablation, as on a command line."""

    alpha: str = ""
    k: str = "none"
    e: str = "0"


class Point(NamedTuple):
    """A value of one stage of the ablation, and the runs that say how good it is."""

    stage: Stage
    rate: float
    value: float  # for k = m the size of a batch, for e an epoch of the run itself
    cells: list[Cell]
    is_chosen: bool  # as the best of its stage


def plan(
    name: str,
    data: Data,
    trials: int | None = None,
    *,
    validation: Callable[[Cell], float | None] = lambda _: None,
    is_settled: Callable[[Cell], bool] = lambda _: False,
) -> list[Cell]:
    """The runs of a table or figure, as far as they are known.

    A later stage of the ablation is known once all runs of the one before are settled: finished or
    failed. `validation` is the held-out accuracy of a finished run.
    """
    if name == "ablation":
        points = ablation_points(data, trials or ABLATION_TRIALS, validation, is_settled)
        return [cell for point in points for cell in point.cells]
    plan: Table | Panels = TABLES[name] if name in TABLES else PANELS[name]
    cells = []
    for row, method in plan.methods():
        for column in plan.columns:
            setting = column.stand_in if data == "toy" else column.setting
            name_of_method = _without_oracle(method, column)
            num = trials or plan.trials
            cells += make_cells(row, column.title, setting, name_of_method, num)
    return cells


def ablation_points(
    data: Data,
    trials: int,
    validation: Callable[[Cell], float | None],
    is_settled: Callable[[Cell], bool],
) -> list[Point]:
    """The points of the ablation in stages, each with the best values of the stages before.

    First alpha varies, with all of the batch as neighbors (k = m) from the first epoch on (e = 0);
    then k, with the best alpha; then e, with the best of both. The best is chosen for each noise
    rate by the accuracy on examples held out from training, never by the test set.
    """
    points: list[Point] = []
    for rate in RATES:
        choice = Choice()
        for stage in STAGES:
            words, values = _words(stage, data), _values(stage, data)
            options = []
            for word in words:
                option = choice._replace(**{stage: word})
                options.append(_ablation_cells(data, rate, stage, option, trials))
            # The best is known only after all runs of the stage.
            best = None
            if all(is_settled(cell) for cells in options for cell in cells):
                best = _best(options, validation)
            for number, (value, cells) in enumerate(zip(values, options, strict=True)):
                points.append(Point(stage, rate, value, cells, number == best))
            if best is None:
                break
            choice = choice._replace(**{stage: words[best]})
    return points


def num_epochs(data: Data) -> int:
    """How long each run of the ablation is."""
    return TOY_EPOCHS if data == "toy" else ABLATION_EPOCHS


def entitled(title: str, data: Data) -> str:
    """The title of a table or figure, which names stand-ins as such."""
    return f"{title} (small stand-ins, not the data itself)" if data == "toy" else title


def make_cells(row: str, column: str, setting: Setting, method: str, trials: int) -> list[Cell]:
    """The runs of one number, which differ in their seed."""
    cells = []
    for seed in range(trials):
        cells.append(
            Cell(
                row=row,
                column=column,
                recipe=setting.recipe,
                arguments=(f"method={method}", *setting.arguments),
                overrides=setting.overrides,
                seed=seed,
            )
        )
    return cells


def call(cell: Cell, data: Data) -> config.Call:
    """The experiment of a run; ConfigError if the recipe does not take it."""
    # Stand-ins need no files, so they have no paths.
    words = [*cell.arguments, f"seed={cell.seed}"]
    if data != "toy":
        folder = _folder(data, cell.recipe)
        words.append(f"path={folder}")
        if cell.recipe == "clothing1m":
            words.append(f"weights={_weights(data, folder)}")
        images = _imagenet(data)
        if cell.recipe == "webvision" and images is not None:
            words.append(f"imagenet={images}")
    return config.apply_overrides(config.call_recipe(cell.recipe, words), cell.overrides)


def _folder(data: Path, recipe: str) -> Path:
    """The folder of a data set: its own inside `data`, or else `data`, where recipes look below."""
    if not data.is_dir():
        raise ValueError(
            f"data must be a folder, got {str(data)!r}. Give the one that holds the data sets, or "
            "toy for stand-ins."
        )
    return _first_folder([data / name for name in _FOLDERS.get(recipe, ())]) or data


def _imagenet(data: Path) -> Path | None:
    """The validation images of ImageNet, on which WebVision is evaluated as well, if present."""
    images = _first_folder([data / name for name in _IMAGENET])
    if images is not None:
        return images.parent
    kaggle = _first_folder([data / _KAGGLE, data / "imagenet" / _KAGGLE])
    return None if kaggle is None else kaggle.parents[3]


def _weights(data: Path, folder: Path) -> Path:
    for place in (folder / _WEIGHTS, data / _WEIGHTS):
        if place.is_file():
            return place
    raise ValueError(
        f"{folder} has no {_WEIGHTS}. Put the weights of a ResNet-50 trained on ImageNet there, "
        "because the paper starts from them on Clothing1M."
    )


def _first_folder(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_dir()), None)


def _without_oracle(method: str, column: Column) -> str:
    """The method; an oracle without noise leaves nothing out and is the same as its method."""
    if method.startswith("oracle") and "noise=0.0" in column.setting.arguments:
        return "mixup" if method.endswith("+mixup") else "standard"
    return method


def _best(options: list[list[Cell]], validation: Callable[[Cell], float | None]) -> int | None:
    """The option with the highest mean, the first of equals; None if no run is finished."""
    best, highest = None, -math.inf
    for number, cells in enumerate(options):
        accuracies = [validation(cell) for cell in cells]
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        if known and sum(known) / len(known) > highest:
            best, highest = number, sum(known) / len(known)
    return best


def _ablation_cells(
    data: Data, rate: float, stage: Stage, choice: Choice, trials: int
) -> list[Cell]:
    chosen = (
        f"objective.alpha={choice.alpha}",
        f"objective.k={choice.k}",
        f"objective.start_epoch={choice.e}",
    )
    arguments: tuple[str, ...] = (f"noise={rate}", "protocol=paper")
    setting = Setting("cifar10", arguments, ("held_out=5000", *_CLEAN, *chosen))
    if data == "toy":
        arguments = (f"noise={rate}", f"epochs={TOY_EPOCHS}")
        setting = Setting("toy", arguments, ("held_out=400", *_CLEAN, *chosen))
    column = f"{stage}={getattr(choice, stage)}"
    return make_cells(f"{100 * rate:.0f} % noise", column, setting, "ncr", trials)


def _words(stage: Stage, data: Data) -> list[str]:
    if stage == "alpha":
        return list(map(str, ALPHAS))
    if stage == "k":
        return [str(k or "none") for k in NEIGHBORS]
    # NCR starts at the same share of a shorter run.
    scale = num_epochs(data) / ABLATION_EPOCHS
    return [f"{start * scale:g}" for start in STARTS]


def _values(stage: Stage, data: Data) -> list[float]:
    if stage == "k":
        return [k or ABLATION_BATCH for k in NEIGHBORS]
    return list(map(float, _words(stage, data)))


def _mini_imagenet(color: str, noise: float) -> Column:
    # The paper's numbers come from its released code, which has other hyper-parameters than the
    # paper prints.
    setting = Setting("mini_imagenet", (f"color={color}", f"noise={noise}", "hyper=released"))
    if color == "blue":
        stand_in = Setting("toy", (f"noise={noise}", f"epochs={TOY_EPOCHS}"))
    else:
        stand_in = Setting("digits", (f"noise={noise}", "kind=instance", f"epochs={DIGITS_EPOCHS}"))
    name = f"{100 * noise:.0f} %"
    group = f"mini-ImageNet-{color.title()}"
    return Column(group=group, name=name, setting=setting, stand_in=stand_in)


def _cifar(num_classes: int, noise: float, *, is_symmetric: bool = True) -> Column:
    kind, name = "symmetric", f"{100 * noise:.0f} %"
    stand_in = Setting("toy", (f"noise={noise}", f"epochs={TOY_EPOCHS}"))
    if not is_symmetric:
        # Asymmetric noise as the public code of ELR makes it, which the paper ran.
        kind = {10: "asymmetric-in-place", 100: "asymmetric-next"}[num_classes]
        name = f"A-{name}"
        words = (f"noise={noise}", "kind=pair-flip", f"epochs={DIGITS_EPOCHS}")
        stand_in = Setting("digits", words)
    setting = Setting(f"cifar{num_classes}", (f"noise={noise}", f"kind={kind}", "protocol=paper"))
    return Column(group=f"CIFAR-{num_classes}", name=name, setting=setting, stand_in=stand_in)


def _cifar_columns() -> Iterable[Column]:
    for num_classes in (10, 100):
        for noise in (0.2, 0.4, 0.5, 0.8, 0.9):
            yield _cifar(num_classes, noise)
        yield _cifar(num_classes, 0.4, is_symmetric=False)


def _real(group: str, recipe: str, *arguments: str, batch_size: int = _USUAL_BATCH) -> Column:
    """Images with noisy labels of their own; digits with noise by image stand in for them."""
    overrides: tuple[str, ...] = ()
    fewer: tuple[str, ...] = ()
    # With the usual batch size the run belongs to another table too, so it has the same name.
    if batch_size != _USUAL_BATCH:
        overrides = (f"batch_size={batch_size}",)
        fewer = (f"batch_size={batch_size // _STAND_IN_SHRINKS}",)
    words = ("noise=0.2", "kind=instance", f"epochs={DIGITS_EPOCHS}")
    setting = Setting(recipe, arguments, overrides)
    return Column(group=group, name="", setting=setting, stand_in=Setting("digits", words, fewer))


def _batch_size(size: int) -> Column:
    column = _real("WebVision", "webvision", "subset=full", batch_size=size)
    return replace(column, name=f"in batches of {size}")


_MINI_IMAGENET = tuple(
    _mini_imagenet(color, noise) for color in ("blue", "red") for noise in (0.0, 0.2, 0.4, 0.8)
)
_HARD = tuple(column for column in _MINI_IMAGENET if column.name in ("40 %", "80 %"))
TABLES = {
    "baselines": Table(
        title="Baselines and oracle on mini-ImageNet with synthetic (Blue) and web (Red) noise",
        rows=paper.baselines(),
        columns=_MINI_IMAGENET,
        trials=5,
        notes=(
            "An oracle trains on the examples alone whose labels are known to be right; without "
            "noise it is the method itself, and the runs are the same.",
            "Hyper-parameters are those of the paper's released code, which its numbers were made "
            "with.",
        ),
    ),
    "realistic": Table(
        title="Realistic noise: mini-WebVision, WebVision and Clothing1M",
        rows=paper.realistic(),
        columns=(
            _real("mini-WebVision", "webvision", "subset=mini"),
            _real("WebVision", "webvision", "subset=full"),
            _real("Clothing1M", "clothing1m"),
        ),
        trials=1,
        notes=(
            "† is of Inception-ResNet-v2, a stronger network than the ResNet-50 of all others.",
        ),
    ),
    "cifar": Table(
        title="Synthetic noise: CIFAR-10 and CIFAR-100",
        rows=paper.cifar(),
        columns=tuple(_cifar_columns()),
        trials=1,
        notes=(
            "A-40 % is asymmetric noise, all else symmetric, both as the public code of ELR makes "
            "them.",
            "The public ELR+, which the paper ran, draws other noise for each of its two networks, "
            "so that each is taught by one that has seen right labels of its wrong ones; here both "
            "learn the same labels.",
        ),
    ),
    "batch-size": Table(
        title="Effect of the batch size on NCR, on WebVision with its 1000 classes",
        rows=paper.batch_size(),
        columns=tuple(map(_batch_size, (256, 512, 1024, 2048))),
        trials=1,
    ),
}
PANELS = {
    "confidence": Panels(title="Confidence in the given labels of mini-ImageNet", columns=_HARD),
    "similarity": Panels(title="Cosine similarity of the features of mini-ImageNet", columns=_HARD),
}
