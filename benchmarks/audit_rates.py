"""How often the interval of the noise rate contains the truth, on drawn data.

    python benchmarks/audit_rates.py --first 70000 --num 420

Each set has its own seed. It is clouds of 2 to 50 classes that overlap more or less, of equal or
unequal size, or a small set of scikit-learn. Up to half of the labels are wrong: symmetric, to the
next class, from one class to another, or mostly where classes meet. One of six classifiers gives
the probabilities, out of sample by five-fold cross-validation. There is a row for features and
probabilities, for features alone, and for probabilities alone. `miss` is the share of intervals
that end below the truth, and of those that begin above it.
"""

import argparse
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import nearsay

Array = NDArray[Any]
# True share, estimate, and both ends of the interval.
Counted = tuple[float, float, float, float]
CLASSIFIERS = ("lr", "lrweak", "lrsure", "knn", "rf", "nb")
STRENGTHS = {"lr": 1.0, "lrweak": 0.003, "lrsure": 100.0}
# Examples of a class, one for each of five folds.
LEAST = 5


def classifier(name: str, seed: int) -> Any:
    """One of `CLASSIFIERS`."""
    if name in STRENGTHS:
        return make_pipeline(StandardScaler(), LogisticRegression(max_iter=300, C=STRENGTHS[name]))
    if name == "knn":
        return KNeighborsClassifier(15)
    return (
        RandomForestClassifier(60, random_state=seed, min_samples_leaf=2)
        if name == "rf"
        else GaussianNB()
    )


def choose(seed: int) -> dict[str, Any]:
    """What a set is like."""
    rng = np.random.default_rng(seed)
    chosen: dict[str, Any] = {}
    if rng.random() < 0.7:
        chosen["classes"] = int(rng.choice([2, 2, 3, 5, 10, 20, 50]))
        chosen["num"], chosen["dim"] = (
            int(rng.choice([200, 400, 800, 1500])),
            int(rng.choice([2, 8, 32])),
        )
        chosen["apart"], chosen["unequal"] = (
            float(rng.choice([2, 3, 4, 6, 9])),
            float(rng.choice([1, 1, 5, 20])),
        )
        if chosen["classes"] >= 20:
            chosen |= {"num": 1500, "dim": 32}
        if chosen["classes"] == 10:
            chosen["dim"] = max(8, chosen["dim"])
    else:
        chosen["data"] = str(rng.choice(["digits", "wine", "cancer", "moons", "iris"]))
        chosen["num"] = int(rng.choice([400, 1000]))
    chosen["noise"] = str(rng.choice(["sym", "sym", "pair", "inst", "one"]))
    chosen["rate"] = float(rng.choice([0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5]))
    chosen["classifier"] = str(rng.choice(CLASSIFIERS))
    return chosen


def clouds(rng: np.random.Generator, chosen: dict[str, Any]) -> tuple[Array, Array]:
    """Normal clouds; the median distance to the nearest center is `apart` deviations."""
    centers = rng.normal(size=(chosen["classes"], chosen["dim"]))
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    distances = np.sqrt(((centers[:, None] - centers[None]) ** 2).sum(-1))
    np.fill_diagonal(distances, np.inf)
    centers *= chosen["apart"] / np.median(distances.min(1))
    shares = np.geomspace(1, 1 / chosen["unequal"], chosen["classes"])
    clean = rng.choice(chosen["classes"], size=chosen["num"], p=shares / shares.sum())
    return centers[clean] + rng.normal(size=(chosen["num"], chosen["dim"])), clean


def real(rng: np.random.Generator, name: str, num: int) -> tuple[Array, Array]:
    """At most `num` examples of a set of scikit-learn."""
    if name == "moons":
        points, clean = datasets.make_moons(
            num, noise=0.25, random_state=int(rng.integers(1 << 30))
        )
    elif name == "digits":
        points, clean = datasets.load_digits(return_X_y=True)
        points = points / 16
    else:
        load = {
            "wine": datasets.load_wine,
            "cancer": datasets.load_breast_cancer,
            "iris": datasets.load_iris,
        }[name]
        points, clean = load(return_X_y=True)
        points = (points - points.mean(0)) / points.std(0)
    kept = rng.permutation(len(points))[:num] if len(points) > num else np.arange(len(points))
    return points[kept], clean[kept]


def spoil(rng: np.random.Generator, points: Array, clean: Array, kind: str, rate: float) -> Array:
    """The labels with about this share of wrong ones; at most 0.4 for two classes or pairs."""
    num, num_classes = len(clean), int(clean.max()) + 1
    rate = min(0.4, rate) if num_classes == 2 or kind == "pair" else rate
    given = clean.copy()
    if rate == 0:
        return given
    if kind == "inst":
        means = np.full((num_classes, points.shape[1]), 1e9)
        for each in np.unique(clean):
            means[each] = points[clean == each].mean(0)
        distances = ((points[:, None] - means[None]) ** 2).sum(-1)
        own = distances[np.arange(num), clean]
        distances[np.arange(num), clean] = np.inf
        # Near 1 where classes meet.
        ranks = (own - distances.min(1)).argsort().argsort() / num
        is_wrong = rng.random(num) < np.clip(2 * rate * ranks, 0, 1)
        given[is_wrong] = distances.argmin(1)[is_wrong]
    elif kind == "one":
        is_wrong = (clean == 0) & (
            rng.random(num) < min(0.6, rate / max((clean == 0).mean(), 1e-9))
        )
        given[is_wrong] = 1
    else:
        is_wrong = rng.random(num) < rate
        drawn = kind == "sym" and num_classes > 2
        steps = rng.integers(1, num_classes, is_wrong.sum()) if drawn else 1
        given[is_wrong] = (given[is_wrong] + steps) % num_classes
    return given


def draw(seed: int) -> tuple[Array, Array, Array, Array]:
    """Features, out-of-sample probabilities, given labels, and which of them are wrong."""
    chosen, rng = choose(seed), np.random.default_rng(seed + 10**6)
    points, clean = (
        real(rng, chosen["data"], chosen["num"]) if "data" in chosen else clouds(rng, chosen)
    )
    given = spoil(rng, points, clean, chosen["noise"], chosen["rate"])
    kept = np.bincount(given)[given] >= LEAST
    points, clean, given = points[kept], clean[kept], given[kept]
    labels = np.unique(given, return_inverse=True)[1]
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    model = classifier(chosen["classifier"], seed)
    found = np.nan_to_num(
        cross_val_predict(model, points, labels, cv=folds, method="predict_proba")
    )
    found = found / found.sum(1, keepdims=True).clip(1e-12)
    found[found.sum(1) < 0.5] = 1 / found.shape[1]
    return points.astype(np.float32), found.astype(np.float32), labels, given != clean


def parse_seeds(description: str | None) -> range:
    """Those that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--num", type=int, default=100, help="so many seeds in a row")
    arguments = parser.parse_args()
    if arguments.first < 0 or arguments.num < 1:
        parser.error(
            f"--first {arguments.first} and --num {arguments.num} must be at least 0 and 1"
        )
    return range(arguments.first, arguments.first + arguments.num)


def summarize(counted: list[Counted]) -> tuple[float, float, float, float]:
    """Shares of intervals below and above the truth, their mean width, and the mean error."""
    true, estimate, low, high = np.array(counted).T
    below, above = (true > high + 1e-9).mean(), (true < low - 1e-9).mean()
    return (
        float(below),
        float(above),
        float((high - low).mean()),
        float(np.abs(estimate - true).mean()),
    )


def main() -> None:
    """Draw, audit and count."""
    seeds = parse_seeds(__doc__)
    # Some fits do not converge.
    warnings.filterwarnings("ignore")
    rows: dict[str, list[Counted]] = {"both": [], "features": [], "probabilities": []}
    for seed in seeds:
        features, probabilities, labels, is_wrong = draw(seed)
        for name in rows:
            known: dict[str, Array] = {"features": features, "probabilities": probabilities}
            rate = nearsay.audit(
                labels, **(known if name == "both" else {name: known[name]})
            ).noise_rate
            rows[name].append((is_wrong.mean(), *rate))
    print("given          held   miss below, above   width   error of the estimate")
    for name, counted in rows.items():
        below, above, width, error = summarize(counted)
        held = f"{1 - below - above:.3f}  {below:.3f}, {above:.3f}"
        print(f"{name:13}  {held}         {width:.3f}   {error:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
