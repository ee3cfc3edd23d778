"""The nouns that everything else speaks in; the shapes of all tensors are fixed here.

Letters: B rows of a batch, C classes, D features, K neighbors, N examples of a data set, V views.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nearsay.validation import can_look, check_tensors, check_together, check_whole

_Function = TypeVar("_Function", bound=Callable[..., object])

PADDING = -1
"""The index of a row that is nobody: no loss, nobody's neighbor."""


class Outputs(NamedTuple):
    """What a network says of a batch."""

    features: Tensor  # (B, D), what enters the classifier
    logits: Tensor  # (B, C)


class Mix(NamedTuple):
    """How mixup blended a batch: row i = weight · itself + (1 − weight) · its partner."""

    partners: Tensor  # (B,) position of the partner in the batch that was mixed, of which this may be a shard
    partner_indices: Tensor  # (B,) who the partner is
    weight: Tensor  # (B,) λ in [½, 1], so a row stays mostly itself


class Predictions(NamedTuple):
    """One pass of a network over a data set: what everything after training reads."""

    features: Tensor  # (N, D)
    logits: Tensor  # (N, C)
    indices: Tensor  # (N,) int64


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of a data set, apart from its images."""

    given: Tensor  # (N,) int64; −1 where unlabeled
    clean: (
        Tensor | None
    )  # (N,) int64, None if unknown; −1 where the true class is outside the vocabulary
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, labels in (("given", self.given), ("clean", self.clean)):
            if labels is not None:
                _check_labels(name, labels, len(self.classes))
        if self.clean is not None and self.clean.shape != self.given.shape:
            raise ValueError(
                f"{len(self.given)} given labels but {len(self.clean)} clean ones; there must be as many"
            )


@dataclass(frozen=True)
class Files:
    """Images on disk, decoded when they are needed; the number of an example is its place here."""

    root: Path
    names: tuple[str, ...]  # paths below the root, with forward slashes

    def __len__(self) -> int:
        return len(self.names)


class Split(NamedTuple):
    """A part of a data set: what the network sees, and the labels apart from it."""

    inputs: (
        Tensor | Files
    )  # (N, 3, H, W) uint8 images, or (N, D) float32 features, or images on disk
    labels: Labels


class Dataset(Protocol):
    """Where examples come from."""

    def open(self, split: str) -> Split:
        """The split "train", "validation" or "test"; NoSplit if there is none of that name."""
        ...


class Noise(Protocol):
    """A function from labels to labels, called once before training."""

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """New given labels, the same clean ones; `inputs` for noise that depends on what an example looks like."""
        ...


class Loss(NamedTuple):
    """The number to minimize and what it was made of.

    Under several processes `total` is scaled so that its mean over processes is the loss of the global batch,
    which is what averaging gradients expects. `terms` are detached, for the log.
    """

    total: Tensor  # ()
    terms: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows for one step. `inputs` may be anything the network takes whose first axis is the rows.

    Rows are view-major: with V views of B examples there are V·B rows, and the same index stands in each view.
    The sum of a target row is the weight of its label: 0 means unlabeled.
    """

    inputs: Tensor  # (V·B, ...)
    targets: Tensor  # (V·B, C) floating point
    indices: Tensor  # (V·B,) int64 who the row is; −1 is padding
    views: int = 1
    mix: Mix | None = None
    plain_targets: Tensor | None = (
        None  # (V·B, C) as they were before mixup, None where there was none
    )
    teacher: Outputs | None = None  # an averaged network on the un-mixed inputs

    @property
    def is_real(self) -> Tensor:
        """(V·B,) bool: the rows that are not padding."""
        return self.indices != PADDING


class Objective(Protocol):
    """A method as a value: its fields are its hyper-parameters, calling it computes the loss."""

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """State between steps, updated only in place; `{}` for almost everyone.

        Tables with a row per example have one more row at the end, where rows that must not be kept are written.
        """
        ...

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """Name of the computation at `epoch`; asked on the host at epoch boundaries, and alone may branch on time."""
        ...

    def __call__(
        self,
        outputs: Outputs,
        batch: Batch,
        epoch: Tensor,
        state: Mapping[str, Tensor],
        phase: str,
    ) -> Loss:
        """The loss of one batch; `epoch` is a 0-d tensor, so ramps are tensor arithmetic."""
        ...


def are_pictures(inputs: Tensor) -> bool:
    """Whether (N, ...) inputs can be looked at: bytes, gray or in color; whatever else a network takes is features."""
    return inputs.ndim == 4 and inputs.dtype == torch.uint8 and inputs.shape[1] in (1, 3)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """(B,) class numbers as (B, C) float32 targets; −1 (unlabeled) becomes a row of zeros.

    Labels on a CPU are checked; on an accelerator, where looking would stall the device, other values become zeros too.
    """
    _check_labels("labels", labels, check_whole("num_classes", num_classes, 1))
    return (labels[:, None].long() == torch.arange(num_classes, device=labels.device)).float()


def first_rows(indices: Tensor) -> Tensor:
    """(B,) bool: the first row of each index, which alone writes into memory; padding never does."""
    order = indices.argsort(stable=True)
    ordered = indices[order]
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(starts).scatter_(0, order, starts) & (indices != PADDING)


def pad(batch: Batch, num_rows: int) -> Batch:
    """The batch (of one view, before mixup) with rows of padding appended, so that all batches have equal shapes."""
    check_tensors(inputs=batch.inputs, targets=batch.targets, indices=batch.indices)
    missing = check_whole(
        "num_rows", num_rows, len(batch.indices), cure=", as many as the batch has"
    )
    missing -= len(batch.indices)
    if batch.views != 1 or batch.mix is not None or batch.teacher is not None:
        raise ValueError("pad a batch first and make its views, teacher and mixup afterwards")

    def extended(rows: Tensor, value: int) -> Tensor:
        return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])

    return Batch(
        inputs=extended(batch.inputs, 0),
        targets=extended(batch.targets, 0),
        indices=extended(batch.indices, PADDING),
    )


def check_outputs(outputs: Outputs, batch: Batch) -> None:
    """Refuse a batch that an objective cannot mean; values are looked at only where it costs nothing."""
    if not isinstance(batch, Batch):
        raise ValueError(
            f"batch of type {type(batch).__name__} must be nearsay.Batch(inputs=..., targets=..., indices=...)"
        )
    for name, said in (
        ("outputs", outputs),
        ("teacher", outputs if batch.teacher is None else batch.teacher),
    ):
        if not isinstance(said, Outputs):
            raise ValueError(
                f"{name} of type {type(said).__name__} must be nearsay.Outputs(features, logits)"
            )
    features, logits = outputs
    check_tensors(features=features, logits=logits, targets=batch.targets, indices=batch.indices)
    check_together(logits, features=features, targets=batch.targets, indices=batch.indices)
    rows = len(logits) if logits.ndim else 0
    if (
        logits.ndim != 2
        or features.ndim != 2
        or len(features) != rows
        or batch.indices.shape != (rows,)
    ):
        raise ValueError(
            f"features {tuple(features.shape)}, logits {tuple(logits.shape)} and indices {tuple(batch.indices.shape)} "
            "must be (B, D), (B, C) and (B,) with one B"
        )
    if not logits.is_floating_point() or not features.is_floating_point():
        raise ValueError(
            f"logits of {logits.dtype} and features of {features.dtype} must be floating point"
        )
    if batch.teacher is not None and batch.teacher.logits.shape != logits.shape:
        raise ValueError(
            f"the teacher's logits {tuple(batch.teacher.logits.shape)} must have the shape {tuple(logits.shape)} of "
            "the logits"
        )
    if batch.mix is not None and any(part.shape != (rows,) for part in batch.mix):
        raise ValueError(
            f"each part of mix must be ({rows},), one number for each row of the batch"
        )
    if batch.targets.shape != logits.shape or not batch.targets.is_floating_point():
        raise ValueError(
            f"targets {tuple(batch.targets.shape)} of {batch.targets.dtype} must be floating-point distributions of "
            f"the shape {tuple(logits.shape)} of the logits; nearsay.one_hot makes them from class numbers"
        )
    if batch.indices.dtype != torch.int64:
        raise ValueError(f"indices of {batch.indices.dtype} must be torch.int64")
    if batch.views < 1 or rows % batch.views:
        raise ValueError(f"{rows} rows cannot be {batch.views} views of the same examples")
    if can_look(batch.targets):
        wrong = (
            ~((batch.targets >= 0) & (batch.targets < torch.inf)) & batch.is_real[:, None]
        )  # true for NaN as well
        if wrong.any():
            row = int(wrong.any(dim=1).nonzero()[0])
            raise ValueError(
                f"target row {row} holds {batch.targets[row][wrong[row]][0].item()}; targets are finite and not "
                "negative, and a row of zeros means unlabeled"
            )


def _check_labels(name: str, labels: Tensor, num_classes: int) -> None:
    check_tensors(**{name: labels})
    if (
        labels.ndim != 1
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
    ):
        raise ValueError(
            f"{name} of shape {tuple(labels.shape)} and {labels.dtype} must be a vector of whole class numbers"
        )
    if can_look(labels) and len(labels):
        labels = (
            labels.long()
        )  # in unsigned or narrow integers −1 and the number of classes may not exist
        outside = labels[(labels < -1) | (labels >= num_classes)]
        if len(outside):
            raise ValueError(
                f"{name} holds {outside[0].item()}, but with {num_classes} classes it must be 0 to {num_classes - 1}, "
                "or -1 for unlabeled"
            )


def check_indices(indices: Tensor, num_examples: int) -> None:
    """Refuse numbers of examples that a memory has no row for; looks only where it costs nothing."""
    if can_look(indices):
        outside = indices[(indices < PADDING) | (indices >= num_examples)]
        if len(outside):
            raise ValueError(
                f"index {outside[0].item()} is not among the {num_examples} examples the memory was made for; "
                f"it must be 0 to {num_examples - 1}, or {PADDING} for padding"
            )


def check_state(state: Mapping[str, Tensor]) -> None:
    """Refuse what is no mapping, such as None."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"state of type {type(state).__name__} must be what objective.init_state(num_examples, num_classes, "
            "num_features) makes, which is {} for most"
        )


def check_place(state: Mapping[str, Tensor], outputs: Outputs) -> None:
    """Refuse a memory that is none, and one that was left behind when the network was moved."""
    check_state(state)
    for name, tensor in state.items():
        if tensor.device != outputs[1].device:
            raise ValueError(
                f"memory[{name!r}] is on {tensor.device} and the logits are on {outputs[1].device}; move all of it "
                "with {name: tensor.to(device) for name, tensor in memory.items()}, or that of an adapter with "
                "criterion.to(device)"
            )
