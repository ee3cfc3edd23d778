"""A finished run as a model for other programs: safetensors, ONNX or torch.export, with a model card beside it.

ONNX and torch.export hold the whole way from raw input to logits: images go in as bytes, (B, 3, H, W) uint8, and are
normalized inside, so that nobody can forget to. Safetensors hold weights alone; `config.json` says how to normalize.
"""

import io
import json
import logging
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import sha256
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as shape_choices

from nearsay import __version__
from nearsay.batch import Outputs, Predictions
from nearsay.config import to_tree
from nearsay.data.loader import MARGIN, Inputs, finish, num_workers, sweep
from nearsay.errors import one_line
from nearsay.models import LinearHead, Timm
from nearsay.training.checkpoints import write_whole
from nearsay.training.outcome import pack_networks
from nearsay.training.predict import Predicted
from nearsay.training.run_folder import Trained, View, find_view, open_trained, read_result
from nearsay.training.splits import are_in_doubt
from nearsay.transforms import Normalize

Format = Literal["safetensors", "onnx", "torch-export"]
FILES: dict[Format, str] = {
    "safetensors": "model.safetensors",
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
}
_ROWS = 256  # that ONNX looks at in one go
_TIMEOUT = 600.0  # seconds to wait for a process that decodes images
_LARGEST = 8192  # pixels of the edge of an image that a file may ask for
_FACTS = "nearsay"  # the name under which an ONNX file knows its classes

_USE: dict[Format, str] = {
    "safetensors": "`model.safetensors` holds the weights and `config.json` the architecture, the classes and, for "
    "images, the mean and standard deviation to normalize pixels in [0, 1] with.",
    "onnx": "`model.onnx` takes `inputs` and gives `logits` and `features`, for any number of rows. Images go in as "
    "raw bytes (B, 3, H, W) of uint8, RGB: they are normalized inside. `nearsay.integrations.export.predict_onnx` runs it.",
    "torch-export": "`torch.export.load('model.pt2').module()` takes inputs and gives logits and features, for any "
    "number of rows. Images go in as raw bytes (B, 3, H, W) of uint8, RGB: they are normalized inside.",
}
_LIMITS = """\
- Examples that resemble each other were taken to share a class. Wrong labels that come in neighborhoods, where all
  examples of a kind carry the same wrong label, are not outvoted but learned.
- The probabilities are not calibrated: a confident answer can be confidently wrong.
- What was common in the training data counts as right. Test on the groups that matter before relying on the average.
- Labels of the training data need not have been checked, nor consent of people shown in it asked."""


class _Deployed(nn.Module):
    """From raw inputs to logits and features: what `Pass` does, as one module."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.networks = nn.ModuleList(trained.networks)
        self.normalize = trained.experiment.normalize

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C) logits, of several networks the logarithm of their mean belief up to a constant; (B, D) features."""
        ready = self._finished(inputs)
        answers: list[Outputs] = [network(ready) for network in self.networks]
        if len(answers) == 1:
            return answers[0].logits, answers[0].features
        beliefs = torch.stack([answer.logits.log_softmax(dim=1) for answer in answers])
        return beliefs.logsumexp(dim=0), answers[0].features

    def _finished(self, inputs: Tensor) -> Tensor:
        """As `finish` does it, but with a number of rows that tracing keeps free."""
        if self.normalize is None or inputs.ndim != 4:
            return finish(inputs, None)
        return self.normalize.apply(
            inputs, inputs.new_zeros((inputs.shape[0], 0), dtype=torch.float32)
        )


class _Signature(NamedTuple):
    """What goes in: an example, and which of its axes may be of any length."""

    example: Tensor
    free: dict[int, Any]  # Any: torch's word for such an axis has no type
    view: View | None  # what the networks have seen of images, None of features


def export_run(folder: Path, target: Path, *, format: Format = "safetensors") -> Path:
    """Write the model of a finished run into the folder `target`, with config.json and README.md; gives its path.

    RunError if the run is not finished, ImportError in one sentence if an extra is missing.
    """
    if format not in FILES:
        raise ValueError(f"format={format!r} must be one of {', '.join(map(repr, FILES))}")
    _check_target(target, format)
    if format == "onnx":
        _import("onnxscript")  # before anything is read
    trained = open_trained(folder)
    signature = _signature(trained)
    facts, card = _facts(trained, signature), _card(trained, read_result(folder), format).encode()
    facts["library"]["card"] = sha256(card).hexdigest()
    if format == "safetensors":
        content = safetensors.torch.save(_named_weights(trained), metadata={"format": "pt"})
    else:
        content = _program(trained, signature, facts, format)
    target.mkdir(parents=True, exist_ok=True)
    (target / "README.md").unlink(
        missing_ok=True
    )  # whoever is killed now leaves none that seems changed by hand
    write_whole(target / "config.json", _json(facts).encode() + b"\n")
    write_whole(target / "README.md", card)
    write_whole(target / FILES[format], content)
    return target / FILES[format]


def predict_onnx(path: Path, inputs: Inputs) -> Predicted:
    """What an exported ONNX file, or the folder it is in, says of raw images or features."""
    session = _session(path)
    facts, wants_images = _read_facts(session, path), len(session.get_inputs()[0].shape) == 4
    size, num_classes = facts["image_size"], len(facts["label_names"])
    are_images = not isinstance(inputs, Tensor) or inputs.ndim == 4
    if are_images != wants_images:
        kinds = ("features", "images")
        raise ValueError(
            f"{kinds[are_images]} do not fit: {path} was trained on {kinds[wants_images]}; give those"
        )
    if isinstance(inputs, Tensor) and inputs.dtype != (
        wanted := torch.uint8 if wants_images else torch.float32
    ):
        raise ValueError(f"inputs of {inputs.dtype} must be {wanted}, as they were for training")
    if not len(inputs):
        raise ValueError("there are 0 examples to look at; give at least one")
    if not isinstance(inputs, Tensor) and size is None:
        raise ValueError(
            f"{path} was trained on arrays that are not square, which images on disk become; give arrays"
        )
    pieces: list[Predictions] = []
    unreadable: dict[int, str] = {}
    workers = num_workers(inputs, None)
    with sweep(
        inputs,
        size=size or 0,
        margin=_margin(facts),
        batch_size=_ROWS,
        workers=workers,
        timeout=_TIMEOUT,
        pin=False,
    ) as batches:
        for indices, rows, problems in batches:
            assert rows is not None
            unreadable.update(problems)
            try:
                logits, features = session.run(
                    ["logits", "features"], {"inputs": np.ascontiguousarray(rows.numpy())}
                )
            except (
                Exception
            ) as error:  # onnxruntime has a class of error for each cause, and none in common
                raise ValueError(
                    f"inputs {tuple(rows.shape)} do not fit {path}: {one_line(error)}"
                ) from error
            if (
                logits.shape != (len(rows), num_classes)
                or len(features) != len(rows)
                or not np.isfinite(logits).all()
            ):
                told = f"finite ones of {(len(rows), num_classes)} should be"
                raise ValueError(
                    f"{path} gives logits {logits.shape} where {told}; export the run again"
                )
            kept = indices >= 0
            pieces.append(
                Predictions(
                    torch.from_numpy(features)[kept], torch.from_numpy(logits)[kept], indices[kept]
                )
            )
    return Predicted(
        Predictions(*(torch.cat(parts) for parts in zip(*pieces, strict=True))), unreadable
    )


def read_onnx_classes(path: Path) -> tuple[str, ...]:
    """The names of the classes of an exported ONNX file, or of the folder it is in."""
    return tuple(_read_facts(_session(path), path)["label_names"])


def _check_target(target: Path, format: Format) -> None:
    """Refuse a folder in which something that is not an earlier export would be replaced."""
    if (target / "experiment.json").exists():
        raise ValueError(
            f"{target} is a run folder, whose own model would be replaced; choose another folder"
        )
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(
            f"{target} cannot be a folder, as {there} is a file; choose another folder"
        )
    taken = [
        name for name in ("config.json", "README.md", FILES[format]) if (target / name).exists()
    ]
    library, card = _library(target / "config.json"), target / "README.md"
    if taken and not library:
        raise ValueError(
            f"{target / taken[0]} is not of nearsay and would be replaced; choose an empty folder"
        )
    if (
        "card" in library
        and card.exists()
        and sha256(card.read_bytes()).hexdigest() != library["card"]
    ):
        raise ValueError(
            f"{card} was changed after its export and would be replaced; move it, or choose a new folder"
        )


def _library(path: Path) -> dict[str, Any]:
    """What a config.json that an export has written says of itself; nothing if it is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())["library"]
        return found if found["name"] == "nearsay" else {}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}


def _signature(trained: Trained) -> _Signature:
    num_inputs = trained.origin["num_inputs"]
    if not trained.wants_images:
        return _Signature(torch.zeros(2, num_inputs), {0: Dim.DYNAMIC}, None)
    view = find_view(trained.experiment, trained.origin)
    # Networks of timm may know the places of an image; ours take the mean over them, whatever their number.
    is_fixed = isinstance(trained.experiment.backbone, Timm)
    free = {0: Dim.DYNAMIC} if is_fixed else {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    edges = (view.height, view.width) if is_fixed else (48, 48)
    return _Signature(torch.zeros(2, num_inputs, *edges, dtype=torch.uint8), free, view)


def _program(
    trained: Trained, signature: _Signature, facts: Mapping[str, Any], format: Format
) -> bytes:
    """The whole way from raw inputs to logits, as one file."""
    # Or torch would treat an axis of length 1 as special, and refuse images so small that one place is left at the end.
    with torch.no_grad(), shape_choices.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(
            _Deployed(trained).eval(),
            (signature.example,),
            dynamic_shapes=(signature.free,),
            strict=False,
        )
    if format == "torch-export":
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={"config.json": _json(facts)})
        return file.getvalue()
    with (
        ExitStack() as quiet
    ):  # torch tells its own developers of libraries that it could use, and of its old words
        logger = logging.getLogger("torch.onnx")
        quiet.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        quiet.enter_context(warnings.catch_warnings(action="ignore", category=FutureWarning))
        made = torch.onnx.export(
            program,
            input_names=["inputs"],
            output_names=["logits", "features"],
            dynamo=True,
            verbose=False,
        )
    assert made is not None
    proto = made.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = _FACTS, json.dumps(facts)
    content: bytes = proto.SerializeToString()
    return content


def _named_weights(trained: Trained) -> dict[str, Tensor]:
    """By the names of timm where that has the network, by those of the run elsewhere."""
    packed = pack_networks(trained.networks)
    classifier = _timm_classifier(trained)
    if classifier is None:
        return packed
    named = {
        name.removeprefix("body."): tensor
        for name, tensor in packed.items()
        if name.startswith("body.")
    }
    return named | {f"{classifier}.{part}": packed[f"fc.{part}"] for part in ("weight", "bias")}


def _timm_classifier(trained: Trained) -> str | None:
    """What timm calls the classifier, if its network with its kind of classifier is what was trained."""
    backbone = trained.experiment.backbone
    if (
        not isinstance(backbone, Timm)
        or not isinstance(backbone.head, LinearHead)
        or len(trained.networks) > 1
    ):
        return None
    body: Any = trained.networks[0].body  # Any: a network of timm
    name = getattr(body, "pretrained_cfg", {}).get("classifier")
    return name if isinstance(name, str) else None


def _facts(trained: Trained, signature: _Signature) -> dict[str, Any]:
    """The content of config.json, by the names that timm and the Hugging Face hub use."""
    experiment, classes = trained.experiment, trained.labels.classes
    classifier = _timm_classifier(trained)
    backbone = experiment.backbone
    facts: dict[str, Any] = {
        "architecture": backbone.name if isinstance(backbone, Timm) else type(backbone).__name__,
        "num_classes": len(classes),
        "num_features": trained.networks[0].num_features,
        "label_names": list(classes),
        "image_size": experiment.image_size,
        "library": {
            "name": "nearsay",
            "version": __version__,
            "backbone": _without_folders(to_tree(backbone)),
        },
        "networks": len(trained.networks),
    }
    if (view := signature.view) is not None:
        facts["image_size"] = (
            view.height if view.height == view.width else None
        )  # files become squares
        normalize = experiment.normalize if isinstance(experiment.normalize, Normalize) else None
        facts["pretrained_cfg"] = {
            "input_size": [signature.example.shape[1], view.height, view.width],
            "crop_pct": view.margin,
            "interpolation": "bilinear",
            "mean": [0.0] * 3 if normalize is None else list(normalize.mean),
            "std": [1.0] * 3 if normalize is None else list(normalize.std),
            "num_classes": len(classes),
            "classifier": classifier or "fc",
            "custom_load": False,
        }
    return facts


def _card(trained: Trained, result: Mapping[str, Any] | None, format: Format) -> str:
    """The model card; what users named stands in it only inside JSON, where it cannot be mistaken for markup."""
    experiment, labels = trained.experiment, trained.labels
    choices = {
        name: _without_folders(to_tree(getattr(experiment, name)))
        for name in ("noise", "objective", "backbone")
    }
    recipe = _without_folders(str(trained.origin.get("recipe", "none")))  # may be a path
    learned = {
        "recipe": recipe,
        "epochs": experiment.epochs,
        "networks": experiment.networks,
        **choices,
    }
    header = [
        "---",
        f"library_name: {'timm' if _timm_classifier(trained) and format == 'safetensors' else 'nearsay'}",
        f"pipeline_tag: {'image-classification' if trained.wants_images else 'tabular-classification'}",
        "tags: [noisy-labels, neighbor-consistency]",
        "---",
        "# Model card",
        "",
        f"A classifier of {len(labels.classes)} classes, trained on noisy labels by nearsay {__version__}.",
        "",
    ]
    sections = {
        "Use": [_USE[format]],
        "Data and noise": [_data_sentence(trained, result)],
        "Accuracy": _accuracy_lines(trained, result),
        "Method": _fenced(learned),
        "Limits": [_LIMITS],
        "Classes": _fenced(list(labels.classes)),
    }
    body = [line for title, lines in sections.items() for line in (f"## {title}", "", *lines, "")]
    return "\n".join([*header, *body])


def _data_sentence(trained: Trained, result: Mapping[str, Any] | None) -> str:
    known = (result or {}).get("labels", {})
    num = known.get("num_examples", len(trained.labels.given))
    requested, effective = known.get("requested_rate"), known.get("effective_rate")
    parts = [f"{num} training examples"]
    if requested is not None:
        parts.append(f"label noise of {requested:.1%} was added on purpose")
    parts.append(
        "the share of wrong labels is unknown"
        if effective is None
        else f"{effective:.1%} of labels are wrong"
    )
    return f"{'; '.join(parts)}."


def _accuracy_lines(trained: Trained, result: Mapping[str, Any] | None) -> list[str]:
    accuracy = (result or {}).get("accuracy") or {}
    if not accuracy:
        return ["No accuracy was recorded."]
    rows = [
        f"| {name} | {each['final']:.4f} | {each['last_10']:.4f} |"
        for name, each in accuracy.items()
    ]
    in_doubt = are_in_doubt("validation", trained.experiment.validation_labels, trained.labels)
    doubt = (
        "Validation is judged by labels that may be as wrong as those that were learned, or cleaned as they were: "
        "judge the model by labels that you trust."
    )
    told = ["", doubt] if "validation" in accuracy and in_doubt else []
    return ["| split | final epoch | mean of the last ten at most |", "|---|---|---|", *rows, *told]


def _without_folders(tree: Any) -> Any:  # Any: what JSON can hold
    """The tree with the last part alone of every path: where files lie is not for a published model."""
    if isinstance(tree, Mapping):
        return {name: _without_folders(each) for name, each in tree.items()}
    if isinstance(tree, list):
        return [_without_folders(each) for each in tree]
    return PurePath(tree).name if isinstance(tree, str) else tree


def _fenced(value: Any) -> list[str]:  # Any: what JSON can hold
    """JSON in a block of code, which no line of it can end: none starts with a fence."""
    return ["```json", *_json(value).split("\n"), "```"]


def _json(value: Any) -> str:  # Any: what JSON can hold
    return json.dumps(value, indent=2, ensure_ascii=False)


def _session(path: Path) -> Any:  # Any: onnxruntime may be missing
    runtime = _import("onnxruntime")
    file = path / FILES["onnx"] if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no file {file}; nearsay export with format onnx makes one")
    try:
        return runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except (
        Exception
    ) as error:  # onnxruntime has a class of error for each cause, and none in common
        raise ValueError(f"{file} is no ONNX file that can be run: {one_line(error)}") from error


def _read_facts(session: Any, path: Path) -> Mapping[str, Any]:
    written = session.get_modelmeta().custom_metadata_map.get(_FACTS)
    if written is None:
        raise ValueError(
            f"{path} was not exported by nearsay, so its classes are unknown; export the run again"
        )
    try:
        facts = json.loads(written)
        names, size = facts["label_names"], facts["image_size"]
        is_whole = isinstance(names, list) and all(isinstance(name, str) for name in names)
        is_whole &= session.get_outputs()[0].shape[1:] == [len(names)]
        is_whole &= size is None or (type(size) is int and 1 <= size <= _LARGEST)
        is_whole &= 0 < _margin(facts) <= 1
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{path} does not say what its classes are; export the run again")
    return dict(facts)


def _margin(facts: Mapping[str, Any]) -> float:
    """How much is looked at of the shorter side of an image; older files do not say."""
    return float(facts.get("pretrained_cfg", {}).get("crop_pct", MARGIN))


def _import(name: str) -> Any:  # Any: the library may be missing
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError('ONNX needs an extra; pip install ".[export]" in the clone') from error
