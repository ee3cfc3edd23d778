"""Benchmarks with noise from the web: mini-ImageNet, WebVision and Clothing1M, as in the paper."""

from pathlib import Path
from typing import Literal, NamedTuple

from nearsay.batch import Dataset
from nearsay.data.clothing1m import Clothing1M
from nearsay.data.mini_imagenet import MiniImageNet
from nearsay.data.webvision import ImageNetValidation, MiniWebVision, WebVision
from nearsay.experiment import Experiment
from nearsay.losses.elr import ELR
from nearsay.losses.ncr import NCR
from nearsay.models.heads import CosineHead
from nearsay.models.resnet import ResNet
from nearsay.optim import SGD, Cosine
from nearsay.recipes.methods import (
    Method,
    Neighbors,
    OwnMethod,
    Start,
    WebMethod,
    check_of_use,
    choose,
    length,
    neighbors,
    pick,
    start_epoch,
    warmup,
)
from nearsay.transforms.color import IMAGENET_COLORS, PLUS_MINUS_ONE
from nearsay.transforms.geometry import Flip, RandomResizedCrop

Color = Literal["red", "blue"]
Hyper = Literal["paper", "released"]
Subset = Literal["mini", "full"]

_WEBVISION_BATCHES: dict[Subset, int] = {"mini": 256, "full": 1024}


class Row(NamedTuple):
    """The settings of NCR at one noise rate; `start` is the paper's e, of 130 epochs."""

    alpha: float
    k: int
    start: float


_MINI_IMAGENET: dict[Hyper, dict[float, Row]] = {
    "paper": {
        0.0: Row(0.9, 50, 50),
        0.2: Row(0.9, 10, 50),
        0.4: Row(0.7, 5, 50),
        0.8: Row(0.9, 100, 50),
    },
    "released": {
        0.0: Row(0.3, 10, 10),
        0.2: Row(0.3, 10, 10),
        0.4: Row(0.3, 100, 10),
        0.8: Row(0.3, 5, 10),
    },
}


def mini_imagenet(
    path: str | Path,
    *,
    color: Color = "red",
    noise: float = 0.2,
    method: Method | OwnMethod = "ncr",
    hyper: Hyper = "paper",
    held_out_set: bool = False,
    partial: bool = False,
    epochs: float | None = None,
    seed: int = 0,
    alpha: float | None = None,
    k: Neighbors | None = None,
    start: Start | None = None,
) -> Experiment:
    """Mini-ImageNet-Red and -Blue on one ResNet-18 at 224 pixels.

    Reproduces: all rows of the paper's table of baselines and oracle but the numbers that it takes
    from other works, for each color and noise rate. The paper made that table again with its
    released code, so hyper=released is nearest; hyper=paper is what it prints. They differ in
    alpha, k, the start, the loss, the network and the augmentation. The weights of label smoothing,
    bootstrapping and mixup are those of the released code in both. The paper has no ELR here; its
    settings are those of CIFAR-100, which has as many classes.

    Command: nearsay train mini_imagenet path=data color=red noise=0.2 method=ncr hyper=released

    Args:
        path: the folder with the images and the published lists in split or mini-imagenet/split.
        color: red is noise from the web, blue is labels that were changed by chance.
        noise: share of wrong labels in the published list: 0, 0.2, 0.4 or 0.8.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        hyper: the settings that the paper prints, or those of its released code.
        held_out_set: validate on the paper's held-out set, and leave it out of training.
        partial: train on the images that are there, because some of the web are gone.
        epochs: how long to train; none is 130. The start of NCR follows in proportion.
        seed: of the weights, the order and the augmentation.
        alpha: weight of the NCR term; none is that of the table for this noise.
        k: neighbors of NCR, or all of the batch; none is that of the table for this noise.
        start: epoch when NCR starts, or auto; none is that of the table.

    Example:
        >>> from nearsay import recipes
        >>> recipes.mini_imagenet("data", color="red", noise=0.4).objective.k
        5
    """
    check_of_use(method, alpha=alpha, k=k, start=start)
    row = pick("noise", noise, pick("hyper", hyper, _MINI_IMAGENET))
    num_epochs = length(epochs, 130)
    ncr = NCR(
        alpha=row.alpha if alpha is None else alpha,
        k=neighbors(k, row.k),
        start_epoch=start_epoch(start, row.start, num_epochs / 130),
        variant=hyper,
    )
    # The settings of ELR on CIFAR-100.
    choice = choose(method, ncr=ncr, elr=ELR(beta=0.9, weight=7.0))
    crop, network = RandomResizedCrop(size=224), ResNet(depth=18, small_images=False)
    colors = IMAGENET_COLORS
    if hyper == "released":
        # The released code crops harder, scales pixels to [-1, 1] and changes the network.
        colors = PLUS_MINUS_ONE
        crop = RandomResizedCrop(size=224, area=(0.05, 1.0))
        network = ResNet(
            depth=18,
            small_images=False,
            projection="all",
            zero_last_gamma=True,
            statistics="process",
        )
    return Experiment(
        data=MiniImageNet(
            path=path, noise=noise, color=color, held_out_set=held_out_set, partial=partial
        ),
        backbone=network,
        **choice.fields(num_epochs),
        augment=choice.augment(crop, Flip()),
        normalize=colors,
        image_size=224,
        optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=5e-4),
        schedule=Cosine(warmup=warmup(num_epochs, 5.0)),
        epochs=num_epochs,
        batch_size=128,
        seed=seed,
    )


def webvision(
    path: str | Path,
    *,
    subset: Subset = "mini",
    method: WebMethod | OwnMethod = "ncr",
    imagenet: str | Path | None = None,
    partial: bool = False,
    epochs: float | None = None,
    seed: int = 0,
    alpha: float | None = None,
    k: Neighbors | None = None,
    start: Start | None = None,
) -> Experiment:
    """WebVision, or its first 50 classes, on one ResNet-50 with a cosine classifier, 130 epochs.

    Reproduces: the rows Standard, Mixup, NCR, NCR+Mixup and NCR+Mixup+DA of the columns
    mini-WebVision and WebVision of the paper's table on realistic noise, and with
    --set batch_size= its table of batch sizes. The scale of the cosine classifier is not printed;
    it is the field backbone.head.scale.

    Command: nearsay train webvision path=data subset=mini method=ncr+mixup+da

    Args:
        path: the folder that contains info, google, flickr and val_images_256.
        subset: mini is 50 classes of Google's images in batches of 256; full is all, in 1024.
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        imagenet: the validation images of ILSVRC 2012, a second test set (second_test).
        partial: train on the images that are there, however many.
        epochs: how long to train; none is 130.
        seed: of the weights, the order and the augmentation.
        alpha: weight of the NCR term; none is 0.5.
        k: neighbors of NCR, or all of the batch; none is 10.
        start: epoch when NCR starts, or auto; none is 0.

    Example:
        >>> from nearsay import recipes
        >>> recipes.webvision("data", subset="full").batch_size
        1024
    """
    check_of_use(method, alpha=alpha, k=k, start=start)
    batch_size = pick("subset", subset, _WEBVISION_BATCHES)
    num_epochs = length(epochs, 130)
    ncr = NCR(
        alpha=0.5 if alpha is None else alpha,
        k=neighbors(k, 10),
        start_epoch=0.0 if start is None else start,
    )
    choice = choose(method, ncr=ncr)
    data: Dataset = WebVision(path=path, partial=partial)
    num_classes = 1000
    if subset == "mini":
        data, num_classes = MiniWebVision(path=path, partial=partial), 50
    # ImageNet has the same classes, so its validation images are a clean second test.
    second_test = None
    if imagenet is not None:
        second_test = ImageNetValidation(
            path=imagenet, synsets=path, num_classes=num_classes, partial=partial
        )
    return Experiment(
        data=data,
        second_test=second_test,
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


def clothing1m(
    path: str | Path,
    *,
    weights: str | Path | None = None,
    method: WebMethod | OwnMethod = "ncr",
    partial: bool = False,
    epochs: float | None = None,
    seed: int = 0,
    alpha: float | None = None,
    k: Neighbors | None = None,
    start: Start | None = None,
) -> Experiment:
    """Clothing1M on one ResNet-50 pretrained on ImageNet, 80 epochs of 1000 balanced batches.

    Reproduces: the rows Standard, Mixup, NCR, NCR+Mixup and NCR+Mixup+DA of the column Clothing1M
    of the paper's table on realistic noise, if weights are given. Without them the network starts
    from random weights, which the paper never does.

    Command: nearsay train clothing1m path=data weights=resnet50.safetensors method=ncr

    Args:
        path: the folder with the images and the lists, or with the lists in annotations.
        weights: a .safetensors file of a ResNet-50 pretrained on ImageNet (torchvision, timm).
        method: a name in docs/methods.md, or a loss of your own (FILE.py:NAME).
        partial: train on the images that are there, however many.
        epochs: how long to train, in units of 1000 batches; none is 80. The start of NCR follows.
        seed: of the classifier, the order and the augmentation.
        alpha: weight of the NCR term; none is 0.9.
        k: neighbors of NCR, or all of the batch; none is 1.
        start: epoch when NCR starts, or auto; none is 40.

    Example:
        >>> from nearsay import recipes
        >>> recipes.clothing1m("data", weights="resnet50.safetensors").batches_per_epoch
        1000
    """
    check_of_use(method, alpha=alpha, k=k, start=start)
    num_epochs = length(epochs, 80)
    ncr = NCR(
        alpha=0.9 if alpha is None else alpha,
        k=neighbors(k, 1),
        start_epoch=start_epoch(start, 40, num_epochs / 80),
    )
    choice = choose(method, ncr=ncr)
    return Experiment(
        data=Clothing1M(path=path, partial=partial),
        # The paper draws every class equally often, because the classes differ in size.
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
