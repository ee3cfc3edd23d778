"""Networks of timm by name, and weights from safetensors files; the only door to timm."""

import difflib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from nearsay.batch import Outputs
from nearsay.errors import first_line
from nearsay.files import load_sealed
from nearsay.models.heads import Head, LinearHead, drawn
from nearsay.models.norm import Statistics, check_statistics, synchronize
from nearsay.validation import check_that

# Of BatchNorm. Older files lack it, and no result depends on it.
COUNTER = "num_batches_tracked"
# A variable of the environment, and the module that remembers its value.
OFFLINE, CONSTANTS = "HF_HUB_OFFLINE", "huggingface_hub.constants"


@dataclass(frozen=True, kw_only=True)
class Timm:
    """Any network of timm with a head of ours; features are the inputs of timm's own classifier.

    Args:
        name: Of the network in timm, such as "resnet50.a1_in1k".
        weights: "none" for random ones, "timm" for those that timm publishes, or the path of a
            safetensors file.
        download: True may download the weights of timm; otherwise the network is not used.
        statistics: Of batch normalization under several processes, as in `BatchNorm`.
        head: The classifier on top of the features.

    >>> Timm(name="resnet18").weights
    'none'
    """

    name: str
    weights: str = "none"
    download: bool = False
    statistics: Statistics = "global"
    # The head is frozen, so it may be shared.
    head: Head = LinearHead()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_statistics(self.statistics)

    def build(self, num_classes: int, *, num_inputs: int = 3, seed: int = 0) -> nn.Module:
        """A module from (B, num_inputs, H, W) images to `Outputs`."""
        with drawn(seed):
            with _network_access(allowed=self.download):
                body: Any = self._body(_import_timm(), num_inputs)
            num_features = int(getattr(body, "head_hidden_size", None) or body.num_features)
            head = self.head.build(num_features, num_classes)
            return _Network(synchronize(body, self.statistics), head, num_features)

    def _body(self, timm: Any, num_inputs: int) -> nn.Module:
        known = timm.list_models()
        if self.name.partition(".")[0] not in known:
            near = difflib.get_close_matches(self.name, known) or known[:3]
            hint = f"Similar names are {', '.join(near)}."
            check_that(False, "name", "a network of timm", self.name, hint=hint)
        try:
            if self.weights == "timm":
                return self._published(timm, num_inputs)
            body: nn.Module = timm.create_model(
                self.name, pretrained=False, num_classes=0, in_chans=num_inputs
            )
        # Such as a name of weights after the dot that timm does not know.
        except RuntimeError as error:
            raise ValueError(f"timm cannot build {self.name!r}: {first_line(error)}") from error
        if self.weights != "none":
            _load(body, Path(self.weights), skip=_classifiers(body))
        return body

    def _published(self, timm: Any, num_inputs: int) -> nn.Module:
        published = timm.get_pretrained_cfg(self.name)
        repository = getattr(published, "hf_hub_id", None)
        source = getattr(published, "url", "")
        if repository:
            source = f"model.safetensors of https://huggingface.co/{repository}"
        if not source:
            raise ValueError(
                f'weights must be "none" or a file for {self.name}, got "timm", '
                "which publishes no weights for it."
            )
        by_hand = f"copy {source} here and set weights to its path"
        missing = (
            f"The weights of {self.name} are not on this machine. Use download=True, or {by_hand}."
        )
        # Without a repository the weights come by torch.hub, which has no offline mode.
        if not repository and not self.download:
            raise ValueError(missing)
        try:
            body: nn.Module = timm.create_model(
                self.name, pretrained=True, num_classes=0, in_chans=num_inputs
            )
        # The network, the cache and the file can raise anything.
        except Exception as error:
            reason = type(error).__name__
            failed = f"The weights of {self.name} cannot be downloaded ({reason})."
            failed = f"{failed} Try again, or {by_hand}."
            raise ValueError(failed if self.download else missing) from error
        return body


def load_weights(module: nn.Module, path: str | Path, *, skip_head: bool = False) -> None:
    """Copy the tensors of a safetensors file into a network, by name.

    All of them must fit, or no weight changes.

    Args:
        module: The network.
        path: The file, such as the model.safetensors of a run.
        skip_head: True keeps the classifier `fc` of the network, for another set of classes.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "weights.safetensors")
    ...     save_file({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, path)
    ...     layer = nn.Linear(2, 1)
    ...     load_weights(layer, path)
    >>> layer.weight
    Parameter containing:
    tensor([[1., 1.]], requires_grad=True)
    """
    skip = ("fc",) if skip_head else ()
    _load(module, Path(path), skip=skip, cure="Use skip_head=True to leave the classifier out")


def _load(module: nn.Module, path: Path, *, skip: Collection[str], cure: str = "") -> None:
    """Copy all weights but those of the parts named in `skip`."""

    def without_skipped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = tuple(f"{part}." for part in skip)
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(parts)}

    from_file = without_skipped(_read(path))
    own = without_skipped(module.state_dict())
    missing = _without_counters(own.keys() - from_file.keys(), own)
    unexpected = _without_counters(from_file.keys() - own.keys(), from_file)
    mismatched = []
    for name in own:
        if name in from_file and own[name].shape != from_file[name].shape:
            mismatched.append(name)
    shapes = [f"{name} {tuple(from_file[name].shape)}" for name in mismatched]
    problems = [
        _named("the file lacks", missing),
        _named("the network lacks", unexpected),
        _named("other shapes have", shapes),
    ]
    if any(problems):
        is_head = all(name.startswith("fc.") for name in missing + unexpected + mismatched)
        hint = cure if cure and is_head else "Use a file of this network"
        raise ValueError(
            f"{path} must fit the network; {'; '.join(filter(None, problems))}. {hint}."
        )
    with torch.no_grad():
        for name in own.keys() & from_file.keys():
            own[name].copy_(from_file[name])


def _without_counters(names: Collection[str], order: Collection[str]) -> list[str]:
    return [name for name in order if name in names and not name.endswith(COUNTER)]


def _read(path: Path) -> dict[str, Tensor]:
    is_of_run = path.name == "model.safetensors" and (path.parent / "experiment.json").is_file()
    if not path.is_file():
        hint = "Train that run to its end." if is_of_run else "Use a safetensors file with weights."
        raise ValueError(f"{path} does not exist. {hint}")
    try:
        return load_sealed(path)
    except SafetensorError as error:
        reason = first_line(error)
        if is_of_run:
            hint = "Remove it and start that run again; it goes on from its last checkpoint."
        elif _begins_well(path):
            hint = "Copy or download it again."
        else:
            hint = "Convert the weights with safetensors.torch.save_file."
            reason = f"it is not a safetensors file ({reason})"
        raise ValueError(f"{path} cannot be read: {reason}. {hint}") from error


def _begins_well(path: Path) -> bool:
    """Whether it is a damaged safetensors file: JSON follows eight bytes of length."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _named(problem: str, names: list[str]) -> str:
    """The problem with at most three names, because a wrong file has hundreds."""
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{problem} {', '.join(names[:3])}{more}"


class _Network(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.body = body
        self.fc = head

    def forward(self, inputs: Tensor) -> Outputs:
        # Every network of timm has these two methods.
        body: Any = self.body
        features = body.forward_head(body.forward_features(inputs), pre_logits=True)
        is_right = features.ndim == 2 and features.shape[1] == self.num_features
        hint = "Use a network of timm that pools its features."
        check_that(is_right, "features", "(B, D)", tuple(features.shape), hint=hint)
        return Outputs(features, self.fc(features))


def _classifiers(body: nn.Module) -> tuple[str, ...]:
    """The names of the classifiers of a network of timm; there may be two."""
    names = getattr(body, "pretrained_cfg", {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _import_timm() -> Any:
    try:
        return import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ImportError(
            'networks of timm need an extra; pip install ".[vision]" in the clone'
        ) from None
    # Such as a torchvision that was built for another torch.
    except RuntimeError as error:
        raise ImportError(
            f"timm cannot be imported ({first_line(error)}); let one pip install torch, "
            "torchvision and timm together"
        ) from error


@contextmanager
def _network_access(*, allowed: bool) -> Iterator[None]:
    """Unless allowed, keep the Hugging Face library off the network, where it would try for a
    minute.
    """
    if allowed:
        yield
        return
    wished = os.environ.get(OFFLINE)
    was_offline = getattr(
        sys.modules.get(CONSTANTS), OFFLINE, (wished or "").upper() in ("1", "ON", "YES", "TRUE")
    )
    # The variable counts if that library is imported later, the constant if it was imported before.
    os.environ[OFFLINE] = "1"
    _set_offline(True)
    try:
        yield
    finally:
        if wished is None:
            del os.environ[OFFLINE]
        else:
            os.environ[OFFLINE] = wished
        _set_offline(was_offline)


def _set_offline(is_offline: bool) -> None:
    if CONSTANTS in sys.modules:
        setattr(sys.modules[CONSTANTS], OFFLINE, is_offline)
