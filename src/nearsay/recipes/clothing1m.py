"""Clothing1M: a pretrained network on a million images of clothes, with labels from the text around them."""

from pathlib import Path

from nearsay.data import Clothing1M
from nearsay.experiment import Experiment
from nearsay.losses import NCR
from nearsay.models import ResNet
from nearsay.optim import SGD, Cosine
from nearsay.recipes._paper import Neighbors, Start, length, neighbors, start_epoch
from nearsay.recipes.methods import WebMethod, check_of_use, choose, warmup
from nearsay.transforms import IMAGENET_COLORS, Flip, RandomResizedCrop

EPOCHS = 80


def recipe(
    path: Path,
    *,
    weights: Path | None = None,
    method: WebMethod = "ncr",
    partial: bool = False,
    epochs: float | None = None,
    seed: int = 0,
    alpha: float | None = None,
    k: Neighbors | None = None,
    start: Start | None = None,
) -> Experiment:
    """Clothing1M on one ResNet-50 that knows ImageNet, 80 epochs of 1000 batches with all classes alike.

    Reproduces: the rows Standard, Mixup, NCR, NCR+Mixup and NCR+Mixup+DA of the column Clothing1M of the paper's table
    on realistic noise, if weights are given: without them the network starts from nothing, which the paper never does.

    Command: nearsay train clothing1m path=data weights=resnet50.safetensors method=ncr

    Time: unmeasured. Accuracy: unmeasured.

    Args:
        path: the folder that holds the lists, or holds them in annotations, and the images.
        weights: a .safetensors file of a ResNet-50 pretrained on ImageNet, with the names of torchvision and timm.
        method: one of docs/methods.md; a wrong name lists them all.
        partial: train on the images that are there, however many.
        epochs: how long to train, in units of 1000 batches; none is 80, and the start of NCR follows in proportion.
        seed: of the classifier, the order and the augmentation.
        alpha: weight of the NCR term; none is 0.9.
        k: neighbors of NCR, or all of the batch; none is 1.
        start: epoch from which NCR is used, or auto; none is 40.
    """
    check_of_use(method, alpha=alpha, k=k, start=start)
    num_epochs = length(epochs, EPOCHS)
    ncr = NCR(
        alpha=0.9 if alpha is None else alpha,
        k=neighbors(k, 1),
        start_epoch=start_epoch(start, 40, num_epochs / EPOCHS),
    )
    choice = choose(method, ncr=ncr)
    return Experiment(
        data=Clothing1M(path=path, partial=partial),
        balanced=True,
        backbone=ResNet(depth=50, small_images=False),
        init=None if weights is None else str(weights),
        **choice.fields(num_epochs),
        augment=choice.augment(RandomResizedCrop(size=224), Flip()),
        normalize=IMAGENET_COLORS,
        image_size=224,
        optimizer=SGD(lr=0.002, momentum=0.9, weight_decay=1e-3),
        schedule=Cosine(warmup=warmup(num_epochs, 5.0)),
        epochs=num_epochs,
        batches_per_epoch=1000,
        batch_size=128,
        seed=seed,
    )
