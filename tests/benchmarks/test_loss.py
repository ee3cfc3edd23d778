import json
import sys

import loss as benchmark
import pytest
import torch


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs it with sizes that take no time, in a folder of its own."""

    def measure(m, d, c, k, device, budget):
        times = {"ours_ms": 1.0, "released_ms": 2.0, "matmul_ms": 0.5}
        memory = {"ours_bytes": 10.0 * m, "released_bytes": 40.0 * m}
        return {"m": m, "d": d, "c": c, "k": k, **times, **memory}

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["loss.py", *map(str, words)])
        benchmark.main()
        return sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json"))

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "loss.py"))
    return run


def strict(path):
    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_the_whole_grid_is_written_to_its_place(call, tmp_path):
    assert call() == ["results/loss-cpu.json"]
    found = strict(tmp_path / "results" / "loss-cpu.json")
    assert len(found["rows"]) == len({*benchmark.CPU_GRID, *benchmark.PAPER_SIZES.values()})
    assert found["summary"]["slowest_ratio_from_1024"] == 2.0


def test_a_part_of_the_grid_is_written_only_where_it_is_told_to(call, tmp_path, capsys):
    assert call("--only", 128) == []
    assert "Wrote nothing" in capsys.readouterr().out
    assert call("--only", 128, "--out", tmp_path / "part.json") == ["part.json"]
    summary = strict(tmp_path / "part.json")["summary"]
    assert summary["slowest_ratio"] == 2.0
    assert "slowest_ratio_from_1024" not in summary


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "cuda"], "--device"),
        (["--only", "7"], "--only"),
        (["--out", "loss.py/new.json"], "--out loss.py/new.json"),
    ],
)
def test_what_cannot_be_measured_or_written_is_told_before_anything_is(
    call, tmp_path, monkeypatch, capsys, words, told
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").touch()
    with pytest.raises(SystemExit, match="2"):
        call(*words)
    assert told in capsys.readouterr().err.splitlines()[-1]
