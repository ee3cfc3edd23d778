"""The third door: train in spite of wrong labels, and hold what came of it as a `Run`."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from nearsay import config
from nearsay.batch import Labels, Predictions
from nearsay.config.records import default_folder
from nearsay.distributed import launch
from nearsay.doors.audit import audit_run
from nearsay.doors.predict import LabelTable, predict
from nearsay.errors import BAD_DATA, INTERRUPTED, RunError, Stopped
from nearsay.experiment import Experiment
from nearsay.label_issues.result import Audit
from nearsay.label_issues.run_audit import judge_run
from nearsay.training.loop import train as train_into
from nearsay.training.progress import (
    Progress,
    describe_end,
    describe_entry,
    describe_facts,
    make_display,
    percent,
)
from nearsay.training.run_folder import (
    read_experiment,
    read_labels,
    read_origin,
    read_predictions,
    read_result,
    remember_experiment,
)

Format = Literal["safetensors", "onnx", "torch-export"]


@dataclass(frozen=True)
class Run:
    """A run folder: what was trained, what came of it, and what can be done with it.

    Made by `nearsay.train` and `nearsay.load`. What a field holds is read from the folder when it
    is first asked for.

    Attributes:
        folder: where the run is.
        experiment: what was trained: data, noise, network, loss and every other choice.
        result: the content of `result.json`: accuracies by split, seconds, the noise found.
        labels: the labels that were learned, and the clean ones where they are known.
        predictions: features and logits of the training examples, in their order.

    >>> import nearsay, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = nearsay.train("toy", epochs=1, out=folder, quiet=True)
    ...     len(run.labels.given), run.predictions.logits.shape[1], sorted(run.result["accuracy"])
    (2000, 8, ['test'])
    """

    folder: Path

    @cached_property
    def experiment(self) -> Experiment:
        """What was trained."""
        return read_experiment(self.folder)

    @cached_property
    def result(self) -> dict[str, Any]:
        """What `result.json` holds; RunError if the run is not finished."""
        result = read_result(self.folder)
        if result is None:
            raise RunError(
                f"{self.folder} must hold a finished run. Train it again to finish it.", BAD_DATA
            )
        return result

    @cached_property
    def labels(self) -> Labels:
        """The labels that were learned."""
        return read_labels(self.folder)

    @cached_property
    def predictions(self) -> Predictions:
        """Features, logits and indices of the training examples."""
        return read_predictions(self.folder, self.labels)

    def predict(self, data: Any, *, device: str = "auto") -> LabelTable:
        """Predict labels for images or features that the run has not seen.

        Args:
            data: an array, tensor or table of features (N, D) or images (N, C, H, W); or a path,
                or a list of paths, of images, of folders of images, of tables with a column
                `path`, or of files of features (.npy, .npz, .parquet).
            device: auto, cpu, cuda or cuda:1.

        >>> import nearsay, numpy, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = nearsay.train("toy", epochs=1, out=folder, quiet=True)
        ...     table = run.predict(numpy.zeros((3, 32)))
        >>> table.probabilities.shape, table.labels[0] in table.classes
        ((3, 8), True)
        """
        return predict(self.folder, data, device=device)

    def evaluate(
        self, data: str | Path | None = None, split: str | None = None, *, device: str = "auto"
    ) -> dict[str, Any]:
        """Measure accuracy and calibration, and how well wrong training labels are found.

        Args:
            data: a folder of class folders, a table of paths and labels, or a file of features
                with labels; by default the data of the run.
            split: train, validation or test; by default test, or validation if there is no test.
            device: auto, cpu, cuda or cuda:1.
        """
        from nearsay.training.evaluate import evaluate  # noqa: PLC0415  # has the name of the method

        if data is not None:
            data = Path(data)
        return evaluate(self.folder, split=split, data=data, device=device)

    def audit(self, *, k: int = 20, device: str = "auto", write: bool = False) -> Audit:
        """Find labels that are likely wrong, from the predictions and the dynamics of the run.

        Args:
            k: how many neighbors to ask about each label, at most 1000.
            device: where to search for neighbors: auto, cpu, cuda or cuda:1.
            write: write audit.csv, audit.json and report.html into the folder, as `nearsay audit`.

        >>> import nearsay, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = nearsay.train("toy", epochs=1, out=folder, quiet=True)
        ...     audit = run.audit()
        >>> len(audit.scores)
        2000
        """
        if write:
            return audit_run(self.folder, k=k, device=device).audit
        return judge_run(self.folder, k=k, device=device).audit

    def export(self, folder: str | Path | None = None, *, format: Format = "safetensors") -> Path:
        """Write the network for other programs, with a model card; returns the file.

        Args:
            folder: where to; by default `export` in the folder of the run.
            format: safetensors, onnx or torch-export.
        """
        from nearsay.integrations.export import export_run  # noqa: PLC0415  # loads torch.export

        target = self.folder / "export" if folder is None else Path(folder)
        return export_run(self.folder, target, format=format)

    def report(self, path: str | Path | None = None) -> Path:
        """Draw curves and tables of the run as one HTML file; returns its path.

        Args:
            path: where to; by default `run.html` in the folder of the run.
        """
        from nearsay.report import write_report  # noqa: PLC0415  # drawing is an extra

        target = self.folder / "run.html" if path is None else Path(path)
        return write_report([self.folder], target, title=self.folder.resolve().name)

    def __repr__(self) -> str:
        """The folder, what was trained, and the final accuracy."""
        return f"<Run {self.folder}: {_describe(self.folder)}>"


def train(
    source: Any,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    quiet: bool = False,
    **arguments: Any,
) -> Run:
    """Train on your data or a benchmark; the same call again resumes, or returns the finished run.

    Ctrl-C, or the stop button of a notebook, leaves a folder from which the same call goes on.

    Args:
        source: the name of a recipe such as "digits" (`nearsay recipes` lists them); the path of a
            recipe file or of your data; a data set as a Python object; or an `Experiment`.
        out: the folder of the run; by default below `runs/`, named after the arguments. Required
            where the source or an argument is a Python object, such as an `Experiment`.
        overrides: single fields to change, as in `["objective.k=5", "batch_size=64"]`.
        device: auto, cpu, cuda or cuda:1; by default what the recipe says, which is auto.
        quiet: show no progress.
        arguments: what the recipe takes, such as `method="ncr"`, `noise=0.4`, `epochs=2`, `seed=1`.

    >>> import nearsay, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = nearsay.train("toy", method="ncr", noise=0.2, epochs=1, out=folder, quiet=True)
    ...     again = nearsay.train("toy", method="ncr", noise=0.2, epochs=1, out=folder, quiet=True)
    ...     again.result == run.result
    True
    """
    changes = [overrides] if isinstance(overrides, str) else list(overrides)
    if device is not None:
        changes.append(f"machine.device={device}")
    if isinstance(source, Experiment):
        call = config.Call(_change(source, changes, arguments), {})
    else:
        call = config.apply_overrides(config.call_source(source, arguments), changes)
    experiment, origin = call.experiment, call.origin
    # Without a recipe, the record in the folder cannot make the experiment again.
    has_recipe = "recipe" in origin
    if out is None and not has_recipe:
        raise ValueError("out must be the folder of the run when the source is a Python object.")
    folder = default_folder(origin) if out is None else Path(out)
    # Of several processes of one run, the first says it.
    notes = config.left_behind(call) if has_recipe and not launch().rank else []
    with closing(_find_display(quiet=quiet)) as display:
        for note in notes:
            display.note(note)
        try:
            train_into(experiment, folder, origin=origin, display=display)
        except Stopped as error:
            # The checkpoint is written. Python has its own word for what the user did.
            if error.code == INTERRUPTED:
                raise KeyboardInterrupt(str(error)) from error
            raise
    return load(folder, experiment=None if has_recipe else experiment)


def load(folder: str | Path, *, experiment: Experiment | None = None) -> Run:
    """Open the folder of a run.

    Args:
        folder: what `nearsay.train` or `nearsay train` has made.
        experiment: what was trained there, if it was trained from an `Experiment` and not by a
            recipe: the folder then does not say how to make the data and the network again.

    >>> import nearsay, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = nearsay.train("toy", epochs=1, out=folder, quiet=True)
    ...     nearsay.load(folder).evaluate()["num_examples"]
    4000
    """
    path = Path(folder)
    # It refuses a folder that holds no run.
    read_origin(path)
    if experiment is not None:
        remember_experiment(path, experiment)
    return Run(path)


def _change(
    experiment: Experiment, changes: Sequence[str], arguments: Mapping[str, Any]
) -> Experiment:
    if arguments:
        raise ValueError(
            f"{next(iter(arguments))} must not be given with an Experiment. "
            "Use dataclasses.replace, or overrides."
        )
    for change in changes:
        experiment = config.override(experiment, change)
    return experiment


def _describe(folder: Path) -> str:
    """Method, data and final accuracy in words; whatever the folder holds, it raises nothing."""
    try:
        origin = read_origin(folder)
    except RunError:
        return "no run"
    tree = origin.get("experiment")
    objective = tree.get("objective") if isinstance(tree, dict) else None
    kind = objective.get("kind") if isinstance(objective, dict) else None
    arguments = origin.get("arguments")
    method = arguments.get("method") if isinstance(arguments, dict) else None
    name = f"{method or kind or 'trained'} on {origin.get('recipe', 'own data')}"
    result = read_result(folder)
    if result is None:
        return f"{name}, not finished"
    for split in ("test", "validation", *result["accuracy"]):
        final = result["accuracy"].get(split, {}).get("final")
        if final is not None:
            return f"{name}, {split} accuracy {percent(final)}"
    return f"{name}, finished"


def _find_display(*, quiet: bool) -> Any:
    """Progress as text that is redrawn in a notebook, else as the command line shows it."""
    # In a notebook stderr is a red block that only grows, and terminals of IPython are terminals.
    shell = sys.modules.get("IPython")
    if quiet or shell is None or type(shell.get_ipython()).__name__ != "ZMQInteractiveShell":
        return make_display(quiet=quiet)
    return Notebook(import_module("IPython.display").display)


class Notebook:
    """Progress in one output of a notebook cell, redrawn in place."""

    def __init__(self, show: Any) -> None:
        self._show, self._handle = show, None
        self._fixed: list[str] = []
        self._now = ""
        self._num_epochs, self._has_begun = 0.0, False

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Show what is trained on what."""
        self._has_begun = True
        self._fixed.append(describe_facts(facts))
        self._draw()

    def step(self, progress: Progress) -> None:
        """Show how far the run is."""
        self._num_epochs = progress.num_epochs
        entry = {"epoch": round(progress.epoch, 1), "step": progress.step, **progress.terms}
        self._now = describe_entry(entry, progress.num_epochs)
        self._draw()

    def epoch(self, entry: Mapping[str, Any]) -> None:
        """Show the accuracies of the epoch."""
        self._now = describe_entry(entry, self._num_epochs)
        self._draw()

    def note(self, message: str) -> None:
        """Keep the note in sight."""
        self._fixed.append(f"note: {message}")
        self._draw()

    def end(self, result: Mapping[str, Any]) -> None:
        """Show how long it took."""
        self._fixed.append(describe_end(result, has_begun=self._has_begun))
        self._draw()

    def close(self) -> None:
        """Leave what is shown."""

    def _draw(self) -> None:
        data = {"text/plain": "\n".join([*self._fixed, self._now]).rstrip()}
        # The first call makes the output, the later ones replace its text.
        if self._handle is None:
            self._handle = self._show(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
