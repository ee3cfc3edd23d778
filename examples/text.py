"""Which labels of sentences to distrust: NCRClassifier on features of the sentences.

`python examples/text.py` does it on 72 questions that are made below. `python examples/text.py
FILE` compares it with logistic regression on weakly labeled text: JSON, perhaps compressed by xz,
with the lists `train` and `test` of objects with `text`, the true `label`, and `mv`, a
majority vote of weak rules (-1 where none applies). Settings are chosen on one half of the training
sentences; the printed figures are those of the other half, and of the test sentences.
"""

import argparse
import json
import lzma
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from sklearn.utils.class_weight import compute_sample_weight

from nearsay import NCRClassifier

QUESTIONS = {
    "person": (
        "who wrote about {}",
        "who was the first to study {}",
        "who likes {}",
        "which woman is known for {}",
    ),
    "place": (
        "where can one find {}",
        "where does one see {}",
        "in which country are {}",
        "what city is famous for {}",
    ),
    "number": (
        "how many {} are there",
        "how much do {} cost",
        "how many years do {} last",
        "how far do {} go",
    ),
}
TOPICS = ("rivers", "trains", "poems", "birds", "bridges", "stars")
NUM_TRAIN = 4965  # of a file: the rows after these are those that its weak rules were written from
SEEDS = range(5)
NCR_SETTINGS = [
    dict(zip(("alpha", "k", "hidden", "epochs", "balanced"), values, strict=True))
    for values in product((0.5, 0.9), (10, 50), ((), (256,)), (5, 20), (False, True))
]
REGRESSION_SETTINGS = [
    {"C": strength, "balanced": balanced}
    for strength, balanced in product((0.03, 0.3, 3.0, 30.0), (False, True))
]


class Sentences(NamedTuple):
    """Sentences, what somebody said that they are, and what they are."""

    texts: list[str]
    given: np.ndarray  # (N,)
    true: np.ndarray  # (N,)


def make_embedder(num_features=256):
    """Single words and pairs of neighbors, weighted and reduced to few directions.

    A sentence encoder is better, where one can be downloaded, and needs no fitting: with
    sentence-transformers, `SentenceTransformer(NAME).encode(texts, normalize_embeddings=True)`.
    """
    return make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\S+"),
        TruncatedSVD(num_features, random_state=0),
        Normalizer(),
    )


def make_questions():
    """72 questions by what they ask for, six of them with a wrong label."""
    rows = [
        (each.format(topic), kind)
        for kind, forms in QUESTIONS.items()
        for each in forms
        for topic in TOPICS
    ]
    texts, true = [text for text, _ in rows], np.array([kind for _, kind in rows])
    given, kinds = true.copy(), list(QUESTIONS)
    for row in range(5, len(rows), 13):
        given[row] = kinds[(kinds.index(true[row]) + 1) % len(kinds)]
    return Sentences(texts, given, true)


def fit_ncr(features, labels, *, seed, balanced, **settings):
    """The classifier; `balanced` gives every class the same weight, however many labels name it."""
    weights = compute_sample_weight("balanced", labels) if balanced else None
    return NCRClassifier(random_state=seed, **settings).fit(features, labels, sample_weight=weights)


def fit_regression(features, labels, *, C, balanced):
    """Logistic regression, with the same choice."""
    weight = "balanced" if balanced else None
    return LogisticRegression(C=C, max_iter=2000, class_weight=weight).fit(features, labels)


def self_confidence(features, labels, *, seed, C, balanced):
    """(N,) the probability of each label, by a regression that has not seen it."""
    _, codes = np.unique(labels, return_inverse=True)
    model = LogisticRegression(C=C, max_iter=2000, class_weight="balanced" if balanced else None)
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The least populated class"
        )  # weak rules name some classes only once
        shown = cross_val_predict(
            model, features, codes, cv=folds, method="predict_proba"
        )  # (N, classes)
    return shown[np.arange(len(codes)), codes]


def load(path):
    """The training and the test sentences that a weak rule applies to."""
    opened = lzma.open if Path(path).suffix == ".xz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
        return _covered(content["train"][:NUM_TRAIN]), _covered(content["test"])
    except (OSError, EOFError, ValueError, TypeError, LookupError, lzma.LZMAError) as error:
        raise ValueError(
            f"{path} is no file of weakly labeled text, as the top of this script tells: {error}"
        ) from error


def compare(train, test):
    """Lines that tell how well wrong labels are found, and sentences understood, by each way."""
    order = np.random.default_rng(0).permutation(len(train.texts))
    chosen_on, told_on = (_selected(train, half) for half in np.array_split(order, 2))
    ncr, regression = _choose(chosen_on)
    embedder = make_embedder()
    features = embedder.fit_transform(told_on.texts)
    unseen = embedder.transform(test.texts)
    given, is_right = told_on.given, told_on.given == told_on.true
    found, accuracy = [], []
    for seed in SEEDS:
        model = fit_ncr(features, given, seed=seed, **ncr)
        confidence = self_confidence(features, given, seed=seed, **regression)
        found.append(
            [roc_auc_score(is_right, score) for score in (model.label_quality_, confidence)]
        )
        accuracy.append((model.predict(unseen) == test.true).mean())
    means, spreads = np.mean(found, axis=0), np.std(found, axis=0, ddof=1)
    plain = fit_regression(features, given, **regression)
    names, places, counts = np.unique(given, return_inverse=True, return_counts=True)
    rarity, votes = roc_auc_score(is_right, -counts[places]), (test.given == test.true).mean()
    return [
        f"{len(given)} sentences, {1 - is_right.mean():.1%} wrong labels, {len(names)} classes; "
        f"chosen on others: NCR {ncr}, regression {regression}",
        f"wrong labels found, AUROC: NCR {means[0]:.3f} ± {spreads[0]:.3f}, self-confidence "
        f"{means[1]:.3f} ± {spreads[1]:.3f}, how rare the label is {rarity:.3f}",
        f"accuracy on {len(test.texts)} test sentences: the votes {votes:.3f}, "
        f"regression {(plain.predict(unseen) == test.true).mean():.3f}, "
        f"NCR {np.mean(accuracy):.3f} ± {np.std(accuracy, ddof=1):.3f}",
    ]


def _choose(train):
    """The settings that find most wrong labels here, of NCR and of the regression."""
    features = make_embedder().fit_transform(train.texts)
    is_right = train.given == train.true

    def by_ncr(settings):
        return roc_auc_score(
            is_right, fit_ncr(features, train.given, seed=0, **settings).label_quality_
        )

    def by_regression(settings):
        return roc_auc_score(is_right, self_confidence(features, train.given, seed=0, **settings))

    return max(NCR_SETTINGS, key=by_ncr), max(REGRESSION_SETTINGS, key=by_regression)


def _covered(rows):
    kept = [row for row in rows if row["mv"] >= 0]
    texts = [row["text"] for row in kept]
    return Sentences(
        texts, np.array([row["mv"] for row in kept]), np.array([row["label"] for row in kept])
    )


def _selected(sentences, rows):
    return Sentences(
        [sentences.texts[row] for row in rows], sentences.given[rows], sentences.true[rows]
    )


def main(arguments):
    """Compare on a file, or show the most doubtful labels of the questions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="weakly labeled text")
    path = parser.parse_args(arguments).file
    if path is not None:
        try:
            train, test = load(path)
        except ValueError as error:
            sys.exit(f"error: {error}")
        print("\n".join(compare(train, test)))
        return
    questions = make_questions()
    features = make_embedder(32).fit_transform(questions.texts)
    model = fit_ncr(features, questions.given, seed=0, balanced=False)
    for row in model.label_quality_.argsort()[:8]:
        note = (
            ""
            if questions.given[row] == questions.true[row]
            else f"   wrong: it is {questions.true[row]}"
        )
        print(
            f"{model.label_quality_[row]:.2f}  {questions.given[row]:7}{questions.texts[row]}{note}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
