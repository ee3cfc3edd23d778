"""The command line: each verb parses, calls one function and prints where the result is.

Nothing that imports torch is imported before a verb needs it, so that help and mistakes answer at once. Results go to
stdout, progress and complaints to stderr.
"""

import csv
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from nearsay import __version__
from nearsay.config import Call, ConfigError, apply_overrides, call_recipe, recipe_names, to_tree
from nearsay.progress import Events, make_display, make_table, percent, print_table, summarize

if TYPE_CHECKING:  # these import torch
    from nearsay.commands.compare import Demonstrated

USAGE, BAD_DATA, INTERNAL, NO_MEMORY, IO_FAILED, INTERRUPTED, PREEMPTED = 2, 65, 70, 71, 74, 130, 143

app = typer.Typer(
    help="Learn from noisy labels by asking the neighbors, and find the labels to distrust.",
    epilog="Start with: nearsay demo. Then: nearsay recipes, and nearsay train RECIPE.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    rich_markup_mode=None,
)
data = typer.Typer(help="Fetch public data sets.", rich_markup_mode=None)
app.add_typer(data, name="data")


class Public(StrEnum):
    """Data sets that can be fetched."""

    CIFAR10 = "cifar10"
    CIFAR100 = "cifar100"


def _folder(help: str) -> Any:  # what typer takes for the description of an argument
    return typer.Argument(help=help, metavar="RUN", exists=True, file_okay=False, show_default=False)


def _check_device(device: str | None) -> str | None:
    if device is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(f"{device!r} must be auto, cpu, cuda, or one of several such as cuda:1")
    return device


Run = Annotated[Path, _folder("Folder that nearsay train has made.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.", callback=_check_device)]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default below runs/.", metavar="DIR")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"nearsay {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from; works anywhere.")] = False,
) -> None:
    """Learn from noisy labels by asking the neighbors, and find the labels to distrust."""


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A name from nearsay recipes, or a .py file of your own.",
            metavar="RECIPE",
            autocompletion=recipe_names,
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="What the recipe takes, as in method=ncr noise=0.4.", metavar="KEY=VALUE"),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one field, as in objective.k=5; may be repeated.", metavar="FIELD=VALUE"),
    ] = None,
    out: Out = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Short for --set machine.device=...", callback=_check_device)
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Short for seed=...")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, with an estimate of its memory, and stop.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events to RUN/tensorboard too.")] = False,
) -> None:
    """Train a recipe; the same command again goes on.

    A run that was stopped goes on from its last checkpoint, and a finished one only tells its result again.

    For example: nearsay train digits method=ncr noise=0.4 --set objective.k=5
    """
    call = call_recipe(recipe, [*(arguments or []), *([] if seed is None else [f"seed={seed}"])])
    call = apply_overrides(call, [*(changes or []), *([] if device is None else [f"machine.device={device}"])])
    if dry_run:
        _print_plan(call, as_json=as_json)
        return
    from nearsay.commands.naming import default_folder  # noqa: PLC0415  # see the first lines
    from nearsay.train import train as train_into  # noqa: PLC0415

    folder = default_folder(call.origin) if out is None else out
    shown = make_display(quiet=quiet)
    with closing(Events(shown, folder / "tensorboard") if tensorboard else shown) as display:
        result = train_into(call.experiment, folder, origin=call.origin, display=display)
    if not result:  # another process of the same run prints it
        return
    if as_json:
        _print_json({"run": str(folder), **result})
    else:
        print_table(summarize(result))
        print(f"The run is in {folder}; nearsay evaluate {folder} tells more.")


@app.command()
def evaluate(
    run: Run,
    source: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Other data: a folder of class folders, a table of paths and labels, or arrays.", exists=True
        ),
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="train, validation or test; by default test.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell how right and how sure a trained run is.

    Predictions that the run has kept are used, so that this takes seconds. Where the true labels of the training set
    are known, it also tells how well the run finds the wrong ones.
    """
    from nearsay.commands import evaluate as command  # noqa: PLC0415  # see the first lines

    report = command.evaluate(run, split=split, data=source, device=device)
    if as_json:
        _print_json(report)
        return
    print_table(make_table(*command.evaluation_cells(report)))


@app.command()
def predict(
    run: Run,
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Images, folders of images, or .npy, .npz, .parquet files of features.", metavar="PATH", exists=True
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="A .csv, .jsonl or .parquet file; by default CSV to stdout.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Label images or features with a trained run.

    The table has the columns path, label, probability and error; what cannot be read is a row with an error.
    """
    from nearsay import tables  # noqa: PLC0415  # see the first lines
    from nearsay.commands import predict as command  # noqa: PLC0415

    if out is not None and out.suffix.lower() not in tables.ENDINGS:
        raise ConfigError(f"--out {out} must end in one of {', '.join(tables.ENDINGS)}")
    columns = command.predict(run, paths, device=device)
    if out is None:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        return
    tables.write(out, columns)
    num_errors = sum(error is not None for error in columns["error"])
    told = f", {num_errors} of them with an error" if num_errors else ""
    print(f"{len(columns['path'])} rows{told} are in {out}.")


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders that nearsay train has made.", metavar="RUN", exists=True, file_okay=False),
    ],
    split: Annotated[str, typer.Option("--split", help="test or validation.")] = "test",
    html: Annotated[Path | None, typer.Option("--html", help="Write curves and tables to this file too.")] = None,
    as_json: Json = False,
) -> None:
    """Put finished runs side by side, with means over seeds."""
    from nearsay.commands import compare as command  # noqa: PLC0415  # see the first lines

    groups = command.compare(runs, split=split)
    if html is not None:
        from nearsay.report import write_report  # noqa: PLC0415  # drawing is an extra

        write_report(runs, html, title="Runs compared")
    if as_json:
        _print_json({"split": split, "groups": [command.as_tree(group) for group in groups]})
        return
    print_table(make_table(*command.comparison_cells(groups, split)))
    if html is not None:
        print(f"Curves are in {html}.")


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Tell all about this one.", autocompletion=recipe_names)] = None,
) -> None:
    """List the recipes, or tell what one of them takes."""
    from nearsay.commands.catalog import describe_recipe  # noqa: PLC0415  # as the others, though without torch

    if name is None:
        for each in map(describe_recipe, recipe_names()):
            print(f"{each.name:<12} {each.summary}")
        print("\nnearsay recipes NAME tells what one takes; nearsay train NAME KEY=VALUE... trains it.")
        return
    described = describe_recipe(name)
    taken = [f"{key}={default}" if default else f"{key}=..." for key, default in described.parameters.items()]
    print(f"nearsay train {name} {' '.join(taken)}\n\n{described.docstring}")


@data.command()
def get(
    name: Annotated[Public, typer.Argument(help="Which one.", show_default=False)],
    to: Annotated[Path, typer.Option("--to", help="Folder to unpack it in.", metavar="DIR")] = Path("data"),
) -> None:
    """Download a data set, compare it with the original and unpack it."""
    from nearsay.datasets.cifar import fetch  # noqa: PLC0415  # see the first lines

    print(f"Fetching {name.value} (about 170 MB) ...", file=sys.stderr)
    print(f"{name.value} is in {fetch(name.value, to)}.")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell what is installed and what does not fit together."""
    from nearsay.commands.doctor import examine  # noqa: PLC0415  # see the first lines

    findings = examine()
    problems = [f"{each.name} {each.problem}" for each in findings if each.problem]
    if as_json:
        _print_json({"found": {each.name: each.value for each in findings}, "problems": problems})
        return
    print_table(make_table(("", ""), [(each.name, each.value) for each in findings]))
    print("\n".join(f"Problem: {problem}." for problem in problems) or "All fits together.")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the six runs.", metavar="DIR")] = Path("runs/demo"),
    quiet: Quiet = False,
) -> None:
    """See what NCR does to noisy labels, on digits.

    Six short runs on the CPU or GPU: cross-entropy (standard) and NCR (ncr), three seeds each. Nothing is downloaded.
    """
    from nearsay.commands.compare import DEMO_TITLE, demo_cells, demonstrate  # noqa: PLC0415  # see the first lines

    print(f"{DEMO_TITLE}: cross-entropy (standard) and NCR, three seeds each.", file=sys.stderr)
    runs: list[Demonstrated] = []
    with closing(make_display(quiet=quiet or not sys.stderr.isatty())) as display:
        for done in demonstrate(out, display=display):
            runs.append(done)
            if not quiet:
                accuracy = percent(done.result["accuracy"]["test"]["final"])
                print(f"{done.number}/{done.total}  {done.method}, seed {done.seed}: {accuracy}", file=sys.stderr)
    print_table(make_table(*demo_cells(runs)))
    _print_report_of_demo(runs, out / "report.html", DEMO_TITLE)


def _print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str))


def _print_plan(call: Call, *, as_json: bool) -> None:
    from nearsay.commands.estimate import describe_plan, estimate  # noqa: PLC0415  # see the first lines

    needed, tree = estimate(call.experiment), to_tree(call.experiment)
    if as_json:
        _print_json({**call.origin, "experiment": tree, "estimate": needed._asdict()})
    else:
        print(describe_plan(tree, needed))


def _print_report_of_demo(runs: "Sequence[Demonstrated]", target: Path, title: str) -> None:
    from nearsay.report import write_report  # noqa: PLC0415  # drawing is an extra

    try:
        print(f"Curves and more: {write_report([each.folder for each in runs], target, title=title)}")
    except ImportError as error:
        print(f"note: no report: {error}", file=sys.stderr)
    print(f"Try next: nearsay evaluate {runs[-1].folder} (how sure it is, and how well it finds the wrong labels)")
    print("          nearsay train digits method=elr noise=0.6 (another method, more noise)")
    print("          nearsay recipes (other data, and your own)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. The one place where errors become sentences."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_debug, words = "--debug" in words, [word for word in words if word != "--debug"] or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to stop
    try:
        with warnings.catch_warnings():
            # what it warns of is for the user, and where in the code is not
            warnings.showwarning = lambda *told, **_: print(f"note: {told[0]}", file=sys.stderr)
            code = get_command(app).main(words, prog_name="nearsay", standalone_mode=False)
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
        code = exit_code(error)
        told = "" if code in (INTERRUPTED, PREEMPTED) else "error: "
        print(f"{told}{explain(error, code)}", file=sys.stderr)
        return code


def _without_reader() -> int:
    """Nobody reads stdout any more; nothing that is still in it may complain when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return IO_FAILED


def exit_code(error: BaseException) -> int:
    """What a command returns that ends in this error."""
    code = getattr(error, "code", None)
    if isinstance(code, int) and 0 < code < 256:
        return code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ConfigError | typer.TyperException) or (
        isinstance(error, ImportError) and "pip install" in str(error)
    ):
        return USAGE
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error):
        return NO_MEMORY  # torch has two ways to say so, and may not be there to be asked
    if isinstance(error, OSError):
        return IO_FAILED
    return BAD_DATA if isinstance(error, ValueError) else INTERNAL


def explain(error: BaseException, code: int) -> str:
    """The error in one sentence that says what would work."""
    told = str(error).strip() or type(error).__name__
    if isinstance(error, typer.TyperException):
        return _explain_usage(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if code == NO_MEMORY:
        return f"out of memory ({told.splitlines()[0]}); try a smaller batch_size, or another device"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if code == INTERNAL and not hasattr(error, "code"):
        return f"internal error: {type(error).__name__}: {told.splitlines()[0]}; run again with --debug to see where"
    return told


def _explain_usage(error: typer.TyperException) -> str:
    told = error.format_message().rstrip(".").replace("Value error, ", "")
    told = told[:1].lower() + told[1:]
    context = getattr(error, "ctx", None)
    verb = context.command_path if context is not None else "nearsay"
    option = getattr(error, "option_name", "")
    if verb == "nearsay train" and option:
        told += f"; what a recipe takes is written {option.lstrip('-')}=VALUE"
    return f"{told} ({verb} --help shows what there is)"
