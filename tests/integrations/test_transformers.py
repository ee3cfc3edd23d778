"""NCR under the Trainer of Hugging Face: images, texts, accumulation, epochs, log, evaluation."""

import pytest
import torch
from integrations.noisy_digits import OBJECTIVE, noisy_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import nearsay
from nearsay.losses import ELR, NCR, Bank

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true but no accelerator is found"
)


@pytest.fixture
def transformers(for_transformers):
    return pytest.importorskip("transformers")


def image_network(transformers, seed=0):
    torch.manual_seed(seed)
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", num_labels=10
    )
    return transformers.ResNetForImageClassification(config)


def text_network(transformers, kind="Bert"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=4, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForSequenceClassification")(config)


def image_rows(data, num=None, *, indices=False):
    rows = zip(data.images[:num], data.labels[:num].tolist(), strict=True)
    more = (lambda row: {"indices": row}) if indices else (lambda row: {})
    return [
        {"pixel_values": image, "labels": label, **more(row)}
        for row, (image, label) in enumerate(rows)
    ]


def text_rows(num=24):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, 30, (num, 6), generator=generator)
    mask = torch.ones(6, dtype=torch.int64)
    return [{"input_ids": row, "attention_mask": mask, "labels": int(row[0]) % 4} for row in words]


def make_trainer(for_transformers, model, rows, folder, *, objective=OBJECTIVE, more=(), **choices):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        **{
            "per_device_train_batch_size": 100, "learning_rate": 3e-3,
            "lr_scheduler_type": "constant", **choices,
        },
    )  # fmt: skip
    return for_transformers.NCRTrainer(
        model=model, args=arguments, train_dataset=rows, objective=objective, **dict(more)
    )


def functional_loss(logits, features, labels, indices=None):
    return 0.1 * cross_entropy(logits, labels) + 0.9 * nearsay.ncr(logits, features, indices, k=10)


def test_the_loss_of_images_is_that_of_the_functions(transformers, for_transformers, tmp_path):
    # Whose statistics would move in training.
    model, data = image_network(transformers).eval(), noisy_digits(0)
    trainer = make_trainer(for_transformers, model, image_rows(data, 50), tmp_path)
    images, labels, indices = data.images[:50], data.labels[:50], torch.arange(50) // 2
    features = model.resnet(images).pooler_output.flatten(1)
    wanted = functional_loss(model.classifier(features), features, labels, indices)
    batch = {"pixel_values": images, "labels": labels, "indices": indices}
    found, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    assert_close(found, wanted, rtol=0, atol=1e-6)
    assert outputs.logits.shape == (50, 10)
    one, other = (torch.autograd.grad(loss, list(model.parameters())) for loss in (found, wanted))
    assert_close(one, other)
    assert all(part.abs().sum() > 0 for part in one)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_the_loss_of_texts_is_that_of_the_functions(transformers, for_transformers, tmp_path, kind):
    model, rows = text_network(transformers, kind), text_rows()
    trainer = make_trainer(for_transformers, model, rows, tmp_path)
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    body = model.base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    if kind == "Bert":
        features = body.pooler_output
        logits = model.classifier(features)
    else:  # its classifier is two layers deep; the last of them is the head
        features = torch.tanh(model.classifier.dense(body.last_hidden_state[:, 0]))
        logits = model.classifier.out_proj(features)
    found = trainer.compute_loss(model, batch)
    assert_close(found, functional_loss(logits, features, batch["labels"]), rtol=0, atol=1e-6)
    found.backward()
    assert model.base_model.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def test_a_training_of_texts_logs_the_terms_from_the_start_epoch_on(
    transformers, for_transformers, tmp_path
):
    objective = NCR(alpha=0.9, k=3, start_epoch=2)
    trainer = make_trainer(
        for_transformers, text_network(transformers), text_rows(), tmp_path, objective=objective,
        per_device_train_batch_size=10, num_train_epochs=3, logging_steps=1,
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["epoch"] for entry in logs] == pytest.approx(
        [(step + 1) / 3 for step in range(9)], abs=1e-3
    )
    assert ["ncr" in entry for entry in logs] == [False] * 6 + [True] * 3
    for entry in logs[:6]:
        assert entry["loss"] == pytest.approx(entry["cross_entropy"], abs=1e-4)
    for entry in logs[6:]:
        assert entry["loss"] == pytest.approx(
            0.1 * entry["cross_entropy"] + 0.9 * entry["ncr"], abs=1e-4
        )


def test_a_term_is_logged_as_the_mean_over_the_losses_that_have_it(
    transformers, for_transformers, tmp_path
):
    """NCR may start between two lines of the log; the losses before it are no zeros of it."""
    logged = {}
    for every in (1, 3):
        torch.manual_seed(0)
        trainer = make_trainer(
            for_transformers, text_network(transformers), text_rows(), tmp_path,
            per_device_train_batch_size=10,
            objective=NCR(k=3, start_epoch=1 / 3), num_train_epochs=1, logging_steps=every,
        )  # fmt: skip
        trainer.train()
        logged[every] = [entry for entry in trainer.state.log_history if "loss" in entry]
    values = [entry["ncr"] for entry in logged[1][1:]]
    assert ["ncr" in entry for entry in logged[1]] == [False, True, True]
    assert [entry["ncr"] for entry in logged[3]] == [pytest.approx(sum(values) / 2, rel=1e-3)]


def test_accumulated_gradients_are_the_mean_over_the_batches(
    transformers, for_transformers, tmp_path
):
    model, rows = text_network(transformers), text_rows()
    batches = [{name: torch.stack([torch.as_tensor(row[name]) for row in part]) for name in rows[0]}
               for part in (rows[:12], rows[12:])]  # fmt: skip
    trainer = make_trainer(
        for_transformers, model, rows, tmp_path, per_device_train_batch_size=12,
        gradient_accumulation_steps=2, max_steps=1, logging_steps=1, max_grad_norm=0.0,
        learning_rate=0.0, train_sampling_strategy="sequential",
    )  # fmt: skip
    wanted = torch.stack([trainer.compute_loss(model, batch) for batch in batches]).mean()
    gradient = torch.autograd.grad(wanted, model.classifier.weight)[0]
    seen = []

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args, **choices):
            seen.append(model.classifier.weight.grad.clone())

    trainer.add_callback(Watch())
    trainer._sums = {}
    trainer.train()
    assert_close(seen, [gradient])
    [entry] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["loss"] == pytest.approx(wanted.item(), abs=1e-4)
    assert entry["loss"] == pytest.approx(
        0.1 * entry["cross_entropy"] + 0.9 * entry["ncr"], abs=1e-4
    )


def test_an_evaluation_is_cross_entropy_and_indices_travel(
    transformers, for_transformers, tmp_path
):
    model, data = image_network(transformers), noisy_digits(0)
    trainer = make_trainer(
        for_transformers, model, image_rows(data, 130, indices=True), tmp_path,
        objective=NCR(k=5, bank=Bank(size=200)), num_train_epochs=1, remove_unused_columns=False,
        bf16=True, more={"eval_dataset": image_rows(data, 60)},
    )  # fmt: skip
    trainer.train()  # 100 and 30 rows, in half precision
    assert sorted(trainer.ncr_loss.state["bank.indices"][:130].tolist()) == list(range(130))
    trainer.args.bf16_full_eval = False
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.eval()(pixel_values=data.images[:60]).logits
    assert found == pytest.approx(float(cross_entropy(logits.float(), data.labels[:60])), abs=0.02)


class Plain(nn.Module):
    """A network that says things in a tuple, with its loss in front if it is shown labels."""

    def __init__(self, *, features):
        super().__init__()
        self.body, self.head, self.features = nn.Linear(6, 8), nn.Linear(8, 4), features

    def forward(self, inputs, labels=None):
        hidden = self.body(inputs).relu()
        said = (self.head(hidden), hidden) if self.features else (self.head(hidden),)
        return said if labels is None else (cross_entropy(said[0], labels), *said)


@pytest.mark.parametrize("features", [False, True])
def test_networks_that_say_things_in_a_tuple_are_evaluated(
    transformers, for_transformers, tmp_path, features
):
    generator = torch.Generator().manual_seed(0)
    rows = [{"inputs": torch.randn(6, generator=generator), "labels": row % 4} for row in range(20)]
    model = Plain(features=features)
    trainer = make_trainer(
        for_transformers, model, rows, tmp_path, num_train_epochs=1, more={"head": model.head},
    )  # fmt: skip
    trainer.train()
    found = trainer.predict(rows)
    with torch.no_grad():
        logits, *more = model.eval()(torch.stack([row["inputs"] for row in rows]))
    said = found.predictions if features else [found.predictions]
    for one, other in zip(said, [logits, *more], strict=True):
        assert_close(torch.as_tensor(one), other)
    labels = torch.tensor([row["labels"] for row in rows])
    assert found.metrics["test_loss"] == pytest.approx(
        float(cross_entropy(logits, labels)), abs=1e-5
    )


def test_a_batch_without_labels_is_refused(transformers, for_transformers, tmp_path):
    rows = [{"inputs": torch.zeros(6), "target": 0} for _ in range(20)]
    model = Plain(features=False)
    trainer = make_trainer(
        for_transformers, model, rows, tmp_path, num_train_epochs=1, remove_unused_columns=False,
        more={"head": model.head},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^labels .* inputs, target"):
        trainer.train()


def test_indices_that_the_trainer_drops_are_asked_for(transformers, for_transformers, tmp_path):
    rows = [{"inputs": torch.zeros(6), "labels": 0, "indices": row} for row in range(20)]
    model = Plain(features=False)
    trainer = make_trainer(
        for_transformers, model, rows, tmp_path, objective=NCR(bank=Bank(size=20)),
        num_train_epochs=1,
        more={"head": model.head},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^indices .* remove_unused_columns=False"):
        trainer.train()


def test_what_has_no_classes_or_would_be_lost_is_refused(transformers, for_transformers, tmp_path):
    rows = text_rows()
    network = text_network(transformers)
    for field, model, choices in (
        ("objective", network, {"objective": NCR(base=ELR())}),
        ("objective", network, {"objective": NCR(bank=Bank(kind="examples"))}),
        ("label_smoothing_factor", network, {"label_smoothing_factor": 0.1}),
        ("model_init", None, {"more": {"model_init": lambda: text_network(transformers)}}),
    ):
        with pytest.raises(ValueError, match=rf"^{field}"):
            make_trainer(for_transformers, model, rows, tmp_path, **choices)
    several = text_network(transformers)
    several.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match=r"^problem_type"):
        make_trainer(for_transformers, several, rows, tmp_path)
    headless = text_network(transformers)
    headless.classifier = nn.Identity()
    with pytest.raises(ValueError, match=r"^head .* 4 outputs"):
        make_trainer(for_transformers, headless, rows, tmp_path)
