"""The numbers that the paper prints, as it prints them, and who of its rows can be run here.

All are accuracies in percent. A row with a `method` is run; one without is of another work, and only ever quoted.
"""

from dataclasses import dataclass
from typing import NamedTuple

NOTHING = "–"  # what the paper leaves out


class Printed(NamedTuple):
    """A number of the paper."""

    text: str
    mean: float | None
    deviation: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table."""

    name: str
    method: str | None  # as recipes name it; None is another work
    printed: tuple[Printed, ...]  # by column
    source: str = ""  # of another work
    is_rerun: bool = False  # by the paper, with the public code of that work

    @property
    def cited(self) -> str:
        """The source, and who ran it if that was the paper."""
        return f"{self.source}, rerun by the paper" if self.is_rerun else self.source


def baselines() -> tuple[Row, ...]:
    """Table 1: mini-ImageNet Blue, then Red, each with 0, 20, 40 and 80 % noise; mean and deviation of five trials."""
    return (
        _row(
            "Standard",
            "standard",
            "72.7±0.4 63.4±0.4 55.9±0.5 13.4±0.4",
            "70.9±0.5 66.9±0.4 63.0±0.3 49.3±0.6",
        ),
        _row(
            "Mixup",
            "mixup",
            "72.6±0.2 66.5±0.4 59.4±0.8 7.8±0.4",
            "70.5±0.2 67.6±0.3 63.8±0.4 48.7±0.4",
        ),
        _row(
            "Bootstrap",
            "bootstrap",
            "72.8±0.4 66.5±0.4 57.4±0.7 13.4±0.9",
            "71.1±0.2 67.4±0.2 63.4±0.4 48.8±0.5",
        ),
        _row(
            "Bootstrap + Mixup",
            "bootstrap+mixup",
            "71.7±0.2 64.6±0.5 53.2±0.4 7.6±0.8",
            "69.9±0.6 66.7±0.1 62.0±0.3 42.2±0.5",
        ),
        _row(
            "Label smoothing",
            "label-smoothing",
            "73.0±0.2 67.7±0.4 60.6±0.2 9.1±0.4",
            "71.2±0.5 68.2±0.5 64.2±0.3 50.2±0.4",
        ),
        _row(
            "Label smoothing + Mixup",
            "label-smoothing+mixup",
            "72.5±0.5 67.9±0.4 60.9±0.6 6.8±0.1",
            "71.1±0.3 68.3±0.3 63.8±0.1 47.3±0.1",
        ),
        _row(
            "NCR",
            "ncr",
            "73.4±0.5 67.8±0.3 60.6±0.5 11.5±0.5",
            "72.1±0.4 69.0±0.5 64.6±0.2 51.2±0.4",
        ),
        _row(
            "NCR + Mixup",
            "ncr+mixup",
            "73.1±0.3 68.3±0.1 61.4±0.3 7.1±0.4",
            "71.7±0.4 68.6±0.2 64.5±0.4 48.9±0.6",
        ),
        _row("D-Mix", None, "-- -- -- --", "55.8 50.3 50.9 35.4", source="Li et al. 2020"),
        _row("ELR", None, "-- -- -- --", "57.4 58.1 50.6 41.7", source="Liu et al. 2020"),
        _row("MOIT", None, "-- -- -- --", "64.7 63.1 60.8 45.9", source="Ortego et al. 2020"),
        _row(
            "Oracle: Standard",
            "oracle",
            "72.7±0.4 70.4±0.1 67.2±0.3 50.6±0.3",
            "70.9±0.5 68.6±0.5 64.8±0.7 47.5±0.5",
        ),
        _row(
            "Oracle: Mixup",
            "oracle+mixup",
            "72.6±0.2 70.3±0.3 67.3±0.3 51.8±0.4",
            "70.5±0.2 68.6±0.3 65.6±0.3 48.7±0.3",
        ),
    )


def realistic() -> tuple[Row, ...]:
    """Table 2: mini-WebVision, WebVision, Clothing1M; † is Inception-ResNet-v2, all others are ResNet-50."""
    return (
        _row("Standard", "standard", "75.8 74.9 71.7"),
        _row("Mixup", "mixup", "77.2 75.5 72.2"),
        _row("NCR", "ncr", "77.1 75.7 74.4"),
        _row("NCR + Mixup", "ncr+mixup", "79.4 75.4 74.5"),
        _row("NCR + Mixup + DA", "ncr+mixup+da", "80.5 76.8 74.6"),
        _row("MLNT, 3 iterations", None, "-- -- 73.5", source="Li et al. 2019"),
        _row("CleanNet", None, "-- -- 74.7", source="Lee et al. 2018"),
        _row("DMI", None, "-- -- 72.5", source="Wang et al. 2019"),
        _row("LongReMix", None, "-- -- 73.0", source="Cordeiro et al. 2021"),
        _row("ELR", None, "76.3† -- --", source="Liu et al. 2020"),
        _row("ELR+", None, "77.8† -- 74.8", source="Liu et al. 2020"),
        _row("D-Mix", None, "76.3 -- 74.8", source="Li et al. 2020"),
        _row("GJS", None, "79.3 -- --", source="Englesson and Azizpour 2021"),
        _row("MoPro", None, "-- 73.9 --", source="Li et al. 2020"),
        _row("MILe", None, "-- 75.2 --", source="Rajeswar et al. 2021"),
        _row("Heteroscedastic", None, "-- 76.6† --", source="Collier et al. 2021"),
        _row("CurrNet", None, "-- 79.3† --", source="Guo et al. 2018"),
    )


def cifar() -> tuple[Row, ...]:
    """Table 3: CIFAR-10, then CIFAR-100, each with 20, 40, 50, 80 and 90 % symmetric and 40 % asymmetric noise."""
    return (
        _row(
            "Standard", "standard", "83.9 68.3 58.5 25.9 17.3 77.3", "61.5 46.2 37.4 10.4 4.1 43.9"
        ),
        _row(
            "MOIT+",
            None,
            "94.1 92.0 - 75.8 - 93.2",
            "75.9 67.4 - 51.4 - 74.0",
            source="Ortego et al. 2020",
        ),
        _row(
            "D-Mix",
            None,
            "95.1 94.2 93.6 91.4 74.5 91.8",
            "76.7 74.6 73.1 57.1 29.7 72.1",
            source="Li et al. 2020",
            is_rerun=True,
        ),
        _row("ELR+", "elr+", "94.9 94.4 93.9 90.9 74.5 88.9", "76.3 74.0 72.0 57.2 30.9 75.8"),
        _row(
            "NCR + ELR+",
            "ncr+elr+",
            "95.2 94.5 94.3 91.6 75.1 90.7",
            "76.6 74.2 72.5 58.0 30.8 76.3",
        ),
    )


def batch_size() -> tuple[Row, ...]:
    """Table 6: NCR on WebVision with batches of 256, 512, 1024 and 2048."""
    return (_row("NCR", "ncr", "73.9 75.0 75.7 75.6"),)


def read_printed(word: str) -> Printed:
    """A cell of the paper: `72.7±0.4`, `76.3†` or a dash."""
    if not word.strip("-"):
        return Printed(NOTHING, None, None)
    mean, _, deviation = word.rstrip("†").partition("±")
    return Printed(word.replace("±", " ± "), float(mean), float(deviation) if deviation else None)


def _row(
    name: str, method: str | None, *printed: str, source: str = "", is_rerun: bool = False
) -> Row:
    cells = tuple(read_printed(word) for words in printed for word in words.split())
    return Row(name=name, method=method, printed=cells, source=source, is_rerun=is_rerun)
