"""What is trained on, what is held out and what labels count there; and the labels as a file."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from nearsay import distributed
from nearsay.batch import DataInfo, Files, Labels, Split
from nearsay.data import Folder, Toy
from nearsay.errors import NoSplit
from nearsay.experiment import Experiment
from nearsay.models import MLP
from nearsay.noise import OpenSet, Recorded, Symmetric, measure_noise
from nearsay.training import splits
from nearsay.training.splits import make_order, open_splits

CLASSES = ("a", "b", "c")


@dataclass(frozen=True)
class Given:
    """A data set of splits that are there already."""

    splits: dict

    def open(self, split):
        if split not in self.splits:
            raise NoSplit(split)
        return self.splits[split]


def labels(*given, clean=None, classes=CLASSES):
    return Labels(
        torch.tensor(given, dtype=torch.int64),
        None if clean is None else torch.tensor(clean),
        classes,
    )


def images(num, start=0):
    return torch.arange(start, start + num).view(num, 1).float()


def experiment(data=None, **choices):
    toy = Toy(num_classes=3, num_features=4, num_train=90, num_test=30)
    return Experiment(data=data or toy, backbone=MLP(hidden=(4,)), normalize=None, **choices)


def given_splits(**splits):
    return experiment(
        Given({name: Split(images(len(each.given)), each) for name, each in splits.items()})
    )


def test_a_single_class_is_told_to_show_nothing_about_labels():
    notes = open_splits(given_splits(train=labels(0, 0, 0, classes=("cat",)))).notes
    assert ["'cat'" in note for note in notes] == [True]
    assert not open_splits(given_splits(train=labels(0, 0, 1, classes=("cat", "dog")))).notes


def test_without_wishes_all_is_trained_on_and_the_test_is_judged():
    found = open_splits(experiment())
    assert found.train.equal(torch.arange(90))
    assert not len(found.held_out)
    assert [(each.name, len(each.inputs), len(each.truth)) for each in found.judged] == [
        ("test", 30, 30)
    ]


def test_true_labels_that_are_no_class_of_the_data_are_refused():
    """Numbers beside names, for one: all examples would count as foreign, and all labels as wrong."""
    with pytest.raises(ValueError, match="clean"):
        open_splits(given_splits(train=labels(0, 1, 2, clean=[-1, -1, -1])))
    assert open_splits(
        given_splits(train=labels(0, 1, 2, clean=[-1, 0, -1]))
    ).labels.clean.tolist() == [-1, 0, -1]


@pytest.mark.parametrize(("wish", "num"), [(0.1, 9), (0.5, 45), (1, 1), (30.0, 30), (0.004, 0)])
def test_a_share_or_a_number_is_held_out(wish, num):
    found = open_splits(experiment(held_out=wish))
    assert len(found.held_out) == num
    assert torch.cat([found.train, found.held_out]).sort().values.equal(torch.arange(90))
    assert [each.name for each in found.judged] == (["validation"] if num else []) + ["test"]


def test_every_class_gives_as_much_and_the_seed_says_who():
    found = open_splits(experiment(held_out=30))
    assert found.labels.given[found.held_out].bincount().tolist() == [10, 10, 10]
    again, other = (open_splits(experiment(held_out=30, seed=seed)).held_out for seed in (0, 1))
    assert found.held_out.equal(again)
    assert not found.held_out.equal(other)


@pytest.mark.parametrize("wish", ["given", "clean"])
def test_held_out_labels_are_as_noisy_as_is_wished_and_the_test_is_clean(wish):
    found = open_splits(
        experiment(noise=Symmetric(rate=0.6, redraw=False), held_out=0.5, validation_labels=wish)
    )
    validation, test = found.judged
    wrong = int((validation.truth != found.labels.clean[found.held_out]).sum())
    assert (wrong > 10) if wish == "given" else (wrong == 0)
    assert validation.truth.equal(getattr(found.labels, wish)[found.held_out])
    assert test.truth.equal(torch.arange(30) % 3)
    assert measure_noise(found.labels).effective_rate == 0.6


def test_the_truth_of_a_test_set_counts_wherever_it_is_known():
    noisy = labels(0, 1, 2, clean=[2, 1, 0])
    found = open_splits(given_splits(train=labels(0, 1, 2), validation=noisy, test=noisy))
    assert [(each.name, each.truth.tolist()) for each in found.judged] == [
        ("validation", [0, 1, 2]),
        ("test", [2, 1, 0]),
    ]
    wished = replace(
        given_splits(train=labels(0, 1, 2), validation=noisy), validation_labels="clean"
    )
    assert open_splits(wished).judged[0].truth.tolist() == [2, 1, 0]


def test_nothing_is_held_out_where_there_is_a_validation_already():
    data = given_splits(train=labels(0, 0, 1, 1, 2, 2), validation=labels(0, 1))
    found = open_splits(replace(data, held_out=0.5))
    assert found.train.equal(torch.arange(6))
    assert not len(found.held_out)
    assert [(each.name, len(each.inputs)) for each in found.judged] == [("validation", 2)]


def test_the_oracle_trains_on_right_labels_alone():
    wished = experiment(noise=Symmetric(rate=0.4, redraw=False), held_out=30, only_clean=True)
    found = open_splits(wished)
    is_right = found.labels.given == found.labels.clean
    assert is_right[found.train].all()
    assert not set(found.train.tolist()) & set(found.held_out.tolist())
    assert len(found.train) == int(is_right.sum()) - int(is_right[found.held_out].sum())
    with pytest.raises(ValueError, match="only_clean"):
        open_splits(replace(given_splits(train=labels(0, 1)), only_clean=True))
    with pytest.raises(ValueError, match="only_clean"):
        open_splits(replace(given_splits(train=labels(0, 1, clean=[1, 0])), only_clean=True))


def test_a_share_of_the_labels_can_be_hidden():
    # Never none.
    assert int((open_splits(experiment(labeled=1e-6)).labels.given >= 0).sum()) == 1
    found = open_splits(experiment(labeled=0.2))
    assert int((found.labels.given >= 0).sum()) == 18
    kept = found.labels.given >= 0
    assert found.labels.given[kept].equal(found.labels.clean[kept])
    assert found.train.equal(torch.arange(90))


def test_labels_of_which_nobody_knows_the_truth_are_not_right_because_others_are_hidden():
    found = open_splits(replace(given_splits(train=labels(0, 1, 2, 0, 1, 2)), labeled=0.5))
    assert sorted(found.labels.given.tolist())[:3] == [-1, -1, -1]
    assert found.labels.clean is None


def test_recorded_labels_are_learned_if_they_belong_to_the_data(tmp_path):
    given = np.arange(90)[::-1] % 3
    np.savez(tmp_path / "a.npz", given=given, classes=np.array(["0", "1", "2"]))
    found = open_splits(experiment(labels_file=str(tmp_path / "a.npz")))
    assert found.labels.given.tolist() == given.tolist()
    assert found.labels.clean.equal(torch.arange(90) % 3)
    np.savez(tmp_path / "b.npz", given=given[1:], classes=np.array(["0", "1", "2"]))
    with pytest.raises(ValueError, match=r"labels_file=.*b\.npz.* 90 .* 89 "):
        open_splits(experiment(labels_file=str(tmp_path / "b.npz")))
    (tmp_path / "c.npz").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"labels_file=.*c\.npz"):
        open_splits(experiment(labels_file=str(tmp_path / "c.npz")))
    np.savez(tmp_path / "d.npz", features=given)
    with pytest.raises(ValueError, match=r"labels_file=.*d\.npz.* 'given'"):
        open_splits(experiment(labels_file=str(tmp_path / "d.npz")))


@pytest.mark.parametrize(
    "given",
    [np.full(4, 1.5), np.full(4, np.nan), np.array(["cat"] * 4), np.array(1), np.array([{}] * 4)],
    ids=["fractions", "NaN", "texts", "one number", "objects"],
)
def test_recorded_labels_that_are_no_class_numbers_are_refused(tmp_path, given):
    np.savez(tmp_path / "a.npz", given=given, classes=np.array(["0", "1"]))
    with pytest.raises(ValueError, match=r"labels_file=.*a\.npz"):
        open_splits(experiment(labels_file=str(tmp_path / "a.npz")))


def test_a_second_network_can_learn_other_noise():
    wished = experiment(
        noise=Symmetric(rate=0.4, seed=5), networks=2, averaging=0.9, noise_per_network=True
    )
    found = open_splits(wished)
    assert found.other_given.equal(
        Symmetric(rate=0.4, seed=6)(wished.data.open("train").labels).given
    )
    assert not found.other_given.equal(found.labels.given)
    same = replace(wished, noise_per_network=False)
    assert open_splits(same).other_given is None
    assert open_splits(same).labels.given.equal(found.labels.given)
    without_seed = replace(wished, noise=Recorded(given=found.labels.given))
    with pytest.raises(ValueError, match="seed"):
        open_splits(without_seed)


def test_in_a_balanced_order_all_classes_come_as_often():
    wished = replace(
        given_splits(train=labels(*[0] * 50, *[1] * 8, *[2] * 2)), balanced=True, batch_size=12
    )
    found = open_splits(wished)
    made = make_order(wished, found)
    for step in range(10):
        assert found.labels.given[made.batch(step)].bincount().tolist() == [4, 4, 4]


def test_nothing_to_learn_is_refused():
    with pytest.raises(ValueError, match="labels"):
        open_splits(given_splits(train=labels(-1, -1)))
    with pytest.raises(ValueError, match="train split"):
        open_splits(given_splits(train=labels()))


def test_one_example_is_too_few():
    alone = given_splits(train=labels(0))
    with pytest.raises(ValueError, match="got 1"):
        make_order(alone, open_splits(alone))
    pair = given_splits(train=labels(0, 0))
    assert make_order(pair, open_splits(pair)).batch_size == 2


def test_unlabeled_examples_are_trained_on_and_never_held_out():
    found = open_splits(replace(given_splits(train=labels(0, -1, 0, 1, -1, 1)), held_out=2))
    assert set(found.held_out.tolist()) <= {0, 2, 3, 5}
    assert {1, 4} <= set(found.train.tolist())


@pytest.mark.parametrize("name", ["validation", "test"])
def test_splits_of_other_classes_are_refused(name):
    splits = {"train": labels(0, 1, 2), name: labels(0, 1, 2, classes=("a", "c", "b"))}
    with pytest.raises(ValueError, match=r"\('a', 'b', 'c'\).*\('a', 'c', 'b'\)"):
        open_splits(given_splits(**splits))


def outside(foreign):
    return Given(
        {
            "train": Split(
                foreign, Labels(torch.zeros(len(foreign), dtype=torch.int64), None, ("x",))
            )
        }
    )


def test_open_set_noise_replaces_exactly_the_images_that_it_says():
    noise = OpenSet(rate=0.25, seed=3)
    wished = replace(
        given_splits(train=labels(*[0, 1, 2] * 40)), noise=noise, outside=outside(images(500, 1000))
    )
    found = open_splits(wished)
    places, chosen = noise.replacements(wished.data.open("train").labels, 500)
    is_foreign = found.inputs[:, 0] >= 1000
    assert int(is_foreign.sum()) == 30
    assert is_foreign.nonzero()[:, 0].equal(places)
    assert found.inputs[places, 0].equal(1000.0 + chosen)
    assert found.inputs[~is_foreign].equal(images(120)[~is_foreign])
    assert (found.labels.clean == -1).equal(is_foreign)
    assert found.labels.given.equal(wished.data.open("train").labels.given)
    # The data set itself is as it was.
    assert wished.data.open("train").inputs.equal(images(120))


def test_open_set_noise_needs_arrays_of_one_shape(tmp_path):
    wished = replace(given_splits(train=labels(0, 1, 2)), noise=OpenSet(rate=0.5))
    with pytest.raises(ValueError, match="outside"):
        open_splits(wished)
    for foreign in (torch.zeros(5, 2), Files(tmp_path, ("a.jpg",))):
        with pytest.raises(ValueError, match="outside"):
            open_splits(replace(wished, outside=outside(foreign)))


def test_an_order_has_the_examples_that_are_not_held_out():
    wished = experiment(held_out=30, batch_size=20, seed=4)
    found = open_splits(wished)
    made = make_order(wished, found)
    assert (made.batch_size, made.batches_per_pass, made.seed) == (20, 3, 4)
    assert torch.cat([made.batch(step) for step in range(3)]).sort().values.equal(found.train)
    assert make_order(replace(wished, batch_size=1000), found).batch_size == 60


def test_a_batch_that_processes_cannot_share_is_refused_with_the_cure(monkeypatch):
    wished = replace(given_splits(train=labels(0, 1, 2, 0)), batch_size=3)
    found = open_splits(wished)
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    with pytest.raises(ValueError, match=r"batch_size .* 2 processes"):
        make_order(wished, found)


def test_noise_that_looks_at_inputs_gets_them_if_they_are_arrays(tmp_path):
    seen = []

    @dataclass(frozen=True)
    class Watcher:
        def __call__(self, labels, inputs=None):
            seen.append(inputs)
            return labels

    open_splits(replace(given_splits(train=labels(0, 1, 2)), noise=Watcher()))
    files = Given({"train": Split(Files(tmp_path, ("a", "b", "c")), labels(0, 1, 2))})
    open_splits(experiment(files, noise=Watcher()))
    assert isinstance(seen[0], Tensor)
    assert seen[1] is None


def test_splits_without_any_label_are_left_out_with_a_note():
    found = open_splits(
        given_splits(train=labels(0, 1), validation=labels(-1, -1), test=labels(-1, 2))
    )
    assert [each.name for each in found.judged] == ["test"]
    assert ["validation" in note for note in found.notes] == [True]
    found = open_splits(
        given_splits(train=labels(0, 1), validation=labels(0, 1), test=labels(-1, clean=[-1]))
    )
    assert [each.name for each in found.judged] == ["validation"]
    assert ["test" in note for note in found.notes] == [True]


def test_looking_for_files_in_two_splits_reads_none_of_them_twice(tmp_path, monkeypatch):
    parts = {"train": range(6), "validation": range(6, 9), "test": range(9, 12)}
    for number in range(12):
        # Of one size, all of them.
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.bmp")
    read, real = [], splits._digest
    monkeypatch.setattr(
        splits, "_digest", lambda files, name: read.append(name) or real(files, name)
    )
    given = {
        split: Split(
            Files(tmp_path, tuple(f"{number}.bmp" for number in numbers)),
            labels(*[0] * len(numbers)),
        )
        for split, numbers in parts.items()
    }
    open_splits(experiment(Given(given)))
    assert sorted(read) == sorted(f"{number}.bmp" for number in range(12))


def test_files_that_are_in_two_splits_are_refused(tmp_path):
    for split, number in (("train", 0), ("train", 1), ("test", 2)):
        for kind in ("cat", "dog"):
            path = tmp_path / split / kind / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (number, len(kind) + (kind == "cat"), 7)).save(path)
    folder = replace(given_splits(train=labels(0, 1)), data=Folder(path=tmp_path))
    assert len(open_splits(folder).judged) == 1
    (tmp_path / "test/cat/copy.png").write_bytes((tmp_path / "train/dog/1.png").read_bytes())
    with pytest.raises(ValueError, match=r"'test/cat/copy.png'.*'train/dog/1"):
        open_splits(folder)


@pytest.mark.parametrize("opened", [torch.zeros(3, 2), (torch.zeros(3, 2), torch.zeros(3))])
def test_a_data_set_that_opens_no_split_is_refused_with_what_it_opened(opened):
    with pytest.raises(ValueError, match=r"Given\.open must return Split.*Tensor"):
        open_splits(Experiment(data=Given({"train": opened}), backbone=MLP()))


def test_a_description_that_differs_from_the_data_is_refused():
    @dataclass(frozen=True)
    class Described(Given):
        num_examples: int = 3

        def describe(self):
            return DataInfo(3, (2,), self.num_examples)

    train = {"train": Split(torch.zeros(3, 2), labels(0, 1, 2))}
    assert len(open_splits(Experiment(data=Described(train), backbone=MLP())).train) == 3
    with pytest.raises(ValueError, match=r"describe must return num_examples=3"):
        open_splits(Experiment(data=Described(train, num_examples=4), backbone=MLP()))
