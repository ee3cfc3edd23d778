"""What an experiment learns from and is evaluated on: splits opened, noise made, examples held out.

`open_splits` gives the splits; `Feed` gives the rows of each step of training.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearsay import distributed, rng
from nearsay.batch import DataInfo, Dataset, Files, Inputs, Labels, Noise, Split
from nearsay.data.inspect import describe
from nearsay.data.labels_file import digest_inputs, file_size, read_relabeled, recorded_digest
from nearsay.data.loader import Order, Rows, Stream, is_resident, num_workers, training_reader
from nearsay.errors import DataError, NoSplit
from nearsay.experiment import Experiment
from nearsay.noise import OpenSet, split_balanced

# With more files than this, looking at the size of each takes too long at every start.
_MAX_COMPARED = 200_000


class Judged(NamedTuple):
    """Examples that are evaluated and never trained on, with the labels that count."""

    # "validation", "test" or "second_test"
    name: str
    inputs: Inputs
    truth: Tensor  # (n,)


class Splits(NamedTuple):
    """The training examples with the labels to learn, and the splits to evaluate on."""

    # Of all N examples of the train split, those held out too.
    inputs: Inputs
    # Of all N, with noise.
    labels: Labels
    # The examples to train on, and those that are held out.
    train: Tensor  # (n,)
    held_out: Tensor  # (m,)
    judged: list[Judged]
    # What the second network learns, if its noise is another.
    other_given: Tensor | None = None  # (N,)
    # What the user should know.
    notes: tuple[str, ...] = ()

    def example(self, size: int) -> Tensor:
        """An input, for its shape; image files become squares of that size."""
        return torch.empty(3, size, size) if isinstance(self.inputs, Files) else self.inputs[0]


def open_splits(experiment: Experiment) -> Splits:
    """Open all splits and make the noise, once; ValueError if they do not fit together."""
    inputs, pure = open_train(experiment)
    _check_train(pure)
    labels = _learned_labels(experiment, experiment.noise, pure, inputs)
    if not (labels.given >= 0).any():
        raise ValueError("the train split must have labels, got unlabeled examples only.")
    validation, test = _open_or_none(experiment, "validation"), _open_or_none(experiment, "test")
    second = None if experiment.second_test is None else experiment.second_test.open("test")
    train, held_out = _hold_out(experiment, labels, has_validation=validation is not None)
    train = _only_clean(experiment, labels, train)

    wish = experiment.validation_labels
    judged = []
    if validation is not None:
        judged.append(Judged("validation", validation.inputs, truth(validation.labels, wish)))
    elif len(held_out):
        kept = truth(labels, wish)[held_out]
        judged.append(Judged("validation", select(inputs, held_out), kept))
    if test is not None:
        judged.append(Judged("test", test.inputs, truth(test.labels, "clean")))
    if second is not None:
        judged.append(Judged("second_test", second.inputs, truth(second.labels, "clean")))

    _check_overlap(inputs, [split.inputs for split in (validation, test) if split is not None])
    for split in (validation, test, second):
        if split is not None and split.labels.classes != labels.classes:
            raise ValueError(
                f"all splits must have the same classes in the same order, got "
                f"{labels.classes[:5]} in train and {split.labels.classes[:5]} in another."
            )
    notes = []
    labeled = []
    for part in judged:
        if (part.truth >= 0).any():
            labeled.append(part)
        else:
            notes.append(f"the {part.name} split has no labels, so it is not evaluated")
    notes += _row_notes(experiment, inputs)
    if len(labels.classes) == 1:
        notes.append(
            f"{labels.classes[0]!r} is the only class, so no label can be found wrong; "
            "add examples of another class"
        )
    other = _other_labels(experiment, pure, inputs)
    return Splits(inputs, labels, train, held_out, labeled, other, tuple(notes))


def open_train(experiment: Experiment) -> Split:
    """The train split before noise of labels, with the images that open-set noise puts in."""
    opened = experiment.data.open("train")
    _check_opened(experiment.data, opened)
    inputs, labels = opened
    if isinstance(experiment.noise, OpenSet) and len(labels.given):
        inputs = _with_foreign_images(experiment, experiment.noise, inputs, labels)
    return Split(inputs, labels)


def _check_opened(data: Dataset, opened: Any) -> None:
    """Refuse what no split is, and a user's own description that differs from the data."""
    is_pair = isinstance(opened, tuple) and len(opened) == 2
    if not is_pair or not isinstance(opened[1], Labels) or not hasattr(opened[0], "__len__"):
        parts = opened if isinstance(opened, tuple) else (opened,)
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise DataError(
            f"{type(data).__name__}.open must return Split(inputs, Labels(...)), got ({kinds})."
        )
    inputs, labels = opened
    # The descriptions of our own data sets are tested, and some of them read a whole folder.
    is_ours = type(data).__module__.partition(".")[0] == "nearsay"
    if is_ours or not hasattr(data, "describe"):
        return
    described = describe(data)
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else None
    actual = DataInfo(len(labels.classes), shape, len(inputs))
    for name, said, real in zip(DataInfo._fields, described, actual, strict=True):
        if said is not None and real is not None and said != real:
            raise DataError(
                f"{type(data).__name__}.describe must return {name}={real}, as open has, "
                f"got {said}."
            )


def select(inputs: Inputs, rows: Tensor) -> Inputs:
    """Some of the examples."""
    if isinstance(inputs, Files):
        return Files(inputs.root, tuple(inputs.names[row] for row in rows.tolist()))
    return inputs[rows]


def truth(labels: Labels, wish: str) -> Tensor:
    """The labels that count: the true ones if `wish` is "clean" and they are known."""
    if wish == "clean" and labels.clean is not None:
        return labels.clean
    return labels.given


def are_in_doubt(split: str, wish: str, learned: Labels) -> bool:
    """Whether the labels that count on a split may be as wrong as those that were learned."""
    if split not in ("train", "validation"):
        return False
    if learned.clean is None:
        return True
    is_wrong = (learned.given != learned.clean) & (learned.given >= 0)
    return split == "validation" and wish == "given" and bool(is_wrong.any())


def make_order(experiment: Experiment, splits: Splits) -> Order:
    """Which examples are in which batch; all processes get equal parts of a batch."""
    num = distributed.num_processes()
    num_examples = len(splits.train)
    size = min(experiment.batch_size, num_examples)
    if experiment.batch_size % num or size < num:
        raise ValueError(
            f"batch_size must be a multiple of the {num} processes and leave an example for each, "
            f"got {experiment.batch_size} with {num_examples} examples."
        )
    if size < 2:
        raise ValueError(f"the train split must have 2 examples or more, got {num_examples}.")
    kinds = splits.labels.given[splits.train] if experiment.balanced else None
    return Order(splits.train, batch_size=size - size % num, seed=experiment.seed, kinds=kinds)


class Feed:
    """The rows of every step, equal bit for bit whether they are resident or streamed."""

    def __init__(self, experiment: Experiment, splits: Splits, device: torch.device) -> None:
        machine, inputs = experiment.machine, splits.inputs
        self.order = make_order(experiment, splits)
        reader = training_reader(
            inputs, experiment.augment, size=experiment.image_size, seed=experiment.seed
        )
        # Whether the reader cuts random crops, the first step of augmentation.
        self.is_cut = any(crop is not None for crop in reader.crops)
        # All inputs on the device, or None if they are streamed.
        self.source: Tensor | None = None  # (N, ...)
        self._stream: Stream | None = None
        if is_resident(inputs, device, machine.loading):
            assert isinstance(inputs, Tensor)
            self.source = inputs.to(device)
            self.order.to(device)
        else:
            workers = num_workers(inputs, machine.workers)
            is_pinned = device.type == "cuda"
            self._stream = Stream(
                reader, self._own_examples, workers, machine.timeout, pin=is_pinned
            )

    def rows(self, steps: range) -> Iterator[Rows]:
        """The rows of each step in turn."""
        if self._stream is not None:
            return self._stream.rows(steps)
        return (Rows(self.order.batch(step), None) for step in steps)

    def read(self, step: int) -> Rows:
        """The rows of one step, read at once and in this process."""
        if self._stream is not None:
            return self._stream.reader.read(*self._own_examples(step))
        return Rows(self.order.batch(step), None)

    def explained(self) -> AbstractContextManager[None]:
        """Name the files in flight if a worker dies inside, and end all workers on leaving."""
        return nullcontext() if self._stream is None else self._stream.explained()

    def _own_examples(self, step: int) -> tuple[Tensor, int]:
        """The examples of this process in a step, and the pass through the data."""
        share = self.order.batch_size // distributed.num_processes()
        start = distributed.rank() * share
        return self.order.batch(step)[start : start + share], step // self.order.batches_per_pass


def _check_train(labels: Labels) -> None:
    if not len(labels.given):
        raise ValueError("the train split must have examples, got 0.")
    if labels.clean is not None and (labels.clean < 0).all():
        raise ValueError(
            f"clean must hold classes of the train split, such as {labels.classes[:5]}, got others "
            "only. Use the same names, or leave the true labels out."
        )


def _learned_labels(
    experiment: Experiment, noise: Noise | None, labels: Labels, inputs: Inputs
) -> Labels:
    """The labels after noise and corrections, without those that are to be hidden."""
    if noise is not None:
        labels = noise(labels, inputs if isinstance(inputs, Tensor) else None)
    if experiment.labels_file is not None:
        given = read_relabeled(Path(experiment.labels_file), labels, inputs)
        labels = Labels(given, labels.clean, labels.classes)
    if experiment.labeled == 1:
        return labels
    known = (labels.given >= 0).nonzero()[:, 0]
    order = known[rng.shuffle(experiment.seed, "labeled choice", 0, known)]
    given = labels.given.clone()
    given[order[max(1, round(experiment.labeled * len(known))) :]] = -1
    return Labels(given, labels.clean, labels.classes)


def _other_labels(experiment: Experiment, pure: Labels, inputs: Inputs) -> Tensor | None:
    """(N,) labels of the second network, with noise of the next seed; None if they are the same."""
    if not experiment.noise_per_network:
        return None
    noise = experiment.noise
    if isinstance(noise, OpenSet):
        raise ValueError("noise must change labels only with noise_per_network, got OpenSet.")
    seed = getattr(noise, "seed", None)
    if noise is None or seed is None:
        kind = type(noise).__name__
        raise ValueError(f"noise must have a seed with noise_per_network, got {kind} without.")
    other = replace(noise, seed=seed + 1)  # type: ignore[type-var]
    return _learned_labels(experiment, other, pure, inputs).given


def _row_notes(experiment: Experiment, inputs: Inputs) -> list[str]:
    """A note if labels by row number meet other arrays than those that they were made for."""
    if experiment.labels_file is None or isinstance(inputs, Files):
        return []
    made_for = recorded_digest(Path(experiment.labels_file).read_bytes())
    if not made_for or made_for == digest_inputs(inputs):
        return []
    return [
        f"labels_file={experiment.labels_file!r} was made for other inputs and labels examples by "
        "row number; make sure that the rows are the same examples in the same order"
    ]


def _only_clean(experiment: Experiment, labels: Labels, train: Tensor) -> Tensor:
    """The examples to train on: all, or those with a label that is known to be right."""
    if not experiment.only_clean:
        return train
    if labels.clean is None:
        raise ValueError("only_clean must be False for data without true labels, got True.")
    kept = train[(labels.given == labels.clean)[train]]
    if not len(kept):
        raise ValueError("only_clean must leave an example, but every label is wrong.")
    return kept


def _hold_out(
    experiment: Experiment, labels: Labels, *, has_validation: bool
) -> tuple[Tensor, Tensor]:
    """The examples to train on, and those to hold out for validation."""
    share = 0.0 if has_validation else experiment.held_out
    num = round(share * len(labels.given)) if share < 1 else round(share)
    if not num:
        return torch.arange(len(labels.given)), torch.empty(0, dtype=torch.int64)
    return split_balanced(labels, num, seed=experiment.seed)


def _open_or_none(experiment: Experiment, name: str) -> Split | None:
    try:
        return experiment.data.open(name)
    except NoSplit:
        return None


def _with_foreign_images(
    experiment: Experiment, noise: OpenSet, inputs: Inputs, labels: Labels
) -> Tensor:
    """The inputs with those of open-set noise put in."""
    if experiment.outside is None:
        raise ValueError("outside must be a data set for open-set noise, got None.")
    foreign = experiment.outside.open("train").inputs
    are_arrays = isinstance(inputs, Tensor) and isinstance(foreign, Tensor)
    if not are_arrays or inputs.shape[1:] != foreign.shape[1:]:  # type: ignore[union-attr]
        raise ValueError(
            "outside must hold arrays of the same shape as data, as CIFAR-10 and CIFAR-100 do, "
            "for open-set noise."
        )
    assert isinstance(inputs, Tensor)
    assert isinstance(foreign, Tensor)
    places, chosen = noise.replacements(labels, len(foreign))
    inputs = inputs.clone()
    inputs[places] = foreign[chosen]
    return inputs


def _check_overlap(inputs: Inputs, others: list[Inputs]) -> None:
    """Refuse files of other splits that are byte for byte in train; no file is read twice."""
    if not isinstance(inputs, Files):
        return
    compared = []
    for files in others:
        if isinstance(files, Files) and len(inputs) + len(files) <= _MAX_COMPARED:
            compared.append(files)
    # Only files of equal size can be equal, so only those are read.
    by_size: dict[int, list[str]] = {}
    if compared:
        for name in inputs.names:
            by_size.setdefault(file_size(inputs, name), []).append(name)
    # size -> digest -> the first file of train that has both
    first_of: dict[int, dict[bytes, str]] = {}
    copies = []
    for files in compared:
        for name in files.names:
            size = file_size(files, name)
            if size < 1 or size not in by_size:
                continue
            if size not in first_of:
                twins = reversed(by_size[size])
                first_of[size] = {_digest(inputs, twin): twin for twin in twins}
            digest = _digest(files, name)
            if digest and digest in first_of[size]:
                copies.append((name, first_of[size][digest]))
    if copies:
        name, twin = copies[0]
        raise ValueError(
            f"images of validation and test must not be in train, got {len(copies)}, such as "
            f"{name!r}, a copy of {twin!r}. Remove one of the two."
        )


def _digest(files: Files, name: str) -> bytes:
    """SHA-256 of a file's content; empty if it is not a file."""
    path = files.root / name
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
