"""A run folder as it is found again: whose it is, what it holds, and what its networks say of other examples."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Conv2d, Module

from nearsay import config
from nearsay.batch import Files, Labels
from nearsay.data.loader import MARGIN, Inputs
from nearsay.errors import BAD_DATA, CANNOT_CREATE, RunError, one_line
from nearsay.experiment import Experiment
from nearsay.noise import fingerprint
from nearsay.sealed import load_sealed
from nearsay.training.checkpoints import Run, write_whole
from nearsay.training.predict import Pass, Predicted
from nearsay.training.splits import (
    Splits,
    digest_inputs,
    pack_labels,
    recorded_digest,
    recorded_rows,
    unpack_labels,
)

MADE_ANEW = "remove it and start the run again, which makes it anew from its last checkpoint"
_BEGINNING = (
    ".lock",
    "labels.npz",
    "tensorboard",
)  # what may be there before the experiment is written down
_NEEDED = (
    "experiment.json",
    "labels.npz",
    "log.jsonl",
    "model.safetensors",
    "predictions/train.safetensors",
)


_REMEMBERED: dict[Path, Experiment] = {}
"""Experiments of runs that were trained from Python, not by a recipe, by their folders."""


class Trained(NamedTuple):
    """What a run has learned."""

    networks: list[Module]  # in evaluation mode, on the CPU
    experiment: Experiment
    labels: Labels  # that were learned
    origin: Mapping[str, Any]  # as experiment.json has it

    @property
    def wants_images(self) -> bool:
        """Whether the networks take images, and not features."""
        return any(isinstance(each, Conv2d) for each in self.networks[0].modules())


class View(NamedTuple):
    """What the networks of a run have seen of images, and so what they must see of others."""

    height: int
    width: int
    margin: float  # of the shorter side of a file, that is kept of the middle

    def edge(self) -> int:
        """The size that files are to have; ValueError where they cannot have it."""
        if self.height != self.width:
            raise ValueError(
                f"images on disk become squares, but this run was trained on arrays of {self.height} × {self.width} "
                "pixels; give images of that shape as an array, from Python"
            )
        return self.height


def read_origin(folder: Path) -> Mapping[str, Any]:
    """What the experiment of a run was called by; RunError if the folder is none of a run."""
    path = folder / "experiment.json"
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError as error:
        cure = "give the folder that nearsay train has named"
        raise RunError(
            f"{folder} is no run folder, as it has no {path.name}; {cure}", BAD_DATA
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"{folder} is no run folder: {path.name} cannot be read ({error})", BAD_DATA
        ) from error
    current: dict[str, Any] = config.current_record(found)
    return current


def remember_experiment(folder: Path, experiment: Experiment) -> None:
    """Let `read_experiment` answer for a run that was trained from Python, in this process."""
    tree = read_origin(folder).get("experiment")
    trees = [_with_whole_paths(each) for each in (tree, config.to_tree(experiment))]
    if changed := config.substantial(config.differences(*trees), ()):
        raise RunError(f"{folder} holds another experiment: {changed[0]}.", BAD_DATA)
    _REMEMBERED[folder.resolve()] = experiment


def read_experiment(folder: Path) -> Experiment:
    """The experiment of a run that was started by a recipe; RunError if it was not."""
    origin = read_origin(folder)
    if "recipe" not in origin and folder.resolve() in _REMEMBERED:
        return _REMEMBERED[folder.resolve()]
    if "recipe" not in origin:
        raise RunError(
            f"{folder} was trained from an Experiment, not by a recipe. "
            "Use nearsay.load(folder, experiment=...) in Python.",
            BAD_DATA,
        )
    return config.from_origin(origin).experiment


def read_labels(folder: Path) -> Labels:
    """The labels that were learned in a run."""
    path = folder / "labels.npz"
    try:
        return unpack_labels(path.read_bytes())
    except FileNotFoundError as error:
        cure = "give the folder of a run, or start the run again, which writes them anew"
        raise RunError(f"{folder} has no labels in {path.name}; {cure}", BAD_DATA) from error
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: {error}", BAD_DATA) from error


def open_trained(folder: Path) -> Trained:
    """The networks of a finished run with their weights; RunError says what is missing."""
    origin, experiment = read_origin(folder), read_experiment(folder)
    labels = read_labels(folder)
    weights = _read_weights(folder / "model.safetensors")
    networks = []
    for number in range(experiment.networks):
        prefix = f"{number}." if experiment.networks > 1 else ""
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        network = experiment.backbone.build(
            len(labels.classes), num_inputs=_num_inputs(folder, origin)
        )
        try:
            network.load_state_dict(own)
        except RuntimeError as error:
            reason = one_line(error)
            raise RunError(
                f"the weights in {folder} do not fit its experiment: {reason}", BAD_DATA
            ) from error
        networks.append(network.eval())
    return Trained(networks, experiment, labels, origin)


def predict_run(
    folder: Path, inputs: Inputs, *, device: str = "auto", workers: int | None = None
) -> Predicted:
    """What the networks of a run say of other images or features."""
    trained = open_trained(folder)
    machine = replace(trained.experiment.machine, device=device)
    place = machine.find_device()
    _check_inputs(inputs, trained, _num_inputs(folder, trained.origin))
    view = find_view(trained.experiment, trained.origin) if isinstance(inputs, Files) else None
    return Pass(
        normalize=trained.experiment.normalize,
        size=trained.experiment.image_size if view is None else view.edge(),
        margin=MARGIN if view is None else view.margin,
        device=place,
        dtype=machine.find_dtype(place),
        workers=machine.workers if workers is None else workers,
        timeout=machine.timeout,
    ).over([network.to(place) for network in trained.networks], inputs)


def find_view(experiment: Experiment, origin: Mapping[str, Any]) -> View:
    """How a run looks at images: at whole arrays, or at the middle of files.

    Older runs have not written down which of the two they learned from; their data knows, if it is still there.
    """
    try:
        shape = (
            origin["image_shape"]
            if "image_shape" in origin
            else _array_shape(experiment.data.open("train").inputs)
        )
    except (ImportError, OSError, RuntimeError, ValueError):
        shape = None
    if shape is None:
        return View(experiment.image_size, experiment.image_size, MARGIN)
    is_shape = (
        isinstance(shape, list)
        and len(shape) == 2
        and all(type(each) is int and each > 0 for each in shape)
    )
    if not is_shape:
        raise RunError(
            f"experiment.json records image_shape as {shape!r}, not as height and width; train again in another folder",
            BAD_DATA,
        )
    height, width = shape
    return View(height, width, 1.0)


def check_same(run: Run, experiment: Experiment) -> None:
    """See that what ran in this folder before, if anything did, is what shall run now.

    A choice that only later versions have, and that is off, is none that was made otherwise.
    """
    path = run.path / "experiment.json"
    if not path.exists():
        foreign = sorted(each.name for each in run.path.iterdir() if each.name not in _BEGINNING)
        if foreign:
            raise RunError(
                f"{run.path} holds {foreign[0]!r} but no {path.name}, so it is not the folder of a run; choose another "
                "with --out",
                CANNOT_CREATE,
            )
        return
    try:
        before = config.current_record(json.loads(path.read_bytes()))["experiment"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path} cannot be read ({error}); choose another folder with --out", BAD_DATA
        ) from error
    trees = [_with_whole_paths(tree) for tree in (before, config.to_tree(experiment))]
    if changed := config.substantial(config.differences(*trees), ()):
        raise config.ConfigError(
            f"{run.path} holds another experiment ({'; '.join(changed[:5])}); choose another folder with --out"
        )


def _with_whole_paths(tree: Any) -> Any:
    """The tree of an experiment with its files in one spelling, however they were written; other JSON as it is."""
    if not isinstance(tree, dict):
        return tree
    files = {
        name: os.path.abspath(tree[name])
        for name in config.FILES
        if isinstance(tree.get(name), str)
    }
    return {**tree, **files}


def claim(
    run: Run, experiment: Experiment, splits: Splits, origin: Mapping[str, Any] | None
) -> list[str]:
    """Write down what runs here and on which labels, or see that the labels are those of before.

    Returns what the user should know: inputs may have been repaired since, and then the run goes on with those.
    """
    path = run.path / "labels.npz"
    if not path.exists():
        write_whole(path, pack_labels(splits, getattr(experiment.noise, "rate", None)))
    try:
        content = path.read_bytes()
        before, inputs = fingerprint(unpack_labels(content)), recorded_digest(content)
    except ValueError as error:
        raise RunError(f"{run.path}: {error}", BAD_DATA) from error
    if before != fingerprint(splits.labels):
        raise RunError(
            f"{path} holds other labels than this experiment makes now, so the data has changed since; restore it, or "
            "choose another folder with --out",
            BAD_DATA,
        )
    if not (run.path / "experiment.json").exists():
        seen = {
            "num_inputs": splits.example(experiment.image_size).shape[0],
            "image_shape": _array_shape(splits.inputs),
        }
        run.write_json(
            "experiment.json", {**(origin or {}), **seen, "experiment": config.to_tree(experiment)}
        )
    if inputs != digest_inputs(splits.inputs):
        return [
            f"the inputs are not those that {run.path} began with; the run goes on with what is there now"
        ]
    return []


def check_relabeled(run: Run, experiment: Experiment) -> None:
    """See that a finished run has learned the labels that the file of `relabeled` holds now, where that is still there.

    Who cleans again, after more decisions, would take the result on the labels before for that on the new ones.
    """
    if (
        experiment.relabeled is None or experiment.labeled != 1
    ):  # with few labels, most are hidden on purpose
        return
    try:
        now = recorded_rows(Path(experiment.relabeled).read_bytes(), "given")
    except (OSError, ValueError):
        return  # of a run that was moved or removed since: nothing says that it is other labels
    if now.tolist() != read_labels(run.path).given.tolist():
        raise RunError(
            f"{run.path} is finished and has learned other labels than relabeled={experiment.relabeled!r} holds now; "
            "choose another folder with --out",
            BAD_DATA,
        )


def is_whole(folder: Path) -> bool:
    """Whether all is there that other commands read; what is missing can be made again from the last checkpoint."""
    return all((folder / name).is_file() for name in _NEEDED)


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a run that needs nothing more, None if it does."""
    try:
        result: Any = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if (
        not isinstance(result, dict)
        or not result.get("finished")
        or not isinstance(result.get("labels"), dict)
    ):
        return None
    return result if _are_shares(result.get("accuracy")) else None


def _are_shares(accuracy: Any) -> bool:
    """Whether it tells numbers of every split, and nothing else."""
    if not isinstance(accuracy, dict) or not all(isinstance(of, dict) for of in accuracy.values()):
        return False
    values = [value for of in accuracy.values() for value in of.values()]
    return all(
        isinstance(each, int | float) and not isinstance(each, bool) and isfinite(each)
        for each in values
    )


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise RunError(
            f"{path.parent} has no {path.name}: the run is not finished; train it to the end",
            BAD_DATA,
        )
    try:
        return load_sealed(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read ({error}); {MADE_ANEW}", BAD_DATA) from error


def _num_inputs(folder: Path, origin: Mapping[str, Any]) -> int:
    """Channels of images, or features, as recorded: the weights alone do not tell which of them is the first."""
    recorded = origin.get("num_inputs")
    if isinstance(recorded, bool) or not isinstance(recorded, int) or recorded < 1:
        raise RunError(
            f"{folder / 'experiment.json'} records num_inputs as {recorded!r}, not as a number from 1; "
            "train again in another folder",
            BAD_DATA,
        )
    return recorded


def _array_shape(inputs: Inputs) -> list[int] | None:
    """Height and width of images that are arrays."""
    return list(inputs.shape[2:]) if isinstance(inputs, Tensor) and inputs.ndim == 4 else None


def _check_inputs(inputs: Inputs, trained: Trained, num_inputs: int) -> None:
    if isinstance(inputs, Files) or inputs.ndim == 4:
        if not trained.wants_images:
            raise ValueError(
                "images do not fit: this run was trained on features; give an array of them"
            )
        num_channels = 3 if isinstance(inputs, Files) else inputs.shape[1]
        if num_channels != num_inputs:
            told = f"this run was trained on images of {num_inputs}; give such images as an array, from Python"
            raise ValueError(f"images of {num_channels} channels do not fit: {told}")
    elif trained.wants_images:
        raise ValueError(
            f"features {tuple(inputs.shape)} do not fit: this run was trained on images; give those"
        )
    elif inputs.shape[1] != num_inputs:
        told = f"this run was trained on rows of {num_inputs}; give as many, made in the same way"
        raise ValueError(f"features {tuple(inputs.shape)} do not fit: {told}")
