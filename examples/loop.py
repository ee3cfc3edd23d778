"""NCR in a plain PyTorch loop: a body that makes features, a classifier, one more term."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nearsay


def setup() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, DataLoader]:
    """What a user has already; here four classes with every third label drawn at random."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.arange(512)
    inputs = 3 * torch.eye(4, 16)[indices % 4] + torch.randn(512, 16, generator=generator)
    labels = torch.where(
        indices % 3 == 0, torch.randint(4, (512,), generator=generator), indices % 4
    )
    loader = DataLoader(
        TensorDataset(inputs, labels, indices), batch_size=128, shuffle=True, generator=generator
    )
    body, classifier = nn.Sequential(nn.Linear(16, 64), nn.ReLU()), nn.Linear(64, 4)
    optimizer = torch.optim.Adam([*body.parameters(), *classifier.parameters()])
    return body, classifier, optimizer, loader


def main() -> None:
    """Train for a few epochs and print the two terms."""
    body, classifier, optimizer, loader = setup()
    for epoch in range(5):
        for inputs, labels, indices in loader:  # indices: which example of the data set each row is
            features = body(inputs)  # (B, D), what enters the classifier
            logits = classifier(features)  # (B, C)
            supervised = torch.nn.functional.cross_entropy(logits, labels)
            consistency = nearsay.ncr(logits, features, indices, k=10)
            loss = 0.1 * supervised + 0.9 * consistency  # paper Eq. 4 with alpha = 0.9
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        terms = (
            f"cross-entropy {supervised.item():.3f}, neighbor consistency {consistency.item():.4f}"
        )
        print(f"epoch {epoch}: {terms}")


if __name__ == "__main__":
    main()
