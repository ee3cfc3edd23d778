"""From words to an Experiment and back: call a recipe, change one field, record the result.

Importing this does not import torch, and a wrong recipe name is refused without it. Nothing here
opens data, except for a data set of the user that trains without a recipe. Every complaint is a
ConfigError of one sentence.
"""

from nearsay.config.aliases import current_record, current_terms
from nearsay.config.calling import (
    FILES,
    Call,
    apply_overrides,
    call_recipe,
    call_source,
    describe_recipe,
    from_origin,
    left_behind,
    recipe_names,
)
from nearsay.config.records import (
    command_again,
    default_folder,
    default_sweep_folder,
    differences,
    run_name,
    substantial,
    to_tree,
)
from nearsay.config.text import override
from nearsay.errors import ConfigError

__all__ = [
    "FILES",
    "Call",
    "ConfigError",
    "apply_overrides",
    "call_recipe",
    "call_source",
    "command_again",
    "current_record",
    "current_terms",
    "default_folder",
    "default_sweep_folder",
    "describe_recipe",
    "differences",
    "from_origin",
    "left_behind",
    "override",
    "recipe_names",
    "run_name",
    "substantial",
    "to_tree",
]
