"""Records of runs that never were, for tests of what is made of them."""

from lab.record import make_record
from lab.run_queue import PLACES

from nearsay import config


def shares(final, *, best, last_10, best_epoch):
    return {"final": final, "best": best, "best_epoch": best_epoch, "last_10": last_10}


def result(final=0.9, *, held_out=None, auroc=0.95, seconds=60.0, seed=0):
    accuracy = {"test": shares(final, best=final + 0.01, last_10=final - 0.01, best_epoch=90.0)}
    if held_out is not None:
        validation = shares(held_out, best=held_out, last_10=held_out, best_epoch=99.0)
        accuracy["validation"] = validation
    labels = {"requested_rate": 0.4, "effective_rate": 0.361, "num_classes": 10}
    return {
        "accuracy": accuracy,
        "labels": {"fingerprint": "ab12", **labels},
        "detection": None if auroc is None else {"auroc": auroc, "average_precision": 0.875},
        "confidence": {"right": 0.8, "wrong": 0.1},
        "epochs": 100.0,
        "steps": 19500,
        "seed": seed,
        "seconds": seconds,
        "images_per_second": 69500.4,
        "peak_memory_bytes": 3 * 2**30,
        "hardware": "NVIDIA H200",
        "versions": {"nearsay": "0.1.0", "torch": "2.11.0", "python": "3.12.1"},
    }


def record(wanted, final=0.9, *, seed=0, commit="1234abc", **more):
    """As of the queue, or with another seed."""
    recipe, *words = wanted.words(PLACES)
    call = config.apply_overrides(config.call_recipe(recipe, words), wanted.overrides)
    tree, results = config.to_tree(call.experiment), result(final, seed=seed, **more)
    made = make_record(wanted, results, tree, seconds=1.0, places=PLACES)
    return {**made, "commit": commit}
