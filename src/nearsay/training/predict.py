"""Predictions of trained networks: a pass over examples, a finished run on new data, and Eq. 2.

`Pass` makes the table of features and logits that everything after training reads. `predict_run`
does so with the networks of a finished run. `propagate` predicts the labels of training examples
from their neighbors (label propagation, paper Eq. 2).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Conv2d, Module

from nearsay import distributed, metrics
from nearsay.batch import PADDING, Files, Inputs, Labels, Outputs, Predictions
from nearsay.data.labels_file import pack_relabeled
from nearsay.data.loader import MARGIN, finish, num_workers, sweep
from nearsay.errors import BAD_DATA, CANNOT_CREATE, RunError, one_line
from nearsay.experiment import Experiment
from nearsay.files import load_sealed
from nearsay.label_propagation import propagate_labels
from nearsay.training.checkpoints import open_run, write_whole
from nearsay.training.run_folder import (
    MADE_ANEW,
    array_shape,
    read_experiment,
    read_labels,
    read_origin,
    read_predictions,
)
from nearsay.transforms.views import Transform

# Rows of small images, and pixels of larger ones, in one batch.
_ROWS = 1024
_PIXELS = _ROWS * 32 * 32 * 3


class Predicted(NamedTuple):
    """The table, and the examples that are not in it."""

    # On the CPU.
    predictions: Predictions
    # The reason why an example could not be decoded, by its number.
    unreadable: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass of networks over a data set, in evaluation mode.

    Attributes:
        normalize: The last transform before the network.
        size: The height and width to which image files are cut and resized.
        device: Where the networks are.
        dtype: The dtype of their arithmetic.
        workers: Processes that decode images; None is one per core.
        timeout: Seconds to wait for a worker.
        margin: The share of an image file's shorter side that is looked at.
    """

    normalize: Transform | None
    size: int
    device: torch.device
    dtype: torch.dtype
    workers: int | None = None
    timeout: float = 600.0
    margin: float = MARGIN

    def over(
        self, networks: Sequence[Module], inputs: Inputs, *, with_features: bool = True
    ) -> Predicted:
        """The features of the first network, and the logits; of several the log of the mean."""
        return self._over(networks, inputs, with_features=with_features, part=(0, 1))

    def together(self, networks: Sequence[Module], inputs: Inputs) -> Predicted:
        """The same without features, bit for bit, shared by all processes; each has the whole.

        So no process waits long for another, however many examples there are.
        """
        num = distributed.num_processes()
        with _with_first_buffers(networks):
            # With fewer batches than processes, each does everything.
            if len(inputs) <= (num - 1) * self._batch_size(inputs):
                return self.over(networks, inputs, with_features=False)
            own = self._over(networks, inputs, with_features=False, part=(distributed.rank(), num))
        logits = distributed.join(own.predictions.logits, self.device)
        indices = distributed.join(own.predictions.indices, self.device)
        lines = [json.dumps(problem) + "\n" for problem in own.unreadable.items()]
        problems = distributed.join_texts("".join(lines), self.device)
        unreadable = dict(map(json.loads, problems.splitlines()))
        return Predicted(Predictions(torch.empty(len(indices), 0), logits, indices), unreadable)

    @torch.no_grad()
    def _over(
        self,
        networks: Sequence[Module],
        inputs: Inputs,
        *,
        with_features: bool,
        part: tuple[int, int],
    ) -> Predicted:
        if not len(inputs):
            raise ValueError("inputs must have examples, got 0.")
        pieces: list[Predictions] = []
        unreadable: dict[int, str] = {}
        batches = sweep(
            inputs,
            size=self.size,
            margin=self.margin,
            batch_size=self._batch_size(inputs),
            workers=num_workers(inputs, self.workers),
            timeout=self.timeout,
            pin=self.device.type == "cuda",
            part=part,
        )
        with _evaluating(networks), batches as rows:
            for indices, images, problems in rows:
                assert images is not None
                unreadable.update(problems)
                features, logits = self._outputs(networks, images)
                is_real = indices != PADDING
                if with_features:
                    kept = features.float().cpu()[is_real]  # (B, D)
                else:
                    kept = torch.empty(int(is_real.sum()), 0)
                pieces.append(Predictions(kept, logits.float().cpu()[is_real], indices[is_real]))
        table = Predictions(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))
        return Predicted(table, unreadable)

    def _outputs(self, networks: Sequence[Module], images: Tensor) -> Outputs:
        inputs = finish(images.to(self.device, non_blocking=True), self.normalize)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            outputs: list[Outputs] = [network(inputs) for network in networks]
        if len(outputs) == 1:
            return outputs[0]
        # The log of the sum of probabilities is a logit of their mean: a constant does not matter.
        log_probabilities = [part.logits.float().log_softmax(dim=1) for part in outputs]
        logits = torch.stack(log_probabilities).logsumexp(dim=0)  # (B, C)
        return Outputs(outputs[0].features, logits)

    def _batch_size(self, inputs: Inputs) -> int:
        height, width = self.size, self.size
        if isinstance(inputs, Tensor):
            if inputs.ndim == 2:
                return _ROWS
            height, width = inputs.shape[-2:]
        return max(1, min(_ROWS, _PIXELS // (3 * height * width)))


class Trained(NamedTuple):
    """What a finished run has learned."""

    # In evaluation mode, on the CPU.
    networks: list[Module]
    experiment: Experiment
    # The labels that were learned.
    labels: Labels
    # The content of experiment.json.
    origin: Mapping[str, Any]

    @property
    def wants_images(self) -> bool:
        """Whether the networks take images, and not features."""
        return any(isinstance(part, Conv2d) for part in self.networks[0].modules())


class View(NamedTuple):
    """The part of an image that the networks of a run were trained on."""

    height: int
    width: int
    # The share of a file's shorter side that is kept of the middle.
    margin: float

    def edge(self) -> int:
        """The height and width to resize files to; ValueError if the run's are not equal."""
        if self.height != self.width:
            raise ValueError(
                f"images must be an array of {self.height} × {self.width} pixels for this run, got "
                "files, which become squares."
            )
        return self.height


def open_trained(folder: Path) -> Trained:
    """The networks of a finished run with their weights."""
    origin, experiment = read_origin(folder), read_experiment(folder)
    labels = read_labels(folder)
    weights = _read_weights(folder / "model.safetensors")
    num_inputs = _recorded_num_inputs(folder, origin)
    networks = []
    for number in range(experiment.networks):
        # The weights of two networks have the numbers of the networks before their names.
        prefix = f"{number}." if experiment.networks > 1 else ""
        own = {}
        for name, tensor in weights.items():
            if name.startswith(prefix):
                own[name.removeprefix(prefix)] = tensor
        network = experiment.backbone.build(len(labels.classes), num_inputs=num_inputs)
        try:
            network.load_state_dict(own)
        except RuntimeError as error:
            raise RunError(
                f"the weights in {folder} do not fit its experiment: {one_line(error)}", BAD_DATA
            ) from error
        networks.append(network.eval())
    return Trained(networks, experiment, labels, origin)


def predict_run(
    folder: Path, inputs: Inputs, *, device: str = "auto", workers: int | None = None
) -> Predicted:
    """The predictions of a finished run for other images or features."""
    trained = open_trained(folder)
    experiment = trained.experiment
    machine = replace(experiment.machine, device=device)
    place = machine.find_device()
    _check_inputs(inputs, trained, _recorded_num_inputs(folder, trained.origin))
    size, margin = experiment.image_size, MARGIN
    if isinstance(inputs, Files):
        view = find_view(experiment, trained.origin)
        size, margin = view.edge(), view.margin
    look = Pass(
        normalize=experiment.normalize,
        size=size,
        margin=margin,
        device=place,
        dtype=machine.find_dtype(place),
        workers=machine.workers if workers is None else workers,
        timeout=machine.timeout,
    )
    return look.over([network.to(place) for network in trained.networks], inputs)


def find_view(experiment: Experiment, origin: Mapping[str, Any]) -> View:
    """The part of an image that a run looks at: whole arrays, or the middle of files.

    Older runs have no `image_shape` in their record; then the data is opened, if it still exists.
    """
    try:
        if "image_shape" in origin:
            shape = origin["image_shape"]
        else:
            shape = array_shape(experiment.data.open("train").inputs)
    except (ImportError, OSError, RuntimeError, ValueError):
        shape = None
    if shape is None:
        return View(experiment.image_size, experiment.image_size, MARGIN)
    is_pair = isinstance(shape, list) and len(shape) == 2
    if not is_pair or not all(type(edge) is int and edge > 0 for edge in shape):
        raise RunError(
            f"image_shape in experiment.json must be [height, width], got {shape!r}. "
            "Train again in another folder.",
            BAD_DATA,
        )
    height, width = shape
    return View(height, width, 1.0)


def propagate(
    folder: Path, *, k: int = 50, mu: float = 0.02, out: Path | None = None
) -> dict[str, Any]:
    """Propagate the labels of a finished run over its features, and write them to be learned.

    Args:
        folder: The run.
        k: The number of neighbors.
        mu: The weight of the given labels.
        out: The file, for `--set labels_file=FILE`; by default `propagated.npz` in the folder.

    Returns:
        How many labels changed, and how many are right before and after, if that is known.
    """
    target = folder / "propagated.npz" if out is None else out
    _check_target(target)
    labels = read_labels(folder)
    predictions = read_predictions(folder, labels)
    shown = metrics.aligned(labels, predictions)
    scores = propagate_labels(predictions.features, shown.given, len(labels.classes), k=k, mu=mu)
    # An example that no label reaches has scores of 0, and gets no label.
    propagated = scores.argmax(dim=1).where(scores.sum(dim=1) > 0, -1)
    given = torch.full_like(labels.given, -1)
    given[predictions.indices] = propagated
    content = pack_relabeled(given, (folder / "labels.npz").read_bytes())
    is_inside = target.absolute().parent.resolve() == folder.resolve()
    with open_run(folder, cure="choose another file with --out") if is_inside else nullcontext():
        write_whole(target, content)
    return {
        "file": str(target),
        "num_examples": len(propagated),
        "num_changed": int((propagated != shown.given).sum()),
        "accuracy_before": _share_right(shown.given, shown.clean),
        "accuracy_after": _share_right(propagated, shown.clean),
    }


def propagate_in_run(
    predictions: Predictions, given: Tensor, clean: Tensor | None, train: Tensor
) -> tuple[Tensor, float | None]:
    """All labels (N,) after propagating those of the examples `train`, and the share that is right.

    An example that no label reaches keeps its own. The share, the transductive accuracy, is None if
    the true labels are unknown.
    """
    is_trained = torch.isin(predictions.indices, train)
    indices, features = predictions.indices[is_trained], predictions.features[is_trained]
    num_classes = int(predictions.logits.shape[1])
    scores = propagate_labels(features, given[indices], num_classes)
    labels = given.clone()
    labels[indices] = scores.argmax(dim=1).where(scores.sum(dim=1) > 0, given[indices])
    return labels, _share_right(labels[indices], None if clean is None else clean[indices])


def pack_networks(networks: Sequence[Module]) -> dict[str, Tensor]:
    """The content of `model.safetensors`; names of several networks begin with their numbers."""
    tensors = {}
    for number, network in enumerate(networks):
        prefix = "" if len(networks) == 1 else f"{number}."
        for name, tensor in network.state_dict().items():
            tensors[f"{prefix}{name}"] = tensor.detach().cpu().contiguous()
    return tensors


@contextmanager
def _evaluating(networks: Sequence[Module]) -> Iterator[None]:
    """Evaluation mode inside; afterwards each network is in the mode that it had before."""
    was_training = [network.training for network in networks]
    for network in networks:
        network.eval()
    try:
        yield
    finally:
        for network, was in zip(networks, was_training, strict=True):
            network.train(was)


@contextmanager
def _with_first_buffers(networks: Sequence[Module]) -> Iterator[None]:
    """The buffers of the first process inside: its networks are saved, and BatchNorm may differ."""
    buffers: list[Tensor] = []
    if distributed.num_processes() > 1:
        for network in networks:
            buffers += network.buffers()
    before = [buffer.clone() for buffer in buffers]
    distributed.broadcast_(buffers)
    try:
        yield
    finally:
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise RunError(
            f"{path.parent} has no {path.name}: the run is not finished. Train it to the end.",
            BAD_DATA,
        )
    try:
        return load_sealed(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {error}. {MADE_ANEW}", BAD_DATA) from error


def _recorded_num_inputs(folder: Path, origin: Mapping[str, Any]) -> int:
    """Channels of images, or the width of features; the weights do not say which input is first."""
    num_inputs = origin.get("num_inputs")
    is_whole = isinstance(num_inputs, int) and not isinstance(num_inputs, bool)
    if not is_whole or num_inputs < 1:  # type: ignore[operator]
        raise RunError(
            f"num_inputs in {folder / 'experiment.json'} must be 1 or more, got {num_inputs!r}. "
            "Train again in another folder.",
            BAD_DATA,
        )
    return num_inputs  # type: ignore[return-value]


def _check_inputs(inputs: Inputs, trained: Trained, num_inputs: int) -> None:
    """Refuse images for a run on features, features for one on images, and other widths."""
    if isinstance(inputs, Files):
        are_images, num_given, given = True, 3, "image files"
    else:
        are_images, num_given = inputs.ndim == 4, inputs.shape[1]
        given = f"an array {tuple(inputs.shape)}"
    if are_images == trained.wants_images and num_given == num_inputs:
        return
    expected = f"features (N, {num_inputs})"
    if trained.wants_images:
        expected = f"images of {num_inputs} channels"
    raise ValueError(f"inputs must be {expected} for this run, got {given}.")


def _check_target(target: Path) -> None:
    """Refuse to replace a file that holds anything but labels as they are written here."""
    if not target.is_file():
        return
    try:
        with np.load(target, allow_pickle=False) as arrays:
            names = set(arrays.files)
        is_ours = {"given", "classes"} <= names <= {"given", "classes", "inputs", "names"}
    # What is no .npz file can raise any exception.
    except Exception:
        is_ours = False
    if not is_ours:
        raise RunError(f"{target} is a file of another kind; choose another --out", CANNOT_CREATE)


def _share_right(labels: Tensor, clean: Tensor | None) -> float | None:
    """The share of labels that are the true class, among those where it is known."""
    if clean is None:
        return None
    is_known = clean >= 0
    return (labels == clean)[is_known].double().mean().item()
