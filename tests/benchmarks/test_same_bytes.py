import sys

import numpy as np
import pytest
import same_bytes as benchmark
import torch

VERSIONS = {"torch": "2", "numpy": "2"}


def both(capsys, before, after):
    code = benchmark.compare(
        {"versions": VERSIONS, "sha256": {"run: weights": before}},
        {"versions": VERSIONS, "sha256": {"run: weights": after}},
    )
    return code, capsys.readouterr().out


def test_equal_hashes_are_the_same(capsys):
    code, told = both(capsys, {"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    assert code == 0
    assert told.splitlines() == [
        "what         | same",
        "run: weights | yes, 2",
        "all 1 are the same",
    ]


def test_another_hash_differs_and_is_named(capsys):
    code, told = both(capsys, {"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    assert code == 1
    assert "run: weights | NO, of 2: 1 differ: b" in told


@pytest.mark.parametrize(
    ("before", "after"), [({"a": "1", "b": "2"}, {"a": "1"}), ({"a": "1"}, {"a": "1", "b": "2"})]
)
def test_what_only_one_record_has_differs(capsys, before, after):
    assert both(capsys, before, after)[0] == 1
    assert not benchmark.judge({}, {"a": "1"})[0]


def test_the_same_bytes_under_another_name_are_the_same_once(capsys):
    code, told = both(capsys, {"strange": "1"}, {"relational": "1"})
    assert code == 0
    assert "strange -> relational" in told
    assert not benchmark.judge({"a": "1", "b": "1"}, {"c": "1"})[0]


def test_two_empty_records_are_not_taken_for_the_same():
    empty = {"versions": VERSIONS, "sha256": {}}
    assert benchmark.compare(empty, empty) == 1


def test_a_hash_is_of_values_type_and_shape():
    values = np.arange(4, dtype=np.float32)
    others = [values + 1, values.astype(np.float64), values.reshape(2, 2), values[::-1]]
    assert len({benchmark.hash_array(array) for array in (values, *others)}) == 5
    assert benchmark.hash_array(values.copy()) == benchmark.hash_array(values)


def test_the_log_is_compared_by_columns_without_times():
    log = (
        '{"epoch": 1.0, "loss": 0.1, "seconds": 3}\n{"epoch": 2.0, "loss": 0.2, "accuracy": 0.5}\n'
    )
    hashes = benchmark.hash_log(log)
    assert hashes.keys() == {"epoch", "loss", "accuracy"}
    changed = benchmark.hash_log(log.replace("0.2", "0.20000000000000004"))
    assert [name for name in hashes if hashes[name] != changed[name]] == ["loss"]


def test_numbers_of_json_are_compared_and_names_and_texts_are_not():
    tree = {
        "pairs": [{"given": "cat", "share": 0.5}],
        "doubt": "text",
        "versions": {"torch": 2},
        "none": None,
    }
    hashes = benchmark.hash_numbers(tree)
    assert hashes.keys() == {"pairs", "none"}
    assert (
        benchmark.hash_numbers({"pairs": [{"label": "dog", "part": 0.5}]})["pairs"]
        == hashes["pairs"]
    )
    assert (
        benchmark.hash_numbers({"pairs": [{"given": "cat", "share": 0.25}]})["pairs"]
        != hashes["pairs"]
    )


def test_a_table_is_compared_below_its_header():
    hashes = benchmark.hash_table(b'index,name\n0,"a\nb"\n1,c\n')
    renamed = benchmark.hash_table(b'index,title\n0,"a\nb"\n1,c\n')
    assert sorted(hashes.values()) == sorted(renamed.values())
    assert hashes["index"] == benchmark.hash_table(b"index,name\n0,d\n1,c\n")["index"]
    assert hashes["name"] != benchmark.hash_table(b"index,name\n0,d\n1,c\n")["name"]


def test_arrays_are_found_in_tuples_and_mappings():
    found = dict(
        benchmark.hash_object({"parts": {"a": torch.ones(2)}, "rate": 0.5, "nothing": None})
    )
    assert found.keys() == {"parts.a", "rate"}
    with pytest.raises(ValueError, match="rate"):
        dict(benchmark.hash_object({"rate": object()}))


def test_a_folder_with_runs_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "ncr").mkdir()
    monkeypatch.setattr(sys, "argv", ["same_bytes.py", "--record", str(tmp_path)])
    assert benchmark.main() == 2
    assert "empty folder" in capsys.readouterr().err


def test_an_older_name_is_used_where_the_newer_is_unknown(monkeypatch):
    def nearsay(*words):
        if "method=neighbor-vote" in words:
            raise RuntimeError

    monkeypatch.setattr(benchmark, "nearsay", nearsay)
    words = benchmark.known(["digits", "method=neighbor-vote"])
    assert words == ["digits", "method=nearsay", "--device", "cpu"]
