import json
from itertools import product
from pathlib import Path

import pytest
from lab.run_queue import (
    EPOCHS,
    HUMAN,
    PARTS,
    PARTS_COLUMNS,
    PLACES,
    Point,
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
    assert len(names()) == len(queue())
    said = [(run.recipe, frozenset(run.arguments), frozenset(run.overrides)) for run in queue()]
    assert len(set(said)) == len(said)


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
    name = "short-held-out-symmetric-20-ncr-paper-alpha-0.9-k-all-e-0-seed-0"
    assert trees[name].objective.k is None
    held = trees["short-held-out-symmetric-40-ncr-released-alpha-0.7-k-10-e-0-seed-0"]
    assert (held.held_out, held.objective.alpha, held.objective.variant) == (5000, 0.7, "released")


def test_every_part_of_our_method_is_left_out_once_and_alone():
    def settings(wanted):
        recipe, *words = wanted.words(PLACES)
        call = config.apply_overrides(config.call_recipe(recipe, words), wanted.overrides)
        return config.to_tree(call.experiment)

    for key, part in product(PARTS_COLUMNS, PARTS):
        assert {without(key, None).name, without(key, part).name} <= names()
        field, value = part.override.split("=")
        trees = settings(without(key, None)), settings(without(key, part))
        assert [line.split(":")[0] for line in config.differences(*trees)] == [field], part
        assert value in ("0", "1", "none")
    assert settings(without("human-worse", None))["held_out"] == 5000
    recipe, *words = without("human-worse", None).words(PLACES)
    objective = config.call_recipe(recipe, words).experiment.objective
    left_out = {part.override.split("=")[0].removeprefix("objective.") for part in PARTS}
    assert left_out - {"mixup"} <= vars(objective).keys()


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
