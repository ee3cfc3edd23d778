"""What a training shows while it runs: bars on a terminal, a line per epoch elsewhere, or nothing.

Here are also the tables and the words for numbers that the command line prints. rich is imported
when something is drawn, so that training without a terminal does not need it.
"""

import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO, Union

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

AnyDisplay = Union["Silent", "Lines", "Bars", "Events"]

# Entries of a line of the log that are neither terms of the loss nor accuracies.
_LOG_FACTS = ("epoch", "step", "rate")
# Entries of result.json that are not metrics.
_RESULT_FACTS = (
    "accuracy",
    "labels",
    "epochs",
    "steps",
    "seed",
    "seconds",
    "images_per_second",
    "peak_memory_bytes",
    "hardware",
    "processes",
    "versions",
    "skipped",
    "finished",
)
# The words for metrics that are shares; others are shown under their own names, as numbers.
_METRIC_WORDS = {
    "confidence right": "confidence in right labels",
    "confidence wrong": "confidence in wrong labels",
    "memorization memorized": "wrong labels memorized",
    "memorization corrected": "wrong labels corrected",
    "detection auroc": "wrong labels found, AUROC",
}
_HIDDEN_METRICS = ("memorization other", "detection average_precision")
# These change the direction of reading, so a name could look like another.
_DIRECTION_MARKS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Progress(NamedTuple):
    """How far a run is."""

    step: int
    num_steps: int
    epoch: float
    num_epochs: float
    images_per_second: float
    seconds_left: float
    # The loss and its terms, means since the epoch began.
    terms: dict[str, float]


class Display(Protocol):
    """What shows a run to the user."""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Called once before the first step, with what runs where."""
        ...

    def step(self, progress: Progress) -> None:
        """Called a few times a second."""
        ...

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Called after each epoch, with its line of the log."""
        ...

    def note(self, message: str) -> None:
        """Called with something that the user should know."""
        ...

    def end(self, result: Mapping[str, Any]) -> None:
        """Called once after the last step."""
        ...


def make_display(*, quiet: bool = False, stream: TextIO | None = None) -> AnyDisplay:
    """The display for the stream, by default stderr; colors and bars are for terminals only."""
    if quiet:
        return Silent(notes=sys.stderr)
    from rich.console import Console  # noqa: PLC0415

    stream = sys.stderr if stream is None else stream
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return Bars(console) if stream.isatty() and not console.is_dumb_terminal else Lines(stream)


class Silent:
    """Shows nothing; prints notes if it has a stream for them."""

    def __init__(self, notes: TextIO | None = None) -> None:
        self._notes = notes

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Show nothing."""

    def step(self, progress: Progress) -> None:
        """Show nothing."""

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Show nothing."""

    def note(self, message: str) -> None:
        """Print the note, because it is not progress."""
        if self._notes is not None:
            print(f"note: {message}", file=self._notes, flush=True)

    def end(self, result: Mapping[str, Any]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class Lines:
    """One plain line for each entry of the log, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._num_epochs, self._has_begun = stream, 0.0, False

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Print the data, the network and the device."""
        self._has_begun = True
        self._print(describe_facts(facts))

    def step(self, progress: Progress) -> None:
        """Remember the number of epochs."""
        self._num_epochs = progress.num_epochs

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Print the line."""
        self._print(describe_entry(entry, self._num_epochs))

    def note(self, message: str) -> None:
        """Print the note."""
        self._print(f"note: {message}")

    def end(self, result: Mapping[str, Any]) -> None:
        """Print the duration."""
        self._print(describe_end(result, has_begun=self._has_begun))

    def close(self) -> None:
        """Show nothing."""

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Bars:
    """A bar with speed and time left; below it the loss, its terms and the last accuracies."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._live: Live | None = None
        self._progress: Progress | None = None
        # The accuracies of the last evaluation.
        self._accuracies: dict[str, Any] = {}

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Print the data, the network and the device, and start the bar."""
        from rich.live import Live  # noqa: PLC0415

        self._console.print(describe_facts(facts), style="dim")
        self._live = Live(self, console=self._console, transient=True, refresh_per_second=4)
        self._live.start()

    def step(self, progress: Progress) -> None:
        """Move the bar when it is next drawn."""
        self._progress = progress

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Keep the accuracies of the epoch until the next ones."""
        for name, value in entry.items():
            if name.endswith("_accuracy"):
                self._accuracies[name] = value

    def note(self, message: str) -> None:
        """Print the note above the bar."""
        self._console.print(f"note: {message}", style="yellow")

    def end(self, result: Mapping[str, Any]) -> None:
        """Remove the bar and print the duration."""
        has_begun = self._live is not None
        self.close()
        self._console.print(describe_end(result, has_begun=has_begun), style="dim")

    def close(self) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich__(self) -> "Group | Text":
        """What rich draws several times a second."""
        from rich.console import Group  # noqa: PLC0415
        from rich.progress_bar import ProgressBar  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

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
        numbers = self._accuracies | progress.terms
        # Accuracies first: a narrow terminal cuts the end of the line.
        text = "  ".join([*_accuracies(numbers), *_terms(numbers)])
        return Group(line, Text(text, style="dim", no_wrap=True))


class Events:
    """Another display, and the log as TensorBoard events in a folder."""

    def __init__(self, inner: AnyDisplay, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError(
                '--tensorboard needs TensorBoard: pip install ".[tensorboard]" in the clone'
            )
        self._inner, self._folder = inner, folder
        # torch's SummaryWriter, which may not be imported before TensorBoard is known to be there.
        self._writer: Any = None

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Open the file; events after the step at which a run resumes are removed."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        self._writer = SummaryWriter(str(self._folder), purge_step=facts["resumed_at"])
        self._inner.begin(facts)

    def step(self, progress: Progress) -> None:
        """Show it only."""
        self._inner.step(progress)

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Write every number of the entry."""
        for name, value in entry.items():
            if name not in ("epoch", "step") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, entry["step"])
        self._inner.epoch(entry)

    def note(self, message: str) -> None:
        """Show it only."""
        self._inner.note(message)

    def end(self, result: Mapping[str, Any]) -> None:
        """Close the file."""
        self._inner.end(result)
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._inner.close()


def make_table(headers: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> "Table":
    """A table with numbers in all columns but the first; a table without headers holds text."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    has_headers = any(headers)
    table = Table(box=box.SIMPLE_HEAD, show_header=has_headers, pad_edge=False)
    for number, header in enumerate(headers):
        is_number = number > 0 and has_headers
        table.add_column(header, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def print_table(table: "Table") -> None:
    """Print a table that has rows; a narrow terminal wraps its headers, never its numbers."""
    from rich.console import Console  # noqa: PLC0415

    if not table.rows:
        return
    width = None if sys.stdout.isatty() else 500
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    unbounded = console.options.update(max_width=10_000)
    if console.measure(table, options=unbounded).maximum > console.width:
        table.padding = (0, 0, 0, 1)
        for column in table.columns:
            column.header = "\n".join(str(column.header).split())
            # Text in a table without headers may continue in the next line.
            column.no_wrap = table.show_header
        if table.show_header:
            # The terminal itself wraps lines that are still too long.
            console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)


def summarize(result: Mapping[str, Any]) -> "Table":
    """The result of a training as a table: accuracies, then every metric of result.json."""
    table = make_table(("accuracy", "final", "best", "mean of last 10 or fewer"))
    for split, accuracy in result["accuracy"].items():
        shares = [percent(accuracy.get(name)) for name in ("final", "best", "last_10")]
        table.add_row(plain(split), *shares)
    rate = result["labels"]["effective_rate"]
    if rate is not None:
        table.add_row("wrong labels", percent(rate))
    for name, text in metric_rows(result):
        table.add_row(plain(name), text)
    return table


def metric_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The name and the text of every metric in a `result.json`, for tables of any kind."""
    values: dict[str, object] = {}
    for name, value in result.items():
        if name in _RESULT_FACTS:
            continue
        parts = value if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            values[f"{name} {part}".strip()] = number
    # The known metrics come first and in one order, whatever the order in the file.
    for name in dict.fromkeys([*_METRIC_WORDS, *values]):
        number = values.get(name)
        if not isinstance(number, int | float) or name in _HIDDEN_METRICS:
            continue
        if name in _METRIC_WORDS:
            yield _METRIC_WORDS[name], percent(number)
        else:
            yield name.replace("_", " "), f"{number:.4g}"


def added_metrics(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The path of each number that an added metric has in a `result.json`: name, or name, split."""
    others = {"metrics", *_RESULT_FACTS, *(words.split()[0] for words in _METRIC_WORDS)}
    for name, value in result.items():
        if name in others:
            continue
        if not isinstance(value, Mapping):
            yield (name,)
            continue
        for part in value:
            yield (name, part)


def percent(share: float | None) -> str:
    """A share as 81.3 %; a dash for None and NaN."""
    return "-" if share is None or share != share else f"{100 * share:.1f} %"


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as "1 run" or "12,000 runs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """The text with a replacement for each character that could command or mislead a terminal.

    These are control characters, line breaks, marks of reading direction, and what has no encoding.
    """
    characters = []
    for character in text:
        category = unicodedata.category(character)
        is_bad = category in ("Cc", "Cs", "Zl", "Zp") or character in _DIRECTION_MARKS
        characters.append("\ufffd" if is_bad else character)
    return "".join(characters)


def describe_facts(facts: Mapping[str, Any]) -> str:
    """The data, the network and the device in one line."""
    num_classes, rate = facts["num_classes"], facts["effective_rate"]
    classes = "1 class" if num_classes == 1 else f"{num_classes} classes"
    wrong = "" if rate is None else f", {100 * rate:.1f} % of the labels wrong"
    resumed = f", resumed at step {facts['resumed_at']}" if facts["resumed_at"] else ""
    return (
        f"{counted(facts['num_examples'], 'example')} in {classes}{wrong}; "
        f"{facts['num_parameters']:,} parameters; {counted(facts['num_steps'], 'step')} on "
        f"{facts['device']} ({facts['precision']}, {facts['loading']} data){resumed}"
    )


def describe_entry(entry: Mapping[str, Any], num_epochs: float = 0.0) -> str:
    """A line of the log for people; `num_epochs` is 0 if it is unknown."""
    total = f"/{num_epochs:g}" if num_epochs else ""
    start = [f"epoch {entry['epoch']:g}{total}", f"step {entry['step']}"]
    return "  ".join([*start, *_terms(entry), *_accuracies(entry)])


def describe_end(result: Mapping[str, Any], *, has_begun: bool = True) -> str:
    """How long the run took; a run that has not begun now was finished before."""
    duration = f"{counted(result['steps'], 'step')} in {describe_seconds(result['seconds'])}"
    if has_begun:
        return duration
    return f"finished before: {duration}. If the data has changed, train in another --out folder."


def describe_seconds(seconds: float) -> str:
    """A duration as 12 s, 3:05 or 2:03:05; "?" for what is not a duration."""
    if not 0 <= seconds < 1e7:
        return "?"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _terms(entry: Mapping[str, Any]) -> list[str]:
    texts = []
    for name, value in entry.items():
        is_term = name not in _LOG_FACTS and not name.endswith("_accuracy")
        if is_term and isinstance(value, int | float):
            texts.append(f"{name} {value:.4g}")
    return texts


def _accuracies(entry: Mapping[str, Any]) -> list[str]:
    texts = []
    for name, value in entry.items():
        if name.endswith("_accuracy") and value is not None:
            texts.append(f"{name.removesuffix('_accuracy')} {100 * value:.1f} %")
    return texts
