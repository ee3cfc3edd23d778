"""From words to an Experiment and back: call a recipe, change one field, write down what came of it.

Importing this does not import torch, and a wrong recipe name is refused without it. Nothing here opens data. Every
complaint is a ConfigError of one sentence that says what exists.
"""

from nearsay.config.aliases import current_record, current_terms
from nearsay.config.calling import (
    FILES,
    Call,
    apply_overrides,
    call_recipe,
    call_source,
    from_origin,
    left_behind,
    recipe_names,
)
from nearsay.config.fields import override
from nearsay.config.trees import differences, substantial, to_tree
from nearsay.errors import ConfigError

__all__ = [
    "FILES",
    "Call",
    "ConfigError",
    "apply_overrides",
    "call_recipe",
    "call_source",
    "current_record",
    "current_terms",
    "differences",
    "from_origin",
    "left_behind",
    "override",
    "recipe_names",
    "substantial",
    "to_tree",
]
