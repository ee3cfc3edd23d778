"""Every choice of a run as one frozen value: what is learned from, by which network, with which loss, for how long."""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch.nn import Module

from nearsay.batch import Dataset, Noise, Objective
from nearsay.errors import NoDevice
from nearsay.losses import NCR
from nearsay.models import ResNet
from nearsay.optim import SGD, AdamW, Cosine, Schedule
from nearsay.transforms import PLUS_MINUS_ONE, Augment, Mixup, Transform, Views
from nearsay.validation import check_number, check_whole

_SEEDS = 2**63  # torch takes no more than 64 bits


class Backbone(Protocol):
    """A network as a value."""

    def build(self, num_classes: int, *, num_inputs: int, seed: int = 0) -> Module:
        """A module whose outputs are `Outputs`, with `num_features`; its weights are a function of `seed`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where an experiment runs and how it is fed: choices that change its speed and, up to rounding, nothing else."""

    device: str = "auto"  # "auto" is a GPU if there is one; "cpu", "cuda", "cuda:1"
    precision: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # "auto" is bfloat16 on a GPU, float32 on a CPU
    )
    loading: Literal["auto", "resident", "streaming"] = (
        "auto"  # all images on the device, or brought batch by batch
    )
    workers: int | None = (
        None  # processes that decode images; None is as many as there are cores, at most 8
    )
    capture: bool | None = (
        None  # replay the whole step from a CUDA graph; None is wherever that is possible
    )
    compile: bool | None = (
        None  # torch.compile; None is on a GPU where the run is long enough to pay for it
    )
    deterministic: bool = (
        False  # on a GPU: only algorithms that give the same bits each time, which are slower
    )
    checkpoint_seconds: float = 60.0  # at most this much work is lost
    checkpoint_steps: int | None = None  # instead of by the clock, after every so many steps
    timeout: float = 600.0  # seconds to wait for a worker or another process before giving up

    def __post_init__(self) -> None:
        _check_choice("precision", self.precision, ("auto", "float32", "bfloat16"))
        _check_choice("loading", self.loading, ("auto", "resident", "streaming"))
        if self.workers is not None:
            check_whole("workers", self.workers, 0, cure=", or None for as many as there are cores")
        if self.checkpoint_steps is not None:
            check_whole(
                "checkpoint_steps",
                self.checkpoint_steps,
                1,
                cure=", or None to go by checkpoint_seconds",
            )
        check_number("checkpoint_seconds", self.checkpoint_seconds, 0)
        check_number("timeout", self.timeout, 1)

    def find_device(self, number: int = 0) -> torch.device:
        """The device that is meant; `number` is the GPU to take where none is named."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise NoDevice(
                f"device={name!r} is no device of torch; use 'auto', 'cpu', 'cuda' or 'cuda:1'"
            ) from error
        if device.type == "cuda":
            found = torch.cuda.device_count() if torch.cuda.is_available() else 0
            place = number if device.index is None else device.index
            if place >= found:
                raise NoDevice(
                    f"device={name!r} asks for GPU {place}, but {found} are found; use 'cpu' or 'auto'"
                )
            return torch.device("cuda", place)
        if device.type != "cpu":
            raise NoDevice(
                f"device={name!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:1'"
            )
        return device

    def find_dtype(self, device: torch.device) -> torch.dtype:
        """What the network calculates in."""
        if self.precision == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that decides what a run learns; `machine` alone is about where. Durations are in epochs."""

    data: Dataset
    noise: Noise | None = None
    outside: Dataset | None = None  # where the images of open-set noise come from
    held_out: float = 0.0  # training examples for validation, if data has none: below 1 a share, from 1 on a number
    validation_labels: Literal["given", "clean"] = (
        "given"  # of held-out examples: as noisy as the rest, or the truth
    )
    second_test: Dataset | None = (
        None  # whose test split is judged as well, such as ImageNet's beside WebVision's
    )
    only_clean: bool = (
        False  # the oracle: train on those examples alone whose label is known to be right
    )
    relabeled: str | None = (
        None  # an .npz whose `given` is learned instead: propagated or corrected labels
    )
    propagate_at: int | None = (
        None  # epoch after which labels are propagated over the features, and those are learned
    )
    labeled: float = (
        1.0  # share of the training labels that is kept; the other examples become unlabeled
    )
    balanced: bool = (
        False  # every class is in a batch as often as any other, however many examples it has
    )

    backbone: Backbone = field(default_factory=ResNet)
    init: str | None = (
        None  # a safetensors file, or a run folder, to take the weights below the classifier from
    )
    objective: Objective = field(default_factory=NCR)
    networks: Literal[1, 2] = 1  # with 2, each is taught by the averaged weights of the other
    noise_per_network: bool = (
        False  # a second network learns other noise, as in the public ELR+: a leak, to measure it
    )
    averaging: float | None = None  # decay of the averaged weights
    self_taught: bool = False  # a network alone is taught by its own averaged weights
    judged: Literal["auto", "networks", "averages"] = (
        "auto"  # the weights to evaluate; "auto": averages if there are
    )
    averaging_ramp: float = 0.0  # epochs over which the decay rises to its value (ELR+)

    augment: Augment | Views | None = None
    normalize: Transform | None = (
        PLUS_MINUS_ONE  # the last step before the network, also in evaluation
    )
    mixup: Mixup | None = None
    image_size: int = 224  # of images on disk, once they are cut and resized
    bad_images: Literal["stop", "skip"] = (
        "stop"  # what cannot be decoded ends the run, or is left out and named
    )

    optimizer: SGD | AdamW = field(default_factory=SGD)
    schedule: Schedule = field(default_factory=Cosine)
    epochs: float = 100.0
    batch_size: int = 256  # over all processes
    batches_per_epoch: int | None = None  # None is once through the data
    class_weights: bool = False  # weigh labels so that every class counts alike
    clip: float | None = None  # largest length of the gradient
    evaluate_every: int = 1  # epochs; the last is always evaluated
    seed: int = 0
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        _check_choice("validation_labels", self.validation_labels, ("given", "clean"))
        _check_choice("bad_images", self.bad_images, ("stop", "skip"))
        _check_choice("networks", self.networks, (1, 2))
        _check_choice("judged", self.judged, ("auto", "networks", "averages"))
        if not check_number("labeled", self.labeled, 0, 1) > 0:
            raise ValueError("labeled=0 leaves nothing to learn from; give a share above 0")
        if self.noise_per_network and (self.networks == 1 or self.noise is None):
            raise ValueError("noise_per_network=True needs networks=2 and a noise")
        if check_number("held_out", self.held_out, 0) > 1 and self.held_out % 1:
            raise ValueError(
                f"held_out={self.held_out} must be a share below 1 or a whole number of examples"
            )
        check_number("averaging_ramp", self.averaging_ramp, 0, 1e9)
        check_whole("evaluate_every", self.evaluate_every, 1)
        check_number("epochs", self.epochs, 0.001, 1e6)
        check_whole("batch_size", self.batch_size, 2, cure="; a row alone has no neighbor")
        check_whole("image_size", self.image_size, 1)
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not -_SEEDS <= self.seed < _SEEDS
        ):
            raise ValueError(
                f"seed={self.seed!r} must be a whole number from -{_SEEDS} to {_SEEDS - 1}"
            )
        if self.batches_per_epoch is not None:
            check_whole(
                "batches_per_epoch",
                self.batches_per_epoch,
                1,
                cure=", or None for once through the data",
            )
        if self.averaging is not None:
            check_number(
                "averaging",
                self.averaging,
                0,
                math.nextafter(1, 0),
                cure=", or None for no averaging",
            )
        if self.judged == "averages" and self.averaging is None:
            raise ValueError("judged='averages' needs averaging=, such as 0.997")
        if self.networks == 2 and self.averaging is None:
            raise ValueError(
                "networks=2 needs averaging=, such as 0.997: each is taught by the average of the other"
            )
        if self.self_taught and (self.networks == 2 or self.averaging is None):
            raise ValueError("self_taught=True needs averaging=, such as 0.997, and networks=1")
        if self.propagate_at is not None:
            check_whole("propagate_at", self.propagate_at, 1, cure=", or None for no propagation")
            if self.propagate_at > self.epochs:
                raise ValueError(
                    f"propagate_at={self.propagate_at} is never reached in epochs={self.epochs}; propagate earlier, or "
                    f"train for at least {self.propagate_at}"
                )
        if self.clip is not None and not check_number("clip", self.clip, 0) > 0:
            raise ValueError(
                "clip=0 would stop all learning; give a positive length, or None for no clipping"
            )
        self.schedule.factor(0.0, self.epochs)  # refuses a warm-up that is longer than the run


def _check_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, known))}")
