import inspect
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from nearsay import recipes
from nearsay.batch import Batch, one_hot
from nearsay.data import Cifar10, Cifar100, Folder, Toy
from nearsay.experiment import Experiment
from nearsay.losses import ELR, GJS, NCR, Bootstrap, CrossEntropy
from nearsay.losses.base import as_objective
from nearsay.models import ResNet, Timm
from nearsay.noise import (
    Asymmetric,
    AsymmetricInPlace,
    InstanceDependent,
    OpenSet,
    PairFlip,
    Symmetric,
)
from nearsay.optim import SGD, Cosine
from nearsay.recipes import own_data
from nearsay.recipes.methods import FeatureMethod, Method, WebMethod, choose
from nearsay.transforms import (
    CIFAR10_COLORS,
    CIFAR100_COLORS,
    IMAGENET_COLORS,
    Augment,
    ColorJitter,
    Cutout,
    Mixup,
    PadCrop,
    RandAugment,
    RandomResizedCrop,
    Views,
)

PATH = Path("/data/mine")
RECIPES = [name for name in recipes.__all__ if name != "dataset"]
ON_FEATURES = ("embeddings", "toy")
FROM_THE_WEB = ("clothing1m", "webvision")
WITHOUT_PATH = ("digits", "toy")
MAKING_NOISE = [name for name in RECIPES if name not in (*FROM_THE_WEB, "mini_imagenet")]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache of Hugging Face, whatever this machine has."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def made(name, **choices) -> Experiment:
    if name not in WITHOUT_PATH:
        choices = {"path": PATH, **choices}
    return getattr(recipes, name)(**choices)


def methods_of(name):
    return get_args(
        FeatureMethod if name in ON_FEATURES else WebMethod if name in FROM_THE_WEB else Method
    )


def put_weights(cache, name):
    file = cache / f"models--timm--{name}" / "snapshots" / "0123" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    return file


def test_every_recipe_has_a_home_and_no_module_hides_one():
    assert set(recipes.HOMES) == set(recipes.__all__)
    assert not set(recipes.HOMES) & set(recipes.HOMES.values())
    with pytest.raises(AttributeError, match="quagga"):
        recipes.quagga  # noqa: B018


@pytest.mark.parametrize(
    ("method", "objective", "is_mixed"),
    [
        ("standard", CrossEntropy(), False),
        ("mixup", CrossEntropy(), True),
        ("label-smoothing", CrossEntropy(smoothing=0.5), False),
        ("label-smoothing+mixup", CrossEntropy(smoothing=0.5), True),
        ("bootstrap", Bootstrap(alpha=0.5), False),
        ("bootstrap+mixup", Bootstrap(alpha=0.5), True),
        ("ncr", NCR(k=7), False),
        ("ncr+mixup", NCR(k=7), True),
        ("ncr+mixup+da", NCR(k=7), True),
        ("oracle", CrossEntropy(), False),
        ("oracle+mixup", CrossEntropy(), True),
        ("elr", ELR(beta=0.5), False),
        ("ncr+elr", NCR(k=7, base=ELR(beta=0.5)), False),
        ("elr+", ELR(beta=0.5), True),
        ("ncr+elr+", NCR(k=7, base=ELR(beta=0.5)), True),
        ("label-propagation", CrossEntropy(), False),
        ("gjs", GJS(), False),
    ],
)
def test_a_method_is_its_objective_and_its_mixup(method, objective, is_mixed):
    choice = choose(method, ncr=NCR(k=7), elr=ELR(beta=0.5))
    assert choice.objective == objective
    assert choice.mixup == (Mixup(alpha=0.5) if is_mixed else None)
    assert choice.num_views == (2 if method in ("gjs", "ncr+mixup+da") else 1)
    fields = choice.fields(10)
    assert fields.get("propagate_at") == (5 if method == "label-propagation" else None)
    assert fields["only_clean"] == method.startswith("oracle")
    assert (fields.get("networks", 1), fields.get("averaging")) == (
        (2, 0.997) if "elr+" in method else (1, None)
    )
    # Only ELR+ has averages, and judges the networks themselves.
    assert fields.get("eval_weights", "auto") == ("networks" if "elr+" in method else "auto")


def test_every_method_has_a_name_and_those_of_features_need_no_second_view():
    assert [name for name in get_args(Method) if choose(name, ncr=NCR()).num_views == 1] == list(
        get_args(FeatureMethod)
    )
    assert [name for name in get_args(Method) if not choose(name, ncr=NCR()).only_clean] == list(
        get_args(WebMethod)
    )
    with pytest.raises(ValueError, match=r"method.*nrc"):
        choose("nrc", ncr=NCR())


def test_beside_elr_a_recipe_may_have_another_ncr():
    choice = choose("ncr+elr", ncr=NCR(), beside_elr=NCR(alpha=0.1))
    assert choice.objective == NCR(alpha=0.1, base=ELR())
    assert choose("ncr", ncr=NCR(), beside_elr=NCR(alpha=0.1)).objective == NCR()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_every_method(name):
    for method in methods_of(name):
        experiment = made(name, method=method)
        is_mixed = "mixup" in method or "elr+" in method
        wanted = Mixup(alpha=1.0, views="first") if method == "neighbor-vote" else None
        assert experiment.mixup == (
            Mixup(alpha=1.0 if "cifar" in name else 0.5) if is_mixed else wanted
        )
        assert experiment.networks == (2 if "elr+" in method else 1)
        assert experiment.only_clean == method.startswith("oracle")
        if name in ON_FEATURES:
            assert (experiment.augment, experiment.normalize) == (None, None)
        elif method == "gjs":
            assert isinstance(experiment.augment, Views)
            assert experiment.augment.first == experiment.augment.second
        elif method == "ncr+mixup+da":
            assert experiment.augment.second == (*experiment.augment.first, ColorJitter())
        elif method == "neighbor-vote":
            covering = (Cutout(size=16),) if name in ("cifar10", "cifar100") else ()
            assert experiment.augment.second == (
                *experiment.augment.first,
                RandAugment(),
                *covering,
            )
            assert experiment.self_taught
        elif experiment.augment is not None:
            assert isinstance(experiment.augment, Augment)


@pytest.mark.parametrize("name", MAKING_NOISE)
def test_a_seed_reaches_the_run_and_its_noise(name):
    experiment = made(name, seed=5, noise=0.3)
    assert experiment.seed == 5
    assert (experiment.noise.seed, experiment.noise.rate) == (5, 0.3)
    if name in WITHOUT_PATH:
        assert experiment.data.seed == 5


def test_cifar10_is_the_paper_but_for_its_length():
    experiment = made("cifar10")
    assert experiment.objective == NCR(
        alpha=0.9, k=10, temperature=2.0, start_epoch=0, variant="paper"
    )
    assert experiment.noise == Symmetric(rate=0.4, redraw=True)
    assert experiment.backbone == ResNet(depth=18, small_images=True, width=64)
    assert experiment.optimizer == SGD(lr=0.1, momentum=0.9, nesterov=False, weight_decay=5e-4)
    assert experiment.schedule == Cosine(warmup=1.0, final=0.0)
    assert (experiment.batch_size, experiment.epochs, experiment.held_out) == (256, 100, 0)
    assert experiment.normalize == CIFAR10_COLORS
    assert [type(each).__name__ for each in experiment.augment.transforms] == ["PadCrop", "Flip"]
    assert experiment.augment.transforms[0].padding == 4
    assert replace(made("cifar100"), data=experiment.data, normalize=CIFAR10_COLORS) == experiment
    assert made("cifar100").normalize == CIFAR100_COLORS


@pytest.mark.parametrize(
    ("name", "kind", "noise"),
    [
        ("cifar10", "symmetric", Symmetric(rate=0.2, redraw=True)),
        ("cifar10", "symmetric-strict", Symmetric(rate=0.2, redraw=False)),
        ("cifar10", "asymmetric", Asymmetric(rate=0.2, mapping="cifar10")),
        ("cifar10", "asymmetric-in-place", AsymmetricInPlace(rate=0.2)),
        ("cifar10", "instance", InstanceDependent(rate=0.2)),
        ("cifar10", "open-set", OpenSet(rate=0.2)),
        ("cifar100", "asymmetric-next", Asymmetric(rate=0.2, mapping="cifar100-next")),
        ("cifar100", "asymmetric-superclass", Asymmetric(rate=0.2, mapping="cifar100-superclass")),
        ("digits", "symmetric-strict", Symmetric(rate=0.2, redraw=False)),
        ("digits", "pair-flip", PairFlip(rate=0.2)),
        ("digits", "instance", InstanceDependent(rate=0.2)),
    ],
)
def test_a_kind_of_noise_is_a_noise_model(name, kind, noise):
    more = {"outside": PATH} if kind == "open-set" else {}
    assert made(name, kind=kind, noise=0.2, **more).noise == noise
    assert made(name, kind=kind, noise=0, **more).noise is None


def test_human_labels_come_from_their_file_and_no_noise_is_added():
    experiment = made("cifar10", kind="human", labels=Path("/n.pt"), column="worse")
    assert experiment.noise is None
    assert (experiment.data.labels, experiment.data.column) == (Path("/n.pt"), "worse")
    assert made("cifar100", kind="human", labels=Path("/n.pt")).data.labels == Path("/n.pt")


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ({"kind": "human"}, "labels"),
        ({"kind": "human", "labels": PATH}, "column"),
        ({"labels": PATH}, "labels"),
        ({"column": "worse"}, "column"),
    ],
)
def test_human_labels_that_would_not_be_used_are_refused(choices, field):
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        made("cifar10", **choices)


def test_open_set_noise_takes_images_of_the_other_cifar():
    other = Path("/data/other")
    assert made("cifar10", kind="open-set", outside=other).outside == Cifar100(path=other)
    assert made("cifar100", kind="open-set", outside=other).outside == Cifar10(path=other)
    assert made("cifar10").outside is None
    for name in ("cifar10", "cifar100"):
        with pytest.raises(ValueError, match=r"^outside"):
            made(name, kind="open-set")
        with pytest.raises(ValueError, match=r"^outside"):
            made(name, outside=other)


def test_open_set_noise_within_cifar10_takes_the_classes_that_are_left_out():
    experiment = made("cifar10", kind="open-set-within", noise=0.4)
    learned, left_out = experiment.data.classes, experiment.outside.classes
    assert (experiment.data.path, experiment.outside.path) == (PATH, PATH)
    assert learned == ("airplane", "automobile", "dog", "frog", "horse", "ship")
    # Asymmetric noise confuses them with the first three, and with horses.
    assert left_out == ("bird", "truck", "cat", "deer")
    with pytest.raises(ValueError, match=r"^outside"):
        made("cifar10", kind="open-set-within", outside=Path("/data/other"))


@pytest.mark.parametrize(
    "name", ["cifar10", "cifar100", "clothing1m", "mini_imagenet", "webvision"]
)
def test_neighbors_may_be_all_of_the_batch(name):
    assert made(name, k="all").objective.k is None
    assert made(name, k=3).objective.k == 3
    assert made(name).objective.k in (1, 10)
    with pytest.raises(ValueError, match=r"\bk\b"):
        made(name, k=0)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ({"method": "standard", "variant": "released"}, "variant"),
        ({"method": "ncr", "noise_per_network": True}, "noise_per_network"),
        ({"method": "elr+", "noise_per_network": True, "noise": 0}, "noise_per_network"),
    ],
)
def test_a_choice_that_would_have_no_effect_is_refused(name, choices, field):
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        made(name, **choices)


def test_elr_has_the_settings_of_its_authors():
    assert made("cifar10", method="elr").objective == ELR(beta=0.7, weight=3.0)
    assert made("cifar10", method="elr", kind="asymmetric").objective == ELR(beta=0.9, weight=1.0)
    assert made("cifar100", method="elr").objective == ELR(beta=0.9, weight=7.0)


@pytest.mark.parametrize("name", ["folder", "manifest"])
def test_own_images_start_from_scratch_where_no_weights_are(name):
    experiment = made(name, size=96, epochs=40, batch_size=128)
    assert experiment.data.path == PATH
    assert (experiment.backbone, experiment.init) == (ResNet(depth=18, small_images=False), None)
    assert experiment.objective == NCR(alpha=0.7, k=10, start_epoch=10)
    assert experiment.optimizer == SGD(lr=0.1)
    assert experiment.augment.transforms[0] == RandomResizedCrop(size=96)
    assert (experiment.image_size, experiment.normalize) == (96, IMAGENET_COLORS)
    assert (experiment.noise, experiment.held_out, experiment.bad_images) == (None, 0.1, "skip")


def test_own_images_start_from_weights_that_were_downloaded_before(cache):
    assert made("folder").init is None
    put_weights(cache, "resnet180.x")
    assert made("folder").init is None
    file = put_weights(cache, "resnet18.a1_in1k")
    experiment = made("folder")
    assert (experiment.backbone, experiment.init) == (
        ResNet(depth=18, small_images=False),
        str(file),
    )
    assert experiment.objective == NCR(alpha=0.7, k=10, start_epoch=0)
    assert experiment.optimizer == SGD(lr=0.01)
    assert made("folder", backbone="resnet50").init is None
    assert made("folder", weights="none").init is None
    assert made("folder", weights="none").optimizer == SGD(lr=0.05)


@pytest.mark.parametrize(
    ("variables", "hub"),
    [
        ({}, ".cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "x"}, "x/huggingface/hub"),
        ({"HF_HOME": "y"}, "y/hub"),
    ],
)
def test_the_cache_is_where_hugging_face_puts_it(monkeypatch, tmp_path, variables, hub):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, place in variables.items():
        monkeypatch.setenv(name, str(tmp_path / place))
    file = put_weights(tmp_path / hub, "resnet18.a1_in1k")
    assert made("folder").init == str(file)


def test_weights_of_a_file_need_the_name_of_their_network():
    experiment = made("folder", backbone="resnet50", weights=Path("/w.safetensors"))
    assert (experiment.backbone, experiment.init) == (
        ResNet(depth=50, small_images=False),
        "/w.safetensors",
    )
    with pytest.raises(ValueError, match=r"^backbone.*/w.safetensors"):
        made("folder", weights=Path("/w.safetensors"))


def test_other_networks_are_those_of_timm_if_it_is_there(monkeypatch, cache):
    monkeypatch.setattr(own_data, "find_spec", lambda name: object())
    assert made("folder", backbone="convnext_tiny").backbone == Timm(name="convnext_tiny")
    file = put_weights(cache, "convnext_tiny.fb_in1k")
    experiment = made("folder", backbone="convnext_tiny")
    assert (experiment.backbone, experiment.init) == (
        Timm(name="convnext_tiny", weights=str(file)),
        None,
    )
    assert experiment.optimizer == SGD(lr=0.01)
    monkeypatch.setattr(own_data, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^backbone.*convnext_tiny.*pip install"):
        made("folder", backbone="convnext_tiny")


@pytest.mark.parametrize("name", ["digits", "toy"])
def test_every_method_takes_a_step_on_the_quick_recipes(name):
    for method in methods_of(name):
        experiment = made(name, method=method)
        split = experiment.data.open("train")
        rows = torch.arange(32)
        labels = experiment.noise(split.labels, split.inputs)
        num_classes = len(labels.classes)
        batch = Batch(
            inputs=split.inputs[rows],
            targets=one_hot(labels.given[rows], num_classes),
            indices=rows,
        )
        if experiment.augment is not None:
            batch = experiment.augment(batch, seed=0, epoch=0)
        if experiment.normalize is not None:
            batch = replace(
                batch, inputs=experiment.normalize(batch.inputs, batch.indices, seed=0, epoch=0)
            )
        if experiment.mixup is not None:
            batch = experiment.mixup(batch, seed=0, epoch=0)
        model = experiment.backbone.build(num_classes, num_inputs=batch.inputs.shape[1])
        memory = experiment.objective.init_state(len(labels.given), num_classes, model.num_features)
        stage = experiment.objective.phase(0.0, memory)
        if experiment.self_taught:
            with torch.no_grad():
                batch = replace(batch, teacher=model(batch.inputs))
        loss = experiment.objective(model(batch.inputs), batch, torch.tensor(0.0), memory, stage)
        loss.total.backward()
        assert loss.total.isfinite()
        assert all(weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("name", recipes.__all__)
def test_a_recipe_says_how_to_run_it_and_what_each_parameter_is(name):
    recipe = getattr(recipes, name)
    text = inspect.getdoc(recipe)
    assert f"Command: nearsay train {name} " in text
    assert ">>> " in text.partition("Example:\n")[2]
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^    (\w+): (.+)$", arguments, flags=re.MULTILINE)
    parameters = inspect.signature(recipe).parameters
    assert [key for key, _ in documented] == list(parameters)
    assert all(meaning.endswith(".") for _, meaning in documented)
    words = re.search(r"^Command: nearsay train \S+(.*)$", text, flags=re.MULTILINE)[1].split()
    assert all(word.partition("=")[0] in parameters for word in words)


# Methods and data of the user.


@dataclass(frozen=True, kw_only=True)
class Squares:
    """A loss of the user without state: a function of logits and targets."""

    power: int = 2

    def __call__(self, logits, targets):
        return ((logits.softmax(dim=1) - targets).abs() ** self.power).sum(dim=1)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_a_loss_of_the_user(name):
    experiment = made(name, method=Squares(power=3))
    assert experiment.objective == as_objective(Squares(power=3))
    assert (experiment.mixup, experiment.networks, experiment.only_clean) == (None, 1, False)
    assert made(name, method=GJS()).objective == GJS()
    usual = made(name, method="standard")
    assert replace(experiment, objective=usual.objective) == usual


@pytest.mark.parametrize("name", ["cifar10", "clothing1m", "mini_imagenet", "webvision"])
def test_settings_of_ncr_are_refused_for_a_loss_of_the_user(name):
    with pytest.raises(ValueError, match=r"^alpha.*Squares"):
        made(name, method=Squares(), alpha=0.5)


@pytest.mark.parametrize(
    ("shape", "backbone", "transform", "size"),
    [
        ((3, 8, 8), ResNet(depth=18, width=16), PadCrop(padding=1, mode="zeros"), 8),
        ((3, 32, 64), ResNet(depth=18, width=64), PadCrop(padding=4, mode="zeros"), 32),
        ((3, 128, 96), ResNet(depth=18, small_images=False), RandomResizedCrop(size=96), 96),
        ("files", ResNet(depth=18, small_images=False), RandomResizedCrop(size=224), 224),
    ],
)
def test_a_data_set_of_the_user_is_trained_by_the_shape_of_its_images(
    shape, backbone, transform, size
):
    experiment = recipes.dataset(Toy(), shape=shape, seed=3, noise=0.2)
    assert experiment.data == Toy()
    assert experiment.backbone == backbone
    assert experiment.augment.transforms[0] == transform
    assert (experiment.image_size, experiment.seed) == (size, 3)
    assert experiment.noise == Symmetric(rate=0.2, seed=3)


def test_a_data_set_of_features_is_trained_as_embeddings_are():
    experiment = recipes.dataset(Toy(), shape=(32,), batch_size=256)
    assert experiment == replace(made("embeddings"), data=Toy())
    assert recipes.dataset(Toy(), batch_size=256) == experiment


def test_a_data_set_that_describes_itself_is_not_opened(tmp_path):
    class Described:
        def __init__(self, shape):
            self.shape = shape

        def describe(self):
            return self

    assert own_data.find_shape(Described((3, 8, 8))) == (3, 8, 8)
    assert own_data.find_shape(Described(None)) == "files"
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.jpg").write_bytes(b"")
    assert own_data.find_shape(Folder(path=tmp_path)) == "files"


@pytest.mark.parametrize("shape", [(1, 8, 8), (8, 8), ()])
def test_a_shape_that_no_recipe_can_train_is_refused(shape):
    with pytest.raises(ValueError, match=r"^shape"):
        recipes.dataset(Toy(), shape=shape)
