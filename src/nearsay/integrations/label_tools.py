"""An audit for cleanlab, FiftyOne and Label Studio, in their own files; and decisions read back.

Any stands for JSON.
"""

import base64
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

import numpy as np
from PIL import Image
from torch import Tensor

from nearsay.batch import Files, Inputs, Labels
from nearsay.errors import BAD_DATA, RunError, one_line
from nearsay.label_issues.run_audit import RunAudit, table_bytes
from nearsay.training.checkpoints import COPY, open_run, write_whole
from nearsay.training.run_folder import read_experiment, read_labels, read_predictions
from nearsay.training.splits import open_train

Tool = Literal["cleanlab", "fiftyone", "label-studio"]
IMAGES = "audit-images"
"""The folder for images of data that is not in files."""
_FIELDS = "fiftyone.core.fields"
_LABEL_FIELD = f"{_FIELDS}.EmbeddedDocumentField(fiftyone.core.labels.Classification)"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Example(NamedTuple):
    """An audited example, in words."""

    number: int  # in the data set
    given: str | None
    suggested: str | None
    probability: float | None  # of the suggestion
    quality: float | None  # low is suspicious
    is_issue: bool


class Handed(NamedTuple):
    """The files that were written, and the folder of the images that they name."""

    files: tuple[Path, ...]
    root: Path | None  # None where the images are not files, or no tool needs them


def hand_over(folder: Path, audited: RunAudit, tools: Sequence[Tool]) -> Handed:
    """Write the files of each tool into the folder of an audited run.

    cleanlab: `audit-cleanlab.npz`. FiftyOne: `audit-fiftyone.json`. Label Studio:
    `audit-label-studio.json`, the issues as tasks, the most suspicious first, and
    `audit-label-studio.xml`, the labeling interface for them.
    """
    contents: dict[str, bytes] = {}
    inputs = _images(folder, audited) if {"fiftyone", "label-studio"} & set(tools) else None
    if "cleanlab" in tools:
        contents["audit-cleanlab.npz"] = _for_cleanlab(folder, audited)
    with open_run(folder, cure=COPY) as run:
        if inputs is not None and "fiftyone" in tools:
            contents["audit-fiftyone.json"] = _for_fiftyone(run.path, audited, inputs)
        if inputs is not None and "label-studio" in tools:
            contents["audit-label-studio.json"] = _for_label_studio(audited, inputs)
            contents["audit-label-studio.xml"] = labeling_interface(audited.audit.classes).encode()
        for name, content in contents.items():
            write_whole(run.path / name, content)
    return Handed(
        tuple(folder / name for name in contents),
        _root(inputs) if isinstance(inputs, Files) else None,
    )


def read_label_studio(folder: Path, path: Path) -> Path:
    """Turn an export of Label Studio (JSON or JSON-MIN) into corrections in the run folder.

    Skipped and unanswered tasks are left out. Of several answers the latest counts. Returns the
    table of corrections.
    """
    labels = read_labels(folder)
    try:
        tasks = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} must be JSON, got {one_line(error)}. Export the project as JSON."
        ) from error
    if not isinstance(tasks, list):
        raise ValueError(f"{str(path)!r} must hold a list of tasks. Export the project as JSON.")
    names = {_shown(name): name for name in labels.classes}
    decided: dict[int, str] = {}
    for place, task in enumerate(tasks):
        for index, choice in _answers(task, f"task {place + 1} of {str(path)!r}", labels):
            if choice not in names:
                raise ValueError(
                    f"the label of task {place + 1} of {str(path)!r} must be a class of the run, "
                    f"got {choice!r}. Use the labeling interface beside the tasks."
                )
            decided[index] = names[choice]
    content = table_bytes({"index": list(decided), "label": list(decided.values())}, ".csv")
    with open_run(folder, cure=COPY) as run:
        write_whole(run.path / "corrections-label-studio.csv", content)
    return folder / "corrections-label-studio.csv"


def labeling_interface(classes: Sequence[str]) -> str:
    """The page of Label Studio as XML: the image, its label, and a button for each class."""
    shown = [_shown(name) for name in classes]
    if twice := next((name for place, name in enumerate(shown) if name in shown[:place]), None):
        raise ValueError(
            f"classes must look different in Label Studio, got {twice!r} twice. Rename one of them."
        )
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in shown)
    return (
        '<View>\n  <Header value="Labeled as" size="5"/>\n'
        '  <Header value="$given_label" size="3"/>\n'
        '  <Image name="image" value="$image"/>\n'
        '  <Choices name="label" toName="image" choice="single-radio" required="true" '
        'showInline="true">\n'
        f"{choices}  </Choices>\n</View>\n"
    )


def _examples(audited: RunAudit) -> Iterator[Example]:
    columns = audited.audit.to_columns(audited.indices.tolist(), with_neighbors=False)
    names = (
        "index",
        "given_label",
        "predicted_label",
        "predicted_probability",
        "label_score",
        "is_label_issue",
    )
    for cells in zip(*(columns[name] for name in names), strict=True):
        yield Example._make(cells)


def _for_cleanlab(folder: Path, audited: RunAudit) -> bytes:
    """The labeled examples: cleanlab cannot hold examples without a label."""
    logits = read_predictions(folder, read_labels(folder)).logits
    rows = (audited.audit.given >= 0).nonzero()[:, 0]
    content = io.BytesIO()
    np.savez(
        content,
        labels=audited.audit.given[rows].numpy(),
        pred_probs=logits[rows].double().softmax(dim=1).float().numpy(),
        label_quality=audited.audit.scores[rows].double().numpy(),
        index=audited.indices[rows].numpy(),
        classes=np.array(audited.audit.classes, dtype=np.str_),
    )
    return content.getvalue()


def _for_fiftyone(folder: Path, audited: RunAudit, inputs: Inputs) -> bytes:
    """What `fiftyone.Dataset.from_json` reads; images of arrays are written as files."""
    samples = []
    for example in _examples(audited):
        if isinstance(inputs, Files):
            path = inputs.root.absolute() / inputs.names[example.number]
        else:
            path = folder.absolute() / IMAGES / f"{example.number:08d}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_png(inputs[example.number]))
        sample: dict[str, Any] = {
            "filepath": str(path),
            "tags": ["label issue"] if example.is_issue else [],
            "index": example.number,
            "label_quality": example.quality,
            "is_label_issue": example.is_issue,
            "ground_truth": None,
            "prediction": None,
        }
        if example.given is not None:
            sample["ground_truth"] = {"_cls": "Classification", "tags": [], "label": example.given}
        if example.suggested is not None:
            sample["prediction"] = {
                "_cls": "Classification",
                "tags": [],
                "label": example.suggested,
                "confidence": example.probability,
            }
        samples.append(sample)
    fields = {
        "index": f"{_FIELDS}.IntField",
        "label_quality": f"{_FIELDS}.FloatField",
        "is_label_issue": f"{_FIELDS}.BooleanField",
        "ground_truth": _LABEL_FIELD,
        "prediction": _LABEL_FIELD,
    }
    content = {
        "name": f"nearsay-{folder.absolute().name}",
        "media_type": "image",
        "sample_fields": fields,
        "info": {"low label_quality": "suspicious"},
        "default_classes": list(audited.audit.classes),
        "samples": samples,
    }
    return _json(content)


def _for_label_studio(audited: RunAudit, inputs: Inputs) -> bytes:
    """Tasks with our suggestion as a prediction, the most suspicious first.

    Paths of files begin with the name of their folder, because Label Studio serves what is in a
    storage, and a storage must be below its document root. Images of arrays are in the tasks.
    """
    issues = [example for example in _examples(audited) if example.is_issue]
    issues.sort(key=_suspicion)
    tasks = []
    for example in issues:
        if isinstance(inputs, Files):
            path = quote(f"{_root(inputs).name}/{inputs.names[example.number]}")
            image = f"/data/local-files/?d={path}"
        else:
            content = base64.b64encode(_png(inputs[example.number])).decode()
            image = f"data:image/png;base64,{content}"
        data = {
            "image": image,
            "index": example.number,
            "given_label": None if example.given is None else _shown(example.given),
            "label_quality": example.quality,
        }
        answer = {
            "id": f"nearsay-{example.number}",
            "from_name": "label",
            "to_name": "image",
            "type": "choices",
            "value": {"choices": [_shown(example.suggested or "")]},
        }
        prediction = {"model_version": "nearsay", "score": example.probability, "result": [answer]}
        predictions = [] if example.suggested is None else [prediction]
        tasks.append({"data": data, "predictions": predictions})
    return _json(tasks)


def _suspicion(example: Example) -> tuple[float, int]:
    return 1.0 if example.quality is None else example.quality, example.number


def _images(folder: Path, audited: RunAudit) -> Inputs:
    """The images of the examples; ValueError for features, RunError where they are gone."""
    experiment = read_experiment(folder)
    try:
        inputs = open_train(experiment).inputs
    except (OSError, ValueError, ImportError) as error:
        raise RunError(f"images of {folder} are missing: {error}", BAD_DATA) from error
    if isinstance(inputs, Tensor) and (inputs.ndim != 4 or inputs.shape[1] not in (1, 3)):
        raise ValueError(
            f"{folder} was trained on features, so there are no images to show. Try --for cleanlab."
        )
    # After a change of the data, the number of an example may stand for another image.
    if audited.absence:
        raise RunError(
            f"images of {folder} have changed: {audited.absence}. Put them back.", BAD_DATA
        )
    return inputs


def _root(files: Files) -> Path:
    """The folder of the data, by a name of its own."""
    return Path(os.path.abspath(files.root))


def _png(image: Tensor) -> bytes:
    """An image (C, H, W) of 1 or 3 channels, in bytes or from 0 to 1."""
    levels = (image * 255).round().clamp(0, 255) if image.is_floating_point() else image
    pixels = levels.byte().permute(1, 2, 0).numpy()  # (H, W, C)
    content = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(content, "PNG")
    return content.getvalue()


def _answers(task: Any, place: str, labels: Labels) -> Iterator[tuple[int, str]]:
    """Example and choice of each answer to a task, the latest last."""
    if not isinstance(task, dict):
        raise ValueError(
            f"{place} must be a JSON object, got {str(task)[:80]!r}. Export the project as JSON."
        )
    data = task.get("data", task)
    index = data.get("index") if isinstance(data, dict) else None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(labels.given):
        raise ValueError(
            f"the index of {place} must be from 0 to {len(labels.given) - 1}, got {index!r}."
        )
    if "annotations" not in task:
        # The format JSON-MIN.
        if isinstance(task.get("label"), str):
            yield index, task["label"]
        return
    answers = _objects(task["annotations"])
    answers.sort(key=lambda answer: str(answer.get("updated_at") or ""))
    for answer in answers:
        results = [] if answer.get("was_cancelled") else _objects(answer.get("result"))
        for result in results:
            value = result.get("value") if result.get("type") == "choices" else None
            choices = value.get("choices") if isinstance(value, dict) else None
            for choice in choices if isinstance(choices, list) else []:
                yield index, str(choice)


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; [] for anything else."""
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]


def _shown(name: str) -> str:
    """A name as XML can hold it."""
    return _NOT_XML.sub("\ufffd", name)


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False).encode() + b"\n"
