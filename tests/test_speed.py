"""The page of speeds says what the files in benchmarks/results hold."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "speed.md").read_text("utf-8")


def measured(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def row(start):
    """The cells of a row of a table behind its first one."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("| ").split("|")[1:]]


def number(text):
    return float(text.replace(" ", "").rstrip("×%"))


def assert_told(text, value):
    """A number as it is printed is the value, to the digits that are printed."""
    digits = len(text.rstrip("×% ").partition(".")[2])
    assert number(text) == pytest.approx(value, abs=0.5001 * 10**-digits)


@pytest.mark.parametrize(("column", "name"), [(0, "loss-cpu"), (1, "loss-cuda")])
def test_what_is_told_of_the_loss_is_what_was_measured(column, name):
    found = measured(name)
    summary = found["summary"]
    head = (
        next(line for line in PAGE.splitlines() if line.startswith("| | "))
        .strip("| ")
        .split("|")[column]
    )
    assert f"torch {found['torch'].split('+')[0]}, commit {found['commit']}" in head
    slowest, mean = row("faster than released")[column].split(" / ")
    assert_told(slowest, summary["slowest_ratio"])
    assert_told(mean, summary["geometric_mean"])
    paper = [ratio for size, ratio in summary.items() if size.startswith("paper: ")]
    for text, ratio in zip(
        row("at the sizes of the paper")[column].split(" to "),
        (min(paper), max(paper)),
        strict=True,
    ):
        assert_told(text, ratio)
    assert_told(
        row("peak memory")[column].removesuffix(" less"), summary["less_memory_at_1024_1000_100"]
    )


def test_how_the_loss_grows_and_is_replayed_is_what_was_measured():
    for text, name in zip(row("growth of peak memory"), ("loss-cpu", "loss-cuda"), strict=True):
        assert_told(text.split()[0], measured(name)["summary"]["most_memory_per_doubling"])
    rows = [
        each
        for each in measured("loss-cuda")["rows"]
        if "ours_graph_ms" in each and each["m"] <= 1024
    ]
    ratios = [each["released_graph_ms"] / each["ours_graph_ms"] for each in rows]
    for text, ratio in zip(
        row("replayed")[1].split(" to "), (min(ratios), max(ratios)), strict=True
    ):
        assert_told(text, ratio)


def test_what_is_told_of_whole_steps_is_what_was_measured():
    found = measured("train-cuda")
    told = PAGE.split("## Whole training steps")[1]
    assert (
        f"{found['hardware']}, torch {found['torch'].split('+')[0]}, commit {found['commit']},"
        in told
    )
    names = (
        "each kernel launched by itself",
        "whole step in a CUDA graph",
        "CUDA graph and torch.compile",
    )
    for start, measurement in zip(names, found["rows"], strict=True):
        plain, ncr, more = row(start)
        speeds = measurement["images_per_second"]
        assert (number(plain), number(ncr)) == (speeds["cross-entropy"], speeds["NCR"])
        assert_told(more.partition("(")[0].strip().lstrip("+"), 100 * measurement["ncr_slower"])
    floor, share = re.search(r"allow ([\d ]+) images/s\. NCR runs at ([\d.]+) of it", told).groups()
    assert number(floor) == found["floor"]
    assert_told(share, found["rows"][-1]["of_floor"])


def test_what_is_told_of_the_usual_loop_is_what_was_measured():
    told = re.search(
        r"reaches ([\d ]+) images/s at ELR's own batch of 128, and ([\d ]+) at ours of 256: NCR here is ([\d.]+) and "
        r"([\d.]+) times as fast",
        PAGE,
    ).groups()
    for batch, speed, times in zip((128, 256), told[:2], told[2:], strict=True):
        found = next(
            each for each in measured("train-cuda")["usual_loop"] if each["batch"] == batch
        )
        assert number(speed) == found["images_per_second"]
        assert_told(times, found["ours_is_faster"])


def test_the_readme_tells_of_a_step_what_was_measured():
    readme = (ROOT / "README.md").read_text("utf-8")
    told = re.search(
        r"with NCR takes (\S+ %) longer .* commit (\w+): ([\d ]+) images/s", readme
    ).groups()
    found = measured("train-cuda")
    assert_told(told[0], 100 * found["rows"][-1]["ncr_slower"])
    assert (told[1], number(told[2])) == (
        found["commit"],
        found["rows"][-1]["images_per_second"]["NCR"],
    )
