"""Names that earlier versions wrote into run folders, and what they are called now."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

METHODS = {"nearsay": "neighbor-vote"}
"""Names of methods in earlier versions, and their names now."""
_KINDS = {"Nearsay": "NeighborVote"}
_FIELDS = {
    "closeness": "feature_weight",
    "kinship": "relation_weight",
    "strictness": "agreement_power",
    "sure": "threshold",
}
_EXPERIMENT_FIELDS = {"judged": "eval_weights", "relabeled": "labels_file"}
# Terms of a loss, in a checkpoint and in the log.
_TERMS = {"apart": "feature_distance", "strange": "relational", "sure": "confident"}
_MODULES = {
    "augment": "transforms",
    "core": "batch",
    "datasets": "data",
    "dist": "distributed",
    "objectives.bank": "losses.memory_bank",
    "objectives.nearsay": "losses.neighbor_vote",
    "objectives": "losses",
    "seeds": "rng",
}
_OLD_MODULE = re.compile(rf"\bnearsay\.({'|'.join(_MODULES)})\b")
# Recipes were modules with a function `recipe`.
_RECIPES = (
    "cifar10|cifar100|clothing1m|digits|embeddings|folder|hub|manifest|mini_imagenet|toy|webvision"
)
_OLD_IMPORT = re.compile(rf"\bfrom nearsay\.recipes\.({_RECIPES}) import recipe\b( as \w+)?")
_OLD_RECIPE = re.compile(rf"\b({_RECIPES})\.recipe\b")


def current_record(record: Any) -> Any:
    """The content of an experiment.json with today's names; other content stays as it is."""
    if not isinstance(record, Mapping):
        return record
    current = dict(record)
    arguments, overrides = record.get("arguments"), record.get("overrides")
    if isinstance(arguments, Mapping):
        method = arguments.get("method")
        if isinstance(method, str) and method in METHODS:
            current["arguments"] = {**arguments, "method": METHODS[method]}
    if isinstance(overrides, list):
        current["overrides"] = [_current_override(change) for change in overrides]
    if "experiment" in record:
        current["experiment"] = _current_tree(record["experiment"])
    return current


def current_source(source: str) -> str:
    """The source of a recipe of an earlier version with the names of today."""
    if "nearsay." not in source:
        return source
    source = _OLD_MODULE.sub(lambda match: f"nearsay.{_MODULES[match[1]]}", source)
    for kind, current in _KINDS.items():
        source = re.sub(rf"\b{kind}\b", current, source)
    source = _OLD_IMPORT.sub(lambda match: _new_import(match[1], match[2]), source)
    return _OLD_RECIPE.sub(r"\1", source)


def _new_import(recipe: str, name: str | None) -> str:
    return f"from nearsay.recipes import {recipe}{name or ' as recipe'}"


def current_terms(names: Sequence[str]) -> list[str]:
    """The names of what a checkpoint has summed up for the log."""
    return [_TERMS.get(name, name) for name in names]


def _current_override(change: Any) -> Any:
    """Such as objective.relation_weight=1 for objective.kinship=1."""
    if not isinstance(change, str):
        return change
    path, equals, text = change.partition("=")
    if path in _EXPERIMENT_FIELDS:
        return f"{_EXPERIMENT_FIELDS[path]}{equals}{text}"
    if not path.startswith("objective."):
        return change
    owner, _, field = path.rpartition(".")
    return f"{owner}.{_FIELDS.get(field, field)}{equals}{text}"


def _current_tree(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_current_tree(item) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    current = {name: _current_tree(value) for name, value in tree.items()}
    kind = tree.get("kind")
    if isinstance(kind, str) and kind in _KINDS:
        renamed = {_FIELDS.get(name, name): value for name, value in current.items()}
        return {**renamed, "kind": _KINDS[kind]}
    if kind == "Experiment":
        return {_EXPERIMENT_FIELDS.get(name, name): value for name, value in current.items()}
    return current
