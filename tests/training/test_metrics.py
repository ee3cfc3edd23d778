"""The numbers of result.json, by examples that can be worked out by hand."""

import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from nearsay.batch import Labels, Predictions
from nearsay.training import metrics
from nearsay.training.metrics import measure_splits, measure_train, summarize_accuracy
from nearsay.training.predict import pack_networks, propagate_in_run
from nearsay.training.splits import Judged

CLASSES = ("a", "b", "c")


def entries(*accuracies):
    return [
        {"epoch": number + 1.0} if each is None else {"epoch": number + 1.0, "test_accuracy": each}
        for number, each in enumerate(accuracies)
    ]


def test_the_last_accuracy_is_the_result_and_the_best_stands_beside_it():
    found = summarize_accuracy(entries(0.1, 0.8, 0.6), "test_accuracy")
    assert found == {"final": 0.6, "best": 0.8, "best_epoch": 2.0, "last_10": pytest.approx(0.5)}


def test_of_equally_good_epochs_the_first_is_the_best():
    assert summarize_accuracy(entries(0.1, 0.8, 0.8, 0.2), "test_accuracy")["best_epoch"] == 2.0


def test_the_last_ten_are_of_the_epochs_that_were_evaluated():
    accuracies = [0.9, 0.9, *(number / 100 for number in range(1, 11))]
    found = summarize_accuracy(
        entries(*(each for pair in zip(accuracies, [None] * 12, strict=True) for each in pair)),
        "test_accuracy",
    )
    assert found["last_10"] == pytest.approx(0.055)
    assert found["final"] == 0.1
    assert found["best_epoch"] == 1.0


def predictions(rows, indices):
    return Predictions(torch.zeros(len(rows), 0), torch.tensor(rows).log(), torch.tensor(indices))


def test_an_example_that_resembles_nobody_keeps_the_label_it_has_or_none():
    features = torch.tensor([[1.0, 0, 0, 0], [1, 0.1, 0, 0], [1, 0, 0.1, 0], [0, 0, 0, 1]])
    seen = Predictions(features, torch.zeros(4, 3), torch.arange(4))
    for alone in (-1, 2):
        found, share = propagate_in_run(
            seen, torch.tensor([1, 1, -1, alone]), None, torch.arange(4)
        )
        assert found.tolist() == [1, 1, 1, alone]
        assert share is None


def test_wrong_labels_are_counted_among_the_examples_that_were_trained_on():
    # Examples 0 and 1 are right, 2, 3 and 4 wrong, 5 is unlabeled, 6 was held out; rows stand in another order.
    labels = Labels(
        torch.tensor([0, 1, 2, 0, 1, -1, 0]), torch.tensor([0, 1, 1, 2, 0, 1, 1]), CLASSES
    )
    seen = predictions(
        [
            [0.9, 0.05, 0.05],  # 6
            [0.2, 0.3, 0.5],  # 5
            [0.2, 0.5, 0.3],  # 4: memorized
            [0.1, 0.2, 0.7],  # 3: corrected
            [0.5, 0.4, 0.1],  # 2: neither
            [0.4, 0.3, 0.3],  # 1
            [0.8, 0.1, 0.1],  # 0
        ],
        [6, 5, 4, 3, 2, 1, 0],
    )
    found = measure_train(seen, labels, torch.tensor([0, 1, 2, 3, 4, 5]))
    assert found["confidence"] == pytest.approx(
        {"right": (0.8 + 0.3) / 2, "wrong": (0.1 + 0.1 + 0.5) / 3}
    )
    # Of six pairs of a wrong and a right label only (0.5, 0.3) stands the wrong way round.
    assert found["detection"]["auroc"] == pytest.approx(5 / 6)
    # From the lowest score: two wrong at 0.1, one right at 0.3, one wrong at 0.5.
    assert found["detection"]["average_precision"] == pytest.approx((1 + 1 + 3 / 4) / 3)
    assert found["memorization"] == pytest.approx(
        {"memorized": 1 / 3, "corrected": 1 / 3, "other": 1 / 3}
    )


@pytest.mark.parametrize(
    ("given", "clean"),
    [([0, 1], None), ([0, 1], [0, 1]), ([-1, 1], [0, 1])],
    ids=["truth unknown", "all right", "unlabeled or right"],
)
def test_without_a_wrong_label_there_is_nothing_to_say(given, clean):
    labels = Labels(torch.tensor(given), None if clean is None else torch.tensor(clean), CLASSES)
    seen = predictions([[0.5, 0.3, 0.2]] * 2, [0, 1])
    assert measure_train(seen, labels, torch.arange(2)) == {
        "detection": None,
        "confidence": None,
        "memorization": None,
    }


def test_a_wrong_label_that_was_held_out_is_none_of_this():
    labels = Labels(torch.tensor([0, 1]), torch.tensor([0, 0]), CLASSES)
    assert (
        measure_train(predictions([[0.5, 0.3, 0.2]] * 2, [0, 1]), labels, torch.tensor([0]))[
            "detection"
        ]
        is None
    )


def test_an_image_from_outside_has_a_wrong_label_but_no_true_class_to_correct_it_to():
    labels = Labels(torch.tensor([0, 1]), torch.tensor([0, -1]), CLASSES)
    found = measure_train(
        predictions([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], [0, 1]), labels, torch.arange(2)
    )
    assert found["confidence"] == pytest.approx({"right": 0.6, "wrong": 0.4})
    assert found["detection"]["auroc"] == 1.0
    assert found["memorization"] == {"memorized": None, "corrected": None, "other": None}


def test_where_all_labels_are_wrong_nothing_is_not_a_number():
    labels = Labels(torch.tensor([1, 1]), torch.tensor([0, 0]), CLASSES)
    found = measure_train(
        predictions([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], [0, 1]), labels, torch.arange(2)
    )
    assert found["detection"] == {"auroc": None, "average_precision": pytest.approx(1.0)}
    assert found["confidence"] == {"right": None, "wrong": pytest.approx(0.35)}
    json.dumps(found, allow_nan=False)


def test_one_network_is_packed_by_its_own_names_and_several_by_number():
    networks = [nn.Linear(2, 3), nn.Linear(2, 3)]
    alone, both = pack_networks(networks[:1]), pack_networks(networks)
    assert alone.keys() == {"weight", "bias"}
    assert_close(alone["weight"], networks[0].weight.detach())
    assert both.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert_close(both["1.bias"], networks[1].bias.detach())
    assert not any(tensor.requires_grad for tensor in both.values())


def test_packed_weights_are_contiguous_whatever_the_network_prefers():
    network = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    packed = pack_networks([network])["weight"]
    assert packed.is_contiguous()
    assert_close(packed, network.weight.detach())


def count_correct(predictions, labels):
    return float((predictions.logits.argmax(dim=1) == labels.given).sum())


def test_a_metric_of_the_training_examples_is_one_entry_of_a_table(monkeypatch):
    monkeypatch.setitem(metrics.TRAIN_METRICS, "correct", count_correct)
    labels = Labels(torch.tensor([0, 1, 0]), None, CLASSES)
    seen = predictions([[0.1, 0.2, 0.7], [0.2, 0.5, 0.3], [0.9, 0.1, 0.0]], [2, 1, 0])
    assert measure_train(seen, labels, torch.tensor([0, 1, 2]))["correct"] == 2.0
    assert measure_train(seen, labels, torch.tensor([0, 2]))["correct"] == 1.0


def test_a_metric_of_the_splits_is_one_entry_of_a_table(monkeypatch):
    unknown = lambda predictions, labels: float("nan")  # noqa: E731  # as short as it is
    monkeypatch.setattr(metrics, "SPLIT_METRICS", {"correct": count_correct, "unknown": unknown})
    seen = predictions([[0.1, 0.2, 0.7], [0.2, 0.5, 0.3]], [1, 0])
    judged = [Judged("test", torch.zeros(2, 1), torch.tensor([1, 2]))]
    assert measure_splits({"test": seen}, judged, CLASSES) == {
        "correct": {"test": 2.0},
        "unknown": {"test": None},
    }
