"""Audited runs made up for tests of their page, harmless and hostile ones."""

from pathlib import Path

import torch

from nearsay.batch import Files, Labels
from nearsay.data import images
from nearsay.errors import ImageError
from nearsay.label_issues import audit
from nearsay.metrics import confidence
from nearsay.noise import describe
from nearsay.report import audit_page
from nearsay.report.findings import Findings
from nearsay.report.runs import Comparison, FinishedRun, group_runs
from nearsay.training.display import plain

SIZE = 5  # examples of a class, the last of which carries the label of the next class


def make_findings(classes, *, inputs=None, knows_truth=True, words=(), **changes):
    """Classes far apart, in each of which one label is wrong; everybody is sure of the truth."""
    num_classes = len(classes)
    clean = torch.arange(num_classes * SIZE) // SIZE
    given = torch.where(
        torch.arange(len(clean)) % SIZE == SIZE - 1, (clean + 1) % num_classes, clean
    )
    draws = torch.Generator().manual_seed(0)
    features = 4 * torch.eye(num_classes)[clean] + 0.3 * torch.randn(
        len(clean), num_classes, generator=draws
    )
    logits = 6 * torch.eye(num_classes)[clean]
    found = audit(
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
        noise=describe(labels),
    )
    rate = found.noise_rate._asdict()
    summary = {
        "num_examples": len(given) + len(changes.get("unreadable", {})),
        "num_labeled": len(given),
        "num_unreadable": len(changes.get("unreadable", {})),
        "num_issues": int(found.is_issue.sum()),
        "noise_rate": rate,
        "most_confused": [pair._asdict() for pair in found.confused()],
        "review_for_recall": {
            f"{recall:g}": found.review_for(recall) for recall in (0.8, 0.9, 0.95)
        },
        "detection": {"score": {"auroc": 0.987}} if knows_truth else None,
        "doubt": changes.get("doubt"),
    }
    return Findings(
        name=changes.get("name", "a run"),
        audit=found,
        indices=torch.arange(len(given)),
        features=features,
        confidence=trust,
        clean=labels.clean,
        inputs=inputs,
        unreadable=changes.get("unreadable", {}),
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
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "</svg><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</pre></code><script>alert(1)</script>",
    "</select></option><script>alert(1)</script>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<object data=javascript:alert(1)>",
    "<embed src=javascript:alert(1)>",
    "<a href=javascript:alert(1)>x</a>",
    "<base href=//evil.example/>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<form action=//evil.example><input autofocus onfocus=alert(1)>",
    "<body onload=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)></video>",
    "<math><mtext></mtext><script>alert(1)</script></math>",
    "<template><script>alert(1)</script></template>",
    "<noscript><p title='</noscript><script>alert(1)</script>'>",
    "' onmouseover='alert(1)",
    '" onfocus="alert(1)" autofocus="',
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "{0}{caption}{data}",
    "${alert(1)} `+alert(1)+`",
    "\\u003cscript\\u003ealert(1)\\u003c/script\\u003e",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\u2028alert(1)\u2029//\u202egpj.exe",
    "url(//evil.example/x) } * { background: red",
]


def render_with(texts, root, monkeypatch):
    """A page with each text in each place: 40 classes, 200 examples, as many files, 40 of them unreadable."""
    num = SIZE * len(texts)
    names = tuple(
        f"{text} {number // len(texts)}" for number, text in enumerate(texts * (SIZE + 1))
    )
    unread = {num + number: text for number, text in enumerate(texts)}

    paths = {root / name: texts[number % len(texts)] for number, name in enumerate(names)}

    def fail(path):
        raise ImageError(f"{paths[path]} went wrong")

    monkeypatch.setattr(images, "decode", fail)
    corrections = {SIZE * number + SIZE - 1: number for number in range(len(texts))}
    findings = make_findings(
        texts,
        inputs=Files(root, names),
        words=[
            plain(text) for text in texts
        ],  # as they are when they have been read from a run folder
        unreadable=unread,
        corrections=corrections,
        problem=" and ".join(texts),
        name=texts[0],
    )
    return audit_page.render(findings)
