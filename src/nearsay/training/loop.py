"""The training loop, which makes a run folder of an experiment; read this file first.

    train               experiment -> run folder, or the result of a finished one
      _Training.go      resume, then for each step: rows -> Step -> log, evaluate, save
      _Training._finish predictions, dynamics, weights and result.json

A run may be killed at any moment. When `train` is called again, it resumes from the last
checkpoint; on a CPU the result and the log are byte-identical to those of an uninterrupted run.
"""

import json
import math
import platform
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nearsay import config, distributed, metrics, optim
from nearsay._version import __version__
from nearsay.batch import Files, Predictions
from nearsay.data.loader import Lost, Rows
from nearsay.errors import BAD_DATA, BadImage, NotFinite, RunError, Stopped
from nearsay.experiment import Experiment
from nearsay.files import pack_sealed
from nearsay.noise import measure_noise
from nearsay.training.checkpoints import LockedRun, open_run, write_whole
from nearsay.training.metrics import measure_splits, measure_train, summarize_accuracy
from nearsay.training.predict import Pass, pack_networks, propagate_in_run
from nearsay.training.progress import Display, Progress, Silent
from nearsay.training.run_folder import check_relabeled, check_same, claim, is_whole, read_result
from nearsay.training.splits import Feed, open_splits
from nearsay.training.step import Setting, Step, make_learners, observe_, restore
from nearsay.training.system import (
    Clock,
    backend,
    hardware,
    own_states,
    peak_memory,
    set_own_states,
    signals,
)

# Images of this height and width take long on a CPU.
_LARGE_IMAGE = 128
# With fewer images in the whole run, compiling takes longer than it saves.
_COMPILE_FROM = 10_000_000
# Batches on which the statistics of averaged weights are measured.
_NUM_CALIBRATION = 16
# Tensors of a checkpoint that every process has for itself, by the start of their names.
_OWN = ("generator.", "own.")
# Tensors that must be finite in a checkpoint.
_LEARNED = ("network", "optimizer", "average")


def train(
    experiment: Experiment,
    folder: str | Path,
    *,
    origin: Mapping[str, Any] | None = None,
    display: Display | None = None,
) -> dict[str, Any]:
    """Run the experiment in `folder`, or resume it there; returns the content of result.json.

    Args:
        experiment: What to train.
        folder: The run folder; it is made if it does not exist.
        origin: The recipe and its arguments, so that other commands can make the experiment again.
        display: What shows the progress; by default nothing does.
    """
    folder = Path(folder)
    launch, machine = distributed.launch(), experiment.machine
    if display is None or launch.rank > 0:
        display = Silent()
    device = machine.find_device(launch.local_rank)
    with (
        distributed.joined(device, machine.timeout),
        # The first process alone writes into the folder.
        open_run(folder) if distributed.rank() == 0 else nullcontext() as run,
        signals() as received,
        backend(machine, device, experiment.seed + distributed.rank()),
    ):
        result = None
        if run is not None:
            check_same(run, experiment)
            if is_whole(folder):
                result = read_result(folder)
        if run is not None and result is not None:
            check_relabeled(run, experiment)
            display.end(result)
        if distributed.share("" if result is None else "finished", device):
            return result or {}
        training = _Training(experiment, folder, run, device, display)
        notes = [*training.splits.notes, *training.notes()]
        if run is not None:
            notes += claim(run, experiment, training.splits, origin)
        for note in notes:
            display.note(note)
        return training.go(received)


class _Training:
    """A run in progress."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        run: LockedRun | None,
        device: torch.device,
        display: Display,
    ) -> None:
        self.experiment, self.folder, self.run = experiment, folder, run
        self.device, self.display = device, display
        self.splits = open_splits(experiment)
        self.feed = Feed(experiment, self.splits, device)
        self.order = self.feed.order
        self.num_per_epoch = experiment.batches_per_epoch or self.order.batches_per_pass
        self.num_steps = max(1, round(experiment.epochs * self.num_per_epoch))
        self.step = self._make_step()
        # What the loss computes in this epoch; the loss names it.
        self.phase = ""
        # Why images were left out, in order and each reason once.
        self.skipped: dict[str, None] = {}
        self.lost = Lost(self.order.batches_per_pass * self.order.batch_size)
        self.began = self.saved_at = time.perf_counter()
        self.clock = Clock(self.order.batch_size)

    def _make_step(self) -> Step:
        """The networks, and the step that trains them."""
        experiment, splits, device = self.experiment, self.splits, self.device
        machine, labels = experiment.machine, splits.labels
        example = splits.example(experiment.image_size)
        num_examples, num_classes = len(labels.given), len(labels.classes)
        learners = make_learners(experiment, num_examples, num_classes, example, device)

        # Collectives are not captured, and compiling pays off in long runs only.
        is_gpu, is_alone = device.type == "cuda", distributed.num_processes() == 1
        captures, compiles = machine.capture, machine.compile
        if captures is None:
            captures = is_alone
        if compiles is None:
            compiles = is_gpu and self.num_steps * self.order.batch_size >= _COMPILE_FROM

        label_weights = torch.ones(num_classes)
        if experiment.class_weights:
            # Held-out labels have no part in the weights.
            trained = replace(labels, given=labels.given[splits.train], clean=None)
            label_weights = optim.class_weights(trained)
        given = [labels.given]
        if experiment.networks == 2:
            given.append(labels.given if splits.other_given is None else splits.other_given)
        setting = Setting(
            source=self.feed.source,
            # Copies, because propagation writes into them.
            given=tuple(part.to(device, copy=True) for part in given),
            label_weights=label_weights.to(device),
            batches_per_epoch=self.num_per_epoch,
            batches_per_pass=self.order.batches_per_pass,
            is_cut=self.feed.is_cut,
            device=device,
            dtype=machine.find_dtype(device),
            captures=captures and is_gpu,
            compiles=compiles,
        )
        return Step(experiment, setting, learners)

    def notes(self) -> list[str]:
        """Choices that the user may not have meant: without effect, or very slow."""
        experiment, notes = self.experiment, []
        last_epoch = (self.num_steps - 1) // self.num_per_epoch
        # Some losses have a start, and some of these find it by themselves ("auto").
        start = getattr(experiment.objective, "start_epoch", None)
        if isinstance(start, float | int) and start > last_epoch:
            notes.append(
                f"start_epoch={start:g} of {type(experiment.objective).__name__} is never reached "
                f"in epochs={experiment.epochs:g}; start earlier, or train for longer"
            )
        size, are_files = experiment.image_size, isinstance(self.splits.inputs, Files)
        if self.device.type == "cpu" and are_files and size >= _LARGE_IMAGE:
            cure = "size=64"
            # Networks of timm have no width, and weights to start from fit one width only.
            if hasattr(experiment.backbone, "width") and experiment.init is None:
                cure += " --set backbone.width=16"
            notes.append(
                f"images of {size} x {size} pixels take long without a GPU; {cure} is faster, if "
                "the recipe takes size="
            )
        return notes

    def go(self, received: list[int]) -> dict[str, Any]:
        """From the last checkpoint, or from the beginning, to the end."""
        start = self._resume()
        self.display.begin(self._facts(start))
        # Steps of an earlier process do not count as done in the time of this one.
        self.clock.restart(start)
        self.saved_at = time.perf_counter()
        steps = range(start, self.num_steps)
        with self.feed.explained():
            for number, rows in zip(steps, self.feed.rows(steps), strict=True):
                if number % self.num_per_epoch == 0:
                    epoch, state = number / self.num_per_epoch, self.step.learners[0].state
                    self.phase = self.experiment.objective.phase(epoch, state)
                self._check_rows(rows)
                self.step(rows, self.phase)
                self._after_step(number + 1, received)
        return self._finish()

    def _after_step(self, done: int, received: list[int]) -> None:
        """Show, log, evaluate and save, when it is time for each; stop after a signal."""
        is_last = done == self.num_steps
        is_epoch_end = is_last or done % self.num_per_epoch == 0
        if self.clock.is_due(done) or is_epoch_end:
            self._look(done)
        if is_epoch_end:
            self._end_epoch(done)
        # A signal or a clock of one process decides for all of them.
        is_stopped, is_due = distributed.agreed(
            [bool(received), self._is_checkpoint_due(done)], self.device
        )
        if is_stopped or is_due or is_last:
            self._save(done)
            self.saved_at = time.perf_counter()
        if is_stopped and not is_last:
            raise Stopped(received[0] if received else signal.SIGTERM, self.folder)

    def _is_checkpoint_due(self, done: int) -> bool:
        machine = self.experiment.machine
        if machine.checkpoint_steps is not None:
            return done % machine.checkpoint_steps == 0
        seconds = time.perf_counter() - self.saved_at
        return distributed.rank() == 0 and seconds >= machine.checkpoint_seconds

    # Watching a run

    def _look(self, done: int) -> None:
        """Wait for the device, check that everything is finite, and show the progress."""
        if not self.step.is_fine.item():
            self._stop_not_finite(int(self.step.bad_step.item()))
        self.clock.look(done)
        rate = self.clock.rate
        left = (self.num_steps - done) * self.order.batch_size / rate if rate else math.inf
        epoch, num_epochs = done / self.num_per_epoch, self.experiment.epochs
        terms = self.step.means()
        self.display.step(Progress(done, self.num_steps, epoch, num_epochs, rate, left, terms))

    def _stop_not_finite(self, step: int) -> None:
        """Name the examples of the first step that was not finite, and end the run."""
        examples = self.order.batch(step).tolist()
        inputs = self.splits.inputs
        epoch, path = step / self.num_per_epoch, self.folder / "not_finite.json"
        if self.run is not None:
            facts = {"step": step, "epoch": epoch, "examples": examples, "names": []}
            if isinstance(inputs, Files):
                facts["names"] = [inputs.names[index] for index in examples]
            self.run.write_json(path.name, facts)
        raise NotFinite(
            f"the loss, its gradient or a weight was not finite at step {step} (epoch "
            f"{epoch:.2f}); {path} names its examples. The last checkpoint is kept. Try a lower "
            "optimizer.lr, clip=1, or machine.precision=float32."
        )

    def _check_rows(self, rows: Rows) -> None:
        """Stop at images that cannot be decoded, or note them."""
        reasons = [reason for _, reason in rows.problems]
        self.lost.count(len(rows.indices), reasons)
        self._check_images(reasons)

    def _check_images(self, reasons: Iterable[str], *, may_stop: bool = True) -> None:
        """Stop at an image that cannot be decoded, or note once that it is left out."""
        for reason in reasons:
            if may_stop and self.experiment.bad_images == "stop":
                raise BadImage(f"{reason}; use bad_images=skip to leave such images out")
            if reason not in self.skipped:
                self.skipped[reason] = None
                self.display.note(f"left out: {reason}")

    def _facts(self, start: int) -> dict[str, Any]:
        """What the display shows before the first step."""
        realized = measure_noise(self.splits.labels)
        parameters = self.step.learners[0].network.parameters()
        return {
            "device": str(self.device),
            "hardware": hardware(self.device),
            "num_examples": len(self.splits.train),
            "num_classes": len(self.splits.labels.classes),
            "effective_rate": realized.effective_rate,
            "fingerprint": realized.fingerprint,
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "num_steps": self.num_steps,
            "resumed_at": start,
            "loading": "streaming" if self.feed.source is None else "resident",
            "precision": str(self.step.setting.dtype).removeprefix("torch."),
        }

    # The end of an epoch

    def _end_epoch(self, done: int) -> None:
        """Evaluate, propagate labels and observe the examples if it is time; write the log."""
        experiment = self.experiment
        is_last, epoch = done == self.num_steps, done / self.num_per_epoch
        factor = experiment.schedule.factor(epoch, experiment.epochs)
        entry: dict[str, Any] = {"epoch": epoch, "step": done}
        entry["rate"] = experiment.optimizer.lr * factor
        entry |= self.step.drain()
        if is_last or round(epoch) % experiment.evaluate_every == 0:
            entry |= self._evaluate(done)
        if done == self.num_per_epoch * (experiment.propagate_at or 0):
            entry["transductive_accuracy"] = self._propagate()
        # Ten times in a run at most, because it costs a pass over all examples.
        every = max(1, round(experiment.epochs / 10))
        if experiment.mixup is not None and (is_last or round(epoch) % every == 0):
            self._observe_all()
        if self.run is not None:
            self.run.append_log(entry)
        self.display.epoch(entry)
        # Evaluation does not count as training time.
        self.clock.restart(done)

    def _evaluate(self, done: int) -> dict[str, float]:
        """The accuracy on every split that is held out."""
        networks, accuracies = self._judged_networks(done), {}
        for name, inputs, truth in self.splits.judged:
            table, unreadable = self._pass().together(networks, inputs)
            self._check_images(unreadable.values())
            accuracy = metrics.accuracy(table.logits, truth[table.indices])
            accuracies[f"{name}_accuracy"] = accuracy
        return accuracies

    def _judged_networks(self, done: int) -> list[Module]:
        """The networks to evaluate: the averaged ones, if any, with statistics of their own."""
        if self.experiment.averaging is None or self.experiment.eval_weights == "networks":
            return [learner.network for learner in self.step.learners]
        # The statistics are measured on the first batches of the current pass, augmented as they
        # were in training.
        turn = max(0, done - 1) // self.order.batches_per_pass
        start = turn * self.order.batches_per_pass
        steps = range(start, start + min(_NUM_CALIBRATION, self.order.batches_per_pass))
        networks = []
        for average in self.step.averages():
            assert average is not None
            network = optim.averaged_copy(average)
            batches = (self.step.prepare(self.feed.read(step), turn) for step in steps)
            optim.recalibrate_(network, batches)
            networks.append(network)
        return networks

    def _propagate(self) -> float | None:
        """Learn the labels of the neighbors from here on; returns the share that is right."""
        table = self._pass().over([self.step.learners[0].network], self.splits.inputs).predictions
        clean, train = self.splits.labels.clean, self.splits.train
        shares = []
        for given in self.step.setting.given:
            labels, share = propagate_in_run(table, given.cpu(), clean, train)
            given.copy_(labels)
            shares.append(share)
        # The labels may differ between processes, because statistics of BatchNorm may.
        distributed.broadcast_(self.step.setting.given)
        return shares[0]

    def _observe_all(self) -> None:
        """Observe all training examples, because with mixup no step sees one as it is."""
        networks = [self.step.learners[0].network]
        table = self._pass().together(networks, self.splits.inputs).predictions
        is_trained = torch.isin(table.indices, self.splits.train)
        logits = table.logits[is_trained].to(self.device)
        indices = table.indices[is_trained].to(self.device)
        observe_(self.step.dynamics, logits, self.step.setting.given[0][indices], indices)

    def _pass(self) -> Pass:
        return Pass(
            normalize=self.experiment.normalize,
            size=self.experiment.image_size,
            device=self.device,
            dtype=self.step.setting.dtype,
            workers=self.experiment.machine.workers,
            timeout=self.experiment.machine.timeout,
        )

    # Checkpoints

    def _save(self, done: int) -> None:
        """Write a checkpoint, unless something is not finite."""
        self._look(done)
        own = own_states(self.device, self.step.buffers())
        learned = self.step.tensors()
        are_finite = []
        for name, tensor in learned.items():
            if name.startswith(_LEARNED):
                are_finite.append(tensor.isfinite().all())
        # A weight may overflow although the gradient was finite.
        is_bad = bool(~torch.stack(are_finite).all())
        if distributed.agreed([is_bad], self.device)[0]:
            self._stop_not_finite(done - 1)
        if self.run is None:
            return
        state = {
            "step": done,
            "phase": self.phase,
            "log_end": self.run.log_end(),
            "sums": self.step.names,
            "skipped": list(self.skipped),
            "seconds": time.perf_counter() - self.began,
            "images_per_second": self.clock.rate,
        }
        self.run.save(done, {**learned, **own}, state)
        self.clock.restart(done)

    def _resume(self) -> int:
        """Restore the last checkpoint on all processes; returns the number of steps done."""
        checkpoint = None if self.run is None else self.run.load()
        content = json.dumps(None if checkpoint is None else checkpoint.state)
        state = json.loads(distributed.share(content, self.device))
        if state is None:
            if self.run is not None:
                # Lines of a run that ended before its first checkpoint.
                self.run.cut_log(0)
            return 0
        self.step.begin_sums(config.current_terms(state["sums"]))
        saved: Mapping[str, Tensor] = {}
        if self.run is not None and checkpoint is not None:
            saved = checkpoint.tensors
            for damaged in checkpoint.damaged:
                note = f"skipped a damaged checkpoint ({damaged}); resuming from step"
                self.display.note(f"{note} {checkpoint.step}")
            self._restore(saved, checkpoint.step)
            self.run.cut_log(state["log_end"])
        distributed.broadcast_(self.step.tensors().values())
        set_own_states(saved, self.device, self.step.buffers())
        # Older checkpoints call it stage, and have no images_per_second.
        self.phase = state.get("phase", state.get("stage"))
        self.clock.resume(state.get("images_per_second", 0.0))
        self.skipped = dict.fromkeys(state["skipped"])
        self.began -= state["seconds"]
        return int(state["step"])

    def _restore(self, saved: Mapping[str, Tensor], step: int) -> None:
        shared = {name: saved[name] for name in saved if not name.startswith(_OWN)}
        try:
            restore(self.step, shared)
        except ValueError as error:
            raise RunError(
                f"the checkpoint of step {step} in {self.folder} is of another experiment: {error}",
                BAD_DATA,
            ) from error

    # The end of the run

    def _finish(self) -> dict[str, Any]:
        """Write what other commands read; returns the content of result.json."""
        networks = self._judged_networks(self.num_steps)
        if self.run is None:
            return {}
        tables = self._predict_all(networks)
        folder = self.folder / "predictions"
        folder.mkdir(exist_ok=True)
        for name, table in tables.items():
            write_whole(folder / f"{name}.safetensors", pack_sealed(table._asdict()))
        dynamics = {}
        for name, tensor in self.step.dynamics.items():
            # The last row takes what must not be kept.
            dynamics[name] = tensor[:-1].cpu().contiguous()
        write_whole(self.folder / "dynamics.safetensors", pack_sealed(dynamics))
        write_whole(self.folder / "model.safetensors", pack_sealed(pack_networks(networks)))
        result = self._result(tables, self.run.read_log())
        self.run.write_json("result.json", result)
        self.display.end(result)
        return result

    def _predict_all(self, networks: list[Module]) -> dict[str, Predictions]:
        """The predictions for the train split and for every split that is evaluated."""
        table, unreadable = self._pass().over(networks, self.splits.inputs)
        self.lost.count(len(self.splits.inputs), unreadable.values())
        # The training is complete, so bad images no longer stop the run.
        self._check_images(unreadable.values(), may_stop=False)
        tables = {"train": table}
        for name, inputs, _ in self.splits.judged:
            tables[name] = self._pass().over(networks, inputs).predictions
        return tables

    def _result(
        self, tables: Mapping[str, Predictions], entries: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The content of result.json; to add a metric, see training/metrics.py."""
        experiment, splits = self.experiment, self.splits
        accuracy = {}
        for split in splits.judged:
            accuracy[split.name] = summarize_accuracy(entries, f"{split.name}_accuracy")
        realized = measure_noise(splits.labels)
        return {
            "accuracy": accuracy,
            "labels": {
                "fingerprint": realized.fingerprint,
                "requested_rate": getattr(experiment.noise, "rate", None),
                "effective_rate": realized.effective_rate,
                "num_examples": len(splits.train),
                "num_classes": len(splits.labels.classes),
            },
            **measure_train(tables["train"], splits.labels, splits.train),
            **measure_splits(tables, splits.judged, splits.labels.classes),
            "epochs": experiment.epochs,
            "steps": self.num_steps,
            "seed": experiment.seed,
            "seconds": round(time.perf_counter() - self.began, 3),
            "images_per_second": round(self.clock.rate, 1),
            "peak_memory_bytes": peak_memory(self.device),
            "hardware": hardware(self.device),
            "processes": distributed.num_processes(),
            "versions": {
                "nearsay": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "skipped": len(self.skipped),
            "finished": True,
        }
