"""What the recipes of CIFAR-10 and CIFAR-100 have in common: protocols, kinds of noise, the experiment."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nearsay.batch import Dataset, Noise
from nearsay.experiment import Experiment
from nearsay.losses import ELR, NCR
from nearsay.models import PreActResNet18, ResNet
from nearsay.noise import InstanceDependent, OpenSet, Symmetric
from nearsay.optim import SGD, Cosine, CosineRestarts, MultiStep, Schedule
from nearsay.recipes._paper import Neighbors, Start, length, neighbors
from nearsay.recipes.methods import Method, choose, warmup
from nearsay.transforms import Cutout, Flip, Mixup, Normalize, PadCrop, RandAugment

Protocol = Literal["short", "paper", "elr"]
Variant = Literal["paper", "released"]
ALPHAS: dict[Variant, float] = {
    "paper": 0.9,
    "released": 0.7,
}  # the released term is larger by T² = 4
RAMP = (
    40_000 / 352
)  # epochs: ELR+ counts 40 000 steps, and 352 are an epoch of 45 000 examples in batches of 128


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a protocol trains; all durations are those of a run of `epochs`."""

    epochs: float
    batch_size: int
    lr: float
    weight_decay: float
    schedule: Schedule
    depth: Literal[18, 34]  # of a ResNet alone; pairs are PreActResNet-18
    ramp: float = RAMP  # of the averaged weights of pairs, and on CIFAR-100 of the ELR term
    start: float = 0.0  # of NCR beside ELR
    held_out: float = 0.0
    padding: Literal["reflect", "zeros"] = "reflect"


# The paper's table of network hyper-parameters.
PAPER = Training(
    epochs=250, batch_size=256, lr=0.1, weight_decay=5e-4, schedule=Cosine(warmup=5.0), depth=18
)
SHORT = replace(PAPER, epochs=100, schedule=Cosine(warmup=1.0), ramp=RAMP * 100 / 250)
ELR_ALONE = replace(  # what all settings of the public ELR code have in common
    PAPER,
    epochs=150,
    batch_size=128,
    lr=0.02,
    weight_decay=1e-3,
    depth=34,
    held_out=5000,
    padding="zeros",
)
ELR_PAIR = replace(ELR_ALONE, epochs=200, weight_decay=5e-4)  # and of the public ELR+ code


def is_pair(method: Method) -> bool:
    """Whether two networks teach each other."""
    return method in ("elr+", "ncr+elr+")


def stretched(training: Training, epochs: float | None) -> Training:
    """The same training for another number of epochs, with all that happens on the way at the same share of it."""
    epochs = length(epochs, training.epochs)
    share = epochs / training.epochs
    schedule = training.schedule
    if isinstance(schedule, Cosine):
        schedule = replace(schedule, warmup=warmup(epochs, schedule.warmup))
    elif isinstance(schedule, MultiStep):
        schedule = replace(schedule, milestones=tuple(each * share for each in schedule.milestones))
    elif isinstance(schedule, CosineRestarts):
        schedule = replace(schedule, period=schedule.period * share)
    start = float(round(training.start * share))
    return replace(
        training, epochs=epochs, schedule=schedule, ramp=training.ramp * share, start=start
    )


def check_labels(kind: str, labels: Path | None, column: str | None) -> None:
    """Refuse human labels without their file, and their file without them."""
    if kind == "human" and labels is None:
        raise ValueError(
            "kind='human' needs labels=, the path of the CIFAR-N file, such as CIFAR-10_human.pt"
        )
    if kind != "human" and (labels is not None or column is not None):
        name, value = ("labels", str(labels)) if labels is not None else ("column", column)
        raise ValueError(f"{name}={value!r} is of use only with kind=human, not with kind={kind}")


def check_outside(kind: str, outside: Path | None, other: str) -> None:
    """Refuse open-set noise without the images that it takes, and those images without it."""
    if kind == "open-set" and outside is None:
        raise ValueError(
            f"kind='open-set' needs outside=, the folder of {other}, whose images it takes"
        )
    if kind != "open-set" and outside is not None:
        raise ValueError(
            f"outside={str(outside)!r} is of use only with kind=open-set, not with kind={kind}"
        )


def common_noise(rate: float, kind: str, seed: int) -> Noise | None:
    """The kinds of noise that need no names of classes; None for human labels and for a rate of 0."""
    if kind == "human" or not rate:
        return None
    if kind == "symmetric":
        return Symmetric(rate=rate, seed=seed)
    if kind == "symmetric-strict":
        return Symmetric(rate=rate, seed=seed, redraw=False)
    if kind == "instance":
        return InstanceDependent(rate=rate, seed=seed)
    if kind.startswith("open-set"):
        return OpenSet(rate=rate, seed=seed)
    raise ValueError(f"kind={kind!r} is no kind of noise of this recipe")


def make_ncrs(
    training: Training,
    *,
    alpha: float | None,
    k: Neighbors | None,
    start: Start | None,
    variant: Variant,
) -> tuple[NCR, NCR]:
    """NCR alone, as the paper's ablation finds best wherever there is noise; and beside ELR, as the paper prints."""
    alone = NCR(
        alpha=ALPHAS[variant] if alpha is None else alpha,
        k=neighbors(k, 10),
        start_epoch=0.0 if start is None else start,
        variant=variant,
    )
    return alone, replace(
        alone,
        alpha=0.1 if alpha is None else alpha,
        start_epoch=training.start if start is None else start,
    )


def make_experiment(
    data: Dataset,
    *,
    noise: Noise | None,
    outside: Dataset | None,
    colors: Normalize,
    method: Method,
    training: Training,
    ncrs: tuple[NCR, NCR],
    elr: ELR,
    held_out: float | None,
    labeled: float,
    noise_per_network: bool,
    seed: int,
) -> Experiment:
    """One network or two for small images, trained as the protocol says."""
    if noise_per_network and not is_pair(method):
        raise ValueError(
            f"noise_per_network=true is for two networks, and method={method!r} has one; take elr+ or ncr+elr+"
        )
    if noise_per_network and noise is None:
        raise ValueError(
            "noise_per_network=true needs noise that is made here, such as kind=symmetric noise=0.4"
        )
    ncr, beside_elr = ncrs
    choice = choose(method, ncr=ncr, beside_elr=beside_elr, elr=elr, mixup=Mixup(alpha=1.0))
    return Experiment(
        data=data,
        noise=noise,
        outside=outside,
        # Only labeled examples can be held out, so fewer labels give fewer of them.
        held_out=round(training.held_out * labeled) if held_out is None else held_out,
        labeled=labeled,
        backbone=PreActResNet18() if is_pair(method) else ResNet(depth=training.depth),
        **choice.fields(training.epochs),
        averaging_ramp=training.ramp if is_pair(method) else 0.0,
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
