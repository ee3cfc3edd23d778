"""What a training shows while it runs: bars on a terminal, a line per epoch elsewhere, or nothing; then a summary."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, Union

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nearsay.training.display import Progress, counted, plain

_FACTS = (
    "epoch",
    "step",
    "rate",
)  # of a line of the log; the rest are terms of the loss, accuracies and the like
AnyDisplay = Union["Quiet", "Lines", "Bars", "Events"]


def make_display(*, quiet: bool = False, stream: TextIO | None = None) -> AnyDisplay:
    """The display that suits the stream, by default stderr; colors and bars are for terminals only."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Quiet()
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return Bars(console) if stream.isatty() and not console.is_dumb_terminal else Lines(stream)


class Quiet:
    """Nothing at all, but what the user must know."""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Nothing."""

    def step(self, progress: Progress) -> None:
        """Nothing."""

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Nothing."""

    def note(self, message: str) -> None:
        """A line on stderr: what is worth a note is no progress."""
        print(f"note: {message}", file=sys.stderr, flush=True)

    def end(self, result: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """One plain line for each entry of the log, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._num_epochs, self._has_begun = stream, 0.0, False

    def begin(self, facts: Mapping[str, Any]) -> None:
        """What is trained on what."""
        self._has_begun = True
        self._print(describe_facts(facts))

    def step(self, progress: Progress) -> None:
        """Remembers only how many epochs there will be."""
        self._num_epochs = progress.num_epochs

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """The line."""
        self._print(describe_entry(entry, self._num_epochs))

    def note(self, message: str) -> None:
        """A line of its own."""
        self._print(f"note: {message}")

    def end(self, result: Mapping[str, Any]) -> None:
        """How long it took."""
        self._print(describe_end(result, has_begun=self._has_begun))

    def close(self) -> None:
        """Nothing."""

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Bars:
    """A bar with speed and time left, and below it the loss, its terms and the accuracies of the last evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._judged: dict[str, Any] = {}  # accuracies of the last evaluation

    def begin(self, facts: Mapping[str, Any]) -> None:
        """What is trained on what; the bar starts."""
        self._console.print(describe_facts(facts), style="dim")
        self._live = Live(self, console=self._console, transient=True, refresh_per_second=4)
        self._live.start()

    def step(self, progress: Progress) -> None:
        """The bar moves when it is next drawn."""
        self._progress = progress

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """The accuracies of the epoch stay until the next ones."""
        self._judged |= {name: value for name, value in entry.items() if name.endswith("_accuracy")}

    def note(self, message: str) -> None:
        """A line above the bar, which stays."""
        self._console.print(f"note: {message}", style="yellow")

    def end(self, result: Mapping[str, Any]) -> None:
        """The bar goes; a line says how long it took."""
        has_begun = self._live is not None
        self.close()
        self._console.print(describe_end(result, has_begun=has_begun), style="dim")

    def close(self) -> None:
        """The bar goes."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich__(self) -> Group | Text:
        """What is drawn several times a second."""
        progress = self._progress
        if progress is None:
            return Text("preparing the first steps", style="dim")
        line = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None, None):
            line.add_column(ratio=ratio, no_wrap=True)
        line.add_row(
            f"epoch {progress.epoch:.1f}/{progress.num_epochs:g}",
            ProgressBar(total=max(1, progress.num_steps), completed=progress.step),
            f"step {progress.step}/{progress.num_steps}",
            f"{progress.images_per_second:,.0f} images/s",
            f"{describe_seconds(progress.seconds_left)} left",
        )
        numbers = self._judged | progress.terms
        # Accuracies first: a narrow terminal cuts the end of the line.
        return Group(
            line,
            Text("  ".join([*_accuracies(numbers), *_terms(numbers)]), style="dim", no_wrap=True),
        )


class Events:
    """Another display, and the log as TensorBoard events in a folder."""

    def __init__(self, inner: AnyDisplay, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError(
                '--tensorboard needs TensorBoard: pip install ".[tensorboard]" in the clone'
            )
        self._inner, self._folder = inner, folder
        self._writer: Any = (
            None  # torch's SummaryWriter, which must not be named before it is known to be there
        )

    def begin(self, facts: Mapping[str, Any]) -> None:
        """The events after the step from which a run goes on are forgotten, as the log forgets them."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # an extra

        self._writer = SummaryWriter(str(self._folder), purge_step=facts["resumed_at"])
        self._inner.begin(facts)

    def step(self, progress: Progress) -> None:
        """Only shown."""
        self._inner.step(progress)

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Every number of the entry, by its step."""
        for name, value in entry.items():
            if name not in ("epoch", "step") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, entry["step"])
        self._inner.epoch(entry)

    def note(self, message: str) -> None:
        """Only shown."""
        self._inner.note(message)

    def end(self, result: Mapping[str, Any]) -> None:
        """The file of events is closed."""
        self._inner.end(result)
        self.close()

    def close(self) -> None:
        """The file of events is closed."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._inner.close()


def make_table(headers: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table whose columns but the first are numbers; without headers, of text."""
    table = Table(box=box.SIMPLE_HEAD, show_header=any(headers), pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(
            header, justify="right" if number and any(headers) else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def print_table(table: Table) -> None:
    """The table on stdout, plain where that is no terminal; headers give way to a narrow one, numbers are never cut.

    Without rows there is nothing to print.
    """
    if not table.rows:
        return
    width = None if sys.stdout.isatty() else 500
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    unbounded = console.options.update(max_width=10_000)
    if console.measure(table, options=unbounded).maximum > console.width:
        table.padding = (0, 0, 0, 1)
        for column in table.columns:
            column.header = "\n".join(str(column.header).split())
            column.no_wrap = table.show_header  # text without headers may go on in the next line
        if table.show_header:  # so may all of a line, in that of the terminal
            console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)


def summarize(result: Mapping[str, Any]) -> Table:
    """What came of a training: accuracies, and what it thinks of right and wrong labels where the truth is known."""
    table = make_table(("accuracy", "final", "best", "mean of last 10 or fewer"))
    for split, found in result["accuracy"].items():
        table.add_row(split, *(percent(found.get(name)) for name in ("final", "best", "last_10")))
    told = {
        "wrong labels": result["labels"]["effective_rate"],
        "confidence in right labels": _value(result["confidence"], "right"),
        "confidence in wrong labels": _value(result["confidence"], "wrong"),
        "wrong labels memorized": _value(result["memorization"], "memorized"),
        "wrong labels corrected": _value(result["memorization"], "corrected"),
        "wrong labels found, AUROC": _value(result["detection"], "auroc"),
    }
    for name, value in told.items():
        if value is not None:
            table.add_row(name, percent(value))
    return table


def percent(share: float | None) -> str:
    """A share as 81.3 %, or a dash."""
    return "-" if share is None or share != share else f"{100 * share:.1f} %"


def _value(found: Mapping[str, float | None] | None, name: str) -> float | None:
    return (found or {}).get(name)


def describe_facts(facts: Mapping[str, Any]) -> str:
    """What is trained on what, in one line."""
    rate = facts["effective_rate"]
    wrong = "" if rate is None else f", {100 * rate:.1f} % of the labels wrong"
    resumed = f", going on from step {facts['resumed_at']}" if facts["resumed_at"] else ""
    return (
        f"{counted(facts['num_examples'], 'example')} in {facts['num_classes']} "
        f"{'class' if facts['num_classes'] == 1 else 'classes'}{wrong}; "
        f"{facts['num_parameters']:,} parameters; {counted(facts['num_steps'], 'step')} on {facts['device']} "
        f"({facts['precision']}, {facts['loading']} data){resumed}"
    )


def describe_entry(entry: Mapping[str, Any], num_epochs: float = 0.0) -> str:
    """A line of the log for people; `num_epochs` is 0 where it is unknown."""
    of = f"/{num_epochs:g}" if num_epochs else ""
    start = [f"epoch {entry['epoch']:g}{of}", f"step {entry['step']}"]
    return "  ".join([*start, *_terms(entry), *_accuracies(entry)])


def describe_end(result: Mapping[str, Any], *, has_begun: bool = True) -> str:
    """How long it took; a run that has not begun was finished before."""
    took = f"{counted(result['steps'], 'step')} in {describe_seconds(result['seconds'])}"
    cure = "if the data has changed since, train in another folder with --out"
    return took if has_begun else f"finished before: {took}; {cure}"


def describe_seconds(seconds: float) -> str:
    """A duration as 12 s, 3:05 or 2:03:05."""
    if not 0 <= seconds < 1e7:  # before the first step it may be anything
        return "?"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _terms(entry: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {value:.4g}"
        for name, value in entry.items()
        if name not in _FACTS and not name.endswith("_accuracy") and isinstance(value, int | float)
    ]


def _accuracies(entry: Mapping[str, Any]) -> list[str]:
    return [
        f"{name.removesuffix('_accuracy')} {100 * value:.1f} %"
        for name, value in entry.items()
        if name.endswith("_accuracy") and value is not None
    ]
