"""NCRClassifier: learning from noisy labels on embeddings or tables, as a scikit-learn estimator.

A fit is a few hundred calls of the same `Step` that trains images, with all rows in memory. Rows
with equal features and label are merged into one row with the sum of their weights, and rows are
sorted before any is drawn. So a weight of 2 is bit for bit the same as writing the row twice, and
the order of the rows does not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor
from torch.nn import Module

from nearsay import rng
from nearsay.batch import Batch, Labels, Loss, Objective, Outputs, Split
from nearsay.data.loader import Order, Rows
from nearsay.experiment import Experiment, Machine
from nearsay.label_issues.inputs import is_missing
from nearsay.losses.base import as_objective
from nearsay.losses.ncr import NCR
from nearsay.models.mlp import MLP, Linear
from nearsay.neighbors import Identity, nearest, normalize
from nearsay.optim import AdamW, Cosine
from nearsay.training.step import Setting, Step, make_learners
from nearsay.validation import check_number, check_whole

# Rows among which the neighbors for `label_quality_` are searched, so that it stays fast.
_MOST_KEYS = 8192
# Rows that are predicted at once.
_CHUNK = 4096
# Batches of an epoch: with fewer, a small table would see too few steps.
_FEWEST_BATCHES = 4


class NCRClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Neighbor Consistency Regularization for features: a classifier for noisy labels.

    Predictions are pulled toward those of the nearest rows of the batch. So a label that
    contradicts its neighbors is not memorized. After `fit`, `label_quality_` says which labels to
    distrust.

    Parameters
    ----------
    hidden : tuple of int, default=(256,)
        Widths of the hidden layers. ``()`` is a linear classifier: neighbors are searched among the
        features themselves, so scale them, for instance by a ``StandardScaler``.
    alpha : float, default=0.9
        Weight of the neighbors against the labels, from 0 (labels alone) to 1.
    k : int, default=10
        Number of neighbors; if a batch is smaller than that, all of its rows.
    epochs : float, default=20
        Passes through the rows.
    batch_size : int, default=512
        Most rows of a step, among which neighbors are searched. A small table is cut into four
        batches, as long as each has 32 rows and room for the neighbors.
    learning_rate : float, default=0.005
        Highest rate of AdamW; it falls to 0 by half a cosine.
    objective : Objective or None, default=None
        Another loss instead of ``NCR(alpha=alpha, k=k)``: one of `nearsay.losses` for one view,
        such as ``ELR()``, or a function of (logits, targets) that returns one loss per row.
    unlabeled : object, default=None
        The value in `y` of rows without a label; they take part as neighbors. None means that every
        value is a class, also -1.
    random_state : int, RandomState instance or None, default=None
        Seed of weights and batches. With an int, a fit on the same data gives the same result.
    device : str, default="cpu"
        Where to train: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one. Predictions
        are made on the CPU.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The values of `y` that are labels.
    label_quality_ : ndarray of shape (n_samples,)
        How well the label of each row of `fit` fits, in [0, 1]; low is suspicious. The mean of the
        probability of the label and the share of the nearest rows that have it. NaN for rows
        without a label or of weight 0.
    n_features_in_ : int
        Number of features in `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, where `X` had names that are strings.
    network_ : torch.nn.Module
        The trained network, in float64, so the outputs of a row do not depend on other rows.

    Examples
    --------
    >>> from sklearn.datasets import make_blobs
    >>> X, y = make_blobs(n_samples=300, centers=3, random_state=0, cluster_std=0.5)
    >>> wrong = y.copy()
    >>> wrong[:60] = (wrong[:60] + 1) % 3
    >>> model = NCRClassifier(random_state=0).fit(X, wrong)
    >>> bool(model.score(X, y) > 0.95)
    True
    """

    def __init__(
        self,
        hidden: tuple[int, ...] = (256,),
        *,
        alpha: float = 0.9,
        k: int = 10,
        epochs: float = 20,
        batch_size: int = 512,
        learning_rate: float = 5e-3,
        objective: Objective | None = None,
        unlabeled: object = None,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.hidden = hidden
        self.alpha = alpha
        self.k = k
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.objective = objective
        self.unlabeled = unlabeled
        self.random_state = random_state
        self.device = device

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn from rows and labels, some of which may be wrong.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features, such as the embeddings of a pretrained network.
        y : array-like of shape (n_samples,)
            Labels of any one type; those equal to `unlabeled` are none.
        sample_weight : array-like of shape (n_samples,), default=None
            Weights of the labels. A row of weight 0 is left out, one of weight 2 counts twice.

        Returns
        -------
        self : NCRClassifier
            The fitted estimator.
        """
        _refuse_missing(y)
        floats = (np.float64, np.float32)
        values, labels = validate_data(self, X, y, dtype=floats, ensure_min_samples=2)
        weights = _check_sample_weight(
            sample_weight, values, dtype=np.float64, ensure_non_negative=True
        )
        codes, self.classes_ = _encoded(labels, weights, self.unlabeled)
        is_kept = weights > 0
        table, places = _merged(_as_float32(values[is_kept]), codes[is_kept], weights[is_kept])
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        experiment = self._experiment(table, seed)
        device = experiment.machine.find_device().type
        # Whatever modes the caller has switched on in torch must not change the result.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device, enabled=False),
            torch.autocast("cpu", enabled=False),
        ):
            network = _train(experiment).cpu()
            quality = _label_quality(network, table, k=self.k, seed=seed)
            network = network.double()
        self.label_quality_ = np.full(len(values), np.nan)
        self.label_quality_[is_kept] = quality[places]
        self.network_ = network
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Probabilities of the classes.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        probabilities : ndarray of shape (n_samples, n_classes)
            In the order of `classes_`; each row sums to 1.
        """
        check_is_fitted(self)
        values = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        with torch.autocast("cpu", enabled=False):
            logits = _ask(self.network_, values, torch.float64).logits
            probabilities: NDArray[np.float64] = logits.softmax(dim=1).numpy()
        return probabilities

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class of each row.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Features.

        Returns
        -------
        labels : ndarray of shape (n_samples,)
            Members of `classes_`.
        """
        probabilities = self.predict_proba(X)
        labels: NDArray[Any] = self.classes_[probabilities.argmax(axis=1)]
        return labels

    def _experiment(self, table: "_Table", seed: int) -> Experiment:
        """All parameters as the value that a step takes; wrong parameters raise here."""
        k = check_whole("k", self.k, 1)
        batch_size = check_whole("batch_size", self.batch_size, 2)
        batch_size = _even_size(len(table.inputs), batch_size, fewest=max(32, 2 * k))
        if self.objective is None:
            objective: Objective = NCR(alpha=_plain(self.alpha), k=min(k, batch_size - 1))
        else:
            objective = as_objective(self.objective)
        epochs = check_number("epochs", _plain(self.epochs), 0.001, 1e6)
        names = tuple(map(str, range(len(self.classes_))))
        labels = Labels(torch.from_numpy(table.codes), None, names)
        machine = Machine(device=self.device, precision="float32")
        weights = torch.from_numpy(table.weights).to(machine.find_device(), torch.float32)
        return Experiment(
            data=_Memory(Split(torch.from_numpy(table.inputs), labels)),
            backbone=_backbone(self.hidden),
            objective=_Weighted(objective, weights),
            normalize=None,
            optimizer=AdamW(lr=check_number("learning_rate", _plain(self.learning_rate), 0, 1e3)),
            schedule=Cosine(warmup=min(1.0, epochs / 10)),
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            machine=machine,
        )


def _backbone(hidden: object) -> MLP | Linear:
    if not isinstance(hidden, tuple | list):
        raise ValueError(
            "hidden must be a tuple of widths such as (256,), or () for a linear classifier, "
            f"got {hidden!r}."
        )
    widths = tuple(check_whole("hidden", width, 1) for width in hidden)
    return MLP(hidden=widths) if widths else Linear()


def _even_size(num_rows: int, most: int, *, fewest: int) -> int:
    """The size of batches that leave out less than one row for each of them."""
    size = min(most, max(fewest, num_rows // _FEWEST_BATCHES))
    # A batch has two rows at least.
    num_batches = max(1, min(-(-num_rows // size), num_rows // 2))
    return num_rows // num_batches


def _plain(value: Any) -> Any:
    """A number of numpy, which searches over parameters draw, as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


class _Table(NamedTuple):
    """Rows that differ from one another."""

    inputs: NDArray[np.float32]  # (N, D)
    codes: NDArray[np.int64]  # (N,) places in the classes, −1 where unlabeled
    weights: NDArray[np.float64]  # (N,) of mean 1


@dataclass(frozen=True, eq=False)
class _Memory:
    """A data set in memory."""

    split: Split

    def open(self, split: str) -> Split:
        return self.split


@dataclass(frozen=True, eq=False)
class _Weighted:
    """An objective with a weight for the label of each example."""

    base: Objective
    weights: Tensor  # (N,) for each example, where the network is

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        return self.base.init_state(num_examples, num_classes, num_features)

    def phase(self, epoch: float, state: Mapping[str, Tensor]) -> str:
        return self.base.phase(epoch, state)

    def __call__(
        self, outputs: Outputs, batch: Batch, epoch: Tensor, state: Mapping[str, Tensor], phase: str
    ) -> Loss:
        # The sum of a target row is the weight of its label.
        targets = batch.targets * self.weights[batch.indices, None]
        return self.base(outputs, replace(batch, targets=targets), epoch, state, phase)


def _refuse_missing(labels: ArrayLike) -> None:
    """Refuse None and NaN among the labels, which scikit-learn would fail to sort."""
    # As objects, because numpy would turn NaN among names into the name "nan".
    cells = np.asarray(labels, dtype=None if hasattr(labels, "__array__") else object)
    if cells.ndim != 1 or cells.dtype.kind not in "fO":
        return
    values = cells.tolist()
    for row, label in enumerate(values):
        if is_missing(label):
            # Among names, -1 would become the name "-1".
            has_names = any(isinstance(value, str) for value in values)
            mark = "?" if has_names else -1
            raise ValueError(
                f"label must not be missing, got {label!r} in row {row}. "
                f"Mark rows without a label, as in unlabeled={mark!r}, or leave them out."
            )


def _encoded(
    labels: NDArray[Any], weights: NDArray[np.float64], unlabeled: object
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Places of the labels in the sorted classes, −1 without a label, and the classes."""
    has_label = np.ones(len(labels), dtype=bool)
    if unlabeled is not None:
        if np.ndim(unlabeled):  # type: ignore[arg-type]
            raise ValueError(f"unlabeled must be one value, got {unlabeled!r}.")
        # One by one, because the types may differ.
        has_label = np.array([bool(label != unlabeled) for label in labels])
        # numpy turns numbers among names into names, which `unlabeled` then no longer equals.
        alike = [label for label in labels[has_label].tolist() if str(label) == str(unlabeled)]
        if alike:
            raise ValueError(f"unlabeled must be {alike[0]!r} as it is in y, got {unlabeled!r}.")
    is_learned = has_label & (weights > 0)
    if not is_learned.any():
        raise ValueError(
            f"y must have a label with a weight above 0, got {int(has_label.sum())} labels in "
            f"{len(labels)} rows with unlabeled={unlabeled!r}."
        )
    check_classification_targets(labels[is_learned])
    classes, places = np.unique(labels[is_learned], return_inverse=True)
    codes = np.full(len(labels), -1, dtype=np.int64)
    codes[is_learned] = places
    return codes, classes


def _as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """In the precision of training; numbers that would become infinite are refused."""
    with np.errstate(over="ignore"):
        # −0 becomes 0: equal rows must have equal bits.
        rows = np.asarray(values, dtype=np.float32) + np.float32(0)
    if not np.isfinite(rows).all():
        raise ValueError(
            f"X must fit into float32, got {np.abs(values).max():g}. Scale the features."
        )
    return rows


def _merged(
    inputs: NDArray[np.float32], codes: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[_Table, NDArray[np.int64]]:
    """Equal rows merged, sorted by their content alone; and the place of each row in the table."""
    # A row and its label as one string of bytes, which np.unique can sort and compare.
    bits = np.column_stack([inputs, codes.astype(np.int32).view(np.float32)])  # (N, D + 1)
    row_of_bytes = np.dtype((np.void, bits.shape[1] * bits.itemsize))
    whole = np.ascontiguousarray(bits).view(row_of_bytes)[:, 0]
    _, firsts, places = np.unique(whole, return_index=True, return_inverse=True)
    if len(firsts) < 2:
        raise ValueError(
            "X must have two different rows of positive weight, "
            f"got n_samples=1 in {len(inputs)} rows."
        )
    sums = np.bincount(places, weights=weights)
    return _Table(inputs[firsts], codes[firsts], sums / sums.mean()), places


def _train(experiment: Experiment) -> Module:
    """The network after all steps; ValueError if it diverged."""
    device = experiment.machine.find_device()
    inputs, labels = experiment.data.open("train")
    assert isinstance(inputs, Tensor)
    num_rows, num_classes = len(inputs), len(labels.classes)
    order = Order(torch.arange(num_rows), batch_size=experiment.batch_size, seed=experiment.seed)
    order.to(device)
    setting = Setting(
        source=inputs.to(device),
        given=(labels.given.to(device),),
        label_weights=torch.ones(num_classes, device=device),
        batches_per_epoch=order.batches_per_pass,
        batches_per_pass=order.batches_per_pass,
        is_cut=False,
        device=device,
        dtype=torch.float32,
        captures=False,
        compiles=False,
    )
    step = Step(
        experiment, setting, make_learners(experiment, num_rows, num_classes, inputs[0], device)
    )
    phase = ""
    for number in range(max(1, round(experiment.epochs * order.batches_per_pass))):
        if number % order.batches_per_pass == 0:
            epoch = number / order.batches_per_pass
            phase = experiment.objective.phase(epoch, step.learners[0].state)
        step(Rows(order.batch(number), None), phase)
    network = step.learners[0].network.eval()
    are_finite = all(tensor.isfinite().all() for tensor in network.state_dict().values())
    if not step.is_fine or not are_finite:
        raise ValueError(
            "learning_rate must be lower or X scaled: with "
            f"{experiment.optimizer.lr} the loss or a weight became infinite."
        )
    return network


@torch.no_grad()
def _ask(network: Module, rows: NDArray[Any], dtype: torch.dtype) -> Outputs:
    """The outputs of the network for all rows, computed in chunks."""
    features, logits = [], []
    for start in range(0, len(rows), _CHUNK):
        # Copied, because torch takes no read-only arrays.
        outputs = network(torch.tensor(rows[start : start + _CHUNK], dtype=dtype))
        features.append(outputs.features)
        logits.append(outputs.logits)
    return Outputs(torch.cat(features), torch.cat(logits))


def _label_quality(network: Module, table: _Table, *, k: int, seed: int) -> NDArray[np.float64]:
    """(N,) mean of the probability of a label and the share of nearest rows that have it.

    NaN for rows without a label.
    """
    features, logits = _ask(network, table.inputs, torch.float32)
    codes = torch.from_numpy(table.codes)
    confidence = logits.softmax(dim=1).gather(1, codes.clamp(min=0)[:, None])[:, 0]
    everyone = torch.arange(len(codes))
    labeled = everyone[codes >= 0]
    keys = labeled[rng.shuffle(seed, "keys", 0, labeled)[:_MOST_KEYS]]
    directions, _ = normalize(features)
    similarities, positions = nearest(
        directions, directions[keys], min(k, len(keys)), Identity(everyone, keys)
    )
    agrees = codes[keys][positions] == codes[:, None]  # (N, K)
    total = similarities.sum(dim=1)
    agreement = (similarities * agrees).sum(dim=1) / total.where(total > 0, 1.0)
    # A row without neighbors has only its own probability.
    quality = torch.where(total > 0, (confidence + agreement) / 2, confidence)
    # The clamp is for rounding, which may pass 1.
    return quality.where(codes >= 0, torch.nan).double().clamp(0, 1).numpy()
