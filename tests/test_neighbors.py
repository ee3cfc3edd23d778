import torch
from torch.testing import assert_close

from nearsay import neighbors
from nearsay.neighbors import Identity, nearest, normalize


def test_rows_of_any_size_are_normalized():
    features = torch.tensor([[3.0, 4.0], [3e30, -4e30], [3e-35, 4e-35], [0.0, 0.0], [1e-40, 0.0], [3e38, 3e38]])
    units, lengths = normalize(features)
    half = 0.5**0.5
    assert_close(units, torch.tensor([[0.6, 0.8], [0.6, -0.8], [0.6, 0.8], [0.0, 0.0], [0.0, 0.0], [half, half]]))
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
            allowed = row != column if who is None else who.queries[row] != who.keys[column] and who.keys[column] >= 0
            similarities.append(max(0.0, float(query @ key)) if allowed else 0.0)
        found.append(sorted(similarities, reverse=True)[:k])
    return torch.tensor(found, dtype=queries.dtype)


def test_nearest_agrees_with_comparing_everybody(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    queries = normalize(torch.randn(23, 4, generator=generator, dtype=torch.float64))[0]
    keys = torch.cat([queries, normalize(torch.randn(9, 4, generator=generator, dtype=torch.float64))[0]])
    indices = torch.randint(-1, 15, (32,), generator=generator)
    who = Identity(indices[:23], indices)
    for rows in (5, 256):
        monkeypatch.setitem(neighbors.CHUNK_ROWS, "cpu", rows)
        for k in (1, 3, 32, None):
            for pool, identity in ((queries, None), (keys, who)):
                similarities, positions = nearest(queries, pool, k, identity)
                assert_close(similarities.sort(descending=True).values, brute(queries, pool, k, identity))
                cosines = (queries[:, None] * pool[positions]).sum(dim=2)
                is_neighbor = similarities > 0
                assert_close(similarities[is_neighbor], cosines[is_neighbor])
