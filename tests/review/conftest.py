"""Run folders as an audit leaves them, and a page that a thread of this process serves."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from nearsay import config
from nearsay.data import tables
from nearsay.data.labels_file import pack_labels
from nearsay.label_issues.corrections import Corrections
from nearsay.review.examples import Pictures, open_source, read_examples
from nearsay.review.server import make_app, make_server
from nearsay.review.session import Session
from nearsay.training.run_folder import read_labels
from nearsay.training.splits import open_splits

TOKEN = "a-token-that-is-known-to-the-tests"


def write_run(folder, recipe, *arguments, num_issues=30, overrides=(), **changes):
    """A run with the score i / N of example i, and the next class as its suggestion."""
    call = config.apply_overrides(config.call_recipe(recipe, [*arguments]), overrides)
    splits = open_splits(call.experiment)
    folder.mkdir(parents=True)
    content = pack_labels(
        splits.labels,
        splits.inputs,
        train=splits.train,
        held_out=splits.held_out,
        requested_rate=None,
    )
    (folder / "labels.npz").write_bytes(content)
    (folder / "experiment.json").write_text(json.dumps({**call.origin, "num_inputs": 3}))
    write_audit(folder, splits.labels, num_issues, **changes)
    return folder


def write_audit(folder, labels, num_issues=30, **changes):
    given, classes = labels.given.tolist(), labels.classes
    num = len(given)
    near = [[(index + step) % num for step in range(1, 6)] for index in range(num)]
    name = {**dict(enumerate(classes)), -1: None}
    columns = {
        "index": list(range(num)),
        "path": [None] * num,
        "given_label": [name[label] for label in given],
        "predicted_label": [classes[(label + 1) % len(classes)] for label in given],
        "predicted_probability": [0.9] * num,
        "label_score": [round(index / num, 6) for index in range(num)],
        "is_label_issue": [index < num_issues for index in range(num)],
        "neighbors": [
            json.dumps(
                [
                    [other, name[given[other]], round(0.9 - 0.1 * step, 4)]
                    for step, other in enumerate(row)
                ]
            )
            for row in near
        ],
        "ood_score": [0.5] * num,
        "status": ["ok"] * num,
        **changes,
    }
    tables.write(folder / "audit.csv", columns)
    (folder / "audit.json").write_text(json.dumps({"doubt": None}))


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "digits", "digits", "noise=0.4")


@pytest.fixture
def run(original, tmp_path):
    """A run on digits that a test may change."""
    folder = tmp_path / "digits"
    folder.mkdir()
    for path in original.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A run on files, and one is no image."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(6):
        place = root / "images" / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1500, 300), (40 * number, 0, 99)).save(place / f"{number}.png")
    (root / "images" / "dog" / "broken.png").write_bytes(b"no image")
    return write_run(
        root / "run", "folder", f"path={root / 'images'}", "backbone=resnet18", "weights=none"
    )


@pytest.fixture
def features(tmp_path):
    """A run on features, with as many classes as there are names: `features(names)`."""

    def write(names, **changes):
        num = len(names)
        arrays = {
            "features": np.eye(num, dtype=np.float32),
            "labels": np.arange(num),
            "classes": np.array(names),
        }
        np.savez(tmp_path / "features.npz", **arrays)
        path = f"path={tmp_path / 'features.npz'}"
        return write_run(
            tmp_path / "features", "embeddings", path, overrides=["held_out=0"], **changes
        )

    return write


def open_session(folder, **choices):
    labels = read_labels(folder)
    source = open_source(folder, len(labels.given))
    return Session(
        read_examples(folder, labels),
        Corrections(folder / "corrections.csv", labels),
        Pictures(source.inputs),
        name=str(folder),
        notes=[source.note] if source.note else [],
        extra=source.extra,
        **choices,
    )


@contextmanager
def serving(folder, **choices):
    """The page of a run: its address, its port, and `ask(method, path, value)`."""
    session = open_session(folder, **choices)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        server = make_server(make_app(session, token=TOKEN, port=port))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.005)

        def ask(method, path, value=None, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            own = (
                {"Content-Type": "application/json", "Origin": f"http://127.0.0.1:{port}"}
                if value is not None
                else {}
            )
            body = None if value is None else json.dumps(value)
            connection.request(method, f"/{TOKEN}/{path}", body, {**own, **headers})
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            return SimpleNamespace(status=answer.status, headers=answer.headers, content=content)

        try:
            yield SimpleNamespace(
                session=session, port=port, ask=ask, address=f"http://127.0.0.1:{port}/{TOKEN}/"
            )
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def page(run):
    with serving(run) as served:
        yield served
