"""Records of earlier versions: their names are read as those of today."""

import json
from types import SimpleNamespace

import pytest

from nearsay.config import ConfigError, call_recipe, current_record, from_origin, to_tree
from nearsay.config.aliases import current_source
from nearsay.config.own_files import digest
from nearsay.losses import NeighborVote
from nearsay.training.run_folder import check_same

# What nearsay 0.1.0 of 4c469b0 wrote into experiment.json, as far as names have changed.
OLD = {
    "recipe": "digits",
    "arguments": {"method": "nearsay", "noise": "0.4"},
    "overrides": [
        "objective.kinship=0.5",
        "objective.closeness=2",
        "objective.strictness=3",
        "objective.sure=0.9",
        "epochs=4",
    ],
    "num_inputs": 3,
}
CHANGED = {
    "closeness": "feature_weight",
    "kinship": "relation_weight",
    "strictness": "agreement_power",
    "sure": "threshold",
}


def old_tree(tree):
    """The tree of an experiment with the names of before."""
    if isinstance(tree, list):
        return [old_tree(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    names = {}
    if tree.get("kind") == "NeighborVote":
        names = {new: old for old, new in CHANGED.items()}
        tree = {**tree, "kind": "Nearsay"}
    return {names.get(key, key): old_tree(value) for key, value in tree.items()}


def test_a_record_of_before_is_called_again_by_the_names_of_today():
    call = from_origin(OLD)
    vote = call.experiment.objective
    assert isinstance(vote, NeighborVote)
    values = (vote.relation_weight, vote.feature_weight, vote.agreement_power, vote.threshold)
    assert values == (0.5, 2, 3, 0.9)
    assert call.origin["arguments"] == {"method": "neighbor-vote", "noise": "0.4"}
    assert call.origin["overrides"][:2] == [
        "objective.relation_weight=0.5",
        "objective.feature_weight=2",
    ]
    assert from_origin(call.origin) == call


def test_a_tree_of_before_is_the_tree_of_today():
    tree = to_tree(from_origin(OLD).experiment)
    before = old_tree(tree)
    assert before["objective"]["kind"] == "Nearsay"
    assert set(CHANGED) <= set(before["objective"])
    current = current_record({**OLD, "experiment": before})
    assert current["experiment"] == tree
    assert current["num_inputs"] == 3
    nested = current_record({"experiment": {"kind": "NCR", "base": [before["objective"]]}})
    assert nested["experiment"] == {"kind": "NCR", "base": [tree["objective"]]}


def test_fields_of_other_kinds_keep_their_names():
    record = {
        "arguments": {"method": "ncr", "sure": "1"},
        "overrides": ["mixup.sure=1", "sure=1", "objective.k=5"],
        "experiment": {"kind": "Mine", "sure": True, "kinship": 3},
    }
    assert current_record(record) == record
    assert current_record(current_record(OLD)) == current_record(OLD)


@pytest.mark.parametrize("record", [None, 3, [], {}, {"arguments": 1, "overrides": "x"}])
def test_whatever_else_a_record_is_stays_as_it_is(record):
    assert current_record(record) == record


def test_a_run_of_before_is_resumed(tmp_path):
    experiment = from_origin(OLD).experiment
    record = {**OLD, "experiment": old_tree(to_tree(experiment))}
    (tmp_path / "experiment.json").write_text(json.dumps(record))
    check_same(SimpleNamespace(path=tmp_path), experiment)
    overrides = [change.replace("sure=0.9", "sure=0.8") for change in OLD["overrides"]]
    other = from_origin({**OLD, "overrides": overrides})
    with pytest.raises(ConfigError, match=r"objective\.threshold"):
        check_same(SimpleNamespace(path=tmp_path), other.experiment)


OLD_RECIPE = """
from dataclasses import replace
import nearsay.datasets
from nearsay.augment import Mixup
from nearsay.core import Labels
from nearsay.objectives import NCR, Nearsay
from nearsay.objectives.bank import Bank
from nearsay.recipes.toy import recipe as toy
from nearsay.recipes import digits

def recipe(seed: int = 0):
    experiment = toy(seed=seed) if seed else digits.recipe()
    return replace(experiment, objective=Nearsay(), mixup=Mixup(alpha=1.0, views="first"))
"""


def test_a_recorded_recipe_that_imports_modules_of_before_is_run_with_those_of_today():
    # The hash is that of the source as it was recorded.
    origin = {
        "recipe": "mine.py",
        "arguments": {"seed": "1"},
        "overrides": ["objective.sure=0.9"],
        "source": OLD_RECIPE,
        "sha256": digest(OLD_RECIPE),
    }
    call = from_origin(origin)
    assert call.experiment.objective == NeighborVote(threshold=0.9)
    assert call.origin["source"] == OLD_RECIPE
    assert from_origin({**origin, "arguments": {}}).experiment.data.seed == 0


def test_a_source_of_today_is_not_changed():
    source = (
        "from nearsay.data import Toy\nfrom nearsay.recipes import toy\n"
        "from mine.core import sure\nfrom nearsay.recipes.methods import choose\n"
        "import nearsay.losses\nx = toy(seed=1)\n"
    )
    assert current_source(source) == source


def test_the_old_name_of_a_method_is_not_taken_on_a_command_line():
    with pytest.raises(ConfigError, match="neighbor-vote"):
        call_recipe("digits", ["method=nearsay"])
