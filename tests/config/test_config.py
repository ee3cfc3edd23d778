import json
import math
import random
import string
import subprocess
import sys
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
from nearsay.config.text import quoted
from nearsay.losses import NCR, Bank, Bootstrap
from nearsay.noise import Recorded
from nearsay.optim import SGD
from nearsay.transforms import Mixup, Views

words_of = str.split
NAMES = words_of(
    "cifar10 cifar100 clothing1m dataset digits embeddings folder hub manifest mini_imagenet toy "
    "webvision"
)
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

def recipe(number: int, share: float = 0.5, *, sure: bool = False, word: str = "a",
           place: str | Path = Path("/"), maybe: int | None = 3, kind: Literal["x", "y", 2] = "x",
           pair: tuple[int, float] = (1, 2.0), many: tuple[int, ...] = (),
           either: Literal["auto"] | Path = "auto", bare=4, unknown=None):
    seen = (number, share, sure, word, place, maybe, kind, pair, many, either, bare, unknown)
    objective = Mine(words=tuple(map(repr, seen)), seen=seen)
    return Experiment(data=Toy(), normalize=None, objective=objective)
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
        if hasattr(getattr(data, name), "open"):
            monkeypatch.setattr(getattr(data, name), "open", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no cache"))


def toy(*overrides):
    return apply_overrides(call_recipe("toy", []), overrides)


def cifar10(*overrides):
    return apply_overrides(call_recipe("cifar10", ["path=/data"]), overrides)


def test_the_recipes_are_those_of_the_package():
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
    assert sentence.endswith("got 'cifr10'. Did you mean cifar10?")
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


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "", "methods", "../toy", "cifar"])
def test_a_name_of_nothing_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        call_recipe(name, [])
    assert quoted(name) in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "arguments", "words"),
    [
        ("toy", "backbone.hidden=3", ["'backbone.hidden'", "--set backbone.hidden=3"]),
        ("toy", "=3", ["'=3'", "seed=1"]),
        ("folder", "/", ["'/'", "path=/"]),
        ("toy", "seed=1 seed=2", ["seed", "'1'", "'2'"]),
        ("toy", "sede=1", ["'sede'", "method, noise, epochs, seed", "mean seed?"]),
        ("toy", "seed=1.5", ["seed", "'1.5'", "whole number"]),
        ("toy", "seed=99999999999999999999", ["seed", "18 digits"]),
        ("toy", "noise=nan", ["noise", "'nan'", "a number"]),
        ("toy", "method=nrc", ["method", "ncr+elr+, label-propagation", "mean ncr?"]),
        ("toy", "seed=1\0", ["NUL"]),
        ("cifar10", "", ["path", "cifar10"]),
        ("cifar10", "path=~no_such_user/x", ["path", "'~no_such_user/x'"]),
        ("cifar10", "path=x k=0", ["k", "0", "or all"]),
        ("cifar10", "path=x start=soon", ["start", "'soon'", "auto, or a number, or none"]),
        ("embeddings", "path=x hidden=a", ["hidden", "'a'", "separated by commas"]),
        ("no_such_file.py", "", ["'no_such_file.py'"]),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(recipe, arguments, words):
    with pytest.raises(ConfigError) as caught:
        call_recipe(recipe, arguments.split())
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\ndef recipe(:", ["SyntaxError in line 2"]),
        ("import no_such_module", ["ModuleNotFoundError in line 1", "no_such_module"]),
        ("import sys; sys.exit('no GPU')", ["SystemExit", "no GPU"]),
        ("x = 1", ["function `recipe"]),
        ("def recipe(): return 3", ["an Experiment", "got 3"]),
        ("def recipe():\n    return [][1]", ["IndexError in line 2"]),
        ("def recipe(): raise ValueError('too much')", ["too much"]),
        ("def recipe(x: 'Nowhere' = 1): pass", ["types", "'Nowhere'"]),
    ],
)
def test_a_wrong_recipe_of_the_user_is_refused_in_one_sentence(tmp_path, source, words):
    path = tmp_path / "own.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as caught:
        call_recipe(str(path), [])
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "read", "value"),
    [
        ("objective.k=5", lambda e: e.objective.k, 5),
        ("objective.bank.size=99", lambda e: e.objective.bank, Bank(size=99)),
        ("objective.mask_partners=true", lambda e: e.objective.mask_partners, True),
        ("optimizer.lr=1", lambda e: e.optimizer, SGD(lr=1.0)),
        ("mixup.alpha=0.5", lambda e: e.mixup, Mixup(alpha=0.5)),
        ("mixup=none", lambda e: e.mixup, None),
        ("augment.transforms.0.padding=2", lambda e: e.augment.transforms[0].padding, 2),
        ("normalize.std=1,2,3", lambda e: e.normalize.std, (1.0, 2.0, 3.0)),
        ("normalize.std.1=9", lambda e: e.normalize.std, (0.2470, 9.0, 0.2616)),
        ("init=weights=1.safetensors", lambda e: e.init, "weights=1.safetensors"),
        ("data.path=/elsewhere", lambda e: e.data.path, Path("/elsewhere")),
        ("machine.device=cpu", lambda e: e.machine.device, "cpu"),
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
    ("change", "words"),
    [
        ("epochs", ["'epochs'", "key=value"]),
        ("epoch=3", ["'epoch'", "data, noise, outside, ", "mean epochs?"]),
        ("objective.alhpa=1", ["'alhpa'", "objective (NCR)", "mean alpha?"]),
        ("objective.k=5.0", ["objective.k", "'5.0'", "whole number, or none"]),
        ("objective.variant=new", ["objective.variant", "'new'", "paper, released"]),
        ("schedule=none", ["schedule", "'none'", "schedule.warmup, schedule.final"]),
        ("mixup=yes", ["mixup", "'yes'", "none", "mixup.alpha"]),
        ("mixup.alhpa=1", ["'alhpa'", "mixup, which is none", "mean alpha?"]),
        ("outside.path=x", ["outside", "path", "FILE.py:NAME"]),
        ("augment.transforms.2.padding=1", ["'2'", "0 to 1"]),
        ("augment.transforms.0.x=1", ["'x'", "augment.transforms.0 (PadCrop)", "padding, mode"]),
        ("normalize.std=1,2", ["normalize.std", "'1,2'", "3 values"]),
        ("backbone.head.scale=1", ["'scale'", "backbone.head (LinearHead)", "none"]),
        ("networks=3", ["networks", "'3'", "1, 2"]),
        ("..=1", ["''", "an experiment"]),
    ],
)
def test_a_wrong_override_is_refused_in_one_sentence(change, words):
    with pytest.raises(ConfigError) as caught:
        override(cifar10().experiment, change)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_none_cannot_be_filled_where_the_kind_is_in_doubt():
    with pytest.raises(ConfigError, match=r"augment.*first"):
        override(cifar10("augment=none").experiment, "augment.first=1")


def test_the_labels_of_a_record_cannot_be_overridden_by_text():
    experiment = replace(toy().experiment, noise=Recorded(given=torch.tensor([0, 1])))
    with pytest.raises(ConfigError, match=r"noise\.given.*'3'"):
        override(experiment, "noise.given=3")
    with pytest.raises(ConfigError, match="'digest'"):
        override(experiment, "noise.digest=x")


def test_overrides_may_come_in_any_order_and_are_recorded_in_one_that_works():
    call = cifar10("epochs=0.5", "averaging=0.9", "schedule.warmup=0.1")
    assert (call.experiment.epochs, call.experiment.schedule.warmup) == (0.5, 0.1)
    assert call.origin["overrides"] == ["averaging=0.9", "schedule.warmup=0.1", "epochs=0.5"]
    more = apply_overrides(call, ["networks=2"])
    assert more.origin["overrides"] == [*call.origin["overrides"], "networks=2"]
    assert from_origin(more.origin) == more


def test_the_first_override_that_stays_impossible_is_named():
    with pytest.raises(ConfigError, match=r"warmup.*1\.0"):
        cifar10("epochs=0.5", "seed=x", "seed.y=1")
    with pytest.raises(ConfigError, match=r"^seed"):
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
    ("change", "words"),
    [
        ({"recipe": "os"}, ["recipe", "'os'"]),
        ({"recipe": "/tmp/x.py"}, ["recipe", "'/tmp/x.py'"]),
        ({"arguments": ["seed=1"]}, ["arguments", "['seed=1']"]),
        ({"arguments": {"seed=1": "2"}}, ["arguments", "{'seed=1': '2'}"]),
        ({"overrides": "seed=1"}, ["overrides", "'seed=1'"]),
        ({"overrides": ["seed"]}, ["'seed'", "key=value"]),
        ({"source": OWN, "sha256": "0" * 64}, ["'toy'", "sha256"]),
        ({"source": OWN}, ["'toy'", "sha256"]),
        ({"files": {"a.py": "x = 1"}}, ["'a.py'", "sha256"]),
        ({"files": {"a.py": {"source": "x = 1", "sha256": "0"}}}, ["'a.py'", "sha256"]),
    ],
)
def test_a_damaged_record_is_refused_in_one_sentence(change, words):
    with pytest.raises(ConfigError) as caught:
        from_origin({**toy().origin, **change})
    assert [word for word in words if word not in str(caught.value)] == []


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
    with pytest.raises(ConfigError, match=r"frozen dataclass|numbers"):
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


def test_two_views_are_overridden_by_name():
    experiment = call_recipe("cifar10", ["path=/data", "method=gjs"]).experiment
    changed = override(experiment, "augment.second.0.padding=0")
    assert isinstance(changed.augment, Views)
    assert (changed.augment.first[0].padding, changed.augment.second[0].padding) == (4, 0)


JUNK = [
    *words_of("none None nan inf -1 0 1 2 1e9 1e999 -1e-9 0x1F 1_000 true false auto a,b 1,2,3"),
    *words_of("(1,) () , ../.. ~ ~x / é \udcff \0 = . __class__ __import__('os') {} [] ٣ 1. .5 +3"),
    *("", " ", "9" * 30, "x" * 300, "a.py:B", "a.py:B(c=1)"),
]
REQUIRED = {name: ["path=/data"] for name in NAMES if name != "dataset"} | {"toy": [], "digits": []}
ARGUMENTS = words_of(
    "k alpha noise seed epochs kind method size hidden weights labels pair start protocol "
    "labeled hyper data backbone"
)
UNSET = words_of("mixup.alpha objective.bank.size objective.bank.kind outside.path noise.mapping")


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


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_words_and_records_give_an_experiment_or_a_config_error(count, own):
    draw = random.Random(count)
    calls = [call_recipe(name, words) for name, words in REQUIRED.items()] + [
        call_recipe(own, ["number=1"])
    ]
    calls.append(call_recipe("cifar10", ["path=/data", "method=gjs", "kind=asymmetric"]))
    accepted = dict.fromkeys(("arguments", "overrides", "records"), 0)
    for _ in range(count):
        name = draw.choice([*REQUIRED, *REQUIRED, own, mutated(draw.choice(NAMES), draw)])
        words = [
            *REQUIRED.get(name, ["number=1"]),
            *(a_word(ARGUMENTS, draw) for _ in range(draw.randint(0, 2))),
        ]
        accepted["arguments"] += attempt(call_recipe, name, words)
        call = draw.choice(calls)
        fields = [*dotted(to_tree(call.experiment)), *UNSET]
        changes = [a_word(fields, draw) for _ in range(draw.randint(1, 2))]
        accepted["overrides"] += attempt(apply_overrides, call, changes)
        record = {
            **call.origin,
            "overrides": ["seed=3", "objective.temperature=1"][: draw.randint(0, 2)],
        }
        accepted["records"] += attempt(from_origin, a_node(record, draw))
    assert all(count / 50 < number < count * 0.9 for number in accepted.values()), accepted


# What follows from an argument


def changed(recipe, arguments, *overrides):
    return apply_overrides(call_recipe(recipe, arguments), overrides)


def test_an_override_of_an_argument_is_noted_with_what_the_argument_would_change():
    (note,) = left_behind(changed("folder", ["path=photos"], "epochs=10"))
    assert note.endswith("objective.start_epoch: 2, not 8; schedule.warmup: 1.0, not 3.0")
    (note,) = left_behind(changed("toy", ["noise=0.2"], "objective.k=3", "seed=4"))
    assert note.endswith(
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
def test_an_override_with_no_further_effect_is_not_noted(overrides):
    assert left_behind(changed("folder", ["path=photos"], *overrides)) == []
