"""The equations as scalar loops, in plain Python floats: what the tensors must agree with."""

import math


def softmax(logits):
    largest = max(logits)
    exponentials = [math.exp(logit - largest) for logit in logits]
    return [value / math.fsum(exponentials) for value in exponentials]


def entropy(probabilities):
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)


def cross_entropy_of(probabilities, target):
    return -math.fsum(y * math.log(p) for p, y in zip(probabilities, target, strict=True))


def weighted_mean(rows, weights):
    return math.fsum(rows) / math.fsum(weights) if math.fsum(weights) > 0 else 0.0


def cross_entropy(logits, targets, smoothing):
    """Label smoothing: (1 − α)·ℓ(σ(z), y) + α·weight·ℓ(σ(z), 1/C)."""
    rows = []
    for row, target in zip(logits, targets, strict=True):
        uniform = [math.fsum(target) / len(row)] * len(row)
        given, smooth = (
            cross_entropy_of(softmax(row), target),
            cross_entropy_of(softmax(row), uniform),
        )
        rows.append((1 - smoothing) * given + smoothing * smooth)
    return rows


def bootstrap(logits, targets, alpha, kind, temperature):
    """(1 − α)·ℓ(σ(z), y) + α·ℓ(σ(z), σ_B(z)), the second times the weight of the label."""
    rows = []
    for row, target in zip(logits, targets, strict=True):
        if kind == "soft":
            own = softmax([logit / temperature for logit in row])
        else:
            own = [1.0 if c == row.index(max(row)) else 0.0 for c in range(len(row))]
        given, bootstrapped = (
            cross_entropy_of(softmax(row), target),
            cross_entropy_of(softmax(row), own),
        )
        rows.append((1 - alpha) * given + alpha * math.fsum(target) * bootstrapped)
    return rows


def clamped_softmax(logits):
    return [min(max(p, 1e-4), 1 - 1e-4) for p in softmax(logits)]


def elr(logits, averages):
    """log(1 − ⟨t, p⟩)."""
    return [
        math.log(1 - math.fsum(t * p for t, p in zip(average, clamped_softmax(row), strict=True)))
        for row, average in zip(logits, averages, strict=True)
    ]


def elr_update(averages, logits, indices, beta):
    """t ← β·t + (1 − β)·p / Σp by the first row of each index; −1 is padding."""
    averages, seen = [list(average) for average in averages], set()
    for row, index in zip(logits, indices, strict=True):
        if index != -1 and index not in seen:
            seen.add(index)
            p = clamped_softmax(row)
            for c in range(len(p)):
                averages[index][c] = beta * averages[index][c] + (1 - beta) * p[c] / math.fsum(p)
    return averages


def gjs(logits, targets, label_weight):
    """(H(Σ π p) − Σ π H(p)) / Z of label and views, from the definition; logits[v][i][c].

    Returns the rows of the part with the label, times its weight, and of the part without.
    """
    num_views, share = len(logits), (1 - label_weight) / len(logits)
    scale = -(1 - label_weight) * math.log(1 - label_weight)
    supervised, consistency = [], []
    for i, target in enumerate(targets):
        weight = math.fsum(target)
        label = [y / weight for y in target] if weight else target
        views = [softmax(logits[v][i]) for v in range(num_views)]
        mean = [math.fsum(view[c] for view in views) / num_views for c in range(len(target))]
        mixture = [
            label_weight * label[c] + math.fsum(share * view[c] for view in views)
            for c in range(len(target))
        ]
        whole = (
            entropy(mixture)
            - label_weight * entropy(label)
            - math.fsum(share * entropy(view) for view in views)
        )
        among_views = (1 - label_weight) * (
            entropy(mean) - math.fsum(map(entropy, views)) / num_views
        )
        supervised.append(weight * (whole - among_views) / scale)
        consistency.append(among_views / scale)
    return supervised, consistency
