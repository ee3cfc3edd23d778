"""One run and the place of its number, in the words by which a recipe is called."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from nearsay import config

Data = Path | Literal["toy"]
TOY_EPOCHS, DIGITS_EPOCHS = 5, 2  # of stand-ins: seconds, and enough to tell that all goes together
_FOLDERS = {"webvision": ("webvision", "WebVision"), "clothing1m": ("clothing1m", "Clothing1M")}
_WEIGHTS = "resnet50.safetensors"  # of ImageNet, which Clothing1M starts from
_IMAGENET = (
    "ILSVRC/val",
    "ILSVRC2012/val",
    "imagenet/val",
    "ImageNet/val",
)  # folders with the validation images
_KAGGLE = "ILSVRC/Data/CLS-LOC/val"  # below the folder that holds the labels


class Setting(NamedTuple):
    """A recipe and what is chosen in it, but for path, seed and method."""

    recipe: str
    arguments: tuple[str, ...]  # key=value
    overrides: tuple[str, ...] = ()  # a.b=c


@dataclass(frozen=True, kw_only=True)
class Column:
    """Data and noise: a column of a table, or a panel of a figure."""

    group: str
    name: str
    setting: Setting
    stand_in: Setting  # what takes its place where there is no data

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group} {self.name}".strip()

    def heading(self, data: Data) -> str:
        """What to print above its numbers: nobody shall take a stand-in for the data itself."""
        return f"{self.stand_in.recipe} for {self.title}" if data == "toy" else self.title

    def panel(self, data: Data) -> str:
        """The same above a panel, where the noise is named as such."""
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
        found = (each.partition("=")[2] for each in self.arguments if each.startswith("method="))
        return next(found, "")


def entitled(title: str, data: Data) -> str:
    """The title of a table or figure, which says so where nothing below it is of the data itself."""
    return f"{title} (small stand-ins, not the data itself)" if data == "toy" else title


def make_cells(row: str, column: str, setting: Setting, method: str, trials: int) -> list[Cell]:
    """The runs of one number, which differ in their seed."""
    arguments = (f"method={method}", *setting.arguments)
    return [
        Cell(
            row=row,
            column=column,
            recipe=setting.recipe,
            arguments=arguments,
            overrides=setting.overrides,
            seed=seed,
        )
        for seed in range(trials)
    ]


def call(cell: Cell, data: Data) -> config.Call:
    """The experiment of a run; ConfigError if the recipe does not take it."""
    words = [*cell.arguments, f"seed={cell.seed}"]
    if data != "toy":
        folder = _place(data, cell.recipe)
        words.append(f"path={folder}")
        if cell.recipe == "clothing1m":
            words.append(f"weights={_weights(data, folder)}")
        if cell.recipe == "webvision" and (images := _imagenet(data)) is not None:
            words.append(f"imagenet={images}")
    return config.apply_overrides(config.call_recipe(cell.recipe, words), cell.overrides)


def _place(data: Path, recipe: str) -> Path:
    """The folder of a data set in that of all: its own where it has one, else the data sets look below themselves."""
    if not data.is_dir():
        raise ValueError(
            f"data={str(data)!r} is no folder; give the one that holds the data sets, or toy for stand-ins"
        )
    return next((data / name for name in _FOLDERS.get(recipe, ()) if (data / name).is_dir()), data)


def _imagenet(data: Path) -> Path | None:
    """Where the validation images of ImageNet are, on which WebVision is judged as well; None if they are not there."""
    found = next((data / each for each in _IMAGENET if (data / each).is_dir()), None)
    if found is not None:
        return found.parent
    return next((each for each in (data, data / "imagenet") if (each / _KAGGLE).is_dir()), None)


def _weights(data: Path, folder: Path) -> Path:
    for place in (folder / _WEIGHTS, data / _WEIGHTS):
        if place.is_file():
            return place
    raise ValueError(
        f"{folder} has no {_WEIGHTS}; put the weights of a ResNet-50 that was trained on ImageNet there, as the paper "
        "starts from such a network on Clothing1M"
    )
