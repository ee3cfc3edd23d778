"""The recipes against the printed tables, copied here a second time; and what methods do."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nearsay.config import apply_overrides, call_recipe
from nearsay.data import Clothing1M, MiniImageNet, MiniWebVision, WebVision
from nearsay.experiment import Machine
from nearsay.losses import ELR, NCR, Bootstrap, CrossEntropy
from nearsay.models import CosineHead, PreActResNet18, ResNet
from nearsay.optim import SGD, Cosine, CosineRestarts, MultiStep
from nearsay.recipes import cifar10, cifar100, clothing1m, mini_imagenet, toy, webvision
from nearsay.training.loop import train
from nearsay.transforms import (
    IMAGENET_COLORS,
    PLUS_MINUS_ONE,
    Flip,
    Mixup,
    PadCrop,
    RandomResizedCrop,
)

PATH = Path("/data/mine")
CIFARS = {"cifar10": cifar10, "cifar100": cifar100}

# The paper's network hyper-parameters: batch, learning rate, epochs, weight decay, depth.
# Momentum is 0.9 and the warm-up 5 everywhere, the schedule a cosine.
NETWORKS = {
    "cifar10": (256, 0.1, 250, 5e-4, 18),
    "cifar100": (256, 0.1, 250, 5e-4, 18),
    "mini_imagenet": (128, 0.1, 130, 5e-4, 18),
    "webvision": (256, 0.1, 130, 1e-3, 50),
    "clothing1m": (128, 0.002, 80, 1e-3, 50),
}
PRINTED = {
    "cifar10": lambda **more: cifar10(PATH, protocol="paper", **more),
    "cifar100": lambda **more: cifar100(PATH, protocol="paper", **more),
    "mini_imagenet": lambda **more: mini_imagenet(PATH, **more),
    "webvision": lambda **more: webvision(PATH, **more),
    "clothing1m": lambda **more: clothing1m(PATH, **more),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_network_and_optimizer_are_as_printed(name):
    batch_size, lr, epochs, weight_decay, depth = NETWORKS[name]
    experiment = PRINTED[name]()
    assert (experiment.batch_size, experiment.epochs, experiment.networks) == (
        batch_size,
        epochs,
        1,
    )
    assert experiment.optimizer == SGD(
        lr=lr, momentum=0.9, nesterov=False, weight_decay=weight_decay
    )
    assert experiment.schedule == Cosine(warmup=5.0, final=0.0)
    assert (experiment.backbone.depth, experiment.backbone.small_images) == (
        depth,
        name.startswith("cifar"),
    )
    if not name.startswith("cifar"):
        assert experiment.augment.transforms == (RandomResizedCrop(size=224), Flip())
        assert (experiment.image_size, experiment.normalize) == (224, IMAGENET_COLORS)


@pytest.mark.parametrize("name", NETWORKS)
def test_another_length_moves_the_start_in_proportion_and_may_shorten_the_warm_up(name):
    printed, method = NETWORKS[name][2], "ncr+elr+" if name.startswith("cifar") else "ncr"

    def starts(**choices):
        return PRINTED[name](method=method, **choices).objective.start_epoch

    assert starts(epochs=printed / 2) == starts() / 2
    assert starts(epochs=printed * 3) == starts() * 3
    assert starts(epochs=printed * 1.01) == round(starts() * 1.01)
    assert (starts(start=7), starts(start="auto", epochs=3)) == (7, "auto")
    warmups = [PRINTED[name](epochs=epochs).schedule.warmup for epochs in (10, 50, 500)]
    assert warmups == [1.0, 5.0, 5.0]


# alpha, k and e, by noise rate: as printed, and as in the released code.
MINI_IMAGENET = {
    "paper": {0.0: (0.9, 50, 50), 0.2: (0.9, 10, 50), 0.4: (0.7, 5, 50), 0.8: (0.9, 100, 50)},
    "released": {0.0: (0.3, 10, 10), 0.2: (0.3, 10, 10), 0.4: (0.3, 100, 10), 0.8: (0.3, 5, 10)},
}


@pytest.mark.parametrize("hyper", MINI_IMAGENET)
@pytest.mark.parametrize("color", ["red", "blue"])
def test_mini_imagenet_has_a_column_of_the_table_for_each_noise_rate(hyper, color):
    for noise, (alpha, k, start) in MINI_IMAGENET[hyper].items():
        experiment = mini_imagenet(PATH, color=color, noise=noise, hyper=hyper, held_out_set=True)
        assert experiment.objective == NCR(
            alpha=alpha, k=k, temperature=2.0, start_epoch=start, variant=hyper
        )
        assert experiment.data == MiniImageNet(
            path=PATH, color=color, noise=noise, held_out_set=True
        )
        assert experiment.noise is None


def test_the_released_code_of_mini_imagenet_differs_in_network_crop_and_colors_too():
    paper, released = (mini_imagenet(PATH, hyper=hyper) for hyper in ("paper", "released"))
    assert paper.backbone == ResNet(depth=18, small_images=False)
    assert released.backbone == ResNet(
        depth=18, small_images=False, projection="all", zero_last_gamma=True, statistics="process"
    )
    assert released.augment.transforms == (RandomResizedCrop(size=224, area=(0.05, 1.0)), Flip())
    assert (paper.normalize, released.normalize) == (IMAGENET_COLORS, PLUS_MINUS_ONE)
    assert released.optimizer == SGD(lr=0.1, momentum=0.9, weight_decay=5e-4, decay_all=True)
    same = ("batch_size", "epochs", "optimizer", "schedule", "data", "mixup")
    assert all(getattr(paper, name) == getattr(released, name) for name in same)


@pytest.mark.parametrize("hyper", ["paper", "released"])
def test_the_baselines_of_mini_imagenet_have_the_weights_of_the_released_code(hyper):
    table = {
        "standard": (CrossEntropy(), None),
        "mixup": (CrossEntropy(), Mixup(alpha=0.5)),
        "bootstrap": (Bootstrap(alpha=0.5, kind="soft", stop_gradient=False), None),
        "label-smoothing+mixup": (CrossEntropy(smoothing=0.5), Mixup(alpha=0.5)),
    }
    for method, wanted in table.items():
        experiment = mini_imagenet(PATH, method=method, hyper=hyper)
        assert (experiment.objective, experiment.mixup) == wanted


def test_an_unpublished_noise_rate_is_refused_with_the_list_of_those_in_the_paper():
    with pytest.raises(ValueError, match=r"^noise.*0\.0, 0\.2, 0\.4, 0\.8"):
        mini_imagenet(PATH, noise=0.5)
    with pytest.raises(ValueError, match=r"^hyper.*paper, released"):
        mini_imagenet(PATH, hyper="mine")


def test_webvision_is_a_cosine_classifier_and_batches_as_large_as_there_are_classes():
    mini, full = webvision(PATH), webvision(PATH, subset="full")
    assert mini.objective == NCR(alpha=0.5, k=10, start_epoch=0.0)
    assert mini.backbone == ResNet(depth=50, small_images=False, head=CosineHead())
    assert (mini.data, full.data) == (MiniWebVision(path=PATH), WebVision(path=PATH))
    assert full == replace(mini, data=full.data, batch_size=1024)
    call = apply_overrides(
        call_recipe("webvision", ["path=/x", "subset=full"]), ["backbone.head.scale=9"]
    )
    assert call.experiment.backbone.head == CosineHead(scale=9.0)
    with pytest.raises(ValueError, match=r"^subset.*mini, full"):
        webvision(PATH, subset="tiny")


def test_clothing1m_fine_tunes_on_a_thousand_balanced_batches_an_epoch():
    experiment = clothing1m(PATH, weights=Path("/w.safetensors"), partial=True)
    assert experiment.objective == NCR(alpha=0.9, k=1, start_epoch=40.0)
    assert (experiment.batches_per_epoch, experiment.balanced) == (1000, True)
    assert experiment.backbone == ResNet(depth=50, small_images=False)
    assert experiment.init == "/w.safetensors"
    assert experiment.data == Clothing1M(path=PATH, partial=True)
    assert clothing1m(PATH).init is None


# CIFAR: the paper's numbers for NCR with ELR+, and the protocol of ELR.


@pytest.mark.parametrize(("name", "start"), [("cifar10", 50), ("cifar100", 200)])
def test_beside_elr_plus_ncr_is_as_the_paper_prints_on_two_networks(name, start):
    experiment = PRINTED[name](method="ncr+elr+")
    assert replace(experiment.objective, base=CrossEntropy()) == NCR(
        alpha=0.1, k=10, start_epoch=start
    )
    assert experiment.backbone == PreActResNet18()
    assert (experiment.networks, experiment.averaging, experiment.eval_weights) == (
        2,
        0.997,
        "networks",
    )
    assert experiment.averaging_ramp == pytest.approx(113.636, abs=1e-3)
    assert experiment.mixup == Mixup(alpha=1.0)
    assert (experiment.batch_size, experiment.epochs, experiment.optimizer.lr) == (256, 250, 0.1)
    assert PRINTED[name]().objective == NCR(alpha=0.9, k=10, start_epoch=0)


def test_the_short_protocol_shortens_what_happens_on_the_way():
    for name, start in (("cifar10", 20), ("cifar100", 80)):
        short = CIFARS[name](PATH, method="ncr+elr+")
        assert (short.epochs, short.schedule) == (100, Cosine(warmup=1.0))
        assert short.objective.start_epoch == start
        assert short.averaging_ramp == pytest.approx(45.4545, abs=1e-3)


# data set, method, kind -> epochs, schedule, weight decay, beta, lambda
ELR_TABLE = [
    ("cifar10", "elr", "symmetric", 150, CosineRestarts(period=10, minimum=0.05), 1e-3, 0.7, 3),
    ("cifar10", "elr", "asymmetric", 120, MultiStep(milestones=(40, 80), gamma=0.01), 1e-3, 0.9, 1),
    (
        "cifar100",
        "elr",
        "symmetric",
        150,
        MultiStep(milestones=(80, 120), gamma=0.01),
        1e-3,
        0.9,
        7,
    ),
    ("cifar10", "elr+", "symmetric", 200, MultiStep(milestones=(150,), gamma=0.1), 5e-4, 0.7, 3),
    ("cifar10", "elr+", "asymmetric", 200, MultiStep(milestones=(150,), gamma=0.1), 5e-4, 0.9, 1),
    ("cifar100", "elr+", "symmetric", 250, MultiStep(milestones=(200,), gamma=0.1), 5e-4, 0.9, 7),
]


@pytest.mark.parametrize(
    ("name", "method", "kind", "epochs", "schedule", "weight_decay", "beta", "weight"), ELR_TABLE
)
def test_the_protocol_of_elr_is_that_of_its_public_code(
    name, method, kind, epochs, schedule, weight_decay, beta, weight
):
    experiment = CIFARS[name](PATH, method=method, kind=kind, protocol="elr")
    is_pair = method == "elr+"
    assert (experiment.epochs, experiment.schedule) == (epochs, schedule)
    assert experiment.optimizer == SGD(lr=0.02, momentum=0.9, weight_decay=weight_decay)
    assert experiment.backbone == (PreActResNet18() if is_pair else ResNet(depth=34))
    assert (experiment.networks, experiment.averaging) == ((2, 0.997) if is_pair else (1, None))
    assert experiment.mixup == (Mixup(alpha=1.0) if is_pair else None)
    assert experiment.averaging_ramp == (40_000 / 352 if is_pair else 0)
    is_slow = is_pair and name == "cifar100"
    assert experiment.objective == ELR(
        beta=beta, weight=weight, ramp=40_000 / 352 if is_slow else 0.0, reweigh=is_slow
    )
    assert (experiment.batch_size, experiment.held_out, experiment.validation_labels) == (
        128,
        5000,
        "given",
    )
    assert experiment.augment.transforms == (PadCrop(padding=4, mode="zeros"), Flip())


def test_other_methods_of_one_network_are_trained_as_elr_is():
    elr = cifar10(PATH, method="elr", protocol="elr")
    assert cifar10(PATH, method="standard", protocol="elr") == replace(
        elr, objective=CrossEntropy()
    )
    beside = cifar10(PATH, method="ncr+elr", protocol="elr")
    assert beside == replace(
        elr, objective=NCR(alpha=0.1, k=10, start_epoch=30, base=elr.objective)
    )
    pair = cifar10(PATH, method="elr+", protocol="elr")
    beside = cifar10(PATH, method="ncr+elr+", protocol="elr")
    assert beside == replace(
        pair, objective=NCR(alpha=0.1, k=10, start_epoch=50, base=pair.objective)
    )


def test_an_explicit_length_scales_milestones_periods_and_ramps():
    def shorter(recipe, **choices):
        return recipe(PATH, protocol="elr", **choices)

    assert shorter(cifar10, method="elr", epochs=15).schedule == CosineRestarts(
        period=1.0, minimum=0.05
    )
    assert shorter(cifar10, method="elr", kind="asymmetric", epochs=60).schedule.milestones == (
        20.0,
        40.0,
    )
    pair = shorter(cifar100, method="ncr+elr+", epochs=50)
    assert pair.schedule.milestones == (40.0,)
    assert pair.objective.start_epoch == 40
    assert pair.averaging_ramp == pair.objective.base.ramp == pytest.approx(40_000 / 352 / 5)
    with pytest.raises(ValueError, match="epochs"):
        shorter(cifar10, epochs=-1)


def test_what_is_asked_for_goes_before_the_protocol():
    experiment = cifar10(
        PATH,
        method="ncr+elr+",
        protocol="elr",
        held_out=0,
        labeled=0.5,
        noise_per_network=True,
        alpha=0.3,
        k=4,
    )
    assert (experiment.held_out, experiment.labeled, experiment.noise_per_network) == (0, 0.5, True)
    assert (experiment.objective.alpha, experiment.objective.k) == (0.3, 4)
    for recipe in CIFARS.values():
        with pytest.raises(ValueError, match=r"^protocol.*short, paper, elr"):
            recipe(PATH, protocol="long")


# What the methods do.


def on_one_core(experiment, **changes):
    return replace(experiment, machine=Machine(device="cpu"), **changes)


def test_elr_plus_trains_two_networks_that_differ_and_comes_to_a_result(tmp_path):
    for method in ("elr+", "ncr+elr+"):
        experiment = on_one_core(toy(method=method, epochs=0.3), batch_size=128)
        result = train(experiment, tmp_path / method)
        weights = load_file(tmp_path / method / "model.safetensors")
        first, second = (
            {key[2:]: tensor for key, tensor in weights.items() if key.startswith(prefix)}
            for prefix in ("0.", "1.")
        )
        assert first.keys() == second.keys()
        assert len(first) + len(second) == len(weights)
        moving = [key for key in first if key.endswith("weight") and first[key].ndim > 1]
        assert moving
        assert not any(first[key].equal(second[key]) for key in moving)
        assert 0 < result["accuracy"]["test"]["final"] <= 1
        [entry] = [
            json.loads(line) for line in (tmp_path / method / "log.jsonl").read_text().splitlines()
        ]
        assert {"cross_entropy", "elr"} <= entry.keys()
        assert ("ncr" in entry) == method.startswith("ncr")
