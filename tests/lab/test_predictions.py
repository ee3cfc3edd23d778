import json

import pytest
import torch
from lab import worker
from lab.predictions import FOLDER, audit_again, path_of
from lab.record import read_records
from lab.run_queue import Wanted, write_queue

from nearsay.files import load_sealed

WORDS = {"recipe": "toy", "arguments": ("method=ncr", "noise=0.4", "epochs=3"), "overrides": ()}
RUN = Wanted(name="toy-run", protocol="short", **WORDS)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The output of a worker that ran a toy experiment, audited it and kept its predictions."""
    folder = tmp_path_factory.mktemp("out")
    (folder / "queue.json").write_text(write_queue([RUN]))
    (folder / "none").mkdir()
    places = {"queue": "queue.json", "records": "none", "runs": "runs", "out": ""}
    words = [word for name, at in places.items() for word in (f"--{name}", str(folder / at))]
    words += ["--keep-predictions", "toy", "--audit", "toy", "--keep", "toy"]
    assert worker.main(["run", *words]) == 0
    return folder


@pytest.fixture
def taken(out, tmp_path):
    """A folder of records with the run taken into it."""
    assert worker.main(["take", str(out / "cifar.json"), "--records", str(tmp_path)]) == 0
    return tmp_path


def test_predictions_are_kept_in_half_precision_beside_the_record(out, taken):
    kept = load_sealed(path_of(RUN.name, taken))
    whole = load_sealed(out / "runs" / RUN.name / "predictions" / "train.safetensors")
    assert kept["logits"].dtype == kept["features"].dtype == torch.float16
    order = whole["indices"].argsort()
    for name in ("logits", "features"):
        expected = whole[name][order].float()
        torch.testing.assert_close(kept[name].float(), expected, rtol=1e-3, atol=1e-3)
    assert [path.name for path in (taken / FOLDER).iterdir()] == [f"{RUN.name}.safetensors"]


def test_the_record_and_its_predictions_give_the_same_audit_again(taken):
    record = read_records(taken)[RUN.name]
    again = audit_again(record, path_of(RUN.name, taken)).summary
    first = record["audit"]
    assert 0.5 < first["auroc"] < 1
    assert again["auroc"] == pytest.approx(first["auroc"], abs=2e-3)
    assert again["average_precision"] == pytest.approx(first["average_precision"], abs=2e-3)
    assert again["noise_rate"]["estimate"] == pytest.approx(
        first["noise_rate"]["estimate"], abs=0.01
    )
    assert again["review_for_recall"].keys() == first["review_for_recall"].keys()


def test_the_verb_writes_the_new_audit_into_the_record(taken):
    path = taken / f"{RUN.name}.json"
    record = json.loads(path.read_text())
    worse = {**record, "audit": {**record["audit"], "auroc": 0.5}}
    path.write_text(json.dumps(worse))
    assert worker.main(["audit", "--records", str(taken), "--only", "nothing"]) == 0
    assert read_records(taken)[RUN.name]["audit"]["auroc"] == 0.5
    assert worker.main(["audit", "--records", str(taken)]) == 0
    assert read_records(taken)[RUN.name]["audit"]["auroc"] == pytest.approx(
        record["audit"]["auroc"], abs=2e-3
    )


def test_predictions_of_another_run_are_refused(taken):
    record = read_records(taken)[RUN.name]
    with pytest.raises(ValueError, match=RUN.name):
        audit_again({**record, "predictions": "0" * 64}, path_of(RUN.name, taken))
    without = {key: value for key, value in record.items() if key != "predictions"}
    with pytest.raises(ValueError, match=RUN.name):
        audit_again(without, path_of(RUN.name, taken))
