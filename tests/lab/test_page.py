import json
import statistics
from pathlib import Path

import pytest
from lab.page import main, make_page, stale_files, write_results
from lab.record import take
from lab.run_queue import BY_KEY, OWN, STAGES, Wanted, ablated, cell
from lab_runs import record

ROOT = Path(__file__).parents[2]
WORST, AGGREGATE = BY_KEY["human-worse"], BY_KEY["human-aggre"]


def page(folder, *records):
    take(records, folder, overwrite=True)
    return make_page(folder)


def lines(text, start, section=""):
    """The cells of the rows of a section that begin with `start`; by default in `short`."""
    part = text if section.startswith("## ") else text.split("## Protocol `short`\n")[1]
    part = part.split(section, 1)[1] if section else part
    rows = [line[1:-1].split("|") for line in part.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in row] for row in rows]


def outdated(made):
    """The record of a run whose recipe has changed since."""
    return {**made, "experiment": {**made["experiment"], "weight_of_old": 0.3}}


def test_the_page_of_the_project_is_up_to_date():
    assert stale_files(ROOT / "benchmarks" / "records", ROOT / "docs" / "results.md") == []


def test_without_records_every_number_of_ours_reads_not_run(tmp_path):
    row = ["`ncr+elr+`", "ours", *["not run"] * 6, "–"]
    assert lines(make_page(tmp_path), "`ncr+elr+`")[0] == row


def test_a_number_stands_in_its_cell_with_what_it_cost(tmp_path):
    text = page(tmp_path, record(cell(BY_KEY["symmetric-80"], "ncr"), 0.81236, seconds=90.0))
    row = ["`ncr`", "ours", *["not run"] * 3, "81.24", "not run", "not run", "1.5"]
    assert lines(text, "`ncr` ")[0] == row
    assert all("81.24" not in " ".join(row) for row in lines(text, "`ncr+mixup`"))


def test_protocols_are_never_mixed(tmp_path):
    short = record(cell(WORST, "ncr+mixup"), 0.80)
    usual = cell(WORST, "ncr+mixup", protocol="paper")
    other = Wanted(name="other", protocol="paper", arguments=(*usual.arguments, "k=5"))
    text = page(tmp_path, short, record(usual, 0.90), record(other, 0.91)).split("## All runs")[0]
    long, short = text.split("## Protocol `short`\n")
    assert [number in long for number in ("80.00", "90.00", "91.00")] == [False, True, True]
    assert [number in short for number in ("80.00", "90.00", "91.00")] == [True, False, False]


def test_seeds_are_a_mean_with_the_deviation_of_a_sample(tmp_path):
    finals = (0.940, 0.945, 0.959)
    runs = [cell(WORST, OWN, protocol="paper", seed=seed) for seed in range(3)]
    made = [record(runs[seed], final, seed=seed) for seed, final in enumerate(finals)]
    found = lines(page(tmp_path, *made), f"`{OWN}`", "## Protocol `paper`\n")[1]
    deviation = statistics.stdev(100 * final for final in finals)
    assert found == [f"`{OWN}`", "ours", f"94.80 ± {deviation:.2f} (n=3)", "1.0"]


def test_the_best_value_is_chosen_on_held_out_examples(tmp_path):
    made = [
        record(ablated(40, point), 0.9 - 0.01 * place, held_out=0.5 + 0.01 * place)
        for place, point in enumerate(STAGES["alpha"])
    ]
    assert lines(page(tmp_path, *made[:-1]), "40 %", "#### α")[0][-2] == "–"
    rows = lines(page(tmp_path, *made), "", "#### α")
    place = next(place for place, row in enumerate(rows) if row[0] == "40 %")
    held_out, test = rows[place], rows[place + 1]
    assert held_out[2:] == [*(f"5{place}.00" for place in range(5)), "0.9", "1.0"]
    assert test[1:7] == ["test", "90.00", "89.00", "88.00", "87.00", "86.00"]


def test_a_mean_is_of_one_form_of_a_method(tmp_path):
    runs = [cell(WORST, OWN, protocol="paper", seed=seed) for seed in range(3)]
    made = [record(run, 0.94 + 0.01 * seed, seed=seed) for seed, run in enumerate(runs)]
    text = page(tmp_path / "mixed", outdated(made[0]), *made[1:])
    assert lines(text, f"`{OWN}`", "## Protocol `paper`\n")[1][2] == "95.50 ± 0.71 (n=2)"
    text = page(tmp_path / "old", *map(outdated, made[:2]))
    assert lines(text, f"`{OWN}`", "## Protocol `paper`\n")[1][2] == "94.50 ± 0.71 (n=2)†"


def test_two_records_of_one_run_are_refused_also_from_different_machines(tmp_path):
    usual = cell(WORST, "ncr")
    arguments = tuple(reversed(usual.arguments))
    other = Wanted(
        name="other", protocol="short", arguments=arguments, overrides=("machine.device=cpu",)
    )
    with pytest.raises(ValueError, match=rf"other\.json .*{usual.name}\.json"):
        page(tmp_path, record(usual), record(other))


def test_a_variation_stands_beside_the_method_as_it_is(tmp_path):
    usual = cell(BY_KEY["symmetric-40"], "ncr")
    changes = {"arguments": usual.arguments, "overrides": ("objective.temperature=4",)}
    other = Wanted(name="other", protocol="short", **changes)
    [found] = lines(page(tmp_path, record(usual, 0.80), record(other, 0.815)), "sym", "### Variat")
    expected = ["`ncr`", "`objective.temperature=4`", "81.50", "+1.50", "–", "–", ".950", "1.0"]
    assert found[1:] == expected


def test_a_run_whose_recipe_has_changed_since_is_not_done(tmp_path):
    take([outdated(record(cell(WORST, "ncr", tier="A"))), record(cell(WORST, "elr"))], tmp_path)
    write_results(tmp_path, tmp_path / "page.md")
    rows = lines((tmp_path / "page.md").read_text(), "", "## What is done")
    assert [row[3] for row in rows[2:6]] == ["0", "0", "1", "0"]
    queue = json.loads((tmp_path / "queue.json").read_text())
    done = [each["name"] for each in queue if each["done"]]
    assert done == [cell(WORST, "elr").name]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("found.md", b"\xff\xfe"),
        ("choices.md", b"\xff\xfe"),
        ("found.md", b"{paper-human-worse-unknown final}"),
        ("damaged.json", b"{"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_no_page_is_written(
    tmp_path, capsys, name, content
):
    take([record(cell(WORST, "ncr"))], tmp_path)
    (tmp_path / name).write_bytes(content)
    assert main(["--records", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 65
    assert str(tmp_path / name) in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_the_command_writes_page_and_queue_and_checks_them(tmp_path):
    folder, out = tmp_path / "records", tmp_path / "docs" / "page.md"
    take([record(cell(WORST, "ncr"))], folder)
    words = ["--records", str(folder), "--out", str(out)]
    assert main([*words, "--check"]) == 65
    assert not out.exists()
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    assert (folder / "queue.json").read_text().count('"done": true') == 1
    assert out.read_text() == make_page(folder)
    take([record(cell(WORST, "mixup"))], folder)
    assert {path.name for path in stale_files(folder, out)} == {"page.md", "queue.json"}
    out.write_bytes(b"\xff\xfe")  # not even a text
    assert write_results(folder, out) == [out, folder / "queue.json"]


@pytest.mark.parametrize(("name", "more"), [("empty", []), ("missing", ["--check"])])
def test_without_records_the_page_that_is_there_stays(tmp_path, capsys, name, more):
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.md").write_text("The page of other records.\n")
    assert (
        main(["--records", str(tmp_path / name), "--out", str(tmp_path / "page.md"), *more]) == 65
    )
    assert str(tmp_path / name) in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == "The page of other records.\n"
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_record_that_the_queue_has_otherwise_stops_the_page(tmp_path):
    usual = cell(WORST, "ncr")
    take(
        [record(Wanted(name=usual.name, protocol="short", arguments=(*usual.arguments, "k=5")))],
        tmp_path,
    )
    with pytest.raises(ValueError, match=usual.name):
        make_page(tmp_path)
