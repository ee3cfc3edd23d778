"""CIFAR-10 and CIFAR-100 with label noise, by the settings of the paper, of ELR, or shortened."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nearsay.batch import Dataset, Noise
from nearsay.data.cifar import Cifar10, Cifar100
from nearsay.experiment import Experiment
from nearsay.losses.elr import ELR
from nearsay.losses.ncr import NCR
from nearsay.models.resnet import PreActResNet18, ResNet
from nearsay.noise import Asymmetric, AsymmetricInPlace, InstanceDependent, OpenSet, Symmetric
from nearsay.optim import SGD, Cosine, CosineRestarts, MultiStep, Schedule
from nearsay.recipes.methods import (
    Method,
    Neighbors,
    OwnMethod,
    Start,
    check_of_use,
    choose,
    is_pair,
    length,
    neighbors,
    pick,
    warmup,
)
from nearsay.transforms.color import CIFAR10_COLORS, CIFAR100_COLORS, Normalize
from nearsay.transforms.geometry import Cutout, Flip, PadCrop
from nearsay.transforms.mixup import Mixup
from nearsay.transforms.strong import RandAugment

Protocol = Literal["short", "paper", "elr"]
Variant = Literal["paper", "released"]
Kind10 = Literal[
    "symmetric",
    "symmetric-strict",
    "asymmetric",
    "asymmetric-in-place",
    "instance",
    "human",
    "open-set",
    "open-set-within",
]
Kind100 = Literal[
    "symmetric",
    "symmetric-strict",
    "asymmetric-next",
    "asymmetric-superclass",
    "instance",
    "human",
    "open-set",
]
Column = Literal["aggre", "worse", "random1", "random2", "random3"]

# Open-set noise within CIFAR-10: of two classes that asymmetric noise confuses, one is learned.
LEARNED = ("airplane", "automobile", "dog", "frog", "horse", "ship")
LEFT_OUT = ("bird", "truck", "cat", "deer")

# The term of the released code is larger by T² = 4, so its weight is smaller.
_ALPHAS: dict[Variant, float] = {"paper": 0.9, "released": 0.7}
# Epochs: ELR+ counts 40 000 steps, and an epoch has 352: 45 000 examples in batches of 128.
_RAMP = 40_000 / 352


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a protocol trains.

    Attributes:
        epochs: the length of a run; all other durations belong to a run of this length.
        batch_size: images of a step.
        lr: the learning rate.
        weight_decay: of the optimizer.
        schedule: how the learning rate changes.
        depth: of the ResNet, if there is one network; two networks are PreActResNet-18.
        ramp: epochs of the ramp of averaged weights, and of the ELR term on CIFAR-100.
        start: the epoch when NCR starts beside ELR.
        held_out: examples for validation.
        padding: how images are padded before they are cropped.
    """

    epochs: float
    batch_size: int
    lr: float
    weight_decay: float
    schedule: Schedule
    depth: Literal[18, 34]
    ramp: float = _RAMP
    start: float = 0.0
    held_out: float = 0.0
    padding: Literal["reflect", "zeros"] = "reflect"

    def stretched(self, epochs: float | None) -> "Training":
        """The same training for another number of epochs, with every duration in proportion."""
        epochs = length(epochs, self.epochs)
        share = epochs / self.epochs
        schedule = self.schedule
        if isinstance(schedule, Cosine):
            schedule = replace(schedule, warmup=warmup(epochs, schedule.warmup))
        elif isinstance(schedule, MultiStep):
            milestones = tuple(milestone * share for milestone in schedule.milestones)
            schedule = replace(schedule, milestones=milestones)
        elif isinstance(schedule, CosineRestarts):
            schedule = replace(schedule, period=schedule.period * share)
        start = float(round(self.start * share))
        return replace(self, epochs=epochs, schedule=schedule, ramp=self.ramp * share, start=start)


# The paper's table of network hyper-parameters.
_PAPER = Training(
    epochs=250, batch_size=256, lr=0.1, weight_decay=5e-4, schedule=Cosine(warmup=5.0), depth=18
)
_SHORT = replace(_PAPER, epochs=100, schedule=Cosine(warmup=1.0), ramp=_RAMP * 100 / 250)
# What all settings of the public ELR code have in common, and what those of ELR+ have.
_ELR_ALONE = replace(
    _PAPER,
    epochs=150,
    batch_size=128,
    lr=0.02,
    weight_decay=1e-3,
    depth=34,
    held_out=5000,
    padding="zeros",
)
_ELR_PAIR = replace(_ELR_ALONE, epochs=200, weight_decay=5e-4)

_ALONE10: dict[Protocol, Training] = {
    "short": replace(_SHORT, start=20),
    "paper": replace(_PAPER, start=50),
    "elr": replace(_ELR_ALONE, schedule=CosineRestarts(period=10, minimum=0.05), start=30),
}
_ASYMMETRIC10 = _ALONE10 | {
    "elr": replace(
        _ELR_ALONE, epochs=120, schedule=MultiStep(milestones=(40, 80), gamma=0.01), start=24
    )
}
_PAIR10 = _ALONE10 | {"elr": replace(_ELR_PAIR, schedule=MultiStep(milestones=(150,)), start=50)}
_ALONE100: dict[Protocol, Training] = {
    "short": replace(_SHORT, start=80),
    "paper": replace(_PAPER, start=200),
    "elr": replace(_ELR_ALONE, schedule=MultiStep(milestones=(80, 120), gamma=0.01), start=120),
}
_PAIR100 = _ALONE100 | {
    "elr": replace(_ELR_PAIR, epochs=250, schedule=MultiStep(milestones=(200,)), start=200)
}


def cifar10(
    path: str | Path,
    *,
    method: Method | OwnMethod = "ncr",
    noise: float = 0.4,
    kind: Kind10 = "symmetric",
    protocol: Protocol = "short",
    labels: str | Path | None = None,
    column: Column | None = None,
    outside: str | Path | None = None,
    labeled: float = 1.0,
    held_out: float | None = None,
    epochs: float | None = None,
    seed: int = 0,
    alpha: float | None = None,
    k: Neighbors | None = None,
    start: Start | None = None,
    variant: Variant = "paper",
    noise_per_network: bool = False,
) -> Experiment:
    """CIFAR-10 with label noise, on one ResNet, or on two that teach each other (elr+, ncr+elr+).

    Reproduces: with method=ncr, the setting of the paper's ablation on CIFAR-10 (its figure of
    alpha, k and e). With method=standard, elr+ or ncr+elr+ and protocol=paper or protocol=elr, the
    rows Standard, ELR+ and Ours+ of the CIFAR-10 half of the paper's table on synthetic noise. The
    paper says that it follows ELR, but prints other settings; both are here. Beside ELR, NCR is
    weak and late, as printed: alpha 0.1, from epoch 50 of 250. With kind=open-set-within, six
    classes are learned and tested, and images of the other four replace some of theirs.

    Command: nearsay train cifar10 path=data method=ncr+elr+ noise=0.4 protocol=elr

    Accuracy: docs/results.md.

    Args:
        path: the folder cifar-10-batches-py, or the folder that contains it.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        noise: share of the labels that is drawn anew; 0 changes none. Not used for human labels.
        kind: the noise; symmetric draws from all classes as ELR does, symmetric-strict from others.
        protocol: short (100 epochs), paper (250, as printed), or elr (as in its public code).
        labels: the file of CIFAR-10N (CIFAR-10_human.pt, or an .npz of it), for kind=human.
        column: the labels of CIFAR-10N, for kind=human: aggre, worse, random1, random2 or random3.
        outside: the folder of CIFAR-100, which replaces some images, for kind=open-set.
        labeled: share of the labels that is kept; the other examples become unlabeled.
        held_out: training examples for validation, a share or a number; none is a tenth for elr.
        epochs: how long to train; none is the protocol's length. Other durations follow.
        seed: of the weights, the order, the augmentation and the noise.
        alpha: weight of the NCR term; none is 0.9, or 0.7 for variant=released, or 0.1 beside ELR.
        k: neighbors of NCR, or all of the batch; none is 10.
        start: epoch when NCR starts, or auto; none is 0, or the protocol's beside ELR.
        variant: NCR as the paper prints it, or as its released code computes it.
        noise_per_network: give the second network other noise, as the public ELR+ does by mistake.

    Example:
        >>> from nearsay import recipes
        >>> recipes.cifar10("data", method="ncr", noise=0.4).epochs
        100
    """
    check_of_use(method, alpha=alpha, k=k, start=start, variant=_unless_default(variant))
    _check_kind(kind, labels=labels, column=column, outside=outside, other="CIFAR-100")
    if kind == "human" and column is None:
        raise ValueError("column must be given with kind=human. Try column=worse.")
    # ELR has other settings for asymmetric noise, and for two networks.
    is_asymmetric, is_within = kind.startswith("asymmetric"), kind == "open-set-within"
    table = _ALONE10
    if is_pair(method):
        table = _PAIR10
    elif is_asymmetric:
        table = _ASYMMETRIC10
    training = pick("protocol", protocol, table).stretched(epochs)
    others: Dataset | None = None if outside is None else Cifar100(path=outside)
    if is_within:
        others = Cifar10(path=path, classes=LEFT_OUT)
    return _make_experiment(
        Cifar10(path=path, labels=labels, column=column, classes=LEARNED if is_within else None),
        noise=_make_noise(noise, kind, seed),
        outside=others,
        colors=CIFAR10_COLORS,
        method=method,
        training=training,
        ncr=_make_ncr(alpha, k, start, variant),
        elr=ELR(beta=0.9, weight=1.0) if is_asymmetric else ELR(beta=0.7, weight=3.0),
        is_default=(alpha is None, start is None),
        held_out=held_out,
        labeled=labeled,
        noise_per_network=noise_per_network,
        seed=seed,
    )


def cifar100(
    path: str | Path,
    *,
    method: Method | OwnMethod = "ncr",
    noise: float = 0.4,
    kind: Kind100 = "symmetric",
    protocol: Protocol = "short",
    labels: str | Path | None = None,
    outside: str | Path | None = None,
    labeled: float = 1.0,
    held_out: float | None = None,
    epochs: float | None = None,
    seed: int = 0,
    alpha: float | None = None,
    k: Neighbors | None = None,
    start: Start | None = None,
    variant: Variant = "paper",
    noise_per_network: bool = False,
) -> Experiment:
    """CIFAR-100 with label noise, on one ResNet, or on two that teach each other (elr+, ncr+elr+).

    Reproduces: with method=standard, elr+ or ncr+elr+ and protocol=paper or protocol=elr, the rows
    Standard, ELR+ and Ours+ of the CIFAR-100 half of the paper's table on synthetic noise; its
    asymmetric noise is kind=asymmetric-next. The paper says that it follows ELR, but prints other
    settings; both are here. Beside ELR, NCR is weak and late, as printed: alpha 0.1, from epoch 200
    of 250. Two networks raise the weight of ELR slowly and multiply labels by its averages, as the
    public ELR+ does with 100 classes.

    Command: nearsay train cifar100 path=data method=ncr+elr+ noise=0.4 protocol=elr

    Args:
        path: the folder cifar-100-python, or the folder that contains it.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        noise: share of the labels that is drawn anew; 0 changes none. Not used for human labels.
        kind: the noise; asymmetric-next is by ELR's blocks of five, asymmetric-superclass is true.
        protocol: short (100 epochs), paper (250, as printed), or elr (as in its public code).
        labels: the file of CIFAR-100N (CIFAR-100_human.pt, or an .npz of it), for kind=human.
        outside: the folder of CIFAR-10, which replaces some images, for kind=open-set.
        labeled: share of the labels that is kept; the other examples become unlabeled.
        held_out: training examples for validation, a share or a number; none is a tenth for elr.
        epochs: how long to train; none is the protocol's length. Other durations follow.
        seed: of the weights, the order, the augmentation and the noise.
        alpha: weight of the NCR term; none is 0.9, or 0.7 for variant=released, or 0.1 beside ELR.
        k: neighbors of NCR, or all of the batch; none is 10.
        start: epoch when NCR starts, or auto; none is 0, or the protocol's beside ELR.
        variant: NCR as the paper prints it, or as its released code computes it.
        noise_per_network: give the second network other noise, as the public ELR+ does by mistake.

    Example:
        >>> from nearsay import recipes
        >>> recipes.cifar100("data", method="ncr+elr+", protocol="elr").networks
        2
    """
    check_of_use(method, alpha=alpha, k=k, start=start, variant=_unless_default(variant))
    _check_kind(kind, labels=labels, column=None, outside=outside, other="CIFAR-10")
    is_double = is_pair(method)
    table = _PAIR100 if is_double else _ALONE100
    training = pick("protocol", protocol, table).stretched(epochs)
    # With 100 classes the public ELR+ raises the weight of its term slowly.
    ramp = training.ramp if is_double else 0.0
    return _make_experiment(
        Cifar100(path=path, labels=labels),
        noise=_make_noise(noise, kind, seed),
        outside=None if outside is None else Cifar10(path=outside),
        colors=CIFAR100_COLORS,
        method=method,
        training=training,
        ncr=_make_ncr(alpha, k, start, variant),
        elr=ELR(beta=0.9, weight=7.0, ramp=ramp, reweigh=is_double),
        is_default=(alpha is None, start is None),
        held_out=held_out,
        labeled=labeled,
        noise_per_network=noise_per_network,
        seed=seed,
    )


def _unless_default(variant: Variant) -> Variant | None:
    return None if variant == "paper" else variant


def _check_kind(
    kind: str,
    *,
    labels: str | Path | None,
    column: str | None,
    outside: str | Path | None,
    other: str,
) -> None:
    """Refuse human labels or open-set noise without its files, and such files without it."""
    needs = {"labels": "human", "column": "human", "outside": "open-set"}
    for name, value in (("labels", labels), ("column", column), ("outside", outside)):
        if value is not None and kind != needs[name]:
            raise ValueError(
                f"{name} must be left out with kind={kind}, got {str(value)!r}. "
                f"Use kind={needs[name]}."
            )
    if kind == "human" and labels is None:
        raise ValueError("labels must be the CIFAR-N file, such as CIFAR-10_human.pt, got None.")
    if kind == "open-set" and outside is None:
        raise ValueError(f"outside must be the folder of {other}, got None.")


def _make_noise(rate: float, kind: str, seed: int) -> Noise | None:
    """The noise of that kind, None for human labels and for a rate of 0."""
    if kind == "human" or not rate:
        return None
    mappings = {
        "asymmetric": "cifar10",
        "asymmetric-next": "cifar100-next",
        "asymmetric-superclass": "cifar100-superclass",
    }
    if kind in mappings:
        return Asymmetric(rate=rate, seed=seed, mapping=mappings[kind])
    table: dict[str, Noise] = {
        "symmetric": Symmetric(rate=rate, seed=seed),
        "symmetric-strict": Symmetric(rate=rate, seed=seed, redraw=False),
        "asymmetric-in-place": AsymmetricInPlace(rate=rate, seed=seed),
        "instance": InstanceDependent(rate=rate, seed=seed),
        "open-set": OpenSet(rate=rate, seed=seed),
        "open-set-within": OpenSet(rate=rate, seed=seed),
    }
    return pick("kind", kind, table)


def _make_ncr(
    alpha: float | None, k: Neighbors | None, start: Start | None, variant: Variant
) -> NCR:
    """NCR alone, with the settings that the paper's ablation finds best for noisy labels."""
    return NCR(
        alpha=pick("variant", variant, _ALPHAS) if alpha is None else alpha,
        k=neighbors(k, 10),
        start_epoch=0.0 if start is None else start,
        variant=variant,
    )


def _make_experiment(
    data: Dataset,
    *,
    noise: Noise | None,
    outside: Dataset | None,
    colors: Normalize,
    method: Method | OwnMethod,
    training: Training,
    ncr: NCR,
    elr: ELR,
    is_default: tuple[bool, bool],
    held_out: float | None,
    labeled: float,
    noise_per_network: bool,
    seed: int,
) -> Experiment:
    """One network or two for small images; `is_default` says it of alpha and start."""
    is_double = is_pair(method)
    if noise_per_network and not is_double:
        raise ValueError(
            f"noise_per_network must be false with one network, got True with method={method}. "
            "Use method=elr+ or ncr+elr+."
        )
    if noise_per_network and noise is None:
        raise ValueError(
            "noise_per_network must be false without noise, got True. Try kind=symmetric noise=0.4."
        )
    # Beside ELR, NCR is weaker and starts later, as the paper prints.
    beside_elr = ncr
    if is_default[0]:
        beside_elr = replace(beside_elr, alpha=0.1)
    if is_default[1]:
        beside_elr = replace(beside_elr, start_epoch=training.start)
    choice = choose(method, ncr=ncr, beside_elr=beside_elr, elr=elr, mixup=Mixup(alpha=1.0))
    if held_out is None:
        # Only labeled examples can be held out, so fewer labels give fewer of them.
        held_out = round(training.held_out * labeled)
    return Experiment(
        data=data,
        noise=noise,
        outside=outside,
        held_out=held_out,
        labeled=labeled,
        backbone=PreActResNet18() if is_double else ResNet(depth=training.depth),
        **choice.fields(training.epochs),
        averaging_ramp=training.ramp if is_double else 0.0,
        noise_per_network=noise_per_network,
        augment=choice.augment(
            PadCrop(padding=4, mode=training.padding),
            Flip(),
            strongly=(RandAugment(), Cutout(size=16)),
        ),
        normalize=colors,
        optimizer=SGD(lr=training.lr, momentum=0.9, weight_decay=training.weight_decay),
        schedule=training.schedule,
        epochs=training.epochs,
        batch_size=training.batch_size,
        seed=seed,
    )
