"""Break the code on purpose, one line at a time, and see that the tests notice.

    python tests/mutants.py          all of them, a few seconds each
    python tests/mutants.py -k self  those whose name contains a word

A mutant that survives is a line that no test guards.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
NCR_TESTS = (
    "tests/losses/test_ncr.py",
    "tests/losses/test_ncr_numerics.py",
    "tests/losses/test_memory_bank.py",
)
KERNEL_TESTS = (*NCR_TESTS, "tests/losses/test_ncr_kernel.py", "tests/test_neighbors.py")
MODULE_TESTS = ("tests/losses/test_base.py", "tests/losses/test_criterion.py")
PROCESS_TESTS = ("tests/distributed",)
METRICS_TESTS, AUDIT_TESTS = ("tests/test_metrics.py",), ("tests/label_issues",)


class Mutant(NamedTuple):
    """One deliberate mistake."""

    name: str
    path: str  # under src/nearsay
    old: str  # stands exactly once in the file
    new: str
    tests: tuple[str, ...] = KERNEL_TESTS


OBJECTIVE, KERNEL, SEARCH, BANK = (
    "losses/ncr.py",
    "losses/_ncr_fast.py",
    "neighbors.py",
    "losses/memory_bank.py",
)
FORMULA, MODULE = "losses/base.py", "losses/criterion.py"
METRICS, ESTIMATES, JUDGMENTS = "metrics.py", "label_issues/noise_rate.py", "label_issues/audit.py"
MUTANTS = [
    Mutant("sign of the paper's term", OBJECTIVE, "return divergence(p, q, log_p", "return -divergence(p, q, log_p"),
    Mutant("direction of the paper's term", OBJECTIVE, "divergence(p, q, log_p - log_q)", "divergence(q, p, log_q - log_p)"),
    Mutant("released term without T²", OBJECTIVE, "log_q - log_p) * choices.temperature**2", "log_q - log_p)"),
    Mutant("missing 1 − alpha", OBJECTIVE, "(1 - self.alpha) * total + ", "total + "),
    Mutant("missing alpha", OBJECTIVE, "self.alpha * consistency", "consistency"),
    Mutant("term one epoch late", OBJECTIVE, "if epoch >= self.start_epoch", "if epoch > self.start_epoch"),
    Mutant("term from the beginning", OBJECTIVE, "if epoch >= self.start_epoch", "if epoch >= 0"),
    Mutant("self not masked in the plain version", OBJECTIVE, "similarities.masked_fill(same, 0)", "similarities"),
    Mutant("temperature on own logits only", OBJECTIVE, "(key_logits / choices.temperature)", "(key_logits / 1.0)"),
    Mutant("weights not normalized", OBJECTIVE, "weights = largest / total.masked_fill(is_alone, 1)", "weights = largest"),
    Mutant("loneliness not handled", OBJECTIVE, "torch.where(is_alone, log_p, log_q)", "log_q"),
    Mutant("padding in the loss", OBJECTIVE, "features = features.masked_fill(is_padding[:, None], 0)", "pass"),
    Mutant("padding counted as isolated", OBJECTIVE, "is_alone & ~is_padding", "is_alone"),
    Mutant("mean over padding too", OBJECTIVE, "(indices != PADDING).sum()", "(indices >= PADDING).sum()"),
    Mutant("autocast left on", SEARCH, "torch.autocast(device, enabled=False)", "torch.autocast(device)"),
    Mutant("half precision kept", OBJECTIVE, "features.dtype), torch.float32)", "features.dtype), torch.float16)"),
    Mutant("partners masked though not asked", OBJECTIVE, "is not None and self.mask_partners else", "is not None else"),
    Mutant("neighbors not gathered", OBJECTIVE, "        if distributed.num_processes() > 1:", "        if False:", PROCESS_TESTS),
    Mutant("mean of the process alone", OBJECTIVE, "consistency = distributed.mean(rows, real)", "consistency = rows.mean()", PROCESS_TESTS),
    Mutant("bank written by the process alone", OBJECTIVE, "everyone, distributed.gather(batch.indices))", "outputs, batch.indices)", PROCESS_TESTS),
    Mutant("self not masked by position", SEARCH, "similarities.diagonal(start).zero_()", "pass"),
    Mutant("self masked at the wrong offset", SEARCH, "similarities.diagonal(start)", "similarities.diagonal(0)"),
    Mutant("self not masked by index", SEARCH, "(queries == who.keys) | (who.keys", "(who.keys"),
    Mutant("padding is a neighbor", SEARCH, "(queries == who.keys) | (who.keys == PADDING)", "queries == who.keys"),
    Mutant("partner is a neighbor", SEARCH, "mask |= who.query_partners[start:stop, None] == who.keys", "pass"),
    Mutant("partner's partner is a neighbor", SEARCH, "mask |= queries == who.key_partners", "pass"),
    Mutant("negative similarities kept", SEARCH, "torch.threshold_(similarities, torch.finfo(similarities.dtype).eps, 0)", "pass"),
    Mutant("farthest instead of nearest", SEARCH, "topk(k, dim=1, sorted=False)", "topk(k, dim=1, largest=False)"),
    Mutant("norm without the maximum", SEARCH, "scaled = features / largest", "scaled = features"),
    Mutant("kernel without T²", KERNEL, "rows *= choices.temperature**2", "pass"),
    Mutant("kernel in the other direction", KERNEL, "_pays(key_p[: len(q)], q, log_ratio)", "_pays(q, key_p[: len(q)], -log_ratio)"),
    Mutant("no gradient to the row itself", KERNEL, "grad_logits[:num_rows] += own", "pass"),
    Mutant("cancellation in the gradient", KERNEL, "p * torch.expm1(-log_ratio.clamp(min=-1)), q - p)", "q - p, q - p)"),
    Mutant("no gradient to the neighbors", KERNEL, "edges.spread(weights, flow_over_q)", "edges.spread(0 * weights, flow_over_q)"),
    Mutant("flow of the wrong sign", KERNEL, "flow = -upstream * q * log_ratio", "flow = upstream * q * log_ratio"),
    Mutant("gradient without 1/T", KERNEL, "grad_logits /= temperature", "pass"),
    Mutant("no gradient to a row's own features", KERNEL, "grad_keys[:num_rows] += edges.combine", "edges.combine"),
    Mutant("length forgotten in the gradient", KERNEL, "grad_keys /= key_lengths[:num_receivers]", "pass"),
    Mutant("direction not projected out", KERNEL, "grad_keys.addcmul_(units,", "grad_keys.addcmul_(0 * units,"),
    Mutant("underflow not seen", KERNEL, "if not can_look(log_p):\n        return True\n    return not", "if not can_look(log_p):\n        return True\n    return False and"),
    Mutant("short sum everywhere", KERNEL, "small = (rows < 1e-2)", "small = (rows < -1)"),
    Mutant("differentiated twice in silence", KERNEL, "if torch.is_grad_enabled():", "if False:"),
    Mutant("examples at hand found in the bank", BANK, "indices.masked_fill(stale, PADDING)", "indices"),
    Mutant("older rows kept in the queue", BANK, '.masked_fill_(is_older, PADDING)', ""),
    Mutant("cursor stands still", BANK, ".add_(is_kept.sum())", ""),
    Mutant("weight of a label not applied to a formula", FORMULA, "distributed.mean(rows * weights, weights)", "distributed.mean(rows, weights)", MODULE_TESTS),
    Mutant("weighted target in a formula", FORMULA, "targets / weights.where(weights > 0, 1.0)[:, None]", "targets", MODULE_TESTS),
    Mutant("row of zeros in a formula", FORMULA, "labels.where(has_label, 1 / labels.shape[1])", "labels", MODULE_TESTS),
    Mutant("saved state not taken by a fresh loss", MODULE, "if {*keys.values()} <= state_dict.keys():", "if False:", MODULE_TESTS),
    Mutant("features of an earlier pass", MODULE, "self._features = self._output = None\n        if", "if", MODULE_TESTS),
    Mutant("state rounded to 16 bits", MODULE, "if moved.dtype.itemsize < state[name].dtype.itemsize:", "if False:", MODULE_TESTS),
    Mutant("least likely class taken for memorized", METRICS, "_checked(logits, labels.given)[0].argmax(dim=1)", "_checked(logits, labels.given)[0].argmin(dim=1)", METRICS_TESTS),
    Mutant("all rows in one adaptive bin", METRICS, "which = rank * bins // len(probability)", "which = rank // len(probability)", METRICS_TESTS),
    Mutant("cosines divided by the width", METRICS, "(first * second).sum(dim=1)", "(first * second).mean(dim=1)", METRICS_TESTS),
    Mutant("bells without their normalization", ESTIMATES, "shares.log() - deviations.log() -", "shares.log() -", AUDIT_TESTS),
    Mutant("nothing from confident learning", JUDGMENTS, "others.append(noise_rate.confident_share(beliefs, seen_labels))", "pass", AUDIT_TESTS),
    Mutant("silence counted as consent", JUDGMENTS, "is_seen = is_scored & (total.sum(dim=1) > 0)", "is_seen = is_scored", AUDIT_TESTS),
    Mutant("an audit of other labels cleaned", "label_issues/cleaning.py", "if [numbers.get(name, -1) for name in given] != labels.given.tolist():", "if False:", ("tests/label_issues/test_cleaning.py",)),
]  # fmt: skip


def survives(mutant: Mutant) -> bool:
    """Whether the tests pass on a copy of the package with this mistake in it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy)
        broken = copy / "nearsay" / mutant.path
        source = broken.read_text()
        if source.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.name}: {mutant.old!r} stands {source.count(mutant.old)} times in {mutant.path}"
            )
        broken.write_text(source.replace(mutant.old, mutant.new))
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *mutant.tests,
        ]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
        if result.returncode not in (0, 1):  # neither passed nor failed: the tests did not run
            raise SystemExit(
                f"{mutant.name}: pytest ended with {result.returncode}\n{result.stdout}{result.stderr}"
            )
        return result.returncode == 0


def main() -> None:
    """Try them and say who survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", default="", help="only mutants whose name contains this")
    chosen = [mutant for mutant in MUTANTS if parser.parse_args().k in mutant.name]
    survivors = []
    for mutant in chosen:
        if survives(mutant):
            survivors.append(mutant.name)
        print(
            f"{'SURVIVES' if mutant.name in survivors else 'caught':8}  {mutant.name}", flush=True
        )
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} caught")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
