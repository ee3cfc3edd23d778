"""The rows that a training is fed with are the same ones, whichever way they come."""

from dataclasses import replace

import pytest
import torch

from nearsay import config, distributed
from nearsay.batch import Files
from nearsay.training.splits import Feed, open_splits

CPU = torch.device("cpu")


def made(*overrides):
    sizes = ["data.num_train=50", "data.num_test=20", "batch_size=8"]
    return config.apply_overrides(config.call_recipe("toy", []), [*sizes, *overrides]).experiment


def feed(*overrides):
    return Feed(made(*overrides), open_splits(made()), CPU)


def test_streamed_rows_are_those_that_lie_on_the_device():
    # The end of one pass, and the beginning of the next.
    resident, steps = feed(), range(4, 9)
    assert resident.source is not None
    for workers in (0, 2):
        streamed = feed("machine.loading=streaming", f"machine.workers={workers}")
        assert streamed.source is None
        with streamed.explained():
            found = list(streamed.rows(steps))
        for step, rows, others in zip(steps, found, resident.rows(steps), strict=True):
            assert (
                rows.indices.tolist()
                == others.indices.tolist()
                == resident.read(step).indices.tolist()
            )
            # The step takes them from the source.
            assert others.inputs is None
            torch.testing.assert_close(rows.inputs, resident.source[others.indices])
            torch.testing.assert_close(rows.inputs, streamed.read(step).inputs)


def test_processes_that_stream_share_a_batch(monkeypatch):
    whole = [rows.indices.tolist() for rows in feed().rows(range(7))]
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        own = feed("machine.loading=streaming")
        with own.explained():
            shares.append([rows.indices.tolist() for rows in own.rows(range(7))])
    assert [first + second for first, second in zip(*shares, strict=True)] == whole


def test_files_are_never_resident(tmp_path):
    splits = open_splits(made())
    files = splits._replace(
        inputs=Files(tmp_path, tuple(map(str, range(len(splits.labels.given)))))
    )
    assert Feed(made(), files, CPU).source is None
    experiment = made()
    wished = replace(experiment, machine=replace(experiment.machine, loading="resident"))
    with pytest.raises(ValueError, match="loading"):
        Feed(wished, files, CPU)
