import json
import math
import random
import string
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nearsay import data
from nearsay.config import (
    ConfigError,
    apply_overrides,
    call_recipe,
    differences,
    from_origin,
    left_behind,
    override,
    recipe_names,
    substantial,
    to_tree,
)
from nearsay.losses import NCR, Bank, Bootstrap
from nearsay.noise import Recorded
from nearsay.optim import SGD
from nearsay.transforms import Mixup, Views

NAMES = [
    "cifar10",
    "cifar100",
    "clothing1m",
    "digits",
    "embeddings",
    "folder",
    "hub",
    "manifest",
    "mini_imagenet",
    "toy",
    "webvision",
]
OWN = """
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from nearsay.experiment import Experiment
from nearsay.data import Toy
from nearsay.losses import CrossEntropy

@dataclass(frozen=True, kw_only=True)
class Mine(CrossEntropy):
    words: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    seen: object = None

def recipe(number: int, share: float = 0.5, *, sure: bool = False, word: str = "a", place: Path = Path("/"),
           maybe: int | None = 3, kind: Literal["x", "y", 2] = "x", pair: tuple[int, float] = (1, 2.0),
           many: tuple[int, ...] = (), either: Literal["auto"] | Path = "auto", bare=4, unknown=None):
    seen = (number, share, sure, word, place, maybe, kind, pair, many, either, bare, unknown)
    return Experiment(data=Toy(), normalize=None, objective=Mine(words=tuple(map(repr, seen)), seen=seen))
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch, tmp_path):
    def refuse(self, split):
        raise AssertionError("data was opened")

    for name in data.__all__:
        monkeypatch.setattr(getattr(data, name), "open", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no cache"))


def toy(*overrides):
    return apply_overrides(call_recipe("toy", []), overrides)


def cifar10(*overrides):
    return apply_overrides(call_recipe("cifar10", ["path=/data"]), overrides)


def test_recipes_are_named_by_their_files():
    assert recipe_names() == NAMES


def test_names_and_wrong_names_do_without_torch():
    code = """
import sys, nearsay.config as config
config.recipe_names()
try:
    config.call_recipe("cifr10", [])
except config.ConfigError as error:
    print(error)
print(sorted({"torch", "numpy"} & sys.modules.keys()))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    sentence, heavy = output.splitlines()
    assert sentence.startswith(
        "there is no recipe 'cifr10' (did you mean cifar10?); there are cifar10, cifar100,"
    )
    assert heavy == "[]"


@pytest.mark.parametrize(
    ("place", "argument", "value"),
    [
        (0, "number=-7", -7),
        (1, "share=1", 1.0),
        (1, "share=.25", 0.25),
        (1, "share=2.5e-1", 0.25),
        (2, "sure=True", True),
        (2, "sure=no", False),
        (3, "word=a=b c", "a=b c"),
        (3, "word=none", "none"),
        (3, "word=", ""),
        (5, "maybe=none", None),
        (5, "maybe=9", 9),
        (6, "kind=y", "y"),
        (6, "kind=2", 2),
        (7, "pair=3,4", (3, 4.0)),
        (7, "pair=(3, 4.5)", (3, 4.5)),
        (8, "many=1,2,3", (1, 2, 3)),
        (8, "many=64,", (64,)),
        (8, "many=", ()),
        (9, "either=auto", "auto"),
        (9, "either=/x", Path("/x")),
        (10, "bare=5", 5),
        (11, "unknown=5", "5"),
    ],
)
def test_an_argument_is_read_as_its_parameter_declares(own, place, argument, value):
    words = [argument] if place == 0 else ["number=1", argument]
    call = call_recipe(own, words)
    found = call.experiment.objective.seen[place]
    assert found == value
    assert type(found) is type(value)
    assert call.origin["arguments"] == dict(word.split("=", 1) for word in words)


def test_paths_are_made_absolute_in_the_experiment_and_in_the_record(own, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    call = call_recipe(own, ["number=1", "place=data/x"])
    assert call.experiment.objective.seen[4] == tmp_path / "data" / "x"
    assert call.origin["arguments"]["place"] == f"{tmp_path}/data/x"
    assert call_recipe("cifar10", ["path=~/x"]).experiment.data.path == Path("/home/me/x")
    monkeypatch.chdir("/")
    assert from_origin(call.origin).experiment == call.experiment


@pytest.mark.parametrize(
    ("name", "recipe"), [("photos", "folder"), ("a.csv", "manifest"), ("b.npz", "embeddings")]
)
def test_data_where_a_recipe_should_stand_is_told_what_trains_on_it(
    tmp_path, monkeypatch, name, recipe
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for file in ("a.csv", "b.npz"):
        (tmp_path / file).write_text("")
    with pytest.raises(
        ConfigError, match=f"its .py file; for data, nearsay train {recipe} path={name}$"
    ):
        call_recipe(name, [])


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_no_file_can_have_is_no_recipe(name):
    with pytest.raises(ConfigError, match=r"its \.py file$"):
        call_recipe(name, [])


@pytest.mark.parametrize(
    ("recipe", "arguments", "sentence"),
    [
        ("quagga", "", "there is no recipe 'quagga'; there are cifar10, "),
        ("methods", "", "there is no recipe 'methods'"),
        (
            "toy",
            "backbone.hidden=3",
            "is a field, not what the recipe toy takes; --set backbone.hidden=3 changes it",
        ),
        ("_cifar", "", "there is no recipe '_cifar'"),
        ("../toy", "", "there is no recipe '../toy'"),
        ("", "", "there is no recipe ''"),
        ("toy", "noise", "'noise' must be key=value"),
        ("toy", "=3", "'=3' must be key=value, such as seed=1"),
        ("folder", "/", "'/' must be key=value, such as path=/"),
        ("toy", "seed=1 seed=2", "seed is given twice, as '1' and '2'; give it once"),
        (
            "toy",
            "sede=1",
            "the recipe toy has no 'sede' (did you mean seed?); it takes method, noise, epochs, seed",
        ),
        ("toy", "seed=1.5", "seed='1.5' must be a whole number"),
        ("toy", "seed=1e3", "seed='1e3' must be a whole number"),
        ("toy", "seed=", "seed='' must be a whole number"),
        (
            "toy",
            "seed=99999999999999999999",
            "seed='99999999999999999999' must be a whole number of at most 18 digits",
        ),
        ("toy", "noise=much", "noise='much' must be a number"),
        ("toy", "noise=nan", "noise='nan' must be a number"),
        ("toy", "noise=1e999", "noise='1e999' must be a number"),
        ("toy", "noise=2", "rate 2.0 must be a number from 0 to 1"),
        ("toy", "epochs=-1", "epochs=-1.0 must be a number from 0.001"),
        ("toy", "method=nrc", "elr+, ncr+elr+, label-propagation (did you mean ncr?)"),
        ("toy", "seed=1\0", "holds characters that no text file can"),
        ("toy", "seed=\udcff", "holds characters that no text file can"),
        ("cifar10", "", "the recipe cifar10 needs path=, which must be a path"),
        ("cifar10", "path=", "path='' must be a path"),
        ("cifar10", "path=~no_such_user/x", "path='~no_such_user/x' must be a path"),
        (
            "cifar10",
            "path=x alpha=2",
            "alpha=2.0 must be a number from 0 to 1: 0 is the base alone, 1 no labels at all",
        ),
        ("cifar10", "path=x k=0", "k=0 must be a whole number of at least 1, or all"),
        ("cifar10", "path=x k=few", "k='few' must be all, or a whole number, or none"),
        (
            "cifar10",
            "path=x kind=odd",
            "kind='odd' must be one of symmetric, symmetric-strict, asymmetric, ",
        ),
        ("cifar10", "path=x start=soon", "start='soon' must be auto, or a number, or none"),
        ("cifar10", "path=x protocol=long", "protocol='long' must be one of short, paper, elr"),
        (
            "cifar10",
            "path=x noise_per_network=yes",
            "noise_per_network=true is for two networks, and method='ncr' has",
        ),
        ("mini_imagenet", "path=x noise=0.3", "noise=0.3 must be one of 0.0, 0.2, 0.4, 0.8"),
        ("mini_imagenet", "path=x color=green", "color='green' must be one of red, blue"),
        ("webvision", "path=x subset=tiny", "subset='tiny' must be one of mini, full"),
        ("clothing1m", "path=x method=oracle", "method='oracle' must be one of standard, mixup, "),
        (
            "embeddings",
            "path=x hidden=a",
            "hidden='a' must be a whole number, or several separated by commas",
        ),
        ("embeddings", "path=x hidden=", "hidden is (); it must name the width"),
        (
            "no_such_file.py",
            "",
            "there is no recipe 'no_such_file.py'; check the name, and the folder that it is",
        ),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(recipe, arguments, sentence):
    with pytest.raises(ConfigError) as caught:
        call_recipe(recipe, arguments.split())
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_long_words_are_quoted_in_short():
    with pytest.raises(ConfigError) as caught:
        call_recipe("toy", ["seed=" + "x" * 10**6])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def recipe(:", "the recipe 'own.py' fails with SyntaxError in line 1: "),
        (
            "import no_such_module",
            "the recipe 'own.py' fails with ModuleNotFoundError: No module named",
        ),
        ("1 / 0", "the recipe 'own.py' fails with ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('no GPU')", "the recipe 'own.py' fails with SystemExit: no GPU"),
        ("def recipe(): raise SystemExit", "the recipe own.py fails with SystemExit: SystemExit"),
        ("def recipe(): exit(1)", "the recipe own.py fails with SystemExit: 1"),
        ("x = 1", "'own.py' defines no function `recipe`"),
        ("recipe = 3", "'own.py' defines no function `recipe`"),
        ("def recipe(): return 3", "the recipe own.py returned 3; it must return an Experiment"),
        (
            "def recipe(): return [][1]",
            "the recipe own.py fails with IndexError: list index out of range",
        ),
        ("def recipe(): raise ValueError('too much')", "too much"),
        (
            "def recipe(x: 'Nowhere' = 1): pass",
            "the types that own.py declares cannot be read: name 'Nowhere'",
        ),
        ("def recipe(x, /): pass", "the recipe own.py fails with TypeError: "),
    ],
)
def test_a_wrong_recipe_of_the_user_is_refused_in_one_sentence(tmp_path, source, sentence):
    path = tmp_path / "own.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as caught:
        call_recipe(str(path), [])
    assert sentence in str(caught.value)


def test_a_recipe_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "own.py"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read: "):
        call_recipe(str(path), [])


@pytest.mark.parametrize(
    ("change", "read", "value"),
    [
        ("objective.k=5", lambda e: e.objective.k, 5),
        ("objective.k=none", lambda e: e.objective.k, None),
        ("objective.base.smoothing=1e-1", lambda e: e.objective.base.smoothing, 0.1),
        ("objective.variant=released", lambda e: e.objective.variant, "released"),
        ("objective.bank.size=99", lambda e: e.objective.bank, Bank(size=99)),
        ("objective.mask_partners=true", lambda e: e.objective.mask_partners, True),
        ("optimizer.lr=1", lambda e: e.optimizer, SGD(lr=1.0)),
        ("epochs=7", lambda e: e.epochs, 7.0),
        ("mixup.alpha=0.5", lambda e: e.mixup, Mixup(alpha=0.5)),
        ("mixup=none", lambda e: e.mixup, None),
        ("noise=None", lambda e: e.noise, None),
        ("noise.rate=0.2", lambda e: e.noise.rate, 0.2),
        ("augment.transforms.0.padding=2", lambda e: e.augment.transforms[0].padding, 2),
        ("augment.transforms.1.probability=0", lambda e: e.augment.transforms[1].probability, 0.0),
        ("normalize.std=1,2,3", lambda e: e.normalize.std, (1.0, 2.0, 3.0)),
        ("normalize.std.1=9", lambda e: e.normalize.std, (0.2470, 9.0, 0.2616)),
        ("backbone.depth=34", lambda e: e.backbone.depth, 34),
        ("init=weights=1.safetensors", lambda e: e.init, "weights=1.safetensors"),
        ("data.path=/elsewhere", lambda e: e.data.path, Path("/elsewhere")),
        ("machine.device=cpu", lambda e: e.machine.device, "cpu"),
        ("machine.workers=2", lambda e: e.machine.workers, 2),
    ],
)
def test_an_override_changes_one_field_and_no_other(change, read, value):
    before = cifar10().experiment
    after = override(before, change)
    assert read(after) == value
    assert type(read(after)) is type(value)
    assert before == cifar10().experiment
    changed = differences(to_tree(after), to_tree(before))
    assert len(changed) == (
        0 if change.startswith("machine") or after == before else max(1, change.count(",") + 1)
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("epochs", "'epochs' must be key=value"),
        (
            "epoch=3",
            "an experiment has no field 'epoch' (did you mean epochs?); it has data, noise, outside, ",
        ),
        (
            "objective.alhpa=1",
            "objective (NCR) has no field 'alhpa' (did you mean alpha?); it has alpha, k, temperature",
        ),
        ("objective.alpha=2", "alpha=2.0 must be a number from 0 to 1: 0 is the base alone"),
        ("objective.k=5.0", "objective.k='5.0' must be a whole number, or none"),
        ("objective.variant=new", "objective.variant='new' must be one of paper, released"),
        ("objective.mask_partners=2", "objective.mask_partners='2' must be true or false"),
        ("batch_size=1e3", "batch_size='1e3' must be a whole number"),
        ("batch_size=1", "batch_size=1 must be a whole number of at least 2"),
        ("schedule.warmup=200", "warmup=200.0 must end before the 100 epochs do"),
        (
            "schedule=none",
            "schedule='none' cannot be read; set its parts: schedule.warmup, schedule.final",
        ),
        ("mixup=yes", "mixup='yes' must be none, or set its parts: mixup.alpha"),
        (
            "mixup.alhpa=1",
            "mixup is none and could not have 'alhpa' (did you mean alpha?); it could have alpha",
        ),
        ("mixup.alpha=0", "alpha=0.0 must be a number above 0"),
        (
            "outside.path=x",
            "outside is none, and path alone does not make one; choose it in a recipe",
        ),
        (
            "augment.transforms=none",
            "cannot be read; set its parts: augment.transforms.0.padding, ",
        ),
        ("augment.transforms.2.padding=1", "augment.transforms has no '2'; it has numbers 0 to 1"),
        (
            "augment.transforms.-1.padding=1",
            "augment.transforms has no '-1'; it has numbers 0 to 1",
        ),
        (
            "augment.transforms.0.x=1",
            "augment.transforms.0 (PadCrop) has no field 'x'; it has padding, mode",
        ),
        (
            "normalize.std=1,2",
            "normalize.std='1,2' must be 3 values separated by commas, each a number",
        ),
        ("backbone.head=1", "backbone.head='1' cannot be read; choose it in a recipe"),
        ("backbone.head.scale=1", "backbone.head (LinearHead) has no field 'scale'; it has none"),
        ("seed.x=1", "seed is 0 and has no 'x'; set seed itself"),
        ("networks=3", "networks='3' must be one of 1, 2"),
        ("networks=2", "networks=2 needs averaging="),
        ("..=1", "an experiment has no field ''"),
    ],
)
def test_a_wrong_override_is_refused_in_one_sentence(change, sentence):
    with pytest.raises(ConfigError) as caught:
        override(cifar10().experiment, change)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_none_cannot_be_filled_where_the_kind_is_in_doubt():
    with pytest.raises(ConfigError, match="augment is none, and first alone does not make one"):
        override(cifar10("augment=none").experiment, "augment.first=1")


def test_the_labels_of_a_record_cannot_be_overridden_by_text():
    experiment = replace(toy().experiment, noise=Recorded(given=torch.tensor([0, 1])))
    with pytest.raises(ConfigError, match=r"noise.given='3' must be chosen in a recipe"):
        override(experiment, "noise.given=3")
    with pytest.raises(ConfigError, match="has no field 'digest'"):
        override(experiment, "noise.digest=x")


def test_overrides_may_come_in_any_order_and_are_recorded_in_one_that_works():
    call = cifar10("epochs=0.5", "averaging=0.9", "schedule.warmup=0.1")
    assert (call.experiment.epochs, call.experiment.schedule.warmup) == (0.5, 0.1)
    assert call.origin["overrides"] == ["averaging=0.9", "schedule.warmup=0.1", "epochs=0.5"]
    more = apply_overrides(call, ["networks=2"])
    assert more.origin["overrides"] == [*call.origin["overrides"], "networks=2"]
    assert from_origin(more.origin) == more


def test_the_first_override_that_stays_impossible_is_named():
    with pytest.raises(ConfigError, match=r"warmup=1.0 must end before the 0.5 epochs do"):
        cifar10("epochs=0.5", "seed=x", "seed.y=1")
    with pytest.raises(ConfigError, match="seed is given twice"):
        cifar10("seed=1", "seed=2")


def test_an_experiment_can_be_repeated_from_its_record(own):
    for call in (
        cifar10("objective.k=5"),
        toy(),
        apply_overrides(call_recipe(own, ["number=3"]), ["seed=4"]),
    ):
        record = json.loads(json.dumps({**call.origin, "experiment": to_tree(call.experiment)}))
        again = from_origin(record)
        assert again.origin == call.origin
        assert to_tree(again.experiment) == to_tree(call.experiment)


def test_a_recipe_of_the_user_is_kept_in_the_record(own):
    call = call_recipe(own, ["number=3"])
    Path(own).unlink()
    assert call.origin["recipe"] == "own.py"
    assert call.origin["source"] == OWN
    assert from_origin(call.origin).experiment.objective.seen[0] == 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"recipe": "os"}, "there is no recipe 'os'"),
        ({"recipe": "nearsay.recipes.toy"}, "there is no recipe 'nearsay.recipes.toy'"),
        ({"recipe": None}, "the recipe is recorded as None; it must be a name"),
        ({"recipe": "/tmp/x.py"}, "there is no recipe '/tmp/x.py'"),
        ({"arguments": ["seed=1"]}, "the arguments are recorded as ['seed=1']"),
        ({"arguments": {"seed": 1}}, "the arguments are recorded as {'seed': 1}"),
        ({"arguments": {"seed=1": "2"}}, "the arguments are recorded as {'seed=1': '2'}"),
        ({"overrides": "seed=1"}, "the overrides are recorded as 'seed=1'"),
        ({"overrides": [1]}, "the overrides are recorded as [1]"),
        ({"overrides": ["seed"]}, "'seed' must be key=value"),
        (
            {"source": OWN, "sha256": "0" * 64},
            "the source of the recipe 'toy' is not as it was recorded",
        ),
        ({"source": OWN}, "the source of the recipe 'toy' is not as it was recorded"),
        ({"source": 3, "sha256": "0"}, "the source of the recipe 'toy' is not as it was recorded"),
    ],
)
def test_a_damaged_record_is_refused_in_one_sentence(change, sentence):
    with pytest.raises(ConfigError) as caught:
        from_origin({**toy().origin, **change})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("record", [None, 3, "toy", [], {}])
def test_a_record_of_another_kind_is_refused(record):
    with pytest.raises(ConfigError):
        from_origin(record)


def test_the_tree_of_an_experiment_is_json_and_names_every_kind():
    tree = to_tree(cifar10("objective.bank.size=7").experiment)
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree
    assert tree["kind"] == "Experiment"
    assert tree["data"] == {
        "kind": "Cifar10",
        "path": "/data",
        "labels": None,
        "column": None,
        "classes": None,
    }
    assert tree["objective"]["bank"] == {"kind": "Bank", "kind_": "queue", "size": 7}
    assert tree["augment"]["transforms"][0] == {"kind": "PadCrop", "padding": 4, "mode": "reflect"}


def test_trees_differ_exactly_where_values_do():
    values = [
        *(torch.tensor(rows) for rows in ([1, 2], [2, 1], [[1, 2]], [1.0, 2.0], [], [True])),
        torch.tensor(1),
        torch.tensor([1.0], dtype=torch.bfloat16),
        np.array([3, 4]),
        *(Bootstrap(kind=kind) for kind in ("soft", "hard")),
        *(NCR(bank=bank) for bank in (None, Bank(), Bank(kind="examples"))),
        *(Recorded(given=torch.tensor(given)) for given in ([0, 1], [1, 0])),
        {"a": 1},
        math.inf,
        -math.inf,
        "x",
    ]
    trees = [json.dumps(to_tree(value), allow_nan=False) for value in values]
    assert len(set(trees)) == len(values)
    assert to_tree(torch.tensor([1, 2])) == to_tree(torch.tensor([9, 1, 2])[1:])
    assert to_tree(np.array([1, 2])) == to_tree(torch.tensor([1, 2]))
    assert to_tree(np.int64(5)) == to_tree(5)


@pytest.mark.parametrize("value", [object(), {1, 2}, print, SGD, np.array([object()])])
def test_what_cannot_be_written_down_is_refused(value):
    with pytest.raises(ConfigError, match="cannot be written down; make"):
        to_tree(value)


def test_one_more_item_of_a_list_makes_another_experiment_and_a_new_field_that_is_off_does_not():
    harmless = [
        "init: 1, not 2",
        "teacher: not there, but null",
        "augment.second.0.share: not there, but 0.0",
    ]
    others = [
        "augment.second.1: not there, but 0",
        "initial: 1, not 2",
        "teacher: not there, but 1",
    ]
    assert substantial([*harmless, *others], ("data.path", "init")) == others


def test_differences_name_the_field_and_both_values():
    ours = to_tree(cifar10("objective.k=5", "mixup.alpha=1", "machine.device=cpu").experiment)
    theirs = to_tree(cifar10("augment.transforms.0.padding=2").experiment)
    assert differences(ours, theirs) == [
        "objective.k: 5, not 10",
        "augment.transforms.0.padding: 4, not 2",
        'mixup: "Mixup", not null',
    ]
    assert differences(ours, ours) == []
    assert differences({"a": 1, "b": {"c": [1]}}, {"b": {"c": [1, 2]}, "d": True}) == [
        "a: 1, not there",
        "b.c.1: not there, but 2",
        "d: not there, but true",
    ]
    assert differences({"a": [1, [2, 3]]}, {"a": [4, [2]]}) == [
        "a.0: 1, not 4",
        "a.1.1: 3, not there",
    ]
    assert differences({"a": []}, {"a": [{"kind": "X"}]}) == ['a.0: not there, but "X"']
    assert differences({"a": True}, {"a": 1}) == ["a: true, not 1"]
    assert differences({"a": {"kind": "X", "b": 1}}, {"a": {"kind": "Y", "b": 2}}) == [
        'a: "X", not "Y"'
    ]
    assert differences(1, None) == ["experiment: 1, not null"]


def test_one_place_of_a_tuple_is_read_as_that_place_declares(own):
    experiment = call_recipe(own, ["number=1"]).experiment
    assert override(experiment, "objective.pair.1=4.5").objective.pair == (1, 4.5)
    with pytest.raises(ConfigError, match=r"objective.pair.0='4.5' must be a whole number"):
        override(experiment, "objective.pair.0=4.5")


def test_two_views_are_overridden_by_name():
    experiment = call_recipe("cifar10", ["path=/data", "method=gjs"]).experiment
    changed = override(experiment, "augment.second.0.padding=0")
    assert isinstance(changed.augment, Views)
    assert (changed.augment.first[0].padding, changed.augment.second[0].padding) == (4, 0)


JUNK = [
    *(
        "",
        " ",
        "none",
        "None",
        "nan",
        "inf",
        "-1",
        "0",
        "1",
        "2",
        "1e9",
        "1e999",
        "-1e-9",
        "9" * 30,
        "0x1F",
        "1_000",
    ),
    *(
        "true",
        "false",
        "auto",
        "a,b",
        "1,2,3",
        "(1,)",
        "()",
        ",",
        "../..",
        "~",
        "~x",
        "/",
        "é",
        "\udcff",
        "\0",
        "=",
        ".",
    ),
    *("__class__", "__import__('os')", "x" * 300, "{}", "[]", "٣", "1.", ".5", "+3"),
]


def dotted(tree, where=""):
    """The dotted name of everything in a tree."""
    parts = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, part in parts:
        yield f"{where}{key}"
        yield from dotted(part, f"{where}{key}.")


def mutated(text, draw):
    """The text with a few letters lost, doubled, exchanged or added."""
    letters = list(text)
    for _ in range(draw.randint(1, 3)):
        place = draw.randint(0, len(letters))
        letters[place : place + draw.randint(0, 2)] = draw.choice(
            ["", "=", ".", "0", "-", draw.choice(string.printable), draw.choice(JUNK)[:20]]
        )
    return "".join(letters)


def a_word(keys, draw):
    word = f"{draw.choice(keys)}={draw.choice(JUNK)}"
    return mutated(word, draw) if draw.random() < 0.3 else word


def a_node(tree, draw):
    """The JSON with one of its nodes replaced, removed or mutated."""
    if isinstance(tree, dict) and tree and draw.random() < 0.8:
        key = draw.choice(list(tree))
        rest = {name: each for name, each in tree.items() if name != key}
        return rest if draw.random() < 0.2 else {**rest, key: a_node(tree[key], draw)}
    if isinstance(tree, list) and tree and draw.random() < 0.8:
        place = draw.randrange(len(tree))
        return [*tree[:place], a_node(tree[place], draw), *tree[place + 1 :]]
    if isinstance(tree, str) and draw.random() < 0.5:
        return mutated(tree, draw)
    return draw.choice(
        [None, True, 0, -1.5, "", "toy", [], {}, [[[]]], {"seed": "1"}, ["seed=1"], *JUNK]
    )


def attempt(act, *arguments):
    """Whether it was accepted; anything but a ConfigError of one short sentence fails the test."""
    complaint = None
    try:
        act(*arguments)
    except ConfigError as error:
        complaint = str(error)
    assert complaint is None or ("\n" not in complaint and 0 < len(complaint) < 2000), arguments
    return complaint is None


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_words_and_records_give_an_experiment_or_a_config_error(count, own):
    draw = random.Random(count)
    required = {name: [] if name in ("toy", "digits") else ["path=/data"] for name in NAMES}
    calls = [call_recipe(name, words) for name, words in required.items()] + [
        call_recipe(own, ["number=1"])
    ]
    calls.append(call_recipe("cifar10", ["path=/data", "method=gjs", "kind=asymmetric"]))
    arguments = [
        "k",
        "alpha",
        "noise",
        "seed",
        "epochs",
        "kind",
        "method",
        "size",
        "hidden",
        "weights",
        "labels",
        "pair",
        "start",
        "protocol",
        "labeled",
        "hyper",
    ]
    unset = [
        "mixup.alpha",
        "objective.bank.size",
        "objective.bank.kind",
        "outside.path",
        "noise.mapping",
    ]
    accepted = dict.fromkeys(("arguments", "overrides", "records"), 0)
    start = time.perf_counter()
    for _ in range(count):
        name = draw.choice([*NAMES, *NAMES, own, mutated(draw.choice(NAMES), draw)])
        words = [
            *required.get(name, ["number=1"]),
            *(a_word(arguments, draw) for _ in range(draw.randint(0, 2))),
        ]
        accepted["arguments"] += attempt(call_recipe, name, words)
        call = draw.choice(calls)
        fields = [*dotted(to_tree(call.experiment)), *unset]
        changes = [a_word(fields, draw) for _ in range(draw.randint(1, 2))]
        accepted["overrides"] += attempt(apply_overrides, call, changes)
        record = {
            **call.origin,
            "overrides": ["seed=3", "objective.temperature=1"][: draw.randint(0, 2)],
        }
        accepted["records"] += attempt(from_origin, a_node(record, draw))
    assert time.perf_counter() - start < count * 0.05
    assert all(count / 50 < number < count * 0.9 for number in accepted.values()), accepted


def test_a_path_by_another_spelling_is_the_same_experiment(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    calls = [
        call_recipe("embeddings", [f"path={path}"]) for path in ("../f.npz", tmp_path / "f.npz")
    ]
    first, second = (to_tree(call.experiment) for call in calls)
    assert differences(first, second) == []


# What follows from an argument


def changed(recipe, arguments, *overrides):
    return apply_overrides(call_recipe(recipe, arguments), overrides)


def test_a_field_that_is_an_argument_too_is_told_of_with_what_would_follow():
    assert left_behind(changed("folder", ["path=photos"], "epochs=10")) == [
        "--set epochs=10 changes that alone; epochs=10 without --set would mean objective.start_epoch: 2, not 8; "
        "schedule.warmup: 1.0, not 3.0"
    ]
    (told,) = left_behind(changed("toy", ["noise=0.2"], "objective.k=3", "seed=4"))
    assert told.endswith(
        "seed=4 without --set would mean data.seed: 4, not 0; noise.seed: 4, not 0"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["objective.k=3"],  # no argument
        ["seed=0"],  # as it was
        [
            "epochs=10",
            "schedule.warmup=1",
            "objective.start_epoch=2",
        ],  # what would follow, in other words
        ["epochs=10", "machine.device=cpu", "schedule.warmup=1", "objective.start_epoch=2"],
    ],
)
def test_a_field_from_which_nothing_follows_is_not_told_of(overrides):
    assert left_behind(changed("folder", ["path=photos"], *overrides)) == []


def test_what_follows_in_a_recipe_of_ones_own_is_told_too(tmp_path):
    source = (
        "from nearsay.data import Toy\nfrom nearsay.experiment import Experiment\n"
        "def recipe(epochs: float = 40.0) -> Experiment:\n"
        "    return Experiment(data=Toy(), epochs=epochs, batch_size=round(8 * epochs))\n"
    )
    (tmp_path / "mine.py").write_text(source)
    (told,) = left_behind(changed(str(tmp_path / "mine.py"), [], "epochs=20"))
    assert (
        told
        == "--set epochs=20 changes that alone; epochs=20 without --set would mean batch_size: 160, not 320"
    )


def test_a_recipe_of_ones_own_that_cannot_take_a_value_is_not_asked_what_would_follow(tmp_path):
    source = (
        "from nearsay.data import Toy\nfrom nearsay.experiment import Experiment\n"
        "def recipe(epochs: float = 20.0) -> Experiment:\n"
        "    return Experiment(data=Toy(), epochs=epochs, batch_size={10.0: 64, 20.0: 32}[epochs])\n"
    )
    (tmp_path / "mine.py").write_text(source)
    assert left_behind(changed(str(tmp_path / "mine.py"), [], "epochs=15")) == []
