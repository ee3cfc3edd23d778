"""Noise models: functions from labels to labels, each called once, before training.

Every draw is a pure function of (seed, purpose, example), made on the CPU: order, device and
torch's generator do not change it. A model changes the given labels and keeps the clean ones; where
those are unknown, the given labels are taken for true. Unlabeled examples stay as they are, and so
do examples with a true class outside the vocabulary.

To write your own model, give a frozen dataclass `__call__(labels, inputs=None) -> Labels`.
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
from nearsay.validation import check_choice, check_number, check_that, check_whole

__all__ = [
    "Asymmetric",
    "AsymmetricInPlace",
    "InstanceDependent",
    "Matrix",
    "MeasuredNoise",
    "OpenSet",
    "PairFlip",
    "Recorded",
    "Symmetric",
    "fingerprint",
    "measure_noise",
    "split_balanced",
]

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
beaver dolphin otter seal whale, aquarium_fish flatfish ray shark trout, orchid poppy rose sunflower
tulip, bottle bowl can cup plate, apple mushroom orange pear sweet_pepper, clock keyboard lamp
telephone television, bed chair couch table wardrobe, bee beetle butterfly caterpillar cockroach,
bear leopard lion tiger wolf, bridge castle house road skyscraper, cloud forest mountain plain sea,
camel cattle chimpanzee elephant kangaroo, fox porcupine possum raccoon skunk, crab lobster snail
spider worm, baby boy girl man woman, crocodile dinosaur lizard snake turtle, hamster mouse rabbit
shrew squirrel, maple_tree oak_tree palm_tree pine_tree willow_tree, bicycle bus motorcycle
pickup_truck train, lawn_mower rocket streetcar tank tractor"""
# How many inputs, and how many numbers of each, are projected at once: 32 MiB of float64.
_ROWS, _COLUMNS = 4096, 1024
# Uniforms are multiples of 2⁻²⁴ from 0, and the normal quantile of 0 is infinite. Half a step is
# added.
_HALF_CELL = 2.0**-25


@dataclass(frozen=True, kw_only=True)
class Symmetric:
    """Exactly round(rate · n) examples get a uniformly random label.

    A lower rate changes a subset of the examples that a higher rate changes.

    Args:
        rate: Share of the labels to draw, from 0 to 1.
        seed: Of the draws.
        redraw: True also draws the own class, the convention of ELR, so rate · (C − 1) / C of the
            labels become wrong. False draws another class.

    >>> import torch
    >>> from nearsay.batch import Labels
    >>> labels = Labels(torch.zeros(10, dtype=torch.int64), None, ("cat", "dog"))
    >>> noisy = Symmetric(rate=0.4, redraw=False)(labels)
    >>> noisy.given.sum()
    tensor(4)
    """

    rate: float
    seed: int = 0
    redraw: bool = True

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """New given labels."""
        given, examples = _start(labels)
        chosen = _choose(self.seed, "symmetric choice", examples, self.rate)
        # A step is how far to go on from the own class; 0 would keep it.
        num_classes = len(labels.classes)
        least = 0 if self.redraw else 1
        steps = least + rng.integers(self.seed, "symmetric step", 0, chosen, num_classes - least)
        given[chosen] = (given[chosen] + steps) % num_classes
        return _finish(labels, given)


@dataclass(frozen=True, kw_only=True)
class Asymmetric:
    """Exactly round(rate · n_c) of the n_c examples of each mapped class c get the class that c
    maps to.

    Args:
        rate: Share of each mapped class, from 0 to 1.
        seed: Of the draws.
        mapping: Pairs (from, to) of class names or numbers, or one of these names. "cifar10": truck
            → automobile, bird → airplane, cat ↔ dog, deer → horse. "cifar100-next": the next number
            in blocks of five, as in ELR, which keeps 6 of 100 classes in their superclass.
            "cifar100-superclass": the next class of the true superclass, by the alphabet. "next":
            the next number. The last of a block, superclass or list is followed by its first.

    >>> import torch
    >>> from nearsay.batch import Labels
    >>> labels = Labels(torch.zeros(10, dtype=torch.int64), None, ("cat", "dog"))
    >>> Asymmetric(rate=0.3, mapping=(("cat", "dog"),))(labels).given.sum()
    tensor(3)
    """

    rate: float
    seed: int = 0
    mapping: str | Pairs

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)
        if isinstance(self.mapping, str):
            check_choice("mapping", self.mapping, _MAPPINGS, cure=", or pairs of classes")
        else:
            pairs = tuple((source, target) for source, target in self.mapping)
            object.__setattr__(self, "mapping", pairs)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """New given labels."""
        return _map(labels, self.mapping, self.rate, self.seed, in_place=False)


@dataclass(frozen=True, kw_only=True)
class AsymmetricInPlace:
    """Asymmetric CIFAR-10 noise as the public code of ELR makes it, to compare with papers that use
    it.

    Classes are changed one after another in place, so some cats that became dogs turn back: rate
    0.4 makes 18.4 % of the labels wrong, not 20 %.

    Args:
        rate: Share of each mapped class, from 0 to 1.
        seed: Of the draws.

    >>> import torch
    >>> from nearsay.batch import Labels
    >>> names = "airplane automobile bird cat deer dog frog horse ship truck"
    >>> labels = Labels(torch.full((10,), 9), None, tuple(names.split()))
    >>> (AsymmetricInPlace(rate=0.4)(labels).given == 1).sum()
    tensor(4)
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """New given labels."""
        return _map(labels, "cifar10", self.rate, self.seed, in_place=True)


@dataclass(frozen=True, kw_only=True)
class PairFlip:
    """Exactly round(rate · n_c) examples of each class c get class c + 1; the last class gets the
    first.

    Args:
        rate: Share of each class, from 0 to 1.
        seed: Of the draws.

    >>> import torch
    >>> from nearsay.batch import Labels
    >>> labels = Labels(torch.ones(10, dtype=torch.int64), None, ("cat", "dog"))
    >>> PairFlip(rate=0.2)(labels).given.sum()
    tensor(8)
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """New given labels."""
        return _map(labels, "next", self.rate, self.seed, in_place=False)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Each example draws its label from the row of its class.

    Args:
        matrix: (C, C) probabilities; row c is the distribution of the labels of class c. Kept as
            tuples.
        seed: Of the draws.

    >>> import torch
    >>> from nearsay.batch import Labels
    >>> labels = Labels(torch.tensor([0, 1, 1]), None, ("cat", "dog"))
    >>> Matrix(matrix=[[1, 0], [1, 0]])(labels).given
    tensor([0, 0, 0])
    """

    matrix: Sequence[Sequence[float]]
    seed: int = 0

    def __post_init__(self) -> None:
        rows = tuple(tuple(float(chance) for chance in row) for row in self.matrix)
        for number, row in enumerate(rows):
            # Both comparisons are False for NaN.
            is_right = len(row) == len(rows) and min(row) >= 0 and abs(sum(row) - 1) <= 1e-6
            condition = f"{len(rows)} probabilities with the sum 1"
            check_that(is_right, f"matrix row {number}", condition, row)
        object.__setattr__(self, "matrix", rows)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """New given labels."""
        given, examples = _start(labels)
        has_rows = len(self.matrix) == len(labels.classes)
        check_that(has_rows, "matrix", f"{len(labels.classes)} rows", len(self.matrix))
        for number, members in _by_class(given, examples):
            chances = torch.tensor(self.matrix[number], dtype=torch.float64)[None]  # (1, C)
            given[members] = _draw(self.seed, "matrix label", members, chances)
        return _finish(labels, given)


@dataclass(frozen=True, kw_only=True)
class InstanceDependent:
    """Noise that depends on the inputs (Xia et al., NeurIPS 2020, Algorithm 2).

    Each example draws its own flip rate from N(rate, deviation²) truncated to [0, 1]. The other
    classes share that rate by the softmax of a random projection of its input; each class has its
    own projection. Near 0 and 1 the truncation moves the average: rate 0.05 with deviation 0.1
    gives 0.10. Rate 0 is no noise at all.

    Args:
        rate: Mean of the flip rates, from 0 to 1.
        seed: Of the draws.
        deviation: Standard deviation of the flip rates, from 0 to 1.

    >>> import torch
    >>> from nearsay.batch import Labels
    >>> labels = Labels(torch.tensor([0, 1, 1]), None, ("cat", "dog"))
    >>> InstanceDependent(rate=1.0, deviation=0.0)(labels, torch.zeros(3, 8)).given
    tensor([1, 0, 0])
    """

    rate: float
    seed: int = 0
    deviation: float = 0.1

    def __post_init__(self) -> None:
        _check_share(rate=self.rate, deviation=self.deviation)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """New given labels; `inputs` (N, ...) are images or features, and uint8 is scaled to [0,
        1].
        """
        num_inputs = 0 if inputs is None else len(inputs)
        num_labels = len(labels.given)
        check_that(num_inputs == num_labels, "inputs", f"{num_labels} rows", num_inputs)
        assert inputs is not None
        given, examples = _start(labels)
        for number, members in _by_class(given, examples):
            chances = self._chances(inputs, members, number, len(labels.classes))
            given[members] = _draw(self.seed, "instance label", members, chances)
        return _finish(labels, given)

    def _chances(self, inputs: Tensor, members: Tensor, number: int, num_classes: int) -> Tensor:
        """(n, C) the probabilities of the labels of `members` (n,), all of class `number`."""
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
        uniforms = rng.uniform(self.seed, "instance rate", 0, members).double() + _HALF_CELL
        # Uniform between the probabilities of 0 and 1, so the quantile is a rate in [0, 1].
        drawn = low + (high - low) * uniforms
        return torch.clamp(self.rate + self.deviation * torch.special.ndtri(drawn), 0, 1)


@dataclass(frozen=True, kw_only=True)
class OpenSet:
    """Exactly round(rate · n) labeled examples get an image from elsewhere: clean becomes −1.

    The given labels stay. Who loads the data also replaces the images, by `replacements`.

    Args:
        rate: Share of the labeled examples, from 0 to 1.
        seed: Of the draws.

    >>> import torch
    >>> from nearsay.batch import Labels
    >>> labels = Labels(torch.tensor([0, 1, 1, 0]), None, ("cat", "dog"))
    >>> (OpenSet(rate=0.5)(labels).clean == -1).sum()
    tensor(2)
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share(rate=self.rate)

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """The labels for the replaced images."""
        clean = (labels.given if labels.clean is None else labels.clean).clone()
        clean[self._chosen(labels).to(clean.device)] = -1
        return Labels(labels.given, clean, labels.classes)

    def replacements(self, labels: Labels, num_outside: int) -> tuple[Tensor, Tensor]:
        """Which examples are replaced, in rising order, and by which examples of the other source.

        The result is the same for the labels before and after noise. No example of the
        `num_outside` from the other source is used twice before all are used once.
        """
        check_whole("num_outside", num_outside, 1)
        chosen = self._chosen(labels)
        order = chosen.argsort()
        outside = rng.shuffle(self.seed, "open-set image", 0, torch.arange(num_outside))
        return chosen[order], outside[order % num_outside]

    def _chosen(self, labels: Labels) -> Tensor:
        # By the given labels alone, because this model itself changes the clean ones.
        labeled = (labels.given.cpu() >= 0).nonzero()[:, 0]
        return _choose(self.seed, "open-set choice", labeled, self.rate)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Recorded labels: of human annotators, an earlier run, label propagation.

    All given labels are replaced. The clean ones are the recorded ones, else those of the data set,
    else they remain unknown, because the replaced labels need not have been true.

    Args:
        given: (N,) whole numbers; −1 where unlabeled.
        clean: (N,) whole numbers, or None.

    Attributes:
        digest: SHA-256 of the labels; two records are equal if it is.

    >>> import torch
    >>> from nearsay.batch import Labels
    >>> labels = Labels(torch.tensor([0, 1]), None, ("cat", "dog"))
    >>> Recorded(given=torch.tensor([1, 1]))(labels).given
    tensor([1, 1])
    """

    given: Tensor = field(compare=False)
    clean: Tensor | None = field(default=None, compare=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        for name, labels in (("given", self.given), ("clean", self.clean)):
            if labels is not None:
                is_whole = not (labels.is_floating_point() or labels.is_complex())
                is_whole = is_whole and labels.dtype != torch.bool
                check_that(is_whole, name, "whole class numbers", labels.dtype)
                object.__setattr__(self, name, labels.to("cpu", torch.int64, copy=True))
        object.__setattr__(self, "digest", _digest(self.given, self.clean))

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """The recorded labels."""
        num = len(labels.given)
        check_that(len(self.given) == num, "given", f"{num} recorded labels", len(self.given))
        clean = labels.clean if self.clean is None else self.clean.to(labels.given.device)
        return Labels(self.given.to(labels.given.device), clean, labels.classes)


class MeasuredNoise(NamedTuple):
    """What noise did to labels, as counted and not as requested.

    Attributes:
        effective_rate: Share of the labels that are not the true class; None if that is unknown.
        num_open_set: Number of labeled examples with a true class outside the vocabulary.
        matrix: (C, C) int64 counts of the other labeled examples; rows are clean, columns given.
        fingerprint: SHA-256 of the labels and the class names.

    >>> import torch
    >>> clean = torch.tensor([0, 1, 0])
    >>> measure_noise(Labels(torch.tensor([0, 1, 1]), clean, ("cat", "dog"))).effective_rate
    0.3333333333333333
    """

    effective_rate: float | None
    num_open_set: int
    matrix: Tensor
    fingerprint: str


def measure_noise(labels: Labels) -> MeasuredNoise:
    """Count the wrong labels, as far as the clean ones are known.

    >>> import torch
    >>> labels = Labels(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), ("cat", "dog"))
    >>> measure_noise(labels).matrix
    tensor([[1, 1],
            [0, 1]])
    """
    given, num_classes = labels.given.cpu(), len(labels.classes)
    clean = torch.full_like(given, -1) if labels.clean is None else labels.clean.cpu()
    # Each cell of the matrix has one number, so that one count of numbers fills it.
    cells = (clean.long() * num_classes + given)[(given >= 0) & (clean >= 0)]
    matrix = torch.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)
    num_open_set = 0 if labels.clean is None else int(((given >= 0) & (clean < 0)).sum())
    num_known = len(cells) + num_open_set
    rate = (num_known - int(matrix.trace())) / num_known if num_known else None
    return MeasuredNoise(rate, num_open_set, matrix, fingerprint(labels))


def fingerprint(labels: Labels) -> str:
    """SHA-256 of given labels, clean labels and class names; the same on every machine.

    >>> import torch
    >>> fingerprint(Labels(torch.tensor([0, 1]), None, ("cat", "dog")))[:8]
    '898ebda6'
    """
    return _digest(labels.given, labels.clean, labels.classes)


def split_balanced(labels: Labels, held_out: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Examples to train on and examples to hold out, both in rising order.

    Every class, by the given labels, gives the same number, or one more. If that is more than half
    of the smallest class, classes give in proportion to their size, and each keeps at least one
    example. Unlabeled examples are never held out.

    Args:
        labels: Of all examples.
        held_out: How many examples to hold out.
        seed: Of the choice.

    >>> import torch
    >>> labels = Labels(torch.arange(10) % 2, None, ("cat", "dog"))
    >>> train, held = split_balanced(labels, 4, seed=0)
    >>> labels.given[held].bincount()
    tensor([2, 2])
    """
    given = labels.given.cpu()
    order = rng.shuffle(seed, "held-out choice", 0, torch.arange(len(given)))
    classes = [members for _, members in _by_class(given, order[given[order] >= 0])]
    sizes = [len(members) for members in classes]
    # Each class keeps one example.
    check_whole("held_out", held_out, 0, sum(sizes) - len(sizes))
    is_held = torch.zeros(len(given), dtype=torch.bool)
    for members, share in zip(classes, _shares(sizes, held_out), strict=True):
        is_held[members[:share]] = True
    return (~is_held).nonzero()[:, 0], is_held.nonzero()[:, 0]


def _shares(sizes: list[int], total: int) -> list[int]:
    """Whole numbers with the sum `total`, each below its size; equal if no class gives more than
    half.
    """
    weights = [1] * len(sizes)
    if any(2 * math.ceil(total / len(sizes)) > size for size in sizes):
        weights = sizes
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    # The rest of the division: one more for the class that is furthest behind.
    for _ in range(total - sum(shares)):
        places = [place for place, size in enumerate(sizes) if shares[place] < size - 1]
        shares[max(places, key=lambda place: total * weights[place] - whole * shares[place])] += 1
    return shares


def _start(labels: Labels) -> tuple[Tensor, Tensor]:
    """A copy of the given labels (N,), and the numbers of the examples that noise may change."""
    check_that(len(labels.classes) >= 2, "classes", "two or more for noise", labels.classes)
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
    """Exactly round(rate · n) of the n `examples`, in random order; a lower rate takes the first of
    them.
    """
    return examples[rng.shuffle(seed, purpose, 0, examples)[: round(rate * len(examples))]]


def _by_class(given: Tensor, examples: Tensor) -> list[tuple[int, Tensor]]:
    """Each class number of `examples`, and the examples of that class."""
    numbers = given[examples]
    return [(number, examples[numbers == number]) for number in torch.unique(numbers).tolist()]


def _map(labels: Labels, mapping: str | Pairs, rate: float, seed: int, *, in_place: bool) -> Labels:
    """Map a share of each class; in place, a class includes examples mapped to it before."""
    given, examples = _start(labels)
    current = given if in_place else given.clone()
    for source, target in sorted(_targets(mapping, labels.classes).items()):
        members = examples[current[examples] == source]
        # Each class has its own purpose. With one for all, in place, the examples that were just
        # mapped would be the first to be mapped again.
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
    numbers: dict[int | str, int] = {}
    for number, name in enumerate(classes):
        numbers[name] = numbers[number] = number
    targets: dict[int, int] = {}
    for pair in chain.from_iterable(pairwise(path) for path in paths.get(mapping, mapping)):
        for key in pair:
            hint = (
                f"The classes are {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}."
            )
            check_that(key in numbers, "mapping", "pairs of known classes", key, hint=hint)
        source, target = numbers[pair[0]], numbers[pair[1]]
        is_new = source != target and source not in targets
        check_that(is_new, "mapping", "a map of each class once, to another class", pair)
        targets[source] = target
    return targets


def _draw(seed: int, purpose: str, examples: Tensor, chances: Tensor) -> Tensor:
    """(n,) class numbers for `examples` (n,), drawn from `chances` (n, C) or (1, C)."""
    bounds = chances.cumsum(dim=1)
    # The last bound is 1, which no uniform reaches.
    bounds = (bounds / bounds[:, -1:]).expand(len(examples), -1).contiguous()
    uniforms = rng.uniform(seed, purpose, 0, examples)[:, None].double()
    return torch.searchsorted(bounds, uniforms, right=True)[:, 0]


def _project(inputs: Tensor, members: Tensor, seed: int, purpose: str, num_classes: int) -> Tensor:
    """(n, C) float64 products of the inputs of `members` (n,) with a matrix of standard normals."""
    rows = inputs.reshape(len(inputs), -1)  # (N, D)
    scores = torch.zeros(len(members), num_classes, dtype=torch.float64)
    for columns in torch.split(torch.arange(rows.shape[1]), _COLUMNS):
        uniforms = rng.uniform(seed, purpose, 0, columns, num_classes).double()
        normals = torch.special.ndtri(uniforms + _HALF_CELL)
        pieces = zip(torch.split(scores, _ROWS), torch.split(members, _ROWS), strict=True)
        for part, places in pieces:
            piece = rows[:, columns[0] : columns[-1] + 1][places.to(rows.device)].cpu()
            numbers = piece.double()
            if piece.dtype == torch.uint8:
                numbers /= 255
            part += numbers @ normals
    wrong = members[~scores.isfinite().all(dim=1)]
    if len(wrong):
        raise ValueError(f"inputs must be finite, got NaN or infinity in example {wrong[0]}.")
    return scores


def _digest(given: Tensor, clean: Tensor | None, classes: Sequence[str] = ()) -> str:
    """SHA-256 of a line of JSON with their number and classes, and of the labels as little-endian
    int64.
    """
    digest = hashlib.sha256(json.dumps([len(given), clean is not None, classes]).encode())
    for labels in (given,) if clean is None else (given, clean):
        digest.update(labels.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _check_share(**values: float) -> None:
    for name, value in values.items():
        check_number(name, value, 0, 1)
