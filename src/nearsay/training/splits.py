"""What an experiment learns from and what it is judged on: data sets opened, noise made, examples held out."""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearsay import distributed, rng
from nearsay.batch import Files, Labels, Noise, Split
from nearsay.data.loader import Inputs, Order
from nearsay.errors import NoSplit, one_line
from nearsay.experiment import Experiment
from nearsay.noise import OpenSet, describe, fingerprint, split_balanced

_MANY = 200_000  # files: of more, looking at every size takes too long to be done at each start


class Judged(NamedTuple):
    """Examples that are never trained on, with the labels that count."""

    name: str  # "validation" or "test"
    inputs: Inputs
    truth: Tensor  # (n,)


class Splits(NamedTuple):
    """The training examples with the labels that are to be learned, and what a network is judged on."""

    inputs: Inputs  # of all N examples of the train split, those held out too
    labels: Labels  # of all N, noise included
    train: Tensor  # (n,) the examples to train on
    held_out: Tensor  # those that were held out
    judged: list[Judged]
    other_given: Tensor | None = None  # (N,) what a second network learns, if its noise is another
    notes: tuple[str, ...] = ()  # what the user should know

    def example(self, size: int) -> Tensor:
        """An input, for its shape; images on disk become squares of that size."""
        return torch.empty(3, size, size) if isinstance(self.inputs, Files) else self.inputs[0]


def open_splits(experiment: Experiment) -> Splits:
    """Open all splits and make the noise, once; ValueError says what does not fit."""
    inputs, pure = open_train(experiment)
    if not len(pure.given):
        raise ValueError("the train split has no examples; there is nothing to learn from")
    if pure.clean is not None and (pure.clean < 0).all():
        raise ValueError(
            f"none of the true labels of the train split is one of its classes {', '.join(map(repr, pure.classes[:5]))}"
            f"{', ...' if len(pure.classes) > 5 else ''}; name classes alike in both, or leave the true labels out"
        )
    labels = _noisy(experiment, experiment.noise, pure, inputs)
    if not (labels.given >= 0).any():
        raise ValueError(
            "no example of the train split has a label; there is nothing to learn from"
        )
    validation = _optional(experiment, "validation")
    train, held_out = _hold_out(experiment, labels, has_validation=validation is not None)
    train = _chosen(experiment, labels, train)
    judged = []
    if validation is not None:
        judged.append(
            Judged(
                "validation",
                validation.inputs,
                truth(validation.labels, experiment.validation_labels),
            )
        )
    elif len(held_out):
        kept = truth(labels, experiment.validation_labels)[held_out]
        judged.append(Judged("validation", select(inputs, held_out), kept))
    test = _optional(experiment, "test")
    _check_leak(inputs, *(split.inputs for split in (validation, test) if split is not None))
    if test is not None:
        judged.append(Judged("test", test.inputs, truth(test.labels, "clean")))
    second = None if experiment.second_test is None else experiment.second_test.open("test")
    if second is not None:
        judged.append(Judged("second_test", second.inputs, truth(second.labels, "clean")))
    for split in (validation, test, second):
        if split is not None and split.labels.classes != labels.classes:
            raise ValueError(
                f"the train split has the classes {labels.classes[:5]} and another split {split.labels.classes[:5]}; "
                "all splits must have the same ones in the same order"
            )
    blank = [each.name for each in judged if not (each.truth >= 0).any()]
    judged = [each for each in judged if each.name not in blank]
    notes = [f"the {name} split has no labels, so nothing is judged on it" for name in blank]
    notes += _doubt_rows(experiment, inputs)
    if len(labels.classes) == 1:
        notes.append(
            f"{labels.classes[0]!r} is the only class, so that no label can be found wrong; give examples of another"
        )
    other = None
    if experiment.noise_per_network:
        if isinstance(experiment.noise, OpenSet):
            raise ValueError(
                "noise_per_network=True cannot give a second network other images; use noise of labels"
            )
        seed = getattr(experiment.noise, "seed", None)
        if seed is None:
            raise ValueError(
                f"noise_per_network=True cannot draw {experiment.noise} again, which has no seed"
            )
        other = _noisy(experiment, replace(experiment.noise, seed=seed + 1), pure, inputs).given  # type: ignore[type-var]
    return Splits(inputs, labels, train, held_out, judged, other, tuple(notes))


def open_train(experiment: Experiment) -> Split:
    """What a network sees of the train split, with the images that open-set noise puts in; labels before noise."""
    inputs, labels = experiment.data.open("train")
    if isinstance(experiment.noise, OpenSet) and len(labels.given):
        inputs = _replaced(experiment, experiment.noise, inputs, labels)
    return Split(inputs, labels)


def select(inputs: Inputs, rows: Tensor) -> Inputs:
    """Some of the examples."""
    if isinstance(inputs, Files):
        return Files(inputs.root, tuple(inputs.names[row] for row in rows.tolist()))
    return inputs[rows]


def make_order(experiment: Experiment, splits: Splits) -> Order:
    """Who is in which batch; a batch is shared evenly by all processes."""
    num = distributed.num_processes()
    size = min(experiment.batch_size, len(splits.train))
    if experiment.batch_size % num or size < num:
        raise ValueError(
            f"batch_size={experiment.batch_size} for {len(splits.train)} examples cannot be shared evenly by {num} "
            f"processes; give a multiple of {num}, or start fewer"
        )
    if size < 2:
        raise ValueError(
            f"{len(splits.train)} example to train on is too few: it has no neighbor; give 2 or more"
        )
    kinds = splits.labels.given[splits.train] if experiment.balanced else None
    return Order(splits.train, batch_size=size - size % num, seed=experiment.seed, kinds=kinds)


def pack_labels(splits: Splits, requested_rate: float | None) -> bytes:
    """The content of `labels.npz`: the labels that were learned, and all that is known of their noise."""
    labels, realized = splits.labels, describe(splits.labels)
    arrays = {
        "given": labels.given.numpy(),
        "classes": np.array(labels.classes, dtype=np.str_),
        "train": splits.train.numpy(),
        "validation": splits.held_out.numpy(),
        "requested_rate": np.array(np.nan if requested_rate is None else requested_rate),
        "effective_rate": np.array(
            np.nan if realized.effective_rate is None else realized.effective_rate
        ),
        "num_open_set": np.array(realized.num_open_set),
        "fingerprint": np.array(realized.fingerprint),
        "inputs": np.array(digest_inputs(splits.inputs)),
        "names": np.array(digest_names(splits.inputs)),
    }
    if labels.clean is not None:
        arrays["clean"] = labels.clean.numpy()
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]  # numpy types these as flags
    return content.getvalue()


def digest_inputs(inputs: Inputs) -> str:
    """A SHA-256 that tells whether a run goes on with the inputs it began with: of arrays, or of names and sizes."""
    digest = hashlib.sha256()
    if isinstance(inputs, Files):
        for name in inputs.names:
            digest.update(f"{name}\0{_size(inputs, name)}\0".encode(errors="surrogateescape"))
    else:
        digest.update(f"{inputs.dtype} {tuple(inputs.shape)}".encode())
        digest.update(inputs.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_names(inputs: Inputs) -> str:
    """A SHA-256 that tells whether the number of an example still means the same file; nothing for arrays."""
    if not isinstance(inputs, Files):
        return ""
    return hashlib.sha256("\0".join(inputs.names).encode(errors="surrogateescape")).hexdigest()


def recorded_digest(content: bytes, name: str = "inputs") -> str:
    """What a `labels.npz` says of the inputs, or of their names; nothing where it does not say it."""
    with _unpacked(content) as arrays:
        return str(arrays[name]) if name in arrays.files else ""


def recorded_rows(content: bytes, name: str) -> Tensor:
    """(n,) numbers of the examples of train that were trained on (`train`) or held out (`validation`)."""
    with _unpacked(content) as arrays:
        return (
            torch.from_numpy(arrays[name])
            if name in arrays.files
            else torch.empty(0, dtype=torch.int64)
        )


def pack_relabeled(given: Tensor, content: bytes) -> bytes:
    """The content of a file for `relabeled`: other labels for the examples of a `labels.npz`, and which these are."""
    with _unpacked(content) as arrays:
        kept = {
            name: arrays[name] for name in ("classes", "inputs", "names") if name in arrays.files
        }
    packed = io.BytesIO()
    np.savez(packed, given=given.numpy(), **kept)
    return packed.getvalue()


def unpack_labels(content: bytes) -> Labels:
    """The labels in a `labels.npz`; ValueError if it is damaged."""
    with _unpacked(content) as arrays:
        given, classes = torch.from_numpy(arrays["given"]), tuple(map(str, arrays["classes"]))
        clean = torch.from_numpy(arrays["clean"]) if "clean" in arrays.files else None
        labels = Labels(given, clean, classes)
        for name in arrays.files:
            arrays[name]  # damage anywhere is told here, before somebody asks for that part
        if fingerprint(labels) != str(arrays["fingerprint"]):
            raise ValueError("its fingerprint is of other labels")
        return labels


@contextmanager
def _unpacked(content: bytes) -> Iterator[Any]:  # Any: as np.load says it
    """The arrays of a `labels.npz`; ValueError if it is damaged, also between two looks of one command."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            yield arrays
    except Exception as error:  # what is no such file can raise anything
        reason = one_line(error)
        reason = "it is damaged" if "allow_pickle" in reason else reason
        raise ValueError(
            f"labels.npz cannot be read: {reason}; start again in another folder"
        ) from error


def _check_leak(inputs: Inputs, *others: Inputs) -> None:
    """Refuse files of other splits that are byte for byte in train as well; no file is read twice."""
    if not isinstance(inputs, Files):
        return
    judged = [
        each for each in others if isinstance(each, Files) and len(inputs) + len(each) <= _MANY
    ]
    by_size: dict[int, list[str]] = {}
    for name in inputs.names if judged else ():
        by_size.setdefault(_size(inputs, name), []).append(name)
    known: dict[
        int, dict[bytes, str]
    ] = {}  # size -> digest -> the first file of train that has both
    leaked = []
    for files in judged:
        for name in files.names:
            size = _size(files, name)
            if size < 1 or size not in by_size:
                continue
            if size not in known:
                known[size] = {_digest(inputs, each): each for each in reversed(by_size[size])}
            digest = _digest(files, name)
            if digest and digest in known[size]:
                leaked.append((name, known[size][digest]))
    if leaked:
        raise ValueError(
            f"{len(leaked)} images to be judged on are byte for byte in train as well, the first {leaked[0][0]!r} as "
            f"{leaked[0][1]!r}; remove them from one of the two"
        )


def _size(files: Files, name: str) -> int:
    """Bytes of a file, −1 if there is none."""
    try:
        return (files.root / name).stat().st_size
    except OSError:
        return -1


def _digest(files: Files, name: str) -> bytes:
    """A SHA-256 of the content, nothing for what is no file."""
    path = files.root / name
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _noisy(experiment: Experiment, noise: Noise | None, labels: Labels, inputs: Inputs) -> Labels:
    """The labels after noise, and without those that are to be hidden."""
    if noise is not None:
        labels = noise(labels, inputs if isinstance(inputs, Tensor) else None)
    if experiment.relabeled is not None:
        given = _recorded(Path(experiment.relabeled), labels, inputs)
        labels = Labels(given, labels.clean, labels.classes)
    if experiment.labeled == 1:
        return labels
    known = (labels.given >= 0).nonzero()[:, 0]
    order = known[rng.shuffle(experiment.seed, "labeled choice", 0, known)]
    given = labels.given.clone()
    given[order[max(1, round(experiment.labeled * len(known))) :]] = -1
    return Labels(given, labels.clean, labels.classes)


def _recorded(path: Path, labels: Labels, inputs: Inputs) -> Tensor:
    """(N,) labels that an earlier command has written."""
    cure = "nearsay clean and nearsay propagate make one"
    try:
        content = path.read_bytes()
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            missing = next((name for name in ("given", "classes") if name not in arrays.files), "")
            names = str(arrays["names"]) if "names" in arrays.files else ""
            given, classes = (
                (np.empty(0), ())
                if missing
                else (arrays["given"], tuple(map(str, arrays["classes"])))
            )
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"relabeled={str(path)!r} is no file; {cure}") from error
    except Exception as error:  # what is no such file can raise anything
        reason = one_line(error)
        reason = "it is no .npz file, or holds objects" if "allow_pickle" in reason else reason
        raise ValueError(f"relabeled={str(path)!r} cannot be read: {reason}; {cure}") from error
    if missing:
        raise ValueError(f"relabeled={str(path)!r} has no array {missing!r}; {cure}")
    if given.dtype.kind not in "iu" or given.ndim != 1:
        told = f"holds labels of {given.dtype} and shape {given.shape}"
        raise ValueError(
            f"relabeled={str(path)!r} {told}; they must be class numbers, one for each example"
        )
    if given.shape != tuple(labels.given.shape) or classes != labels.classes:
        raise ValueError(
            f"relabeled={str(path)!r} holds {len(given)} labels of {len(classes)} classes, but the data has "
            f"{len(labels.given)} examples of {len(labels.classes)}; it belongs to other data"
        )
    if names and isinstance(inputs, Files) and names != digest_names(inputs):
        raise ValueError(
            f"relabeled={str(path)!r} goes by the number of each file, and files were renamed, moved or replaced; "
            "put them back, or train on them as they are and audit that"
        )
    return torch.from_numpy(given.astype(np.int64))


def _doubt_rows(experiment: Experiment, inputs: Inputs) -> list[str]:
    """A note where labels by number meet other arrays than they were made for: perhaps better features, or mixed up."""
    if experiment.relabeled is None or isinstance(inputs, Files):
        return []
    made_for = recorded_digest(Path(experiment.relabeled).read_bytes())
    if not made_for or made_for == digest_inputs(inputs):
        return []
    return [
        f"relabeled={experiment.relabeled!r} was made for other inputs than these and goes by the number of the row; "
        "make sure that the rows are the same examples in the same order"
    ]


def _chosen(experiment: Experiment, labels: Labels, train: Tensor) -> Tensor:
    """The examples to train on: all, or those that are known to be right."""
    if not experiment.only_clean:
        return train
    if labels.clean is None:
        raise ValueError("only_clean=True needs the true labels, which this data set does not know")
    kept = train[(labels.given == labels.clean)[train]]
    if not len(kept):
        raise ValueError("only_clean=True leaves no example: none of the labels is right")
    return kept


def _hold_out(
    experiment: Experiment, labels: Labels, *, has_validation: bool
) -> tuple[Tensor, Tensor]:
    wish = 0.0 if has_validation else experiment.held_out
    num = round(wish * len(labels.given)) if wish < 1 else round(wish)
    if not num:
        return torch.arange(len(labels.given)), torch.empty(0, dtype=torch.int64)
    return split_balanced(labels, num, seed=experiment.seed)


def _optional(experiment: Experiment, name: str) -> Split | None:
    try:
        return experiment.data.open(name)
    except NoSplit:
        return None


def truth(labels: Labels, wish: str) -> Tensor:
    """The true labels where they are wished and known, else the given ones."""
    return labels.clean if wish == "clean" and labels.clean is not None else labels.given


def are_in_doubt(split: str, wish: str, learned: Labels) -> bool:
    """Whether the labels that count on a split of a run come from where wrong ones among those learned come from."""
    if split not in ("train", "validation") or learned.clean is None:
        return split in ("train", "validation")
    is_wrong = (learned.given != learned.clean) & (learned.given >= 0)
    return split == "validation" and wish == "given" and bool(is_wrong.any())


def _replaced(experiment: Experiment, noise: OpenSet, inputs: Inputs, labels: Labels) -> Tensor:
    """The inputs with those of open-set noise put in."""
    if experiment.outside is None:
        raise ValueError("open-set noise needs outside=, the data set that its images come from")
    foreign = experiment.outside.open("train").inputs
    if (
        not isinstance(inputs, Tensor)
        or not isinstance(foreign, Tensor)
        or inputs.shape[1:] != foreign.shape[1:]
    ):
        raise ValueError(
            "open-set noise needs two data sets of arrays with one shape, such as CIFAR-10 and CIFAR-100"
        )
    places, chosen = noise.replacements(labels, len(foreign))
    inputs = inputs.clone()
    inputs[places] = foreign[chosen]
    return inputs
