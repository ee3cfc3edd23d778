"""What the recipes of the paper's own experiments share: lengths and starts that follow the epochs, neighbors."""

from collections.abc import Mapping
from typing import Literal, TypeVar

from nearsay.validation import check_number, check_whole

Start = float | Literal["auto"]
Neighbors = int | Literal["all"]
Key = TypeVar("Key")
Row = TypeVar("Row")


def length(wish: float | None, printed: float) -> float:
    """The epochs that are wished, or else the printed ones; refused here, as other durations are derived from them."""
    return printed if wish is None else check_number("epochs", wish, 0.001, 1e6)


def start_epoch(wish: Start | None, printed: float, share: float) -> Start:
    """When NCR starts: as wished, or else at a `share` of the printed epoch, rounded as it falls between epochs."""
    return float(round(printed * share)) if wish is None else wish


def neighbors(wish: Neighbors | None, printed: int) -> int | None:
    """How many neighbors NCR asks, None being all of the batch: as wished, or else as printed."""
    if wish == "all":
        return None
    return printed if wish is None else check_whole("k", wish, 1, cure=", or all")


def pick(name: str, value: Key, table: Mapping[Key, Row]) -> Row:
    """What a table of hyper-parameters holds under a value; ValueError lists what there is."""
    if value not in table:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, table))}")
    return table[value]
