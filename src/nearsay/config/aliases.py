"""Names that earlier versions wrote into run folders, and what they are called now."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_METHODS = {"nearsay": "neighbor-vote"}
_KINDS = {"Nearsay": "NeighborVote"}
_FIELDS = {
    "closeness": "feature_weight",
    "kinship": "relation_weight",
    "strictness": "agreement_power",
    "sure": "threshold",
}
_TERMS = {"strange": "relational"}  # of a loss, in a checkpoint and in the log
_MODULES = {
    "augment": "transforms",
    "core": "batch",
    "datasets": "data",
    "objectives": "losses",
}
_OLD_MODULE = re.compile(rf"\bnearsay\.({'|'.join(_MODULES)})\b")


def current_record(record: Any) -> Any:
    """The content of an experiment.json with today's names; whatever else is in it stays as it is."""
    if not isinstance(record, Mapping):
        return record
    current = dict(record)
    arguments, overrides = record.get("arguments"), record.get("overrides")
    if isinstance(arguments, Mapping):
        method = arguments.get("method")
        if isinstance(method, str) and method in _METHODS:
            current["arguments"] = {**arguments, "method": _METHODS[method]}
    if isinstance(overrides, list):
        current["overrides"] = [_current_override(change) for change in overrides]
    if "experiment" in record:
        current["experiment"] = _current_tree(record["experiment"])
    return current


def current_source(source: str) -> str:
    """The text of a recorded recipe with the modules of nearsay where they are now."""
    return _OLD_MODULE.sub(lambda found: f"nearsay.{_MODULES[found[1]]}", source)


def current_terms(names: Sequence[str]) -> list[str]:
    """The names of what a checkpoint has summed up for the log."""
    return [_TERMS.get(name, name) for name in names]


def _current_override(change: Any) -> Any:
    """Such as objective.relation_weight=1 for objective.kinship=1."""
    if not isinstance(change, str) or not change.startswith("objective."):
        return change
    path, equals, text = change.partition("=")
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
    return current
