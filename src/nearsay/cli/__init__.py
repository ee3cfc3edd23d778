"""The command line: each verb parses, calls one function and prints where the result is.

Nothing that imports torch is imported before a verb needs it, so that help and mistakes answer at once. Results go to
stdout, progress and complaints to stderr.
"""

import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import typer
from typer.main import get_command

from nearsay import __version__
from nearsay.cli.auditing import audit, clean
from nearsay.cli.options import Json, Out, Quiet, Recipe, check_device, print_json
from nearsay.cli.paper import check, propagate, reproduce
from nearsay.cli.reading import compare, evaluate, export, predict
from nearsay.cli.reviewing import review
from nearsay.cli.starting import demo, doctor, get, recipes
from nearsay.cli.streams import silence, told_if_possible
from nearsay.cli.sweeping import sweep
from nearsay.config import Call, apply_overrides, call_recipe, left_behind, to_tree
from nearsay.errors import INTERRUPTED, IO_FAILED, PREEMPTED, USAGE, exit_code, explain
from nearsay.training.progress import Events, make_display, print_table, summarize

_TAKE_BATCHES = ("train", "sweep")  # verbs that can be told how large they are

app = typer.Typer(
    help="Learn from noisy labels by asking the neighbors, and find the labels to distrust.",
    epilog="Start with: nearsay demo. On your own images: nearsay train folder path=photos/, then nearsay audit RUN.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"nearsay {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from; works anywhere.")
    ] = False,
) -> None:
    """Learn from noisy labels by asking the neighbors, and find the labels to distrust."""
    try:
        os.getcwd()
    except FileNotFoundError as error:  # torch would end the process while it is loaded
        raise OSError("the working directory was deleted; change into one that is there") from error


def train(
    recipe: Recipe,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="What the recipe takes, as in method=ncr noise=0.4.", metavar="KEY=VALUE"
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change one field, as in objective.k=5; may be repeated.",
            metavar="FIELD=VALUE",
        ),
    ] = None,
    out: Out = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="auto, cpu, cuda or cuda:1; short for --set machine.device=...",
            callback=check_device,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Short for seed=...")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what would run, with an estimate of its memory, and stop."
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write events to RUN/tensorboard too.")
    ] = False,
) -> None:
    """Train on your data or a benchmark; run again, it resumes.

    A run that was stopped goes on from its last checkpoint, and a finished one only tells its result again.

    For example: nearsay train folder path=photos/ --out runs/first

    Or: nearsay train digits method=ncr noise=0.4 --set objective.k=5
    """
    call = call_recipe(recipe, [*(arguments or []), *([] if seed is None else [f"seed={seed}"])])
    call = apply_overrides(
        call, [*(changes or []), *([] if device is None else [f"machine.device={device}"])]
    )
    from nearsay.distributed import launch  # noqa: PLC0415  # see the first lines

    alone = [] if launch().rank else left_behind(call)
    if dry_run:
        print("".join(f"note: {told}\n" for told in alone), end="", file=sys.stderr)
        _print_plan(call, as_json=as_json)
        return
    from nearsay.config import default_folder  # noqa: PLC0415  # see the first lines
    from nearsay.training.loop import train as train_into  # noqa: PLC0415
    from nearsay.training.system import follow_parent  # noqa: PLC0415

    follow_parent()
    folder = default_folder(call.origin) if out is None else out
    shown = make_display(quiet=quiet)
    with closing(Events(shown, folder / "tensorboard") if tensorboard else shown) as display:
        for told in alone:
            display.note(told)
        result = train_into(call.experiment, folder, origin=call.origin, display=display)
    if not result:  # another process of the same run prints it
        return
    if as_json:
        print_json({"run": str(folder), **result})
    else:
        print_table(summarize(result))
        name = shlex.quote(str(folder))
        print(f"The run is in {folder}.")
        print(
            f"Next: nearsay evaluate {name} tells more, nearsay audit {name} which labels to distrust."
        )


def _print_plan(call: Call, *, as_json: bool) -> None:
    from nearsay.training.estimate import describe_plan, estimate  # noqa: PLC0415  # see the first lines

    needed, tree = estimate(call.experiment), to_tree(call.experiment)
    if as_json:
        print_json({**call.origin, "experiment": tree, "estimate": needed._asdict()})
    else:
        print(describe_plan(tree, needed))


data = typer.Typer(
    help="Fetch public data sets, or see whether one is whole.", rich_markup_mode=None
)
data.command()(get)
data.command()(check)
for verb in (
    train,
    sweep,
    evaluate,
    predict,
    compare,
    audit,
    review,
    clean,
    export,
    reproduce,
    propagate,
    recipes,
    doctor,
    demo,
):
    app.command()(verb)
app.add_typer(data, name="data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with told_if_possible():
        return _run(words, is_process=arguments is None)


def _run(words: list[str], *, is_process: bool) -> int:
    """The one place where errors become sentences; `is_process` if the process ends with it."""
    is_debug, words = (
        "--debug" in words,
        [word for word in words if word != "--debug"] or ["--help"],
    )
    try:
        with warnings.catch_warnings():
            # what it warns of is for the user, and where in the code is not
            warnings.showwarning = lambda *told, **_: print(f"note: {told[0]}", file=sys.stderr)
            code = get_command(app).main(words, prog_name="nearsay", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt  # which typer has made an exit code of
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _without_reader()
    except SystemExit as stop:
        # typer ends so where nobody reads the output any more, and after completing words for a shell
        return _without_reader() if stop.code == 1 else int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if is_debug:
            traceback.print_exc()
        if isinstance(error, typer.TyperException):
            print(f"error: {_explain_usage(error, words[0])}", file=sys.stderr)
            return USAGE
        code = exit_code(error)
        if is_process and code in (
            INTERRUPTED,
            PREEMPTED,
        ):  # a second signal has nothing left to stop
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        told = "" if code in (INTERRUPTED, PREEMPTED) else "error: "
        print(
            f"{told}{explain(error, code, takes_batches=words[0] in _TAKE_BATCHES)}",
            file=sys.stderr,
        )
        return code


def _without_reader() -> int:
    silence(sys.stdout)
    return IO_FAILED


def _explain_usage(error: typer.TyperException, first: str) -> str:
    told = error.format_message().rstrip(".").replace("Value error, ", "")
    told = told[:1].lower() + told[1:]
    wrong: list[dict[str, str]] = getattr(
        error.__cause__, "errors", list
    )()  # what pydantic says leaves out the value
    if wrong:
        told = told.replace("Input should", f"{wrong[0]['input']!r} should")
    context = getattr(error, "ctx", None)
    is_verb = first in getattr(get_command(app), "commands", {})
    verb = (
        context.command_path
        if context is not None
        else f"nearsay {first}"
        if is_verb
        else "nearsay"
    )
    option = getattr(error, "option_name", "")
    if (
        verb == "nearsay train" and option and context is not None
    ):  # no such option, not one without its value
        told += f"; what a recipe takes is written {option.lstrip('-')}=VALUE"
    return f"{told} ({verb} --help shows what there is)"
