"""NCRLoss in a plain loop, with features and with head=, and what it says to wrong input."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import nearsay

torch.manual_seed(0)
inputs, truth = map(torch.as_tensor, load_digits(return_X_y=True))
inputs = inputs.float() / 16
is_redrawn = torch.rand(len(truth)) < 0.4
labels = torch.where(is_redrawn, torch.randint(10, (len(truth),)), truth)
train, test = slice(0, 1400), slice(1400, None)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return (model(inputs[test]).argmax(dim=1) == truth[test]).float().mean().item()


# With features.
model = network()
body, classifier = model[:2], model[2]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss = nearsay.NCRLoss(k=10, alpha=0.7)
for epoch in range(15):
    loss.set_epoch(epoch)
    for rows in torch.randperm(1400).split(128):
        features = body(inputs[rows])
        total = loss(classifier(features), features, labels[rows], rows)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
assert accuracy(model) > 0.7, accuracy(model)

# With head=.
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss = nearsay.NCRLoss(k=10, alpha=0.7, head=model[2])
for _ in range(15):
    for rows in torch.randperm(1400).split(128):
        total = loss(model(inputs[rows]), labels[rows])
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
assert accuracy(model) > 0.7, accuracy(model)

# Wrong input: a ValueError or TypeError that names the argument.
logits, features, few = torch.zeros(8, 10), torch.zeros(8, 64), labels[:8]
wrong = {
    "features": lambda: nearsay.NCRLoss()(logits, few),
    "labels": lambda: nearsay.NCRLoss()(logits, features, few[:7]),
    "class numbers": lambda: nearsay.NCRLoss()(logits, features, few.float()),
    "logits": lambda: nearsay.NCRLoss()(logits[:, 0], features, few),
    "base": lambda: nearsay.NCRLoss(base=nearsay.ELR),
    "indices": lambda: nearsay.NCRLoss(bank=nearsay.Bank(size=16))(logits, features, few),
    "head": lambda: nearsay.NCRLoss(head=model),
    "one loss per row": lambda: nearsay.NCRLoss(base=nn.CrossEntropyLoss())(logits, features, few),
}
for words, call in wrong.items():
    try:
        call()
    except (ValueError, TypeError) as error:
        message = str(error)
    else:
        raise AssertionError(f"nothing was said about {words}")
    assert words in message, f"{words}: {message}"
print("loop: fine")
