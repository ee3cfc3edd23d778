"""CIFAR-100 with noise made here or by human annotators, by the paper's settings, by those of ELR, or in short."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from nearsay.batch import Noise
from nearsay.data import Cifar10, Cifar100
from nearsay.experiment import Experiment
from nearsay.losses import ELR
from nearsay.noise import Asymmetric
from nearsay.optim import MultiStep
from nearsay.recipes import _cifar
from nearsay.recipes._cifar import Protocol, Training, Variant
from nearsay.recipes._paper import Neighbors, Start, pick
from nearsay.recipes.methods import Method, check_of_use
from nearsay.transforms import CIFAR100_COLORS

Kind = Literal[
    "symmetric",
    "symmetric-strict",
    "asymmetric-next",
    "asymmetric-superclass",
    "instance",
    "human",
    "open-set",
]

ALONE: dict[Protocol, Training] = {
    "short": replace(_cifar.SHORT, start=80),
    "paper": replace(_cifar.PAPER, start=200),
    "elr": replace(
        _cifar.ELR_ALONE,
        epochs=150,
        schedule=MultiStep(milestones=(80, 120), gamma=0.01),
        start=120,
    ),
}
PAIR = ALONE | {
    "elr": replace(_cifar.ELR_PAIR, epochs=250, schedule=MultiStep(milestones=(200,)), start=200)
}


def recipe(
    path: Path,
    *,
    method: Method = "ncr",
    noise: float = 0.4,
    kind: Kind = "symmetric",
    protocol: Protocol = "short",
    labels: Path | None = None,
    outside: Path | None = None,
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
    """CIFAR-100 under label noise, on a ResNet or, for elr+ and ncr+elr+, on two that teach each other.

    Reproduces: with method=standard, elr+ or ncr+elr+ and protocol=paper or protocol=elr, the rows Standard, ELR+ and
    Ours+ of the CIFAR-100 half of the paper's table on synthetic noise; its asymmetric noise is kind=asymmetric-next.
    The paper says that it follows ELR, but prints other settings; both are here. Beside ELR, NCR is weak and late, as
    it prints: alpha 0.1, from epoch 200 of 250. Pairs raise the weight of ELR slowly and multiply labels by its
    averages, as the public ELR+ does with 100 classes.

    Command: nearsay train cifar100 path=data method=ncr+elr+ noise=0.4 protocol=elr

    Time: unmeasured. Accuracy: unmeasured.

    Args:
        path: the folder cifar-100-python, or the one that holds it.
        method: one of docs/methods.md; a wrong name lists them all.
        noise: share of the labels that is drawn anew; 0 leaves them as they are. Not used for human labels.
        kind: how labels turn wrong; asymmetric-next is ELR's blocks of five, asymmetric-superclass the true superclass.
        protocol: short (100 epochs), paper (250, as printed), or elr: network, schedule and split of the public code.
        labels: the file of CIFAR-100N, CIFAR-100_human.pt or an .npz with its arrays, for kind=human.
        outside: the folder of CIFAR-10, whose images replace some, for kind=open-set.
        labeled: share of the labels that is kept; the other examples become unlabeled.
        held_out: training examples for validation, a share or a number; none is a tenth of the labels for elr, else 0.
        epochs: how long to train; none is as long as the protocol, and milestones and starts follow in proportion.
        seed: of the weights, the order, the augmentation and the noise.
        alpha: weight of the NCR term; none is 0.9, for variant=released 0.7, and 0.1 beside ELR.
        k: neighbors of NCR, or all of the batch; none is 10.
        start: epoch from which NCR is used, or auto; none is 0, and beside ELR that of the protocol.
        variant: NCR as the paper prints it, or as its released code computes it.
        noise_per_network: give the second network other noise, as the public ELR+ does by mistake.
    """
    check_of_use(
        method, alpha=alpha, k=k, start=start, variant=None if variant == "paper" else variant
    )
    _cifar.check_labels(kind, labels, None)
    _cifar.check_outside(kind, outside, "CIFAR-10")
    is_pair = _cifar.is_pair(method)
    training = _cifar.stretched(pick("protocol", protocol, PAIR if is_pair else ALONE), epochs)
    return _cifar.make_experiment(
        Cifar100(path=path, labels=labels),
        noise=_noise(noise, kind, seed),
        outside=None if outside is None else Cifar10(path=outside),
        colors=CIFAR100_COLORS,
        method=method,
        training=training,
        ncrs=_cifar.make_ncrs(training, alpha=alpha, k=k, start=start, variant=variant),
        elr=ELR(beta=0.9, weight=7.0, ramp=training.ramp if is_pair else 0.0, reweigh=is_pair),
        held_out=held_out,
        labeled=labeled,
        noise_per_network=noise_per_network,
        seed=seed,
    )


def _noise(rate: float, kind: Kind, seed: int) -> Noise | None:
    if kind == "asymmetric-next" and rate:
        return Asymmetric(rate=rate, seed=seed, mapping="cifar100-next")
    if kind == "asymmetric-superclass" and rate:
        return Asymmetric(rate=rate, seed=seed, mapping="cifar100-superclass")
    return _cifar.common_noise(rate, kind, seed)
