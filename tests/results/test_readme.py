import re
from pathlib import Path

from nearsay.results.record import read_records

ROOT = Path(__file__).parents[2]
COLUMNS = {2: ("kind=symmetric", "noise=0.4"), 3: ("kind=human", "column=worse")}


def test_accuracies_in_the_readme_are_those_of_recorded_runs():
    lines = (ROOT / "README.md").read_text("utf-8").split("| test accuracy after the last epoch, %")[1].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    ours = [row for row in rows if row[0].startswith("`")]
    records, checked = read_records(ROOT / "results").values(), 0
    for name, _, *cells, _ in ours:
        method = name.split("`")[1]
        for place, cell in enumerate(cells, start=2):
            epochs = 100 if "100 epochs" in name + cell else 250
            found = [
                f"{100 * each['accuracy']['test']['final']:.2f}"
                for each in sorted(records, key=lambda each: each["seed"])
                if {f"method={method}", *COLUMNS[place]} <= {*each["arguments"]} and each["epochs"] == epochs
            ]
            told = re.findall(r"\d+\.\d+", cell)
            checked += len(told)
            assert told == found, f"{method}: {cell!r} in README.md, {found} in results/"
    assert checked >= 10
