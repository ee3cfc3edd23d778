"""WebVision and its first fifty classes: images that two search engines found for the names of ImageNet classes."""

from pathlib import Path
from typing import Literal

from nearsay.data import ImageNetValidation, MiniWebVision, WebVision
from nearsay.experiment import Experiment
from nearsay.losses import NCR
from nearsay.models import CosineHead, ResNet
from nearsay.optim import SGD, Cosine
from nearsay.recipes._paper import Neighbors, Start, length, neighbors, pick
from nearsay.recipes.methods import WebMethod, check_of_use, choose, warmup
from nearsay.transforms import IMAGENET_COLORS, Flip, RandomResizedCrop

Subset = Literal["mini", "full"]
BATCH_SIZES: dict[Subset, int] = {"mini": 256, "full": 1024}


def recipe(
    path: Path,
    *,
    subset: Subset = "mini",
    method: WebMethod = "ncr",
    imagenet: Path | None = None,
    partial: bool = False,
    epochs: float | None = None,
    seed: int = 0,
    alpha: float | None = None,
    k: Neighbors | None = None,
    start: Start | None = None,
) -> Experiment:
    """WebVision on one ResNet-50 with a cosine classifier, 130 epochs.

    Reproduces: the rows Standard, Mixup, NCR, NCR+Mixup and NCR+Mixup+DA of the columns mini-WebVision and WebVision of
    the paper's table on realistic noise, and with --set batch_size= its table of batch sizes. The scale of the cosine
    classifier is not printed; it is the field backbone.head.scale.

    Command: nearsay train webvision path=data subset=mini method=ncr+mixup+da

    Time: unmeasured. Accuracy: unmeasured.

    Args:
        path: the folder that holds info, google, flickr and val_images_256.
        subset: mini is the first 50 classes of Google's images in batches of 256, full is all in batches of 1024.
        method: one of docs/methods.md; a wrong name lists them all.
        imagenet: the validation images of ILSVRC 2012, to be judged on as well; their result is second_test.
        partial: train on the images that are there, however many.
        epochs: how long to train; none is 130.
        seed: of the weights, the order and the augmentation.
        alpha: weight of the NCR term; none is 0.5.
        k: neighbors of NCR, or all of the batch; none is 10.
        start: epoch from which NCR is used, or auto; none is 0.
    """
    check_of_use(method, alpha=alpha, k=k, start=start)
    num_epochs = length(epochs, 130)
    ncr = NCR(
        alpha=0.5 if alpha is None else alpha,
        k=neighbors(k, 10),
        start_epoch=0.0 if start is None else start,
    )
    choice = choose(method, ncr=ncr)
    batch_size = pick("subset", subset, BATCH_SIZES)
    num_classes = 50 if subset == "mini" else 1000
    return Experiment(
        data=(MiniWebVision if subset == "mini" else WebVision)(path=path, partial=partial),
        second_test=None
        if imagenet is None
        else ImageNetValidation(
            path=imagenet, synsets=path, num_classes=num_classes, partial=partial
        ),
        backbone=ResNet(depth=50, small_images=False, head=CosineHead()),
        **choice.fields(num_epochs),
        augment=choice.augment(RandomResizedCrop(size=224), Flip()),
        normalize=IMAGENET_COLORS,
        image_size=224,
        optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=1e-3),
        schedule=Cosine(warmup=warmup(num_epochs, 5.0)),
        epochs=num_epochs,
        batch_size=batch_size,
        seed=seed,
    )
