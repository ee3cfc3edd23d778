"""NCR under the Trainer of Lightning: loss, epochs, log, checkpoints, and accuracy."""

from statistics import mean

import pytest
import torch
from integrations.noisy_digits import OBJECTIVE, as_dataset, noisy_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import DataLoader, Subset

import nearsay
from nearsay.losses import NCR, NCRLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step` but have no `val_dataloader`"
    ),
    pytest.mark.filterwarnings(
        "ignore:.*LeafSpec.* is deprecated"
    ),  # Lightning 2.6 beside torch 2.15
]


@pytest.fixture
def lightning(for_lightning):
    return pytest.importorskip("lightning")


def make_module(lightning, *, criterion, seed=0, lr=0.01):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            head = nn.Linear(256, 10)
            self.network = nn.Sequential(nn.Flatten(), nn.Linear(192, 256), nn.ReLU(), head)
            self.criterion = criterion(head)
            self.seen = []

        def training_step(self, batch, _):
            images, labels, indices = batch
            logits = self.network(images)
            if not isinstance(self.criterion, NCRLoss):
                return self.criterion(logits, labels)
            loss = self.criterion(logits, labels, indices)
            self.seen.append(
                (self.current_epoch, loss.item(), *map(float, self.criterion.terms.values()))
            )
            return loss

        def validation_step(self, batch, _):
            images, labels, _ = batch
            self.log("validation", self.criterion(self.network(images), labels))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=lr)

    return Module()


def make_trainer(lightning, tmp_path, **choices):
    return lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **choices,
    )  # fmt: skip


def loader_of(data, *, seed=0, num=None, batch_size=256):
    dataset = as_dataset(data) if num is None else Subset(as_dataset(data), range(num))
    return DataLoader(
        dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )


def test_a_step_is_that_of_the_functions(lightning, for_lightning, tmp_path):
    data = noisy_digits(0)
    module = make_module(lightning, criterion=lambda head: NCRLoss(head=head, objective=OBJECTIVE))
    images, labels = data.images[:100], data.labels[:100]
    features = module.network[:3](images)
    logits = module.network[3](features)
    wanted = 0.1 * cross_entropy(logits, labels) + 0.9 * nearsay.ncr(logits, features, k=10)
    gradients = torch.autograd.grad(wanted, list(module.network.parameters()))
    batches = DataLoader(Subset(as_dataset(data), range(100)), batch_size=100)
    make_trainer(lightning, tmp_path, max_steps=1, callbacks=[for_lightning.NCRCallback()]).fit(
        module, batches
    )
    [(_, found, *_)] = module.seen
    assert found == pytest.approx(wanted.item(), abs=1e-6)
    assert_close(
        [part.grad for part in module.network.parameters()], list(gradients), rtol=1e-4, atol=1e-6
    )


def test_the_callback_keeps_the_start_and_logs_the_terms(lightning, for_lightning, tmp_path):
    data = noisy_digits(0)
    objective = NCR(alpha=0.9, k=10, start_epoch=2)
    module = make_module(lightning, criterion=lambda head: NCRLoss(head=head, objective=objective))
    trainer = make_trainer(
        lightning, tmp_path, max_epochs=4, callbacks=[for_lightning.NCRCallback()]
    )
    trainer.fit(
        module,
        loader_of(data, num=200, batch_size=100),
        DataLoader(Subset(as_dataset(data), range(50)), 50),
    )
    assert [(epoch, len(terms)) for epoch, _, *terms in module.seen] == [
        (0, 1), (0, 1), (1, 1), (1, 1), (2, 3), (2, 3), (3, 3), (3, 3),
    ]  # fmt: skip
    logged = trainer.callback_metrics
    last = [seen for seen in module.seen if seen[0] == 3]
    assert float(logged["train/cross_entropy"]) == pytest.approx(
        mean(seen[2] for seen in last), rel=1e-5
    )
    assert float(logged["train/ncr"]) == pytest.approx(mean(seen[3] for seen in last), rel=1e-5)
    with torch.no_grad():  # nothing of the neighbors is in the loss of a validation
        images, labels, _ = (
            torch.stack(parts) for parts in zip(*Subset(as_dataset(data), range(50)), strict=True)
        )
        assert float(logged["validation"]) == pytest.approx(
            float(cross_entropy(module.network(images), labels))
        )


def test_two_criteria_are_logged_apart(lightning, for_lightning, tmp_path):
    data = noisy_digits(0)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.networks = nn.ModuleList(
                nn.Sequential(nn.Flatten(), nn.Linear(192, 10)) for _ in range(2)
            )
            self.first, self.second = (
                NCRLoss(head=each[1], objective=OBJECTIVE) for each in self.networks
            )

        def training_step(self, batch, _):
            images, labels, _ = batch
            return self.first(self.networks[0](images), labels) + self.second(
                self.networks[1](images), labels
            )

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    trainer = make_trainer(
        lightning, tmp_path, max_epochs=1, callbacks=[for_lightning.NCRCallback()]
    )
    trainer.fit(module, loader_of(data, num=100, batch_size=100))
    for name, criterion in (("first", module.first), ("second", module.second)):
        for term, value in criterion.terms.items():
            assert_close(trainer.callback_metrics[f"train/{name}/{term}"], value)
    assert "train/ncr" not in trainer.callback_metrics


@pytest.mark.parametrize("choices", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_accumulation_and_mixed_precision_train(lightning, for_lightning, tmp_path, choices):
    data = noisy_digits(0)
    module = make_module(lightning, criterion=lambda head: NCRLoss(head=head, objective=OBJECTIVE))
    before = [part.detach().clone() for part in module.network.parameters()]
    trainer = make_trainer(
        lightning, tmp_path, max_epochs=1, callbacks=[for_lightning.NCRCallback()], **choices
    )
    trainer.fit(module, loader_of(data, num=230, batch_size=100))  # the last batch is short
    assert len(module.seen) == 3
    assert all(0 < seen[3] < 5 for seen in module.seen)
    assert all(
        (new != old).any() for new, old in zip(module.network.parameters(), before, strict=True)
    )


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty", "ignore:.*resuming from a checkpoint"
)
def test_a_training_that_is_resumed_inside_an_epoch_knows_which_it_is(
    lightning, for_lightning, tmp_path
):
    data, objective = noisy_digits(0), NCR(alpha=0.9, k=10, start_epoch=1)
    saved = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1
    )
    for path, epochs in ((None, [0, 0, 1, 1, 2, 2]), (tmp_path / "epoch=1-step=3.ckpt", [1, 2, 2])):
        module = make_module(
            lightning, criterion=lambda head: NCRLoss(head=head, objective=objective)
        )
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path, max_epochs=3, callbacks=[for_lightning.NCRCallback(), saved],
        )  # fmt: skip
        trainer.fit(module, loader_of(data, num=200, batch_size=100), ckpt_path=path)
        assert [(epoch, len(terms)) for epoch, _, *terms in module.seen] == [
            (epoch, 3 if epoch >= 1 else 1) for epoch in epochs
        ]


def test_an_automatic_start_that_was_found_is_known_after_a_resume(
    lightning, for_lightning, tmp_path
):
    """Lightning loads the memory before it says that training starts."""
    data, objective, path = noisy_digits(0), NCR(alpha=0.9, k=10, start_epoch="auto"), None
    for epochs in (3, 4):
        module = make_module(
            lightning, criterion=lambda head: NCRLoss(head=head, objective=objective), lr=0.0
        )
        trainer = make_trainer(
            lightning, tmp_path, max_epochs=epochs, callbacks=[for_lightning.NCRCallback()]
        )
        trainer.fit(module, loader_of(data, num=200, batch_size=200), ckpt_path=path)
        assert "ncr" in module.criterion.terms  # nothing rises where nothing is learned
        trainer.save_checkpoint(path := tmp_path / "resume.ckpt")
    assert [epoch for epoch, *_ in module.seen] == [3]


def test_a_module_without_a_criterion_is_refused(lightning, for_lightning, tmp_path):
    module = make_module(lightning, criterion=lambda head: nn.CrossEntropyLoss())
    trainer = make_trainer(
        lightning, tmp_path, max_epochs=1, callbacks=[for_lightning.NCRCallback()]
    )
    with pytest.raises(ValueError, match="NCRLoss"):
        trainer.fit(module, loader_of(noisy_digits(0), num=100))
