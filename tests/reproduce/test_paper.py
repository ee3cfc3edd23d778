from typing import get_args

import pytest

from nearsay.recipes.methods import Method
from nearsay.reproduce import paper

CIFAR_SUMS = [463.2, 443.4, 340.3, 375.6, 241.4, 441.9, 367.0, 336.4, 255.0, 234.1, 95.5, 342.1]


@pytest.mark.parametrize(
    ("table", "sums"),
    [  # sums of the printed columns, dashes left out
        (paper.baselines, [727.1, 673.4, 603.9, 179.1, 887.8, 851.4, 802.0, 605.8]),
        (paper.realistic, [699.7, 683.3, 810.7]),
        (paper.cifar, CIFAR_SUMS),
        (paper.batch_size, [73.9, 75.0, 75.7, 75.6]),
    ],
)
def test_columns_add_up_to_what_the_paper_prints(table, sums):
    columns = zip(*(row.printed for row in table()), strict=True)
    assert [round(sum(cell.mean or 0 for cell in column), 1) for column in columns] == sums


@pytest.mark.parametrize(
    ("table", "num_rows", "num_run"),
    [(paper.baselines, 13, 10), (paper.realistic, 17, 5), (paper.cifar, 5, 3)],
)
def test_some_rows_are_run_and_all_others_have_a_source(table, num_rows, num_run):
    rows = table()
    assert len(rows) == num_rows
    assert sum(row.method is not None for row in rows) == num_run
    assert all((row.method is None) == bool(row.source) for row in rows)
    assert {row.method for row in rows} <= {None, *get_args(Method)}


def test_rows_name_the_method_that_they_are_run_with():
    methods = {row.name: row.method for row in (*paper.baselines(), *paper.cifar())}
    assert methods["Label smoothing + Mixup"] == "label-smoothing+mixup"
    assert methods["NCR + ELR+"] == "ncr+elr+"
    assert methods["Oracle: Standard"] == "oracle"
    assert methods["Oracle: Mixup"] == "oracle+mixup"


def test_a_cell_is_read_as_mean_deviation_or_nothing():
    assert paper.read_printed("72.7±0.4") == ("72.7 ± 0.4", 72.7, 0.4)
    assert paper.read_printed("76.3†") == ("76.3†", 76.3, None)
    assert paper.read_printed("--") == paper.read_printed("-") == ("–", None, None)
