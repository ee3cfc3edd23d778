"""Finished runs as values: read from their folders, grouped by seed and made ready to compare."""

import json
import math
import os
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from nearsay import config
from nearsay.batch import Labels, Predictions
from nearsay.files import load_sealed
from nearsay.metrics import aligned, confidence
from nearsay.noise import MeasuredNoise, fingerprint, measure_noise
from nearsay.training.progress import added_metrics, counted, plain

CURE = "Train the run again, or leave it out."
_UNFINISHED = "Train the run to its end, or leave it out."
OTHER_JUDGES = (
    "these runs were judged by different labels, which makes cleaned ones look better; "
    "nearsay evaluate with --data judges all runs by the same labels."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedRun:
    """What a report needs of a run; Any is the type of JSON."""

    path: Path
    recipe: str
    arguments: dict[str, str]
    overrides: tuple[str, ...]
    settings: dict[str, Any]  # the whole experiment, as a tree
    seed: int
    log: tuple[dict[str, float], ...]  # one entry per evaluation, only finite numbers
    result: dict[str, Any]
    labels: Labels  # of the n examples that were trained on
    trust: Tensor  # (n,) confidence in the given label, NaN where there is no label
    noise: MeasuredNoise
    num_held_out: int = 0  # training examples kept for validation
    label_hash: str = ""  # the fingerprint of all labels, with those of held-out examples

    def number(self, *names: str) -> float | None:
        """A finite number of the result by its path of names, or None."""
        value: Any = self.result
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return _finite(value)

    def metrics(self) -> list[tuple[str, ...]]:
        """The path in the result of every number that no other table shows, in their order."""
        names = [path for path in added_metrics(self.result) if self.number(*path) is not None]
        # A file of another program may hold anything here, so only numbers of a split count.
        for split, values in _items(self.result.get("metrics")):
            for name, value in _items(values):
                if _finite(value) is not None:
                    names.append(("metrics", split, name))
        return names

    def relabeled(self) -> str | None:
        """The file of labels that replaced those of the data, with the hash of its labels.

        The hash is part of it because a second cleaning may write other labels to the same file.
        With few labels (`labeled`) every seed hides other ones, so the hash is left out.
        """
        file = self.settings.get("labels_file")
        if not isinstance(file, str):
            return None
        label_hash = self.label_hash if self.settings.get("labeled", 1) == 1 else ""
        return f"{os.path.realpath(file)} {label_hash}"

    def is_wrong(self) -> Tensor | None:
        """(n,) whether the given label is not the true class; None if the truth is unknown."""
        return None if self.labels.clean is None else self.labels.given != self.labels.clean

    def method(self) -> str:
        """The method by its argument, or else by the kind of its objective.

        NCR is what recipes take by default, so it has the same name with and without method=.
        """
        objective = self.settings.get("objective")
        kind = objective.get("kind") if isinstance(objective, dict) else None
        default = "ncr" if kind == "NCR" else str(kind or self.recipe)
        return self.arguments.get("method") or default

    def data(self) -> str:
        """The name of the data set."""
        tree = self.settings.get("data")
        return str(tree.get("kind", self.recipe)) if isinstance(tree, dict) else self.recipe


class Spread(NamedTuple):
    """Mean and standard deviation (of a sample, so None for one number) of `num` numbers."""

    mean: float
    deviation: float | None
    num: int

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """Such as "95.1 ± 0.4"."""
        deviation = "" if self.deviation is None else f" ± {scale * self.deviation:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{deviation}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Runs of one experiment that differ only in their seed; a seed may have several runs."""

    name: str
    runs: tuple[FinishedRun, ...]  # by seed

    def by_seed(self) -> list[list[FinishedRun]]:
        """The runs of each seed: several if the same run was made again."""
        runs: dict[str, list[FinishedRun]] = {}
        for run in self.runs:
            runs.setdefault(_settings(run), []).append(run)
        return list(runs.values())

    @property
    def num_seeds(self) -> int:
        """How many runs there are without repetitions."""
        return len(self.by_seed())

    def numbers(self, *names: str) -> list[float]:
        """A number of the result for each seed that has it: the mean over repetitions."""
        means = []
        for runs in self.by_seed():
            of_seed = spread(run.number(*names) for run in runs)
            if of_seed is not None:
                means.append(of_seed.mean)
        return means

    def spread(self, *names: str) -> Spread | None:
        """Mean and deviation of a number of the result over seeds, None if no run has it."""
        return spread(self.numbers(*names))

    def first(self) -> FinishedRun:
        """A run to ask for what all of them share."""
        return self.runs[0]


class Comparison(NamedTuple):
    """Groups of runs, and the examples on which they are compared."""

    groups: tuple[Group, ...]
    split: str | None  # such as "test" or "validation", None if no run was evaluated on either

    def runs(self) -> list[FinishedRun]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]


def compare(paths: Sequence[Path], split: str | None = None) -> Comparison:
    """Read the run folders, each once however often it is named, and group them.

    They are compared on `split`. Without it they are compared on the test set if all runs were
    evaluated on one, else on held-out examples if all have them, else on what some of them have.
    """
    if not paths:
        raise ValueError(
            "runs must be at least one folder, got []. Name folders that nearsay train wrote."
        )
    comparison = Comparison(group_runs([read_run(path) for path in each_once(paths)]), split)
    if split is not None:
        return comparison
    num_runs = len(comparison.runs())
    num_evaluated = {}
    for name in ("test", "validation"):
        accuracies = spread(run.number("accuracy", name, "final") for run in comparison.runs())
        num_evaluated[name] = accuracies.num if accuracies is not None else 0
    # A split that all runs have comes first, then one that some runs have.
    for enough in (num_runs, 1):
        for name, num in num_evaluated.items():
            if num >= enough:
                return comparison._replace(split=name)
    return comparison


def split_text(comparison: Comparison) -> str:
    """The examples on which runs are compared, in words that say how far to trust their labels."""
    runs = comparison.runs()
    if comparison.split == "validation":
        if all(map(_has_clean_validation, runs)):
            return "held-out validation set with clean labels"
        if any(map(_replaced_labels, runs)):
            return "held-out validation set (its labels as each run has them)"
        return "held-out validation set (its labels as they were given)"
    if comparison.split == "second_test":
        return "second test set"
    knows_truth = all(run.labels.clean is not None for run in runs)
    return "clean test set" if knows_truth else "test set"


def judges_differ(runs: Iterable[FinishedRun], split: str | None) -> bool:
    """Whether some runs were evaluated with labels from `nearsay clean` or `propagate`."""
    if split != "validation":
        return False
    return len({_replaced_labels(run) for run in runs if not _has_clean_validation(run)}) > 1


def source(groups: Sequence[Group]) -> str:
    """Where numbers come from: data sets, runs and seeds."""
    runs = Comparison(tuple(groups), None).runs()
    data = distinct(run.data() for run in runs)
    return f"Data: {data}; {counted(len(runs), 'run')}; {seeds_text(run.seed for run in runs)}."


def seeds_text(seeds: Iterable[int]) -> str:
    """Such as "seed 0" or "seeds 0, 1"."""
    unique = sorted(set(seeds))
    noun = "seed" if len(unique) == 1 else "seeds"
    return f"{noun} {', '.join(map(str, unique))}"


def run_names(comparison: Comparison) -> dict[Path, str]:
    """What to call each folder: its last name, or the whole path if two folders end alike."""
    names = {run.path: plain(run.path.name) for run in comparison.runs()}
    if len({path.name for path in names}) == len(names):
        return names
    return {path: plain(str(path)) for path in names}


def distinct(texts: Iterable[str]) -> str:
    """Each text once."""
    return ", ".join(dict.fromkeys(texts))


def spread(numbers: Iterable[float | None]) -> Spread | None:
    """Mean and standard deviation of a sample without missing numbers, None if it is empty."""
    values = [number for number in numbers if number is not None]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(mean, None, 1)
    # The deviation of a sample, hence n − 1.
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (len(values) - 1)), len(values))


def single(run: FinishedRun, *names: str) -> Spread | None:
    """A number of the result of one run."""
    return spread([run.number(*names)])


def each_once(paths: Iterable[Path]) -> list[Path]:
    """The folders in their order, each once, however often and in whatever spelling it is named."""
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def group_runs(runs: Sequence[FinishedRun]) -> tuple[Group, ...]:
    """Groups in the order in which their first runs come."""
    # Runs with the same identity form a group, in whatever order they come.
    members: dict[str, list[FinishedRun]] = {}
    for run in runs:
        members.setdefault(_identity(run), []).append(run)
    names = _names([group[0] for group in members.values()])
    groups = []
    for name, group in zip(names, members.values(), strict=True):
        groups.append(Group(name=name, runs=tuple(sorted(group, key=lambda run: run.seed))))
    return tuple(groups)


def read_run(path: Path) -> FinishedRun:
    """Read a finished run folder; ValueError names the file that is missing or damaged."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder. Name folders that nearsay train wrote.")
    result = _read_object(path / "result.json")
    if result.get("finished") is not True:
        raise ValueError(f"{path / 'result.json'} is not of a finished run. {_UNFINISHED}")
    seed = result.get("seed")
    if not isinstance(seed, int):
        file = path / "result.json"
        raise ValueError(f"seed in {file} must be a whole number, got {seed!r}. {CURE}")
    record = config.current_record(_read_object(path / "experiment.json"))
    # Each part is checked, because a file of another program may have the same name.
    parts = [("arguments", dict), ("overrides", list), ("experiment", dict)]
    if not all(isinstance(record.get(name), kind) for name, kind in parts):
        names = "arguments, overrides and experiment"
        raise ValueError(f"{path / 'experiment.json'} does not hold {names}. {CURE}")
    labels, trust, num_held_out, label_hash = _read_trust(path)
    return FinishedRun(
        path=path,
        recipe=str(record.get("recipe", "unknown recipe")),
        arguments={key: str(value) for key, value in record["arguments"].items()},
        overrides=tuple(map(str, record["overrides"])),
        settings=record["experiment"],
        seed=seed,
        log=_read_log(path / "log.jsonl"),
        result=result,
        labels=labels,
        trust=trust,
        noise=measure_noise(labels),
        num_held_out=num_held_out,
        label_hash=label_hash,
    )


def _has_clean_validation(run: FinishedRun) -> bool:
    return run.settings.get("validation_labels") == "clean" and run.labels.clean is not None


def _replaced_labels(run: FinishedRun) -> str | None:
    """The file of replaced labels, if held-out examples have their labels from it too."""
    return run.relabeled() if run.num_held_out else None


def _read_object(path: Path) -> dict[str, Any]:
    value = _parse(_read_text(path), path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object. {CURE}")
    return value


def _read_log(path: Path) -> tuple[dict[str, float], ...]:
    entries = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        entry = _parse(line, path, f"line {number} of ")
        if not isinstance(entry, dict) or _finite(entry.get("epoch")) is None:
            raise ValueError(f"line {number} of {path} has no epoch. {CURE}")
        numbers = {}
        for key, value in entry.items():
            finite = _finite(value)
            if finite is not None:
                numbers[key] = finite
        entries.append(numbers)
    if not entries:
        raise ValueError(f"{path} is empty. {CURE}")
    return tuple(sorted(entries, key=lambda entry: entry["epoch"]))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing. {_UNFINISHED}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}). {CURE}") from error


def _parse(text: str, path: Path, where: str = "") -> Any:
    try:
        return _cleaned(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}{path} cannot be read as JSON ({error}). {CURE}") from error


def _cleaned(value: Any) -> Any:
    """The same JSON with text that can be shown."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return list(map(_cleaned, value))
    if isinstance(value, dict):
        return {plain(key): _cleaned(child) for key, child in value.items()}
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
    """The labels trained on and the network's confidence in them.

    Then come the number of held-out examples and the fingerprint of all labels.
    """
    labels, train, num_held_out = _read_labels(path / "labels.npz")
    file = path / "predictions" / "train.safetensors"
    try:
        # Features may be large and are not needed.
        tensors = load_sealed(file, ("logits", "indices"))
        logits, indices = tensors["logits"], tensors["indices"]
        # Predictions may be in any order and hold held-out rows: keep the trained rows, by index.
        is_trained = torch.isin(indices, train)
        order = indices[is_trained].argsort()
        logits, indices = logits[is_trained][order], indices[is_trained][order]
        trained = aligned(labels, Predictions(logits, logits, indices))
        if len(labels.classes) != logits.shape[1]:
            raise ValueError(
                f"{logits.shape[1]} columns of logits for {len(labels.classes)} classes"
            )
        return trained, confidence(logits, trained.given), num_held_out, fingerprint(labels)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing. {_UNFINISHED}") from None
    except (OSError, SafetensorError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"{file} cannot be used ({error}). {CURE}") from error


def _read_labels(path: Path) -> tuple[Labels, Tensor, int]:
    """All labels, the indices of the examples that were trained on, and how many were held out."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            tensors = {}
            for name in ("given", "clean", "train"):
                if name in arrays:
                    tensors[name] = torch.from_numpy(arrays[name]).long()
            classes = tuple(plain(str(name)) for name in arrays["classes"].reshape(-1))
            num_held_out = arrays["validation"].size if "validation" in arrays else 0
        if "given" not in tensors:
            raise ValueError("it holds no given labels")
        labels = Labels(tensors["given"], tensors.get("clean"), classes)
        return labels, tensors.get("train", torch.arange(len(labels.given))), num_held_out
    except FileNotFoundError:
        raise ValueError(f"{path} is missing. {_UNFINISHED}") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        # numpy advises to load damaged files unsafely, which nobody should follow.
        reason = "it is damaged" if "unsafely" in str(error) else error
        raise ValueError(f"{path} cannot be used ({reason}). {CURE}") from error


def _identity(run: FinishedRun) -> str:
    """What two runs of one group have in common.

    A seed inside the tree, such as that of the noise, mostly follows the seed of the run. If
    somebody chose it, an argument or override says so.
    """
    seeds = []
    for pair in (*map("=".join, run.arguments.items()), *run.overrides):
        key = pair.partition("=")[0]
        if key.endswith("seed") and key != "seed":
            seeds.append(pair)
    return json.dumps([run.recipe, _settings(run, "seed"), sorted(seeds)])


def _settings(run: FinishedRun, *left_out: str) -> str:
    """All that makes two runs the same, as text; "machine" only says where a run took place."""
    # The hash of replaced labels counts as a setting, because their file may change.
    settings = {**run.settings, "labels_file": run.relabeled()}
    return json.dumps(_without(settings, "machine", *left_out), sort_keys=True)


def _without(tree: Any, *keys: str) -> Any:
    """The tree without these keys, at any depth."""
    if isinstance(tree, dict):
        return {key: _without(value, *keys) for key, value in tree.items() if key not in keys}
    return [_without(value, *keys) for value in tree] if isinstance(tree, list) else tree


def _names(firsts: Sequence[FinishedRun]) -> list[str]:
    """Names that differ: by choices, or else by fields of the experiment, or else by a number."""
    if len(firsts) == 1:
        return [firsts[0].method()]
    names = []
    for run, parts in zip(firsts, _differences(list(map(_choices, firsts))), strict=True):
        names.append(" ".join(parts) or run.method())
    counts = Counter(names)
    fields = [dict(_leaves(_without(run.settings, "machine", "seed"))) for run in firsts]
    for place, parts in enumerate(_differences(fields)):
        if counts[names[place]] > 1:
            names[place] = " ".join([names[place], *parts[:3]])
    counts, used = Counter(names), Counter[str]()
    numbered = []
    for name in names:
        used[name] += 1
        numbered.append(f"{name} ({used[name]})" if counts[name] > 1 else name)
    return numbered


def _differences(choices: Sequence[dict[str, str]]) -> list[list[str]]:
    """For each run the choices that differ; method and recipe go without their key."""
    first = {"recipe": 0, "method": 1}
    keys = dict.fromkeys(key for choice in choices for key in choice)
    differing = [key for key in keys if len({choice.get(key) for choice in choices}) > 1]
    differing.sort(key=lambda key: first.get(key, 2))
    texts = []
    for choice in choices:
        parts = []
        for key in differing:
            if key in choice:
                parts.append(choice[key] if key in first else f"{key}={choice[key]}")
        texts.append(parts)
    return texts


def _choices(run: FinishedRun) -> dict[str, str]:
    chosen = dict(run.arguments)
    for pair in run.overrides:
        key, _, text = pair.partition("=")
        if not key.startswith("machine."):
            chosen[key] = text
    chosen.update(recipe=run.recipe, method=run.method())
    chosen.pop("seed", None)
    return chosen


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names of all values in a tree."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{prefix}{key}.")
    else:
        yield prefix[:-1], str(tree)
