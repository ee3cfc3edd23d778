"""Which runs a table or a figure needs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nearsay.reproduce import ablation, paper
from nearsay.reproduce.cells import (
    DIGITS_EPOCHS,
    TOY_EPOCHS,
    Cell,
    Column,
    Data,
    Setting,
    make_cells,
)
from nearsay.reproduce.paper import Row

_USUAL_BATCH = 1024  # of the recipe of WebVision
_STAND_IN_SHRINKS = 8  # batches of the stand-in, as digits are only 1 347; its usual batch is 128


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper: its rows, and what its columns are run with."""

    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    trials: int  # of the paper, 1 where it does not say
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Panels:
    """A figure of the paper that compares methods, panel by panel."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, str], ...] = (
        ("Standard", "standard"),
        ("NCR", "ncr"),
    )  # name and method
    trials: int = 1


def plan(
    name: str,
    data: Data,
    trials: int | None = None,
    *,
    validation: Callable[[Cell], float | None] = lambda _: None,
    is_settled: Callable[[Cell], bool] = lambda _: False,
) -> list[Cell]:
    """The runs of a table or figure, as far as they can be named.

    A later stage of the ablation is known once all runs of the one before are settled: finished or failed.
    `validation` is the held-out accuracy of a finished run.
    """
    if name == "ablation":
        return ablation.plan(data, trials or ablation.TRIALS, validation, is_settled)
    if name in TABLES:
        table = TABLES[name]
        pairs: Iterable[tuple[str, str | None]] = [(row.name, row.method) for row in table.rows]
        num, columns = trials or table.trials, table.columns
    else:
        pairs, num, columns = PANELS[name].rows, trials or PANELS[name].trials, PANELS[name].columns
    return [
        cell
        for row, method in pairs
        if method is not None
        for column in columns
        for cell in make_cells(
            row, column.title, chosen(column, data), _method(method, column), num
        )
    ]


def chosen(column: Column, data: Data) -> Setting:
    """The setting of the paper, or its stand-in."""
    return column.stand_in if data == "toy" else column.setting


def _method(method: str, column: Column) -> str:
    """An oracle without noise leaves nothing out: it is the method itself, and its runs are the same."""
    if method.startswith("oracle") and "noise=0.0" in column.setting.arguments:
        return "mixup" if method.endswith("+mixup") else "standard"
    return method


def _mini_imagenet(color: str, noise: float) -> Column:
    # The paper's numbers were made with its released code, whose hyper-parameters are not those that it prints.
    setting = Setting("mini_imagenet", (f"color={color}", f"noise={noise}", "hyper=released"))
    if color == "blue":
        stand_in = Setting("toy", (f"noise={noise}", f"epochs={TOY_EPOCHS}"))
    else:
        stand_in = Setting("digits", (f"noise={noise}", "kind=instance", f"epochs={DIGITS_EPOCHS}"))
    return Column(
        group=f"mini-ImageNet-{color.title()}",
        name=f"{100 * noise:.0f} %",
        setting=setting,
        stand_in=stand_in,
    )


def _cifar(num_classes: int, noise: float, *, is_symmetric: bool = True) -> Column:
    # Asymmetric noise as the public code of ELR makes it, which the paper ran.
    kind = (
        "symmetric"
        if is_symmetric
        else {10: "asymmetric-in-place", 100: "asymmetric-next"}[num_classes]
    )
    setting = Setting(f"cifar{num_classes}", (f"noise={noise}", f"kind={kind}", "protocol=paper"))
    stand_in = Setting("toy", (f"noise={noise}", f"epochs={TOY_EPOCHS}"))
    if not is_symmetric:
        stand_in = Setting(
            "digits", (f"noise={noise}", "kind=pair-flip", f"epochs={DIGITS_EPOCHS}")
        )
    name = f"{100 * noise:.0f} %" if is_symmetric else f"A-{100 * noise:.0f} %"
    return Column(group=f"CIFAR-{num_classes}", name=name, setting=setting, stand_in=stand_in)


def _real(
    group: str, recipe: str, *arguments: str, batch_size: int | None = None, name: str = ""
) -> Column:
    """Images whose labels are noisy as they come; digits with noise that depends on the image stand in for them."""
    is_usual = batch_size in (None, _USUAL_BATCH)  # then the run is one of another table, too
    overrides = () if is_usual else (f"batch_size={batch_size}",)
    fewer = (
        () if batch_size is None or is_usual else (f"batch_size={batch_size // _STAND_IN_SHRINKS}",)
    )
    stand_in = Setting("digits", ("noise=0.2", "kind=instance", f"epochs={DIGITS_EPOCHS}"), fewer)
    return Column(
        group=group, name=name, setting=Setting(recipe, arguments, overrides), stand_in=stand_in
    )


_RATES = (0.0, 0.2, 0.4, 0.8)
_CIFAR_RATES = (0.2, 0.4, 0.5, 0.8, 0.9)
TABLES = {
    "baselines": Table(
        title="Baselines and oracle on mini-ImageNet with synthetic (Blue) and web (Red) noise",
        rows=paper.baselines(),
        columns=tuple(
            _mini_imagenet(color, noise) for color in ("blue", "red") for noise in _RATES
        ),
        trials=5,
        notes=(
            "An oracle trains on the examples alone whose labels are known to be right; without noise it is the method "
            "itself, and the runs are the same.",
            "Hyper-parameters are those of the paper's released code, which its numbers were made with.",
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
        columns=tuple(
            column
            for num_classes in (10, 100)
            for column in (
                *(_cifar(num_classes, noise) for noise in _CIFAR_RATES),
                _cifar(num_classes, 0.4, is_symmetric=False),
            )
        ),
        trials=1,
        notes=(
            "A-40 % is asymmetric noise, all else symmetric, both as the public code of ELR makes them.",
            "The public ELR+, which the paper ran, draws other noise for each of its two networks, so that each is "
            "taught by one that has seen right labels of its wrong ones; here both learn the same labels.",
        ),
    ),
    "batch-size": Table(
        title="Effect of the batch size on NCR, on WebVision with its 1000 classes",
        rows=paper.batch_size(),
        columns=tuple(
            _real(
                "WebVision",
                "webvision",
                "subset=full",
                batch_size=size,
                name=f"in batches of {size}",
            )
            for size in (256, 512, 1024, 2048)
        ),
        trials=1,
    ),
}
_HARD = tuple(column for column in TABLES["baselines"].columns if column.name in ("40 %", "80 %"))
PANELS = {
    "confidence": Panels(title="Confidence in the given labels of mini-ImageNet", columns=_HARD),
    "similarity": Panels(title="Cosine similarity of the features of mini-ImageNet", columns=_HARD),
}
