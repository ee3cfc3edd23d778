"""An audit handed over to other tools, in files that they read without nearsay; and what was decided there, read back.

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

from nearsay.batch import Files, Labels
from nearsay.data.loader import Inputs
from nearsay.doors.audit import Audited, table_bytes
from nearsay.errors import BAD_DATA, RunError, one_line
from nearsay.training.checkpoints import COPY, open_run, write_whole
from nearsay.training.run_folder import read_experiment, read_labels, read_predictions
from nearsay.training.splits import open_train

Tool = Literal["cleanlab", "fiftyone", "label-studio"]
IMAGES = "audit-images"
"""The folder for images of data that is no files."""
_FIELDS = "fiftyone.core.fields"
_LABEL_FIELD = f"{_FIELDS}.EmbeddedDocumentField(fiftyone.core.labels.Classification)"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Example(NamedTuple):
    """One judged example, in words."""

    number: int  # in the data set
    given: str | None
    suggested: str | None
    probability: float | None  # of the suggestion
    quality: float | None  # low is suspicious
    is_issue: bool


class Handed(NamedTuple):
    """What was written, and where the images are that it speaks of."""

    files: tuple[Path, ...]
    root: Path | None  # of images in files; None where there are none, or nobody asked for them


def hand_over(folder: Path, found: Audited, tools: Sequence[Tool]) -> Handed:
    """Write what each tool reads into the folder of an audited run; ValueError if the data is not for that tool.

    cleanlab: `audit-cleanlab.npz`. FiftyOne: `audit-fiftyone.json`. Label Studio: `audit-label-studio.json`, the
    issues as tasks, the most suspicious first, and `audit-label-studio.xml`, the labeling interface for them.
    """
    contents: dict[str, bytes] = {}
    inputs = _images(folder, found) if {"fiftyone", "label-studio"} & set(tools) else None
    if "cleanlab" in tools:
        contents["audit-cleanlab.npz"] = _for_cleanlab(folder, found)
    with open_run(folder, cure=COPY) as run:
        if inputs is not None and "fiftyone" in tools:
            contents["audit-fiftyone.json"] = _for_fiftyone(run.path, found, inputs)
        if inputs is not None and "label-studio" in tools:
            contents["audit-label-studio.json"] = _for_label_studio(found, inputs)
            contents["audit-label-studio.xml"] = labeling_interface(found.audit.classes).encode()
        for name, content in contents.items():
            write_whole(run.path / name, content)
    return Handed(
        tuple(folder / name for name in contents),
        _root(inputs) if isinstance(inputs, Files) else None,
    )


def read_label_studio(folder: Path, path: Path) -> Path:
    """Turn an export of Label Studio (JSON or JSON-MIN) of our tasks into `corrections-label-studio.csv` in the run.

    Tasks that nobody has answered, or that were skipped, are left out; of several answers the latest counts.
    """
    labels = read_labels(folder)
    try:
        tasks = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = one_line(error)
        raise ValueError(
            f"{str(path)!r} is no JSON ({reason}); export the project as JSON"
        ) from error
    if not isinstance(tasks, list):
        raise ValueError(f"{str(path)!r} holds no list of tasks; export the project as JSON")
    names = {_shown(name): name for name in labels.classes}
    decided: dict[int, str] = {}
    for place, task in enumerate(tasks):
        for index, choice in _answers(task, f"task {place + 1} of {str(path)!r}", labels):
            if choice not in names:
                raise ValueError(
                    f"task {place + 1} of {str(path)!r} has the label {choice!r}, which is no class of the run; "
                    "use the labeling interface that was written beside the tasks"
                )
            decided[index] = names[choice]
    content = table_bytes({"index": list(decided), "label": list(decided.values())}, ".csv")
    with open_run(folder, cure=COPY) as run:
        write_whole(run.path / "corrections-label-studio.csv", content)
    return folder / "corrections-label-studio.csv"


def labeling_interface(classes: Sequence[str]) -> str:
    """The XML that Label Studio draws a page from: the image, its label, and a button for each class."""
    shown = [_shown(name) for name in classes]
    if twice := next((name for place, name in enumerate(shown) if name in shown[:place]), None):
        raise ValueError(
            f"two classes would both be shown as {twice!r} in Label Studio; rename one of them"
        )
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in shown)
    return (
        '<View>\n  <Header value="Labeled as" size="5"/>\n  <Header value="$given_label" size="3"/>\n'
        '  <Image name="image" value="$image"/>\n'
        '  <Choices name="label" toName="image" choice="single-radio" required="true" showInline="true">\n'
        f"{choices}  </Choices>\n</View>\n"
    )


def _examples(found: Audited) -> Iterator[Example]:
    columns = found.audit.to_columns(found.indices.tolist(), with_neighbors=False)
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


def _for_cleanlab(folder: Path, found: Audited) -> bytes:
    """Labeled examples alone: cleanlab has no word for those without a label."""
    logits = read_predictions(folder, read_labels(folder)).logits
    rows = (found.audit.given >= 0).nonzero()[:, 0]
    content = io.BytesIO()
    np.savez(
        content,
        labels=found.audit.given[rows].numpy(),
        pred_probs=logits[rows].double().softmax(dim=1).float().numpy(),
        label_quality=found.audit.scores[rows].double().numpy(),
        index=found.indices[rows].numpy(),
        classes=np.array(found.audit.classes, dtype=np.str_),
    )
    return content.getvalue()


def _for_fiftyone(folder: Path, found: Audited, inputs: Inputs) -> bytes:
    """The layout that `fiftyone.Dataset.from_json` reads; images of arrays are written as files."""
    samples = []
    for example in _examples(found):
        if isinstance(inputs, Files):
            path = inputs.root.absolute() / inputs.names[example.number]
        else:
            path = folder.absolute() / IMAGES / f"{example.number:08d}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_png(inputs[example.number]))  # the list of them is written last
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
        "default_classes": list(found.audit.classes),
        "samples": samples,
    }
    return _json(content)


def _for_label_studio(found: Audited, inputs: Inputs) -> bytes:
    """Tasks with our suggestion as a prediction; files by their path from beside their folder, arrays as images.

    From beside it, since Label Studio serves what is in a storage, and a storage must be below its document root.
    """
    issues = [example for example in _examples(found) if example.is_issue]
    tasks = []
    for example in sorted(
        issues, key=lambda each: (1.0 if each.quality is None else each.quality, each.number)
    ):
        if isinstance(inputs, Files):
            image = f"/data/local-files/?d={quote(f'{_root(inputs).name}/{inputs.names[example.number]}')}"
        else:
            image = (
                f"data:image/png;base64,{base64.b64encode(_png(inputs[example.number])).decode()}"
            )
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
        tasks.append(
            {"data": data, "predictions": [prediction] if example.suggested is not None else []}
        )
    return _json(tasks)


def _images(folder: Path, found: Audited) -> Inputs:
    """What the examples look like; ValueError where they are no images, or not to be found any more."""
    experiment = read_experiment(folder)
    try:
        inputs = open_train(experiment).inputs
    except (OSError, ValueError, ImportError) as error:
        raise RunError(f"the images of {folder} cannot be found: {error}", BAD_DATA) from error
    if isinstance(inputs, Tensor) and (inputs.ndim != 4 or inputs.shape[1] not in (1, 3)):
        raise ValueError(
            f"{folder} was trained on features, of which no image can be shown; take --for cleanlab"
        )
    if found.absence:  # what a number stood for is somewhere else
        raise RunError(
            f"the images of {folder} cannot be told apart: {found.absence}; put them back", BAD_DATA
        )
    return inputs


def _root(files: Files) -> Path:
    """The folder of the data, by a name of its own."""
    return Path(os.path.abspath(files.root))


def _png(image: Tensor) -> bytes:
    """An image of 1 or 3 channels, in bytes or from 0 to 1."""
    levels = (image * 255).round().clamp(0, 255) if image.is_floating_point() else image
    pixels = levels.byte().permute(1, 2, 0).numpy()  # (H, W, C)
    content = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(content, "PNG")
    return content.getvalue()


def _answers(task: Any, told: str, labels: Labels) -> Iterator[tuple[int, str]]:
    """Example and choice of each answer to a task, the latest last."""
    if not isinstance(task, dict):
        raise ValueError(
            f"{told} is {str(task)[:80]!r} and not an object; export the project as JSON"
        )
    data = task.get("data", task)
    index = data.get("index") if isinstance(data, dict) else None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(labels.given):
        raise ValueError(
            f"{told} has the index {index!r}, which is none of the {len(labels.given)} examples"
        )
    if "annotations" not in task:  # JSON-MIN
        choices = [task["label"]] if isinstance(task.get("label"), str) else []
    else:
        given = [each for each in _objects(task["annotations"]) if not each.get("was_cancelled")]
        given.sort(key=lambda each: str(each.get("updated_at") or ""))
        results = [each for answer in given for each in _objects(answer.get("result"))]
        values = [each.get("value") for each in results if each.get("type") == "choices"]
        named = [value.get("choices") for value in values if isinstance(value, dict)]
        choices = [name for names in named if isinstance(names, list) for name in names]
    yield from ((index, str(choice)) for choice in choices)


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; none of anything else."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _shown(name: str) -> str:
    """A name as XML can hold it."""
    return _NOT_XML.sub("\ufffd", name)


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False).encode() + b"\n"
