"""The record of a finished run: one small file with its command, settings, numbers and versions.

A record never holds a path of the machine that ran it: the places of data sets are written as
`data/...`, as in the printed command.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.run_queue import EPOCHS, FILE, PLACES, Wanted
from nearsay import config
from nearsay.training.checkpoints import write_whole

Record = dict[str, Any]  # what JSON can hold
MERGED = "cifar.json"
_KINDS: dict[str, type | tuple[type, ...]] = {  # what every record has
    **dict.fromkeys(("accuracy", "labels", "versions", "experiment"), dict),
    **dict.fromkeys(("name", "tier", "protocol", "command", "recipe", "hardware", "commit"), str),
    **dict.fromkeys(("images_per_second", "seconds", "peak_memory_bytes"), (int, float)),
    "arguments": list,
    "overrides": list,
    "seed": int,
    "detection": (dict, type(None)),
}
_ACCURACIES = ("final", "best", "last_10")
_DETECTIONS = ("auroc", "average_precision")
_ABSOLUTE = re.compile(r"([\w.]+=|)((?:[A-Za-z]:[\\/]|~?/).+)")  # alone, or as the value of a word
_SEPARATOR = re.compile(r"[\\/]")
_NAME = re.compile(r"[\w+][\w+.-]*")  # of a file, in the folder and nowhere else
_PLACES = ("data.path", "data.labels", "outside.path")  # fields that say where files are


def make_record(
    wanted: Wanted,
    result: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    seconds: float,
    places: Mapping[str, str],
) -> Record:
    """What is kept of a finished run: numbers, versions and settings, but no path of this machine.

    `result` is that of the run folder, `settings` its experiment as a tree, `seconds` all the time
    that it took, and `places` says where this machine has the files that PLACES names.
    """
    labels = {key: value for key, value in result["labels"].items() if key != "num_classes"}
    shown = {place: PLACES[name] for name, place in places.items()}
    arguments, overrides = without_private_paths((wanted.arguments, wanted.overrides), shown)
    wanted = replace(wanted, arguments=arguments, overrides=overrides)
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
        "experiment": without_private_paths(settings, shown),
    }


def without_private_paths(tree: Any, places: Mapping[str, str]) -> Any:
    """The tree with every absolute path replaced by one below `data`, also as a word `key=/path`.

    A path in `places` is replaced by its value there, any other one by `data/` and its last part.
    """
    if isinstance(tree, dict):
        return {key: without_private_paths(value, places) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(without_private_paths(value, places) for value in tree)
    found = _ABSOLUTE.fullmatch(tree) if isinstance(tree, str) else None
    if found is None:
        return tree
    key, path = found.groups()
    for place in sorted(places, key=len, reverse=True):  # a folder within another one comes first
        if path == place or path.startswith(f"{place}/"):
            return f"{key}{places[place]}{path.removeprefix(place)}"
    return f"{key}data/{_SEPARATOR.split(path.rstrip('/'))[-1]}"


def as_wanted(record: Record) -> Wanted:
    """The run of a record, as a queue has it."""
    return Wanted(
        name=record["name"],
        protocol=record["protocol"],
        recipe=record["recipe"],
        arguments=tuple(record["arguments"]),
        overrides=tuple(record["overrides"]),
    )


def device_seconds(record: Record) -> float:
    """How long a run had the device: its whole time, or its share where others ran at once."""
    return float(record["device_seconds"] if "device_seconds" in record else record["seconds"])


def read_records(folder: Path) -> dict[str, Record]:
    """All records in a folder by name; ValueError names a file that is none."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.name != FILE:
            record = _read(path)
            if record["name"] != path.stem:
                raise ValueError(f"{path} must be named after its run, {record['name']!r}.")
            found[path.stem] = record
    return found


def check_queued(record: Record, wanted: Iterable[Wanted]) -> None:
    """See that a record is of the run that the queue has under its name; else ValueError."""
    for each in wanted:
        if each.name == record["name"] and each.command() != record["command"]:
            raise ValueError(
                f"{each.name} is recorded as {record['command']!r}, but the queue has "
                f"{each.command()!r}; remove the record, and it is run again"
            )


def changed_since(record: Record) -> list[str]:
    """The settings in which the recipe, called in the same way, differs today from the run."""
    recipe, *words = as_wanted(record).words(PLACES)
    try:
        call = config.call_recipe(recipe, words)
        now = config.to_tree(config.apply_overrides(call, record["overrides"]).experiment)
    except config.ConfigError as error:
        return [str(error)]
    return config.substantial(config.differences(record["experiment"], now), _PLACES)


def unchanged(records: Mapping[str, Record]) -> list[str]:
    """The names of the runs that would be run in the same way today: those that are done."""
    return [name for name, record in records.items() if not changed_since(record)]


def take(
    records: Iterable[Record], folder: Path, *, commit: str = "", overwrite: bool = False
) -> list[str]:
    """Put records into a folder, a file each; returns the names of the new ones.

    `commit` is filled in where a record has none, or names one with changes ("-dirty"). A record of
    today's recipe replaces one of the recipe as it was. For any other record that differs from the
    one that is there, ValueError before anything is written, unless `overwrite`.
    """
    fresh: list[Record] = []
    for each in records:
        try:
            record = _checked(each)
        except ValueError as error:
            raise ValueError(
                f"what shall be taken is no record of a run: {error}; nothing was written"
            ) from error
        known = record["commit"]
        named = {
            **record,
            "commit": commit if commit and (not known or known.endswith("-dirty")) else known,
        }
        path = folder / f"{record['name']}.json"
        before = _read(path) if path.exists() else None
        if before is not None:
            is_same = {**before, "commit": ""} == {**named, "commit": ""}
            if is_same and before["commit"]:
                continue
            is_outdated = not is_same and changed_since(before) and not changed_since(named)
            if not (is_same or is_outdated or overwrite):
                raise ValueError(
                    f"{path} holds another result ({_final(before)} there, {_final(named)} now); "
                    "nothing was written, and --replace would overwrite it"
                )
        fresh.append(named)
    folder.mkdir(parents=True, exist_ok=True)
    for record in fresh:
        write_json(folder / f"{record['name']}.json", record)
    return [record["name"] for record in fresh]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """The value as a file with a line for each of its keys, in one piece."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(each, ensure_ascii=False, allow_nan=False)}"
        for key, each in value.items()
    ]
    write_whole(path, ("{\n " + ",\n ".join(lines) + "\n}\n").encode())


def _read(path: Path) -> Record:
    try:
        return _checked(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no record of a run: {error}; restore or remove it") from error


def _checked(record: Any) -> Record:
    """The record; ValueError if it was damaged or edited by hand so that a page cannot show it."""
    if not isinstance(record, dict):
        raise ValueError(f"it is {str(record)[:40]!r} and no object")
    for key, kind in _KINDS.items():
        if key not in record:
            raise ValueError(f"it has no {key!r}")
        if not isinstance(record[key], kind) or (
            isinstance(record[key], float) and not math.isfinite(record[key])
        ):
            raise ValueError(f"its {key!r} is {str(record[key])[:40]!r}")
    if without_private_paths(record, {}) != record:
        raise ValueError("it holds an absolute path. Replace it by one below data/")
    _check_words(record)
    _check_shares(record)
    _check_costs(record)
    return dict(record)


def _check_words(record: Record) -> None:
    """See that names and words are some, and agree with each other."""
    if not _NAME.fullmatch(record["name"]) or f"{record['name']}.json" == FILE:
        raise ValueError(f"{record['name']!r} is no name of a run")
    if record["protocol"] not in EPOCHS:
        raise ValueError(f"its protocol {record['protocol']!r} is none of {', '.join(EPOCHS)}")
    if odd := [
        word for word in (*record["arguments"], *record["overrides"]) if not isinstance(word, str)
    ]:
        raise ValueError(f"{odd[0]!r} is no word of a command")
    if odd := [
        f"{name} is {value!r}"
        for name, value in record["versions"].items()
        if not isinstance(value, str)
    ]:
        raise ValueError(f"its version of {odd[0]} and no text")
    for key in ("protocol", "seed"):
        told = [
            word.partition("=")[2] for word in record["arguments"] if word.startswith(f"{key}=")
        ]
        if told and set(told) != {str(record[key])}:
            raise ValueError(
                f"its {key!r} is {record[key]!r}, but its arguments say {' and '.join(told)}"
            )
    command = as_wanted(record).command()
    if record["command"] != command:
        raise ValueError(
            f"its command is {record['command']!r}, but its arguments make {command!r}"
        )


def _check_shares(record: Record) -> None:
    """See that accuracies, detection and the rate of noise are shares."""
    for split in ("test", *record["accuracy"]):
        found = record["accuracy"].get(split)
        shares = [found.get(kind) if isinstance(found, dict) else None for kind in _ACCURACIES]
        if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
            raise ValueError(f"its accuracies {shares} on {split!r} are no shares from 0 to 1")
    audit = record.get("audit") or {}
    if not isinstance(audit, dict):
        raise ValueError(f"its 'audit' is {str(audit)[:40]!r}")
    shown = [
        (kind, found.get(kind))
        for found in (record["detection"], audit)
        if found
        for kind in _DETECTIONS
    ]
    rate = record["labels"].get("effective_rate")
    for kind, share in (*shown, *([] if rate is None else [("effective_rate", rate)])):
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"its {kind!r} {share!r} is no share from 0 to 1")


def _check_costs(record: Record) -> None:
    """See that what it took on the device, and the audit, can be added up."""
    share = record.get("device_seconds", 0.0)
    if not isinstance(share, int | float) or not 0 <= share <= record["seconds"]:
        raise ValueError(
            f"its 'device_seconds' {share!r} are no part of {record['seconds']} seconds"
        )
    taken = (record.get("audit") or {}).get(
        "seconds", 0.0
    )  # an audit that was made later may not have been timed
    if not isinstance(taken, int | float) or not 0 <= taken < math.inf:
        raise ValueError(f"the 'seconds' {taken!r} of its 'audit' are no time")


def _final(record: Record) -> str:
    return f"{100 * record['accuracy']['test']['final']:.2f} %"
