"""The numbers that the paper prints, as it prints them, and which of its rows can be run here.

All are accuracies in percent. A row with a source is another work and is only quoted. All other
rows are run, with the method that their name says.
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


_BASELINES = """
Standard                | 72.7±0.4 63.4±0.4 55.9±0.5 13.4±0.4 70.9±0.5 66.9±0.4 63.0±0.3 49.3±0.6
Mixup                   | 72.6±0.2 66.5±0.4 59.4±0.8  7.8±0.4 70.5±0.2 67.6±0.3 63.8±0.4 48.7±0.4
Bootstrap               | 72.8±0.4 66.5±0.4 57.4±0.7 13.4±0.9 71.1±0.2 67.4±0.2 63.4±0.4 48.8±0.5
Bootstrap + Mixup       | 71.7±0.2 64.6±0.5 53.2±0.4  7.6±0.8 69.9±0.6 66.7±0.1 62.0±0.3 42.2±0.5
Label smoothing         | 73.0±0.2 67.7±0.4 60.6±0.2  9.1±0.4 71.2±0.5 68.2±0.5 64.2±0.3 50.2±0.4
Label smoothing + Mixup | 72.5±0.5 67.9±0.4 60.9±0.6  6.8±0.1 71.1±0.3 68.3±0.3 63.8±0.1 47.3±0.1
NCR                     | 73.4±0.5 67.8±0.3 60.6±0.5 11.5±0.5 72.1±0.4 69.0±0.5 64.6±0.2 51.2±0.4
NCR + Mixup             | 73.1±0.3 68.3±0.1 61.4±0.3  7.1±0.4 71.7±0.4 68.6±0.2 64.5±0.4 48.9±0.6
D-Mix                   | -- -- -- -- 55.8 50.3 50.9 35.4 | Li et al. 2020
ELR                     | -- -- -- -- 57.4 58.1 50.6 41.7 | Liu et al. 2020
MOIT                    | -- -- -- -- 64.7 63.1 60.8 45.9 | Ortego et al. 2020
Oracle: Standard        | 72.7±0.4 70.4±0.1 67.2±0.3 50.6±0.3 70.9±0.5 68.6±0.5 64.8±0.7 47.5±0.5
Oracle: Mixup           | 72.6±0.2 70.3±0.3 67.3±0.3 51.8±0.4 70.5±0.2 68.6±0.3 65.6±0.3 48.7±0.3
"""
_REALISTIC = """
Standard           | 75.8  74.9  71.7
Mixup              | 77.2  75.5  72.2
NCR                | 77.1  75.7  74.4
NCR + Mixup        | 79.4  75.4  74.5
NCR + Mixup + DA   | 80.5  76.8  74.6
MLNT, 3 iterations | --    --    73.5 | Li et al. 2019
CleanNet           | --    --    74.7 | Lee et al. 2018
DMI                | --    --    72.5 | Wang et al. 2019
LongReMix          | --    --    73.0 | Cordeiro et al. 2021
ELR                | 76.3† --    --   | Liu et al. 2020
ELR+               | 77.8† --    74.8 | Liu et al. 2020
D-Mix              | 76.3  --    74.8 | Li et al. 2020
GJS                | 79.3  --    --   | Englesson and Azizpour 2021
MoPro              | --    73.9  --   | Li et al. 2020
MILe               | --    75.2  --   | Rajeswar et al. 2021
Heteroscedastic    | --    76.6† --   | Collier et al. 2021
CurrNet            | --    79.3† --   | Guo et al. 2018
"""
_CIFAR = """
Standard   | 83.9 68.3 58.5 25.9 17.3 77.3  61.5 46.2 37.4 10.4  4.1 43.9
MOIT+      | 94.1 92.0 -    75.8 -    93.2  75.9 67.4 -    51.4 -    74.0 | Ortego et al. 2020
D-Mix      | 95.1 94.2 93.6 91.4 74.5 91.8  76.7 74.6 73.1 57.1 29.7 72.1 | Li et al. 2020 | rerun
ELR+       | 94.9 94.4 93.9 90.9 74.5 88.9  76.3 74.0 72.0 57.2 30.9 75.8
NCR + ELR+ | 95.2 94.5 94.3 91.6 75.1 90.7  76.6 74.2 72.5 58.0 30.8 76.3
"""
_BATCH_SIZE = """
NCR | 73.9 75.0 75.7 75.6
"""
_ORACLES = {"Oracle: Standard": "oracle", "Oracle: Mixup": "oracle+mixup"}


def baselines() -> tuple[Row, ...]:
    """Table 1: mini-ImageNet Blue, then Red, with 0, 20, 40 and 80 % noise; five trials each."""
    return _rows(_BASELINES)


def realistic() -> tuple[Row, ...]:
    """Table 2: mini-WebVision, WebVision, Clothing1M; † is Inception-ResNet-v2, else ResNet-50."""
    return _rows(_REALISTIC)


def cifar() -> tuple[Row, ...]:
    """Table 3: CIFAR-10, then CIFAR-100.

    Each has 20, 40, 50, 80 and 90 % symmetric, then 40 % asymmetric noise.
    """
    return _rows(_CIFAR)


def batch_size() -> tuple[Row, ...]:
    """Table 6: NCR on WebVision with batches of 256, 512, 1024 and 2048."""
    return _rows(_BATCH_SIZE)


def read_printed(word: str) -> Printed:
    """A cell of the paper: `72.7±0.4`, `76.3†` or a dash."""
    if not word.strip("-"):
        return Printed(NOTHING, None, None)
    mean, _, deviation = word.rstrip("†").partition("±")
    return Printed(word.replace("±", " ± "), float(mean), float(deviation) if deviation else None)


def _rows(table: str) -> tuple[Row, ...]:
    rows = []
    for line in table.strip().splitlines():
        name, words, *others = map(str.strip, line.split("|"))
        source = others[0] if others else ""
        method = _ORACLES.get(name, name.lower().replace(" + ", "+").replace(" ", "-"))
        rows.append(
            Row(
                name=name,
                method=None if source else method,
                printed=tuple(map(read_printed, words.split())),
                source=source,
                is_rerun="rerun" in others,
            )
        )
    return tuple(rows)
