"""The nouns that all other modules share; the shapes of all tensors are fixed here.

Letters: B rows of a batch, C classes, D features, K neighbors, N examples of a data set, V views.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nearsay.validation import can_look, check_tensors, check_that, check_together, check_whole

PADDING = -1
"""The index of a row that is no example: it adds nothing to a loss and is no neighbor."""


class Outputs(NamedTuple):
    """What a network computes for a batch.

    Attributes:
        features: (B, D) floating point, the inputs of the classifier.
        logits: (B, C) floating point.

    >>> import torch
    >>> Outputs(features=torch.zeros(2, 8), logits=torch.zeros(2, 3)).logits.shape
    torch.Size([2, 3])
    """

    features: Tensor
    logits: Tensor


class Mix(NamedTuple):
    """How mixup blended a batch: row i = weight · itself + (1 − weight) · its partner.

    Attributes:
        partners: (B,) position of the partner in the mixed batch; this batch may be a shard of it.
        partner_indices: (B,) index of the partner, as in `Batch.indices`.
        weight: (B,) λ in [½, 1], so a row stays mostly itself.
    """

    partners: Tensor
    partner_indices: Tensor
    weight: Tensor


class Predictions(NamedTuple):
    """One pass of a network over a data set; all analysis after training reads this.

    Attributes:
        features: (N, D) floating point.
        logits: (N, C) floating point.
        indices: (N,) int64, which example each row is.

    >>> import torch
    >>> seen = Predictions(torch.zeros(2, 8), torch.eye(2), indices=torch.tensor([5, 3]))
    >>> seen.logits.argmax(dim=1)
    tensor([0, 1])
    """

    features: Tensor
    logits: Tensor
    indices: Tensor


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of a data set, apart from its images.

    Attributes:
        given: (N,) int64, the labels to learn from; −1 where unlabeled.
        clean: (N,) int64, the true labels, −1 where the true class is not in `classes`; None if
            they are unknown.
        classes: The name of each class.

    >>> import torch
    >>> labels = Labels(torch.tensor([0, 1, -1]), None, ("cat", "dog"))
    >>> labels.classes[labels.given[1]]
    'dog'
    """

    given: Tensor
    clean: Tensor | None
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_labels("given", self.given, len(self.classes))
        if self.clean is not None:
            _check_labels("clean", self.clean, len(self.classes))
            rows = len(self.given)
            check_that(len(self.clean) == rows, "clean", f"{rows} labels", len(self.clean))


@dataclass(frozen=True)
class Files:
    """Images on disk, decoded when they are needed; an example is its position in `names`.

    Attributes:
        root: The folder of the images.
        names: Paths below the root, with forward slashes.

    >>> len(Files(root=Path("photos"), names=("cat/1.jpg", "dog/2.jpg")))
    2
    """

    root: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)


class Split(NamedTuple):
    """A part of a data set.

    Attributes:
        inputs: (N, 3, H, W) uint8 images, or (N, D) float32 features, or `Files`.
        labels: The labels of the N examples.

    >>> import torch
    >>> split = Split(torch.zeros(2, 5), Labels(torch.tensor([0, 1]), None, ("cat", "dog")))
    >>> inputs, labels = split
    """

    inputs: Tensor | Files
    labels: Labels


class DataInfo(NamedTuple):
    """What a data set contains, known without reading all of it.

    Attributes:
        num_classes: How many classes its labels have.
        shape: (C, H, W) of an image array, (D,) of features, None for image files of any size.
        num_examples: How many examples its training split has; None if only the files can tell.

    >>> DataInfo(num_classes=10, shape=(3, 32, 32), num_examples=50_000).shape
    (3, 32, 32)
    """

    num_classes: int
    shape: tuple[int, ...] | None
    num_examples: int | None


class Dataset(Protocol):
    """Where examples come from: any object with the method `open`.

    Two more methods are used if they exist:

    `describe() -> DataInfo` says what the data contains without reading all of it. Without it,
    `nearsay.data.describe` opens the training split and looks.

    `at(path, split=None) -> Dataset | None` is the same kind of data at another path, or None if
    the path holds something else; `split` is the split that will be opened. Without it, a dataclass
    with a field `path` is copied with that field replaced.

    >>> import torch
    >>> from nearsay.data import describe
    >>> class Stripes:
    ...     def open(self, split):
    ...         images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    ...         return Split(images, Labels(torch.arange(4) % 2, None, ("across", "down")))
    >>> describe(Stripes())
    DataInfo(num_classes=2, shape=(3, 8, 8), num_examples=4)
    """

    def open(self, split: str) -> Split:
        """The split "train", "validation" or "test"; NoSplit if it has no split of that name."""
        ...


class Noise(Protocol):
    """A function from labels to labels, called once before training."""

    def __call__(self, labels: Labels, inputs: Tensor | None = None) -> Labels:
        """New given labels, the same clean ones; `inputs` is for noise that depends on them."""
        ...


class Loss(NamedTuple):
    """The number to minimize and its terms.

    Attributes:
        total: () the loss. Under several processes it is scaled so that its mean over processes is
            the loss of the global batch, because gradients are averaged.
        terms: Detached () tensors by name, for the log.

    >>> import torch
    >>> Loss(torch.tensor(0.5), {"cross_entropy": torch.tensor(0.5)}).total
    tensor(0.5000)
    """

    total: Tensor
    terms: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows for one step.

    Rows are view-major: V views of B examples are V·B rows, and each view repeats the indices.

    Attributes:
        inputs: (V·B, ...) anything that the network takes, one row per example and view.
        targets: (V·B, C) floating point. The sum of a row is the weight of its label; 0 means
            unlabeled.
        indices: (V·B,) int64, which example a row is; −1 is padding.
        views: How many views each example has.
        mix: How mixup blended the rows; None without mixup.
        plain_targets: (V·B, C) the targets before mixup; None without mixup.
        teacher: Outputs of an averaged network on the inputs before mixup; None without one.

    >>> import torch
    >>> batch = Batch(
    ...     inputs=torch.zeros(2, 8),
    ...     targets=one_hot(torch.tensor([0, -1]), num_classes=3),
    ...     indices=torch.tensor([7, 4]),
    ... )
    >>> batch.targets.sum(dim=1)
    tensor([1., 0.])
    """

    inputs: Tensor
    targets: Tensor
    indices: Tensor
    views: int = 1
    mix: Mix | None = None
    plain_targets: Tensor | None = None
    teacher: Outputs | None = None

    @property
    def is_real(self) -> Tensor:
        """(V·B,) bool: the rows that are not padding."""
        return self.indices != PADDING


class Objective(Protocol):
    """A method as a value: its fields are hyper-parameters, and calling it computes the loss.

    >>> import torch
    >>> from nearsay import ELR
    >>> objective: Objective = ELR(beta=0.9)
    >>> state = objective.init_state(num_examples=4, num_classes=3, num_features=8)
    >>> state["averages"].shape
    torch.Size([5, 3])
    """

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """State between steps, updated only in place; `{}` for most losses.

        A table with a row per example has one more row at the end. Rows that must not be kept are
        written there.
        """
        ...

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        """Name of the computation at `epoch`; called on the host at the start of each epoch.

        Only this method may branch on time.
        """
        ...

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        """The loss of one batch; `epoch` is a 0-d tensor, so ramps are tensor arithmetic."""
        ...


def are_pictures(inputs: Tensor) -> bool:
    """Whether (N, ...) inputs are uint8 images, gray or in color; all other inputs are features."""
    return inputs.ndim == 4 and inputs.dtype == torch.uint8 and inputs.shape[1] in (1, 3)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """(B,) class numbers as (B, C) float32 targets; −1 (unlabeled) becomes a row of zeros.

    Labels on a CPU are checked. On an accelerator, where a check would stall the device, any other
    value becomes a row of zeros too.

    Args:
        labels: (B,) class numbers; −1 is unlabeled.
        num_classes: C.

    >>> import torch
    >>> one_hot(torch.tensor([1, -1]), num_classes=2)
    tensor([[0., 1.],
            [0., 0.]])
    """
    _check_labels("labels", labels, check_whole("num_classes", num_classes, 1))
    return (labels[:, None].long() == torch.arange(num_classes, device=labels.device)).float()


def first_rows(indices: Tensor) -> Tensor:
    """(B,) bool: the first row of each index; only this row writes into state. Never padding."""
    # A stable sort puts rows of one example side by side, with the first of them in front.
    order = indices.argsort(stable=True)
    ordered = indices[order]
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(starts).scatter_(0, order, starts) & (indices != PADDING)


def pad(batch: Batch, num_rows: int) -> Batch:
    """A batch with padding rows appended, so that all batches have equal shapes.

    Args:
        batch: one view of each example, with neither a teacher nor mixup.
        num_rows: how many rows the new batch has, at least as many as before.

    >>> import torch
    >>> batch = Batch(
    ...     inputs=torch.ones(1, 2), targets=torch.ones(1, 1), indices=torch.tensor([5])
    ... )
    >>> pad(batch, num_rows=3).indices
    tensor([ 5, -1, -1])
    """
    check_tensors(inputs=batch.inputs, targets=batch.targets, indices=batch.indices)
    rows = len(batch.indices)
    missing = check_whole("num_rows", num_rows, rows) - rows
    if batch.views != 1 or batch.mix is not None or batch.teacher is not None:
        raise ValueError("batch must be padded before it has views, a teacher or mixup.")

    def extended(rows: Tensor, value: int) -> Tensor:
        return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])

    return Batch(
        inputs=extended(batch.inputs, 0),
        targets=extended(batch.targets, 0),
        indices=extended(batch.indices, PADDING),
    )


def check_outputs(outputs: Outputs, batch: Batch) -> None:
    """Refuse outputs and a batch that do not belong together; reads values only on a CPU."""
    _check_type("batch", batch, Batch)
    _check_type("outputs", outputs, Outputs)
    features, logits = outputs
    check_tensors(features=features, logits=logits, targets=batch.targets, indices=batch.indices)
    check_together(logits, features=features, targets=batch.targets, indices=batch.indices)
    for name, values in (("logits", logits), ("features", features), ("targets", batch.targets)):
        check_that(values.ndim == 2, name, "two-dimensional", tuple(values.shape))
        check_that(values.is_floating_point(), name, "floating point", values.dtype)
    check_that(batch.indices.ndim == 1, "indices", "one-dimensional", tuple(batch.indices.shape))
    check_that(batch.indices.dtype == torch.int64, "indices", "torch.int64", batch.indices.dtype)
    rows = len(logits)
    row_counts = {"features": features, "targets": batch.targets, "indices": batch.indices}
    for name, values in row_counts.items():
        check_that(len(values) == rows, name, "as many rows as logits", tuple(values.shape))
    check_that(
        batch.targets.shape == logits.shape,
        "targets",
        "(B, C) like the logits",
        tuple(batch.targets.shape),
        hint="Use nearsay.one_hot for class numbers.",
    )
    has_equal_views = batch.views >= 1 and rows % batch.views == 0
    check_that(has_equal_views, "views", "a divisor of the number of rows", batch.views)
    if batch.teacher is not None:
        _check_type("teacher", batch.teacher, Outputs)
        shape = tuple(batch.teacher.logits.shape)
        check_that(shape == tuple(logits.shape), "teacher logits", "like the logits", shape)
    if batch.mix is not None:
        for name, part in zip(Mix._fields, batch.mix, strict=True):
            check_that(part.shape == (rows,), f"mix.{name}", "one per row", tuple(part.shape))
    if can_look(batch.targets):
        _check_target_values(batch)


def check_indices(indices: Tensor, num_examples: int) -> None:
    """Refuse indices without a row in a table of `num_examples`; reads values only on a CPU."""
    if can_look(indices):
        outside = indices[(indices < PADDING) | (indices >= num_examples)]
        if len(outside):
            raise ValueError(
                f"indices must be from 0 to {num_examples - 1}, or {PADDING} for padding, got "
                f"{outside[0].item()}. The state has a row for {num_examples} examples."
            )


def check_state(state: Mapping[str, Tensor]) -> None:
    """Refuse a state that is no mapping, such as None."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"state must be a mapping, got {type(state).__name__}. "
            "Use objective.init_state(num_examples, num_classes, num_features)."
        )


def check_place(state: Mapping[str, Tensor], outputs: Outputs) -> None:
    """Refuse a state that stayed on another device when the network was moved."""
    check_state(state)
    # By position, because the outputs are checked later and may be a plain tuple.
    device = outputs[1].device
    for name, tensor in state.items():
        if tensor.device != device:
            raise ValueError(
                f"state[{name!r}] must be on the device of the logits, {device}, got "
                f"{tensor.device}. Move every tensor of the state, or the loss module, with .to()."
            )


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be nearsay.{kind.__name__}, got {type(value).__name__}.")


def _check_target_values(batch: Batch) -> None:
    # This comparison is False for NaN as well.
    is_right = (batch.targets >= 0) & (batch.targets < torch.inf)
    wrong = ~is_right & batch.is_real[:, None]
    if wrong.any():
        row = int(wrong.any(dim=1).nonzero()[0])
        value = batch.targets[row][wrong[row]][0].item()
        raise ValueError(f"targets must be finite and 0 or more, got {value} in row {row}.")


def _check_labels(name: str, labels: Tensor, num_classes: int) -> None:
    check_tensors(**{name: labels})
    check_that(labels.ndim == 1, name, "one-dimensional", tuple(labels.shape))
    is_whole = not (labels.is_floating_point() or labels.is_complex())
    is_whole = is_whole and labels.dtype != torch.bool
    check_that(is_whole, name, "whole class numbers", labels.dtype)
    if can_look(labels) and len(labels):
        # In unsigned or narrow integers −1 and the number of classes may not exist.
        numbers = labels.long()
        outside = numbers[(numbers < -1) | (numbers >= num_classes)]
        if len(outside):
            raise ValueError(
                f"{name} must be from 0 to {num_classes - 1}, or -1 for unlabeled, got "
                f"{outside[0].item()}."
            )


Inputs = Tensor | Files
