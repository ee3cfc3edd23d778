"""Objects of a user's own file: FILE.py:NAME, recorded with every local file that it imports."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nearsay.batch import Batch, Outputs
from nearsay.config import (
    ConfigError,
    apply_overrides,
    call_recipe,
    call_source,
    command_again,
    default_folder,
    differences,
    from_origin,
    left_behind,
    to_tree,
)
from nearsay.losses import NCR, CrossEntropy
from nearsay.losses.base import as_objective
from nearsay.training.run_folder import read_experiment
from nearsay.transforms import Mixup

LOSS = """
from dataclasses import dataclass
from helpers import reverse

@dataclass(frozen=True, kw_only=True)
class SCE:
    q: float = 0.5
    names: tuple[str, ...] = ()

    def __call__(self, logits, targets):
        p = logits.softmax(dim=1)
        return -(targets * p.log()).sum(dim=1) + self.q * reverse(p, targets)

def plain(logits, targets):
    return -(targets * logits.log_softmax(dim=1)).sum(dim=1)

class Loose:
    def __call__(self, logits, targets):
        return plain(logits, targets)

usual = SCE(q=0.25)
"""
HELPERS = """
def reverse(p, targets):
    from parts.four import FOUR
    return FOUR * (p * (1 - targets)).sum(dim=1)
"""
DATA = """
import math
from dataclasses import dataclass
import torch
from nearsay.batch import Labels, Split

@dataclass(frozen=True, kw_only=True)
class Stripes:
    size: int = 8

    def open(self, split):
        labels = torch.arange(40) % 2
        images = torch.zeros(40, 3, self.size, self.size, dtype=torch.uint8)
        images[labels == 0, :, ::2] = 200
        return Split(images, Labels(given=labels, clean=labels.clone(), classes=("a", "b")))

@dataclass(frozen=True, kw_only=True)
class Known(Stripes):
    def describe(self):
        from nearsay.batch import Files
        return type("Info", (), {"shape": (math.prod([3, self.size]),)})

    def open(self, split):
        raise OSError("not here")
"""
NET = """
from dataclasses import dataclass
from nearsay.models import MLP

@dataclass(frozen=True, kw_only=True)
class Tiny:
    width: int = 4

    def build(self, num_classes, *, num_inputs, seed=0):
        return MLP(hidden=(self.width,)).build(num_classes, num_inputs=num_inputs, seed=seed)

@dataclass(frozen=True, kw_only=True)
class Flips:
    rate: float = 0.5

    def __call__(self, labels, inputs=None):
        return labels

@dataclass(frozen=True, kw_only=True)
class Still:
    num_draws: int = 0

    def apply(self, images, draws):
        return images
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory with files of a user."""
    folder = tmp_path / "home"
    (folder / "parts").mkdir(parents=True)
    for name, text in (
        ("sce.py", LOSS),
        ("helpers.py", HELPERS),
        ("parts/four.py", "from .two import TWO\nFOUR = 2 * TWO\n"),
        ("parts/two.py", "TWO = 2\n"),
        ("unused.py", "raise SystemExit\n"),
        ("my_data.py", DATA),
        ("my_net.py", NET),
    ):
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def toy(*words, overrides=()):
    return apply_overrides(call_recipe("toy", words), overrides)


def loss_of(objective):
    """What an objective makes of two rows."""
    logits = torch.tensor([[2.0, 1.0], [0.0, 0.5]])
    batch = Batch(inputs=logits, targets=torch.eye(2), indices=torch.arange(2))
    outputs = Outputs(logits, logits)
    return objective(outputs, batch, torch.tensor(0.0), {}, objective.phase(0.0, {})).total.item()


def expected(q):
    p = torch.tensor([[2.0, 1.0], [0.0, 0.5]]).softmax(dim=1)
    right = p.diag()
    return (-right.log() + q * 4 * (1 - right)).mean().item()


def test_a_class_a_function_and_an_instance_of_a_file_are_methods(home):
    assert loss_of(toy("method=sce.py:SCE").experiment.objective) == pytest.approx(expected(0.5))
    for text, q in (("SCE(q=2.0)", 2), ("plain", 0), ("usual", 0.25), ("SCE()", 0.5)):
        objective = toy(overrides=[f"objective=sce.py:{text}"]).experiment.objective
        assert loss_of(objective) == pytest.approx(expected(q)), text


def test_with_a_method_of_the_user_the_rest_of_the_recipe_stays(home):
    usual, own = toy("method=standard").experiment, toy("method=sce.py:SCE").experiment
    changes = differences(to_tree(own), to_tree(usual))
    assert changes == ['objective: "LossFunction", not "CrossEntropy"']
    experiment = toy(
        "method=ncr", overrides=["objective.base=sce.py:SCE(q=1.0)", "mixup.alpha=1"]
    ).experiment
    assert isinstance(experiment.objective, NCR)
    assert loss_of(experiment.objective.base) == pytest.approx(expected(1))
    assert experiment.mixup == Mixup(alpha=1.0)
    assert toy("method=elr+", overrides=["objective=sce.py:SCE"]).experiment.networks == 2
    call = toy("method=sce.py:SCE", overrides=["objective.function.q=0.75", "labeled=0.5"])
    assert loss_of(call.experiment.objective) == pytest.approx(expected(0.75))
    assert from_origin(call.origin) == call
    command = command_again(call.origin, labels_file=Path("labels.npz"), out=Path("again"))
    assert f"method={home}/sce.py:SCE" in command
    assert "labeled=0.5" not in command


def test_data_network_and_noise_of_a_file_take_the_place_of_those_of_a_recipe(home):
    words = ["data=my_data.py:Stripes", "backbone=my_net.py:Tiny(width=3)"]
    call = call_recipe("cifar10", [*words, "noise=my_net.py:Flips", "seed=3"])
    assert from_origin(call.origin) == call
    assert left_behind(call) == []
    experiment = call.experiment
    assert (experiment.data.size, experiment.backbone.width, experiment.noise.rate) == (8, 3, 0.5)
    assert experiment.seed == 3
    assert call_recipe("folder", ["path=x", words[1]]).experiment.backbone.width == 3
    assert call_recipe("clothing1m", ["path=x", "noise.rate=1"][:1]).experiment.noise is None
    experiment = toy(overrides=["noise=my_net.py:Flips(rate=0.25)"]).experiment
    assert experiment.noise.rate == 0.25
    changes = ["augment.transforms.1=my_net.py:Still", "normalize=my_net.py:Still"]
    call = apply_overrides(call, changes)
    kept, still = call.experiment.augment.transforms
    assert (type(kept).__name__, still) == ("PadCrop", call.experiment.normalize)
    assert from_origin(call.origin) == call


def test_every_file_that_is_imported_is_recorded_with_its_hash_and_no_other(home):
    origin = toy("method=sce.py:SCE", overrides=["data=my_data.py:Stripes"]).origin
    assert origin["arguments"] == {"method": "sce.py:SCE"}
    assert origin["overrides"] == ["data=my_data.py:Stripes"]
    names = ["helpers.py", "my_data.py", "parts/four.py", "parts/two.py", "sce.py"]
    assert list(origin["files"]) == names
    assert all(origin["files"][name]["source"] == Path(name).read_text() for name in names)
    assert origin["folder"] == str(home)
    assert "files" not in toy("method=standard").origin


def test_a_record_is_called_again_without_the_files_and_beside_others(home, tmp_path, monkeypatch):
    call = toy("method=sce.py:SCE(q=2.0)", "seed=3", overrides=["data=my_data.py:Stripes"])
    record = json.loads(json.dumps({**call.origin, "experiment": to_tree(call.experiment)}))
    shutil.rmtree(home)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("sce.py", "helpers.py", "my_data.py", "torch.py"):
        (elsewhere / name).write_text("raise SystemExit('the wrong file')")
    monkeypatch.chdir(elsewhere)
    again = from_origin(record)
    assert to_tree(again.experiment) == record["experiment"]
    assert again.origin == call.origin
    assert loss_of(again.experiment.objective) == pytest.approx(expected(2))
    # The functions that import something only when they are called do so, too.
    code = """
import json, sys
from nearsay.config import from_origin, to_tree
record = json.load(sys.stdin)
again = from_origin(record)
assert to_tree(again.experiment) == record["experiment"]
logits = __import__("torch").zeros(2, 2)
print(again.experiment.objective.function(logits, logits + 0.5)[0].item())
"""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=json.dumps(record),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(to_tree.__code__.co_filename).parents[2])},
    )
    assert float(ran.stdout) == pytest.approx(0.6931 + 2 * 4 * 0.5, abs=1e-3)


def test_files_of_several_folders_are_recorded_by_their_place(home, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sce.py").write_text(LOSS.replace("self.q *", "3 * self.q *"))
    (other / "helpers.py").write_text("def reverse(p, targets):\n    return p.sum(dim=1) * 0\n")
    call = toy("method=sce.py:SCE", overrides=[f"objective={other}/sce.py:SCE(q=1.0)"])
    assert call.origin["overrides"] == ["objective=../other/sce.py:SCE(q=1.0)"]
    shutil.rmtree(other)
    again = from_origin(call.origin)
    assert again == call
    assert loss_of(again.experiment.objective) == pytest.approx(expected(0))
    again = from_origin({**call.origin, "overrides": []})
    assert loss_of(again.experiment.objective) == pytest.approx(expected(0.5))


def test_a_file_is_found_from_any_folder_and_home(home, tmp_path, monkeypatch):
    wanted = toy("method=sce.py:SCE").origin
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("home/sce.py:SCE", f"{home}/sce.py:SCE", "~/home/sce.py:SCE"):
        assert toy(f"method={text}").origin == wanted


def test_the_same_class_is_loaded_once_and_another_content_is_another_class(home):
    first, second = (toy("method=sce.py:SCE").experiment for _ in range(2))
    assert first == second
    (home / "parts" / "two.py").write_text("TWO = 3\n")
    third = toy("method=sce.py:SCE").experiment
    assert third != first
    [change] = differences(to_tree(third), to_tree(first))
    assert change.startswith('objective.function.code: "sce.py ')
    assert loss_of(third.objective) != loss_of(first.objective)
    folders = {
        default_folder(toy("method=sce.py:SCE").origin),
        default_folder(from_origin(toy("method=sce.py:SCE").origin).origin),
    }
    (home / "parts" / "two.py").write_text("TWO = 2\n")
    folders.add(default_folder(toy("method=sce.py:SCE").origin))
    assert len(folders) == 2


def test_two_classes_of_one_name_in_two_files_differ(home):
    shutil.copy(home / "sce.py", home / "other.py")
    (home / "other.py").write_text(LOSS + "\n# another file\n")
    trees = [to_tree(toy(f"method={name}.py:SCE").experiment) for name in ("sce", "other")]
    assert differences(*trees)
    trees = [to_tree(toy(f"objective=sce.py:{name}").experiment) for name in ("plain", "SCE")]
    assert differences(*trees)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("method=nowhere.py:SCE", ["'nowhere.py'"]),
        ("method=sce.py:SCEE", ["sce.py", "SCEE", "mean SCE?"]),
        ("method=sce.py:SCE(p=1)", ["sce.py:SCE", "'p'"]),
        ("method=sce.py:SCE(0.5)", ["SCE", "'(0.5)'", "keyword"]),
        ("method=sce.py:SCE(q=open('x'))", ["SCE", "literals"]),
        ("method=sce.py:SCE(**{'q': 1})", ["SCE", "keyword"]),
        ("method=sce.py:plain(q=1)", ["plain", "function"]),
        ("method=sce.py:reverse.x", ["method", "'sce.py:reverse.x'", "FILE.py:NAME"]),
        ("method=my_data.py:Stripes", ["method", "Stripes"]),
        ("method=sce.py:Loose", ["Loose", "frozen dataclass"]),
        ("backbone=sce.py:plain", ["backbone", "Backbone (build)", "function"]),
        ("optimizer=sce.py:SCE", ["optimizer", "SGD or AdamW", "SCE"]),
        ("method=broken.py:X", ["'broken.py'", "line 3"]),
        ("method=raises.py:X", ["raises.py", "ZeroDivisionError in line 2 of raises.py"]),
        ("method=exits.py:X", ["exits.py", "SystemExit"]),
        ("method=strict.py:Strict", ["strict.py:Strict", "line 7", "too small"]),
    ],
)
def test_a_wrong_object_is_refused_in_one_sentence(home, word, parts):
    (home / "broken.py").write_text("x = 1\n\ndef f(:\n")
    (home / "raises.py").write_text("x = 1\ny = 1 / 0\n")
    (home / "exits.py").write_text("import sys\nsys.exit('no')\n")
    (home / "strict.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Strict:\n"
        "    x: int = 0\n    def __post_init__(self):\n        raise ValueError('too small')\n"
    )
    with pytest.raises(ConfigError) as caught:
        toy(word)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "sentence"), [("sce.py", "sha256"), ("helpers.py", "sha256"), (None, "'sce.py'")]
)
def test_a_record_that_was_changed_is_refused(home, path, sentence):
    origin = json.loads(json.dumps(toy("method=sce.py:SCE").origin))
    if path is None:
        del origin["files"]["sce.py"]
    else:
        origin["files"][path]["source"] += "\nimport os\n"
    with pytest.raises(ConfigError, match=sentence):
        from_origin(origin)


def test_nothing_of_the_folder_hides_a_module_of_python_or_nearsay(home):
    for name in ("math", "dataclasses", "nearsay"):
        (home / f"{name}.py").write_text("raise SystemExit('hidden')")
    before = list(sys.path)
    call = toy("data=my_data.py:Stripes")
    assert list(call.origin["files"]) == ["my_data.py"]
    assert (sys.path, "my_data" in sys.modules) == (before, False)


@pytest.mark.parametrize(
    "line",
    [
        "from parts.four import FOUR as four",
        "import parts.four; four = parts.four.FOUR",
        "import math, parts.four as module; four = math.floor(module.FOUR)",
        "from .parts import four as module; four = module.FOUR",
        "import box; four = box.FOUR",
        "from box import inner; four = inner.FOUR",
        "from box.inner import *; four = FOUR",
        "import circle; four = circle.FOUR",
        "try:\n    import missing\nexcept ImportError:\n    from parts.four import FOUR as four",
    ],
)
def test_local_files_may_be_imported_in_every_way_of_python(home, line):
    (home / "box").mkdir()
    (home / "box" / "__init__.py").write_text("from .inner import FOUR\n")
    (home / "box" / "inner.py").write_text("from parts.four import *\n")
    (home / "circle.py").write_text("FOUR = 4\nimport user\n")
    (home / "user.py").write_text(
        f"{line}\nfrom dataclasses import dataclass\nassert four == 4\n"
        "@dataclass(frozen=True)\nclass Tiny:\n    def build(self): pass\n"
    )
    call = toy("backbone=user.py:Tiny")
    for path in ("user.py", "circle.py", "box", "parts"):
        target = home / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    assert from_origin(call.origin) == call


def test_an_own_file_may_have_a_name_that_is_no_identifier(home):
    (home / "my-loss.v2.py").write_text(LOSS)
    call = toy("method=my-loss.v2.py:SCE")
    assert to_tree(call.experiment)["objective"]["function"]["code"].startswith("my-loss.v2.py ")
    assert from_origin(call.origin) == call


def test_an_own_file_finds_data_beside_itself(home):
    (home / "rate.txt").write_text("0.125")
    (home / "beside.py").write_text(
        NET.replace("rate: float = 0.5", "rate: float = float(FILE.read_text())").replace(
            "\nfrom dataclasses",
            "from pathlib import Path\nFILE = Path(__file__).with_name('rate.txt')\n"
            "from dataclasses",
        )
    )
    call = toy(overrides=["noise=beside.py:Flips"])
    assert call.experiment.noise.rate == 0.125
    assert from_origin(call.origin) == call


def test_a_recipe_of_the_user_may_import_files_beside_it(home):
    (home / "mine.py").write_text(
        "from nearsay import recipes\nfrom sce import SCE\n"
        "def recipe(q: float = 1.0, epochs: float = 3.0):\n"
        "    return recipes.toy(method=SCE(q=q), epochs=epochs)\n"
    )
    call = apply_overrides(call_recipe("mine.py", ["q=2"]), ["backbone=my_net.py:Tiny"])
    assert loss_of(call.experiment.objective) == pytest.approx(expected(2))
    assert call.origin["recipe"] == "mine.py"
    names = ["helpers.py", "my_net.py", "parts/four.py", "parts/two.py", "sce.py"]
    assert list(call.origin["files"]) == names
    shutil.rmtree(home)
    assert from_origin(call.origin) == call
    assert left_behind(call) == []


def test_a_run_can_be_read_and_resumed_from_its_record(home, tmp_path, monkeypatch):
    from nearsay.training.loop import train  # noqa: PLC0415

    call = apply_overrides(
        call_recipe("toy", ["method=sce.py:SCE", "epochs=1"]),
        ["data.num_train=100", "data.num_test=50", "batch_size=50", "machine.device=cpu"],
    )
    result = train(call.experiment, tmp_path / "run", origin=call.origin)
    (home / "helpers.py").write_text(HELPERS.replace("FOUR *", "2 * FOUR *"))
    changed = apply_overrides(
        call_recipe("toy", ["method=sce.py:SCE", "epochs=1"]), call.origin["overrides"]
    )
    with pytest.raises(ConfigError, match=r"objective\.function\.code.*sce\.py"):
        train(changed.experiment, tmp_path / "run", origin=changed.origin)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(home)
    assert read_experiment(tmp_path / "run") == call.experiment
    again = from_origin(json.loads((tmp_path / "run" / "experiment.json").read_text()))
    assert train(again.experiment, tmp_path / "run", origin=again.origin) == result


# Sources of data, and values of Python.


@pytest.mark.parametrize(
    ("source", "recipe", "path"),
    [
        ("photos", "folder", "photos"),
        ("labels.csv", "manifest", "labels.csv"),
        ("labels.parquet", "manifest", "labels.parquet"),
        ("features.npz", "embeddings", "features.npz"),
        ("features.npy", "embeddings", "features.npy"),
    ],
)
def test_data_is_trained_by_the_recipe_of_its_kind(home, source, recipe, path):
    (home / "photos").mkdir()
    if not (home / source).exists():
        (home / source).write_text("")
    call = call_recipe(source, ["method=mixup"])
    assert call == call_recipe(recipe, ["method=mixup", f"path={path}"])
    assert call_source(source, {"method": "mixup"}) == call
    assert call_source(home / source, {"method": "mixup"}) == call


def test_a_file_of_another_kind_is_refused_and_so_is_its_path_twice(home):
    (home / "notes.txt").write_text("")
    (home / "a.csv").write_text("")
    with pytest.raises(ConfigError, match=r"notes\.txt.*\.csv"):
        call_recipe("notes.txt", [])
    with pytest.raises(ConfigError, match="path"):
        call_recipe("a.csv", ["path=b.csv"])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("Stripes", "3,8,8"), ("Stripes(size=32)", "3,32,32"), ("Known(size=5)", "15")],
)
def test_an_own_data_set_is_a_source_and_its_shape_is_recorded(home, name, shape, monkeypatch):
    call = call_recipe(f"my_data.py:{name}", ["method=ncr", "epochs=2"])
    arguments = {"data": f"my_data.py:{name}", "method": "ncr", "epochs": "2", "shape": shape}
    assert call.origin["recipe"] == "dataset"
    assert call.origin["arguments"] == arguments
    # Another time the data is not opened: the shape is known.
    monkeypatch.setattr(type(call.experiment.data), "open", None)
    assert from_origin(call.origin) == call


def test_an_own_data_set_that_cannot_be_opened_is_refused_with_the_reason(home):
    (home / "my_data.py").write_text(DATA.replace("labels = torch.arange", "1 / 0; torch.arange"))
    with pytest.raises(ConfigError, match=r"data.*ZeroDivisionError in line \d+ of my_data\.py"):
        call_recipe("my_data.py:Stripes", [])


def test_values_of_python_are_recorded_as_words(home):
    values = {"method": "ncr", "noise": 0.25, "epochs": 3, "seed": 1, "objective.k": 7}
    typed = apply_overrides(
        call_recipe("toy", ["method=ncr", "noise=0.25", "epochs=3", "seed=1"]), ["objective.k=7"]
    )
    assert call_source("toy", values) == typed
    call = call_source("embeddings", {"path": Path("f.npz"), "hidden": (64, 32), "labels": None})
    assert call == call_recipe("embeddings", ["path=f.npz", "hidden=64,32", "labels=none"])
    call = call_source("mini_imagenet", {"path": "x", "partial": True})
    assert call.experiment.data.partial is True
    assert call_source("toy", {"method": "sce.py:SCE"}) == toy("method=sce.py:SCE")


def test_fields_of_an_experiment_are_overrides_of_every_recipe():
    call = call_source("toy", {"batch_size": 32, "labeled": 0.5})
    assert call.origin["arguments"] == {}
    assert call.origin["overrides"] == ["batch_size=32", "labeled=0.5"]
    assert call == call_recipe("toy", ["batch_size=32", "labeled=0.5"])


def test_objects_of_python_train_but_make_no_recipe_to_call_again(home):
    call = call_source("toy", {"method": CrossEntropy(smoothing=0.5), "noise": 0.1})
    assert call.experiment == toy("method=label-smoothing", "noise=0.1").experiment
    assert "recipe" not in call.origin
    assert call.origin["arguments"] == {"noise": "0.1"}
    changed = apply_overrides(call, ["epochs=2", "objective.smoothing=0.25"])
    assert changed.experiment.objective == CrossEntropy(smoothing=0.25)
    assert left_behind(changed) == []
    json.dumps(changed.origin)

    def squares(logits, targets):
        return ((logits - targets) ** 2).sum(dim=1)

    assert call_source("toy", {"method": squares}).experiment.objective == as_objective(squares)
    data = call.experiment.data
    assert call_source(data, {}).experiment.data == data
    assert call_source(data, {}).origin["arguments"]["shape"] == "32"


def test_objects_that_text_can_describe_are_recorded_as_overrides():
    from nearsay.experiment import Machine  # noqa: PLC0415
    from nearsay.optim import SGD, AdamW  # noqa: PLC0415

    call = call_source("toy", {"machine": Machine(device="cpu"), "optimizer": AdamW(lr=0.5)})
    assert from_origin(call.origin) == call
    assert call.experiment.optimizer == AdamW(lr=0.5)
    assert "machine.device=cpu" in call.origin["overrides"]
    call = call_source("toy", {"optimizer": SGD()})
    assert call.experiment.optimizer == SGD()
    assert "recipe" not in call.origin


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"method": 3}, "method"),
        ({"method": object()}, "objective|object"),
        ({"data": CrossEntropy()}, "data"),
        ({"machine": CrossEntropy()}, "machine"),
        ({"thing": CrossEntropy()}, "thing"),
        ({"sede": 1}, "sede"),
    ],
)
def test_wrong_values_of_python_are_refused(arguments, field):
    with pytest.raises(ConfigError, match=field):
        call_source("toy", arguments)


def test_a_field_of_the_users_formula_is_found_from_the_objective(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("q.py").write_text(
        "from dataclasses import dataclass\n\n"
        "@dataclass(frozen=True)\n"
        "class Q:\n"
        "    q: float = 1.0\n\n"
        "    def __call__(self, logits, targets):\n"
        "        return self.q * logits.sum(dim=1)\n"
    )
    call = call_recipe("toy", ["method=q.py:Q"])
    with pytest.raises(ConfigError, match=r"Use objective\.function\.q=2"):
        apply_overrides(call, ["objective.q=2"])
    assert apply_overrides(call, ["objective.function.q=2"]).experiment.objective.function.q == 2


def test_a_source_that_is_no_data_set_is_refused_with_its_value():
    with pytest.raises(ConfigError, match=r"source .*3"):
        call_source(3, {})
