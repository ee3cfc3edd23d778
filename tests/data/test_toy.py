import math

import pytest
import torch
from scipy.stats import kstest, norm
from torch.testing import assert_close

from nearsay import rng
from nearsay.data.toy import Toy


def test_shapes_types_and_labels():
    for split, num in (("train", 2000), ("test", 4000)):
        inputs, labels = Toy().open(split)
        assert inputs.shape == (num, 32)
        assert inputs.dtype == torch.float32
        assert labels.classes == tuple("01234567")
        assert labels.clean.tolist() == [i % 8 for i in range(num)]
        assert torch.equal(labels.given, labels.clean)
        assert labels.given is not labels.clean


def test_every_number_follows_from_the_seed_by_the_inverse_normal():
    data = Toy(num_classes=3, num_features=5, num_train=7, num_test=4, distance=2.0, seed=9)
    for split, num in (("train", 7), ("test", 4)):
        inputs = data.open(split).inputs
        for example in range(num):
            directions = deviates("toy centers", example % 3, 9)
            scale = 2.0 / math.sqrt(sum(value**2 for value in directions))
            noise = deviates(f"toy {split}", example, 9)
            expected = [
                scale * direction + value
                for direction, value in zip(directions, noise, strict=True)
            ]
            assert_close(inputs[example], torch.tensor(expected))


def deviates(purpose, example, seed):
    words = rng.words(seed, purpose, 0, torch.tensor(example), 5).tolist()
    return [float(norm.ppf((word + 0.5) / 2**32)) for word in words]


def test_the_rarest_words_are_finite_and_opposite(monkeypatch):
    monkeypatch.setattr(
        rng, "words", lambda *arguments: torch.tensor([[0, 2**32 - 1]]).expand(2, 2)
    )
    inputs = Toy(num_classes=2, num_features=2, num_train=2, distance=0.0).open("train").inputs
    assert_close(inputs, torch.tensor([[-6.3380, 6.3380]] * 2), atol=1e-3, rtol=0)


def test_points_are_normal_around_centers_at_the_distance():
    inputs, labels = Toy(num_train=16_000, distance=5.0).open("train")
    centers = torch.stack([inputs[labels.clean == number].mean(dim=0) for number in range(8)])
    # 5 ± 1/√2000 a direction
    assert_close(centers.norm(dim=1), torch.full((8,), 5.0), atol=0.15, rtol=0)
    residuals = (inputs - centers[labels.clean]).flatten()[:20_000]
    assert kstest(residuals.numpy(), "norm").pvalue > 1e-4


def test_a_longer_split_continues_a_shorter_one_and_splits_are_apart():
    short, long = Toy(num_train=10).open("train").inputs, Toy(num_train=30).open("train").inputs
    assert torch.equal(long[:10], short)
    # Points in 32 dimensions are far apart.
    assert torch.cdist(long, Toy().open("test").inputs).min() > 1


def test_another_seed_is_another_data_set():
    first, other = (Toy(seed=seed).open("train").inputs[:200] for seed in (3, 4))
    assert torch.cdist(first, other).min() > 1


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Toy(num_train=10).open("train").inputs
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(Toy(num_train=10).open("train").inputs, first)


def test_what_cannot_be_meant_is_refused():
    wrong = [("num_classes", 1), ("num_features", 0), ("num_train", 2.0), ("num_test", True)]
    for field, value in [*wrong, ("distance", -1.0), ("distance", math.nan)]:
        with pytest.raises(ValueError, match=field):
            Toy(**{field: value})
    with pytest.raises(ValueError, match="split"):
        Toy().open("validation")
