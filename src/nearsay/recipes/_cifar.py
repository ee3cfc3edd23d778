"""What the recipes of CIFAR-10 and CIFAR-100 have in common."""

from pathlib import Path
from typing import Literal

from nearsay.augment import Flip, Mixup, Normalize, PadCrop
from nearsay.core import Dataset, Noise
from nearsay.experiment import Experiment
from nearsay.models import ResNet
from nearsay.noise import InstanceDependent, Symmetric
from nearsay.objectives import ELR, NCR
from nearsay.optim import SGD, Cosine
from nearsay.recipes.methods import Method, choose, warmup

Variant = Literal["paper", "released"]
ALPHAS: dict[Variant, float] = {"paper": 0.9, "released": 0.7}  # the released term is larger by T² = 4


def check_labels(kind: str, labels: Path | None, column: str | None) -> None:
    """Refuse human labels without their file, and their file without them."""
    if kind == "human" and labels is None:
        raise ValueError("kind='human' needs labels=, the path of the CIFAR-N file, such as CIFAR-10_human.pt")
    if kind != "human" and (labels is not None or column is not None):
        name, value = ("labels", str(labels)) if labels is not None else ("column", column)
        raise ValueError(f"{name}={value!r} is of use only with kind=human, not with kind={kind}")


def common_noise(rate: float, kind: str, seed: int) -> Noise | None:
    """The kinds of noise that need no names of classes; None for human labels and for a rate of 0."""
    if kind == "symmetric":
        return Symmetric(rate=rate, seed=seed) if rate else None
    if kind == "symmetric-strict":
        return Symmetric(rate=rate, seed=seed, redraw=False) if rate else None
    if kind == "instance":
        return InstanceDependent(rate=rate, seed=seed) if rate else None
    return None


def make_ncr(alpha: float | None, k: int | None, variant: Variant) -> NCR:
    """The paper's ablation: alpha=0.9 and k=10 are best wherever there is noise, from the first epoch on."""
    return NCR(alpha=ALPHAS[variant] if alpha is None else alpha, k=10 if k is None else k, variant=variant)


def make_experiment(
    data: Dataset,
    *,
    noise: Noise | None,
    colors: Normalize,
    method: Method,
    ncr: NCR,
    beside_elr: NCR,
    elr: ELR,
    held_out: float,
    epochs: float,
    seed: int,
) -> Experiment:
    """ResNet-18 for small images, batches of 256, SGD from 0.1 down a cosine."""
    choice = choose(method, ncr=ncr, beside_elr=beside_elr, elr=elr, mixup=Mixup(alpha=1.0))
    return Experiment(
        data=data,
        noise=noise,
        held_out=held_out,
        backbone=ResNet(depth=18),
        objective=choice.objective,
        augment=choice.augment(PadCrop(padding=4), Flip()),
        normalize=colors,
        mixup=choice.mixup,
        optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=5e-4),
        schedule=Cosine(warmup=warmup(epochs, 1.0)),
        epochs=epochs,
        batch_size=256,
        seed=seed,
    )
