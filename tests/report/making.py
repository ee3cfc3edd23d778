"""Runs and audited runs made up for tests of their pages, harmless and hostile ones."""

import json
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from nearsay.batch import Files, Labels
from nearsay.data import images
from nearsay.errors import ImageError
from nearsay.label_issues import audit
from nearsay.metrics import confidence
from nearsay.noise import measure_noise
from nearsay.report import audit_page
from nearsay.report.findings import Findings
from nearsay.report.runs import Comparison, FinishedRun, group_runs
from nearsay.training.progress import plain

SIZE = 5  # examples of a class, the last of which carries the label of the next class
CLASSES = ("cat", "dog", "emu")


class Reader(HTMLParser):
    """Tags, attributes and text of a page as a browser reads them, the text also by heading."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.scripts = [], [], []
        self.text, self.drawn, self.parts = "", "", defaultdict(str)
        self.part, self.is_heading, self.is_script = "", False, False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attributes]
        self.is_heading, self.is_script = tag == "h2", tag == "script"
        if self.is_heading:
            self.part = ""
        if self.is_script:
            self.scripts.append((dict(attributes).get("type"), ""))

    def handle_endtag(self, tag):
        self.is_heading = self.is_heading and tag != "h2"
        self.is_script = self.is_script and tag != "script"

    def handle_data(self, data):
        if self.is_script:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
            return
        self.text += data
        if self.is_heading:
            self.part += data
        else:
            self.parts[self.part] += data
        if self.tags[-1:] == ["text"]:  # of a chart
            self.drawn += data

    def words(self, part=None):
        text = self.text if part is None else self.parts[part]
        return " ".join(text.replace("\u00a0", " ").split())

    def points(self):
        """The data of the map."""
        [content] = [content for kind, content in self.scripts if kind == "application/json"]
        return json.loads(content)


def write_run(
    folder, *, method="ncr", seed=0, finals=None, classes=CLASSES, knows_truth=True, **changes
):
    """A run folder as training leaves it: 30 examples, every cat labeled a dog, sure of the rest.

    The changes are `arguments`, `settings`, `result`, `recipe`, `overrides`, `num`, `num_trained`
    and `wrong_trust`.
    """
    num, num_classes = changes.get("num", 30), len(classes)
    finals = finals or [0.5, 0.6, 0.7, 0.8 + seed / 100]
    record = {
        "recipe": changes.get("recipe", "digits"),
        "arguments": {"method": method, "noise": "0.4", "seed": str(seed)}
        | changes.get("arguments", {}),
        "overrides": changes.get("overrides", []),
        "experiment": {
            "kind": "Experiment",
            "data": {"kind": "Digits", "seed": 0},
            "noise": {"kind": "Symmetric", "seed": seed},
            "objective": {"kind": method.upper()},
            "epochs": 4.0,
            "seed": seed,
            "machine": {"device": "cpu"},
        }
        | changes.get("settings", {}),
    }
    test = {"final": finals[-1], "best": 0.99, "best_epoch": 2.0, "last_10": np.mean(finals)}
    result = {
        "accuracy": {"test": test},
        "labels": {"effective_rate": 0.4, "num_examples": num, "num_classes": num_classes},
        "detection": {"auroc": 0.95, "average_precision": 0.9},
        "memorization": {"memorized": 0.125, "corrected": 0.75, "other": 0.125},
        "seed": seed,
        "epochs": 4.0,
        "seconds": 12.5,
        "images_per_second": 2000.0,
        "peak_memory_bytes": 2**30,
        "hardware": "a small CPU",
        "versions": {"nearsay": "0.1.0", "torch": "2.10"},
        "finished": True,
    } | changes.get("result", {})
    lines = []
    for epoch, accuracy in enumerate(finals, start=1):
        entry = {"epoch": float(epoch), "step": 10 * epoch, "rate": 0.1, "loss": 1 / epoch}
        lines.append(json.dumps(entry | {"test_accuracy": accuracy}) + "\n")
    (folder / "predictions").mkdir(parents=True)
    (folder / "experiment.json").write_text(json.dumps(record))
    (folder / "log.jsonl").write_text("".join(lines))
    (folder / "result.json").write_text(json.dumps(result))

    clean = torch.arange(num) % num_classes
    given = (clean + (torch.arange(num) % 3 == 0)) % num_classes
    wrong_trust = torch.tensor(changes.get("wrong_trust", 0.12))
    trust = torch.where(given == clean, torch.tensor(0.92), wrong_trust)
    logits = ((1 - trust) / (num_classes - 1)).log()[:, None].repeat(1, num_classes)
    logits[torch.arange(num), given] = trust.log()
    arrays = {"given": given.numpy(), "classes": np.array(classes)}
    if knows_truth:
        arrays["clean"] = clean.numpy()
    num_trained = changes.get("num_trained", num)
    arrays |= {"train": np.arange(num_trained), "validation": np.arange(num_trained, num)}
    np.savez(folder / "labels.npz", **arrays)
    tensors = {"features": torch.zeros(num, 2), "logits": logits, "indices": torch.arange(num)}
    save_file(tensors, folder / "predictions" / "train.safetensors")
    return folder


def make_findings(classes, *, inputs=None, knows_truth=True, words=(), **changes):
    """Classes far apart, each with one wrong label; the network is sure of the truth."""
    num_classes = len(classes)
    clean = torch.arange(num_classes * SIZE) // SIZE
    is_last = torch.arange(len(clean)) % SIZE == SIZE - 1
    given = torch.where(is_last, (clean + 1) % num_classes, clean)
    noise = torch.randn(len(clean), num_classes, generator=torch.Generator().manual_seed(0))
    features = 4 * torch.eye(num_classes)[clean] + 0.3 * noise
    logits = 6 * torch.eye(num_classes)[clean]
    result = audit(
        given, probabilities=logits.softmax(dim=1), features=features, classes=classes, k=4
    )
    labels = Labels(given, clean if knows_truth else None, tuple(classes))
    trust = confidence(logits, given)
    run = FinishedRun(
        path=Path("a run"),
        recipe=words[0] if words else "digits",
        arguments={word: word for word in words},
        overrides=tuple(words),
        settings={word: word for word in words},
        seed=0,
        log=(
            {"epoch": 1.0, "test_accuracy": 0.5, "train_accuracy": 0.4},
            {"epoch": 2.0, "test_accuracy": 0.9},
        ),
        result={"seconds": 12.5, "hardware": "a small CPU", "seed": 0, "finished": True},
        labels=labels,
        trust=trust,
        noise=measure_noise(labels),
    )
    unreadable = changes.get("unreadable", {})
    reviews = {f"{recall:g}": result.review_for(recall) for recall in (0.8, 0.9, 0.95)}
    summary = {
        "num_examples": len(given) + len(unreadable),
        "num_labeled": len(given),
        "num_unreadable": len(unreadable),
        "num_issues": int(result.is_issue.sum()),
        "noise_rate": result.noise_rate._asdict(),
        "most_confused": [pair._asdict() for pair in result.confused()],
        "review_for_recall": reviews,
        "detection": {"score": {"auroc": 0.987}} if knows_truth else None,
        "doubt": changes.get("doubt"),
    }
    return Findings(
        name=changes.get("name", "a run"),
        audit=result,
        indices=torch.arange(len(given)),
        features=features,
        confidence=trust,
        clean=labels.clean,
        inputs=inputs,
        unreadable=unreadable,
        corrections=changes.get("corrections", {}),
        problem=changes.get("problem", ""),
        summary=summary,
        comparison=Comparison(group_runs([run]), "test"),
    )


PAYLOADS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "--><script>alert(1)</script>",
    "]]><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<svg><script>alert(1)</script></svg>",
    "</style></svg></title></pre><script>alert(1)</script>",
    "</select></option><script>alert(1)</script>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<details open ontoggle=alert(1)>",
    "<noscript><p title='</noscript><script>alert(1)</script>'>",
    "' onmouseover='alert(1)",
    '" onfocus="alert(1)" autofocus="',
    "{{ 7 * 7 }}{% raw %}",
    "{0}{caption}{data}",
    "${alert(1)} `+alert(1)+` \\u003cscript\\u003e",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "alert(1)//\u202egpj.exe",
    "one line\u2028and\u2029another",
]


def render_with(texts, root, monkeypatch):
    """A page with each text in each place: 20 classes, 100 examples, 20 unreadable files."""
    num = SIZE * len(texts)
    names = []
    for number, text in enumerate(texts * (SIZE + 1)):
        names.append(f"{text} {number // len(texts)}")
    reasons = {root / name: texts[number % len(texts)] for number, name in enumerate(names)}

    def fail(path):
        raise ImageError(f"{reasons[path]} went wrong")

    monkeypatch.setattr(images, "decode", fail)
    findings = make_findings(
        texts,
        inputs=Files(root, tuple(names)),
        words=list(map(plain, texts)),  # as they are read from a run folder
        unreadable={num + number: text for number, text in enumerate(texts)},
        corrections={SIZE * number + SIZE - 1: number for number in range(len(texts))},
        problem=" and ".join(texts),
        name=texts[0],
    )
    return audit_page.render(findings)
