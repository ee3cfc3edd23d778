"""Files of weights from anywhere: what is no such file is refused in one sentence, in little memory, and never run."""

import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from nearsay.config import apply_overrides, call_recipe
from nearsay.errors import RunError
from nearsay.training.loop import train
from nearsay.training.predict import open_trained

SMALL = ["data.num_train=60", "data.num_test=20", "batch_size=20", "backbone.hidden=16"]


def made():
    return apply_overrides(call_recipe("toy", ["epochs=1", "method=standard"]), SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    call = made()
    path = tmp_path_factory.mktemp("runs") / "toy"
    train(call.experiment, path, origin=call.origin)
    return path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


class Trap:
    """What would leave a trace if it were unpickled."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return open, (self.trace, "w")


def torch_file(value):
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def zip_file(**files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        for name, each in files.items():
            file.writestr(name, each)
    return content.getvalue()


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape, start=0, end=0, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def hostile(right, trace):
    """Contents of a file of weights, none of them right."""
    safe = dict(right)
    return {
        "nothing": b"",
        "seven bytes": b"\0" * 7,
        "random bytes": random.Random(0).randbytes(5000),
        "text": b"not weights\n" * 100,
        "a pickle": pickle.dumps(Trap(trace)),
        "a file of torch": torch_file(safe),
        "a file of torch with a trap": torch_file({"fc.weight": Trap(trace)}),
        "an exported program": zip_file(**{"data.pkl": pickle.dumps(Trap(trace)), "version": "3"}),
        "a bomb": zip_file(zeros=bytes(10**7)),
        "a numpy file": zip_file(**{"fc.weight.npy": np.zeros(3).tobytes()}),
        "a header of exabytes": struct.pack("<Q", 2**63) + b"{}",
        "a header of a gigabyte": struct.pack("<Q", 10**9) + b"{}",
        "a header that is no JSON": with_header(b"{" * 1000),
        "a deep header": with_header(b'{"a":' * 50_000),
        "a header that is no UTF-8": with_header(b"\xff" * 50),
        "a tensor beyond the file": with_header({"fc.weight": entry([8, 16], 0, 512)}),
        "a tensor of exabytes": with_header({"fc.weight": entry([2**40, 2**20], 0, 2**62)}),
        "a product that overflows": with_header(
            {"fc.weight": entry([2**33, 2**33], 0, 64)}, bytes(64)
        ),
        "negative offsets": with_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}'),
        "an unknown type": with_header({"fc.weight": entry([1], 0, 4, "Q7")}, bytes(4)),
        "a gap": with_header({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
        "cut off": save(safe)[:-1],
        "half": save(safe)[: len(save(safe)) // 2],
        "bytes after the end": save(safe) + b"more",
        "no tensors": save({}),
        "another shape": save(
            safe | {"fc.weight": torch.zeros(8, 17), "body.0.weight": torch.zeros(16, 31)}
        ),
        "an empty tensor that names a huge size": with_header({"body.0.weight": entry([0, 10**9])}),
        "a wide tensor": save({"body.0.weight": torch.zeros(1, 500_000)}),
        "another network": save({"conv1.weight": torch.zeros(4, 3, 3, 3)}),
        "a missing tensor": save(
            {name: each for name, each in safe.items() if name != "body.0.weight"}
        ),
        "a tensor too many": save(safe | {"evil": torch.zeros(3)}),
    }


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A file that nobody may make."""
    path = tmp_path_factory.mktemp("trap") / "trace"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def contents(trained, trace):
    return hostile(load_file(trained / "model.safetensors"), trace)


def test_hostile_weights_of_a_run_are_refused(run, contents, trace):
    for content in contents.values():
        (run / "model.safetensors").write_bytes(content)
        with pytest.raises(RunError) as caught:
            open_trained(run)
        assert caught.value.code == 65
        assert str(run) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not trace.exists()


def test_hostile_weights_to_start_from_are_refused(contents, trace, tmp_path):
    path = tmp_path / "weights.safetensors"
    for content in contents.values():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"weights\.safetensors") as caught:
            train(replace(made().experiment, init=str(path)), tmp_path / "run")
        assert "\n" not in str(caught.value)
        assert not trace.exists()
        assert not (tmp_path / "run" / "checkpoints").exists()


def test_damaged_weights_to_start_from_are_told(run, tmp_path):
    right = (run / "model.safetensors").read_bytes()
    flipped = bytearray(right)
    flipped[-20] ^= 4
    of_a_run, of_others = run / "model.safetensors", tmp_path / "weights.safetensors"
    cases = [(of_a_run, content) for content in (flipped, right[:-20], b"", bytes(3000))]
    for path, content in [*cases, (of_others, right[:-20])]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            train(replace(made().experiment, init=str(path)), tmp_path / "new")


def test_a_run_that_has_no_weights_yet_is_told_from_a_wrong_path(run, tmp_path):
    with pytest.raises(ValueError, match=r"best\.safetensors"):
        train(replace(made().experiment, init=str(run / "best.safetensors")), tmp_path / "new")
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        train(replace(made().experiment, init=str(run)), tmp_path / "new")


def test_a_pipe_is_not_waited_for(run):
    (run / "model.safetensors").unlink()
    os.mkfifo(run / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors"):
        open_trained(run)


MEASURED = """
import json, resource, sys
from pathlib import Path
from nearsay.errors import RunError
from nearsay.training.predict import open_trained
folder = Path(sys.argv[1])
trained = open_trained(folder)  # all is imported and warm
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
told = []
for path in sorted(Path(sys.argv[2]).iterdir()):
    (folder / "model.safetensors").write_bytes(path.read_bytes())
    try:
        open_trained(folder)
    except RunError as error:
        told.append(str(error))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"refused": len(told), "mebibytes": (after - before) / 1024}))
"""


def test_hostile_weights_take_little_memory(run, contents, trace, tmp_path):
    (tmp_path / "files").mkdir()
    for number, content in enumerate(contents.values()):
        (tmp_path / "files" / str(number)).write_bytes(content)
    largest = max(map(len, contents.values())) / 2**20
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(run), str(tmp_path / "files")],
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(done.stdout)
    assert measured["refused"] == len(contents)
    # Of the interpreter itself.
    assert measured["mebibytes"] <= 2 * largest + 10
    assert not trace.exists()


@pytest.mark.slow
def test_a_thousand_damaged_files_are_refused_or_hold_the_right_shapes(run):
    draw, right = random.Random(0), (run / "model.safetensors").read_bytes()
    shapes = {name: each.shape for name, each in load_file(run / "model.safetensors").items()}
    refused = 0
    for _ in range(1000):
        content = bytearray(right)
        for _ in range(draw.choice([1, 2, 10])):
            content[draw.randrange(draw.choice([16, 600, len(content)]))] = draw.randrange(256)
        (run / "model.safetensors").write_bytes(
            content[: draw.choice([None, None, draw.randrange(len(content))])]
        )
        try:
            found = open_trained(run).networks[0].state_dict()
        except RunError as error:
            assert error.code == 65  # noqa: PT017 — both outcomes are right
            refused += 1
        else:
            assert {name: each.shape for name, each in found.items()} == shapes
    assert 300 < refused < 1000
