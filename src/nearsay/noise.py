"""Noise models: functions from labels to labels, each called once, before training.

Every draw is a pure function of (seed, purpose, example), made on the CPU: neither order, device nor torch's generator
changes it. A model acts on the given labels and keeps the clean ones; where those are unknown, the given labels are
taken for true. Unlabeled examples and those whose true class is outside the vocabulary stay as they are.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from nearsay import rng
from nearsay.batch import Labels

Pairs = tuple[tuple[int | str, int | str], ...]
_MAPPINGS = ("cifar10", "cifar100-next", "cifar100-superclass", "next")
_CIFAR10: Pairs = (
    ("truck", "automobile"),
    ("bird", "airplane"),
    ("cat", "dog"),
    ("dog", "cat"),
    ("deer", "horse"),
)
_CIFAR100_SUPERCLASSES = """
beaver dolphin otter seal whale, aquarium_fish flatfish ray shark trout, orchid poppy rose sunflower tulip, bottle bowl
can cup plate, apple mushroom orange pear sweet_pepper, clock keyboard lamp telephone television, bed chair couch table
wardrobe, bee beetle butterfly caterpillar cockroach, bear leopard lion tiger wolf, bridge castle house road
skyscraper, cloud forest mountain plain sea, camel cattle chimpanzee elephant kangaroo, fox porcupine possum raccoon
skunk, crab lobster snail spider worm, baby boy girl man woman, crocodile dinosaur lizard snake turtle, hamster mouse
rabbit shrew squirrel, maple_tree oak_tree palm_tree pine_tree willow_tree, bicycle bus motorcycle pickup_truck train,
lawn_mower rocket streetcar tank tractor"""
_ROWS, _COLUMNS = 4096, 1024  # of the inputs looked at in one go, 32 MiB of float64
_HALF_CELL = (
    2.0**-25
)  # uniforms are multiples of 2⁻²⁴ from 0, whose quantile is infinite; the middle of a cell has one


@dataclass(frozen=True, kw_only=True)
class Symmetric:
    """Exactly round(rate · n) examples get a uniformly random label.

    With `redraw`, the convention of ELR, the own class is drawn as well, so only rate · (C − 1) / C of the labels turn
    wrong; without, only other classes are drawn. A lower rate changes a subset of what a higher one changes.
    """

    rate: float
    seed: int = 0
    redraw: bool = True

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """A share of the labels drawn anew."""
        given, examples = _start(labels)
        chosen = _choose(self.seed, "symmetric choice", examples, self.rate)
        num_classes, least = len(labels.classes), 0 if self.redraw else 1
        steps = least + rng.integers(self.seed, "symmetric step", 0, chosen, num_classes - least)
        given[chosen] = (given[chosen] + steps) % num_classes
        return _finish(labels, given)


@dataclass(frozen=True, kw_only=True)
class Asymmetric:
    """Exactly round(rate · n_c) of the n_c examples of each mapped class c get the class that c is mapped to.

    `mapping` is pairs (from, to) of class names or numbers, or "cifar10": truck → automobile, bird → airplane,
    cat ↔ dog, deer → horse; "cifar100-next": the next number in blocks of five, as in ELR, which keeps 6 of 100 classes
    in their superclass; "cifar100-superclass": the next class of the true superclass, by the alphabet; "next": the next
    number. The last of a block, of a superclass or of all is followed by its first.
    """

    rate: float
    seed: int = 0
    mapping: str | Pairs

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)
        if not isinstance(self.mapping, str):
            object.__setattr__(
                self, "mapping", tuple((source, target) for source, target in self.mapping)
            )
        elif self.mapping not in _MAPPINGS:
            raise ValueError(
                f"mapping {self.mapping!r} must be pairs of classes or one of {', '.join(_MAPPINGS)}"
            )

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """A share of each mapped class mapped."""
        return _map(labels, self.mapping, self.rate, self.seed, in_place=False)


@dataclass(frozen=True, kw_only=True)
class AsymmetricInPlace:
    """Asymmetric CIFAR-10 noise as the public code of ELR makes it, only to compare with papers that follow it.

    Class after class is changed in place, so some cats that became dogs turn back: rate 0.4 makes 18.4 % wrong, not 20.
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """A share of each mapped class mapped, and of those that were mapped to it."""
        return _map(labels, "cifar10", self.rate, self.seed, in_place=True)


@dataclass(frozen=True, kw_only=True)
class PairFlip:
    """Exactly round(rate · n_c) examples of each class c get class c + 1, those of the last class the first."""

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """A share of each class moved on."""
        return _map(labels, "next", self.rate, self.seed, in_place=False)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Each example draws its label from the row of its class; rows sum to 1."""

    matrix: Sequence[Sequence[float]]  # (C, C), kept as tuples
    seed: int = 0

    def __post_init__(self) -> None:
        rows = tuple(tuple(float(chance) for chance in row) for row in self.matrix)
        for number, row in enumerate(rows):
            if len(row) != len(rows) or not min(row) >= 0 or not abs(sum(row) - 1) <= 1e-6:
                raise ValueError(
                    f"row {number}, {row}, sums to {sum(row):.9g}; give {len(rows)} chances of sum 1"
                )
        object.__setattr__(self, "matrix", rows)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """All labels drawn."""
        given, examples = _start(labels)
        if len(self.matrix) != len(labels.classes):
            raise ValueError(
                f"{len(self.matrix)} rows do not fit {len(labels.classes)} classes; give a row for each"
            )
        for number, members in _by_class(given, examples):
            chances = torch.tensor(self.matrix[number], dtype=torch.float64)[None]  # (1, C)
            given[members] = _draw(self.seed, "matrix label", members, chances)
        return _finish(labels, given)


@dataclass(frozen=True, kw_only=True)
class InstanceDependent:
    """Noise that depends on what an example looks like (Xia et al., NeurIPS 2020, Algorithm 2).

    Each example draws its own flip rate from N(rate, deviation²) truncated to [0, 1], and the other classes share that
    rate by the softmax of a random projection of its input; each class has a projection of its own. Near 0 and 1 the
    truncation moves the average: rate 0.05 with deviation 0.1 gives 0.10. Rate 0 is no noise at all.
    """

    rate: float
    seed: int = 0
    deviation: float = 0.1

    def __post_init__(self) -> None:
        _check_share(rate=self.rate, deviation=self.deviation)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """All labels drawn; `inputs` (N, ...) are images or features, and uint8 is scaled to [0, 1]."""
        if inputs is None or len(inputs) != len(labels.given):
            found = 0 if inputs is None else len(inputs)
            raise ValueError(
                f"{found} inputs for {len(labels.given)} labels; noise by instance needs one for each"
            )
        given, examples = _start(labels)
        for number, members in _by_class(given, examples):
            chances = self._chances(inputs, members, number, len(labels.classes))
            given[members] = _draw(self.seed, "instance label", members, chances)
        return _finish(labels, given)

    def _chances(self, inputs: Tensor, members: Tensor, number: int, num_classes: int) -> Tensor:
        """(n, C) the probabilities of the labels of `members` (n,), which are of class `number`."""
        scores = _project(inputs, members, self.seed, f"instance projection {number}", num_classes)
        scores[:, number] = -torch.inf
        rates = self._flip_rates(members)
        chances = scores.softmax(dim=1) * rates[:, None]
        chances[:, number] = 1 - rates
        return chances

    def _flip_rates(self, members: Tensor) -> Tensor:
        """(n,) float64 quantiles of the truncated normal."""
        if self.rate == 0 or self.deviation == 0:
            return torch.full(members.shape, float(self.rate), dtype=torch.float64)
        low, high = map(NormalDist(self.rate, self.deviation).cdf, (0, 1))
        drawn = low + (high - low) * (
            rng.uniform(self.seed, "instance rate", 0, members).double() + _HALF_CELL
        )
        return torch.clamp(self.rate + self.deviation * torch.special.ndtri(drawn), 0, 1)


@dataclass(frozen=True, kw_only=True)
class OpenSet:
    """Exactly round(rate · n) labeled examples are to get an image from elsewhere: clean becomes −1, given stays."""

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """The labels that go with the replaced images."""
        clean = (labels.given if labels.clean is None else labels.clean).clone()
        clean[self._chosen(labels).to(clean.device)] = -1
        return Labels(labels.given, clean, labels.classes)

    def replacements(self, labels: Labels, num_outside: int) -> tuple[Tensor, Tensor]:
        """Which examples are replaced, in rising order, and by which of `num_outside` examples of the other source.

        The same for the labels before and after noise. Nobody from outside comes twice before all came once.
        """
        if isinstance(num_outside, bool) or not isinstance(num_outside, int) or num_outside < 1:
            raise ValueError(
                f"num_outside {num_outside!r} must be a whole number of examples, at least 1"
            )
        chosen = self._chosen(labels)
        order = chosen.argsort()
        outside = rng.shuffle(self.seed, "open-set image", 0, torch.arange(num_outside))
        return chosen[order], outside[order % num_outside]

    def _chosen(self, labels: Labels) -> Tensor:
        labeled = (labels.given.cpu() >= 0).nonzero()[
            :, 0
        ]  # whatever clean says: that this very model changes
        return _choose(self.seed, "open-set choice", labeled, self.rate)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Labels that somebody wrote down: human annotators, an earlier run, label propagation.

    All given labels are replaced. The clean ones are the recorded ones, or else those of the data set, or else remain
    unknown, as what is replaced need not have been true. Two records are equal when their labels are.
    """

    given: Tensor = field(compare=False)  # (N,) whole numbers; −1 where unlabeled
    clean: Tensor | None = field(default=None, compare=False)  # (N,)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        for name, labels in (("given", self.given), ("clean", self.clean)):
            if labels is not None:
                if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
                    raise ValueError(
                        f"{name} of {labels.dtype} must be whole class numbers, such as torch.int64"
                    )
                object.__setattr__(self, name, labels.to("cpu", torch.int64, copy=True))
        object.__setattr__(self, "digest", _digest(self.given, self.clean))

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """The recorded labels."""
        if len(self.given) != len(labels.given):
            raise ValueError(
                f"{len(self.given)} recorded labels but {len(labels.given)} examples; record as many"
            )
        clean = labels.clean if self.clean is None else self.clean.to(labels.given.device)
        return Labels(self.given.to(labels.given.device), clean, labels.classes)


class Realized(NamedTuple):
    """What noise did to labels, as counted and not as asked for."""

    effective_rate: (
        float | None
    )  # share of labels that are not the true class, None where that is unknown
    num_open_set: int  # those of examples whose true class is outside the vocabulary
    matrix: Tensor  # (C, C) int64 counts of the other labeled examples: rows clean, columns given
    fingerprint: str


def describe(labels: Labels) -> Realized:
    """Count what is wrong with `labels`, as far as their clean ones are known."""
    given, num_classes = labels.given.cpu(), len(labels.classes)
    clean = torch.full_like(given, -1) if labels.clean is None else labels.clean.cpu()
    cells = (clean.long() * num_classes + given)[(given >= 0) & (clean >= 0)]
    matrix = torch.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)
    num_open_set = 0 if labels.clean is None else int(((given >= 0) & (clean < 0)).sum())
    num_known = len(cells) + num_open_set
    rate = (num_known - int(matrix.trace())) / num_known if num_known else None
    return Realized(rate, num_open_set, matrix, fingerprint(labels))


def fingerprint(labels: Labels) -> str:
    """The SHA-256 of given labels, clean labels and class names: the same on every machine."""
    return _digest(labels.given, labels.clean, labels.classes)


def split_balanced(labels: Labels, held_out: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Examples to train on and examples to hold out, both in rising order; `held_out` says how many.

    Every class, by the given labels, gives the same number, or some one more. Where that is more than half of the
    smallest class, classes give in proportion to their size, and each keeps at least one example. Unlabeled examples
    are never held out.
    """
    given = labels.given.cpu()
    order = rng.shuffle(seed, "held-out choice", 0, torch.arange(len(given)))
    members = [each for _, each in _by_class(given, order[given[order] >= 0])]
    most = sum(len(each) - 1 for each in members)
    if isinstance(held_out, bool) or not isinstance(held_out, int) or held_out < 0:
        raise ValueError(
            f"held_out={held_out!r} must be a whole number of examples, from 0 to {most}"
        )
    if held_out > most:
        cure = f"give held_out={most} at most" if most else "give held_out=0"
        raise ValueError(
            f"{held_out} of {len(given)} examples cannot be held out: each class must keep one; {cure}"
        )
    is_held = torch.zeros(len(given), dtype=torch.bool)
    for each, share in zip(
        members, _shares([len(each) for each in members], held_out), strict=True
    ):
        is_held[each[:share]] = True
    return (~is_held).nonzero()[:, 0], is_held.nonzero()[:, 0]


def _shares(sizes: list[int], total: int) -> list[int]:
    """Whole numbers that sum to `total`, each below its size: equal if that takes no more than halves."""
    weights = (
        sizes
        if any(2 * math.ceil(total / len(sizes)) > size for size in sizes)
        else [1] * len(sizes)
    )
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    for _ in range(total - sum(shares)):  # one more to whoever is furthest behind
        places = [place for place, size in enumerate(sizes) if shares[place] < size - 1]
        shares[max(places, key=lambda place: total * weights[place] - whole * shares[place])] += 1
    return shares


def _start(labels: Labels) -> tuple[Tensor, Tensor]:
    """A copy of the given labels (N,), and the numbers of the examples that noise may change."""
    if len(labels.classes) < 2:
        raise ValueError(
            f"labels of {len(labels.classes)} class cannot be confused; noise needs at least 2 classes"
        )
    given = labels.given.to("cpu", torch.int64, copy=True)
    clean = given if labels.clean is None else labels.clean.cpu()
    return given, ((given >= 0) & (clean >= 0)).nonzero()[:, 0]


def _finish(labels: Labels, given: Tensor) -> Labels:
    return Labels(
        given.to(labels.given.device),
        labels.given if labels.clean is None else labels.clean,
        labels.classes,
    )


def _choose(seed: int, purpose: str, examples: Tensor, rate: float) -> Tensor:
    """Exactly round(rate · n) of the n `examples`, in random order; those of a lower rate come first."""
    return examples[rng.shuffle(seed, purpose, 0, examples)[: round(rate * len(examples))]]


def _by_class(given: Tensor, examples: Tensor) -> list[tuple[int, Tensor]]:
    """Each class number that `examples` have, and the examples that have it."""
    kinds = given[examples]
    return [(number, examples[kinds == number]) for number in torch.unique(kinds).tolist()]


def _map(labels: Labels, mapping: str | Pairs, rate: float, seed: int, *, in_place: bool) -> Labels:
    """Map a share of each class; in place, a class counts those that were mapped to it before."""
    given, examples = _start(labels)
    current = given if in_place else given.clone()
    for source, target in sorted(_targets(mapping, labels.classes).items()):
        members = examples[current[examples] == source]
        # a purpose for each class: with one for all, in place those just mapped would be the first to be mapped on
        given[_choose(seed, f"asymmetric choice {source}", members, rate)] = target
    return _finish(labels, given)


def _targets(mapping: str | Pairs, classes: tuple[str, ...]) -> dict[int, int]:
    """The class number that each mapped class number goes to."""
    paths: dict[str | Pairs, Sequence[Sequence[int | str]]] = {
        "cifar10": _CIFAR10,
        "cifar100-next": [[*range(start, start + 5), start] for start in range(0, 100, 5)],
        "cifar100-superclass": [
            [*names, names[0]] for names in map(str.split, _CIFAR100_SUPERCLASSES.split(","))
        ],
        "next": [[*range(len(classes)), 0]],
    }
    numbers: dict[int | str, int] = {
        key: number for number, name in enumerate(classes) for key in (name, number)
    }
    targets: dict[int, int] = {}
    for pair in chain.from_iterable(pairwise(path) for path in paths.get(mapping, mapping)):
        if unknown := [name for name in pair if name not in numbers]:
            raise ValueError(
                f"the mapping names the class {unknown[0]!r}, which is none of {', '.join(classes)}"
            )
        source, target = numbers[pair[0]], numbers[pair[1]]
        if source == target or source in targets:
            raise ValueError(
                f"the mapping holds {pair!r}; it must map a class once, and to another class"
            )
        targets[source] = target
    return targets


def _draw(seed: int, purpose: str, examples: Tensor, chances: Tensor) -> Tensor:
    """(n,) class numbers for `examples` (n,), drawn from `chances` (n, C) or (1, C)."""
    bounds = chances.cumsum(dim=1)
    bounds = (
        (bounds / bounds[:, -1:]).expand(len(examples), -1).contiguous()
    )  # the last is 1, which no uniform reaches
    return torch.searchsorted(
        bounds, rng.uniform(seed, purpose, 0, examples)[:, None].double(), right=True
    )[:, 0]


def _project(inputs: Tensor, members: Tensor, seed: int, purpose: str, num_classes: int) -> Tensor:
    """(n, C) float64 products of the inputs of `members` (n,) with a matrix of standard normals, piece by piece."""
    rows = inputs.reshape(len(inputs), -1)  # (N, D)
    scores = torch.zeros(len(members), num_classes, dtype=torch.float64)
    for columns in torch.split(torch.arange(rows.shape[1]), _COLUMNS):
        normals = torch.special.ndtri(
            rng.uniform(seed, purpose, 0, columns, num_classes).double() + _HALF_CELL
        )
        for part, places in zip(
            torch.split(scores, _ROWS), torch.split(members, _ROWS), strict=True
        ):
            piece = rows[:, columns[0] : columns[-1] + 1][places.to(rows.device)].cpu()
            part += (
                piece.double() / 255 if piece.dtype == torch.uint8 else piece.double()
            ) @ normals
    if len(wrong := members[~scores.isfinite().all(dim=1)]):
        raise ValueError(
            f"the input of example {wrong[0].item()} is not finite; mend it or leave it out"
        )
    return scores


def _digest(given: Tensor, clean: Tensor | None, classes: Sequence[str] = ()) -> str:
    """SHA-256 of labels as little-endian int64, after a line of JSON that says how many there are and of what."""
    digest = hashlib.sha256(json.dumps([len(given), clean is not None, classes]).encode())
    for labels in (given,) if clean is None else (given, clean):
        digest.update(labels.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _check_share(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name} {value!r} must be a number from 0 to 1, such as 0.4")
