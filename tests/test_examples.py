"""What a reader is shown is true: the examples run, the documents' code runs, and what they quote exists."""

import json
import re
from functools import partial
from pathlib import Path

import loop
import neighbor_vote_loop
import numpy as np
import pytest
import text
import torch
import toy

import nearsay
from nearsay.training.predict import open_trained

ROOT = Path(__file__).parents[1]


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the demo does
    yield
    torch.set_num_threads(threads)


def assert_ncr_is_far_ahead(seed):
    plain, ncr, wrong_share = toy.compare(seed)
    assert ncr.accuracy - plain.accuracy >= 0.15
    assert plain.trust_wrong > 0.5 > ncr.trust_wrong
    assert wrong_share == pytest.approx(0.4)


@pytest.mark.usefixtures("one_thread")
def test_ncr_beats_cross_entropy_on_the_toy():
    assert_ncr_is_far_ahead(seed=0)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_ncr_beats_cross_entropy_on_the_other_seeds(seed):
    assert_ncr_is_far_ahead(seed)


def test_the_loop_runs(capsys):
    loop.main()
    assert capsys.readouterr().out.startswith("epoch 0: cross-entropy ")


@pytest.mark.usefixtures("one_thread")
def test_the_loop_of_nearsay_learns_the_classes_and_mends_labels(capsys):
    assert neighbor_vote_loop.main() > 0.9
    before, after, _ = map(float, re.findall(r"[\d.]+(?=%)", capsys.readouterr().out))
    assert after < 0.5 * before


@pytest.mark.parametrize("number", range(2))
def test_the_code_of_the_readme_runs(number):
    found = [block for block in blocks(read("README.md"), "python") if "optimizer" in block]
    assert len(found) == 2
    body, classifier, optimizer, loader = loop.setup()
    before = [parameter.detach().clone() for parameter in classifier.parameters()]
    given = {"body": body, "classifier": classifier, "optimizer": optimizer, "loader": loader}
    exec(found[number], {**given, "device": "cpu"})
    assert all((new != old).any() for new, old in zip(classifier.parameters(), before, strict=True))


@pytest.mark.usefixtures("one_thread")
def test_the_audit_of_the_readme_prints_what_it_shows(capsys):
    text = read("README.md")
    [code] = [block for block in blocks(text, "python") if "nearsay.audit" in block]
    [shown] = [block for block in blocks(text, "") if block.startswith("<Audit")]
    names = {}
    exec(code, names)
    assert capsys.readouterr().out == shown
    is_wrong = np.isin(names["found"].order(), names["shifted"])
    assert f"Of the first 200 labels in this order {is_wrong[:200].sum()} are wrong ones" in text


@pytest.mark.usefixtures("one_thread")
def test_the_training_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    [code] = [block for block in blocks(read("README.md"), "python") if "nearsay.train" in block]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    assert re.search(r"^0\.\d+ <Audit of 1347 labels in 10 classes: ", capsys.readouterr().out)
    assert names["same"].result == names["run"].result


def test_the_two_networks_of_the_page_about_loops_learn():
    [shown] = [
        block for block in blocks(read("docs/adapters.md"), "python") if "AveragedModel" in block
    ]
    torch.manual_seed(0)
    *_, loader = loop.setup()
    networks = []
    for _ in range(2):
        body, classifier, *_ = loop.setup()
        networks.append(neighbor_vote_loop.Network())
        networks[-1].body, networks[-1].classifier = body, classifier
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in networks]
    names = {"networks": networks, "optimizers": optimizers, "loader": loader}
    exec(shown, names)
    inputs, _, indices = loader.dataset.tensors
    for network, average in zip(networks, names["averages"], strict=True):
        assert (network(inputs).logits.argmax(dim=1) == indices % 4).float().mean() > 0.85
        assert average.n_averaged == 20
    assert all(loss.state["base.averages"][:512].sum(dim=1).min() > 0.5 for loss in names["losses"])


def test_the_code_of_the_contributors_guide_runs():
    loss, data_set, backbone = blocks(read("CONTRIBUTING.md"), "python")
    names = {"__name__": "guide"}
    for block in (loss, data_set, backbone):
        exec(block, names)
    images, labels = names["Stripes"](num_examples=10).open("train")
    network = names["SmallConvolution"]().build(len(labels.classes))
    batch = nearsay.Batch(
        inputs=images.float(),
        targets=nearsay.one_hot(labels.given, len(labels.classes)),
        indices=torch.arange(10),
    )
    objective = nearsay.NCR(k=3, base=nearsay.as_objective(names["SCE"](a=0.0, b=0.5)))
    total, terms = objective(
        network(batch.inputs), batch, torch.tensor(0.0), {}, objective.phase(0, {})
    )
    total.backward()
    assert set(terms) == {"sce", "ncr", "isolated"}
    assert network.fc.weight.grad.abs().sum() > 0
    own = network(batch.inputs).logits.softmax(dim=1)[torch.arange(10), labels.given]
    # Without the cross-entropy it is the mean absolute error times −log 0 = 4.
    torch.testing.assert_close(terms["sce"], (0.5 * 4 * (1 - own)).mean().detach())


def test_the_loss_the_data_set_and_the_network_of_the_contributors_guide_train(tmp_path):
    loss, data_set, backbone = blocks(read("CONTRIBUTING.md"), "python")
    names = {"__name__": "guide"}
    for block in (loss, data_set, backbone):
        exec(block, names)
    data = names["Stripes"]()
    assert nearsay.data.describe(data).shape == data.open("train").inputs.shape[1:]
    experiment = nearsay.Experiment(
        data=data,
        backbone=names["SmallConvolution"](),
        objective=nearsay.as_objective(names["SCE"]()),
        epochs=8,
        batch_size=20,
        optimizer=nearsay.optim.SGD(lr=0.1),
    )
    run = nearsay.train(experiment, out=tmp_path / "run", quiet=True)
    assert run.result["accuracy"]["test"]["final"] > 0.9


def test_the_recipe_of_the_training_page_trains(tmp_path, monkeypatch):
    recipe, called = blocks(read("docs/train.md"), "python")
    (tmp_path / "my_recipe.py").write_text(recipe, "utf-8")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(called, names)
    assert names["run"].result["accuracy"]["test"]["final"] > 0.9
    assert open_trained(tmp_path / "runs" / "mine").experiment == names["run"].experiment
    assert names["run"].experiment.backbone.hidden == (128,)


def test_the_code_of_the_audit_page_runs(capsys):
    shown, _ = blocks(read("docs/audit.md"), "python")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    features = torch.eye(3)[labels] + 0.1 * torch.randn(90, 3, generator=generator)
    right = labels.clone()
    labels[5] = 0  # of class 2
    names = {"labels": labels, "features": features, "probabilities": (5 * features).softmax(dim=1)}
    exec(shown, names)
    about, first, *_ = capsys.readouterr().out.splitlines()
    assert about.startswith("<Audit of 90 labels in 3 classes: 1 seem wrong, noise rate 0.01")
    assert re.fullmatch(r"5: 0\.\d\d, 0, rather 2 \(0\.\d\d\)", first)
    assert names["table"]["predicted_label"][5] == "2"
    assert torch.equal(names["cleaned"], right)


def test_the_loop_of_the_audit_page_finds_the_wrong_labels():
    _, shown = blocks(read("docs/audit.md"), "python")
    torch.manual_seed(0)
    body, classifier, optimizer, loader = loop.setup()
    inputs, labels, indices = loader.dataset.tensors
    names = {"body": body, "classifier": classifier, "optimizer": optimizer, "loader": loader}
    names |= {"inputs": inputs, "labels": labels, "device": "cpu"}
    exec(shown, names)
    is_wrong = labels != indices % 4
    assert is_wrong[names["found"].order()[:80]].float().mean() > 0.95  # 130 of 512 are
    assert names["count"].tolist() == [20.0] * 512
    assert "training" in names["found"].parts


@pytest.mark.usefixtures("one_thread")
def test_the_code_of_the_text_page_finds_the_wrong_labels(capsys):
    [shown] = blocks(read("docs/text.md"), "python")
    questions = text.make_questions()
    names = {"texts": questions.texts, "labels": questions.given}
    exec(shown, names)
    wrong = np.flatnonzero(questions.given != questions.true)
    assert len(wrong) == 6
    assert sorted(names["suspicious"].tolist()) == wrong.tolist()
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.usefixtures("one_thread")
def test_the_example_on_text_shows_the_wrong_labels_first(capsys):
    text.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [" wrong: it is " in line for line in lines] == [True] * 6 + [False] * 2


@pytest.mark.usefixtures("one_thread")
def test_the_example_on_text_compares_what_a_file_holds(tmp_path, monkeypatch, capsys):
    """Scattered errors on the questions: every way finds them, and the numbers are those of known answers."""
    questions, kinds = text.make_questions(), list(text.QUESTIONS)
    true, given = (
        [kinds.index(kind) for kind in labels] for labels in (questions.true, questions.given)
    )
    columns = zip(questions.texts, true, given, strict=True)
    rows = [{"text": text, "label": label, "mv": vote} for text, label, vote in columns]
    uncovered = {"text": "nobody knows", "label": 0, "mv": -1}
    content = {"train": [*rows, uncovered], "test": [*rows[:12], uncovered]}
    path = tmp_path / "weak.json"
    path.write_text(json.dumps(content), "utf-8")
    monkeypatch.setattr(
        text, "NCR_SETTINGS", [{"alpha": 0.9, "k": 5, "hidden": (32,), "balanced": True}]
    )
    monkeypatch.setattr(text, "REGRESSION_SETTINGS", [{"C": 3.0, "balanced": True}])
    monkeypatch.setattr(text, "make_embedder", partial(text.make_embedder, 16))
    monkeypatch.setattr(text, "SEEDS", range(2))
    text.main([str(path)])
    about, found, accuracy = capsys.readouterr().out.splitlines()
    assert about.startswith("36 sentences, ")
    by_ncr, by_regression, by_rarity = map(float, re.findall(r" (0\.\d+|1\.0+)(?= ±|$)", found))
    assert min(by_ncr, by_regression) > 0.9 > by_rarity
    assert accuracy.startswith("accuracy on 12 test sentences: the votes 0.917, ")
