"""The page that says what of the paper is where is made of the plans themselves: `python tests/test_coverage.py`."""

import re
import sys
from pathlib import Path

from nearsay.reproduce import NAMES
from nearsay.reproduce.cells import Cell
from nearsay.reproduce.plans import TABLES, plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"
RUNNING = "tests/reproduce/test_running.py"
TITLES = {
    "baselines": "Table: baselines and oracles, mini-ImageNet Blue and Red",
    "realistic": "Table: realistic noise, mini-WebVision, WebVision, Clothing1M",
    "cifar": "Table: CIFAR-10 and CIFAR-100",
    "batch-size": "Table: batch size, WebVision (supplement)",
    "ablation": "Figure: alpha, k and e, CIFAR-10",
    "confidence": "Figure: confidence in right and wrong labels",
    "similarity": "Figure: similarity of same and different labels",
}
SETTINGS = {
    "mini_imagenet": "test_mini_imagenet_has_a_column_of_the_table_for_each_noise_rate",
    "webvision": "test_webvision_is_a_cosine_classifier_and_batches_as_large_as_there_are_classes",
    "clothing1m": "test_clothing1m_fine_tunes_on_a_thousand_balanced_batches_an_epoch",
    "cifar10": "test_network_and_optimizer_are_as_printed",
    "cifar100": "test_network_and_optimizer_are_as_printed",
}
TRAINED = {
    "baselines": "test_every_method_of_the_baselines_is_trained_and_printed",
    "realistic": "test_every_other_table_is_printed",
    "cifar": "test_every_other_table_is_printed",
    "batch-size": "test_every_other_table_is_printed",
    "ablation": "test_the_ablation_goes_on_with_what_it_found_best",
    "confidence": "test_figures_are_drawn_from_the_runs_of_the_table",
    "similarity": "test_figures_are_drawn_from_the_runs_of_the_table",
}
BEYOND = [
    ("ELR, one network", "cifar10", "nearsay train cifar10 path=data method=elr protocol=elr",
     "tests/recipes/test_paper.py", "test_the_protocol_of_elr_is_that_of_its_public_code"),
    ("NCR + ELR, one network", "cifar10", "nearsay train cifar10 path=data method=ncr+elr",
     "tests/recipes/test_paper.py", "test_other_methods_of_one_network_are_trained_as_elr_is"),
    ("GJS", "cifar10", "nearsay train cifar10 path=data method=gjs",
     "tests/recipes/test_recipes.py", "test_every_recipe_takes_every_method"),
    ("Label propagation (Eq. 2)", "any recipe", "method=label-propagation",
     "tests/training/test_paper_choices.py", "test_labels_are_propagated_halfway_and_learned"),
    ("Label propagation of a finished run", "any run",
     "nearsay propagate RUN; nearsay train RECIPE --set relabeled=RUN/propagated.npz",
     "tests/cli/test_paper.py", "test_labels_are_propagated_and_learned"),
    ("Few labels (outlook of the paper)", "any recipe", "--set labeled=0.1",
     "tests/training/test_paper_choices.py", "test_training_with_few_labels_learns"),
    ("Held-out set for choosing", "mini-ImageNet", "nearsay train mini_imagenet path=data held_out_set=true",
     "tests/data/test_mini_imagenet.py", ""),
    ("ILSVRC-2012 validation images", "mini-WebVision", "nearsay train webvision path=data imagenet=ILSVRC",
     "tests/training/test_paper_choices.py", "test_a_second_test_split_is_judged_as_well"),
    ("One draw of noise per network (the leak)", "cifar10",
     "nearsay train cifar10 path=data method=ncr+elr+ noise_per_network=true",
     "tests/training/test_paper_choices.py", "test_other_noise_changes_the_second_network_and_only_by_its_teaching_the_first"),
    ("Start of NCR without choosing e", "any recipe", "--set objective.start_epoch=auto",
     "tests/losses/test_neighborhood.py", "test_the_start_is_where_agreement_stops_to_rise"),
    ("Open-set rejection", "any recipe", "--set objective.reject=0.1",
     "tests/losses/test_neighborhood.py", "test_far_and_undecided_rows_lose_their_label"),
]  # fmt: skip


def page() -> str:
    lines = [
        "# What of the paper is where",
        "",
        "Every table and figure of the paper, every method in it and every data set it is run on: the command, and the",
        "tests. `nearsay reproduce NAME --data DIR` trains what a table or figure needs and writes it with the paper's",
        "numbers beside ours; `--data toy` does the same on stand-ins that need no file, cell by cell in",
        f"`test_every_cell_runs_on_stand_ins` ({RUNNING}, slow). This page is made by `python tests/test_coverage.py`.",
        "",
    ]
    for name in NAMES:
        lines += [f"## {TITLES[name]}", "", f"`nearsay reproduce {name} --data data`", ""]
        lines += [
            "| row | data | one run of it | settings tested by | trained by |",
            "|---|---|---|---|---|",
        ]
        lines += [cell_line(name, cell) for cell in plan(name, Path("data"), 1)]
        quoted = (
            [row.name for row in TABLES[name].rows if row.method is None] if name in TABLES else []
        )
        if quoted:
            lines += ["", f"Quoted from the paper, not run: {', '.join(quoted)}."]
        if name == "ablation":
            lines += [
                "",
                "The runs over k and e follow once the best alpha, and then the best k, are known.",
            ]
        lines += [""]
    lines += [
        "## Beside the tables",
        "",
        "| what | data | command | tested by |",
        "|---|---|---|---|",
    ]
    for what, data, command, path, test in BEYOND:
        tested = f"`{test}`" if test else f"[{Path(path).name}](../{path})"
        commands = ", then ".join(f"`{each}`" for each in command.split("; "))
        lines.append(f"| {what} | {data} | {commands} | {tested} |")
    return "\n".join([*lines, ""])


def cell_line(name: str, cell: Cell) -> str:
    words = [
        "nearsay train",
        cell.recipe,
        "path=data",
        *cell.arguments,
        *(f"--set {each}" for each in cell.overrides),
    ]
    return f"| {cell.row} | {cell.column} | `{' '.join(words)}` | `{SETTINGS[cell.recipe]}` | `{TRAINED[name]}` |"


def test_the_page_is_what_the_plans_say():
    assert PAGE.read_text("utf-8") == page(), "run python tests/test_coverage.py"


def test_no_cell_is_empty_and_every_test_exists():
    text = PAGE.read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 150
    assert not [row for row in rows if re.search(r"\|\s*\|", row)]
    known = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert {each for each in named if f"def {each}(" not in known} == set()
    linked = re.findall(r"\]\(\.\./(tests/[^)]+)\)", text)
    assert all((ROOT / path).is_file() for path in linked)


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE.write_text(page(), 'utf-8')} characters\n")
