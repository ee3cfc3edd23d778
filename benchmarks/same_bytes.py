"""Whether two versions of the code train and audit to the same bytes.

    python benchmarks/same_bytes.py --against main
    PYTHONPATH=src python benchmarks/same_bytes.py --record before
    python benchmarks/same_bytes.py --compare before/bytes.json after/bytes.json

Use it for changes that must not change results. `--record` makes six small trainings, audits two
of them, and audits arrays, with the nearsay that Python finds. It writes SHA-256 values into
DIR/bytes.json: of every tensor of the weights, of the predictions, of the training dynamics and of
the last checkpoint; of the arrays in labels.npz; of each column of the log and of audit.csv; of
the numbers in result.json, audit.json and `nearsay evaluate`; and of every array of the audit of
arrays. `--against` records this tree and a commit, at the same time, and compares them. The exit
code is 1 if something differs, and 2 if a record cannot be made.

The runs go through the command line alone, so modules may move between the two versions. Names may
change, too: what has another name and the same bytes counts as the same, and the table shows both
names. Sentences, classes and field names in JSON are not compared, nor are times, memory and
versions.

A record takes about a minute on one core. Only records of the same machine and the same libraries
can be equal.
"""

import argparse
import csv
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
FILE = "bytes.json"
OLDER = {"method=neighbor-vote": "method=nearsay"}  # words of today, and of older versions
NOT_COMPARED = ("seconds", "images_per_second", "peak_memory_bytes", "versions", "hardware")

# The words of `nearsay train`. Each memory, each start and each phase takes part in one of them.
TRAININGS = {
    "ncr": (
        "digits method=ncr epochs=6 --set objective.start_epoch=2 --set objective.bank.size=256 "
        "--set objective.reject=0.1 --set held_out=0.1"
    ),
    "ncr+mixup": "digits method=ncr+mixup epochs=6 --set objective.start_epoch=2",
    "elr": "digits method=elr epochs=4 labeled=0.8",
    "ncr+elr+": "digits method=ncr+elr+ epochs=5",
    # The vote starts at epoch 4; soon after, sure beliefs begin to replace labels.
    "neighbor-vote": "digits method=neighbor-vote epochs=12",
    # NCR starts by itself at epoch 5.
    "toy": "toy method=ncr epochs=12 --set objective.start_epoch=auto --set propagate_at=8",
}
AUDITED = ("neighbor-vote", "toy")

Record = dict[str, dict[str, str]]  # what it is of -> name -> SHA-256


def main() -> int:
    """Record or compare; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    act = parser.add_mutually_exclusive_group(required=True)
    act.add_argument("--record", type=Path, metavar="DIR", help="a new folder for runs and hashes")
    act.add_argument("--against", metavar="REV", help="a commit to compare this tree with")
    act.add_argument("--compare", type=Path, nargs=2, metavar="JSON", help="two records")
    arguments = parser.parse_args()
    try:
        if arguments.record:
            record(arguments.record)
            return 0
        if arguments.against:
            return against(arguments.against)
        return compare(*(json.loads(path.read_text("utf-8")) for path in arguments.compare))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def record(folder: Path) -> None:
    """Train, audit and write the hashes into `folder`."""
    if folder.exists() and any(folder.iterdir()):  # a finished run would not be trained again
        raise ValueError(f"{folder} must be a new or an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    found: Record = {}
    for name, words in TRAININGS.items():
        run = folder / name
        print(f"{name}: {words}", flush=True)
        nearsay("train", *known(words.split()), "--seed", "0", "--out", str(run), "--quiet")
        found |= {f"{name}: {what}": hashes for what, hashes in hash_run(run).items()}
        if name in AUDITED:
            nearsay("audit", str(run), "--no-report", "--device", "cpu")
            found |= {f"{name}: {what}": hashes for what, hashes in hash_audit(run).items()}
    print("an audit of arrays", flush=True)
    found["arrays: audit"] = dict(hash_object(audit_arrays()))
    content = json.dumps({"versions": versions, "sha256": found}, indent=1) + "\n"
    (folder / FILE).write_text(content, "utf-8")


def nearsay(*words: str) -> str:
    """What the command prints; RuntimeError if it fails."""
    command = [sys.executable, "-m", "nearsay", *words]
    told = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if told.returncode:
        raise RuntimeError(
            f"nearsay {' '.join(words)} ended with {told.returncode}: {told.stderr.strip()}"
        )
    return told.stdout


def known(words: Sequence[str]) -> list[str]:
    """The words of a training on the CPU, by the names that this version knows."""
    words = [*words, "--device", "cpu"]
    if not OLDER.keys() & set(words):
        return words
    try:
        nearsay("train", *words, "--dry-run")
    except RuntimeError:
        return [OLDER.get(word, word) for word in words]
    return words


def hash_run(run: Path) -> Record:
    """What a finished training has left."""
    with np.load(run / "labels.npz") as arrays:
        labels = {name: hash_array(arrays[name]) for name in arrays.files}
    evaluation = json.loads(nearsay("evaluate", str(run), "--json", "--device", "cpu"))
    checkpoint = max((run / "checkpoints").glob("step-*"))
    return {
        "weights": hash_tensors(run / "model.safetensors"),
        "log": hash_log((run / "log.jsonl").read_text("utf-8")),
        **{
            f"predictions of {path.stem}": hash_tensors(path)
            for path in sorted((run / "predictions").glob("*.safetensors"))
        },
        "dynamics": hash_tensors(run / "dynamics.safetensors"),
        "last checkpoint": hash_tensors(checkpoint / "tensors.safetensors"),
        "labels": labels,
        "result.json": hash_numbers(json.loads((run / "result.json").read_text("utf-8"))),
        "evaluate --json": hash_numbers(evaluation),
    }


def hash_audit(run: Path) -> Record:
    """What an audit of a run has written."""
    return {
        "audit.csv": hash_table((run / "audit.csv").read_bytes()),
        "audit.json": hash_numbers(json.loads((run / "audit.json").read_text("utf-8"))),
    }


def hash_tensors(path: Path) -> dict[str, str]:
    """Of each tensor in a safetensors file."""
    return {name: hash_array(tensor.numpy()) for name, tensor in sorted(load_file(path).items())}


def hash_array(array: np.ndarray) -> str:
    """Of the numbers, their type and their order."""
    digest = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def hash_json(value: object) -> str:
    """Of a value that JSON can hold; floats are written so that each has a text of its own."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def hash_log(text: str) -> dict[str, str]:
    """Of each column: its values with the numbers of their lines."""
    columns: dict[str, list[tuple[int, Any]]] = {}
    for number, line in enumerate(text.splitlines()):
        for name, value in json.loads(line).items():
            if name not in NOT_COMPARED:
                columns.setdefault(name, []).append((number, value))
    return {name: hash_json(values) for name, values in columns.items()}


def hash_numbers(tree: Mapping[str, Any]) -> dict[str, str]:
    """Of all numbers below each name of the top, in order; what holds none is left out."""
    kept = {name: list(numbers(value)) for name, value in tree.items() if name not in NOT_COMPARED}
    return {name: hash_json(values) for name, values in kept.items() if values}


def numbers(value: Any) -> Iterator[float | None]:
    """The numbers, truth values and nulls of JSON, without the names and texts around them."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif not isinstance(value, str):
        yield value


def hash_table(content: bytes) -> dict[str, str]:
    """Of the whole of a CSV below its header, and of each column."""
    _, _, body = content.partition(b"\n")
    header, *rows = csv.reader(io.StringIO(content.decode(), newline=""))
    columns = zip(header, zip(*rows, strict=True), strict=True)
    return {
        "(bytes below the header)": hashlib.sha256(body).hexdigest(),
        **{name: hash_json(cells) for name, cells in columns},
    }


def audit_arrays() -> Any:
    """An `Audit` of the digits with a fifth of wrong labels, by a classifier of class means."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  # takes a second

    import nearsay  # noqa: PLC0415  # comparing two records works without it

    torch.set_num_threads(1)
    features, clean = load_digits(return_X_y=True)
    features = (features / 16).astype(np.float32)
    draw = np.random.default_rng(0)
    is_drawn = draw.random(len(clean)) < 0.2
    labels = np.where(is_drawn, draw.integers(0, 10, len(clean)), clean)
    labels[:20] = -1  # unlabeled
    means = np.stack([features[labels == number].mean(axis=0) for number in range(10)])
    distances = ((features[:, None] - means) ** 2).sum(axis=2, dtype=np.float64)
    likelihoods = np.exp(-(distances - distances.min(axis=1, keepdims=True)))
    probabilities = likelihoods / likelihoods.sum(axis=1, keepdims=True)
    return nearsay.audit(labels, features=features, probabilities=probabilities)


def hash_object(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Of every array and number in dataclasses, tuples and mappings, by its path of names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        parts = value._asdict()
    elif isinstance(value, Mapping):
        parts = dict(value)
    else:
        if isinstance(value, torch.Tensor | np.ndarray):
            yield name, hash_array(np.asarray(value))
        elif isinstance(value, bool | int | float):
            yield name, hash_json(value)
        elif isinstance(value, tuple | list) and all(isinstance(each, str) for each in value):
            yield name, hash_json(list(value))
        elif value is not None:
            raise ValueError(
                f"{name} must be an array, a number or names, got {type(value).__name__}."
            )
        return
    for key, part in parts.items():
        yield from hash_object(part, f"{name}.{key}" if name else str(key))


def against(revision: str) -> int:
    """Record that commit and this tree, and compare them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        git = ["git", "-C", str(ROOT), "worktree"]
        made = subprocess.run(
            [*git, "add", "--quiet", "--detach", str(folder / "tree"), revision],
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise ValueError(f"--against must be a commit, got {revision!r}: {made.stderr.strip()}")
        try:
            sides = {folder / "before": folder / "tree", folder / "after": ROOT}
            for tree in sides.values():
                _check_import(tree, folder)
            processes = [_start(tree, side) for side, tree in sides.items()]
            told = [process.communicate()[0] for process in processes]
        finally:
            subprocess.run([*git, "remove", "--force", str(folder / "tree")], check=True)
        for side, process, text in zip((revision, "this tree"), processes, told, strict=True):
            if process.returncode:
                raise RuntimeError(f"{side} cannot be recorded: {text.strip().splitlines()[-1]}")
        records = [
            json.loads((folder / side / FILE).read_text("utf-8")) for side in ("before", "after")
        ]
    return compare(*records)


def _check_import(tree: Path, folder: Path) -> None:
    """See that Python takes the nearsay of the tree, and not one that is installed."""
    ask = [sys.executable, "-c", "import nearsay; print(nearsay.__file__)"]
    place = subprocess.run(
        ask, env=_environment(tree), cwd=folder, capture_output=True, text=True, check=True
    )
    if not Path(place.stdout.strip()).resolve().is_relative_to(tree.resolve()):
        raise RuntimeError(f"nearsay must be imported from {tree}, got {place.stdout.strip()}.")


def _start(tree: Path, side: Path) -> "subprocess.Popen[str]":
    """A process that records with the code of a tree."""
    command = [sys.executable, str(Path(__file__).resolve()), "--record", str(side)]
    pipe, errors = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(
        command, env=_environment(tree), cwd=side.parent, stdout=pipe, stderr=errors, text=True
    )


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src")}


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Print `what | same` for two records; returns 1 if something differs, else 0."""
    if before["versions"] != after["versions"]:
        print(f"note: the libraries differ: {before['versions']}, {after['versions']}")
    mine, others = before["sha256"], after["sha256"]
    verdicts = {
        what: judge(mine.get(what, {}), others.get(what, {}))
        for what in dict.fromkeys((*mine, *others))
    }
    width = max(map(len, verdicts), default=0)
    print(f"{'what':{width}} | same")
    for what, (_, text) in verdicts.items():
        print(f"{what:{width}} | {text}")
    bad = sum(not is_same for is_same, _ in verdicts.values())
    print(f"{bad} of {len(verdicts)} differ" if bad else f"all {len(verdicts)} are the same")
    return 1 if bad or not verdicts else 0


def judge(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[bool, str]:
    """Whether all hashes are equal, and the text for the table.

    A hash that is there under one name before and under another after counts as renamed.
    """
    changed = [name for name in before if name in after and before[name] != after[name]]
    gone = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    renamed = {}
    for name in list(gone):
        twin = next((other for other in new if after[other] == before[name]), None)
        if twin is not None:
            renamed[name] = twin
            gone.remove(name)
            new.remove(twin)
    problems = {"differ": changed, "only before": gone, "only after": new}
    told = [
        f"{len(names)} {problem}: {_some(names)}" for problem, names in problems.items() if names
    ]
    if told:
        return False, f"NO, of {len(before)}: {'; '.join(told)}"
    names = [f"{name} -> {twin}" for name, twin in renamed.items()]
    return True, f"yes, {len(before)}" + (f", new names: {_some(names)}" if names else "")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


if __name__ == "__main__":
    sys.exit(main())
