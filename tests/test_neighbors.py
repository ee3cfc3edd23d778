"""Nearest neighbors against scalar loops, and the recall of the index."""

import sys

import pytest
import torch
from label_issues.helpers import blobs
from torch.testing import assert_close

from nearsay import neighbors
from nearsay.label_issues import audit
from nearsay.neighbors import Identity, nearest, normalize


def test_rows_of_any_size_are_normalized():
    features = [[3.0, 4.0], [3e30, -4e30], [3e-35, 4e-35], [0.0, 0.0], [1e-40, 0.0], [3e38, 3e38]]
    units, lengths = normalize(torch.tensor(features))
    half = 0.5**0.5
    expected = [[0.6, 0.8], [0.6, -0.8], [0.6, 0.8], [0.0, 0.0], [0.0, 0.0], [half, half]]
    assert_close(units, torch.tensor(expected))
    assert_close(lengths[:3], torch.tensor([[5.0], [5e30], [5e-35]]))
    assert lengths[3:5].isinf().all()


def test_values_that_are_not_finite_stay_so():
    units, _ = normalize(torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [1.0, 1.0]]))
    assert units[:2].isnan().any(dim=1).all()
    assert units[2].isfinite().all()


def brute(queries, keys, k, who):
    rows = []
    for row, query in enumerate(queries):
        similarities = []
        for column, key in enumerate(keys):
            if who is None:
                is_allowed = row != column
            else:
                is_allowed = who.queries[row] != who.keys[column] and who.keys[column] >= 0
            similarities.append(max(0.0, float(query @ key)) * is_allowed)
        rows.append(sorted(similarities, reverse=True)[:k])
    return torch.tensor(rows, dtype=queries.dtype)


def test_nearest_agrees_with_scalar_loops(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    queries = normalize(torch.randn(23, 4, generator=generator, dtype=torch.float64))[0]
    keys = torch.cat(
        [queries, normalize(torch.randn(9, 4, generator=generator, dtype=torch.float64))[0]]
    )
    indices = torch.randint(-1, 15, (32,), generator=generator)
    who = Identity(indices[:23], indices)
    for rows in (5, 256):
        monkeypatch.setitem(neighbors.CHUNK_ROWS, "cpu", rows)
        for k in (1, 3, 32, None):
            for pool, identity in ((queries, None), (keys, who)):
                similarities, positions = nearest(queries, pool, k, identity)
                assert_close(
                    similarities.sort(descending=True).values, brute(queries, pool, k, identity)
                )
                cosines = (queries[:, None] * pool[positions]).sum(dim=2)
                is_neighbor = similarities > 0
                assert_close(similarities[is_neighbor], cosines[is_neighbor])


def test_lengths_and_chunks_change_no_neighbors(monkeypatch):
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    units, _ = normalize(features)
    expected = nearest(units, units, 4, None)
    monkeypatch.setattr(neighbors, "_CHUNK", 30)
    scales = torch.arange(1, 41)[:, None]
    found, recall = neighbors.nearest_others(features * scales, 4)
    assert recall is None
    assert_close(found.similarities.sort().values, expected.similarities.sort().values)
    assert torch.equal(found.positions.sort().values, expected.positions.sort().values)


def test_an_index_in_chunks_finds_nearly_all_neighbors(monkeypatch):
    pytest.importorskip("faiss")
    features = torch.randn(3000, 8, generator=torch.Generator().manual_seed(4))
    whole = neighbors.nearest_others(features, 5, approximate=True)
    monkeypatch.setattr(neighbors, "_CHUNK", 8 * 700)
    parts = neighbors.nearest_others(features.half(), 5, approximate=True)
    exact = neighbors.nearest_others(features, 5).neighbors.positions
    for (similarities, positions), recall in (whole, parts):
        hits = (exact[:, :, None] == positions[:, None]).any(dim=2).float().mean().item()
        assert recall >= 0.95
        assert abs(hits - recall) < 0.03
        is_own = positions == torch.arange(3000)[:, None]
        assert not is_own[similarities > 0].any()
    monkeypatch.setattr(neighbors, "_PROBED", (1,))
    assert neighbors.nearest_others(features, 5, approximate=True).recall < 0.8


def test_neighbors_are_the_same_under_autocast():
    # Many nearly as similar.
    features = torch.randn(300, 64, generator=torch.Generator().manual_seed(5)) + 1
    units, _ = normalize(features)
    expected = nearest(units, units, 10, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = nearest(units, units, 10, None)
    assert torch.equal(found.similarities, expected.similarities)
    assert torch.equal(found.positions, expected.positions)


def test_the_recall_counts_only_neighbors_that_exist():
    pytest.importorskip("faiss")
    # Each row has one neighbor, and all others are orthogonal.
    features = torch.eye(200).repeat(2, 1)
    (similarities, positions), recall = neighbors.nearest_others(features, 5, approximate=True)
    assert recall == 1
    assert (similarities > 0).sum(dim=1).tolist() == [1] * 400
    own = positions.gather(1, similarities.argmax(dim=1, keepdim=True))[:, 0]
    assert torch.equal(own % 200, torch.arange(400) % 200)


def test_an_audit_uses_the_index_and_reports_its_recall():
    pytest.importorskip("faiss")
    features, _, given = blobs(4000, classes=5)
    judged = audit(given, features=features, approximate=True)
    assert judged.neighbor_recall > 0.9
    assert "propagation" not in judged.parts


def test_an_index_is_used_only_for_very_many_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(neighbors, "APPROXIMATE_FROM", 50)
    features = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ImportError, match=r'pip install "\.\[audit\]"'):
        neighbors.nearest_others(features, 5)
    assert neighbors.nearest_others(features, 5, approximate=False).recall is None
    assert neighbors.nearest_others(features[:49], 5).recall is None
