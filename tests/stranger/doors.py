"""Training, auditing and predicting from Python, and what help() explains."""

import inspect
import re
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import nearsay

run = nearsay.train("digits", method="ncr", noise=0.4, epochs=2, out="runs/first", quiet=True)
assert run.result["accuracy"]["test"]["final"] > 0.2, run.result["accuracy"]
assert len(run.audit().order()) == 1347
assert 0 < run.evaluate()["accuracy"] < 1
images = np.zeros((3, 3, 8, 8), dtype=np.uint8)
assert len(run.predict(images).labels) == 3
assert Path(run.export()).is_file()
again = nearsay.load("runs/first")
assert again.result == run.result
assert len(again.predictions.features) == 1347

features, labels = load_digits(return_X_y=True)
labels[:100] = (labels[:100] + 1) % 10
worst = nearsay.audit(labels, features=features).order()[:50]
assert (np.asarray(worst) < 100).mean() > 0.8

for call in (
    lambda: nearsay.train("digit", out="runs/x"),
    lambda: nearsay.train("digits", noize=0.4, out="runs/x"),
    lambda: nearsay.train(3, out="runs/x"),
    lambda: nearsay.load("runs/nowhere"),
    lambda: nearsay.audit(labels),
    lambda: run.predict("nowhere"),
    lambda: run.evaluate("nowhere"),
    lambda: run.export(format="word"),
):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        message = str(error)
    else:
        raise AssertionError(f"nothing was said by {inspect.getsource(call)}")
    assert len(message.splitlines()) == 1, message

for name in nearsay.__all__:
    value = getattr(nearsay, name)
    if inspect.ismodule(value):
        continue
    told = inspect.getdoc(value) or ""
    for field in inspect.signature(value).parameters:
        is_open = field in ("args", "kwargs")
        assert is_open or re.search(rf"\b{field}\b[^\n]*:", told), f"help({name}) omits {field}"
print("doors: fine")
