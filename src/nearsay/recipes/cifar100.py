"""CIFAR-100 with noise made here or by human annotators, one ResNet-18."""

from pathlib import Path
from typing import Literal

from nearsay.augment import CIFAR100_COLORS
from nearsay.core import Noise
from nearsay.datasets import Cifar100
from nearsay.experiment import Experiment
from nearsay.noise import Asymmetric
from nearsay.objectives import ELR, NCR
from nearsay.recipes._cifar import Variant, check_labels, common_noise, make_experiment, make_ncr
from nearsay.recipes.methods import Method

Kind = Literal["symmetric", "symmetric-strict", "asymmetric-next", "asymmetric-superclass", "instance", "human"]


def recipe(
    path: Path,
    *,
    method: Method = "ncr",
    noise: float = 0.4,
    kind: Kind = "symmetric",
    labels: Path | None = None,
    held_out: float = 0,
    epochs: float = 100,
    seed: int = 0,
    alpha: float | None = None,
    k: int | None = None,
    variant: Variant = "paper",
) -> Experiment:
    """CIFAR-100 under label noise, on one ResNet-18 at the paper's batch size, learning rate and weight decay.

    Reproduces: no row of the paper, whose CIFAR-100 numbers are of NCR with ELR+ on two networks for 250 epochs. For
    ncr+elr, alpha and the start are those that the paper prints for CIFAR-100: 0.1, after four fifths of the epochs.

    Command: nearsay train cifar100 path=data method=ncr noise=0.4

    Time: unmeasured. Accuracy: unmeasured.

    Args:
        path: the folder cifar-100-python, or the one that holds it.
        method: what to train with.
        noise: share of the labels that is drawn anew; 0 leaves them as they are. Not used for human labels.
        kind: how labels turn wrong; asymmetric-next is ELR's blocks of five, asymmetric-superclass the true superclass.
        labels: the file of CIFAR-100N, CIFAR-100_human.pt or an .npz with its arrays, for kind=human.
        held_out: training examples kept for validation, a share or a number; 5000 is ELR's split, 0 uses all.
        epochs: how long to train.
        seed: of the weights, the order, the augmentation and the noise.
        alpha: weight of the NCR term; none is 0.9, for variant=released 0.7, and 0.1 for ncr+elr.
        k: neighbors of NCR; none is 10.
        variant: NCR as the paper prints it, or as its released code computes it.
    """
    check_labels(kind, labels, None)
    return make_experiment(
        Cifar100(path=path, labels=labels),
        noise=_noise(noise, kind, seed),
        colors=CIFAR100_COLORS,
        method=method,
        ncr=make_ncr(alpha, k, variant),
        beside_elr=NCR(
            alpha=0.1 if alpha is None else alpha,
            k=10 if k is None else k,
            variant=variant,
            start_epoch=max(0, round(epochs * 4 / 5)),  # the paper's 200 of 250
        ),
        elr=ELR(beta=0.9, weight=7.0),
        held_out=held_out,
        epochs=epochs,
        seed=seed,
    )


def _noise(rate: float, kind: Kind, seed: int) -> Noise | None:
    if kind == "asymmetric-next" and rate:
        return Asymmetric(rate=rate, seed=seed, mapping="cifar100-next")
    if kind == "asymmetric-superclass" and rate:
        return Asymmetric(rate=rate, seed=seed, mapping="cifar100-superclass")
    return common_noise(rate, kind, seed)
