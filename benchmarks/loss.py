"""Time and memory of `nearsay.ncr`, forward and backward, against the released formulation.

    python benchmarks/loss.py                 the CPU, one thread
    python benchmarks/loss.py --device cuda   a GPU, also replayed from a CUDA graph

Times are minima of interleaved repeats in one run, so read the ratios. Writes
benchmarks/results/loss-DEVICE.json; with --only, which measures a part, only the file of --out.
"""

import argparse
import gc
import itertools
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

import nearsay

CPU_GRID = list(
    itertools.product((128, 256, 1024, 4096), (512, 2048), (10, 100, 1000), (1, 10, 100))
)
GPU_GRID = [
    *CPU_GRID,
    *itertools.product((16384, 65536), (512, 2048), (10, 100, 1000), (1, 10, 100)),
]
PAPER_SIZES = {  # batch, features, classes, k of the paper's experiments
    "CIFAR-10": (256, 512, 10, 10),
    "CIFAR-100": (256, 512, 100, 10),
    "mini-ImageNet 20 %": (128, 512, 100, 10),
    "mini-ImageNet 80 %": (128, 512, 100, 100),
    "mini-WebVision": (256, 2048, 50, 10),
    "WebVision": (1024, 2048, 1000, 10),
    "Clothing1M": (128, 2048, 14, 1),
}


def released(logits: Tensor, features: Tensor, k: int, temperature: float = 2.0) -> Tensor:
    """The loss of the authors' code: logits gathered to (B, K, C), self dropped as top column."""
    unit = features / features.norm(dim=1, keepdim=True)
    similarities = torch.relu(unit @ unit.T)
    nearest, positions = similarities.topk(min(k + 1, len(logits)), dim=1)
    nearest, positions = nearest[:, 1:], positions[:, 1:]
    weights = nearest / nearest.sum(dim=1, keepdim=True)
    target = (weights[:, :, None] * (logits[positions] / temperature).softmax(dim=2)).sum(dim=1)
    log_p = (logits / temperature).log_softmax(dim=1)
    return (target * (target.log() - log_p)).sum(dim=1).mean() * temperature**2


def ours(logits: Tensor, features: Tensor, k: int) -> Tensor:
    """What a user calls."""
    return nearsay.ncr(logits, features, k=k, variant="released")


def inputs(m: int, d: int, c: int, device: str) -> tuple[Tensor, Tensor]:
    """Logits and features after a ReLU that agree somewhat, as in a network half trained."""
    choices = {"generator": torch.Generator(device).manual_seed(m + d + c), "device": device}
    centers = torch.randn(c, d, **choices)
    labels = torch.randint(c, (m,), **choices)
    features = torch.relu(centers[labels] + torch.randn(m, d, **choices))
    logits = 2 * torch.randn(m, c, **choices) + 4 * torch.eye(c, device=device)[labels]
    return logits.requires_grad_(), features.requires_grad_()


def step(
    loss: Callable[..., Tensor], logits: Tensor, features: Tensor, k: int
) -> Callable[[], object]:
    """One forward and backward pass."""

    def run() -> None:
        torch.autograd.grad(loss(logits, features, k), (logits, features), allow_unused=True)

    return run


def seconds(run: Callable[[], object], device: str) -> float:
    """Wall time of one call, the device waited for."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(
    runs: dict[str, Callable[[], object]], device: str, budget: float
) -> dict[str, float]:
    """Minimum time of each, in turn until the budget of seconds is spent; three rounds at least."""
    for run in runs.values():
        seconds(run, device)
    best = dict.fromkeys(runs, math.inf)
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or (time.perf_counter() - start < budget and rounds < 200):
        for name, run in runs.items():
            best[name] = min(best[name], seconds(run, device))
        rounds += 1
    return best


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Most memory that one call holds at a time, beyond its inputs."""
    run()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = peak = 0
    for event in (
        profile.profiler.kineto_results.events()
    ):  # the public tables sum allocations, which hides the peak
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same pass replayed from a CUDA graph: what it costs when launches cost nothing."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(m: int, d: int, c: int, k: int, device: str, budget: float) -> dict[str, float]:
    """One row of the table."""
    logits, features = inputs(m, d, c, device)
    mine, theirs = step(ours, logits, features, k), step(released, logits, features, k)
    fixed = features.detach()
    runs: dict[str, Callable[[], object]] = {"ours": mine, "matmul": lambda: fixed @ fixed.T}
    row: dict[str, float] = {"m": m, "d": d, "c": c, "k": k}
    fits = True
    try:
        theirs()
        runs["released"] = theirs
    except torch.OutOfMemoryError:
        fits = False
        torch.cuda.empty_cache()
    row |= {f"{name}_ms": 1e3 * value for name, value in interleaved(runs, device, budget).items()}
    row["ours_bytes"] = peak_bytes(mine, device)
    if fits:
        row["released_bytes"] = peak_bytes(theirs, device)
    if device == "cuda" and m <= 1024:
        graphs = {name: captured(run) for name, run in (("ours", mine), ("released", theirs))}
        row |= {
            f"{name}_graph_ms": 1e3 * value
            for name, value in interleaved(graphs, device, budget).items()
        }
    return row


def geometric_mean(values: list[float]) -> float:
    """Of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def speedup(row: dict[str, float]) -> float:
    """How many times faster than the released formulation."""
    return row["released_ms"] / row["ours_ms"]


def report(rows: list[dict[str, float]]) -> dict[str, float]:
    """Print the table and what it says in short."""
    head = f"{'m':>6}{'d':>6}{'c':>6}{'k':>5}{'ours ms':>10}{'released':>10}{'faster':>8}"
    print(head + f"{'matmul':>9}{'MB':>8}{'less':>7}")
    for row in rows:
        theirs = row.get("released_ms", math.nan)
        less = row.get("released_bytes", math.nan) / row["ours_bytes"]
        line = f"{row['m']:>6}{row['d']:>6}{row['c']:>6}{row['k']:>5}"
        line += f"{row['ours_ms']:>10.3f}{theirs:>10.3f}{theirs / row['ours_ms']:>7.2f}x"
        line += f"{row['matmul_ms']:>9.3f}{row['ours_bytes'] / 1e6:>8.1f}{less:>6.1f}x"
        if "ours_graph_ms" in row:
            line += f"   graph {row['ours_graph_ms']:.3f} against {row['released_graph_ms']:.3f}"
        print(line)
    both = [row for row in rows if "released_ms" in row]
    large = [row for row in rows if row["m"] == 4096 and row["k"] <= 10]
    by_size = {(row["m"], row["d"], row["c"], row["k"]): row["ours_bytes"] for row in rows}
    summary = {
        "slowest_ratio": min(map(speedup, both), default=math.nan),
        "slowest_ratio_from_1024": min(
            (speedup(row) for row in both if row["m"] >= 1024), default=math.nan
        ),
        "geometric_mean": geometric_mean([speedup(row) for row in both]),
        "slowest_at_4096_k10": min(
            (speedup(row) for row in large if "released_ms" in row), default=math.nan
        ),
        "matmuls_at_4096": geometric_mean(
            [row["ours_ms"] / row["matmul_ms"] for row in large if row["c"] <= 100]
        ),
        "most_memory_per_doubling": max(
            ((after / before) ** (1 / math.log2(size[0] / m)))
            for size, after in by_size.items()
            for m in (128, 256, 1024, 4096, 16384)
            if m < size[0] and (before := by_size.get((m, *size[1:])))
        )
        if len({row["m"] for row in rows}) > 1
        else math.nan,
        "less_memory_at_1024_1000_100": min(
            (
                row["released_bytes"] / row["ours_bytes"]
                for row in both
                if (row["m"], row["c"], row["k"]) == (1024, 1000, 100)
            ),
            default=math.nan,
        ),
    }
    print()
    for name, value in summary.items():
        print(f"{name:32} {value:.2f}")
    return summary


def commit() -> str:
    """The commit of the code, not of the folder in which the command was given."""
    words, here = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(
            words, capture_output=True, text=True, check=True, cwd=here
        ).stdout.strip()
    return ""


def main() -> None:
    """Measure the grid, print it, write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--budget", type=float, default=1.0, help="seconds of repeats for each size"
    )
    parser.add_argument("--only", type=int, nargs="*", help="batch sizes m to measure")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and torch finds none; take cpu")
    out = arguments.out or Path(__file__).parent / "results" / f"loss-{arguments.device}.json"
    try:  # before anything is measured
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out} cannot be written ({error.strerror})")
    torch.set_num_threads(1)
    grid = CPU_GRID if arguments.device == "cpu" else GPU_GRID
    grid = sorted({*PAPER_SIZES.values(), *grid})
    if arguments.only:
        grid = [size for size in grid if size[0] in arguments.only]
    if not grid:
        parser.error(f"--only {arguments.only} names no batch size of the grid")
    rows = []
    for size in grid:
        rows.append(measure(*size, arguments.device, arguments.budget))
        print(f"\r{len(rows)} of {len(grid)} sizes", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    summary = report(rows)
    paper = {name: rows[grid.index(size)] for name, size in PAPER_SIZES.items() if size in grid}
    for name, row in paper.items():
        print(f"{name:32} {speedup(row):.2f}x")
        summary[f"paper: {name}"] = speedup(row)
    hardware = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{platform.machine()}, one thread"
    )
    known = {
        name: value for name, value in summary.items() if not math.isnan(value)
    }  # JSON has no NaN
    record = {
        "hardware": hardware,
        "torch": torch.__version__,
        "commit": commit(),
        "summary": known,
        "rows": rows,
    }
    if arguments.only and arguments.out is None:
        print("\nWrote nothing: this is a part of the grid; --out names a file for it")
        return
    rounded = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.4g}"))
    out.write_text(
        json.dumps(rounded, indent=None, separators=(",", ":")).replace('{"m"', '\n{"m"') + "\n"
    )
    print(f"\nWrote {out}")


if __name__ == "__main__":
    main()
