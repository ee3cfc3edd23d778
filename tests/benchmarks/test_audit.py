import json
import sys

import audit as benchmark
import numpy as np
import planting
import pytest
import torch


@pytest.fixture
def tiles():
    """(12, 3, 32, 32) parts of photographs."""
    images = planting.photographs(side=32, tile=64)
    return images[:: max(1, len(images) // 12)][:12]


def test_to_review_counts_until_nine_tenths_are_found():
    is_wrong = torch.tensor([False, True, True, False, True])
    assert benchmark.to_review(torch.tensor([1, 0, 2, 3, 4]), is_wrong) == 5
    assert benchmark.to_review(torch.tensor([1, 2, 4, 0, 3]), is_wrong) == 3
    assert benchmark.to_review(torch.arange(3), torch.zeros(3, dtype=torch.bool)) == 0


def test_detection_is_perfect_where_all_wrong_ones_stand_first():
    is_wrong = torch.tensor([True, False, True, False])
    found = benchmark.detection(torch.tensor([0.1, 0.9, 0.2, 0.8]), is_wrong)
    assert found == {"auroc": 1.0, "average_precision": 1.0}
    assert benchmark.detection(torch.rand(3), torch.zeros(3, dtype=torch.bool)) is None


def test_copies_stand_at_the_end_and_kinds_take_turns(tiles):
    planted = planting.plant(tiles, 6, seed=3)
    assert len(planted.images) == 18
    assert planted.pairs == {(at, 12 + at) for at in range(6)}
    assert [planted.changes[at, 12 + at] for at in range(6)] == [*planting.CHANGES, "crop"]
    assert torch.equal(planting.plant(tiles, 6, seed=3).images, planted.images)
    assert all(not torch.equal(planted.images[at], planted.images[12 + at]) for at in range(6))


def test_found_pairs_are_planted_real_or_mistakes(tiles, monkeypatch):
    # A real duplicate, which nobody has planted: 11 and 12.
    twice = torch.cat([tiles, tiles[-1:]])
    planted = planting.plant(twice, 4, seed=3)
    found = torch.tensor([[0, 13], [1, 14], [2, 15], [11, 12], [4, 5]])
    monkeypatch.setattr(benchmark, "same_pictures", lambda thumbnails: found)
    row = benchmark.find_planted("tiles", planted)
    assert row["recall"] == pytest.approx(3 / 4)
    assert row["recall_of"] == {"crop": 1, "jpeg": 1, "resize": 1, "brightness": 0, "all": 0}
    assert (row["found"], row["others"], row["others_same_by_rule"]) == (5, 2, 1)
    assert row["precision"] == pytest.approx(4 / 5)


def test_the_independent_rule_allows_a_move_but_no_other_picture(tiles):
    wide = planting.photographs(side=40, tile=64)[0]
    images = torch.stack([wide[:, :32, :32], wide[:, 3:35, 2:34], tiles[5], 255 - tiles[5]])
    pairs = torch.tensor([[0, 1], [0, 2], [2, 3]])
    assert planting.is_same(images, pairs).tolist() == [True, False, False]


def test_foreign_kinds_take_turns_and_are_drawn_again_alike():
    images, kinds = planting.foreign(8, seed=4)
    assert kinds == [*planting.KINDS, planting.KINDS[0]]
    assert images.dtype == torch.uint8
    assert images.shape == (8, 3, 32, 32)
    assert torch.equal(planting.foreign(8, seed=4)[0], images)
    assert not torch.equal(images[0], images[7])


def test_foreign_images_are_ranked_by_kind():
    generator = torch.Generator().manual_seed(0)
    strangers = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    home = planting.photographs(side=32, tile=64)
    kinds = ["noise", "noise", "text", "text"]
    row = benchmark.rank_foreign(home, torch.arange(len(home)) % 2, strangers, kinds)
    assert row["num_images"] == len(home) + 4
    assert set(row["auroc_of"]) == {"noise", "text"}
    assert row["auroc"] == pytest.approx(sum(row["auroc_of"].values()) / 2)
    apart = benchmark._apart(torch.tensor([0.9, 0.5]), torch.tensor([0.7, 0.1]))
    assert apart == pytest.approx(0.75)


def test_features_on_disk_have_the_wished_shape_and_classes_that_overlap(tmp_path):
    clean = torch.arange(400) % 4
    rows = planting.write_features(tmp_path / "features.npy", clean, 4)
    assert isinstance(rows, np.memmap)
    assert (rows.shape, rows.dtype) == ((400, 512), np.float16)
    assert rows.min() == 0
    values = torch.from_numpy(np.array(rows)).float()
    means = torch.stack([values[clean == each].mean(dim=0) for each in range(4)])
    between = (means[0] - means[1]).norm()
    within = (values[clean == 0] - means[0]).norm(dim=1).mean()
    assert 0.1 < between / within < 0.8


def test_a_large_audit_is_timed_and_judged():
    before = torch.get_num_threads()
    row = benchmark.scale(600, 3)
    torch.set_num_threads(before)
    assert (row["num_examples"], row["num_features"], row["num_classes"]) == (600, 512, 3)
    assert row["neighbor_recall"] is None
    assert row["rate"]["true"] == pytest.approx(0.2, abs=0.05)
    assert row["auroc"] > 0.9
    assert 1 / 3 < row["neighbors_of_same_class"] < 1
    assert row["seconds"] > 0
    assert 0.1 < row["peak_gib"] < 50


def test_rows_are_written_and_runs_are_not_mixed_with_what_needs_none(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(benchmark, "scale", lambda num, classes: {"sizes": [num, classes]})
    out = tmp_path / "a folder of its own" / "rows.json"
    words = ["audit.py", "--scale", "70", "--classes", "7", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    benchmark.main()
    assert json.loads(out.read_text())["rows"] == [{"sizes": [70, 7]}]
    monkeypatch.setattr(sys, "argv", ["audit.py", "--scale", "70", "run"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--scale", "50", "--classes", "1"], 2, "--classes"),
        (["--scale", "50", "--out", "file/rows.json"], 74, "File exists"),
        (["--verified", "file", "run"], 65, "file"),
        (["--verified", "one.npz", "run"], 65, "one.npz"),
        (["--verified", "one.npy", "run"], 65, "one.npy"),
    ],
)
def test_wrong_arguments_end_in_an_error_line(tmp_path, monkeypatch, capsys, words, code, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    np.savez("one.npz", original=[1, 2])
    np.save("one.npy", [1, 2])
    monkeypatch.setattr(sys, "argv", ["audit.py", *words])
    with pytest.raises(SystemExit, match=str(code)):
        benchmark.main()
    assert part in capsys.readouterr().err.splitlines()[-1]
