import math

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    brier_score_loss,
    confusion_matrix,
    log_loss,
    roc_auc_score,
)
from torch.testing import assert_close

from nearsay import metrics, neighbors
from nearsay.batch import Labels, Predictions
from nearsay.metrics import (
    accuracy,
    aligned,
    average_precision,
    brier,
    calibration_error,
    class_accuracy,
    confidence,
    confusion,
    detection_auroc,
    knn_accuracy,
    margin,
    memorization,
    nll,
    noise_rate,
    similarity_histogram,
    top_k_accuracy,
)

CLASSES = ("a", "b", "c", "d")
QUICK = settings(derandomize=True, deadline=None, max_examples=60, database=None)


def random_case(seed=0, num=60, num_classes=4, ties=True):
    """Logits with many ties, and labels with some −1 and without class 2."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, num_classes, (num,), generator=generator)
    labels[labels == 2] = 1
    return (logits.round() if ties else logits), labels


def rows_of(logits, labels):
    return [
        (row, label)
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True)
        if label >= 0
    ]


def softmax(row):
    powers = [math.exp(each - max(row)) for each in row]
    return [each / sum(powers) for each in powers]


def predictions_of(features, indices=None):
    if indices is None:
        indices = torch.arange(len(features))
    return Predictions(features, torch.zeros(len(features), 2), indices)


# Accuracy


@pytest.mark.parametrize("k", [1, 3, 9])
def test_top_k_ranks_equals_by_class_number(k):
    logits, labels = random_case()
    hits = [
        label in sorted(range(4), key=lambda c, row=row: (-row[c], c))[:k]
        for row, label in rows_of(logits, labels)
    ]
    assert top_k_accuracy(logits, labels, k=k) == pytest.approx(sum(hits) / len(hits))
    assert len(hits) < len(labels)


def test_confusion_has_labels_in_rows():
    logits, labels = random_case()
    known = labels >= 0
    expected = confusion_matrix(labels[known], logits.argmax(dim=1)[known], labels=range(4))
    counts = confusion(logits, labels)
    assert counts.tolist() == expected.tolist()
    assert counts.sum() == known.sum()


def test_accuracy_by_class_skips_classes_without_examples():
    logits, labels = random_case()
    classes, mean = class_accuracy(logits, labels)
    for label in range(4):
        hits = [row.index(max(row)) == own for row, own in rows_of(logits, labels) if own == label]
        assert classes[label].item() == pytest.approx(
            sum(hits) / len(hits) if hits else math.nan, nan_ok=True
        )
    assert classes[2].isnan()
    assert classes.dtype == torch.float64
    assert mean == pytest.approx(sum(classes[[0, 1, 3]].tolist()) / 3)


# Probabilities


def test_confidence_and_margin_are_low_where_the_label_is_unlikely():
    logits, labels = random_case()
    sure, margins = confidence(logits, labels), margin(logits, labels)
    for row, label, own, edge in zip(
        logits.tolist(), labels.tolist(), sure.tolist(), margins.tolist(), strict=True
    ):
        if label < 0:
            assert math.isnan(own)
            assert math.isnan(edge)
            continue
        chances = softmax(row)
        best_other = max(chance for other, chance in enumerate(chances) if other != label)
        assert own == pytest.approx(chances[label])
        assert edge == pytest.approx((1 + chances[label] - best_other) / 2)
        assert 0 <= edge <= 1
    assert confidence(torch.zeros(1, 1), torch.tensor([0])).item() == 1
    assert margin(torch.zeros(1, 1), torch.tensor([0])).item() == 1


def test_likelihood_and_brier_agree_with_scikit_learn():
    logits, labels = random_case(ties=False)
    known = labels >= 0
    chances = logits[known].softmax(dim=1).numpy()
    truth = labels[known].numpy()
    assert nll(logits, labels) == pytest.approx(log_loss(truth, chances, labels=range(4)))
    per_class = [brier_score_loss(truth == label, chances[:, label]) for label in range(4)]
    assert brier(logits, labels) == pytest.approx(sum(per_class))
    # Logarithms of a user's own zeros.
    assert nll(torch.tensor([[0.0, -math.inf]]), torch.tensor([1])) == math.inf


def brute_calibration(logits, labels, bin_of):
    """Sum over bins of |number right − sum of probabilities| / N, with the bins by `bin_of`."""
    sure = [max(softmax(row)) for row, _ in rows_of(logits, labels)]
    right = [row.index(max(row)) == label for row, label in rows_of(logits, labels)]
    gaps = {}
    for number, is_right, probability in zip(bin_of(sure), right, sure, strict=True):
        gaps[number] = gaps.get(number, 0) + is_right - probability
    return sum(map(abs, gaps.values())) / len(sure)


@pytest.mark.parametrize("bins", [1, 4, 15])
@pytest.mark.parametrize("ties", [False, True])
def test_calibration_error_is_the_gap_of_each_bin(bins, ties):
    logits, labels = random_case(ties=ties, seed=3)
    doubtful = (logits.softmax(dim=1).amax(dim=1) < 0.6) & (labels >= 0)
    # Bins err both ways: their gaps must not be summed first.
    labels[doubtful] = logits[doubtful].argmax(dim=1)

    def equal_widths(sure):
        return [next(b for b in range(bins) if each <= (b + 1) / bins + 1e-12) for each in sure]

    def equal_numbers(sure):
        return [sum(other < each - 1e-12 for other in sure) * bins // len(sure) for each in sure]

    assert calibration_error(logits, labels, bins=bins) == pytest.approx(
        brute_calibration(logits, labels, equal_widths)
    )
    adaptive = calibration_error(logits, labels, bins=bins, adaptive=True)
    assert adaptive == pytest.approx(brute_calibration(logits, labels, equal_numbers))
    if bins > 1:
        assert adaptive > 1.2 * calibration_error(logits, labels, bins=1)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    assert calibration_error(
        logits[order], labels[order], bins=bins, adaptive=True
    ) == pytest.approx(adaptive)


def test_a_bin_owns_its_upper_edge():
    # Two rows at exactly ½: in the lower of two bins, apart from the row near 1.
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    high = 1 / (1 + math.exp(-2))
    labels = torch.tensor([0, 0, 1])
    # 2·(1 − ½) and 1·high.
    assert calibration_error(logits, labels, bins=2) == pytest.approx((1 + high) / 3)
    assert calibration_error(logits, labels, bins=1) == pytest.approx(abs(2 - 1 - high) / 3)


# Wrong labels


def test_memorization_counts_only_wrong_labels_of_known_classes():
    given = torch.tensor([0, 1, 1, 2, 2, -1, 3, 0, 3])
    clean = torch.tensor([0, 0, 0, 0, 3, 1, -1, 2, 1])
    predicted = torch.tensor([1, 1, 0, 2, 3, 0, 3, 1, 3])
    labels = Labels(given, clean, CLASSES)
    logits = 5 * torch.nn.functional.one_hot(predicted, 4).float()
    # Rows 1, 2, 3, 4, 7 and 8.
    assert memorization(logits, labels) == pytest.approx((3 / 6, 2 / 6, 1 / 6))
    # Row 6 is wrong too: its class is outside the vocabulary.
    assert noise_rate(labels) == pytest.approx(7 / 8)


def brute_auroc(scores, is_wrong):
    wrong = [score for score, bad in zip(scores, is_wrong, strict=True) if bad]
    right = [score for score, bad in zip(scores, is_wrong, strict=True) if not bad]
    pairs = [(w < r) + (w == r) / 2 for w in wrong for r in right]
    return sum(pairs) / len(pairs) if pairs else math.nan


def brute_precision(scores, is_wrong):
    """For each wrong label, the share of wrong ones among all that score no higher."""
    precisions = []
    for score, bad in zip(scores, is_wrong, strict=True):
        if bad:
            rows = zip(scores, is_wrong, strict=True)
            below = [other_bad for other, other_bad in rows if other <= score]
            precisions.append(sum(below) / len(below))
    return sum(precisions) / len(precisions) if precisions else math.nan


SCORES = st.sampled_from([0.0, -0.0, 0.1, 0.25, 0.5, 0.75, 1.0, math.inf, -math.inf]) | st.floats(
    0, 1, width=32
)


@QUICK
@drawn(st.lists(st.tuples(SCORES, st.booleans()), max_size=30))
def test_detection_is_exact_with_ties(rows):
    scores, is_wrong = [score for score, _ in rows], [bad for _, bad in rows]
    tensors = torch.tensor(scores, dtype=torch.float64), torch.tensor(is_wrong, dtype=torch.bool)
    assert detection_auroc(*tensors) == pytest.approx(
        brute_auroc(scores, is_wrong), nan_ok=True, abs=1e-12
    )
    assert average_precision(*tensors) == pytest.approx(
        brute_precision(scores, is_wrong), nan_ok=True, abs=1e-12
    )
    if len(set(is_wrong)) == 2 and all(map(math.isfinite, scores)):
        suspicion = [-score for score in scores]
        assert detection_auroc(*tensors) == pytest.approx(roc_auc_score(is_wrong, suspicion))
        assert average_precision(*tensors) == pytest.approx(
            average_precision_score(is_wrong, suspicion)
        )


def test_detection_skips_rows_without_a_score_and_knows_the_extremes():
    scores = torch.tensor([0.1, 0.2, math.nan, 0.8, 0.9, math.nan])
    is_wrong = torch.tensor([True, True, False, False, False, True])
    assert detection_auroc(scores, is_wrong) == 1
    assert average_precision(scores, is_wrong) == 1
    assert detection_auroc(-scores, is_wrong) == 0
    assert detection_auroc(torch.zeros(6), is_wrong) == 0.5
    assert average_precision(torch.zeros(6), is_wrong) == 0.5


# Neighbors


def brute_knn(train, votes, test, truth, k, is_same_set):
    hits = []
    for row, label in enumerate(truth.tolist()):
        if label < 0 or test.indices[row] < 0:
            continue
        neighbors = []
        for key, vote in enumerate(votes.tolist()):
            is_own = is_same_set and train.indices[key] == test.indices[row]
            if vote >= 0 and train.indices[key] >= 0 and not is_own:
                pair = train.features[key], test.features[row]
                neighbors.append((torch.cosine_similarity(*pair, dim=0).item(), vote))
        tally = {}
        for similarity, vote in sorted(neighbors, reverse=True)[:k]:
            tally[vote] = tally.get(vote, 0) + max(0, similarity)
        best = max(tally.values(), default=0)
        hits.append(best > 0 and tally.get(label, -1) == best)
    return sum(hits) / len(hits)


@pytest.mark.parametrize("k", [1, 4, 500])
@pytest.mark.parametrize("rows_at_a_time", [7, 10_000])
def test_knn_accuracy_agrees_with_scalar_loops(k, rows_at_a_time, monkeypatch):
    monkeypatch.setattr(metrics, "_CHUNK", rows_at_a_time * max(k, 4))
    monkeypatch.setitem(neighbors.CHUNK_ROWS, "cpu", 5)
    generator = torch.Generator().manual_seed(k)
    centers = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    classes = torch.randint(0, 4, (60,), generator=generator)
    features = centers[classes] + 0.7 * torch.randn(60, 3, generator=generator, dtype=torch.float64)
    votes, truth = classes.clone(), classes.clone()
    votes[::4] = torch.randint(-1, 4, (15,), generator=generator)
    truth[::7] = -1
    indices = torch.arange(40)
    # Two views of one example.
    indices[[5, 6]] = 5
    indices[9] = -1
    train, test = predictions_of(features[:40], indices), predictions_of(features[40:])
    expected = brute_knn(train, votes[:40], test, truth[40:], k, False)
    assert knn_accuracy(train, votes[:40], test, truth[40:], k=k) == pytest.approx(expected)
    expected = brute_knn(train, votes[:40], train, truth[:40], k, True)
    assert knn_accuracy(train, votes[:40], None, truth[:40], k=k) == pytest.approx(expected)


def test_an_example_does_not_vote_for_itself():
    features = torch.eye(4)
    train, labels = predictions_of(features), torch.arange(4)
    # All others are orthogonal: no votes, all misses.
    assert knn_accuracy(train, labels, None, labels, k=1) == 0
    # As another set, the namesake may vote.
    assert knn_accuracy(train, labels, train, labels, k=1) == 1
    assert knn_accuracy(predictions_of(features.bfloat16()), labels, train, labels, k=3) == 1


def test_similarities_of_pairs_by_label_and_correctness():
    # Three orthogonal or opposite directions: every kind of pair has its own similarity.
    features = torch.tensor(
        [[9.0, 9.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [-1.0, 0.0]]
    )
    labels = Labels(torch.tensor([-1, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, -1, 1, 1]), CLASSES)
    edges, counts = similarity_histogram(3 * features, labels, bins=5, num_pairs=4000)
    assert_close(edges, torch.tensor([-1, -0.6, -0.2, 0.2, 0.6, 1]))
    (same_right, same_wrong), (different_right, different_wrong) = counts.tolist()
    assert same_right[:4] == [0, 0, 0, 0]
    assert same_wrong[:2] == same_wrong[3:] == [0, 0]
    assert different_right[1:] == [0, 0, 0, 0]
    assert different_wrong[:2] == different_wrong[3:] == [0, 0]
    # Out of 5 × 3 or 5 × 2 ordered draws within a label, and of 25 over all.
    drawn_pairs = [same_right[4], same_wrong[2], different_right[0], different_wrong[2]]
    chances = [2 / 5 * 1 / 3 + 2 / 5 * 1 / 2, 2 / 5 * 1 / 3 + 1 / 5 * 2 / 3, 8 / 25, 4 / 25]
    for number, chance in zip(drawn_pairs, chances, strict=True):
        assert abs(number / 4000 - chance) < 4 * math.sqrt(chance / 4000)


def test_pairs_depend_on_the_seed_alone(monkeypatch):
    features, labels = (
        torch.randn(50, 3, generator=torch.Generator().manual_seed(0)),
        random_case(num=50)[1],
    )
    labels = Labels(labels, None, CLASSES)
    counts = similarity_histogram(features, labels, num_pairs=3000).counts
    # Nothing is known to be wrong.
    assert not counts[:, 1].any()
    assert counts.sum() > 4000
    monkeypatch.setattr(metrics, "_CHUNK", 100)
    assert torch.equal(similarity_histogram(features, labels, num_pairs=3000).counts, counts)
    assert not torch.equal(
        similarity_histogram(features, labels, num_pairs=3000, seed=1).counts, counts
    )


def test_pairs_are_drawn_evenly_within_a_label():
    features = torch.tensor([[math.cos(t), math.sin(t)] for t in (0, 0.3, 1.0, 1.9)])
    labels = Labels(torch.tensor([1, 1, 1, 1]), None, CLASSES)
    counts = similarity_histogram(features, labels, bins=200, num_pairs=20_000).counts
    assert not counts[1].any()
    found = counts[0, 0][counts[0, 0] > 0]
    assert len(found) == 6
    assert abs(found.sum() / 20_000 - 0.75) < 0.02
    assert found.max() / found.min() < 1.15


# Order, emptiness, complaints


def test_labels_are_brought_into_the_order_of_the_rows():
    labels = Labels(torch.tensor([3, 1, 2]), torch.tensor([0, -1, 2]), CLASSES)
    found = aligned(labels, predictions_of(torch.zeros(5, 2), torch.tensor([2, 0, -1, 0, 1])))
    assert found.given.tolist() == [2, 3, -1, 3, 1]
    assert found.clean.tolist() == [2, 0, -1, 0, -1]
    assert found.classes == CLASSES
    assert (
        aligned(Labels(labels.given, None, CLASSES), predictions_of(torch.zeros(1, 2))).clean
        is None
    )


@pytest.mark.parametrize("num", [0, 3])
def test_means_over_no_rows_are_nan(num):
    logits, labels = torch.zeros(num, 4), torch.full((num,), -1)
    predictions, two = predictions_of(torch.ones(num, 2)), predictions_of(torch.ones(2, 2))
    scores, is_wrong = torch.full((num,), math.nan), torch.zeros(num, dtype=torch.bool)
    both, zeros = Labels(labels, labels, CLASSES), torch.zeros(2, dtype=torch.int64)
    values = [
        accuracy(logits, labels),
        top_k_accuracy(logits, labels),
        class_accuracy(logits, labels).mean,
        *class_accuracy(logits, labels).classes,
        *confidence(logits, labels),
        *margin(logits, labels),
        nll(logits, labels),
        brier(logits, labels),
        calibration_error(logits, labels),
        calibration_error(logits, labels, adaptive=True),
        *memorization(logits, both),
        noise_rate(both),
        detection_auroc(scores, is_wrong),
        average_precision(scores, is_wrong),
        knn_accuracy(predictions, labels, None, labels),
        knn_accuracy(predictions, labels, two, zeros),
        knn_accuracy(two, zeros, predictions, labels),
    ]
    assert all(math.isnan(value) for value in values), values
    assert confusion(logits, labels).tolist() == [[0] * 4] * 4
    assert not similarity_histogram(torch.ones(num, 2), Labels(labels, None, CLASSES)).counts.any()


ONE = (torch.zeros(1, 2), torch.tensor([0]))
UNKNOWN = Labels(ONE[1], None, CLASSES)
NAN = (torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: accuracy(ONE[0], torch.tensor([2])), "given"),
        (lambda: accuracy(ONE[0], torch.tensor([0, 1])), "logits"),
        (lambda: nll(*NAN), "logits .*row 1"),
        (lambda: brier(torch.full((1, 2), -math.inf), ONE[1]), "logits .*row 0"),
        (lambda: top_k_accuracy(*ONE, k=0), "k"),
        (lambda: memorization(ONE[0], UNKNOWN), "clean"),
        (lambda: noise_rate(UNKNOWN), "clean"),
        (lambda: detection_auroc(torch.zeros(2), torch.tensor([True])), "scores"),
        (lambda: knn_accuracy(predictions_of(torch.ones(2, 2)), ONE[1], None, ONE[1]), "labels"),
        (lambda: similarity_histogram(torch.ones(2, 2), UNKNOWN), "features"),
        (lambda: aligned(UNKNOWN, predictions_of(torch.ones(1, 2), ONE[1] - 2)), "predictions"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(call, field):
    with pytest.raises(ValueError, match=field):
        call()
