import importlib.util

import pytest
import torch
from torch.testing import assert_close

from nearsay import neighbors
from nearsay.neighbors import Identity, nearest, normalize


def test_rows_of_any_size_are_normalized():
    features = torch.tensor(
        [[3.0, 4.0], [3e30, -4e30], [3e-35, 4e-35], [0.0, 0.0], [1e-40, 0.0], [3e38, 3e38]]
    )
    units, lengths = normalize(features)
    half = 0.5**0.5
    assert_close(
        units,
        torch.tensor([[0.6, 0.8], [0.6, -0.8], [0.6, 0.8], [0.0, 0.0], [0.0, 0.0], [half, half]]),
    )
    assert_close(lengths[:3], torch.tensor([[5.0], [5e30], [5e-35]]))
    assert lengths[3:5].isinf().all()


def test_what_is_not_finite_is_not_normalized_away():
    units, _ = normalize(torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [1.0, 1.0]]))
    assert units[:2].isnan().any(dim=1).all()
    assert units[2].isfinite().all()


def brute(queries, keys, k, who):
    found = []
    for row, query in enumerate(queries):
        similarities = []
        for column, key in enumerate(keys):
            allowed = (
                row != column
                if who is None
                else who.queries[row] != who.keys[column] and who.keys[column] >= 0
            )
            similarities.append(max(0.0, float(query @ key)) if allowed else 0.0)
        found.append(sorted(similarities, reverse=True)[:k])
    return torch.tensor(found, dtype=queries.dtype)


def test_nearest_agrees_with_comparing_everybody(monkeypatch):
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


def test_others_are_found_whatever_the_lengths_and_however_many_at_a_time(monkeypatch):
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    units, _ = normalize(features)
    expected = nearest(units, units, 4, None)
    monkeypatch.setattr(neighbors, "_HELD", 30)
    scales = torch.arange(1, 41)[:, None]
    found, recall = neighbors.nearest_others(features * scales, 4)
    assert recall is None
    assert_close(found.similarities.sort().values, expected.similarities.sort().values)
    assert torch.equal(found.positions.sort().values, expected.positions.sort().values)


@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is an extra")
def test_an_index_that_is_fed_in_parts_looks_far_enough(monkeypatch):
    features = torch.randn(3000, 8, generator=torch.Generator().manual_seed(4))
    whole = neighbors.nearest_others(features, 5, approximate=True)
    monkeypatch.setattr(neighbors, "_HELD", 8 * 700)
    parts = neighbors.nearest_others(features.half(), 5, approximate=True)
    exact = neighbors.nearest_others(features, 5).neighbors.positions
    for found in (whole, parts):
        hits = (
            (exact[:, :, None] == found.neighbors.positions[:, None])
            .any(dim=2)
            .float()
            .mean()
            .item()
        )
        assert found.recall >= 0.95
        assert abs(hits - found.recall) < 0.03
    monkeypatch.setattr(neighbors, "_PROBED", (1,))
    assert neighbors.nearest_others(features, 5, approximate=True).recall < 0.8


def test_neighbors_are_the_same_under_autocast():
    features = (
        torch.randn(300, 64, generator=torch.Generator().manual_seed(5)) + 1
    )  # many nearly as similar
    units, _ = normalize(features)
    expected = nearest(units, units, 10, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = nearest(units, units, 10, None)
    assert torch.equal(found.similarities, expected.similarities)
    assert torch.equal(found.positions, expected.positions)
