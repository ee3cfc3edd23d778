"""Runs of seconds that need no file: handwritten digits, and Gaussian classes."""

from dataclasses import replace
from typing import Literal

from nearsay.batch import Noise
from nearsay.data.digits import Digits
from nearsay.data.toy import Toy
from nearsay.experiment import Experiment
from nearsay.losses.ncr import NCR
from nearsay.losses.neighbor_vote import NeighborVote
from nearsay.models.mlp import MLP
from nearsay.models.resnet import ResNet
from nearsay.noise import InstanceDependent, PairFlip, Symmetric
from nearsay.optim import SGD, AdamW, Constant, Cosine
from nearsay.recipes.methods import FeatureMethod, Method, OwnMethod, choose, pick, warmup
from nearsay.transforms.geometry import PadCrop
from nearsay.transforms.views import Augment, Views

Kind = Literal["symmetric", "symmetric-strict", "pair-flip", "instance"]


def digits(
    *,
    method: Method | OwnMethod = "ncr",
    noise: float = 0.4,
    kind: Kind = "symmetric",
    epochs: float = 20,
    seed: int = 0,
) -> Experiment:
    """The 1 797 digits of scikit-learn with label noise, on a ResNet-18 of a quarter of its width.

    It shows in seconds what the methods do; the paper has no such experiment.

    Command: nearsay train digits method=ncr noise=0.4

    Time: 13 seconds on one CPU thread. Accuracy: 90.3 ± 0.9 % (n = 3).

    Args:
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        noise: share of the labels that is drawn anew; 0 changes none.
        kind: the noise; symmetric draws from all classes, symmetric-strict from the others only.
        epochs: how long to train.
        seed: of the split, the weights, the order, the augmentation and the noise.

    Example:
        >>> from nearsay import recipes
        >>> recipes.digits(method="ncr", noise=0.4).objective.k
        10
    """
    choice = choose(method, ncr=NCR(), vote=NeighborVote(k=30))
    fields = choice.fields(epochs)
    if choice.is_strong:
        # An epoch has only ten steps: features need more epochs, and averages must be short.
        objective = replace(fields["objective"], start_epoch=epochs / 3)
        fields |= {"averaging": 0.95, "objective": objective}
    augment: Augment | Views | None = None
    if choice.num_views == 2:
        # Shifts alone keep cross-entropy from memorizing labels, so one view has none.
        augment = choice.augment(PadCrop(padding=1, mode="zeros"))
    return Experiment(
        data=Digits(seed=seed),
        noise=_make_noise(noise, kind, seed) if noise else None,
        backbone=ResNet(depth=18, width=16),
        **fields,
        augment=augment,
        optimizer=SGD(lr=0.1),
        schedule=Cosine(warmup=warmup(epochs, 1.0)),
        epochs=epochs,
        batch_size=128,
        seed=seed,
    )


def toy(
    *,
    method: FeatureMethod | OwnMethod = "ncr",
    noise: float = 0.4,
    epochs: float = 50,
    seed: int = 0,
) -> Experiment:
    """Eight Gaussian classes in 32 dimensions, 2 000 examples, on a small perceptron.

    Data, network and settings are those of examples/toy.py; the paper has no such experiment.

    Command: nearsay train toy method=ncr noise=0.4

    Time: 6 seconds on one CPU thread. Accuracy: 94.1 ± 0.8 % (n = 3).

    Args:
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        noise: share of the labels that is drawn from the other classes; 0 changes none.
        epochs: how long to train.
        seed: of the data, the weights, the order and the noise.

    Example:
        >>> from nearsay import recipes
        >>> recipes.toy(epochs=5).data.num_classes
        8
    """
    choice = choose(method, ncr=NCR())
    return Experiment(
        data=Toy(seed=seed),
        noise=Symmetric(rate=noise, seed=seed, redraw=False) if noise else None,
        backbone=MLP(hidden=(256, 64), batch_norm=False),
        **choice.fields(epochs),
        normalize=None,
        optimizer=AdamW(lr=2e-3, weight_decay=0.0),
        schedule=Constant(),
        epochs=epochs,
        batch_size=256,
        seed=seed,
    )


def _make_noise(rate: float, kind: Kind, seed: int) -> Noise:
    table: dict[Kind, Noise] = {
        "symmetric": Symmetric(rate=rate, seed=seed),
        "symmetric-strict": Symmetric(rate=rate, seed=seed, redraw=False),
        "pair-flip": PairFlip(rate=rate, seed=seed),
        "instance": InstanceDependent(rate=rate, seed=seed),
    }
    return pick("kind", kind, table)
