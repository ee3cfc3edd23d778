"""The table of methods that all recipes share: what a name such as `ncr+mixup` means.

Weights of label smoothing, bootstrapping and mixup are those of the paper's released code, .5, .5 and Beta(.5, .5);
the paper prints none. To add a method, give it a row in `choose` and its name to one of the lists of `Method`.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from nearsay.batch import Objective
from nearsay.losses import ELR, GJS, NCR, Bootstrap, CrossEntropy, NeighborVote
from nearsay.transforms import Augment, ColorJitter, Mixup, RandAugment, Transform, Views

_Usual = Literal[  # lists in the order in which users are told them
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
FeatureMethod = Literal[
    _Usual, _Oracle, _More
]  # a second view, as gjs and da want, needs an image to augment
WebMethod = Literal[
    _Usual, "ncr+mixup+da", _More, _Views
]  # nobody knows the true labels of images from the web


class Choice(NamedTuple):
    """What a method asks of an experiment."""

    objective: Objective
    mixup: Mixup | None = None
    num_views: Literal[1, 2] = 1
    jitters: bool = False  # the colors of the second view: the paper's DA
    only_clean: bool = False  # the oracle
    networks: Literal[1, 2] = 1  # that teach each other, as in ELR+
    propagates: bool = False  # labels over the features, halfway
    is_strong: bool = (
        False  # the second view is strongly augmented, and the teacher is the network's own average
    )

    def augment(
        self, *transforms: Transform, strongly: tuple[Transform, ...] = (RandAugment(),)
    ) -> Augment | Views:
        """The transforms, for as many views of an image as the method compares; a strong one is made by `strongly`."""
        if self.num_views == 2:
            more = (ColorJitter(),) if self.jitters else strongly if self.is_strong else ()
            return Views(first=transforms, second=(*transforms, *more))
        return Augment(transforms=transforms)

    def fields(self, epochs: float) -> dict[str, Any]:
        """Fields of an `Experiment` of so many epochs, whose types Any stands for."""
        fields: dict[str, Any] = {
            "objective": self.objective,
            "mixup": self.mixup,
            "only_clean": self.only_clean,
        }
        if (
            self.networks == 2
        ):  # ELR+ evaluates the networks themselves; their averages are teachers only
            fields |= {"networks": 2, "averaging": 0.997, "judged": "networks"}
        if self.is_strong:
            fields |= {"averaging": 0.99, "self_taught": True}
            fields["objective"] = replace(self.objective, start_epoch=max(1.0, round(epochs / 10)))  # type: ignore[type-var]
        if self.propagates:
            fields["propagate_at"] = max(1, round(epochs / 2))
        return fields


def choose(
    method: Method,
    *,
    ncr: NCR,
    beside_elr: NCR | None = None,
    elr: ELR | None = None,
    mixup: Mixup | None = None,
    vote: NeighborVote = NeighborVote(),  # noqa: B008  # frozen, so it may be shared
) -> Choice:
    """The method of that name, made of the recipe's own losses; `beside_elr` is NCR where its base is ELR."""
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
    if method not in table:
        raise ValueError(f"method={method!r} must be one of {', '.join(table)}")
    return table[method]


def check_of_use(method: str, **wished: object) -> None:
    """Refuse settings of NCR for a method that has none, rather than leave them without effect."""
    for name, value in wished.items():
        if value is not None and "ncr" not in method:
            raise ValueError(
                f"{name}={value!r} is of NCR, which method={method!r} does not use; leave it out"
            )


def warmup(epochs: float, most: float) -> float:
    """Epochs of warm-up: at most a tenth of the run, so that a run of one epoch is possible, too."""
    return max(0.0, min(most, epochs / 10))
