import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from lab.run_queue import (
    EPOCHS,
    HUMAN,
    PARTS,
    PARTS_COLUMNS,
    PLACES,
    VARIANTS,
    Point,
    ablated,
    cell,
    queue,
    read_queue,
    without,
    write_queue,
)

from nearsay import config
from nearsay.recipes import cifar10


def names():
    return {each.name for each in queue()}


def test_no_run_is_wanted_twice():
    assert Counter(each.name for each in queue()).most_common(1)[0][1] == 1
    said = Counter(
        (each.recipe, frozenset(each.arguments), frozenset(each.overrides)) for each in queue()
    )
    assert said.most_common(1)[0][1] == 1


def test_the_directions_of_kl_are_compared_at_every_weight_of_the_released_one():
    def weight(point):
        return point.alpha / (1 - point.alpha) * (4 if point.variant == "released" else 1)

    weights = {name: [weight(point) for point in points] for name, points in VARIANTS.items()}
    for heavy in [each for each in weights["released"] if each > 9]:
        assert min(abs(each / heavy - 1) for each in weights["paper"]) < 0.05
    assert max(weights["paper"]) == pytest.approx(max(weights["released"]), rel=0.01)


def test_the_recipe_takes_every_run_and_says_what_its_name_says():
    trees = {}
    for each in queue():
        recipe, *words = each.words(PLACES)
        call = config.apply_overrides(config.call_recipe(recipe, words), each.overrides)
        trees[each.name] = call.experiment
        assert call.experiment.epochs == EPOCHS[each.protocol]
        assert call.experiment.machine.compile is True
    assert trees["short-symmetric-80-ncr-seed-0"].noise.rate == 0.8
    assert trees["paper-symmetric-40-ncr+elr+-seed-2"].seed == 2
    assert trees["short-symmetric-40-elr+-noise-per-network-seed-0"].noise_per_network
    assert (
        trees["short-held-out-symmetric-20-ncr-paper-alpha-0.9-k-all-e-0-seed-0"].objective.k
        is None
    )
    held = trees["short-held-out-symmetric-40-ncr-released-alpha-0.7-k-10-e-0-seed-0"]
    assert (held.held_out, held.objective.alpha, held.objective.variant) == (5000, 0.7, "released")


def test_every_part_of_our_method_is_left_out_once_and_alone():
    def settings(wanted):
        recipe, *words = wanted.words(PLACES)
        return config.to_tree(
            config.apply_overrides(config.call_recipe(recipe, words), wanted.overrides).experiment
        )

    for key, part in product(PARTS_COLUMNS, PARTS):
        assert {without(key, None).name, without(key, part).name} <= names()
        field, value = part.override.split("=")
        changed = [
            each.split(":")[0]
            for each in config.differences(
                settings(without(key, None)), settings(without(key, part))
            )
        ]
        assert changed == [field], part
        assert value in ("0", "1", "none")
    assert settings(without("human-worse", None))["held_out"] == 5000
    recipe, *words = without("human-worse", None).words(PLACES)
    objective = config.call_recipe(recipe, words).experiment.objective
    left_out = {part.override.split("=")[0].removeprefix("objective.") for part in PARTS}
    assert left_out - {"mixup"} <= vars(objective).keys()


def test_the_commands_of_the_ablation_differ_in_the_values_alone():
    plain = ablated(40, Point()).command()
    for value in ("1", "all"):
        k = None if value == "all" else int(value)
        assert ablated(40, Point(k=k)).command() == plain.replace(" k=10 ", f" k={value} ")


def test_the_settings_that_are_not_varied_are_those_of_the_recipe():
    recipe = cifar10(Path("data"), method="ncr").objective
    assert (recipe.alpha, recipe.k, recipe.start_epoch) == (Point().alpha, Point().k, Point().e)


def test_a_command_names_the_files_it_needs_and_no_place_of_a_machine():
    human = cell(HUMAN[2], "ncr").command()
    assert human == (
        "nearsay train cifar10 path=data labels=data/CIFAR-10_human.pt method=ncr kind=human "
        "column=worse protocol=short seed=0 --set machine.compile=true"
    )
    assert not any("=/" in each.command() for each in queue())


def test_a_queue_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "queue.json"
    path.write_text(write_queue(queue(), ["short-symmetric-40-ncr-seed-0"]))
    assert read_queue(path) == queue()
    done = [each["name"] for each in json.loads(path.read_text()) if each["done"]]
    assert done == ["short-symmetric-40-ncr-seed-0"]


@pytest.mark.parametrize(
    "content", ["{", '[{"name": "a"}]', '[{"name": "a", "protocol": "long", "arguments": []}]']
)
def test_a_file_that_is_not_a_queue_is_named(tmp_path, content):
    path = tmp_path / "queue.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=str(path)):
        read_queue(path)
