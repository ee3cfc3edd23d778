import pytest

from nearsay.reproduce import NAMES, plans
from nearsay.reproduce.plans import call, plan


@pytest.fixture
def folder(tmp_path):
    """A place for data, in which a recipe can be called, though there is nothing to train on."""
    (tmp_path / "clothing1m").mkdir()
    (tmp_path / "clothing1m" / "resnet50.safetensors").write_bytes(b"")
    return tmp_path


def runs(name, data, trials=None):
    return {cell.run for cell in plan(name, data, trials)}


@pytest.mark.parametrize(
    ("name", "trials", "num_cells", "num_runs"),
    [
        # Oracles without noise are methods that are there.
        ("baselines", None, 10 * 8 * 5, (10 * 8 - 2 * 2) * 5),
        ("baselines", 2, 10 * 8 * 2, (10 * 8 - 2 * 2) * 2),
        ("realistic", None, 15, 15),
        ("cifar", None, 36, 36),
        ("batch-size", None, 4, 4),
        ("confidence", 3, 24, 24),
        ("similarity", None, 8, 8),
        ("ablation", None, 15, 15),  # its first stage
    ],
)
def test_a_plan_has_a_run_for_every_number(folder, name, trials, num_cells, num_runs):
    assert len(plan(name, folder, trials)) == num_cells
    assert len(runs(name, folder, trials)) == num_runs


@pytest.mark.parametrize("name", NAMES)
def test_recipes_take_all_that_is_planned(folder, name):
    for data in (folder, "toy"):
        for cell in plan(name, data, 1):
            assert call(cell, data).experiment.seed == 0


def test_tables_and_figures_share_runs(folder):
    assert runs("confidence", folder) == runs("similarity", folder) < runs("baselines", folder)
    assert len(runs("batch-size", folder) & runs("realistic", folder)) == 1  # in batches of 1024


def experiments(name, folder):
    cells = plan(name, folder, 1)
    return {(cell.row, cell.column): call(cell, folder).experiment for cell in cells}


def test_a_run_is_planned_as_the_paper_trains_it(folder):
    cifar = experiments("cifar", folder)
    both = cifar["NCR + ELR+", "CIFAR-100 50 %"]
    assert (both.networks, both.epochs, both.batch_size, both.noise.rate) == (2, 250, 256, 0.5)
    assert (both.objective.alpha, both.objective.k, both.objective.start_epoch) == (0.1, 10, 200)
    assert type(cifar["Standard", "CIFAR-10 A-40 %"].noise).__name__ == "AsymmetricInPlace"
    baselines = experiments("baselines", folder)
    ours = baselines["NCR", "mini-ImageNet-Red 40 %"]
    assert (ours.objective.variant, ours.objective.alpha) == ("released", 0.3)
    assert ours.objective.k == 100
    assert (ours.data.color, ours.data.noise) == ("red", 0.4)
    assert baselines["Oracle: Mixup", "mini-ImageNet-Blue 80 %"].only_clean
    assert not baselines["Oracle: Mixup", "mini-ImageNet-Blue 0 %"].only_clean
    sizes = [experiment.batch_size for experiment in experiments("batch-size", folder).values()]
    assert sizes == [256, 512, 1024, 2048]


def test_data_sets_are_found_in_folders_of_their_own_or_together(folder):
    (folder / "WebVision").mkdir()
    cells = {cell.recipe: cell for name in ("realistic", "cifar") for cell in plan(name, folder, 1)}
    assert call(cells["webvision"], folder).experiment.data.path == folder / "WebVision"
    assert call(cells["clothing1m"], folder).experiment.init.endswith(
        "clothing1m/resnet50.safetensors"
    )
    assert call(cells["cifar10"], folder).experiment.data.path == folder


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ("ILSVRC/val", "ILSVRC"),
        ("imagenet/val", "imagenet"),
        ("ILSVRC/Data/CLS-LOC/val", "."),  # as Kaggle packs it, with the labels beside ILSVRC
        ("imagenet/ILSVRC/Data/CLS-LOC/val", "imagenet"),
    ],
)
def test_webvision_is_judged_on_imagenet_too_where_its_images_are(folder, images, expected):
    [mini, _, clothing] = [cell for cell in plan("realistic", folder, 1) if cell.row == "NCR"]
    assert call(mini, folder).experiment.second_test is None
    (folder / images).mkdir(parents=True)
    second = call(mini, folder).experiment.second_test
    assert (second.path, second.num_classes) == (folder / expected, 50)
    assert call(clothing, folder).experiment.second_test is None


def test_missing_weights_and_folders_are_named(folder):
    cell = next(cell for cell in plan("realistic", folder, 1) if cell.recipe == "clothing1m")
    (folder / "clothing1m" / "resnet50.safetensors").unlink()
    with pytest.raises(ValueError, match=r"clothing1m .*resnet50\.safetensors"):
        call(cell, folder)
    with pytest.raises(ValueError, match=r"data .*nowhere"):
        call(cell, folder / "nowhere")


def staged(validation, is_settled=lambda cell: True, data="toy"):
    """The points of the ablation at 40 % noise, by stage and value."""
    points = plans.ablation_points(data, 2, validation, is_settled)
    return {(point.stage, point.value): point for point in points if point.rate == 0.4}


def choices_of(cell):
    return [override.removeprefix("objective.") for override in cell.overrides[2:]]


def test_the_ablation_takes_the_best_of_each_stage_to_the_next(tmp_path):
    def validation(cell):
        weights = {"alpha=0.7": 0.1, "k=5": 0.2, "start_epoch=150": 0.3}
        return sum(weights.get(choice, 0) for choice in choices_of(cell))

    points = staged(validation, data=tmp_path)
    assert len(points) == 5 + 6 + 5
    for place, choices in {
        ("alpha", 0.1): ["alpha=0.1", "k=none", "start_epoch=0"],
        ("k", 100): ["alpha=0.7", "k=100", "start_epoch=0"],
        ("k", 256): ["alpha=0.7", "k=none", "start_epoch=0"],
        ("e", 200): ["alpha=0.7", "k=5", "start_epoch=200"],
    }.items():
        assert [choices_of(cell) for cell in points[place].cells] == [choices] * 2
    chosen = [place for place, point in points.items() if point.is_chosen]
    assert chosen == [("alpha", 0.7), ("k", 5), ("e", 150)]


def test_the_best_has_the_highest_mean_over_trials_and_the_first_of_equals_wins():
    means = {"0.3": (0.9, 0.1), "0.5": (0.6, 0.6), "0.7": (0.6, 0.6)}
    points = staged(lambda cell: means.get(cell.column.removeprefix("alpha="), (0, 0))[cell.seed])
    chosen = [value for (stage, value), point in points.items() if point.is_chosen]
    assert chosen[0] == 0.5


def test_a_stage_waits_for_all_runs_of_the_one_before():
    points = staged(lambda cell: 0.5, is_settled=lambda cell: "alpha=0.3" not in cell.column)
    assert {stage for stage, _ in points} == {"alpha"}
    assert not any(point.is_chosen for point in points.values())


def test_a_run_that_failed_is_not_chosen():
    accuracies = {"alpha=0.9": None, "alpha=0.1": 0.5}
    points = staged(lambda cell: accuracies.get(cell.column, 0.0))
    assert points["alpha", 0.1].is_chosen
    assert {stage for stage, _ in staged(lambda cell: None)} == {"alpha"}


def test_each_noise_rate_has_its_own_choice():
    best = {"0 % noise": "alpha=0.1", "20 % noise": "alpha=0.5", "40 % noise": "alpha=0.9"}
    points = plans.ablation_points(
        "toy", 1, lambda cell: float(cell.column == best[cell.row]), lambda cell: True
    )
    chosen = [point.value for point in points if point.is_chosen and point.stage == "alpha"]
    assert chosen == [0.1, 0.5, 0.9]


@pytest.mark.parametrize("is_toy", [True, False])
def test_values_are_chosen_on_clean_held_out_examples_and_starts_fit_the_run(is_toy, tmp_path):
    data = "toy" if is_toy else tmp_path
    starts = [0, 1, 2, 3, 4] if is_toy else [0, 50, 100, 150, 200]
    points = staged(lambda cell: 0.5, data=data)
    assert [value for stage, value in points if stage == "e"] == starts
    experiment = call(points["e", starts[-1]].cells[0], data).experiment
    assert experiment.epochs == plans.num_epochs(data) == (5 if is_toy else 250)
    assert experiment.held_out == (400 if is_toy else 5000)
    assert experiment.validation_labels == "clean"
