"""Networks of timm by name, and weights from safetensors files; the only door to timm."""

import difflib
import os
import sys
from collections.abc import Collection, Iterator
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

COUNTER = "num_batches_tracked"  # of BatchNorm: older files do without, and nothing depends on it
OFFLINE, CONSTANTS = (
    "HF_HUB_OFFLINE",
    "huggingface_hub.constants",
)  # a variable, and the module that remembers it


@dataclass(frozen=True, kw_only=True)
class Timm:
    """Any network of timm, under a head of ours; features = what timm would give to its own classifier.

    `weights` is "none" for random ones, "timm" for those that timm publishes, or the path of a safetensors file. Those
    of timm must have been downloaded before, unless `download=True`: nothing else here touches the network.
    """

    name: str
    weights: str = "none"
    download: bool = False
    statistics: Statistics = "global"  # of batch normalization under several processes
    head: Head = LinearHead()  # noqa: RUF009 — frozen, so it may be shared

    def __post_init__(self) -> None:
        check_statistics(self.statistics)

    def build(self, num_classes: int, *, num_inputs: int = 3, seed: int = 0) -> nn.Module:
        """A module from (B, num_inputs, H, W) images to `Outputs`."""
        with drawn(seed):
            with _network_access(allowed=self.download):
                body: Any = self._body(
                    _import_timm(), num_inputs
                )  # Any: attributes that every network of timm has
            num_features = int(getattr(body, "head_hidden_size", None) or body.num_features)
            head = self.head.build(num_features, num_classes)
            return _Network(synchronize(body, self.statistics), head, num_features)

    def _body(self, timm: Any, num_inputs: int) -> nn.Module:  # Any: timm may be missing
        known = timm.list_models()
        if self.name.partition(".")[0] not in known:
            near = difflib.get_close_matches(self.name, known) or known[:3]
            raise ValueError(
                f"timm has no network named {self.name!r}; it has {', '.join(near)} and others"
            )
        try:
            if self.weights == "timm":
                return self._published(timm, num_inputs)
            body: nn.Module = timm.create_model(
                self.name, pretrained=False, num_classes=0, in_chans=num_inputs
            )
        except (
            RuntimeError
        ) as error:  # for one, a name of weights after the dot that timm does not know
            raise ValueError(f"timm cannot build {self.name!r}: {first_line(error)}") from error
        if self.weights != "none":
            _load(body, Path(self.weights), skip=_classifiers(body))
        return body

    def _published(self, timm: Any, num_inputs: int) -> nn.Module:
        published = timm.get_pretrained_cfg(self.name)
        repository = getattr(published, "hf_hub_id", None)
        source = (
            f"model.safetensors of https://huggingface.co/{repository}"
            if repository
            else getattr(published, "url", "")
        )
        if not source:
            raise ValueError(
                f'timm publishes no weights for {self.name}; choose weights="none", or a file of yours'
            )
        by_hand = f"bring {source} here and give its path as weights"
        missing = f"the weights of {self.name} are not on this machine; choose download=True, or {by_hand}"
        if (
            not repository and not self.download
        ):  # they come by torch.hub, which knows no offline mode
            raise ValueError(missing)
        try:
            body: nn.Module = timm.create_model(
                self.name, pretrained=True, num_classes=0, in_chans=num_inputs
            )
        except Exception as error:  # whatever the network, the cache or the file had to say
            failed = f"the weights of {self.name} could not be downloaded ({type(error).__name__}); {by_hand}"
            raise ValueError(failed if self.download else missing) from error
        return body


def load_weights(module: nn.Module, path: str | Path, *, skip_head: bool = False) -> None:
    """Copy the tensors of a safetensors file into a network, by name; all of them must fit, or nothing is changed.

    With `skip_head` the classifier `fc` keeps its weights, whatever the file has: for another set of classes.
    """
    _load(
        module,
        Path(path),
        skip=("fc",) if skip_head else (),
        cure="skip_head=True leaves the classifier out",
    )


def _load(module: nn.Module, path: Path, *, skip: Collection[str], cure: str = "") -> None:
    """The parts of the network and of the file named in `skip` are left out."""

    def is_wanted(name: str) -> bool:
        return not any(name.startswith(f"{part}.") for part in skip)

    given = {name: tensor for name, tensor in _read(path).items() if is_wanted(name)}
    own: dict[str, Tensor] = {
        name: tensor for name, tensor in module.state_dict().items() if is_wanted(name)
    }
    missing, unexpected = (
        [name for name in some if name not in others and not name.endswith(COUNTER)]
        for some, others in ((own, given), (given, own))
    )
    mismatched = [name for name in own if name in given and own[name].shape != given[name].shape]
    problems = [
        _named("it lacks", missing),
        _named("the network has no", unexpected),
        _named(
            "shapes differ for",
            [
                f"{name} {tuple(given[name].shape)} instead of {tuple(own[name].shape)}"
                for name in mismatched
            ],
        ),
    ]
    if any(problems):
        is_head = all(name.startswith("fc.") for name in missing + unexpected + mismatched)
        advice = cure if cure and is_head else "it must be the file of this very network"
        raise ValueError(f"{path} does not fit: {'; '.join(filter(None, problems))}; {advice}")
    with torch.no_grad():
        for name in own.keys() & given.keys():
            own[name].copy_(given[name])


def _read(path: Path) -> dict[str, Tensor]:
    is_of_run = path.name == "model.safetensors" and (path.parent / "experiment.json").is_file()
    if not path.is_file():
        cure = (
            "train that run to its end"
            if is_of_run
            else "give the path of a safetensors file with weights"
        )
        raise ValueError(f"there is no file {path}; {cure}")
    try:
        return load_sealed(path)
    except SafetensorError as error:
        reason = first_line(error)
        if not is_of_run and not _begins_well(path):
            cure = "convert weights with safetensors.torch.save_file"
            raise ValueError(f"{path} is no safetensors file ({reason}); {cure}") from error
        again = "remove it and start that run again, which makes it anew from its last checkpoint"
        cure = again if is_of_run else "copy or download it again"
        raise ValueError(f"{path} cannot be used ({reason}); {cure}") from error


def _begins_well(path: Path) -> bool:
    """Whether it was a safetensors file before it was damaged: after eight bytes of length stands an object of JSON."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _named(problem: str, names: list[str]) -> str:
    """At most three of them: a wrong file has hundreds."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{problem} {', '.join(names[:3])}{more}" if names else ""


class _Network(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.body = body
        self.fc = head

    def forward(self, inputs: Tensor) -> Outputs:
        body: Any = self.body  # Any: these two methods are what timm calls a network
        features = body.forward_head(body.forward_features(inputs), pre_logits=True)
        if features.ndim != 2 or features.shape[1] != self.num_features:
            raise ValueError(
                f"this network of timm gives features {tuple(features.shape)}, not (B, {self.num_features}); "
                "choose one that pools them"
            )
        return Outputs(features, self.fc(features))


def _classifiers(body: nn.Module) -> tuple[str, ...]:
    """What timm calls the classifier of this network; there may be two."""
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
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise ImportError(
            f"timm cannot be imported ({first_line(error)}); let one pip install torch, torchvision and timm together"
        ) from error


@contextmanager
def _network_access(*, allowed: bool) -> Iterator[None]:
    """Unless allowed, keep the Hugging Face library off the network: without one it tries for most of a minute."""
    if allowed:
        yield
        return
    wished = os.environ.get(OFFLINE)
    was_offline = getattr(
        sys.modules.get(CONSTANTS), OFFLINE, (wished or "").upper() in ("1", "ON", "YES", "TRUE")
    )
    os.environ[OFFLINE] = "1"  # counts if that library is imported from here on
    _set_offline(True)  # counts if it was imported before
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
