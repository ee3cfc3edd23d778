"""The table of methods that all recipes share: what a name such as `ncr+mixup` means.

The weights of label smoothing, bootstrapping and mixup are .5, .5 and Beta(.5, .5), as in the
released code of the paper, because the paper prints none. To add a method, add a row to `choose`
and its name to `Method`. A loss of your own needs neither: every recipe takes it as `method=`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from nearsay.batch import Objective
from nearsay.losses.base import as_objective
from nearsay.losses.bootstrap import Bootstrap
from nearsay.losses.cross_entropy import CrossEntropy
from nearsay.losses.elr import ELR
from nearsay.losses.gjs import GJS
from nearsay.losses.ncr import NCR
from nearsay.losses.neighbor_vote import NeighborVote
from nearsay.transforms.color import ColorJitter
from nearsay.transforms.mixup import Mixup
from nearsay.transforms.strong import RandAugment
from nearsay.transforms.views import Augment, Transform, Views
from nearsay.validation import check_number, check_whole

# The lists are in the order in which users see them.
_Usual = Literal[
    "standard",
    "mixup",
    "label-smoothing",
    "label-smoothing+mixup",
    "bootstrap",
    "bootstrap+mixup",
    "ncr",
    "ncr+mixup",
]
_Oracle = Literal["oracle", "oracle+mixup"]
_More = Literal["elr", "ncr+elr", "elr+", "ncr+elr+", "label-propagation"]
_Views = Literal["gjs", "neighbor-vote"]
Method = Literal[_Usual, "ncr+mixup+da", _Oracle, _More, _Views]
# Features have no second view, because augmentation needs an image.
FeatureMethod = Literal[_Usual, _Oracle, _More]
# The true labels of images from the web are unknown, so there is no oracle.
WebMethod = Literal[_Usual, "ncr+mixup+da", _More, _Views]

OwnMethod = Objective | Callable[[Tensor, Tensor], Tensor]
"""A loss of the user: an objective, or a function of (B, C) logits and targets to (B,) rows."""
Start = float | Literal["auto"]
Neighbors = int | Literal["all"]

_Key = TypeVar("_Key")
_Row = TypeVar("_Row")


class Choice(NamedTuple):
    """The parts of an experiment that a method decides.

    Attributes:
        objective: the loss.
        mixup: how images are mixed, None for not at all.
        num_views: how many augmented views of an image the loss compares.
        jitters: change the colors of the second view, which the paper calls DA.
        only_clean: train on the examples with right labels only, as the oracle does.
        networks: 2 for networks that teach each other, as in ELR+.
        propagates: propagate labels over the features, halfway.
        is_strong: augment the second view strongly, and let the averaged network teach.
    """

    objective: Objective
    mixup: Mixup | None = None
    num_views: Literal[1, 2] = 1
    jitters: bool = False
    only_clean: bool = False
    networks: Literal[1, 2] = 1
    propagates: bool = False
    is_strong: bool = False

    def augment(
        self, *transforms: Transform, strongly: tuple[Transform, ...] = (RandAugment(),)
    ) -> Augment | Views:
        """The transforms for one view, or for two; `strongly` is added to a strong second view."""
        if self.num_views == 1:
            return Augment(transforms=transforms)
        more: tuple[Transform, ...] = ()
        if self.jitters:
            more = (ColorJitter(),)
        elif self.is_strong:
            more = strongly
        return Views(first=transforms, second=(*transforms, *more))

    def fields(self, epochs: float) -> dict[str, Any]:
        """The fields of an `Experiment` of so many epochs; each value has the type of its field."""
        fields: dict[str, Any] = {
            "objective": self.objective,
            "mixup": self.mixup,
            "only_clean": self.only_clean,
        }
        if self.networks == 2:
            # ELR+ evaluates the networks themselves. Their averages only teach.
            fields |= {"networks": 2, "averaging": 0.997, "eval_weights": "networks"}
        if self.is_strong:
            start = max(1.0, round(epochs / 10))
            vote: Any = self.objective
            fields |= {"averaging": 0.99, "self_taught": True}
            fields["objective"] = replace(vote, start_epoch=start)
        if self.propagates:
            fields["propagate_at"] = max(1, round(epochs / 2))
        return fields


def choose(
    method: Method | OwnMethod,
    *,
    ncr: NCR,
    beside_elr: NCR | None = None,
    elr: ELR | None = None,
    mixup: Mixup | None = None,
    vote: NeighborVote = NeighborVote(),  # noqa: B008  # frozen, so it can be shared
) -> Choice:
    """The method of that name, made of the losses of the recipe; or a loss of the user alone.

    `beside_elr` is the NCR with ELR as its base, for methods such as ncr+elr.
    """
    if not isinstance(method, str):
        return Choice(as_objective(method))
    elr = elr or ELR()
    beside = replace(beside_elr or ncr, base=elr)
    mixup = mixup or Mixup(alpha=0.5)
    smoothed, bootstrap = CrossEntropy(smoothing=0.5), Bootstrap(alpha=0.5)
    table: dict[Method, Choice] = {
        "standard": Choice(CrossEntropy()),
        "mixup": Choice(CrossEntropy(), mixup),
        "label-smoothing": Choice(smoothed),
        "label-smoothing+mixup": Choice(smoothed, mixup),
        "bootstrap": Choice(bootstrap),
        "bootstrap+mixup": Choice(bootstrap, mixup),
        "ncr": Choice(ncr),
        "ncr+mixup": Choice(ncr, mixup),
        "ncr+mixup+da": Choice(ncr, mixup, num_views=2, jitters=True),
        "oracle": Choice(CrossEntropy(), only_clean=True),
        "oracle+mixup": Choice(CrossEntropy(), mixup, only_clean=True),
        "elr": Choice(elr),
        "ncr+elr": Choice(beside),
        "elr+": Choice(elr, mixup, networks=2),
        "ncr+elr+": Choice(beside, mixup, networks=2),
        "label-propagation": Choice(CrossEntropy(), propagates=True),
        "gjs": Choice(GJS(), num_views=2),
        "neighbor-vote": Choice(vote, Mixup(alpha=1.0, views="first"), num_views=2, is_strong=True),
    }
    return pick("method", method, table)


def is_pair(method: Method | OwnMethod) -> bool:
    """Whether two networks teach each other."""
    return isinstance(method, str) and method in ("elr+", "ncr+elr+")


def check_of_use(method: Method | OwnMethod, **wished: object) -> None:
    """Refuse settings of NCR for a method without NCR, because they would have no effect."""
    name = method if isinstance(method, str) else type(method).__name__
    if isinstance(method, str) and "ncr" in name:
        return
    for setting, value in wished.items():
        if value is not None:
            raise ValueError(
                f"{setting} must be left out, got {value!r}. It is a setting of NCR, "
                f"which method={name} does not use."
            )


def pick(name: str, value: _Key, table: Mapping[_Key, _Row]) -> _Row:
    """The row of a table of settings; ValueError lists the rows."""
    if value not in table:
        raise ValueError(f"{name} must be one of {', '.join(map(str, table))}, got {value!r}.")
    return table[value]


def length(epochs: float | None, printed: float) -> float:
    """The epochs that the user wants, or else the printed ones.

    They are checked here, because other durations are derived from them.
    """
    return printed if epochs is None else check_number("epochs", epochs, 0.001, 1e6)


def start_epoch(start: Start | None, printed: float, share: float) -> Start:
    """When NCR starts: as the user wants, or else at a `share` of the printed epoch, rounded."""
    return float(round(printed * share)) if start is None else start


def neighbors(k: Neighbors | None, printed: int) -> int | None:
    """How many neighbors NCR uses, None for all of the batch: as the user wants, or as printed."""
    if k == "all":
        return None
    return printed if k is None else check_whole("k", k, 1, cure=", or all")


def warmup(epochs: float, most: float) -> float:
    """Epochs of warm-up: at most a tenth of the run, so that a run of one epoch is possible."""
    return max(0.0, min(most, epochs / 10))
