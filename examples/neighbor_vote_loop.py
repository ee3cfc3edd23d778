"""The method `nearsay` in a plain PyTorch loop: averaged weights as teacher, two views, and the neighbors' vote."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nearsay

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
    """Train, print how many labels are replaced, and return the accuracy against the true classes."""
    torch.manual_seed(0)
    inputs, classes, labels = make_data()
    student = Network()
    teacher = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.Adam(student.parameters())
    objective, mixup = nearsay.NeighborVote(start_epoch=2), nearsay.Mixup(views="first")
    memory = objective.init_state(
        NUM, CLASSES, FEATURES
    )  # for every example; .to(device) each tensor on a GPU
    for epoch in range(EPOCHS):
        stage = objective.phase(epoch, memory)
        for indices in torch.randperm(NUM).split(BATCH):
            weak, strong = (
                inputs[indices] + size * torch.randn(len(indices), 16) for size in (0.1, 0.5)
            )
            targets = nearsay.one_hot(labels[indices], CLASSES)
            batch = nearsay.Batch(
                inputs=torch.cat([weak, strong]),
                targets=targets.repeat(2, 1),
                indices=indices.repeat(2),
                views=2,
            )
            with torch.no_grad():
                seen = teacher(weak)  # before mixup; its rows stand for both views
            batch = replace(batch, teacher=nearsay.Outputs(*(part.repeat(2, 1) for part in seen)))
            batch = mixup(batch, seed=0, epoch=epoch)
            loss = objective(
                student(batch.inputs), batch, torch.tensor(float(epoch)), memory, stage
            )
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
            teacher.update_parameters(student)
    voted = memory["labels"][:NUM].argmax(
        dim=1
    )  # the labels as they vote now: the last row is nobody's
    accuracy = (teacher(inputs).logits.argmax(dim=1) == classes).float().mean().item()
    before, after = ((each != classes).float().mean().item() for each in (labels, voted))
    print(
        f"wrong labels: {before:.1%} before, {after:.1%} now; the teacher is right on {accuracy:.1%} of the examples"
    )
    return accuracy


if __name__ == "__main__":
    main()
