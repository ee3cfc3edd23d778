import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from nearsay.training import progress
from nearsay.training.progress import Progress

FACTS = {
    "device": "cpu",
    "num_examples": 1347,
    "num_classes": 10,
    "effective_rate": 0.367,
    "num_parameters": 25416,
    "num_steps": 300,
    "resumed_at": 0,
    "loading": "resident",
    "precision": "float32",
}
ENTRY = {
    "epoch": 3.0,
    "step": 30,
    "rate": 0.08,
    "loss": 0.9125,
    "ncr": 0.25,
    "train_accuracy": 0.5,
    "test_accuracy": 0.8125,
}
RESULT = {
    "accuracy": {"test": {"final": 0.8, "best": 0.85, "best_epoch": 2.0, "last_10": 0.79}},
    "labels": {"effective_rate": 0.367},
    "confidence": {"right": 0.7, "wrong": 0.1},
    "memorization": {"memorized": 0.05, "corrected": 0.9, "other": 0.05},
    "detection": {"auroc": 0.99, "average_precision": 0.95},
    "steps": 300,
    "seconds": 65.4,
}
MOMENT = Progress(
    30, 300, 3.0, 30.0, 5200.0, 185.0, {"loss": 0.9125, "ncr": 0.25, "train_accuracy": 0.25}
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(display):
    display.begin(FACTS)
    display.step(MOMENT)
    display.epoch(ENTRY)
    display.note("a checkpoint was damaged")
    display.end(RESULT)
    display.close()


def test_lines_say_what_is_trained_each_epoch_and_how_long_it_took():
    stream = io.StringIO()
    shown(progress.Lines(stream))
    assert stream.getvalue().splitlines() == [
        "1,347 examples in 10 classes, 36.7 % of the labels wrong; 25,416 parameters; 300 steps on cpu (float32, "
        "resident data)",
        "epoch 3/30  step 30  loss 0.9125  ncr 0.25  train 50.0 %  test 81.2 %",
        "note: a checkpoint was damaged",
        "300 steps in 1:05",
    ]


def test_bars_show_step_epoch_speed_time_left_terms_and_accuracy(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    bars = progress.Bars(Console(file=Terminal(), force_terminal=True, width=120))
    bars.step(MOMENT)
    bars.epoch(ENTRY)
    page = io.StringIO()
    Console(file=page, width=120).print(bars)
    first, second = page.getvalue().splitlines()
    assert first.split()[:2] == ["epoch", "3.0/30"]
    assert first.rstrip().endswith("step 30/300 5,200 images/s 3:05 left")
    # So far, and when last judged.
    assert second.rstrip() == "train 25.0 %  test 81.2 %  loss 0.9125  ncr 0.25"


def test_bars_give_the_terminal_back_after_an_error_and_twice_is_fine(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    bars = progress.Bars(Console(file=stream, force_terminal=True))
    bars.begin(FACTS)
    bars.close()
    bars.close()
    # Cursor off and on.
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_without_color_there_is_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    shown(progress.make_display(stream=stream))
    assert "a checkpoint was damaged" in stream.getvalue()
    assert "\x1b[3" not in stream.getvalue()
    monkeypatch.delenv("NO_COLOR")
    stream = Terminal()
    shown(progress.make_display(stream=stream))
    # The note is yellow.
    assert "\x1b[33m" in stream.getvalue()


def test_the_display_suits_the_stream(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress.make_display(stream=Terminal()), progress.Bars)
    assert isinstance(progress.make_display(stream=io.StringIO()), progress.Lines)
    assert isinstance(progress.make_display(quiet=True, stream=Terminal()), progress.Silent)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress.make_display(stream=Terminal()), progress.Lines)


def test_quiet_shows_nothing_but_notes(capsys):
    shown(progress.make_display(quiet=True))
    assert capsys.readouterr() == ("", "note: a checkpoint was damaged\n")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 s"),
        (1.234, "1.23 s"),
        (59, "59 s"),
        (60, "1:00"),
        (185, "3:05"),
        (3600, "1:00:00"),
        (93784, "26:03:04"),
    ],
)
def test_durations_read_like_a_clock(seconds, told):
    assert progress.describe_seconds(seconds) == told


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
def test_a_duration_that_nobody_knows_is_a_question_mark(seconds):
    assert progress.describe_seconds(seconds) == "?"


@pytest.mark.parametrize(("width", "num_headers"), [(200, 1), (50, 2), (20, 2)])
def test_a_narrow_terminal_cuts_no_cell_of_a_table(monkeypatch, width, num_headers):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    headers, row = (
        ("run", "validation, final", "last ten epochs"),
        ("a/long/path/to-a-run", "36.7 %", "猫"),
    )
    progress.print_table(progress.make_table(headers, [row]))
    lines = [
        line for line in re.sub(r"\x1b\[\d*m", "", stream.getvalue()).splitlines() if line.strip()
    ]
    assert lines[-1].split() == ["a/long/path/to-a-run", "36.7", "%", "猫"]
    assert "…" not in stream.getvalue()
    assert len(lines) - 2 >= num_headers


def test_the_summary_leaves_out_what_is_unknown(capsys):
    unknown = {
        "confidence": None,
        "memorization": None,
        "detection": None,
        "labels": {"effective_rate": None},
    }
    progress.print_table(progress.summarize({**RESULT, **unknown}))
    out = capsys.readouterr().out
    assert "80.0 %" in out
    assert "wrong" not in out
    # No example was held out.
    progress.print_table(progress.summarize({**RESULT, **unknown, "accuracy": {}}))
    assert capsys.readouterr().out == ""


def test_the_summary_has_every_metric_of_the_result(capsys):
    more = {"balanced_accuracy": {"test": 0.75}, "mean_length": 3.5, "unknown": None}
    rows = dict(progress.metric_rows({**RESULT, **more}))
    assert rows["balanced accuracy test"] == "0.75"
    assert rows["mean length"] == "3.5"
    assert rows["confidence in right labels"] == "70.0 %"
    assert "unknown" not in rows
    progress.print_table(progress.summarize({**RESULT, **more}))
    assert "balanced accuracy test" in capsys.readouterr().out


def test_events_hold_every_number_of_the_log_by_its_step(monkeypatch, tmp_path):
    written, closed = [], []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            closed.append(True)

    monkeypatch.setattr(progress, "find_spec", lambda name: object())
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer)
    )
    stream = io.StringIO()
    events = progress.Events(progress.Lines(stream), tmp_path / "tensorboard")
    shown(events)
    assert written == [
        (str(tmp_path / "tensorboard"), 0),
        ("rate", 0.08, 30),
        ("loss", 0.9125, 30),
        ("ncr", 0.25, 30),
        ("train_accuracy", 0.5, 30),
        ("test_accuracy", 0.8125, 30),
    ]
    assert closed == [True]
    assert "epoch 3/30" in stream.getvalue()


def test_names_in_a_table_cannot_command_the_terminal(capsys):
    names = ("\x1b]0;taken\x07", "two\nlines", "\u202egpj", "[red]:cat:[/]")
    progress.print_table(progress.make_table(("name",), [[name] for name in names]))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[3:7] == ["\ufffd]0;taken\ufffd", "two\ufffdlines", "\ufffdgpj", "[red]:cat:[/]"]
