import math

import pytest
import torch
from sklearn.datasets import load_digits

from nearsay.data.digits import Digits

IMAGES, NUMBERS = (torch.from_numpy(array) for array in load_digits(return_X_y=True))


@pytest.mark.parametrize(("split", "num"), [("train", 1347), ("test", 450)])
def test_shapes_types_and_labels(split, num):
    inputs, labels = Digits().open(split)
    assert inputs.shape == (num, 3, 8, 8)
    assert inputs.dtype == torch.uint8
    assert (inputs.min(), inputs.max()) == (0, 240)
    assert labels.classes == tuple("0123456789")
    assert labels.given.dtype == torch.int64
    assert torch.equal(labels.given, labels.clean)
    assert labels.given is not labels.clean


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.99])
def test_every_class_gives_its_share(share):
    total = torch.bincount(NUMBERS)
    test = torch.bincount(Digits(test_share=share).open("test").labels.clean, minlength=10)
    train = torch.bincount(Digits(test_share=share).open("train").labels.clean, minlength=10)
    assert torch.equal(train + test, total)
    assert ((test - share * total).abs() <= 0.5).all()
    assert test.min() > 0
    assert train.min() > 0


def test_every_image_is_in_one_split_with_its_label_and_in_the_order_of_the_file():
    places = {tuple(image): place for place, image in enumerate(IMAGES.tolist())}
    assert len(places) == len(IMAGES)  # no two are alike
    found = []
    for split in ("train", "test"):
        inputs, labels = Digits().open(split)
        assert torch.equal(inputs[:, 0], inputs[:, 1])
        assert torch.equal(inputs[:, 0], inputs[:, 2])
        here = [places[tuple(image)] for image in (inputs[:, 0].double() / 15).flatten(1).tolist()]
        assert here == sorted(here)
        assert torch.equal(labels.clean, NUMBERS[here])
        found += here
    assert sorted(found) == list(range(1797))


def test_the_split_follows_from_the_seed():
    first, again, other = (Digits(seed=seed).open("test").inputs for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 0.009, math.nan])
def test_a_share_that_empties_a_split_is_refused(share):
    with pytest.raises(ValueError, match="test_share"):
        Digits(test_share=share)


def test_other_splits_are_refused():
    with pytest.raises(ValueError, match="'validation'"):
        Digits().open("validation")
