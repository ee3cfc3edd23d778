import re
from pathlib import Path

from lab.record import device_seconds, read_records

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
COLUMNS = {2: "symmetric-40", 3: "human-worse"}


def rows():
    """The rows of the README's table that are ours, cell by cell, and the recorded runs of each of its columns."""
    lines = README.split("| test accuracy after the last epoch, %")[1].splitlines()[2:]
    records = sorted(read_records(ROOT / "benchmarks" / "records").values(), key=lambda each: each["seed"])
    for cells in (line.strip("| ").split(" | ") for line in lines[: lines.index("")]):
        if not cells[0].startswith("`"):
            continue
        method = cells[0].split("`")[1]
        protocol = "short" if "100 epochs" in cells[0] else "paper"
        names = {place: f"{protocol}-{noise}-{method}-seed-{{}}" for place, noise in COLUMNS.items()}
        yield (
            cells,
            {
                place: [each for each in records if each["name"] == name.format(each["seed"])]
                for place, name in names.items()
            },
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


def test_what_the_readme_says_of_100_epochs_is_recorded():
    told = re.search(
        r"In 100 epochs, `nearsay` ends at (\S+) and (\S+) % under 80 and 90 % symmetric noise, at (\S+) % under 40 % "
        r"asymmetric noise and at (\S+) % on the aggregate labels of CIFAR-10N \(seed 0, commit (\w+), (\S+) minutes",
        README,
    ).groups()
    kinds = ("symmetric-80", "symmetric-90", "asymmetric-40", "human-aggre")
    records = read_records(ROOT / "benchmarks" / "records")
    runs = [records[f"short-{kind}-nearsay-seed-0"] for kind in kinds]
    minutes = sum(device_seconds(run) for run in runs) / len(runs) / 60
    found = [f"{100 * run['accuracy']['test']['final']:.1f}" for run in runs]
    assert told == (*found, runs[0]["commit"], f"{minutes:.1f}")
    assert len({run["commit"] for run in runs}) == 1


def test_what_the_readme_says_of_audits_is_recorded():
    worst, aggregate = re.search(
        r"more suspicious than a right one\) of (\S+), each .* labels (\S+) \(100", README
    ).groups()
    records = read_records(ROOT / "benchmarks" / "records")
    names = [f"paper-human-worse-nearsay-seed-{seed}" for seed in range(3)]
    assert {worst} == {f"{records[name]['audit']['auroc']:.3f}".lstrip("0") for name in names}
    found = records["short-human-aggre-nearsay-seed-0"]["audit"]["auroc"]
    assert aggregate == f"{found:.3f}".lstrip("0")
