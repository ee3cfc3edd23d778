"""One small file for each run that is done: what was run, what came of it, and by which command it is done again."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nearsay import config
from nearsay.results.queue import FILE, PLACES, Wanted
from nearsay.run import write_whole

Record = dict[str, Any]  # what JSON can hold
MERGED = "cifar.json"
_NEEDED = frozenset(
    {"name", "tier", "protocol", "command", "recipe", "arguments", "overrides", "seed", "accuracy", "detection"}
    | {"labels", "images_per_second", "seconds", "peak_memory_bytes", "hardware", "versions", "commit", "experiment"}
)
# Differences that make no other experiment: where files are, and what later versions can do but was not asked for.
_HARMLESS = re.compile(r"(data\.path|data\.labels|outside\.path): |.*: not there, but (null|false|0|0\.0)$")


def make_record(
    wanted: Wanted, result: Mapping[str, Any], settings: Mapping[str, Any], *, seconds: float, places: Mapping[str, str]
) -> Record:
    """What is kept of a finished run: numbers, versions and settings, none of the places where files are.

    `result` is that of the run folder, `settings` its experiment as a tree, and `seconds` all the time that it took.
    """
    labels = {key: value for key, value in result["labels"].items() if key != "num_classes"}
    return {
        "name": wanted.name,
        "tier": wanted.tier,
        "protocol": wanted.protocol,
        "command": wanted.command(),
        "recipe": wanted.recipe,
        "arguments": list(wanted.arguments),
        "overrides": list(wanted.overrides),
        "seed": result["seed"],
        "accuracy": result["accuracy"],
        "detection": result["detection"],
        "confidence": result["confidence"],
        "labels": labels,
        "epochs": result["epochs"],
        "steps": result["steps"],
        "images_per_second": result["images_per_second"],
        "seconds": round(max(seconds, result["seconds"]), 1),
        "peak_memory_bytes": result["peak_memory_bytes"],
        "hardware": result["hardware"],
        "versions": dict(result["versions"]),
        "commit": "",
        "experiment": _without_places(settings, {place: PLACES[key] for key, place in places.items()}),
    }


def read_records(folder: Path) -> dict[str, Record]:
    """All records in a folder by name; ValueError names a file that is none."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.name != FILE:
            record = _read(path)
            if record["name"] != path.stem:
                raise ValueError(f"{path} holds the run {record['name']!r}; name the file after the run that it holds")
            found[path.stem] = record
    return found


def check_queued(record: Record, wanted: Iterable[Wanted]) -> None:
    """See that a record is of the run that the queue has under its name; ValueError if it is of another."""
    for each in wanted:
        if each.name == record["name"] and each.command() != record["command"]:
            raise ValueError(
                f"{each.name} is recorded as {record['command']!r}, but the queue has {each.command()!r}; remove the "
                "record, and it is run again"
            )


def changed_since(record: Record) -> list[str]:
    """In which settings the recipe, called in the same way, differs today from what was run; [] if in none."""
    places = [f"{key}={place}" for key, place in PLACES.items() if f" {key}=" in record["command"]]
    try:
        call = config.call_recipe(record["recipe"], [*places, *record["arguments"]])
        now = config.to_tree(config.apply_overrides(call, record["overrides"]).experiment)
    except config.ConfigError as error:
        return [str(error)]
    return [each for each in config.differences(record["experiment"], now) if not _HARMLESS.match(each)]


def take(records: Iterable[Record], folder: Path, *, commit: str = "", replace: bool = False) -> list[str]:
    """Put records into a folder, a file each; returns the names of the new ones.

    `commit` is filled in where a record has none, or names one that was changed ("-dirty"). ValueError, before anything
    is written, for a record that differs from the one that is there, unless it is to be replaced.
    """
    fresh: list[Record] = []
    for record in records:
        known = record.get("commit", "")
        named = {**record, "commit": commit if commit and (not known or known.endswith("-dirty")) else known}
        path = folder / f"{record['name']}.json"
        before = _read(path) if path.exists() else None
        if before is not None and {**before, "commit": ""} == {**named, "commit": ""} and before["commit"]:
            continue
        if before is not None and {**before, "commit": ""} != {**named, "commit": ""} and not replace:
            raise ValueError(
                f"{path} holds another result ({_final(before)} there, {_final(named)} now); nothing was written, "
                "and --replace would overwrite it"
            )
        fresh.append(named)
    folder.mkdir(parents=True, exist_ok=True)
    for record in fresh:
        write_json(folder / f"{record['name']}.json", record)
    return [record["name"] for record in fresh]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """The value as a file with a line for each of its keys, in one piece."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(each, ensure_ascii=False, allow_nan=False)}" for key, each in value.items()
    ]
    write_whole(path, ("{\n " + ",\n ".join(lines) + "\n}\n").encode())


def _read(path: Path) -> Record:
    try:
        record: Any = json.loads(path.read_text("utf-8"))
        missing = sorted(_NEEDED - set(record))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no record of a run: {error}; restore or remove it") from error
    if missing:
        raise ValueError(f"{path} is no record of a run: it has no {missing[0]!r}; restore or remove it")
    return dict(record)


def _final(record: Record) -> str:
    return f"{100 * record['accuracy']['test']['final']:.2f} %"


def _without_places(tree: Any, places: Mapping[str, str]) -> Any:
    """The tree with the places of this machine replaced by those of the printed command."""
    if isinstance(tree, dict):
        return {key: _without_places(value, places) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_places(value, places) for value in tree]
    return places.get(tree, tree) if isinstance(tree, str) else tree
