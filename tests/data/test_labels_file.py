"""The labels of a run as a file: what comes back, and what damage is noticed."""

import io

import numpy as np
import pytest
import torch

from nearsay.batch import Labels
from nearsay.data.labels_file import pack_labels, recorded_rows, unpack_labels
from nearsay.noise import Symmetric

INPUTS = torch.zeros(90, 4)


def noisy():
    clean = torch.arange(90) % 3
    return Symmetric(rate=0.4, redraw=False)(Labels(clean, clean, ("0", "1", "2")))


def packed(labels, requested_rate=None):
    rows = {"train": torch.arange(81), "held_out": torch.arange(81, 90)}
    return pack_labels(labels, INPUTS, **rows, requested_rate=requested_rate)


@pytest.mark.parametrize("is_known", [True, False])
def test_labels_come_back_from_their_file(is_known):
    labels = noisy() if is_known else Labels(torch.arange(90) % 3, None, ("ä", "b b", "c"))
    content = packed(labels, requested_rate=0.4 if is_known else None)
    back = unpack_labels(content)
    assert back.classes == labels.classes
    assert back.given.equal(labels.given)
    assert (back.clean is None) is not is_known
    assert recorded_rows(content, "train").tolist() == list(range(81))
    assert recorded_rows(content, "validation").tolist() == list(range(81, 90))
    with np.load(io.BytesIO(content)) as arrays:
        rates = [float(arrays["requested_rate"]), float(arrays["effective_rate"])]
        assert rates == [0.4, 0.4] if is_known else all(map(np.isnan, rates))


def changed(content, **changes):
    with np.load(io.BytesIO(content)) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    made = io.BytesIO()
    np.savez(made, **{name: each for name, each in {**kept, **changes}.items() if each is not None})
    return made.getvalue()


def test_labels_take_no_more_room_for_many_classes_and_older_files_that_did_are_read():
    many = tuple(map(str, range(1000)))
    content = packed(Labels(torch.arange(90) % 3, None, many))
    assert len(content) < 100_000  # the noise matrix alone would be 8 MB
    older = changed(content, matrix=np.zeros((1000, 1000), dtype=np.int64))
    assert unpack_labels(older).classes == many


class Trap:
    """What would leave a trace if it were unpickled."""

    def __reduce__(self):
        return open, ("trace", "w")


DAMAGES = {
    "nothing": lambda content: b"",
    "half of it": lambda content: content[: len(content) // 2],
    "no zip": lambda content: b"x" * len(content),
    "a flipped bit": lambda content: content.replace(b"\x01" + bytes(7), b"\x00" + bytes(7), 1),
    "another label": lambda content: changed(content, given=np.zeros(90, dtype=np.int64)),
    "a label that is no class": lambda content: changed(content, given=np.full(90, 7)),
    "labels that are no numbers": lambda content: changed(content, given=np.array(["a"] * 90)),
    "fewer clean labels": lambda content: changed(content, clean=np.zeros(3, dtype=np.int64)),
    "no labels": lambda content: changed(content, given=None),
    "no fingerprint": lambda content: changed(content, fingerprint=None),
    "another class": lambda content: changed(content, classes=np.array(["0", "1", "x"])),
    "a pickle in it": lambda content: changed(content, given=np.array([Trap()], dtype=object)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_labels_are_refused_and_nothing_is_run(damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^labels\.npz"):
        unpack_labels(DAMAGES[damage](packed(noisy())))
    assert not list(tmp_path.iterdir())
