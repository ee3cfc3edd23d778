"""NeighborVote in a plain PyTorch loop: an averaged network as teacher, and two views."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nearsay
from nearsay.losses import NCRLoss, NeighborVote

NUM, CLASSES, FEATURES, EPOCHS, BATCH = 2048, 4, 64, 20, 128


class Network(nn.Module):
    """What a user has already: a body that makes features, and a classifier on top."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES), nn.ReLU()
        )
        self.classifier = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> nearsay.Outputs:
        """Features and logits."""
        features = self.body(inputs)
        return nearsay.Outputs(features, self.classifier(features))


def make_data() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, their classes, and labels of which three in ten are of another class."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(NUM) % CLASSES
    inputs = 3 * torch.eye(CLASSES, 16)[classes] + torch.randn(NUM, 16, generator=generator)
    shifts = torch.randint(1, CLASSES, (NUM,), generator=generator)
    is_wrong = torch.rand(NUM, generator=generator) < 0.3
    return inputs, classes, (classes + shifts * is_wrong) % CLASSES


def main() -> float:
    """Train, print how many labels are replaced, and return the accuracy on the true classes."""
    torch.manual_seed(0)
    inputs, classes, labels = make_data()
    student = Network()
    teacher = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.Adam(student.parameters())
    loss = NCRLoss(objective=NeighborVote(start_epoch=2), num_examples=NUM)
    mixup = nearsay.Mixup(views="first")
    for epoch in range(EPOCHS):
        loss.set_epoch(epoch)
        for indices in torch.randperm(NUM).split(BATCH):
            weak = inputs[indices] + 0.1 * torch.randn(len(indices), 16)
            strong = inputs[indices] + 0.5 * torch.randn(len(indices), 16)
            targets = nearsay.one_hot(labels[indices], CLASSES)
            batch = nearsay.Batch(
                inputs=torch.cat([weak, strong]),
                targets=targets.repeat(2, 1),
                indices=indices.repeat(2),
                views=2,
            )
            # The teacher sees the weak view before mixup. Its rows stand for both views.
            with torch.no_grad():
                features, logits = teacher(weak)
            outputs = nearsay.Outputs(features.repeat(2, 1), logits.repeat(2, 1))
            batch = mixup(replace(batch, teacher=outputs), seed=0, epoch=epoch)
            features, logits = student(batch.inputs)
            total = loss(logits, features, batch)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            teacher.update_parameters(student)
    # The labels as they vote now. The last row of the table belongs to no example.
    voted = loss.state["labels"][:NUM].argmax(dim=1)
    accuracy = (teacher(inputs).logits.argmax(dim=1) == classes).float().mean().item()
    before = (labels != classes).float().mean().item()
    after = (voted != classes).float().mean().item()
    print(f"wrong labels: {before:.1%} before, {after:.1%} now; teacher: {accuracy:.1%} right")
    return accuracy


if __name__ == "__main__":
    main()
