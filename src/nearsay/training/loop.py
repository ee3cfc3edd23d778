"""The loop, which makes a run folder of an experiment; read this first.

A run can be killed at any moment and goes on from its last checkpoint when `train` is called again; on a CPU it ends
with the very bytes of a run that was never interrupted, log included.
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
from torch.nn import Module

from nearsay import __version__, config, distributed, metrics, optim
from nearsay.batch import Files, Predictions
from nearsay.data.loader import Lost
from nearsay.errors import BAD_DATA, BadImage, NotFinite, RunError, Stopped
from nearsay.experiment import Experiment
from nearsay.noise import describe
from nearsay.sealed import pack_sealed
from nearsay.training.checkpoints import Checkpoint, Run, open_run, write_whole
from nearsay.training.display import Display, Progress, Silent
from nearsay.training.feed import Feed
from nearsay.training.outcome import pack_networks, propagate, summarize, wrong_labels
from nearsay.training.predict import Pass
from nearsay.training.run_folder import check_relabeled, check_same, claim, is_whole, read_result
from nearsay.training.splits import open_splits
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

_LARGE = 128  # pixels, from which on a CPU is slow
_COMPILE_FROM = 10_000_000  # images: below that, compiling takes longer than it saves
_OWN = (
    "generator.",
    "own.",
)  # what the names of tensors begin with of which each process has its own
_LEARNED = (
    "network",
    "optimizer",
    "average",
)  # what the names of tensors begin with that must stay finite
_CALIBRATION = 16  # batches to measure the statistics of averaged weights on


def train(
    experiment: Experiment,
    folder: str | Path,
    *,
    origin: Mapping[str, Any] | None = None,
    display: Display | None = None,
) -> dict[str, Any]:
    """Run the experiment in `folder`, or go on where it was left; returns what `result.json` says.

    `origin` is what `config` calls the experiment by, so that other commands can make it again.
    """
    folder = Path(folder)
    launch, machine = distributed.launch(), experiment.machine
    display = display if display is not None and launch.rank == 0 else Silent()
    device = machine.find_device(launch.local_rank)
    with (
        distributed.joined(device, machine.timeout),
        open_run(folder) if distributed.rank() == 0 else nullcontext() as run,
        signals() as received,
        backend(machine, device, experiment.seed + distributed.rank()),
    ):
        if run is not None:
            check_same(run, experiment)
            finished = read_result(run.path) if is_whole(run.path) else None
            if finished is not None:
                check_relabeled(run, experiment)
                display.end(finished)
        else:
            finished = None
        if distributed.share("" if finished is None else "finished", device):
            return finished or {}
        training = _Training(experiment, folder, run, device, display)
        claimed = claim(run, experiment, training.splits, origin) if run else ()
        for told in (*training.splits.notes, *training.doubts(), *claimed):
            display.note(told)
        return training.go(received)


class _Training:
    """A run in progress."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        run: Run | None,
        device: torch.device,
        display: Display,
    ) -> None:
        self.experiment, self.folder, self.run, self.device, self.display = (
            experiment,
            folder,
            run,
            device,
            display,
        )
        self.splits = open_splits(experiment)
        self.feed = Feed(experiment, self.splits, device)
        self.order = self.feed.order
        self.num_per_epoch = experiment.batches_per_epoch or self.order.batches_per_pass
        self.num_steps = max(1, round(experiment.epochs * self.num_per_epoch))
        self.step = self._prepare()
        self.phase = ""
        self.skipped: dict[str, None] = {}  # why images were left out; a set in order
        self.lost = Lost(self.order.batches_per_pass * self.order.batch_size)
        self.began, self.clock = time.perf_counter(), Clock(self.order.batch_size)

    def doubts(self) -> list[str]:
        """What may not have been meant: what is chosen, but never takes place, and what takes very long."""
        chosen, last, told = (
            self.experiment.objective,
            (self.num_steps - 1) // self.num_per_epoch,
            [],
        )
        start = getattr(
            chosen, "start_epoch", None
        )  # of an objective that has one; it may be found by itself
        if isinstance(start, float | int) and start > last:
            told.append(
                f"start_epoch={start:g} of {type(chosen).__name__} is never reached in epochs="
                f"{self.experiment.epochs:g}, so that what begins there has no part in this run; start earlier, or "
                "train for longer"
            )
        size = self.experiment.image_size
        if self.device.type == "cpu" and isinstance(self.splits.inputs, Files) and size >= _LARGE:
            # A network of timm has no width, and weights to start from fit one width only.
            is_free = hasattr(self.experiment.backbone, "width") and self.experiment.init is None
            cure = f"size=64{' --set backbone.width=16' if is_free else ''} is faster, where the recipe takes size="
            told.append(f"images of {size} x {size} pixels take long without a GPU; {cure}")
        return told

    def _prepare(self) -> Step:
        """Networks, and the step that brings them together with the data."""
        experiment, splits, machine, device = (
            self.experiment,
            self.splits,
            self.experiment.machine,
            self.device,
        )
        example = splits.example(experiment.image_size)
        learners = make_learners(
            experiment, len(splits.labels.given), len(splits.labels.classes), example, device
        )
        captures = (
            device.type == "cuda" and distributed.num_processes() == 1
            if machine.capture is None
            else machine.capture
        )
        is_long = self.num_steps * self.order.batch_size >= _COMPILE_FROM
        labels = splits.labels
        trained = replace(
            labels, given=labels.given[splits.train], clean=None
        )  # held-out labels weigh nothing
        weights = (
            optim.class_weights(trained)
            if experiment.class_weights
            else torch.ones(len(labels.classes))
        )
        given = [labels.given, labels.given if splits.other_given is None else splits.other_given][
            : experiment.networks
        ]
        setting = Setting(
            source=self.feed.source,
            given=tuple(
                each.to(device, copy=True) for each in given
            ),  # propagation writes into them
            label_weights=weights.to(device),
            batches_per_epoch=self.num_per_epoch,
            batches_per_pass=self.order.batches_per_pass,
            is_cut=self.feed.is_cut,
            device=device,
            dtype=machine.find_dtype(device),
            captures=captures and device.type == "cuda",
            compiles=device.type == "cuda" and is_long
            if machine.compile is None
            else machine.compile,
        )
        return Step(experiment, setting, learners)

    def go(self, received: list[int]) -> dict[str, Any]:
        """From the last checkpoint, or from the beginning, to the end."""
        start = self._resume()
        self.display.begin(self._facts(start))
        self.clock.restart(
            start
        )  # steps of an earlier process were not done in the time of this one
        saved, is_stopped = time.perf_counter(), False
        with self.feed.explained():
            steps = range(start, self.num_steps)
            for number, rows in zip(steps, self.feed.rows(steps), strict=True):
                if number % self.num_per_epoch == 0:
                    self.phase = self.experiment.objective.phase(
                        number / self.num_per_epoch, self.step.learners[0].state
                    )
                self.lost.count(
                    len(rows.indices), reasons := [reason for _, reason in rows.problems]
                )
                self._check_images(reasons)
                self.step(rows, self.phase)
                done = number + 1
                is_epoch = done % self.num_per_epoch == 0 or done == self.num_steps
                if self.clock.is_due(done) or is_epoch:
                    self._look(done)
                if is_epoch:
                    self._end_epoch(done)
                is_stopped, is_time = distributed.agreed(
                    [bool(received), self._wants_checkpoint(done, saved)], self.device
                )
                if is_stopped or is_time or done == self.num_steps:
                    self._save(done)
                    saved = time.perf_counter()
                if is_stopped and done < self.num_steps:
                    raise Stopped(received[0] if received else signal.SIGTERM, self.folder)
        return self._finish()

    def _wants_checkpoint(self, done: int, saved: float) -> bool:
        machine = self.experiment.machine
        if machine.checkpoint_steps is not None:
            return done % machine.checkpoint_steps == 0
        return distributed.rank() == 0 and time.perf_counter() - saved >= machine.checkpoint_seconds

    def _resume(self) -> int:
        """Bring back the last checkpoint; the number of steps that are done."""
        found = self.run.load() if self.run is not None else None
        state = json.loads(
            distributed.share(json.dumps(None if found is None else found.state), self.device)
        )
        if state is None:
            if self.run is not None:
                self.run.cut_log(0)  # of a run that ended before its first checkpoint
            return 0
        self.step.begin_sums(config.current_terms(state["sums"]))
        if self.run is not None and found is not None:
            for damaged in found.damaged:
                self.display.note(
                    f"passed over a damaged checkpoint ({damaged}); going on from step {found.step}"
                )
            self._restore(found)
            self.run.cut_log(state["log_end"])
        distributed.broadcast_(self.step.tensors().values())
        set_own_states({} if found is None else found.tensors, self.device, self.step.buffers())
        self.phase = state["phase"] if "phase" in state else state["stage"]  # its older name
        self.skipped = dict.fromkeys(state["skipped"])
        self.began -= state["seconds"]
        self.clock.resume(state.get("images_per_second", 0.0))  # early checkpoints have none
        return int(state["step"])

    def _restore(self, found: Checkpoint) -> None:
        tensors = {name: each for name, each in found.tensors.items() if not name.startswith(_OWN)}
        try:
            restore(self.step, tensors)
        except ValueError as error:
            raise RunError(
                f"the checkpoint of step {found.step} in {self.folder} does not fit this experiment: {error}",
                BAD_DATA,
            ) from error

    def _save(self, done: int) -> None:
        self._look(done)  # no checkpoint is written of what is not finite
        own = own_states(self.device, self.step.buffers())
        learned = self.step.tensors()
        must_be_finite = [each for name, each in learned.items() if name.startswith(_LEARNED)]
        is_bad = not torch.stack([each.isfinite().all() for each in must_be_finite]).all()
        if distributed.agreed([is_bad], self.device)[0]:
            self._report_not_finite(
                done - 1
            )  # a finite gradient can still be too much for a weight
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

    def _look(self, done: int) -> None:
        """Wait for the device, and see whether all is well."""
        if not self.step.is_fine.item():
            self._report_not_finite(int(self.step.bad_step.item()))
        self.clock.look(done)
        rate = self.clock.rate
        left = (self.num_steps - done) * self.order.batch_size / rate if rate else math.inf
        epoch = done / self.num_per_epoch
        terms = self.step.means()
        self.display.step(
            Progress(done, self.num_steps, epoch, self.experiment.epochs, rate, left, terms)
        )

    def _report_not_finite(self, bad: int) -> None:
        examples = self.order.batch(bad).tolist()
        inputs = self.splits.inputs
        names = [inputs.names[index] for index in examples] if isinstance(inputs, Files) else []
        where = self.folder / "not_finite.json"
        if self.run is not None:
            facts = {
                "step": bad,
                "epoch": bad / self.num_per_epoch,
                "examples": examples,
                "names": names,
            }
            self.run.write_json(where.name, facts)
        raise NotFinite(
            f"the loss, its gradient or a weight was not finite at step {bad} (epoch {bad / self.num_per_epoch:.2f}); "
            f"its examples are in {where}, and the last checkpoint is as it was before; try a lower optimizer.lr, "
            "clip=1, or machine.precision=float32"
        )

    def _check_images(self, problems: Iterable[str], *, may_stop: bool = True) -> None:
        """Stop at an image that cannot be decoded, or say once that it is left out."""
        for reason in problems:
            if may_stop and self.experiment.bad_images == "stop":
                raise BadImage(f"{reason}; bad_images=skip would leave it out and go on")
            if reason not in self.skipped:
                self.skipped[reason] = None
                self.display.note(f"left out: {reason}")

    def _end_epoch(self, done: int) -> None:
        epoch = done / self.num_per_epoch
        entry: dict[str, Any] = {"epoch": epoch, "step": done}
        entry["rate"] = self.experiment.optimizer.lr * self.experiment.schedule.factor(
            epoch, self.experiment.epochs
        )
        entry |= self.step.drain()
        if round(epoch) % self.experiment.evaluate_every == 0 or done == self.num_steps:
            networks = self._judged_networks(done)
            for name, inputs, truth in self.splits.judged:
                seen = self._pass().together(networks, inputs)
                self._check_images(seen.unreadable.values())
                entry[f"{name}_accuracy"] = metrics.accuracy(
                    seen.predictions.logits, truth[seen.predictions.indices]
                )
        if done == self.num_per_epoch * (self.experiment.propagate_at or 0):
            entry["transductive_accuracy"] = self._propagate()
        every = max(1, round(self.experiment.epochs / 10))
        if self.experiment.mixup is not None and (
            round(epoch) % every == 0 or done == self.num_steps
        ):
            self._observe_all()
        if self.run is not None:
            self.run.append_log(entry)
        self.display.epoch(entry)
        self.clock.restart(done)

    def _propagate(self) -> float | None:
        """Learn from here on what the neighbors make of the labels; the share of them that is right."""
        seen = self._pass().over([self.step.learners[0].network], self.splits.inputs).predictions
        shares = []
        for given in self.step.setting.given:
            found, share = propagate(seen, given.cpu(), self.splits.labels.clean, self.splits.train)
            given.copy_(found)
            shares.append(share)
        distributed.broadcast_(
            self.step.setting.given
        )  # BatchNorm may count on each process for itself
        return shares[0]

    def _observe_all(self) -> None:
        """Under mixup no step sees an example as it is, so look at all of them."""
        seen = (
            self._pass().together([self.step.learners[0].network], self.splits.inputs).predictions
        )
        is_trained = torch.isin(seen.indices, self.splits.train)
        logits, indices = (part[is_trained].to(self.device) for part in (seen.logits, seen.indices))
        observe_(self.step.dynamics, logits, self.step.setting.given[0][indices], indices)

    def _judged_networks(self, done: int) -> list[Module]:
        """The networks as they are judged: the averaged ones, if there are any, with statistics of their own."""
        if self.experiment.averaging is None or self.experiment.judged == "networks":
            return [learner.network for learner in self.step.learners]
        turn = max(0, done - 1) // self.order.batches_per_pass
        steps = range(turn * self.order.batches_per_pass, (turn + 1) * self.order.batches_per_pass)[
            :_CALIBRATION
        ]
        networks = []
        for average in self.step.averages():
            assert average is not None
            judged = optim.averaged_copy(average)
            optim.recalibrate_(
                judged, (self.step.prepare(self.feed.read(step), turn) for step in steps)
            )
            networks.append(judged)
        return networks

    def _pass(self) -> Pass:
        return Pass(
            normalize=self.experiment.normalize,
            size=self.experiment.image_size,
            device=self.device,
            dtype=self.step.setting.dtype,
            workers=self.experiment.machine.workers,
            timeout=self.experiment.machine.timeout,
        )

    def _facts(self, start: int) -> dict[str, Any]:
        realized = describe(self.splits.labels)
        return {
            "device": str(self.device),
            "hardware": hardware(self.device),
            "num_examples": len(self.splits.train),
            "num_classes": len(self.splits.labels.classes),
            "effective_rate": realized.effective_rate,
            "fingerprint": realized.fingerprint,
            "num_parameters": sum(
                each.numel() for each in self.step.learners[0].network.parameters()
            ),
            "num_steps": self.num_steps,
            "resumed_at": start,
            "loading": "streaming" if self.feed.source is None else "resident",
            "precision": str(self.step.setting.dtype).removeprefix("torch."),
        }

    def _finish(self) -> dict[str, Any]:
        """Write what other commands read."""
        networks = self._judged_networks(self.num_steps)
        if self.run is None:
            return {}
        folder = self.folder / "predictions"
        folder.mkdir(exist_ok=True)
        train_split = self._pass().over(networks, self.splits.inputs)
        self.lost.count(len(self.splits.inputs), train_split.unreadable.values())
        self._check_images(
            train_split.unreadable.values(), may_stop=False
        )  # nothing is left to be spoiled by them
        tables = {"train": train_split.predictions}
        for name, inputs, _ in self.splits.judged:
            tables[name] = self._pass().over(networks, inputs).predictions
        for name, predictions in tables.items():
            write_whole(folder / f"{name}.safetensors", pack_sealed(predictions._asdict()))
        dynamics = {
            name: tensor[:-1].cpu().contiguous() for name, tensor in self.step.dynamics.items()
        }
        write_whole(self.folder / "dynamics.safetensors", pack_sealed(dynamics))
        write_whole(self.folder / "model.safetensors", pack_sealed(pack_networks(networks)))
        result = self._result(tables["train"], self.run.read_log())
        self.run.write_json("result.json", result)
        self.display.end(result)
        return result

    def _result(self, seen: Predictions, entries: list[dict[str, Any]]) -> dict[str, Any]:
        realized = describe(self.splits.labels)
        return {
            "accuracy": {
                name: summarize(entries, f"{name}_accuracy") for name, _, _ in self.splits.judged
            },
            "labels": {
                "fingerprint": realized.fingerprint,
                "requested_rate": getattr(self.experiment.noise, "rate", None),
                "effective_rate": realized.effective_rate,
                "num_examples": len(self.splits.train),
                "num_classes": len(self.splits.labels.classes),
            },
            **wrong_labels(seen, self.splits.labels, self.splits.train),
            "epochs": self.experiment.epochs,
            "steps": self.num_steps,
            "seed": self.experiment.seed,
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
