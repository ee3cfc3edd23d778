"""The verb train: train on your data or a benchmark."""

import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from nearsay.cli.options import Json, Quiet, RecipeDevice, print_json
from nearsay.config.calling import Call, apply_overrides, call_source, left_behind, recipe_names
from nearsay.config.records import to_tree
from nearsay.config.text import split_pairs
from nearsay.training.progress import Events, make_display, print_table, summarize

Source = Annotated[
    str,
    typer.Argument(
        help="A name from nearsay recipes, or the path of your data or of a recipe file.",
        metavar="SOURCE",
        autocompletion=recipe_names,
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="What the recipe takes, as in method=ncr noise=0.4.", metavar="KEY=VALUE"),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change one field, as in objective.k=5. May be repeated.",
        metavar="FIELD=VALUE",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder of the run. By default below runs/, named after the settings.",
        metavar="DIR",
    ),
]


def train(
    source: Source,
    arguments: Arguments = None,
    changes: Changes = None,
    method: Annotated[str | None, typer.Option("--method", help="Same as method=...")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same as seed=...")] = None,
    out: Out = None,
    device: RecipeDevice = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the settings and the memory they need, and stop."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write events to RUN/tensorboard.")
    ] = False,
) -> None:
    """Train on your data or a benchmark.

    If a run was stopped, the same command resumes it from its last checkpoint. If it is finished,
    the same command prints its result again.

    Your own images: nearsay train folder path=photos/ --out runs/first

    A benchmark: nearsay train digits --method ncr noise=0.4
    """
    words = list(arguments or [])
    for key, value in (("method", method), ("seed", seed)):
        if value is not None:
            words.append(f"{key}={value}")
    fields = list(changes or [])
    if device is not None:
        fields.append(f"machine.device={device}")
    call = apply_overrides(call_source(source, split_pairs(words)), fields)
    # What follows imports torch: a wrong word is answered before.
    from nearsay.distributed import launch  # noqa: PLC0415

    notes = [] if launch().rank else left_behind(call)
    if dry_run:
        print("".join(f"note: {note}\n" for note in notes), end="", file=sys.stderr)
        _print_plan(call, as_json=as_json)
        return
    from nearsay.config.records import default_folder  # noqa: PLC0415
    from nearsay.training.loop import train as train_into  # noqa: PLC0415
    from nearsay.training.system import follow_parent  # noqa: PLC0415

    follow_parent()
    folder = default_folder(call.origin) if out is None else out
    plain = make_display(quiet=quiet)
    with closing(Events(plain, folder / "tensorboard") if tensorboard else plain) as display:
        for note in notes:
            display.note(note)
        result = train_into(call.experiment, folder, origin=call.origin, display=display)
    # Of several processes of one run, only the first has the result to print.
    if result and as_json:
        print_json({"run": str(folder), **result})
    elif result:
        print_table(summarize(result))
        name = shlex.quote(str(folder))
        print(f"The run is in {folder}.")
        print(f"Next: nearsay audit {name} finds wrong labels, nearsay evaluate {name} tells more.")


def _print_plan(call: Call, *, as_json: bool) -> None:
    from nearsay.training.estimate import describe_plan, estimate  # noqa: PLC0415  # brings torch

    needed, tree = estimate(call.experiment), to_tree(call.experiment)
    if as_json:
        print_json({**call.origin, "experiment": tree, "estimate": needed._asdict()})
    else:
        print(describe_plan(tree, needed))
