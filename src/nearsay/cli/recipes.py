"""The verb recipes: what can be trained by name."""

from typing import Annotated

import typer

from nearsay.config.calling import describe_recipe, recipe_names


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show what this one takes.", metavar="NAME", autocompletion=recipe_names
        ),
    ] = None,
) -> None:
    """List the recipes, or show what one of them takes.

    For example: nearsay recipes digits
    """
    if name is None:
        names = recipe_names()
        width = max(map(len, names))
        for recipe in map(describe_recipe, names):
            print(f"{recipe.name:<{width}}  {recipe.summary}")
        print(
            "\nnearsay recipes NAME shows what one takes, nearsay train NAME KEY=VALUE trains it."
        )
        return
    # The first line can be copied: it is the command with its defaults.
    recipe = describe_recipe(name)
    words = []
    for key, default in recipe.parameters.items():
        words.append(f"{key}={default}" if default else f"{key}=...")
    print(f"nearsay train {name} {' '.join(words)}\n\n{recipe.docstring}")
