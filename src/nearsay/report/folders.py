"""Run folders as values: what a finished run says of itself, checked once when it is read."""

import json
import math
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from nearsay import config
from nearsay.batch import Labels, Predictions
from nearsay.files import load_sealed
from nearsay.metrics import aligned, confidence
from nearsay.noise import Realized, describe, fingerprint
from nearsay.training.progress import plain

CURE = "train the run again, or leave it out"


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedRun:
    """What a report needs of a run; Any is the type of JSON."""

    path: Path
    recipe: str
    arguments: dict[str, str]
    overrides: tuple[str, ...]
    settings: dict[str, Any]  # every choice, as a tree
    seed: int
    log: tuple[dict[str, float], ...]  # one entry an evaluation, finite numbers only
    result: dict[str, Any]
    labels: Labels  # of the n examples that were trained on
    trust: Tensor  # (n,) confidence in the given label, NaN where there is none
    noise: Realized
    num_held_out: int = (
        0  # training examples kept for validation; 0 if the data brings its own, or none
    )
    learned: str = ""  # the fingerprint of all labels, those that were held out too

    def number(self, *names: str) -> float | None:
        """A finite number of the result by its path of names, None where there is none."""
        value: Any = self.result
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return _finite(value)

    def relabeled(self) -> str | None:
        """The labels in place of those of the data: their file, in one spelling, and what it held; None without.

        Who cleans again writes other labels into the same file. Of few labels (`labeled`) each seed hides others.
        """
        file = self.settings.get("relabeled")
        if not isinstance(file, str):
            return None
        return f"{os.path.realpath(file)} {self.learned if self.settings.get('labeled', 1) == 1 else ''}"

    def is_wrong(self) -> Tensor | None:
        """(n,) whether the given label is not the true class; None if the truth is unknown."""
        return None if self.labels.clean is None else self.labels.given != self.labels.clean

    def method(self) -> str:
        """The method by its argument; where it was left to the recipe, by the kind of the objective.

        What every recipe takes of itself is called as by method=, since the same run may have been asked for so.
        """
        objective = self.settings.get("objective")
        kind = objective.get("kind") if isinstance(objective, dict) else None
        return self.arguments.get("method") or {"NCR": "ncr"}.get(
            str(kind), str(kind or self.recipe)
        )

    def data(self) -> str:
        """The name of the data set."""
        tree = self.settings.get("data")
        return str(tree.get("kind", self.recipe)) if isinstance(tree, dict) else self.recipe


def read_run(path: Path) -> FinishedRun:
    """Read a finished run folder; ValueError names the file that is missing or odd."""
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder; give run folders, as `nearsay train` writes them"
        )
    result = _read_object(path / "result.json")
    if result.get("finished") is not True:
        raise ValueError(
            f"{path / 'result.json'} is not of a finished run; train it to its end, or leave it out"
        )
    if not isinstance(result.get("seed"), int):
        raise ValueError(
            f"{path / 'result.json'} has the seed {result.get('seed')!r}, no whole number; {CURE}"
        )
    origin = config.current_record(_read_object(path / "experiment.json"))
    arguments, overrides, settings = (
        origin.get(name) for name in ("arguments", "overrides", "experiment")
    )
    if (
        not isinstance(arguments, dict)
        or not isinstance(overrides, list)
        or not isinstance(settings, dict)
    ):
        raise ValueError(
            f"{path / 'experiment.json'} does not hold arguments, overrides and experiment; {CURE}"
        )
    labels, trust, num_held_out, learned = _read_trust(path)
    return FinishedRun(
        path=path,
        recipe=str(origin.get("recipe", "unknown recipe")),
        arguments={key: str(value) for key, value in arguments.items()},
        overrides=tuple(map(str, overrides)),
        settings=settings,
        seed=result["seed"],
        log=_read_log(path / "log.jsonl"),
        result=result,
        labels=labels,
        trust=trust,
        noise=describe(labels),
        num_held_out=num_held_out,
        learned=learned,
    )


def each_once(paths: Iterable[Path]) -> list[Path]:
    """The folders in their order, each once, however often and in whatever words it is named."""
    found: dict[Path, Path] = {}
    for path in paths:
        found.setdefault(path.resolve(), path)
    return list(found.values())


def _read_object(path: Path) -> dict[str, Any]:
    value = _parse(_read_text(path), path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; {CURE}")
    return value


def _read_log(path: Path) -> tuple[dict[str, float], ...]:
    entries = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        entry = _parse(line, path, f"line {number} of ")
        if not isinstance(entry, dict) or _finite(entry.get("epoch")) is None:
            raise ValueError(f"line {number} of {path} says of no epoch what it is; {CURE}")
        entries.append(
            {key: finite for key, value in entry.items() if (finite := _finite(value)) is not None}
        )
    if not entries:
        raise ValueError(f"{path} has no line; {CURE}")
    return tuple(sorted(entries, key=lambda entry: entry["epoch"]))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; train the run to its end, or leave it out") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {CURE}") from error


def _parse(text: str, path: Path, where: str = "") -> Any:
    try:
        return _cleaned(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}{path} cannot be read as JSON ({error}); {CURE}") from error


def _cleaned(value: Any) -> Any:
    """The same JSON with text that can be shown."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    if isinstance(value, dict):
        return {plain(key): _cleaned(each) for key, each in value.items()}
    return value


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read_trust(path: Path) -> tuple[Labels, Tensor, int, str]:
    """Labels of the examples trained on, how likely the network finds each, how many others were held out, and a
    fingerprint of the labels of all.
    """
    labels, train, num_held_out = _read_labels(path / "labels.npz")
    file = path / "predictions" / "train.safetensors"
    try:
        tensors = load_sealed(
            file, ("logits", "indices")
        )  # features may be large and are not needed
        logits, indices = tensors["logits"], tensors["indices"]
        is_trained = torch.isin(indices, train)
        order = indices[is_trained].argsort()
        logits, indices = logits[is_trained][order], indices[is_trained][order]
        seen = aligned(labels, Predictions(logits, logits, indices))
        if len(labels.classes) != logits.shape[1]:
            raise ValueError(
                f"{logits.shape[1]} columns of logits for {len(labels.classes)} classes"
            )
        return seen, confidence(logits, seen.given), num_held_out, fingerprint(labels)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing; train the run to its end, or leave it out") from None
    except (OSError, SafetensorError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"{file} cannot be used ({error}); {CURE}") from error


def _read_labels(path: Path) -> tuple[Labels, Tensor, int]:
    """All labels, the numbers of the examples that were trained on, and how many were held out."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            given, clean = (
                torch.from_numpy(arrays[name]) if name in arrays else None
                for name in ("given", "clean")
            )
            classes = tuple(plain(str(name)) for name in arrays["classes"].reshape(-1))
            train = torch.from_numpy(arrays["train"]) if "train" in arrays else None
            num_held_out = arrays["validation"].size if "validation" in arrays else 0
        if given is None:
            raise ValueError("it holds no given labels")
        labels = Labels(given.long(), None if clean is None else clean.long(), classes)
        return labels, torch.arange(len(given)) if train is None else train.long(), num_held_out
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; train the run to its end, or leave it out") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        reason = (
            "it is damaged" if "unsafely" in str(error) else error
        )  # which is no advice to give
        raise ValueError(f"{path} cannot be used ({reason}); {CURE}") from error
