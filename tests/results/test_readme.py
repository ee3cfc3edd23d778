import re
from pathlib import Path

from nearsay.results.record import device_seconds, read_records

ROOT = Path(__file__).parents[2]
COLUMNS = {2: ("kind=symmetric", "noise=0.4"), 3: ("kind=human", "column=worse")}


def rows():
    """The rows of the README's table that are ours, cell by cell, and the recorded runs of each of its columns."""
    lines = (ROOT / "README.md").read_text("utf-8").split("| test accuracy after the last epoch, %")[1].splitlines()[2:]
    records = sorted(read_records(ROOT / "results").values(), key=lambda each: each["seed"])
    for cells in (line.strip("| ").split(" | ") for line in lines[: lines.index("")]):
        if not cells[0].startswith("`"):
            continue
        method = cells[0].split("`")[1]
        epochs = 100 if "100 epochs" in cells[0] else 250
        alike = [each for each in records if f"method={method}" in each["arguments"] and each["epochs"] == epochs]
        yield (
            cells,
            {place: [each for each in alike if {*noise} <= {*each["arguments"]}] for place, noise in COLUMNS.items()},
        )


def test_accuracies_in_the_readme_are_those_of_recorded_runs():
    checked = 0
    for cells, runs in rows():
        for place, alike in runs.items():
            found = [f"{100 * each['accuracy']['test']['final']:.2f}" for each in alike]
            told = re.findall(r"\d+\.\d+", cells[place])
            checked += len(told)
            assert told == found, f"{cells[0]}: {cells[place]!r} in README.md, {found} in results/"
    assert checked >= 10


def test_minutes_in_the_readme_are_those_of_recorded_runs():
    for cells, runs in rows():
        taken = [device_seconds(each) / 60 for alike in runs.values() for each in alike]
        decimals = len(cells[-1].partition(".")[2])
        assert cells[-1] == f"{sum(taken) / len(taken):.{decimals}f}", cells[0]
