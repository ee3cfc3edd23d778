"""Eq. 3 and 4 of the paper as scalar loops, in plain Python floats."""

import math

from oracles import softmax


def cosine(left, right):
    product = math.fsum(x * y for x, y in zip(left, right, strict=True))
    lengths = math.sqrt(math.fsum(x * x for x in left)) * math.sqrt(math.fsum(y * y for y in right))
    return product / lengths if lengths > 0 else 0.0


def neighbors(row, keys, k):
    """[(similarity, key)] of the k nearest keys, without self, padding and mixup partners."""
    candidates = []
    for key in keys:
        is_self = key["index"] == row["index"]
        is_partner = row.get("partner") is not None and (
            key["index"] == row["partner"] or key.get("partner") == row["index"]
        )
        if is_self or is_partner or key["index"] == -1:
            continue
        similarity = cosine(row["features"], key["features"])
        if similarity > 0:
            candidates.append((similarity, key))
    candidates.sort(key=lambda candidate: -candidate[0])
    return candidates if k is None else candidates[:k]


def ncr(rows, pool, *, k, temperature, variant):
    """The loss of each row; rows and pool are dicts of `logits`, `features`, `index`, `partner`."""
    losses = []
    for row in rows:
        found = neighbors(row, rows + pool, k)
        if row["index"] == -1 or not found:
            losses.append(0.0)
            continue
        own = softmax([z / temperature for z in row["logits"]])
        theirs = [0.0] * len(own)
        total = math.fsum(similarity for similarity, _ in found)
        for similarity, key in found:
            for c, p in enumerate(softmax([z / temperature for z in key["logits"]])):
                theirs[c] += similarity / total * p
        if variant == "paper":
            losses.append(math.fsum(p * math.log(p / q) for p, q in zip(own, theirs, strict=True)))
        else:
            divergence = math.fsum(q * math.log(q / p) for p, q in zip(own, theirs, strict=True))
            losses.append(temperature**2 * divergence)
    return losses
