"""The command line: each verb parses, calls one function and prints where the result is.

Nothing that imports torch is imported before a verb needs it, so that help and mistakes answer at
once. Results go to stdout, progress and complaints to stderr.
"""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from nearsay._version import __version__
from nearsay.cli import (
    audit,
    clean,
    compare,
    data,
    demo,
    doctor,
    evaluate,
    export,
    predict,
    propagate,
    recipes,
    reproduce,
    review,
    sweep,
    train,
)
from nearsay.cli.streams import safe_streams, silence
from nearsay.errors import INTERRUPTED, IO_FAILED, PREEMPTED, USAGE, exit_code, explain

_WITH_BATCHES = ("train", "sweep")  # verbs that take a batch size

app = typer.Typer(
    help="Train on noisy labels, and find the labels that are likely wrong.",
    epilog="Start with: nearsay demo. On your own images: nearsay train folder path=photos/, "
    "then nearsay audit RUN.",
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
        bool, typer.Option("--debug", help="Show where an error came from. Works anywhere.")
    ] = False,
) -> None:
    """Train on noisy labels, and find the labels that are likely wrong."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        # Without a working directory, importing torch would end the process.
        raise OSError("the working directory was deleted; change into one that is there") from error


for verb in (
    train.train,
    sweep.sweep,
    evaluate.evaluate,
    predict.predict,
    compare.compare,
    audit.audit,
    review.review,
    clean.clean,
    export.export,
    reproduce.reproduce,
    propagate.propagate,
    recipes.recipes,
    doctor.doctor,
    demo.demo,
):
    app.command()(verb)
app.add_typer(data.data, name="data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with safe_streams():
        return _run(words, is_process=arguments is None)


def _run(words: list[str], *, is_process: bool) -> int:
    """The one place where errors become sentences; `is_process` if the process ends with it."""
    is_debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = get_command(app).main(words, prog_name="nearsay", standalone_mode=False)
        if code == INTERRUPTED:
            # typer has made an exit code of it.
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _end_without_reader()
    except SystemExit as stop:
        # typer ends like this without a reader, and after it has completed words for a shell.
        return _end_without_reader() if stop.code == 1 else int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if is_debug:
            traceback.print_exc()
        if isinstance(error, typer.TyperException):
            print(f"error: {_explain_usage(error, words[0])}", file=sys.stderr)
            return USAGE
        code = exit_code(error)
        is_stopped = code in (INTERRUPTED, PREEMPTED)
        if is_process and is_stopped:
            # A second signal has nothing left to stop.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        message = explain(error, code, takes_batches=words[0] in _WITH_BATCHES)
        if message.startswith("internal error"):
            message = _explain_own_code(error) or message
        print(f"{'' if is_stopped else 'error: '}{message}", file=sys.stderr)
        return code


def _explain_own_code(error: BaseException) -> str | None:
    """Where a user's own loss, data set or network failed; None if it did not."""
    from nearsay.config.own_files import explain_own  # noqa: PLC0415  # --help does not need it

    return explain_own(error)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as a note: what it is about is for the user, where in the code it is, is not."""
    print(f"note: {message}", file=sys.stderr)


def _end_without_reader() -> int:
    silence(sys.stdout)
    return IO_FAILED


def _explain_usage(error: typer.TyperException, first: str) -> str:
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    message = message[:1].lower() + message[1:]
    # The words of pydantic leave out the value.
    wrong: list[dict[str, str]] = getattr(error.__cause__, "errors", list)()
    if wrong:
        message = message.replace("Input should", f"{wrong[0]['input']!r} should")
    context = getattr(error, "ctx", None)
    verb = "nearsay"
    if context is not None:
        verb = context.command_path
    elif first in getattr(get_command(app), "commands", {}):
        verb = f"nearsay {first}"
    option = getattr(error, "option_name", "")
    # With a context it is an unknown option, and not an option without its value.
    if verb == "nearsay train" and option and context is not None:
        message += f"; arguments of a recipe are written {option.lstrip('-')}=VALUE"
    return f"{message} (see {verb} --help)"
