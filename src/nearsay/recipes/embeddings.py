"""Features that another network made, such as CLIP's or a sentence encoder's, with labels of doubtful quality."""

from pathlib import Path

from nearsay.data import Embeddings
from nearsay.experiment import Experiment
from nearsay.losses import NCR
from nearsay.models import MLP
from nearsay.noise import Symmetric
from nearsay.optim import AdamW, Cosine
from nearsay.recipes.methods import FeatureMethod, choose, warmup


def recipe(
    path: Path,
    *,
    labels: Path | None = None,
    method: FeatureMethod = "ncr",
    hidden: tuple[int, ...] = (512,),
    epochs: float = 30,
    batch_size: int = 256,
    held_out: float = 0.1,
    seed: int = 0,
    noise: float = 0.0,
) -> Experiment:
    """A perceptron on given features, which are as good on the first day as on the last: NCR starts at once.

    Reproduces: nothing of the paper, which learns features and classifier together.

    Command: nearsay train embeddings path=features.npz

    Time: unmeasured. Accuracy: unmeasured.

    Args:
        path: an .npz or Parquet file with features and labels, or an .npy with features.
        labels: an .npy or a table with labels, where they are not beside the features.
        method: one of docs/methods.md; a wrong name lists them all.
        hidden: widths of the hidden layers, such as 512 or 512,128.
        epochs: how long to train.
        batch_size: examples of a step; neighbors are found among them.
        held_out: training examples kept for validation, a share or a number; 0 uses all.
        seed: of the held-out examples, the weights, the order and the noise.
        noise: share of the labels to make wrong on purpose, to see what a method does about it.
    """
    choice = choose(method, ncr=NCR())
    return Experiment(
        data=Embeddings(path=path, labels=labels),
        noise=Symmetric(rate=noise, seed=seed) if noise else None,
        held_out=held_out,
        backbone=MLP(hidden=hidden),
        **choice.fields(epochs),
        normalize=None,
        optimizer=AdamW(lr=1e-3),
        schedule=Cosine(warmup=warmup(epochs, 1.0)),
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )
