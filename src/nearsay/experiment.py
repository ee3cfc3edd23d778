"""Every choice of a run as one frozen value: data, network, loss, optimizer, length and machine."""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch.nn import Module

from nearsay.batch import Dataset, Noise, Objective
from nearsay.errors import NoDevice
from nearsay.losses.ncr import NCR
from nearsay.models.resnet import ResNet
from nearsay.optim import SGD, AdamW, Cosine, Schedule
from nearsay.transforms.color import PLUS_MINUS_ONE
from nearsay.transforms.mixup import Mixup
from nearsay.transforms.views import Augment, Transform, Views
from nearsay.validation import check_choice, check_number, check_plain, check_that, check_whole

# torch seeds its generators with 64 bits.
_SEED_LIMIT = 2**63


class Backbone(Protocol):
    """A network as a value."""

    def build(self, num_classes: int, *, num_inputs: int, seed: int = 0) -> Module:
        """A module that returns `Outputs` and has `num_features`; `seed` decides its weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where an experiment runs. These choices change its speed and, up to rounding, nothing else.

    Attributes:
        device: "cpu", "cuda" or "cuda:1"; "auto" is a GPU if there is one.
        precision: "float32" or "bfloat16"; "auto" is bfloat16 on a GPU and float32 on a CPU.
        loading: "resident" keeps all inputs on the device, "streaming" brings each batch to it;
            "auto" is resident if there is room.
        workers: Processes that decode images; None is one per core, at most 8.
        capture: Replay each step from a CUDA graph; None is wherever that is possible.
        compile: Use torch.compile; None is on a GPU if the run is long enough to gain from it.
        deterministic: On a GPU, use only algorithms that give the same bits each time; slower.
        checkpoint_seconds: Seconds between two checkpoints.
        checkpoint_steps: Steps between two checkpoints; if set, the clock is not used.
        timeout: Seconds to wait for a worker or another process before giving up.

    Example:
        >>> Machine(device="cpu").find_device()
        device(type='cpu')
    """

    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    loading: Literal["auto", "resident", "streaming"] = "auto"
    workers: int | None = None
    capture: bool | None = None
    compile: bool | None = None
    deterministic: bool = False
    checkpoint_seconds: float = 60.0
    checkpoint_steps: int | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("auto", "float32", "bfloat16"))
        check_choice("loading", self.loading, ("auto", "resident", "streaming"))
        if self.workers is not None:
            check_whole("workers", self.workers, 0, cure=", or None for one per core")
        if self.checkpoint_steps is not None:
            cure = ", or None to use checkpoint_seconds"
            check_whole("checkpoint_steps", self.checkpoint_steps, 1, cure=cure)
        check_number("checkpoint_seconds", self.checkpoint_seconds, 0)
        check_number("timeout", self.timeout, 1)

    def find_device(self, number: int = 0) -> torch.device:
        """The device to use; `number` chooses the GPU if the name does not."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError:
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise NoDevice(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:1', got {name!r}.")
        if device.type == "cpu":
            return device
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        place = number if device.index is None else device.index
        if place >= num_gpus:
            raise NoDevice(
                f"device must be one of the {num_gpus} GPUs of this machine, got {name!r}. "
                "Use 'cpu' or 'auto'."
            )
        return torch.device("cuda", place)

    def find_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the network's arithmetic."""
        if self.precision == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides what a run learns. Durations are in epochs.

    `nearsay.train(experiment, out=folder)` runs it. Recipes such as `nearsay.recipes.cifar10` build
    experiments; `dataclasses.replace` changes one.

    Attributes:
        data: The data set; see `nearsay.data`.
        noise: A function from labels to labels that makes some of them wrong; see `nearsay.noise`.
        outside: The data set that the images of open-set noise come from.
        held_out: Training examples to hold out for validation if the data has no validation split:
            a share if below 1, else a number.
        validation_labels: Labels of held-out examples: "given" (as noisy as the rest) or "clean".
        second_test: A data set with a second test split, such as ImageNet's beside WebVision's.
        only_clean: Train only on examples with a label that is known to be right (an oracle).
        labels_file: An .npz file of other training labels, made by `nearsay clean` or `propagate`.
        propagate_at: The epoch after which labels are propagated over the features (paper Eq. 2).
        labeled: The share of training labels to keep; the other examples become unlabeled.
        balanced: Put every class into a batch equally often.
        backbone: The network; see `nearsay.models`.
        init: A safetensors file or a run folder with weights to start from, without the classifier.
        objective: The loss; see `nearsay.losses`.
        networks: 1, or 2 that teach each other by their averaged weights.
        noise_per_network: Give the second network other noise, as the public ELR+ code does.
        averaging: The decay of the averaged weights; None is no averaging.
        self_taught: Teach a single network by its own averaged weights.
        eval_weights: The weights to evaluate: "networks" or "averages"; "auto" is averages if any.
        averaging_ramp: Epochs over which the decay rises to its value, as in ELR+.
        augment: The augmentation of training inputs, for one view or two; see
            `nearsay.transforms`.
        normalize: The last transform before the network, also in evaluation.
        mixup: Mixup of inputs and labels, or None.
        image_size: The height and width to which image files are cut and resized.
        bad_images: At a file that cannot be decoded, "stop" ends the run, "skip" leaves it out.
        optimizer: The optimizer; see `nearsay.optim`.
        schedule: The learning-rate schedule; see `nearsay.optim`.
        epochs: The length of the run; fractions are allowed.
        batch_size: Examples per step over all processes.
        batches_per_epoch: Steps per epoch; None is one pass through the data.
        class_weights: Weigh labels so that every class has the same total weight.
        clip: The maximum norm of the gradient; None is no clipping.
        evaluate_every: Epochs between two evaluations; the last epoch is always evaluated.
        seed: The seed of every random draw.
        machine: Where to run; see `Machine`.

    Example:
        >>> from nearsay.data import Toy
        >>> from nearsay.losses import ELR
        >>> from nearsay.models import MLP
        >>> from nearsay.noise import Symmetric
        >>> experiment = Experiment(
        ...     data=Toy(), noise=Symmetric(rate=0.4), backbone=MLP(), objective=ELR(), epochs=20
        ... )
        >>> experiment.batch_size
        256
    """

    data: Dataset
    noise: Noise | None = None
    outside: Dataset | None = None
    held_out: float = 0.0
    validation_labels: Literal["given", "clean"] = "given"
    second_test: Dataset | None = None
    only_clean: bool = False
    labels_file: str | None = None
    propagate_at: int | None = None
    labeled: float = 1.0
    balanced: bool = False

    backbone: Backbone = field(default_factory=ResNet)
    init: str | None = None
    objective: Objective = field(default_factory=NCR)
    networks: Literal[1, 2] = 1
    noise_per_network: bool = False
    averaging: float | None = None
    self_taught: bool = False
    eval_weights: Literal["auto", "networks", "averages"] = "auto"
    averaging_ramp: float = 0.0

    augment: Augment | Views | None = None
    normalize: Transform | None = PLUS_MINUS_ONE
    mixup: Mixup | None = None
    image_size: int = 224
    bad_images: Literal["stop", "skip"] = "stop"

    optimizer: SGD | AdamW = field(default_factory=SGD)
    schedule: Schedule = field(default_factory=Cosine)
    epochs: float = 100.0
    batch_size: int = 256
    batches_per_epoch: int | None = None
    class_weights: bool = False
    clip: float | None = None
    evaluate_every: int = 1
    seed: int = 0
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_averaging()
        if self.noise_per_network and (self.networks == 1 or self.noise is None):
            raise ValueError("noise_per_network must be False without noise= and networks=2.")
        if self.propagate_at is not None:
            check_whole("propagate_at", self.propagate_at, 1, cure=", or None for no propagation")
            is_reached = self.propagate_at <= self.epochs
            check_that(
                is_reached, "propagate_at", f"at most epochs={self.epochs}", self.propagate_at
            )
        # A schedule refuses a warm-up that is longer than the run.
        self.schedule.factor(0.0, self.epochs)

    def _check_choices(self) -> None:
        check_choice("validation_labels", self.validation_labels, ("given", "clean"))
        check_choice("bad_images", self.bad_images, ("stop", "skip"))
        check_choice("networks", self.networks, (1, 2))
        check_choice("eval_weights", self.eval_weights, ("auto", "networks", "averages"))

    def _check_numbers(self) -> None:
        labeled = check_number("labeled", self.labeled, 0, 1)
        check_that(labeled > 0, "labeled", "more than 0", labeled)
        held_out = check_number("held_out", self.held_out, 0)
        is_count = held_out <= 1 or held_out % 1 == 0
        check_that(is_count, "held_out", "a share below 1 or a whole number", held_out)
        check_number("averaging_ramp", self.averaging_ramp, 0, 1e9)
        check_whole("evaluate_every", self.evaluate_every, 1)
        check_number("epochs", self.epochs, 0.001, 1e6)
        # An example alone in its batch has no neighbor.
        check_whole("batch_size", self.batch_size, 2)
        check_whole("image_size", self.image_size, 1)
        check_plain("seed", self.seed)
        check_whole("seed", self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)
        if self.batches_per_epoch is not None:
            cure = ", or None for one pass through the data"
            check_whole("batches_per_epoch", self.batches_per_epoch, 1, cure=cure)
        if self.clip is not None:
            clip = check_number("clip", self.clip, 0)
            check_that(clip > 0, "clip", "more than 0, or None for no clipping", clip)

    def _check_averaging(self) -> None:
        if self.averaging is not None:
            cure = " and below 1, or None for no averaging"
            check_number("averaging", self.averaging, 0, math.nextafter(1, 0), cure=cure)
            if self.self_taught and self.networks == 2:
                raise ValueError("self_taught must be False with networks=2, got True.")
            return
        # Each network of two, and one that teaches itself, is taught by averaged weights.
        needs = {
            "eval_weights='averages'": self.eval_weights == "averages",
            "networks=2": self.networks == 2,
            "self_taught=True": self.self_taught,
        }
        for choice, is_chosen in needs.items():
            if is_chosen:
                raise ValueError(f"averaging must be set for {choice}, got None. Try 0.997.")
