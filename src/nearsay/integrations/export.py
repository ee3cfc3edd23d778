"""A finished run as a model for other programs: safetensors, ONNX or torch.export, and a card.

ONNX and torch.export hold everything from raw input to logits: images go in as bytes, (B, 3, H, W)
uint8, and are normalized inside. Safetensors hold the weights alone; `config.json` says how to
normalize.
"""

import io
import json
import logging
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as shape_choices

from nearsay._version import __version__
from nearsay.batch import Inputs, Outputs, Predictions
from nearsay.config.records import to_tree
from nearsay.data.loader import MARGIN, finish, num_workers, sweep
from nearsay.errors import one_line
from nearsay.integrations import import_library
from nearsay.models.heads import LinearHead
from nearsay.models.pretrained import Timm
from nearsay.training.checkpoints import write_whole
from nearsay.training.predict import (
    Predicted,
    Trained,
    View,
    find_view,
    open_trained,
    pack_networks,
)
from nearsay.training.run_folder import read_result
from nearsay.training.splits import are_in_doubt
from nearsay.transforms.color import Normalize

Format = Literal["safetensors", "onnx", "torch-export"]
FILES: dict[Format, str] = {
    "safetensors": "model.safetensors",
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
}
# Rows that ONNX takes at once.
_ROWS = 256
# Seconds to wait for a process that decodes images.
_TIMEOUT = 600.0
# The largest edge of images, in pixels, that a file may ask for.
_LARGEST = 8192
# The name of the entry of an ONNX file that holds its classes.
_FACTS = "nearsay"

_USE: dict[Format, str] = {
    "safetensors": """\
`model.safetensors` holds the weights and `config.json` the architecture, the classes and, for
images, the mean and standard deviation to normalize pixels in [0, 1] with.""",
    "onnx": """\
`model.onnx` takes `inputs` and gives `logits` and `features`, for any number of rows. Images go in
as raw bytes (B, 3, H, W) of uint8, RGB: they are normalized inside.
`nearsay.integrations.export.predict_onnx` runs it.""",
    "torch-export": """\
`torch.export.load('model.pt2').module()` takes inputs and gives logits and features, for any number
of rows. Images go in as raw bytes (B, 3, H, W) of uint8, RGB: they are normalized inside.""",
}
_LIMITS = """\
- Training assumed that examples that resemble each other share a class. If all similar examples
  carry the same wrong label, that label is learned.
- The probabilities are not calibrated: a confident answer can be wrong.
- What was common in the training data counts as right. Test on the groups that matter before
  relying on the average.
- Neither the labels of the training data nor the consent of people shown in it were checked."""


class _Deployed(nn.Module):
    """From raw inputs to logits and features, as one module."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.networks = nn.ModuleList(trained.networks)
        self.normalize = trained.experiment.normalize

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C) logits and (B, D) features.

        The logits of several networks are the logarithm of their mean prediction, up to a constant.
        """
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
        no_draws = inputs.new_zeros((inputs.shape[0], 0), dtype=torch.float32)
        return self.normalize.apply(inputs, no_draws)


class _Signature(NamedTuple):
    """The inputs: an example, and the axes that may have any length."""

    example: Tensor
    free: dict[int, Any]
    # How the networks were shown images; None for features.
    view: View | None


def export_run(folder: Path, target: Path, *, format: Format = "safetensors") -> Path:
    """Write the model of a finished run into a folder, and return the path of the model file.

    Raises RunError if the run is not finished and ImportError if an extra is missing.

    Args:
        folder: the run.
        target: the folder for the model, config.json and README.md (the model card).
        format: "safetensors", "onnx" or "torch-export".
    """
    if format not in FILES:
        raise ValueError(f"format must be one of {', '.join(FILES)}, got {format!r}.")
    _check_target(target, format)
    if format == "onnx":
        # Before the run is read.
        import_library("onnxscript", "export")
    trained = open_trained(folder)
    signature = _signature(trained)
    facts, card = _facts(trained, signature), _card(trained, read_result(folder), format).encode()
    facts["library"]["card"] = sha256(card).hexdigest()
    if format == "safetensors":
        content = safetensors.torch.save(_named_weights(trained), metadata={"format": "pt"})
    else:
        content = _program(trained, signature, facts, format)
    target.mkdir(parents=True, exist_ok=True)
    # If the process is killed now, no card is left that seems to have been edited by hand.
    (target / "README.md").unlink(missing_ok=True)
    write_whole(target / "config.json", _json(facts).encode() + b"\n")
    write_whole(target / "README.md", card)
    write_whole(target / FILES[format], content)
    return target / FILES[format]


def predict_onnx(path: Path, inputs: Inputs) -> Predicted:
    """The predictions of an exported ONNX file for raw images or features.

    Args:
        path: the file, or the folder of the export.
        inputs: (N, 3, H, W) uint8 images, image files, or (N, D) float32 features.
    """
    session = _session(path)
    facts = _read_facts(session, path)
    size = facts["image_size"]
    _check_inputs(session, path, inputs, size)
    features, logits, examples = [], [], []
    unreadable: dict[int, str] = {}
    with sweep(
        inputs,
        size=size or 0,
        margin=_margin(facts),
        batch_size=_ROWS,
        workers=num_workers(inputs, None),
        timeout=_TIMEOUT,
        pin=False,
    ) as batches:
        for indices, rows, problems in batches:
            assert rows is not None
            unreadable.update(problems)
            outputs = _run(session, path, rows, len(facts["label_names"]))
            is_kept = indices >= 0
            features.append(outputs.features[is_kept])
            logits.append(outputs.logits[is_kept])
            examples.append(indices[is_kept])
    predictions = Predictions(torch.cat(features), torch.cat(logits), torch.cat(examples))
    return Predicted(predictions, unreadable)


def _check_inputs(session: Any, path: Path, inputs: Inputs, size: int | None) -> None:
    wants_images = len(session.get_inputs()[0].shape) == 4
    expected, dtype = ("images", torch.uint8) if wants_images else ("features", torch.float32)
    are_images = not isinstance(inputs, Tensor) or inputs.ndim == 4
    if are_images != wants_images:
        raise ValueError(f"inputs must be {expected}, because {path} was trained on them.")
    if isinstance(inputs, Tensor) and inputs.dtype != dtype:
        raise ValueError(f"inputs must be {dtype} as in training, got {inputs.dtype}.")
    if not len(inputs):
        raise ValueError("inputs must hold at least one example, got 0.")
    if not isinstance(inputs, Tensor) and size is None:
        raise ValueError(
            f"inputs must be arrays: {path} was trained on images that are not square, "
            "and image files become squares."
        )


def _run(session: Any, path: Path, rows: Tensor, num_classes: int) -> Outputs:
    """The outputs of the file for one batch."""
    try:
        logits, features = session.run(
            ["logits", "features"], {"inputs": np.ascontiguousarray(rows.numpy())}
        )
    # onnxruntime has a class of error for each cause, and no common one.
    except Exception as error:
        raise ValueError(
            f"inputs must fit {path}, got {tuple(rows.shape)}: {one_line(error)}"
        ) from error
    is_whole = logits.shape == (len(rows), num_classes) and len(features) == len(rows)
    if not is_whole or not np.isfinite(logits).all():
        raise ValueError(
            f"logits of {path} must be {(len(rows), num_classes)} finite numbers, "
            f"got {logits.shape}. Export the run again."
        )
    return Outputs(torch.from_numpy(features), torch.from_numpy(logits))


def read_onnx_classes(path: Path) -> tuple[str, ...]:
    """The names of the classes of an exported ONNX file, or of the folder it is in."""
    return tuple(_read_facts(_session(path), path)["label_names"])


def _check_target(target: Path, format: Format) -> None:
    """Refuse a folder in which files that are no earlier export would be replaced."""
    if (target / "experiment.json").exists():
        raise ValueError(f"target must not be a run folder, got {target}. Choose another folder.")
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"target must be a folder, but {there} is a file. Choose another folder.")
    names = ("config.json", "README.md", FILES[format])
    taken = [target / name for name in names if (target / name).exists()]
    library, card = _library(target / "config.json"), target / "README.md"
    if taken and not library:
        raise ValueError(
            f"target must not hold {taken[0]}, which nearsay did not write. Choose an empty folder."
        )
    has_card = "card" in library and card.exists()
    if has_card and sha256(card.read_bytes()).hexdigest() != library["card"]:
        raise ValueError(
            f"target must not hold {card}, which was edited after its export. "
            "Move it, or choose another folder."
        )


def _library(path: Path) -> dict[str, Any]:
    """The entry "library" of a config.json that an export has written; otherwise empty."""
    try:
        library: dict[str, Any] = json.loads(path.read_bytes())["library"]
        return library if library["name"] == "nearsay" else {}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}


def _signature(trained: Trained) -> _Signature:
    num_inputs = trained.origin["num_inputs"]
    if not trained.wants_images:
        return _Signature(torch.zeros(2, num_inputs), {0: Dim.DYNAMIC}, None)
    view = find_view(trained.experiment, trained.origin)
    # Networks of timm may need a fixed size; ours take the mean over all places of an image.
    is_fixed = isinstance(trained.experiment.backbone, Timm)
    free = {0: Dim.DYNAMIC} if is_fixed else {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    edges = (view.height, view.width) if is_fixed else (48, 48)
    return _Signature(torch.zeros(2, num_inputs, *edges, dtype=torch.uint8), free, view)


def _program(
    trained: Trained, signature: _Signature, facts: Mapping[str, Any], format: Format
) -> bytes:
    """Everything from raw inputs to logits, as one file."""
    # Otherwise torch would treat an axis of length 1 as special, and refuse images so small that a
    # single place is left at the end.
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
    # torch logs what concerns only its developers.
    with ExitStack() as quiet:
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
    """The weights by the names of timm if the network is its, else by those of the run."""
    packed = pack_networks(trained.networks)
    classifier = _timm_classifier(trained)
    if classifier is None:
        return packed
    named = {}
    for name, tensor in packed.items():
        if name.startswith("body."):
            named[name.removeprefix("body.")] = tensor
    for part in ("weight", "bias"):
        named[f"{classifier}.{part}"] = packed[f"fc.{part}"]
    return named


def _timm_classifier(trained: Trained) -> str | None:
    """The name of the classifier in timm, if the run trained one such network of timm."""
    backbone = trained.experiment.backbone
    if not isinstance(backbone, Timm) or not isinstance(backbone.head, LinearHead):
        return None
    if len(trained.networks) > 1:
        return None
    body: Any = trained.networks[0].body
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
        # Image files become squares.
        facts["image_size"] = view.height if view.height == view.width else None
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
    """The model card. Names that users chose stand in it only as JSON, so they are never markup."""
    experiment, labels = trained.experiment, trained.labels
    # The recipe of a user is a path.
    method = {
        "recipe": _without_folders(str(trained.origin.get("recipe", "none"))),
        "epochs": experiment.epochs,
        "networks": experiment.networks,
    }
    for name in ("noise", "objective", "backbone"):
        method[name] = _without_folders(to_tree(getattr(experiment, name)))
    is_of_timm = _timm_classifier(trained) and format == "safetensors"
    task = "image-classification" if trained.wants_images else "tabular-classification"
    header = [
        "---",
        f"library_name: {'timm' if is_of_timm else 'nearsay'}",
        f"pipeline_tag: {task}",
        "tags: [noisy-labels, neighbor-consistency]",
        "---",
        "# Model card",
        "",
        f"A classifier of {len(labels.classes)} classes, trained on noisy labels by nearsay "
        f"{__version__}.",
        "",
    ]
    sections = {
        "Use": [_USE[format]],
        "Data and noise": [_data_sentence(trained, result)],
        "Accuracy": _accuracy_lines(trained, result),
        "Method": _fenced(method),
        "Limits": [_LIMITS],
        "Classes": _fenced(list(labels.classes)),
    }
    body = []
    for title, lines in sections.items():
        body += [f"## {title}", "", *lines, ""]
    return "\n".join([*header, *body])


def _data_sentence(trained: Trained, result: Mapping[str, Any] | None) -> str:
    labels = (result or {}).get("labels", {})
    num = labels.get("num_examples", len(trained.labels.given))
    requested, effective = labels.get("requested_rate"), labels.get("effective_rate")
    parts = [f"{num} training examples"]
    if requested is not None:
        parts.append(f"label noise of {requested:.1%} was added on purpose")
    if effective is None:
        parts.append("the share of wrong labels is unknown")
    else:
        parts.append(f"{effective:.1%} of labels are wrong")
    return f"{'; '.join(parts)}."


def _accuracy_lines(trained: Trained, result: Mapping[str, Any] | None) -> list[str]:
    accuracy = (result or {}).get("accuracy") or {}
    if not accuracy:
        return ["No accuracy was recorded."]
    lines = ["| split | final epoch | mean of the last ten at most |", "|---|---|---|"]
    for name, values in accuracy.items():
        lines.append(f"| {name} | {values['final']:.4f} | {values['last_10']:.4f} |")
    in_doubt = are_in_doubt("validation", trained.experiment.validation_labels, trained.labels)
    if "validation" in accuracy and in_doubt:
        lines += [
            "",
            "The validation labels may be as wrong as the training labels, or were cleaned as they "
            "were. Evaluate the model on labels that you trust.",
        ]
    return lines


def _without_folders(tree: Any) -> Any:
    """The tree with only the last part of every path: folders are not for a published model."""
    if isinstance(tree, Mapping):
        return {name: _without_folders(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_without_folders(value) for value in tree]
    return PurePath(tree).name if isinstance(tree, str) else tree


def _fenced(value: Any) -> list[str]:
    """JSON in a block of code. No line of it starts with a fence, so none ends the block."""
    return ["```json", *_json(value).split("\n"), "```"]


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _session(path: Path) -> Any:
    runtime = import_library("onnxruntime", "export")
    file = path / FILES["onnx"] if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} must be a file. Use nearsay export with format=onnx.")
    try:
        return runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    # onnxruntime has a class of error for each cause, and no common one.
    except Exception as error:
        raise ValueError(f"{file} must be an ONNX file that runs: {one_line(error)}") from error


def _read_facts(session: Any, path: Path) -> Mapping[str, Any]:
    written = session.get_modelmeta().custom_metadata_map.get(_FACTS)
    if written is None:
        raise ValueError(f"{path} must be an export of nearsay. Export the run again.")
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
        raise ValueError(f"{path} must hold its classes and image size. Export the run again.")
    return dict(facts)


def _margin(facts: Mapping[str, Any]) -> float:
    """The share of the shorter side of an image that is shown; older files have no such entry."""
    return float(facts.get("pretrained_cfg", {}).get("crop_pct", MARGIN))
