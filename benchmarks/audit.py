"""Quality of the audit on run folders with known true labels, compared with cleanlab.

    python benchmarks/audit.py RUN...                   wrong labels, noise rate, size of the review
    python benchmarks/audit.py --folds RUN...           also cleanlab with cross-validation
    python benchmarks/audit.py --clean RUN...           accuracy before and after cleaning
    python benchmarks/audit.py --verified FILE RUN...   ranks of known errors of the test set
    python benchmarks/audit.py --planted DATA           duplicates and foreign images in CIFAR-10
    python benchmarks/audit.py --scale N                time and memory for N rows, 2 threads

RUN is the folder of a finished training. cleanlab gets the probabilities of the same run. It needs
out-of-sample ones: on probabilities of a network that has seen the labels, its rate and matrix are
far too low. So compare these only with `--folds`, which adds the result of cleanlab for a logistic
regression on the pixels with five-fold cross-validation (for small images). Without cleanlab its
columns read "not installed".

FILE is an .npz with `original` and `corrected`: the labels of the test set as published and as
verified by people, in its order, -1 if they agree on no class. DATA is the folder of CIFAR-10; 200
changed copies of its images and 500 images of other kinds are added, and the features are the
pixels at 8 x 8, because no network is trained. The rows of `--scale` have 512 float16 features on
disk: overlapping classes (`--classes`, 10) around random centers, in 64 directions of falling
spread, with 20 % wrong labels. `--out FILE` writes the rows as JSON.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import safetensors.torch
import torch
from planting import CHANGES, KINDS, Planted, foreign, is_same, photographs, plant, write_features
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from torch import Tensor
from torch.nn import functional

import nearsay
from nearsay import config, metrics
from nearsay.batch import Labels
from nearsay.data import Cifar10
from nearsay.doors.audit import audit_run
from nearsay.errors import exit_code, explain
from nearsay.label_issues.cleaning import DROP_BELOW, RELABEL_ABOVE, clean_run
from nearsay.label_issues.duplicates import same_pictures, shrink
from nearsay.label_issues.noise_rate import noise_matrix
from nearsay.training.loop import train
from nearsay.training.run_folder import read_labels, read_origin, read_result

RECALL = 0.9
NOT_INSTALLED = "not installed"
CLEANLAB_SCORES = ("self_confidence", "normalized_margin")
PLANTED_SEED, NUM_COPIES, NUM_FOREIGN = 101, 200, 500


def measure(folder: Path, *, folds: bool) -> dict[str, Any]:
    """Everything about one run, audited."""
    found, indices, _, *_ = audit_run(folder, report=False)
    labels = read_labels(folder)
    if labels.clean is None:
        raise ValueError(f"{folder} does not know which labels are right; measure a run that does")
    given, clean = labels.given[indices], labels.clean[indices]
    is_wrong = (given != clean) & (given >= 0)
    probabilities = _probabilities(folder, "train", indices)
    confidence = probabilities.gather(1, given.clamp(min=0)[:, None])[:, 0].where(
        given >= 0, torch.nan
    )
    truth = noise_matrix(given, clean, len(labels.classes))
    row = {
        "run": folder.name,
        "score": detection(found.scores, is_wrong),
        "confidence": detection(confidence, is_wrong),
        "rate": {
            "true": metrics.noise_rate(Labels(given, clean, labels.classes)),
            **found.noise_rate._asdict(),
        },
        "matrix_error": None
        if found.noise_matrix is None
        else (found.noise_matrix - truth).abs().mean().item(),
        "review": {
            "estimate": found.review_for(RECALL),
            "true": to_review(found.order(), is_wrong),
        },
    }
    row["cleanlab"] = by_cleanlab(given, probabilities, is_wrong, truth)
    if folds:
        row["cleanlab_out_of_sample"] = by_cleanlab(
            given, out_of_sample(folder, indices, given), is_wrong, truth
        )
    return row


def out_of_sample(folder: Path, indices: Tensor, given: Tensor) -> Tensor:
    """(n, C) out-of-sample probabilities of a logistic regression on the pixels."""
    inputs = config.from_origin(read_origin(folder)).experiment.data.open("train").inputs
    if not isinstance(inputs, Tensor) or (given < 0).any():
        raise ValueError(
            f"--folds needs labeled images in memory, which {folder} has not; leave it out"
        )
    pixels = inputs[indices].flatten(1).float() / 255
    model = LogisticRegression(max_iter=1000)
    return torch.from_numpy(
        cross_val_predict(model, pixels.numpy(), given.numpy(), cv=5, method="predict_proba")
    )


def detection(scores: Tensor, is_wrong: Tensor) -> dict[str, float] | None:
    """How well scores find what is wrong; None where nothing or everything is."""
    if not is_wrong.any() or is_wrong.all():
        return None
    return {
        "auroc": metrics.detection_auroc(scores, is_wrong),
        "average_precision": metrics.average_precision(scores, is_wrong),
    }


def to_review(order: Tensor, is_wrong: Tensor) -> int:
    """How many of the most suspicious labels hold nine tenths of the wrong ones, in truth."""
    found = is_wrong[order].cumsum(dim=0)
    if not len(found) or not found[-1]:
        return 0
    return int((found >= RECALL * found[-1]).nonzero()[0]) + 1


def by_cleanlab(
    given: Tensor, probabilities: Tensor, is_wrong: Tensor, truth: Tensor
) -> dict[str, Any] | str:
    """What cleanlab makes of probabilities."""
    if find_spec("cleanlab") is None:
        return NOT_INSTALLED
    from cleanlab import count, rank  # noqa: PLC0415  # optional

    is_labeled = given >= 0
    labels, beliefs = given[is_labeled].numpy(), probabilities[is_labeled].double().numpy()
    beliefs = beliefs / beliefs.sum(axis=1, keepdims=True)
    found: dict[str, Any] = {}
    for method in CLEANLAB_SCORES:
        scores = torch.from_numpy(
            np.asarray(rank.get_label_quality_scores(labels, beliefs, method=method))
        )
        found[method] = detection(scores, is_wrong[is_labeled])
    joint = count.compute_confident_joint(labels, beliefs)
    shares = count.estimate_joint(labels, beliefs, confident_joint=joint)  # (given, true)
    _, matrix, _ = count.estimate_latent(joint, labels)  # (given, true), columns sum to 1
    found["rate"] = float(1 - np.trace(shares))
    found["matrix_error"] = float(np.abs(np.asarray(matrix).T - truth.numpy()).mean())
    return found


def clean_and_repeat(folder: Path) -> dict[str, Any]:
    """Clean the labels of a run, train again, and compare the accuracies on the test set."""
    audit_run(folder, report=False)
    cleaned = clean_run(folder, relabel_above=RELABEL_ABOVE, drop_below=DROP_BELOW)
    call = config.from_origin(read_origin(folder))
    call = config.apply_overrides(call, [f"labels_file={(folder / 'cleaned.npz').resolve()}"])
    again = folder.with_name(f"{folder.name}-cleaned")
    result = train(call.experiment, again, origin=call.origin)
    labels = read_labels(folder)
    before = read_result(folder)
    if before is None:
        raise ValueError(f"{folder} has no result.json; train it to the end first")
    row: dict[str, Any] = {
        "run": folder.name,
        "before": before["accuracy"]["test"]["final"],
        "after": result["accuracy"]["test"]["final"],
        "relabeled": len(cleaned.relabeled),
        "dropped": len(cleaned.dropped),
        "left_for_review": len(cleaned.review),
    }
    if labels.clean is not None:
        row["wrong_before"] = metrics.noise_rate(labels)
        row["wrong_after"] = metrics.noise_rate(Labels(cleaned.given, labels.clean, labels.classes))
    return row


def verify(folder: Path, path: Path) -> dict[str, Any]:
    """The ranks of the verified errors of the test set, the most suspicious label first."""
    try:
        arrays = np.load(path, allow_pickle=False)
        original, corrected = (
            torch.from_numpy(arrays[name].astype(np.int64)) for name in ("original", "corrected")
        )
    except (ValueError, LookupError, EOFError, BadZipFile) as error:
        raise ValueError(
            f"{path} is no .npz with the whole numbers original and corrected ({error})"
        ) from error
    tensors = safetensors.torch.load_file(folder / "predictions" / "test.safetensors")
    order = tensors["indices"].argsort()
    if len(order) != len(original):
        raise ValueError(
            f"{path} is of {len(original)} labels, but {folder} has predicted {len(order)}"
        )
    probabilities = tensors["logits"][order].double().softmax(dim=1)
    found = nearsay.audit(
        original, probabilities=probabilities, features=tensors["features"][order].float()
    )
    is_error = original != corrected
    confidence = probabilities.gather(1, original[:, None])[:, 0]
    ranks = {
        name: _ranks(scores, is_error)
        for name, scores in (("score", found.scores), ("confidence", confidence))
    }
    return {
        "run": folder.name,
        "num_labels": len(original),
        "num_errors": int(is_error.sum()),
        "median_rank": {name: statistics.median(places) for name, places in ranks.items()},
        "in_first_hundred": {
            name: sum(place <= 100 for place in places) for name, places in ranks.items()
        },
    }


def plant_and_find(path: Path) -> list[dict[str, Any]]:
    """Recall and precision of planted near-duplicates, and ranks of foreign images."""
    split = Cifar10(path=str(path)).open("train")
    assert isinstance(split.inputs, Tensor)
    order = torch.randperm(len(split.inputs), generator=torch.Generator().manual_seed(PLANTED_SEED))
    images, tiles = split.inputs[order], photographs()
    rows = [
        find_planted("CIFAR-10", plant(images, NUM_COPIES, PLANTED_SEED)),
        find_planted(
            "photographs, 224 px", plant(tiles, min(NUM_COPIES, len(tiles)), PLANTED_SEED)
        ),
    ]
    strangers, kinds = foreign(NUM_FOREIGN, PLANTED_SEED)
    return [*rows, rank_foreign(images, split.labels.given[order], strangers, kinds)]


def find_planted(name: str, planted: Planted) -> dict[str, Any]:
    """Recall of the planted pairs, and precision by an independent rule."""
    start = time.process_time()
    found = same_pictures(shrink(planted.images))
    seconds = time.process_time() - start
    hits = planted.pairs & set(map(tuple, found.tolist()))
    others = torch.tensor(
        sorted(set(map(tuple, found.tolist())) - planted.pairs), dtype=torch.int64
    ).reshape(-1, 2)
    num_real = int(is_same(planted.images, others).sum()) if len(others) else 0
    made, seen = (dict.fromkeys(CHANGES, 0) for _ in range(2))
    for pair, change in planted.changes.items():
        made[change] += 1
        seen[change] += pair in hits
    return {
        "data": name,
        "num_images": len(planted.images),
        "seed": PLANTED_SEED,
        "recall": len(hits) / len(planted.pairs),
        "recall_of": {change: seen[change] / max(1, made[change]) for change in CHANGES},
        "found": len(found),
        "others": len(others),
        "others_same_by_rule": num_real,
        "precision": (len(hits) + num_real) / max(1, len(found)),
        "cpu_seconds": seconds,
    }


def rank_foreign(
    images: Tensor, labels: Tensor, strangers: Tensor, kinds: list[str]
) -> dict[str, Any]:
    """AUROC of the out-of-distribution score, for all foreign images and for each kind."""
    pictures = torch.cat([images, strangers])
    features = torch.cat(
        [
            functional.adaptive_avg_pool2d(some.float(), 8).flatten(1)
            for some in pictures.split(4096)
        ]
    )
    given = torch.cat([labels, torch.zeros(len(kinds), dtype=torch.int64)])
    found = nearsay.audit(given, features=features, images=pictures)
    assert found.ood_scores is not None
    home, away = found.ood_scores[: len(images)], found.ood_scores[len(images) :]
    chosen = {
        kind: away[torch.tensor([each == kind for each in kinds])]
        for kind in KINDS
        if kind in kinds
    }
    return {
        "data": "foreign images",
        "num_images": len(pictures),
        "seed": PLANTED_SEED,
        "auroc": _apart(home, away),
        "auroc_of": {kind: _apart(home, scores) for kind, scores in chosen.items()},
    }


def _apart(home: Tensor, away: Tensor) -> float:
    return metrics.detection_auroc(
        torch.cat([home, away]), torch.arange(len(home) + len(away)) >= len(home)
    )


def scale(num: int, num_classes: int) -> dict[str, Any]:
    """Time, memory and recall of an audit of `num` rows with features on disk."""
    torch.set_num_threads(2)
    drawn = torch.Generator().manual_seed(0)
    clean = torch.randint(0, num_classes, (num,), generator=drawn)
    is_wrong = torch.rand(num, generator=drawn) < 0.2
    given = (
        clean + is_wrong * torch.randint(1, num_classes, (num,), generator=drawn)
    ) % num_classes
    logits = torch.randn(num, num_classes, generator=drawn)
    logits.scatter_add_(1, clean[:, None], torch.full((num, 1), 3.0))
    with tempfile.TemporaryDirectory() as folder:
        features = write_features(Path(folder) / "features.npy", clean, num_classes)
        times, start = time.process_time(), time.perf_counter()
        found = nearsay.audit(given, probabilities=logits.softmax(dim=1), features=features)
        seconds, processor = time.perf_counter() - start, time.process_time() - times
    return {
        "num_examples": num,
        "num_features": features.shape[1],
        "num_classes": num_classes,
        "seconds": seconds,
        "cpu_seconds": processor,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "neighbor_recall": found.neighbor_recall,
        "neighbors_of_same_class": None
        if found.evidence is None
        else (clean[found.evidence.positions] == clean[:, None]).float().mean().item(),
        "auroc": metrics.detection_auroc(found.scores, is_wrong),
        "rate": {"true": is_wrong.float().mean().item(), **found.noise_rate._asdict()},
    }


def _ranks(scores: Tensor, is_error: Tensor) -> list[int]:
    places = torch.empty(len(scores), dtype=torch.int64)
    places[scores.argsort(stable=True)] = torch.arange(1, len(scores) + 1)
    return sorted(places[is_error].tolist())


def _probabilities(folder: Path, split: str, indices: Tensor) -> Tensor:
    tensors = safetensors.torch.load_file(folder / "predictions" / f"{split}.safetensors")
    order = tensors["indices"].argsort()
    if not torch.equal(tensors["indices"][order], indices):
        raise ValueError(
            f"the predictions in {folder} are not of the examples that were audited; train it again"
        )
    return tensors["logits"][order].double().softmax(dim=1)


def _shown(value: Any, name: str = "auroc") -> str:
    if value == NOT_INSTALLED:
        return NOT_INSTALLED
    return "-" if value is None else f"{value[name]:.3f}"


def show_measured(rows: list[dict[str, Any]]) -> None:
    """Print a table: AUROC / AP, then rates and the matrix, then how many to review."""
    print(
        "AUROC / AP of            score          confidence     "
        "self-confidence  normalized margin (cleanlab)"
    )
    for row in rows:
        peers = [
            row["cleanlab"] if row["cleanlab"] == NOT_INSTALLED else row["cleanlab"][m]
            for m in CLEANLAB_SCORES
        ]
        cells = [
            f"{_shown(v)} / {_shown(v, 'average_precision')}"
            for v in (row["score"], row["confidence"], *peers)
        ]
        print(f"{row['run'][:22]:22}  " + "  ".join(f"{cell:15}" for cell in cells))
    print(
        "\nwrong labels, %         truth   estimate (95 % interval)  "
        "cleanlab   matrix error: ours  cleanlab's"
    )
    for row in rows:
        peer, rate = row["cleanlab"], row["rate"]
        cells = [NOT_INSTALLED] * 2
        if peer != NOT_INSTALLED:
            cells = [f"{100 * peer['rate']:.1f}", f"{peer['matrix_error']:.4f}"]
        interval = (
            f"{100 * rate['estimate']:.1f} ({100 * rate['low']:.1f} to {100 * rate['high']:.1f})"
        )
        ours = "-" if row["matrix_error"] is None else f"{row['matrix_error']:.4f}"
        print(
            f"{row['run'][:22]:22}  {100 * rate['true']:5.1f}   {interval:24}  "
            f"{cells[0]:9}  {ours:>18}  {cells[1]}"
        )
    for row in rows:
        peer = row.get("cleanlab_out_of_sample")
        if isinstance(peer, dict):
            cell = f"rate {100 * peer['rate']:.1f} %, matrix error {peer['matrix_error']:.4f}"
            auroc = _shown(peer["self_confidence"])
            print(f"{row['run'][:22]:22}  cleanlab, out of sample: {cell}, AUROC {auroc}")
    print(f"\nreview for {RECALL:.0%} of the wrong labels: estimated, true")
    for row in rows:
        print(f"{row['run'][:22]:22}  {row['review']['estimate']:6}  {row['review']['true']:6}")


def show_cleaned(rows: list[dict[str, Any]]) -> None:
    """Print accuracies before and after."""
    print("run                     before   after   (accuracy on the test set, last epoch, %)")
    for row in rows:
        print(f"{row['run'][:22]:22}  {100 * row['before']:6.1f}  {100 * row['after']:6.1f}")
    means = [statistics.mean(row[name] for row in rows) for name in ("before", "after")]
    print(f"{'mean':22}  {100 * means[0]:6.1f}  {100 * means[1]:6.1f}")


def show_verified(rows: list[dict[str, Any]]) -> None:
    """Print median ranks."""
    print("median rank of the verified errors: by score, by confidence")
    for row in rows:
        ranks, cell = row["median_rank"], f"of {row['num_labels']}; {row['num_errors']} errors"
        print(f"{row['run'][:22]:22}  {ranks['score']:8g}  {ranks['confidence']:8g}  {cell}")


def show_found(rows: list[dict[str, Any]]) -> None:
    """Print what was found of what was planted, or how long a large audit took."""
    for row in rows:
        print(json.dumps(row, indent=1))


def main() -> None:
    """Measure the runs that are named, print a table, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--clean", action="store_true", help="clean the labels and train again")
    choice.add_argument(
        "--verified", type=Path, metavar="FILE", help="an .npz of verified test labels"
    )
    choice.add_argument("--planted", type=Path, metavar="DATA", help="the folder of CIFAR-10")
    choice.add_argument("--scale", type=int, metavar="N", help="rows of a made-up data set")
    parser.add_argument("--classes", type=int, default=10, help="of the made-up data set")
    parser.add_argument(
        "--folds", action="store_true", help="cleanlab on out-of-sample probabilities as well"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the rows as JSON")
    chosen = parser.parse_args()
    if bool(chosen.runs) == bool(chosen.planted or chosen.scale):
        parser.error("name at least one RUN, or none with --planted and --scale")
    if (chosen.scale or 1) < 1 or chosen.classes < 2:
        parser.error("--scale must be 1 or more, and --classes 2 or more")
    try:
        # Create the folder now, so that a wrong path fails before the measurement.
        if chosen.out is not None:
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
        rows, show = _rows(chosen)
    except (OSError, ValueError, nearsay.training.checkpoints.RunError) as error:
        print(f"error: {explain(error, exit_code(error))}", file=sys.stderr)
        sys.exit(exit_code(error))
    show(rows)
    if chosen.out is not None:
        peers = {name: _version(name) for name in ("nearsay", "torch", "cleanlab", "faiss-cpu")}
        about = {
            "machine": platform.processor() or platform.machine(),
            "versions": peers,
            "rows": rows,
        }
        chosen.out.write_text(json.dumps(about, indent=1) + "\n")
        print(f"\nwritten to {chosen.out}")


def _rows(chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], Any]:
    if chosen.planted is not None:
        return plant_and_find(chosen.planted), show_found
    if chosen.scale is not None:
        return [scale(chosen.scale, chosen.classes)], show_found
    if chosen.clean:
        return [clean_and_repeat(each) for each in chosen.runs], show_cleaned
    if chosen.verified is not None:
        return [verify(each, chosen.verified) for each in chosen.runs], show_verified
    return [measure(each, folds=chosen.folds) for each in chosen.runs], show_measured


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return NOT_INSTALLED


if __name__ == "__main__":
    main()
